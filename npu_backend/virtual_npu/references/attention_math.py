"""What the attention operators share: layouts, their limits, sparse modes and the arithmetic, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from npu_backend.virtual_npu.references.checks import need, need_dtype

FAR = 2**31 - 1  # a window without an edge
_COMPRESSED = 2048  # rows and columns of the mask that stands for any triangle
_PREFIX_ROWS = 1024  # rows of the rectangle below it that stands for any prefix
_MOST_PREFIXES = 32
Masked = Callable[[int, int], "torch.Tensor | None"]


@dataclass
class Settings:
    """One call: the operator's name and every argument that changes the arithmetic."""

    operator: str
    heads: int
    layout: str
    scale: float = 1.0
    keep_prob: float = 1.0
    seed: int = 0
    mask: torch.Tensor | None = None
    mode: int = 0
    before: int = FAR
    after: int = FAR
    prefix: Sequence[int] | None = None
    pse_type: int = 1
    sink: torch.Tensor | None = None
    q_ends: Sequence[int] | None = None
    k_ends: Sequence[int] | None = None


# ---- layouts: everything is [batch, heads, sequence, width] inside ----


def to_heads(x: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    if layout in ("BSH", "SBH"):
        x = x.reshape(*x.shape[:2], heads, -1)
    return x.permute({"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}[layout])


def from_heads(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BSH":
        return x.transpose(1, 2).flatten(2)
    if layout == "SBH":
        return x.permute(2, 0, 1, 3).flatten(2)
    return x.transpose(1, 2) if layout == "BSND" else x


def check_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    s: Settings,
    dtypes: tuple[torch.dtype, ...],
    widest: int,
) -> int:
    """Check the operands against each other, and return how many heads key and value have."""
    name, layout, heads = s.operator, s.layout, s.heads
    dimensions = 3 if layout in ("BSH", "SBH", "TND") else 4
    for what, tensor in (("query", query), ("key", key), ("value", value)):
        need_dtype(name, what, tensor, dtypes)
        need(tensor.dim() == dimensions, name, f"{what} has {tensor.dim()} dimensions, {layout} has {dimensions}")
        need(tensor.dtype == query.dtype, name, f"{what} is {tensor.dtype}, query is {query.dtype}")
    need(1 <= heads <= 256, name, f"head_num={heads} must be from 1 to 256")
    flat = layout in ("BSH", "SBH")
    need(not flat or query.shape[-1] % heads == 0, name, f"{heads} heads do not divide the size {query.shape[-1]}")
    axis = {"BSND": 2, "BNSD": 1, "TND": 1}.get(layout, 0)
    need(
        flat or query.shape[axis] == heads,
        name,
        f"head_num={heads}, query {tuple(query.shape)} has {query.shape[axis]}",
    )
    width = query.shape[-1] // heads if flat else query.shape[-1]
    need(1 <= width <= widest, name, f"head size {width} must be from 1 to {widest}")
    need(not flat or key.shape[-1] % width == 0, name, f"the size {key.shape[-1]} of key is no multiple of {width}")
    kv_heads = key.shape[-1] // width if flat else key.shape[axis]
    need(flat or key.shape[-1] == width, name, f"head size of key is {key.shape[-1]}, of query {width}")
    need(
        key.shape[:-1] == value.shape[:-1] and value.shape[-1] <= key.shape[-1],
        name,
        f"key {tuple(key.shape)} and value {tuple(value.shape)} must be alike",
    )
    need(kv_heads > 0 and heads % kv_heads == 0, name, f"{heads} query heads are no multiple of {kv_heads} key heads")
    lengths = (s.q_ends, s.k_ends)
    need(layout != "TND" or all(lengths), name, "TND needs actual_seq_qlen and actual_seq_kvlen")
    return int(kv_heads)


# ---- sparse modes ----


def mask_of(s: Settings, *, first: bool = True, last: bool = True, sequence: int | None = None) -> Masked:
    """A function of (rows, columns): True where a score does not count, [.., rows, columns]; None for nowhere.

    `first`, `last`, `sequence`: which of the packed sequences of TND is asked about.
    """
    mode = {7: 4 if last else 3, 8: 4 if first else 2}.get(s.mode, s.mode)  # a cut sequence is a band, the others whole

    def masked(rows: int, columns: int) -> torch.Tensor | None:
        if s.mask is None:
            return None
        need_dtype(s.operator, "atten_mask", s.mask, (torch.bool, torch.uint8, torch.int8))
        mask = s.mask.bool()
        distance = torch.arange(columns).unsqueeze(0) - torch.arange(rows).unsqueeze(1)
        if mode in (0, 1):
            return _given(mask, s, mode, distance)
        if mode in (5, 6):
            return _prefixed(mask, s, mode, distance - (columns - rows), sequence)
        _check_compressed(mask, s, _COMPRESSED)
        if mode == 2:
            return distance > 0
        distance = distance - (columns - rows)  # seen from the lower right corner
        return distance > 0 if mode == 3 else (distance > s.after) | (distance < -s.before)

    return masked


def _given(mask: torch.Tensor, s: Settings, mode: int, distance: torch.Tensor) -> torch.Tensor:
    rows, columns = distance.shape
    need(
        mask.shape[-2] >= rows and mask.shape[-1] >= columns and mask.dim() in (2, 3, 4),
        s.operator,
        f"atten_mask {tuple(mask.shape)} does not cover the scores [{rows}, {columns}]",
    )
    mask = mask[..., :rows, :columns]
    outside = (distance > s.after) | (distance < -s.before)
    need(
        mode == 1 or not bool((outside & ~mask).any()),
        s.operator,
        "atten_mask keeps scores outside of pre_tockens and next_tockens, which the device skips",
    )
    return mask.unsqueeze(1) if mask.dim() == 3 else mask


def _check_compressed(mask: torch.Tensor, s: Settings, rows: int) -> None:
    whole = tuple(mask.shape[-2:]) == (rows, _COMPRESSED)
    triangle = whole and bool((mask[..., :_COMPRESSED, :] == mask[..., :_COMPRESSED, :].triu(1)).all())
    need(
        triangle,
        s.operator,
        f"sparse_mode={s.mode} takes the {_COMPRESSED} x {_COMPRESSED} mask that is True above the diagonal"
        + (f", and {_PREFIX_ROWS} rows below it whose right half is True" if rows > _COMPRESSED else ""),
    )


def _prefixed(mask: torch.Tensor, s: Settings, mode: int, distance: torch.Tensor, sequence: int | None) -> torch.Tensor:
    """Causal from the lower right corner, and each batch entry's first columns open to all rows."""
    rows, columns = distance.shape
    widths = list(s.prefix or ())
    need(0 < len(widths) <= _MOST_PREFIXES, s.operator, f"sparse_mode={mode} needs prefix, of 1 to {_MOST_PREFIXES}")
    need(
        all(max(columns - rows, 0) <= n <= columns for n in widths) or sequence is not None,
        s.operator,
        f"prefix={widths} must be from {max(columns - rows, 0)} to {columns}",
    )
    if sequence is not None:
        need(mode == 6 and sequence < len(widths), s.operator, "TND takes sparse_mode=6 and one prefix per sequence")
        widths = widths[sequence : sequence + 1]
    column = torch.arange(columns)
    wanted = torch.stack([(distance > 0) & (column >= n) for n in widths]).unsqueeze(1)
    if mode == 6:
        _check_compressed(mask, s, _COMPRESSED + _PREFIX_ROWS)
        return wanted
    need(
        mask.dim() == 4 and tuple(mask.shape[-2:]) == (rows, columns) and bool((mask == wanted).all()),
        s.operator,
        f"atten_mask {tuple(mask.shape)} must be causal from the lower right corner, with the columns of prefix open",
    )
    return wanted


# ---- arithmetic ----


def _dropout(shape: Sequence[int], s: Settings) -> torch.Tensor:
    if s.keep_prob == 1:
        return torch.ones(())
    draws = torch.rand(*shape, generator=torch.Generator().manual_seed(s.seed))
    return (draws < s.keep_prob).float() / s.keep_prob


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pse: torch.Tensor | None, s: Settings, masked: Masked
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, row maxima and row sums of [batch, heads, sequence, width] operands in float32."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2)
    if pse is not None:
        need(
            pse.dim() == 4 and pse.shape[-2] in (1, scores.shape[-2]) and pse.shape[-1] >= scores.shape[-1],
            s.operator,
            f"pse {tuple(pse.shape)} must be [batch or 1, heads, rows or 1, columns] of {tuple(scores.shape)}",
        )
    bias = 0.0 if pse is None else pse[..., : scores.shape[-1]].float()
    scores = (scores + bias) * s.scale if s.pse_type == 1 else scores * s.scale + bias
    hidden = masked(q.shape[2], k.shape[2])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    largest = scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    if s.sink is not None:
        sink = s.sink.float().view(1, -1, 1, 1)
        largest = torch.maximum(largest, sink.detach())
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    if s.sink is not None:
        total = total + (sink - largest).exp()
    weights = weights / total.clamp(min=torch.finfo(torch.float32).tiny)  # a row that sees nothing gives zeros
    return (weights * _dropout(weights.shape, s)) @ v, largest, total


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, s: Settings
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """TND: each sequence for itself. Output [tokens, heads, width], and maxima and sums [rows, heads, 1] of each."""
    q_ends, k_ends = list(s.q_ends or ()), list(s.k_ends or ())
    need(len(q_ends) == len(k_ends), s.operator, f"{len(q_ends)} query lengths, {len(k_ends)} of key and value")
    starts_q, starts_k = [0, *q_ends], [0, *k_ends]
    used = [i for i, end in enumerate(q_ends) if end > starts_q[i]]  # 0 behind the last marks what is left out
    out, statistics, covered = [], [], 0
    for i in used:
        parts = (query[starts_q[i] : q_ends[i]], key[starts_k[i] : k_ends[i]], value[starts_k[i] : k_ends[i]])
        heads = [part.transpose(0, 1).unsqueeze(0) for part in parts]
        masked = mask_of(s, first=i == used[0], last=i == used[-1], sequence=i)
        found = [t.squeeze(0).transpose(0, 1) for t in attend(heads[0], heads[1], heads[2], None, s, masked)]
        out.append(found[0])
        statistics.append((found[1], found[2]))
        covered = q_ends[i]
    need(covered <= query.shape[0], s.operator, f"actual_seq_qlen ends at {covered}, query has {query.shape[0]} rows")
    rest = query.new_zeros(query.shape[0] - covered, s.heads, value.shape[-1])  # rows behind the last sequence
    return torch.cat([*out, rest]), statistics
