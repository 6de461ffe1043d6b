# Needs Python >= 3.11 and nothing else. PYTHON=... chooses another one.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# The checkout itself, so that a machine on which nothing can be installed runs the same.
export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels:$(CURDIR)/launchers

.DEFAULT_GOAL := help
.PHONY: help install train test test-slow test-gpu lint format bench golden hashes matrix

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: .venv/.installed ## make .venv with what training needs, pinned, and megaspec itself

train: .venv/.installed data/hello.manifest.json ## prepare a corpus and train recipe=hello; CONFIG="a.b=c ..." changes it
	$(BIN)/megaspec train recipe=hello $(CONFIG)

# Workers of `make test` compute on one core by tests/conftest.py.
test-slow: export OMP_NUM_THREADS := 1
# Ranks are started by the hundred: each finds its modules compiled.
test test-slow: export PYTHONDONTWRITEBYTECODE :=
# Three tests at a time, so that one that waits leaves its core to another, also on two cores.
WORKERS ?= 3

test: .venv/.installed-dev ## all tests that need no GPU and are not marked slow
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

test-slow: .venv/.installed-dev ## the tests that are marked slow
	$(BIN)/pytest -m 'slow and not gpu'

test-gpu: .venv/.installed-dev ## the tests that need CUDA
	$(BIN)/pytest -m gpu

lint: .venv/.installed-dev ## style, formatting, layers, and what the sources may not say
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pytest tests/test_sources.py

format: .venv/.installed-dev ## bring the sources into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What a GPU measures, and what a machine without one can.
BENCH_TRAIN = $(if $(shell command -v nvidia-smi),--model llama1b --mbs 2,\
	--model tiny --seq 256 --precision fp32 --cross-entropy chunked --compile none)

bench: .venv/megatron ## measure training, checkpoints and data preparation; a JSON line each
	$(BIN)/python tests/benchmarks/bench_train.py $(BENCH_TRAIN)
	$(BIN)/python tests/benchmarks/bench_checkpoint.py --gb 1
	$(BIN)/python tests/benchmarks/bench_data_prepare.py --megatron .venv/megatron

golden: .venv/.installed-dev ## write the golden files that are our own: look at the difference before you commit it
	$(BIN)/python -m tests.write_golden

hashes: | .venv/.installed ## write the hashes of what requirements*.txt pin, after a pin was changed
	$(BIN)/python -m pip install --quiet --target .venv/uv uv==0.13.9
	PYTHONPATH=.venv/uv $(BIN)/python -m tests.write_hashes

matrix: .venv/.installed-dev ## write the tables in tests/parity/README.md: which layouts are held to one rank
	$(BIN)/python -m tests.parity.matrix

.venv/.installed: requirements.txt requirements-torch.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found; set PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --requirement requirements-torch.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.venv/.installed-dev: .venv/.installed requirements-dev.txt requirements-triton.txt
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --requirement requirements-triton.txt
	touch $@

# What blends and data preparation are compared with; nothing of ours imports it.
.venv/megatron: | .venv/.installed
	$(BIN)/python -m pip install --quiet --no-deps --target $@ megatron-core==0.16.1

data/hello.manifest.json: | .venv/.installed
	$(BIN)/megaspec data prepare python --out data/hello --tokenizer byte
