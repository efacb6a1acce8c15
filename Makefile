# `make` lists the targets. A machine needs GNU make, bash and Python >= 3.12; `make setup` says so where one is missing.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# An NVIDIA GPU also needs the CUDA run-time libraries; elsewhere the compilers alone do.
EXTRAS ?= dev,aot$(if $(shell nvidia-smi -L 2>/dev/null),$(comma)cuda13)
comma := ,
SOURCES := mgpu_ops core tuning tests scripts examples docs
# Plain `make test-gpu` takes the project's environment, PYTHON=python3 any Python that has jax.
GPU_PYTHON = $(or $(PYTHON),$(wildcard .venv/bin/python),python3)
# Processes that share the GPU: compiling takes most of the time. JAX then leaves memory to the others.
GPU_WORKERS = 1

# A PYTHONPATH left over in the shell must not shadow the environment. test-gpu alone passes it on, on purpose.
unexport PYTHONPATH PYTHONHOME

# No test depends on how fast the machine is: one that takes ten minutes hangs.
PYTEST = -m pytest -n $(WORKERS) --dist worksteal --timeout 600

.PHONY: help setup test test-all mutants lint types imports unit coverage test-gpu test-oldest test-newest format bench demo site release pictures clean distclean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup:  ## make .venv with the newest suitable Python >= 3.12 (PYTHON=/path picks one)
	@scripts/setup.sh $(VENV) $(EXTRAS)

test: lint imports  ## every check and test that needs no GPU
	@$(MAKE) --jobs 2 types unit  # beside each other: mypy takes one core for a minute, and tests now and then wait

lint: setup  ## ruff: rules and formatting
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: setup  ## mypy
	$(BIN)/mypy

imports: setup  ## import-linter: core <- ops <- tuning
	$(BIN)/lint-imports

unit: setup  ## pytest (ARGS="-k name" to choose)
	$(BIN)/python $(PYTEST) $(ARGS)

test-all: setup  ## pytest with ten times the examples of each property, and what else takes long
	MGPU_OPS_TEST_ALL=1 $(BIN)/python $(PYTEST) --timeout 3600 $(ARGS)

mutants: setup  ## plant the bugs of tests/mutants/, one at a time: each should be caught
	$(BIN)/python scripts/mutants.py --jobs $(WORKERS) $(ARGS)

coverage: setup  ## pytest, and which lines it runs
	$(BIN)/python $(PYTEST) --cov --cov-report term $(ARGS)

test-gpu:  ## the tests marked gpu, on a Hopper machine; PYTHON=python3 needs no .venv; GPU_WORKERS=8: in so many processes
	@gpu=$$(scripts/hopper.sh); log=results/$$(date +%F)-$$gpu-test-gpu.log; mkdir -p results; \
	$(if $(filter-out 1,$(GPU_WORKERS)),XLA_PYTHON_CLIENT_PREALLOCATE=false) MGPU_OPS_TEST_GPU=1 \
	PYTHONPATH="$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))" $(GPU_PYTHON) -m pytest -m gpu -v -p no:cacheprovider \
	  $(if $(filter-out 1,$(GPU_WORKERS)),-n $(GPU_WORKERS) -p no:benchmark) $(ARGS) 2>&1 | sed 's|$(CURDIR)|.|g' | tee "$$log"; \
	echo "log: $$log"

# Both ends of the jax pin, in environments of their own.
test-oldest:  ## the tests with the oldest jax and Python that pyproject.toml allows
	@PYTHON= WANT=3.12 scripts/setup.sh .venvs/oldest dev,aot 'jax==0.11.2'
	.venvs/oldest/bin/python $(PYTEST) $(ARGS)

test-newest:  ## the tests with the newest jax that pyproject.toml allows
	@scripts/setup.sh .venvs/newest dev,aot --upgrade 'jax<0.13'
	.venvs/newest/bin/python $(PYTEST) $(ARGS)

format: setup  ## let ruff mend and format the sources
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: setup  ## import time; on a Hopper GPU also matmul against XLA
	@JAX_PLATFORMS=cpu $(BIN)/python scripts/import_time.py
	@if gpu=$$(scripts/hopper.sh); then $(BIN)/mgpu-tune bench matmul $(ARGS); \
	else echo "skipped: mgpu-tune bench matmul, which times kernels on a Hopper GPU"; fi

demo: setup  ## a tour of the tuner, on any machine
	@$(BIN)/mgpu-tune demo

site: setup  ## build the documentation into build/site, with warnings as errors
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html -d build/doctrees docs build/site
	@echo "open build/site/index.html"

release: setup  ## build and check sdist and wheel, and run the demo from the wheel in a clean environment
	@scripts/release.sh

pictures: setup  ## draw every picture under results/ again from its CSV file or its sweeps
	@$(BIN)/mgpu-tune plot --from results/*.csv --in-place
	@$(BIN)/mgpu-tune replay --picture results/replay/regret

clean:  ## remove caches and build outputs
	rm -rf build dist htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## also remove the virtual environments
	rm -rf .venv .venvs
