# Needs GNU make and python3 3.11 or newer, nothing else: the rest goes into $(VENV).
#   make demo       watch a small GPT-2 that leaks memory, then the same script without the leak
#   make test       lint, type check and test: at most 10 minutes on two cores; of one folder: make test WHAT=store
#   make test-slow  the tests of 3 s or more, which `make test` leaves out; CI runs both in an hour
#   make test-long  the tests for which that hour has no room
#   make slow-table measure which tests take 3 s or more, and write tests/slow.txt (hours; WHAT=store: minutes)
#   make cell       test this Python and torch: the cell of docs/versions.md (some minutes)
#   make zoo-agree  run each script of the zoo three times; the answers must agree (many minutes)
#   make extras     install each optional extra by itself and try it (many minutes)
#   make cases      run the cases again, as far as this machine can, and write their pages again
#   make docs       build the documentation as a site, into site/
#   make gallery    the same: the reports of the gallery are part of the site
# Again after the first time, both skip the installation unless pyproject.toml has changed.

PYTHON ?= python3
VENV ?= .venv
# Pinned, so that everybody tests one version, and because a plain `torch` takes the newest release, which on
# Linux pulls gigabytes of CUDA libraries. Where pip is configured to find a CPU build of this version, it
# takes that. For another build or version: make test TORCH='torch==2.14.1'. A torch that is in $(VENV)
# already stays, if it is new enough.
TORCH ?= torch==2.13.0
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
CELL_STAMP := $(VENV)/.installed-cell
DOCS_STAMP := $(VENV)/.installed-docs
DEEPSPEED := $(VENV)/deepspeed

.DEFAULT_GOAL := help
.PHONY: help install demo ready test test-slow test-long slow-table cell zoo-agree extras cases docs gallery lint format bench clean

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "memtriage needs Python 3.11 or newer; give one with PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# memtriage with the extra that is asked for, and torch unless a new enough one is there. Not compiled: of the
# thousands of modules of torch and transformers, a program needs few.
define install_extra
	@torch=$$($(BIN)/python -c 'import re, torch; \
	  raise SystemExit(tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 8))' 2>/dev/null \
	  || echo '$(TORCH)'); \
	echo "installing memtriage[$(1)] $$torch into $(VENV), once"; \
	$(BIN)/python -m pip install -q --no-compile $$torch -e '.[$(1)]'
	@touch $@
endef

# Compiled, on all cores, for many processes of tests. Templates among the packages are no Python: no error.
$(STAMP): pyproject.toml | $(BIN)/python
	$(call install_extra,dev)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

$(DEMO_STAMP): pyproject.toml | $(BIN)/python
	$(call install_extra,demo)

# Less than the extra `dev`, whose packages do not all exist for the newest Python.
$(CELL_STAMP): $(DEMO_STAMP)
	$(BIN)/python -m pip install -q pytest hypothesis pytest-xdist joblib accelerate prometheus-client ipython
	@touch $@

# DeepSpeed in a folder that only its own tests see: installed, it changes how many libraries behave. Its
# requirements name every package, for pip would bring a second torch along. Without it those tests are skipped.
$(DEEPSPEED)/.installed: cases/deepspeed_zero2_offload/requirements.txt | $(STAMP)
	@$(BIN)/python -m pip install -q --no-deps --target $(DEEPSPEED) --upgrade -r $< \
	  && touch $@ || echo "DeepSpeed could not be installed: its tests are skipped" >&2

# On a busy machine OpenMP threads that spin while they wait make the script many times slower.
demo: export OMP_WAIT_POLICY ?= PASSIVE
demo: export PYTHONDONTWRITEBYTECODE =
demo: $(DEMO_STAMP)
	@echo '1 of 2: train a small GPT-2 for 16 steps; its log keeps every loss with its graph. Expect: LEAK'
	$(BIN)/memtriage run -o memtriage-run-leak examples/train_gpt2.py --leak
	@echo
	@echo '2 of 2: the same script with the leak fixed. Expect: CLEAN'
	$(BIN)/memtriage run -o memtriage-run-fixed examples/train_gpt2.py --no-leak
	@echo
	@echo 'As a page: $(BIN)/memtriage report memtriage-run-leak --html leak.html'
	@echo 'Your own script: $(BIN)/memtriage run train.py'

# Their tests run in processes of their own. In one process with the others, each census would look through all
# objects of the libraries that they load.
LOADS_MUCH := $(addprefix tests/,cases docs integrations planning prediction prove report/monitoring \
  cli/test_plan.py cli/test_predict.py)

# They walk over all modules of their process, which is quick before other tests have imported theirs.
WALKS := $(addprefix tests/,account/test_group_details.py diagnose/test_mechanisms.py \
  session/schedule/test_investigation.py)

# Folders or files below tests/; without it, all.
WHAT ?=

PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Each group in processes of its own, also after one that failed. Status 5: a group has no such tests.
define run_tests
	@status=0; \
	run() { echo "$(PYTEST) $$*"; $(PYTEST) "$$@" || [ $$? = 5 ] || status=1; }; \
	if [ -n "$(WHAT)" ]; then ls -d $(addprefix tests/,$(WHAT)) >/dev/null && run -m $(1) $(addprefix tests/,$(WHAT)) || status=1; else \
	run -m $(1) $(WALKS); \
	run -m $(1) $(addprefix --ignore=,$(LOADS_MUCH) $(WALKS)); \
	run -m $(1) $(LOADS_MUCH); fi; \
	exit $$status
endef

ready: install $(DEEPSPEED)/.installed

# One thread for each of the workers' kernels: more only compete on a small machine.
test test-slow test-long slow-table: export OMP_NUM_THREADS = 1
test: lint ready
	$(call run_tests,"not slow and not long and not agree and not packaging")

test-slow: ready
	$(call run_tests,slow)

test-long: ready
	$(call run_tests,long)

slow-table: ready
	$(BIN)/python tests/support/slow_table.py $(or $(addprefix tests/,$(WHAT)),$(WALKS) $(wildcard tests/*/ tests/test_*.py))

cell: export OMP_NUM_THREADS = 1
cell: $(CELL_STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(addprefix tests/,model observe account snapshots messages)
	$(BIN)/python -m pytest -m slow tests/zoo -k "losses_list_attached or lstm_of_new_shapes"
	$(BIN)/memtriage run -o memtriage-run-cell examples/train_gpt2.py --leak
	$(BIN)/memtriage predict examples/train_gpt2.py -- --steps 4

zoo-agree: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m agree tests/zoo

extras: install
	$(BIN)/python -m pytest -m packaging tests/integrations/test_extras.py

# Cases that need a GPU, TransformerEngine or DeepSpeed say so where there is none. What would run here:
# make cases CASES=--list; only some: make cases CASES='--only loss_retention'.
cases: install $(DEEPSPEED)/.installed
	$(BIN)/python cases/run_all.py $(CASES)

# Strict: a broken link or anchor, a missing image, or a page that the navigation lacks is an error.
$(DOCS_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[docs]'
	@touch $@

gallery: docs

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/census.py
	$(BIN)/python benchmarks/explain.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python benchmarks/predict_ranks.py
	$(BIN)/python benchmarks/offload.py
	$(BIN)/python benchmarks/park.py
	$(BIN)/python benchmarks/many_ranks.py
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/detection.py
	$(BIN)/python benchmarks/soak.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis site memtriage-run*/ memtriage-compare
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
