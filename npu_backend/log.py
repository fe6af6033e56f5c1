"""One logger. What every rank would repeat is said by rank 0 alone; a process without a process group is rank 0."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("npu_backend")
_said: set[str] = set()


def is_rank0() -> bool:
    """Whether this process speaks for all ranks. Asks torch.distributed only if somebody imported it already."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") in ("", "0")


def show(level: str | None) -> None:
    """What NPU_BACKEND_LOG asks for: this level, and a handler if the program has configured none."""
    if level is not None:
        logger.setLevel(level)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())


def info_rank0(message: str) -> None:
    """An INFO line on rank 0."""
    if is_rank0():
        logger.info(message)


def warn_rank0(message: str) -> None:
    """A WARNING line on rank 0."""
    if is_rank0():
        logger.warning(message)


def warn_once(key: str, message: str) -> None:
    """A WARNING line on rank 0, the first time that `key` is used in this process."""
    if key not in _said:
        _said.add(key)
        warn_rank0(message)


def forget_warnings() -> None:
    """Let `warn_once` speak again (tests; after a revert)."""
    _said.clear()
