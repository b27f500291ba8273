# Everything runs from .venv, which is made on first use and remade when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install run test gpu lint format clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "lancet_kernels needs Python 3.10 or newer, got " + sys.version.split()[0] + "; call make PYTHON=/path/to/python3.10")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

run: $(INSTALLED)
	$(BIN)/lancet train --compare 8

test: $(INSTALLED)
	$(BIN)/python -m pytest

# With the Python of the machine, which has torch for its GPU; installs nothing.
gpu:
	@PYTHON=$(PYTHON) bench/gpu.sh

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
