"""What the parts of a run cost in seconds: decoding, prompts, training, weight updates, rewards.

Made from hardware tables (`hardware`), a recorded run (`recorded`) or a measurement (`calibrate`); used by `simulate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from arealite.core.foresee.step_curve import StepCurve


@dataclass(frozen=True)
class ServerCost:
    """One inference server.

    A decode step of b sequences with c tokens of context in all takes
    `step_s + max(weights_s, b * compute_s) + b * sequence_s + c * context_s + b * d * spread_s`, where d is the
    standard deviation of their lengths. If `curve` is known, it says all but the last two.
    """

    step_s: float
    # Reading the weights once; arithmetic of one sequence, which hides behind it as long as it is shorter.
    weights_s: float = 0.0
    compute_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    spread_s: float = 0.0
    # Seconds per prompt token, per step that computes prompts, and per request besides its tokens.
    prompt_s: float = 0.0
    pass_s: float = 0.0
    request_s: float = 0.0
    max_running: int = 256
    # Size of the KV cache, in tokens.
    cache_tokens: float = float("inf")
    # Measured seconds of a step by its sequences.
    curve: StepCurve | None = None

    def base_s(self, num_sequences: float) -> float:
        """Return the seconds of a step without those that depend on the context."""
        if self.curve is not None:
            return self.curve.at(num_sequences)
        memory_or_compute = max(self.weights_s, num_sequences * self.compute_s)
        return self.step_s + memory_or_compute + num_sequences * self.sequence_s

    def tokens_per_s(self, num_sequences: float, context: float) -> float:
        """Return the speed with so many sequences, each with `context` tokens on average."""
        return num_sequences / (self.base_s(num_sequences) + num_sequences * context * self.context_s)


@dataclass(frozen=True)
class TrainCost:
    """A training step: `num_replicas` data-parallel replicas share the groups of a batch by tokens."""

    token_s: float
    # Attention: seconds per pair of tokens of a sequence.
    pair_s: float = 0.0
    step_s: float = 0.0
    num_replicas: int = 1

    def seconds(self, groups: Sequence[Sequence[float]]) -> float:
        """Return the seconds of a step over these groups of sequences, given by their tokens."""
        work = sorted((sum(n * self.token_s + n * n * self.pair_s for n in group) for group in groups), reverse=True)
        if self.num_replicas == 1:
            return self.step_s + sum(work)
        # The longest group to the replica with the least work, as `split_groups` does.
        replicas = [0.0] * self.num_replicas
        heapify(replicas)
        for seconds in work:
            heapreplace(replicas, replicas[0] + seconds)
        return self.step_s + max(replicas)


@dataclass(frozen=True)
class UpdateCost:
    """A weight update: the trainer publishes, then all servers load at once."""

    publish_s: float = 0.0
    load_s: float = 0.0
    # For how long generation stops, if servers load while they generate.
    pause_s: float = 0.0
    # Whether they do; else requests are interrupted for all of `load_s` (`rollout.pause_mode`).
    is_swap: bool = True
