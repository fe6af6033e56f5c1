"""One kernel through bishengir-compile, up to its closed last stage: linalg text in, `Verdict` out.

The compiler hands its memory-planned module to a program `hivmc`, which is closed and comes with CANN only. A stand-in
on PATH takes it, which shows that everything before has passed; use of on-chip memory, double buffers and two kinds of
code that compiles and is wrong are read from that module's text.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from npu_backend.ascend.verdict import SCOPES, Verdict

TIMEOUT = 300  # seconds; the slowest kernels seen take 5
RUNS = 3  # near a limit

_STAND_IN = """#!/bin/sh
# In place of the closed last stage: gives a version, keeps the module that it is given, and makes nothing of it.
case "$*" in *--version*) echo "${0##*/} 1.2.0 (000000000000 2026-01-01)"; exit 0;; esac
for file in "$@"; do case "$file" in *.mlir) cp "$file" "$HIVMC_MODULE";; esac; done
exit 0
"""
_OVERFLOW = re.compile(r"(\w+) overflow, requires (?:at least )?(\d+) bits\D*(\d+) bits available", re.IGNORECASE)
_RETRY = re.compile(r"automatically set ([\w-]+) to false and retrying")
_ERROR = re.compile(r"error: (.*)")
_NOT_AN_ERROR = "Failed to run BiShengHIR"  # what it says of every error, before or after the error

_FUNCTION = re.compile(r"\n  (?:llvm\.|func\.)func ")
_CONSTANT = re.compile(r"(%[\w-]+) = (?:arith\.constant |llvm\.mlir\.constant\()(\d+) : (?:i64|index)")
_CAST = re.compile(r"(%[\w-]+) = builtin\.unrealized_conversion_cast (%[\w-]+) : i64 to index")
_BUFFER = re.compile(r"pointer_cast\((%[\w-]+)\)[^:\n]*: memref<((?:\d+x)*)[a-z]*(\d+), #hivm\.address_space<(\w+)>>")
_SWAP = re.compile(r"select .*(?:#hivm\.address_space<(?:ub|cbuf)>|struct<\(ptr<[2-9]>)")  # the one or the other buffer
_UNPLANNED = re.compile(r"memref\.alloc\(\)[^\n]*#hivm\.address_space<(?:ub|cbuf|cc)>")
_CAPACITY = re.compile(r'"(UB|L1|L0C)_SIZE", (\d+)')
_CORE = re.compile(r"module_core_type<(\w+)>")
_MMA = re.compile(r"call @mma_tile_\w+\(([^)]*)\)")
_COLUMNS = 5  # the argument of mma_tile that says how many columns of the result are computed


def compile_repeatedly(command: list[str], linalg: str, environment: dict[str, str]) -> Verdict:
    """As `compile_once`; near a limit three times, because there the compiler does not always say the same.

    Returns:
        The verdict that all runs gave. If they differ: status "unstable", with the figures of the worst.
    """
    first = compile_once(command, linalg, environment)
    if not first.near_a_limit:
        return first
    verdicts = [first, *(compile_once(command, linalg, environment) for _ in range(RUNS - 1))]
    said = {verdict.short() for verdict in verdicts}
    worst = max(verdicts, key=lambda verdict: (verdict.status != "ok", verdict.need))
    if len({verdict.status for verdict in verdicts}) > 1:
        return replace(worst, status="unstable", message=" / ".join(sorted(said)), runs=RUNS)
    return replace(worst, runs=RUNS)


def compile_once(command: list[str], linalg: str, environment: dict[str, str]) -> Verdict:
    """Run triton-ascend's own command line for a kernel.

    Args:
        command: The compiler, the input file, options, `-o`, the output file; the two files are replaced by our own.
        linalg: What the input file holds.
        environment: Of the compiler; its PATH holds `stand_in_folder()`.
    """
    with tempfile.TemporaryDirectory(prefix="compile-check-") as name:
        folder = Path(name)
        source, module = folder / "kernel.ttadapter.mlir", folder / "module.mlir"
        source.write_text(linalg, encoding="utf-8")
        arguments = [command[0], str(source), *command[2:-1], str(folder / "kernel")]
        variables = {**environment, "HIVMC_MODULE": str(module)}
        try:
            done = subprocess.run(
                arguments, cwd=folder, env=variables, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return Verdict("unsupported", f"bishengir-compile has not ended after {TIMEOUT} s")
        output = done.stdout + done.stderr
        retries = tuple(dict.fromkeys(_RETRY.findall(output)))
        if done.returncode == 0 and module.exists():
            return _passed(module.read_text(encoding="utf-8", errors="replace"), linalg, retries)
        if done.returncode == 0 and any(folder.glob("kernel*.o")):  # CANN's compiler, and its own last stage
            return Verdict("ok", retries=retries, ping_pong="lost" if "enable-auto-multi-buffer" in retries else "")
        return _refused(done.returncode, output, retries)


@functools.cache
def stand_in_folder() -> str:
    """A folder with the stand-ins of the last stage, to put first on PATH; removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="compile-check-hivmc-")
    _KEPT.append(folder)
    for name in ("hivmc", "hivmc-a5"):
        path = Path(folder.name) / name
        path.write_text(_STAND_IN, encoding="utf-8")
        path.chmod(0o755)
    return folder.name


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def _passed(module: str, linalg: str, retries: tuple[str, ...]) -> Verdict:
    core = _CORE.search(module)
    swaps = "kept" if _SWAP.search(module) else "none"
    found = Verdict(
        "ok",
        use=_use(module),
        capacity={scope: int(bits) for scope, bits in _CAPACITY.findall(module)},
        ping_pong="lost" if "enable-auto-multi-buffer" in retries else swaps,
        core=core.group(1) if core else "",
        retries=retries,
    )
    suspicion = _suspicion(module, linalg, found.core)
    return replace(found, status="suspect", message=suspicion) if suspicion else found


def _refused(status: int, output: str, retries: tuple[str, ...]) -> Verdict:
    overflows = _OVERFLOW.findall(output)
    if overflows:
        scope, need, available = overflows[-1]
        name = SCOPES.get(scope.lower(), scope)
        return Verdict("overflow", "", name, int(need), int(available), retries=retries)
    errors = [error for error in _ERROR.findall(output) if _NOT_AN_ERROR not in error]
    first = next((line for line in output.splitlines() if line.strip()), "no output")
    words = "; ".join(dict.fromkeys(errors)) or first
    how = f"ended with {status}" if status >= 0 else f"crashed (signal {-status})"
    return Verdict("unsupported", f"bishengir-compile {how}: {words[:600]}", retries=retries)


def _use(module: str) -> dict[str, int]:
    """The end of the highest buffer of each on-chip memory."""
    use: dict[str, int] = {}
    for function in _FUNCTION.split(module):
        constants = _constants(function)
        for name, shape, width, scope in _BUFFER.findall(function):
            elements = math.prod(int(size) for size in shape.split("x") if size)
            end = constants.get(name, 0) * 8 + elements * int(width)
            key = SCOPES.get(scope, scope)
            use[key] = max(use.get(key, 0), end)
    return use


def _constants(function: str) -> dict[str, int]:
    """The named integer constants of one function; another one has the same names for other things."""
    found = {name: int(value) for name, value in _CONSTANT.findall(function)}
    found.update((name, found[source]) for name, source in _CAST.findall(function) if source in found)
    return found


def _suspicion(module: str, linalg: str, core: str) -> str:
    """What is known to come out wrong although it compiles (found by executing such modules in an emulator)."""
    if _UNPLANNED.search(module):
        return "a buffer on chip is used that was never planned (atomic_add of what tl.dot returns?)"
    if core == "MIX" and "AtomicRMW" in linalg:
        return "an atomic in a kernel with tl.dot: nothing keeps both vector cores of a cube core from adding the same"
    return _unwritten_columns(module, linalg)


def _unwritten_columns(module: str, linalg: str) -> str:
    """A2 and A3: a masked right operand makes the product narrower, and the rest of the accumulator keeps what was
    there. That is seen if the tile is reduced, unless a select on the tile came first.
    """
    for function in _FUNCTION.split(module):
        products = [call.split(", ")[_COLUMNS] for call in _MMA.findall(function)]
        if all(columns in _constants(function) for columns in products):
            continue
        for tile in re.findall(r"linalg\.matmul .*-> (tensor<\d+x\d+xf32>)", linalg):
            shape = re.escape(tile)
            reduced = re.search(rf"linalg\.reduce ins\([^)]*: {shape}\)", linalg)
            selected = re.search(rf"arith\.select .*, {shape}$", linalg, re.MULTILINE)
            if reduced and not selected:
                return (
                    "a weight that is masked along the result's columns goes into tl.dot, and the result is reduced: "
                    "columns beyond the mask hold what was in the accumulator before. Apply tl.where to the result"
                )
    return ""
