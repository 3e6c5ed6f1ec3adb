# `make up` runs the product, `make test` proves it. Both make their own environment in .venv first.
# ARGS goes to `thimble up` (make up ARGS="--port 9000"), PIP_FLAGS to pip (an index or folder with a CPU build of torch).
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
JOBS ?= 2# tests at once; they start real servers and watch the clock, so not as many as there are cores
PIP := $(BIN)/pip --disable-pip-version-check --no-input install --constraint .venv/constraints.txt $(PIP_FLAGS)

.PHONY: up test lint types native unit drill docker-host proto settings pins locks audit clean

up: .venv/up.stamp
	@exec $(BIN)/thimble up $(ARGS)

test: .venv/test.stamp
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types native
	@$(MAKE) --no-print-directory unit

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test.stamp
	$(BIN)/mypy

# The C++ is built first, so that no test's time limit has to cover it; without a compiler the slower paths are tested.
native: .venv/test.stamp
	-$(BIN)/python -m kernels.build

# Tests start a hundred processes: their modules are compiled once, whatever the environment says.
unit: native
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m "not gpu and not compose" -n $(JOBS) --dist loadfile

# The compose stack on a real Docker engine (DOCKER_HOST), with stand-in base images; see tests/stack/drill/README.md.
drill: docker-host .venv/test.stamp
	$(BIN)/pytest -m compose -s tests/stack

docker-host:
	@test -n "$$DOCKER_HOST" || { echo "set DOCKER_HOST to the Docker engine that may build and run this" >&2; exit 1; }

proto: .venv/test.stamp
	$(BIN)/python -m grpc_tools.protoc -I services/rpc=proto/thimble/v1 --python_out=. --pyi_out=. --grpc_python_out=. services/rpc/engine.proto

settings: .venv/test.stamp
	sed -i '/^# The engine: /,$$d' .env.example && $(BIN)/thimble settings >>.env.example

# Exact versions of all that pyproject.toml's pins bring along, CUDA's libraries included. Run it with Debian 12's Python,
# the oldest that we support: it needs a package more than later ones.
pins:
	rm -rf .build/pins && $(PYTHON) -m venv .build/pins
	.build/pins/bin/pip install --dry-run --ignore-installed --report .build/pins/report.json $(PIP_FLAGS) '.[test]'
	.build/pins/bin/python -c 'import json; \
	found = [entry["metadata"] for entry in json.load(open(".build/pins/report.json"))["install"]]; \
	print(*sorted(f"""{m["name"]}=={m["version"].partition("+")[0]}""" for m in found if m["name"] != "thimble"), sep="\n")' \
	  >.build/pins/constraints.txt
	LC_ALL=C sort --ignore-case .build/pins/constraints.txt >services/constraints.txt
	rm -rf .build/pins
	$(MAKE) --no-print-directory locks

# The same with the hashes of every file, for the images: pip install --require-hashes.
locks: .venv/test.stamp
	$(BIN)/python -m services.tools.lock
	$(BIN)/python -m services.tools.licences

# Known holes in what is pinned, by PyPI's database; asks the internet, keeps what it said in .build/audit.md.
# `make audit AUDIT_FLAGS="-s osv"` asks another.
audit:
	rm -rf .build/audit .build/audit.md && $(PYTHON) -m venv .build/audit && .build/audit/bin/pip install --quiet pip-audit==2.10.1
	.build/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement services/locks/everything.txt \
	  --format markdown --output .build/audit.md $(AUDIT_FLAGS); status=$$?; cat .build/audit.md 2>/dev/null; exit $$status

.venv/up.stamp: pyproject.toml .venv/constraints.txt
	$(PIP) --editable '.[engine,api,embedded,checkpoint]'
	@touch $@

.venv/test.stamp: pyproject.toml .venv/constraints.txt
	$(PIP) --editable '.[test]'
	@touch $@ .venv/up.stamp

.venv/constraints.txt: services/constraints.txt
	@test -n "$(PYTHON)" || { echo "Thimble needs Python 3.11 or 3.12 and found neither: install one, or say PYTHON=/path/to/it" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) cannot make environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@cp services/constraints.txt $@

clean:
	rm -rf .venv .build .run
