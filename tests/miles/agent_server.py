"""A small ``/run`` server for faults that a healthy NeMo Gym does not have.

It calls its policy as an agent does, so that the session server has turns to train, and then answers as it is told.
"""

import json
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@dataclass(frozen=True)
class Answer:
    """What ``/run`` is answered with.

    Attributes:
        status: HTTP status.
        body: JSON, or text as it is.
        hangs_up: close the connection without an answer.
    """

    status: int = 200
    body: Any = None
    hangs_up: bool = False


def make_agent_server(answer: Answer, *, turns: int = 2) -> web.Application:
    """The server as an aiohttp application.

    Args:
        answer: to every ``/run``, after its turns.
        turns: model calls that each makes first.
    """

    async def run(request: web.Request) -> web.Response:
        body = await request.json()
        await _call_policy(body["policy_base_url"], body["problem_statement"], turns)
        if answer.hangs_up:
            request.transport.close()
            return web.Response()
        text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
        return web.Response(status=answer.status, text=text, content_type="application/json")

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/run", run)
    app.router.add_get("/health", health)
    return app


async def _call_policy(base_url: str, statement: str, turns: int) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": statement}]
    async with aiohttp.ClientSession() as session:
        for _ in range(turns):
            request = {"model": "model", "messages": messages, "tools": [_TOOL]}
            async with session.post(f"{base_url}/chat/completions", json=request, raise_for_status=True) as response:
                message = (await response.json())["choices"][0]["message"]
            messages.append({key: value for key, value in message.items() if value is not None})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in message["tool_calls"]
            ]
