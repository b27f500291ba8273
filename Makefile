# Everything runs from .venv, which is made on first use and remade when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# And what only `make test-all` needs.
ALL_INSTALLED := $(VENV)/.all-installed
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# The oldest Triton that is supported, for the compile checks of the kernels; the newest one is in .venv.
OLDEST := .triton-oldest

# Two tests at a time, but never two of those that need both cores (tests/conftest.py).
SIDE_BY_SIDE := -n 2 --dist loadgroup

.PHONY: install run bench-overlap test test-all gpu lint format docs wheel clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt constraints-kernels.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "lancet_kernels needs Python 3.10 or newer, got " + sys.version.split()[0] + "; call make PYTHON=/path/to/python3.10")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[dev]'
ifeq ($(shell uname -s),Linux)
	$(PIP) show nvidia-nvshmem-cu13 2>/dev/null || $(PIP) install --no-deps -c constraints-kernels.txt nvidia-nvshmem-cu13
endif
	touch $@

$(ALL_INSTALLED): $(INSTALLED)
	$(PIP) install -c constraints.txt -e '.[test-all]'
	touch $@

$(OLDEST)/.installed: $(INSTALLED) constraints-kernels.txt
	rm -rf $(OLDEST)
ifeq ($(shell uname -s),Linux)
	$(PIP) install --no-deps --target $(OLDEST) -c constraints-kernels.txt triton
endif
	mkdir -p $(OLDEST)
	touch $@

# Measures every strategy, on a quiet machine, and writes the tables of README and docs.
bench-overlap: $(INSTALLED)
	$(BIN)/lancet bench overlap --output bench/results/overlap-emulated-2-core-cpu.json
	$(BIN)/lancet bench overlap --stands-for 16 --output bench/results/overlap-stands-for-16-emulated-2-core-cpu.json
	$(BIN)/python docs/scripts/generate.py

run: $(INSTALLED)
	$(BIN)/lancet train --steps 120
	$(BIN)/lancet bench overlap --model gpt2-tiny-moe --strategies none,lancet,auto --timeline runs/timeline.png

# A few cases of everything.
test: $(INSTALLED)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not long and not gpu'

# Every case that needs no GPU, and every benchmark once, for hours; or for so many minutes: make test-all MINUTES=30
test-all: $(ALL_INSTALLED) $(OLDEST)/.installed build/transformers
	LANCET_TRANSFORMERS_TESTS=build/transformers/tests $(BIN)/python -m pytest tests bench --benchmark-disable $(SIDE_BY_SIDE) -m 'not gpu' --hypothesis-profile long $(MINUTES:%=--minutes %)

# The source distribution of transformers, whose own tests run with ours in place of theirs; where it cannot be had,
# tests/lancet_kernels/transformers/test_mixins.py is skipped.
build/transformers: $(ALL_INSTALLED)
	rm -rf $@ build/download && mkdir -p $@
	$(PIP) download --no-deps --no-build-isolation --no-binary :all: -c constraints.txt -d build/download transformers \
		&& tar -xzf build/download/transformers-*.tar.gz --strip-components 1 -C $@ \
		|| { rm -rf $@; echo "the source distribution of transformers could not be had: its own tests are skipped"; }

# With the Python of the machine, which has torch for its GPU; installs nothing. make gpu OUT=folder ONLY=machine,eta
gpu:
	@$(PYTHON) bench/gpu/first_run.py $(OUT:%=--out %) $(ONLY:%=--only %) $(UNTIL:%=--until %)

# mypy looks for packages in folders of their names; ours are mapped, so it gets links that are as installed.
TYPED := build/mypy/lancet_kernels
# import-linter does not follow links: a copy.
IMPORTED := build/imports

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)
	cd $(TYPED) && ln -s ../../../lancet_kernels/* ../../../ops ../../../graph ../../../schedules .
	$(BIN)/mypy
	$(BIN)/mypy -p bench
	$(BIN)/mypy examples docs/scripts
	rm -rf $(IMPORTED) && mkdir -p $(IMPORTED)
	cp -r lancet_kernels $(IMPORTED) && cp -r ops graph schedules $(IMPORTED)/lancet_kernels
	cd $(IMPORTED) && ../../$(BIN)/lint-imports --no-logo --no-cache ../../pyproject.toml

# The pages, into build/docs; a warning is an error.
docs: $(INSTALLED)
	$(PIP) install -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/scripts/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A wheel and a source distribution, into dist/.
wheel: $(INSTALLED)
	$(PIP) install -c constraints.txt -e '.[release]'
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
