# CPU time on two cores of a Xeon with AVX-512 (2026-11); the wall time is half of it or more. Set-up: 1 minute, once.
#
# make demo     train a small language model on this machine, through the whole tool: 2 minutes
# make test     check, and every test; as root against real Slurm, Grid Engine and sshd: 1 hour, in a fresh clone
# make quick    check, and the tests that start no ranks, jobs or compilers, the inner loop: under 1 minute
# make check    formatting, lint, types, architecture rules: 15 s, and the first time 1 minute more for types
# make kernels  build the ops of csrc/ for this machine: 2.5 minutes, once
# make parity   one, two and three mesh axes over up to 8 ranks, compared with the serial run: 2 days; PARITY=--levels for
#               every instruction level of the processor: 2 days for each
# make proofs   the table of families in docs/guide/models.md, by the tests that prove it, and all that takes long: 1 hour
# make torture  exact resume after kill -9 at 20 random instants, and after every system call of a save failed: 10 minutes
# make faults   injected faults on this machine and on real schedulers, a table of what recovers; resumable: hours
# make gpu      proofs and measurements on one GPU, in stages that survive being cut off; GPU=--dry on the CPU: 1 minute
# make start    CPU time of starting llmctl, beside a bare typer program: under 1 minute
# make docs     the documentation site, in site/; fails at a broken link, a page outside the menu, or a key or flag without a text
# make pictures the pictures of the documentation (docs/pictures), recorded from real runs: 8 minutes
# make set-up   virtual environment and packages, as every other target does first
# make clean    remove everything that the other targets made

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help set-up real-tier demo check quick kernels test parity proofs torture faults gpu start docs pictures clean

PYTHON_OF_VENV := .venv/bin/python
STEP := scripts/step.sh
BUILD_KERNELS = $(STEP) "kernels built" $(PYTHON_OF_VENV) -m trainer kernels build
# One thread per process: the tests start several processes per core.
export OMP_NUM_THREADS ?= 1
# The bytecode of packages is written when they are first imported (scripts/set_up.sh).
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(PYTHON_OF_VENV) -m pytest
# Tests of the architecture rules, and folders with pure tests only: a file that starts ranks is left out.
ARCHITECTURE := tests/test_architecture.py tests/test_rooms.py tests/test_docs.py
QUICK := tests/llmctl/backends tests/llmctl/site tests/llmctl/runs tests/llmctl/doctor tests/trainer/config \
    tests/trainer/planning tests/trainer/optimizer tests/trainer/data/indexed tests/trainer/data/samples \
    --ignore tests/trainer/optimizer/test_distributed_optimizer.py --ignore tests/trainer/data/samples/test_index_cache.py

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
	@$(STEP) "architecture" $(PYTEST) $(ARCHITECTURE)

# In one process: each worker of pytest-xdist would import torch and collect all tests.
quick: check
	@$(PYTEST) $(QUICK) </dev/null

kernels: set-up
	@$(BUILD_KERNELS)

# Kernels first: otherwise all tests that train would wait for the build at once. The static checks need one core.
test:
	@$(MAKE) --no-print-directory --jobs=2 set-up real-tier
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check kernels
	@scripts/test_tiers.sh $(PYTEST) --require-real

real-tier:
	@scripts/real_tier.sh

parity: set-up
	@$(PYTHON_OF_VENV) -m tests.parity $(PARITY) </dev/null

proofs: set-up
	@scripts/proofs.sh $(PYTEST)

torture: set-up
	@$(PYTHON_OF_VENV) -m tests.resume_torture </dev/null
	@$(PYTHON_OF_VENV) -m tests.save_faults </dev/null

faults: set-up
	@$(PYTHON_OF_VENV) -m tests.faults </dev/null

# No set-up: a machine with a GPU has its own Python with torch, and often no network (scripts/gpu_wheels.sh).
gpu:
	$(or $(wildcard $(PYTHON_OF_VENV)),python3) -m benchmarks.gpu.stages $(GPU)

start: set-up
	@$(PYTHON_OF_VENV) -m benchmarks.cli_start

docs: set-up
	@$(STEP) "reference" $(PYTHON_OF_VENV) -m scripts.reference --check
	@$(STEP) "site" env NO_MKDOCS_2_WARNING=1 $(PYTHON_OF_VENV) -m mkdocs build

pictures: set-up
	@$(PYTHON_OF_VENV) scripts/pictures.py
	@$(PYTHON_OF_VENV) scripts/page_pictures.py
	@$(PYTHON_OF_VENV) scripts/site_pictures.py

clean:
	rm -rf .venv .make .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
