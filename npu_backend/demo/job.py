"""The demo's six steps: what each does and prints, and what counts as a finding."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from npu_backend.config import parse_backend
from npu_backend.demo import checkpoint, host, plot
from npu_backend.families import families_of
from npu_backend.patches.engine import ENGINE, PatchSet
from npu_backend.patches.targets import Slot, resolve

SCORED_TOKENS = 64  # of each text
# Triton's interpreter runs a kernel's blocks one after the other, in Python.
INTERPRETED_LAYERS, INTERPRETED_TOKENS = 2, 8


@dataclass(frozen=True)
class Options:
    """The command line's options."""

    model: str | None = None
    use_liger: bool = False
    impl_backend: str | None = None
    steps: int = 4
    plot: str | None = None


@dataclass
class DemoReport:
    """What ran, with what result. `findings` is empty when everything was as it should be."""

    device: str = ""
    not_shown: str = ""
    model: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists, dictionaries, strings and numbers."""
        return {**vars(self), "ok": self.ok}


class Screen:
    """Prints, unless told to be quiet; every heading says where things run."""

    def __init__(self, label: str, *, quiet: bool) -> None:
        self.label = label
        self.quiet = quiet

    def heading(self, text: str) -> None:
        """Begin a step."""
        self.say(f"\n== {text}, on {self.label}")

    def say(self, text: object = "") -> None:
        """Print lines."""
        if not self.quiet:
            print(text, flush=True)


def run_demo(options: Options, *, quiet: bool = False) -> DemoReport:
    """Run the demo in this process; nothing stays patched.

    Args:
        options: what the command line says.
        quiet: print nothing (the report holds everything).

    Raises:
        ConfigError: the model, its tokenizer or an option cannot be used; raised before anything runs.
        BackendUnavailableError: a device or a backend asked for by name is not here.
    """
    if options.plot:
        plot.check(options.plot)
    if options.impl_backend is not None:
        parse_backend(options.impl_backend)
    source = checkpoint.find(options.model)
    where = host.prepare(use_liger=options.use_liger)
    screen = Screen(where.label, quiet=quiet)
    report = DemoReport(where.label, where.not_shown, source.name)
    screen.say(f"npu-backend demo: {source.name} in float32, on {where.label}")
    if where.not_shown:
        screen.say(f"not shown here: {where.not_shown}")
    try:
        _Job(options, source, where, screen, report).run()
    finally:
        ENGINE.revert()
    for finding in report.findings:
        screen.say(f"FINDING: {finding}")
    screen.say(f"\nnpu-backend demo: {'ok' if report.ok else 'NOT ok'}, on {where.label}")
    return report


class _Job:
    """The steps, in order; each leaves its results for the next."""

    def __init__(
        self, options: Options, source: checkpoint.Checkpoint, where: host.Host, screen: Screen, report: DemoReport
    ) -> None:
        self.options = options
        self.where = where
        self.screen = screen
        self.report = report
        plain, self.tokenizer = checkpoint.load(source)
        if where.interpreter:
            checkpoint.keep_layers(plain, INTERPRETED_LAYERS)
            screen.say(f"the model's first {INTERPRETED_LAYERS} layers only, to keep the interpreter's time short")
        self.stop = checkpoint.stop_token(plain.config)
        self.plain = plain.to("cpu" if where.interpreter else where.device.type).eval()

    def run(self) -> None:
        from npu_backend.demo.scoring import Scores
        from npu_backend.demo.training import train

        before = Scores.of(self.plain, self.tokenizer, INTERPRETED_TOKENS if self.where.interpreter else SCORED_TOKENS)
        originals = list(self._originals())
        self._plan()
        self._apply()
        self.model = checkpoint.rebuilt(self.plain)
        self._verify()
        self._score(before)
        self.screen.heading(f"5. train: {self.options.steps} GRPO steps on generated additions")
        facts, findings = train(
            self.model, self.plain, self.tokenizer, self.stop, self.where, self.options.steps, self.screen
        )
        self.report.facts["training"] = facts
        self.report.findings += findings
        if self.options.plot:
            title = f"{self.report.model}, {self.where.label}"
            plot.write(self.options.plot, facts["steps"], title)
            self.screen.say(f"picture: {self.options.plot}")
        self._revert(originals)

    @property
    def _config(self) -> dict[str, Any]:
        return {"hf_config": self.plain.config, "use_liger": self.options.use_liger}

    def _originals(self) -> Iterator[tuple[str, Slot, Any]]:
        """Every target of the patch set for this model, with the object in it before anything is applied."""
        name = "liger" if self.options.use_liger else "verl_npu"
        patch_set: PatchSet = importlib.import_module(f"npu_backend.patches.{name}").PATCH_SET
        for patch in patch_set.of(families_of([self.plain.config.model_type])):
            try:
                slot, _ = resolve(patch.target, patch.aliases)
            except ImportError:  # a registry that this transformers does not have
                continue
            yield patch.target, slot, slot.get()

    def _plan(self) -> None:
        from npu_backend.manager import plan_patches

        self.screen.heading("1. plan")
        plan = plan_patches(self._config)
        self.screen.say(plan)
        self.report.facts["plan"] = plan.to_dict()
        if self.where.interpreter:
            self.screen.say("(refused on a CPU, as it must be; the next step applies it in the interpreter)")

    def _apply(self) -> None:
        from npu_backend.manager import apply_npu_fsdp_patches

        self.screen.heading("2. apply")
        if self.where.interpreter:
            from npu_backend.liger_interpreter import apply_liger_in_interpreter

            applied = apply_liger_in_interpreter(self.plain.config)
        else:
            applied = apply_npu_fsdp_patches(self._config)
        self.screen.say(applied)
        if any(row.state == "stale" for row in applied.rows):
            self.screen.say("(stale: the plain model, which stays as it is for comparison)")
        self.report.facts["apply"] = applied.to_dict()

    def _verify(self) -> None:
        from npu_backend.verification import verify

        self.screen.heading("3. verify every operator and the head against the unpatched ones")
        result = verify(None if self.report.facts["apply"]["applied"] else self._config, model=self.model)
        self.screen.say(result)
        self.report.facts["verify"] = result.to_dict()
        if not result.ok:
            self.report.findings.append("verify: an operator is too far from the unpatched one, or never ran")

    def _score(self, before: Any) -> None:
        from npu_backend.demo.scoring import compare

        self.screen.heading("4. score real text with the plain model, the patched model and the fused head")
        lines, facts, findings = compare(before, self.model, self.tokenizer, self.options.impl_backend)
        for line in lines:
            self.screen.say(line)
        self.report.facts["score"] = facts
        self.report.findings += findings

    def _revert(self, originals: list[tuple[str, Slot, Any]]) -> None:
        from npu_backend.manager import revert_patches

        self.screen.heading("6. revert")
        touched = [(str(c.slot), c.slot, c.before) for t in ENGINE.ledger for c in t.changes]
        reverted = revert_patches()
        self.screen.say(reverted)
        targets = {name: (slot, value) for name, slot, value in [*touched, *originals]}
        wrong = [name for name, (slot, value) in targets.items() if not slot.holds(value)]
        self.screen.say(f"{len(targets) - len(wrong)} of {len(targets)} targets hold the very object they held before")
        self.report.facts["revert"] = {"targets": sorted(targets), "not_restored": wrong}
        self.report.findings += [f"revert: {name} does not hold its original" for name in wrong]
