# What README names. `make` alone lists the targets. Nothing is needed but Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed
# Tests run side by side; each compile is given one thread so that two of them fit two cores.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo test check check-style check-types check-generated docs bench clean

help:  ## list the targets
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("optpass needs Python 3.11 or later, this is " + sys.version.split()[0] + "; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing the pinned set into $(VENV); the first time this downloads torch and takes minutes'
	@: # modules are compiled when they are first imported: most of 12,000 never are
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $@

install: $(STAMP)  ## make the virtual environment and install the pinned set

demo: $(STAMP)  ## train a small GPT with backend="optpass" on the Python standard library's sources
	$(BIN)/optpass train examples/gpt-demo.toml

test: $(STAMP)  ## the test suite; SEED=N draws an earlier run's numbers again, PART=N takes every second slow test
	@: # hundreds of processes import torch: without bytecode on disk each compiles its sources again
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(if $(SEED),--seed $(SEED)) $(if $(PART),--part $(PART))

check: check-style check-types check-generated  ## ruff, mypy --strict, import-linter, generated files up to date

check-style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

check-types: $(STAMP)
	$(BIN)/mypy

check-generated: $(STAMP)
	$(BIN)/python -m optpass.reporting.schema --check
	$(BIN)/python docs/generate.py --check

docs: $(STAMP)  ## write the generated parts of README and docs/, and the JSON Schemas
	$(BIN)/python -m optpass.reporting.schema
	$(BIN)/python docs/generate.py

bench: $(STAMP)  ## every benchmark; takes long and wants a quiet machine
	$(BIN)/optpass bench roofline
	$(BIN)/optpass bench fusion_bytes
	$(BIN)/optpass bench compile_time

clean:  ## remove the virtual environment and what builds leave behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
