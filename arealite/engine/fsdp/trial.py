"""A batch of made-up tokens, with which `FSDPEngine.warm_up` compiles before the first batch."""

import torch
from transformers import PreTrainedConfig

from arealite.algo.policy_losses import LossAndStats
from arealite.api.io_struct import Batch

_LONGEST = 509
_GROUP_SIZE = 4


def trial_batch(max_tokens: int, config: PreTrainedConfig) -> Batch:
    """Return groups of answers to shared prompts that fill one micro-batch of at most `max_tokens`.

    All sizes differ: torch.compile takes sizes that are equal in its first batch to be equal in all.
    """
    longest = max(6, min(_LONGEST, max_tokens // 8))
    prompt, lengths = longest // 3, [longest - 1]
    # The second row is the longest. The first one of a group computes the prompt for all of it: its answer begins with
    # the largest token.
    while sum(lengths) + longest <= max_tokens:
        lengths.append(longest - 7 * (len(lengths) - 1) % (longest // 3))
    group_ids = torch.arange(len(lengths)) // _GROUP_SIZE
    position = torch.arange(longest)
    attention_mask = (position < torch.tensor(lengths)[:, None]).long()
    # Answers differ between rows, prompts between groups only.
    number = torch.where(position < prompt, group_ids[:, None], torch.arange(len(lengths))[:, None])
    input_ids = (number * longest + position) * 7919 % config.get_text_config().vocab_size * attention_mask
    input_ids[:, prompt] = _GROUP_SIZE - torch.arange(len(lengths)) % _GROUP_SIZE
    loss_mask = attention_mask * (position >= prompt)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask, "group_ids": group_ids}


def trial_loss(outputs: Batch, mb: Batch) -> LossAndStats:
    """Return a loss with a gradient for the output that every algorithm trains."""
    return outputs["logp" if "logp" in outputs else "values"].sum(), {}
