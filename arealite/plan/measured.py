"""`Measured`: costs and workload that were measured, in a run or by `calibrate`, and their file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arealite.api.errors import ConfigError
from arealite.core.foresee.core_sharing import CoreUse
from arealite.core.foresee.gpu_sharing import GpuShare
from arealite.plan.costs import ServerCost, TrainCost, UpdateCost
from arealite.plan.workload import Distribution, Workload


@dataclass(frozen=True)
class Measured:
    """What `simulate` needs, from measurements."""

    workload: Workload
    num_servers: int
    server: ServerCost
    train: TrainCost
    update: UpdateCost
    eta: int = 4
    # Cores or a GPU that servers and trainer share; None: each has its own devices.
    cores: CoreUse | GpuShare | None = None
    # The run's own limits besides eta.
    adaptive_lead: bool = True
    max_concurrent: int | None = None
    # Steps of the run without the first ones.
    num_steps: int = 20


def describe_costs(measured: Measured) -> str:
    """Return the costs in one line."""
    server, train, update = measured.server, measured.train, measured.update
    few, many = (1e3 * server.base_s(count) for count in (1, server.max_running))
    return (
        f"decode step {few:.2f} ms with one sequence, {many:.2f} ms with {server.max_running}, "
        f"prompts {1 / max(server.prompt_s, 1e-12):,.0f} tokens/s, "
        f"training {1 / max(train.token_s, 1e-12):,.0f} tokens/s, "
        f"weight update {update.publish_s + update.load_s:.2f} s"
    )


def write_measured(path: Path, measured: Measured) -> None:
    """Write costs and workload as JSON."""
    # JSON has no infinity.
    values = asdict(measured)
    values["server"] = {k: v for k, v in values["server"].items() if v != float("inf")}
    path.write_text(json.dumps(values, indent=1) + "\n")


def read_measured(path: Path) -> Measured:
    """Read what `write_measured` has written."""
    try:
        values = json.loads(path.read_text())
        work = values["workload"]
        drawn = {k: Distribution(v["kind"], tuple(v["arguments"])) for k, v in work.items() if isinstance(v, dict)}
        return Measured(
            Workload(**{**work, **drawn}),
            values["num_servers"],
            ServerCost(**values["server"]),
            TrainCost(**values["train"]),
            UpdateCost(**values["update"]),
            values["eta"],
            _read_cores(values["cores"]),
            values.get("adaptive_lead", True),
            values.get("max_concurrent"),
        )
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {path}: arealite plan --calibrate {path} --model FOLDER writes it"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not a file of `arealite plan --calibrate`: {error!r}") from error


def _read_cores(value: Any) -> CoreUse | None:
    # Files of older versions have the number of cores only.
    return None if value is None else CoreUse(*value) if isinstance(value, list) else CoreUse(value)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return coefficients, none of them negative, with which the sums of a row come near its seconds.

    Rows are weighted by their inverse, so that relative errors count.
    """
    matrix, target = np.asarray(rows, dtype=float), np.asarray(seconds, dtype=float)
    scaled = matrix / target[:, None]
    found, used = np.zeros(matrix.shape[1]), list(range(matrix.shape[1]))
    while used:
        part, *_ = np.linalg.lstsq(scaled[:, used], np.ones(len(target)), rcond=None)
        if (part >= 0).all():
            found[used] = part
            break
        used = [column for column, value in zip(used, part, strict=True) if value > 0]
    return found.tolist()
