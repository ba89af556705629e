"""A black-box agent with two turns learns on a CPU, through its endpoint and the asynchronous executor."""

import random

import openai
import pytest

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, PPOActorConfig, ServerConfig
from arealite.api.io_struct import FinetuneSpec, WeightUpdateMeta
from arealite.engine.embedded import EmbeddedEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.weights.sync import sync_weights
from arealite.workflow.openai import AgentWorkflow
from tests.engine.engine_testing import engine_config

STEPS, PROMPTS = 30, 8


async def polite_agent(row, base_url, api_key):
    """Talks in two turns; rewarded for the share of the wanted letter in both answers."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": row["word"]}]
        said = ""
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
            said += answer.choices[0].message.content
        return said.count("a") / 12


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_two_turn_agent_learns(model_path, tokenizer, tmp_path):
    config = InferenceEngineConfig(max_head_offpolicyness=1)
    engine = EmbeddedEngine(config, ServerConfig(model_path=str(model_path), max_total_tokens=32_768))
    engine.initialize(train_batch_size=PROMPTS)
    actor = FSDPPPOActor(engine_config(model_path, PPOActorConfig, lr=5e-3, max_update_kl=None))
    actor.initialize(FinetuneSpec(1, STEPS * PROMPTS, PROMPTS))
    gconfig = GenerationHyperparameters(n_samples=4, max_new_tokens=6, ignore_eos=True)
    workflow, rng = AgentWorkflow(polite_agent, gconfig, tokenizer), random.Random(0)
    rows = [{"word": "".join(rng.choices("xyz", k=3))} for _ in range(STEPS * PROMPTS)]
    loader = [rows[i : i + PROMPTS] for i in range(0, len(rows), PROMPTS)]
    rewards = []
    try:
        for step in range(STEPS):
            batch = engine.prepare_batch(loader, workflow)
            assert batch["stats/drift_calls"].sum() == 0
            rewards.append(batch["rewards"].mean().item())
            batch["prox_logp"] = actor.compute_logp(batch)
            actor.compute_advantages(batch)
            actor.ppo_update(batch)
            actor.step_lr_scheduler()
            sync_weights(actor, engine, WeightUpdateMeta("disk", str(tmp_path), step + 1))
    finally:
        engine.destroy()
        actor.destroy()
    # A random model writes each of its 90 characters alike.
    assert sum(rewards[:3]) / 3 < 0.1 and sum(rewards[-3:]) / 3 > 0.25
