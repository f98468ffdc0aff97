"""What a scan shows: a line or a bar on the way, and a summary at the end."""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from nemogym_contract import EXIT_STATUSES
from scan_input import Expectation, Options
from scan_results import Results
from scan_statistics import (
    CLASSES,
    Episode,
    Reading,
    SolveRate,
    known_metric,
    ks_up_to,
    mean_pass_at_k,
    quantile,
    solve_rate,
    task_class,
)
from tqdm import tqdm


def as_expected(episode: Episode, expected: Expectation) -> bool:
    """Whether it ended well. A policy may fail a task: of it a verdict is expected, or what was asked for."""
    if episode.kind != "policy":
        return episode.reading == Reading.PASS
    return (
        episode.reward is not None
        and expected.reward in (None, episode.reward)
        and expected.exit_status in (None, episode.exit_status)
    )


def reason(episode: Episode, expected: Expectation) -> str:
    """What was expected of an episode and what was found, in one line."""
    wanted = {"gold": "1.0", "null": "0.0 with tests run", "policy": str(expected)}[episode.kind]
    found = "no verdict" if episode.reward is None else f"reward {episode.reward}"
    text = f"expected {wanted}, found {found}, {episode.exit_status} ({EXIT_STATUSES[episode.exit_status].cause})"
    return " ".join(f"{text}: {episode.detail}".rstrip(": ").split())[:400]


class Progress:
    """Shows each episode as it ends: a bar and the failures on a terminal, a line each elsewhere."""

    def __init__(self, options: Options, *, total: int, ended: int) -> None:
        """
        Args:
            options: what was asked for.
            total: episodes of the whole scan.
            ended: those of an earlier run.
        """
        self._options = options
        self._ended = ended
        self._on_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=ended, unit="episode", file=sys.stderr, disable=not self._on_terminal)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def show(self, episode: Episode) -> None:
        self._ended += 1
        self._bar.update()
        if not as_expected(episode, self._options.expected):
            self._say(_failure(episode, self._options))
        elif not self._on_terminal:
            found = f": reward {episode.reward:g}, {episode.exit_status}" if episode.kind == "policy" else ""
            self._say(f"ok   {_head(episode, self._options)}{found}")

    def _say(self, line: str) -> None:
        counted = line if self._on_terminal else f"[{self._ended}/{self._bar.total}] {line}"
        self._bar.write(counted, file=sys.stdout)
        sys.stdout.flush()


def _failure(episode: Episode, options: Options) -> str:
    return f"FAIL {_head(episode, options)}: {reason(episode, options.expected)}"


def _head(episode: Episode, options: Options) -> str:
    which = f" {episode.attempt}/{options.passes}" if options.passes > 1 and episode.kind != "null" else ""
    return f"{episode.kind} {episode.instance_id}{which} {episode.seconds:.1f}s"


def say_what_was_found(results: Results, options: Options, *, to_run: int) -> None:
    """Say what of the scan is in its results file already, its failures, and what is not of this scan."""
    if found := results.episodes:
        left = f"{to_run} to run" if to_run else "none to run (--again sets the file aside and runs them again)"
        print(f"resuming {options.output}: {len(found)} episode(s) are in it, {left}", file=sys.stderr)
        for episode in found:
            if not as_expected(episode, options.expected):
                print(_failure(episode, options))
    if others := {episode.instance_id for episode in results.others}:
        print(f"{options.output} also holds {len(others)} task(s) of other scans: not counted", file=sys.stderr)


def say_what_is_kept(added: int, output: Path | None) -> None:
    if added:
        kept = f"in {output}" if output else "and not kept: there was no --output"
        print(f"{added} episode(s) had ended, {kept}", file=sys.stderr)


# --- golden scan ------------------------------------------------------------------


def classes_of(ids: Iterable[str], episodes: Iterable[Episode], *, passes: int, null_control: bool) -> dict[str, str]:
    """The class of each task of a golden scan, in the order of ``ids``."""
    by_task = tasks_of(episodes)
    return {one: task_class(by_task[one], passes=passes, null_control=null_control) for one in ids}


def print_golden_summary(classes: dict[str, str], episodes: Sequence[Episode], *, passes: int) -> None:
    """A line per task, the totals, and the verdict in one sentence.

    Args:
        classes: class of each task by id.
        episodes: those that ended.
        passes: how often each gold patch was to run.
    """
    by_task = tasks_of(episodes)
    width, marks = max(map(len, classes)), max(passes, len("gold"))
    print(f"\n{'task':<{width}}  {'gold':>{marks}} {'s':>7}  {'null':>4} {'s':>7}  class")
    for instance_id, name in classes.items():
        gold, null = ([one for one in by_task[instance_id] if one.kind == kind] for kind in ("gold", "null"))
        print(f"{instance_id:<{width}}  {_cells(gold, marks)}  {_cells(null, 4)}  {name}")
    counts = Counter(classes.values())
    passed = sum(episode.reading == Reading.PASS for episode in episodes)
    print(
        f"{passed} of {len(episodes)} episodes and {counts['supported']} of {len(classes)} tasks as expected\n"
        + "classes: "
        + ", ".join(f"{name} {counts[name]}" for name in CLASSES if counts[name] or name != "unfinished")
    )
    _say_inconclusive(sum(episode.reading == Reading.INCONCLUSIVE for episode in episodes))
    if counts["supported"] < len(classes):
        print(
            f"golden scan FAILED: {len(classes) - counts['supported']} task(s) did not score as their patches should"
        )
    else:
        every = f" in each of {passes} passes" if passes > 1 else ""
        controlled = {episode.instance_id for episode in episodes if episode.kind == "null"}
        control = " and every empty patch 0.0" if controlled >= set(classes) else ""
        print(f"golden scan passed: every gold patch scored 1.0{every}{control}")


def _cells(episodes: Sequence[Episode], width: int) -> str:
    """The rewards in the order of the passes, one character each, ``?`` for an inconclusive one, and the mean time."""
    if not episodes:
        return f"{'-':>{width}} {'-':>7}"
    rewards = "".join(mark(episode) for episode in sorted(episodes, key=lambda episode: episode.attempt))
    return f"{rewards:>{width}} {sum(episode.seconds for episode in episodes) / len(episodes):>7.1f}"


def mark(episode: Episode) -> str:
    """The reward of an episode in one character: 1, 0, ``?`` for an inconclusive one, ``-`` for none."""
    if episode.reading == Reading.INCONCLUSIVE:
        return "?"
    return "-" if episode.reward is None else str(int(episode.reward == 1.0))


# --- policy scan ------------------------------------------------------------------


def print_policy_summary(
    ids: Sequence[str], episodes: Sequence[Episode], *, passes: int, expected: Expectation
) -> None:
    """A line per task, the totals, solve rate and pass@k, and the verdict in one sentence.

    Args:
        ids: the tasks, in the order of the lines.
        episodes: those that ended.
        passes: how often each task was to run.
        expected: what every episode must have ended with.
    """
    _print_policy_tasks(ids, episodes, expected=expected)
    print(f"exit statuses: {statuses(episodes)}")
    _print_solve_rates(ids, episodes, passes=passes)
    spent = [("seconds", [episode.seconds for episode in episodes])]
    spent += [(name.replace("_", " "), known_metric(episodes, name)) for name in ("turns", "tool_calls")]
    print(
        "an episode, median (9 of 10 within): "
        + ", ".join(f"{name} {quantile(of, 0.5):.4g} ({quantile(of, 0.9):.4g})" for name, of in spent if of)
    )
    _say_inconclusive(sum(episode.reading == Reading.INCONCLUSIVE for episode in episodes))
    failed = sum(not as_expected(episode, expected) for episode in episodes)
    if failed:
        print(f"policy scan FAILED: {failed} of {len(episodes)} episode(s) did not end with {expected}")
    else:
        print(f"policy scan passed: every episode ended with {expected}")


def _print_policy_tasks(ids: Sequence[str], episodes: Sequence[Episode], *, expected: Expectation) -> None:
    by_task = tasks_of(episodes)
    width = max(map(len, ids))
    print(f"\n{'task':<{width}}  {'solved':>7} {'rate':>5}  {'95 %':<11} {'turns':>6} {'s':>7}  exit_status")
    for instance_id in ids:
        ended = by_task[instance_id]
        if not ended:
            continue
        rate = solve_rate(ended)
        shown = "-" if rate.rate is None else f"{rate.rate:.2f}"
        turns = known_metric(ended, "turns")
        mean_turns = f"{sum(turns) / len(turns):.1f}" if turns else "-"
        seconds = sum(episode.seconds for episode in ended) / len(ended)
        names = statuses(ended) if len(ended) > 1 else ended[0].exit_status
        flag = "" if all(as_expected(episode, expected) for episode in ended) else "  FAIL"
        print(
            f"{instance_id:<{width}}  {f'{rate.solved}/{rate.verdicts}':>7} {shown:>5}  {interval(rate):<11} "
            f"{mean_turns:>6} {seconds:>7.1f}  {names}{flag}"
        )


def _print_solve_rates(ids: Sequence[str], episodes: Sequence[Episode], *, passes: int) -> None:
    by_task = tasks_of(episodes)
    total, rates = solve_rate(episodes), [solve_rate(by_task[one]) for one in ids]
    if total.rate is None:
        print("solve rate: no verdict")
        return
    print(
        f"solve rate {total.rate:.3f} over {total.verdicts} verdict(s), 95 % interval {interval(total)} (Wilson, "
        "of these tasks)"
    )
    if passes > 1:
        told = [(k, *mean_pass_at_k(rates, k)) for k in ks_up_to(passes)]
        print(", ".join(f"pass@{k} {value:.3f}{_of(n, len(ids))}" for k, value, n in told if value is not None))
    bands = Counter(rate.band for rate in rates)
    print(
        "tasks: "
        + ", ".join(f"{bands[band]} {band} solved" for band in ("always", "sometimes", "never"))
        + (f", {bands['unknown']} without a verdict" if bands["unknown"] else "")
    )


def statuses(episodes: Iterable[Episode]) -> str:
    """Exit statuses with their counts, the commonest first."""
    counts = Counter(episode.exit_status for episode in episodes)
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def interval(rate: SolveRate) -> str:
    """Its 95 % interval; ``-`` without a verdict."""
    low, high = rate.interval
    return f"{low:.2f} to {high:.2f}" if rate.verdicts else "-"


def _of(tasks: int, total: int) -> str:
    """Said where some tasks have too few verdicts."""
    return "" if tasks == total else f" ({tasks} of {total} tasks)"


def _say_inconclusive(count: int) -> None:
    if count:
        print(f"{count} episode(s) say nothing about their task: --retry-inconclusive runs only them again")


def tasks_of(episodes: Iterable[Episode]) -> defaultdict[str, list[Episode]]:
    """Episodes of each task, in their order."""
    by_task: defaultdict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        by_task[episode.instance_id].append(episode)
    return by_task
