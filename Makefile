# `make up` runs the product, `make test` proves it. Both make their own environment in .venv first.
PYTHON ?= $(shell command -v python3.12 || command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: up test lint types unit proto clean

up: .venv/up.stamp
	@$(BIN)/thimble up

test: .venv/test.stamp lint types unit

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test.stamp
	$(BIN)/mypy

unit: .venv/test.stamp
	$(BIN)/pytest

proto: .venv/test.stamp
	$(BIN)/python -m grpc_tools.protoc -I services/rpc=proto/thimble/v1 --python_out=. --pyi_out=. --grpc_python_out=. services/rpc/engine.proto

.venv/up.stamp: pyproject.toml .venv/constraints.txt
	$(BIN)/pip install --quiet --constraint .venv/constraints.txt --editable '.[engine,api,embedded]'
	@touch $@

.venv/test.stamp: pyproject.toml .venv/constraints.txt
	$(BIN)/pip install --quiet --constraint .venv/constraints.txt --editable '.[test]'
	@touch $@ .venv/up.stamp

.venv/constraints.txt: services/constraints.txt
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 13), "Thimble needs Python 3.11 or 3.12; this is " + sys.version.split()[0]'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@cp services/constraints.txt $@

clean:
	rm -rf .venv .build .run
