"""Which steps of a record can be replayed, and what is wrong with one that cannot."""

import contextvars
import json
import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from arealite.api.cli_args import DatasetConfig, GRPOConfig, SFTConfig, TrainEngineConfig
from arealite.api.dataset_args import MixtureSourceConfig
from arealite.api.errors import RecordError, RequestError
from arealite.api.generation_args import GenerationHyperparameters
from arealite.api.io_struct import ROUTED_EXPERTS, ModelRequest, ModelResponse
from arealite.api.trajectory import Trajectory
from arealite.core.episode import Episode, EpisodeId, check_trajectories
from arealite.core.record import environment
from arealite.core.record import recorder as recorder_module
from arealite.core.record.environment import describe_environment, differences
from arealite.core.record.episodes import TrainedRows, decode_requests, decode_row, encode_episode, encode_row
from arealite.core.record.recorder import Recorder
from arealite.core.record.step_file import StepRecord, read_step, recorded_steps, step_path, write_step
from arealite.engine.replay.compare import Difference, compare_stats
from arealite.engine.replay.plan import choose_steps, weights_before
from arealite.engine.replay.playback import Playback, ReplayMismatch
from arealite.utils.request_log import LoggedRequest, log_request, use_log
from tests.engine.engine_testing import random_batch


def record(folder, steps, **info):
    folder.mkdir(exist_ok=True)
    for step in steps:
        write_step(folder, step, StepRecord({"attempt": "attempt000000-x", **info}, []))
    return folder


def test_steps_and_their_checkpoint_are_chosen(tmp_path):
    folder = record(tmp_path / "r", range(10))
    checkpoints = [(3, tmp_path / "a"), (7, tmp_path / "b"), (10, tmp_path / "c")]
    assert choose_steps(folder, checkpoints, None, None, True) == (0, 9, None)
    assert choose_steps(folder, checkpoints, 8, 8, True) == (7, 8, tmp_path / "b")
    assert choose_steps(folder, checkpoints, 5, None, True) == (3, 9, tmp_path / "a")
    assert choose_steps(folder, checkpoints, 5, 6, False) == (5, 6, None)
    assert choose_steps(folder, checkpoints, 8, None, True, 1) == (7, 8, tmp_path / "b")
    # The oldest steps have made room: a number of steps counts from the first one that can be replayed.
    folder = record(tmp_path / "rest", range(5, 10))
    assert choose_steps(folder, checkpoints, None, None, True, 2) == (7, 8, tmp_path / "b")
    assert choose_steps(folder, checkpoints, None, None, False, 2) == (5, 6, None)


def test_what_cannot_be_replayed_says_what_can(tmp_path):
    with pytest.raises(RecordError, match=r"no record in .*`record` above 0"):
        choose_steps(tmp_path, [], None, None, True)
    folder = record(tmp_path / "r", range(4, 10))
    with pytest.raises(RecordError, match=r"step 1 is not in the record.*it has steps 5 to 10"):
        choose_steps(folder, [], 0, None, True)
    with pytest.raises(RecordError, match=r"before step 6: replay can start at steps none.*recover.freq_steps"):
        choose_steps(folder, [], 5, None, True)
    with pytest.raises(RecordError, match="before step 6: replay can start at steps 9 of"):
        choose_steps(folder, [(2, tmp_path), (8, tmp_path)], 5, None, True)
    with pytest.raises(RecordError, match="--to 5 is before --from 7"):
        choose_steps(folder, [], 6, 4, False)
    step_path(folder, 6).unlink()
    with pytest.raises(RecordError, match="step 7 is missing"):
        choose_steps(folder, [], 4, 8, False)


def test_damaged_files_are_named(tmp_path):
    folder = record(tmp_path / "r", [0])
    path = step_path(folder, 0)
    whole = path.read_bytes()
    for wrong in (b"", whole[:-4], whole[:20] + b"\x00" + whole[21:], b"text"):
        path.write_bytes(wrong)
        with pytest.raises(RecordError, match=r"step000000.rec is damaged.*step 1 cannot be replayed"):
            read_step(folder, 0)
    path.write_bytes(whole)
    with pytest.raises(RecordError, match=r"attempt000000-x\.json"):
        weights_before(folder, 0)


def test_a_batch_is_stored_exactly(tmp_path):
    batch = random_batch([5, 9, 1, 7]) | {"stats/x": torch.tensor([1.0, torch.nan, 3.0, 4.0])}
    batch["odd_padding"] = torch.full(batch["input_ids"].shape, 7)
    batch["huge"] = torch.tensor([1 << 40, 0, 0, -1])
    batch[ROUTED_EXPERTS] = torch.where(batch["attention_mask"][..., None].bool(), 3, 255).to(torch.uint8)
    batch["pixel_values"] = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    write_step(tmp_path, 0, StepRecord({"a": 1}, [batch, batch]))
    info, (first, second) = read_step(tmp_path, 0)
    assert info == {"a": 1} and list(first) == list(batch)
    for name, column in batch.items():
        for again in (first[name], second[name]):
            assert again.dtype == column.dtype and torch.equal(again.nan_to_num(), column.nan_to_num()), name


def test_rows_are_stored_or_the_reason_is(tmp_path):
    row = {
        "messages": [{"role": "user", "content": "hé"}],
        "image": b"\x00\xff",
        "n": 1,
        "none": None,
        "pair": (1, "a"),
    }
    encoded, problem = encode_row(row)
    assert decode_row(json.loads(json.dumps(encoded))) == row and problem == ""
    assert encode_row({"x": object()}) == (None, "its row holds a object, which cannot be recorded")
    assert encode_row({"x": {1: "a"}})[1] == "its row holds a dict whose keys are no text, which cannot be recorded"


def make_episode(number, length):
    batch = random_batch([length, length])
    return Episode(EpisodeId("stream", number), {"prompt": "p"}, None, result=check_trajectories(batch)), batch


def test_the_oldest_steps_make_room_and_a_resumed_run_replaces_later_ones(tmp_path):
    folder = tmp_path / "record"
    recorder = Recorder(folder, max_bytes=20_000)
    recorder.begin(0, {"weights": {}})
    for step in range(12):
        episode, batch = make_episode(step, 400)
        recorder.add_batch([episode], batch)
        recorder.commit(step, {"stats": [], "weights": {}})
    recorder.close()
    kept = recorded_steps(folder)
    assert 1 < len(kept) < 12 and kept[-1] == 11
    assert sum(path.stat().st_size for path in folder.glob("*.rec")) <= 20_000
    again = Recorder(folder, max_bytes=20_000)
    again.begin(11, {"weights": {}})
    again.close()
    assert recorded_steps(folder) == kept[:-1]


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, capfd):
    (tmp_path / "record").write_text("no folder")
    recorder = Recorder(tmp_path / "record", max_bytes=1000)
    recorder.begin(0, {})
    recorder.commit(0, {})
    recorder.close()
    assert "no longer recorded" in capfd.readouterr().out


def test_a_batch_that_cannot_be_written_ends_the_record_and_not_its_thread(tmp_path, capfd):
    recorder = Recorder(tmp_path / "record", max_bytes=1000)
    recorder.begin(0, {})
    recorder.add_batch([], {"attention_mask": torch.ones(1, 2)})
    recorder.set_share({"note": "no tensor"})  # pyright: ignore[reportArgumentType]
    recorder.commit(0, {})
    recorder.commit(1, {})
    recorder.close()
    assert "no longer recorded" in capfd.readouterr().out and recorded_steps(tmp_path / "record") == []


def test_a_batch_that_its_loop_has_overwritten_is_not_recorded(tmp_path, capfd):
    recorder = Recorder(tmp_path / "record", max_bytes=1 << 20)
    recorder.begin(0, {})
    for step in range(2):
        episode, batch = make_episode(step, 5)
        recorder.add_batch([episode], batch)
        # Rewards are copied.
        batch["rewards"] += 1.0
        batch["advantages"] = torch.zeros(2, 5)
        if step == 1:
            batch["loss_mask"][0, 2] = 0
        recorder.commit(step, {})
    recorder.close()
    assert "the loop changes ['loss_mask'] of its batch in place" in capfd.readouterr().out
    assert recorded_steps(tmp_path / "record") == [0]


def test_the_end_of_a_run_does_not_wait_for_a_disk_that_hangs(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(recorder_module, "_CLOSE_TIMEOUT_S", 0.01)
    goes_on = threading.Event()
    monkeypatch.setattr(recorder_module, "write_step", lambda *_: goes_on.wait(60))
    recorder = Recorder(tmp_path / "record", max_bytes=1000)
    recorder.begin(0, {})
    recorder.commit(0, {})
    recorder.close()
    assert "the last steps were not written" in capfd.readouterr().out
    goes_on.set()
    recorder.close()
    assert not recorder._thread.is_alive()


def test_statistics_that_measure_time_may_differ():
    timed = ("time/update", "train_tokens_per_s", "wait_s", "train_tflops", "mfu", "pipeline_bubble_share")
    old, new = ({"loss": 1.0, "truncated_share": 0.5, **dict.fromkeys(timed, time)} for time in (0.1, 0.2))
    assert compare_stats(0, [old], [new]) is None
    assert compare_stats(0, [old], [new | {"truncated_share": 0.6}]) == Difference(0, "truncated_share", "0.5", "0.6")


def test_differences_of_environments_are_named():
    old = {
        "hardware": {"threads": 1, "ranks": 1},
        "versions": {"torch": "2.11"},
        "commit": "abc",
        "modules": {"mine": 1, "gone": 2},
        "config": {"actor.optimizer.lr": 0.1, "trial_name": "a", "rollout.num_workers": 2, "seed": 1},
    }
    new = {
        "hardware": {"threads": 2, "ranks": 1},
        "versions": {"torch": "2.13"},
        "commit": "def",
        "modules": {"mine": 3},
        "config": {"actor.optimizer.lr": 0.2, "trial_name": "b", "rollout.num_workers": 0, "seed": 1},
    }
    assert differences(old, old) == []
    assert differences(old, new) == [
        "threads: 1, now 2",
        "torch: 2.11, now 2.13",
        "actor.optimizer.lr: 0.1, now 0.2",
        "code of mine (recorded at commit abc)",
    ]


def test_a_changed_data_file_of_a_supervised_run_is_named(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    config = SFTConfig("e", "t", train_dataset=DatasetConfig(path=str(first)), model=TrainEngineConfig(path="m"))
    mixed = SFTConfig("e", "t", train_datasets={"b": MixtureSourceConfig(path=str(second))})
    for path in (first, second):
        path.write_text("one\n")
    old, old_mixed = describe_environment(config), describe_environment(mixed)
    assert differences(old, describe_environment(config)) == []
    first.write_text("two\n")
    (text,) = differences(old, describe_environment(config))
    assert text.startswith("rows of train_dataset: 4 bytes with checksum")
    assert differences(old_mixed, describe_environment(mixed)) == [], "the other file has changed"
    second.unlink()
    (text,) = differences(old_mixed, describe_environment(mixed))
    assert text.startswith("rows of train_datasets.b: ") and text.endswith("now no such file")
    del old["data"]
    assert differences(old, describe_environment(config)) == [], "a record of an older version"
    # Rollouts get their rows from the record.
    rl = GRPOConfig("e", "t", train_dataset=DatasetConfig(path=str(first)))
    assert describe_environment(rl)["data"] == {}


def test_both_ends_of_a_large_data_file_count(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_MAX_DATA_BYTES", 4)
    config = SFTConfig("e", "t", train_dataset=DatasetConfig(path=str(tmp_path / "rows.jsonl")))
    found = []
    for text in ("0123456789", "x123456789", "012345678x", "0123456789x"):
        (tmp_path / "rows.jsonl").write_text(text)
        found.append(describe_environment(config)["data"]["train_dataset"])
    assert len(set(found)) == 4


def logged(*exchanges):
    """Return the log of requests, each with its answer."""

    def fill(log):
        use_log(log)
        for request, response in exchanges:
            log_request(request, [response], is_group=False)
        return log

    return contextvars.copy_context().run(fill, [])


def test_a_log_keeps_what_was_asked_whatever_a_workflow_does_with_it_later():
    ids, tokens = [1, 2], [3, 4]
    request = ModelRequest(ids, seed=7, images=[b"large"], metadata={"session": threading.Lock()})
    (known,) = logged((request, ModelResponse(ids, tokens, [-1.0, -2.0], [0, 0], "stop")))
    tokens.pop()
    ids += tokens
    # Workers send their logs.
    assert pickle.loads(pickle.dumps(known)) == known
    assert (known.prompt, known.responses[0].input_tokens, known.responses[0].output_tokens) == ([1, 2], [1, 2], [3, 4])


def test_recorded_experts_are_played_back():
    experts = np.arange(16, dtype=np.uint8).reshape(8, 2)

    def play(responses):
        trajectory = Trajectory().observe([1, 2]).add(responses[0])
        return Trajectory.join([trajectory.observe([5, 6]).add(responses[1]).reward(1.0)])

    first = ModelResponse([1, 2], [3, 4], [-1.0, -2.0], [0, 0], "stop", routed_experts=experts[:3])
    second = ModelResponse([1, 2, 3, 4, 5, 6], [7, 8], [-3.0, -4.0], [1, 1], "stop", routed_experts=experts[:7])
    batch = play([first, second])
    log = logged(*((ModelRequest(each.input_tokens), each) for each in (first, second)))
    episode = Episode(EpisodeId("stream", 4), {"prompt": "p"}, None, result=check_trajectories(batch), log=log)
    encoded = encode_episode(episode, 1, TrainedRows(batch))
    again = play([known.responses[0] for known in decode_requests(encoded, batch)])
    assert torch.equal(again[ROUTED_EXPERTS], batch[ROUTED_EXPERTS])


def test_requests_with_other_sampling_parameters_are_no_repetition():
    sampled = [GenerationHyperparameters(max_new_tokens=count, stop=["."]) for count in (8, 4)]
    answers = [ModelResponse([1, 2], [3, count], [-1.0, -2.0], [0, 0], "stop") for count in (8, 4)]
    log = logged(*((ModelRequest([1, 2], g, seed=7), a) for g, a in zip(sampled, answers, strict=True)))
    encoded = encode_episode(Episode(EpisodeId("stream", 4), {"prompt": "p"}, None, log=log), 1, None)
    playback = Playback()
    playback.add(decode_requests(json.loads(json.dumps(encoded)), None))
    # Which of two requests at once ends first may differ.
    again = playback.find(ModelRequest([1, 2], sampled[1], seed=7), is_group=False)
    assert again.responses[0].output_tokens == [3, 4]
    with pytest.raises(ReplayMismatch, match=r"gconfig.temperature of a request .* 4: recorded 1.0, replayed 0.5"):
        playback.find(ModelRequest([1, 2], replace(sampled[0], temperature=0.5), seed=7), is_group=False)
    difference = Difference(3, "gconfig.temperature of a request of episode 4", "1.0", "0.5")
    assert "other sampling" in difference.describe([])
    # Records of older versions have no parameters.
    del encoded["requests"][0]["sampling"]
    playback.add(decode_requests(encoded, None)[:1])
    assert playback.find(ModelRequest([1, 2], replace(sampled[0], temperature=0.5), seed=7), is_group=False)


def test_a_refused_request_is_refused_again_and_unknown_ones_name_the_nearest():
    log = [LoggedRequest([1, 2, 3], 7, [], False, "too long")]
    episode = Episode(EpisodeId("stream", 4), {"prompt": "p"}, None, log=log)
    recorded = decode_requests(json.loads(json.dumps(encode_episode(episode, 1, None))), None)
    playback = Playback()
    playback.add(recorded)
    with pytest.raises(ReplayMismatch, match=r"episode 4, from token 2 on,: recorded \[3\] of 3.*replayed \[4\] of 3"):
        playback.find(ModelRequest([1, 2, 4], seed=7), is_group=False)
    with pytest.raises(RequestError, match="too long"):
        playback.find(ModelRequest([1, 2, 3], seed=7), is_group=False)
    with pytest.raises(ReplayMismatch, match="request with seed 7: recorded none"):
        playback.find(ModelRequest([1, 2, 3], seed=7), is_group=False)
