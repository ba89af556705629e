"""Speculative decoding by prompt lookup: proposes tokens that followed the same n-gram earlier.

The scheduler writes a draft behind the known tokens of a sequence when few sequences run. The runner computes it in
the pass that computes the last known token, and samples every position with the random numbers of that position, as a
step of its own would. `runner.keep_accepted` keeps sampled tokens as far as the draft before them agrees with them. So
tokens and log-probs are those of ordinary sampling, up to rounding of the forward pass.
"""

import numpy as np

NGRAM = 3  # tokens at the end of a sequence that must have occurred before
MAX_SEQUENCES = 8  # no drafts while more sequences decode: a step with many tokens is bound by computation
MAX_PAUSE = 31  # steps without drafts on a GPU, while drafts gain nothing


def look_up(tokens: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` tokens after the latest earlier occurrence of the last n-gram.

    Empty without an earlier occurrence. Text that repeats with a period below `count` is continued with that period.
    """
    end = len(tokens)
    num_starts = end - NGRAM
    if num_starts < 1 or count < 1:
        return tokens[:0]
    found = tokens[:num_starts] == tokens[num_starts]
    for i in range(1, NGRAM):
        found &= tokens[i : num_starts + i] == tokens[num_starts + i]
    starts = np.flatnonzero(found)
    if len(starts) == 0:
        return tokens[:0]
    begin = starts[-1] + NGRAM
    return tokens[begin + np.arange(count) % (end - begin)]
