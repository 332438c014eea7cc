# make train   sets up what is missing and trains the laptop recipe
# make test    sets up what is missing and runs lint, types and tests
# make setup-dali   adds NVIDIA DALI, for data.feed=dali (400 MB)
# make length-story   pretrains tiny models that fail beyond their context and repairs them (tens of minutes)
# make hf-ops   writes the ops of the shipped Hugging Face class from those of the package
# make chaos   kills and damages a tiny run again and again, which ends as one that nothing happens to (minutes)
# make audit   compares every gradient of every parallel layout with one process (minutes)
# make test-slurm   installs a SLURM of two nodes where it can (as root, on Debian) and submits runs to it (minutes)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
STREAMING := mosaicml-streaming==0.13.0
DALI := nvidia-dali-cuda120==2.4.0
BIN := .venv/bin
.PHONY: train length-story setup setup-dali test lint types test-fast test-slow test-slurm setup-slurm test-gpu audit chaos hf-ops format clean

train: .venv/.ready
	$(BIN)/python train.py

length-story: .venv/.ready
	$(BIN)/python tools/length_story.py

setup: .venv/.ready

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps "$(STREAMING)"
	touch $@

.venv/.finetune: .venv/.ready
	$(BIN)/pip install --quiet --editable ".[dev,finetune]"
	touch $@

setup-dali: .venv/.ready
	$(BIN)/pip install --quiet "$(DALI)"

test: lint types test-fast

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.ready
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

test-fast: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not gloo and not slow and not gpu"
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "gloo and not slow"

test-slow: .venv/.finetune setup-slurm
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow $(if $(SLICE),--slice $(SLICE))

test-slurm: .venv/.ready setup-slurm
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow or not slow" tests/slurm

# without it these tests say so and are skipped, but where HYBRIDTRON_CI is set they fail
setup-slurm:
	-command -v slurmctld >/dev/null || (apt-get update --quiet --quiet && \
	  apt-get install --quiet --quiet --yes --no-install-recommends slurmctld slurmd slurm-client munge)

test-gpu: .venv/.ready
	$(BIN)/pytest -m gpu

audit: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python tools/audit_parallel.py --cases all

chaos: .venv/.ready
	$(BIN)/python tools/chaos.py

hf-ops: .venv/.ready
	$(BIN)/python tools/make_hf_ops.py

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache
