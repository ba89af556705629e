import json
import shutil

import pytest

from arealite.api.cli_args import FreqConfig, RecoverConfig
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import SaveLoadMeta, StepInfo
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Frequency, Saver
from arealite.utils.rundir import RunDir, list_complete


def info(step: int, per_epoch: int = 4) -> StepInfo:
    return StepInfo(step // per_epoch, step % per_epoch, step, per_epoch)


class Engine:
    """The part of a TrainEngine that checkpoints use: one number in one file."""

    def __init__(self, value=0, fail=None):
        self.value, self.fail = value, fail

    def save(self, meta: SaveLoadMeta) -> None:
        if self.fail:
            raise self.fail
        from pathlib import Path

        Path(meta.path).mkdir(parents=True, exist_ok=meta.weight_format == "hf")
        (Path(meta.path) / "weights").write_text(str(self.value))

    def load(self, meta: SaveLoadMeta) -> None:
        from pathlib import Path

        self.value = int((Path(meta.path) / "weights").read_text())


class Counter:
    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (FreqConfig(), []),
        (FreqConfig(freq_steps=3), [2, 5, 8, 11]),
        (FreqConfig(freq_epochs=2), [7]),
        (FreqConfig(freq_steps=5, freq_epochs=1), [3, 4, 7, 9, 11]),
    ],
)
def test_frequency_by_steps_and_epochs(config, expected):
    frequency = Frequency(config)
    assert [step for step in range(12) if frequency.is_due(info(step))] == expected


def test_frequency_by_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("arealite.trainer.saver.time.monotonic", lambda: now[0])
    frequency = Frequency(FreqConfig(freq_secs=10))
    due = []
    for step in range(8):
        now[0] += 4
        due.append(frequency.is_due(info(step)))
    assert due == [False, False, True, False, False, True, False, False]


def test_saver_writes_a_whole_model_folder(tmp_path, tokenizer):
    saver = Saver(FreqConfig(freq_steps=2), RunDir(tmp_path), Engine(7), tokenizer)
    assert saver.maybe_save(info(0)) is None
    path = saver.maybe_save(info(1))
    assert path == tmp_path / "checkpoints" / "step000002"
    assert (path / "weights").read_text() == "7" and (path / "tokenizer.json").exists()


class NoSpace:
    """A tokenizer that cannot be written; the tokenizers library raises the base class then."""

    def save_pretrained(self, folder):
        raise Exception("No space left on device (os error 28)")


def test_a_tokenizer_that_cannot_be_written_leaves_no_checkpoint(tmp_path):
    saver = Saver(FreqConfig(), RunDir(tmp_path), Engine(7), NoSpace())
    with pytest.raises(CheckpointError, match="No space left on device"):
        saver.save(info(0))
    assert not list((tmp_path / "checkpoints").iterdir())


def test_the_last_model_is_saved_once_room_was_made(tmp_path):
    blocked = tmp_path / "checkpoints"
    blocked.write_text("not a folder")
    saver = Saver(FreqConfig(), RunDir(tmp_path), Engine(7))

    def make_room():
        blocked.unlink()
        return True

    assert saver.save_last(info(1), make_room) == blocked / "step000002"
    assert (blocked / "step000002" / "weights").read_text() == "7"


def test_the_last_model_is_saved_elsewhere_and_the_error_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"The trained model is in .*: move it") as caught:
        Saver(FreqConfig(), RunDir(run), Engine(7)).save_last(info(1), lambda: False)
    (path,) = tmp_path.glob("arealite-model-*/step000002")
    assert (path / "weights").read_text() == "7" and str(path) in str(caught.value)
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_is_named(tmp_path):
    engine = Engine(fail=OSError(28, "No space left on device"))
    with pytest.raises(CheckpointError, match=r"No space left.*earlier ones are untouched"):
        Saver(FreqConfig(), RunDir(tmp_path), engine).save(info(0))


def make(tmp_path, mode="auto", value=0, at=0, **kwargs) -> Recover:
    config = RecoverConfig(mode=mode, freq_steps=1)
    return Recover(config, RunDir(tmp_path), {"actor": Engine(value, **kwargs)}, {"loader": Counter(at)})


def test_recover_round_trip_keeps_the_newest_and_the_one_before(tmp_path):
    recover = make(tmp_path, value=5, at=9)
    assert recover.load() is None
    for step in range(2, 5):
        assert recover.maybe_save(info(step))
    kept = sorted(p.name for p in (tmp_path / "recover").iterdir())
    assert kept == ["step000004", "step000005"]
    again = make(tmp_path, "resume")
    assert again.load() == info(4)
    assert again.engines["actor"].value == 5 and again.parts["loader"].at == 9


def test_a_failed_save_leaves_the_previous_one(tmp_path):
    make(tmp_path, value=1).save(info(0))
    with pytest.raises(CheckpointError, match="No space left on device; earlier ones"):
        make(tmp_path, fail=OSError(28, "No space left on device")).save(info(1))
    # And a crash in the middle.
    (tmp_path / "recover" / "writing" / "actor").mkdir(parents=True)
    again = make(tmp_path)
    assert again.load() == info(0) and again.engines["actor"].value == 1
    again.save(info(1))
    assert [p.name for p in list_complete(tmp_path / "recover")] == ["step000002", "step000001"]


def test_a_damaged_checkpoint_is_detected_and_the_one_before_it_is_used(tmp_path, capsys):
    for step in range(2):
        make(tmp_path, value=step, at=step).save(info(step))
    weights = tmp_path / "recover" / "step000002" / "actor" / "weights"
    # As long as before: only its checksum tells.
    weights.write_text("7")
    again = make(tmp_path)
    assert again.load() == info(0) and again.engines["actor"].value == 0
    assert again.parts["loader"].at == 0
    assert "step000002 is damaged (actor/weights)" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "recover").iterdir()) == ["damaged000002", "step000001"]
    (tmp_path / "recover" / "step000001" / "actor" / "weights").unlink()
    with pytest.raises(CheckpointError, match=r"all 1 recover checkpoints in .* are damaged"):
        make(tmp_path).load()


def test_a_changed_digit_in_the_state_is_detected(tmp_path, capsys):
    for step in range(2):
        make(tmp_path, value=step, at=3 + step).save(info(step))
    state = tmp_path / "recover" / "step000002" / "state.json"
    state.write_text(state.read_text().replace('"at": 4', '"at": 5'))
    again = make(tmp_path)
    assert again.load() == info(0) and again.parts["loader"].at == 3
    assert "step000002 is damaged (state.json)" in capsys.readouterr().out


def _zero_bytes_and_remove_sums(path):
    (path / "actor" / "weights").write_bytes(bytes(1))
    for file in path.glob("sums-*"):
        file.unlink()


def _remove_one_list(path):
    (path / "sums-0.json").unlink()


def _write_sums(text):
    return lambda path: (path / "sums-0.json").write_text(text)


def _remove_state(path):
    for name in ("state.json", "sums-state.json"):
        (path / name).unlink()
    (path / "state.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_zero_bytes_and_remove_sums, "actor/weights has no checksum"),
        (_remove_one_list, "actor/weights has no checksum"),
        (_write_sums("{}"), "actor/weights has no checksum"),
        (_write_sums("[1, 2]"), "sums-0.json does not hold a checksum for each file"),
        (_write_sums('{"actor/weights": null}'), "sums-0.json does not hold a checksum for each file"),
        (_write_sums('{"actor/weights": [1'), "sums-0.json cannot be read: JSONDecodeError"),
        (_write_sums("[" * 100_000), "sums-0.json cannot be read: RecursionError"),
        (_write_sums('{"../step000001/actor/weights": 1}'), "actor/weights has no checksum"),
        (_remove_state, "state.json has no checksum"),
    ],
)
def test_a_checkpoint_without_all_its_checksums_is_not_good(tmp_path, capsys, damage, reason):
    for step in range(2):
        make(tmp_path, value=step, at=step).save(info(step))
    damage(tmp_path / "recover" / "step000002")
    again = make(tmp_path)
    assert again.load() == info(0) and again.engines["actor"].value == 0
    assert f"step000002 is damaged ({reason}): trying the one before it" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "recover").iterdir()) == ["damaged000002", "step000001"]


def _add_stray_folder(tmp_path):
    stray = tmp_path / "recover" / "step000099"
    stray.mkdir()
    (stray / "state.json").write_text("{}")


def test_no_good_checkpoint_is_deleted_for_a_stray_folder(tmp_path, capsys):
    recover = make(tmp_path)
    for step in range(4):
        recover.save(info(step))
        if step == 1:
            _add_stray_folder(tmp_path)
    assert [p.name for p in list_complete(tmp_path / "recover")] == ["step000099", "step000004", "step000003"]
    # A folder of that name may be there from an earlier recovery.
    (tmp_path / "recover" / "damaged000099").mkdir()
    again = make(tmp_path)
    assert again.load() == info(3)
    assert "step000099 is damaged (state.json has no checksum)" in capsys.readouterr().out
    names = ["damaged000099", "damaged000099.2", "step000003", "step000004"]
    assert sorted(p.name for p in (tmp_path / "recover").iterdir()) == names


def test_the_one_before_is_kept_when_the_newest_is_damaged_while_the_run_goes_on(tmp_path):
    recover = make(tmp_path)
    for step in range(2):
        recover.save(info(step))
    _remove_one_list(tmp_path / "recover" / "step000002")
    with pytest.raises(CheckpointError, match="No space left"):
        recover.engines["actor"].fail = OSError(28, "No space left on device")
        recover.save(info(2))
    assert make(tmp_path).load() == info(0)


def test_making_room_keeps_the_newest_good_checkpoint(tmp_path):
    recover = make(tmp_path)
    for step in range(2):
        recover.save(info(step))
    weights = tmp_path / "recover" / "step000002" / "actor" / "weights"
    good = weights.read_text()
    weights.write_text("7")
    assert not recover.make_room()
    weights.write_text(good)
    assert recover.make_room() and not recover.make_room()
    assert [p.name for p in list_complete(tmp_path / "recover")] == ["step000002"]


def test_a_copy_beside_the_checkpoints_is_ignored(tmp_path):
    recover = make(tmp_path, value=1)
    recover.save(info(0))
    copy = shutil.copytree(tmp_path / "recover/step000001", tmp_path / "recover/step000001.bak")
    for step in (1, 2):
        recover.save(info(step))
    last = make(tmp_path).load()
    assert last is not None and last.global_step == 2 and copy.exists()


def _save_steps(tmp_path, numbers, value):
    recover = make(tmp_path, value=value)
    for number in numbers:
        recover.save(info(number - 1))
    return tmp_path / "recover"


@pytest.mark.parametrize("spelling", ["recover/step000003", "link/step000003", "recover/../recover/step000003/"])
def test_a_run_that_goes_back_leaves_the_later_checkpoints_behind(tmp_path, capsys, monkeypatch, spelling):
    folder = _save_steps(tmp_path, [3, 4], value=1)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert make(tmp_path).load(spelling) == info(2)
    assert sorted(path.name for path in folder.iterdir()) == ["left000004", "step000003"]
    assert f"{folder}/step000004 is not continued: it is kept as left000004" in capsys.readouterr().out
    assert make(tmp_path).load(True) == info(2)


def test_a_run_that_continues_another_one_leaves_its_own_checkpoints_behind(tmp_path):
    other = _save_steps(tmp_path / "other", [3, 4], value=1)
    folder = _save_steps(tmp_path / "own", [2, 5], value=2)
    recover = make(tmp_path / "own")
    assert recover.load(f"{other}/step000003") == info(2)
    assert len(list_complete(other)) == 2 and list_complete(folder) == []
    recover.save(info(3))
    assert [path.name for path in list_complete(folder)] == ["step000004"]


def test_a_renamed_checkpoint_can_be_continued(tmp_path):
    folder = _save_steps(tmp_path, [3, 4], value=1)
    copy = (folder / "step000004").rename(folder / "step000004.bak")
    recover = make(tmp_path)
    assert recover.load(str(copy)) == info(3)
    for step in (4, 5):
        recover.save(info(step))
    assert copy.is_dir()


def test_a_checkpoint_that_is_missing_or_of_another_run_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"recover.mode=resume, but there is no complete checkpoint"):
        make(tmp_path, "resume").load()
    make(tmp_path).save(info(0))
    other = Recover(RecoverConfig(mode="auto"), RunDir(tmp_path), {"critic": Engine()}, {})
    with pytest.raises(CheckpointError, match="has no engines critic"):
        other.load()


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (RecoverConfig(mode="disabled", freq_steps=1), "recover.freq_steps has no effect"),
        (RecoverConfig(mode="auto"), "recover.mode=auto has no frequency"),
        (RecoverConfig(mode="auto", freq_secs=60), ""),
        (RecoverConfig(mode="disabled", freq_secs=60), ""),
        (RecoverConfig(mode="disabled"), ""),
    ],
)
def test_half_a_configuration_of_recovery_is_named(tmp_path, capsys, config, missing):
    Recover(config, RunDir(tmp_path), {"actor": Engine()}).load()
    printed = capsys.readouterr().out
    assert ("starts anew" in printed) == bool(missing) and missing in printed


def test_disabled_neither_saves_nor_loads(tmp_path):
    make(tmp_path).save(info(0))
    recover = make(tmp_path, "disabled")
    assert recover.load() is None and not recover.maybe_save(info(5))
    state = json.loads((tmp_path / "recover" / "step000001" / "state.json").read_text())
    assert state["parts"] == {"loader": {"at": 0}}
