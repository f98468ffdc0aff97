"""The scripted policy's turns and its manners as an OpenAI endpoint, over real HTTP."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys

import aiohttp
import pytest
from local_stack.__main__ import scripted_policy
from local_stack.scripted_policy import ROLES, load_tasks, make_app, role_url, serving, serving_in_thread

from . import EXAMPLE_DIR

TASK = {
    "instance_id": "psf__requests-1",
    "problem_statement": "Proxies lose their credentials.",
    "patch": "diff --git a/src/x.py b/src/x.py\n--- a/src/x.py\n+++ b/src/x.py\n@@ -1 +1 @@\n-a\n+b\n",
    "PASS_TO_PASS": '["tests/t.py::test_c", "tests/t.py::test_d[<?xml"]',
}
# Its statement is part of the other's.
SHORTER = {**TASK, "instance_id": "psf__requests-2", "problem_statement": "Proxies", "patch": "--- a/other.py\n"}


def _opening(task: dict = TASK) -> list[dict]:
    statement = f"<pr_description>\n{task['problem_statement']}\n</pr_description>"
    return [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": statement}]


async def _ask(url: str, messages, *, key: str | None = None, timeout_s: float = 10, **body) -> tuple[int, dict]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    request = {"model": "model", "messages": messages, **body}
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with session.post(f"{url}/chat/completions", json=request, headers=headers) as response:
            return response.status, await response.json()


async def _play(url: str, answers: list[str], task: dict = TASK) -> list[str | None]:
    """Commands of an episode in which the tool answers so; None is a turn without a call."""
    messages, commands = _opening(task), []
    for answer in [*answers, None]:
        status, completion = await _ask(url, messages)
        assert status == 200, completion
        message = completion["choices"][0]["message"]
        calls = message.get("tool_calls")
        commands.append(json.loads(calls[0]["function"]["arguments"])["command"] if calls else None)
        if calls is None or answer is None:
            break
        messages += [message, {"role": "tool", "tool_call_id": calls[0]["id"], "content": answer}]
    return commands


@pytest.fixture
async def policy():
    async with serving(make_app([TASK, SHORTER])) as url:
        yield lambda role: role_url(url, role)


STATUS = "<returncode>0</returncode>\n<output>\n M src/x.py\nA new file.py\n A src/new.py\n</output>"


async def test_solve_looks_edits_tests_checks_and_submits(policy):
    commands = await _play(policy("solve"), ["files", STATUS, "1 passed", "the patch"])
    look, edit, tests, patch, submit = commands
    assert "src/x.py" in look and "git log" in look
    assert TASK["patch"] in edit and edit.startswith("git apply")
    # The name with a space was cut by swebench's log parser; pytest would not find it.
    assert "pytest" in tests and "tests/t.py::test_c" in tests and "test_d" not in tests
    assert patch.startswith("git diff -- src/x.py src/new.py > patch.txt")
    assert submit == "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt"


async def test_the_patch_is_of_the_files_that_an_earlier_turn_saw(policy):
    commands = await _play(policy("solve"), ["files", STATUS.replace("src/x.py", "src/other.py"), "1 passed"])
    assert "src/other.py" in commands[3] and "src/x.py" not in commands[3]


async def test_without_an_edit_there_is_nothing_to_submit(policy):
    commands = await _play(policy("solve"), ["files", "<returncode>1</returncode>", "1 passed"])
    assert commands[3] is None


async def test_wrong_edits_and_submits_but_not_the_fix(policy):
    commands = await _play(policy("wrong"), ["files", STATUS, "1 passed", "the patch"])
    assert ">> src/x.py" in commands[1] and "git apply" not in "".join(map(str, commands))
    assert commands[4].startswith("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


async def test_never_submit_edits_and_goes_on_for_ever(policy):
    commands = await _play(policy("never-submit"), ["files", STATUS] + ["1 passed"] * 20)
    assert len(commands) == 23 and ">> src/x.py" in commands[1]
    assert all("pytest" in command for command in commands[2:])
    assert not any("COMPLETE_TASK" in command for command in commands)


async def test_never_call_calls_no_tool(policy):
    messages = [*_opening(), {"role": "user", "content": "Tool call error"}]
    _, completion = await _ask(policy("never-call"), messages)
    choice = completion["choices"][0]
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop" and choice["message"]["content"]


async def test_a_reply_is_an_openai_completion(policy):
    tools = [{"type": "function", "function": {"name": "bash"}}]
    status, completion = await _ask(policy("solve"), _opening(), tools=tools, temperature=0.5)
    assert status == 200 and completion["object"] == "chat.completion" and completion["model"] == "model"
    assert completion["id"] and isinstance(completion["created"], int)
    (choice,) = completion["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["index"] == 0
    assert isinstance(choice["message"]["content"], str)
    assert call["type"] == "function" and call["function"]["name"] == "bash" and call["id"]
    usage = completion["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"] > 0


async def test_episodes_of_two_tasks_do_not_mix(policy):
    first, second = await asyncio.gather(
        _play(policy("solve"), ["files", STATUS]), _play(policy("solve"), ["files", STATUS], SHORTER)
    )
    assert "src/x.py" in first[0] and "other.py" in second[0]


async def test_content_in_parts_is_read(policy):
    messages = _opening()
    messages[1]["content"] = [{"type": "text", "text": messages[1]["content"]}]
    assert (await _ask(policy("solve"), messages))[0] == 200


async def test_too_long_is_sglangs_error(policy):
    status, answer = await _ask(policy("too-long"), _opening())
    assert status == 400 and answer["object"] == "error" and answer["type"] == "BadRequestError"
    assert "is longer than the model's context length (" in answer["message"]


async def test_crash_is_an_error_500(policy):
    status, answer = await _ask(policy("crash"), _opening())
    assert status == 500 and answer["error"]["message"]


async def test_hang_never_answers_and_outlives_neither_its_caller_nor_its_server():
    async with serving(make_app([TASK])) as url:
        running = len(asyncio.all_tasks())
        with pytest.raises(asyncio.TimeoutError):
            await _ask(role_url(url, "hang"), _opening(), timeout_s=0.3)
        await asyncio.sleep(0.2)
        assert len(asyncio.all_tasks()) == running
        hanging = asyncio.create_task(_ask(role_url(url, "hang"), _opening()))
        await asyncio.sleep(0.1)
    with pytest.raises(aiohttp.ClientError):
        await asyncio.wait_for(hanging, timeout=5)


@pytest.mark.parametrize(
    "messages, body, status, code",
    [
        ([{"role": "user", "content": "Something else."}], {}, 400, "unknown_task"),
        ([], {}, 400, "invalid_messages"),
        ("no list", {}, 400, "invalid_messages"),
        (["no object"], {}, 400, "invalid_messages"),
        (_opening(), {"stream": True}, 400, "unsupported_value"),
        (_opening(), {"model": "another"}, 404, "model_not_found"),
    ],
)
async def test_a_bad_request_gets_a_json_error(policy, messages, body, status, code):
    found, answer = await _ask(policy("solve"), messages, **body)
    assert (found, answer["error"]["code"]) == (status, code) and answer["error"]["message"]


async def test_unknown_roles_and_paths_get_json_errors(policy):
    status, answer = await _ask(policy("sleep"), _opening())
    assert status == 404 and "never-submit" in answer["error"]["message"]
    async with aiohttp.ClientSession() as session:
        async with session.get(policy("solve") + "/completions") as response:
            assert response.status == 404 and (await response.json())["error"]["message"]
        async with session.post(policy("solve") + "/chat/completions", data=b"{broken") as response:
            assert response.status == 400 and (await response.json())["error"]["code"] == "invalid_messages"


async def test_models_are_listed_for_every_role():
    async with serving(make_app([TASK], model="scripted")) as url, aiohttp.ClientSession() as session:
        for role in ROLES:
            async with session.get(f"{role_url(url, role)}/models") as response:
                assert [entry["id"] for entry in (await response.json())["data"]] == ["scripted"]


async def test_a_key_is_asked_for():
    async with serving(make_app([TASK], api_key="sk-right")) as url:
        for key, expected in ((None, 401), ("sk-wrong", 401), ("sk-right", 200)):
            status, answer = await _ask(role_url(url, "solve"), _opening(), key=key)
            assert status == expected and "sk-right" not in json.dumps(answer)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{role_url(url, 'solve')}/models") as response:
                assert response.status == 401


def test_in_a_thread_it_serves_and_ends():
    with serving_in_thread(make_app([TASK])) as url:
        assert asyncio.run(_ask(role_url(url, "solve"), _opening()))[0] == 200
    with pytest.raises(aiohttp.ClientConnectorError):
        asyncio.run(_ask(role_url(url, "solve"), _opening()))


def _command(tasks, *options: str) -> dict:
    command = [sys.executable, "-m", "local_stack.scripted_policy", "--tasks", str(tasks), *options]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE_DIR)}
    return {"args": command, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "p", "metadata": TASK}) + "\n\n")
    # A test run in the background may have been started with SIGINT ignored.
    default_sigint = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(**_command(tasks, "--model", "m"), **default_sigint) as process:
        with contextlib.ExitStack() as stack:
            stack.callback(process.kill)
            roles = dict(process.stdout.readline().split() for _ in ROLES)
            assert tuple(roles) == ROLES
            assert asyncio.run(_ask(roles["solve"], _opening(), model="m"))[0] == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=10) == 130
            assert process.stderr.read() == ""


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "unreadable: No such file"),
        ("", "at least one task"),
        ("{broken\n", "line 1: expected a task as a JSON object"),
        ("[]\n", "line 1: expected a task as a JSON object"),
        (json.dumps({**TASK, "patch": ""}) + "\n", "line 1: expected a task with ['patch']"),
        (json.dumps({**TASK, "patch": "no diff"}) + "\n", "a patch of existing files"),
    ],
)
def test_tasks_that_cannot_be_played_are_named(tmp_path, text, said):
    path = tmp_path / "tasks.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as raised:
        load_tasks(path)
    assert said in str(raised.value)


def test_the_command_says_what_is_wrong_in_one_line(tmp_path):
    done = subprocess.run(**_command(tmp_path / "missing.jsonl"), timeout=20)
    assert done.returncode == 2 and "missing.jsonl" in done.stderr and len(done.stderr.splitlines()) == 1


def test_beside_the_stack_a_command_finds_the_policy_and_sends_it_no_real_key(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(TASK) + "\n")
    with scripted_policy("wrong", tasks=tasks, model="m") as variables:
        assert variables["POLICY_BASE_URL"].endswith("/wrong/v1")
        assert (variables["OPENAI_API_KEY"], variables["DEEPSEEK_API_KEY"]) == ("", "")
        assert asyncio.run(_ask(variables["POLICY_BASE_URL"], _opening(), model="m"))[0] == 200
    with scripted_policy(None, tasks=tasks, model="m") as variables:
        assert variables == {}


@pytest.mark.parametrize(
    "options, said", [(["--policy", "solv"], "never-submit"), (["--golden", "--policy", "solve"], "found both")]
)
def test_the_stack_refuses_a_role_that_it_cannot_play(tmp_path, options, said):
    done = subprocess.run(
        [sys.executable, "-m", "local_stack", "run", *options, "--", "true"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE_DIR), "LOCAL_STACK_DIR": str(tmp_path)},
        text=True,
        capture_output=True,
        timeout=20,
    )
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
