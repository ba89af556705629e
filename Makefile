# make demo: train a small model from nothing.  make test: the tests.  Both set up .venv first; see scripts/setup.
PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all soak lint format setup clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train a small model by asynchronous reinforcement learning, from nothing, on this machine"
	@echo "make test      the tests that need nothing but this machine"
	@echo "make test-all  also the slow ones: Ray, Slurm, SGLang, vLLM (skipped with the reason where not installed)"
	@echo "make soak      also what takes hours or says the same twice"
	@echo "make lint      ruff and pyright"
	@echo "make setup     only make .venv"

setup:
	@scripts/setup

demo: setup
	@$(PY) examples/arealite/demo.py

test: setup
	@$(PY) -m pytest $(ARGS)

test-all:
	@scripts/setup dev,ray
	@$(PY) -m pytest -m "not gpu and not soak" $(ARGS)

soak:
	@scripts/setup dev,ray
	@$(PY) -m pytest -m "not gpu" $(ARGS)

lint: setup
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m pyright

format: setup
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

clean:
	@rm -rf .venv .pytest_cache .ruff_cache *.egg-info
