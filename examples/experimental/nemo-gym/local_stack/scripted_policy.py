"""A policy without a model: an OpenAI chat-completions endpoint that plays roles on the local tasks.

The role is part of the URL, ``http://host:port/<role>/v1``:

    solve         look, apply the gold patch, run tests, write the patch, submit        reward 1.0
    wrong         the same with an edit that fixes nothing                              reward 0.0
    never-submit  look, edit wrongly, run tests until the step limit                    reward 0.0, LimitsExceeded
    never-call    talk and never call the tool                                          reward 0.0, LimitsExceeded
    too-long      SGLang's 400 for a conversation longer than the context               ContextLengthExceeded
    crash         HTTP 500                                                              no verdict
    hang          never answer

The server keeps no state. The task is the one whose problem statement is in the conversation, the turn is the number of
tool calls in it that were answered, and what an earlier turn found out is read from its answer: the patch is taken of
the files that ``git status`` listed after the edit. So any number of episodes may run at once::

    python -m local_stack.scripted_policy --tasks tasks.jsonl --port 8000
"""

import asyncio
import contextlib
import json
import re
import secrets
import shlex
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from aiohttp import web

HOST = "127.0.0.1"
_CHARACTERS_PER_TOKEN = 4  # of the estimate in ``usage``
_TESTS_RUN = 5
_START_TIMEOUT_S = 10.0
_MAX_REQUEST_BYTES = 2**26

Messages = list[dict[str, Any]]


# --- roles ----------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One reply of the policy.

    Attributes:
        text: what it says.
        command: what it calls the tool ``bash`` with; None does not call it.
        calls: names and arguments, JSON, of other tools that it calls.
    """

    text: str
    command: str | None = None
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def tool_calls(self) -> tuple[tuple[str, str], ...]:
        """Names and arguments of all tools that it calls."""
        return self.calls if self.command is None else (("bash", json.dumps({"command": self.command})), *self.calls)


class UnknownTask(Exception):
    """The conversation holds no known problem statement."""


def play_solve(task: dict[str, Any], messages: Messages) -> Turn:
    """The next turn of an episode that ends with the gold patch submitted."""
    return play_and_submit(task, messages, edit=f"git apply - <<'END_OF_PATCH'\n{task['patch']}\nEND_OF_PATCH")


def play_wrong(task: dict[str, Any], messages: Messages) -> Turn:
    """The next turn of an episode that ends with a patch submitted that fixes nothing."""
    return play_and_submit(task, messages, edit=_wrong_edit(task))


def play_never_submit(task: dict[str, Any], messages: Messages) -> Turn:
    """The next turn of an episode that edits wrongly and then runs tests for ever."""
    turn = len(_answers(messages))
    if turn < 2:
        return [_look(task), _edit(_wrong_edit(task))][turn]
    return Turn("I am not sure about it. I run the tests once more.", _test_command(task))


def play_never_call(task: dict[str, Any], messages: Messages) -> Turn:
    """A turn without a tool call."""
    return Turn("The cause lies elsewhere. Nothing has to be changed here.")


PLAYED: dict[str, Callable[[dict[str, Any], Messages], Turn]] = {
    "solve": play_solve,
    "wrong": play_wrong,
    "never-submit": play_never_submit,
    "never-call": play_never_call,
}
FAULTS = ("too-long", "crash", "hang")
ROLES = (*PLAYED, *FAULTS)


def play_and_submit(task: dict[str, Any], messages: Messages, *, edit: str) -> Turn:
    """The next turn of an episode that looks, edits, runs tests, writes the patch of the edit and submits it.

    Args:
        task: the SWE-bench instance.
        messages: the conversation so far.
        edit: bash text that edits the repository.
    """
    answers = _answers(messages)
    if len(answers) == 0:
        return _look(task)
    if len(answers) == 1:
        return _edit(edit)
    if len(answers) == 2:
        return Turn("The edit is made. I run tests around it.", _test_command(task))
    if len(answers) == 3:
        files = _edited_files(answers[1])
        if not files:
            return Turn("git status lists no edited file, so that there is nothing to submit.")
        names = " ".join(map(shlex.quote, files))
        return Turn("I write the patch and check it.", f"git diff -- {names} > patch.txt && cat patch.txt")
    return Turn("The patch is complete. I submit it.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt")


def _look(task: dict[str, Any]) -> Turn:
    names = " ".join(map(shlex.quote, _source_files(task)))
    return Turn("I look at the repository and the files in question.", f"git log --oneline && wc -l {names} && ls")


def _edit(command: str) -> Turn:
    # -N: a file that the edit adds is part of ``git diff`` and listed like a changed one.
    return Turn("I edit the source.", f"{command}\ngit add -AN && git status --porcelain")


def _wrong_edit(task: dict[str, Any]) -> str:
    return f"printf '\\n\\n_CHECKED = True\\n' >> {shlex.quote(_source_files(task)[0])}"


def _test_command(task: dict[str, Any]) -> str:
    tests = task["PASS_TO_PASS"]
    tests = json.loads(tests) if isinstance(tests, str) else tests
    # swebench cuts a parametrised test's name at its first space: pytest would not find it.
    whole = [str(test) for test in tests if "[" not in str(test)]
    names = " ".join(map(shlex.quote, whole[:_TESTS_RUN]))
    return f"python -m pytest -q -p no:cacheprovider {names} 2>&1 | tail -n 5"


def _source_files(task: dict[str, Any]) -> list[str]:
    return re.findall(r"^--- a/(.+?)\s*$", task["patch"], re.MULTILINE)


def _edited_files(answer: str) -> list[str]:
    return re.findall(r"^ ?[MAD] (\S+)\s*$", answer, re.MULTILINE)


def _answers(messages: Messages) -> list[str]:
    """What the tool calls so far were answered, in order; their number is the turn."""
    return [text_of(message) for message in messages if message.get("role") == "tool"]


def text_of(message: dict[str, Any]) -> str:
    """What a message says, whether its content is text or parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


# --- endpoint -------------------------------------------------------------------


def load_tasks(path: Path) -> list[dict[str, Any]]:
    """Read tasks with their gold patches.

    Args:
        path: JSONL; Miles prompt rows or SWE-bench instances.

    Returns:
        SWE-bench instances.

    Raises:
        ValueError: unreadable, not JSON, or a row lacks a field that a role needs; the line is named.
    """
    tasks = []
    for number, row in read_json_lines(path):
        try:
            task = row.get("metadata", row)
            missing = [key for key in ("problem_statement", "patch", "PASS_TO_PASS") if not task.get(key)]
        except AttributeError as error:
            raise ValueError(f"{path} line {number}: expected a task as a JSON object, found {error}") from None
        if missing or not _source_files(task):
            raise ValueError(f"{path} line {number}: expected a task with {missing or 'a patch of existing files'}")
        tasks.append(task)
    if not tasks:
        raise ValueError(f"expected at least one task in {path}, found none")
    return tasks


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Values of a JSONL file after their line numbers.

    Raises:
        ValueError: unreadable, or a line is not JSON; it is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"expected tasks in {path}, found it unreadable: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number}: expected a task as a JSON object, found {error}") from None


def make_app(
    tasks: list[dict[str, Any]],
    *,
    model: str = "model",
    api_key: str | None = None,
    players: Mapping[str, Callable[[dict[str, Any], Messages], Turn]] = PLAYED,
    find: Callable[[list[dict[str, Any]], Messages], dict[str, Any]] | None = None,
) -> web.Application:
    """The endpoint as an aiohttp application.

    Args:
        tasks: SWE-bench instances with their gold patches, or what ``find`` searches.
        model: the only model that it serves; a request for another one is answered 404, as vLLM does.
        api_key: bearer token that is asked for, 401 without it; None asks for none.
        players: what a role says next, by role; there are those of ``FAULTS`` beside them.
        find: the task of a conversation; ``find_task`` when None.
    """
    roles = (*players, *FAULTS)
    app = web.Application(client_max_size=_MAX_REQUEST_BYTES, middlewares=[_errors_as_json])

    def admit(request: web.Request) -> str:
        if api_key is not None and request.headers.get("Authorization") != f"Bearer {api_key}":
            raise _ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        role = request.match_info["role"]
        if role not in roles:
            raise _ApiError(404, f"There is no role {role!r}; there are {', '.join(roles)}.", code="not_found")
        return role

    async def models(request: web.Request) -> web.Response:
        admit(request)
        entry = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "local_stack"}
        return web.json_response({"object": "list", "data": [entry]})

    async def complete(request: web.Request) -> web.Response:
        role = admit(request)
        messages = await _read_messages(request, model=model)
        if role == "hang":
            await asyncio.Event().wait()
        if role == "crash":
            raise _ApiError(500, "The scripted policy plays a crash.", code="internal_error")
        if role == "too-long":
            return web.json_response(_context_error(_estimated_tokens(messages)), status=400)
        try:
            turn = players[role]((find or find_task)(tasks, messages), messages)
        except UnknownTask as error:
            raise _ApiError(400, str(error), code="unknown_task") from None
        return web.json_response(_completion(turn, messages, model=model))

    app.router.add_get("/{role}/v1/models", models)
    app.router.add_post("/{role}/v1/chat/completions", complete)
    return app


class _ApiError(Exception):
    def __init__(self, status: int, message: str, *, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@web.middleware
async def _errors_as_json(request: web.Request, handler: Callable) -> web.StreamResponse:
    try:
        return await handler(request)
    except _ApiError as error:
        status, message, code = error.status, str(error), error.code
    except web.HTTPException as error:
        status, message, code = error.status, f"{request.method} {request.path}: {error.reason}", None
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": code}}, status=status)


async def _read_messages(request: web.Request, *, model: str) -> Messages:
    try:
        body = await request.json()
    except ValueError:
        body = None
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise _ApiError(400, "Expected a JSON object with a list of messages.", code="invalid_messages")
    if body.get("stream"):
        raise _ApiError(400, "This endpoint does not stream.", code="unsupported_value")
    if body.get("model") != model:
        raise _ApiError(404, f"The model {body.get('model')!r} does not exist.", code="model_not_found")
    return messages


def find_task(tasks: list[dict[str, Any]], messages: Messages) -> dict[str, Any]:
    """The task whose problem statement the conversation holds; the longest, where one holds another.

    Raises:
        UnknownTask: it holds none.
    """
    said = "\n".join(text_of(message) for message in messages if message.get("role") == "user")
    found = [task for task in tasks if task["problem_statement"].strip() in said]
    if not found:
        raise UnknownTask(f"The conversation holds no problem statement of the {len(tasks)} known tasks.")
    return max(found, key=lambda task: len(task["problem_statement"]))


def _completion(turn: Turn, messages: Messages, *, model: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": text}}
            for name, text in turn.tool_calls
        ]
    prompt_tokens, completion_tokens = _estimated_tokens(messages), _estimated_tokens([message])
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": "tool_calls" if turn.tool_calls else "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _context_error(prompt_tokens: int) -> dict[str, Any]:
    """As SGLang words it (ErrorResponse of its OpenAI server); litellm knows it by the message."""
    limit = max(prompt_tokens - 1, 1)
    return {
        "object": "error",
        "message": f"The input ({prompt_tokens} tokens) is longer than the model's context length ({limit} tokens).",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }


def _estimated_tokens(messages: Messages) -> int:
    return len(json.dumps(messages)) // _CHARACTERS_PER_TOKEN


# --- serving --------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(app: web.Application, *, port: int = 0) -> AsyncIterator[str]:
    """Serve the endpoint on the loopback interface while the block runs.

    Args:
        app: see ``make_app``.
        port: TCP port; 0 takes a free one.

    Yields:
        Its URL without role, ``http://127.0.0.1:<port>``; see ``role_url``.

    Raises:
        OSError: the port cannot be used.
    """
    # An agent that has hung up needs no answer, and a hanging role would never give one.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port).start()
        yield f"http://{HOST}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def serving_in_thread(app: web.Application, *, port: int = 0) -> Iterator[str]:
    """``serving`` for a program without an event loop: the endpoint runs in a thread of this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="scripted policy", daemon=True)
    thread.start()
    context = serving(app, port=port)
    try:
        url = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(_START_TIMEOUT_S)
        try:
            yield url
        finally:
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(_START_TIMEOUT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def role_url(url: str, role: str) -> str:
    """The OpenAI base URL of a role.

    Args:
        url: as ``serving`` yields it.
        role: one of ``ROLES``.
    """
    return f"{url}/{role}/v1"


def main(
    tasks: Annotated[Path, typer.Option(help="Tasks with gold patches, JSONL.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port on 127.0.0.1; 0 takes a free one.")] = 0,
    model: Annotated[str, typer.Option(help="The model name that it serves.")] = "model",
    api_key: Annotated[str | None, typer.Option(help="Ask for this bearer token.")] = None,
) -> None:
    """Play a policy on an OpenAI chat-completions endpoint until Ctrl-C."""
    try:
        app = make_app(load_tasks(tasks), model=model, api_key=api_key)
        asyncio.run(_serve_for_ever(app, port=port))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def _serve_for_ever(app: web.Application, *, port: int) -> None:
    async with serving(app, port=port) as url:
        print("\n".join(f"{role:<13} {role_url(url, role)}" for role in ROLES), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    typer.run(main)
