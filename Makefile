# GNU make 3.81 (macOS) and later. PYTHON chooses the interpreter, ARGS is passed on to the command.

ARGS =

# A variable named ENV may be in anyone's shell for other reasons: only `make test ENV=xla` counts.
ifneq ($(origin ENV),command line)
ENV = torch
endif

ifeq ($(ENV),torch)
TEST = test
TEST_CONSTRAINTS = constraints/torch.txt
TEST_EXTRAS = examples,tensorboard,profile,notebook,ray,dev
else ifeq ($(ENV),xla)
TEST = test-xla
TEST_CONSTRAINTS = constraints/xla.txt
TEST_EXTRAS = examples,tensorboard,profile,notebook,ray,dev,xla
else
$(error ENV=$(ENV) is not known: use ENV=torch or ENV=xla)
endif

TEST_PYTHON = .venv-$(TEST)/bin/python
BENCHMARKS = benchmarks/overhead.py benchmarks/startup.py benchmarks/checkpoint.py \
    benchmarks/rollcall.py benchmarks/fingerprint.py benchmarks/control.py benchmarks/ray.py

.PHONY: help train test faults verify lint format bench clean train-environment test-environment bench-environment

help:
	@echo 'make train    train the digits example: lockstep train examples/digits.yaml'
	@echo 'make test     lint, then all tests; ENV=xla runs them with torch_xla'
	@echo 'make faults   every cell of the fault matrix; writes the table of docs/reliability.md'
	@echo 'make verify   lockstep verify on the examples; writes the tables of docs/verify.md'
	@echo 'make lint     ruff, mypy and the import layers'
	@echo 'make format   format the code and fix what can be fixed by itself'
	@echo 'make bench    the benchmarks: overhead, start-up, checkpoints, roll call, fingerprints, control'
	@echo 'make clean    remove environments and build products from this folder (runs/ stays)'
	@echo
	@echo 'ARGS="..."         more arguments, e.g. make test ARGS="-k checkpoint"; ARGS=--long for the longest tests too'
	@echo 'PYTHON=python3.12  the Python to use (3.11, 3.12 or 3.13)'
	@echo 'LOCKSTEP_CACHE=DIR where the installed dependencies are kept (else the cache folder of the user)'

train: train-environment
	@.venv-train/bin/lockstep train examples/digits.yaml $(ARGS)

# One test waits for its processes too often to keep two cores busy: two at once.
# Compiled once, where PYTHONDONTWRITEBYTECODE would have every process of every test compile them again.
test: lint
	$(TEST_PYTHON) -m compileall -q src tests examples
	$(TEST_PYTHON) -m pytest --numprocesses 2 --dist loadgroup $(ARGS)

faults: test-environment
	$(TEST_PYTHON) -m pytest tests/faults/test_matrix.py tests/ray/test_cluster_failures.py --whole-matrix --long $(ARGS)

verify: test-environment
	$(TEST_PYTHON) scripts/verify_tables.py $(ARGS)

lint: test-environment
	$(TEST_PYTHON) -m ruff check
	$(TEST_PYTHON) -m ruff format --check
	$(TEST_PYTHON) -m mypy
	$(TEST_PYTHON) -c 'from importlinter.cli import lint_imports_command as run; run()'

format: test-environment
	$(TEST_PYTHON) -m ruff check --fix
	$(TEST_PYTHON) -m ruff format

bench: bench-environment
	@set -e; for benchmark in $(BENCHMARKS); do \
	    echo "$$benchmark"; .venv-bench/bin/python "$$benchmark" $(ARGS); done

train-environment:
	@scripts/environment train constraints/torch.txt examples,tensorboard

test-environment:
	@scripts/environment $(TEST) $(TEST_CONSTRAINTS) $(TEST_EXTRAS)

bench-environment:
	@scripts/environment bench constraints/torch.txt examples,tensorboard,ray,bench

clean:
	rm -rf .venv-* .env-fallback build dist src/*.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find benchmarks examples src tests -name __pycache__ -type d -prune -exec rm -rf {} +
