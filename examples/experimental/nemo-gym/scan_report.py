"""What the scan keeps of an episode and shows of it: one JSON line in --output, one line on the way, a summary."""

import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from nemogym_contract import EXIT_STATUSES, GRADED_STATUSES, Outcome
from tqdm import tqdm


class SetUpError(Exception):
    """Ends the scan with exit status 2; the message is one sentence for the user."""


@dataclass(frozen=True)
class Expectation:
    """What every policy episode must end with; None expects nothing but a verdict."""

    reward: float | None = None
    exit_status: str | None = None

    def __str__(self) -> str:
        reward = "a verdict" if self.reward is None else f"reward {self.reward:g}"
        return f"{reward}, {self.exit_status}" if self.exit_status else reward


@dataclass(frozen=True)
class Job:
    """One episode to run; ``kind`` is gold, null or policy. ``expected`` is read for a policy only."""

    row: dict[str, Any]
    kind: str
    expected: Expectation = Expectation()

    @property
    def task(self) -> dict[str, Any]:
        return {**self.row, "patch": ""} if self.kind == "null" else self.row


@dataclass(frozen=True)
class Result:
    job: Job
    outcome: Outcome
    seconds: float

    @property
    def passed(self) -> bool:
        """Gold, policy: reward 1.0. Null: reward 0.0."""
        if self.job.kind == "null":
            # A 0.0 without a run of the tests would say nothing about the task.
            return self.outcome.exit_status in GRADED_STATUSES and self.outcome.reward == 0.0
        return self.outcome.reward == 1.0

    @property
    def as_expected(self) -> bool:
        """A policy may fail a task: of its episodes a verdict is expected, or what was asked for."""
        if self.job.kind != "policy":
            return self.passed
        expected = self.job.expected
        return (
            self.outcome.reward is not None
            and expected.reward in (None, self.outcome.reward)
            and expected.exit_status in (None, self.outcome.exit_status)
        )

    def as_record(self) -> dict[str, Any]:
        return {
            "instance_id": self.job.row["instance_id"],
            "repo": self.job.row.get("repo"),
            "kind": self.job.kind,
            "pass": self.passed,
            "reward": self.outcome.reward,
            "exit_status": self.outcome.exit_status,
            "seconds": round(self.seconds, 3),
            "eval_report": self.outcome.eval_report,
        }

    def reason(self) -> str:
        """What was expected and what was found, in one line."""
        outcome = self.outcome
        expected = {"gold": "1.0", "null": "0.0 with tests run", "policy": str(self.job.expected)}[self.job.kind]
        found = "no verdict" if outcome.reward is None else f"reward {outcome.reward}"
        cause = EXIT_STATUSES[outcome.exit_status].cause
        text = f"expected {expected}, found {found}, {outcome.exit_status} ({cause})"
        return " ".join(f"{text}: {outcome.detail}".rstrip(": ").split())[:400]


def new_output(path: Path | None, *, input_path: Path) -> TextIO:
    """An empty file at ``path``, in place of what was there; with None, nowhere.

    Raises:
        SetUpError: it cannot be written, or it is the input.
    """
    if path is None:
        return open(os.devnull, "w", encoding="utf-8")
    if path.exists() and path.samefile(input_path):
        raise SetUpError(f"expected --output to be another file than --input, found {path} for both")
    if path.is_dir():
        raise SetUpError(f"expected --output to be a file, found the directory {path}")
    try:
        # Replaced in one step: a reader of the old file never sees it truncated.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.fchmod(descriptor, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise SetUpError(f"expected to write --output {path}, found: {error.strerror}") from None
    return open(descriptor, "w", encoding="utf-8")


class Report:
    """Keeps each result, writes it to the output and shows it: a bar on a terminal, lines elsewhere."""

    def __init__(self, *, results: list[Result], total: int, sink: TextIO) -> None:
        self.results = results
        self._sink = sink
        self._on_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, unit="episode", file=sys.stderr, disable=not self._on_terminal)

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def add(self, result: Result) -> None:
        self._sink.write(json.dumps(result.as_record()) + "\n")
        self._sink.flush()
        self.results.append(result)
        self._bar.update()
        head = f"{result.job.kind} {result.job.row['instance_id']}"
        if not result.as_expected:
            self._say(f"FAIL {head} {result.seconds:.1f}s: {result.reason()}")
        elif not self._on_terminal:
            found = f": reward {result.outcome.reward:g}, {result.outcome.exit_status}"
            self._say(f"ok   {head} {result.seconds:.1f}s{found if result.job.kind == 'policy' else ''}")

    def _say(self, line: str) -> None:
        counted = line if self._on_terminal else f"[{len(self.results)}/{self._bar.total}] {line}"
        self._bar.write(counted, file=sys.stdout)
        sys.stdout.flush()


def say_what_is_kept(results: list[Result], output: Path | None) -> None:
    if results:
        kept = f"in {output}" if output else "and not kept: there was no --output"
        print(f"{len(results)} episode(s) had ended, {kept}", file=sys.stderr)


def print_golden_summary(rows: list[dict[str, Any]], results: list[Result]) -> None:
    """A line per task, the totals, and the verdict in one sentence."""
    by_task = {(result.job.row["instance_id"], result.job.kind): result for result in results}
    width = max(len(row["instance_id"]) for row in rows)
    print(f"\n{'task':<{width}}  {'gold':>6} {'s':>7}  {'null':>6} {'s':>7}")
    for row in rows:
        gold, null = (by_task.get((row["instance_id"], kind)) for kind in ("gold", "null"))
        flag = "" if all(result.passed for result in (gold, null) if result) else "  FAIL"
        print(f"{row['instance_id']:<{width}}  {_cells(gold)}  {_cells(null)}{flag}")
    failed = {result.job.row["instance_id"] for result in results if not result.passed}
    episodes_passed = sum(result.passed for result in results)
    print(
        f"{episodes_passed} of {len(results)} episodes and {len(rows) - len(failed)} of {len(rows)} tasks as expected"
    )
    if failed:
        print(f"golden scan FAILED: {len(failed)} task(s) did not score as their patches should")
    else:
        control = " and every empty patch 0.0" if any(result.job.kind == "null" for result in results) else ""
        print(f"golden scan passed: every gold patch scored 1.0{control}")


def _cells(result: Result | None) -> str:
    if result is None:
        return f"{'-':>6} {'-':>7}"
    return f"{_reward(result):>6} {result.seconds:>7.1f}"


def _reward(result: Result) -> str:
    return "none" if result.outcome.reward is None else f"{result.outcome.reward:g}"


def print_policy_summary(rows: list[dict[str, Any]], results: list[Result], *, expected: Expectation) -> None:
    """A line per task, the totals per exit status, the mean reward, and the verdict in one sentence."""
    by_task = {result.job.row["instance_id"]: result for result in results}
    results = [by_task[row["instance_id"]] for row in rows]
    width = max(len(result.job.row["instance_id"]) for result in results)
    names = max(len(result.outcome.exit_status) for result in results)
    print(f"\n{'task':<{width}}  {'reward':>6}  {'exit_status':<{max(names, 11)}} {'s':>7}")
    for result in results:
        flag = "" if result.as_expected else "  FAIL"
        status = f"{result.outcome.exit_status:<{max(names, 11)}}"
        print(f"{result.job.row['instance_id']:<{width}}  {_reward(result):>6}  {status} {result.seconds:>7.1f}{flag}")
    counts = Counter(result.outcome.exit_status for result in results)
    print("exit statuses: " + ", ".join(f"{status} {count}" for status, count in counts.most_common()))
    rewards = [result.outcome.reward for result in results if result.outcome.reward is not None]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no mean reward"
    solved = sum(result.passed for result in results)
    print(f"{mean} over {len(rewards)} verdict(s); {solved} of {len(results)} tasks solved")
    failed = sum(not result.as_expected for result in results)
    if failed:
        print(f"policy scan FAILED: {failed} of {len(results)} episode(s) did not end with {expected}")
    else:
        print(f"policy scan passed: every episode ended with {expected}")
