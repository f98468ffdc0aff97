"""Miles' rollout side on a CPU, in front of a real NeMo Gym.

Tests that only a checkout can pass are collected only where there is one. Nothing here skips: what is missing on the
machine fails with the reason.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .checkout import use_checkout

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE_DIR = REPOSITORY / "examples" / "experimental" / "nemo-gym"
if str(EXAMPLE_DIR) not in sys.path:
    sys.path.insert(0, str(EXAMPLE_DIR))
os.environ.setdefault("LOCAL_STACK_DIR", str(REPOSITORY / ".local_stack"))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MILES_EXPERIMENTAL_ROLLOUT_REFACTOR"] = "1"  # the release of May 2026 asks for it

CHECKOUT = os.environ.get("MILES")
collect_ignore = ["test_release.py" if CHECKOUT else "test_checkout.py"]
try:
    if CHECKOUT:
        use_checkout(Path(CHECKOUT), packages=REPOSITORY / ".venv-sglang")
    from .tokenizer import make_checkpoint
    from .trainer import Trainer, running_trainer
except (FileNotFoundError, ModuleNotFoundError) as error:
    raise pytest.UsageError(f"these tests need an environment of their own, `make test-miles`: {error}") from None

from local_stack.environment_policy import load_rows
from local_stack.environments import ENVIRONMENTS
from local_stack.paths import Paths
from local_stack.server import Options, Stack, running_stack


@pytest.fixture(scope="session")
def tasks() -> list[dict]:
    """The local tasks as SWE-bench instances."""
    paths = Paths.from_environment()
    assert paths.tasks.is_file(), f"no tasks in {paths.root}: run `make setup` first"
    return [json.loads(line)["metadata"] for line in paths.tasks.read_text().splitlines()]


@pytest.fixture(scope="session")
def task(tasks) -> dict:
    """The task whose tests are fastest."""
    return tasks[1]


@pytest.fixture(scope="session")
def stack(tasks) -> Iterator[Stack]:
    """One NeMo Gym for the session."""
    with running_stack(Paths.from_environment(), options=Options(concurrency=8)) as stack:
        yield stack


@pytest.fixture(scope="session")
def environments() -> Iterator[Stack]:
    """One NeMo Gym with every environment of the local stack."""
    with running_stack(Paths.from_environment(), options=Options(environments=tuple(ENVIRONMENTS.values()))) as stack:
        yield stack


@pytest.fixture(scope="session")
def rows() -> dict[str, list[dict]]:
    """Their example rows, by environment, each with the agent that NeMo Gym's preparation of data would name."""
    paths = Paths.from_environment()
    return {
        name: [{**row, "agent_ref": {"name": environment.agent}} for row in load_rows(environment.rows(paths))]
        for name, environment in ENVIRONMENTS.items()
    }


@pytest.fixture(scope="session", autouse=True)
def connector_settings(stack) -> Iterator[None]:
    """Those of the user are out of the way."""
    with pytest.MonkeyPatch.context() as environment:
        for name in list(os.environ):
            if name.startswith("NEMO_GYM_") or name == "MILES_ROUTER_EXTERNAL_HOST":
                environment.delenv(name)
        environment.setenv("NEMO_GYM_URL", stack.policy_url)
        environment.setenv("NEMO_GYM_RUN_TIMEOUT", "300")
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tokenizer, made here."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def trainer(checkpoint, tasks) -> Iterator[Trainer]:
    """A rollout side as run.py launches one."""
    with running_trainer(checkpoint, tasks) as trainer:
        yield trainer
