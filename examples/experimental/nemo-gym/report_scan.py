"""A scan's results file, read to be reported: its episodes, and of those that went wrong what failed.

    read_scan(path)            one results file of eval_nemogym_via_api.py, also while it is being written
    check_same_tasks(scans)    whether they can be put together

Classes and solve rates are those of ``scan_statistics``. Text of a server is made printable where it is read.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from report_text import last_lines, one_line
from row_reader import DataError, json_lines
from scan_report import classes_of, tasks_of
from scan_results import read_record
from scan_statistics import Episode, Reading, SolveRate, solve_rate

_MOST_FAILING = 10
_ERROR_LINES = 8


class Ended(NamedTuple):
    """An episode, and of one that is not as it should be what its server's report shows.

    ``failing``: tests that failed, the first few. ``more_failing``: how many others did. ``lines``: end of the error.
    """

    episode: Episode
    failing: tuple[str, ...] = ()
    more_failing: int = 0
    lines: tuple[str, ...] = ()


@dataclass
class Scan:
    """One results file.

    Attributes:
        name: what it is called on the page.
        ended: one for each (instance_id, kind, attempt), in the order of the file.
        cut_off: the file does not end with a whole line: a scan is writing it, or was killed.
    """

    name: str
    ended: list[Ended] = field(default_factory=list)
    cut_off: bool = False

    @cached_property
    def episodes(self) -> list[Episode]:
        return [one.episode for one in self.ended]

    @cached_property
    def tasks(self) -> dict[str, list[Episode]]:
        """Episodes by task, tasks in the order of the file."""
        return tasks_of(self.episodes)

    @property
    def golden(self) -> bool:
        return self.episodes[0].kind != "policy"

    @property
    def policy(self) -> str | None:
        return self.episodes[0].policy

    @property
    def temperature(self) -> float:
        """Of the policy; the agent sends 0.0 when none was asked for."""
        value = self.episodes[0].sampling.get("temperature")
        return float(value) if _is_finite(value) else 0.0

    @cached_property
    def passes(self) -> int:
        """How often a task was to run, as far as the file shows."""
        return max((one.attempt for one in self.episodes if one.kind != "null"), default=1)

    @cached_property
    def classes(self) -> dict[str, str]:
        """Of a golden scan: the class of each task."""
        null_control = any(one.kind == "null" for one in self.episodes)
        return classes_of(self.tasks, self.episodes, passes=self.passes, null_control=null_control)

    @cached_property
    def rates(self) -> dict[str, SolveRate]:
        """Of a policy scan: the solve rate of each task."""
        return {instance_id: solve_rate(episodes) for instance_id, episodes in self.tasks.items()}

    @property
    def missing(self) -> int:
        """Episodes that the tasks of the file still lack, up to the number of passes."""
        main = Counter(one.instance_id for one in self.episodes if one.kind != "null")
        return sum(self.passes - main[instance_id] for instance_id in self.tasks)


# --- reading ----------------------------------------------------------------------


def read_scan(path: Path, *, name: str | None = None) -> Scan:
    """The scan of a results file; the file is only read, and a scan that is writing it goes on.

    A last line that is cut off is left out. Of two lines for one episode the later counts.

    Args:
        path: results of ``eval_nemogym_via_api.py``.
        name: what to call it; None takes the file's name.

    Raises:
        DataError: it cannot be read, is empty, or holds something else than one scan.
    """
    found: dict[tuple[str, str, int], Ended] = {}
    for place, record in json_lines(path, skip_cut_off_end=True):
        try:
            one = _read_ended(record)
        except ValueError as error:
            raise DataError(
                f"{place}: {one_line(error)}; name results of eval_nemogym_via_api.py, "
                "or run the scan again with this version"
            ) from None
        found.pop(one.episode.key, None)
        found[one.episode.key] = one
    scan = Scan(name=one_line(name or path.name, limit=60), ended=list(found.values()), cut_off=_is_cut_off(path))
    if not scan.ended:
        raise DataError(
            f"expected at least one ended episode in {path}, found none; wait for the scan's first, or run it"
        )
    _check_is_one_scan(scan, path)
    return scan


def _read_ended(record: Any) -> Ended:
    episode = read_record(record)
    shown = {name: one_line(getattr(episode, name), limit=200) for name in ("instance_id", "task")}
    for name in ("repo", "policy"):
        shown[name] = None if getattr(episode, name) is None else one_line(getattr(episode, name), limit=200)
    if not _is_finite(episode.seconds) or not (episode.reward is None or _is_finite(episode.reward)):
        found = f"{one_line(episode.seconds, limit=40)} seconds, reward {one_line(episode.reward, limit=40)}"
        raise ValueError(f"expected finite numbers, found {found}")
    metrics = {name: value for name, value in episode.agent_metrics.items() if _is_finite(value)}
    episode = replace(episode, **shown, detail=one_line(episode.detail), agent_metrics=metrics)
    if episode.reading == Reading.PASS:
        return Ended(episode)
    report = record.get("eval_report")
    failing = failing_tests(report)
    return Ended(
        episode,
        failing=tuple(failing[:_MOST_FAILING]),
        more_failing=max(len(failing) - _MOST_FAILING, 0),
        lines=tuple(error_lines(report)),
    )


def _is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold; an integer of JSON may have thousands of digits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def failing_tests(eval_report: Any) -> list[str]:
    """The tests that a server's report lists as failed, FAIL_TO_PASS first; anything unreadable lists none.

    The report is swebench's (harness/grading.py), below ``eval_report``, by instance id.
    """
    reports = eval_report.get("eval_report") if isinstance(eval_report, Mapping) else None
    names: list[str] = []
    for report in reports.values() if isinstance(reports, Mapping) else ():
        suites = report.get("tests_status") if isinstance(report, Mapping) else None
        for suite in suites.values() if isinstance(suites, Mapping) else ():
            failed = suite.get("failure") if isinstance(suite, Mapping) else None
            names += [one_line(name, limit=160) for name in failed] if isinstance(failed, list) else []
    return names


def error_lines(eval_report: Any) -> list[str]:
    """The last lines of the traceback in a server's report, else of its error; none when it has neither."""
    for name in ("traceback", "error"):
        text = eval_report.get(name) if isinstance(eval_report, Mapping) else None
        if isinstance(text, str) and text.strip():
            return last_lines(text, count=_ERROR_LINES)
    return []


def _is_cut_off(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(0, 2)
        size = file.tell()
        file.seek(max(size - 1, 0))
        return size > 0 and file.read(1) != b"\n"


def _check_is_one_scan(scan: Scan, path: Path) -> None:
    first, rows = scan.episodes[0], {}
    for one in scan.episodes:
        for what, ours, theirs in (
            ("a golden or a policy scan", first.kind == "policy", one.kind == "policy"),
            ("one policy", first.policy, one.policy),
            ("one policy's sampling settings", first.sampling, one.sampling),
            (f"one row of {one.instance_id}", rows.setdefault(one.instance_id, one.task), one.task),
        ):
            if ours != theirs:
                raise DataError(
                    f"expected {path} to hold {what}, found two kinds of results in it ({one.instance_id}); "
                    "give each scan a file of its own"
                )


def check_same_tasks(scans: Sequence[Scan]) -> None:
    """Refuse scans that cannot be put together: other rows under the same ids, or no task in common.

    Raises:
        DataError: naming two of them.
    """
    seen: dict[str, tuple[str, str]] = {}
    for scan in scans:
        if seen and not seen.keys() & scan.tasks.keys():
            raise DataError(
                f"expected scans of the same tasks, found none of {scan.name}'s {len(scan.tasks)} in {scans[0].name}; "
                "make a report of each"
            )
        for instance_id, (first, *_) in scan.tasks.items():
            row, where = seen.setdefault(instance_id, (first.task, scan.name))
            if row != first.task:
                raise DataError(
                    f"expected scans of the same rows, found two of {instance_id}: {row} in {where}, {first.task} in "
                    f"{scan.name}; scan the same --input, or make a report of each"
                )
