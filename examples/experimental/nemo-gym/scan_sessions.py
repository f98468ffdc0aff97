"""Sessions for a policy scan of NeMo Gym environments: what a Miles trainer's session server is to their model server.

The model server in miles_session_model/ calls ``http://host:port/sessions/<id>/v1``, a session for each episode. Here each
call is handed on to the policy's endpoint as it is, with the policy's key; nothing is recorded but how many there were.
"""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

_MAX_REQUEST_BYTES = 1 << 28
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass
class ScanSession:
    """One episode's session. ``url``: as Miles would pass it to the connector. ``calls``: how many were handed on."""

    url: str
    calls: int = 0


@asynccontextmanager
async def serving_sessions(
    policy_base_url: str, *, api_key: str | None, server: str, port: int = 0
) -> AsyncIterator[Callable[[], ScanSession]]:
    """Serve sessions while the block runs: to this machine if the agent server is on it, else on every interface.

    Args:
        policy_base_url: OpenAI base URL of the policy, as this machine reaches it.
        api_key: its bearer key; None sends none.
        server: URL of the agent server.
        port: TCP port; 0 takes a free one.

    Yields:
        A function that opens a session. Its name cannot be guessed.

    Raises:
        OSError: the port cannot be used.
    """
    sessions: dict[str, ScanSession] = {}
    host = "127.0.0.1" if urlsplit(server).hostname in _LOOPBACK else "0.0.0.0"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)

    async def hand_on(request: web.Request) -> web.Response:
        session = sessions.get(request.match_info["name"])
        if session is None:
            return web.json_response({"error": "session not found"}, status=404)
        session.calls += 1
        try:
            async with client.post(
                f"{policy_base_url}/chat/completions", data=await request.read(), headers=headers
            ) as answer:
                body, status, kind = await answer.read(), answer.status, answer.content_type
        except (aiohttp.ClientError, OSError) as error:
            return web.json_response({"error": f"no answer from the policy endpoint: {error}"}, status=502)
        return web.Response(body=body, status=status, content_type=kind)

    app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
    app.router.add_post("/sessions/{name}/v1/chat/completions", hand_on)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    async with aiohttp.ClientSession(
        headers={"Content-Type": "application/json"}, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as client:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()

            def start() -> ScanSession:
                name = secrets.token_hex(16)
                sessions[name] = ScanSession(f"http://{host}:{runner.addresses[0][1]}/sessions/{name}")
                return sessions[name]

            yield start
        finally:
            await runner.cleanup()
