"""What the episodes of a scan say about its tasks: classes, solve rates, pass@k.

Pure: no I/O, standard library only.

    golden scan    task_class(episodes of one task, ...)  -> one of CLASSES
    policy scan    solve_rate(episodes)                   -> SolveRate, with its 95 % interval
                   mean_pass_at_k(one SolveRate a task)   -> pass@k
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nemogym_contract import GRADED_STATUSES

KINDS = ("gold", "null", "policy")

# ``unfinished``: not every pass has been run, and those that have do not decide.
CLASSES = ("supported", "flaky", "broken", "inconclusive", "unfinished")

# The contract lays these at the policy's door. No policy acts in a golden scan: there they are the environment's.
_ENVIRONMENT_IN_GOLDEN = frozenset({"TimeLimitExceeded", "SandboxFailed"})
_Z_95 = 1.959963984540054  # 97.5th percentile of the standard normal distribution


class Reading(Enum):
    """What one episode says about its task. PASS: gold and policy 1.0, null 0.0. INCONCLUSIVE: nothing."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Episode:
    """One ended episode.

    Attributes:
        instance_id: its task.
        repo: the task's repository; None when the row names none.
        kind: ``gold`` (the task's own patch), ``null`` (an empty one) or ``policy``.
        attempt: which of the passes, from 1.
        reward: the verdict; None when there is none.
        exit_status: a key of ``nemogym_contract.EXIT_STATUSES``.
        seconds: wall time.
        agent_metrics: ``turns`` and ``tool_calls`` of the agent; a key is absent when its value is unknown.
        detail: what was found, one line for people.
        task: fingerprint of the row that was run.
        policy: name of the policy; None in a golden scan.
        sampling: the policy's sampling settings; those left to the agent are absent.
    """

    instance_id: str
    repo: str | None
    kind: str
    attempt: int
    reward: float | None
    exit_status: str
    seconds: float
    agent_metrics: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    task: str = ""
    policy: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """What an episode is told apart by: run again, it takes the other's place."""
        return self.instance_id, self.kind, self.attempt

    @property
    def reading(self) -> Reading:
        """What it says about the task."""
        if self.exit_status == "UngradableInstance":
            return Reading.FAIL  # the task's own fault, however often it is run
        if self.reward is None or (self.kind != "policy" and self.exit_status in _ENVIRONMENT_IN_GOLDEN):
            return Reading.INCONCLUSIVE
        if self.kind != "null":
            return Reading.PASS if self.reward == 1.0 else Reading.FAIL
        if self.exit_status == "NoTestsRan":
            return Reading.INCONCLUSIVE  # a 0.0 that no test gave does not show that the tests need the patch
        return Reading.PASS if self.exit_status in GRADED_STATUSES and self.reward == 0.0 else Reading.FAIL


def task_class(episodes: Iterable[Episode], *, passes: int, null_control: bool) -> str:
    """The class of one task of a golden scan.

    A task that scores 1.0 without its patch is broken whatever the patch does. A 1.0 and a 0.0 of the gold patch make it
    flaky whatever else failed. All other classes need every episode to have said something.

    Args:
        episodes: the gold and null episodes of one task, each attempt once.
        passes: how often the gold patch was to run.
        null_control: whether the empty patch was to run.

    Returns:
        One of ``CLASSES``.
    """
    readings: dict[str, list[Reading]] = {"gold": [], "null": []}
    for episode in episodes:
        readings[episode.kind].append(episode.reading)
    gold, null = readings["gold"], readings["null"]
    if Reading.FAIL in null:
        return "broken"
    if Reading.PASS in gold and Reading.FAIL in gold:
        return "flaky"
    if Reading.INCONCLUSIVE in gold + null:
        return "inconclusive"
    if len(gold) < passes or (null_control and not null):
        return "unfinished"
    return "broken" if Reading.FAIL in gold else "supported"


@dataclass(frozen=True)
class SolveRate:
    """How many of the verdicts were 1.0. Episodes without a verdict count nowhere."""

    solved: int
    verdicts: int

    @property
    def rate(self) -> float | None:
        return self.solved / self.verdicts if self.verdicts else None

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.solved, self.verdicts)

    @property
    def band(self) -> str:
        """``always``, ``sometimes`` or ``never`` solved; ``unknown`` without a verdict."""
        if not self.verdicts:
            return "unknown"
        return {0: "never", self.verdicts: "always"}.get(self.solved, "sometimes")


def solve_rate(episodes: Iterable[Episode]) -> SolveRate:
    """Count the verdicts of policy episodes and those that are 1.0."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    return SolveRate(solved=sum(reward == 1.0 for reward in rewards), verdicts=len(rewards))


def wilson_interval(solved: int, trials: int) -> tuple[float, float]:
    """The Wilson score interval of a proportion, 95 %, without continuity correction (Wilson 1927).

    Unlike the normal approximation it stays within 0 and 1 and has a width at 0 of n and n of n. Over the episodes of
    several tasks it is an interval for these tasks' mean rate, and a cautious one: it takes them for one task.

    Args:
        solved: number of successes.
        trials: number of trials; 0 gives (0.0, 1.0).
    """
    if trials == 0:
        return 0.0, 1.0
    rate, z2 = solved / trials, _Z_95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z_95 * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def pass_at_k(rate: SolveRate, k: int) -> float:
    """Probability that at least one of k episodes solves the task: the unbiased estimator 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1.

    Raises:
        ValueError: there are fewer than k verdicts.
    """
    if rate.verdicts < k:
        raise ValueError(f"expected at least {k} verdicts for pass@{k}, found {rate.verdicts}")
    return 1.0 - math.comb(rate.verdicts - rate.solved, k) / math.comb(rate.verdicts, k)


def mean_pass_at_k(rates: Iterable[SolveRate], k: int) -> tuple[float | None, int]:
    """pass@k over the tasks that have at least k verdicts, and how many these are; None when there is none."""
    values = [pass_at_k(rate, k) for rate in rates if rate.verdicts >= k]
    return (math.fsum(values) / len(values) if values else None), len(values)


def ks_up_to(passes: int) -> list[int]:
    """The k for which pass@k is told: the powers of two below ``passes``, and ``passes``."""
    powers = [2**exponent for exponent in range(passes.bit_length())]
    return sorted({k for k in powers if k <= passes} | {passes})


def known_metric(episodes: Iterable[Episode], name: str) -> list[float]:
    """The values of one of ``agent_metrics``, of the episodes that know it."""
    values = (episode.agent_metrics.get(name) for episode in episodes)
    return [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least ``share`` of them do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
