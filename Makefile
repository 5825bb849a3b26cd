# Every target makes what it needs: the first one builds .venv (three to six minutes, mostly downloads).

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two workers of one thread each: as fast as two cores get, and the same numbers everywhere.
ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline
WORKERS ?= 2

.PHONY: help setup demo test test-fast check format bench clean

help:
	@echo "make setup      build .venv from constraints.txt (once, three to six minutes)"
	@echo "make demo       train two heads, watch their circuits, say which algorithm they learned (under two minutes)"
	@echo "make test-fast  the tests for the hand (under four minutes)"
	@echo "make test       every test (under twenty-five minutes on two cores)"
	@echo "make check      format, lint, types, imports"
	@echo "make bench      the speed floors, as ratios in one process"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "Building $(VENV): three to six minutes the first time."; $(PYTHON) -m venv $(VENV); }
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,integrations]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/icl-mechinterp demo

test-fast: $(STAMP)
	$(ENV) $(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu"

test: $(STAMP)
	$(ENV) $(BIN)/python -m pytest -n $(WORKERS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	@for script in benchmarks/*.py; do echo "== $$script"; OMP_NUM_THREADS=1 $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .hypothesis
