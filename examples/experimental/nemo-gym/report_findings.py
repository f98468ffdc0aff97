"""What scans say about their tasks, taken together: what to do with each task, figures of each scan, two compared.

    judge(scans, band)                 a Task for each, with one of DECISIONS
    verdict(tasks, scans)              all of it in one sentence
    figures(scan), compare(scans)      for people, on a page or a terminal

Pure. Intervals are those of ``scan_statistics``, the choice of what is worth training on is that of ``task_selection``.
Of several scans of one kind the last one named decides; the others are there to be compared.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemogym_contract import EXIT_STATUSES
from report_scan import Ended, Scan
from report_text import counted, listed, percent
from scan_input import Expectation
from scan_report import interval, mark, reason
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
)
from task_selection import Band, Selection

DEFAULT_BAND = Band(0.05, 0.95)


class Decision(NamedTuple):
    """``title``: two words at most. ``meaning``: one sentence, for people who see it for the first time."""

    title: str
    meaning: str


DECISIONS: dict[str, Decision] = {
    "drop": Decision("Drop", "The task itself is at fault: its reward is constant, or partly chance."),
    "rescan": Decision("Rescan", "The environment failed or the scan is not finished: nothing is known of the task."),
    "train": Decision("Train on", "Solved sometimes: groups hold unequal rewards, from which a policy learns."),
    "too_hard": Decision("Too hard", "Solved too rarely: groups of zeros, from which nothing is learnt now."),
    "too_easy": Decision("Too easy", "Solved too often: groups of ones, from which nothing is learnt any more."),
    "sound": Decision("Sound", "Graded as it should be; no policy has been tried on it."),
}

CLASS_MEANINGS = {
    "supported": "1.0 with its own patch in every pass, 0.0 without",
    "flaky": "both 1.0 and 0.0 with the same patch",
    "broken": "never 1.0, or 1.0 without the patch, or unknown to the grader",
    "inconclusive": "the environment failed an episode",
    "unfinished": "not every pass has been run",
}
_OF_CLASS = {"broken": "drop", "flaky": "drop", "inconclusive": "rescan", "unfinished": "rescan"}
_OF_REASON = {"solved_too_rarely": "too_hard", "solved_too_often": "too_easy", None: "train"}


# --- what to do with each task ----------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One task, with what the deciding scans say of it.

    Attributes:
        instance_id: its id.
        repo: its repository; ``unknown`` when its row names none.
        decision: a key of ``DECISIONS``.
        task_class: of the golden scan; None without one.
        rate: of the policy scan; None without one.
    """

    instance_id: str
    repo: str
    decision: str
    task_class: str | None
    rate: SolveRate | None


def graded(tasks: Sequence[Task]) -> list[Task]:
    """Those that the deciding policy scan tells something of: not to be dropped or scanned again, and tried."""
    return [task for task in tasks if task.decision in _OF_REASON.values()]


def deciding(scans: Sequence[Scan]) -> tuple[Scan | None, Scan | None]:
    """The last golden and the last policy scan."""
    golden = [scan for scan in scans if scan.golden]
    policy = [scan for scan in scans if not scan.golden]
    return (golden[-1] if golden else None), (policy[-1] if policy else None)


def judge(scans: Sequence[Scan], band: Band = DEFAULT_BAND) -> list[Task]:
    """What to do with each task of the scans, in the order in which they name them.

    Args:
        scans: at least one.
        band: solve rates that are worth training on.
    """
    golden, policy = deciding(scans)
    known = {instance_id: rate.rate for instance_id, rate in (policy.rates if policy else {}).items()}
    solve_rates = {instance_id: rate for instance_id, rate in known.items() if rate is not None}
    selection = Selection(solve_rates=solve_rates, band=band)
    tasks = []
    for instance_id in dict.fromkeys(instance_id for scan in scans for instance_id in scan.tasks):
        episodes = [one for scan in scans for one in scan.tasks.get(instance_id, ())]
        task_class = golden.classes.get(instance_id) if golden else None
        tried = policy is not None and instance_id in policy.tasks
        tasks.append(
            Task(
                instance_id=instance_id,
                repo=next((one.repo for one in episodes if one.repo), "unknown"),
                decision=_decide(instance_id, episodes, task_class, tried=tried, selection=selection),
                task_class=task_class,
                rate=policy.rates[instance_id] if tried else None,
            )
        )
    return tasks


def _decide(
    instance_id: str, episodes: Sequence[Episode], task_class: str | None, *, tried: bool, selection: Selection
) -> str:
    if task_class in _OF_CLASS:
        return _OF_CLASS[task_class]
    if all(one.exit_status == "UngradableInstance" for one in episodes if one.kind == "policy") and tried:
        return "drop"
    if not tried:
        return "sound" if task_class == "supported" else "rescan"
    return _OF_REASON.get(selection.unfit_reason(instance_id), "rescan")


def verdict(tasks: Sequence[Task], scans: Sequence[Scan]) -> str:
    """What to do with the tasks, and whether a policy learns on the rest, in one sentence."""
    _, policy = deciding(scans)
    counts = Counter(task.decision for task in tasks)
    rest = len(tasks) - counts["drop"] - counts["rescan"]
    aside = [f"{name} {counts[name]:,}" for name in ("drop", "rescan") if counts[name]]
    first = f"{listed(aside).capitalize()} of {counted(len(tasks), 'task')}; " if aside else ""
    if not rest:
        return f"{first}there is nothing left to learn from."
    if policy is None:
        sound = f"the other {rest:,}" if aside else f"All {rest:,} tasks" if rest > 1 else "The one task"
        return f"{first}{sound} {_are(rest)} sound, and a policy scan will tell what a policy learns from."
    on = f"on the other {rest:,}" if aside else f"Of {counted(rest, 'task')}"
    return f"{first}{on} the policy {_learns(counts, policy)}."


def _learns(counts: Counter, policy: Scan) -> str:
    if policy.passes == 1:
        return f"solves {counts['too_easy']:,} in its one pass, and one pass cannot tell what it learns from"
    train, tried = counts["train"], sum(counts[decision] for decision in _OF_REASON.values())
    share = f" ({percent(train, tried)}{' of those tried' if counts['sound'] else ''})"
    others = {key: counts[key] for key in ("too_hard", "too_easy", "sound") if counts[key]}
    if not others:
        return "can learn from all"
    said = {
        "too_hard": f"{counts['too_hard']:,} {_are(counts['too_hard'])} too hard for it",
        "too_easy": f"{counts['too_easy']:,} {_are(counts['too_easy'])} too easy",
        "sound": f"{counts['sound']:,} {'has' if counts['sound'] == 1 else 'have'} not been tried",
    }
    learns = f"{train:,}{share}" if train else "none"
    return f"can learn from {learns}, while {listed(said[key] for key in others)}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def notes(scans: Sequence[Scan], tasks: Sequence[Task]) -> list[str]:
    """What to know before the verdict is trusted, a sentence each."""
    golden, policy = deciding(scans)
    said = []
    for scan in scans:
        if scan.cut_off:
            said.append(f"{scan.name} does not end with a whole line: its scan is still running, or was killed.")
        if scan.missing:
            said.append(
                f"{scan.name} lacks {counted(scan.missing, 'episode')} of {scan.passes} passes over its tasks."
            )
    if policy and golden is None:
        said.append("No golden scan is in this report: a task that is never solved may also be broken.")
    if golden and not any(one.kind == "null" for one in golden.episodes):
        said.append(f"{golden.name} ran no empty patches: a task that passes without its fix is not noticed.")
    if golden and golden.passes == 1:
        said.append(f"{golden.name} ran each gold patch once, which does not tell flaky tasks from sound ones.")
    if policy and policy.passes == 1:
        said.append(f"{policy.name} ran each task once: solved is not always solved, and failed is not too hard.")
    if policy and policy.passes > 1 and not policy.temperature:
        said.append(f"{policy.name} was sampled at temperature 0: its passes are nearly the same episode.")
    if untried := sum(task.decision == "sound" for task in tasks) if policy else 0:
        said.append(f"{counted(untried, 'sound task')} {_are(untried)} not in {policy.name}.")
    return said


# --- figures of a scan ------------------------------------------------------------


def figures(scan: Scan) -> dict[str, str]:
    """The totals of a scan, by what they are."""
    shown = {"tasks": f"{len(scan.tasks):,}", "episodes": f"{len(scan.episodes):,}", "passes": str(scan.passes)}
    if scan.golden:
        counts = Counter(scan.classes.values())
        shown |= {name: f"{counts[name]:,}" for name in CLASSES if counts[name] or name != "unfinished"}
    else:
        shown |= {"policy": scan.policy or "unknown", "temperature": f"{scan.temperature:g}"}
        shown |= _solve_figures(scan)
    without = sum(one.reward is None for one in scan.episodes)
    shown["without a verdict"] = f"{without:,} ({percent(without, len(scan.episodes))})"
    spent = {"seconds": [one.seconds for one in scan.episodes], "turns": known_metric(scan.episodes, "turns")}
    for name, values in spent.items():
        if values:
            shown[f"{name}, median (9 of 10 within)"] = f"{quantile(values, 0.5):.4g} ({quantile(values, 0.9):.4g})"
    return shown


def _solve_figures(scan: Scan) -> dict[str, str]:
    total, rates = solve_rate(scan.episodes), list(scan.rates.values())
    if total.rate is None:
        return {"solve rate": "no verdict"}
    shown = {"solve rate": f"{total.rate:.3f} (95 %: {interval(total)})"}
    for k in ks_up_to(scan.passes) if scan.passes > 1 else ():
        value, count = mean_pass_at_k(rates, k)
        if value is not None:
            shown[f"pass@{k}"] = f"{value:.3f}" + ("" if count == len(rates) else f" ({count} tasks)")
    bands = Counter(rate.band for rate in rates)
    return shown | {f"{band} solved": f"{bands[band]:,}" for band in ("always", "sometimes", "never")}


def status_counts(scan: Scan) -> dict[str, int]:
    """Exit statuses of a scan's episodes, the commonest first."""
    counts = Counter(one.exit_status for one in scan.episodes)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


class Repository(NamedTuple):
    """Tasks of one repository: how many of each decision, and the solve rate over the verdicts of those in ``graded``."""

    name: str
    counts: Counter
    rate: SolveRate

    @property
    def tasks(self) -> int:
        return self.counts.total()


def repositories(tasks: Sequence[Task]) -> list[Repository]:
    """One for each repository, the best solved first, those without a verdict last."""
    found: dict[str, list[Task]] = {}
    for task in tasks:
        found.setdefault(task.repo, []).append(task)
    rows = [
        Repository(
            name=name,
            counts=Counter(task.decision for task in of),
            rate=SolveRate(
                solved=sum(task.rate.solved for task in graded(of)),
                verdicts=sum(task.rate.verdicts for task in graded(of)),
            ),
        )
        for name, of in found.items()
    ]
    return sorted(rows, key=lambda row: (-1.0 if row.rate.rate is None else row.rate.rate, row.tasks), reverse=True)


# --- two scans --------------------------------------------------------------------


class Comparison(NamedTuple):
    """Two scans of one kind, over the tasks that are in both.

    ``moves``: tasks by (what they were, what they became): classes of golden scans, bands of policy ones.
    ``changed``: tasks that moved, as (id, before, after), those with the largest change first.
    """

    before: Scan
    after: Scan
    sentence: str
    labels: tuple[str, ...]
    moves: dict[tuple[str, str], int]
    changed: list[tuple[str, str, str]]


def compare(scans: Sequence[Scan]) -> list[Comparison]:
    """The first and the last scan of each kind that is there at least twice."""
    pairs = []
    for golden in (True, False):
        of_kind = [scan for scan in scans if scan.golden == golden]
        if len(of_kind) > 1:
            pairs.append(_compare(of_kind[0], of_kind[-1], golden=golden))
    return pairs


def _compare(before: Scan, after: Scan, *, golden: bool) -> Comparison:
    both = [instance_id for instance_id in before.tasks if instance_id in after.tasks]
    if golden:
        labels = tuple(name for name in CLASSES if name in {*before.classes.values(), *after.classes.values()})
        was, now = before.classes, after.classes
    else:
        labels = ("never", "sometimes", "always", "unknown")
        was, now = ({one: rate.band for one, rate in scan.rates.items()} for scan in (before, after))
        labels = tuple(name for name in labels if name in {*was.values(), *now.values()})
    moves = Counter((was[one], now[one]) for one in both)
    if golden:
        changed = [(one, was[one], now[one]) for one in both if was[one] != now[one]]
        sentence = f"{counted(len(changed), 'task')} of the {len(both):,} in both changed class."
    else:
        sentence, changed = _compare_rates(before.rates, after.rates, both)
    return Comparison(before, after, sentence, labels, dict(moves), changed)


def _compare_rates(
    before: Mapping[str, SolveRate], after: Mapping[str, SolveRate], both: Sequence[str]
) -> tuple[str, list[tuple[str, str, str]]]:
    rated = [one for one in both if before[one].verdicts and after[one].verdicts]
    change = {one: after[one].rate - before[one].rate for one in rated}
    moved = sorted((one for one in rated if change[one]), key=lambda one: (-abs(change[one]), one))
    shown = [(one, *(f"{rate.solved}/{rate.verdicts}" for rate in (before[one], after[one]))) for one in moved]
    if not rated:
        return "No task has a verdict in both.", shown
    if not moved:
        return f"No solve rate of the {counted(len(rated), 'task')} in both changed.", shown
    mean, up = math.fsum(change.values()) / len(change), sum(value > 0 for value in change.values())
    chance = sign_test(up, len(moved) - up)
    telling = "which can be chance" if chance > 0.05 else "which chance alone hardly makes"
    return (
        f"The mean solve rate of the {counted(len(rated), 'task')} in both changed by {mean:+.3f}; {up:,} rose and "
        f"{len(moved) - up:,} fell, {telling} (sign test, p {'under 0.001' if chance < 0.001 else f'= {chance:.3f}'})."
    ), shown


def sign_test(up: int, down: int) -> float:
    """Probability of a split at least as uneven if each of the tasks that changed were as likely to rise as to fall.

    The exact two-sided sign test; it supposes nothing about how much a task changes, and few tasks prove little.

    Args:
        up: tasks that rose.
        down: tasks that fell.
    """
    total = up + down
    tail = sum(math.comb(total, count) for count in range(min(up, down) + 1))
    return min(2 * tail / 2**total, 1.0)


# --- one row of the table ---------------------------------------------------------


def marks(episodes: Sequence[Episode], kind: str) -> str:
    """Rewards of one kind in the order of the passes, a character each: 1, 0 or ``?``."""
    return "".join(mark(one) for one in sorted(episodes, key=lambda one: one.attempt) if one.kind == kind)


def outcomes(ended: Sequence[Ended]) -> list[dict[str, Any]]:
    """Episodes of one task in one scan for the table, those that ended alike as one."""
    groups: dict[tuple, list[Episode]] = {}
    for one in ended:
        episode = one.episode
        alike = (episode.kind, episode.reward, episode.exit_status, episode.reading, *one[1:])
        groups.setdefault(alike, []).append(episode)
    return [_outcome(key, episodes) for key, episodes in groups.items()]


def _outcome(key: tuple, episodes: Sequence[Episode]) -> dict[str, Any]:
    kind, reward, status, reading, failing, more_failing, lines = key
    first, turns = episodes[0], known_metric(episodes, "turns")
    why = ""
    if reading != Reading.PASS:
        why = reason(first, Expectation()) if kind != "policy" else f"{EXIT_STATUSES[status].cause}. {first.detail}"
    return {
        "kind": kind,
        "attempts": sorted(episode.attempt for episode in episodes),
        "reward": reward,
        "status": status,
        "ok": reading == Reading.PASS,
        "seconds": round(quantile([episode.seconds for episode in episodes], 0.5), 1),
        "turns": quantile(turns, 0.5) if turns else None,
        "why": why.strip(),
        "failing": list(failing),
        "more": more_failing,
        "lines": list(lines),
    }
