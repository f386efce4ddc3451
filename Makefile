# The front door. Each target sets up what it needs; `make help` lists them.
# Needs Linux, make, a C++ compiler, and Python 3.11 with its venv module and headers, nothing else.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PACKAGES := schemas pipelines trainer scheduler presage benchmarks tests
KERNELS := schemas/kernels trainer/data trainer/embedding/kernels trainer/slots
JOB := schemas/demo/job.yaml
JOBS ?= 2
DATASET := demo/dataset
PYTEST = python -m pytest -n $(JOBS) --dist worksteal

# What the surroundings of a process decide: no usage reports, no plot window, no chatter of libraries.
export DO_NOT_TRACK := 1
export MPLBACKEND := Agg
export GRPC_VERBOSITY ?= ERROR
export TF_CPP_MIN_LOG_LEVEL ?= 3
export OMP_WAIT_POLICY ?= PASSIVE
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Without its caches of bytecode a process that imports Torch compiles for 15 seconds first.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup wheel demo tools test test-quick test-all test-part test-gpu check format bench chaos lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile

setup: build/installed ## make .venv from requirements.lock and build the kernels

# pip brings the locked uv, and uv brings the rest. The lock names uv, so a sync keeps it.
$(BIN)/uv:
	@test -n "$(PYTHON)" || { echo "set-up must find Python 3.11, got none on PATH; install it or run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	  || { echo "set-up must use Python 3.11, got PYTHON=$(PYTHON); run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/uv.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r .venv/uv.lock

.venv/synced: requirements.lock | $(BIN)/uv
	$(BIN)/uv pip sync --quiet --compile-bytecode --require-hashes --python $(BIN)/python requirements.lock
	@touch $@

# The modules are installed beside their sources, for this processor alone.
build/installed: .venv/synced CMakeLists.txt $(wildcard $(addsuffix /*.cpp,$(KERNELS)) $(addsuffix /*.h,$(KERNELS)))
	@command -v c++ g++ clang++ > /dev/null || { echo "set-up must find a C++ compiler, got none on PATH; install g++" >&2; exit 1; }
	@mkdir -p build
	@{ cmake --fresh -S . -B build -G Ninja -D Python_EXECUTABLE=$(CURDIR)/$(BIN)/python -D LEVELS=$$(python schemas/processor.py) \
	  && cmake --build build && cmake --install build --prefix .; } > build/log 2>&1 || { cat build/log >&2; exit 1; }
	@touch $@

# One wheel for the oldest Linux that this compiler's library allows. Torch brings the OpenMP that the trainer's kernels use.
wheel: build/installed ## dist/presage-*.whl, with kernels for AVX2 and for AVX-512
	@rm -rf dist build/wheel
	@uv build --quiet --wheel --no-build-isolation --python $(BIN)/python --out-dir build/wheel .
	@auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl
	@ls dist

# A fresh start each time, so that the second run shows the same numbers as the first.
demo: build/installed ## log, dataset, oracle, three trainings, plan and demo/report.html
	@rm -rf demo
	python -m pipelines generate $(JOB) --output demo/log
	@mkdir -p demo/runs
	python -m pipelines build $(JOB) --input demo/log --output $(DATASET) --json > demo/runs/build.json
	python -m trainer train $(JOB) --dataset $(DATASET) --output demo/runs/dedup
	python -m trainer train $(JOB) --dataset $(DATASET) --output demo/runs/expanded --expanded
	python -m trainer train $(JOB) --dataset $(DATASET) --output demo/runs/cached --embedding cached
	python -m scheduler plan $(JOB) --dataset $(DATASET) --history demo/runs --json > demo/runs/plan.json
	python -m scheduler plan $(JOB) --dataset $(DATASET) --history demo/runs --explain
	python -m pipelines report $(DATASET) --html demo/report.html --runs demo/runs
	@echo "open demo/report.html"

test-quick: build/installed ## the tests of single functions
	$(PYTEST) -m "not slow and not nightly and not chaos"

test: build/installed ## every function of the product, with a local store and one kill of each kind
	$(PYTEST) -m "not nightly and not chaos"

# Ten times as many examples of each property.
test-all: export HYPOTHESIS_PROFILE := thorough
test-all: test ## also Flink, Kubernetes, other stores, images, documents and the long fault injection
	$(PYTEST) -m "nightly and not chaos"
	$(PYTEST) -m chaos

test-part: build/installed ## PART=K/N: part K (from 0) of N of the nightly tests
	$(PYTEST) --part $(PART)

tools: build/installed ## build and install the programs that tests start, once per machine
	python -m tests.tools

check: build/installed ## format, lint, types and import directions
	ruff format --check .
	ruff check .
	pyright
	python -m pytest -q tests/test_imports.py

format: build/installed ## mend format and what lint can mend
	ruff format .
	ruff check --fix .

bench: build/installed ## every benchmark into benchmarks/results; SIZE=small ends in minutes
	python -m benchmarks $(if $(SIZE),--$(SIZE)) $(NAMES)

# On a machine with a GPU, whose environment is requirements-gpu.lock or the machine's own.
test-gpu: ## what needs a GPU: losses and bits against the processors', then times of a step
	python -m pytest -m gpu -p no:xdist tests/trainer tests/presage
	python -m benchmarks.runs.steps --parts devices --datasets demo

chaos: build/installed ## the long fault-injection run; DRAW=seed LIMIT=240 runs a part of it
	$(PYTEST) -m chaos $(if $(DRAW),--draw $(DRAW)) $(if $(LIMIT),--seconds $(LIMIT))

# torchrec asks for the CUDA build of fbgemm by name: the override drops that from the CPU locks.
PIN = $(BIN)/uv pip compile --quiet --no-header --no-annotate --generate-hashes --no-emit-index-url --no-emit-find-links \
  --python-version 3.11 --python-platform x86_64-manylinux_2_28 $(UPGRADE)
COMPILE = $(PIN) pyproject.toml

lock: | $(BIN)/uv ## compile the locks; UPGRADE=--upgrade takes newer versions
	$(COMPILE) --extra pipelines --extra yaml --extra trainer --extra torchrec --extra score --extra scheduler --extra dev --override requirements-override.txt --output-file requirements.lock
	$(COMPILE) --extra pipelines --constraints requirements.lock --output-file requirements-pipelines.lock
	$(COMPILE) --extra pipelines --extra dataflow --constraints requirements.lock --output-file requirements-dataflow.lock
	$(COMPILE) --extra pipelines --extra gpu --extra scheduler --extra dev --constraints requirements.lock --output-file requirements-gpu.lock
	$(COMPILE) --extra pipelines --extra trainer --extra torchrec --extra scheduler --constraints requirements.lock --override requirements-override.txt --override deploy/images/override.txt --output-file requirements-jobs.lock
	$(COMPILE) --extra scheduler --constraints requirements.lock --output-file requirements-scheduler.lock
	$(PIN) deploy/airflow/requirements.in --output-file deploy/airflow/requirements.lock

clean: ## remove .venv, the kernels, demo and caches
	rm -rf .venv build dist demo .pytest_cache .ruff_cache .hypothesis
	find $(PACKAGES) -name __pycache__ -type d -prune -exec rm -rf {} +
	find $(KERNELS) -name '*.so' -delete
