"""An own docker engine with the images of the local tasks, and NeMo Gym on it, for tests that may break both.

Nothing here skips: what is missing on the machine fails with the reason. Run by ``make test-docker`` only.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE_DIR = REPOSITORY / "examples" / "experimental" / "nemo-gym"
sys.path[:0] = [str(EXAMPLE_DIR), str(REPOSITORY / "tools")]
os.environ.setdefault("LOCAL_STACK_DIR", str(REPOSITORY / ".local_stack"))

from docker_engine import Engine, running_engine
from local_stack.install import set_up
from local_stack.paths import Paths
from local_stack.server import HOST, Options, Sandbox, running_stack
from nemogym_agent_function import run_episode

ENGINE_MIB = 1024
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Servers:
    """URLs of a running NeMo Gym."""

    policy_url: str
    golden_url: str


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """An engine for the session, the one that ``docker`` uses in this process and its children."""
    with running_engine(mib=ENGINE_MIB) as engine:
        os.environ["DOCKER_HOST"] = engine.host
        yield engine
        del os.environ["DOCKER_HOST"]


@pytest.fixture
def breakable(engine: Engine) -> Iterator[Engine]:
    """The engine for a test that kills it or fills its disk; works again afterwards."""
    yield engine
    if not engine.is_alive():
        engine.start()
    deadline = time.monotonic() + 30
    # One whose removal has begun already cannot be removed again.
    while containers := engine.docker("ps", "--all", "--quiet").split():
        assert time.monotonic() < deadline, containers
        engine.docker("rm", "--force", *containers, check=False, stderr=subprocess.DEVNULL)


def start_container(engine: Engine, image: str, *arguments: str) -> str:
    """Start a container that only sleeps and return its id; without a bound a mistake in it floods the machine."""
    return engine.docker("run", "--detach", "--pids-limit=64", *arguments, image, "sleep", "600").strip()


@pytest.fixture(scope="session")
def paths(engine: Engine) -> Paths:
    """An installed local stack whose images are in the engine."""
    paths = Paths.from_environment()
    set_up(paths, docker=True)
    return paths


@pytest.fixture(scope="session")
def tasks(paths: Paths) -> list[dict]:
    """The local tasks as SWE-bench instances."""
    return [json.loads(line)["metadata"] for line in paths.tasks.read_text().splitlines()]


@pytest.fixture(scope="session")
def command_environment(engine: Engine) -> dict[str, str]:
    """Environment for the project's commands as subprocesses, without the settings of whoever runs the tests."""
    settings = ("NEMO_GYM_", "MILES_", "PORT", "POLICY_", "DATA", "LIMIT", "SANDBOX")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(settings)}
    return {**inherited, "PYTHONPATH": str(EXAMPLE_DIR)}


@pytest.fixture(scope="session")
def docker_servers(paths: Paths, engine: Engine, command_environment: dict[str, str]) -> Iterator[Servers]:
    """NeMo Gym as ``SANDBOX=docker python -m local_stack serve`` starts it; leaves no container behind."""
    port = _free_block(4)
    command = [sys.executable, "-m", "local_stack", "serve", "--port", str(port), "--concurrency", "4"]
    server = subprocess.Popen(
        command, env={**command_environment, "SANDBOX": "docker"}, stdout=subprocess.PIPE, text=True
    )
    try:
        lines = []
        while "Ctrl-C stops it.\n" not in lines:  # others before it: it may wait for another set-up
            lines.append(server.stdout.readline())
            assert lines[-1], f"it ended: {lines}"
        yield Servers(policy_url=f"http://{HOST}:{port}", golden_url=f"http://{HOST}:{port + 1}")
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 130
        assert engine.docker("ps", "--all", "--quiet") == ""
    finally:
        server.kill()


@pytest.fixture(scope="session", params=list(Sandbox), ids=lambda sandbox: sandbox.value)
def servers(request) -> Iterator[Servers]:
    """NeMo Gym with each of the sandboxes in turn."""
    if request.param is Sandbox.DOCKER:
        yield request.getfixturevalue("docker_servers")
        return
    with running_stack(request.getfixturevalue("paths"), options=Options(concurrency=4)) as stack:
        yield Servers(policy_url=stack.policy_url, golden_url=stack.golden_url)


def _free_block(size: int) -> int:
    """The first of some ports in a row that are free now."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.socket())
            first.bind((HOST, 0))
            port = first.getsockname()[1]
            for number in range(port + 1, port + size):
                stack.enter_context(socket.socket()).bind((HOST, number))
            return port


@contextlib.asynccontextmanager
async def commanding(*turns: str | Callable[[], str]) -> AsyncIterator[str]:
    """A policy that has the agent run one command a turn, the last one for ever; yields its URL.

    A callable is called in the event loop's thread when its turn comes, and returns the command.
    """
    answered = 0

    async def complete(request: web.Request) -> web.Response:
        nonlocal answered
        turn = turns[min(answered, len(turns) - 1)]
        answered += 1
        command = turn if isinstance(turn, str) else turn()
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        call = {"id": f"call_{answered}", "type": "function", "function": function}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return web.json_response({"id": "1", "object": "chat.completion", "model": "model", "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        yield f"http://{HOST}:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def episode(servers: Servers, task: dict, *turns: str | Callable[[], str]):
    """The Outcome of an episode in which the agent runs these commands; without any it applies the task's patch."""
    if not turns:
        return await run_episode(task, request_kwargs={}, server=servers.golden_url, timeout_s=TIMEOUT_S, golden=True)
    async with commanding(*turns) as url:
        return await run_episode(
            task, request_kwargs={}, server=servers.policy_url, timeout_s=TIMEOUT_S, policy_base_url=url
        )
