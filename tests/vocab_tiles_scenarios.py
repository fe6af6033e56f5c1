"""What tests/head/test_ascend_head.py runs on four ranks: tiles of a vocabulary that is itself divided among them.

The NPU's autograd function with eager row kernels, in the place of the torch backend's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from references import head_case
from vocab_parallel_scenarios import ROWS, UNEVEN, VOCAB, _parts

from npu_backend.head import linear_log_prob, vocab_tiles
from npu_backend.head.selection import row_compaction

linear_log_prob.ChunkedHead = vocab_tiles.VocabTiledHead  # type: ignore[misc]
vocab_tiles.NARROWEST, vocab_tiles._ALIGN = 16, 8  # several tiles even here


def scenarios() -> Iterator[tuple[str, float]]:
    world = dist.group.WORLD
    case = head_case(ROWS, vocab_size=VOCAB)
    case.labels[3] = case.ignore_index
    yield "both outputs", _parts(case, UNEVEN, world)
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    bias[80:] = -torch.inf  # all of the last part, as if the vocabulary were padded
    yield "a part of -inf", _parts(replace(case, bias=bias, labels=case.labels % 80), UNEVEN, world)
    yield "log-probs only, softcap", _parts(replace(case, grad_entropy=None, softcap=3.0), UNEVEN, world)
    yield "kept logits", _parts(case, UNEVEN, world, logits_cache_gib=1.0)
    silent = torch.arange(ROWS) % 3 != 0
    some = {name: getattr(case, name).masked_fill(silent, 0.0) for name in ("grad_log_probs", "grad_entropy")}
    with row_compaction(True):
        yield "rows left out", _parts(replace(case, **some), UNEVEN, world)
