"""One short episode on an agent server: the only proof of image, sandbox and the way back before GPUs start.

1. The session port is bound as the session server will bind it, and a stand-in serves one scripted turn there.
2. One task is posted to ``/run`` by the connector's own code, with the session URL that a sample would get.
3. The scripted turn submits at once. The task's version is one that the grader does not know, so that no test runs: the
   episode ends some seconds after its sandbox is up. What it leaves on the server is a few small files.

    findings = asyncio.run(fly_canaries(servers, task, session_host="0.0.0.0", session_ports=[30000]))
"""

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

from aiohttp import web
from nemogym_agent_function import Settings, reachable_policy_url, run_episode
from nemogym_checks import Canary, Finding, check_canary
from nemogym_contract import build_run_request
from tqdm import tqdm

TIMEOUT_S = 600.0
_VERSION = "canary"
_COMMAND = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


async def fly_canaries(
    servers: Sequence[str],
    task: Mapping[str, Any],
    *,
    session_host: str,
    session_ports: Sequence[int],
    timeout_s: float = TIMEOUT_S,
) -> list[Finding]:
    """One episode on each server, all at a time.

    Args:
        servers: URLs of agent servers.
        task: a SWE-bench instance whose image the servers have or can pull.
        session_host: address that the session server will listen on.
        session_ports: its ports; the first one is used, the others have to be free.
        timeout_s: seconds for one episode, the pull of its image included.

    Returns:
        A finding for each server, or the one that kept the episodes from being started.

    Raises:
        ValueError: ``session_host`` or a variable of the connector has a value that cannot be worked with.
    """
    with contextlib.ExitStack() as stack:
        try:
            listeners = [stack.enter_context(_listener(session_host, port)) for port in session_ports]
        except OSError as problem:
            return [
                Finding.error(
                    "session port",
                    expected=f"to listen on {session_host}, port {', '.join(map(str, session_ports))}",
                    found=problem.strerror or str(problem),
                    remedy="Stop what listens there, or choose another --session-server-port or --session-server-ip.",
                )
            ]
        async with _serving(listeners) as sessions:
            flights = [
                _fly_canary(server, task, session_host, session_ports[0], sessions, timeout_s=timeout_s)
                for server in servers
            ]
            return [check_canary(canary) for canary in await _patiently(flights, timeout_s)]


async def _fly_canary(
    server: str, task: Mapping[str, Any], host: str, port: int, sessions: "_Sessions", *, timeout_s: float
) -> Canary:
    session, call = sessions.open()
    url = await reachable_policy_url(session_url(host, port, session), server, Settings.from_environment())
    started = time.monotonic()
    outcome = await run_episode(
        {**task, "version": _VERSION}, request_kwargs={}, server=server, timeout_s=timeout_s, policy_base_url=url
    )
    return Canary(
        server=server,
        url=url,
        image=build_run_request(task, None)["image_name"],
        outcome=outcome,
        seconds=time.monotonic() - started,
        called_after=call.at - started if call.at else None,
        said=call.said,
    )


def session_url(host: str, port: int, session: str) -> str:
    """A session's URL as Miles makes it (miles/rollout/generate_utils/openai_endpoint_utils.py).

    Args:
        host: address that the session server listens on, IPv6 with or without brackets.
        port: its port.
        session: id, 32 hexadecimal digits.
    """
    bare = host.strip("[]")
    return f"http://{f'[{bare}]' if ':' in bare else bare}:{port}/sessions/{session}"


# --- the stand-in for the session server ------------------------------------------


class _Call:
    """``at``: when the agent called first, monotonic. ``said``: what it then reported of its command's output."""

    at: float | None = None
    said: str | None = None


class _Sessions:
    """Answers each session's first turn with a command that submits, and a second one, which never comes, with 400."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}

    def open(self) -> tuple[str, _Call]:
        session = secrets.token_hex(16)
        self._calls[session] = _Call()
        return session, self._calls[session]

    async def complete(self, request: web.Request) -> web.Response:
        call = self._calls.get(request.match_info["session"])
        if call is None:
            return web.json_response({"error": {"message": "no such session"}}, status=404)
        call.at = call.at or time.monotonic()
        body = await request.json()
        answers = [message.get("content") for message in body["messages"] if message.get("role") == "tool"]
        if answers:
            call.said = str(answers[-1])
            return web.json_response({"error": {"message": "the canary has submitted"}}, status=400)
        return web.json_response(_turn(body.get("model")))


def _turn(model: Any) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": _COMMAND})}
    message = {
        "role": "assistant",
        "content": "I submit at once.",
        "tool_calls": [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}],
    }
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def _listener(host: str, port: int) -> socket.socket:
    """The session server's own socket.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), port), family=family)


@contextlib.asynccontextmanager
async def _serving(listeners: Sequence[socket.socket]) -> AsyncIterator[_Sessions]:
    """Sessions on every listener while the block runs."""
    sessions = _Sessions()
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/sessions/{session}/v1/chat/completions", sessions.complete)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        for listener in listeners:
            await web.SockSite(runner, listener).start()
        yield sessions
    finally:
        await runner.cleanup()


async def _patiently(flights: Sequence[Coroutine[Any, Any, Canary]], timeout_s: float) -> list[Canary]:
    """Wait, and say that this takes a while. What the connector logs about an episode, the finding says."""
    said = f"waiting for {len(flights)} canary episode(s); each may pull an image first, {timeout_s:g} s at most"
    quiet = logging.NullHandler()
    logging.getLogger("nemogym_agent_function").addHandler(quiet)
    tasks = [asyncio.create_task(flight) for flight in flights]
    try:
        with tqdm(desc=said, bar_format="{desc} {elapsed}", disable=not sys.stderr.isatty(), leave=False) as bar:
            if bar.disable:
                print(said, file=sys.stderr, flush=True)
            while (await asyncio.wait(tasks, timeout=1))[1]:
                bar.refresh()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        logging.getLogger("nemogym_agent_function").removeHandler(quiet)
