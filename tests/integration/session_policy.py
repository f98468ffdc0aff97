"""A policy for tests: sessions of an OpenAI chat-completions endpoint, each of which plays its own list of tool calls."""

import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from local_stack.scripted_policy import serving

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff"


@dataclass
class Session:
    """One episode's session.

    Attributes:
        url: as Miles passes it to the agent function.
        requests: bodies of the agent's calls, in order.
    """

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)

    @property
    def policy_base_url(self) -> str:
        """What the agent calls."""
        return f"{self.url}/v1"


@contextlib.asynccontextmanager
async def playing() -> AsyncIterator[Callable[..., Session]]:
    """Serve the endpoint while the block runs.

    Yields:
        ``start(*commands)``: open a session that answers the agent's n-th call with the n-th command, and every further
        one with HTTP 500. With ``raw=True`` they are the arguments of the tool call, as they are.
    """
    sessions: dict[str, tuple[Session, list[str]]] = {}

    async def complete(request: web.Request) -> web.Response:
        session, calls = sessions[request.match_info["name"]]
        session.requests.append(await request.json())
        if len(session.requests) > len(calls):
            return web.json_response({"error": {"message": "the session has no more commands"}}, status=500)
        return web.json_response(_completion(calls[len(session.requests) - 1]))

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/sessions/{name}/v1/chat/completions", complete)
    async with serving(app) as url:

        def start(*commands: str, raw: bool = False) -> Session:
            name = secrets.token_hex(16)
            session = Session(f"{url}/sessions/{name}")
            calls = commands if raw else [json.dumps({"command": command}) for command in commands]
            sessions[name] = session, list(calls)
            return session

        yield start


def apply_patch(patch: str) -> str:
    """The command that applies a patch."""
    return f"git apply - <<'END_OF_PATCH'\n{patch}\nEND_OF_PATCH"


def _completion(arguments: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": arguments}
    call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return {"id": "1", "object": "chat.completion", "model": "model", "choices": [choice]}
