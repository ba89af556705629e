"""A run in a process that is not its own, such as a notebook, leaves nothing behind."""

import gc
import sys
import weakref

from arealite.easy.process import borrowed_process


class Engine:
    """A part of a reference cycle, as engines are."""

    def __init__(self):
        self.own = self


def test_objects_are_freed_and_the_interpreter_is_as_before(tmp_path):
    gc.unfreeze()
    interval_s = sys.getswitchinterval()
    with borrowed_process(tmp_path / "run.log", 1):
        sys.setswitchinterval(interval_s / 50)
        engine = Engine()
        gc.freeze()
        held = weakref.ref(engine)
        del engine
        assert held() is not None
    assert held() is None and gc.get_freeze_count() == 0
    assert sys.getswitchinterval() == interval_s
