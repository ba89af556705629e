"""Hardware tables and the share of them that this package reaches.

Figures of a device are its data sheet's, dense bf16. The efficiencies were fitted to measurements on one H200
(`benchmark/results/inference.md`, `training_h200.txt`): 0.5B, 1.5B and 7B shapes, 64 to 1,024 sequences.
"""

from dataclasses import dataclass

from arealite.api.errors import ConfigError
from arealite.utils.config_help import nearest_text


@dataclass(frozen=True)
class Gpu:
    """One device: FLOP/s in bf16; bytes/s of its memory, of links in a node, of its share of the network."""

    name: str
    flops: float
    bandwidth: float
    memory_gib: float
    link: float
    network: float = 50e9

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * 2**30


_TABLE = (
    Gpu("B200", 2250e12, 8.0e12, 180, 900e9),
    Gpu("H200", 989e12, 4.8e12, 140, 450e9),
    Gpu("H100", 989e12, 3.35e12, 80, 450e9),
    Gpu("H800", 989e12, 3.35e12, 80, 200e9),
    Gpu("H20", 148e12, 4.0e12, 96, 450e9),
    Gpu("A100", 312e12, 2.0e12, 80, 300e9, 25e9),
    Gpu("A100-40", 312e12, 1.55e12, 40, 300e9, 25e9),
    Gpu("A800", 312e12, 2.0e12, 80, 200e9, 25e9),
    Gpu("MI300X", 1307e12, 5.3e12, 192, 400e9),
    Gpu("L40S", 362e12, 0.864e12, 48, 32e9, 12e9),
    Gpu("A10", 125e12, 0.6e12, 24, 32e9, 12e9),
    Gpu("RTX4090", 165e12, 1.0e12, 24, 32e9, 12e9),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}


def find_gpu(name: str) -> Gpu:
    """Return a device of the table by its name, in any case."""
    found = GPUS.get(name.upper())
    if found is None:
        near = nearest_text(name.upper(), list(GPUS))
        raise ConfigError(f"unknown GPU {name!r}{f' ({near})' if near else ''}; known: {', '.join(GPUS)}")
    return found


@dataclass(frozen=True)
class Efficiency:
    """What an inference backend costs besides the roofline, when log-probs are returned over HTTP."""

    # Seconds of a step, and of each of its sequences, that the host and sampling need.
    step_s: float
    sequence_s: float
    # Shares of peak FLOP/s and bandwidth.
    compute: float = 0.6
    weights: float = 0.7
    cache: float = 0.65
    prefill: float = 0.5


BACKENDS = {
    "embedded": Efficiency(0.6e-3, 2.5e-6),
    "sglang": Efficiency(1.2e-3, 10e-6),
    "vllm": Efficiency(2.5e-3, 32e-6),
}
# Share of peak FLOP/s in training, and fixed seconds of a step (optimizer, advantages, statistics).
TRAIN_EFFICIENCY = 0.42
TRAIN_STEP_S = 0.15
# Seconds of one all-reduce however small it is.
REDUCE_S = 12e-6
# Share of a link that collectives reach.
LINK_EFFICIENCY = 0.7
GPUS_PER_NODE = 8
