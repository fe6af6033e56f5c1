"""Compile the C runtime, once per machine and source, into the user's cache. A C compiler is all it needs.

The result is a folder shaped like a CANN installation: `lib/` with the libraries that torch_npu links against or opens
by name, and the empty folders whose presence it checks. The folder appears by one rename, so that processes which
build at the same time do not see each other's halves.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from npu_backend.config import cache_folder
from npu_backend.errors import BackendUnavailableError

_SOURCES = Path(__file__).parent / "native"
_RUNTIME = "ascendcl"  # the library with the functions; it comes first, the others depend on it
_SOURCES_OF = {
    _RUNTIME: ("aclop.c", "device.c", "memory.c", "stream.c", "unimplemented.c"),
    "hccl": ("hccl.c", "hccl_count.c", "hccl_group.c", "hccl_p2p.c", "hccl_reduce.c", "hccl_rendezvous.c"),
}
# Libraries that only have to exist: torch_npu finds what it looks for in them through their dependency on those above.
_EMPTY = ("acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi", "nnopbase", "hcomm")
LIBRARIES = (*_SOURCES_OF, *_EMPTY)
_FOLDERS = ("runtime", "compiler", "opp")
_FLAGS = ("-std=gnu11", "-O3", "-fwrapv", "-fPIC", "-shared", "-pthread")


def runtime_folder() -> Path:
    """The compiled runtime; compiled now if this source was never compiled on this machine.

    Raises:
        BackendUnavailableError: there is no C compiler, it fails, or the cache cannot be written.
    """
    digest = hashlib.sha256(platform.machine().encode())
    for source in sorted([*_SOURCES.iterdir(), Path(__file__)]):
        digest.update(source.name.encode() + source.read_bytes())
    folder = cache_folder() / f"virtual-npu-{digest.hexdigest()[:16]}"
    if not folder.is_dir():
        _build(folder)
    return folder


def find_compiler() -> str:
    """The C compiler: `$CC`, else the first of cc, gcc, clang on PATH.

    Raises:
        BackendUnavailableError: none is there.
    """
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    raise BackendUnavailableError(
        "the virtual NPU compiles its runtime once and found no C compiler (tried $CC, cc, gcc and clang); install one "
        "(for example `apt-get install gcc libc6-dev`) or set CC"
    )


def _build(folder: Path) -> None:
    compiler = find_compiler()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise BackendUnavailableError(
            f"the virtual NPU cannot write its runtime to {folder.parent} ({error}); "
            "set XDG_CACHE_HOME to a writable folder"
        ) from error
    try:
        for name in ("lib", *_FOLDERS):
            (draft / name).mkdir()
        for name in LIBRARIES:
            _compile(compiler, draft / "lib", name, [_SOURCES / source for source in _SOURCES_OF.get(name, ())])
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was not first, so this is a real failure
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _compile(compiler: str, folder: Path, name: str, sources: list[Path]) -> None:
    file = f"lib{name}.so"
    command = [compiler, *_FLAGS, "-o", str(folder / file), f"-Wl,-soname,{file}", *map(str, sources)]
    if name != _RUNTIME:
        needed = [f"-l{other}" for other in _SOURCES_OF if (folder / f"lib{other}.so").exists()]
        command += ["-x", "c", os.devnull, "-Wl,--no-as-needed", f"-L{folder}", *needed, "-Wl,-rpath,$ORIGIN"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendUnavailableError(
            f"the virtual NPU's runtime does not compile: `{' '.join(command)}` ended with "
            f"{done.returncode}:\n{done.stderr}"
        )
