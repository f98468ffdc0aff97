"""The local stack, installed and running, for tests against a real NeMo Gym.

Nothing here skips: what is missing on the machine fails with the reason.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE_DIR = REPOSITORY / "examples" / "experimental" / "nemo-gym"
if str(EXAMPLE_DIR) not in sys.path:
    sys.path.insert(0, str(EXAMPLE_DIR))
os.environ.setdefault("LOCAL_STACK_DIR", str(REPOSITORY / ".local_stack"))

from local_stack.install import set_up
from local_stack.paths import Paths
from local_stack.scripted_policy import make_app, role_url, serving
from local_stack.server import Options, Stack, running_stack
from nemogym_agent_function import run_episode

from .session_policy import Session, playing

TIMEOUT_S = 300.0
POLICY_KEY = "sk-0123456789-of-a-test"
# Tests that hang cost this long; those of the local tasks end within 10 s on an idle machine.
EVAL_TIMEOUT_S = 60
_SANDBOX_DRIVER = Path(__file__).with_name("sandbox_driver.py")


@pytest.fixture(scope="session")
def paths() -> Paths:
    """An installed local stack."""
    paths = Paths.from_environment()
    set_up(paths)
    return paths


@pytest.fixture(scope="session")
def stack(paths: Paths) -> Iterator[Stack]:
    """One NeMo Gym for the session."""
    with running_stack(paths, options=Options(concurrency=8, eval_timeout=EVAL_TIMEOUT_S)) as stack:
        yield stack


@pytest.fixture(scope="session")
def tasks(paths: Paths) -> list[dict]:
    """The local tasks as SWE-bench instances."""
    return [json.loads(line)["metadata"] for line in paths.tasks.read_text().splitlines()]


@pytest.fixture
def command_environment() -> dict[str, str]:
    """Environment for the project's commands as subprocesses, without the settings of whoever runs the tests."""
    settings = ("NEMO_GYM_", "MILES_", "PORT", "POLICY_", "DATA", "LIMIT")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(settings)}
    return {**inherited, "PYTHONPATH": str(EXAMPLE_DIR)}


@pytest.fixture
async def policy(stack, tasks):
    """Runs one episode of a role; ``policy.calls`` counts the agent's model calls by role and HTTP status."""
    app = make_app(tasks, api_key=POLICY_KEY)
    calls: Counter = Counter()

    async def count(request, response) -> None:
        calls[request.match_info["role"], response.status] += 1

    app.on_response_prepare.append(count)
    async with serving(app) as url:

        async def run(role: str, task: dict, *, key: str = POLICY_KEY, timeout_s: float = TIMEOUT_S):
            return await run_episode(
                task,
                request_kwargs={},
                server=stack.policy_url,
                timeout_s=timeout_s,
                policy_base_url=role_url(url, role),
                policy_api_key=key,
            )

        run.calls = calls
        yield run


@pytest.fixture
async def start_session() -> AsyncIterator[Callable[..., Session]]:
    """Opens sessions of a policy endpoint; see ``session_policy.playing``."""
    async with playing() as start:
        yield start


@pytest.fixture
def in_sandboxes(paths: Paths) -> Callable[..., list[list[dict]]]:
    """Run commands in real sandboxes of one image, in NeMo Gym's own environment."""

    first_image = sorted(path.name for path in paths.images.glob("sweb.*"))[0]

    def run(*sandboxes: list[str], timeout_s: float = 20, image: str = first_image, **provider) -> list[list[dict]]:
        request = {
            "image_root": str(paths.images),
            "image": image,
            "sandboxes": sandboxes,
            "timeout_s": timeout_s,
            "provider": provider,
        }
        done = subprocess.run(
            [str(paths.gym_python), str(_SANDBOX_DRIVER)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
