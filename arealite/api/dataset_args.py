"""Configuration of data: where rows come from, what they are made of, and their order.

`cli_args` exports these classes. A dataset is either of a built-in task (`arealite.trainer.tasks`), or `columns` and
`reward` say what its columns mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from arealite.api.config_field import AT_LEAST_1, SHARE, Range, Section
from arealite.api.config_field import help_field as _help

# How names of local data files end.
DATA_FILES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet", ".arrow")
# Starts of paths whose rows are generated.
GENERATED = ("reasoning_gym:", "generate:")
# The column of a row that names its set, in a mixture of training sets. Rows that have a `data_source` of their own,
# as those of verl, keep it for their reward, and name their set in the other one.
SOURCE_COLUMN, MIXTURE_COLUMN = "data_source", "_training_set"


@dataclass
class DataSourceConfig(Section):
    """Rows of one file, folder, hub dataset or generator."""

    path: str = _help(
        "Local .jsonl/.json/.csv/.parquet/.arrow file or folder, hub name, reasoning_gym:TASK or generate:TASK.", ""
    )
    name: str | None = _help("Configuration of a hub dataset (`main` of gsm8k), or its sub-folder in a download.", None)
    split: str | None = _help("Split of a hub dataset or local folder; default: by role (train, test).", None)
    task: str | None = _help("Built-in task; null: the one whose name is in the path, unless `columns` is set.", None)
    columns: dict[str, str] = _help(
        "What rows are made of, by name (prompt or messages, answer, …): a column, or text with {column}.",
        dict,
        any_text=True,
    )
    reward: str | None = _help("As `reward`, for this dataset; null: `reward`, or the task's.", None)
    system_prompt: str | None = _help(
        "Put before every prompt; messages that begin with a system message keep that one.", None, any_text=True
    )
    prompt_template: str | None = _help(
        "Plain text with {prompt}; the model then continues text instead of a chat.", None, any_text=True
    )
    few_shot: int = _help("Show the first n rows with their answers before every prompt.", 0, Range(0, 1000))
    max_length: int | None = _help("Leave out rows with more tokens; an image counts as one.", None, AT_LEAST_1)
    streaming: bool = _help("Read rows when they are needed, for data larger than memory.", False)
    options: dict[str, Any] = _help("Generated rows: size, seed, and the task's own parameters.", dict, secret=True)

    # Which split is read if `split` is not set.
    is_validation: ClassVar[bool] = False

    def problems(self) -> Iterator[str]:
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            yield f"prompt_template must contain {{prompt}}, got {self.prompt_template[:200]!r}"
        if self.options and not self.path.startswith(GENERATED):
            yield f"options are of generated rows only ({', '.join(GENERATED)}), and path is {self.path!r}"
        if self.streaming and self.path.startswith(GENERATED):
            yield f"streaming reads files, and the rows of {self.path} are generated: leave it out"


@dataclass
class MixtureSourceConfig(DataSourceConfig):
    """One of several training sets."""

    weight: float | None = _help(
        "Share of all rows, relative to the other sets; null for all: by their numbers of rows.", None,
        Range(0, 10**6, above=True),
    )  # fmt: skip


@dataclass
class CurriculumConfig(Section):
    """Draws rows by the share of their last answers that were right."""

    low: float = _help("Rows with a lower pass rate are mostly skipped.", 0.1, SHARE)
    high: float = _help("Rows with a higher pass rate are mostly skipped.", 0.9, SHARE)
    outside: float = _help("Probability of drawing a row outside the band, so that its rate stays known.", 0.1,
                           Range(0.01, 1))  # fmt: skip

    def problems(self) -> Iterator[str]:
        if self.low > self.high:
            yield f"low={self.low} is more than high={self.high}"


@dataclass
class DatasetConfig(DataSourceConfig):
    """A dataset and how it is batched."""

    batch_size: int = _help("Rows per step, over all ranks.", 8, AT_LEAST_1)
    shuffle: bool = _help("Shuffle in each epoch, by the seed.", True)
    curriculum: CurriculumConfig | None = _help("RL: draw rows by their pass rate; null: all alike.", None)


@dataclass
class ValidationDatasetConfig(DatasetConfig):
    """A dataset that is evaluated on."""

    is_validation: ClassVar[bool] = True

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.curriculum is not None:
            yield "curriculum is for training data: leave it out"
