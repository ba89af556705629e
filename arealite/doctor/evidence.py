"""What else is known of a run: health of its servers, last events of its ledger, ends of logs."""

import http.client
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from arealite.api.errors import ConfigError
from arealite.core.ledger.reading import open_ledger
from arealite.doctor.case import Case
from arealite.utils.process import tail
from arealite.utils.rundir import RunDir

_HEALTH_TIMEOUT_S = 2.0
_MAX_SERVERS, _MAX_EVENTS, _LOG_LINES = 256, 8, 8


def read_evidence(case: Case) -> None:
    """Add health, events and logs to the case."""
    run_dir = RunDir(case.run_dir)
    _read_events(case, run_dir)
    _read_logs(case, run_dir)
    try:
        key = run_dir.read_key()
    except ConfigError as error:
        key = None
        case.notes.append(str(error))
    entries = [entry for process in case.role("trainer") if process.is_running for entry in process.parts("servers")]
    addresses = [str(entry["address"]) for entry in entries if "address" in entry]
    addresses += [str(p.part("facts")["address"]) for p in case.role("server") if "address" in p.part("facts")]
    addresses += [str(whom) for _, wait in case.long_waits("generate", "load") for whom in wait.get("whom") or ()]
    unique = list(dict.fromkeys(addresses))[:_MAX_SERVERS]
    if unique:
        with ThreadPoolExecutor(min(16, len(unique))) as pool:
            case.health = dict(zip(unique, pool.map(lambda address: _check(address, key), unique), strict=True))


def _check(address: str, key: str | None) -> str:
    """Return why the health check of a server fails; empty if it passes."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connection = http.client.HTTPConnection(address, timeout=_HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", "/health", headers=headers)
            code = connection.getresponse().status
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(error) or type(error).__name__
    return "" if code == 200 else f"status {code}"


def _read_events(case: Case, run_dir: RunDir) -> None:
    if not run_dir.db_path.exists():
        return
    try:
        with closing(open_ledger(run_dir.db_path)) as db:
            rows = db.execute(
                "SELECT time, kind, text FROM events ORDER BY time DESC LIMIT ?", (_MAX_EVENTS,)
            ).fetchall()
    except sqlite3.Error as error:
        case.notes.append(f"cannot read the events in {run_dir.db_path.name}: {error}")
        return
    for at, kind, text in reversed(rows):
        case.events.append(f"{time.strftime('%H:%M:%S', time.localtime(at))} {kind}: {text[:160]}")


def _read_logs(case: Case, run_dir: RunDir) -> None:
    """Read the ends of the logs of processes that have ended; of all if no process is known."""
    names = [process.name for process in case.processes if not process.is_running]
    if not case.processes and run_dir.logs.is_dir():
        names = [path.stem for path in sorted(run_dir.logs.glob("*.log"))[:4]]
    for name in names:
        path = run_dir.logs / f"{name}.log"
        if path.exists():
            case.logs[name] = tail(path, lines=_LOG_LINES)
