"""Checkpoints: loadable elsewhere, exact to resume from, safe on a full disk."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader
from transformers import AutoModelForCausalLM

from arealite.api.cli_args import RecoverConfig
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import SaveLoadMeta, StepInfo, WeightUpdateMeta
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.trainer.recover import Recover
from arealite.utils import distributed
from arealite.utils.data import select_rows
from arealite.utils.rundir import RunDir
from arealite.weights.host_memory import SharedWeights
from tests.engine.engine_testing import SPEC, Ranks, engine_config, random_batch

BATCH = random_batch([5, 12, 7, 9])


def trained_engine(path, steps=2):
    engine = FSDPLMEngine(engine_config(path))
    engine.initialize(SPEC)
    for _ in range(steps):
        engine.train_lm(BATCH)
        engine.step_lr_scheduler()
    return engine


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3_moe"])
def test_hf_export_loads_in_transformers_and_engine(model_dirs, tmp_path, kind):
    engine = trained_engine(model_dirs[kind])
    path = str(tmp_path / "export")
    engine.save(SaveLoadMeta(path, "hf"))
    # Over an existing folder.
    engine.save(SaveLoadMeta(path, "hf"))
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for (name, ours), theirs in zip(engine.model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export"]
    fresh = trained_engine(model_dirs[kind], steps=0)
    fresh.load(SaveLoadMeta(path, "hf"))
    assert all(map(torch.equal, fresh.model.parameters(), engine.model.parameters()))


def test_dcp_resume_is_exact(model_dirs, tmp_path):
    engine = trained_engine(model_dirs["qwen2"])
    engine.set_version(7)
    meta = SaveLoadMeta(str(tmp_path / "dcp"), "dcp", with_optim=True)
    # An odd number: numpy then holds the second of a pair of normal numbers.
    numpy.random.standard_normal(5)
    engine.save(meta)
    noise, drawn = torch.rand(3), numpy.random.standard_normal(3).tolist()
    expected = [engine.train_lm(BATCH) for _ in range(3)]
    resumed = trained_engine(model_dirs["qwen2"], steps=0)
    resumed.load(meta)
    assert resumed.get_version() == 7 and resumed.lr_step == 2
    assert torch.equal(torch.rand(3), noise)
    assert numpy.random.standard_normal(3).tolist() == drawn
    for before in expected:
        after = resumed.train_lm(BATCH)
        assert (after["loss"], after["grad_norm"]) == (before["loss"], before["grad_norm"])


# CPUs without bfloat16 fall back to a slower product.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_forward_pass_before_saving_or_loading_changes_nothing(model_dirs, tmp_path):
    """A forward pass leaves sharded weights gathered. Two dtypes shard them even on one rank."""

    def make(steps):
        config = engine_config(model_dirs["qwen2"])
        config.dtype = "bfloat16"
        engine = FSDPLMEngine(config)
        engine.initialize(SPEC)
        for _ in range(steps):
            engine.train_lm(BATCH)
        return engine

    engine = make(2)
    meta = SaveLoadMeta(str(tmp_path / "dcp"), "dcp", with_optim=True)
    engine.forward(BATCH)
    engine.save(meta)
    expected = [engine.train_lm(BATCH)["grad_norm"] for _ in range(2)]
    resumed = make(1)
    resumed.forward(BATCH)
    resumed.load(meta)
    assert [resumed.train_lm(BATCH)["grad_norm"] for _ in range(2)] == expected


def test_a_checkpoint_before_the_first_step_resumes(model_dirs, tmp_path):
    """The optimizer has no state yet if all rewards were equal; loading drops existing state."""
    engine = trained_engine(model_dirs["qwen2"], steps=0)
    meta = SaveLoadMeta(str(tmp_path / "dcp"), "dcp", with_optim=True)
    engine.save(meta)
    for resumed in (trained_engine(model_dirs["qwen2"], steps=n) for n in (0, 2)):
        resumed.load(meta)
        assert not resumed.optimizer.state and resumed.lr_step == 0
        assert all(map(torch.equal, resumed.model.parameters(), engine.model.parameters()))
    engine.save(SaveLoadMeta(str(tmp_path / "weights"), "dcp", with_optim=False))
    with pytest.raises(CheckpointError, match="saved without the optimizer"):
        engine.load(SaveLoadMeta(str(tmp_path / "weights"), "dcp", with_optim=True))


def _resume_on_rank(rank, model_path, folder):
    engine = FSDPLMEngine(engine_config(model_path))
    engine.initialize(SPEC)
    engine.load(SaveLoadMeta(f"{folder}/one", "dcp", with_optim=True))
    share = select_rows(BATCH, [[0, 1, 2], [3]][rank])
    stats = engine.train_lm(share)
    engine.save(SaveLoadMeta(f"{folder}/two", "dcp", with_optim=True))
    engine.save(SaveLoadMeta(f"{folder}/hf", "hf"))
    engine.update_weights(WeightUpdateMeta("disk", f"{folder}/published", 1))
    return stats["loss"], stats["grad_norm"]


def test_checkpoint_of_one_rank_resumes_on_two_and_back(model_dirs, tmp_path, two_ranks):
    one = trained_engine(model_dirs["qwen2"])
    one.save(SaveLoadMeta(str(tmp_path / "one"), "dcp", with_optim=True))
    expected = one.train_lm(BATCH)
    answers = two_ranks.run(_resume_on_rank, model_dirs["qwen2"], str(tmp_path))
    assert answers[0] == pytest.approx((expected["loss"], expected["grad_norm"]), rel=1e-5)
    back = trained_engine(model_dirs["qwen2"], steps=0)
    back.load(SaveLoadMeta(str(tmp_path / "two"), "dcp", with_optim=True))
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    published = load_file(tmp_path / "published" / "model.safetensors")
    for name, parameter in back.model.named_parameters():
        assert torch.equal(parameter, exported[name]) and torch.equal(parameter, published[name])
        torch.testing.assert_close(parameter, one.model.get_parameter(name), atol=1e-5, rtol=1e-4)


def _save_with_little_room(model_path, folder):
    engine = trained_engine(model_path)
    for form in ("hf", "dcp"):
        engine.save(SaveLoadMeta(f"{folder}/{form}", form, with_optim=True))
    good = {form: _content(f"{folder}/{form}") for form in ("hf", "dcp")}
    engine.train_lm(BATCH)
    # Limit files to 20 kB, which fails a write like a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    messages = []
    for form in ("hf", "dcp"):
        with pytest.raises(CheckpointError) as caught:
            engine.save(SaveLoadMeta(f"{folder}/{form}", form, with_optim=True))
        messages.append(str(caught.value))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    unchanged = all(_content(f"{folder}/{form}") == good[form] for form in good)
    loss = engine.train_lm(BATCH)["loss"]
    engine.save(SaveLoadMeta(f"{folder}/hf", "hf"))
    return messages, unchanged, loss


def _content(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir())}


def test_full_disk_keeps_the_last_checkpoint_and_training_continues(model_dirs, tmp_path):
    messages, unchanged, loss = _save_with_little_room(model_dirs["qwen2"], str(tmp_path))
    for form, message in zip(("hf", "dcp"), messages, strict=True):
        assert str(tmp_path / form) in message and "GB are free" in message
    assert unchanged and loss > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "hf"]


def test_incomplete_foreign_and_missing_checkpoints_are_rejected(model_dirs, tmp_path):
    engine = trained_engine(model_dirs["qwen2"])
    before = [p.detach().clone() for p in engine.model.parameters()]
    other = trained_engine(model_dirs["llama"], steps=1)
    for form in ("hf", "dcp"):
        other.save(SaveLoadMeta(str(tmp_path / f"other_{form}"), form, with_optim=True))
        engine.save(SaveLoadMeta(str(tmp_path / f"torn_{form}"), form, with_optim=True))
        for file in (tmp_path / f"torn_{form}").glob("*"):
            if file.suffix in (".safetensors", ".distcp"):
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        for name in (f"other_{form}", f"torn_{form}", "missing"):
            with pytest.raises(CheckpointError):
                engine.load(SaveLoadMeta(str(tmp_path / name), form, with_optim=True))
    assert all(map(torch.equal, before, engine.model.parameters()))


def test_a_checkpoint_with_more_layers_than_the_engine_is_rejected(model_dirs, tmp_path):
    """Without its last layers a model loads, but computes something else."""
    model = AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"])
    model.config.num_hidden_layers = 1
    model.config.layer_types = model.config.layer_types[:1]
    del model.model.layers[1:]
    model.save_pretrained(tmp_path / "small")
    meta = SaveLoadMeta(str(tmp_path / "dcp"), "dcp", with_optim=True)
    trained_engine(model_dirs["qwen2"], steps=1).save(meta)
    small = trained_engine(str(tmp_path / "small"), steps=1)
    before = [p.detach().clone() for p in small.model.parameters()]
    for with_optim in (True, False):
        with pytest.raises(CheckpointError, match=r"tensors that this engine lacks, such as model\.layers\.1\."):
            small.load(SaveLoadMeta(meta.path, "dcp", with_optim=with_optim))
    with pytest.raises(CheckpointError, match="it has 2 layers, and this engine has 1"):
        small.load(SaveLoadMeta(model_dirs["qwen2"], "hf"))
    assert all(map(torch.equal, before, small.model.parameters()))


@pytest.mark.parametrize(
    ("saved", "other"), [("adamw_8bit", "adamw"), ("adamw_8bit", "adamw_bf16"), ("adamw", "adamw_8bit")]
)
def test_states_of_another_kind_of_optimizer_are_rejected(model_dirs, tmp_path, saved, other):
    """Codes of 8 bits would be read as the moments themselves."""
    meta = SaveLoadMeta(str(tmp_path / "dcp"), "dcp", with_optim=True)
    engines = {}
    for kind in (saved, other):
        config = engine_config(model_dirs["qwen2"])
        config.optimizer.type = kind
        engines[kind] = FSDPLMEngine(config)
        engines[kind].initialize(SPEC)
    engines[saved].train_lm(BATCH)
    engines[saved].save(meta)
    before = [p.detach().clone() for p in engines[other].model.parameters()]
    with pytest.raises(CheckpointError, match=rf"optimizer.type={saved}.* this engine has optimizer.type={other},"):
        engines[other].load(meta)
    assert all(map(torch.equal, before, engines[other].model.parameters()))
    engines[other].load(SaveLoadMeta(meta.path, "dcp"))
    assert all(map(torch.equal, engines[saved].model.parameters(), engines[other].model.parameters()))


def test_weights_through_shared_memory(model_dirs, tmp_path):
    engine = trained_engine(model_dirs["qwen2"])
    meta = WeightUpdateMeta("shm", str(tmp_path / "segment"), 1)
    engine.update_weights(meta)
    reader = SharedWeights.attach(meta.path)
    engine.train_lm(BATCH)
    engine.update_weights(meta.with_version(2))
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(reader.tensors[name], parameter)
    assert "lm_head.weight" not in reader.tensors
    engine.destroy()
    assert not (tmp_path / "segment").exists()


def _save_where_rank_1_cannot_write(rank, folder):
    """Rank 1 cannot write its checksums: there is a folder of that name."""
    taken = Path(folder) / "recover/writing/sums-1.json"
    engine = SimpleNamespace(save=lambda meta: taken.mkdir(exist_ok=True))
    distributed.init_process_group("cpu")
    recover = Recover(RecoverConfig(mode="auto"), RunDir(folder), {"actor": engine})
    with pytest.raises(CheckpointError) as caught:
        recover.save(StepInfo(0, 0, 0, 1))
    # All ranks are still in step.
    distributed.barrier()
    return str(caught.value)


def test_a_rank_that_cannot_write_fails_the_recover_checkpoint_on_all(two_ranks, tmp_path):
    first, second = two_ranks.run(_save_where_rank_1_cannot_write, str(tmp_path))
    assert "another rank failed" in first and "Is a directory" in second
    assert not list((tmp_path / "recover").glob("step*"))


def _load_without_rank_1(rank, path, folder):
    """Let rank 1 die before it loads its part, and write down what rank 0 raises."""
    engine = trained_engine(path, steps=0)
    meta = SaveLoadMeta(folder, "dcp", with_optim=True)
    engine.save(meta)
    if rank == 1:
        state_dict_loader.load = lambda *args, **kwargs: os._exit(1)
    try:
        engine.load(meta)
    except RuntimeError as error:
        Path(f"{folder}.raised").write_text(type(error).__name__)


def test_a_rank_that_dies_while_all_load_is_no_damaged_checkpoint(model_dirs, tmp_path):
    """A `CheckpointError` would end the job; after another error it starts again."""
    ranks, raised = Ranks(2), tmp_path / "saved.raised"
    try:
        with pytest.raises(EOFError):
            ranks.run(_load_without_rank_1, model_dirs["qwen2"], str(tmp_path / "saved"))
        # The answer of rank 0, unless it came before.
        assert raised.exists() or ranks.connections[0].poll(60)
    finally:
        ranks.close()
    assert raised.read_text() not in ("", "CheckpointError")
