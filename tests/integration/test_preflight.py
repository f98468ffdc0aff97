"""The preflight before a real NeMo Gym: what it reads of servers, and the canary episode."""

import json
import socket
import subprocess
import sys

import pytest
from nemogym_preflight import Job, run_checks

from .conftest import EVAL_TIMEOUT_S, EXAMPLE_DIR, TIMEOUT_S


@pytest.fixture
def environment(stack, monkeypatch):
    """The connector's variables for the policy server."""
    monkeypatch.delenv("MILES_ROUTER_EXTERNAL_HOST", raising=False)
    monkeypatch.setenv("NEMO_GYM_URL", stack.policy_url)
    monkeypatch.setenv("NEMO_GYM_HEAD_URL", stack.head_url)
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "600")
    return monkeypatch


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _prompt_data(path, *tasks: dict) -> list[str]:
    path.write_text("".join(json.dumps({"prompt": "p", "metadata": task}) + "\n" for task in tasks))
    return [str(path)]


def _wrong(job: Job, **options) -> list[str]:
    return [str(finding) for finding in run_checks(job, **options) if finding.level != "ok"]


def test_doctor_finds_nothing_wrong(stack, paths, port, command_environment):
    command = [sys.executable, str(EXAMPLE_DIR / "nemogym_preflight.py"), "--prompt-data", str(paths.tasks)]
    command += ["--session-server-port", str(port)]
    given = {
        "NEMO_GYM_URL": stack.policy_url,
        "NEMO_GYM_HEAD_URL": stack.head_url,
        "NEMO_GYM_MAX_CONCURRENCY": "8",
    }
    done = subprocess.run(
        command, env={**command_environment, **given}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert all(line.startswith("ok ") for line in lines) and last.endswith("0 warning(s), 0 error(s)"), done.stdout
    said = "\n".join(lines)
    assert "sandbox provider bubblewrap" in said and "at most 10 model calls" in said
    assert f"step_timeout 60 s + eval_timeout {EVAL_TIMEOUT_S} s = {60 + EVAL_TIMEOUT_S} s" in said
    # 0.0.0.0 became the address that routes to the server, and the agent called there.
    assert f"called http://127.0.0.1:{port}/sessions/" in lines[-1]
    socket.create_server(("0.0.0.0", port)).close()


def test_a_canary_leaves_nothing_that_an_episode_meets(stack, tasks, tmp_path, environment, port):
    job = Job(_prompt_data(tmp_path / "t.jsonl", tasks[0]), session_ports=[port], in_flight=8)
    assert _wrong(job) == _wrong(job) == []


def test_a_golden_server_is_named_by_its_configuration_and_by_the_canary(stack, tasks, tmp_path, environment, port):
    environment.setenv("NEMO_GYM_URL", stack.golden_url)
    job = Job(_prompt_data(tmp_path / "t.jsonl", tasks[0]), session_ports=[port], in_flight=8)
    (line,) = _wrong(job)
    assert line.startswith("error    agent server") and "run_golden: true" in line
    # A head server that is not its own: nothing is known but what the episode shows.
    environment.delenv("NEMO_GYM_HEAD_URL")
    unknown, canary = _wrong(job)
    assert unknown.startswith("warning") and "NEMO_GYM_HEAD_URL" in unknown
    assert canary.startswith("error    canary episode") and "run_golden: true" in canary


def test_a_canary_that_cannot_call_back(tasks, tmp_path, environment, port):
    # Nobody listens there: the session port is bound on 127.0.0.1 alone.
    environment.setenv("MILES_ROUTER_EXTERNAL_HOST", "127.0.0.2")
    prompt_data = _prompt_data(tmp_path / "t.jsonl", tasks[0])
    (line,) = _wrong(Job(prompt_data, session_host="127.0.0.1", session_ports=[port], in_flight=8))
    assert line.startswith("error    canary episode")
    assert f"http://127.0.0.2:{port}/sessions/" in line and "MILES_ROUTER_EXTERNAL_HOST" in line


def test_an_image_that_is_not_there(tasks, tmp_path, environment, port):
    image = "docker.io/swebench/sweb.eval.x86_64.missing:latest"
    prompt_data = _prompt_data(tmp_path / "t.jsonl", {**tasks[0], "image_name": image})
    (line,) = _wrong(Job(prompt_data, session_ports=[port], in_flight=8))
    assert line.startswith("error    canary episode") and f"a sandbox of {image}" in line
