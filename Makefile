# Start with `make train` and `make test`. Both set up `.venv` first; set-up installs nothing when it is repeated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With a working NVIDIA driver, vLLM's CUDA build is installed, otherwise its CPU build.
ACCELERATOR := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
READY := $(VENV)/.ready-$(ACCELERATOR)
# Some images set this. Each process of Ray, vLLM and the tests would then compile thousands of imported files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train notebook test-unit test test-integration test-all test-slow mutants test-gpu bench-gpu \
	contract coverage lint clean

help:
	@echo "make train      train the embedded policy on the embedded task: minutes, no GPU, no model download"
	@echo "make notebook   open the tutorial in JupyterLab"
	@echo "make test-unit  run the unit tests, which start no Ray cluster and no engine"
	@echo "make test       run the unit tests, and each main path once on real Ray, vLLM and TRL"
	@echo "make test-integration  run the other tests that are not slow; CI runs them after make test"
	@echo "make test-all   run all tests, including slow ones: faults, network failures, the notebook"
	@echo "make test-slow  run the slow tests that guard what has changed since the default branch, or since BASE=COMMIT"
	@echo "make mutants    change a seeded sample of expressions, one at a time, and count those that a unit test catches"
	@echo "make test-gpu   test on one GPU, under 25 minutes; DRY=1: tiny sizes, without a GPU"
	@echo "make bench-gpu  compare with stock TRL on one GPU, under 25 minutes; DRY=1: tiny sizes, without a GPU"
	@echo "make contract   check our source against the oldest and newest supported vLLM, TRL, transformers, accelerate and Ray"
	@echo "make coverage   measure line and branch coverage of make test, including Ray workers"
	@echo "make lint       run ruff, and mypy on everything, the notebooks too"
	@echo "make setup      set up .venv only; the other commands do it too"
	@echo "make clean      delete .venv and build outputs"

setup: $(READY)

$(READY): pyproject.toml scripts/set_up.py
	$(PYTHON) scripts/set_up.py --accelerator $(ACCELERATOR) --venv $(VENV)
	@touch $@

train: setup
	$(BIN)/python jobs/train.py --example arithmetic

notebook: setup
	$(PYTHON) scripts/set_up.py --accelerator $(ACCELERATOR) --venv $(VENV) --extras test,notebook
	$(BIN)/jupyter lab notebooks/grpo_with_ray_train.ipynb

# Unit tests run in one process per core, so each process computes with one thread.
UNIT := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/unit
INTEGRATION := $(BIN)/python -m pytest tests/benchmarks tests/fault_injection tests/integration
test-unit: setup
	$(UNIT) -m "not slow and not long"

# One process leaves cores idle, since its tests wait for other processes and for time limits. So two share the files,
# with Ray clusters of their own; three take longer on 2 cores. The files stay in this order: the longest tests are
# those of the benchmarks, and at the end they would run alone.
SIDE_BY_SIDE := $(INTEGRATION) -n 2 --dist loadfile --no-loadscope-reorder

test: setup
	$(UNIT) -m "not slow and not long"
	$(SIDE_BY_SIDE) -m "main_path and not slow"

test-integration: setup
	$(UNIT) -m "long and not slow"
	$(SIDE_BY_SIDE) -m "not slow and not main_path"

test-all: setup
	$(UNIT)
	$(INTEGRATION)

# The same without --run only prints them.
test-slow: setup
	$(BIN)/python tests/helpers/slow_tests.py --run $(if $(BASE),--base $(BASE))

# ARGS="--only ledger --sample 60 --seed 1" tries others.
mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/mutants.py $(ARGS)

test-gpu: setup
	$(BIN)/python tests/gpu/run.py $(if $(DRY),--dry) $(ARGS)

bench-gpu: setup
	$(BIN)/python tests/benchmarks/bench_gpu.py $(if $(DRY),--dry,--write) $(ARGS)

# RELEASES="vllm==0.32.0 transformers==5.18.0" checks these in place of the supported ones.
contract: setup
	PYTHONPATH=tests/helpers $(BIN)/python -m library_contract $(RELEASES)

coverage: setup
	$(BIN)/python tests/benchmarks/measure_coverage.py -- $(MAKE) test test-integration

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/notebook_code.py build/notebooks
	$(BIN)/mypy grpo_ray jobs scripts tests build/notebooks

clean:
	rm -rf $(VENV) build dist *.egg-info
