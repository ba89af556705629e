"""A run in a process that is not its own, such as a notebook, leaves nothing behind."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from arealite import SFTTrainer
from arealite.api.errors import ConfigError
from arealite.easy.process import borrowed_process, only_run


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


def test_a_second_run_at_the_same_time_is_refused(model_path, tmp_path):
    rows = [{"prompt": "a", "response": "b"}] * 8
    trainer = SFTTrainer(model_path, train_dataset=rows, max_steps=1, output_dir=tmp_path / "runs")
    refused = pytest.raises(ConfigError, match="another trainer of this process is training: call train")
    with only_run(), ThreadPoolExecutor(1) as pool, refused:
        pool.submit(trainer.train).result()
    assert not (tmp_path / "runs").exists()
    with only_run():
        pass
