# One command on a fresh machine: each target installs what it needs into .venv first.
# PYTHON=... picks the interpreter that .venv is made with.
# VENV=/path uses that environment as it is: nothing is installed into it, and `make clean` leaves it alone.
# ARGS=... is passed on: make demo ARGS=--fresh, make test ARGS='-k tree'.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
ifeq ($(VENV),.venv)
READY := .venv/.installed
endif

.PHONY: help demo test check install clean

help:
	@echo 'make demo     dump, train, serve and compare a small model'
	@echo 'make test     run the tests'
	@echo 'make check    lint, format, types, and the contract with the installed SGLang'
	@echo 'make install  make .venv and install everything into it (the others do so where needed)'
	@echo 'make clean    remove .venv, caches and build outputs'

demo: $(READY)
	$(BIN)/sglang-dflash demo $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p sglang_dflash
	$(BIN)/sglang-dflash check

install: $(READY)

# The stamp comes last, so an interrupted installation is taken up again; making a venv twice is harmless.
.venv/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than Python 3.11 ($$($(PYTHON) --version 2>&1)). Install Python 3.11 or newer" \
	       "and name it: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check --editable '.[test]'
	@touch $@

clean:
	rm -rf .venv build dist sglang_dflash.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find bench kernels sglang_dflash tests train -name __pycache__ -type d -prune -exec rm -rf {} +
