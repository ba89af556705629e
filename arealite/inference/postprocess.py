"""Appends sampled tokens to their sequences, finds finished sequences and makes their outputs.

The core calls it after every step. Batches are handled with array operations; only sequences that finish, stream or
have stop strings cost Python work.
"""

from typing import Any

import numpy as np

from arealite.inference.loading import ModelShape
from arealite.inference.runner import StepResult
from arealite.inference.sequence import SampleOutput, Sequence
from arealite.inference.slots import SlotTable
from arealite.protocol.detokenizer import IncrementalText, decode


class Postprocessor:
    """Appends step results to the slot table and sets the finish reasons."""

    def __init__(self, slots: SlotTable, shape: ModelShape, tokenizer: Any | None):
        self.slots = slots
        self.tokenizer: Any = tokenizer
        self.generated_tokens = 0
        self._is_eos = np.zeros(shape.vocab_size, bool)
        self._is_eos[list(shape.eos_ids)] = True

    def append(self, result: StepResult) -> list[Sequence]:
        """Store the tokens of one step; returns the sequences that finish with it, with `finish_reason` set."""
        slots = self.slots
        # A sequence may have finished while this step was in flight.
        alive = slots.ticket[result.slots] == result.tickets
        rows, at = result.slots[alive], result.positions[alive]
        tokens, logprobs = result.tokens[alive], result.logprobs[alive]
        slots.tokens[rows, at] = tokens
        slots.logprobs[rows, at] = logprobs
        if result.raw_logprobs is not None:
            slots.raw_logprobs[rows, at] = result.raw_logprobs[alive]
        self.generated_tokens += len(rows)
        for i in np.flatnonzero(slots.constrained[rows]):
            slots.sequence[rows[i]].constraint.accept(int(tokens[i]))
        if result.top is not None:
            self._add_top(rows, result.top[alive])

        stopped = self._is_eos[tokens] & ~slots.ignore_eos[rows]
        most = slots.num_stop_ids[rows].max(initial=0)
        if most:
            stopped |= (slots.stop_ids[rows, :most] == tokens[:, None]).any(1)
        full = at + 1 >= slots.limit[rows]
        broken = ~np.isfinite(logprobs)
        ended = []
        for i in np.flatnonzero(stopped | full | broken | slots.watched[rows]):
            seq = slots.sequence[rows[i]]
            token = int(tokens[i])
            if slots.watched[rows[i]] and not broken[i]:
                count = int(at[i] + 1 - slots.prompt_len[rows[i]])
                self._watch(seq, token, float(logprobs[i]), count, is_stop=bool(stopped[i]))
            if broken[i]:
                message = "no finite log-prob: the weights are broken, or every token is forbidden"
                seq.finish_reason = {"type": "abort", "message": message, "status_code": 500}
            elif stopped[i]:
                seq.finish_reason = {"type": "stop", "matched": token}
            elif seq.detokenizer is not None and seq.detokenizer.matched is not None:
                seq.finish_reason = {"type": "stop", "matched": seq.detokenizer.matched}
            elif full[i]:
                length = int(at[i] + 1 - slots.prompt_len[rows[i]])
                seq.finish_reason = {"type": "length", "length": length}
            else:
                continue
            slots.length[rows[i]] = at[i] + 1
            ended.append(seq)
        return ended

    def _add_top(self, rows: np.ndarray, top: np.ndarray) -> None:
        """Keep the likeliest tokens [B, 2, K] of the sequences that ask for them."""
        counts = self.slots.num_top[rows]
        for i in np.flatnonzero(counts):
            ids, logprobs = top[i, :, : counts[i]]
            # No JSON can hold -inf, which forbidden tokens have; OpenAI writes -9999.
            values = np.maximum(logprobs.view(np.float32), -9999.0).tolist()
            self.slots.sequence[rows[i]].top_logprobs.append(list(zip(ids.tolist(), values, strict=True)))

    def _watch(self, seq: Sequence, token: int, logprob: float, count: int, is_stop: bool) -> None:
        """Add the token number `count` to the text of a sequence, search stop strings, stream the token."""
        request = seq.request
        if seq.detokenizer is None and self.tokenizer is not None:
            params = request.params
            settings = params.skip_special_tokens, request.hidden_tokens, request.token_before
            seq.detokenizer = IncrementalText(self.tokenizer, params.stop, *settings)
        text = ""
        if seq.detokenizer is not None and not is_stop:
            text = seq.detokenizer.add(token, may_stop=count >= request.params.min_new_tokens)
        if request.on_progress is not None:
            top = seq.top_logprobs[-1] if request.num_top_logprobs else []
            request.on_progress(seq.index, token, logprob, text, top)

    def num_sampled(self, seq: Sequence) -> int:
        """Number of tokens sampled so far. No step may be in flight."""
        if seq.slot >= 0:
            return int(self.slots.length[seq.slot] - self.slots.prompt_len[seq.slot])
        return 0 if seq.saved_tokens is None else len(seq.saved_tokens)

    def output(self, seq: Sequence) -> SampleOutput:
        """Make the output of a sequence whose `finish_reason` is set."""
        slots, request = self.slots, seq.request
        if seq.slot >= 0:
            part = slice(int(slots.prompt_len[seq.slot]), int(slots.length[seq.slot]))
            tokens = slots.tokens[seq.slot, part].tolist()
            logprobs = slots.logprobs[seq.slot, part].tolist()
            raw = slots.raw_logprobs[seq.slot, part]
        elif seq.saved_tokens is not None:
            tokens, logprobs = seq.saved_tokens.tolist(), seq.saved_logprobs.tolist()
            raw = seq.saved_raw
        else:
            tokens, logprobs, raw = [], [], seq.saved_raw
        return SampleOutput(
            token_ids=tokens,
            logprobs=logprobs,
            raw_logprobs=raw.tolist() if request.want_raw_logprobs else None,
            version_spans=seq.version_spans(len(tokens)),
            finish_reason=seq.finish_reason,
            cached_tokens=seq.cached_tokens,
            text=self._text(seq, tokens) if request.want_text else None,
            top_logprobs=seq.top_logprobs if request.num_top_logprobs else None,
        )

    def _text(self, seq: Sequence, tokens: list[int]) -> str:
        matched = seq.finish_reason.get("matched")
        if isinstance(matched, str):
            return seq.detokenizer.text
        if matched is not None:  # the stop token is not part of the text
            tokens = tokens[:-1]
        request = seq.request
        settings = request.params.skip_special_tokens, request.hidden_tokens, request.token_before
        return decode(self.tokenizer, tokens, *settings)
