"""The pipes of one core: each runs its instructions in order and knows of the others only what flags tell it.

The compiler orders the pipes with `set_flag[A, B, event]` (A has come this far), `wait_flag[A, B, event]` (B may go on)
and `pipe_barrier[A]`. Each pipe has a vector clock of what it knows to be finished; an access of bytes that another
access touched, which the clock does not cover, is a race. Within a pipe a write after a read is safe; a read or write
after a write wants a barrier, as the compiler itself assumes. Whatever the scalar pipe has awaited is known to every
instruction issued later, since it issues them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from hivm_emulator.memory import GRANULE, FlagError, RaceError

if TYPE_CHECKING:
    from hivm_emulator.memory import Memory

NAMES = ("S", "V", "MTE1", "MTE2", "MTE3", "M", "FIX")
_SCALAR = 0


class _Trace:
    """Who touched each granule of a memory last: the writer and its instruction, and each pipe's last reading one."""

    def __init__(self, size: int) -> None:
        granules = -(-size // GRANULE)
        self.writer = np.full(granules, -1, np.int8)
        self.written = np.zeros(granules, np.int64)
        self.read = np.zeros((len(NAMES), granules), np.int64)


class Pipes:
    """Clocks, flags and traces of one core."""

    def __init__(self, core: str) -> None:
        self.core = core
        self.issued = np.zeros(len(NAMES), np.int64)
        self.known = np.zeros((len(NAMES), len(NAMES)), np.int64)
        self.flags: dict[tuple[str, str, int], list[np.ndarray]] = defaultdict(list)
        self.current = _SCALAR
        self._traces: dict[str, _Trace] = {}

    def issue(self, pipe: str) -> None:
        """The next instruction is one of `pipe`."""
        self.current = NAMES.index(pipe)
        self.issued[self.current] += 1
        own = self.known[self.current]
        of_scalar = self.known[_SCALAR].copy()
        of_scalar[_SCALAR] = 0  # its own stores to on-chip memory take a flag
        np.maximum(own, of_scalar, out=own)
        self.known[_SCALAR, _SCALAR] = self.issued[_SCALAR]

    def set_flag(self, source: str, target: str, event: int) -> None:
        reached = self.known[NAMES.index(source)].copy()
        reached[NAMES.index(source)] = self.issued[NAMES.index(source)]
        waiting = self.flags[source, target, event]
        waiting.append(reached)
        if len(waiting) > 1:
            raise FlagError(f"{self.core}: flag {event} from {source} to {target} is set twice without a wait")

    def wait_flag(self, source: str, target: str, event: int) -> None:
        waiting = self.flags[source, target, event]
        if not waiting:
            raise FlagError(f"{self.core}: {target} waits for flag {event} from {source}, which nobody has set")
        own = self.known[NAMES.index(target)]
        np.maximum(own, waiting.pop(0), out=own)

    def barrier(self, pipe: str) -> None:
        if pipe == "ALL":
            self.known[...] = self.issued
        else:
            self.known[NAMES.index(pipe), NAMES.index(pipe)] = self.issued[NAMES.index(pipe)]

    def finish(self) -> None:
        """The core has ended: every flag must have been awaited."""
        left = [f"{event} from {source} to {target}" for (source, target, event), sets in self.flags.items() if sets]
        if left:
            raise FlagError(f"{self.core} ended with flags that nobody awaited: {', '.join(left)}")

    def reads(self, memory: Memory, first: int, last: int) -> None:
        trace, part = self._trace(memory), _granules(first, last)
        self._after_writes(memory, trace, part, "reads")
        trace.read[self.current, part] = self.issued[self.current]

    def writes(self, memory: Memory, first: int, last: int) -> None:
        trace, part = self._trace(memory), _granules(first, last)
        self._after_writes(memory, trace, part, "overwrites")
        known = self.known[self.current].copy()
        known[self.current] = self.issued[self.current]
        late = (trace.read[:, part] > known[:, None]).any(axis=1)
        if late.any():
            reader = NAMES[int(late.argmax())]
            raise RaceError(self._sentence(memory, part, "overwrites", f"{reader} may still be reading"))
        trace.writer[part] = self.current
        trace.written[part] = self.issued[self.current]

    def _after_writes(self, memory: Memory, trace: _Trace, part: slice, what: str) -> None:
        writer, written = trace.writer[part], trace.written[part]
        own = (writer == self.current) & (written == self.issued[self.current])
        late = (writer >= 0) & ~own & (written > self.known[self.current][writer])
        if late.any():
            raise RaceError(self._sentence(memory, part, what, f"{NAMES[writer[late][0]]} may still be writing"))

    def _sentence(self, memory: Memory, part: slice, what: str, other: str) -> str:
        where = f"{memory.name} bytes {part.start * GRANULE} to {part.stop * GRANULE}"
        return f"{self.core}: pipe {NAMES[self.current]} {what} {where}, which {other}: no flag or barrier orders them"

    def _trace(self, memory: Memory) -> _Trace:
        if memory.name not in self._traces:
            self._traces[memory.name] = _Trace(memory.data.size)
        return self._traces[memory.name]


def _granules(first: int, last: int) -> slice:
    return slice(first // GRANULE, -(-last // GRANULE))
