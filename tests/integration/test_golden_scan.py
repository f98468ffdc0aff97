"""The local tasks on a real NeMo Gym: gold and empty patches, side by side, and an episode with a policy."""

import asyncio
import json
import subprocess
import sys
from collections import Counter

import nemogym_agent_function
import pytest
from nemogym_agent_function import run_episode
from nemogym_preflight import check_agent_server

from .conftest import EXAMPLE_DIR, REPOSITORY, TIMEOUT_S
from .session_policy import SUBMIT, apply_patch


def test_tasks_are_real_and_of_several_repositories(tasks):
    assert len(tasks) >= 6
    assert len({task["repo"] for task in tasks}) >= 3
    assert sum(task["patch"].count("diff --git") > 1 for task in tasks) >= 2
    assert sum(len(json.loads(task["PASS_TO_PASS"])) for task in tasks) >= 20
    for task in tasks:
        assert json.loads(task["FAIL_TO_PASS"]) and json.loads(task["PASS_TO_PASS"]), task["instance_id"]


def test_golden_scan_proves_every_task(stack, paths, tasks, tmp_path, command_environment):
    output = tmp_path / "golden.jsonl"
    command = [sys.executable, str(EXAMPLE_DIR / "eval_nemogym_via_api.py"), "--golden", "--concurrency", "2"]
    command += ["--input", str(paths.tasks), "--output", str(output)]
    environment = {**command_environment, "NEMO_GYM_URL": stack.golden_url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert Counter(record["kind"] for record in records) == {"gold": len(tasks), "null": len(tasks)}
    assert f"classes: supported {len(tasks)}, flaky 0, broken 0, inconclusive 0" in done.stdout
    for record in records:
        assert record["reward"] == (1.0 if record["kind"] == "gold" else 0.0), record
        assert record["pass"] is True and record["exit_status"] == "Submitted" or record["kind"] == "null"
        assert record["seconds"] > 0 and record["eval_report"]["eval_report"][record["instance_id"]]["tests_status"]


def test_golden_scan_of_a_policy_server_is_stopped_by_its_first_episode(stack, paths, command_environment):
    command = [sys.executable, str(EXAMPLE_DIR / "eval_nemogym_via_api.py"), "--golden", "--input", str(paths.tasks)]
    environment = {**command_environment, "NEMO_GYM_URL": stack.policy_url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "needs a server started with run_golden=true" in done.stderr
    assert done.stdout == "", "the episode that showed it is no result"


def test_a_killed_golden_scan_is_resumed(stack, paths, tmp_path, command_environment):
    output, ids = tmp_path / "golden.jsonl", tmp_path / "supported.txt"
    command = [sys.executable, str(EXAMPLE_DIR / "eval_nemogym_via_api.py"), "--golden", "--concurrency", "1"]
    command += ["--input", str(paths.tasks), "--limit", "2", "--passes", "2"]
    command += ["--output", str(output), "--supported-ids", str(ids)]
    environment = {**command_environment, "NEMO_GYM_URL": stack.golden_url}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        shown = [process.stdout.readline() for _ in range(2)]
        process.kill()
    assert [line.split()[0] for line in shown] == ["[1/6]", "[2/6]"]
    ended = len(output.read_text().splitlines())

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ended < 6 and f"resuming {output}: {ended} episode(s) are in it, {6 - ended} to run" in done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert Counter((record["kind"], record["attempt"], record["reward"]) for record in records) == {
        ("gold", 1, 1.0): 2,
        ("gold", 2, 1.0): 2,
        ("null", 1, 0.0): 2,
    }
    assert "every gold patch scored 1.0 in each of 2 passes and every empty patch 0.0" in done.stdout
    assert len(ids.read_text().split()) == 2


@pytest.mark.parametrize("target", ["golden-scan", "policy-scan"])
@pytest.mark.parametrize("setting", ["LIMIT=0", "LIMIT=few", "CONCURRENCY=0", "PASSES=0"])
def test_make_names_a_wrong_setting_before_nemo_gym_starts(command_environment, target, setting):
    # -o venv: the environment that runs this test is as good.
    make = ["make", "-o", "venv", f"VENV={sys.prefix}", target, setting]
    done = subprocess.run(make, cwd=REPOSITORY, env=command_environment, capture_output=True, text=True, timeout=60)
    name, value = setting.split("=")
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"--{name.lower()}" in done.stderr and f"{name}='{value}'" in done.stderr
    assert "NeMo Gym" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "target, settings, said",
    [
        ("golden-scan", ["DATA=missing.jsonl"], "missing.jsonl"),
        ("policy-scan", ["DATA=missing.jsonl"], "POLICY_BASE_URL"),
        ("policy-scan", ["DATA=missing.jsonl", "POLICY_BASE_URL=http://127.0.0.1:9/v1"], "missing.jsonl"),
        ("policy-scan", ["POLICY_BASE_URL=http://127.0.0.1:9/v1"], "127.0.0.1:9"),
    ],
)
def test_make_names_wrong_data_and_a_dead_endpoint_before_nemo_gym_starts(command_environment, target, settings, said):
    make = ["make", "-o", "venv", f"VENV={sys.prefix}", target, *settings]
    done = subprocess.run(make, cwd=REPOSITORY, env=command_environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr, done.stdout + done.stderr
    assert "starting NeMo Gym" not in done.stdout + done.stderr


async def test_eight_episodes_of_one_task_do_not_see_each_other(stack, tasks):
    task = tasks[0]
    kinds = ["gold", "null"] * 4

    async def episode(kind: str):
        row = task if kind == "gold" else {**task, "patch": ""}
        return await run_episode(row, request_kwargs={}, server=stack.golden_url, timeout_s=TIMEOUT_S, golden=True)

    first = await episode("gold")
    after = await episode("null")
    beside = await asyncio.gather(*map(episode, kinds))
    assert (first.reward, after.reward) == (1.0, 0.0)
    assert [outcome.reward for outcome in beside] == [1.0 if kind == "gold" else 0.0 for kind in kinds]


@pytest.mark.parametrize("server", ["policy_url", "golden_url"])
def test_preflight_accepts_both_servers(stack, server):
    check_agent_server(getattr(stack, server))


async def test_connector_runs_a_policy_episode(stack, tasks, monkeypatch, start_session):
    task = tasks[0]
    monkeypatch.setenv("NEMO_GYM_URL", stack.policy_url)
    session = start_session(apply_patch(task["patch"]), SUBMIT)
    result = await nemogym_agent_function.run(
        base_url=session.url,
        prompt=task["problem_statement"],
        request_kwargs={"temperature": 0.7, "top_p": 0.9, "max_tokens": 512, "top_k": 20},
        metadata=dict(task),
    )
    assert result["exit_status"] == "Submitted", result
    assert result["reward"] == 1.0
    assert result["eval_report"]["model_patch"].strip() == task["patch"].strip()
    assert len(session.requests) == 2
    for request in session.requests:
        sampling = {key: request.get(key) for key in ("temperature", "top_p", "max_tokens", "top_k")}
        assert sampling == {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512, "top_k": 20}
