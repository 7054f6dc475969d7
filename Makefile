PYTHON ?= python3

demo:
	$(PYTHON) -m venv .venv && .venv/bin/pip install -e . && .venv/bin/fedplat run quickstart

test:
	$(PYTHON) -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/python -m pytest -n 2 --dist loadfile

slow:
	.venv/bin/python -m pytest -m slow

check:
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/python -m tests.typecheck

docs:
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

.PHONY: demo test slow check docs
