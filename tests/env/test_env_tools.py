"""The tools that ship with the package: Python in the sandbox, search over a corpus."""

import asyncio

from arealite.env.python_tool import python
from arealite.env.search import BM25Index

CORPUS = {
    "France": "Paris is the capital of France, on the river Seine.",
    "Italy": "Rome is the capital of Italy.",
    "Rivers": "The Seine, the Tiber and the Thames are rivers. " * 20,
}


def test_python_runs_in_the_sandbox():
    assert python("print(2**10)") == "1024"
    assert "ZeroDivisionError" in python("1 / 0")
    assert python("x = 1") == "[the code printed nothing]"
    assert "secret" not in python("import os; print(os.environ)")


def test_search_finds_the_best_passages_first():
    index = BM25Index.from_texts(CORPUS, num_results=2, max_chars=40)
    found = asyncio.run(index.search("What is the capital of France?"))
    assert found.startswith("France: Paris is the capital of France, on the")
    assert len(found.split("\n\n")) == 2 and all(len(part) < 60 for part in found.split("\n\n"))
    assert asyncio.run(index.search("zebra \ud800\0")) == asyncio.run(index.search("")) == "nothing found"
    # A word in one passage weighs more than one in all; a long passage counts less.
    scores = dict(index.ranked("seine"))
    assert scores[0] > 0 and 1 not in scores
    assert asyncio.run(BM25Index().search("anything")) == "nothing found"
