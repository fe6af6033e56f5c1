"""One kernel through triton-ascend's front end: Triton source in, linalg text and the compiler's command line out.

Runs in the worker, whose triton is triton-ascend. Its own stages do all of it; where the last of them would start
bishengir-compile, the command line is taken instead. So the options are those that a user's release passes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_backend.soc import Soc

MOST_PROGRAMS = 65535  # of one launch; triton-ascend refuses more
_COMPILER = "bishengir-compile"


@dataclass(frozen=True)
class Launch:
    """A kernel as it is compiled and launched.

    Attributes:
        kernel: What `triton.jit` returned.
        signature: Type of each argument that is no constant, such as "*bf16".
        constants: Value of each constant argument.
        options: Of triton-ascend, besides its defaults.
        attributes: What Triton knows of the arguments' values, in its own form; None for nothing.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    grid: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    attributes: Any = None

    def key(self) -> str:
        """Hash of all that decides what is compiled, but for the chip and the compiler."""
        attributes = self.attributes.to_dict() if hasattr(self.attributes, "to_dict") else self.attributes
        parts = (
            self.kernel.cache_key,  # its source and that of all it calls
            sorted(self.signature.items()),
            sorted((name, str(value)) for name, value in self.constants.items()),
            sorted(self.options.items()),
            str(attributes),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


class Refused(Exception):
    """A stage before bishengir-compile does not take the kernel."""


class _Command(Exception):
    """Carries the command line out of triton-ascend."""


class _Subprocess(types.SimpleNamespace):
    """In place of `subprocess` in triton-ascend's compiler module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, command: list[str], **options: Any) -> Any:
        if Path(command[0]).name == _COMPILER:
            raise _Command(list(command), Path(command[1]).read_text(encoding="utf-8"))
        return subprocess.run(command, **options)


def target_of(soc: Soc) -> Any:
    """Triton's name for the chip."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("npu", soc.name, 0)


def options_of(soc: Soc) -> dict[str, Any]:
    """What triton-ascend must be told for this generation of chips."""
    return {"compile_on_910_95": True, "enable_select_analysis": True} if soc.generation == "A5" else {}


def lower(launch: Launch, soc: Soc) -> tuple[list[str], str]:
    """The command line of bishengir-compile for a kernel, and the text of its input file. Not for several threads.

    Raises:
        Refused: Triton, or triton-adapter-opt, does not take the kernel; with its words.
    """
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource, make_backend

    backend = make_backend(target_of(soc))
    _take_over(type(backend).add_stages.__globals__)
    _chip[0] = soc.name
    options = backend.parse_options({**options_of(soc), **launch.options})
    constants = {p.name: p.default for p in launch.kernel.params if p.is_constexpr and p.has_default}
    constants.update(launch.constants)
    signature = {**launch.signature, **{name: "constexpr" for name in constants if name not in launch.signature}}
    try:
        source = ASTSource(launch.kernel, signature, constants, launch.attributes)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        metadata = {"target": backend.target, **options.__dict__}
        stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
        backend.add_stages(stages, options)
        for stage in stages.values():
            module = stage(module, metadata)
    except _Command as taken:
        command, linalg = taken.args
        return [_compiler_for(command[0], soc), *command[1:]], linalg
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else str(error.stderr)
        errors = [line.partition("error: ")[2] for line in words.splitlines() if "error: " in line]
        said = "; ".join(dict.fromkeys(errors)) or words[-300:]
        raise Refused(f"{Path(error.cmd[0]).name}: {said[:600]}") from error
    except Exception as error:  # Triton raises of everything
        raise Refused(f"Triton's front end: {type(error).__name__}: {str(error).strip()[-600:]}") from error
    raise Refused(f"triton-ascend did not call {_COMPILER}")


_chip = [""]


def _take_over(names: dict[str, Any]) -> None:
    """In triton-ascend's compiler module: no device is asked for its name, and the compiler is not started."""
    if isinstance(names["subprocess"], _Subprocess):
        return
    names["subprocess"] = _Subprocess()
    names["NPUUtils"] = lambda: types.SimpleNamespace(get_arch=lambda: _chip[0])
    for name in ("_check_bishengir_api_change", "_check_bishengir_is_regbased"):  # each starts the compiler for --help
        if name in names:
            names[name] = functools.cache(names[name])


def _compiler_for(path: str, soc: Soc) -> str:
    """PyPI's compiler has a program of its own for A5."""
    own = f"{path}-a5"
    return own if soc.generation == "A5" and os.path.exists(own) else path
