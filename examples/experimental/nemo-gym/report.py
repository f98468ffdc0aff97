#!/usr/bin/env python3
"""A report on scans and training runs: one HTML page, and the same figures on the terminal.

Of scans it says which tasks to drop, which to scan again, and on which of the rest a policy learns something; of a run,
what became of rewards, groups and episodes step by step.

- A golden scan tells which tasks are sound, a policy scan what a model solves. Given together, and of the same rows,
  they make one answer: the last golden and the last policy scan decide, and of two of a kind the page also tells how
  they differ.
- A results file may still be written to: what is whole in it is reported, and nothing in it is changed.
- A run is the folder that was given to --dump-details, or the log of a rollout (report_training.py says what is read).
- The page holds all that it needs; whoever opens it asks nobody for anything. Written in one step, and of the same
  input always the same bytes.

The page needs jinja2 and matplotlib; without --output only the terminal is told, and neither is needed.

Exit status: 0 the report is made, 2 an input or the set-up is wrong, 130 interrupted.

  python report.py golden.jsonl policy.jsonl -o report.html
  python report.py before.jsonl after.jsonl outputs/r1/dump_details -o report.html
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from file_writer import replacing
from report_findings import (
    DECISIONS,
    DEFAULT_BAND,
    Task,
    compare,
    figures,
    judge,
    notes,
    repositories,
    status_counts,
    verdict,
)
from report_scan import Scan, check_same_tasks, read_scan
from report_training import FOLDERS, Run, read_run, run_figures, run_notes, run_verdict
from row_reader import DataError
from scan_report import interval
from task_selection import Band, parse_band

EXIT_OK, EXIT_SET_UP, EXIT_INTERRUPTED = 0, 2, 130

_MOST_SCANS = 8  # colours that can be told apart
_MOST_REPOSITORIES = 15

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    inputs: Annotated[
        list[Path], typer.Argument(help="Results of scans (.jsonl), folders of --dump-details, logs of rollouts.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The page, e.g. report.html.")] = None,
    band: Annotated[
        str, typer.Option("--solve-rate", help="Solve rates worth training on, <lowest>:<highest>.")
    ] = f"{DEFAULT_BAND.lowest:g}:{DEFAULT_BAND.highest:g}",
) -> None:
    """Tell which tasks to drop and whether a policy learns something on the rest."""
    try:
        execute(inputs, output, parse_band(band))
        status = EXIT_OK
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        status = EXIT_SET_UP
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    raise typer.Exit(status)


def execute(inputs: Sequence[Path], output: Path | None, band: Band) -> None:
    """Read the inputs, write the page, tell the terminal.

    Raises:
        DataError: an input, the output or the set-up is not what it has to be, and nothing is written; or the terminal
            cannot be told, and the page is written.
    """
    _check_output(output, inputs)
    names = _names(inputs)
    scans = [read_scan(path, name=name) for path, name in zip(inputs, names, strict=True) if _is_scan(path)]
    runs = [read_run(path) for path in inputs if not _is_scan(path)]
    if len(scans) > _MOST_SCANS:
        raise DataError(f"expected at most {_MOST_SCANS} scans, found {len(scans)}; make two reports")
    check_same_tasks(scans)
    tasks = judge(scans, band)
    no_page = None
    if output:
        try:
            page = _page(scans, tasks, runs, band)
            with replacing(output) as file:
                file.write(page)
        except DataError as error:
            no_page = error  # said below the summary, which can be told all the same
    with _printing():
        print_summary(scans, tasks, runs)
        if output and no_page is None:
            print(f"\nreport: {output}")
    if no_page is not None:
        raise no_page


def _is_scan(path: Path) -> bool:
    """Whether a file is a scan's results: its first character that is no space opens a JSON object."""
    if os.path.isdir(path):
        return False
    if os.path.exists(path) and not os.path.isfile(path):
        raise DataError(
            f"expected {path} to be a file or a folder, found neither; what a pipe brings has to be in a file first"
        )
    try:
        with open(path, "rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError as error:
        raise DataError(f"expected to read {path}, found: {error.strerror}") from None
    return start[:1] in (b"{", b"") or path.suffix == ".jsonl"


def _names(paths: Sequence[Path]) -> list[str]:
    """File names, or whole paths where two files have one name."""
    names = [path.name for path in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]


def _check_output(output: Path | None, inputs: Sequence[Path]) -> None:
    read = {os.path.realpath(path) for path in inputs}
    if len(read) < len(inputs):
        raise DataError("expected every input once, found one twice")
    if output is None:
        return
    written = Path(os.path.realpath(output))
    if str(written) in read:
        raise DataError(f"expected --output to be another file than the inputs, found {output} for both")
    for path in inputs:
        if any(written.is_relative_to(os.path.realpath(path / folder)) for folder in FOLDERS):
            raise DataError(f"expected --output to be outside what is read of {path}, found {output}")
    if os.path.exists(output) and not os.path.isfile(output):
        raise DataError(f"expected --output to be a file, found {output}, which is none")


def _page(scans: Sequence[Scan], tasks: Sequence[Task], runs: Sequence[Run], band: Band) -> str:
    try:
        from report_page import render
    except ImportError as error:
        raise DataError(
            f"expected jinja2 and matplotlib for the page, found no {error.name}: pip install 'jinja2>=3.1' "
            "'matplotlib>=3.9', or leave --output out"
        ) from None
    return render(scans, tasks, runs, band)


# --- terminal ---------------------------------------------------------------------


@contextmanager
def _printing() -> Iterator[None]:
    """For what prints: a reader that has gone, such as head, ends it and is no error.

    Raises:
        DataError: it cannot be printed.
    """
    try:
        yield
        print(end="", flush=True)
    except OSError as error:
        # What is still buffered would fail again when the interpreter ends.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise DataError(f"expected to print the summary, found: {error.strerror}") from None


def print_summary(scans: Sequence[Scan], tasks: Sequence[Task], runs: Sequence[Run]) -> None:
    """The figures of the page, without its table of tasks."""
    if scans:
        print(f"{verdict(tasks, scans)}\n")
        for key, decision in DECISIONS.items():
            if count := sum(task.decision == key for task in tasks):
                print(f"{decision.title:<9} {count:>7,}  {decision.meaning}")
        _print_figures([(scan.name, figures(scan)) for scan in scans])
        _print_statuses([(scan.name, status_counts(scan)) for scan in scans])
        _print_repositories(tasks)
        for pair in compare(scans):
            print(f"\n{pair.before.name} and {pair.after.name}: {pair.sentence}")
        for note in notes(scans, tasks):
            print(f"note: {note}")
    for run in runs:
        print(f"{chr(10) if scans else ''}{run.name}: {run_verdict(run)}")
        _print_figures([(run.name, run_figures(run))])
        _print_statuses([(run.name, run.statuses)])
        for note in run_notes(run):
            print(f"note: {note}")


def _print_figures(columns: Sequence[tuple[str, dict[str, str]]]) -> None:
    labels = dict.fromkeys(label for _, of in columns for label in of)
    _print_table(
        ["", *(name for name, _ in columns)], [[one, *(of.get(one, "") for _, of in columns)] for one in labels]
    )


def _print_statuses(columns: Sequence[tuple[str, dict[str, int]]]) -> None:
    names = dict.fromkeys(name for _, of in columns for name in of)
    if names:
        rows = [[name, *(f"{of.get(name, 0):,}" for _, of in columns)] for name in names]
        _print_table(["exit status", *(name for name, _ in columns)], rows)


def _print_repositories(tasks: Sequence[Task]) -> None:
    rows = []
    for row in repositories(tasks):
        parts = ", ".join(f"{row.counts[key]} {DECISIONS[key].title.lower()}" for key in DECISIONS if row.counts[key])
        rate = "not tried" if row.rate.rate is None else f"{row.rate.rate:.2f} ({interval(row.rate)})"
        rows.append([row.name, str(row.tasks), rate, parts])
    more = [[f"and {len(rows) - _MOST_REPOSITORIES} more", "", "", ""]] if len(rows) > _MOST_REPOSITORIES else []
    _print_table(["repository", "tasks", "solve rate (95 %)", "what to do"], rows[:_MOST_REPOSITORIES] + more)


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[number]) for row in [head, *rows]) for number in range(len(head))]
    print()
    for row in [head, *rows]:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    app()
