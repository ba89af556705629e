"""Runs the micro-batches of a batch through the stages of a pipeline, with the schedules of torch.

1F1B with one stage per rank, interleaved 1F1B (arXiv 2104.04473) with several. The gradients of all micro-batches are
added up on each rank and reduced over data-parallel ranks once, at the end. Results of the last stage are sent to all
ranks of the pipeline, so that each has the same losses and statistics.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from arealite.api.io_struct import Batch, Stat
from arealite.engine.fsdp.micro_batches import MicroBatch, MicroBatchCount
from arealite.engine.fsdp.passes import LossOf, PassSettings
from arealite.engine.pipeline.model import PipelinedModel
from arealite.engine.pipeline.stage import StageModel

# With so many micro-batches per rank, a rank waits for less than a fifth of the time.
_COUNT_PER_RANK = 4


class PipelinePasses:
    """Passes through a `PipelinedModel`. All ranks of the pipeline call it with the same micro-batches."""

    def __init__(self, module: PipelinedModel):
        self.module = module
        size = len(module.ranks)
        self.is_last = module.rank == size - 1
        multiple = size if len(module.stages) > 1 else 1
        self.count = MicroBatchCount(least=module.num_stages, wanted=_COUNT_PER_RANK * size, multiple=multiple)

    def backward(self, micro_batches: Sequence[MicroBatch], settings: PassSettings, loss_of: LossOf) -> dict[str, Stat]:
        """Add the gradients of all micro-batches to the parameters. Returns statistics of the passes."""
        clock = _Clock(self.module.device_type)
        results = self._run(micro_batches, settings, loss_of, clock)
        self.module.add_tied_gradients()
        if not self.is_last:
            # The last rank has computed the losses between its passes.
            with torch.no_grad():
                for mb, outputs in zip(micro_batches, results, strict=True):
                    loss_of(outputs, mb)
        return {"pipeline_bubble_share": Stat(torch.tensor(clock.idle_share(self.module.group)))}

    def outputs(self, micro_batches: Sequence[MicroBatch], settings: PassSettings) -> Iterator[Batch]:
        """Yield the results of each micro-batch."""
        with torch.no_grad():
            results = self._run(micro_batches, settings, None, _Clock(self.module.device_type))
        yield from results

    def _run(
        self, micro_batches: Sequence[MicroBatch], settings: PassSettings, loss_of: LossOf | None, clock: "_Clock"
    ) -> list[Batch]:
        """Run the schedule; return the results of each micro-batch, the same on all ranks of the pipeline."""
        results: list[Batch] = []

        def finish(outputs: Batch, mb: MicroBatch) -> torch.Tensor:
            results.append({key: value.detach() for key, value in outputs.items()})
            return torch.zeros(1) if loss_of is None else loss_of(outputs, mb)

        length = max(map(self.module.stages[0].piece_length, micro_batches))
        stages = []
        for model in self.module.stages:
            model.begin(list(micro_batches), settings, length, finish)
            stages.append(self._stage(model, length, loss_of is not None, clock))
        options: dict[str, Any] = {"scale_grads": False, "loss_fn": None if loss_of is None else _own_loss}
        if len(stages) > 1:
            schedule = ScheduleInterleaved1F1B(stages, len(micro_batches), **options)
        else:
            schedule = Schedule1F1B(stages[0], len(micro_batches), **options)
        try:
            # Stages know their micro-batches: there is nothing to divide but the numbers of the losses.
            schedule.step(target=torch.arange(len(micro_batches)), return_outputs=False)
        except RuntimeError as error:
            # torch wraps what a stage raises, such as an error of the configuration.
            raise error.__cause__ or error from None
        clock.stop()
        self.module.reshard()
        return self._share(results, micro_batches, settings)

    def _stage(self, model: StageModel, length: int, is_trained: bool, clock: "_Clock") -> "_TimedStage":
        """Return torch's stage for this length of micro-batches; its buffers live as long as it."""
        size = (length, self.module.model.config.get_text_config().hidden_size)
        states = torch.empty(size, dtype=self.module.dtype, device="meta", requires_grad=is_trained)
        loss = torch.empty((), device="meta", requires_grad=is_trained)
        stage = _TimedStage(
            model,
            model.index,
            self.module.num_stages,
            torch.device(self.module.device_type),
            input_args=states if model.index > 0 else (),
            output_args=loss if model.is_last else states,
            group=self.module.group,
        )
        stage.clock = clock
        return stage

    def _share(self, results: list[Batch], micro_batches: Sequence[MicroBatch], settings: PassSettings) -> list[Batch]:
        """Send the results of the last stage to all ranks of the pipeline, in one tensor."""
        keys = ["values"]
        if self.module.has_lm_head:
            keys = ["logp", "entropy"] if settings.with_entropy else ["logp"]
        lengths = [len(mb.data["input_ids"]) for mb in micro_batches for _ in keys]
        device = micro_batches[0].data["input_ids"].device
        flat = torch.empty(sum(lengths), dtype=torch.float32, device=device)
        if self.is_last:
            torch.cat([outputs[key] for outputs in results for key in keys], out=flat)
        dist.broadcast(flat, src=self.module.ranks[-1], group=self.module.group)
        parts = iter(flat.split(lengths))
        return [{key: next(parts) for key in keys} for _ in micro_batches]


def _own_loss(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return what the last stage has computed already: it is the loss."""
    return loss


class _TimedStage(PipelineStage):
    """A stage that measures how long it computes."""

    clock: "_Clock"

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock:
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock:
            return super().backward_one_chunk(*args, **kwargs)


class _Clock:
    """Measures the time of a schedule, and how long this rank computes in it."""

    def __init__(self, device_type: str):
        self.on_gpu = device_type == "cuda"
        self._marks: list[Any] = [self._now()]

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self) -> None:
        self._marks.append(self._now())

    def __exit__(self, *_: object) -> None:
        self._marks.append(self._now())

    def stop(self) -> None:
        self._marks.append(self._now())

    def idle_share(self, group: dist.ProcessGroup) -> float:
        """Return the share of the time in which ranks of the pipeline wait, the mean of all of them."""
        if self.on_gpu:
            self._marks[-1].synchronize()
        busy = torch.tensor([sum(map(self._between, self._marks[1:-1:2], self._marks[2:-1:2]))])
        wall = torch.tensor([self._between(self._marks[0], self._marks[-1])])
        dist.all_reduce(busy, group=group)
        dist.all_reduce(wall, dist.ReduceOp.MAX, group=group)
        return 1.0 - float(busy / (wall * dist.get_world_size(group)))

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self.on_gpu else end - start
