"""Sampling seeds: of the episodes of a run, the attempts of an episode, the calls of an attempt."""


def derive_seed(seed: int, number: int) -> int:
    """Return seed `number` of those that belong to `seed`; the same after a restart (splitmix64).

    Seeds of different numbers are unrelated: the samples of one request use the seeds that follow its own.
    """
    mask = (1 << 64) - 1
    z = (seed * 0xD1342543DE82EF95 + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    # 31 bits less room for `+ sample index`: servers take a signed 32-bit seed.
    return (z ^ (z >> 31)) % ((1 << 31) - (1 << 16))
