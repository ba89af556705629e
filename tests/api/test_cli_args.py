import dataclasses
import math
import typing

import pytest

from arealite.api import cli_args
from arealite.api.config_field import Section
from arealite.api.errors import ConfigError

CLASSES = [
    c for c in vars(cli_args).values() if isinstance(c, type) and issubclass(c, Section) and c != Section
]  # fmt: skip


def test_every_field_has_one_line_of_help():
    for cls in CLASSES:
        for field in dataclasses.fields(cls):
            text = field.metadata.get("help", "")
            assert text and "\n" not in text, f"{cls.__name__}.{field.name} has no line of help"


def test_the_tree_stays_small():
    own = sum("ClassVar" not in str(kind) for c in CLASSES for kind in c.__annotations__.values())
    assert own <= 230, f"{own} fields: pass a backend's own flags through a dict instead"


def test_types_resolve():
    for cls in CLASSES:
        assert typing.get_type_hints(cls)


def numeric_fields():
    """Every number of every section: its class, name and declared range."""
    for cls in CLASSES:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            kinds = {hints[field.name], *typing.get_args(hints[field.name])}
            if kinds & {int, float}:
                yield pytest.param(cls, field, id=f"{cls.__name__}.{field.name}")


@pytest.mark.parametrize(("cls", "field"), list(numeric_fields()))
def test_every_number_has_a_finite_range_and_all_else_is_refused_by_its_name(cls, field):
    limits = field.metadata.get("limits")
    assert limits is not None, "declare the range of this number"
    assert math.isfinite(limits.low) and math.isfinite(limits.high)
    for value in (-1, math.nan, math.inf, -math.inf, 10**30, -(10**30), 0, limits.high, limits.high + 1, "text"):
        is_legal = not isinstance(value, str) and limits.low <= value <= limits.high
        is_legal = is_legal and not (limits.above and value == limits.low)
        given = [value] if "list" in str(field.type) else value
        try:
            cls(**{field.name: given}).check()
        except ConfigError as error:
            own = f"{field.name} must be a number {limits}, got {value!r}"
            # A legal value may contradict another field.
            assert (str(error) == own) != is_legal
        else:
            assert is_legal, f"{value!r} was accepted"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (cli_args.GenerationHyperparameters(n_samples=0), "n_samples"),
        (cli_args.GenerationHyperparameters(temperature=-1), "temperature"),
        (cli_args.OptimizerConfig(lr_scheduler_type="step"), "use one of"),
        (cli_args.OptimizerConfig(lr=0), "larger than 0"),
        (cli_args.TrainEngineConfig(path="m", dtype="int8"), "dtype"),
        (cli_args.TrainEngineConfig(path="m", device="tpu"), "device"),
        (cli_args.NormConfig(mean_level="batch", leave_one_out=True), "leave_one_out needs mean_level=group"),
        (cli_args.PPOActorConfig(path="m", c_clip=0.5), "c_clip"),
        (cli_args.InferenceEngineConfig(max_head_offpolicyness=-1), "from 0 to"),
        (cli_args.InferenceEngineConfig(pause_mode="stop"), "pause_mode"),
        (cli_args.ServerConfig(host="0.0.0.0"), "set server.api_key"),
        (cli_args.ServerConfig(api_key="ключ"), "ASCII"),
        (cli_args.ServerConfig(mem_fraction=2), "mem_fraction"),
        (cli_args.DatasetConfig(path="d", batch_size=0), "batch_size"),
        (cli_args.RecoverConfig(mode="maybe"), "mode is 'maybe'; use one of"),
        (cli_args.ClusterConfig(n_nodes=0), "n_nodes"),
    ],
)  # fmt: skip
def test_impossible_values_are_refused_with_what_to_do(part, expected):
    with pytest.raises(ConfigError, match=expected.replace("[", r"\[")):
        part.check()


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\x1b[31m", "a\u2028b", "a\x00"])
@pytest.mark.parametrize(
    ("section", "key"),
    [
        (lambda text: cli_args.LauncherConfig(slurm={"comment": text}), "slurm.comment"),
        (lambda text: cli_args.LauncherConfig(slurm={text: 1}), "slurm"),
        (lambda text: cli_args.TrainEngineConfig(path=text), "path"),
        (lambda text: cli_args.ClusterConfig(fileroot=text), "fileroot"),
        (lambda text: cli_args.ServerConfig(api_key=text), "api_key"),
    ],
)
def test_control_characters_are_refused(section, key, text):
    with pytest.raises(ConfigError, match=f"{key} must not contain the control character"):
        section(text).check()


def test_control_characters_are_allowed_in_stop_strings_and_in_fields_of_a_script():
    @dataclasses.dataclass
    class Mine(Section):
        prompt: str = "first\nsecond"

    cli_args.GenerationHyperparameters(stop=["\n\n"]).check()
    Mine().check()


@pytest.mark.parametrize("address", ["http://a:1", "a", "a:b", "a:1/x", "a b:1"])
def test_addresses_of_servers_are_host_and_port(address):
    with pytest.raises(ConfigError, match=r"write host:port, without http://"):
        cli_args.InferenceEngineConfig(server_addrs=[address]).check()
    with pytest.raises(ConfigError, match="more than once"):
        cli_args.InferenceEngineConfig(server_addrs=["a:1", "a:1"]).check()
    cli_args.InferenceEngineConfig(server_addrs=["a-b.c:1", "10.0.0.1:65535", "[::1]:80"]).check()


def grpo(**kwargs) -> cli_args.GRPOConfig:
    return cli_args.GRPOConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=cli_args.DatasetConfig(path="d"),
        **{
            "actor": cli_args.PPOActorConfig(path="m"),
            "gconfig": cli_args.GenerationHyperparameters(n_samples=4),
            **kwargs,
        },
    )


def test_impossible_combinations_are_refused():
    grpo().check()
    with pytest.raises(ConfigError, match="makes every group advantage zero"):
        grpo(gconfig=cli_args.GenerationHyperparameters(n_samples=1)).check()
    with pytest.raises(ConfigError, match="different distributions"):
        grpo(gconfig=cli_args.GenerationHyperparameters(n_samples=4, temperature=0.7)).check()
    fp8, lora = cli_args.ServerConfig(weight_dtype="fp8"), cli_args.PPOActorConfig(path="m", lora_rank=8)
    with pytest.raises(ConfigError, match=r"rollout.weight_update=auto sends adapters alone"):
        grpo(actor=lora, server=fp8).check()
    grpo(actor=lora, server=fp8, rollout=cli_args.InferenceEngineConfig(weight_update="shm")).check()


@pytest.mark.parametrize(
    ("config", "full", "lora"),
    [
        (cli_args.PPOActorConfig, 2e-6, 2e-5),
        (cli_args.PPOCriticConfig, 1e-5, 1e-4),
        (cli_args.PreferenceConfig, 3e-6, 1e-4),
        (cli_args.TrainEngineConfig, 1e-5, 1e-4),
    ],
)
def test_full_fine_tuning_and_lora_have_their_own_default_learning_rates(config, full, lora):
    assert config(path="m").peak_lr == pytest.approx(full)
    assert config(path="m", lora_rank=8).peak_lr == pytest.approx(lora)
    given = cli_args.OptimizerConfig(lr=3e-4)
    assert config(path="m", lora_rank=8, optimizer=given).peak_lr == 3e-4
