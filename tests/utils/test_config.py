import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, fields

import pytest
from omegaconf import OmegaConf

from arealite.api.cli_args import DPOConfig, GRPOConfig, SFTConfig
from arealite.api.config_field import help_field
from arealite.api.errors import ConfigError, WaitTimeout
from arealite.utils.config import load_config, load_plain, private_yaml, public_yaml, run_main, to_yaml
from arealite.utils.config_help import help_text

BASE = ["experiment_name=e", "trial_name=t", "train_dataset.path=d", "actor.path=m", "gconfig.n_samples=4"]


def load(*overrides: str) -> GRPOConfig:
    return load_config([*BASE, *overrides], GRPOConfig)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def test_overrides_come_after_files_and_later_files_after_earlier(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 2\nactor: {path: a, optimizer: {lr: 3e-4}}\n")
    (tmp_path / "b.yaml").write_text("actor: {path: b}\ntrial_name: from_file\n")
    config = load("--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}")
    assert (config.seed, config.trial_name, config.actor.path) == (2, "t", "m")
    assert config.actor.optimizer is not None and config.actor.optimizer.lr == 3e-4
    assert type(config) is GRPOConfig and type(config.sglang) is dict


def test_null_sections_are_made_when_a_key_in_them_is_set():
    config = load("ref.path=r", "valid_dataset.path=v", "valid_dataset.batch_size=2")
    assert config.ref is not None and config.ref.path == "r" and config.ref.dtype == "bfloat16"
    assert config.valid_dataset is not None and config.valid_dataset.batch_size == 2
    assert load("actor.optimizer=null").actor.optimizer is None


def test_home_is_expanded_in_files_and_overrides(tmp_path):
    (tmp_path / "a.yaml").write_text("tokenizer_path: ~/tok\nsglang: {x: ~/y}\n")
    config = load("--config", str(tmp_path / "a.yaml"), "actor.path=~/m")
    home = os.path.expanduser("~")
    assert (config.tokenizer_path, config.actor.path) == (f"{home}/tok", f"{home}/m")
    assert config.sglang == {"x": f"{home}/y"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *((text, text) for text in ("24:00:00", "16:00", "1:30.5", "0123", "007", "2026-01-31")),
        *(("1e-5", 1e-5), ("3e4", 3e4), ("0.5", 0.5), ("-.5", -0.5), ("12", 12), ("-3", -3), ("0", 0)),
        *(("1_000", 1000), ("0x1f", 31), ("'12'", "12"), ("null", None), ("", None), ("true", True)),
        ("[1, 007, {a: 1:30}]", [1, "007", {"a": "1:30"}]),
    ],
)  # fmt: skip
def test_values_are_what_is_written(tmp_path, written, meant):
    """YAML 1.1 would make 24:00:00 a number of base 60, and 0123 one of base 8."""
    (tmp_path / "a.yaml").write_text(f"a: {{b: {written}}}\n")
    for argv in (["--config", str(tmp_path / "a.yaml")], [f"a.b={written}"]):
        found = load_plain(argv).a.b
        assert found == meant and isinstance(found, float) == isinstance(meant, float)


def test_text_with_the_look_of_a_number_comes_through_whole(tmp_path):
    config = load("launcher.slurm.time=24:00:00", "trial_name=007", "server.api_key=0123")
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    again = load_config(["--config", str(tmp_path / "c.yaml")], GRPOConfig)
    for read in (config, again):
        assert read.launcher.slurm == {"time": "24:00:00"}
        assert (read.trial_name, read.server.api_key) == ("007", "0123")


@pytest.mark.parametrize("text", ["1.10", "1_000", "0x10", "1e3", "on", "true", "2.0", "'1.10'"])
def test_a_field_of_text_gets_the_text_as_it_is_written(tmp_path, text):
    (tmp_path / "a.yaml").write_text(
        f"tokenizer_path: {text}\nserver: {{api_key: {text}}}\ngconfig: {{stop: [{text}]}}\n"
    )
    for argv in (
        ["--config", str(tmp_path / "a.yaml")],
        [f"tokenizer_path={text}", f"server={{api_key: {text}}}", f"gconfig.stop=[{text}]"],
        [f"tokenizer_path={text}", f"server.api_key={text}", f"gconfig={{stop: [{text}]}}"],
    ):
        config = load(*argv)
        read = (config.tokenizer_path, config.server.api_key, *config.gconfig.stop)
        assert read == (text.strip("'"),) * 3


def test_null_and_nothing_given_for_text():
    config = load("server.api_key=null", "tokenizer_path=", "valid_dataset.path=v", "valid_dataset.name=")
    assert (config.server.api_key, config.tokenizer_path) == (None, "")
    assert config.valid_dataset is not None and config.valid_dataset.name is None
    assert "trial_name" in refusal("trial_name=null")
    assert load("server.api_key=#1: @").server.api_key == "#1: @"


def test_free_form_sections_take_any_key():
    config = load("sglang.mem_fraction_static=0.5", "sglang.attention_backend=fa3", "vllm.x=[1,2]")
    assert config.sglang == {"mem_fraction_static": 0.5, "attention_backend": "fa3"}
    assert config.vllm == {"x": [1, 2]}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "actor.optimizr.lr=1",
            "unknown key 'actor.optimizr' in override 'actor.optimizr.lr=1': did you mean actor.optimizer?",
        ),
        ("actor.optimizer.lrr=1", "did you mean actor.optimizer.lr?"),
        ("max_new_tokens=5", "did you mean gconfig.max_new_tokens or eval_gconfig.max_new_tokens?"),
        (
            "actor.on_collapse=stop",
            "unknown key 'actor.on_collapse' in override 'actor.on_collapse=stop': did you mean on_collapse?",
        ),
        ("actor.gconfig.n_samples=2", "did you mean gconfig?"),
        ("rollout.n_samples=2", "did you mean gconfig.n_samples or eval_gconfig.n_samples?"),
        ("optimizer.lr=1", "did you mean actor.optimizer or critic.optimizer"),
        ("nonsense=5", "known here: experiment_name"),
        ("actor.optimizer.lr=fast", "actor.optimizer.lr in override 'actor.optimizer.lr=fast' (expected float | null)"),
        ("gconfig.n_samples=1.5", "(expected int)"),
        ("gconfig=3", "is a section, not one value"),
        ("actor=null", "actor in override 'actor=null'"),
        ("seed=${nope}", "Interpolation key 'nope' not found"),
        ("--wrong", "cannot read the argument '--wrong'"),
        ("gconfig.top_p=7", "gconfig.top_p must be a number larger than 0 and at most 1, got 7"),
        ("actor.dtype=float8", "actor.dtype is 'float8'; use one of"),
        ("actor.optimizer.lr=-1", "actor.optimizer.lr must be a number larger than 0"),
        ("actor.optimizer.beta2=2", "actor.optimizer.beta2 must be a number from 0 to 1, got 2"),
        ("actor.eps_clip=-1", "actor.eps_clip must be a number from 0 to 1, got -1"),
        ("actor.temperature=0", "actor.temperature must be a number larger than 0"),
        ("actor.behav_imp_weight_floor=9", "no token would be trained"),
        ("actor.behav_imp_weight_floor=1.5", "leave out 1"),
        ("actor.behav_imp_weight_cap=0.2", "leave out 1"),
        ("actor.ppo_n_minibatches=33", "is more than the 32 sequences of a rank and step"),
        ("total_train_epochs=0", "total_train_epochs must be a number from 1 to 1000000000, got 0"),
        ("recover.retries=2", "set recover.mode=auto"),
        ("seed=[1", "cannot read the override"),
        ("recover.retries=-1", "recover.retries must be a number from 0 to 1000, got -1"),
        ("rollout.num_workers=-1", "rollout.num_workers must be a number from 0 to 1024, got -1"),
        ("rollout.request_timeout_s=.nan", "rollout.request_timeout_s must be a number larger than 0 and at most"),
        ("actor.optimizer.lr=.inf", "actor.optimizer.lr must be a number larger than 0 and at most 1000000000"),
        ("seed=.nan", "seed in override 'seed=.nan' (expected int)"),
        (f"seed={'1' * 10_000}", "digits"),
        (f"allocation_mode=d{'1' * 20}", "a degree of parallelism is from 1 to 100000"),
        (f"allocation_mode=d{'1' * 10_000}", "longer than 100 characters"),
        ("allocation_mode=d99999t99999", "these are 9999800001 devices; at most 100000"),
        ("sglang..x=1", "a part of its key is empty"),
        ("sglang=[1]", "sglang in override 'sglang=[1]' must be dict"),
        ("rollout.server_addrs={a: 1}", "must be list[str]"),
        ("rollout.server_addrs=127.0.0.1:1", "addrs=127.0.0.1:1' must be list[str]: write it as [a, b]"),
        ("gconfig.stop_token_ids=3", "must be list[int]: write it as [a, b]"),
        ("sglang=text", "must be dict[str, typing.Any]: write it as {a: b}"),
        ("trial_name=\ud800", "control character"),
        (r'gconfig.stop=["\ud800"]', "gconfig.stop must not contain the control character"),
        (f"gconfig.{'a.' * 500}b=1", "its key has more than 20 parts"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(override, expected):
    assert expected in refusal(override)


def test_unknown_key_names_its_file(tmp_path):
    (tmp_path / "a.yaml").write_text("rollout: {max_head_ofpolicyness: 2}\n")
    message = refusal("--config", str(tmp_path / "a.yaml"))
    assert "a.yaml" in message and "rollout.max_head_offpolicyness" in message


def alias_bomb(first: str, form: str) -> str:
    """Nine values, nine lists of those, nine lists of those lists, and so on."""
    lines = [f"  a0: &a0 {first}"]
    lines += [f"  a{i}: &a{i} {form.format(', '.join([f'*a{i - 1}'] * 9))}" for i in range(1, 12)]
    return "sglang:\n" + "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n- b\n", "`key: value` pairs at its top level"),
        ("a: [1\n", "line 2: "),
        ("12\n", "`key: value` pairs at its top level"),
        ("sglang: {b: 1, b: 2}\n", "line 1: the key b appears twice"),
        ("seed: 1\nseed: 2\n", "line 2: the key seed appears twice"),
        (alias_bomb("[x, x, x, x, x, x, x, x, x]", "[{}]"), "sglang: more than 4000 keys and values"),
        (alias_bomb("{b: 1}", "{{<<: [{}]}}"), "more than 4000 keys and values"),
        ("sglang: &a {b: [*a]}", "*a is an alias of a value that holds it"),
        ("sglang: {a: " + "[" * 5000 + "]" * 5000 + "}", "sglang.a: nested more than 20 levels deep"),
        ("sglang: {a: " + "{a: " * 5000 + "}" * 5001, "nested more than 20 levels deep"),
        ("sglang:\n" + "".join(f"  k{i}: {i}\n" for i in range(10_000)), "sglang: more than 4000 keys and values"),
        ("sglang: {a: " + "x" * 2_000_000 + "}", "at most 1000000 are read"),
        (f"seed: {'1' * 10_000}", "line 1: cannot read '1111"),
        ("sglang: {a: !!int abc}", "line 1: cannot read 'abc'"),
        ("sglang: {a: !!timestamp 2020-01-01}", "sglang.a: Value 'date' is not a supported primitive type"),
        ("sglang: {a: !!python/object:os.system x}", "line 1: could not determine a constructor"),
        ("sglang: {a: '${'}", "sglang.a: "),
        ("sglang: {null: 3}", "sglang: Incompatible key type"),
        ("sglang: {? [a] : 3}", "line 1: found unhashable key"),
        ("sglang: !!omap [a: 1]", "must be dict"),
        ("seed: 0b_", "expected int"),
        ("a: \x01", "special characters are not allowed"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, expected):
    (tmp_path / "a.yaml").write_text(text)
    message = refusal("--config", str(tmp_path / "a.yaml"))
    assert "a.yaml" in message and expected in message
    assert "\n" not in message and len(message) < 600


def test_unreadable_files_and_too_many_overrides(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"trial_name: \xff\n")
    assert "a.yaml" in refusal("--config", str(tmp_path / "a.yaml"))
    assert "cannot read the config file" in refusal("--config", str(tmp_path))
    assert "at most 500" in refusal(*(f"sglang.k{i}=1" for i in range(501)))
    assert "cannot read the config file" in refusal("--config", str(tmp_path / "none.yaml"))
    assert "--config needs a file" in refusal("--config")


def test_missing_values_are_listed_with_their_help():
    with pytest.raises(ConfigError) as caught:
        load_config(["seed=1"], SFTConfig)
    for key in ("experiment_name", "trial_name", "model.path"):
        assert f"{key}=…" in str(caught.value)
    # Either it or `train_datasets` is needed.
    with pytest.raises(ConfigError, match=r"set it in a file or as train_dataset\.path=…"):
        load_config(["experiment_name=e", "trial_name=t", "model.path=m"], SFTConfig)


def test_yaml_round_trip(tmp_path):
    config = load("ref.path=r", "actor.kl_ctl=0.1", "gconfig.stop=['\\n\\n','a: b']", "sglang.x=1")
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config(["--config", str(tmp_path / "c.yaml")], GRPOConfig) == config


def test_a_script_may_extend_the_class():
    @dataclass
    class Mine(GRPOConfig):
        """My run."""

        horizon: int = 3

    assert load_config([*BASE, "horizon=5"], Mine).horizon == 5
    assert "horizon" in help_text(Mine) and "My run." in help_text(Mine)


def test_help_lists_every_field_in_order(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help", "all"], GRPOConfig)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    positions = [f"\n{text}".index(f"\n  {f.name}") for f in fields(GRPOConfig)]
    assert positions == sorted(positions)
    assert "actor.optimizer.lr" in text and "float | null = null" in text and "Peak learning rate;" in text
    assert "(required)" in text and "bool = true" in text


def test_help_ends_quietly_when_nobody_reads_on():
    code = (
        "from arealite.api.cli_args import GRPOConfig; from arealite.utils.config import load_config; "
        "load_config(['--help'], GRPOConfig)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_load_plain_knows_no_keys():
    assert load_plain(["a.b=1", "c=x"]) == {"a": {"b": 1}, "c": "x"}


def test_run_main_exit_codes(capsys):
    def fails(argv):
        raise ConfigError("no such thing")

    def may_pass(argv):
        raise WaitTimeout("too slow")

    cases = ((fails, 2), (may_pass, 1), (lambda argv: 7, 7), (lambda argv: None, 0))
    for main, code in cases:
        with pytest.raises(SystemExit) as caught:
            run_main(main, [])
        assert caught.value.code == code
    captured = capsys.readouterr()
    assert captured.err == "error: no such thing\nerror: too slow\n"


def test_an_interrupt_while_python_exits_shows_no_traceback():
    """Exit functions of libraries may take a second: `torch._dynamo` imports modules in one."""
    code = (
        "import atexit, os, signal; from arealite.utils.config import run_main; "
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); run_main(lambda argv: 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_launched_process_logs_to_its_file_and_not_to_the_console(tmp_path):
    code = (
        "import logging; from arealite.utils.config import run_main; "
        "run_main(lambda argv: logging.getLogger('arealite.x').warning('episode failed'))"
    )
    env = {**os.environ, "AREALITE_LOG_FILE": str(tmp_path / "log")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "WARNING arealite.x: episode failed" in (tmp_path / "log").read_text()


def test_reading_a_configuration_does_not_import_torch():
    code = "import sys, arealite.utils.config, arealite.launcher.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_sections_by_name(tmp_path):
    text = "valid_datasets: {gsm8k: {path: 007, max_length: 8}, mawps: {path: m}}\nvalid_dataset: {path: v}\n"
    (tmp_path / "a.yaml").write_text(text)
    config = load("--config", str(tmp_path / "a.yaml"), "valid_datasets.mawps.split=1.10", "valid_datasets.c.path=c")
    assert {name: data.path for name, data in config.validation_sets.items()} == {
        "valid": "v", "gsm8k": "007", "mawps": "m", "c": "c",
    }  # fmt: skip
    assert config.valid_datasets["mawps"].split == "1.10" and config.valid_datasets["gsm8k"].max_length == 8
    assert all(data.is_validation for data in config.validation_sets.values())
    again = tmp_path / "b.yaml"
    again.write_text(to_yaml(config))
    assert load_config(["--config", str(again)], GRPOConfig) == config
    assert "valid_datasets.NAME.path" in help_text(GRPOConfig, "all")


def test_names_of_sections_and_flags_may_look_like_numbers(tmp_path):
    """A set named after a year is not the number."""
    text = "valid_datasets: {2024: {path: a}, 1.50: {path: b}, on: {path: c}}\ntrain_datasets: {007: {path: d}}\n"
    (tmp_path / "a.yaml").write_text(text + "sglang: {1: 2}\n")
    config = load("--config", str(tmp_path / "a.yaml"), "train_dataset.path=", "valid_datasets.2024.split=s")
    assert {name: data.path for name, data in config.valid_datasets.items()} == {"2024": "a", "1.50": "b", "on": "c"}
    assert config.valid_datasets["2024"].split == "s" and list(config.train_datasets) == ["007"]
    assert config.sglang == {"1": 2}


def test_a_list_and_keys_do_not_merge(tmp_path):
    (tmp_path / "a.yaml").write_text("sglang: {a: [1, 2], b: {c: 1}}\n")
    for override in ("sglang.a.1=5", "sglang.a={c: 1}", "sglang.b=[1]"):
        message = f"override '{override}' has keys where an earlier value is a list, or a list where it has keys"
        assert message in refusal("--config", str(tmp_path / "a.yaml"), override)
        with pytest.raises(ConfigError, match="has keys where an earlier value is a list"):
            load_plain(["--config", str(tmp_path / "a.yaml"), override], GRPOConfig)


def test_mistakes_in_sections_by_name():
    assert "unknown key 'valid_datasets.a.pth'" in refusal("valid_datasets.a.pth=x")
    assert "did you mean valid_datasets.a.path?" in refusal("valid_datasets.a.pth=x")
    assert "valid_datasets.a in override 'valid_datasets.a=x' is a section" in refusal("valid_datasets.a=x")
    assert "valid_datasets.a.path=…" in refusal("valid_datasets.a.split=x")
    assert "valid_datasets.a.batch_size must be a number from 1" in refusal(
        "valid_datasets.a.path=x", "valid_datasets.a.batch_size=0"
    )
    assert "which becomes a file name" in refusal("valid_datasets.a/b.path=x")
    assert "rename that" in refusal("valid_datasets.valid.path=x", "valid_dataset.path=y")


def test_evaluations_are_greedy_with_the_lengths_of_training_unless_set():
    gconfig = load("gconfig.max_new_tokens=77", "gconfig.stop=[x]").evaluation_gconfig
    assert (gconfig.n_samples, gconfig.temperature, gconfig.max_new_tokens, gconfig.stop) == (1, 0, 77, ["x"])
    own = ("eval_gconfig.n_samples=8", "eval_gconfig.temperature=0.6", "eval_gconfig.max_new_tokens=9")
    gconfig = load(*own).evaluation_gconfig
    assert (gconfig.n_samples, gconfig.temperature, gconfig.max_new_tokens) == (8, 0.6, 9)
    assert "n_samples=8 greedy answers would be equal" in refusal("eval_gconfig.n_samples=8")
    assert "eval_gconfig.max_new_tokens=900" in refusal(
        "valid_dataset.path=v", "server.context_length=600", "eval_gconfig.max_new_tokens=900"
    )


def test_an_override_replaces_a_whole_mapping_and_changes_single_entries(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("train_dataset: {path: 'reasoning_gym:letter_counting', options: {size: 9, min_words: 1}}\n")
    base = ["--config", str(file), "actor.path=x", "experiment_name=e", "trial_name=t", "gconfig.n_samples=2"]
    for load in (lambda argv: load_config(argv, GRPOConfig), lambda argv: load_plain(argv, GRPOConfig)):
        changed = load([*base, "train_dataset.options={size: 5, max_value: 30}"])
        assert dict(changed.train_dataset.options) == {"size": 5, "max_value": 30}
        added = load([*base, "train_dataset.options.size=7"])
        assert dict(added.train_dataset.options) == {"size": 7, "min_words": 1}
        emptied = load([*base, "train_dataset.options={}"])
        assert dict(emptied.train_dataset.options) == {}
        # Two files are merged.
        second = tmp_path / "second.yaml"
        second.write_text("train_dataset: {options: {size: 3}}\n")
        assert load([*base, "--config", str(second)]).train_dataset.options["min_words"] == 1


@dataclass
class JudgedConfig(GRPOConfig):
    """Of a user, with a secret of their own."""

    judge: str = help_field("Credential of the judge.", "", secret=True)
    judge_model: str = help_field("Its model.", "")


@pytest.mark.parametrize("is_typed", [True, False])
def test_config_yaml_has_no_value_that_is_marked_as_secret(is_typed):
    secrets = {
        "server": {"api_key": "s3cret-0", "host": "h"},
        "sglang": {"api_key": "s3cret-1", "hf_token": "s3cret-2", "tp": 2},
        "workflow_args": {"judge": {"password": "s3cret-3", "name": "kept"}, "from_env": "${oc.env:MY_TOKEN}"},
        "launcher": {"slurm": {"my_secret": "s3cret-4", "partition": "gpu"}},
        "train_dataset": {"path": "d", "options": {"api_token": "s3cret-5"}, "columns": {"prompt": "key"}},
        "valid_datasets": {"one": {"path": "d", "options": {"api_token": "s3cret-6"}}},
        "judge_model": "kept-model",
        **({"judge": "s3cret-7"} if is_typed else {"own": {"password": "s3cret-7"}}),
    }
    base = {"experiment_name": "e", "trial_name": "t", "actor": {"path": "m"}, "gconfig": {"n_samples": 2}}
    values = OmegaConf.create({**base, **secrets})
    config = OmegaConf.merge(OmegaConf.structured(JudgedConfig), values) if is_typed else values
    text = public_yaml(config)
    assert "s3cret" not in text
    shown = OmegaConf.to_container(OmegaConf.create(text))
    assert shown["server"]["api_key"] == "${oc.env:AREALITE_API_KEY}" and shown["server"]["host"] == "h"
    assert shown["sglang"]["tp"] == 2 and shown["workflow_args"]["judge"]["name"] == "kept"
    assert shown["workflow_args"]["from_env"] == "${oc.env:MY_TOKEN}"
    assert shown["train_dataset"]["columns"] == {"prompt": "key"} and shown["judge_model"] == "kept-model"
    assert private_yaml(config).count("s3cret") == 7, "ranks get all but the API key, which they have from a file"


def test_an_override_refers_to_keys_of_other_sources():
    argv = ["actor.path=x", "experiment_name=e", "trial_name=t", "gconfig.n_samples=2", "train_dataset.path=y"]
    assert load_config([*argv, "tokenizer_path=${actor.path}"], GRPOConfig).tokenizer_path == "x"


def test_a_reference_has_the_type_of_the_policy_unless_it_is_given(tmp_path):
    argv = ["actor.path=x", "experiment_name=e", "trial_name=t", "gconfig.n_samples=2", "train_dataset.path=y"]
    argv += ["actor.kl_loss_coef=0.1", "actor.dtype=float32", "ref.path=z"]
    file = tmp_path / "ref.yaml"
    file.write_text("ref: {path: z, dtype: float16}")
    for more, expected in (([], "float32"), (["ref.dtype=bfloat16"], "bfloat16"), (["--config", str(file)], "float16")):
        ref = load_config([*argv, *more], GRPOConfig).ref
        assert ref is not None and (ref.path, ref.dtype) == ("z", expected)
    assert load_config([*argv, "ref=null"], GRPOConfig).ref.path == "x"  # pyright: ignore
    pairs = ["model.path=x", "model.dtype=float32", "ref.path=z", "train_dataset.path=y", *argv[1:3]]
    assert load_config(pairs, DPOConfig).ref.dtype == "float32"  # pyright: ignore


@pytest.mark.parametrize("text", ["${x}", "a ${x} ${y:z} b", r"\frac{1}{2} ${x}", r"\${x}", r"C:\\${x}"])
def test_a_text_with_the_look_of_a_reference_can_be_escaped(tmp_path, text):
    """As OmegaConf has it: a backslash, and two for each one before it."""
    written = re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + r"\${", text)
    argv = ["actor.path=x", "experiment_name=e", "trial_name=t", "gconfig.n_samples=2", "train_dataset.path=y"]
    file = tmp_path / "escaped.yaml"
    OmegaConf.save({"gconfig": {"stop": [written]}, "workflow_args": {"text": written}}, file)
    argv += ["--config", str(file), f"train_dataset.system_prompt={written}", "tokenizer_path=${actor.path}"]
    argv += ["valid_dataset.path=v", "valid_dataset.system_prompt=${train_dataset.system_prompt}"]
    config = load_config(argv, GRPOConfig)
    # Ranks read what the launcher has written.
    (tmp_path / "rank.yaml").write_text(private_yaml(config))
    for one in (config, load_config(["--config", str(tmp_path / "rank.yaml")], GRPOConfig)):
        assert one.train_dataset.system_prompt == one.valid_dataset.system_prompt == text  # pyright: ignore
        assert (one.gconfig.stop, one.workflow_args, one.tokenizer_path) == ([text], {"text": text}, "x")
    assert load_plain(argv).train_dataset.system_prompt == text
