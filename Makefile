# Everything runs from .venv; needs only python3 (>= 3.11) with pip.
PYTHON   ?= python3
# More arguments for pip, e.g. an index with CPU-only wheels of torch.
PIP_ARGS ?=
# Yardsticks shared between checkouts: reference benchmarks and conformance cases.
SHARED   ?= ../shared
export SHARED

BIN   := .venv/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
STAMP := .venv/.installed
OTHER := .venv-torch-$(VERSION)-$(notdir $(PYTHON))

# Ranks are processes or threads already: more threads inside each operation only fight for the cores.
ONE_THREAD := OMP_NUM_THREADS=1
# One worker more than cores (tests/conftest.py).  What tests start again and again is compiled once.
PYTEST  := $(ONE_THREAD) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick test-long test-torch lint format bench bench-quick gpu conformance conformance-yardstick conformance-paddle conformance-models mutants seeds docs changelog clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## make .venv and install everything into it

# Debian ships python3 without ensurepip unless python3-venv is installed: then the system's pip fills the venv.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv .venv || { $(PYTHON) -m venv --clear --without-pip .venv && \
	  $(PYTHON) -m pip --python $(BIN)/python install pip; }

# torch first and alone: the large download is kept when a later step fails.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install $(PIP_ARGS) "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## train a small model on 2 x 2 processes and compare it with one device
	$(ONE_THREAD) $(BIN)/meshwright train --model example --mesh dp=2,tp=2 --dtype float64 --steps 30 --verify

test: setup  ## the tests, and which ten took longest
	$(PYTEST) --durations 10

test-quick: setup  ## the most telling tests of each room of the core, in a minute or two
	$(PYTEST) $$($(BIN)/python -m tests.support.quick)

test-long: setup  ## all tests, with whole grids and long sweeps
	$(PYTEST) --whole

test-torch:  ## the tests on other versions: make test-torch VERSION=2.15.0 (PYTHON=python3.13, TESTS=... for some of them)
	@test -n "$(VERSION)" || { echo "say which: make test-torch VERSION=2.15.0"; exit 2; }
	$(PYTHON) -m venv $(OTHER)
	grep -v -e '^torch==' -e '^setuptools==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install $(PIP_ARGS) torch==$(VERSION) -c $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install $(PIP_ARGS) -c $(OTHER)/constraints.txt -e '.[dev]'
	$(subst $(BIN),$(OTHER)/bin,$(PYTEST)) $(TESTS)

lint: setup  ## ruff, mypy, the order of the layers, readable pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/project/test_layering.py tests/project/test_readability.py tests/project/test_changelog.py

format: setup  ## let ruff format and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## the benchmarks: figures, targets, verdicts
	$(BIN)/python -m bench

bench-quick: setup  ## do all benchmarks run?
	$(BIN)/python -m bench --quick

gpu:  ## what one CUDA device can show, in one report (.venv where there is one, else PYTHON); without a device, shrunken
	$(ONE_THREAD) PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m bench.gpu

conformance: setup  ## PyTorch's op database on 4 processes, and DTensor beside it with bytes
	$(BIN)/python -m conformance.opdb --against dtensor

conformance-yardstick: setup  ## the same database by the harness of a shared folder (SHARED=DIR)
	$(BIN)/python -m conformance.yardstick

conformance-paddle: setup  ## the rules against recorded answers of PaddlePaddle's
	$(ONE_THREAD) $(BIN)/meshwright check paddle

conformance-models: setup  ## models of transformers on meshes against one device, eager and captured
	$(ONE_THREAD) $(BIN)/python conformance/models.py

mutants: setup  ## mutants of the core, which some test should notice (MUTANTS="passes/ --sample 60": some of them)
	$(ONE_THREAD) $(BIN)/python -m conformance.mutation --least 0.9 $(MUTANTS)

docs: setup  ## the site in build/site, without a warning; look at it: python -m http.server -d build/site
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

changelog: setup  ## the next version's section of CHANGELOG.md, from changelog.d/ (at a release: towncrier build --version X)
	$(BIN)/towncrier build --draft --version next

seeds: setup  ## break the code behind the rows of docs/seeds.md: their tests must notice (SEEDS="1-20 --others": some of them)
	$(ONE_THREAD) $(BIN)/python -m tests.support.seeds $(SEEDS)

clean:  ## remove .venv, caches and outputs
	rm -rf .venv .venv-torch-* build dist runs bench/out conformance/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
