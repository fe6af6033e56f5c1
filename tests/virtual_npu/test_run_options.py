"""`npu-backend run --memory --count` and what `activate(memory=)` accepts, on a virtual NPU (arithmetic by the CPU)."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from npu_backend import soc
from npu_backend.errors import ConfigError
from npu_backend.virtual_npu import LABEL, launch


def run(*options: str, program: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "npu_backend",
        "run",
        *options,
        "--",
        sys.executable,
        "-c",
        textwrap.dedent(program),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("page", ["README.md", "docs/quick_start.md", "docs/zh/quick_start.md"])
def test_the_first_program_that_a_page_shows_runs(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    done = run("--virtual-npu", program=text.partition("```python\n")[2].partition("```")[0])
    assert done.returncode == 0, done.stderr
    assert "virtual NPU (arithmetic by the CPU): 3 applied" in done.stdout


@pytest.mark.parametrize(("visible", "count"), [("1", 1), ("0,7,1", 1), ("x", 0)])
def test_visible_devices_are_those_that_the_variable_names(visible: str, count: int) -> None:
    """Ray gives each of its workers one device in this way."""
    code = f"""
        import os
        os.environ["ASCEND_RT_VISIBLE_DEVICES"] = {visible!r}
        import torch, torch_npu
        print(torch.npu.device_count())
        if torch.npu.device_count():
            assert (torch.ones(3, device="npu:0") + 1).sum().item() == 6
    """
    done = run("--virtual-npu=2", program=code)
    assert done.stdout.split() == [str(count)], done.stderr


def test_a_program_that_asks_for_expandable_segments_runs_without_them() -> None:
    done = run(
        "--virtual-npu",
        program="""
            import os
            os.environ["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:True"
            import torch
            print((torch.ones(3, device="npu") + 1).sum().item())
        """,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "6.0", done.stderr  # torch_npu says what it does not do, there too
    assert "expandable_segments setting failure, now change to `False`" in done.stderr  # torch_npu's own words


def test_memory_is_bounded_and_everything_is_counted() -> None:
    done = run(
        "--virtual-npu=2", "--memory=1GiB", "--count", "--json",
        program="""
            import torch
            x = torch.ones(1 << 18, device="npu:1")
            y = (x + 1) + 1
            print(torch.npu.mem_get_info(1)[1])
            try:
                torch.empty(1 << 31, dtype=torch.uint8, device="npu:1")
            except torch.OutOfMemoryError:
                print("full")
        """,
    )  # fmt: skip
    assert done.stdout.split() == [str(1 << 30), "full"], done.stderr
    report = json.loads(next(line for line in done.stderr.splitlines() if '"operators"' in line))
    assert report["backend"] == LABEL
    assert report["operators"]["aten::add.Tensor"] == [2, 2 * 2 * (1 << 20)]  # an operand and a result of 1 MiB
    assert report["peak_bytes"] == {"npu:1": pytest.approx(3 << 20, rel=0.01)}  # and torch_npu's padding


def test_every_rank_reports_for_itself_as_a_table() -> None:
    program = """
        import os, torch
        if os.environ.get("RANK") is None:
            import subprocess, sys
            command = [sys.executable, "-c", "import torch; torch.ones(3).npu()"]
            for rank in "01":
                subprocess.run(command, env={**os.environ, "RANK": rank})
    """
    done = run("--virtual-npu", "--count", program=program)
    assert done.returncode == 0, done.stderr
    assert f"{LABEL}: operators of process" in done.stderr
    for rank in "01":
        assert f", rank {rank}\n" in done.stderr
    assert done.stderr.count("operators of process") == 2  # the parent ran nothing on a device


def test_the_device_s_own_operators_come_first_then_the_most_called() -> None:
    program = """
        import torch, torch_npu
        x = torch.ones(2, 8, device="npu")
        for _ in range(3):
            x = x + 1
        torch_npu.npu_swiglu(x)
    """
    done = run("--virtual-npu", "--count", "--json", program=program)
    found = json.loads(next(line for line in done.stderr.splitlines() if '"operators"' in line))["operators"]
    assert next(iter(found)) == "npu::npu_swiglu", done.stderr
    others = [calls for name, (calls, _) in found.items() if name.startswith("aten::")]
    assert others == sorted(others, reverse=True)
    assert max(others) >= 3


def test_collectives_are_counted_with_their_bytes() -> None:
    """Buffers of one rank: 1 KiB in and out, 4 KiB in and out; nothing for a barrier, nor for what was not called."""
    program = """
        import torch, torch.distributed as dist
        dist.init_process_group("hccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        dist.all_reduce(torch.ones(256, device="npu"))
        whole = torch.empty(1024, device="npu")
        for _ in range(2):
            dist.all_gather_into_tensor(whole, torch.ones(1024, device="npu"))
        dist.destroy_process_group()
    """
    done = run("--virtual-npu", "--count", "--json", program=program)
    found = json.loads(next(line for line in done.stderr.splitlines() if '"operators"' in line))["operators"]
    assert {n: v for n, v in found.items() if n.startswith("hccl::")} == {
        "hccl::all_reduce": [1, 2048],
        "hccl::all_gather": [2, 2 * 8192],
    }, done.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 << 30), (12345, 12345), ("1.5 gib", 3 << 29), ("80GB", 80 * 10**9), ("512M", 512 * 10**6), ("7B", 7)],
)
def test_sizes_of_memory(text: int | str, size: int) -> None:
    assert launch.environment(1, soc.DEFAULT, memory=text)["VIRTUAL_NPU_MEMORY_BYTES"] == str(size)


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "GiB", "64 elephants", "1e9", -5, 0])
def test_what_is_no_size_is_refused(text: int | str) -> None:
    with pytest.raises(ConfigError, match="is no size of a device"):
        launch.environment(1, soc.DEFAULT, memory=text)


@pytest.mark.parametrize("name", ["Ascend910_9392", "Ascend950PR_9579"])
def test_other_generations_start_and_compute(name: str) -> None:
    program = "import torch; print(torch.npu.get_device_name(), (torch.ones(2).npu() + 1).sum().item())"
    done = run("--virtual-npu", f"--soc={name}", program=program)
    assert done.stdout.split() == [name, "4.0"], done.stderr


def test_torch_npu_takes_every_chip_of_the_table() -> None:
    program = """
        import os, torch
        from npu_backend.soc import SOCS
        for name in SOCS:
            if os.fork() == 0:  # torch_npu reads the name once, when a device is first used
                os.environ["VIRTUAL_NPU_SOC"] = name
                assert (torch.ones(2).npu() + 1).sum().item() == 4 and torch.npu.get_device_name() == name
                print(name, flush=True)
                os._exit(0)
            os.wait()
    """
    done = run("--virtual-npu", program=program)
    assert done.stdout.split() == list(soc.SOCS), done.stderr
