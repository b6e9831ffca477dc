# make demo and make test do all the set-up on a fresh machine.

VENV ?= .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
PROGRAMS := /usr/bin/chromium-headless-shell /usr/bin/curl
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo)

.PHONY: setup demo test test-slow lint unit durations docs pictures dist bench bench-tables gpu-check browser page-types clean

# What is installed, and compiled kernels.
setup: $(READY)

# Needs neither linters nor test tools; its kernels are compiled while it runs.
demo: $(RUNS)
	@echo "loading, the first time with every module compiled"
	$(BIN)/python -m examples.demo --out out/demo

# Compiling kernels keeps one core busy, and so does lint: side by side.
test:
	$(MAKE) --jobs=2 --output-sync=line browser setup lint page-types
	$(MAKE) unit

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Each of two processes takes the next file, the longest first (tests/durations.py): tests of a file share what they have
# set up, and both processes end together.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Each process of the tests would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

unit: $(READY) $(PROGRAMS)
	$(PYTEST) --durations=40 --durations-min=2

# The seconds of each test file, to tests/durations.json.
durations: $(READY) $(PROGRAMS)
	$(PYTEST) --write-durations

# What takes minutes: all enumerations whole, every command of the docs, the wheel in clean environments, chaos.
test-slow: $(READY) $(PROGRAMS)
	OPTPIPE_TEST_SIZE=full $(PYTEST) -m ''

# The site, from docs/ and the docstrings; a warning is an error.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html -d out/doctrees docs out/docs

# Every picture of docs/concepts, drawn anew, and the page in all its states, which takes minutes.
pictures: $(READY)
	$(BIN)/python -m examples.pictures --out docs/pictures/concepts
	$(BIN)/python -m examples.page_pictures --out docs/pictures/page

# The sdist, and the wheel built from it, both with the site.
dist: $(READY) docs
	$(BIN)/python -m build --no-isolation --outdir dist .

bench: $(READY)
	$(BIN)/python -m pytest benchmarks --benchmark-columns=min,median,iqr,rounds --benchmark-sort=name

# Tables and pictures: SIZE=quick to out/benchmarks/, SIZE=full to docs/benchmarks.
SIZE ?= quick
SECTIONS ?= all
bench-tables: $(READY)
	$(BIN)/python -m benchmarks.document $(SECTIONS) --size $(SIZE)

# What a GPU does with offload; exits with 2 where there is none.
gpu-check: $(READY)
	$(BIN)/python -m benchmarks.gpu_check

# Types of the page's modules, by their JSDoc, with the Node of the virtual environment.
page-types: $(INSTALLED)
	PATH="$(abspath $(BIN)):$$PATH" npx --yes --package typescript@5.9.3 tsc --project api/web/tsconfig.json

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A line every five seconds, since pip is silent while it unpacks. Modules are compiled when they are first loaded.
define install
	python3 -m venv $(VENV)
	@begun=$$(date +%s); while sleep 5 > /dev/null; do echo "installing: $$(($$(date +%s) - begun)) s"; done & \
	trap "kill $$!" EXIT; $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '$(1)'
endef

$(RUNS): pyproject.toml constraints.txt
	$(call install,.[train])
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	$(call install,.[all])
	touch $(RUNS) $@

# Tests drive the page in Debian's Chromium, and run the commands of the service's guide, which are curl's.
browser: $(PROGRAMS)

$(PROGRAMS) &:
	@command -v apt-get > /dev/null || { echo "$@ is missing. Maybe install it there." >&2; exit 1; }
	$(AS_ROOT) apt-get update
	$(AS_ROOT) apt-get install --yes --no-install-recommends $(notdir $(PROGRAMS))

$(READY): $(INSTALLED)
	$(BIN)/python -m solver.warm_up
	touch $@
