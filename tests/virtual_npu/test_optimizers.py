"""Optimisers and the gradient scaler on the virtual NPU (arithmetic by the CPU) take the CPU's steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

FOREACH = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adadelta")
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
NPU_FUSED = {"NpuFusedAdamW": "AdamW", "NpuFusedAdam": "Adam", "NpuFusedSGD": "SGD", "NpuFusedRMSprop": "RMSprop"}


def model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).to(device)


def steps(optimizer: torch.optim.Optimizer, net: nn.Module, device: str, scale: float = 1.0) -> list[torch.Tensor]:
    data = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        (net(data).square().mean() * scale).backward()
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]


@pytest.mark.parametrize(
    ("name", "options"), [(n, {"foreach": True}) for n in FOREACH] + [(n, {"fused": True}) for n in FUSED], ids=str
)
def test_foreach_and_fused_steps_equal_the_cpus(name: str, options: dict[str, bool]) -> None:
    found = []
    for device in ("cpu", "npu"):
        net = model(device)
        found.append(steps(getattr(torch.optim, name)(net.parameters(), lr=0.01, **options), net, device))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(("fused", "plain"), NPU_FUSED.items())
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_torch_npus_fused_optimizers_equal_torchs(fused: str, plain: str) -> None:
    import torch_npu

    on_cpu, on_npu = model("cpu"), model("npu")
    expected = steps(getattr(torch.optim, plain)(on_cpu.parameters(), lr=0.01), on_cpu, "cpu")
    got = steps(getattr(torch_npu.optim, fused)(on_npu.parameters(), lr=0.01), on_npu, "npu")
    torch.testing.assert_close(got, expected)


def test_the_gradient_scaler_skips_and_scales_as_on_the_cpu() -> None:
    found = []
    for device in ("cpu", "npu"):
        net = model(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)
        data = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(device)
        scales = []
        for factor in (1.0, float("inf"), 1.0, 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(net(data).square().mean() * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        found.append((scales, [p.detach().cpu() for p in net.parameters()]))
    assert found[0][0] == found[1][0] == [256.0, 128.0, 128.0, 256.0, 256.0]
    torch.testing.assert_close(found[1][1], found[0][1])
