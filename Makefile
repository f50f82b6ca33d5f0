# `make demo`, `make test` and `make test-all` need Python 3.11 or newer and git; everything else goes into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-accelerator soak lint format bench clean docker-image docker-rates testbed-docker

demo: $(VENV)/installed
	$(BIN)/chaosnet demo

# Tests without processes or sockets of their own go on side by side; the others are timed, and want the machine.
SIDE_BY_SIDE := -n auto --dist loadscope
# In a process of its own: where the sham device is loaded, torch.accelerator finds it ever after.
SHAM := CHAOSNET_TEST_DEVICE=sham $(BIN)/python -m pytest tests/accelerator

test: $(VENV)/installed
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not realtime"
	$(BIN)/python -m pytest -m "not slow and realtime"
	$(SHAM)

# What fails is run once more, and listed: tests of real processes find a busy machine now and then.
test-all: $(VENV)/installed
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not realtime"
	$(BIN)/python -m pytest -m realtime --reruns 1 -rsR
	$(SHAM)

# On the device that torch.accelerator finds; `make test` has these tests run on one that only behaves like one.
test-accelerator: $(VENV)/installed
	$(BIN)/python -m pytest tests/accelerator

soak: $(VENV)/installed
	$(BIN)/chaosnet soak --minutes 3 --every 5

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/check_types.py

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed
	$(BIN)/chaosnet bench join --json runs/bench/join.json
	$(BIN)/chaosnet bench allreduce --json runs/bench/allreduce.json

# Where pip knows a build of torch for CPUs (a folder or index of your own), it comes from there; else docker build asks
# PyTorch's own index.
docker-image:
	mkdir -p wheels
	$(PYTHON) -m pip download --quiet --no-deps --dest wheels "$$(grep '^torch==' constraints.txt)+cpu" 2>/dev/null || true
	docker build --build-arg PIP_INDEX_URL --tag chaosnet .

# For what `docker-compose up` has started (root): rates for all links, and others every three minutes, for half an hour.
docker-rates: $(VENV)/installed
	$(BIN)/chaosnet testbed up examples/compose.yaml --backend docker --name chaosnet
	$(BIN)/chaosnet testbed trace examples/compose-rates.csv --name chaosnet

testbed-docker: $(VENV)/installed
	$(BIN)/python -m pytest -rs tests/testbed/test_docker.py

$(VENV)/installed: setup.cfg constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: python is %d.%d (expected 3.11 or newer; set PYTHON=...)" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info runs .mypy_cache .pytest_cache .ruff_cache
