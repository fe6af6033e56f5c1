"""What the vendor's compiler said of one kernel. Standard library only: both sides of the pipe to the worker use it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

STATUSES = {
    "ok": "every stage but the closed last one has passed",
    "overflow": "the buffers do not fit on chip",
    "unsupported": "a stage refuses the kernel",
    "suspect": "it compiles, and the result is known to be wrong for such code",
    "unstable": "the compiler does not answer the same every time",
}
SCOPES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}  # the compiler's names of on-chip memories, and everybody else's


@dataclass(frozen=True)
class Verdict:
    """Sizes are bits, as in the compiler's messages.

    Attributes:
        status: One of `STATUSES`.
        message: The compiler's words, or what is suspect; empty if ok.
        scope: The memory that overflows: UB, L1 or L0C; `need` of it is wanted and `available` is there.
        use: The highest address in use, for each memory that the kernel uses.
        capacity: What the chip has of each.
        ping_pong: Whether loads overlap with work in double buffers: kept, lost (the compiler gave it up to make the
            kernel fit; slower code), none (nothing to overlap).
        core: AIV (vector cores only), AIC (cube cores only) or MIX.
        retries: What the compiler switched off by itself, one after the other, before it succeeded or gave up.
        runs: How often it was compiled: three times near a limit.
    """

    status: str
    message: str = ""
    scope: str = ""
    need: int = 0
    available: int = 0
    use: dict[str, int] = field(default_factory=dict)
    capacity: dict[str, int] = field(default_factory=dict)
    ping_pong: str = ""
    core: str = ""
    retries: tuple[str, ...] = ()
    runs: int = 1

    @property
    def near_a_limit(self) -> bool:
        """Whether another run of the same compiler could say something else: seen where planning is a tight fit."""
        return (
            self.status == "overflow" or bool(self.retries) or self.use.get("UB", 0) > 0.95 * self.capacity.get("UB", 0)
        )

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self)

    def short(self) -> str:
        """One line: the status and its figures."""
        if self.status == "overflow":
            return f"{self.scope} overflow: needs {self.need} of {self.available} bits"
        if self.status != "ok":
            return f"{self.status}: {self.message}"
        return "ok" if self.ping_pong != "lost" else "ok, without ping-pong"
