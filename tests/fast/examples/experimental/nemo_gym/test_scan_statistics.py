"""Classes, solve rates and pass@k, without a server."""

import itertools
import statistics

import pytest
from scan_statistics import (
    Episode,
    Reading,
    SolveRate,
    known_metric,
    ks_up_to,
    mean_pass_at_k,
    pass_at_k,
    quantile,
    solve_rate,
    task_class,
    wilson_interval,
)

# What an episode can end with, as (reward, exit_status).
ONE, ZERO = (1.0, "Submitted"), (0.0, "Submitted")
ERROR, LATE, DEAD = (None, "SandboxUnavailable"), (0.0, "TimeLimitExceeded"), (0.0, "SandboxFailed")
UNTESTED, SKIPPED, UNKNOWN_TASK = (0.0, "NoTestsRan"), (0.0, "TestsSkipped"), (None, "UngradableInstance")


def _episode(kind: str, end: tuple, *, attempt: int = 1, **fields) -> Episode:
    return Episode("a__b-1", "a/b", kind, attempt, reward=end[0], exit_status=end[1], seconds=1.0, **fields)


def _episodes(gold: tuple, null: tuple = (ZERO,)) -> list[Episode]:
    ends = [("gold", end) for end in gold] + [("null", end) for end in null]
    return [_episode(kind, end, attempt=number) for number, (kind, end) in enumerate(ends, start=1)]


@pytest.mark.parametrize(
    "gold, null, name",
    [
        ((ONE, ONE, ONE), (ZERO,), "supported"),
        ((ONE, ZERO, ONE), (ZERO,), "flaky"),
        ((ZERO, ZERO, ZERO), (ZERO,), "broken"),
        ((ERROR, ONE, ONE), (ZERO,), "inconclusive"),
        # What the environment does cannot hide what the others have shown.
        ((ERROR, ONE, ZERO), (ZERO,), "flaky"),
        ((ERROR, ZERO, ZERO), (ZERO,), "inconclusive"),
        ((ONE, ZERO), (ERROR,), "flaky"),
        # The control: passes anyway, skips its way through, was never made.
        ((ONE, ONE, ONE), (ONE,), "broken"),
        ((ONE, ZERO, ERROR), (ONE,), "broken"),
        ((ONE, ONE, ONE), (SKIPPED,), "broken"),
        ((ONE, ONE, ONE), (UNTESTED,), "inconclusive"),
        ((ONE, ONE, ONE), (ERROR,), "inconclusive"),
        # No policy acts here: a slow server and a sandbox that dies are the environment's.
        ((LATE, ONE, ONE), (ZERO,), "inconclusive"),
        ((DEAD, ONE, ONE), (ZERO,), "inconclusive"),
        ((ONE, ONE, ONE), (LATE,), "inconclusive"),
        # The task's own fault, in every pass.
        ((UNTESTED, UNTESTED, UNTESTED), (ZERO,), "broken"),
        ((SKIPPED, ONE, ONE), (ZERO,), "flaky"),
        ((UNKNOWN_TASK, UNKNOWN_TASK, UNKNOWN_TASK), (UNKNOWN_TASK,), "broken"),
        # Cut short.
        ((ONE, ONE), (ZERO,), "unfinished"),
        ((ONE, ONE, ONE), (), "unfinished"),
        ((ONE, ZERO), (), "flaky"),
        ((), (), "unfinished"),
    ],
)
def test_the_class_of_a_task(gold, null, name):
    assert task_class(_episodes(gold, null), passes=3, null_control=True) == name


def test_without_the_control_the_gold_patch_decides():
    assert task_class(_episodes((ONE,), ()), passes=1, null_control=False) == "supported"


def test_more_passes_than_asked_for_still_count():
    assert task_class(_episodes((ONE, ZERO, ONE)), passes=1, null_control=True) == "flaky"


@pytest.mark.parametrize(
    "end, reading",
    [
        (ONE, Reading.PASS),
        (ZERO, Reading.FAIL),
        ((0.0, "TimeLimitExceeded"), Reading.FAIL),
        ((0.0, "SandboxFailed"), Reading.FAIL),
        ((0.0, "NoTestsRan"), Reading.FAIL),
        (ERROR, Reading.INCONCLUSIVE),
        ((None, "PolicyEndpointError"), Reading.INCONCLUSIVE),
        (UNKNOWN_TASK, Reading.FAIL),
    ],
)
def test_a_verdict_on_a_policy_is_the_contracts(end, reading):
    assert _episode("policy", end).reading == reading


def test_the_solve_rate_is_over_verdicts():
    rate = solve_rate(_episode("policy", end) for end in (ONE, ZERO, ERROR, ZERO, LATE))
    assert rate == SolveRate(solved=1, verdicts=4) and rate.rate == 0.25
    assert SolveRate(0, 0).rate is None and SolveRate(0, 0).interval == (0.0, 1.0)
    assert [SolveRate(*of).band for of in ((0, 4), (1, 4), (4, 4), (0, 0))] == [
        "never",
        "sometimes",
        "always",
        "unknown",
    ]


@pytest.mark.parametrize(
    "solved, trials, low, high",
    # Newcombe 1998, Two-sided confidence intervals for the single proportion, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_is_wilsons(solved, trials, low, high):
    assert wilson_interval(solved, trials) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(trials - solved, trials) == pytest.approx((1 - high, 1 - low), abs=5e-5)


@pytest.mark.parametrize("solved, verdicts, k", [(0, 4, 2), (1, 4, 1), (1, 4, 2), (2, 5, 3), (3, 5, 3), (4, 4, 4)])
def test_pass_at_k_is_the_share_of_all_choices_of_k(solved, verdicts, k):
    rewards = [True] * solved + [False] * (verdicts - solved)
    choices = [any(choice) for choice in itertools.combinations(rewards, k)]
    assert pass_at_k(SolveRate(solved, verdicts), k) == pytest.approx(statistics.fmean(choices))


def test_pass_at_k_needs_k_verdicts():
    with pytest.raises(ValueError, match="at least 3 verdicts"):
        pass_at_k(SolveRate(1, 2), 3)
    assert mean_pass_at_k([SolveRate(1, 2), SolveRate(0, 4)], 3) == (0.0, 1)
    assert mean_pass_at_k([SolveRate(1, 2), SolveRate(0, 4)], 1) == (0.25, 2)
    assert mean_pass_at_k([SolveRate(1, 2)], 3) == (None, 0)


@pytest.mark.parametrize("passes, ks", [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (10, [1, 2, 4, 8, 10])])
def test_the_k_that_are_told(passes, ks):
    assert ks_up_to(passes) == ks


def test_a_metric_counts_where_it_is_known():
    metrics = [{"turns": 4}, {}, {"turns": None}, {"turns": 6, "tool_calls": True}]
    episodes = [_episode("policy", ONE, agent_metrics=one) for one in metrics]
    assert known_metric(episodes, "turns") == [4.0, 6.0] and known_metric(episodes, "tool_calls") == []


def test_a_quantile_is_one_of_the_values():
    assert [quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.75, 0.9, 1.0)] == [1.0, 2.0, 3.0, 4.0, 4.0]
