import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from arealite.api.backends import BACKENDS, Spread
from arealite.api.cli_args import ClusterConfig, RecoverConfig, ServerConfig
from arealite.api.errors import AllocationError, ConfigError
from arealite.launcher.job import Job, name_checkpoint
from arealite.launcher.launch_config import LaunchConfig, read_launch_config
from arealite.launcher.placement import local_slots, make_placement, visible_gpus
from arealite.launcher.script_check import check_source
from arealite.launcher.servers import halve_gpu_memory, prepare_server
from arealite.utils.config import load_config
from arealite.utils.rundir import RunDir

EIGHT = list(range(8))


def config(mode: str, **kwargs) -> LaunchConfig:
    return LaunchConfig(allocation_mode=mode, model_path="m", **kwargs)


def test_devices_are_split_servers_first():
    placement = make_placement(config("sglang.d2t2+d4"), [EIGHT], True)
    assert [s.places for s in placement.servers] == [((0, (0, 1)),), ((0, (2, 3)),)]
    assert [(r.rank, r.local_rank, r.device) for r in placement.ranks] == [(0, 0, 4), (1, 1, 5), (2, 2, 6), (3, 3, 7)]


def test_nodes_are_filled_in_order():
    placement = make_placement(config("sglang.d12p1t1+d4p1t1"), [[0, 1, 2, 3]] * 4, True)
    assert [s.places[0][0] for s in placement.servers] == [0] * 4 + [1] * 4 + [2] * 4
    assert {r.node for r in placement.ranks} == {3} and [r.local_rank for r in placement.ranks] == [0, 1, 2, 3]


def test_a_server_may_span_nodes():
    placement = make_placement(config("vllm.d1t4p2+d8"), [[0, 1, 2, 3]] * 4, True)
    assert placement.servers[0].places == ((0, (0, 1, 2, 3)), (1, (0, 1, 2, 3)))
    assert [r.node for r in placement.ranks] == [2] * 4 + [3] * 4


@pytest.mark.parametrize(
    ("mode", "size", "where"),
    [
        ("embedded.d1t16+d8", 8, "server 0 .*8 of node 0, 8 of node 1"),
        ("embedded.d3t2+d3", 3, "server 1 .*1 of node 0, 1 of node 1"),
    ],
)
def test_an_embedded_server_may_not_span_nodes(mode, size, where):
    for on_gpu in (True, False):
        with pytest.raises(ConfigError, match=where):
            make_placement(config(mode), [list(range(size))] * 3, on_gpu)
    assert make_placement(config(mode.replace("embedded", "sglang")), [list(range(size))] * 3, True)


def test_too_few_devices_are_refused_with_the_arithmetic():
    with pytest.raises(AllocationError) as caught:
        make_placement(config("sglang.d4t2+d8"), [EIGHT], True)
    message = str(caught.value)
    assert "needs 16 devices (sglang d4p1t2 = 8, training d8p1t1 = 8)" in message and "there are 8" in message


def test_cpu_processes_are_not_limited(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (devices,), on_gpu = local_slots(config("embedded.d4+d8"))
    placement = make_placement(config("embedded.d4+d8"), [devices], on_gpu)
    assert len(placement.servers) == 4 and len(placement.ranks) == 8 and placement.threads >= 1


@pytest.mark.parametrize(("given", "threads"), [("3", 3), ("", 1), ("4,2", 1)])
def test_omp_num_threads_sets_the_threads(monkeypatch, given, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert make_placement(config("embedded.d1+d1"), [[0, 1]], False).threads == threads


def test_cpu_clusters_fill_their_places_like_devices():
    placement = make_placement(config("sglang.d12p1t1+d4p1t1"), [[0, 1, 2, 3]] * 4, on_gpu=False)
    assert [s.places[0][0] for s in placement.servers] == [0] * 4 + [1] * 4 + [2] * 4
    assert {r.node for r in placement.ranks} == {3}
    with pytest.raises(AllocationError, match="there are 8"):
        make_placement(config("sglang.d12p1t1+d4p1t1"), [[0, 1, 2, 3]] * 2, on_gpu=False)


def test_sides_that_ask_for_cpu_need_no_device():
    on_cpu = config("embedded.d4+d8", server=ServerConfig(device="cpu"), train_device="cpu")
    placement = make_placement(on_cpu, [[0], [0]], on_gpu=True)
    assert [(r.node, r.local_rank) for r in placement.ranks] == [(n, i) for n in (0, 1) for i in range(4)]
    assert [s.places for s in placement.servers] == [((i % 2, ()),) for i in range(4)]


def test_single_sided_modes_run_one_process_of_the_script():
    assert len(make_placement(config("sglang.d2+eval"), [[0, 1]], False).ranks) == 1
    assert make_placement(config("sglang.d2"), [[0, 1]], True).ranks[0].device is None
    assert make_placement(config("d2"), [[0, 1]], False).servers == ()


def test_servers_need_a_model():
    with pytest.raises(ConfigError, match=r"set actor\.path or server\.model_path"):
        make_placement(LaunchConfig(allocation_mode="sglang.d1+d1"), [[0, 1]], False)


@pytest.mark.parametrize(
    ("mode", "gpus", "server_gpus", "rank_gpus"),
    [
        ("embedded.d1+d1", "7", [(0,)], [0]),
        ("sglang.d1t2+d2", "0,1", [(0, 1)], [0, 1]),
        ("embedded.d1+d2", "0,1", [(0,)], [0, 1]),
    ],
)
def test_sides_share_the_gpus_of_a_machine_that_has_too_few(monkeypatch, mode, gpus, server_gpus, rank_gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    devices, on_gpu = local_slots(config(mode))
    placement = make_placement(config(mode), devices, on_gpu)
    assert placement.shares_gpus and "(shared with a server)" in placement.describe()
    assert [s.places for s in placement.servers] == [((0, taken),) for taken in server_gpus]
    assert [r.device for r in placement.ranks] == rank_gpus
    alone = config(mode, train_device="cpu")
    assert not make_placement(alone, *local_slots(alone)).shares_gpus


def test_running_servers_take_no_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    running = config("sglang.d4t2+d2", server_addrs=["a:1", "b:2"])
    placement = make_placement(running, *local_slots(running))
    assert placement.servers == () and [r.device for r in placement.ranks] == [0, 1] and not placement.shares_gpus
    assert (
        "2 running servers, 2 trainer ranks" in placement.describe() and "running server: b:2" in placement.describe()
    )


def test_a_side_that_does_not_fit_is_refused_though_gpus_can_be_shared(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    asked = config("embedded.d1+d2")
    with pytest.raises(AllocationError, match="there are 1"):
        make_placement(asked, *local_slots(asked))


def test_servers_leave_memory_to_a_trainer_on_their_gpus():
    shared = halve_gpu_memory(config("embedded.d1+d1", sglang={"mem_fraction_static": 0.2}))
    assert "mem_fraction=0.4" in BACKENDS["embedded"].command(shared, 1)
    assert shared.sglang == {"mem_fraction_static": 0.2}, "what is given stays"
    assert shared.vllm == {"gpu_memory_utilization": 0.4}


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        *(("2,5", ["2", "5"]), ("", []), ("-1", []), ("NoDevFiles", []), ("0,-1,1", ["0"])),
        *(("GPU-8932f937, GPU-1111", ["GPU-8932f937", "GPU-1111"]), ("MIG-abc", ["MIG-abc"])),
    ],
)
def test_visible_gpus(monkeypatch, chosen, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == names


def test_servers_of_a_job_have_seeds_of_their_own():
    embedded = config("embedded.d3+d1", server=ServerConfig(seed=7))
    commands = [BACKENDS["embedded"].command(embedded, 1, index=i) for i in range(3)]
    first, second, third = (
        int(argument.removeprefix("seed="))
        for command in commands
        for argument in command
        if argument.startswith("seed=")
    )
    # Each request counts its server's seed up by one: a million of them do not meet.
    assert first == 7 and min(second - first, third - second) > 10**6
    for command in commands:
        load_config(command[command.index("arealite.cli.serve") + 1 :], ServerConfig).check()


def test_server_commands():
    embedded = config("embedded.d1+d1", server=ServerConfig(dtype="float32", api_key="secret"))
    command = BACKENDS["embedded"].command(embedded, 1234)
    assert command[1:] == [
        "-m",
        "arealite.cli.serve",
        "model_path=m",
        "dtype=float32",
        "port=1234",
        f'weight_folders=["{embedded.run_path}"]',
        "api_key=${oc.env:AREALITE_API_KEY}",
    ]
    assert BACKENDS["embedded"].env(embedded) == {"AREALITE_API_KEY": "secret"}
    wide = BACKENDS["embedded"].command(config("embedded.d2t4+d1"), 1)
    assert wide[-3:-1] == ["tensor_parallel=4", "port=1"]
    sglang = config(
        "sglang.d1t4+d1",
        sglang={"mem_fraction_static": 0.8, "trust_remote_code": True, "disable_x": False, "command": "sg --now"},
    )
    assert BACKENDS["sglang"].command(sglang, 1) == [
        "sg",
        "--now",
        "--model-path",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        "1",
        "--tp-size",
        "4",
        "--pp-size",
        "1",
        "--mem-fraction-static",
        "0.8",
        "--trust-remote-code",
    ]
    vllm = config("vllm.d1t2p2+d1", vllm={"command": "vllm serve", "env": {"A": 1}, "lora_modules": ["a", "b"]})
    command = BACKENDS["vllm"].command(vllm, 1)
    assert command[:11] == [
        "vllm",
        "serve",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        "1",
        "--tensor-parallel-size",
        "2",
        "--pipeline-parallel-size",
        "2",
    ]
    assert command[-3:] == ["--lora-modules", "a", "b"]
    assert "--worker-extension-cls" in command  # its answers carry fingerprints of what it holds
    env = BACKENDS["vllm"].env(vllm)
    assert env["VLLM_SERVER_DEV_MODE"] == "1" and env["A"] == "1"


def test_vllm_finds_this_package_and_no_other(tmp_path):
    job = config("vllm.d1+d1", cluster=ClusterConfig(fileroot=str(tmp_path)))
    env = {**os.environ, **prepare_server(job, "vllm")}
    folder = Path(env["PYTHONPATH"].split(os.pathsep)[0])
    assert [path.name for path in folder.iterdir()] == ["arealite"]
    job.package_link.unlink()
    job.package_link.symlink_to(tmp_path / "moved")
    assert prepare_server(job, "vllm")["PYTHONPATH"] == env["PYTHONPATH"]
    code = "import arealite.api.errors as module; print(module.__file__)"
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, text=True, capture_output=True)
    assert done.stdout.strip() == str(folder / "arealite/api/errors.py")


@pytest.mark.parametrize("backend", ["embedded", "sglang", "vllm"])
def test_an_api_key_is_never_on_a_command_line(backend, tmp_path):
    (tmp_path / "mine.yaml").write_text("log-level: warning\n")
    cluster, server = ClusterConfig(fileroot=str(tmp_path)), ServerConfig(api_key="top-secret")
    keyed = config(f"{backend}.d1+d1", cluster=cluster, server=server, sglang={"config": str(tmp_path / "mine.yaml")})
    job = Job(keyed, "a.py", ["server.api_key=top-secret", "seed=1"], [[0, 1]], False)
    assert "top-secret" not in " ".join([*BACKENDS[backend].command(job.config, 1), *job.command(), job.describe()])
    assert job.command()[-2:] == ["server.api_key=${oc.env:AREALITE_API_KEY}", "seed=1"]
    job.save()
    env = prepare_server(job.config, backend)
    readable = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert all("top-secret" not in path.read_text() for path in readable)
    if backend == "sglang":
        flags = yaml.safe_load(job.config.private_file.read_text())
        assert flags == {"log-level": "warning", "api-key": "top-secret"}
        assert BACKENDS[backend].command(job.config, 1)[-2:] == ["--config", str(job.config.private_file)]
    else:
        assert "top-secret" in env.values()


def test_servers_get_flags_for_adapters_and_broadcasts():
    adapters = config("vllm.d1+d1")
    adapters.lora_rank = 12
    command = " ".join(BACKENDS["vllm"].command(adapters, 1))
    assert "--enable-lora --max-lora-rank 16 --max-loras 1 --max-cpu-loras 2" in command
    assert BACKENDS["vllm"].env(adapters)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "--max-lora-rank 12" in " ".join(BACKENDS["sglang"].command(adapters, 1))
    adapters.weight_update = "broadcast"  # then adapters come merged
    command = " ".join(BACKENDS["vllm"].command(adapters, 1))
    assert "lora" not in command
    assert '--weight-transfer-config {"backend": "arealite"}' in command


def test_only_embedded_servers_pull_their_weights():
    for backend in ("sglang", "vllm", "embedded"):
        settings = config(f"{backend}.d1+d1")
        settings.weight_update = "delta"
        if backend == "embedded":
            BACKENDS[backend].check(settings)
            continue
        with pytest.raises(ConfigError, match="needs embedded servers"):
            BACKENDS[backend].check(settings)


@pytest.mark.parametrize("way", ["stream", "delta"])
def test_shards_with_adapters_are_refused_before_anything_starts(way):
    settings = config("embedded.d1+d1")
    settings.weight_update, settings.lora_rank = way, 8
    with pytest.raises(ConfigError, match=f"rollout.weight_update={way} sends shards, .* set auto"):
        BACKENDS["embedded"].check(settings)


def test_servers_that_span_nodes():
    spread = Spread(2, 1, "10.0.0.1:99")
    sglang = BACKENDS["sglang"].command(config("sglang.d1t16+d1"), 1, spread)
    assert "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:99" in " ".join(sglang)
    vllm = BACKENDS["vllm"].command(config("vllm.d1t16+d1"), 1, spread)
    assert "--nnodes 2 --node-rank 1 --headless --master-addr 10.0.0.1 --master-port 99" in " ".join(vllm)


def test_a_job_is_saved_as_json(tmp_path):
    cluster = ClusterConfig(n_nodes=2, n_gpus_per_node=2, fileroot=str(tmp_path))
    job = Job(config("embedded.d2+d2", cluster=cluster), "a.py", ["x=1"], [[0, 1]] * 2, False)
    path = job.save()
    assert job.config.server.api_key not in path.read_text()
    assert Job.load(path) == job and job.config.server.host == "0.0.0.0"
    assert job.placement().servers_on(0) == list(job.placement().servers) and len(job.placement().ranks_on(1)) == 2
    text = job.describe()
    assert "server 1: node 0 slot 1" in text and "rank 1: node 1 slot 1" in text


def test_every_job_with_servers_of_its_own_has_a_key(tmp_path, monkeypatch):
    cluster = ClusterConfig(fileroot=str(tmp_path))
    first, second = (Job(config("embedded.d1+d1", cluster=cluster), "a.py", [], [[0, 1]], False) for _ in range(2))
    keys = {job.config.server.api_key for job in (first, second)}
    assert len(keys) == 2 and all(len(key) == 32 for key in keys) and first.config.server.host == "127.0.0.1"
    running = config("sglang.d1+d1", cluster=cluster)
    running.server_addrs = ["10.0.0.5:30000"]
    assert Job(running, "a.py", [], [[0]], False).config.server.api_key is None
    monkeypatch.setenv("AREALITE_API_KEY", "theirs")
    assert Job(running, "a.py", [], [[0]], False).config.server.api_key == "theirs"
    with pytest.raises(ConfigError, match="shows the key to all users"):
        keyed = config("embedded.d1+d1", cluster=cluster, server=ServerConfig(api_key="abc"))
        Job(keyed, "a.py", ["server={api_key: abc}"], [[0, 1]], False)


def test_the_next_run_in_a_directory_has_the_key_that_joined_servers_know(tmp_path):
    def key_of_next(**server) -> str | None:
        settings = config("d1", cluster=ClusterConfig(fileroot=str(tmp_path)), server=ServerConfig(**server))
        job = Job(settings, "a.py", [], [[0]], False)
        job.save()
        return job.config.server.api_key

    first = key_of_next()
    assert key_of_next() == first and key_of_next(api_key="theirs") == "theirs"
    assert key_of_next() not in (first, "theirs"), "a key that was set holds for its run"
    run_dir = RunDir(tmp_path / "run" / "trial")
    run_dir.key_path.write_bytes(b"\xff")
    assert len(key_of_next() or "") == 32


@pytest.mark.parametrize(
    "text", ["[]", "5", '{"config": 3}', '{"config": {"nobody": 1}}', '{"config": {}, "x": 1}', "{"]
)
def test_a_damaged_job_is_one_message(tmp_path, text):
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot read the job"):
        Job.load(tmp_path / "job.json")


def test_a_job_without_its_key_is_one_message(tmp_path):
    job = Job(config("embedded.d1+d1", cluster=ClusterConfig(fileroot=str(tmp_path))), "a.py", [], [[0, 1]], False)
    path = job.save()
    job.run_dir.key_path.unlink()
    with pytest.raises(ConfigError, match="there is no API key"):
        Job.load(path)


def save_job(root, **recover):
    settings = config("embedded.d1+d1", cluster=ClusterConfig(fileroot=str(root)), recover=RecoverConfig(**recover))
    job = Job(settings, "a.py", [], [[0, 1]], False)
    job.save()
    return job.run_dir


def test_a_new_run_keeps_the_results_of_an_earlier_one_of_its_name(tmp_path, capsys):
    run_dir = save_job(tmp_path)
    assert not (run_dir.path / "earlier").exists(), "nothing was trained"
    for number in (1, 2):
        run_dir.stats_path.write_text(f"steps of run {number}")
        run_dir.db_path.write_text("episodes")
        (run_dir.checkpoints / "model").mkdir(parents=True)
        (run_dir.path / "rollouts" / "images").mkdir(parents=True)
        save_job(tmp_path)
        kept = run_dir.path / "earlier" / str(number)
        assert (kept / "stats.jsonl").read_text() == f"steps of run {number}" and (kept / "config.yaml").exists()
        assert (kept / "run.sqlite").exists() and (kept / "checkpoints" / "model").is_dir()
        assert (kept / "rollouts" / "images").is_dir() and not (run_dir.path / "rollouts").exists()
        assert not run_dir.stats_path.exists() and str(kept) in capsys.readouterr().out


def test_a_run_that_continues_moves_nothing(tmp_path):
    run_dir = save_job(tmp_path)
    run_dir.stats_path.write_text("steps")
    save_job(tmp_path, mode="resume")
    # The second name: a crash while a checkpoint was being replaced.
    for name in ("step000003", "replaced000003"):
        make_checkpoint(run_dir, name)
        save_job(tmp_path, mode="auto")
        assert run_dir.stats_path.exists() and not (run_dir.path / "earlier").exists()
        shutil.rmtree(run_dir.recover)


def make_checkpoint(run_dir, name):
    (run_dir.recover / name).mkdir(parents=True)
    (run_dir.recover / name / "state.json").write_text("{}")


def test_a_run_without_a_checkpoint_to_continue_from_keeps_the_earlier_results(tmp_path):
    run_dir = save_job(tmp_path)
    run_dir.stats_path.write_text("steps")
    # Renamed by hand because it is damaged, and one that was not finished.
    make_checkpoint(run_dir, "step000003.damaged")
    (run_dir.recover / "step000004").mkdir()
    save_job(tmp_path, mode="auto")
    kept = run_dir.path / "earlier" / "1"
    assert (kept / "stats.jsonl").read_text() == "steps" and (kept / "recover" / "step000003.damaged").is_dir()


def test_only_a_finished_checkpoint_is_named_after_a_signal(tmp_path, capsys):
    settings = config("d1", cluster=ClusterConfig(fileroot=str(tmp_path)))
    job = Job(settings, "a.py", [], [[0]], False)
    for name in ("step000003", "step000005.bak"):
        make_checkpoint(job.run_dir, name)
    name_checkpoint(job, 130)
    assert f"the newest recover checkpoint is {job.run_dir.recover}/step000003\n" in capsys.readouterr().out


def test_a_model_of_the_earlier_run_needs_another_name(tmp_path):
    run_dir = save_job(tmp_path)
    run_dir.stats_path.write_text("steps")
    (run_dir.checkpoints / "last").mkdir(parents=True)
    settings = config("embedded.d1+d1", cluster=ClusterConfig(fileroot=str(tmp_path)))
    settings.model_paths = {"actor.path": str(run_dir.checkpoints / "last")}
    with pytest.raises(ConfigError, match="use another trial_name"):
        Job(settings, "a.py", [], [[0, 1]], False).save()
    assert run_dir.stats_path.exists()


BASE = ["experiment_name=e", "trial_name=t", "train_dataset.path=d", "gconfig.n_samples=2"]


def test_a_script_with_its_own_class_runs_in_check_mode(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from dataclasses import dataclass\n"
        "from arealite.api.cli_args import GRPOConfig\n"
        "from arealite.utils.config import load_config, run_main\n"
        "@dataclass\nclass Mine(GRPOConfig):\n    horizon: int = 3\n"
        "def main(argv):\n    load_config(argv, Mine)\n    raise SystemExit('went on')\n"
        "run_main(main)\n"
    )
    found = read_launch_config(str(script), [*BASE, "actor.path=m", "horizon=5", "server.port=77"])
    assert found.model_path == "m" and found.server.port == 77 and "horizon: 5" in found.resolved_yaml
    with pytest.raises(ConfigError, match="did you mean horizon"):
        read_launch_config(str(script), [*BASE, "actor.path=m", "horizn=5"])


def test_keys_of_a_script_may_be_named_like_what_launchers_derive(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from dataclasses import dataclass, field\n"
        "from arealite.api.cli_args import GRPOConfig\n"
        "from arealite.utils.config import load_config, run_main\n"
        "@dataclass\nclass Mine(GRPOConfig):\n"
        "    model_path: str | None = None\n"
        "    lora_rank: str = 'auto'\n"
        "    models: dict[str, str] = field(default_factory=lambda: {'judge': 'm2'})\n"
        "def main(argv):\n    load_config(argv, Mine)\n"
        "run_main(main)\n"
    )
    found = read_launch_config(str(script), [*BASE, "actor.path=m", "model_path=other"])
    assert (found.model_path, found.lora_rank, found.models) == ("m", 0, ["actor"])
    assert "model_path: other" in found.resolved_yaml and "judge: m2" in found.resolved_yaml


@pytest.mark.parametrize(("start", "encoding"), [("", "utf-8-sig"), ("# -*- coding: latin-1 -*-\n# é\n", "latin-1")])
def test_a_script_is_read_in_its_encoding(tmp_path, start, encoding):
    """Python runs a script with a byte order mark, as editors on Windows write it, and one in Latin-1."""
    script = tmp_path / "script.py"
    code = "from arealite.api.cli_args import GRPOConfig\nload_config(argv, GRPOConfig)\n"
    script.write_text(start + code, encoding=encoding)
    found = read_launch_config(str(script), [*BASE, "actor.path=m"])
    check_source(found, str(script), runs_here=True)
    assert found.model_path == "m"


def test_a_script_without_load_config_may_have_any_keys(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("print('hello')\n")
    found = read_launch_config(str(script), ["anything=1", "cluster.n_nodes=2"])
    assert found.cluster == ClusterConfig(n_nodes=2)
    script.write_text("def broken(:\n")
    with pytest.raises(ConfigError, match="not valid Python: line 1"):
        read_launch_config(str(script), [])


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (["actor.dtype=float32"], "float32"),
        (["actor.dtype=bfloat16"], "auto"),
        (["actor.dtype=float32", "server.dtype=bfloat16"], "bfloat16"),
    ],
)
def test_servers_compute_in_float32_beside_a_trainer_in_float32(tmp_path, given, dtype):
    (tmp_path / "script.py").touch()
    argv = ["actor.path=m", "allocation_mode=embedded.d1+d1", *given]
    config = read_launch_config(str(tmp_path / "script.py"), argv)
    assert config.server.dtype == dtype
    assert ("dtype=float32" in BACKENDS["embedded"].command(config, 1)) == (dtype == "float32")
