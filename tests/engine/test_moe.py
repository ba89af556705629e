"""Mixtures of experts: routing replay from the server to the trainer, router statistics."""

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, PPOActorConfig, ServerConfig
from arealite.api.errors import ConfigError, RequestError, TrainingError, WeightUpdateError
from arealite.api.io_struct import ROUTED_EXPERTS, SaveLoadMeta, WeightUpdateMeta
from arealite.api.trajectory import Trajectory
from arealite.engine.embedded import EmbeddedEngine
from arealite.engine.fsdp.micro_batches import MicroBatchCount
from arealite.engine.fsdp.routing import WEIGHTS
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.weights import WeightSource
from arealite.utils.data import concat_padded, with_sample_columns
from arealite.utils.routing import expert_blocks
from arealite.weights.stream import publish
from arealite.weights.sync import make_transport
from tests.engine.engine_testing import SPEC, engine_config, random_batch

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
PROMPTS = [[5, 9, 11, 4, 8, 13], [7, 3, 20, 21, 22, 23, 24, 25, 26, 30]]


def make_actor(path, **settings) -> FSDPPPOActor:
    actor = FSDPPPOActor(engine_config(path, cls=PPOActorConfig, **settings))
    actor.initialize(SPEC)
    return actor


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def own_experts(model, ids: list[int]) -> np.ndarray:
    """The experts of each token by the model's own forward pass, sorted in each layer: [tokens, L, K]."""
    found, blocks = [], expert_blocks(model)
    hooks = [b.router.register_forward_hook(lambda _, __, out: found.append(out[2])) for b in blocks]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).sort(dim=-1).values.numpy()


def add_router_noise(model, scale: float) -> None:
    """Move each router a little, as another kernel or dtype would."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for block in expert_blocks(model):
            weight = block.router.weight
            weight += scale * weight.std() * torch.randn(weight.shape, generator=generator)


def roll_out(model, prompts=PROMPTS, turns: int = 1, **settings):
    """Answers of a server with this model, as a batch with recorded experts."""
    config = InferenceEngineConfig(routing_replay=True, segment_tokens=5)
    engine = EmbeddedEngine(config, ServerConfig(device="cpu", block_size=4, max_total_tokens=256, **settings))
    engine._engine = Engine(engine.server, model=copy.deepcopy(model)).start()
    gconfig = GenerationHyperparameters(max_new_tokens=14, ignore_eos=True)

    async def answer(prompt: list[int], seed: int) -> Trajectory:
        trajectory = Trajectory().observe(prompt)
        for turn in range(turns):
            if turn:
                trajectory.observe([17, 18, 19])
            trajectory.add(await engine.agenerate(trajectory.request(gconfig, seed=seed)))
        return trajectory.reward(float(seed % 2))

    async def answer_all() -> list[Trajectory]:
        return await asyncio.gather(*(answer(p, seed) for p in prompts for seed in range(3)))

    try:
        return Trajectory.join(asyncio.run(answer_all()))
    finally:
        engine._engine.close()


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_server_returns_the_experts_of_every_computed_token(model_dirs, kind):
    model = load(model_dirs[kind])
    top_k = model.config.num_experts_per_tok
    batch = roll_out(model, turns=2)
    assert batch[ROUTED_EXPERTS].dtype == torch.uint8
    for ids, mask, record in zip(batch["input_ids"], batch["attention_mask"], batch[ROUTED_EXPERTS], strict=True):
        length = int(mask.sum())
        known = record[: length - 1].unflatten(1, (-1, top_k)).sort(dim=-1).values.numpy()
        np.testing.assert_array_equal(known, own_experts(model, ids[:length].tolist())[:-1])
        assert (record[length - 1 :] == 255).all(), "the last token was not computed"


@pytest.mark.parametrize("kind", FAMILIES)
def test_replay_closes_the_gap_of_a_server_that_routes_differently(model_dirs, kind):
    model = load(model_dirs[kind])
    add_router_noise(model, 0.05)
    batch = roll_out(model)
    mask = batch["loss_mask"].bool()
    actor = make_actor(model_dirs[kind])
    gap = {}
    for name in ("replayed", "free"):
        given = {key: value for key, value in batch.items() if name == "replayed" or key != ROUTED_EXPERTS}
        gap[name] = (actor.compute_logp(given) - batch["logprobs"])[mask].abs().mean().item()
    # What is left is the effect of the noise on the weights of the experts.
    assert gap["replayed"] < 0.5 * gap["free"], gap


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_recorded_experts(model_dirs, checkpointing):
    """Other weights choose other experts: with the record both compute the same function of the same weights."""
    batch = random_batch([9, 14, 6, 20])
    noisy = load(model_dirs["qwen3_moe"])
    add_router_noise(noisy, 0.5)
    record = np.stack([own_experts(noisy, row.tolist()) for row in batch["input_ids"]])
    batch[ROUTED_EXPERTS] = torch.from_numpy(record).flatten(2).to(torch.uint8)
    actor = make_actor(
        model_dirs["qwen3_moe"], max_tokens_per_mb=25, gradient_checkpointing=checkpointing, share_prefix=False
    )
    actor.optimizer.step = actor.optimizer.zero_grad = lambda *a, **k: None
    actor.config.optimizer.gradient_clipping = 0.0
    stats = actor.train_batch(batch, lambda out, mb: (out["logp"].sum(), {}), lambda mb: torch.tensor(1.0))
    assert stats["moe/replayed"] == 1.0 and 0 < stats["moe/changed_experts"] < 1

    reference = load(model_dirs["qwen3_moe"])
    for number, block in enumerate(expert_blocks(reference)):
        fixed = torch.from_numpy(record[:, :, number]).flatten(0, 1)

        def use(router, _, out, fixed=fixed):
            assert not router.norm_topk_prob
            return out[0], out[0].softmax(-1).gather(1, fixed), fixed

        block.router.register_forward_hook(use)
    logits = reference(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logp = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    (logp * batch["loss_mask"][:, 1:]).sum().div(stats["num_micro_batches"]).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in actor.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_of_the_routers_own_experts_are_its_own(model_dirs, kind):
    model = load(model_dirs[kind])
    hidden = torch.randn(7, model.config.hidden_size)
    for block in expert_blocks(model):
        logits, weights, index = block.router(hidden)
        torch.testing.assert_close(WEIGHTS[model.config.model_type](block.router, logits, index), weights)


def test_layers_without_experts_may_be_recorded_too(model_dirs):
    """SGLang records all layers; the first one of this model has no experts."""
    routing = make_actor(model_dirs["deepseek_v3"]).module.routing
    record = torch.arange(12).reshape(3, 4)
    assert torch.equal(routing.unpack(record), record[None, :, 2:])
    with pytest.raises(TrainingError, match="same model"):
        routing.unpack(record[:, :3])


def test_requests_for_experts_need_a_server_that_records_them(model_dirs):
    engine = Engine(ServerConfig(device="cpu", max_total_tokens=64), model=load(model_dirs["mixtral"]))
    with pytest.raises(RequestError, match="record_routing"):
        engine.check(Request([1], SamplingParams(), want_routing=True))


def test_rows_without_a_record_join_those_with_one():
    full = {"attention_mask": torch.ones(1, 2), ROUTED_EXPERTS: torch.zeros(1, 2, 4, dtype=torch.uint8)}
    _, filled = with_sample_columns([full, {"attention_mask": torch.ones(2, 3)}])
    assert filled[ROUTED_EXPERTS].shape == (2, 3, 4) and (filled[ROUTED_EXPERTS] == 255).all()
    joined = concat_padded([full, filled])[ROUTED_EXPERTS]
    assert (joined[0, :2] == 0).all() and (joined[0, 2:] == 255).all()


def test_the_balancing_loss_has_the_gradient_of_its_formula(model_dirs):
    batch, kind = random_batch([9, 14]), "mixtral"
    grads = {}
    for coef in (0.0, 0.3):
        actor = make_actor(model_dirs[kind], router_aux_loss_coef=coef)
        actor.optimizer.step = actor.optimizer.zero_grad = lambda *a, **k: None
        actor.config.optimizer.gradient_clipping = 0.0
        actor.train_batch(batch, lambda out, mb: (0.0 * out["logp"].sum(), {}), lambda mb: torch.tensor(1.0))
        grads[coef] = [block.router.weight.grad for block in expert_blocks(actor.model)]
    assert all(not grad.any() for grad in grads[0.0])
    reference = load(model_dirs[kind])
    losses, mask = [], batch["attention_mask"].bool()
    for block in expert_blocks(reference):
        # Hugging Face's function joins the layers: called for each one alone.
        block.router.register_forward_hook(
            lambda _, __, out: losses.append(load_balancing_loss_func((out[0],), 4, 2, mask.long()) / 2)
        )
    reference(batch["input_ids"], attention_mask=batch["attention_mask"])
    (0.3 * sum(losses) / len(losses)).backward()
    for grad, block in zip(grads[0.3], expert_blocks(reference), strict=True):
        torch.testing.assert_close(grad, block.router.weight.grad, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("mixtral", {"router_aux_loss_coef": 0.3}), ("deepseek_v3", {"router_bias_update_rate": 0.01})],
)
def test_rows_without_advantage_count_in_the_balance(model_dirs, kind, settings):
    """Most groups of a hard task have equal rewards. The experts of their tokens are as busy as the others."""
    batch = random_batch([9, 14, 6, 20])
    for rewards in ([0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]):
        actor = make_actor(model_dirs[kind], **settings)
        before = [
            tensor.clone() for block in expert_blocks(actor.model) for tensor in block.router.state_dict().values()
        ]
        given = batch | {"rewards": torch.tensor(rewards)}
        actor.compute_advantages(given)
        (stats,) = actor.ppo_update(given)
        assert stats["num_tokens"] == 49 and stats["idle_steps"] == 0
        after = [tensor for block in expert_blocks(actor.model) for tensor in block.router.state_dict().values()]
        assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_the_balancing_loss_has_the_same_gradient_in_float16(model_dirs):
    """There gradients of the other losses are divided by the number of tokens after the passes only."""
    added = {}
    for dtype in ("float32", "float16"):
        grads = {}
        for coef in (0.0, 0.3):
            config = engine_config(model_dirs["mixtral"], router_aux_loss_coef=coef)
            engine = FSDPLMEngine(replace(config, dtype=dtype, param_dtype=dtype, max_tokens_per_mb=16))
            engine.initialize(SPEC)
            engine.optimizer.step = engine.optimizer.zero_grad = lambda *a, **k: None
            engine.config.optimizer.gradient_clipping = 0.0
            engine.train_lm(random_batch([9, 14, 12]))
            grads[coef] = [block.router.weight.grad.float() for block in expert_blocks(engine.model)]
        added[dtype] = torch.stack(grads[0.3]) - torch.stack(grads[0.0])
    assert added["float32"].norm() > 1e-4
    assert (added["float16"] - added["float32"]).norm() < 0.05 * added["float32"].norm()


def test_correction_biases_move_towards_equal_load_and_reach_the_server(model_dirs, tmp_path):
    actor = make_actor(model_dirs["deepseek_v3"], router_bias_update_rate=0.01)
    (block,) = expert_blocks(actor.model)
    before, loads = block.router.e_score_correction_bias.clone(), []
    hook = block.router.register_forward_hook(lambda _, __, out: loads.append(out[2].flatten().bincount(minlength=8)))
    optimized = {id(p) for group in actor.optimizer.param_groups for p in group["params"]}
    assert id(block.router.e_score_correction_bias) not in optimized
    actor.train_batch(random_batch([9, 14]), lambda out, mb: (out["logp"].sum(), {}), lambda mb: torch.tensor(1.0))
    hook.remove()
    tokens = torch.stack(loads).sum(dim=0).float()
    expected = before + 0.01 * torch.sign(tokens.mean() - tokens)
    torch.testing.assert_close(block.router.e_score_correction_bias, expected)

    actor.save(SaveLoadMeta(str(tmp_path / "new")))
    actor.train_batch(random_batch([9, 14]), lambda out, mb: (out["logp"].sum(), {}), lambda mb: torch.tensor(1.0))
    engine = Engine(ServerConfig(model_path=model_dirs["deepseek_v3"], device="cpu", max_total_tokens=64)).start()
    try:
        engine.update(WeightSource.published(WeightUpdateMeta("disk", str(tmp_path / "new"), 1))).result(60)
        served = expert_blocks(engine.model)[0].router.e_score_correction_bias
        torch.testing.assert_close(served, expected)
        meta = WeightUpdateMeta("shm", str(tmp_path / "segment"), 2)
        actor.update_weights(meta)
        engine.update(WeightSource.published(meta)).result(60)
        assert not torch.equal(served, expected)
        torch.testing.assert_close(served, block.router.e_score_correction_bias)
    finally:
        engine.close()
        actor.destroy()
    with pytest.raises(ConfigError, match="has none"):
        make_actor(model_dirs["mixtral"], router_bias_update_rate=0.01)


def test_correction_biases_stay_without_an_optimizer_step(model_dirs):
    """With `max_update_kl`, which is `may_step` here, and if the gradient is not finite."""
    actor = make_actor(model_dirs["deepseek_v3"], router_bias_update_rate=0.01)
    (block,) = expert_blocks(actor.model)
    before, batch = block.router.e_score_correction_bias.clone(), random_batch([9, 14])
    for share, may_step in ((1.0, lambda stats: False), (float("nan"), None)):
        loss = lambda out, mb, share=share: (share * out["logp"].sum(), {})  # noqa: E731
        stats = actor.train_batch(batch, loss, lambda mb: torch.tensor(1.0), may_step)
        assert stats["moe/load_imbalance"] > 1
        assert torch.equal(block.router.e_score_correction_bias, before)
    actor.train_batch(batch, lambda out, mb: (out["logp"].sum(), {}), lambda mb: torch.tensor(1.0))
    assert not torch.equal(block.router.e_score_correction_bias, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_correction_biases_arrive_in_a_stream_and_as_changes(model_dirs, dtype):
    config = engine_config(model_dirs["deepseek_v3"], cls=PPOActorConfig, router_bias_update_rate=0.01)
    actor = FSDPPPOActor(replace(config, dtype=dtype))
    actor.initialize(SPEC)
    (block,) = expert_blocks(actor.model)
    config = ServerConfig(model_path=model_dirs["deepseek_v3"], device="cpu", dtype=dtype, max_total_tokens=64)
    engine = Engine(config).start()
    try:
        served = expert_blocks(engine.model)[0].router.e_score_correction_bias
        (name,) = (n for n in engine.weights.named_tensors() if n.endswith("e_score_correction_bias"))
        for version, kind in enumerate(("stream", "delta", "delta"), 1):
            actor.train_batch(
                random_batch([9, 14]), lambda out, mb: (out["logp"].sum(), {}), lambda mb: torch.tensor(1.0)
            )
            before, meta = served.clone(), WeightUpdateMeta(kind, "biases", version)
            actor.update_weights(meta)
            publisher = publish._publishers["biases"]
            publisher.hub.begin(version)
            order = publisher.orders(["server"])["server"]
            engine.update(WeightSource.streamed(order, version)).result(60)
            assert torch.equal(served, block.router.e_score_correction_bias) and not torch.equal(served, before)
            assert make_transport(meta).first_mismatch(meta, engine.fingerprints().result(60)) is None
        # Only what has changed was sent, and a bias that differs is named.
        assert publisher.board.base == 2 and engine.weights._receiver.board.base == 2
        with torch.no_grad():
            served += 1
        assert make_transport(meta).first_mismatch(meta, engine.fingerprints().result(60)) == name
    finally:
        engine.close()
        actor.destroy()


def test_correction_biases_that_do_not_fit_are_refused(model_dirs):
    config = ServerConfig(model_path=model_dirs["deepseek_v3"], device="cpu", max_total_tokens=64)
    engine = Engine(config).start()
    try:
        held = {name: tensor.clone() for name, tensor in engine.weights.named_tensors().items()}
        (name,) = (n for n in held if n.endswith("e_score_correction_bias"))
        for wrong, message in ((held[name][:-1], "has shape"), (held[name] * float("nan"), "holds NaN")):
            with pytest.raises(WeightUpdateError, match=f"{name} {message}"):
                engine.update(WeightSource.received(held | {name: wrong}, 1)).result(60)
        assert torch.equal(engine.weights.named_tensors()[name], held[name])
    finally:
        engine.close()


@pytest.mark.parametrize("format", ["dcp", "hf"])
def test_correction_biases_are_in_checkpoints(model_dirs, tmp_path, format):
    actor = make_actor(model_dirs["deepseek_v3"], router_bias_update_rate=0.01)
    (block,) = expert_blocks(actor.model)
    meta, saved = SaveLoadMeta(str(tmp_path / "saved"), format), None
    for _ in range(2):
        actor.train_batch(random_batch([9, 14]), lambda out, mb: (out["logp"].sum(), {}), lambda mb: torch.tensor(1.0))
        if saved is None:
            actor.save(meta)
            saved = block.router.e_score_correction_bias.clone()
    assert not torch.equal(block.router.e_score_correction_bias, saved)
    actor.load(meta)
    assert torch.equal(block.router.e_score_correction_bias, saved)


@pytest.mark.parametrize("settings", [{}, {"router_aux_loss_coef": 0.3}])
def test_fillers_count_neither_in_statistics_nor_in_the_balance(model_dirs, settings):
    """With more micro-batches than rows, the rest are fillers of one token."""
    found = []
    for least in (2, 5):
        actor = make_actor(model_dirs["deepseek_v3"], router_bias_update_rate=0.01, **settings)
        actor._passes.count = MicroBatchCount(least=least)
        if settings:  # a mean over micro-batches, of which fillers have no loss
            actor._module.routing.aux_loss_coef *= least / 2
        (block,) = expert_blocks(actor.model)
        stats = actor.train_batch(
            random_batch([9, 14]), lambda out, mb: (0.0 * out["logp"].sum(), {}), lambda mb: torch.tensor(1.0)
        )
        assert stats["num_micro_batches"] == least
        moe = {key: value for key, value in stats.items() if key.startswith("moe/")}
        found.append((moe, block.router.e_score_correction_bias.clone(), stats["grad_norm"]))
        actor.destroy()
    (few, few_biases, few_norm), (many, many_biases, many_norm) = found
    assert few == pytest.approx(many, rel=1e-5) and torch.equal(few_biases, many_biases)
    assert few_norm == pytest.approx(many_norm, rel=1e-4) and (few_norm > 0) == bool(settings)


def test_passes_for_log_probs_count_neither_in_statistics_nor_in_the_balance(model_dirs):
    """With `compile` they run the graph of training."""
    found = []
    for others in ([], [random_batch([30, 25, 28], seed=5)]):
        actor = make_actor(model_dirs["deepseek_v3"], router_bias_update_rate=0.01)
        # Only now: compiling takes minutes here, and the passes are the same.
        actor.config = replace(actor.config, compile=True)
        for batch in others:
            actor.compute_logp(batch)
        (block,) = expert_blocks(actor.model)
        stats = actor.train_batch(
            random_batch([9, 14]), lambda out, mb: (0.0 * out["logp"].sum(), {}), lambda mb: torch.tensor(1.0)
        )
        moe = {key: value for key, value in stats.items() if key.startswith("moe/")}
        found.append((moe, block.router.e_score_correction_bias.clone()))
        actor.destroy()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5) and torch.equal(found[0][1], found[1][1])


def test_router_statistics(model_dirs):
    actor = make_actor(model_dirs["mixtral"])
    with torch.no_grad():
        for block in expert_blocks(actor.model):
            # Equal logits: all tokens take the same two experts.
            block.router.weight.zero_()
    stats = actor.train_batch(
        random_batch([9, 14]), lambda out, mb: (out["logp"].sum(), {}), lambda mb: torch.tensor(1.0)
    )
    assert stats["moe/router_entropy"] == pytest.approx(np.log(4), rel=1e-5)
    assert stats["moe/load_imbalance"] == stats["moe/load_imbalance/max"] == 2.0
    assert stats["moe/idle_experts"] == 0.5
    assert "moe/replayed" not in stats
