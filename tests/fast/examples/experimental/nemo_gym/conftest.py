"""The example on sys.path, a real /run server on 127.0.0.1, and bodies as mini_swe_agent_2 sends them."""

import asyncio
import copy
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from . import EXAMPLE_DIR

if str(EXAMPLE_DIR) not in sys.path:
    sys.path.insert(0, str(EXAMPLE_DIR))

ROW = {
    "instance_id": "psf__requests-1",
    "repo": "psf/requests",
    "version": "2.27",
    "base_commit": "abc123",
    "problem_statement": "It fails.",
    "patch": "diff --git a/a b/a\n",
    "test_patch": "diff --git a/t b/t\n",
    "FAIL_TO_PASS": '["t.py::test_a", "t.py::test_b"]',
    "PASS_TO_PASS": '["t.py::test_c"]',
}

CALL = {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'}
CALL_OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a.py"}

OPENAPI = {
    "paths": {"/run": {"post": {}}},
    "components": {"schemas": {"MiniSWEAgentRunRequest": {"properties": {"policy_base_url": {}}}}},
}


def graded_body(
    reward: Any = 1.0,
    *,
    instance_id: str = "psf__requests-1",
    passed: tuple[str, ...] = ("t.py::test_a", "t.py::test_b"),
    failed: tuple[str, ...] = (),
    model_patch: str = "diff --git a/a b/a\n",
    output: tuple[dict, ...] = (CALL, CALL_OUTPUT, CALL),
) -> dict[str, Any]:
    tests = {
        "FAIL_TO_PASS": {"success": list(passed), "failure": list(failed)},
        "PASS_TO_PASS": {"success": ["t.py::test_c"], "failure": []},
    }
    report = {instance_id: {"resolved": reward == 1.0, "patch_successfully_applied": True, "tests_status": tests}}
    return {
        "reward": reward,
        "response": {"output": list(output)},
        "instance_id": instance_id,
        "mask_sample": False,
        "failure_kind": None,
        "metadata": {"instance_id": instance_id, "model_patch": model_patch, "eval_report": report},
    }


def failed_body(traceback: str, error: str = "") -> dict[str, Any]:
    return {"reward": 0.0, "response": {"output": []}, "metadata": {"error": error, "traceback": traceback}}


def golden_answer(body: dict[str, Any]) -> dict[str, Any]:
    """A golden server's answer: gold patches resolve the task, empty ones run the tests and do not."""
    tests = ("t.py::test_a", "t.py::test_b")
    resolved = bool(body["patch"])
    return graded_body(
        1.0 if resolved else 0.0,
        instance_id=body["instance_id"],
        passed=tests if resolved else (),
        failed=() if resolved else tests,
        model_patch=body["patch"],
        output=(),
    )


Answer = dict | str | bytes | web.Response


class StubServer:
    """A /run server in a thread of its own.

    Set ``on_run`` to a function of the request's body; what it returns is the answer, a coroutine is awaited. It may
    call ``hang`` or raise ``Drop``. ``in_flight`` and ``most_in_flight`` count the episodes it is at; ``healthy`` is
    what ``/health`` says, after ``health_takes_s``. While it is ``dying``, every connection is made and then reset.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.on_run: Callable[[dict[str, Any]], Answer | Awaitable[Answer]] = lambda body: graded_body()
        self.openapi: Answer = OPENAPI
        self.status = 200
        self.healthy = True
        self.health_takes_s = 0.0
        self.dying = False
        self.in_flight = self.most_in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self._call(self._start())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def hang(self) -> Answer:
        await asyncio.sleep(3600)
        raise AssertionError

    class Drop(Exception):
        """Raised by ``on_run`` to close the socket without an answer."""

    def close(self) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()

    async def _end(self) -> None:
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10)

    def restart(self) -> None:
        """Accept connections again, on the port as before."""
        self._call(self._start(self.port))

    def stop(self) -> None:
        """End every connection and refuse new ones."""
        self._call(self._runner.cleanup())

    async def _start(self, port: int = 0) -> int:
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        return self._runner.addresses[0][1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.dying:
            request.transport.abort()
            return web.Response()
        if request.path.endswith("/openapi.json"):
            return self._response(self.openapi)
        if request.path.endswith("/health"):
            await asyncio.sleep(self.health_takes_s)
            return web.Response(status=200 if self.healthy else 503)
        body = await request.json()
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        self.requests.append(copy.deepcopy(body))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = self.on_run(body)
            if asyncio.iscoroutine(answer):
                answer = await answer
        except StubServer.Drop:
            request.transport.close()
            return web.Response()
        finally:
            self.in_flight -= 1
        return self._response(answer)

    def _response(self, answer: Answer) -> web.StreamResponse:
        if isinstance(answer, web.Response):
            return answer
        if isinstance(answer, dict):
            return web.Response(text=json.dumps(answer), content_type="application/json", status=self.status)
        return web.Response(body=answer.encode() if isinstance(answer, str) else answer, status=self.status)


@pytest.fixture
def stub() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.close()


@pytest.fixture
def stubs() -> Iterator[list[StubServer]]:
    servers = [StubServer(), StubServer(), StubServer()]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("NEMO_GYM_", "MILES_ROUTER_")):
            monkeypatch.delenv(name)
