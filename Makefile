# `make demo`, `make test` and `make test-all` need Python 3.11 or newer and git; everything else goes into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-accelerator dashboard-test soak lint format bench site wheel-test clean docker-image docker-rates testbed-docker testbed-slurm pages-test

demo: $(VENV)/installed
	$(BIN)/chaosnet demo

# Tests go on side by side, in their order: the longest modules are among the first, so no worker is left alone with one
# at the end. Those of real processes wait more than they compute, so there are half as many more of them as processors;
# and they are timed, so what fails is run once more, alone.
BY_MODULE := --dist loadscope --no-loadscope-reorder
SIDE_BY_SIDE := -n auto $(BY_MODULE)
WAITING = -n $$($(BIN)/python -c "import os; print(3 * os.cpu_count() // 2)") $(BY_MODULE)
ALONE := --last-failed --last-failed-no-failures none -rf
# In a process of its own: where the sham device is loaded, torch.accelerator finds it ever after.
SHAM := CHAOSNET_TEST_DEVICE=sham $(BIN)/python -m pytest tests/accelerator

test: $(VENV)/installed
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not realtime"
	$(BIN)/python -m pytest $(WAITING) -m "not slow and realtime" || $(BIN)/python -m pytest $(ALONE) -m realtime
	$(SHAM)

test-all: $(VENV)/installed
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not realtime"
	$(BIN)/python -m pytest $(WAITING) -m realtime || $(BIN)/python -m pytest $(ALONE) -m realtime
	$(SHAM)

# On the device that torch.accelerator finds; `make test` has these tests run on one that only behaves like one.
test-accelerator: $(VENV)/installed
	$(BIN)/python -m pytest tests/accelerator

# The page in a real browser, a real Prometheus, `chaosnet top` in tmux (root, Debian or Ubuntu; elsewhere, install the
# three yourself).
dashboard-test: $(VENV)/installed
	for each in chromium prometheus tmux; do command -v $$each >/dev/null || apt-get install -y --no-install-recommends $$each || exit; done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt playwright
	$(BIN)/python -m pytest -rs tests/unit/test_page.py tests/integration/test_page_served.py \
		tests/integration/test_page_actions.py tests/integration/test_page_in_browser.py \
		tests/integration/test_top_in_tmux.py

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

# build/site/index.html, to be opened as it is. A link that leads nowhere is an error. Diagrams are drawn in the reader's
# browser by mermaid, which comes from npm once; without npm they stay text.
MERMAID := 11.17.2
site: $(VENV)/docs-installed
	test -e build/mermaid.min.js || ! command -v npm >/dev/null || $(MAKE) build/mermaid.min.js
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

# The sdist and the wheel, in an environment that has never seen this folder.
wheel-test: $(VENV)/installed
	$(BIN)/python tests/wheel.py

build/mermaid.min.js:
	mkdir -p build
	cd build && npm pack --silent mermaid@$(MERMAID) && tar -xzf mermaid-$(MERMAID).tgz package/dist/mermaid.min.js
	mv build/package/dist/mermaid.min.js $@
	rm -r build/package build/mermaid-$(MERMAID).tgz

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

# examples/slurm/train.sbatch under a Slurm of namespaces (root, Debian or Ubuntu; elsewhere, install Slurm and munge
# yourself). Four minutes, of which the job waits most for its time to be over.
testbed-slurm: $(VENV)/installed
	for each in slurm-wlm munge; do dpkg -s $$each >/dev/null 2>&1 || apt-get install -y --no-install-recommends $$each || exit; done
	$(BIN)/python -m pytest -rs tests/testbed/test_job_under_slurm.py

# Every command of the pages, typed as it stands, on namespaces with the pages' addresses (root, Linux). Eight minutes.
pages-test: $(VENV)/installed
	$(BIN)/python -m pytest -rs tests/testbed/type_pages.py tests/integration/test_pages.py

# pip compiles what it installs, but nothing editable. Where Python may write no bytecode (PYTHONDONTWRITEBYTECODE), each
# of the thousands of processes that tests start would compile all of it.
PACKAGES := chaosnet scheduler node protocols netem simulator benchmarks trials

$(VENV)/installed: setup.cfg constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: python is %d.%d (expected 3.11 or newer; set PYTHON=...)" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m compileall -q $(PACKAGES)
	touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info runs .mypy_cache .pytest_cache .ruff_cache
