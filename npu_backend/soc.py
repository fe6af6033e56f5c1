"""What each Ascend chip has: core counts and on-chip memory. The one source of these facts in the package.

Figures are the device specs of the vendor's compiler, bishengir 1.2.0 (`bishengir-compile[-a5] --target=NAME
--mlir-print-ir-after=hacc-append-device-spec`, one run per name). It does not know 910_9363, 950PR_957bx and
950DT_9582x: their cores are those of the public table of the vendor's DVM kernels, the rest is their generation's.
torch_npu 2.13.0 accepts every name here. It refuses the names 910_95xx that A5 chips had before they were 950PR_95xx,
and the compiler has no vector cores for its older chips (310, 910A, 910Pro), so neither are listed.
Sizes are bytes of one AI core (L1, L0C) or of one vector core (UB).
"""

from __future__ import annotations

from dataclasses import dataclass

from npu_backend.errors import ConfigError, did_you_mean
from npu_backend.log import warn_once

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
    # generation, cube cores, UB, L1, L0C (KiB), names; each cube core has two vector cores
    rows: tuple[tuple[str, int, int, int, int, str], ...] = (
        ("A2", 24, 192, 512, 128, "910B1 910B2 910B2C"),
        ("A2", 20, 192, 512, 128, "910B3 910B4 910B4-1"),
        ("A3", 24, 192, 512, 128, "910_9381 910_9382 910_9391 910_9392"),
        ("A3", 20, 192, 512, 128, "910_9362 910_9363 910_9372"),
        ("A5", 4, 248, 512, 256, "950PR_950z"),
        ("A5", 8, 248, 512, 256, "950DT_950x 950DT_950y"),
        ("A5", 28, 248, 512, 256, "950PR_9579 950PR_957a 950PR_957b 950PR_957bx 950PR_957c 950PR_957d"),
        ("A5", 28, 248, 512, 256, "950DT_9571 950DT_9572 950DT_9573 950DT_9574 950DT_9575 950DT_9576"),
        ("A5", 28, 248, 512, 256, "950DT_9577 950DT_9578"),
        ("A5", 32, 248, 512, 256, "950PR_9589 950PR_958a 950PR_958b 950PR_958c 950PR_958d"),
        ("A5", 32, 248, 512, 256, "950DT_9581 950DT_9582 950DT_9582x 950DT_9583 950DT_9584 950DT_9585 950DT_9586"),
        ("A5", 32, 248, 512, 256, "950DT_9587 950DT_9588"),
        ("A5", 36, 248, 512, 256, "950PR_9599 950PR_959a 950PR_959b"),
        ("A5", 36, 248, 512, 256, "950DT_9591 950DT_9592 950DT_9595 950DT_9596 950DT_95A1 950DT_95A2"),
    )  # fmt: skip
    chips: dict[str, Soc] = {}
    for generation, cube, ub, l1, l0c, names in rows:
        for name in names.split():
            full = f"Ascend{name}"
            chips[full] = Soc(full, generation, cube, 2 * cube, ub * KIB, l1 * KIB, l0c * KIB)
    return chips


SOCS = _table()
DEFAULT = "Ascend910B1"


def find_soc(name: str) -> Soc:
    """The chip of that name.

    Raises:
        ConfigError: the name is not in the table; the message gives a close one and all of them.
    """
    if name in SOCS:
        return SOCS[name]
    raise ConfigError(f"unknown soc {name!r}{did_you_mean(name, SOCS)} (known: {', '.join(SOCS)})")


def find_or_smallest(name: str) -> Soc:
    """The chip of that name; for one that is not in the table the smallest, with a warning: what fits it fits any."""
    if name not in SOCS:
        smallest = min(SOCS.values(), key=lambda chip: (chip.ub_bytes, chip.vector_cores))
        warn_once(f"soc.{name}", f"unknown Ascend chip {name!r}: kernels are sized for {smallest.name}, the smallest")
        return smallest
    return SOCS[name]
