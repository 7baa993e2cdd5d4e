# The first target that needs it makes .venv; afterwards it is remade only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
FUZZ_CASES ?= 2000
SOAK_MINUTES ?= 30
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo check fast test docs tables fuzz soak lint bench release clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)  ## a small network on digits beside the truth: a table and runs/demo/report.html
	$(BIN)/ntk-iterncgp demo

check: $(STAMP)  ## lint and the fast tests, side by side: two minutes on two cores
	@$(MAKE) --no-print-directory --keep-going --jobs=2 lint fast

fast: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow and not process and not cli'

test: $(STAMP)  ## run the whole test suite, on all cores
	$(BIN)/python -m pytest -n auto --dist worksteal

fuzz: $(STAMP)  ## FUZZ_CASES (2000) random cases on both front doors, new ones every time
	FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest tests/test_fuzz.py

soak: $(STAMP)  ## SOAK_MINUTES (30) of fit, refine, save, load and predict: is memory flat?
	$(BIN)/python -m benchmarks.soak --minutes $(SOAK_MINUTES)

lint: $(STAMP)  ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## the documentation as a site, in site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

tables: $(STAMP)  ## the complete tables of docs/results.md, an hour or two: MNIST and CIFAR-10 under NTK_ITERNCGP_DATA
	$(BIN)/python -m benchmarks.tables

bench: $(STAMP)  ## run the benchmarks
	$(BIN)/ntk-iterncgp bench

release: lint docs  ## build the wheel and the source archive into dist/, and check that they install and work
	rm -rf dist build
	$(BIN)/python -m build --outdir dist
	NTK_ITERNCGP_DIST=dist $(BIN)/python -m pytest -q tests/test_wheel.py tests/test_repository.py

clean:  ## remove .venv, builds and caches
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --no-compile: of 18 000 modules Python compiles the few that are imported, when they are.
# The stamp goes first and comes back last, so an installation that failed is tried again.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "ntk-iterncgp needs Python 3.11 or newer, and '$(PYTHON)' is not. Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Making $(VENV) and installing ntk-iterncgp with its dependencies: a few minutes and about 6 GB, only the first time."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[experiments,dev]'
	@touch $@
