"""Configuration of generation: sampling, the client of inference servers, and the embedded server.

`cli_args` exports these classes with all others.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from arealite.api.config_field import AT_LEAST_1, NOT_NEGATIVE, PORT, SECONDS, SHARE, Range, Section
from arealite.api.config_field import choice_field as _choice
from arealite.api.config_field import help_field as _help

# A server that listens on one of these is reached from its own machine only.
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
# Sequences that the embedded server decodes at once by default: at least, and on a GPU at most. More do not
# make a training run faster, and their tokens become older.
FEW_RUNNING, MOST_RUNNING = 256, 512


@dataclass
class GenerationHyperparameters(Section):
    """Sampling parameters of one request."""

    n_samples: int = _help("Samples per prompt (the group size of GRPO).", 1, AT_LEAST_1)
    max_new_tokens: int = _help("Longest continuation, in tokens.", 512, AT_LEAST_1)
    min_new_tokens: int = _help("No stop token is sampled before this many tokens.", 0, NOT_NEGATIVE)
    temperature: float = _help("Sampling temperature; 0 is greedy.", 1.0, NOT_NEGATIVE)
    top_p: float = _help("Sample from the smallest set of tokens with this probability.", 1.0, Range(0, 1, True))
    top_k: int = _help("Sample from the k most likely tokens; 0: from all.", 0, NOT_NEGATIVE)
    min_p: float = _help("Drop tokens less likely than this share of the likeliest.", 0.0, SHARE)
    stop_token_ids: list[int] = _help("Extra token ids that end a continuation.", list, NOT_NEGATIVE)
    stop: list[str] = _help("Strings that end a continuation.", list, any_text=True)
    ignore_eos: bool = _help("Go on after the end-of-text token.", False)
    frequency_penalty: float = _help(
        "Subtracted from the logit of a token for each earlier occurrence.", 0.0, Range(-1000, 1000)
    )
    presence_penalty: float = _help("Subtracted from the logits of tokens that have occurred.", 0.0, Range(-1000, 1000))
    repetition_penalty: float = _help(
        "Divides positive logits of tokens that have occurred, and multiplies negative ones.", 1.0, Range(0, 1000, True)
    )


@dataclass
class EvalGenerationConfig(Section):
    """Sampling of evaluations, greedy by default. Stop strings and penalties are those of `gconfig`."""

    n_samples: int = _help("Answers per question, for pass@k and maj@k.", 1, AT_LEAST_1)
    temperature: float = _help("Sampling temperature; 0 is greedy.", 0.0, NOT_NEGATIVE)
    top_p: float = _help("Sample from the smallest set of tokens with this probability.", 1.0, Range(0, 1, True))
    top_k: int = _help("Sample from the k most likely tokens; 0: from all.", 0, NOT_NEGATIVE)
    max_new_tokens: int | None = _help("Longest answer, in tokens; null: gconfig.max_new_tokens.", None, AT_LEAST_1)

    def problems(self) -> Iterator[str]:
        if self.n_samples > 1 and self.temperature == 0:
            yield f"n_samples={self.n_samples} greedy answers would be equal: raise temperature, or set n_samples=1"

    def apply(self, gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
        """Return `gconfig` with these settings."""
        own = {name: value for name, value in vars(self).items() if value is not None}
        return replace(gconfig, **own)

    def statistics(self, gconfig: GenerationHyperparameters) -> dict[str, float]:
        """Return `sampling/KEY` for each key: results say how their answers were sampled."""
        made = self.apply(gconfig)
        return {f"sampling/{name}": float(getattr(made, name)) for name in vars(self)}


@dataclass
class InferenceEngineConfig(Section):
    """Asynchronous rollout: the client of the inference servers."""

    max_concurrent_rollouts: int | None = _help(
        "Most episodes in flight; null: (max_head_offpolicyness + 1) * train_dataset.batch_size.", None, AT_LEAST_1
    )
    max_head_offpolicyness: int = _help(
        "Largest staleness of a trained sample, in versions (eta); 0 is synchronous.", 0, NOT_NEGATIVE
    )
    adaptive_lead: bool = _help(
        "Generate only as far ahead as keeps the trainer busy; false: as far as max_head_offpolicyness allows.", True
    )
    num_workers: int = _help(
        "Rollout workers (processes that run episodes); 0: run them in the trainer's process.", 0, Range(0, 1024)
    )
    pause_mode: str = _choice(
        "Open requests at a weight update. abort: their KV cache is computed again; in_place: it is kept.",
        *("abort", "in_place"),
    )
    server_addrs: list[str] = _help("Servers that already run, as [host:port, ...]; then launchers start none.", list)
    weight_update: str = _choice(
        "How weights reach the servers; auto: shm if all servers can read it, else disk.",
        *("auto", "disk", "shm", "broadcast", "stream", "delta"),
    )
    setup_timeout_s: float = _help("Deadline for servers to pass their health check.", 300.0, SECONDS)
    request_timeout_s: float = _help("Deadline of one generation request.", 3600.0, SECONDS)
    request_retries: int = _help("Attempts at one request before its episode fails.", 3, AT_LEAST_1)
    health_timeout_s: float = _help(
        "A server that does not answer for so long counts as lost; its requests continue elsewhere.", 30.0, SECONDS
    )
    segment_tokens: int = _help(
        "Tokens requested at a time: a killed server loses at most so many of an answer.", 4096, AT_LEAST_1
    )
    episode_timeout_s: float = _help("Deadline of one episode; after it the episode has failed.", 7200.0, SECONDS)
    batch_timeout_s: float = _help("Deadline of one prepare_batch.", 7200.0, SECONDS)
    max_failed_episodes: int = _help("Stop the run after this many failed episodes in a row.", 64, AT_LEAST_1)
    routing_replay: bool = _help(
        "Mixtures of experts: train each token with the experts that it took on the server (embedded, SGLang).", False
    )
    dump_rollouts: bool = _help("Keep rollouts in run.sqlite, as text and tokens.", True)
    max_dump_tokens: int = _help(
        "Tokens of each training batch (and of each evaluation) kept there, in whole groups, up to 128 answers.",
        16_384,
        NOT_NEGATIVE,
    )

    def problems(self) -> Iterator[str]:
        for address in self.server_addrs:
            if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):[0-9]{1,5}", address):
                yield f"server_addrs has {address!r}: write host:port, without http://"
            if self.server_addrs.count(address) > 1:
                yield f"server_addrs has {address} more than once"


@dataclass
class ServerConfig(Section):
    """The embedded inference server."""

    model_path: str = _help("Hugging Face folder or hub name of the model.", "")
    dtype: str = _help(
        "float32, bfloat16, float16; auto: float32 on CPU and beside a trainer in float32, else bfloat16.", "auto"
    )
    device: str = _help("cpu, cuda, or auto (cuda if there is one).", "auto")
    tensor_parallel: int = _help("Devices (on CPU, processes) of one model.", 1, Range(1, 1024))
    host: str = _help("Address to listen on; anything but loopback needs `api_key`.", "127.0.0.1")
    port: int = _help("Port to listen on; 0 takes a free one.", 0, PORT)
    api_key: str | None = _help("Bearer token that requests must carry.", None, secret=True)
    max_running_requests: int | None = _help(
        "Sequences decoded at once; null: 256, and on a GPU up to 512 if the KV cache has 1024 tokens for each.",
        None,
        AT_LEAST_1,
    )
    max_total_tokens: int | None = _help("KV cache size in tokens; null: what fits.", None, AT_LEAST_1)
    context_length: int | None = _help(
        "Longest prompt plus continuation, in tokens; null: the model's.", None, AT_LEAST_1
    )
    block_size: int = _help("Tokens per KV cache block; 0: 16, with kv_cache_dtype=fp8 64.", 0, NOT_NEGATIVE)
    max_prefill_tokens: int = _help("Prompt tokens processed in one step.", 4096, AT_LEAST_1)
    kv_cache_dtype: str = _help(
        "auto (that of the weights), or fp8 on CUDA: about half the memory, faster at long contexts.", "auto"
    )
    weight_dtype: str = _help(
        "auto (that of `dtype`), or fp8 on CUDA: linear layers and experts take half the memory.", "auto"
    )
    mem_fraction: float = _help(
        "Share of the memory besides weights for the KV cache; halved if a trainer shares the GPU.",
        0.8,
        Range(0, 1, True),
    )
    keep_prefix_across_updates: bool = _help(
        "Reuse cached prefixes after a weight update: saves prefill, but their keys and values are those of older "
        "weights, so log-probs differ from the trainer's.",
        False,
    )
    record_routing: bool = _help(
        "Record the experts of each token, for requests with return_routed_experts (set by rollout.routing_replay).",
        False,
    )
    draft_tokens: int = _help(
        "Speculative decoding by prompt lookup: most tokens proposed for a sequence; 0: off.", 0, Range(0, 64)
    )
    deterministic: bool = _help("The same seed gives the same tokens in any batch (slower).", False)
    # The launcher adds 2**32 for each further server; the engine counts up from it in units of 2**20.
    seed: int = _help("Seed of requests that have none.", 0, Range(0, 2**44 - 1))
    join: str = _help("Run directory of a running job that this server joins.", "")
    weight_folders: list[str] = _help("Folders that weights are loaded from; empty: any of this user.", list)
    image_folder: str = _help("Folder whose images requests may name as file:// URLs; empty: none.", "")

    def problems(self) -> Iterator[str]:
        # A server that joins a job takes the job's key.
        if self.host not in LOOPBACK_HOSTS and not self.api_key and not self.join:
            yield f"server.host={self.host} is not loopback: set server.api_key too"
        if self.api_key and not self.api_key.isascii():
            yield "server.api_key is sent in an HTTP header: use ASCII characters only"
        for key in ("kv_cache_dtype", "weight_dtype"):
            if (value := getattr(self, key)) not in ("auto", "fp8"):
                yield f"server.{key} is {value!r}: use auto or fp8"
            if value == "fp8" and self.device == "cpu":
                yield f"server.{key}=fp8 works on CUDA only: use auto with server.device=cpu"
        if self.draft_tokens and self.deterministic:
            yield (
                "server.deterministic computes every token alone, server.draft_tokens several at once: use one of them"
            )
