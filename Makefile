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

oldest := .venv/oldest
core := test_exgen.py tests/test_parity.py tests/test_artifacts.py tests/test_export.py

.PHONY: demo test lint env bench

demo: $(env)
	@$(bin)/python demo.py $${PROMPT:+--prompt "$$PROMPT"} $${MODEL:+--model "$$MODEL"}

# The newest transformers is in .venv; the oldest that pyproject.toml allows is laid over it for a second run.
test: lint $(oldest)
	OMP_NUM_THREADS=1 $(bin)/pytest -q -n 2 --dist loadscope
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(oldest) $(bin)/pytest -q -n 2 --dist loadscope $(core)

lint: $(env)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

bench: $(env)
	@$(bin)/python -m pip install --quiet --editable ".[bench]"
	@$(bin)/python bench/peers.py

env: $(env)

$(oldest): $(env)
	@echo "installing the oldest transformers supported into $@"
	@$(bin)/python -m pip install -qq --upgrade --target $@ $(shell sed -n 's/.*"transformers>=\([0-9.]*\).*/transformers==\1.0/p' pyproject.toml) einops==0.7.0

# torch alone and first, at one version: an open range would take the newest build, several gigabytes of it on some systems.
$(env): pyproject.toml
	@test -x $(bin)/python || $(PYTHON) -m venv .venv
	@echo "installing $(TORCH) into .venv (some minutes the first time)"
	@$(bin)/python -m pip install -qq "$(TORCH)"
	@echo "installing transformers, the test tools and exgen itself"
	@$(bin)/python -m pip install -qq --editable ".[test,demo,executorch]"
	@touch $@
