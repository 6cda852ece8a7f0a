# Everything from a fresh clone: `make train`, `make test`, `make lint`.
#
#   make train                                the default run, configs/darl.py
#   make train CONFIG=configs/other.py WORKDIR=runs/mine
#   make train ARGS="--config.num_steps=50"   any flag of launch/main.py
#   make test ARGS="tests/config_test.py"     any argument of pytest
#   make test PYTHON=python3.12               the interpreter of a new .venv

PYTHON ?= python3
CONFIG ?= configs/darl.py
WORKDIR ?=
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check

.PHONY: help train test lint
.NOTPARALLEL:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# Without WORKDIR each run picks a new folder below runs/.
train: $(VENV)/.installed
	$(RUN) launch/main.py --config=$(CONFIG) \
	  $(if $(WORKDIR),--workdir=$(WORKDIR)) $(ARGS)

test: $(VENV)/.installed-test
	$(RUN) -m pytest -n 2 --dist=loadfile --max-worker-restart=0 $(ARGS)

lint: $(VENV)/.installed-test
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

# Stamps: each is made again only when pyproject.toml is newer.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "darl_jax needs Python 3.11 or newer, but $(PYTHON) is " \
	  + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	@echo "Installing darl_jax into $(VENV) (a minute or two, once)."
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/.created
	@echo "Installing darl_jax and its test tools into $(VENV) (a minute or" \
	  "two, once)."
	$(INSTALL) -e '.[test]'
	@touch $(VENV)/.installed $@
