"""The summary of kernels by phase, made of intervals with known times."""

import pytest

from benchmark.step_kernels import REST, Interval, busy_ns, kind_of, summarize

MS = 1_000_000


def interval(name, begin_ms, end_ms):
    return Interval(name, begin_ms * MS, end_ms * MS)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void pytorch_flash::flash_bwd_kernel<...>", "attention"),
        ("nvjet_tst_128x256_64x4", "matrix products"),
        ("triton_red_fused_add_mul_3", "compiled by torch"),
        ("void at::native::multi_tensor_apply_kernel<...>", "optimizer and norms"),
        ("void at::native::index_elementwise_kernel<...>", REST),
    ],
)
def test_kernels_have_kinds(kernel, kind):
    assert kind_of(kernel) == kind


def test_time_that_kernels_share_is_counted_once():
    kernels = [interval("b", 4, 6), interval("a", 0, 3), interval("a", 1, 2), interval("c", 5, 9)]
    assert busy_ns(kernels) == 8 * MS
    assert busy_ns([]) == 0


def test_kernels_count_in_the_phase_in_which_they_begin():
    phases = [interval("update", 0, 10), interval("weights", 10, 14), interval("update", 20, 30)]
    kernels = [
        interval("gemm", 1, 4), interval("triton_poi", 3, 6), interval("Memcpy", 9, 12), interval("gemm", 22, 27),
        interval("adam", 15, 16),
    ]  # fmt: skip
    found = summarize(phases, kernels, num_steps=2)
    update, weights = found["phases"]["update"], found["phases"]["weights"]
    # Milliseconds of one of two steps. The copy ends after its phase.
    assert update == {"time": 10, "GPU waits": 3.5, "matrix products": 4, "compiled by torch": 1.5, "copies": 1.5}
    assert weights == {"time": 2, "GPU waits": 2}
    assert next(iter(found["longest"].items())) == ("gemm", 4) and "adam" in found["longest"]
    assert found["launches"] == 2
