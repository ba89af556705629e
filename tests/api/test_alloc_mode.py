import pytest

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.errors import AllocationError


@pytest.mark.parametrize(
    ("text", "gen", "gen_size", "train_size"),
    [
        ("sglang.d12p1t1+d4p1t1", "sglang", 12, 4),
        ("sglang.d96p1t1+d32p1t1", "sglang", 96, 32),
        ("sglang.d16p1m1+d32p2m1", "sglang", 16, 64),
        ("embedded.d1p1t1+d1p1t1", "embedded", 1, 1),
        ("sglang:d4t2+fsdp:d8", "sglang", 8, 8),
        ("vllm.d4t2", "vllm", 8, 0),
        ("sglang.d4p1t1+eval", "sglang", 4, 0),
        ("d8", None, 0, 8),
        ("fsdp:d2t2c2", None, 0, 8),
    ],
)
def test_every_form_of_the_grammar(text, gen, gen_size, train_size):
    mode = AllocationMode.from_str(text)
    assert (mode.gen_backend, mode.gen_world_size, mode.train_world_size) == (gen, gen_size, train_size)
    assert mode.world_size == gen_size + train_size
    assert mode.evaluate == text.endswith("eval")
    assert AllocationMode.from_str(str(mode)) == mode


def test_degrees():
    mode = AllocationMode.from_str("sglang.d3t2p4+d2c2e4")
    assert mode.num_servers == 3 and mode.gen is not None and mode.gen.instance_size == 8
    assert mode.train == ParallelStrategy(data=2, context=2, expert=4)
    assert mode.train_world_size == 4, "experts reuse the ranks of the others"


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("", 0, "empty"),
        ("sglang.d4x2+d1", 9, "expected one of d, p, t"),
        ("sglang.d4d2", 9, "data parallelism is given twice"),
        ("sglang.d4t2m2", 11, "tensor parallelism is given twice"),
        ("trt.d4+d4", 0, "unknown backend 'trt'"),
        ("sglang.d+d4", 8, "expected a number"),
        ("sglang.d0+d4", 8, "from 1 to 100000"),
        ("sglang.d4+", 10, "expected a parallel strategy"),
        ("d4+d4", 0, "the left side generates"),
        ("sglang.d4+vllm.d4", 10, "the right side trains"),
        ("sglang.d4+d4+d4", 12, "nothing may follow"),
        ("d4+eval", 0, "`+eval` needs an inference backend"),
    ],
)
def test_errors_point_at_the_place(text, column, expected):
    with pytest.raises(AllocationError) as caught:
        AllocationMode.from_str(text)
    message = str(caught.value)
    assert expected in message
    caret = message.splitlines()[2]
    assert caret == "  " + " " * column + "^"
