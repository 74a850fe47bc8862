# make demo     train a small language model on this machine, through the whole tool
# make test     check, and every test; as root against real Slurm, Grid Engine and sshd
# make check    formatting, lint, types, import walls
# make parity   every axis, two axes and three, over up to 8 ranks, against the serial run; PARITY=--levels: at every
#               instruction level of this processor
# make torture  exact resume after kill -9 at 20 random instants
# make clean    remove what the other targets made

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help set-up real-tier demo check kernels test parity torture clean

PYTHON_OF_VENV := .venv/bin/python
STEP := scripts/step.sh
# One thread per process: the tests start several processes per core.
export OMP_NUM_THREADS ?= 1
# Test files that run at once: one more than two cores, since much of their time they wait.
TEST_WORKERS ?= 3
# Of those of schedulers: what they wait for must not come late.
SCHEDULER_TEST_WORKERS ?= 2
PYTEST := $(PYTHON_OF_VENV) -m pytest --require-real
WHOLE_FILES := --dist loadfile --no-loadscope-reorder

help:
	@sed -n '/^$$/q; s/^# //p' Makefile

set-up:
	@scripts/set_up.sh

demo: set-up
	@.venv/bin/python -m examples.demo

check: set-up
	@$(STEP) "ruff format" .venv/bin/ruff format --check .
	@$(STEP) "ruff check" .venv/bin/ruff check .
	@$(STEP) "mypy --strict" .venv/bin/mypy
	@$(STEP) "import walls" $(PYTHON_OF_VENV) -m pytest tests/test_architecture.py

real-tier:
	@scripts/real_tier.sh

kernels: set-up
	@$(STEP) "kernels built" $(PYTHON_OF_VENV) -m trainer kernels build

# Kernels first: tests that train would all wait for them at once. Those of schedulers wait most of their time, and have
# the machine for themselves: beside others that compute, what they wait for comes too late.
test: check real-tier kernels
	@$(PYTEST) tests/schedulers -n $(SCHEDULER_TEST_WORKERS) $(WHOLE_FILES) </dev/null
	@$(PYTEST) --ignore tests/schedulers -n $(TEST_WORKERS) $(WHOLE_FILES) </dev/null

parity: set-up
	@$(PYTHON_OF_VENV) -m tests.parity $(PARITY) </dev/null

torture: set-up
	@$(PYTHON_OF_VENV) -m tests.resume_torture </dev/null

clean:
	rm -rf .venv .make .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
