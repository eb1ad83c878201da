# Two commands do everything on a fresh machine:  make train   and   make test
# Pass options to the job with ARGS:               make train ARGS="--epochs 5 --batch-size 128"

PYTHON ?= python3
# `make test-versions` sets these two
VENV := .venv
CONSTRAINTS := requirements.lock
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# three files of tests at a time, also on two cores: much of their time is waiting; four with a cluster and containers
PYTEST := $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder
# folders all of whose tests are slow: where none of them is run, none need be collected
SLOW := bare cluster docker k8s nodes processes gpu
GATE := cluster docker k8s nodes promises processes
ARGS ?=
# for a Python before 3.10: an environment that it has made stays as it is, as that may be somebody's
NEW := import sys; sys.exit("needs Python 3.10 or newer; remove $(VENV), then: make setup PYTHON=python3.12" * (sys.version_info < (3, 10)) or 0)
# an environment that was moved with its folder, or in which a wheel has replaced this source, would run other source
OWN := import importlib.util, os, sys; it = importlib.util.find_spec("evenkeel"); at = it and it.origin or "no folder"; \
  sys.exit(f"$(VENV) has evenkeel of {at}, not of here: remove $(VENV), or name another VENV" * (os.path.realpath(at) != os.path.realpath("src/evenkeel/__init__.py")) or 0)
# of pip's 500 lines, to a pipe that ends with its exit code: downloads from 100 MB on; errors are on stderr
QUIET := while read -r word rest; do case "$$word $$rest" in "exit "*) exit "$$rest";; Downloading*[0-9][0-9][0-9].?" MB"*|Downloading*GB*) \
  echo "  $$word $$rest";; "Installing collected"*) echo "  installing $$(echo "$$rest" | tr , '\n' | wc -l) packages: some minutes";; esac; done

.PHONY: own help setup train test test-fast test-rest test-gate test-all test-bare test-docker test-versions bench-smoke lint format \
  docs lock
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: own  ## create .venv with the locked versions

# The lock is applied as constraints, so that packages which one platform does not need are not installed there.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@df -Pk . | awk 'NR == 2 && $$4 < 12e6 {printf "make setup: only %.1f GB are free here; it may need 12 GB\n", $$4 / 1e6}'
	@$(PYTHON) -c '$(NEW)'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c '$(NEW)'
	@echo 'make setup: installs some 160 packages, with CUDA 6 GB; large downloads are shown'
	@{ $(BIN)/pip install --progress-bar off --constraint $(CONSTRAINTS) --editable '.[dev]'; echo "exit $$?"; } | { $(QUIET); }
	@touch $@

own: $(INSTALLED)
	@$(BIN)/python -c '$(OWN)'

# no restarts by torchrun: a bug ends it at once, and killed ranks start again in place all the same
train: own  ## train the default task: on every GPU here, or on 2 CPU processes
	$(BIN)/python launch/single_node.py --max-restarts 0 -- $(ARGS)

test: own  ## unit tests, and the job's promises by real processes (features: test-gate): under 6 minutes on two quiet cores
	OMP_NUM_THREADS=1 $(PYTEST) -m 'not slow' $(SLOW:%=--ignore=tests/%) $(ARGS)

test-fast: own  ## the unit tests alone, two minutes
	OMP_NUM_THREADS=1 $(PYTEST) -m 'not slow and not promise' $(SLOW:%=--ignore=tests/%) $(ARGS)

test-rest: own  ## all that `make test` leaves out; what needs root or a GPU is skipped without
	$(PYTEST) -n 4 -m slow $(wildcard $(SLOW:%=tests/%)) tests/promises $(ARGS)

# of tests/processes only those that are marked as a promise
test-gate: own  ## of that, what CI runs after `make test`: the promises on a cluster, nodes and containers
	$(PYTEST) -n 4 -m 'slow and not long' $(wildcard $(GATE:%=tests/%)) $(ARGS)

test-all: own  ## all tests
	$(PYTEST) $(ARGS)

test-bare: own  ## `make train` and most of `make test` on a bare machine: Debian, Python, make, no root (making it needs root)
	$(BIN)/pytest tests/bare $(ARGS)

test-docker: own  ## build the image and run it, with an engine of the tests' own (needs root)
	$(BIN)/pytest tests/docker $(ARGS)

test-versions:  ## train, and the unit tests, with the oldest torch and Python, the newest and one between
	$(PYTHON) tests/versions.py $(ARGS)

bench-smoke: own  ## two minutes: is a step still no slower than a bare DDP loop's? (for a quiet machine)
	$(BIN)/python benchmarks/smoke.py $(ARGS)

lint: own  ## ruff and a strict type check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: own  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: own  ## the documentation as a searchable site in build/site; a dead link or anchor is an error
	$(BIN)/mkdocs build --strict --clean

lock: own  ## renew requirements.lock from pyproject.toml (needs the network)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --universal --python-version 3.10 --extra dev --extra bench --extra onnx \
	  --no-annotate --no-header --upgrade --constraint requirements.in --output-file requirements.lock pyproject.toml
