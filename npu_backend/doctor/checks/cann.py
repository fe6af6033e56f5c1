"""Checks of CANN: one toolkit, and all variables agree on it."""

from __future__ import annotations

from collections.abc import Iterator

from npu_backend.doctor.facts import Facts, Toolkit
from npu_backend.doctor.report import Finding

_SOURCE = "https://github.com/verl-project/verl/pull/6017"
_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")


def one_toolkit(facts: Facts) -> Iterator[Finding]:
    """CANN absent, its set_env.sh not sourced, or variables (LD_LIBRARY_PATH among them) that name different ones."""
    if not facts.ascend:
        return
    named = _named(facts)
    default = facts.default_toolkit
    if default is None and not named:
        yield Finding(
            "one_toolkit",
            "error",
            "no CANN is installed in /usr/local/Ascend or ~/Ascend, and no variable names one",
            "start a CANN image (docs/doctor.md lists the tested ones), or install CANN and source its set_env.sh",
        )
        return
    if not named:
        yield Finding(
            "one_toolkit",
            "error",
            f"{default} is installed, but its set_env.sh was not sourced: torch_npu does not find libhccl.so",
            _source_command(facts, default),
            "https://github.com/vllm-project/vllm-ascend/issues/262",
        )
        return
    lost = [f"{where} names {toolkit.folder}" for where, toolkit in named if not facts.host.exists(toolkit.folder)]
    if lost:
        message = f"{'; '.join(lost)}, which does not exist; installed: {_installed(facts)}"
        yield Finding("one_toolkit", "error", message, _source_command(facts, default), _SOURCE)
    folders = dict.fromkeys(toolkit.folder for _, toolkit in named)
    if len(folders) > 1:
        message = "; ".join(f"{where} names {toolkit}" for where, toolkit in named)
        yield Finding("one_toolkit", "error", message, _source_command(facts, default), _SOURCE)
    elif default and not lost and default.folder not in folders:
        yield Finding(
            "one_toolkit",
            "warning",
            f"{', '.join(where for where, _ in named)} name {named[0][1]}, but {default} is the installed default",
            _source_command(facts, default),
            _SOURCE,
        )


def _named(facts: Facts) -> list[tuple[str, Toolkit]]:
    """Variable -> the CANN that it names; LD_LIBRARY_PATH once per CANN."""
    found = [(name, facts.toolkit_at(facts.environ.get(name, ""))) for name in _HOMES]
    libraries = dict.fromkeys(filter(None, map(facts.toolkit_at, facts.library_path)))
    return [(name, t) for name, t in found if t] + [("LD_LIBRARY_PATH", toolkit) for toolkit in libraries]


def _installed(facts: Facts) -> str:
    return ", ".join(toolkit.folder for toolkit in facts.toolkits) or "none"


def _source_command(facts: Facts, toolkit: Toolkit | None) -> str:
    if toolkit is None:
        return "install CANN, and source its set_env.sh"
    scripts = (f"{toolkit.folder}/set_env.sh", f"{toolkit.folder.rpartition('/')[0]}/set_env.sh")
    script = next((script for script in scripts if facts.host.exists(script)), scripts[0])
    return (
        "take every path of another CANN out of LD_LIBRARY_PATH (Dockerfile, ~/.bashrc), in a new shell\n"
        f"source {script}"
    )
