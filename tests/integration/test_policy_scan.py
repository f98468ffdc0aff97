"""Whole agent episodes on a real NeMo Gym: mini-swe-agent calls the scripted policy, the sandbox is graded."""

import asyncio
import json
import subprocess
import sys
from collections import Counter

import pytest
from local_stack.scripted_policy import make_app, role_url, serving_in_thread

from .conftest import EXAMPLE_DIR, POLICY_KEY, TIMEOUT_S


async def test_eight_episodes_at_once_do_not_mix(tasks, policy):
    # First, so that the workers that NeMo Gym starts for it serve the other tests too.
    task = tasks[1]
    roles = ["solve", "wrong"] * 4
    outcomes = await asyncio.gather(*(policy(role, task) for role in roles))
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0] * 4, outcomes
    assert policy.calls == {("solve", 200): 20, ("wrong", 200): 20}


async def test_solve_is_graded_1_after_at_least_four_turns(tasks, policy):
    outcome = await policy("solve", tasks[0])
    assert (outcome.exit_status, outcome.reward) == ("Submitted", 1.0), outcome
    assert outcome.eval_report["model_patch"].strip() == tasks[0]["patch"].strip()
    assert policy.calls == {("solve", 200): 5}


async def test_wrong_is_graded_0_with_its_patch(tasks, policy):
    outcome = await policy("wrong", tasks[0])
    assert (outcome.exit_status, outcome.reward) == ("Submitted", 0.0), outcome
    assert "_CHECKED" in outcome.eval_report["model_patch"]
    assert policy.calls == {("wrong", 200): 5}


@pytest.mark.parametrize("role", ["never-submit", "never-call"])
async def test_who_never_submits_runs_into_the_step_limit(tasks, policy, role):
    outcome = await policy(role, tasks[1])
    assert (outcome.exit_status, outcome.reward) == ("LimitsExceeded", 0.0), outcome
    assert policy.calls == {(role, 200): 10}


def test_the_scan_runs_a_policy_on_the_local_stack(stack, paths, tasks, tmp_path, command_environment):
    output = tmp_path / "policy.jsonl"
    with serving_in_thread(make_app(tasks, api_key=POLICY_KEY)) as url:
        command = [sys.executable, str(EXAMPLE_DIR / "eval_nemogym_via_api.py"), "--concurrency", "2", "--limit", "2"]
        command += ["--input", str(paths.tasks), "--output", str(output), "--policy-base-url", role_url(url, "solve")]
        command += ["--head-url", stack.head_url, "--expect-reward", "1", "--passes", "2", "--temperature", "1"]
        environment = {**command_environment, "NEMO_GYM_URL": stack.policy_url, "OPENAI_API_KEY": POLICY_KEY}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert Counter((record["kind"], record["reward"], record["exit_status"]) for record in records) == {
        ("policy", 1.0, "Submitted"): 4
    }
    assert {(record["policy"], record["sampling"]["temperature"]) for record in records} == {("model", 1.0)}
    assert "solve rate 1.000 over 4 verdict(s), 95 % interval 0.51 to 1.00" in done.stdout
    assert "pass@1 1.000, pass@2 1.000" in done.stdout and "2 always solved" in done.stdout
    assert "model name" not in done.stderr, "the head server tells the model name, the endpoint lists it"
    assert POLICY_KEY not in done.stdout + done.stderr + output.read_text()
