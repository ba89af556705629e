"""What a run used: read from the ledger and the statistics, and the costs that follow from it."""

import contextlib
import json
import sqlite3

import pytest

from arealite.core.foresee.core_sharing import CoreUse
from arealite.core.foresee.recording import read_recording
from arealite.core.foresee.resources import ServerUse, StepTime, core_use, fit_step_cost, read_server_use
from arealite.core.ledger.store import Ledger, ServerSample
from tests.core.foresee.test_recording import write_run

# Steps of 8, 100 and 20 sequences; 4 ms, 0.1 ms a sequence and 0.05 ms a prompt token.
LOADS = [(50, 400, 0), (10, 1000, 200), (20, 400, 1000)]
ROWS = [[n, b, p, 1.0, 4e-3 * n + 1e-4 * b + 5e-5 * p] for n, b, p in LOADS]


def write_steps(path, *servers):
    ledger = Ledger(path)
    for number, (rows, cpu_s) in enumerate(servers):
        sample = ServerSample(1000.0, f"s{number}", 0, True, step_times=json.dumps(rows), cpu_s=cpu_s)
        ledger.sample([sample._replace(time=999.0, step_times="[[1, 1, 1, 1, 1]]"), sample])
    ledger.close()


def read(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        return read_server_use(database)


def test_the_last_counters_of_all_servers_are_added(tmp_path):
    write_steps(tmp_path / "run.sqlite", (ROWS, 3.0), (ROWS[:1], 2.0))
    use = read(tmp_path / "run.sqlite")
    assert [row.steps for row in use.steps] == [100, 20, 10] and use.cpu_s == 5.0
    write_steps(tmp_path / "gpu.sqlite", (ROWS, None))
    assert read(tmp_path / "gpu.sqlite").cpu_s is None
    with sqlite3.connect(tmp_path / "run.sqlite") as database:
        database.execute("DROP TABLE server_steps")
    assert read(tmp_path / "run.sqlite") == ServerUse((), None)


def test_the_cost_of_a_step_is_fitted():
    rows = [StepTime(*row) for row in ROWS]
    assert fit_step_cost(ServerUse(rows, 3.0)) == pytest.approx((4e-3, 1e-4, 5e-5))
    # On a GPU the seconds count. These do not grow with anything, and no cost is negative.
    found = fit_step_cost(ServerUse([row._replace(seconds=row.steps) for row in rows], None))
    assert found == pytest.approx((1.0, 0.0, 0.0), abs=1e-9)
    assert fit_step_cost(ServerUse(rows[:1], 3.0)) is None and fit_step_cost(ServerUse((), None)) is None


def test_a_run_on_cpu_knows_how_its_cores_were_used(tmp_path):
    stats = write_run(tmp_path)
    old = read_recording(tmp_path, stats)
    assert old.cores is None and old.server_use == ServerUse((), None)
    write_steps(tmp_path / "run.sqlite", (ROWS, 1.0))
    for line in stats:
        line |= {"cpu/trainer": 1.0, "cpu/rollout": 0.3, "cpu/cores": 4.0}
    # Engines: 0.24 + 0.15 + 0.17 s. A step works for 0.5 s of its second, with two threads. 0.9 s for 1,800 tokens.
    expected = CoreUse(4.0, 1.0 / 0.56, 2.0, 1, 0.9 / 1800)
    assert read_recording(tmp_path, stats).cores == pytest.approx(expected)
    assert core_use(ServerUse(old.server_use.steps, None), stats, 1) is None, "servers on GPUs"
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("cluster: {n_nodes: 2}\n")
    assert read_recording(tmp_path, stats).cores is None, "two machines"
