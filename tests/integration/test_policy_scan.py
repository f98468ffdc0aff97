"""Whole agent episodes on a real NeMo Gym: mini-swe-agent calls the scripted policy, the sandbox is graded."""

import asyncio
import json
import subprocess
import sys
from collections import Counter

import pytest
from local_stack.scripted_policy import make_app, role_url, serving, serving_in_thread
from nemogym_agent_function import run_episode

from .conftest import EXAMPLE_DIR

_TIMEOUT_S = 300.0
_KEY = "sk-0123456789-of-a-test"


@pytest.fixture
async def policy(tasks):
    """Runs one episode of a role; ``policy.calls`` counts the agent's model calls by role and HTTP status."""
    app = make_app(tasks, api_key=_KEY)
    calls: Counter = Counter()

    async def count(request, response) -> None:
        calls[request.match_info["role"], response.status] += 1

    app.on_response_prepare.append(count)
    async with serving(app) as url:

        async def run(stack, role: str, task: dict, *, key: str = _KEY, timeout_s: float = _TIMEOUT_S):
            return await run_episode(
                task,
                request_kwargs={},
                server=stack.policy_url,
                timeout_s=timeout_s,
                policy_base_url=role_url(url, role),
                policy_api_key=key,
            )

        run.calls = calls
        yield run


async def test_eight_episodes_at_once_do_not_mix(stack, tasks, policy):
    # First, so that the workers that NeMo Gym starts for it serve the other tests too.
    task = tasks[1]
    roles = ["solve", "wrong"] * 4
    outcomes = await asyncio.gather(*(policy(stack, role, task) for role in roles))
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0] * 4, outcomes
    assert policy.calls == {("solve", 200): 20, ("wrong", 200): 20}


async def test_solve_is_graded_1_after_at_least_four_turns(stack, tasks, policy):
    outcome = await policy(stack, "solve", tasks[0])
    assert (outcome.exit_status, outcome.reward) == ("Submitted", 1.0), outcome
    assert outcome.eval_report["model_patch"].strip() == tasks[0]["patch"].strip()
    assert policy.calls == {("solve", 200): 5}


async def test_wrong_is_graded_0_with_its_patch(stack, tasks, policy):
    outcome = await policy(stack, "wrong", tasks[0])
    assert (outcome.exit_status, outcome.reward) == ("Submitted", 0.0), outcome
    assert "_CHECKED" in outcome.eval_report["model_patch"]
    assert policy.calls == {("wrong", 200): 5}


@pytest.mark.parametrize("role", ["never-submit", "never-call"])
async def test_who_never_submits_runs_into_the_step_limit(stack, tasks, policy, role):
    outcome = await policy(stack, role, tasks[1])
    assert (outcome.exit_status, outcome.reward) == ("LimitsExceeded", 0.0), outcome
    assert policy.calls == {(role, 200): 10}


async def test_too_long_is_the_policys_doing(stack, tasks, policy):
    outcome = await policy(stack, "too-long", tasks[1])
    assert (outcome.exit_status, outcome.reward) == ("ContextLengthExceeded", 0.0), outcome


@pytest.mark.parametrize("role, key, status", [("crash", _KEY, 500), ("solve", "sk-wrong", 401)])
async def test_a_failing_endpoint_is_no_verdict(stack, tasks, policy, role, key, status):
    outcome = await policy(stack, role, tasks[1], key=key)
    assert (outcome.exit_status, outcome.reward) == ("PolicyEndpointError", None), outcome
    assert set(policy.calls) == {(role, status)}


async def test_a_policy_that_hangs_runs_out_of_time(stack, tasks, policy):
    outcome = await policy(stack, "hang", tasks[1], timeout_s=3)
    assert (outcome.exit_status, outcome.reward) == ("TimeLimitExceeded", 0.0), outcome


def test_the_scan_runs_a_policy_on_the_local_stack(stack, paths, tasks, tmp_path, command_environment):
    output = tmp_path / "policy.jsonl"
    with serving_in_thread(make_app(tasks, api_key=_KEY)) as url:
        command = [sys.executable, str(EXAMPLE_DIR / "eval_nemogym_via_api.py"), "--concurrency", "2", "--limit", "2"]
        command += ["--input", str(paths.tasks), "--output", str(output), "--policy-base-url", role_url(url, "solve")]
        command += ["--head-url", stack.head_url, "--expect-reward", "1", "--passes", "2", "--temperature", "1"]
        environment = {**command_environment, "NEMO_GYM_URL": stack.policy_url, "OPENAI_API_KEY": _KEY}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert Counter((record["kind"], record["reward"], record["exit_status"]) for record in records) == {
        ("policy", 1.0, "Submitted"): 4
    }
    assert {(record["policy"], record["sampling"]["temperature"]) for record in records} == {("model", 1.0)}
    assert "solve rate 1.000 over 4 verdict(s), 95 % interval 0.51 to 1.00" in done.stdout
    assert "pass@1 1.000, pass@2 1.000" in done.stdout and "2 always solved" in done.stdout
    assert "model name" not in done.stderr, "the head server tells the model name, the endpoint lists it"
    assert _KEY not in done.stdout + done.stderr + output.read_text()
