"""Speculative decoding by prompt lookup: proposes tokens that followed the same n-gram earlier.

A pass computes the last known token of a sequence and a draft behind it. It samples every position with the random
numbers of that position, as a step of its own would. Sampled tokens are kept as far as the draft before them agrees
with them. So tokens and log-probs are those of ordinary sampling, up to rounding of the forward pass.

`planning` says which steps have drafts. On CPU the scheduler looks them up (`HostDrafts`, `runner.keep_accepted`), on
CUDA kernels do (`cuda.verify`).
"""

import numpy as np

NGRAM = 3  # tokens at the end of a sequence that must have occurred before
MAX_SEQUENCES = 8  # no drafts while more sequences decode: a step with many tokens is bound by computation


def look_up(tokens: np.ndarray, count: int, shortest: int = NGRAM) -> np.ndarray:
    """Return the `count` tokens after the latest earlier occurrence of the last n-gram.

    Empty without an earlier occurrence. With `shortest`, shorter n-grams are tried if the longer ones are new. Text
    that repeats with a period below `count` is continued with that period.
    """
    end = len(tokens)
    if count < 1:
        return tokens[:0]
    for size in range(min(NGRAM, end - 1), shortest - 1, -1):
        num_starts = end - size
        found = tokens[:num_starts] == tokens[num_starts]
        for i in range(1, size):
            found &= tokens[i : num_starts + i] == tokens[num_starts + i]
        starts = np.flatnonzero(found)
        if len(starts):
            begin = starts[-1] + size
            return tokens[begin + np.arange(count) % (end - begin)]
    return tokens[:0]
