"""A run in a process that is not its own, such as a notebook, leaves nothing behind."""

import gc
import weakref

from arealite.easy.process import borrowed_process


class Engine:
    """A part of a reference cycle, as engines are."""

    def __init__(self):
        self.own = self


def test_objects_that_a_run_has_exempted_from_garbage_collection_are_freed(tmp_path):
    gc.unfreeze()
    with borrowed_process(tmp_path / "run.log", 1):
        engine = Engine()
        gc.freeze()
        held = weakref.ref(engine)
        del engine
        assert held() is not None
    assert held() is None and gc.get_freeze_count() == 0
