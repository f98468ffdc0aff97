"""What a conversion of data tells: rows by reason with an example each, as a file, on the screen and as one sentence."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import swebench_rows
import task_selection

LEFT_OUT = {
    **swebench_rows.REASONS,
    "no_input": "a NeMo Gym row without input, with settings that cannot be read, or one that is not JSON",
    "duplicate": "an earlier row has the same id, case aside",
    **task_selection.REASONS,
}
NOTES = {
    "no_gold_patch": "no patch of its own that fits into a command: fit for training, not for a golden scan",
    "id_lower_cased": "the id was made lower-case; original_instance_id keeps it",
}

_MOST_NAMED = 12


@dataclass
class Tally:
    """``rows`` counted for one reason; ``example`` is the first one's id, or its place if it has none."""

    rows: int = 0
    example: str = ""

    def add(self, example: str) -> None:
        self.rows += 1
        self.example = self.example or example


@dataclass
class Report:
    """What a conversion did.

    Attributes:
        read: rows that were looked at.
        written: rows by (subset, split); of NeMo Gym rows the agent is the subset.
        left_out: rows that were not written, by a key of ``LEFT_OUT``.
        kept: rows that were written all the same, by the reason that --keep-ungradable overrode or a key of ``NOTES``.
        removed: how many rows a field of ``swebench_rows.REMOVED_FIELDS`` was removed from, by field.
        set_aside: of how many NeMo Gym rows such a field was set aside (``nemogym_environments.SET_ASIDE``), by field.
        unknown_repositories: rows left out because the grader does not know their repository, by repository.
        not_found: ids that an option named and the input did not have, by option.
    """

    read: int = 0
    written: Counter[tuple[str, str]] = field(default_factory=Counter)
    left_out: dict[str, Tally] = field(default_factory=dict)
    kept: dict[str, Tally] = field(default_factory=dict)
    removed: Counter[str] = field(default_factory=Counter)
    set_aside: Counter[str] = field(default_factory=Counter)
    unknown_repositories: Counter[str] = field(default_factory=Counter)
    not_found: dict[str, Tally] = field(default_factory=dict)

    def leave_out(self, reason: str, *, example: str) -> None:
        self.left_out.setdefault(reason, Tally()).add(example)

    def note(self, reason: str, *, example: str) -> None:
        self.kept.setdefault(reason, Tally()).add(example)

    def miss(self, option: str, instance_id: str) -> None:
        self.not_found.setdefault(option, Tally()).add(instance_id)

    def as_json(self, **about: Any) -> dict[str, Any]:
        """The content of ``<output>.report.json``, after what the caller says of the conversion."""
        return {
            **about,
            "rows_read": self.read,
            "rows_written": self.written.total(),
            "written": [
                {"subset": subset, "split": split, "rows": count}
                for (subset, split), count in sorted(self.written.items())
            ],
            "left_out": _tallies(self.left_out, LEFT_OUT),
            "kept_all_the_same": _tallies(self.kept, LEFT_OUT | NOTES),
            "fields_removed": dict(sorted(self.removed.items())),
            "fields_set_aside": dict(sorted(self.set_aside.items())),
            "unknown_repositories": dict(sorted(self.unknown_repositories.items())),
            "ids_not_found": {
                option: {"ids": tally.rows, "example": tally.example} for option, tally in self.not_found.items()
            },
        }


class NothingLeftError(Exception):
    """Every row was left out. ``report`` says why; the message names the commonest reason."""

    def __init__(self, report: Report) -> None:
        super().__init__(_why_nothing_is_left(report))
        self.report = report


def _tallies(tallies: Mapping[str, Tally], meanings: Mapping[str, str]) -> dict[str, Any]:
    """In the order of ``meanings``, each with its own."""
    return {
        reason: {"rows": tallies[reason].rows, "example": tallies[reason].example, "meaning": meaning}
        for reason, meaning in meanings.items()
        if reason in tallies
    }


def print_counts(report: Report) -> None:
    """A line for each reason, and what else was done to rows; nothing about rows that went through as they were."""
    if report.left_out:
        print(f"left out {sum(tally.rows for tally in report.left_out.values())} of {report.read} row(s):")
        _print_tallies(report.left_out, LEFT_OUT)
    if report.kept:
        print("kept all the same:")
        _print_tallies(report.kept, LEFT_OUT | NOTES)
    for what, fields in (("removed", report.removed), ("set aside", report.set_aside)):
        if fields:
            print(f"fields {what}: " + ", ".join(f"{name} in {count}" for name, count in sorted(fields.items())))
    for option, tally in report.not_found.items():
        print(f"warning: {tally.rows} id(s) of {option} are not in the input, e.g. {tally.example}")


def _print_tallies(tallies: Mapping[str, Tally], meanings: Mapping[str, str]) -> None:
    width = max(len(reason) for reason in tallies)
    for reason, tally in _tallies(tallies, meanings).items():
        print(f"  {reason:<{width}} {tally['rows']:>6}  {tally['meaning']}; e.g. {tally['example']}")


def print_written(report: Report, output: Path, report_path: Path, *, seconds: float) -> None:
    """How much was written, of what kinds, and where."""
    kinds = ", ".join(
        f"{count} of subset {subset}, split {split}" for (subset, split), count in sorted(report.written.items())
    )
    print(f"wrote {report.written.total()} row(s) to {output} in {seconds:.1f} s: {kinds}")
    print(f"what was left out and why: {report_path}")


def _why_nothing_is_left(report: Report) -> str:
    commonest = max(LEFT_OUT, key=lambda reason: report.left_out.get(reason, Tally()).rows)
    count = report.left_out[commonest].rows
    head = f"no task is left of {report.read} row(s)"
    unknown = report.unknown_repositories
    if commonest == "no_eval_spec" and unknown.total() == count:
        names = ", ".join(sorted(unknown)[:_MOST_NAMED]) + (" and others" if len(unknown) > _MOST_NAMED else "")
        return (
            f"{head}: {swebench_rows.grader()}, with which the agent grades, knows none of their repositories ({names}). "
            "It cannot grade SWE-Gym; it can grade SWE-bench, its Lite and its Verified"
        )
    most = "" if count == report.read else f" for {count} of them"
    return f"{head}: {LEFT_OUT[commonest]}{most} ({commonest}, e.g. {report.left_out[commonest].example})"
