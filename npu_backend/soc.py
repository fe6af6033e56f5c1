"""What each Ascend chip has: core counts and on-chip memory. The one source of these facts in the package.

Figures are those of the vendor's compiler (bishengir 1.2.0, its memory planner and device specs); A2 and A3 differ in
core counts only. Sizes are bytes of one AI core (L1, L0C) or of one vector core (UB).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from npu_backend.errors import ConfigError

KIB = 1024


@dataclass(frozen=True)
class Soc:
    """One chip, under the name that the CANN runtime reports."""

    name: str
    generation: str
    cube_cores: int
    vector_cores: int
    ub_bytes: int
    l1_bytes: int
    l0c_bytes: int


def _table() -> dict[str, Soc]:
    # generation, cube cores, vector cores, UB, L1, L0C (KiB), names
    rows: tuple[tuple[str, int, int, int, int, int, tuple[str, ...]], ...] = (
        ("A2", 24, 48, 192, 512, 128, ("910B1", "910B2", "910B2C")),
        ("A2", 20, 40, 192, 512, 128, ("910B3", "910B4", "910B4-1")),
        ("A3", 24, 48, 192, 512, 128, ("910_9381", "910_9382", "910_9391", "910_9392")),
        ("A3", 20, 40, 192, 512, 128, ("910_9362", "910_9372")),
        ("A5", 28, 56, 248, 512, 256, ("950PR_9579",)),
        ("A5", 36, 72, 248, 512, 256, ("950DT_9592",)),
    )
    chips: dict[str, Soc] = {}
    for generation, cube, vector, ub, l1, l0c, names in rows:
        for name in names:
            full = f"Ascend{name}"
            chips[full] = Soc(full, generation, cube, vector, ub * KIB, l1 * KIB, l0c * KIB)
    return chips


SOCS = _table()
DEFAULT = "Ascend910B1"


def find_soc(name: str) -> Soc:
    """The chip of that name.

    Raises:
        ConfigError: the name is not in the table; the message gives the closest one and all of them.
    """
    if name in SOCS:
        return SOCS[name]
    close = difflib.get_close_matches(str(name), SOCS, n=1, cutoff=0.0)
    raise ConfigError(f"unknown soc {name!r}; did you mean {close[0]!r}? Known: {', '.join(SOCS)}")
