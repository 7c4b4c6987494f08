# Needs Python >= 3.11 and make. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Rooms that say what is right. `check` runs their tests once, in `coverage`.
COVERED := tests/answers tests/evaluation tests/lab
# Tests in which nearly all code with tensors runs. `check` runs them once, in `shapes`.
SHAPED := tests/attention tests/policy tests/rollout/test_local.py tests/grpo/test_equivalence.py tests/grpo/test_losses.py tests/grpo/test_trainer.py

.DEFAULT_GOAL := help
.PHONY: help demo demo-cluster test test-ci test-long test-containers coverage shapes ui docs lint types audit check bench bench-real bench-gpu count chaos vllm cover-promises size clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## run the whole pipeline on the embedded model: CPU only, no server, no model download
	$(BIN)/grpo run demo $(ARGS)

demo-cluster: $(READY) vllm ## run the demo over two nodes of a Ray cluster on this machine, with two vLLM servers (half an hour)
	WHOLE_DEMO=1 $(BIN)/python -m pytest -m "" tests/cluster/test_demo_cluster.py $(ARGS)

test: $(READY) ## run the quick tests (ARGS="tests/data -k csv" for some; ARGS='-m "not long" tests/data' for a whole room)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not long and not containers" --durations=10 $(ARGS)

test-ci: $(READY) ## run one long test of each kind: vLLM, servers in a browser, kills, the demo (ten minutes)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "long and ci" --durations=10 $(ARGS)

test-long: $(READY) ## run all long tests: servers in daily operation, kills, browsers, vLLM, more demos (two to three hours)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m long --durations=30 $(ARGS)

test-containers: $(READY) ## run the demo through the compose stack, and a job through Slurm with three nodes (needs Docker, Slurm; half an hour)
	$(BIN)/python -m pytest -m containers tests/deploy $(ARGS)

coverage: $(READY) ## fail when the tests of answers, evaluation and lab cover less than the floor in pyproject.toml
	$(BIN)/python -m pytest -q -m "not long or ci" -p no:cacheprovider --cov --cov-report=term $(COVERED)

shapes: $(READY) ## run the tests of the engine with every annotation of a tensor checked: axes, sizes, dtypes
	SHAPES=1 $(BIN)/python -m pytest -q -m "not long or ci" -p no:cacheprovider $(SHAPED)

ui: $(READY) ## start the Prefect UI, the MLflow UI, a worker and all deployments on 127.0.0.1; Ctrl-C stops them
	$(BIN)/grpo ui

docs: $(READY) ## write the generated pages, and build docs/ as a site in .site/
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build

lint: $(READY) ## check with ruff, and check the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY) ## check the types with mypy
	$(BIN)/mypy

audit: $(READY) ## list known vulnerabilities of the installed packages (needs the network; reports it if there is none)
	.ci/audit $(BIN)

check: lint types coverage shapes ## run what CI runs: lint, types, coverage, shapes, and all tests but the long ones, and those of test-ci
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not containers and (not long or ci)" $(COVERED:%=--ignore=%) $(SHAPED:%=--ignore=%) --durations=10 $(ARGS)

bench: $(READY) ## compare with TRL and with plain code: step, decoding, memory, learning, noisy prompts, share of the machine's rate (half an hour)
	$(BIN)/python -m tests.benchmarks

bench-real: $(READY) ## what a real language model costs on the CPU, and what it learns, beside TRL and others (MODEL=DIR; hours)
	$(BIN)/python -m tests.benchmarks.real $(MODEL)
	$(BIN)/python -m tests.benchmarks.real_learning $(MODEL)

bench-gpu: $(READY) ## the same comparison on a GPU, with the shapes of Qwen2.5-0.5B and 1.5B (ARGS="--budget 300")
	$(BIN)/python -m tests.benchmarks.gpu $(ARGS)

count: $(READY) ## count what an update would ask of a GPU, without one: bytes, kernels, syncs; writes .bench/counts.json
	$(BIN)/python -m tests.benchmarks.counts

chaos: $(READY) vllm ## kill the pipeline at 200 random points, restart it each time, and compare with an undisturbed run
	$(BIN)/python -m tests.flows.chaos --kills 200
	$(BIN)/python -m tests.flows.chaos --kills 20 --engine vllm

vllm: ## install the environment of the rollout server, .venv-vllm (a CPU build if there is no GPU)
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; then build=gpu; else build=cpu; fi; \
	.venv-vllm/bin/pip install --quiet --no-deps -r deploy/vllm-$$build.lock.txt

cover-promises: $(READY) ## write docs/promises.md: what is promised, and which command proves it
	$(BIN)/python docs/generate.py

size: $(READY) ## count the product: lines, files, folders, functions, imports, docstrings
	$(BIN)/python -m tests.size

clean: ## remove the files of runs and tests, but not the environment
	rm -rf runs .grpo .site .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache

# Install torch first and by its exact version: pip then takes a CPU wheel if the index has one, and resolves the rest around it.
$(READY): pyproject.toml deploy/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python >= 3.11 is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint deploy/constraints.txt torch
	$(BIN)/pip install --quiet --constraint deploy/constraints.txt --editable '.[dev]'
	@touch $(READY)
