# Everything runs in .venv, which is made and filled on first use. `make help` lists the targets.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# Where the standard library is enough.
PYTHON3 ?= python3
EXTRAS := megatron,demo,plot,ray,completion,docs,test
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
# Two files at a time: most tests start processes of their own, and wait for them.
PARALLEL := -n 2 --dist loadfile

export OMP_NUM_THREADS ?= 1

.PHONY: help install test test-slow lint demo docs parity test-versions test-stock gpu-check bench-plan anneal \
  readme-numbers report-check package-check audit plan-solver plan-versions fuzz kills memory soak \
  mutants mutants-sample clean

# Other releases that the tests train with; each lies in a folder of its own, torch is shared.
OTHER_MEGATRONS := $(addprefix $(VENV)/megatron-core-,0.17.1 0.18.2)

help:
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 16

install: $(INSTALLED)  ## make .venv with the package and all that tests and demo need

test: lint $(OTHER_MEGATRONS)  ## lint, types and the tests, but the slow ones (ten minutes)
	$(PYTEST) $(PARALLEL) -m "not slow" tests

test-slow: $(OTHER_MEGATRONS)  ## what test leaves out: other Megatron versions and plugins, experts, long runs
	$(PYTEST) $(PARALLEL) -m slow tests

lint: $(INSTALLED)  ## ruff, types, who imports whom, unused names
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/vulture

readme-numbers:  ## figures of README and docs, from benchmarks/results
	$(PYTHON3) -m benchmarks.readme_numbers

parity: $(OTHER_MEGATRONS)  ## every layout and option of the parity suite; writes docs/parity.md
	PARITY=full $(PYTEST) $(PARALLEL) tests/parity

test-versions: $(OTHER_MEGATRONS)  ## the same trainings on every supported megatron-core
	$(PYTEST) tests/versions tests/parity/test_versions.py

test-stock: $(INSTALLED)  ## MEGATRON_LM=DIR: Megatron-LM's own pretrain_gpt.py from a checkout
	@test -n "$(MEGATRON_LM)" || { echo "give MEGATRON_LM=DIR, a Megatron-LM checkout" >&2; exit 2; }
	$(BIN)/python -m tests.stock.run "$(MEGATRON_LM)"

fuzz: $(INSTALLED)  ## 10 000 plans, 1 000 batches, 20 000 damaged files, 240 000 calls with junk (an hour)
	FUZZ=full $(PYTEST) --timeout 7200 tests/reliability/test_fuzz.py \
	  tests/reliability/test_damaged_files.py tests/reliability/test_junk.py

mutants: $(INSTALLED)  ## plant every small fault; the fast tests must notice 95 % (90 minutes)
	$(BIN)/python -m tests.mutants

MUTANTS ?= 24

mutants-sample: $(INSTALLED)  ## MUTANTS=24 of them, chosen by the commit; fails on survivors not on the page
	$(BIN)/python -m tests.mutants --sample $(MUTANTS)

kills: $(INSTALLED)  ## a training stopped at every durable write, in every way, and restarted (25 minutes)
	KILLS=full $(PYTEST) --timeout 3600 -s tests/reliability/test_kills.py

memory: $(INSTALLED)  ## 500 steps of varying shapes: resident memory and live tensors
	MEMORY=full MALLOC_ARENA_MAX=1 $(PYTEST) -s tests/reliability/test_memory.py

SOAK_MINUTES ?= 30

soak: $(INSTALLED)  ## SOAK_MINUTES=30 of demo training with random faults; the ledger must balance
	rm -rf runs/soak
	SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/python -m tests.reliability.soak runs/soak

SEEDS ?= 1
LAYOUT ?= dp2

demo: $(INSTALLED)  ## reinforcement learning on two CPU processes; SEEDS=3 LAYOUT=pp2|tp2|cp2 RESUME=1 ASYNC=1
	$(BIN)/python -m examples.demo $(if $(ASYNC),--out runs/demo-async --async,\
	  --out runs/demo --seeds $(SEEDS) --layout $(LAYOUT) $(if $(RESUME),--resume))

gpu-check: $(INSTALLED)  ## kernels against float64 on this machine's GPU, and their speed
	$(BIN)/python -m benchmarks.gpu_check

docs: $(INSTALLED)  ## the documentation as a site in site/; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

report-check: $(INSTALLED)  ## RUN=DIR: the report page in headless Chromium: four widths, light and dark
	$(BIN)/python -m tests.browser.check_report $(RUN)

package-check: $(INSTALLED)  ## DIST=DIR: sdist and wheel; the wheel in new environments
	$(BIN)/python -m tests.package.check $(DIST)

AUDITOR := $(VENV)/auditor

audit: $(AUDITOR)  ## known vulnerabilities of all that is installed; fails where it could not ask
	$(BIN)/python -m tests.package.audit $(AUDITOR)/bin/python

$(AUDITOR): | $(INSTALLED)
	$(BIN)/python -m venv $@.part
	$@.part/bin/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.10'
	mv $@.part $@

PEERS := runs/peers

bench-plan: $(PEERS)  ## plans side by side with baselines and the packers of verl, areal, openrlhf
	$(BIN)/python -m benchmarks.plan_quality --peers $(PEERS) --fewest-peers 2

anneal: $(PEERS)  ## make the annealed reference plans again (half an hour)
	$(BIN)/python -m benchmarks.plan_anneal --peers $(PEERS)

plan-solver: $(INSTALLED)  ## plans of up to 40 samples within 2 % of an exact solver's bound
	PLAN_SOLVER=full $(PYTEST) tests/plan/test_exact_solver.py

# The oldest supported NumPy, and an interpreter other than the one that .venv was made with.
OTHER_NUMPY := $(VENV)/numpy-2.0.2
OTHER_PYTHON ?= python3.13

plan-versions: $(OTHER_NUMPY) $(VENV)/plan-python  ## same plans; OTHER_PYTHON=python3.13
	$(PYTEST) tests/versions/test_plans.py

$(OTHER_NUMPY): $(VENV)/numpy-%: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $@.part numpy==$*
	mv $@.part $@

$(VENV)/plan-python: | $(INSTALLED)
	$(OTHER_PYTHON) -m venv $@.part
	$@.part/bin/python -m pip install --quiet --disable-pip-version-check numpy pyarrow
	mv $@.part $@

$(PEERS): | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $@.part verl==0.9.1 areal==1.0.4 openrlhf==0.11.2
	mv $@.part $@

$(OTHER_MEGATRONS): $(VENV)/megatron-core-%: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $@.part megatron-core==$*
	mv $@.part $@

clean:  ## remove .venv and what runs left behind
	rm -rf $(VENV) runs build dist *.egg-info

# A Python that runs and is new enough; a pyenv shim may be on PATH and still not run.
define FIND_PYTHON
for python in $$PYTHON python3.12 python3.13 python3.14 python3 python \
    $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1[2-9]*/bin/python \
    /usr/local/bin/python3.1[2-9] /opt/python*/bin/python3 /opt/homebrew/bin/python3.1[2-9] \
    $$HOME/.local/bin/python3.1[2-9] $$HOME/miniconda3/bin/python; do \
  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' \
      >/dev/null 2>&1; then echo "$$python"; exit 0; fi; \
done; \
echo "No Python 3.12 or newer (with venv) was found: install one, for example with" \
  "'apt-get install python3.12 python3.12-venv' or 'pyenv install 3.12'," \
  "or name it: make PYTHON=/path/to/python3.12" >&2; exit 1
endef

$(INSTALLED): pyproject.toml setup.py
	@python=$$($(FIND_PYTHON)) && echo "using $$python" && \
	  { test -x $(BIN)/python || "$$python" -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@
