"""The triton backend on a real CUDA device: what an interpreter on the CPU cannot show."""

from __future__ import annotations

from dataclasses import replace

import gloo_ranks
import pytest
import torch
from references import assert_head_matches, error_bound, full_logits_head, head_case, max_error, run_head

pytest.importorskip("triton")

from npu_backend import linear_log_prob
from npu_backend.head import backends, inputs, triton_cuda
from npu_backend.head.selection import row_compaction

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GIB = 2**30


def on_cuda(cache: float | str | None = 0, device: str = "cuda", backend: str = "triton"):
    def head(case):
        moved = case.on(device)
        out = linear_log_prob(
            moved.hidden, moved.weight, moved.labels, impl_backend=backend, logits_cache_gib=cache, **moved.options()
        )
        assert out.backend == backend
        return out.log_probs.cpu(), out.entropy.cpu()

    return head


def big_inputs(rows: int, hidden: int, vocab: int):
    x = torch.randn(rows, hidden, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(vocab, hidden, device="cuda") * 2 * hidden**-0.5).bfloat16().requires_grad_()
    return x, w, torch.randint(0, vocab, (rows,), device="cuda")


@pytest.fixture
def without_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_cuda, "fused_kernels", lambda *_: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [0, 1e-4, "auto"])
@pytest.mark.parametrize("hidden_size", [64, 200, 1024])
@pytest.mark.parametrize("vocab_size", [257, 5003])
def test_fused_kernels(dtype: torch.dtype, cache: float | str, hidden_size: int, vocab_size: int) -> None:
    case = head_case(3, 67, hidden_size=hidden_size, vocab_size=vocab_size, dtype=dtype)
    case.labels[0, ::5] = -100
    assert_head_matches(case, on_cuda(cache))


@pytest.mark.usefixtures("without_fused")
@pytest.mark.parametrize("cache", [0, 1e-4, "auto"])
def test_library_gemm_and_row_kernels_instead(cache: float | str) -> None:
    assert_head_matches(head_case(201, hidden_size=200, vocab_size=5003, dtype=torch.bfloat16), on_cuda(cache))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 129])
def test_ragged_rows_of_the_fused_kernels(rows: int) -> None:
    assert_head_matches(head_case(rows, hidden_size=72, vocab_size=600, dtype=torch.bfloat16), on_cuda(0))


@pytest.mark.case("D36")
def test_an_older_gpu_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    choice = backends.resolve("triton", torch.device("cuda", 0), torch.bfloat16)
    assert choice.name == "torch"
    assert "compute capability 8.0" in choice.reason


@pytest.mark.case("D36")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_on_another_device_than_the_current_one() -> None:
    case = head_case(70, hidden_size=64, vocab_size=600, dtype=torch.bfloat16)
    with torch.cuda.device(0):
        assert_head_matches(case, on_cuda("auto", device="cuda:1"))


@pytest.mark.case("D24")
@pytest.mark.parametrize("cache", [0, "auto"])
def test_offsets_beyond_32_bits(cache: float | str) -> None:
    rows, vocab = 16384, 151936  # 2.5e9 scores
    x, w, labels = big_inputs(rows, 64, vocab)
    out = linear_log_prob(x, w, labels, impl_backend="triton", logits_cache_gib=cache)
    grads = torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), (x, w))
    last = slice(rows - 64, rows)
    case = replace(
        head_case(64), hidden=x[last], weight=w, labels=labels[last], grad_log_probs=torch.ones(64, device="cuda"),
        grad_entropy=torch.ones(64, device="cuda"),
    )  # fmt: skip
    exact = run_head(case.to(torch.float64), full_logits_head)
    torch.testing.assert_close(out.log_probs[last].double(), exact["log_probs"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.entropy[last].double(), exact["entropy"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[0][last].double(), exact["grad_hidden"], rtol=2e-2, atol=2e-2)
    assert grads[1].isfinite().all()


def test_a_vocabulary_of_262144() -> None:
    case = head_case(40, hidden_size=64, vocab_size=262144, dtype=torch.bfloat16)
    assert_head_matches(case, on_cuda("auto"))


@pytest.mark.case("D25", "D35")
def test_a_vocabulary_divided_among_ranks(tmp_path) -> None:
    """Four processes on one device; gloo carries what they tell each other."""
    errors = gloo_ranks.run(4, "vocab_parallel_scenarios", tmp_path / "store", HEAD_TEST_DEVICE="cuda")
    assert len(errors) > 10
    assert max(errors.values()) < 1, errors


@pytest.fixture
def leave_free():
    """leave_free(bytes) occupies the device's memory but for so much; it is given back when the test ends."""
    ballast: list[torch.Tensor] = []

    def occupy(size: int) -> None:
        torch.cuda.empty_cache()
        ballast.append(torch.empty(torch.cuda.mem_get_info()[0] - size, dtype=torch.uint8, device="cuda"))

    yield occupy
    ballast.clear()
    torch.cuda.empty_cache()


def test_auto_takes_half_of_what_backward_leaves(leave_free) -> None:
    x, w, labels = big_inputs(4096, 256, 32768)
    given = inputs.prepare(x, w, labels, 1.0, None, None, None, -100)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    assert 0.4 * free <= triton_cuda._free_share(given, x.dtype) <= 0.5 * free
    leave_free(GIB)
    assert triton_cuda._free_share(given, x.dtype) <= 0.3 * GIB
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = linear_log_prob(x, w, labels, impl_backend="triton", logits_cache_gib="auto")
    out.log_probs.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < GIB


def test_a_cache_that_does_not_fit_is_given_up(leave_free) -> None:
    x, w, labels = big_inputs(8192, 256, 65536)
    expected = torch.autograd.grad(linear_log_prob(x, w, labels, impl_backend="triton", logits_cache_gib=0)[0].sum(), x)
    leave_free(GIB)
    got = torch.autograd.grad(linear_log_prob(x, w, labels, impl_backend="triton", logits_cache_gib=100)[0].sum(), x)
    assert torch.equal(got[0], expected[0])


def test_backward_gives_the_cache_up_rather_than_run_out_of_memory(leave_free) -> None:
    x, w, labels = big_inputs(8192, 1024, 65536)
    with torch.no_grad():
        scores = -(x.double() @ w.double().T).softmax(1)
        scores[torch.arange(len(labels)), labels] += 1
        reference = scores.T @ x.double()
        del scores
    # The first run also makes cuBLAS's handles, which need memory that no allocator knows of.
    recomputed = linear_log_prob(x, w, labels, impl_backend="triton", logits_cache_gib=0).log_probs.sum()
    (expected,) = torch.autograd.grad(recomputed, w)
    bound = error_bound(expected, reference, w.dtype, times=1.0)  # with less memory cuBLAS may round otherwise
    out = linear_log_prob(x, w, labels, impl_backend="triton", logits_cache_gib=2)
    reference = reference.cpu()
    leave_free(64 * 2**20)
    (got,) = torch.autograd.grad(out.log_probs.sum(), w)
    assert max_error(got.cpu(), reference) <= bound


def test_peak_memory_without_a_cache_is_gradients_and_a_tile() -> None:
    rows, hidden, vocab = 8192, 1024, 65536
    x, w, labels = big_inputs(rows, hidden, vocab)
    linear_log_prob(x, w, labels, impl_backend="triton", logits_cache_gib=0)[0].sum().backward()
    x.grad = w.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_log_prob(x, w, labels, impl_backend="triton", logits_cache_gib=0)[0].sum().backward()
    gradients = 2 * vocab * hidden + 4 * rows * hidden
    assert torch.cuda.max_memory_allocated() - before <= gradients + triton_cuda.TILE_BYTES + 16 * 2**20


def test_nothing_waits_for_the_device_where_that_is_asked_for() -> None:
    x, w, labels = big_inputs(256, 64, 1000)
    linear_log_prob(x, w, labels, impl_backend="triton")[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with inputs.trusted_values(), row_compaction(False):
            linear_log_prob(x, w, labels, impl_backend="triton")[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph() -> None:
    x, w, labels = big_inputs(256, 64, 1000)

    def step():
        with inputs.trusted_values():  # kernels are compiled before the capture only if the cache is the same in both
            out = linear_log_prob(x, w, labels, impl_backend="triton", logits_cache_gib=0)
            return out.log_probs, torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), (x, w))

    with row_compaction(False):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            log_probs, grads = step()
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            labels.copy_(labels.flip(0))
        graph.replay()
        expected_log_probs, expected_grads = step()
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=0)
    for got, expected in zip(grads, expected_grads):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_the_same_bits_each_time_with_deterministic_algorithms() -> None:
    x, w, labels = big_inputs(1000, 256, 5000)
    silent = torch.rand(1000, device="cuda") < 0.5
    labels[::9] = -100
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            out = linear_log_prob(x, w, labels, impl_backend="triton")
            runs.append([*out[:2], *torch.autograd.grad(out.log_probs.masked_fill(silent, 0.0).sum(), (x, w))])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first, second) for first, second in zip(*runs))


@pytest.mark.case("D22")
def test_autocast_with_float32_master_weights() -> None:
    case = head_case(64, hidden_size=128, vocab_size=1003)
    x, w = case.hidden.cuda().requires_grad_(), case.weight.cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        out = linear_log_prob(x, w, case.labels.cuda(), impl_backend="triton")
    torch.autograd.backward([out.log_probs, out.entropy], [case.grad_log_probs.cuda(), case.grad_entropy.cuda()])
    assert x.grad.dtype == w.grad.dtype == torch.float32
    exact = run_head(case.to(torch.float64), full_logits_head)
    torch.testing.assert_close(w.grad.cpu().double(), exact["grad_weight"], rtol=3e-2, atol=3e-2)


@pytest.mark.case("D30")
@pytest.mark.parametrize("cache", [0, 0.001])
def test_torch_compile(cache: float) -> None:
    x, w, labels = big_inputs(300, 64, 1003)

    def loss(x, w, labels):
        out = linear_log_prob(x, w, labels, temperature=0.7, impl_backend="triton", logits_cache_gib=cache)
        return out.log_probs.sum() + 0.1 * out.entropy.sum()

    expected = torch.autograd.grad(loss(x, w, labels), (x, w))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x, w, labels), (x, w))
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_the_fused_kernels_are_what_runs_here_on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    _, w, _ = big_inputs(64, 64, 1000)
    from npu_backend.head import gemm_stats_cuda  # older releases of triton have no Gluon

    assert triton_cuda.fused_kernels(w, None, w.dtype, 1.0, None) is gemm_stats_cuda
