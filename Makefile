# Everything runs in .venv, which is made from constraints.txt on first use.

PYTHON ?= python3
BUILDER ?= buildah
BIN := .venv/bin
STAMP := .venv/.installed
DEMO_OUT ?= demo-out
CLOCK_ROUNDS ?= 50
PROCESS_ROUNDS ?= 3

# Without kept bytecode every process of the tests compiles PyTorch again.
unexport PYTHONDONTWRITEBYTECODE

# absolute, because its tests run it where the rules are; empty where none could be fetched, and they are skipped
PROMTOOL = "$${TRTSPEC_PROMTOOL:-$$(ls $(CURDIR)/.oracles/promtool/usr/bin/promtool 2> /dev/null)}"

.PHONY: help demo test test-nightly test-all test-busy test-oracles test-gpu lint docs dist image clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$(printf '\t') read -r target does; do \
		printf '%-14s %s\n' "$$target" "$$does"; done

demo: $(STAMP)  ## the whole chain on a small Kimi, on a CPU, ending in a report
	@TRTSPEC_PROGRESS=1 $(BIN)/trtspec demo -o $(DEMO_OUT) --force

test: lint  ## lint, then the default test suite
	@echo "== tests (several minutes; slow ones are in 'make test-nightly')"
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# sizes: TRTSPEC_KILLS, _TEST_PROMPTS, _HOSTILE_GRAMMARS, _ROUNDS, _HONEST_CHECKS, _FAULT_STEP (1: all faults)
test-nightly: lint  ## every test that needs no GPU and no environment of others; ends with the skipped ones and their reasons
	@echo "== default and slow tests"
	@export CUDA_VISIBLE_DEVICES= TRTSPEC_KILLS=$${TRTSPEC_KILLS:-100} TRTSPEC_ROUNDS=$${TRTSPEC_ROUNDS:-2} \
		TRTSPEC_TEST_PROMPTS=$${TRTSPEC_TEST_PROMPTS:-300} TRTSPEC_HOSTILE_GRAMMARS=$${TRTSPEC_HOSTILE_GRAMMARS:-300} \
		TRTSPEC_HONEST_CHECKS=$${TRTSPEC_HONEST_CHECKS:-1} TRTSPEC_FAULT_STEP=$${TRTSPEC_FAULT_STEP:-10} \
		TRTSPEC_PROMTOOL=$(PROMTOOL); \
		nightly="$(BIN)/python -m pytest --timeout=1800 -rs --no-fold-skipped"; failed=0; \
		$$nightly -n 2 --dist loadfile -m "not alone" || failed=1; \
		echo "== tests that compare speeds, beside nothing"; \
		$$nightly -m alone || failed=1; \
		exit $$failed

# both with four loops beside them that keep every core busy
test-busy: $(STAMP)  ## CLOCK_ROUNDS runs of the tests that bound a time, PROCESS_ROUNDS of those that start processes
	@for loop in 1 2 3 4; do (while :; do :; done) & loops="$$loops $$!"; done; trap "kill $$loops" EXIT; trap "exit 130" INT TERM; \
	for round in $$(seq $(CLOCK_ROUNDS)); do \
		echo "== round $$round of $(CLOCK_ROUNDS): tests with clocks"; \
		$(BIN)/python -m pytest -q -m "clock and not slow" || exit 1; \
	done; \
	for round in $$(seq $(PROCESS_ROUNDS)); do \
		echo "== round $$round of $(PROCESS_ROUNDS): tests with processes"; \
		$(BIN)/python -m pytest -q $$(grep -rlE "subprocess|TRTSPEC|process\(|served\(|fork" tests --include="test_*.py") || exit 1; \
	done

test-all: lint .oracles/.made  ## also the tests that take minutes each, and those against a real vLLM
	@echo "== all tests"
	@TRTSPEC_VLLM_PYTHON=.oracles/vllm/bin/python TRTSPEC_PROMTOOL=$(PROMTOOL) \
		$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow or not slow" --timeout=1800

# TRTSPEC_ORACLE_SOURCES=DIR: checkouts of TorchSpec, SpecForge and EAGLE, which are no packages; skipped without
# TRTSPEC_TRTLLM_LOADERS=DIR[:DIR]: sources of TensorRT-LLM, the newest first, for tests/oracles/engine_loaders.py; skipped without
test-oracles: .oracles/.made  ## against code that others wrote: vLLM, speculators, ModelOpt 0.47 and 0.48, clients, promtool and more in environments of their own
	@TRTSPEC_ORACLE_PYTHON=.oracles/transformers4/bin/python TRTSPEC_VLLM_PYTHON=.oracles/vllm/bin/python \
		TRTSPEC_VLLM_STARTS=30 TRTSPEC_SPECULATORS_PYTHON=.oracles/vllm/bin/python \
		TRTSPEC_MODELOPT_048_PYTHON=.oracles/modelopt048/bin/python \
		TRTSPEC_SCHEMATHESIS_PYTHON=.oracles/schemathesis/bin/python TRTSPEC_LITELLM_PYTHON=.oracles/litellm/bin/python \
		TRTSPEC_LANGCHAIN_PYTHON=.oracles/langchain/bin/python TRTSPEC_LM_EVAL_PYTHON=.oracles/lm_eval/bin/python \
		TRTSPEC_GUIDELLM_PYTHON=.oracles/guidellm/bin/python TRTSPEC_AIPERF_PYTHON=.oracles/aiperf/bin/python \
		TRTSPEC_PROMTOOL=$(PROMTOOL) TRTSPEC_FLA=.oracles/fla \
		$(BIN)/python -m pytest tests/oracles tests/hostile/test_server_requests.py tests/quant/test_modelopt_export.py tests/docker/test_monitoring.py -m "slow or not slow" --timeout=1800 -s

# TRTSPEC_GPU_PYTHON: a Python with a CUDA build of torch where .venv's is built without
test-gpu: $(STAMP)  ## exactness, losslessness and speed on this machine's GPU: a table to send back
	@$${TRTSPEC_GPU_PYTHON:-$(BIN)/python} -m tools.gpu -o gpu-report.json

.oracles/.made: $(STAMP) tests/oracles/environments.sh
	@echo "== installing what others publish into .oracles (10 GB, a quarter of an hour)"
	@rm -rf .oracles
	@bash tests/oracles/environments.sh .oracles .venv
	@touch $@

lint: $(STAMP)  ## style, types, generated documents up to date, prose
	@echo "== lint (ruff, mypy, generated documents, prose)"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/python tools/generate.py --check
	@$(BIN)/python -m tools.prose

docs: $(STAMP)  ## the documentation as a site in site/
	@$(BIN)/python tools/generate.py
	@$(BIN)/zensical build --clean

dist: $(STAMP)  ## the wheel and the source distribution in dist/, the wheel built from the sources that it goes with
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation -o dist

image:  ## the image of the reference backend, which then describes the model that it ships: BUILDER=buildah or docker
	@$(BUILDER) build -f docker/cpu.Dockerfile -t trtspec:cpu .
	@if [ $(BUILDER) = buildah ]; then \
		container=$$(buildah from trtspec:cpu); buildah run "$$container" -- trtspec inspect kimi-nano; status=$$?; \
		buildah rm "$$container" > /dev/null; exit $$status; \
	else $(BUILDER) run --rm trtspec:cpu inspect kimi-nano; fi

clean:  ## removes what the others made
	rm -rf .venv .oracles site demo-out build dist .pytest_cache .mypy_cache .ruff_cache

$(STAMP): pyproject.toml constraints.txt
	@echo "== installing into .venv (about 2 GB, two to three minutes on two cores)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	@touch $@
