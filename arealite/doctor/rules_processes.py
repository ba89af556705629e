"""Findings about the machine and single processes: full disk, memory, stopped, dead, blocked."""

import re
from collections.abc import Iterator

from arealite.doctor.case import LATE_FILE_S, Case, Finding, Process

_MIB = 1 << 20
# A status in memory older than this means that no thread of the process runs Python code.
_MIN_SILENCE_S, _MAX_SILENCE_S = 4.0, 10.0
_CLOCK_SKEW_S = 10.0
# A step is long if it takes so many times the longest of the last ones, or, without any, the patience.
_LONG_STEP, _FIRST_STEP = 5.0, 10.0
_NUM_LINES = 3


def full_disk(case: Case) -> Iterator[Finding]:
    problems = [f"{p.name}: {p.status['problem']}" for p in case.processes if p.is_running and p.status.get("problem")]
    evidence = [f"a test file in {case.run_dir}: {case.probe_error}"] if case.probe_error else []
    evidence += problems
    for disk in case.disks[:1]:
        if disk["free"] < 32 * _MIB or disk["free_inodes"] < 0.001:
            evidence.append(
                f"{disk['path']} has {disk['free'] // _MIB} MiB and {disk['free_inodes']:.1%} of files free"
            )
    text = " ".join(evidence)
    if re.search("No space left|quota|MiB and", text):
        verdict = "the disk of the run directory is full: checkpoints, statistics and logs are lost"
        remedy = "free space there (old checkpoints/, recover/), or restart with another cluster.fileroot; "
        yield Finding("disk_full", verdict, evidence, f"{remedy}recover.mode=auto continues from the last checkpoint")
    elif case.probe_error and (not case.is_probe_refused or problems or _nobody_writes(case)):
        verdict = "the run directory cannot be written"
        yield Finding("disk_unwritable", verdict, evidence, "check the mount and the permissions of the run directory")


def _nobody_writes(case: Case) -> bool:
    """Whether the run goes on, and the files of all its processes are old."""
    writers = [p for p in case.processes if p.is_running and not p.is_stopped and p.status.get("interval_s")]
    ages = [p.age_s if p.file_age_s is None else p.file_age_s for p in writers]
    return bool(ages) and min(ages) > LATE_FILE_S


def memory_pressure(case: Case) -> Iterator[Finding]:
    memory, evidence = case.memory, []
    if memory.get("total") and memory["available"] < 0.03 * memory["total"]:
        evidence.append(f"{memory['available'] // _MIB} of {memory['total'] // _MIB} MiB are available")
    if memory.get("pressure", 0) > 20:
        evidence.append(f"tasks wait for memory {memory['pressure']:.0f}% of the time (/proc/pressure/memory)")
    for process in case.processes:
        proc = process.proc
        if proc is None:
            continue
        if proc.virtual_limit and proc.virtual_bytes > 0.95 * proc.virtual_limit:
            used, limit = proc.virtual_bytes // _MIB, proc.virtual_limit // _MIB
            evidence.append(f"{process.name} uses {used} MiB of its limit of {limit} MiB (ulimit -v)")
        if proc.swap_bytes > proc.rss_bytes // 4 and process.major_faults_per_s > 50:
            evidence.append(f"{process.name} reads {process.major_faults_per_s:.0f} pages a second from swap")
    if evidence:
        verdict = "memory is short: processes are slow, and the kernel may kill one"
        remedy = "lower rollout.max_concurrent_rollouts, rollout.num_workers or max_tokens_per_mb, or give the job more"
        yield Finding("memory_pressure", verdict, evidence, f"{remedy} memory")


def stopped(case: Case) -> Iterator[Finding]:
    for process in case.processes:
        if process.proc and process.is_stopped:
            kind = "launcher_stopped" if process.role == "launcher" else "process_stopped"
            what = "the launcher" if process.role == "launcher" else process.name
            evidence = [f"process {process.pid} is in state {process.proc.state}", *_waited_for(case, process)]
            verdict = f"{what} is stopped (Ctrl+Z, SIGSTOP or a debugger): it does nothing until it is continued"
            remedy = f"continue it: kill -CONT {process.pid} (or `fg` in its terminal)"
            yield Finding(kind, verdict, evidence, remedy, (process.name,))


def gil_held(case: Case) -> Iterator[Finding]:
    limit_s = min(_MAX_SILENCE_S, max(_MIN_SILENCE_S, case.patience_s))
    for process in case.processes:
        is_threaded = process.status.get("interval_s") and process.role != "launcher"
        if not (process.proc and process.is_live and is_threaded and process.age_s > limit_s):
            continue
        if process.is_stopped:
            continue
        evidence = [
            f"no thread of process {process.pid} has run Python code for {process.age_s:.0f} s; it uses "
            f"{process.cpu_share:.0%} of a core, state {process.proc.state}",
            *[f"it is in {place}" for place in current_place(process)],
        ]
        if process.proc.state == "D":
            verdict = f"{process.name} waits in the kernel for a disk, a file server or a GPU driver"
            remedy = "see `dmesg` and the mounts of that machine"
            yield Finding("io_blocked", verdict, evidence, remedy, (process.name,))
        else:
            verdict = f"{process.name} hangs in code that keeps the interpreter lock (GIL): all of its threads wait"
            remedy = "move that code to a plain reward function (it runs in a process of its own), or bound its input"
            yield Finding("gil_held", verdict, evidence, remedy, (process.name,))


def loop_blocked(case: Case) -> Iterator[Finding]:
    for process in case.processes:
        for name, lag_s in process.part("loops").items():
            lag_s += process.age_s if process.is_local else 0.0
            if process.is_running and not process.is_stopped and lag_s >= max(case.patience_s, 3.0):
                evidence = [f"the event loop {name}{process.where} has not answered for {lag_s:.0f} s"]
                evidence += [f"it is in {place}" for place in loop_place(process)]
                verdict = (
                    f"code that does not await blocks the event loop of {process.name}: no episode or request goes on"
                )
                remedy = "use `await`, asyncio.to_thread, or a plain reward function; not time.sleep or requests"
                yield Finding("loop_blocked", verdict, evidence, remedy, (process.name,))


def status_lag(case: Case) -> Iterator[Finding]:
    late, skewed = [], []
    for process in case.processes:
        file_age_s = process.file_age_s or 0.0
        has_file = process.status.get("interval_s") and not process.has_ended
        if has_file and process.is_live and process.age_s < _MAX_SILENCE_S and file_age_s > LATE_FILE_S:
            late.append(f"{process.name} lives, and its file is {file_age_s:.0f} s old")
            late += [f"{process.name}: {process.status['problem']}"] if process.status.get("problem") else []
        if process.is_running and process.is_silent:
            late.append(f"{process.name} on {process.host}: its file is {process.age_s:.0f} s old")
        if process.is_running and abs(process.clock_skew_s) > _CLOCK_SKEW_S:
            skewed.append(f"{process.name} on {process.host}: its clock is {process.clock_skew_s:+.0f} s off")
    if late and not all(process.is_silent for process in case.processes if process.is_running):
        verdict = "status files are late: the shared folder is slow or cached, or those machines are down"
        remedy = "check the mount (NFS: actimeo) and those machines; what is said about them here is old"
        yield Finding("status_lag", verdict, late, remedy)
    if skewed:
        verdict = "the clocks of machine and file server differ: leases of servers may expire too early or too late"
        yield Finding("clock_skew", verdict, skewed, "set the clocks (NTP, chrony)")


def long_step(case: Case) -> Iterator[Finding]:
    """A trainer whose main thread is long in one step, in nothing that the package knows as a wait."""
    for rank in case.role("trainer"):
        pace, longest_s = rank.part("pace"), rank.part("pace").get("longest_s")
        is_waiting = any(wait.get("thread") == "MainThread" for wait in rank.waits)
        if not (pace and rank.is_running) or rank.is_stopped or rank.is_silent or is_waiting:
            continue
        age_s = float(pace.get("age_s", 0)) + rank.age_s
        # The first step may compile.
        limit_s = _FIRST_STEP * case.patience_s if longest_s is None else max(case.patience_s, _LONG_STEP * longest_s)
        if age_s < limit_s:
            continue
        before = "" if longest_s is None else f"; the last ones took {longest_s:.1f} s at most"
        step = rank.part("facts").get("step", 0) + 1
        evidence = [f"{rank.name}{rank.where} uses {rank.cpu_share:.0%} of a core, and waits for no other process"]
        evidence += [f"it does: {entry.get('text')}" for entry in rank.parts("doing")]
        evidence += main_place(rank)
        verdict = f"{rank.name}{rank.where} has been in step {step} for {age_s:.0f} s{before}"
        remedy = "look at the lines above and its stack: the training loop, or what it calls, does not go on. A long "
        remedy += "checkpoint or a new size of batches ends by itself"
        yield Finding("step_long", verdict, evidence, remedy, (rank.name,))


def main_place(process: Process) -> list[str]:
    """Return a sentence with the innermost lines of the main thread, if they are known."""
    found = re.search(r"(?:Current thread|MainThread)[^\n]*\n((?:\s+File .*\n?)+)", process.stacks)
    lines = re.findall(r"File .*", found[1])[:_NUM_LINES] if found else []
    return [f"its main thread is in {' ← '.join(lines)}"] if lines else []


def current_place(process: Process) -> list[str]:
    """Return the innermost line of the thread that runs Python code, if it is known."""
    found = re.search(r"Current thread.*\n\s+(File .*)", process.stacks)
    return [found[1]] if found else top_lines(process)[:1]


def loop_place(process: Process) -> list[str]:
    """Return the innermost line of the thread that runs the event loop."""
    for thread in re.split(r"\n\n", process.stacks):
        if re.search("in (keep_running|run_forever|run_until_complete)", thread):
            frame = re.search(r"\n\s+(File .*)", "\n" + "\n".join(thread.splitlines()[1:]))
            return [frame[1]] if frame else []
    return []


def top_lines(process: Process) -> list[str]:
    """Return the innermost line of each thread."""
    return re.findall(r"(?:hread 0x|MainThread)[^\n]*\n\s+(File [^\n]*)", process.stacks)


def _waited_for(case: Case, process: Process) -> list[str]:
    names = {process.name, str(process.part("facts").get("address"))}
    if process.role == "trainer":
        names.add("ranks")
    waits = [(p, w) for p in case.processes for w in p.waits if names & set(map(str, w.get("whom") or ()))]
    return [f"{p.name} waits for it: {w.get('what')} ({w['age_s']:.0f} s)" for p, w in waits if p is not process][:4]
