# Everything lives in ./.venv. A set-up runs again only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

.PHONY: help train test lint clean
.DELETE_ON_ERROR:

# The stamp names the folder it was made in: an environment that was moved, or whose Python has gone, is made anew.
ifneq ($(shell cat .venv/venv.stamp 2>/dev/null && .venv/bin/python -c '' 2>&1),$(CURDIR))
.PHONY: .venv/venv.stamp
endif

help:
	@echo 'make train   set up and train a small transformer on 4 local processes  (ARGS="--steps 50": options of hsdp train)'
	@echo 'make test    set up, then ruff, mypy and the test suite                 (ARGS="-k layout": options of pytest)'
	@echo 'make lint    set up, then ruff and mypy only'
	@echo 'make clean   remove ./.venv and caches'
	@echo 'PYTHON=...   the Python that makes ./.venv, 3.10 or newer (now: $(PYTHON))'

train: .venv/train.stamp
	@$(BIN)/hsdp train $(ARGS)

test: lint
	@$(BIN)/python -m pytest $(ARGS)

lint: .venv/dev.stamp
	@$(BIN)/ruff check .
	@$(BIN)/mypy

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each check ends with one line that says what is missing; make's own "Error 1" follows it.
.venv/venv.stamp:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo 'set-up: "$(PYTHON)" not found. Install Python 3.10 or newer, or say make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'set-up: "$(PYTHON)" is '"$$($(PYTHON) -V 2>&1)"'; 3.10 or newer is needed: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo 'set-up: this Python cannot make environments: its venv module is missing (Debian, Ubuntu: apt install python3-venv)' >&2; \
	  exit 1; }
	@rm -rf .venv
	@$(PYTHON) -m venv .venv || { echo 'set-up: $(PYTHON) -m venv .venv failed' >&2; exit 1; }
	@echo '$(CURDIR)' >$@

.venv/dev.stamp: pyproject.toml constraints.txt .venv/venv.stamp
	@$(call install,dev)
	@touch .venv/train.stamp $@

.venv/train.stamp: pyproject.toml constraints.txt .venv/venv.stamp
	@$(call install,train)
	@touch $@

define install
echo 'set-up: installing hsdp[$(1)] into ./.venv (torch is large: minutes the first time)'; \
$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -e '.[$(1)]' -c constraints.txt \
  >.venv/pip.log 2>&1 </dev/null || { \
  echo "set-up: pip failed (is there a network?): $$(grep -m 1 'ERROR: ' .venv/pip.log || tail -n 1 .venv/pip.log)" \
       "[all of it: .venv/pip.log]" >&2; exit 1; }
endef
