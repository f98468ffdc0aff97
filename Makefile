# make help lists the targets. Settings: the variables below, on the command line or in the environment.
PYTHON ?= python3
CONCURRENCY ?= $(shell nproc 2>/dev/null || echo 2)
PASSES ?= 1
EXAMPLE := examples/experimental/nemo-gym
VENV := .venv
PY := $(VENV)/bin/python
MINT_VERSION := 4.2.941
MILES_VENV := .venv-miles
SGLANG_VENV := .venv-sglang
BENCH_VENV := .venv-bench
TEST_MILES = MILES="$(if $(MILES),$(abspath $(MILES)))" $(MILES_VENV)/bin/python -m pytest tests/miles
SOURCES := examples tests tools

export LOCAL_STACK_DIR ?= $(CURDIR)/.local_stack
export PYTHONPATH := $(CURDIR)/$(EXAMPLE)
unexport PYTHONDONTWRITEBYTECODE MAKEFLAGS
STACK := $(PY) -m local_stack
SCAN := $(PY) $(EXAMPLE)/eval_nemogym_via_api.py --concurrency "$(CONCURRENCY)" --passes "$(PASSES)" $(if $(LIMIT),--limit "$(LIMIT)")

.DEFAULT_GOAL := help
.PHONY: help venv miles-venv engine setup test test-fast test-miles test-docker test-browser lint docs-check format \
	golden-scan policy-scan envs data eval-specs report serve doctor train train-dry-run miles-flags upstream-pr bench lock clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

venv:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found; install Python 3.10 or newer, or name one: make PYTHON=<path>" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: Python 3.10 or newer is needed, found $$($(PYTHON) --version 2>&1): make PYTHON=<path>" >&2; exit 2; }
	@$(PYTHON) tools/setup_venv.py $(VENV) requirements-dev.txt

miles-venv: venv
	@$(PY) tools/setup_venv.py $(MILES_VENV) tests/miles/requirements.txt 3.11
	@$(if $(MILES),$(PY) tools/setup_venv.py $(SGLANG_VENV) tests/miles/requirements-sglang.txt 3.11)

setup: venv  ## install everything and build the tasks (once; 2.5 GB)
	@exec $(STACK) setup --with-parent

test: lint setup miles-venv test-fast  ## lint, offline tests, tests on a real NeMo Gym, Miles' rollout in front of it
	$(PY) -m pytest tests/integration
	$(TEST_MILES)

test-fast: venv  ## offline tests only
	$(PY) -m pytest tests/fast

test-browser: venv  ## the page of make report in a headless Chromium (CHROMIUM=<path>)
	$(PY) -m pytest tests/browser

test-miles: setup miles-venv  ## Miles' rollout on a CPU, in front of that NeMo Gym (MILES=<checkout>: its code)
	$(TEST_MILES)

test-docker: engine setup  ## episodes in docker, on an engine of its own (Linux, as root; on Debian it fetches what it needs)
	$(PY) -m pytest tests/docker

engine: venv
	@exec $(PY) tools/docker_engine.py --check

lint: venv  ## ruff, autoflake, isort, black, links and paths of the pages: check only
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/autoflake --check --quiet --recursive --remove-all-unused-imports $(SOURCES)
	$(VENV)/bin/isort --check-only --quiet $(SOURCES)
	$(VENV)/bin/black --check --quiet $(SOURCES)
	@$(PY) tools/check_docs.py

docs-check: lint  ## Mintlify's own checker on docs/ (npm; 1 GB, minutes for the first time)
	@command -v npx >/dev/null || { echo "error: npx was not found; install Node.js 20 or newer with npm" >&2; exit 2; }
	cd docs && npx --yes mint@$(MINT_VERSION) broken-links

format: venv  ## ruff, autoflake, isort, black: rewrite
	$(VENV)/bin/ruff check --fix $(SOURCES)
	$(VENV)/bin/autoflake --in-place --recursive --remove-all-unused-imports $(SOURCES)
	$(VENV)/bin/isort $(SOURCES)
	$(VENV)/bin/black $(SOURCES)

# Settings are checked before NeMo Gym starts; what the scan says of its options is followed by make's names for them.
SETTINGS := DATA='$(DATA)' LIMIT='$(LIMIT)' PASSES='$(PASSES)' CONCURRENCY='$(CONCURRENCY)' ARGS='$(ARGS)'
CHECK = $(1) --check-only $(if $(DATA),--input "$(DATA)") || { echo "the settings of make: $(SETTINGS)" >&2; exit 2; }
# Unfinished scans are resumed. A finished one of the local tasks runs again: it is to prove this machine as it is now.
TASKS = --input "$(or $(DATA),$(LOCAL_STACK_DIR)/tasks.jsonl)" $(if $(DATA),,--again)
# What is proven in one sandbox is not proven in the other.
GOLDEN_SCAN = $(SCAN) --golden --output outputs/golden$(if $(filter docker,$(SANDBOX)),-docker).jsonl $(ARGS)

ifdef NEMO_GYM_URL
golden-scan: venv
	@test -n "$(DATA)" || { echo "error: NEMO_GYM_URL is set, so that its server is scanned; name its tasks with DATA=<file.jsonl>" >&2; exit 2; }
	@mkdir -p outputs
	@$(call CHECK,$(GOLDEN_SCAN))
	@$(GOLDEN_SCAN) --input "$(DATA)"
else
golden-scan: venv  ## prove every task: gold patch 1.0, empty patch 0.0 (PASSES=1, LIMIT=, DATA=, ARGS=)
	@mkdir -p outputs
	@$(call CHECK,$(GOLDEN_SCAN))
	@exec $(STACK) run --with-parent --golden -- $(GOLDEN_SCAN) $(TASKS)
endif

# Of the scripted roles solve runs on every task, the others on their first few.
FEW := $(or $(LIMIT),2)
POLICY_SCAN = $(SCAN) --policy-base-url "$$POLICY_BASE_URL" --output outputs/policy.jsonl $(ARGS)
LOCAL_MODEL = --policy-model "$(or $(POLICY_MODEL),model)"
ROLE_SCAN = echo "scripted policy: $(1)"; $(SCAN) --policy-base-url "$${POLICY_BASE_URL%/solve/v1}/$(1)/v1" --output outputs/policy-$(1).jsonl --input "$$LOCAL_STACK_TASKS" --again $(ARGS)
define ROLE_SCANS
set -e
$(call ROLE_SCAN,solve) --expect-reward 1 --expect-exit-status Submitted
$(call ROLE_SCAN,wrong) --limit "$(FEW)" --expect-reward 0 --expect-exit-status Submitted
$(call ROLE_SCAN,never-submit) --limit "$(FEW)" --expect-reward 0 --expect-exit-status LimitsExceeded
$(call ROLE_SCAN,never-call) --limit "$(FEW)" --expect-reward 0 --expect-exit-status LimitsExceeded
endef
export ROLE_SCANS

# Other environments than SWE-bench (make envs); ENV is a variable of shells, too, so only make's own command line counts.
ENVIRONMENT := $(if $(filter command line,$(origin ENV)),$(ENV))
ENV_SCAN = echo "scripted policy: $(1)"; $(SCAN) --policy-base-url "$${POLICY_BASE_URL%/solve/v1}/$(1)/v1" --output "outputs/policy-$(ENVIRONMENT)-$(1).jsonl" --input "$$LOCAL_STACK_TASKS" --again --expect-exit-status Graded $(2) $(ARGS)
define ENV_SCANS
set -e
$(call ENV_SCAN,solve,$$LOCAL_STACK_EXPECT_SOLVE)
$(call ENV_SCAN,wrong,$$LOCAL_STACK_EXPECT_WRONG)
endef
export ENV_SCANS

ifdef NEMO_GYM_URL
policy-scan: venv
	@test -n "$(DATA)" || { echo "error: NEMO_GYM_URL is set, so that its server is scanned; name its tasks with DATA=<file.jsonl>" >&2; exit 2; }
	@test -n "$$POLICY_BASE_URL" || { echo "error: NEMO_GYM_URL is set, so that its server is scanned; name the policy it calls with POLICY_BASE_URL=<http://host:8000/v1>" >&2; exit 2; }
	@mkdir -p outputs
	@$(call CHECK,$(POLICY_SCAN))
	@$(POLICY_SCAN) --input "$(DATA)"
else ifneq ($(ENVIRONMENT),)
policy-scan: venv
	@mkdir -p outputs
	@$(call CHECK,$(SCAN) $(ARGS))
ifdef POLICY_BASE_URL
	@exec $(STACK) run --with-parent --env "$(ENVIRONMENT)" -- sh -c '$(SCAN) --policy-base-url "$$POLICY_BASE_URL" --output "outputs/policy-$(ENVIRONMENT).jsonl" --input "$(or $(DATA),$$LOCAL_STACK_TASKS)" $(LOCAL_MODEL) $(ARGS)'
else
	@exec $(STACK) run --with-parent --env "$(ENVIRONMENT)" --policy solve -- sh -c "$$ENV_SCANS"
endif
else ifdef POLICY_BASE_URL
policy-scan: venv
	@mkdir -p outputs
	@$(call CHECK,$(POLICY_SCAN) $(LOCAL_MODEL))
	@exec $(STACK) run --with-parent -- $(POLICY_SCAN) $(LOCAL_MODEL) $(TASKS)
else
policy-scan: venv  ## whole agent episodes: scripted policies, or POLICY_BASE_URL=<url> POLICY_MODEL=<name> (ENV=, PASSES=1, ...)
	@test -z "$(DATA)" || { echo "error: the scripted policies know the local tasks only, found DATA=$(DATA); name a policy for it with POLICY_BASE_URL=<http://host:8000/v1>" >&2; exit 2; }
	@mkdir -p outputs
	@$(call CHECK,$(SCAN) $(ARGS))
	@exec $(STACK) run --with-parent --policy solve -- sh -c "$$ROLE_SCANS"
endif

envs: venv  ## environments of NeMo Gym that run here beside SWE-bench: make policy-scan ENV=<name>
	@exec $(STACK) envs

data: venv  ## tasks as Miles prompts (INPUT=SWE-bench Verified, OUTPUT=, SPLIT=, SUBSET=, LIMIT=, ARGS="--only ids.txt")
	@test -n "$(OUTPUT)$(if $(INPUT),,1)" || { echo "error: INPUT is set; name the file to write: make data INPUT=$(INPUT) OUTPUT=<file.jsonl>" >&2; exit 2; }
	@test "$(origin DATA)" != "command line" || { echo "error: DATA names what a scan reads; here INPUT is read and OUTPUT is written" >&2; exit 2; }
	@$(PY) $(EXAMPLE)/download_and_process_data.py --output "$(or $(OUTPUT),outputs/swe_verified.jsonl)" $(if $(INPUT),--input "$(INPUT)") $(if $(SPLIT),--split "$(SPLIT)") $(if $(SUBSET),--subset "$(SUBSET)") $(if $(LIMIT),--limit "$(LIMIT)") $(ARGS)

# What the scans of the local tasks and of DATA write, unless SCANS names others.
FOUND_SCANS = $(wildcard outputs/golden.jsonl outputs/policy.jsonl)
report: venv  ## what to drop and what a policy learns from, as a page (SCANS="golden.jsonl policy.jsonl dump/", OUTPUT=)
	@test -n "$(or $(SCANS),$(FOUND_SCANS))" || { echo "error: no results of a scan are in outputs; run make golden-scan or make policy-scan POLICY_BASE_URL=..., or name some: make report SCANS=<file.jsonl>" >&2; exit 2; }
	@$(PY) $(EXAMPLE)/report.py $(or $(SCANS),$(FOUND_SCANS)) --output "$(or $(OUTPUT),outputs/report.html)" $(ARGS)

eval-specs: setup  ## list again what the pinned swebench can grade, for make data
	@"$(LOCAL_STACK_DIR)/gym/bin/python" tools/eval_specs.py

serve: venv  ## run NeMo Gym in the foreground (ENV=, PORT=12000, POLICY_MODEL=model)
	@exec $(STACK) serve --with-parent $(if $(ENVIRONMENT),--env "$(ENVIRONMENT)")

doctor: venv  ## check servers, tasks and the way back: ok, warning or error (DATA=<prompt data>, EVAL_DATA=)
	@$(PY) $(EXAMPLE)/nemogym_preflight.py $(if $(DATA),--prompt-data "$(DATA)") $(if $(EVAL_DATA),--eval-data "$(EVAL_DATA)") $(ARGS)

train:  ## one GRPO job on 4 GPUs (MILES=<checkout>, NEMO_GYM_URL=<server>, ARGS="--num-rollout 200")
	@test -z "$(MILES)" -o -e "$(MILES)/miles/utils/external_utils/command_utils.py" || { echo "error: MILES=$(MILES) is no checkout of Miles: git clone https://github.com/radixark/miles <folder>, then make train MILES=<folder>" >&2; exit 2; }
	@PYTHONPATH="$(if $(MILES),$(abspath $(MILES)):)$(PYTHONPATH)" $(PYTHON) $(EXAMPLE)/run.py $(ARGS)

train-dry-run: venv  ## print what make train would run (MILES=<checkout>); no GPU needed
	@$(PY) tools/train_dry_run.py "$(MILES)" $(ARGS)

miles-flags: venv  ## put every recorded launch through Miles' own parser, write its options down (MILES=<checkout>)
	@test -n "$(MILES)" || { echo "error: name a checkout of Miles: git clone https://github.com/radixark/miles <folder>, then make miles-flags MILES=<folder>" >&2; exit 2; }
	@$(PY) tools/setup_venv.py .venv-miles-flags tools/miles_flags.txt 3.11
	@$(PY) tools/setup_venv.py .venv-megatron tools/miles_megatron.txt 3.11
	@.venv-miles-flags/bin/python tools/miles_flags.py "$(MILES)" --megatron .venv-megatron

upstream-pr: venv  ## this repository as pull requests to Miles (MILES=<checkout>, SLICE=, ARGS="--check")
	@test -n "$(MILES)" || { echo "error: name a checkout of Miles: git clone https://github.com/radixark/miles <folder>, then make upstream-pr MILES=<folder>" >&2; exit 2; }
	@$(PY) tools/upstream_pr.py "$(MILES)" $(if $(SLICE),--slice "$(SLICE)") $(ARGS)

BENCH := -m tests.benchmarks $(if $(PART),"$(PART)") $(ARGS)
bench: venv  ## measure: connector, growth, data, import, stack (PART=one of them, ARGS="--rounds 3"); leave the machine alone
	@$(PY) $(BENCH) --check-only
	@$(PY) tools/setup_venv.py $(BENCH_VENV) tests/benchmarks/requirements.txt 3.11
	@$(if $(findstring stack,$(or $(PART),stack)),$(STACK) setup --with-parent)
	@$(BENCH_VENV)/bin/python $(BENCH)

lock: venv  ## pin the closure of pyproject.toml and of the other environments' .in files
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 --extra dev --extra report --no-header --no-annotate --no-emit-index-url pyproject.toml -o requirements-dev.txt
	$(VENV)/bin/uv pip compile --quiet --python-version 3.13.14 --no-header --no-annotate --no-emit-index-url $(EXAMPLE)/local_stack/requirements.in -o $(EXAMPLE)/local_stack/requirements.txt
	$(VENV)/bin/uv pip compile --quiet --config-file tools/miles_flags.toml --python-version 3.11 --no-header --no-annotate --no-emit-index-url tools/miles_flags.in -o tools/miles_flags.txt
	$(VENV)/bin/uv pip compile --quiet --config-file tests/miles/uv.toml --python-version 3.11 --no-header --no-annotate --no-emit-index-url tests/miles/requirements.in -o tests/miles/requirements.txt
	$(VENV)/bin/uv pip compile --quiet --python-version 3.11 --no-header --no-annotate --no-emit-index-url tests/benchmarks/requirements.in -o tests/benchmarks/requirements.txt

clean:  ## remove environments, tasks and outputs
	-@test ! -x $(PY) -o ! -d "$(LOCAL_STACK_DIR)/runs" || $(STACK) clear
	rm -rf $(VENV) $(MILES_VENV) $(SGLANG_VENV) $(BENCH_VENV) .venv-miles-flags .venv-megatron .venv*.lock "$(LOCAL_STACK_DIR)" outputs .pytest_cache tests/miles/.pytest_cache .ruff_cache
