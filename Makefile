# The two commands of the README are `make grpo` and `make test`; each sets up first.
.NOTPARALLEL:
.PHONY: help setup grpo test quick nightly lint types format pins

# One thread a process: two ranks share the machine, and vLLM's CPU kernels are slower with more.
export OMP_NUM_THREADS := 1
# Pyright is bundled in its wheel: it need not ask the network for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
unexport VIRTUAL_ENV PYTHONHOME

BIN := .venv/bin
RECIPE := bin/recipes/grpo_tiny_cpu.yaml
# Two test processes, each with its own rank processes and engines; a file stays in one of them.
TWO := -n 2 --dist loadfile

help:
	@echo "make grpo    set up, then train the tiny model with GRPO on this machine's CPU"
	@echo "make test    set up, then lint, type checks and every test"
	@echo "make quick   set up, then the tests that take less than 5 seconds each"
	@echo "make nightly set up, then every kind of layout with a pre-trained model of 135 M parameters"
	@echo "make lint types format pins"

setup:
	@bash .ci/setup

grpo: setup
	$(BIN)/python bin/make_tiny.py --config $(RECIPE)
	$(BIN)/torchrun --nproc-per-node 2 bin/grpo.py --config $(RECIPE)

test: lint types
	$(BIN)/pytest -q $(TWO) --durations=10

quick: setup
	$(BIN)/pytest -q $(TWO) -m "not slow"

nightly: setup
	@bash .ci/setup nightly
	PYTHONPATH=runs/nightly/packages $(BIN)/python tests/nightly.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Resolves pyproject.toml into .ci/pins.txt. Versions stay unless ARGS=--upgrade is given.
pins:
	@bash .ci/setup pins $(ARGS)
