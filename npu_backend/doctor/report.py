"""What doctor says: findings, each with its fix, and the facts that they rest on; text, and JSON of a fixed schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from npu_backend import __version__
from npu_backend.doctor import facts as gather
from npu_backend.doctor.facts import Facts
from npu_backend.report import table

SCHEMA = 1  # of to_dict(); raised when a key changes its meaning or goes away, not when one is added
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        check: The name of the check that found it.
        severity: `error` (training does not start, or is wrong), `warning` (untested, or likely to fail), `note` (no
            fault; the exit status stays 0).
        message: What is wrong, where.
        fix: What to do, as commands where that is possible; one per line, in this order.
        source: Where the fault is described.
    """

    check: str
    severity: str
    message: str
    fix: str
    source: str = ""

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.check}: {self.message}"]
        lines += [("  fix: " if i == 0 else "       ") + line for i, line in enumerate(self.fix.splitlines())]
        return "\n".join([*lines, f"  see: {self.source}"] if self.source else lines)


@dataclass(frozen=True)
class DoctorReport:
    """What `examine` returns. `ok` is False as soon as there is an error or a warning."""

    facts: dict[str, Any]
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    not_run: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(finding.severity == "note" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists, dictionaries, strings and numbers; docs/doctor.md describes each key."""
        return {
            "schema": SCHEMA,
            "npu_backend": __version__,
            "ok": self.ok,
            "facts": self.facts,
            "findings": [asdict(finding) for finding in self.findings],
            "checks": list(self.checks),
            "not_run": list(self.not_run),
        }

    def __str__(self) -> str:
        facts = self.facts
        ascend = [f"{name.replace('_', ' ')}: {text}" for name, text in facts["ascend"].items() if text]
        variables = [f"{name}={value}" for name, value in facts["variables"].items()]
        counts = {s: sum(finding.severity == s for finding in self.findings) for s in SEVERITIES}
        counted = ", ".join(f"{n} {name}" if n == 1 else f"{n} {name}s" for name, n in counts.items())
        return "\n".join(
            [
                f"npu-backend {__version__} on {facts['host']}, Python {facts['python']}",
                *_block(
                    "packages (the first of a name is in use)", table(("name", "version", "folder"), _copies(facts))
                ),
                *_block("driver and CANN", ascend),
                *_block("variables", variables),
                *_block("findings", [line for finding in self.findings for line in str(finding).splitlines()]),
                "",
                f"{len(self.checks)} checks: {counted}",
                *(f"not run: {what}" for what in self.not_run),
            ]
        )


def describe(facts: Facts) -> dict[str, Any]:
    """The facts of a report. One that cannot be had on a broken host is empty."""
    return {
        "host": _safe(lambda: _host(facts), "a host that cannot be examined"),
        "python": gather.python_version(),
        "virtual_npu": _safe(lambda: facts.virtual, 0),
        "packages": _safe(
            lambda: [
                {"name": package.name, "version": package.version, "folder": package.folder}
                for copies in facts.packages.values()
                for package in copies
            ],
            [],
        ),
        "modules": _safe(lambda: facts.modules, {}),
        "ascend": {
            "chip": _safe(lambda: facts.chip, ""),
            "devices": _safe(lambda: ", ".join(facts.devices), ""),
            "driver": _safe(lambda: facts.driver_version, ""),
            "cann_in_use": _safe(lambda: str(facts.toolkit or ""), ""),
            "cann_installed": _safe(lambda: ", ".join(toolkit.folder for toolkit in facts.toolkits), ""),
            "operators_compiled_for": _safe(lambda: ", ".join(facts.kernels), ""),
        },
        "variables": _safe(lambda: dict(facts.shown_variables()), {}),
    }


def _host(facts: Facts) -> str:
    if facts.virtual:
        from npu_backend.virtual_npu import LABEL

        return f"{facts.virtual} x {facts.environ.get('VIRTUAL_NPU_SOC', 'Ascend')}, {LABEL}"
    if facts.devices:
        return f"{len(facts.devices)} x {facts.chip or 'an NPU'}"
    return f"a host without an NPU, though it has {facts.ascend}" if facts.ascend else "a host without an NPU"


def _copies(facts: dict[str, Any]) -> list[list[str]]:
    """The distributions, then the modules that no distribution brought: a checkout on PYTHONPATH."""
    copies = [[p["name"], p["version"], p["folder"]] for p in facts["packages"]]
    known = tuple(f"{p['folder']}/" for p in facts["packages"])
    loose = ((name, folder) for name, folders in facts["modules"].items() for folder in folders)
    return copies + [[name, "(no metadata)", folder] for name, folder in loose if not folder.startswith(known)]


def _block(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _safe(get: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return get()
    except Exception:  # a check reports the same fact as broken, with the error
        return otherwise
