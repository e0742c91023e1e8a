# Both commands make .venv and install into it on first use; PYTHON=... picks the interpreter.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
STORY = Once upon a time

.PHONY: story test lint
story: .venv/installed ## the built-in model writes one
	@.venv/bin/python -m wiola_mlx.generate "$(STORY)" --echo --temp 0.8 --top-p 0.95 --max-tokens 400

test: .venv/installed-test ## the default tests
	.venv/bin/python -m pytest --numprocesses 2 --dist worksteal

lint: .venv/installed-test
	.venv/bin/ruff format . && .venv/bin/ruff check --fix .

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or say make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/installed-test: .venv/installed
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@
