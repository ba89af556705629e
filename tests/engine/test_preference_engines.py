"""Critic, reward model and preference engines: equal to plain transformers, and over ranks."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from arealite.api.cli_args import PPOCriticConfig, PreferenceConfig
from arealite.api.errors import DatasetError, TrainingError
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.dpo.dpo_engine import FSDPDPOEngine
from arealite.engine.dpo.pairs import with_mismatched
from arealite.engine.fsdp.micro_batches import _inseparable_rows
from arealite.engine.fsdp.packed_attention import PackedLayout
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.engine.rw.rw_engine import FSDPRWEngine
from arealite.utils.data import select_rows
from tests.engine.engine_testing import SPEC, engine_config, random_batch

LENGTHS = [6, 15, 9, 9, 20, 5, 12, 3]


def started(cls, config, parallel=None):
    # Heads that the checkpoint lacks are random.
    torch.manual_seed(3)
    engine = cls(config, parallel)
    engine.initialize(SPEC)
    return engine


def pair_batch(seed=0):
    batch = random_batch(LENGTHS, seed)
    # Rows of a pair are not adjacent, and the order of sides varies.
    batch["pair_ids"] = torch.tensor([1, 2, 3, 4, 4, 3, 2, 1])
    batch["is_chosen"] = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0])
    return batch


# ----------------------------------------------------------------------------------------------- critic


def test_critic_learns_returns_and_aligns_them_with_tokens(model_dirs):
    critic = started(FSDPPPOCritic, engine_config(model_dirs["qwen2"], PPOCriticConfig, value_eps_clip=None))
    batch = random_batch(LENGTHS)
    mask = batch["loss_mask"].bool()
    batch["returns"] = torch.where(mask, (batch["input_ids"].roll(1, 1) % 5).float(), 0.0)
    errors = []
    for _ in range(60):
        batch["values"] = critic.compute_values(batch)
        errors.append((batch["values"] - batch["returns"])[mask].square().mean().item())
        stats = critic.ppo_update(batch)[0]
    # The return of a token depends on the token before it, from which its value is predicted.
    assert errors[-1] < 0.1 * errors[0]
    assert stats["value_error"] == pytest.approx(errors[-1], rel=1e-3)
    assert batch["values"][~mask].abs().sum() == 0


def test_a_minibatch_without_trained_tokens_makes_no_step_of_the_critic(model_dirs):
    critic = started(FSDPPPOCritic, engine_config(model_dirs["qwen2"], PPOCriticConfig, ppo_n_minibatches=4))
    batch = random_batch([9, 8, 7, 6])
    batch["loss_mask"][1] = 0
    batch["values"] = batch["returns"] = batch["loss_mask"].float()
    assert len(critic.ppo_update(batch)) == 3
    batch["loss_mask"][:] = 0
    assert critic.ppo_update(batch) == []


def test_returns_that_are_not_numbers_do_not_stay_in_the_scale_of_the_critic(model_dirs):
    critic = started(FSDPPPOCritic, engine_config(model_dirs["qwen2"], PPOCriticConfig, value_norm=True))
    batch = random_batch([9, 8, 7, 6])
    batch["values"] = batch["returns"] = batch["loss_mask"].float()
    bad = batch | {"returns": batch["returns"] * torch.nan}
    for given in (bad, batch):
        (stats,) = critic.ppo_update(given)
        assert stats["bad_steps"] == 1
    assert critic.compute_values(batch).isfinite().all()


def test_critic_final_values_are_those_after_the_last_token(model_dirs):
    """They equal the values of the same rows with one more token."""
    critic = started(FSDPPPOCritic, engine_config(model_dirs["qwen2"], PPOCriticConfig))
    torch.nn.init.constant_(critic.model.score.weight, 0.1)
    batch = random_batch(LENGTHS)
    critic.compute_values(batch)
    longer = random_batch([n + 1 for n in LENGTHS])
    longer["input_ids"][:, : batch["input_ids"].shape[1]] = batch["input_ids"]
    longer["loss_mask"] = longer["attention_mask"].clone()
    values = critic.compute_values(longer)
    expected = values[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)]
    torch.testing.assert_close(batch["final_values"], expected)


def test_value_norm_keeps_values_on_the_scale_of_returns(model_dirs, tmp_path):
    config = engine_config(model_dirs["qwen2"], PPOCriticConfig, value_norm=True, value_eps_clip=None)
    critic = started(FSDPPPOCritic, config)
    batch = random_batch(LENGTHS)
    mask = batch["loss_mask"].bool()
    batch["returns"] = torch.where(mask, 1000.0 + 50 * torch.randn(mask.shape), 0.0)
    for _ in range(5):
        batch["values"] = critic.compute_values(batch)
        critic.ppo_update(batch)
    values = critic.compute_values(batch)
    assert 900 < values[mask].mean() < 1100
    meta = SaveLoadMeta(str(tmp_path / "c"), "dcp", with_optim=True)
    critic.save(meta)
    other = started(FSDPPPOCritic, config)
    other.load(meta)
    assert torch.equal(other.compute_values(batch), values)


def test_first_tokens_are_not_in_the_scale_of_the_critic(model_dirs):
    critic = started(FSDPPPOCritic, engine_config(model_dirs["qwen2"], PPOCriticConfig, value_norm=True))
    batch = random_batch(LENGTHS)
    batch["loss_mask"] = batch["attention_mask"].clone()
    batch["returns"] = torch.full(batch["loss_mask"].shape, 10.0)
    batch["returns"][:, 0] = 0.0
    batch["values"] = critic.compute_values(batch)
    critic.ppo_update(batch)
    count, total, _ = critic.extra_state()["value_moments"].tolist()
    assert (count, total / count) == (sum(LENGTHS) - len(LENGTHS), 10.0)


def test_the_first_update_of_a_normalised_critic_is_not_clipped_away(model_dirs):
    """Returns far from 0 change the scale at once; clipping uses the network's outputs, not that scale."""
    critic = started(FSDPPPOCritic, engine_config(model_dirs["qwen2"], PPOCriticConfig, value_norm=True))
    batch = random_batch(LENGTHS)
    mask = batch["loss_mask"].bool()
    batch["returns"] = torch.where(mask, 10.0 + torch.randn(mask.shape), 0.0)
    batch["values"] = critic.compute_values(batch)
    stats = critic.ppo_update(batch)[0]
    assert stats["value_clip_share"] == 0.0 and stats["grad_norm"] > 0.1


def test_critic_names_what_is_missing(model_dirs):
    critic = started(FSDPPPOCritic, engine_config(model_dirs["qwen2"], PPOCriticConfig))
    with pytest.raises(TrainingError, match="compute_values"):
        critic.ppo_update(random_batch(LENGTHS))


# ----------------------------------------------------------------------------------------- reward model


def test_reward_model_learns_and_exports(model_dirs, tmp_path):
    engine = started(FSDPRWEngine, engine_config(model_dirs["qwen2"], max_tokens_per_mb=30))
    batch = pair_batch()
    first = engine.evaluate_rw(batch)
    for _ in range(30):
        stats = engine.train_rw(batch)
    assert stats["num_micro_batches"] > 1
    assert stats["accuracy"] == 1.0 and stats["loss"] < 0.5 * first["loss"]
    engine.save(SaveLoadMeta(str(tmp_path / "rm"), "hf"))
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    # Servers choose the class by it.
    assert plain.config.architectures == ["Qwen2ForSequenceClassification"]
    plain.config.pad_token_id = 0
    ids = batch["input_ids"] * batch["attention_mask"]
    expected = plain(input_ids=ids, attention_mask=batch["attention_mask"]).logits.squeeze(-1)
    torch.testing.assert_close(engine.score(batch), expected.detach(), atol=1e-4, rtol=1e-4)


def test_rows_without_a_partner_are_rejected(model_dirs):
    engine = started(FSDPRWEngine, engine_config(model_dirs["qwen2"]))
    with pytest.raises(DatasetError, match="do not pair up"):
        engine.train_rw(select_rows(pair_batch(), [0, 1, 2]))


# ------------------------------------------------------------------------------------------ preferences


def dpo_engine(path, loss, **kwargs):
    config = engine_config(path, PreferenceConfig, loss=loss, max_tokens_per_mb=30, **kwargs)
    return started(FSDPDPOEngine, config)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "orpo", "simpo"])
def test_preferences_are_learned(model_dirs, loss):
    engine = dpo_engine(model_dirs["qwen2"], loss, lr=3e-3)
    batch = with_mismatched(pair_batch()) if loss == "kto" else pair_batch()
    reference = engine.forward(batch)["logp"]
    if engine.config.needs_reference:
        with pytest.raises(TrainingError, match="ref_logp"):
            engine.train_dpo(batch)
        batch["ref_logp"] = reference
    first = engine.evaluate_dpo(batch)
    for _ in range(10):
        stats = engine.train_dpo(batch)
    change = ((engine.forward(batch)["logp"] - reference) * batch["loss_mask"]).sum(1)
    change, good = (x[batch["pair_ids"] > 0] for x in (change, batch["is_chosen"].bool()))
    assert stats["loss"] < first["loss"]
    assert change[good].mean() > change[~good].mean()
    if engine.config.needs_reference:
        assert stats["chosen"] > stats["rejected"]
    if loss == "dpo":
        # The policy is the reference: −log σ(0).
        assert first["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_kto_baseline_is_the_mean_over_mismatched_rows(model_dirs):
    engine = dpo_engine(model_dirs["qwen2"], "kto")
    pairs = pair_batch()
    batch = with_mismatched(pairs)
    batch["ref_logp"] = engine.forward(batch)["logp"] - 0.1 * torch.rand(batch["loss_mask"].shape)
    deltas = []
    # Naive: the prompt of each row with the answer of the next row of its side.
    for side in (1, 0):
        rows = [i for i in range(8) if pairs["is_chosen"][i] == side]
        for here, there in zip(rows, rows[1:] + rows[:1], strict=True):
            columns = (pairs[key][here] for key in ("input_ids", "attention_mask", "loss_mask"))
            prompt = [int(t) for t, a, m in zip(*columns, strict=True) if a and not m]
            answer = pairs["input_ids"][there][pairs["loss_mask"][there].bool()].tolist()
            ids = torch.tensor(prompt + answer)
            size = len(ids)
            match = [
                r
                for r in range(8, 16)
                if batch["input_ids"][r, :size].equal(ids) and batch["attention_mask"][r].sum() == size
            ]
            assert len(match) == 1 and batch["pair_ids"][match[0]] == -1
            layout = PackedLayout.make(torch.tensor([0, len(ids)]), [len(ids)])
            positions = torch.arange(len(ids))[None]
            logits = engine.model(input_ids=ids[None], position_ids=positions, packed_layout=layout).logits[0]
            logp = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]][len(prompt) - 1 :]
            reference = batch["ref_logp"][match[0]][len(prompt) : len(ids)]
            deltas.append(float((logp - reference).sum().detach()))
    assert engine._kto_baseline(batch) == pytest.approx(sum(deltas) / 8, rel=1e-4)
    with pytest.raises(TrainingError, match="with_mismatched"):
        engine.train_dpo(select_rows(batch, list(range(8))))


def answer_batch():
    """Single answers, five good and three bad ones."""
    batch = random_batch(LENGTHS)
    batch["pair_ids"] = torch.arange(1, 9)
    batch["is_chosen"] = torch.tensor([1, 1, 0, 1, 0, 1, 0, 1])
    return batch


def test_kto_of_single_answers_equals_the_formula_of_the_paper(model_dirs):
    """The loss in float64, with a plain model, one answer after the other; the KL from shifted answers (§4.1)."""
    weights = {1: 1.25, 0: 2.0}
    names = {"desirable_weight": weights[1], "undesirable_weight": weights[0]}
    engine = dpo_engine(model_dirs["qwen2"], "kto", beta=0.3, **names)
    plain = AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"], dtype=torch.float64)
    singles = answer_batch()
    batch = with_mismatched(singles)
    assert batch["pair_ids"].tolist() == [*range(1, 9), *[-1] * 8]
    noise = torch.rand(batch["loss_mask"].shape, generator=torch.Generator().manual_seed(4))
    batch["ref_logp"] = engine.forward(batch)["logp"] - 0.4 * noise

    def delta(prompt, answer, reference):
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([prompt + answer])).logits[0]
        logp = logits.log_softmax(-1)
        total = sum(logp[len(prompt) + i - 1, token].item() for i, token in enumerate(answer))
        return total - sum(reference[len(prompt) : len(prompt) + len(answer)].tolist())

    parts = []
    for row, length in enumerate(LENGTHS):
        ids, start = singles["input_ids"][row, :length].tolist(), int(singles["loss_mask"][row].argmax())
        parts.append((ids[:start], ids[start:]))
    shifted = zip(range(8), [*range(1, 8), 0], strict=True)
    kl = max(0.0, sum(delta(parts[i][0], parts[j][1], batch["ref_logp"][8 + i]) for i, j in shifted) / 8)
    assert kl > 0.1
    expected = 0.0
    for row, good in enumerate(singles["is_chosen"].tolist()):
        gain = 0.3 * (delta(parts[row][0], parts[row][1], batch["ref_logp"][row]) - kl) * (1 if good else -1)
        expected += weights[good] * (1 - 1 / (1 + math.exp(-gain))) / 8
    assert engine.evaluate_dpo(batch)["loss"] == pytest.approx(expected, rel=1e-5)


def test_single_answers_are_learned(model_dirs):
    engine = dpo_engine(model_dirs["qwen2"], "kto", lr=3e-3)
    batch = with_mismatched(answer_batch())
    reference = batch["ref_logp"] = engine.forward(batch)["logp"]
    first = engine.evaluate_dpo(batch)
    for _ in range(10):
        stats = engine.train_dpo(batch)
    change = ((engine.forward(batch)["logp"] - reference) * batch["loss_mask"]).sum(1)[:8]
    good = batch["is_chosen"][:8].bool()
    # The policy is the reference: 1 − σ(0).
    assert first["loss"] == pytest.approx(0.5, abs=1e-4) and stats["loss"] < 0.45
    assert change[good].mean() > change[~good].mean()


def test_single_answers_beside_pairs_are_mismatched_within_their_side():
    batch = random_batch([6, 7, 8])
    batch |= {"pair_ids": torch.tensor([1, 1, 2]), "is_chosen": torch.tensor([1, 0, 1])}
    assert with_mismatched(batch)["pair_ids"].tolist() == [1, 1, 2, -1, -1]
    one_of_each = random_batch([6, 7]) | {"pair_ids": torch.tensor([1, 2]), "is_chosen": torch.tensor([1, 0])}
    assert with_mismatched(one_of_each)["pair_ids"].tolist() == [1, 2, -1, -1]


def test_mismatched_rows_are_no_longer_than_the_data_may_be(noisy_model_dirs):
    """A long prompt with the long answer to a short one: more tokens than the model has positions."""
    batch = random_batch([100, 100, 20])
    starts = torch.tensor([[95], [5], [5]])
    batch["loss_mask"] = (torch.arange(100) >= starts) * batch["attention_mask"]
    batch |= {"pair_ids": torch.tensor([1, 2, 3]), "is_chosen": torch.tensor([1, 0, 1])}
    cut = with_mismatched(batch, max_length=110)
    assert cut["attention_mask"].sum(dim=1).tolist() == [100, 100, 20, 110, 20, 10]
    assert cut["loss_mask"].sum(dim=1).tolist() == [5, 95, 15, 15, 15, 5]
    assert torch.equal(cut["input_ids"][3, 95:110], batch["input_ids"][1, 5:20])
    engine = dpo_engine(noisy_model_dirs["gpt2"], "kto")
    cut["ref_logp"] = engine.forward(cut)["logp"]
    assert engine.evaluate_dpo(cut)["loss"] == pytest.approx(0.5, abs=1e-4)
    # Rows of other data may be longer: a prompt without an answer would measure nothing.
    assert with_mismatched(batch, max_length=50)["attention_mask"].sum(dim=1).tolist()[3] == 100


def test_a_mismatched_answer_of_several_turns_is_moved_as_a_whole():
    batch = random_batch([5, 8])
    # The second answer has two trained turns with a message between them.
    batch |= {"pair_ids": torch.tensor([1, 2]), "is_chosen": torch.tensor([1, 0])}
    batch["loss_mask"] = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 1, 1]])
    made, ids = with_mismatched(batch), batch["input_ids"]
    assert made["input_ids"][2].tolist() == [*ids[0, :3], *ids[1, 2:]]
    assert made["loss_mask"][2].tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert made["input_ids"][3, :4].tolist() == [*ids[1, :2], *ids[0, 3:5]]
    assert made["loss_mask"][3].tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0]


def _dpo_on_rank(rank, path):
    engine = dpo_engine(path, "dpo")
    losses = []
    for step in range(3):
        batch = pair_batch(step)
        batch["ref_logp"] = torch.full(batch["logprobs"].shape, -4.0)
        rows = list(range(8)) if rank is None else [[0, 1, 2, 5, 6, 7], [3, 4]][rank]
        stats = engine.train_dpo(select_rows(batch, rows))
        losses.append([stats["loss"], stats["grad_norm"], stats["accuracy"]])
    return losses


def test_mismatched_rows_are_no_pairs():
    batch = random_batch([6, 7, 8, 9, 6, 7])
    batch["pair_ids"] = torch.tensor([1, 1, 2, 2, -1, -1])
    assert _inseparable_rows(batch) == [[0, 1], [2, 3], [4], [5]]


def test_preferences_on_two_ranks_equal_one(model_dirs, two_ranks):
    one = _dpo_on_rank(None, model_dirs["llama"])
    two = two_ranks.run(_dpo_on_rank, model_dirs["llama"])
    assert two[0] == two[1]
    assert torch.tensor(two[0]).allclose(torch.tensor(one), rtol=1e-4)
