"""docs/architecture.md is true: every step that it lists exists, and one real training step runs them in that order."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from arealite.api.cli_args import (
    DatasetConfig,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
    ServerConfig,
)
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset import StatefulDataLoader
from arealite.engine.embedded import EmbeddedEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.weights.sync import make_weight_meta, sync_weights
from arealite.workflow.rlvr import RLVRWorkflow
from tests.source_trees import tree_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STEP = re.compile(r"^\d+\. \[`([\w.]+)`\]\(\.\./(arealite/[\w/]+\.py)\)", re.MULTILINE)
# (file, qualified name)
Step = tuple[str, str]


def steps_of(title: str) -> list[Step]:
    """Return the numbered steps of one section."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return [(file, name) for name, file in STEP.findall(section)]


BATCH, WEIGHTS = steps_of("A batch"), steps_of("A weight update")


@pytest.mark.parametrize(("file", "name"), sorted({*BATCH, *WEIGHTS}))
def test_every_step_is_defined_where_the_page_says(file, name):
    body: Any = tree_of(ROOT / file)
    for part in name.split("."):
        found = [node for node in body.body if getattr(node, "name", None) == part]
        assert found, f"{file} does not define {name}"
        body = found[0]


def test_every_link_of_the_page_exists():
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


@contextmanager
def recorded_calls(wanted: set[Step]) -> Iterator[list[Step]]:
    """Record the first call of each wanted function, in all threads started meanwhile. Clear the list to start over."""
    calls: list[Step] = []
    names = {name for _, name in wanted}

    def note(frame: FrameType, _event: str, _: object) -> None:
        code = frame.f_code
        if code.co_qualname in names:
            step = next((s for s in wanted if s[1] == code.co_qualname and code.co_filename.endswith(s[0])), None)
            if step is not None and step not in calls:
                calls.append(step)

    # Called when a function is entered; it returns no tracer for the lines of the function.
    threading.settrace(note)
    sys.settrace(note)
    try:
        yield calls
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def length_reward(prompt, completion, prompt_ids, completion_ids, **row) -> float:
    return float(sum(completion_ids) % 7)


def test_one_training_step_runs_the_steps_in_their_order(model_path, tokenizer, tmp_path):
    actor = FSDPPPOActor(
        PPOActorConfig(path=str(model_path), dtype="float32", device="cpu", optimizer=OptimizerConfig(lr=1e-3))
    )
    actor.initialize(FinetuneSpec(1, 8, 4))
    data = DatasetConfig(path="none", batch_size=4)
    loader = StatefulDataLoader([{"prompt": f"{i}+{i}="} for i in range(8)], data, seed=1)
    with recorded_calls({*BATCH, *WEIGHTS}) as calls:
        rollout = EmbeddedEngine(
            InferenceEngineConfig(weight_update="disk"),
            ServerConfig(model_path=str(model_path), device="cpu", dtype="float32"),
        )
        rollout.initialize(train_batch_size=4)
        # The engine generates a few tokens at its start, to compare log-probs with those of the model.
        calls.clear()
        gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=4)
        workflow = RLVRWorkflow(length_reward, gconfig, tokenizer)
        batch = rollout.prepare_batch(loader, workflow)
        batch["prox_logp"] = actor.compute_logp(batch)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        config = GRPOConfig(actor=actor.config, rollout=rollout.config)
        sync_weights(actor, rollout, make_weight_meta(config, tmp_path, rollout).with_version(1))
    rollout.destroy()
    actor.destroy()
    for walk in (BATCH, WEIGHTS):
        assert [step for step in calls if step in walk] == walk
