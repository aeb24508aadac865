# Two commands do everything: `make demo` installs and runs the whole loop, `make test` installs and runs the tests.
# Both use a local environment (.venv) and need Python 3.11 to 3.13 with venv; nothing is installed outside it,
# except that `make test` run as root on Debian adds the programs it tests against (tools/test-programs).

PYTHON ?= python3
DEMO ?=
PYTHONS ?= 3.11 3.12 3.13

.PHONY: demo test test-slow test-deploy fuzz matrix bench lock audit clean

demo: .venv/service
	.venv/bin/ncclscope demo $(DEMO)

test: .venv/dev
	tools/test-programs
	tools/check

test-slow: .venv/dev
	tools/test-programs
	.venv/bin/python -m pytest -m slow -n 3 --durations 25
	FUZZ_SEED=1 tools/fuzz-log 15

test-deploy: .venv/deploy
	tools/test-programs
	.venv/bin/python -m pytest -m deploy

fuzz: .venv/dev
	tools/fuzz-log
	.venv/bin/python -m pytest -n 2 -m "hypothesis and not slow and not deploy" --hypothesis-profile=search

matrix: .venv/dev
	tools/matrix $(PYTHONS)

bench: .venv/dev
	.venv/bin/python benchmarks/all.py

.venv/service: requirements/service.txt pyproject.toml
	tools/environment $(PYTHON) .venv requirements/service.txt
	touch $@

.venv/dev: requirements/dev.txt pyproject.toml
	tools/environment $(PYTHON) .venv requirements/dev.txt
	touch .venv/service $@

.venv/deploy: requirements/deploy.txt .venv/dev
	tools/environment $(PYTHON) .venv requirements/deploy.txt
	touch $@

# Pins with hashes, for every Python that is supported. Needs uv (`pip install uv`).
lock:
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  --extra service pyproject.toml -o requirements/service.txt
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  --extra service --extra grafana --extra models --extra notify --extra otlp --group dev pyproject.toml -o requirements/dev.txt

	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  pyproject.toml -o requirements/agent.txt
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  --group build -o requirements/build.txt
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  -c requirements/dev.txt --group deploy -o requirements/deploy.txt
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  --group audit -o requirements/audit.txt

# Known weaknesses of all pinned packages, by the advisories of PyPI or `make audit AUDIT="-s osv"`; needs the network.
audit: .venv-audit
	tools/audit $(AUDIT)

.venv-audit: requirements/audit.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	touch $@

clean:
	rm -rf .venv .venv-audit .venv-3* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
