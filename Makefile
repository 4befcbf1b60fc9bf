# make demo [ENGINE=torch]   train on 2 ranks with real data and write a report
# make test                  set up both engines and run every test
# make check                 style, types, import layers
# make bench                 the benchmarks; results in benchmarks/results

PYTHON ?= python3.11
ENGINE ?= mindspore
RANKS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check bench docs clean

demo: $(VENV)/.ready-$(ENGINE)
	@BIN=$(BIN) ENGINE=$(ENGINE) RANKS=$(RANKS) sh examples/demo.sh

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks.sampler
	$(BIN)/python -m benchmarks.data_parallel
	$(BIN)/python -m benchmarks.mindspore_data_parallel
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.channel_parallel --engine torch --network resnet50 --ranks 2
	$(BIN)/python -m benchmarks.channel_parallel --engine torch --network resnet50 --ranks 4
	$(BIN)/python -m benchmarks.channel_parallel --engine torch --network wide_field --ranks 2
	$(BIN)/python -m benchmarks.channel_parallel --engine torch --network wide_field --ranks 4
	$(BIN)/python -m benchmarks.channel_parallel --engine mindspore --network resnet50 --ranks 2
	$(BIN)/python -m benchmarks.channel_parallel --engine mindspore --network resnet50 --ranks 4
	$(BIN)/python -m benchmarks.channel_parallel --engine mindspore --network wide_field --ranks 2
	$(BIN)/python -m benchmarks.channel_parallel --engine mindspore --network wide_field --ranks 4
	$(BIN)/python -m benchmarks.channel_exchange
	$(BIN)/python -m benchmarks.convolution_scratch
	$(BIN)/python -m benchmarks.exactness
	$(BIN)/python -m benchmarks.planner
	$(BIN)/python -m benchmarks.memory_budget
	$(BIN)/python -m benchmarks.profile_overhead
	$(BIN)/python -m benchmarks.profile_scale
	$(BIN)/python -m benchmarks.advice

docs: $(VENV)/.ready-dev
	$(BIN)/convmesh config reference --language en > docs/en/configuration.md
	$(BIN)/convmesh config reference --language zh > docs/zh/configuration.md

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "ConvMesh needs Python 3.11: install it, or name one with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-mindspore $(VENV)/.ready-torch: $(VENV)/.ready-%: $(BIN)/python pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with $* (a minute or two)"
	$(PIP) -e '.[$*,demo]'
	@touch $@

$(VENV)/.ready-dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with both engines and the development tools (a few minutes)"
	$(PIP) -e '.[mindspore,torch,demo,dev,tensorboard,wandb,mlflow]'
	@touch $@ $(VENV)/.ready-mindspore $(VENV)/.ready-torch
