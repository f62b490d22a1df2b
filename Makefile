# Everything a newcomer or CI runs; each target makes what it needs first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-all test-more test-long test-processes test-others test-jax goldens reference mutations extras lint types check docs bench bench-speed bench-planner bench-transport bench-faults bench-chaos bench-netns bench-figures clean

setup: $(VENV)/installed

# Every process begins with the same imports, and tests start many.
export PYTHONDONTWRITEBYTECODE :=

# Installed again when the dependencies change. Most of what is installed is never imported: what is,
# is compiled then.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --editable '.[dev]' $(INSTALL)
	touch $@

demo: setup
	$(BIN)/jaxmorph train configs/demo.yaml

# Tests that start ranks run one after another. Ranks wait half of the time; then all other tests run,
# in two processes of lower priority, since some tests time what ranks do. They report at the end.
SEVERAL_PROCESSES := multiprocess or netns
# How many processes run tests that start ranks, and how many the others; 0: pytest's own alone.
LAUNCHING ?= 0
WORKERS ?= 2
# Marks of tests to choose, and to leave out, as in `make test WITHOUT='long or one_jax'`.
ONLY ?=
WITHOUT ?= long
# The files with such tests: no other has to be read for them.
SEVERAL_IN = $(shell grep -rlE 'mark\.(multiprocess|netns)' --include='test_*.py' $(or $(TESTS),tests) | sort)
THEIR_FILES = $(if $(findstring ::,$(TESTS)),$(TESTS),$(or $(SEVERAL_IN),$(TESTS)))
MARKED = -m '$(1)$(if $(ONLY), and ($(ONLY)))$(if $(WITHOUT), and not ($(WITHOUT)))' --durations=15 --durations-min=5

test: setup
	@$(MAKE) --no-print-directory --jobs 2 test-processes test-others

test-processes: setup
	$(BIN)/python -m pytest --numprocesses $(LAUNCHING) --dist loadfile \
	    $(call MARKED,($(SEVERAL_PROCESSES))) $(THEIR_FILES)

test-others: setup
	@nice -n 5 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
	    $(call MARKED,not ($(SEVERAL_PROCESSES))) $(TESTS) >$(VENV)/others.log 2>&1; \
	status=$$?; echo "all other tests:"; cat $(VENV)/others.log; exit $$status

# What CI adds: properties with 100 examples in place of 25, what needs `make extras`, gradients of more
# models and numbers of stages, and the wheel.
IN_CI := hypothesis or extras or (long and in_ci)

test-more: setup
	@HYPOTHESIS_PROFILE=thorough $(MAKE) test ONLY='$(IN_CI)' WITHOUT=

# Before a release: whole runs of half a minute and more, most of them under faults.
test-long: setup
	@$(MAKE) test ONLY='long and not ($(IN_CI))' WITHOUT=

test-all: test test-more test-long

# Whether the tests notice deliberate mistakes: half an hour. ARGS='--only slackness' takes a few.
mutations: setup
	$(BIN)/python -m tests.mutations $(ARGS)

# What some tests need and not every machine can have; without it they are skipped: NIXL, for RDMA;
# PyTorch (its CPU build has a version of its own; the other brings CUDA), for models beside Hugging
# Face's; NVIDIA's assembler, for the GPU kernels, where none is on the path; MkDocs, for `make docs`.
extras: setup
	@$(BIN)/pip install --quiet --no-deps --no-compile nixl-cu12==1.5.1 \
	|| echo "== no NIXL to be had here: the tests of RDMA are skipped"
	@$(BIN)/pip install --quiet --no-compile 'torch==2.13.0+cpu' --editable '.[test-hf]' \
	|| echo "== no CPU build of PyTorch to be had here: tests/models/test_hugging_face.py is skipped"
	@$(BIN)/pip install --quiet --no-compile --editable ".[docs]" \
	|| echo "== no MkDocs to be had here: the documentation is not built"
	@command -v ptxas >/dev/null \
	|| $(BIN)/pip install --quiet --no-deps --no-compile nvidia-cuda-nvcc==13.0.88 \
	|| echo "== no ptxas to be had here: the GPU kernels are not assembled"

# What matters most of JAX's version, with one of them: the lowering of the GPU kernels and of cuDNN's
# attention, copies, flags. JAX 0.11 and later want Python 3.12: make test-jax PYTHON=python3.12
JAX ?= 0.11.2
JAX_VENV = .venv-jax-$(JAX)
OF_JAX := tests/pallas_kernels tests/copies tests/stage/test_cudnn_attention.py tests/models/test_attention.py tests/test_gpu_page.py tests/runtime/test_xla_settings.py

test-jax:
	@$(MAKE) --no-print-directory setup VENV=$(JAX_VENV) INSTALL=jax==$(JAX)
	$(JAX_VENV)/bin/python -m pytest -m 'not (long or one_jax)' $(or $(TESTS),$(OF_JAX))

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint types test

# What a refactoring must not change, as tests/goldens/__main__.py says: plans, programs and short
# runs, compared with committed ones, or with all that a commit does: AGAINST=COMMIT
goldens: setup
	$(BIN)/python -m tests.goldens $(if $(AGAINST),--against $(AGAINST)) $(if $(ONLY),--only $(ONLY)) $(if $(UPDATE),--update)

# The tables of docs/reference/, from the types and commands that they describe, and those of results.
reference: setup
	$(BIN)/python -m tests.reference
	$(BIN)/python -m tests.command_reference
	$(BIN)/python -m benchmarks.result_pages

# The documentation as a site in build/site; a dead link or anchor is an error.
docs: setup
	@$(BIN)/python -c "import material" 2>/dev/null || $(BIN)/pip install --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Long measurements on an otherwise idle machine; none of them runs in CI.
bench: setup
	@status=0; \
	for benchmark in split_cost dispatch training_speed resume_at_scale; do \
	    $(BIN)/python -m benchmarks.$$benchmark || status=1; \
	done; \
	exit $$status

# This tree's speed beside that of a commit, in turns: make bench-speed AGAINST=COMMIT, half an hour.
bench-speed: setup
	$(BIN)/python -m benchmarks.old_and_new $(or $(AGAINST),HEAD) $(ARGS)

# Plans against proven optima, which are kept in benchmarks/data and need no solving; cost growth.
bench-planner: setup
	@status=0; \
	for benchmark in planner_gap planner_scale; do \
	    $(BIN)/python -m benchmarks.$$benchmark || status=1; \
	done; \
	exit $$status

# The sidecars' throughput and latency, beside raw sockets and memcpy; throughput by their number.
bench-transport: setup
	$(BIN)/python -m benchmarks.transport_speed
	$(BIN)/python -m benchmarks.several_sidecars

# Ten thousand messages over at least three hundred faults: each once, in order, intact.
bench-faults: setup
	$(BIN)/python -m benchmarks.transport_faults

# Training through four hundred faults and thirty kills of everything, every way to end a run, and
# flipped bits in its files: the same bits, causes named, nothing left.
bench-chaos: setup
	$(BIN)/python -m benchmarks.chaos
	$(BIN)/python -m benchmarks.chaos --kill-everything 30
	$(BIN)/python -m benchmarks.flipped_bits

# The data plane and training over network cards that are slow, or lost; for root on Linux.
bench-netns: setup
	$(BIN)/python -m benchmarks.netns

# The paper's figures, its traces and head-of-line blocking, about two hours on an idle machine: what
# of them is missing in runs/figures, and then all their bars.
FIGURES := hol figure3 figure3_mesh figure9 figure14 figure15 figure16 figure16_14b figure17 figure18 \
    figure19 figure21 figure21_14b figure22 table3 ablation memory
bench-figures: setup
	@for figure in $(FIGURES); do \
	    $(BIN)/jaxmorph compare configs/$$figure.yaml run.dir=runs/figures/$$figure --resume auto \
	        || exit 1; \
	done
	$(BIN)/python -m benchmarks.judge runs/figures

clean:
	rm -rf $(VENV) .venv-jax-* build dist .pytest_cache .ruff_cache .hypothesis
