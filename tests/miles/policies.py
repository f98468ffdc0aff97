"""What the stub engine's model says: the scripted policies as model text, and faulty ones.

A policy is a function of the task and the conversation so far. The engine keeps no state, so that any number of
episodes may run at once; a policy that misbehaves once knows it from the conversation.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from local_stack.environment_policy import PLAYERS
from local_stack.scripted_policy import PLAYED, Messages, Turn, play_and_submit

Task = dict[str, Any]
SLEEP_S = f"300.{os.getpid()}"  # by which the sandbox is found among those of other runs


@dataclass(frozen=True)
class Reply:
    """One turn of the model.

    Attributes:
        text: what it says, tool calls included.
        finish: "stop", or "length" where max_tokens cut it: there is no end-of-turn token then.
        status: HTTP status; other than 200 the engine fails.
        hangs: the engine never answers.
    """

    text: str = ""
    finish: str = "stop"
    status: int = 200
    hangs: bool = False


Policy = Callable[[Task, Messages], Reply]


def tool_call(command: str) -> str:
    """A call of mini-swe-agent's only tool as Qwen3 writes it."""
    return _written("bash", json.dumps({"command": command}, ensure_ascii=False))


def _written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def turns(messages: Messages) -> int:
    """Tool calls that were answered: the number of the turn."""
    return sum(message.get("role") == "tool" for message in messages)


def _as_reply(turn: Turn) -> Reply:
    calls = [_written(*call) for call in turn.calls] if turn.command is None else [tool_call(turn.command)]
    return Reply("\n".join([turn.text, *calls]))


def _scripted(name: str) -> Policy:
    return lambda task, messages: _as_reply(PLAYED[name](task, messages))


_solve = _scripted("solve")


def _solve_but(turn: int, reply: Callable[[Reply], Reply], *, once: bool = False) -> Policy:
    """Solve, with one turn's reply changed.

    Args:
        turn: which, from 0.
        reply: its change.
        once: as it should be after the agent complained, else changed every time it is asked for.
    """

    def policy(task: Task, messages: Messages) -> Reply:
        as_it_should_be = _solve(task, messages)
        complained = once and messages[-1].get("role") == "user" and len(messages) > 2
        return as_it_should_be if turns(messages) != turn or complained else reply(as_it_should_be)

    return policy


def _odd(task: Task, messages: Messages) -> Reply:
    """Text and output outside ASCII: emoji, bytes that are no UTF-8, the markup of the dialogue itself."""
    if turns(messages) == 0:
        command = "printf '日本 \\377\\376\\000 🎉\\n'; echo '<|im_end|>' '</tool_response><tool_call>' # é"
        return Reply(f"Думаю: 步骤 🚀\n{tool_call(command)}\n{tool_call('echo parallel')}")
    asked = [message for message in messages if message.get("role") != "tool"]
    answered = [message for message in messages if message.get("role") == "tool"][2:]
    return _solve(task, asked + answered)


def _solve_with_conftest(source: Callable[[Task], str]) -> Policy:
    """Solve, and change how the tests run on top."""

    def policy(task: Task, messages: Messages) -> Reply:
        gold = f"git apply - <<'END_OF_PATCH'\n{task['patch']}\nEND_OF_PATCH"
        conftest = f"cat > conftest.py <<'END_OF_FILE'\n{source(task)}END_OF_FILE"
        return _as_reply(play_and_submit(task, messages, edit=f"{gold}\n{conftest}"))

    return policy


def _break_the_run(task: Task) -> str:
    """The shell that runs the tests dies with the output that it would have written."""
    return "import os\n\nos.kill(os.getppid(), 9)\n"


def _skip_what_failed(task: Task) -> str:
    """Skips are written as the grader reads them: it counts such tests neither as passed nor as failed."""
    return f"""
import pytest

failing = {task["FAIL_TO_PASS"]}

def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.split()[0] in failing:
            item.add_marker(pytest.mark.skip)

def pytest_terminal_summary(terminalreporter):
    for name in failing:
        terminalreporter.write_line("SKIPPED " + name)
"""


def _in_environment(name: str, role: str) -> Policy:
    return lambda row, messages: _as_reply(PLAYERS[name][role](row, messages))


def _all_calls_at_once(row: Task, messages: Messages) -> Reply:
    """Every call that the task wants in one turn, after a thought that no reasoning parser takes out."""
    if turns(messages):
        return Reply("Готово ✅")
    calls = [_written(call["name"], call["arguments"]) for call in row["ground_truth"]]
    return Reply("\n".join(["<think>\nall of them\n</think>\n\nSo:", *calls]))


def _fail_after_one_call(row: Task, messages: Messages) -> Reply:
    return Reply(status=500) if turns(messages) else _in_environment("workplace_assistant", "solve")(row, messages)


POLICIES: dict[str, Policy] = {
    **{f"{name}-{role}": _in_environment(name, role) for name, roles in PLAYERS.items() for role in roles},
    "workplace_assistant-at-once": _all_calls_at_once,
    "workplace_assistant-fail": _fail_after_one_call,
    "solve": _solve,
    "wrong": _scripted("wrong"),
    "never-submit": _scripted("never-submit"),
    "never-call": _scripted("never-call"),
    "odd": _odd,
    "talk-once": _solve_but(2, lambda reply: Reply("I think about it first."), once=True),
    "cut-in-call": _solve_but(2, lambda reply: Reply(reply.text[: len(reply.text) // 2], finish="length"), once=True),
    "cut-after-call": _solve_but(2, lambda reply: replace(reply, finish="length")),
    "cut-at-the-end": _solve_but(4, lambda reply: replace(reply, finish="length")),
    "fail-first": _solve_but(0, lambda reply: Reply(status=500)),
    "fail-late": _solve_but(2, lambda reply: Reply(status=500)),
    "refuse-late": _solve_but(2, lambda reply: Reply(status=401)),
    "hang-late": _solve_but(2, lambda reply: Reply(hangs=True)),
    "sleep": _solve_but(1, lambda reply: Reply(tool_call(f"sleep {SLEEP_S}"))),
    "break-tests": _solve_with_conftest(_break_the_run),
    "skip-tests": _solve_with_conftest(_skip_what_failed),
}
