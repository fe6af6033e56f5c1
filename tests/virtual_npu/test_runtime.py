"""The software CANN runtime under torch_npu, a virtual NPU (arithmetic by the CPU): devices, memory, streams."""

from __future__ import annotations

import ctypes
import gc
import math
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from npu_backend import soc, virtual_npu
from npu_backend.virtual_npu import build

MIB = 1 << 20
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def test_a_fresh_process_may_ask_for_properties_before_it_uses_a_device() -> None:
    command = "import torch; print(torch.npu.get_device_properties(1).total_memory > 0)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_two_devices_that_say_what_they_are() -> None:
    assert virtual_npu.is_active()
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 2
    properties = torch.npu.get_device_properties(1)
    chip = soc.find_soc(properties.name)
    assert properties.cube_core_num == chip.cube_cores
    assert properties.vector_core_num == chip.vector_cores
    assert torch.npu.get_device_name(0) == soc.DEFAULT
    with pytest.raises(RuntimeError):
        torch.empty(1, device="npu:2")


def test_allocations_are_booked_per_device_and_given_back() -> None:
    for device in ("npu:0", "npu:1"):  # torch_npu does not switch to a device that was never used
        torch.ones(1, device=device)
    gc.collect()  # what another test left in a cycle must not be freed between two readings
    torch.npu.empty_cache()
    before = [torch.npu.memory_allocated(d) for d in (0, 1)]
    free = [torch.npu.mem_get_info(d)[0] for d in (0, 1)]
    torch.npu.reset_peak_memory_stats(1)
    held = torch.empty(40 * MIB, dtype=torch.uint8, device="npu:1")
    assert torch.npu.memory_allocated(1) - before[1] >= 40 * MIB
    assert torch.npu.memory_allocated(0) == before[0]
    assert free[1] - torch.npu.mem_get_info(1)[0] >= 40 * MIB
    assert torch.npu.mem_get_info(0)[0] == free[0]
    del held
    torch.npu.empty_cache()
    assert torch.npu.memory_allocated(1) == before[1]
    assert torch.npu.max_memory_allocated(1) - before[1] >= 40 * MIB
    assert torch.npu.mem_get_info(1)[0] == free[1]


def test_out_of_memory_is_torch_npus_own_error() -> None:
    total = torch.npu.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="npu")
    assert torch.ones(2, device="npu").sum().item() == 2  # and the device is still of use


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_keep_every_dtype_and_layout(dtype: torch.dtype) -> None:
    values = (torch.arange(24) % 5).reshape(2, 3, 4).to(dtype)
    forms = {
        "plain": values,
        "transposed": values.transpose(0, 2),
        "strided": values[:, ::2, 1:],
        "expanded": values[:1].expand(3, 3, 4),
        "empty": values[:0],
        "scalar": values[0, 0, 0],
    }
    for name, form in forms.items():
        for path in (
            lambda t: t.npu().cpu(),
            lambda t: t.to("npu:0").to("npu:1").cpu(),
            lambda t: torch.empty_like(t, device="npu").copy_(t).cpu(),
            lambda t: torch.empty_like(t).copy_(t.npu()),
            lambda t: t.npu().clone().contiguous().cpu(),
        ):
            copy = path(form)
            assert copy.dtype == dtype
            assert torch.equal(copy, form), name
    device = values.npu()
    assert torch.equal(device.transpose(0, 2)[1:, ::2].cpu(), values.transpose(0, 2)[1:, ::2])
    assert torch.equal(device.to(torch.float32).cpu(), values.to(torch.float32)) or dtype.is_complex


def test_conjugate_and_negative_views_are_read_as_such() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    device = values.npu()
    assert torch.equal(device.conj().cpu(), values.conj())
    assert torch.equal((device.conj().imag + 0).cpu(), values.conj().imag)
    assert torch.equal(torch.dot(device.conj(), device).cpu(), torch.dot(values.conj(), values))


def test_views_share_memory_and_writes_are_seen() -> None:
    base = torch.zeros(4, 4, device="npu")
    base[1].add_(1)
    base.t()[2] = 5
    base.view(-1)[::5].mul_(3)
    expected = torch.zeros(4, 4)
    expected[1].add_(1)
    expected.t()[2] = 5
    expected.view(-1)[::5].mul_(3)
    assert torch.equal(base.cpu(), expected)


def test_a_slice_of_a_storage_need_not_be_aligned() -> None:
    data = torch.arange(24, dtype=torch.uint8)
    for dtype in (torch.float32, torch.int64):
        read = [torch.empty(0, dtype=dtype, device=d).set_(data.to(d).untyped_storage()[3:19]) for d in ("cpu", "npu")]
        assert torch.equal((read[1] + 0).cpu(), read[0])


def test_packed_sequences_keep_their_sizes_on_the_host() -> None:
    results = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        x = torch.randn(5, 2, 3).to(device).requires_grad_()
        packed = pack_padded_sequence(x, torch.tensor([3, 5]), enforce_sorted=False)
        padded, lengths = pad_packed_sequence(torch.nn.LSTM(3, 4).to(device)(packed)[0])
        padded.sum().backward()
        assert (packed.batch_sizes.device.type, lengths.device.type) == ("cpu", "cpu")
        results.append((padded.cpu(), lengths, x.grad.cpu()))
    torch.testing.assert_close(results[1], results[0])
    with pytest.raises(RuntimeError, match="'lengths' argument should be a 1D CPU int64 tensor, but is on npu:0"):
        pack_padded_sequence(torch.ones(5, 2, 3, device="npu"), torch.tensor([5, 3], device="npu"))


def test_out_arguments_are_resized_and_filled() -> None:
    x = torch.arange(6.0, device="npu")
    out = torch.empty(0, device="npu")
    assert torch.add(x, 1, out=out) is out
    assert out.tolist() == [1, 2, 3, 4, 5, 6]
    room = torch.zeros(2, 6, device="npu")
    torch.mul(x, 2, out=room[1])
    assert room.cpu()[1].tolist() == [0, 2, 4, 6, 8, 10]
    assert room.cpu()[0].abs().sum() == 0
    values, places = torch.empty(0, device="npu"), torch.empty(0, dtype=torch.int64, device="npu")
    torch.topk(x, 2, out=(values, places))
    assert (values.tolist(), places.tolist()) == ([5, 4], [5, 4])


@pytest.mark.parametrize("where", ["npu:1", "cpu"])
def test_operands_on_two_devices_are_refused_as_on_the_device(where: str) -> None:
    a, b = torch.ones(3, device="npu:0"), torch.ones(3, device=where)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        a + b
    assert (a + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a CPU scalar is allowed
    assert torch.arange(3, device="npu")[torch.tensor([2, 0])].tolist() == [2, 0]  # and so are CPU indices
    calls = {
        "aten::cat": lambda: torch.cat((a, b)),
        "aten::stack": lambda: torch.stack((a, b)),
        "aten::_foreach_add.List": lambda: torch._foreach_add([a], [b]),
        "npu::npu_rms_norm": lambda: torch.ops.npu.npu_rms_norm(a, b),
        "npu::npu_grouped_matmul": lambda: torch.ops.npu.npu_grouped_matmul([a[None]], [b[:, None]], split_item=0),
    }
    if b.device.type == "npu":
        calls["aten::index.Tensor"] = lambda: a[b.long()]
    for label, call in calls.items():
        with pytest.raises(RuntimeError, match=f"found at least two devices, npu:0 and {where}! .{label}"):
            call()


def test_lists_of_tensors_are_worked_through_where_each_lies() -> None:
    everywhere = [torch.full((2,), 3.0, device=device) for device in ("cpu", "npu:0", "npu:1")]
    for results in (torch._foreach_add(everywhere, 1), torch._foreach_norm(everywhere)):
        assert [result.device for result in results] == [tensor.device for tensor in everywhere]
        assert len({tuple(result.flatten().tolist()) for result in results}) == 1
    torch._foreach_copy_(everywhere, [torch.zeros(2), torch.ones(2), torch.ones(2, device="npu:0")])  # copies may cross
    assert [tensor.tolist() for tensor in everywhere] == [[0, 0], [1, 1], [1, 1]]


def test_events_have_real_times_in_order() -> None:
    first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start = time.perf_counter()
    first.record()
    time.sleep(0.05)
    last.record()
    torch.npu.synchronize()
    all_of_it = 1000 * (time.perf_counter() - start)  # ms
    assert first.query()
    assert 50 <= first.elapsed_time(last) <= all_of_it
    assert last.elapsed_time(first) < 0


def test_an_event_without_timing_has_no_time() -> None:
    first, last = torch.npu.Event(), torch.npu.Event()
    first.record()
    last.record()
    with pytest.raises(RuntimeError, match=r"made without enable_timing=True") as raised:
        first.elapsed_time(last)
    assert "107006" in str(raised.value)  # ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID


def test_streams_order_work_and_hand_tensors_over() -> None:
    stream = torch.npu.Stream(device="npu:1")
    assert stream != torch.npu.current_stream(1)
    with torch.npu.stream(stream):
        x = torch.ones(3, device="npu:1") * 2
        done = stream.record_event()
    torch.npu.current_stream(1).wait_event(done)
    torch.npu.current_stream(1).wait_stream(stream)
    x.record_stream(torch.npu.current_stream(1))
    stream.synchronize()
    assert stream.query()
    assert x.tolist() == [2, 2, 2]


def test_a_new_thread_and_a_device_context_find_their_device() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append((torch.ones(2, device="npu:1") + 1).device))
    thread.start()
    thread.join()
    with torch.npu.device(1):
        found.append(torch.empty(1, device="npu").device)
    with torch.device("npu:1"):
        found += [torch.arange(3).device, torch.nn.Linear(2, 2)(torch.ones(1, 2)).device]
    assert found == [torch.device("npu:1")] * 4


def test_pinned_memory_is_told_from_other_memory() -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()


@pytest.mark.parametrize("device", ["npu:0", "npu:1"])
def test_random_numbers_follow_the_devices_generator(device: str) -> None:
    torch.manual_seed(7)
    expected, state_of_cpu = torch.randn(5), torch.get_rng_state()
    torch.manual_seed(7)
    assert torch.equal(torch.randn(5, device=device).cpu(), expected)
    state = torch.npu.get_rng_state(device)
    first, second = torch.rand(4, device=device), torch.rand(4, device=device)
    assert not torch.equal(first, second)
    torch.npu.set_rng_state(state, device)
    assert torch.equal(torch.rand(4, device=device), first)
    torch.npu.manual_seed_all(7)
    assert torch.equal(torch.randn(5, device=device).cpu(), expected)
    generator = torch.Generator(device).manual_seed(3)
    draws = [torch.randperm(9, device=device, generator=generator) for _ in range(2)]
    assert torch.equal(draws[0], torch.randperm(9, device=device, generator=generator.manual_seed(3)))
    assert not torch.equal(draws[0], draws[1])
    torch.manual_seed(7)
    torch.nn.functional.dropout(torch.ones(99, device=device))
    assert torch.equal(torch.randn(5), expected)  # device draws leave the CPU's own stream alone
    assert torch.equal(torch.get_rng_state(), state_of_cpu)


def test_calls_are_counted_until_they_are_reset(calls) -> None:
    x = torch.ones(3, device="npu")
    calls()
    for _ in range(3):
        x = x + 1
    x.add_(1)
    counted = calls()
    assert (counted["aten::add.Tensor"], counted["aten::add_.Tensor"]) == (3, 1)
    assert calls() == {}


def test_an_unimplemented_function_fails_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    runtime = ctypes.CDLL("libascendcl.so")
    assert runtime.rtKernelLaunch() != 0
    assert "rtKernelLaunch is not implemented" in capfd.readouterr().err
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    assert b"rtKernelLaunch" in runtime.aclGetRecentErrMsg()
    assert virtual_npu.LABEL.encode() in runtime.aclGetRecentErrMsg()
    assert runtime.aclopCompileAndExecute(b"NoSuchOperator", 0, None, None, 0, None, None, None, 0, 0, None, None) != 0
    assert b"NoSuchOperator" in runtime.aclGetRecentErrMsg()


def test_bad_handles_and_sizes_are_errors_not_crashes() -> None:
    runtime = ctypes.CDLL("libascendcl.so")
    start, end, milliseconds = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float(math.nan)
    runtime.aclrtCreateEventExWithFlag(ctypes.byref(start), 0)
    runtime.aclrtCreateEventExWithFlag(ctypes.byref(end), 0)
    assert runtime.aclrtEventElapsedTime(ctypes.byref(milliseconds), start, end) != 0  # never recorded
    assert runtime.aclrtRecordEvent(start, end) != 0  # an event is not a stream
    assert runtime.aclrtFree(start) != 0  # and was not allocated
    room = ctypes.create_string_buffer(4)
    assert runtime.aclrtMemcpy(room, ctypes.c_size_t(4), b"12345678", ctypes.c_size_t(8), 0) != 0
    assert runtime.aclrtSetDevice(2) != 0


def test_every_signature_is_the_vendors(tmp_path: Path) -> None:
    """The compiler compares our prototypes with the headers that torch_npu's wheel carries."""
    import torch_npu

    headers = Path(torch_npu.__file__).parent / "include"
    # The HCCL headers are C++: their constants are no array bounds in C.
    for header in (headers / "third_party" / "hccl").rglob("*.h"):
        text = re.sub(r"const \w+ (\w+) *= *(\w+);", r"enum { \1 = (int)\2 };", header.read_text(encoding="utf-8"))
        text = re.sub(r"union (HcclConfigValue) (\{.*?\});", r"typedef union \2 \1;", text, flags=re.DOTALL)
        copy = tmp_path / header.relative_to(headers)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(re.sub(r"inline void HcclCommConfigInit.*?\n}\n", "", text, flags=re.DOTALL), encoding="utf-8")
    native = Path(build.__file__).parent / "native"
    include = [f"-I{tmp_path}", f"-I{headers / 'third_party' / 'acl' / 'inc'}", f"-I{headers}"]
    for source in sorted(native.glob("*.c")):
        if source.name == "unimplemented.c":  # functions without arguments stand in for any signature
            continue
        check = ["-std=gnu11", "-Dconstexpr=", "-DVIRTUAL_NPU_CHECK_PROTOTYPES", "-fsyntax-only", *include, str(source)]
        done = subprocess.run([build.find_compiler(), *check], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
