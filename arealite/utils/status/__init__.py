"""Status of the processes of a run: what each one does and waits for. `arealite doctor` reads it.

Every process keeps its status in memory that the doctor can read on the same machine (a memfd, also on a full disk and
while the shared folder hangs), refreshed every second, and in `status/NAME.json` of the run directory every five
seconds and at its end, for other machines and for processes that have died.

| process | name | begins in | what it adds to the waits of its own threads |
|---|---|---|---|
| launcher of a node | node0 | `launcher.node.run_node` | its children, and how they ended |
| trainer rank | rank0 | `startup.prepare_process`, or `Run` without a launcher | step; rank 0: executor, servers |
| rank in a Ray actor | actor.rank0 | `controller.rank.RankActor` | its method; rollout: executor, servers |
| embedded server | server0 | `cli.server.run_server` | requests, KV cache, version, event loop |
| rollout worker | worker-PID | `core.worker_pool` | the episodes' waits, event loop |
| reward, tool or environment worker | job-PID | `pools.job_pool` | only its stack: no file |

Servers of SGLang and vLLM write none: the launcher and rank 0 report about them.
"""
