"""Runs a grid: a vector kernel one core per block, a mixed kernel one cube and two vector cores in threads."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from hivm_emulator.core import Core
from hivm_emulator.memory import DeadlockError, FlagError, Memory, MemRef
from hivm_emulator.parser import Module, parse

_VECTOR_CORES = 2


class Flags:
    """The flags between the cores of a block: counters per direction, vector core and flag.

    The cube core sets a flag for both vector cores and waits for both; a vector core sets and awaits its own. When
    every core that still runs waits for a flag that nobody has set, they are in a deadlock.
    """

    def __init__(self, cores: int) -> None:
        self._changed = threading.Condition()
        self._set: Counter[tuple[str, int, int]] = Counter()
        self._running = cores
        self._awaited: list[list[tuple[str, int, int]]] = []  # by each core that waits
        self._stopped = False

    def set(self, kind: str, sub_block: int, flag: int) -> None:
        with self._changed:
            self._set.update(self._concerned(kind, sub_block, flag, setter=kind))
            self._changed.notify_all()

    def wait(self, kind: str, sub_block: int, flag: int) -> None:
        other = "CUBE" if kind == "VECTOR" else "VECTOR"
        keys = self._concerned(kind, sub_block, flag, setter=other)
        with self._changed:
            self._awaited.append(keys)
            self._changed.wait_for(lambda: self._are_set(keys) or self._stopped or self._is_deadlock())
            self._awaited.remove(keys)
            if self._stopped or not self._are_set(keys):
                raise DeadlockError(
                    f"{kind.lower()} core {sub_block} waits for flag {flag} of the {other.lower()} core"
                )
            self._set.subtract(keys)

    def stop(self) -> None:
        """A core has failed: let the others fail too rather than wait."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def leave(self) -> None:
        """A core has ended: it will set no flag any more."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def finish(self) -> None:
        """All cores have ended."""
        left = {key: count for key, count in self._set.items() if count}
        if left:
            told = ", ".join(f"flag {flag} of the {setter.lower()} core ({core})" for setter, core, flag in left)
            raise FlagError(f"set and never awaited: {told}")

    def _are_set(self, keys: list[tuple[str, int, int]]) -> bool:
        return all(self._set[key] > 0 for key in keys)

    def _is_deadlock(self) -> bool:
        return len(self._awaited) == self._running and not any(map(self._are_set, self._awaited))

    def _concerned(self, kind: str, sub_block: int, flag: int, *, setter: str) -> list[tuple[str, int, int]]:
        cores = range(_VECTOR_CORES) if kind == "CUBE" else (sub_block,)
        return [(setter, core, flag) for core in cores]


def launch(ir: str, kernel: str, arguments: Sequence[torch.Tensor | int | float], grid: int) -> None:
    """Run `kernel` of a module on tensors, in place.

    Args:
        ir: the text that the closed stage receives (`module.hivm.opt.mlir`).
        kernel: its name in the source.
        arguments: the kernel's own, without constants: CPU tensors, ints and floats. Fill outputs with NaN first, so
            that what is not written shows.
        grid: number of programs.

    Raises:
        EmulationError: a fault of the kernel or its compilation; the classes in `memory` say which.
        UnsupportedError: an operation that the emulator does not know, by name.
    """
    module = parse(ir)
    size = grid * _workspace_bytes(ir)
    workspace = MemRef(Memory.poisoned("workspace", size), 0, "i8", [size])
    locks = MemRef(Memory.poisoned("locks", 0), 0, "i8", [0])
    user = [_argument(f"argument {i}", value) for i, value in enumerate(arguments)]
    values = [0, locks, workspace, *user, grid, 1, 1]
    for program in range(grid):
        if kernel in module.functions:
            Core(module, program, "VECTOR", 0, Flags(1)).run(kernel, values)
        else:
            _run_mixed(module, kernel, values, program)


def _run_mixed(module: Module, kernel: str, values: list[object], program: int) -> None:
    flags = Flags(1 + _VECTOR_CORES)
    failures: list[Exception] = []

    def run(core: Core, function: str) -> None:
        try:
            core.run(function, list(values))
        except Exception as error:  # handed to the caller's thread
            failures.append(error)
            flags.stop()
        finally:
            flags.leave()

    cores = [(Core(module, program, "CUBE", 0, flags), f"{kernel}_mix_aic")]
    cores += [(Core(module, program, "VECTOR", i, flags), f"{kernel}_mix_aiv") for i in range(_VECTOR_CORES)]
    threads = [threading.Thread(target=run, args=core) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    flags.finish()


def _workspace_bytes(ir: str) -> int:
    """What the compiled host function says a block needs of global memory."""
    found = re.search(r"_infer_workspace_shape_function\(.*?\{\n(.*?)return", ir, re.S)
    sizes = re.findall(r"constant (\d+) : (?:i64|index)", found[1]) if found else []
    return int(sizes[-1]) if sizes else 0


def _argument(name: str, value: torch.Tensor | int | float) -> object:
    if isinstance(value, torch.Tensor):
        return Memory.of_tensor(name, value)
    return np.float32(value) if isinstance(value, float) else int(value)
