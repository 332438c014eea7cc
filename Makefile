# make train   sets up what is missing and trains the laptop recipe
# make test    sets up what is missing and runs lint, types and tests
# make setup-metrics   adds TensorBoard and Weights & Biases
# make setup-dali   adds NVIDIA DALI, for data.feed=dali (400 MB)
# make gpu-measure MINUTES=4.5   on a machine with a GPU: the next undone parts of a list, most valuable first
# make reference   writes docs/keys.md, the reference of all keys, and lists of registered names in other pages
# make docs   builds the site of the docs in build/site
# make length-story   pretrains tiny models that fail beyond their context and repairs them (tens of minutes)
# make passkey   trains tiny models to find a key in long texts, with Mamba and without (an hour)
# make mixers   trains every recurrence at equal size and compares them (hours)
# make optimizers   trains three models with AdamW and with Muon at several rates and compares them (hours)
# make experts   trains two models with experts beside their dense sibling and compares them (hours)
# make joint-recall   trains sparse attention beside Mamba to recall values by context and key (hours)
# make grown   grows HAX beside a tiny Mamba and tunes both on keys in filler (half an hour)
# make span-study   adapts a tiny hybrid to longer rows with every kind of attention and of adapters (an hour)
# make papers   carries on with what four papers claim, a piece of at most two hours, and writes their pages
# make chaos   kills and damages a tiny run again and again, which ends as one that nothing happens to (minutes)
# make audit   compares every gradient of every parallel layout with one process (minutes)
# make rehearse   rehearses a step of every recipe under six layouts without a GPU, and writes its page (tens of minutes)
# make gpu-day-one   on a machine with one GPU: whether all of it is right, a step of every recipe, speed (20 minutes)
# make test-triton TRITON=3.6.0   runs the kernels' tests with another Triton than torch's own (minutes); with
#   ONLY=compiled those that compile all kernels for sm_90
# make test-core   runs the part of the tests that another megatron-core could break
# make setup-slurm   installs SLURM (as root, on Debian), which some slow tests need; nothing else installs it
# make test-slurm   starts a SLURM of two nodes and submits runs to it (minutes)
#
# PYTHON=python3.12 VENV=.venv312 after any of them: with that interpreter, in an environment of its own

# the first that runs; what a version manager leaves in PATH need not
PYTHON ?= $(firstword $(foreach version,3.11 3.12 3.13,$(shell python$(version) -c "import sys; print(sys.executable)" 2>/dev/null)) python3)
VENV ?= .venv
DOCS_VENV ?= .venv-docs
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
.PHONY: train length-story setup setup-dev setup-metrics setup-dali same-python test lint types test-fast test-slow \
  passkey mixers optimizers experts joint-recall grown span-study papers test-core test-triton test-slurm setup-slurm test-gpu gpu-day-one gpu-measure audit \
  chaos rehearse reference docs format clean

train: $(VENV)/.ready
	$(BIN)/python train.py

length-story: $(VENV)/.ready
	$(BIN)/python -m studies.length_story.story

passkey: $(VENV)/.ready
	$(BIN)/python -m studies.passkey.study

mixers: $(VENV)/.ready
	$(BIN)/python -m studies.mixers.study

optimizers: $(VENV)/.ready
	$(BIN)/python -m studies.optimizers.study

experts: $(VENV)/.ready
	$(BIN)/python -m studies.experts.study

joint-recall: $(VENV)/.ready
	$(BIN)/python -m studies.joint_recall.study --results studies/joint_recall/results

grown: $(VENV)/.ready
	$(BIN)/python -m studies.grown.study --results studies/grown/results

span-study: $(VENV)/.ready
	$(BIN)/python -m studies.span_study.study --results studies/span_study/results

papers: $(VENV)/.ready
	$(BIN)/python -m studies.papers

setup: $(VENV)/.ready

setup-dev: $(VENV)/.dev

$(VENV)/.ready: pyproject.toml | same-python
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[prepare,plot,export,tasks,s3,streaming]"
	$(BIN)/pip install --quiet --no-deps --group without-dependencies
	touch $@

same-python:
ifneq ($(origin PYTHON),file)
	@test ! -e $(BIN)/python || test "$$($(BIN)/python --version)" = "$$($(PYTHON) --version)" || \
	  { echo "$(VENV) has $$($(BIN)/python --version), not $(PYTHON): make clean, or add VENV=another-folder"; exit 2; }
endif

$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/.finetune: $(VENV)/.dev
	$(BIN)/pip install --quiet --editable ".[finetune,metrics,mlflow]"
	touch $@

setup-metrics: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable ".[metrics]"

setup-dali: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable ".[dali]"

# one worker runs the tests that start processes, the other the rest
TWO_WORKERS = -n 2 --dist loadgroup --no-loadscope-reorder

test: lint types test-fast

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	test ! -x $(BIN)/hadolint || $(BIN)/hadolint Dockerfile

types: $(VENV)/.dev
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

test-fast: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest $(TWO_WORKERS)

test-slow: $(VENV)/.finetune
	OMP_NUM_THREADS=1 $(BIN)/pytest $(TWO_WORKERS) --timeout 300 -rs -m slow $(if $(SLICE),--slice $(SLICE))

# what another megatron-core could break
test-core: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow and not gpu" tests/engine tests/test_requirements.py \
	  $(patsubst %,tests/parallel/test_%.py,core_in_use training step_guard gather_full_tensors)

# numpy because the interpreter of Triton 3.6 fails with newer ones
test-triton: $(VENV)/.dev
	$(BIN)/pip install --quiet --upgrade --target build/triton-$(TRITON) "triton==$(TRITON)" "numpy<2.4"
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/build/triton-$(TRITON) \
	  $(BIN)/pytest -m "not gpu" tests/ops/*/test_kernels*.py tests/ops/ssd/test_decay.py tests/ops/test_sum_kernels.py \
	  tests/ops/test_whole_step.py $(if $(ONLY),-k $(ONLY))

test-slurm: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow or not slow" tests/cluster

# without it the tests of a real SLURM are skipped and say so; where HYBRIDTRON_CI is set they fail
setup-slurm:
	command -v slurmctld >/dev/null || (apt-get update --quiet --quiet && \
	  apt-get install --quiet --quiet --yes --no-install-recommends slurmctld slurmd slurm-client munge)

test-gpu: $(VENV)/.dev
	$(BIN)/pytest -m gpu

audit: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m hybridtron audit --cases all

chaos: $(VENV)/.ready
	$(BIN)/python -m hybridtron chaos

rehearse: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m hybridtron rehearse --suite
	OMP_NUM_THREADS=1 $(BIN)/python -m hybridtron rehearse --suite --families

gpu-day-one: $(VENV)/.dev
	$(BIN)/python -m hybridtron.proving.gpu.acceptance build/gpu_day_one

gpu-measure: $(VENV)/.dev
	$(BIN)/python -m hybridtron.proving.gpu.measure $(if $(MINUTES),--minutes $(MINUTES))

reference: $(VENV)/.ready
	$(BIN)/python -m docs.make_keys
	$(BIN)/python -m docs.make_passages

# only the packages of the extra, in an environment of their own: the pages are built from sources, without torch
docs: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet --site-dir build/site

$(DOCS_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(DOCS_VENV)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" \
	  > $(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/pip install --quiet --requirement $(DOCS_VENV)/requirements.txt
	touch $@

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
