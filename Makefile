# Everything a checkout needs: set-up, demonstration, tests. `make help` lists the targets.
#
# Set-up is one stamp file per extent, made from pyproject.toml and constraints.txt; while it is newer than both,
# nothing is installed. Where packages come from is left to pip's own configuration.

PYTHON ?= python3
CORPORA ?=
REASON ?=

PY := .venv/bin/python
CORE := .venv/.installed-core
DEV := .venv/.installed-dev
PYTEST := $(PY) -m pytest -n auto $(if $(CORPORA),--corpora="$(CORPORA)")

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test unit lint docs results audit bench bench-quick golden clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' Makefile

demo: $(CORE) ## set up, run the built-in study `quick`, print its verdicts and where the report is
	.venv/bin/equipoise run quick

test: lint unit ## set up, lint, type-check and test; CORPORA=DIR adds the tests on real text

unit: $(DEV) ## the tests alone
	$(PYTEST)

lint: $(DEV) ## formatting, lint rules, types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy --strict

docs: $(CORE) ## write docs/study.md anew, from the docstrings of the spec, and the tables of docs/scale.md
	$(PY) docs/study_reference.py
	$(PY) docs/scale_tables.py

results: $(CORE) ## make the pages of results/ anew from the records there, then docs/results.md and the front of README
	@for study in results/*/; do [ ! -f "$$study/lock.json" ] || .venv/bin/equipoise report "$$study" > /dev/null || exit 1; done
	$(PY) docs/results_page.py

audit: $(PY) ## known vulnerabilities of the pinned packages, by pip-audit; needs the network
	@test -x .venv/audit/bin/pip-audit || { $(PYTHON) -m venv .venv/audit && .venv/audit/bin/python -m pip install -q pip-audit; }
	@.venv/audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt || { \
	  echo "audit: not passed; above are packages with known faults, or why the vulnerability service could not be asked" >&2; exit 1; }

bench: $(DEV) ## a training step beside Hugging Face's, under an hour on an idle machine; writes build/bench.md
	@mkdir -p build
	$(PY) benchmarks/step_time.py --shapes A,B,B-wide-heads,tinystories-cpu --threads 2 --out build/bench.md

bench-quick: $(DEV) ## does every benchmark run? A minute or two, no figures worth reading
	$(PY) benchmarks/step_time.py --quick
	$(PY) benchmarks/kernels.py --rounds 1
	$(PY) benchmarks/data.py --quick
	$(PY) benchmarks/prepare_big.py --quick --spelling --clean --folder build/big
	$(PY) benchmarks/study_time.py --quick
	$(PY) benchmarks/gpu_step.py

golden: $(DEV) ## record the golden losses anew; REASON="..." is their line under Numerics in CHANGELOG.md
	@$(PY) tests/test_golden.py '$(subst ','\'',$(REASON))'

clean: ## remove caches and build output; .venv and runs stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks docs -type d -name __pycache__ -prune -exec rm -rf {} +

$(CORE): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install -c constraints.txt -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install -c constraints.txt -e '.[hf,dev]'
	@touch $(CORE) $@

# An absent interpreter also covers a .venv whose Python is gone; --clear then removes the stale stamps with it.
$(PY):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "equipoise needs $(PYTHON), version 3.11 or newer; on Debian and Ubuntu: apt install python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "equipoise needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "equipoise needs Python's venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	@$(PY) -m pip --version >/dev/null 2>&1 || { rm -rf .venv; \
	  echo "equipoise needs pip in its virtual environment; on Debian and Ubuntu: apt install python3-pip python3-venv" >&2; exit 1; }
