"""The tree of sampled stacks: what it adds up, what it leaves out, and that a thread fills it."""

import importlib
import sys
import threading

from benchmark import startup_stacks
from benchmark.startup_stacks import Node, Sampler, stack_of


def test_a_function_has_the_time_of_its_calls():
    root = Node("all")
    root.add(["main", "load", "read"], 2.0)
    root.add(["main", "load"], 1.0)
    root.add(["main", "train"], 4.0)
    root.add(["main", "train", "tiny"], 0.05)
    assert list(root.lines(min_s=0.1)) == [
        "   7.05  main",
        "   4.05    train",
        "   3.00    load",
        "   2.00      read",
    ]  # fmt: skip


def test_a_function_with_one_long_call_is_left_out():
    root = Node("all")
    root.add(["main", "wrapper", "work"], 9.9)
    root.add(["main", "wrapper"], 0.1)
    assert list(root.lines(min_s=0.1)) == ["   9.90  work"]


def test_a_stack_begins_with_its_outermost_function():
    def inner():
        return stack_of(sys._getframe())

    names = inner()
    assert names[-1] == "inner (benchmark/test_startup_stacks.py)"
    assert names[-2] == "test_a_stack_begins_with_its_outermost_function (benchmark/test_startup_stacks.py)"
    assert not any("importlib" in name for name in names) and stack_of(None) == []


def test_modules_are_named_while_they_are_imported(tmp_path, monkeypatch):
    (tmp_path / "module_with_stack.py").write_text(
        "import sys\nfrom benchmark.startup_stacks import stack_of\nNAMES = stack_of(sys._getframe())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = importlib.import_module("module_with_stack").NAMES
    assert names[-1] == f"import of module_with_stack ({tmp_path.name}/module_with_stack.py)"
    assert "importlib" not in names[-2]


def test_a_thread_samples_the_main_thread(monkeypatch):
    enough, samples = threading.Event(), []

    def stack(frame):
        samples.append(stack_of(frame))
        if len(samples) == 3:
            enough.set()
        return samples[-1]

    monkeypatch.setattr(startup_stacks, "stack_of", stack)
    sampler = Sampler()
    sampler.start()
    assert enough.wait(60)
    sampler.stop()
    assert sampler.root.seconds > 0
    assert any("test_a_thread_samples_the_main_thread" in name for name in samples[-1])
