# `make demo` trains a small model from nothing. `make test` runs the tests. Both make .venv first (scripts/setup).
PY := .venv/bin/python
# Test processes that run at the same time. On two cores a third one works while tests wait for what they started.
JOBS ?= 3
REAL := slurm or ray or vllm or sglang or browser
export OMP_NUM_THREADS ?= 1
# Tests start many interpreters: let them keep compiled modules (in __pycache__), whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-all soak lint format docs diagrams clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train a small model by asynchronous reinforcement learning on this machine"
	@echo "make test      run the tests that need nothing but this machine (about five minutes on two cores)"
	@echo "make test-all  also the slow tests, and those with Ray, Slurm, SGLang, vLLM and Chromium where they are installed"
	@echo "make soak      also the tests that take hours"
	@echo "make lint      ruff and pyright"
	@echo "make format    let ruff rewrite the files"
	@echo "make docs      build the documentation into site/; see it with: $(PY) -m http.server -d site"
	@echo "make diagrams  render docs/architecture/*.puml again where they changed (needs PlantUML)"
	@echo "make setup     only make .venv"
	@echo 'pytest options: make test ARGS="-x tests/engine"'

setup:
	@scripts/setup

demo: setup
	@$(PY) examples/arealite/demo.py

test: setup
	@$(PY) -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

# Clusters and servers of the real tests exist once: those tests run in one process.
test-all:
	@scripts/setup dev,ray,browser
	@$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not gpu and not soak and not ($(REAL))" $(ARGS)
	@$(PY) -m pytest -q -m "($(REAL)) and not gpu and not soak" $(ARGS)

soak:
	@scripts/setup dev,ray,browser
	@$(PY) -m pytest -q -m "not gpu" $(ARGS)

lint: setup
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m pyright

format: setup
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

docs:
	@scripts/setup dev,docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

diagrams: setup
	@$(PY) scripts/diagrams.py

clean:
	@rm -rf .venv site .pytest_cache .ruff_cache *.egg-info
