# The commands of the workspace. `make check` is the one to know; each target makes the environment that it needs.

PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
VERSIONS := 3.10 3.11 3.12 3.13
PYTEST := -m pytest -W error -n $(JOBS) --dist loadfile
SOURCES := core plugins examples tests docs bench

PYPROJECTS := $(wildcard core/pyproject.toml plugins/*/pyproject.toml examples/*/pyproject.toml)
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml examples/*/pyproject.toml))
TEST_TOOLS := pytest pytest-xdist hypothesis
TOOLS := $(TEST_TOOLS) hatchling import-linter mypy ruff

.PHONY: check format lint types layers test test-main test-notorch fuzz demo docs bench clean
.DELETE_ON_ERROR:

check: lint types layers test-main

test: test-main test-notorch

# Environments. A stamp is newer than every pyproject that it was made from, so a second run installs nothing.

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python core/pyproject.toml plugins/cuda/pyproject.toml constraints.txt
	$(PIP) -e 'core[torch]' -e plugins/cuda
	@touch $@

$(VENV)/.tools: $(VENV)/.demo $(PYPROJECTS)
	$(PIP) -e 'core[torch,triton,testing]' $(addprefix -e ,$(PLUGINS)) $(TOOLS)
	@touch $@

# Checks.

format: $(VENV)/.tools
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lint: $(VENV)/.tools
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: $(VENV)/.tools
	$(BIN)/mypy

layers: $(VENV)/.tools
	$(BIN)/lint-imports --no-cache

test-main: $(VENV)/.tools
	$(BIN)/python $(PYTEST)

# The random tests of tests/fuzz for minutes instead of seconds. The seed is printed; `make fuzz SEED=…` runs it again.

SEED ?= $(shell date +%s)

fuzz: $(VENV)/.tools
	@echo "seed $(SEED)"
	$(BIN)/python -m pytest -W error -n $(JOBS) --dist load -v tests/fuzz $(wildcard plugins/*/tests/fuzz) \
	    --hypothesis-profile fuzz --hypothesis-seed $(SEED) || { echo "failed with SEED=$(SEED)"; exit 1; }

# Planning needs no torch: the same tests without it, on each interpreter that is installed. Tests that need torch,
# those that build wheels, and those that say the same on every interpreter, are left out here.

test-notorch: $(addprefix test-notorch-,$(VERSIONS))

test-notorch-%: FORCE
	@python=$$(for it in python$* $$HOME/.pyenv/versions/$*.*/bin/python; do \
	    if $$it -c '' 2>/dev/null; then echo $$it; break; fi; done); \
	if [ -z "$$python" ]; then echo "python$* is not installed: its tests without torch are left out"; exit 0; fi; \
	$(MAKE) --no-print-directory .venv-notorch-$*/.tools FOUND=$$python && \
	echo "without torch, python$*:" && \
	.venv-notorch-$*/bin/python $(PYTEST) -m 'not dist and not once'

.venv-notorch-%/.tools: $(PYPROJECTS) constraints.txt
	$(FOUND) -m venv .venv-notorch-$*
	.venv-notorch-$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    -e 'core[testing]' $(addprefix -e ,$(PLUGINS)) $(TEST_TOOLS)
	@touch $@

FORCE:

# What kvdock does, in two commands.

demo: $(VENV)/.demo
	$(BIN)/kvdock plan tests/models/llama-3.1-70b.json --device h200 --tp 8 --weights 17GiB
	$(BIN)/kvdock run tests/models/gpt-oss-20b.json --memory 64MiB --page-size 16 --context 4096

# Timings, written to bench/RESULTS.md; quote their ratios, since a machine has moods. Peers are timed beside kvdock
# where they are installed: PEERS is the interpreter of an environment that has them.

PEERS ?= $(BIN)/python

bench: $(VENV)/.tools
	@mkdir -p build
	PYTHONPATH=core/src $(PEERS) bench/allocators.py --write build/allocators.md
	$(BIN)/python bench/planning.py --write build/planning.md
	$(BIN)/python bench/unified.py --write build/unified.md
	{ printf '# Results of the last `make bench`\n\n## Planning\n\n'; cat build/planning.md; \
	  printf '\n## Bookkeeping\n\n'; cat build/allocators.md; \
	  printf '\n## Unified memory\n\n'; cat build/unified.md; } > bench/RESULTS.md

docs: $(VENV)/.tools
	$(BIN)/python docs/render.py build/docs

clean:
	rm -rf $(VENV) .venv-notorch-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
