# Everything runs in .venv, which is made from constraints.txt on first use.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEMO_OUT ?= demo-out

# Without kept bytecode every process of the tests compiles PyTorch again.
unexport PYTHONDONTWRITEBYTECODE

# absolute, because its tests run it where the rules are; empty where none could be fetched, and they are skipped
PROMTOOL = "$${TRTSPEC_PROMTOOL:-$$(ls $(CURDIR)/.oracles/promtool/usr/bin/promtool 2> /dev/null)}"

.PHONY: demo test test-all test-oracles test-gpu lint docs clean

demo: $(STAMP)  ## the whole chain on a small Kimi, on a CPU, ending in a report
	@TRTSPEC_PROGRESS=1 $(BIN)/trtspec demo -o $(DEMO_OUT) --force

test: lint  ## lint, then the default test suite
	@echo "== tests (several minutes; slow ones are in 'make test-all')"
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-all: lint .oracles/.made  ## also the tests that take minutes each, and those against a real vLLM
	@echo "== all tests"
	@TRTSPEC_VLLM_PYTHON=.oracles/vllm/bin/python TRTSPEC_PROMTOOL=$(PROMTOOL) \
		$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow or not slow" --timeout=1800

# TRTSPEC_ORACLE_SOURCES=DIR: checkouts of TorchSpec, SpecForge and EAGLE, which are no packages; skipped without
test-oracles: .oracles/.made  ## against code that others wrote: vLLM, speculators, ModelOpt 0.47 and 0.48, clients, promtool and more in environments of their own
	@TRTSPEC_ORACLE_PYTHON=.oracles/transformers4/bin/python TRTSPEC_VLLM_PYTHON=.oracles/vllm/bin/python \
		TRTSPEC_VLLM_STARTS=30 TRTSPEC_SPECULATORS_PYTHON=.oracles/vllm/bin/python \
		TRTSPEC_MODELOPT_048_PYTHON=.oracles/modelopt048/bin/python \
		TRTSPEC_SCHEMATHESIS_PYTHON=.oracles/schemathesis/bin/python TRTSPEC_LITELLM_PYTHON=.oracles/litellm/bin/python \
		TRTSPEC_LANGCHAIN_PYTHON=.oracles/langchain/bin/python TRTSPEC_LM_EVAL_PYTHON=.oracles/lm_eval/bin/python \
		TRTSPEC_GUIDELLM_PYTHON=.oracles/guidellm/bin/python TRTSPEC_AIPERF_PYTHON=.oracles/aiperf/bin/python \
		TRTSPEC_PROMTOOL=$(PROMTOOL) \
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

clean:
	rm -rf .venv .oracles site demo-out build dist .pytest_cache .mypy_cache .ruff_cache

$(STAMP): pyproject.toml constraints.txt
	@echo "== installing into .venv (about 2 GB, two to three minutes on two cores)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	@touch $@
