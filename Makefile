# Everything a newcomer or CI runs; each target makes what it needs first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint types check bench bench-planner bench-transport bench-faults bench-netns bench-figures clean

setup: $(VENV)/installed

# Installed again when the dependencies change.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/jaxmorph train configs/demo.yaml

test: setup
	$(BIN)/python -m pytest $(TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint types test

# Long measurements on an otherwise idle machine; none of them runs in CI.
bench: setup
	@status=0; \
	for benchmark in split_cost pace blocking all_delegated head_of_line dispatch delegated_message; do \
	    $(BIN)/python -m benchmarks.$$benchmark || status=1; \
	done; \
	exit $$status

# Plans against proven optima, which are kept in benchmarks/data and need no solving; cost growth.
bench-planner: setup
	@status=0; \
	for benchmark in planner_gap planner_scale; do \
	    $(BIN)/python -m benchmarks.$$benchmark || status=1; \
	done; \
	exit $$status

# The sidecars' throughput and latency, beside raw sockets and memcpy.
bench-transport: setup
	$(BIN)/python -m benchmarks.transport_speed

# Ten thousand messages over at least three hundred faults: each once, in order, intact.
bench-faults: setup
	$(BIN)/python -m benchmarks.transport_faults

# The data plane and training over network cards that are slow, or lost; for root on Linux.
bench-netns: setup
	$(BIN)/python -m benchmarks.netns

# The paper's figures 14 to 17, about 50 minutes on a machine that does nothing else.
bench-figures: setup
	$(BIN)/python -m benchmarks.paper_figures

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
