# make demo [PROMPT="..."] [MODEL=DIR_OR_HUB_NAME]   a real model, five ways to generate
# make test                                          lint, types, tests
# make bench                                         against other engines: sets them up, writes docs/benchmarks.md
PYTHON ?= python3
TORCH ?= torch==2.13.0
PROMPT ?=
MODEL ?=
export PROMPT MODEL

env := .venv/.installed
bin := .venv/bin

.PHONY: demo test lint env bench

demo: $(env)
	@$(bin)/python demo.py $${PROMPT:+--prompt "$$PROMPT"} $${MODEL:+--model "$$MODEL"}

test: lint
	OMP_NUM_THREADS=1 $(bin)/pytest -q -n 2

lint: $(env)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

bench: $(env)
	@$(bin)/python -m pip install --quiet matplotlib
	@$(bin)/python bench/peers.py

env: $(env)

# torch alone and first, at one version: an open range would take the newest build, several gigabytes of it on some systems.
$(env): pyproject.toml
	@test -x $(bin)/python || $(PYTHON) -m venv .venv
	@echo "installing $(TORCH) into .venv (some minutes the first time)"
	@$(bin)/python -m pip install -qq "$(TORCH)"
	@echo "installing transformers, the test tools and exgen itself"
	@$(bin)/python -m pip install -qq --editable ".[test,demo]"
	@touch $@
