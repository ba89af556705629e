"""Rows and rewards by name, by column map, and what is refused before a run starts."""

import gzip
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import AReaLiteError, ConfigError, DatasetError, RequestError
from arealite.api.reward_api import check_columns
from arealite.cli.main import MainConfig, flatten
from arealite.reward.gsm8k import gsm8k_reward
from arealite.reward.math import math_reward
from arealite.trainer import task_formats
from arealite.trainer.tasks import REWARDS, TASKS, check_data, find_reward, find_task, load_rl, load_sft
from arealite.utils.config import load_config
from tests.tiny_vision import make_vision_model, picture

DATA = os.environ.get("AREALITE_TEST_DATA", "")


@pytest.mark.parametrize(
    ("path", "task"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("/data/math/gsm8k/train.jsonl", "gsm8k"),
        ("EleutherAI/hendrycks_math", "math"),
        ("/data/mathematics/x.jsonl", None),
        ("/data/mathword/mawps_addsub.jsonl", "mawps"),
        ("Anthropic/hh-rlhf", "hh_rlhf"),
        ("trl-lib/tldr", "tldr"),
        ("openai_humaneval", "humaneval"),
        ("rajpurkar/squad", "search_qa"),
        ("/data/qa/nq_open_val.jsonl", "search_qa"),
        ("allenai/sciq", "sciq"),
        ("BUAADreamer/clevr_count_70k", "clevr_count"),
        ("hiyouga/geometry3k", "geometry3k"),
        ("reasoning_gym:gcd", "reasoning_gym"),
        ("generate:countdown", "countdown"),
        ("mine.jsonl", None),
    ],
)
def test_a_path_names_its_task(path, task):
    found = find_task(DatasetConfig(path=path))
    assert found == (TASKS[task] if task else type(found)())
    # A column map means that it is other data.
    assert find_task(DatasetConfig(path=path, columns={"prompt": "q"})).reward is None


def test_rewards_are_named_by_the_dataset_then_the_run_then_the_task():
    data = DatasetConfig(path="gsm8k.jsonl")
    assert find_reward(data) is gsm8k_reward and find_reward(data, "math") is math_reward
    own = DatasetConfig(path="gsm8k.jsonl", reward="arealite.reward.math:math_reward")
    assert find_reward(own, "gsm8k") is math_reward


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (None, "no reward is known for the dataset 'mine.jsonl': set reward to a built-in one .gsm8k, math"),
        ("maths", r"there is no reward 'maths': use gsm8k, math.* did you mean math\?"),
        ("my_task.vowels", r"there is no reward 'my_task.vowels': .* did you mean my_task:vowels\?"),
        ("no_such_module:f", "reward=no_such_module:f: there is no module 'no_such_module'"),
        ("arealite.reward.math:nothing", "the module arealite.reward.math has no 'nothing'"),
        ("arealite.reward.math:_MAX_FORMULA", "is a int; it must be a class or a function"),
    ],
)
def test_unknown_rewards_are_refused(reward, message):
    with pytest.raises(ConfigError, match=message):
        find_reward(DatasetConfig(path="mine.jsonl", reward=reward))


ROWS = {
    "math": ({"problem": "1+1?", "solution": "so $\\boxed{2}$"}, {"answer": "2"}),
    "countdown": ({"nums": [1, 2, 3], "target": 6}, {"numbers": [1, 2, 3], "target": 6, "answer": None}),
    "tldr": ({"content": "Long.", "summary": " Short. "}, {"answer": "Short."}),
    "hh_rlhf": (
        {"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
         "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: e"},
        {"answer": "d"},
    ),
    "search_qa": ({"question": "who", "answers": {"text": ["I", "me"]}}, {"answer": ["I", "me"]}),
    "clevr_count": (
        {"images": ["i"], "problem": "<image>How many?", "answer": "<answer> 3 </answer>"},
        {"answer": "3", "images": ["i"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("task", ROWS)
def test_rows_of_tasks_have_what_their_rewards_need(tmp_path, tokenizer, task):
    raw, expected = ROWS[task]
    (tmp_path / "rows.jsonl").write_text(json.dumps(raw) + "\n")
    (row,) = load_rl(DatasetConfig(path=str(tmp_path / "rows.jsonl"), task=task), tokenizer)
    messages = row.pop("messages")
    assert row == expected
    if task == "hh_rlhf":
        assert [(m["role"], m["content"]) for m in messages] == [("user", "a"), ("assistant", "b"), ("user", "c")]
    if task == "clevr_count":
        assert "<image>" not in messages[-1]["content"]


def test_choices_are_shuffled_by_the_question(tmp_path, tokenizer):
    rows = [
        {"question": f"q{i}", "correct_answer": "yes", "distractor1": "a", "distractor2": "b", "distractor3": "c"}
        for i in range(40)
    ]
    (tmp_path / "sciq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = load_rl(DatasetConfig(path=str(tmp_path / "sciq.jsonl")), tokenizer)
    assert {row["answer"] for row in made} == set("ABCD")
    assert all(row["choices"]["ABCD".index(row["answer"])] == "yes" for row in made)
    assert all(f"{row['answer']}. yes" in row["messages"][-1]["content"] for row in made)


def check(tmp_path, kind, *argv):
    common = [f"trainer.type={kind}", f"cluster.fileroot={tmp_path}", "total_train_steps=1"]
    common += [] if kind == "null" else ["train_dataset.batch_size=1"]
    config = load_config([*common, *argv], MainConfig)
    check_data(flatten(config), config.trainer.type)


@pytest.mark.parametrize(
    ("kind", "argv", "message"),
    [
        ("grpo", ["reward=math"], r"rows\.jsonl, row 1: it has no `prompt`.* its columns are q, a, n. Set columns"),
        ("grpo", ["reward=math", "train_dataset.columns={prompt: n}"], "row 1: `prompt` must be text, not int"),
        ("grpo", ["reward=math", "train_dataset.columns.prompt={q} or {b}"], "the field {b}, which is not a column"),
        ("grpo", ["train_dataset.columns.prompt=q"], "no reward is known"),
        ("grpo", ["train_dataset.columns.prompt=q", "reward=maths"], "there is no reward 'maths'"),
        ("grpo", ["train_dataset.task=maths"], "there is no task 'maths': use one of gsm8k"),
        ("sft", [], "row 1: supervised training needs `messages`"),
        ("sft", ["train_dataset.columns={prompt: q, response: n}"], "row 1: `response` must be text, not int"),
        ("rw", [], "row 1: a pair needs the columns chosen and rejected; it lacks chosen and rejected and has q, a"),
    ],
)
def test_data_that_cannot_be_used_is_refused_before_anything_starts(tmp_path, kind, argv, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "1+1?", "a": "2", "n": 3}\n')
    with pytest.raises(AReaLiteError, match=message):
        check(tmp_path, kind, f"train_dataset.path={path}", *argv)


@pytest.mark.parametrize("name", ["gsm8k", "math", "qa", "f1", "choice", "countdown"])
def test_rewards_that_ship_say_which_column_they_miss(name):
    with pytest.raises(DatasetError, match=rf"the reward {name}_reward needs '(answer|numbers)'.*the columns q: set"):
        check_columns(REWARDS[name], {"q": 1})


PROMPTS = "train_dataset.columns={prompt: q, answer: a, response: a, chosen: q, rejected: a}"


@pytest.mark.parametrize(
    ("kind", "argv", "message"),
    [
        ("grpo", ["train_dataset.batch_size=4"], r"rows\.jsonl has 3 rows, fewer than one batch: lower batch_size=4"),
        ("grpo", ["train_dataset.batch_size=3", "train_dataset.few_shot=1"], "has 2 rows, fewer than one batch"),
        ("grpo", ["train_dataset.batch_size=4", "train_dataset.streaming=true"], "has 3 rows, fewer than one batch"),
        ("sft", ["train_dataset.batch_size=4"], "has 3 rows, fewer than one batch"),
        ("dpo", ["trainer.dpo.model.loss=simpo", "train_dataset.batch_size=4"], "has 3 rows, fewer than one batch"),
        (
            "sft",
            ["train_dataset.batch_size=2", "allocation_mode=d2", "valid_dataset.columns={prompt: q, response: a}"],
            "set valid has 1 rows, and each of 2 data-parallel ranks needs one",
        ),
        (
            "dpo",
            ["train_dataset.batch_size=4", "trainer.dpo.model.loss=kto", "trainer.dpo.ref.path=x",
             "allocation_mode=d2"],
            r"rows.jsonl has 3 rows, and model\.loss=kto, .* needs 4 or more \(2 for each data-parallel rank\)",
        ),
        (
            "dpo",
            ["train_dataset.batch_size=2", "trainer.dpo.model.loss=kto", "trainer.dpo.ref.path=x",
             "valid_dataset.columns={chosen: q, rejected: a, prompt: q}"],
            "set valid has 1 rows, one for each data-parallel rank, and model.loss=kto compares",
        ),
    ],
)  # fmt: skip
def test_too_few_rows_are_refused_before_anything_starts(tmp_path, kind, argv, message):
    train, valid = tmp_path / "rows.jsonl", tmp_path / "valid.jsonl"
    train.write_text('{"q": "1+1?", "a": "2"}\n' * 3)
    valid.write_text('{"q": "1+1?", "a": "2"}\n')
    if any(key.startswith("valid") for key in argv):
        argv = [*argv, f"valid_dataset.path={valid}"]
    reward = ["reward=math"] if kind == "grpo" else []
    keys = [f"train_dataset.path={train}", PROMPTS, *reward, *argv]
    with pytest.raises(DatasetError, match=message):
        check(tmp_path, kind, *keys)
    # Enough rows pass.
    train.write_text('{"q": "1+1?", "a": "2"}\n' * 4)
    valid.write_text('{"q": "1+1?", "a": "2"}\n' * 2)
    check(tmp_path, kind, *keys)


@pytest.mark.parametrize("streaming", [False, True])
def test_single_answers_with_a_label_are_checked_for_the_loss(tmp_path, streaming):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1?", "completion": "2", "label": true}\n' * 4)
    keys = [f"train_dataset.path={path}", f"valid_dataset.path={path}", f"train_dataset.streaming={streaming}"]
    keys += ["train_dataset.batch_size=2", "trainer.dpo.ref.path=x"]
    check(tmp_path, "dpo", *keys, "trainer.dpo.model.loss=kto")
    with pytest.raises(DatasetError, match=r"row 1: .*`label`, and model\.loss=dpo compares two"):
        check(tmp_path, "dpo", *keys)
    with pytest.raises(DatasetError, match=r"row 1: .*`label`, and a reward model compares two"):
        check(tmp_path, "rw", *keys[:-1])


def test_a_mixture_has_the_rows_of_all_its_sets(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "1+1?", "a": "2"}\n' * 2)
    sets = [f"train_datasets.{name}.path={path}" for name in "xy"]
    sets += [f"train_datasets.{name}.columns={{prompt: q, answer: a}}" for name in "xy"]
    check(tmp_path, "grpo", *sets, "reward=math", "train_dataset.batch_size=4")
    with pytest.raises(DatasetError, match="of train_datasets has 4 rows, fewer than one batch"):
        check(tmp_path, "grpo", *sets, "reward=math", "train_dataset.batch_size=5")


def test_a_conversation_may_become_several_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    check(tmp_path, "sft", f"train_dataset.path={path}", "train_dataset.batch_size=2")


def test_data_with_a_column_map_passes(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "1+1?", "a": "2", "n": 3}\n')
    columns = "columns={prompt: 'What is {q}', answer: a}"
    sets = [f"train_datasets.x.path={path}", f"train_datasets.x.{columns}", "train_datasets.y.path=reasoning_gym:gcd"]
    check(tmp_path, "grpo", f"train_dataset.path={path}", f"train_dataset.{columns}", "reward=math")
    check(tmp_path, "null", f"valid_dataset.path={path}", f"valid_dataset.{columns}", "valid_dataset.reward=math")
    check(tmp_path, "sft", f"train_dataset.path={path}", "train_dataset.columns={prompt: q, response: a}")
    pytest.importorskip("reasoning_gym")
    check(tmp_path, "grpo", *sets, "train_datasets.x.reward=math")
    with pytest.raises(DatasetError, match=r"row 1: columns\.prompt=b names no column"):
        check(tmp_path, "grpo", *sets, "train_datasets.x.columns.prompt=b", "train_datasets.x.reward=math")


def test_images_of_the_first_row_are_checked_before_anything_starts(tmp_path):
    make_vision_model(tmp_path / "model", "llava")
    path, columns = tmp_path / "rows.jsonl", {"prompt": "how many?", "answer": "2"}
    argv = [f"train_dataset.path={path}", "reward=math", f"trainer.grpo.actor.path={tmp_path / 'model'}"]
    (tmp_path / "a.png").write_bytes(picture())
    path.write_text(json.dumps(columns | {"images": [str(tmp_path / "a.png")]}))
    check(tmp_path, "grpo", *argv)
    path.write_text(json.dumps(columns | {"images": [str(tmp_path / "b.png")]}))
    with pytest.raises(RequestError, match=r"the image '.*b\.png' is not a file"):
        check(tmp_path, "grpo", *argv)


def stub_of(raw):
    """Return code with the names of a solution, in which nothing is computed."""
    functions = re.findall(r"^def\s+(\w+)", raw["code"], re.M)
    classes = re.findall(r"^class\s+(\w+)", raw["code"], re.M)
    lines = [f"def {name}(*a, **k): return None" for name in functions]
    lines += [f"class {name}:\n  def __init__(self, *a, **k): pass" for name in classes]
    return "\n".join(lines)


# Of each file: how many rows it has, a right answer and a wrong one.
REFERENCES = {
    "gsm8k/train.jsonl": (7473, lambda raw, row: raw["answer"], "It is 0.123."),
    "gsm8k/test.jsonl": (1319, lambda raw, row: raw["answer"], "It is 0.123."),
    "mathword/mawps_addsub.jsonl": (395, lambda raw, row: f"It is {raw['target']}.", "It is 0.123."),
    "mathword/mawps_multiarith.jsonl": (600, lambda raw, row: f"It is {raw['target']}.", "It is 0.123."),
    "mathword/mawps_singleeq.jsonl": (508, lambda raw, row: f"It is {raw['target']}.", "It is 0.123."),
    "mathword/mawps_singleop.jsonl": (562, lambda raw, row: f"It is {raw['target']}.", "It is 0.123."),
    "math/math_test_5000.jsonl": (5000, lambda raw, row: raw["solution"], "I do not know."),
    "qa/squad_1000.jsonl": (1000, lambda raw, row: row["answer"][-1], "I do not know."),
    "qa/nq_open_val.jsonl": (3610, lambda raw, row: f"<answer>{row['answer'][0]}</answer>", "I do not know."),
    "qa/hotpot_dev_simplified.json": (7405, lambda raw, row: f"<answer>{row['answer'][0]}</answer>", "I do not know."),
    "qa/sciq_val.jsonl": (
        1000,
        lambda raw, row: f"<answer>{row['answer']}</answer>",
        lambda raw, row: f"<answer>{raw['distractor1']}</answer>",
    ),
    "code/HumanEval.jsonl.gz": (164, lambda raw, row: raw["canonical_solution"], "    pass\n"),
    "code/mbpp.jsonl": (
        974,
        lambda raw, row: f"Here it is:\n```python\n{raw['code']}\n```",
        lambda raw, row: f"```python\n{stub_of(raw)}\n```",
    ),
}


def read(path):
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        return json.load(file) if path.suffix == ".json" else [json.loads(line) for line in file]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not DATA, reason="AREALITE_TEST_DATA names no folder")
@pytest.mark.parametrize("name", REFERENCES)
def test_reference_answers_of_real_data_are_right_and_others_wrong(name, tokenizer):
    count, right, wrong = REFERENCES[name]
    data = DatasetConfig(path=str(Path(DATA) / name))
    rows, reward, raws = load_rl(data, tokenizer), find_reward(data), read(Path(DATA) / name)
    assert len(rows) == len(raws) == len(load_sft(data, tokenizer)) == count

    def score(raw, row, answer):
        columns = {key: value for key, value in row.items() if key != "messages"}
        completion = answer if isinstance(answer, str) else answer(raw, row)
        return reward(prompt="", completion=completion, prompt_ids=[], completion_ids=[], **columns)

    with ThreadPoolExecutor(2) as pool:
        for answer, expected in ((right, 1.0), (wrong, 0.0)):
            scores = pool.map(lambda raw, row: score(raw, row, answer), raws, rows)  # noqa: B023
            others = [row for row, value in zip(rows, scores, strict=True) if value != expected]
            assert not others, f"{len(others)} of {count}: {others[:3]}"


def score_alone(completion):
    return 1.0


def score_lists(completions, **columns):
    return [1.0] * len(completions)


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="AREALITE_TEST_DATA names no folder")
def test_dialogues_of_hh_rlhf_are_split(tokenizer):
    path = Path(DATA) / "hh-rlhf" / "harmless-base_test.jsonl.gz"
    with gzip.open(path, "rt") as file:
        raw = [json.loads(line) for line in file]
    rows = load_rl(DatasetConfig(path=str(path)), tokenizer)
    assert len(rows) == len(raw) == 2312
    for old, row in zip(raw, rows, strict=True):
        assert row["messages"][0]["role"] == row["messages"][-1]["role"] == "user"
        assert old["chosen"].rstrip().endswith(row["answer"])
    assert task_formats.to_messages("\n\nHuman: a\n\nAssistant:") == [{"role": "user", "content": "a"}]


def score(completion, target, **row):
    return 0.0


def test_tokenizer_chat_template_and_columns_of_the_reward_are_checked(model_path, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n")
    data = f"train_dataset.path={rows}"
    with pytest.raises(
        AReaLiteError, match="the reward score needs 'target', and a row has the columns messages, answer"
    ):
        check(tmp_path, "grpo", data, f"reward={__name__}:score", f"trainer.grpo.actor.path={model_path}")
    for name, message in {
        "score_alone": "the reward score_alone does not take 'prompt', 'prompt_ids', 'completion_ids', 'answer', which",
        "score_lists": "the reward score_lists takes `completions`, a list as in TRL",
    }.items():
        with pytest.raises(AReaLiteError, match=message):
            check(tmp_path, "grpo", data, f"reward={__name__}:{name}", f"trainer.grpo.actor.path={model_path}")
    empty, plain = tmp_path / "empty", shutil.copytree(model_path, tmp_path / "plain")
    empty.mkdir()
    shutil.copy(model_path / "config.json", empty)
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(AReaLiteError, match=r"cannot load a tokenizer from .*empty"):
        check(tmp_path, "grpo", data, "reward=math", f"trainer.grpo.actor.path={empty}")
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows.write_text(json.dumps({"messages": turns, "answer": "2"}) + "\n")
    check(tmp_path, "sft", data, f"trainer.sft.model.path={model_path}")
    for kind, key in (("grpo", "actor"), ("sft", "model")):
        with pytest.raises(AReaLiteError, match=r"rows\.jsonl, row 1: .*the tokenizer has no chat template"):
            check(tmp_path, kind, data, "reward=math", f"trainer.{kind}.{key}.path={plain}")
