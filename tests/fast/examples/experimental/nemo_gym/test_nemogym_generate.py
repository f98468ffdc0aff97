"""Reward hook, group filter and rollout metrics: what is a verdict, what drops a group, and that nothing raises."""

import enum
import importlib
import logging
import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import nemogym_metrics
import pytest
from nemogym_contract import EXIT_STATUSES, Outcome


def _minimal_miles() -> dict[str, types.ModuleType]:
    class Sample:
        class Status(enum.Enum):
            COMPLETED = "completed"
            TRUNCATED = "truncated"
            ABORTED = "aborted"

        def __init__(self) -> None:
            self.metadata: Any = None
            self.status = Sample.Status.COMPLETED
            self.reward: Any = None

        def get_reward_value(self, args: Any) -> Any:
            return self.reward if not args.reward_key else self.reward[args.reward_key]

    @dataclass
    class DynamicFilterOutput:
        keep: bool
        reason: str | None = None

    def compute_rollout_step(args: Any, rollout_id: int) -> int:
        return rollout_id * args.step

    tracked: list[tuple] = []
    packages = ("miles", "miles.utils", "miles.utils.tracking_utils", "miles.rollout", "miles.rollout.filter_hub")
    names = (*packages, "miles.utils.types", "miles.utils.metric_utils", "miles.utils.tracking_utils.tracking")
    modules = {name: types.ModuleType(name) for name in (*names, "miles.rollout.filter_hub.base_types")}
    for name in packages:
        modules[name].__path__ = []
    modules["miles.utils.types"].Sample = Sample
    modules["miles.utils.metric_utils"].compute_rollout_step = compute_rollout_step
    modules["miles.utils.tracking_utils.tracking"].log = lambda args, metrics, step_key: tracked.append(
        (metrics, step_key)
    )
    modules["miles.utils.tracking_utils.tracking"].tracked = tracked
    modules["miles.rollout.filter_hub.base_types"].DynamicFilterOutput = DynamicFilterOutput
    return modules


@pytest.fixture
def generate(monkeypatch):
    for name, module in _minimal_miles().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "nemogym_generate", raising=False)
    generate = importlib.import_module("nemogym_generate")
    monkeypatch.setattr(generate, "TALLY", nemogym_metrics.Tally())
    yield generate
    sys.modules.pop("nemogym_generate", None)


ARGS = SimpleNamespace(reward_key=None, step=10)


def _sample(generate, metadata, reward=None, **attributes):
    sample = generate.Sample()
    sample.metadata, sample.reward = metadata, reward
    for name, value in attributes.items():
        setattr(sample, name, value)
    return sample


# --- reward ---------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "status, mask, turns, reward",
    [
        ("TRUNCATED", [1, 1, 0, 1, 0, 1], 3, 1.0),
        ("TRUNCATED", [1, 1, 0, 1, 1], 3, 0.0),
        ("TRUNCATED", [1, 1, 0, 1, 1], None, 0.0),
        ("TRUNCATED", None, 1, 0.0),
        ("COMPLETED", [1, 1, 0, 1, 1], 3, 1.0),
    ],
)
async def test_a_sample_cut_before_what_was_graded_has_no_reward_for_it(generate, status, mask, turns, reward):
    metrics = {} if turns is None else {"turns": turns}
    metadata = {"exit_status": "Submitted", "reward": 1.0, "agent_metrics": metrics}
    sample = _sample(generate, metadata, loss_mask=mask, status=generate.Sample.Status[status])
    assert await generate.reward_func(None, sample) == reward
    assert sample.status.name == status


async def test_a_list_is_scored_one_by_one(generate):
    won = _sample(generate, {"exit_status": "Submitted", "reward": 1.0})
    lost = _sample(generate, {"exit_status": "UnknownError"})

    assert await generate.reward_func(None, [won, lost], evaluation=True) == [1.0, 0.0]
    assert [won.status.name, lost.status.name] == ["COMPLETED", "ABORTED"]


@dataclass
class _NotASample:
    metadata: dict = field(default_factory=dict)


class _Raises:
    @property
    def metadata(self):
        raise RuntimeError


@pytest.mark.parametrize("odd", [None, 3, "text", _NotASample(), _Raises()])
async def test_odd_types_do_not_raise(generate, odd):
    assert await generate.reward_func(None, odd) == 0.0
    assert await generate.reward_func(None, [odd]) == [0.0]


@pytest.mark.parametrize("status", [status for status, known in EXIT_STATUSES.items() if not known.is_verdict])
async def test_ungraded_as_zero_is_trained_as_a_failure(generate, monkeypatch, status):
    monkeypatch.setenv("NEMO_GYM_UNGRADED", "zero")
    sample = _sample(generate, Outcome(status).as_metadata())
    assert await generate.reward_func(None, sample) == 0.0
    assert sample.status.name == "COMPLETED"


async def test_a_setting_of_neither_kind_drops_and_is_named_once(generate, monkeypatch, caplog):
    monkeypatch.setenv("NEMO_GYM_UNGRADED", "0")
    for _ in range(2):
        sample = _sample(generate, {})
        assert await generate.reward_func(None, sample) == 0.0
        assert sample.status.name == "ABORTED"
    (record,) = caplog.records
    assert "NEMO_GYM_UNGRADED" in record.message and "'0'" in record.message


# --- group filter ---------------------------------------------------------------


def _group(generate, rewards):
    return [_sample(generate, {"exit_status": "Submitted", "reward": reward}, reward) for reward in rewards]


@pytest.mark.parametrize(
    "rewards, keep, reason",
    [
        ([0.0, 1.0], True, None),
        ([0.0, 0.0, 0.0], False, "zero_std_0.0"),
        ([1.0, 1.0], False, "zero_std_1.0"),
        ([0.5], False, "zero_std_0.5"),
        ([0.0, None], False, "unreadable"),
        ([float("nan"), 1.0], False, "unreadable"),
        ([1.0, float("nan")], False, "unreadable"),
        ([1.0, float("inf")], False, "unreadable"),
        ([], False, "empty"),
    ],
)
def test_a_group_teaches_by_its_differences(generate, rewards, keep, reason):
    output = generate.keep_group(ARGS, _group(generate, rewards))
    assert (output.keep, output.reason) == (keep, reason)


async def test_a_group_without_a_verdict_is_dropped_by_its_reason_first(generate):
    group = _group(generate, [0.0, 0.0])
    group.append(_sample(generate, {"exit_status": "SandboxUnavailable"}, 0.0))
    assert await generate.reward_func(None, group) == [0.0, 0.0, 0.0]
    output = generate.keep_group(ARGS, group)
    assert (output.keep, output.reason) == (False, "no_verdict_SandboxUnavailable")


def test_a_group_that_miles_aborted_is_dropped(generate):
    group = _group(generate, [0.0, 1.0])
    group[0].status = generate.Sample.Status.ABORTED
    output = generate.keep_group(ARGS, group)
    assert (output.keep, output.reason) == (False, "group_has_aborted")


def test_a_group_of_lists_is_one_group(generate):
    first, second = _group(generate, [0.0, 1.0])
    assert generate.keep_group(ARGS, [[first], [second]]).keep
    assert not generate.keep_group(ARGS, [[first, first], [first]]).keep


def test_a_reward_of_several_is_read_by_its_key(generate):
    group = _group(generate, [{"grade": 0.0}, {"grade": 1.0}])
    assert generate.keep_group(SimpleNamespace(reward_key="grade"), group).keep


@pytest.mark.parametrize("odd", [None, [None], 3, [[]], [_NotASample()]])
def test_an_odd_group_is_dropped_and_does_not_raise(generate, odd):
    assert not generate.keep_group(ARGS, odd).keep


def test_a_group_without_an_end_is_dropped_and_does_not_raise(generate):
    group = []
    group.append(group)
    assert generate.keep_group(ARGS, group).reason == "unreadable"


# --- metrics --------------------------------------------------------------------


def _graded(generate, reward, group, **metrics):
    metadata = {"exit_status": "Submitted", "reward": reward, "agent_metrics": metrics}
    return _sample(generate, metadata, reward, group_index=group)


def test_a_rollout_logs_how_all_episodes_ended_and_what_was_kept(generate):
    for outcome in [Outcome("Submitted", 1.0)] * 3 + [Outcome("SandboxUnavailable")]:
        generate.TALLY.add(outcome)
    kept = [
        _graded(generate, 1.0, 0, turns=4, tool_calls=4, total_time=10.0, tampered=True),
        _graded(generate, 0.0, 0, turns=6, tool_calls=8, total_time=20.0, tampered=False),
        [_graded(generate, 0.0, 1)],
    ]
    metrics = {"rollout/other": 1}
    assert generate.log_rollout(3, ARGS, kept, metrics, 1.0) is False
    assert metrics == {
        "rollout/other": 1,
        "rollout/nemo_gym/episodes": 4.0,
        "rollout/nemo_gym/exit_status/Submitted": 3.0,
        "rollout/nemo_gym/exit_status/SandboxUnavailable": 1.0,
        "rollout/nemo_gym/no_verdict_share": 0.25,
        "rollout/nemo_gym/kept_samples": 3.0,
        "rollout/nemo_gym/kept_groups": 2.0,
        "rollout/nemo_gym/turns_mean": 5.0,
        "rollout/nemo_gym/tool_calls_mean": 6.0,
        "rollout/nemo_gym/total_time_mean": 15.0,
        "rollout/nemo_gym/tampered_share": 0.5,
    }


def test_what_one_sample_says_wrongly_costs_no_metric(generate):
    generate.TALLY.add(Outcome("Submitted", 1.0))
    odd = _graded(generate, 1.0, 0, turns="many", tool_calls=float("nan"), total_time=None)
    metrics = {}
    generate.log_rollout(3, ARGS, [odd, _graded(generate, 1.0, 0, turns=4)], metrics, 1.0)
    assert metrics["rollout/nemo_gym/turns_mean"] == 4.0
    assert metrics["rollout/nemo_gym/episodes"] == 1.0
    assert "rollout/nemo_gym/tool_calls_mean" not in metrics


def test_an_eval_logs_its_mean_over_verdicts_beside_their_number(generate):
    generate.TALLY.add(Outcome("SandboxUnavailable"))
    samples = [
        _graded(generate, 1.0, 0),
        _graded(generate, 0.0, 0),
        _sample(generate, {"exit_status": "UnknownError"}),
    ]
    data = {"verified": {"rewards": [1.0, 0.0, 0.0], "samples": samples}, "bare": {"rewards": [1.0]}, "none": None}
    metrics = {}
    assert generate.log_eval_rollout(3, ARGS, data, metrics) is False
    assert metrics == {
        "eval/nemo_gym/episodes": 1.0,
        "eval/nemo_gym/exit_status/SandboxUnavailable": 1.0,
        "eval/nemo_gym/no_verdict_share": 1.0,
        "eval/nemo_gym/verified/verdicts": 2.0,
        "eval/nemo_gym/verified/no_verdict_share": pytest.approx(1 / 3),
        "eval/nemo_gym/verified/mean_over_verdicts": 0.5,
    }


def test_without_a_dict_of_miles_the_metrics_are_tracked_by_themselves(generate):
    tracked = sys.modules["miles.utils.tracking_utils.tracking"].tracked
    assert generate.log_rollout(3, ARGS, [], None, 1.0) is False
    assert generate.log_eval_rollout(4, ARGS, {}) is False
    assert tracked == [
        ({"rollout/nemo_gym/kept_samples": 0.0, "rollout/step": 30}, "rollout/step"),
        ({"eval/step": 40}, "eval/step"),
    ]


@pytest.mark.parametrize("odd", [None, 3, "text", [None], [[3]], {"a": None}, [_NotASample(metadata=3)]])
def test_odd_logs_do_not_raise(generate, odd, caplog):
    caplog.set_level(logging.CRITICAL)
    assert generate.log_rollout(1, ARGS, odd, {}, None) is False
    assert generate.log_eval_rollout(1, ARGS, odd, {}) is False
    assert generate.log_eval_rollout(1, None, odd, None) is False
