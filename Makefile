# GNU make 3.81 (macOS) and later. PYTHON chooses the interpreter, ARGS is passed on to the command.

ARGS =
MINUTES = 10
SEED =
LOOPS = 20000

TEST_EXTRAS = examples,tensorboard,profile,notebook,ray,s3,text,metrics,stream,predict,onnx,wandb,mlflow,docs,dev
TORCH_EXTRAS = $(TEST_EXTRAS),lightning
TEST_PYTHON = .venv-test/bin/python
# Tests wait for their processes too often for two at once to keep two cores busy.
PYTEST = -m pytest --numprocesses 3
# Where words that nobody in this field uses may not come back.
WORDS_IN = README.md docs src

# torch_xla has builds for 64-bit x86 Linux alone, and wants a torch of its own: what needs it has an environment of its own.
MACHINE := $(shell uname -s) $(shell uname -m)
XLA_PYTHON = .venv-test-xla/bin/python
XLA_TESTS = tests/xla tests/unit/test_pjrt.py
RAY_XLA_TESTS = tests/ray/test_ray_xla.py
ifeq ($(MACHINE),Linux x86_64)
WITH_XLA = test-xla
ENVIRONMENTS = both-environments
VERIFY_ENVIRONMENT = xla-environment
VERIFY_PYTHON = $(XLA_PYTHON)
else
WITH_XLA = without-xla
ENVIRONMENTS = test-environment
VERIFY_ENVIRONMENT = test-environment
VERIFY_PYTHON = $(TEST_PYTHON)
endif

BENCHMARKS = benchmarks/overhead.py benchmarks/startup.py benchmarks/checkpoint.py \
    benchmarks/rollcall.py benchmarks/fingerprint.py benchmarks/control.py benchmarks/data.py benchmarks/ray.py
# Hosts of network namespaces are made by root alone.
ifeq ($(shell id -u),0)
BENCHMARKS += benchmarks/hosts.py
endif

.PHONY: help train check test test-all test-torch test-xla without-xla faults fuzz storm verify lint format bench docs dist
.PHONY: both-environments release-notes clean train-environment test-environment xla-environment bench-environment docs-environment

help:
	@echo 'make train    train the digits example: lockstep train examples/digits.yaml'
	@echo 'make check    lint, then the unit tests: minutes'
	@echo 'make test     lint, then all tests; those of XLA in an environment of their own, where torch_xla has a build'
	@echo 'make test-all  the same with the longest tests, and with those whose subject has not changed since they passed'
	@echo 'make faults   every cell of the fault matrix; writes the table of docs/reliability.md'
	@echo 'make fuzz     LOOPS=20000 random training loops, each compared with plain PyTorch'
	@echo 'make storm    random faults for MINUTES=10, from SEED=N or another seed each time'
	@echo 'make verify   lockstep verify on the examples; writes the tables of docs/verify.md'
	@echo 'make lint     ruff, mypy, the import layers and the words of the docs'
	@echo 'make format   format the code and fix what can be fixed by itself'
	@echo 'make bench    the benchmarks: overhead, start-up, checkpoints, roll call, fingerprints, control'
	@echo 'make docs     the documentation site, into site/: open site/index.html'
	@echo 'make dist     the wheel and the source distribution, into dist/; make release-notes: what is new in it'
	@echo 'make clean    remove environments and build products from this folder (runs/ stays)'
	@echo
	@echo 'ARGS="..."         more arguments, e.g. make test ARGS="-k checkpoint"; ARGS=--long for the longest tests too'
	@echo 'PYTHON=python3.12  the Python to use (3.11, 3.12 or 3.13)'
	@echo 'LOCKSTEP_CACHE=DIR where the installed dependencies are kept (else the cache folder of the user)'

train: train-environment
	@.venv-train/bin/lockstep train examples/digits.yaml $(ARGS)

check: lint
	$(TEST_PYTHON) $(PYTEST) tests/unit $(ARGS)

# Lint takes a core for a minute, beside the tests.
test: $(ENVIRONMENTS)
	@$(MAKE) --no-print-directory -j2 lint test-torch
	@$(MAKE) --no-print-directory $(WITH_XLA)

test-all:
	@$(MAKE) --no-print-directory test ARGS='$(if $(ARGS),$(ARGS),--long)'

# Both at once, where both are needed: most of it is waiting for downloads, by turns with unpacking.
both-environments:
	@scripts/environment test-xla constraints/xla.txt $(TEST_EXTRAS),xla,tpu-plan & other=$$!; \
	    scripts/environment test constraints/torch.txt $(TORCH_EXTRAS); made=$$?; wait $$other && exit $$made

# Compiled once, where PYTHONDONTWRITEBYTECODE would have every process of every test compile them again.
test-torch: test-environment
	$(TEST_PYTHON) -m compileall -q src tests examples
	$(TEST_PYTHON) $(PYTEST) $(if $(ARGS),$(ARGS),--skip-unchanged)

# Without torch_xla these tests would be skipped, so it is imported first. Those on Ray come one by one: parts of Ray Train look
# for the newest cluster of the machine, which with two at once may be the other one's. ARGS may choose none of them: pytest's exit code 5.
test-xla: xla-environment
	$(XLA_PYTHON) -c 'import torch_xla'
	$(XLA_PYTHON) -m pytest --numprocesses 2 $(XLA_TESTS) $(ARGS) || [ $$? -eq 5 ]
	$(XLA_PYTHON) -m pytest $(RAY_XLA_TESTS) $(ARGS) || [ $$? -eq 5 ]

without-xla:
	@echo 'make test: what needs torch_xla was left out ($(XLA_TESTS) $(RAY_XLA_TESTS)): torch_xla has no build for $(MACHINE)'

faults: test-environment
	$(TEST_PYTHON) -m pytest tests/faults/test_matrix.py tests/ray/test_cluster_failures.py tests/hosts \
	    --whole-matrix --long $(ARGS)

# Random loops in plain PyTorch and in Lockstep: make test tries 200, always the same.
fuzz: test-environment
	LOCKSTEP_LOOPS=$(LOOPS) $(TEST_PYTHON) $(PYTEST) -o faulthandler_timeout=0 tests/differential $(ARGS)

# SEED=N makes the same storm again.
storm: test-environment
	$(TEST_PYTHON) tests/faults/storm.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

verify: $(VERIFY_ENVIRONMENT)
	$(VERIFY_PYTHON) scripts/verify_tables.py $(ARGS)

lint: test-environment
	$(TEST_PYTHON) -m ruff check
	$(TEST_PYTHON) -m ruff format --check
	$(TEST_PYTHON) -m mypy
	$(TEST_PYTHON) -c 'from importlinter.cli import lint_imports_command as run; run()'
	$(TEST_PYTHON) scripts/words.py $(WORDS_IN)

format: test-environment
	$(TEST_PYTHON) -m ruff check --fix
	$(TEST_PYTHON) -m ruff format

bench: bench-environment
	@set -e; for benchmark in $(BENCHMARKS); do \
	    echo "$$benchmark"; .venv-bench/bin/python "$$benchmark" $(ARGS); done

docs: docs-environment
	@.venv-docs/bin/python scripts/docs $(ARGS)

dist: docs-environment
	@.venv-docs/bin/python scripts/distributions.py $(ARGS)

release-notes: docs-environment
	@.venv-docs/bin/python scripts/release_notes.py $(ARGS)

train-environment:
	@scripts/environment train constraints/torch.txt examples,tensorboard

test-environment:
	@scripts/environment test constraints/torch.txt $(TORCH_EXTRAS)

xla-environment:
	@scripts/environment test-xla constraints/xla.txt $(TEST_EXTRAS),xla,tpu-plan

bench-environment:
	@scripts/environment bench constraints/torch.txt examples,tensorboard,ray,bench

docs-environment:
	@scripts/environment docs constraints/torch.txt docs

clean:
	rm -rf .venv-* .env-fallback build dist site src/*.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find benchmarks examples src tests -name __pycache__ -type d -prune -exec rm -rf {} +
