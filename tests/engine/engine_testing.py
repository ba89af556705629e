"""What the engine tests share: tiny models, random batches, and `run_ranks`."""

import os
import pickle
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Client, Listener, wait

import torch
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig
from arealite.api.io_struct import FinetuneSpec
from tests import warm_python
from tests.machines import Machine

VOCAB = 64
_SIZE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_THREE = _SIZE | {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
_LATENT = dict(
    q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, n_routed_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=24, n_group=2, topk_group=1, n_shared_experts=1,
    first_k_dense_replace=1, initializer_range=0.1,
)  # fmt: skip
MODELS = {
    "qwen2": lambda: Qwen2Config(**_SIZE, tie_word_embeddings=True),
    "qwen2_window": lambda: Qwen2Config(**_SIZE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**_SIZE, head_dim=16),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SIZE, head_dim=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
    "mixtral": lambda: MixtralConfig(**_SIZE, num_local_experts=4),
    "gpt_oss": lambda: GptOssConfig(
        **_SIZE, head_dim=16, sliding_window=5, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.1
    ),
    "deepseek_v3": lambda: DeepseekV3Config(**_SIZE | {"num_key_value_heads": 4}, **_LATENT),
    "deepseek_three_heads": lambda: DeepseekV3Config(**_THREE | {"num_key_value_heads": 3}, **_LATENT),
    "three_heads": lambda: Qwen2Config(**_THREE, tie_word_embeddings=True),
    "three_heads_window": lambda: Qwen2Config(**_THREE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "llama": lambda: LlamaConfig(**_SIZE, tie_word_embeddings=False),
    # Scales what it looks up in the embedding.
    "gemma": lambda: GemmaConfig(**_SIZE, head_dim=8),
    # Its plan for tensor ranks leaves out the norms of single heads.
    "glm4_moe": lambda: Glm4MoeConfig(
        **_SIZE, head_dim=8, use_qk_norm=True, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2
    ),
    # Its activation has parameters.
    "apertus": lambda: ApertusConfig(**_SIZE),
}
# Models with randomness in training mode: dropout, layer drop, router noise.
NOISY_MODELS = {
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    ),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=32, dropout=0.1, layerdrop=0.3,
    ),
    "mixtral_noise": lambda: MixtralConfig(
        **_SIZE, num_local_experts=4, router_jitter_noise=0.5, attention_dropout=0.1
    ),
}  # fmt: skip
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=1)


def make_model(path, kind: str) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config((MODELS | NOISY_MODELS)[kind]())
    for name, value in model.state_dict().items():
        if name.endswith(("_bias", ".sinks")):
            # Zeros after initialization.
            torch.nn.init.normal_(value, std=0.1)
    model.save_pretrained(path)
    return str(path)


def engine_config(path: str, cls=TrainEngineConfig, lr: float = 1e-2, **kwargs) -> TrainEngineConfig:
    # Adam divides by √v + eps: with the usual 1e-8 a gradient of rounding errors alone would still make a full step,
    # and no two ways of adding up the same numbers could be compared.
    optimizer = OptimizerConfig(lr=lr, warmup_steps_proportion=0.0, weight_decay=0.1, eps=1e-4)
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


class Ranks:
    """Gloo ranks in processes of their own that stay alive between tests; evenly on `machines`, if given."""

    def __init__(self, world_size: int, machines: Sequence[Machine] = ()):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.num_tasks = 0
        self.processes, self.connections = [], []
        with Listener(family="AF_UNIX") as listener:
            for rank in range(world_size):
                env = {
                    **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": machines[0].address if machines else "127.0.0.1", "MASTER_PORT": str(port),
                    # Tests send functions of their own modules.
                    "PYTHONPATH": os.pathsep.join(sys.path),
                }  # fmt: skip
                place = machines[rank * len(machines) // world_size].python if machines else []
                command = [*place, "-m", "tests.engine.engine_testing", listener.address]
                self.processes.append(warm_python.start(command, env=env, stdout=1, stderr=2))
                self.connections.append(listener.accept())

    def run(self, function, *args, timeout_s: float = 120.0) -> list:
        """Call `function(rank, *args)` on every rank. Returns the results in rank order."""
        self.num_tasks += 1
        for connection in self.connections:
            connection.send_bytes(pickle.dumps((self.num_tasks, function, args)))
        answers = {}
        while len(answers) < len(self.connections):
            missing = [c for rank, c in enumerate(self.connections) if rank not in answers]
            ready = wait(missing, timeout_s)
            assert ready, f"no answer within {timeout_s:g} s"
            for connection in ready:
                number, result, error = pickle.loads(connection.recv_bytes())
                if number == self.num_tasks:  # else the answer to a test that has timed out
                    rank = self.connections.index(connection)
                    assert error is None, f"rank {rank} failed:\n{error}"
                    answers[rank] = result
        return [answers[rank] for rank in range(len(self.connections))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)


def _rank_main(address: str) -> None:
    connection = Client(address)
    while True:
        number, function, args = pickle.loads(connection.recv_bytes())
        try:
            answer = (number, function(int(os.environ["RANK"]), *args), None)
        except BaseException:
            answer = (number, None, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _rank_main(sys.argv[1])
