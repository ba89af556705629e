"""What does the record for `arealite replay` cost a step?

    python benchmark/record.py [--prompts 32] [--group 8] [--answer 512]

Records batches of made-up answers, with the checksums of a model. Prints a table and one JSON line: the CPU time of the
trainer's thread and of the writer's, and the bytes of a step.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import describe_machine, print_table
from transformers import Qwen2Config, Qwen2ForCausalLM

from arealite.api.io_struct import ModelResponse
from arealite.api.trajectory import Trajectory
from arealite.core.episode import Episode, EpisodeId, check_trajectories, join_trajectories
from arealite.core.record.recorder import Recorder
from arealite.core.record.step_file import step_path
from arealite.utils.request_log import LoggedRequest
from arealite.weights import checksums

HIDDEN, LAYERS = 1024, 12


def make_episode(number: int, group: int, prompt: int, answer: int) -> Episode:
    """Make a finished episode of one prompt and `group` answers."""
    ids = torch.randint(0, 30_000, (prompt,)).tolist()
    responses = []
    for _ in range(group):
        length = int(torch.randint(answer // 2, answer + 1, ()))
        logprobs = torch.randn(length).abs().neg().tolist()
        tokens = torch.randint(0, 30_000, (length,)).tolist()
        responses.append(ModelResponse(ids, tokens, logprobs, [number % 3] * length, "stop"))
    rows = [Trajectory().observe(ids).add(response).reward(1.0) for response in responses]
    episode = Episode(EpisodeId("stream", number), {"prompt": "made up"}, None)
    episode.result = check_trajectories(Trajectory.join(rows))
    episode.log = [LoggedRequest(ids, number, responses, True)]
    return episode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--answer", type=int, default=512, help="longest answer, in tokens")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    shape = Qwen2Config(hidden_size=HIDDEN, num_hidden_layers=LAYERS, vocab_size=32_000, intermediate_size=4 * HIDDEN)
    model = Qwen2ForCausalLM(shape)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), 1 << 30)
        recorder.begin(0, {})
        trainer_s, tokens = [], 0
        in_all_s, in_main_s = time.process_time(), time.thread_time()
        for step in range(args.steps):
            episodes = [make_episode(i, args.group, 64, args.answer) for i in range(args.prompts)]
            batch = join_trajectories(episodes)
            tokens = int(batch["attention_mask"].sum())
            start = time.thread_time()
            recorder.add_batch(episodes, batch)
            recorder.commit(step, {"stats": [], "weights": {"actor": checksums.take(model)}})
            trainer_s.append(time.thread_time() - start)
        recorder.close()
        writer_s = time.process_time() - in_all_s - (time.thread_time() - in_main_s)
        size = step_path(Path(folder), args.steps - 1).stat().st_size
    results = {
        "tokens": tokens,
        "million_parameters": round(sum(p.numel() for p in model.parameters()) / 1e6),
        "trainer_cpu_ms": round(1e3 * statistics.median(trainer_s), 1),
        "writer_cpu_ms": round(1e3 * writer_s / args.steps, 1),
        "kilobytes": round(size / 1e3, 1),
        "bytes_per_token": round(size / tokens, 2),
    }
    print_table(["of one step", "value"], [[key, str(value)] for key, value in results.items()])
    print(json.dumps({"benchmark": "record", **results, **describe_machine()}))


if __name__ == "__main__":
    main()
