"""The column map: columns, values inside them, templates, and what is said about rows that do not fit."""

import pytest

from arealite.api.errors import DatasetError
from arealite.dataset.columns import apply_columns, fill_template, map_rows

ROW = {"q": "1+1", "a": {"text": ["2", "two"]}, "n": 3, "level": None, "a.b": "dotted"}


def test_a_name_maps_to_a_column_a_value_inside_it_or_a_text():
    columns = {"prompt": "{q} = ? Put it in \\boxed{} ({n} points)", "answer": "a.text.1", "all": "a.text", "b": "a.b"}
    assert apply_columns(ROW, columns) == {
        "prompt": "1+1 = ? Put it in \\boxed{} (3 points)",
        "answer": "two",
        "all": ["2", "two"],
        "b": "dotted",
    }
    assert apply_columns(ROW, {}) is ROW


def test_values_are_not_expanded_again():
    assert fill_template("{q}", {"q": "{secret}", "secret": "x"}, "t") == "{secret}"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("question", "row 2: columns.prompt=question names no column; its columns are q, a, n, level, a.b"),
        ("{question}?", "row 2: columns.prompt has the field {question}, which is not a column; its columns are q, a"),
        ("a.text.7", "row 2: columns.prompt=a.text.7 names no column"),
        ("{a}", "row 2: columns.prompt has the field {a}, whose value is dict, not text or a number"),
        ("{level}", "row 2: columns.prompt has the field {level}, whose value is NoneType"),
    ],
)
def test_what_does_not_fit_names_the_row_and_its_columns(spec, message):
    rows = [ROW | {"question": "x", "a": {"text": list("abcdefgh")}}, ROW]
    if spec in ("{a}", "{level}"):
        rows[0] = ROW | {"a": "text", "level": "text"}
    with pytest.raises(DatasetError) as caught:
        map_rows(rows, lambda row: apply_columns(row, {"prompt": spec}), "data.jsonl")
    assert str(caught.value).startswith(f"data.jsonl, {message}") and "\n" not in str(caught.value)
