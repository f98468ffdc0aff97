"""The report as one HTML page that needs nothing but itself: no request, no font, no file beside it.

Needs jinja2 and matplotlib. What a server sent reaches the page in two ways only: through the template, which escapes
it, and as JSON in which ``<``, ``>`` and ``&`` are written as escapes, which the page's script shows as text. A content
security policy lets no script run but the page's own, and lets nothing be fetched.
"""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import report_charts
from markupsafe import Markup
from nemogym_contract import EXIT_STATUSES
from report_findings import (
    CLASS_MEANINGS,
    DECISIONS,
    Comparison,
    Repository,
    Task,
    compare,
    deciding,
    figures,
    graded,
    marks,
    notes,
    outcomes,
    repositories,
    status_counts,
    verdict,
)
from report_scan import Ended, Scan
from report_text import counted, listed, percent
from report_training import Run, is_verdict, run_figures, run_notes, run_verdict
from scan_statistics import CLASSES, quantile
from task_selection import Band

_TEMPLATE = Path(__file__).parent / "report_template"
_MOST_CHANGED = 8
_MOST_SERIES = len(report_charts.SERIES)


def render(scans: Sequence[Scan], tasks: Sequence[Task], runs: Sequence[Run], band: Band) -> str:
    """The page.

    Args:
        scans: with their tasks in ``tasks``; none for a report of runs alone.
        tasks: each with what to do with it.
        runs: training runs; none for a report of scans alone.
        band: solve rates that are worth training on.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (_TEMPLATE / "page.js").read_text()
    sentence = verdict(tasks, scans) if scans else run_verdict(runs[0])
    return environment.get_template("page.html.jinja").render(
        title=f"NeMo Gym report: {', '.join(one.name for one in [*scans, *runs])}",
        verdict=sentence,
        notes=notes(scans, tasks) if scans else [],
        sources=[one.name for one in [*scans, *runs]],
        style=Markup((_TEMPLATE / "page.css").read_text()),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        runs=[_run_view(run) for run in runs],
        **(_scan_view(scans, tasks, band) if scans else _NO_SCANS),
    )


_NO_SCANS: dict[str, Any] = {"decisions": [], "totals": [], "comparisons": []}


def _scan_view(scans: Sequence[Scan], tasks: Sequence[Task], band: Band) -> dict[str, Any]:
    coloured = list(zip(scans, report_charts.SERIES, strict=False))
    golden = [(scan, colour) for scan, colour in coloured if scan.golden]
    policies = [(scan, colour) for scan, colour in coloured if not scan.golden]
    rates = {colour: _known_rates(scan, tasks) for scan, colour in policies}
    passes = max((scan.passes for scan, _ in policies), default=1)
    drawn = any(rates.values())
    return {
        "decisions": _decisions(tasks, scans),
        "steps": _steps(tasks, scans),
        "totals": [_Columns([(scan.name, figures(scan)) for scan, _ in kind]) for kind in (golden, policies) if kind],
        "scan_key": _key(coloured),
        "policy_key": _key(policies),
        "golden_key": _key(golden),
        "classes": _class_bars(golden),
        "statuses": _status_bars(coloured),
        "repositories": [_repository_view(row) for row in repositories(tasks)],
        "rate_chart": Markup(report_charts.solve_rates(rates, band, passes=passes)) if drawn else None,
        "rate_text": _rate_text(policies[-1][0], tasks) if drawn else "",
        "duration_chart": Markup(
            report_charts.durations({colour: [one.seconds for one in scan.episodes] for scan, colour in coloured})
        ),
        "comparisons": [_comparison_view(pair) for pair in compare(scans)],
        "glossary": _glossary(band),
        "data": Markup(_script_safe(_table(scans, tasks))),
    }


def _key(coloured: Sequence[tuple[Scan, str]]) -> list[dict[str, str]]:
    """What the colours of a chart stand for."""
    return [{"name": scan.name, "colour": colour} for scan, colour in coloured]


def _known_rates(scan: Scan, tasks: Sequence[Task]) -> list[float]:
    """Solve rates of the tasks that are left when those to drop and to scan again are out."""
    rates = [scan.rates[task.instance_id].rate for task in graded(tasks) if task.instance_id in scan.rates]
    return [rate for rate in rates if rate is not None]


class _Columns(list):
    """Figures of several scans or runs side by side; ``labels`` are those of all, in the order of their first use."""

    def __init__(self, columns: Sequence[tuple[str, Mapping[str, str]]]) -> None:
        super().__init__({"name": name, "figures": of} for name, of in columns)
        self.labels = list(dict.fromkeys(label for _, of in columns for label in of))


# --- decisions --------------------------------------------------------------------


def _decisions(tasks: Sequence[Task], scans: Sequence[Scan]) -> list[dict[str, Any]]:
    views = []
    for key, decision in DECISIONS.items():
        chosen = [task for task in tasks if task.decision == key]
        # A class tells more than the decision only where it made it.
        classes = Counter(task.task_class for task in chosen if key in ("drop", "rescan") and task.task_class)
        views.append(
            {
                "key": key,
                "title": decision.title,
                "meaning": decision.meaning,
                "count": len(chosen),
                "share": percent(len(chosen), len(tasks)),
                "parts": listed(f"{count} {name}" for name, count in classes.most_common()) if classes else "",
            }
        )
    return views


def _steps(tasks: Sequence[Task], scans: Sequence[Scan]) -> list[tuple[str, str]]:
    """What to do with what the page shows, each with a command."""
    counts = Counter(task.decision for task in tasks)
    _, policy = deciding(scans)
    once = policy is not None and policy.passes == 1
    steps = []
    if counts["rescan"]:
        steps.append(
            (
                f"Mend what failed the {counted(counts['rescan'], 'task')} to rescan (see “ended as” below), then repeat "
                "the command of that scan with one more option:",
                "--retry-inconclusive",
            )
        )
    if once or (policy is None and counts["sound"]):
        steps.append(
            (
                f"Let the model that is to be trained try {'each task' if once else 'the sound tasks'} as often as a group "
                "will have samples:",
                "python eval_nemogym_via_api.py --policy-base-url http://<engine>:8000/v1 --input <rows> "
                "--passes 8 --temperature 1.0 --output policy.jsonl",
            )
        )
    if counts["train"] or (policy is None and counts["sound"]):
        keep, what = ("train", "what is worth training on") if counts["train"] else ("sound", "only the sound tasks")
        steps.append(
            (
                f"Save {keep}.txt above and keep {what} of the rows:",
                f"python download_and_process_data.py --input <rows> --only {keep}.txt --output {keep}.jsonl",
            )
        )
    elif counts["drop"]:
        steps.append(
            (
                "Save drop.txt above and leave these tasks out:",
                "python download_and_process_data.py --input <rows> --exclude drop.txt --output kept.jsonl",
            )
        )
    return steps


def _glossary(band: Band) -> list[tuple[str, str]]:
    return [
        *((decision.title, decision.meaning) for decision in DECISIONS.values()),
        *CLASS_MEANINGS.items(),
        ("golden scan", "Every task runs with its own patch, which must score 1.0, and with an empty one: 0.0."),
        (
            "policy scan",
            "A model works on every task, several times; the share of episodes that score 1.0 is its solve rate.",
        ),
        ("verdict", "A reward that the policy can have caused. Without one an episode counts in no rate."),
        ("95 % interval", "Wilson's: where the true rate may lie. Few passes tell it roughly."),
        ("worth training on", f"Solve rates from {band.lowest:g} to {band.highest:g}."),
    ]


# --- bars and tables --------------------------------------------------------------


def _class_bars(golden: Sequence[tuple[Scan, str]]) -> list[dict[str, Any]]:
    counts = [Counter(scan.classes.values()) for scan, _ in golden]
    own_colours = {"supported": "sound", "flaky": "drop", "broken": "drop"}
    rows = [(name, CLASS_MEANINGS[name], [of[name] for of in counts]) for name in CLASSES]
    views = _bars(
        [row for row in rows if any(row[2]) or row[0] != "unfinished"] if golden else [],
        [colour for _, colour in golden],
    )
    for view in views if len(golden) == 1 else []:
        view["colour"] = own_colours.get(view["name"], "rescan")
    return views


def _status_bars(coloured: Sequence[tuple[Scan, str]]) -> list[dict[str, Any]]:
    counts, colours = [status_counts(scan) for scan, _ in coloured], [colour for _, colour in coloured]
    names = sorted(
        {name for of in counts for name in of}, key=lambda name: (-sum(of.get(name, 0) for of in counts), name)
    )
    views = _bars([(name, EXIT_STATUSES[name].cause, [of.get(name, 0) for of in counts]) for name in names], colours)
    for view in views:
        view |= {"filter": "status", "tag": "" if is_verdict(view["name"]) else "no verdict"}
    return views


def _bars(rows: Sequence[tuple[str, str, Sequence[int]]], colours: Sequence[str]) -> list[dict[str, Any]]:
    """Bars as long as their share of their scan's own sum, so that scans of unlike size can be compared."""
    sums = [sum(values) or 1 for values in zip(*(values for _, _, values in rows), strict=True)]
    return [
        {
            "name": name,
            "text": text,
            "tag": "",
            "filter": None,
            "colour": None,
            "amounts": [
                {
                    "share": round(value / of, 4),
                    "text": f"{value:,} · {percent(value, of)}",
                    "colour": colour,
                }
                for value, of, colour in zip(values, sums, colours, strict=True)
            ],
        }
        for name, text, values in rows
    ]


def _repository_view(row: Repository) -> dict[str, Any]:
    low, high = (round(100 * bound, 1) for bound in row.rate.interval)
    return {
        "name": row.name,
        "tasks": row.tasks,
        "parts": [
            {"key": key, "count": row.counts[key], "text": f"{row.counts[key]} {DECISIONS[key].title.lower()}"}
            for key in DECISIONS
            if row.counts[key]
        ],
        "rate": "" if row.rate.rate is None else f"{100 * row.rate.rate:.0f} % of {row.rate.verdicts:,}",
        "at": 100 * (row.rate.rate or 0),
        "low": low,
        "high": high,
    }


def _rate_text(policy: Scan, tasks: Sequence[Task]) -> str:
    left = graded(tasks)
    solved = Counter(task.rate.band for task in left)
    return (
        f"{policy.name}: of the {counted(len(left), 'task')} left, {solved['never']:,} never, {solved['sometimes']:,} "
        f"sometimes and {solved['always']:,} always solved in {counted(policy.passes, 'pass', 'passes')}. "
        "Only groups with unequal rewards move the policy."
    )


def _comparison_view(pair: Comparison) -> dict[str, Any]:
    most = max(pair.moves.values(), default=1)
    rank = {label: number for number, label in enumerate(pair.labels)}
    better = -1 if pair.after.golden else 1  # classes are listed from the best on, bands from the worst

    def cell(was: str, now: str) -> dict[str, Any]:
        count, way = pair.moves.get((was, now), 0), (rank[now] - rank[was]) * better
        kind = "same" if not way or "unknown" in (was, now) else "up" if way > 0 else "down"
        return {"count": count, "kind": kind, "heat": round(10 + 30 * count / most) if count else 0}

    return {
        "before": pair.before.name,
        "after": pair.after.name,
        "sentence": pair.sentence,
        "labels": pair.labels,
        "rows": [{"label": was, "cells": [cell(was, now) for now in pair.labels]} for was in pair.labels],
        "changed": pair.changed[:_MOST_CHANGED],
        "more": max(len(pair.changed) - _MOST_CHANGED, 0),
    }


# --- runs -------------------------------------------------------------------------


def _run_view(run: Run) -> dict[str, Any]:
    charts = []
    rewards = {"kept samples": run.rewards, **run.evals}
    shown = [(name, points) for name, points in rewards.items() if points][:_MOST_SERIES]
    if shown:
        charts.append(_over_steps("Reward", "mean reward", shown, report_charts.lines))
    groups = [("kept", {number: step.kept or 0.0 for number, step in run.steps.items()})]
    groups += [(f"dropped: {name}", _series(run, "dropped", name)) for name in run.dropped]
    if any(value for _, points in groups for value in points.values()):
        charts.append(_over_steps("Groups", "groups", _few(groups), report_charts.stacked))
    statuses = [(name, _series(run, "statuses", name)) for name in run.statuses]
    if statuses:
        charts.append(_over_steps("Exit statuses", "episodes", _few(statuses), report_charts.stacked))
    return {
        "name": run.name,
        "verdict": run_verdict(run),
        "notes": run_notes(run),
        "charts": charts,
        "columns": _Columns([(run.name, run_figures(run))]),
    }


def _over_steps(title: str, y: str, series: Sequence[tuple[str, Mapping[int, float]]], draw: Any) -> dict[str, Any]:
    key = [{"name": name, "colour": colour} for (name, _), colour in zip(series, report_charts.SERIES, strict=False)]
    text = series[0][0] if len(series) == 1 else ""
    return {"title": title, "svg": Markup(draw([of for _, of in series], y=y)), "key": key, "text": text}


def _series(run: Run, what: str, name: str) -> dict[int, float]:
    return {number: getattr(step, what).get(name, 0.0) for number, step in run.steps.items()}


def _few(series: Sequence[tuple[str, Mapping[int, float]]]) -> list[tuple[str, Mapping[int, float]]]:
    """As many as there are colours; the rest together as one."""
    if len(series) <= _MOST_SERIES:
        return list(series)
    first, rest = list(series[: _MOST_SERIES - 1]), series[_MOST_SERIES - 1 :]
    together: Counter[int] = Counter()
    for _, points in rest:
        together.update(points)
    return [*first, (f"{len(rest)} others", dict(together))]


# --- the table --------------------------------------------------------------------


def _table(scans: Sequence[Scan], tasks: Sequence[Task]) -> dict[str, Any]:
    """What the page's script draws rows from."""
    by_scan = [_ended_by_task(scan) for scan in scans]
    rows = []
    for task in tasks:
        ended = [of.get(task.instance_id, []) for of in by_scan]
        every = [one.episode for of in ended for one in of]
        statuses = Counter(episode.exit_status for episode in every)
        rows.append(
            {
                "id": task.instance_id,
                "repo": task.repo,
                "decision": task.decision,
                "seconds": round(quantile([episode.seconds for episode in every], 0.5), 1),
                "statuses": dict(statuses.most_common()),
                "scans": [_cell(scan, task.instance_id, of) for scan, of in zip(scans, ended, strict=True)],
            }
        )
    return {
        "scans": [{"name": scan.name, "golden": scan.golden} for scan in scans],
        "decisions": {key: decision.title for key, decision in DECISIONS.items()},
        "rows": rows,
    }


def _ended_by_task(scan: Scan) -> dict[str, list[Ended]]:
    found: dict[str, list[Ended]] = {}
    for one in scan.ended:
        found.setdefault(one.episode.instance_id, []).append(one)
    return found


def _cell(scan: Scan, instance_id: str, ended: Sequence[Ended]) -> dict[str, Any] | None:
    if not ended:
        return None
    episodes = scan.tasks[instance_id]
    if scan.golden:
        shown = {kind: marks(episodes, kind) for kind in ("gold", "null")} | {"class": scan.classes[instance_id]}
    else:
        rate = scan.rates[instance_id]
        shown = {"solved": [rate.solved, rate.verdicts, *(round(bound, 3) for bound in rate.interval)]}
    return shown | {"outcomes": outcomes(ended)}


def _script_safe(value: Any) -> str:
    """JSON that ends no script element and starts no markup, wherever it stands in a page."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
