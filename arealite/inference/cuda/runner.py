"""Runs planned steps on a GPU; the host is not on the critical path.

The state of all slots (last token, position, block table, sampling parameters) lives on the device. A decode step is
CUDA graphs for its batch size, with layers, sampling, log-probs and the advance of that state, so several steps can be
queued before the first result is read. Prefills are graphs for token counts. The host sends changes and reads tokens a
few steps later.

Legend: S slots (row S is padding), B rows of a step, N tokens of a prefill, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from arealite.api.cli_args import ServerConfig
from arealite.api.generation_args import MOST_RUNNING
from arealite.inference.cuda import ops as cuda_ops
from arealite.inference.cuda.cache import DeviceCache
from arealite.inference.cuda.changes import send_changes
from arealite.inference.cuda.extras import SamplingExtras
from arealite.inference.cuda.fused_model import make_decoder
from arealite.inference.cuda.graphs import GraphSet, decode_sizes, prefill_sizes
from arealite.inference.cuda.images import ImagePrefill
from arealite.inference.cuda.ops import DeviceBatch
from arealite.inference.cuda.packing import pack_chunks
from arealite.inference.cuda.results import likeliest, read_result, to_host
from arealite.inference.cuda.runs import SHORT_CONTEXT, choose_tuning, is_faster_in_runs, plan_runs
from arealite.inference.cuda.verify import DraftVerifier
from arealite.inference.drafts.lookup import MAX_SEQUENCES
from arealite.inference.fp8 import stage_pairs
from arealite.inference.loading import ModelShape, choose_cache_dtype
from arealite.inference.routing import RoutingRecord
from arealite.inference.runner import Runner, Step, cache_bytes, count_blocks, count_slots
from arealite.inference.scheduler import Chunk, StepPlan
from arealite.inference.slots import Journal, SlotTable
from arealite.inference.vision import check_served, is_served
from arealite.inference.weights import Pairs

_MAX_CHUNKS = 256  # sequences in one prefill pass
_COST_ON_RANKS = 0.3  # of steps with drafts in tensor parallel (see `Runner.measure_drafts`), not measured


class CudaRunner(Runner):
    """The model, its paged KV cache and the slots' state on one device."""

    max_in_flight = 3

    def __init__(self, model: PreTrainedModel, shape: ModelShape, config: ServerConfig):
        self.model, self.shape, self.config = model, shape, config
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.on_gpu = self.device.type == "cuda"  # Triton's interpreter runs the same code on the CPU
        self.block_size = config.block_size
        max_len = shape.context_length
        self.decoder = make_decoder(model, max_len)
        self.images: ImagePrefill | None = None
        if is_served(model.config):
            check_served(model.config, config, self.device)
            self.images = ImagePrefill(model, self.decoder)
        heads = model.config.get_text_config().num_attention_heads
        self.tile_tokens = cuda_ops.tokens_per_tile(heads // shape.num_kv_heads)
        slots = config.max_running_requests or MOST_RUNNING
        # In float32: bfloat16 would round a logit of 20, and its log-prob, to eighths.
        logits = torch.zeros(slots, shape.vocab_size, dtype=torch.float32, device=self.device)
        cache_type = choose_cache_dtype(config, self.dtype)
        self.num_blocks = count_blocks(config, shape, cache_type, self._free_bytes(), slots) + 1
        self.num_slots = count_slots(config, self.num_blocks)
        self.logits = logits if self.num_slots == slots else logits[: self.num_slots].clone()
        del logits
        self.cache = DeviceCache(shape, self.num_blocks, config.block_size, cache_type, self.device)
        self.group_size = heads // shape.num_kv_heads
        self.tuning = choose_tuning(cache_type.itemsize, self.group_size, shape.head_dim)
        # Runs depend on the lengths of all sequences, so they change the order of sums with the batch.
        self.has_runs = not config.deterministic and shape.context_length > SHORT_CONTEXT
        self.cache_item = cache_type.itemsize
        if config.record_routing:
            self.routing = RoutingRecord(model, self.num_blocks, config.block_size)
        self.stream = torch.cuda.Stream() if self.on_gpu else None
        self.stage_stream = torch.cuda.Stream() if self.on_gpu else None

    # ------------------------------------------------------------------------------------------- set-up

    @torch.inference_mode()
    def attach(self, slots: SlotTable) -> None:
        """Make device copies of this table and capture the graphs."""
        self.slots = slots
        self.extras: SamplingExtras | None = None  # made for the first request that needs it
        self.journal = slots.journal = Journal()
        if self.images is not None:
            self.images.attach(slots)
        s, device = slots.num_slots, self.device
        self.table = torch.zeros(s + 1, slots.block_table.shape[1], dtype=torch.int32, device=device)
        self.last_token = torch.zeros(s + 1, dtype=torch.int32, device=device)
        self.position = torch.zeros(s + 1, dtype=torch.int32, device=device)
        self.temperature = torch.ones(s + 1, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(s + 1, 2, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(s + 1, dtype=torch.int32, device=device)
        self.top_p = torch.ones(s + 1, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(s + 1, dtype=torch.float32, device=device)
        self.thresholds = torch.full((s,), float("-inf"), device=device)
        self.truncated = False  # whether `thresholds` hold anything but -inf
        self.rows = torch.full((s,), s, dtype=torch.int32, device=device)
        self.sent_rows = np.full(s, s, np.int32)
        self.out = torch.zeros(3, s, dtype=torch.int32, device=device)  # token, log-prob, raw log-prob
        self.out_logprobs = self.out.view(torch.float32)[1]
        self.out_raw = self.out.view(torch.float32)[2]
        # The bits of a product depend on its shape: deterministic mode uses one shape for every token.
        fixed = self.config.deterministic
        self.decode_sizes = [s] if fixed else decode_sizes(s)
        self.prefill_sizes = [] if fixed else prefill_sizes(self.config.max_prefill_tokens)
        self.prefill_inputs = {
            n: torch.zeros(3 * n + 2 * self._num_tiles(n), dtype=torch.int32, device=device) for n in self.prefill_sizes
        }
        for n, inputs in self.prefill_inputs.items():
            inputs[n : 2 * n] = s
        graphs = GraphSet(self.stream)
        for n in reversed(self.prefill_sizes):
            graphs.add(("prefill", n), lambda n=n: self._prefill_pass(n))
        for b in reversed(self.decode_sizes):
            graphs.add(("layers", b), lambda b=b: self._layers(b))
            if self.has_runs:
                graphs.add(("long layers", b), lambda b=b: self._layers(b, is_long=True))
            graphs.add(("truncate", b), lambda b=b: self._truncate(b))
            graphs.add(("sample", b), lambda b=b: self._sample(b))
        self.graphs = graphs
        self.verifier = DraftVerifier(self) if self.config.draft_tokens else None

    def measure_drafts(self) -> np.ndarray:
        assert self.verifier is not None
        # All ranks must plan the same steps.
        alone = self.config.tensor_parallel == 1
        return self.verifier.measure() if alone else np.full(MAX_SEQUENCES + 1, _COST_ON_RANKS)

    def _prefill_pass(self, n: int) -> None:
        ids, batch = self._prefill_batch(n)
        with self._recording(batch):
            self.decoder.hidden(ids, batch)

    def _prefill_batch(self, n: int) -> tuple[torch.Tensor, DeviceBatch]:
        """Token ids [N] and the batch of a prefill."""
        inputs, tiles = self.prefill_inputs[n], self._num_tiles(n)
        ids, rows, positions = inputs[: 3 * n].view(3, n)
        first, count = inputs[3 * n :].view(2, tiles)
        return ids, self.make_batch(rows, positions, tile_first=first, tile_count=count)

    def make_batch(self, rows: torch.Tensor, positions: torch.Tensor, **how: Any) -> DeviceBatch:
        """A forward pass of tokens in slots `rows` at `positions`."""
        cache = self.cache
        rope = None if self.images is None else self.images.rope(rows, positions)
        return DeviceBatch(cache.keys, cache.values, self.table, rows, positions, rope, scales=cache.scales, **how)

    def _layers(self, b: int, is_long: bool = False) -> None:
        """Logits of the next token of each row; `is_long` divides long contexts over the whole device."""
        rows = self.rows[:b]
        positions = self.position.index_select(0, rows)
        ids = self.last_token.index_select(0, rows)
        plan = plan_runs(positions, self.shape.num_kv_heads, self.tuning) if is_long else None
        batch = self.make_batch(rows, positions, splits=self._splits(b), plan=plan)
        self.decode(ids, batch, self.logits[:b])

    def decode(self, ids: torch.Tensor, batch: DeviceBatch, logits: torch.Tensor) -> None:
        """Write the logits of tokens `ids` to `logits`, and their experts to the record."""
        with self._recording(batch):
            self.decoder.logits(ids, batch, logits)

    def _recording(self, batch: DeviceBatch) -> AbstractContextManager[None]:
        if self.routing is None:
            return nullcontext()
        block = self.table[batch.rows, batch.positions // self.block_size]
        return self.routing.writing(block * self.block_size + batch.positions % self.block_size)

    def _truncate(self, b: int) -> None:
        cuda_ops.find_thresholds(
            self.logits[:b], self.rows[:b], self.temperature, self.top_k, self.top_p, self.min_p, self.thresholds[:b]
        )

    def _sample(self, b: int) -> None:
        rows = self.rows[:b]
        positions = self.position.index_select(0, rows)
        cuda_ops.sample(
            self.logits[:b], rows, positions, self.temperature, self.seeds, self.thresholds[:b],
            self.out[0], self.out_logprobs,
        )  # fmt: skip
        cuda_ops.advance(rows, self.out[0], self.last_token, self.position)

    # ------------------------------------------------------------------------------------------ one step

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Step:
        with torch.cuda.stream(self.stream):
            send_changes(self)
            for first in range(0, len(plan.chunks), _MAX_CHUNKS):
                self._prefill(plan.chunks[first : first + _MAX_CHUNKS])
            if plan.copies:
                pairs = self.send(np.array(plan.copies, np.int64).T)
                self.cache.copy(pairs[0], pairs[1])
                if self.routing is not None:
                    self.routing.blocks[pairs[1]] = self.routing.blocks[pairs[0]]
            if plan.has_drafts and self.verifier is not None:
                return self.verifier.launch(plan.slots)
            return self._decode(plan.slots)

    def _decode(self, slots: np.ndarray) -> Step:
        if len(slots) == 0:
            return lambda: None
        if self.verifier is not None:
            self.verifier.lines.clear()  # the device keeps tokens of steps with drafts only
        places = slots, self.slots.ticket[slots], self.slots.length[slots]
        b = self._send_rows(slots)
        sizes = self._splits(b), self.shape.num_kv_heads, self.shape.head_dim, self.cache_item
        is_long = self.has_runs and is_faster_in_runs(places[2], *sizes)
        self.graphs.run(("long layers" if is_long else "layers", b))
        extras = self._extras_for(slots)
        if extras is not None:
            rows = self.rows[:b]
            positions = self.position.index_select(0, rows)
            extras.adjust(self.logits[:b], rows, positions, self.temperature)
        self._forbid(slots)
        if self.slots.truncates[slots].any():
            self.graphs.run(("truncate", b))
            self.truncated = True
        elif self.truncated:
            self.thresholds.fill_(float("-inf"))
            self.truncated = False
        self.graphs.run(("sample", b))
        if extras is not None:
            extras.finish(self.logits[:b], self.rows[:b], self.temperature, self.out)
        num_top = int(self.slots.num_top[slots].max())
        top = None
        if num_top:
            of_row = self.temperature.index_select(0, self.rows[:b])
            top = likeliest(self.logits[:b], of_row, self.out[0, :b], self.out_logprobs[:b], num_top)
        if not self.on_gpu:
            return partial(read_result, places, self.out.clone(), top, None)
        out = to_host(self.out)
        top = None if top is None else to_host(top)
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return partial(read_result, places, out, top, event)

    def _forbid(self, slots: np.ndarray) -> None:
        """Forbid tokens outside of grammars. All earlier tokens are known: see `EngineCore.step`."""
        lines = np.flatnonzero(self.slots.constrained[slots])
        if len(lines):
            bits = np.stack([self.slots.sequence[slot].constraint.allowed() for slot in slots[lines]])
            cuda_ops.forbid(self.logits, self.send(lines.astype(np.int32)), self.send(bits.view(np.int32)))

    def _extras_for(self, slots: np.ndarray) -> SamplingExtras | None:
        """The extras, if one of these sequences needs them in this step."""
        table = self.slots
        asked = table.penalizes[slots] | table.biased[slots] | table.wants_raw[slots]
        return self.extras if (asked | (table.length[slots] < table.min_len[slots])).any() else None

    def _prefill_one_by_one(self, chunks: list[Chunk]) -> None:
        """Compute prompts with the decode graph, one token of each sequence at a time.

        Position by position: a prompt may continue blocks that another one computes in this step.
        """
        for at in sorted({at for chunk in chunks for at in range(chunk.start, chunk.end)}):
            slots = np.array([chunk.slot for chunk in chunks if chunk.start <= at < chunk.end])
            self._set_inputs(slots, np.full(len(slots), at))
            self.graphs.run(("layers", self._send_rows(slots)))
        slots = np.array([chunk.slot for chunk in chunks])
        self._set_inputs(slots, self.slots.length[slots] - 1)

    def _prefill(self, chunks: list[Chunk]) -> None:
        if self.config.deterministic:
            self._prefill_one_by_one(chunks)
            return
        total = sum(chunk.end - chunk.start for chunk in chunks)
        n = next(size for size in self.prefill_sizes if size >= total)
        tiles = self._num_tiles(n)
        data = pack_chunks(self.slots, chunks, n, tiles, self.tile_tokens)
        self.prefill_inputs[n].copy_(self.send(data))
        if self.images is not None and self.images.is_needed(chunks):
            # All chunks at once: each may continue blocks that another one computes in this step.
            self.images.prefill(chunks, *self._prefill_batch(n))
        else:
            self.graphs.run(("prefill", n))

    # ------------------------------------------------------------------------------ from the host to the device

    def _send_rows(self, slots: np.ndarray) -> int:
        """Send the slots of the next pass to the device; returns the size of its graph."""
        b = next(size for size in self.decode_sizes if size >= len(slots))
        wanted = np.full(b, self.slots.num_slots, np.int32)
        wanted[: len(slots)] = slots
        if not np.array_equal(wanted, self.sent_rows[:b]):
            self.rows[:b] = self.send(wanted)
            self.sent_rows[:b] = wanted
        return b

    def _set_inputs(self, slots: np.ndarray, at: np.ndarray) -> None:
        """Make the token at position `at` the next input of each slot."""
        sent = self.send(np.stack([slots, self.slots.tokens[slots, at], at]))
        self.last_token[sent[0]] = sent[1].int()
        self.position[sent[0]] = sent[2].int()

    def send(self, array: np.ndarray) -> torch.Tensor:
        """Copy an array to the device."""
        tensor = torch.from_numpy(array)
        if not self.on_gpu:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def stage(self, pairs: Pairs) -> Pairs:
        """Copy new weights to the device while steps run. Called from another thread."""
        with torch.cuda.stream(self.stage_stream):
            staged = list(stage_pairs(pairs, self.model, self.device))
        if self.stage_stream is not None:
            self.stage_stream.synchronize()
        return staged

    def load(self, pairs: Pairs) -> None:
        """Copy staged weights into the parameters; the graphs keep their addresses."""
        with torch.cuda.stream(self.stream):
            super().load(pairs)
        if self.stream is not None:
            self.stream.synchronize()
        if self.images is not None:
            self.images.vision.reload()

    @torch.inference_mode()
    def read_routing(self, blocks: np.ndarray, num_tokens: int) -> np.ndarray:
        with torch.cuda.stream(self.stream):
            return super().read_routing(blocks, num_tokens)

    @torch.inference_mode()
    def clear_blocks(self, blocks: list[int]) -> None:
        """Zero cache blocks that hold non-finite numbers and that no sequence uses any more."""
        with torch.cuda.stream(self.stream):
            self.cache.clear(self.send(np.array(blocks)))

    # --------------------------------------------------------------------------------------------- sizes

    def _num_tiles(self, n: int) -> int:
        return n // self.tile_tokens + min(n, _MAX_CHUNKS)

    def _splits(self, b: int) -> int:
        """Number of parts per sequence: enough to fill the device if there are few sequences."""
        splits, wanted = 1, 512 if self.has_runs else 256
        while b * self.shape.num_kv_heads * splits < wanted and self.slots.max_len // splits > 512:
            splits *= 2
        return min(splits, 32)

    def _free_bytes(self) -> int:
        if not self.on_gpu:
            return 1 << 30
        torch.cuda.empty_cache()
        share, own = self.config.mem_fraction, torch.cuda.memory_reserved(self.device)
        return cache_bytes(*torch.cuda.mem_get_info(self.device), own, share)
