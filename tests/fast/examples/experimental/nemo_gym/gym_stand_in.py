"""A NeMo Gym for checks of a launch: a stub agent server that calls back, and its head server."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from .conftest import StubServer, failed_body

# How the grader of swebench 4.1.0 ends an episode whose version it does not know.
UNKNOWN_VERSION = (
    "Traceback (most recent call last):\n"
    '  File "test_spec.py", line 318, in make_test_spec\n'
    "    specs = MAP_REPO_VERSION_TO_SPECS[repo][version]\n"
    "KeyError: 'canary'"
)
NO_SANDBOX = (
    "Traceback (most recent call last):\n"
    '  File "sandbox_environment.py", line 90, in _start\n'
    "nemo_gym.sandbox.SandboxCreateError: pull: toomanyrequests"
)
SECRET = "sk-of-the-server"


class Gym:
    """``stub``: the agent server. ``agent``: its block of the configuration. ``extra``: further blocks."""

    def __init__(self, stub: StubServer) -> None:
        self.stub = stub
        self.agent: dict[str, Any] = {
            "port": stub.port,
            "sandbox_provider": "sandbox",
            "run_golden": False,
            "concurrency": 16,
        }
        self.extra: dict[str, Any] = {"sandbox": {"docker": {}}}
        self.head_url = ""

    @property
    def url(self) -> str:
        return self.stub.url

    def configuration(self) -> dict[str, Any]:
        agents = {"mini_swe_agent_2": {"responses_api_agents": {"mini_swe_agent_2": self.agent}}}
        return {"policy_api_key": SECRET, **agents, **self.extra}


class _HeadServer(StubServer):
    """Tells the configuration of ``gym``."""

    def __init__(self, gym: Gym) -> None:
        self._gym = gym
        super().__init__()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/global_config_dict_yaml":
            return web.Response(status=404)
        return web.json_response(yaml.safe_dump(self._gym.configuration()))


@contextlib.contextmanager
def running_gym(stub: StubServer) -> Iterator[Gym]:
    """A head server for ``stub`` while the block runs; its agent calls the policy once."""
    gym = Gym(stub)
    stub.on_run = agent_that_calls
    with contextlib.closing(_HeadServer(gym)) as head:
        gym.head_url = head.url
        yield gym


async def agent_that_calls(body: dict[str, Any], *messages: dict[str, Any]) -> dict[str, Any]:
    """Call the policy as mini-swe-agent does, and end as the grader does with a version that it does not know."""
    request = {"model": "model", "messages": [{"role": "user", "content": "Fix it."}, *messages]}
    async with aiohttp.ClientSession() as client:
        async with client.post(f"{body['policy_base_url']}/chat/completions", json=request) as response:
            body["policy_answer"] = await response.json()
    return failed_body(UNKNOWN_VERSION)


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
