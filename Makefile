# make quickstart   train a draft for the embedded target, measure it, print the table and the report's path
# make test         the tests
# make serving      exports in a real vLLM, sound and broken ones; makes its environment (3.4 GB) when it is missing
# make lint         formatting, lint, types, import layers
# make venv         the virtual environment only
#
# PYTHON=python3.12 chooses the interpreter. Without a GPU torch is pinned to TORCH_CPU; where the package index serves
# CUDA builds under that version, PIP_EXTRA_INDEX_URL can name an index of CPU builds.

SHELL := /bin/bash
# Tests start Python more than a hundred times: without bytecode each would compile torch and transformers again.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
TORCH_CPU ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# What runs needs less than what tests: DeepSpeed, peft and Triton take minutes to install.
STAMP := $(VENV)/.installed
STAMP_DEV := $(VENV)/.installed-dev
EXTRAS := data
EXTRAS_DEV := data,dev
RECIPE ?= recipes/quickstart.yaml
SUITE ?= eval/suites/core.yaml
ARGS ?=
# Files of tests run side by side, a worker a core; ARGS=-n0 runs all in one process.
SIDE_BY_SIDE := -n logical --dist loadfile
# The whole suite is 96 conversations at two temperatures; a sixth of it shows the result in a few minutes.
SUITE_ARGS ?= limit=$(if $(FEWER),8,16) max_new_tokens=64
# The quickstart is made for CPUs with bfloat16. One without takes three times as long for it, so there it is given fewer
# prompts, as a run of another name; FULL=1 gives it all of them. Other recipes are run as they are. Asked for once, when .venv is there.
FULL ?=
FEWER = $(eval FEWER := $(if $(GPU)$(FULL)$(filter-out recipes/quickstart.yaml,$(RECIPE)),,$(ASK_FEWER)))$(FEWER)
ASK_FEWER = $(shell $(BIN)/python -c 'from drafttrain.targets.native import native_dtype as of; print("yes" * (of("cpu") != "bfloat16"))')
FEWER_ARGS := name=quick data.prompts.0.count=64 data.prompts.1.count=440
FEWER_NOTE := This CPU has no bfloat16: fewer prompts are used, for a weaker draft in less than half an hour. FULL=1 takes all of them in an hour and more.

# The last value that ARGS gives a key, and the folder that the run has by it.
asked = $(lastword $(patsubst $(1)=%,%,$(filter $(1)=%,$(ARGS))))
NAME = $(or $(call asked,name),$(if $(FEWER),quick,$(shell sed -n 's/^name: *//p' $(RECIPE))))
RUN = $(or $(call asked,output_dir),runs/$(NAME))

GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# A GPU machine keeps the torch it has.
KEEP_TORCH := $(if $(GPU),$(shell $(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages))
# On CPUs that share cores between threads, accelerate would leave half of them idle.
ON_CPU := --config_file recipes/accelerate/cpu.yaml --num_cpu_threads_per_process $(shell nproc 2>/dev/null || echo 1)
ON_GPU := --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no
LAUNCH := $(if $(GPU),$(ON_GPU),$(ON_CPU))

.PHONY: quickstart test serving lint format venv clean

quickstart: $(STAMP)
	$(if $(FEWER),@echo '$(FEWER_NOTE)')
	$(BIN)/accelerate launch $(LAUNCH) drafttrain/train.py $(RECIPE) $(if $(FEWER),$(FEWER_ARGS)) $(ARGS)
	$(BIN)/drafttrain eval $(RUN) --suite $(SUITE) $(SUITE_ARGS)

# What is compared number for number is compared on a CPU; a GPU has tests of its own. In this order the longest files,
# those of tests/integration, come first.
test: venv
	$(if $(GPU),$(BIN)/python -m pytest tests/gpu tests/kernels $(ARGS))
	$(if $(GPU),CUDA_VISIBLE_DEVICES= )$(BIN)/python -m pytest $(SIDE_BY_SIDE) --maxprocesses 8 --no-loadscope-reorder -m "not serving" $(ARGS)

# The files with the most loads of the server come first; each server takes more than 1 GiB.
serving: venv
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --maxprocesses 4 tests/serving -m serving $(ARGS)

lint: venv
	@status=0; \
	for check in "ruff format --check --output-format concise ." "ruff check ." "mypy" "lint-imports"; do \
		echo "+ $$check"; $(BIN)/$$check || status=1; \
	done; exit $$status

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(STAMP_DEV)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "drafttrain needs Python 3.11 or newer; set PYTHON="; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(KEEP_TORCH) $(VENV)
	$(if $(GPU),,$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --no-compile '$(TORCH_CPU)')
	$(BIN)/python -m pip install --no-compile -e '.[$(EXTRAS)]'
	touch $@

$(STAMP_DEV): $(STAMP)
	$(BIN)/python -m pip install --no-compile -e '.[$(EXTRAS_DEV)]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
