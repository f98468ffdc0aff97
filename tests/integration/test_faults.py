"""What goes wrong in real episodes and how each of them ends: its exit status, and a reward only as a verdict."""

import asyncio
import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import nemogym_agent_function
import pytest
from nemogym_agent_function import run_episode
from nemogym_contract import Outcome

from .conftest import EVAL_TIMEOUT_S, POLICY_KEY, TIMEOUT_S
from .process_tree import ancestors, find_process
from .session_policy import SUBMIT, Session, apply_patch, playing


def ending(outcome: Outcome) -> tuple[str, float | None]:
    return outcome.exit_status, outcome.reward


def conftest(code: str) -> str:
    """An agent's command that has pytest run ``code``; the server restores the task's test files, but not this one."""
    return f"cat > conftest.py <<'END_OF_CODE'\n{code}\nEND_OF_CODE"


async def play(stack, row: dict, session: Session) -> Outcome:
    """Run one episode with the policy of ``session``."""
    return await run_episode(
        row,
        request_kwargs={},
        server=stack.policy_url,
        timeout_s=TIMEOUT_S,
        policy_base_url=session.policy_base_url,
    )


@pytest.fixture(scope="module")
def hanging_tests(stack, tasks) -> Iterator[Future]:
    """An episode whose tests hang; it does so beside all the others, so that nothing waits for it alone."""

    async def run() -> Outcome:
        async with playing() as start:
            return await play(stack, tasks[0], start(conftest("import time; time.sleep(3600)"), SUBMIT))

    with ThreadPoolExecutor() as pool:
        yield pool.submit(asyncio.run, run())


# --- many at once ---------------------------------------------------------------


@pytest.mark.usefixtures("hanging_tests")
async def test_sixteen_episodes_of_one_task_keep_their_verdict_and_their_sampling(
    stack, tasks, monkeypatch, start_session
):
    task = tasks[0]
    monkeypatch.setenv("NEMO_GYM_URL", stack.policy_url)
    samplings = [
        {"temperature": 0.1 + n / 16, "top_p": 0.5 + n / 64, "max_tokens": 100 + n, "top_k": 1 + n, "seed": 1000 + n}
        for n in range(16)
    ]
    edits = [apply_patch(task["patch"]), "echo >> setup.py"] * 8
    sessions = [start_session(edit, SUBMIT) for edit in edits]
    results = await asyncio.gather(
        *(
            nemogym_agent_function.run(
                base_url=session.url,
                prompt=task["problem_statement"],
                request_kwargs=dict(sampling),
                metadata=dict(task),
            )
            for session, sampling in zip(sessions, samplings, strict=True)
        )
    )
    assert [(result["exit_status"], result.get("reward")) for result in results] == [
        ("Submitted", 1.0),
        ("Submitted", 0.0),
    ] * 8
    for session, sampling in zip(sessions, samplings, strict=True):
        assert len(session.requests) == 2
        for request in session.requests:
            assert {key: request.get(key) for key in sampling} == sampling, session.url


# --- the sandbox ----------------------------------------------------------------


@pytest.fixture
def unusable_image(paths) -> Iterator[str]:
    """An image whose interpreter is not there."""
    folder = paths.images / f"unusable-{uuid.uuid4().hex}"
    folder.mkdir()
    (folder / "image.json").write_text(json.dumps({"python": "/nowhere", "environment": "/nowhere"}))
    yield f"docker.io/swebench/{folder.name}:latest"
    shutil.rmtree(folder)


async def test_a_missing_image_is_no_verdict(stack, tasks, start_session):
    session = start_session(SUBMIT)
    outcome = await play(stack, {**tasks[0], "image_name": "docker.io/swebench/missing:latest"}, session)
    assert ending(outcome) == ("SandboxUnavailable", None), outcome
    assert "docker.io/swebench/missing:latest" in outcome.detail and session.requests == []


async def test_a_sandbox_that_cannot_start_is_no_verdict(stack, tasks, start_session, unusable_image):
    session = start_session(SUBMIT)
    outcome = await play(stack, {**tasks[0], "image_name": unusable_image}, session)
    assert ending(outcome) == ("SandboxUnavailable", None), outcome
    assert "/nowhere" in outcome.detail and session.requests == []


async def test_a_sandbox_that_dies_under_the_agent_is_a_zero(stack, tasks, start_session):
    mark = f"300.{uuid.uuid4().int}"
    episode = asyncio.create_task(play(stack, tasks[0], start_session(f"sleep {mark}", SUBMIT)))
    sleeping = await asyncio.to_thread(find_process, mark)
    pid_1 = next(pid for pid, name in ancestors(sleeping) if name.startswith("python"))
    os.kill(pid_1, signal.SIGKILL)
    outcome = await episode
    assert ending(outcome) == ("SandboxFailed", 0.0), outcome


async def test_an_agent_cannot_end_its_own_sandbox(stack, tasks, start_session):
    attempts = ["kill -INT 1; kill -9 1; kill -9 -1", "prlimit --pid 1 --cpu=1:1 --nofile=3:3"]
    attempts += ["head -c 1G /dev/zero > /run/full; rm /run/full", "rm -rf / 2>/dev/null; git checkout -q -- ."]
    session = start_session(*attempts, apply_patch(tasks[0]["patch"]), SUBMIT)
    outcome = await play(stack, tasks[0], session)
    assert ending(outcome) == ("Submitted", 1.0), outcome
    assert len(session.requests) == len(attempts) + 2


async def test_an_agent_that_fills_its_own_sandbox_with_processes_is_graded(stack, tasks, start_session):
    """What it leaves running may stop its commands and its tests from running: a 0, but a verdict."""
    submits = ["echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"] * 100  # there may be no room for a command that submits
    outcome = await play(stack, tasks[0], start_session(":(){ :|:& };: ; sleep 1", *submits))
    assert outcome.reward == 0.0, outcome


async def test_an_episode_whose_worker_dies_is_not_run_again(stack, tasks, start_session):
    mark = f"300.{uuid.uuid4().int}"
    session = start_session(f"sleep {mark}", SUBMIT)
    episode = asyncio.create_task(play(stack, tasks[0], session))
    sleeping = await asyncio.to_thread(find_process, mark)
    worker = next(pid for pid, name in ancestors(sleeping) if name.startswith("ray::"))
    os.kill(worker, signal.SIGKILL)
    outcome = await episode
    assert ending(outcome) == ("UnknownError", None), outcome
    assert len(session.requests) == 1


# --- the tests and their grading --------------------------------------------------

_POSE_AS_SUBMISSION = """
import os
def pytest_sessionfinish():
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/run/"):
                os.pwrite(fd, b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\n", 0)
        except OSError:
            pass
"""


@pytest.mark.parametrize(
    "command, exit_status",
    [
        # Each listed test that did not run counts as failed.
        pytest.param("echo 'raise ImportError' > src/marshmallow/__init__.py", "Submitted", id="import"),
        pytest.param(conftest("raise ImportError"), "Submitted", id="conftest"),
        pytest.param("rm -rf .git", "Submitted", id="repository"),
        pytest.param(conftest("import os; os.kill(os.getppid(), 9)"), "NoTestsRan", id="runner"),
        pytest.param("chmod 0 /testbed", "NoTestsRan", id="folder"),
        pytest.param(conftest(_POSE_AS_SUBMISSION), "NoTestsRan", id="output poses as a submission"),
    ],
)
async def test_who_breaks_the_tests_gets_a_zero(stack, tasks, start_session, command, exit_status):
    session = start_session(f"{command}\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    outcome = await play(stack, tasks[0], session)
    assert ending(outcome) == (exit_status, 0.0), outcome
    assert len(session.requests) == 1


async def test_skipped_tests_are_a_zero(stack, tasks, start_session):
    code = f"""
import pytest
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid in {json.loads(tasks[0]["FAIL_TO_PASS"])}:
            item.add_marker(pytest.mark.skip)
"""
    configuration = "printf '[pytest]\\naddopts = --no-fold-skipped\\n' > pytest.ini"
    outcome = await play(stack, tasks[0], start_session(conftest(code), configuration, SUBMIT))
    report = outcome.eval_report["eval_report"][tasks[0]["instance_id"]]
    assert report["resolved"] is True, "the server takes a skipped test for neither passed nor failed"
    assert ending(outcome) == ("TestsSkipped", 0.0), outcome


async def test_output_that_the_grader_cannot_read_is_a_zero(stack, tasks, start_session):
    # swebench's parser for seaborn takes the second word of every line that starts with FAILED.
    code = "def pytest_terminal_summary(terminalreporter): terminalreporter.write_line('FAILED')"
    row = {**tasks[0], "repo": "mwaskom/seaborn", "version": "0.12"}
    outcome = await play(stack, row, start_session(conftest(code), SUBMIT))
    assert ending(outcome) == ("NoTestsRan", 0.0), outcome


@pytest.mark.parametrize("field, value", [("repo", "nobody/nothing"), ("version", "0.0")])
async def test_a_task_that_the_grader_does_not_know_is_no_verdict(stack, tasks, start_session, field, value):
    outcome = await play(stack, {**tasks[0], field: value}, start_session(SUBMIT))
    assert ending(outcome) == ("UngradableInstance", None), outcome


# --- the policy and its endpoint ----------------------------------------------------


@pytest.mark.parametrize("arguments", ["5", "null", '"command"', '["command"]'])
async def test_tool_calls_that_end_the_agent_are_a_zero(stack, tasks, start_session, arguments):
    outcome = await play(stack, tasks[0], start_session(arguments, raw=True))
    assert ending(outcome) == ("FormatError", 0.0), outcome


@pytest.mark.parametrize(
    "arguments", ['{"command": "echo', "{}", '{"command": "echo \\ud83d \\u0000"}', '{"command": 5}']
)
async def test_other_odd_tool_calls_do_not(stack, tasks, start_session, arguments):
    submit = json.dumps({"command": SUBMIT})
    session = start_session(arguments, submit, raw=True)
    assert ending(await play(stack, tasks[0], session)) == ("Submitted", 0.0)
    assert len(session.requests) == 2


async def test_too_long_is_the_policys_doing(tasks, policy):
    outcome = await policy("too-long", tasks[1])
    assert ending(outcome) == ("ContextLengthExceeded", 0.0), outcome


async def test_an_unreachable_endpoint_is_no_verdict(stack, tasks, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stack.policy_url)
    result = await nemogym_agent_function.run(
        base_url="http://127.0.0.1:9/sessions/none", prompt="", request_kwargs={}, metadata=dict(tasks[0])
    )
    assert result["exit_status"] == "PolicyEndpointError" and "reward" not in result


@pytest.mark.parametrize("role, key, status", [("crash", POLICY_KEY, 500), ("solve", "sk-wrong", 401)])
async def test_a_failing_endpoint_is_no_verdict(tasks, policy, role, key, status):
    outcome = await policy(role, tasks[1], key=key)
    assert ending(outcome) == ("PolicyEndpointError", None), outcome
    assert set(policy.calls) == {(role, status)}


async def test_an_endpoint_that_fails_in_mid_episode_is_no_verdict(stack, tasks, start_session):
    session = start_session(apply_patch(tasks[0]["patch"]), "git diff")
    outcome = await play(stack, tasks[0], session)
    assert ending(outcome) == ("PolicyEndpointError", None), outcome
    assert len(session.requests) > 2


# --- what hangs -----------------------------------------------------------------
# Last: other episodes must end while it is asked whether the server still works.


def test_hanging_tests_are_a_zero(hanging_tests):
    outcome = hanging_tests.result(timeout=EVAL_TIMEOUT_S + TIMEOUT_S)
    assert ending(outcome) == ("NoTestsRan", 0.0), outcome


async def test_a_policy_that_hangs_runs_out_of_time(tasks, policy):
    outcome = await policy("hang", tasks[1], timeout_s=3)
    assert ending(outcome) == ("TimeLimitExceeded", 0.0), outcome
