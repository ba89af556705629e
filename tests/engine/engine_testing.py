"""What the engine tests share: tiny models, random batches, and `run_ranks`."""

import os
import socket
import traceback

import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig
from arealite.api.io_struct import FinetuneSpec

VOCAB = 64
_SIZE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {
    "qwen2": lambda: Qwen2Config(**_SIZE, tie_word_embeddings=True),
    "qwen2_window": lambda: Qwen2Config(
        **_SIZE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SIZE, head_dim=16),
    "llama": lambda: LlamaConfig(**_SIZE, tie_word_embeddings=False),
}
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=1)


def make_model(path, kind: str) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[kind]())
    model.save_pretrained(path)
    return str(path)


def engine_config(
    path: str, cls=TrainEngineConfig, lr: float = 1e-2, **kwargs
) -> TrainEngineConfig:
    optimizer = OptimizerConfig(lr=lr, warmup_steps_proportion=0.0, weight_decay=0.1)
    return cls(path=path, dtype="float32", device="cpu", optimizer=optimizer, **kwargs)


def random_batch(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """A padded batch with everything a policy update needs; about two thirds of each row are trained."""
    g = torch.Generator().manual_seed(seed)
    rows, longest = len(lengths), max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    prompt = (torch.tensor(lengths) // 3).clamp(min=1)
    trained = mask & (torch.arange(longest) >= prompt[:, None])
    ids = torch.randint(3, VOCAB, (rows, longest), generator=g) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "loss_mask": trained.long(),
        "logprobs": (-3 + 0.5 * torch.randn(rows, longest, generator=g)) * trained,
        "versions": torch.where(trained, 0, -1),
        "rewards": torch.rand(rows, generator=g),
        "group_ids": torch.arange(rows) // 2,
    }


def run_ranks(function, world_size: int, *args, timeout_s: float = 120.0) -> list:
    """`function(rank, *args)` on `world_size` gloo ranks in fresh processes; their results in rank order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(function, rank, world_size, port, queue, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        answers = dict(_checked(queue.get(timeout=timeout_s)) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    return [answers[rank] for rank in range(world_size)]


def _checked(answer):
    rank, result, error = answer
    assert error is None, f"rank {rank} failed:\n{error}"
    return rank, result


def _rank_main(function, rank, world_size, port, queue, args):
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )  # fmt: skip
    try:
        result = function(rank, *args)
        # Tensors travel as numbers: a tensor in a queue needs its sender alive.
        queue.put((rank, result, None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
        raise
