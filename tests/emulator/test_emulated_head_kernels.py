"""Every kernel of the PPO head as the vendor compiles it, executed in the emulator at its real block sizes.

Against float64: scores, log-probs and entropy to 2e-5, gradients to the rounding of their dtype. What is compiled are
the launches that `ascend_launches` describes, so each variant that the head can launch is here.
"""

from __future__ import annotations

import functools

import pytest
import torch
from hivm_emulator.head_kernels import DTYPES, RUNNERS, Shape
from hivm_emulator.modules import missing_toolchain, modules
from references import ALLOWED_NATS

from npu_backend.head.ascend_launches import KernelLaunch, kernel_launches, rows_forward
from npu_backend.soc import find_soc

pytestmark = pytest.mark.skipif(bool(missing_toolchain()), reason=missing_toolchain())

SOC = "Ascend910B3"
V, H = 151936, 1024
FORMS: list[dict[str, bool]] = [
    {}, {"bias": True}, {"softcap": True}, {"bias": True, "softcap": True}, {"slices": False},
]  # fmt: skip


def launches(dtype: str, forms: list[dict[str, bool]]) -> list[KernelLaunch]:
    """Each distinct launch once."""
    every = [launch for form in forms for launch in kernel_launches(find_soc(SOC), V, H, dtype, **form)]
    return list({launch.name: launch for launch in every}.values())


def of_a_negative_scale(dtype: str) -> KernelLaunch:
    return rows_forward(find_soc(SOC), dtype, bias=False, softcap=False, mask=True, entropy=True)


# The kernels of a group are compiled together, when the first of them is tested.
GROUPS = {
    "bf16": [*launches("bf16", FORMS), of_a_negative_scale("bf16")],
    "fp16": launches("fp16", FORMS[:1]),
    "fp32": launches("fp32", FORMS[:1]),
    "fp16 rest": [*launches("fp16", FORMS[1:]), of_a_negative_scale("fp16")],
    "fp32 rest": [*launches("fp32", FORMS[1:]), of_a_negative_scale("fp32")],
}
SLOW = {"fp16 rest", "fp32 rest"}
CASES = [
    pytest.param(group, launch, id=f"{group}-{launch.name}", marks=[pytest.mark.slow] if group in SLOW else [])
    for group, members in GROUPS.items()
    for launch in members
]


@functools.cache
def compiled(group: str) -> dict[str, str]:
    members = GROUPS[group]
    return dict(zip((launch.name for launch in members), modules(members, SOC)))


def shapes(launch: KernelLaunch) -> list[Shape]:
    """Ragged in every direction; more programs than rows; several blocks, of which the last is not whole, and one."""
    if launch.kernel in ("rows_forward", "rows_backward"):
        return [Shape(9, 20003), Shape(2, 8192, programs=3), Shape(5, 97)]
    return [Shape(150, 733, hidden=300, programs=3), Shape(3, 256, hidden=1027, programs=5, parts=1)]


def check(group: str, launch: KernelLaunch, shape: Shape) -> None:
    dtype = DTYPES[next(iter(launch.signature.values()))[1:]]
    errors = RUNNERS[launch.kernel](compiled(group)[launch.name], launch, shape)
    assert errors
    for name, error in errors.items():
        bound = torch.finfo(dtype).eps / 2 + 2e-6 if name == "gradient" else ALLOWED_NATS
        assert error <= bound, (name, error, shape)


@pytest.mark.parametrize(("group", "launch"), CASES)
def test_kernel(group: str, launch: KernelLaunch):
    for shape in shapes(launch):
        check(group, launch, shape)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [32000, 49152, 129920, 151936, 248320])
@pytest.mark.parametrize("name", ["rows_forward", "rows_backward"])
def test_published_vocabularies(name: str, vocab: int):
    launch = next(launch for launch in GROUPS["bf16"] if launch.name == name)
    check("bf16", launch, Shape(3, vocab, programs=2))
