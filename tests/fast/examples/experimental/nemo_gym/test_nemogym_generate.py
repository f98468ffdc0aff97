"""The reward hook: takes a verdict of the connector's, marks everything else ABORTED, never raises."""

import enum
import importlib
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest


def _minimal_miles() -> dict[str, types.ModuleType]:
    class Sample:
        class Status(enum.Enum):
            COMPLETED = "completed"
            ABORTED = "aborted"

        def __init__(self, metadata: Any = None) -> None:
            self.metadata = metadata
            self.status = Sample.Status.COMPLETED

    modules = {name: types.ModuleType(name) for name in ("miles", "miles.utils", "miles.utils.types")}
    modules["miles.utils.types"].Sample = Sample
    return modules


@pytest.fixture
def generate(monkeypatch):
    try:
        importlib.import_module("miles.utils.types")
    except ImportError:
        for name, module in _minimal_miles().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "nemogym_generate", raising=False)
    yield importlib.import_module("nemogym_generate")
    sys.modules.pop("nemogym_generate", None)


def _sample(generate, metadata):
    sample = generate.Sample()
    sample.metadata = metadata
    sample.status = generate.Sample.Status.COMPLETED
    return sample


@pytest.mark.parametrize(
    "exit_status, reward",
    [("Submitted", 1.0), ("Submitted", 0), ("LimitsExceeded", 0.5), ("TimeLimitExceeded", 0.0)],
)
async def test_a_verdict_is_the_reward_and_the_sample_stays(generate, exit_status, reward):
    sample = _sample(generate, {"exit_status": exit_status, "reward": reward})

    assert await generate.reward_func(None, sample) == reward
    assert sample.status == generate.Sample.Status.COMPLETED


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        "Submitted",
        {},
        {"reward": 1.0},  # the row's own
        {"exit_status": "ServerUnreachable", "reward": 1.0},  # the row's own reward, the connection lost
        {"exit_status": "SomeoneElses", "reward": 1.0},
        {"exit_status": ["Submitted"], "reward": 1.0},
        {"exit_status": "Submitted"},
        {"exit_status": "Submitted", "reward": None},
        {"exit_status": "Submitted", "reward": True},
        {"exit_status": "Submitted", "reward": "1.0"},
        {"exit_status": "Submitted", "reward": float("nan")},
        {"exit_status": "Submitted", "reward": 10**400},
    ],
)
async def test_anything_else_is_zero_and_aborted(generate, metadata):
    sample = _sample(generate, metadata)

    assert await generate.reward_func(None, sample) == 0.0
    assert sample.status == generate.Sample.Status.ABORTED


async def test_a_list_is_scored_one_by_one(generate):
    won = _sample(generate, {"exit_status": "Submitted", "reward": 1.0})
    lost = _sample(generate, {"exit_status": "UnknownError"})

    assert await generate.reward_func(None, [won, lost], evaluation=True) == [1.0, 0.0]
    assert [won.status.name, lost.status.name] == ["COMPLETED", "ABORTED"]


@dataclass
class _NotASample:
    metadata: dict = field(default_factory=dict)


@pytest.mark.parametrize("odd", [None, 3, "text", _NotASample()])
async def test_odd_types_do_not_raise(generate, odd):
    assert await generate.reward_func(None, odd) == 0.0
    assert await generate.reward_func(None, [odd]) == [0.0]
