#!/usr/bin/env python3
"""SWE-bench-family data, or that of any NeMo Gym environment -> Miles prompt data that NeMo Gym can run and grade.

1. One line per task: {"prompt": problem_statement, "metadata": {the whole instance, "image_name", "subset", "split"}}.
2. Tasks that cannot be sent or graded are left out, each counted under a reason (``swebench_rows.REASONS``); so are those
   whose own patch is publicly known to fail or flake, and those that --only, --exclude or --solve-rate leave out.
3. Values become JSON, ids lower-case, test lists lists. Fields that would look like a verdict on the policy, or that the
   connector or Miles writes itself, are removed.
4. A NeMo Gym row ({"responses_create_params", "agent_ref", ...}) becomes {"prompt": the text of its input, "metadata": {the
   whole row}}. Its fields that connector or Miles would take for their own are set aside in metadata, and sent all the same.
5. Rows are streamed. The output and <output>.report.json, what was left out and why, appear at the end, each in one step;
   same input and options, same bytes.

--input is a dataset on the Hugging Face hub, a folder with one data file per split, or a file: JSONL or a JSON array, also
packed with gzip, or Parquet; of SWE-bench instances, NeMo Gym rows or Miles prompt rows. A JSON file needs no network, and not the
package datasets.

Exit status: 0 written, 1 no task was left, 2 the options or the input are wrong, 130 interrupted; only with 0 is the
output touched.

  python download_and_process_data.py --output swe_verified.jsonl
  python download_and_process_data.py --input rows.jsonl --output prompts.jsonl --only supported.txt
  python download_and_process_data.py --input environments/workplace_assistant/data/train.jsonl --output office.jsonl
  python download_and_process_data.py --input prompts.jsonl --output train.jsonl --solve-rate 0.05:0.95 --from policy.jsonl
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import swebench_rows
import typer
from data_report import NothingLeftError, Report, print_counts, print_written
from file_writer import replacing
from nemogym_environments import (
    SET_ASIDE,
    agent_name_of,
    build_environment_request,
    is_environment_row,
    prompt_of,
    row_metadata,
    task_of,
)
from row_reader import DEFAULT_SPLIT, DataError, open_rows
from swebench_rows import NotJsonError, normalised_task, prompt_row, ungradable_reason
from task_selection import Selection, known_flaky_ids, parse_band, read_ids, read_solve_rates
from tqdm import tqdm

EXIT_NOTHING_LEFT, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143

DEFAULT_INPUT = "SWE-bench/SWE-bench_Verified"
DEFAULT_SUBSET = "verified"

_ROWS_PER_LINE = 1000
_LONGEST_SHOWN = 200

# --- orchestration --------------------------------------------------------------


def main(
    output: Annotated[Path, typer.Option(help="Miles prompt data, .jsonl; its folder is made.")],
    source: Annotated[
        str, typer.Option("--input", help="Dataset on the Hugging Face hub, folder of split files, or file.")
    ] = DEFAULT_INPUT,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a dataset on the hub.")] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Split of a dataset to read, or what the rows of a file are to be called.",
            show_default=f"{DEFAULT_SPLIT}; rows of a file keep their own",
        ),
    ] = None,
    subset: Annotated[
        str | None,
        typer.Option(
            help="Picks the image of a row that names none: 'verified' is the official docker.io/swebench/..., any other "
            "name docker.io/xingyaoww/...",
            show_default=f"{DEFAULT_SUBSET}; rows keep their own",
        ),
    ] = None,
    only: Annotated[Path | None, typer.Option(help="Keep only the tasks of this file, an id a line.")] = None,
    exclude: Annotated[Path | None, typer.Option(help="Leave out the tasks of this file, an id a line.")] = None,
    solve_rate: Annotated[
        str | None, typer.Option(help="Keep tasks solved at this rate, e.g. 0.05:0.95; needs --from.")
    ] = None,
    scan: Annotated[
        Path | None, typer.Option("--from", help="Results of a policy scan, which tell the solve rates.")
    ] = None,
    no_known_flaky: Annotated[
        bool, typer.Option("--no-known-flaky", help="Keep tasks whose own patch is known to fail or flake.")
    ] = False,
    keep_ungradable: Annotated[
        bool, typer.Option("--keep-ungradable", help="Keep tasks that the grader cannot grade.")
    ] = False,
    agent: Annotated[
        str | None, typer.Option(help="Agent server of NeMo Gym rows that name none in agent_ref.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Stop after N tasks are kept.")] = None,
) -> None:
    """Convert SWE-bench-family or NeMo Gym data to Miles prompt data for NeMo Gym."""
    # What datasets and the hub's client log about a failure, their exception says as well.
    logging.disable(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    start = time.monotonic()
    try:
        _check_apart(output, {"--only": only, "--exclude": exclude, "--from": scan})
        selection = read_selection(
            only=only, exclude=exclude, solve_rate=solve_rate, scan=scan, keep_known_flaky=no_known_flaky
        )
        report = convert(
            source,
            output,
            revision=revision,
            split=split,
            subset=subset,
            limit=limit,
            selection=selection,
            keep_ungradable=keep_ungradable,
            agent=agent,
        )
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except NothingLeftError as error:
        print_counts(error.report)
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_NOTHING_LEFT) from None
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print_counts(report)
    print_written(report, output, report_path(output), seconds=time.monotonic() - start)


def convert(
    source: str,
    output: Path,
    *,
    revision: str | None = None,
    split: str | None = None,
    subset: str | None = None,
    limit: int | None = None,
    selection: Selection | None = None,
    keep_ungradable: bool = False,
    agent: str | None = None,
) -> Report:
    """Convert ``source`` to Miles prompt data at ``output``, one row at a time.

    Args:
        source: dataset id on the hub, folder with one data file per split, or file.
        output: the ``.jsonl`` file to write; it and its report are replaced in one step each, or not touched at all.
        revision: branch, tag or commit of a dataset on the hub.
        split: split of a dataset to read, ``test`` when None. Rows of a file get it as their name; None leaves their
            own.
        subset: image family of every row; None leaves a row its own, or makes it ``verified``.
        limit: stop after so many rows are written.
        selection: what the tasks' ids decide; None leaves out those known to flake.
        keep_ungradable: write also what can be sent and not graded.
        agent: agent server of NeMo Gym rows that name none.

    Returns:
        What was written and left out.

    Raises:
        DataError: an option or the input is wrong, or the output cannot be written.
        NothingLeftError: there are rows, and none was fit.
    """
    selection = selection or Selection(flaky=known_flaky_ids())
    _check_options(source, output, report_path(output), subset=subset, limit=limit)
    opened = open_rows(source, split=split, revision=revision)
    conversion = Conversion(
        split=opened.split or split, subset=subset, selection=selection, keep_ungradable=keep_ungradable, agent=agent
    )
    report = conversion.report
    with ExitStack() as stack:
        file = stack.enter_context(replacing(output))
        progress = stack.enter_context(closing(_Progress(total=opened.total if limit is None else None)))
        for place, row in opened.rows:
            progress.add()
            converted = conversion.convert(row, place=place)
            if converted is not None:
                file.write(json.dumps(converted, allow_nan=False) + "\n")
            if report.written.total() == limit:
                break
        else:
            conversion.count_ids_not_found()
        if not report.read:
            raise DataError(f"expected at least one row in {source}, found none")
        if not report.written:
            raise NothingLeftError(report)
        about = {"input": source, "revision": opened.revision, "grader": swebench_rows.grader(), "limit": limit}
        _write_report(report_path(output), report.as_json(**about))
    return report


def report_path(output: Path) -> Path:
    """Where the report of a conversion to ``output`` is."""
    return output.with_name(f"{output.name}.report.json")


class Conversion:
    """The way of every row of one input, and what became of them: ``report``.

    Args:
        split: name of the split for every row; None leaves a row its own.
        subset: likewise.
        selection: what the tasks' ids decide.
        keep_ungradable: keep what can be sent and not graded.
        agent: agent server of NeMo Gym rows that name none.
    """

    def __init__(
        self,
        *,
        split: str | None,
        subset: str | None,
        selection: Selection,
        keep_ungradable: bool,
        agent: str | None = None,
    ) -> None:
        self.report = Report()
        self._split = split
        self._subset = subset
        self._selection = selection
        self._keep_ungradable = keep_ungradable
        self._agent = agent
        self._kept_ids: set[str] = set()
        self._ids_not_seen = {"--only": set(selection.only or ()), "--exclude": set(selection.exclude)}

    def convert(self, row: Any, *, place: str) -> dict[str, Any] | None:
        """The prompt row, or None for a row that is left out; the report counts both.

        Raises:
            DataError: ``row`` is no object.
        """
        instance = _instance(row, place=place)
        self.report.read += 1
        if is_environment_row(instance):
            return self._convert_environment_row(instance, place=place)
        shown_id = instance.get("instance_id")
        instance_id = shown_id.lower() if isinstance(shown_id, str) else None
        for ids in self._ids_not_seen.values():
            ids.discard(instance_id)
        reason, task = self._judged(instance, instance_id)
        if reason is not None:
            self.report.leave_out(reason, example=_plain(shown_id) or place)
            if reason == "no_eval_spec" and not swebench_rows.is_known_repository(task.get("repo")):
                self.report.unknown_repositories[_shown(task.get("repo"))] += 1
            return None
        self._count_kept(task, instance)
        return prompt_row(task)

    def _convert_environment_row(self, row: Mapping[str, Any], *, place: str) -> dict[str, Any] | None:
        if self._selection.only is not None or self._selection.exclude or self._selection.solve_rates is not None:
            raise DataError(
                f"{place}: expected --only, --exclude and --solve-rate for SWE-bench tasks, found a NeMo Gym row, which has "
                "no instance_id that a scan or a list would know it by"
            )
        if self._agent and not agent_name_of(row):
            row = {**row, "agent_ref": {"type": "responses_api_agents", "name": self._agent}}
        try:
            build_environment_request(row, {})
        except ValueError:
            self.report.leave_out("no_input", example=place)
            return None
        metadata = row_metadata(row, misread=swebench_rows.REMOVED_FIELDS)
        agent = agent_name_of(row)
        self.report.written[_shown(agent) if agent else "without agent_ref", _shown(self._split_of(row))] += 1
        self.report.set_aside.update(metadata.get(SET_ASIDE, {}).keys())
        return {"prompt": prompt_of(row), "metadata": metadata}

    def count_ids_not_found(self) -> None:
        """Count the ids that an option named and no row had; for when all rows were seen."""
        for option, ids in self._ids_not_seen.items():
            for instance_id in sorted(ids):
                self.report.miss(option, instance_id)

    def _judged(self, instance: Mapping[str, Any], instance_id: str | None) -> tuple[str | None, dict[str, Any]]:
        """Why a row is left out, or None, and the task that it is."""
        reason = self._selection.unasked_reason(instance_id)
        if reason is not None:
            return reason, {}
        try:
            task = normalised_task(instance, subset=self._subset_of(instance), split=self._split_of(instance))
        except NotJsonError:
            return "not_json", {}
        reason = ungradable_reason(task)
        if self._keep_ungradable and reason not in swebench_rows.UNSENDABLE:
            reason = None
        if reason is None:
            reason = self._selection.unfit_reason(instance_id)
        if reason is None and instance_id in self._kept_ids:
            reason = "duplicate"
        return reason, task

    def _subset_of(self, instance: Mapping[str, Any]) -> Any:
        return self._subset or instance.get("subset") or DEFAULT_SUBSET

    def _split_of(self, instance: Mapping[str, Any]) -> str:
        own = instance.get("split")
        return self._split or (own if isinstance(own, str) and own else DEFAULT_SPLIT)

    def _count_kept(self, task: dict[str, Any], instance: Mapping[str, Any]) -> None:
        instance_id = task["instance_id"]
        self._kept_ids.add(instance_id)
        self.report.written[task["subset"], _shown(task["split"])] += 1
        self.report.removed.update(swebench_rows.REMOVED_FIELDS & instance.keys())
        ungradable = ungradable_reason(task) if self._keep_ungradable else None
        if ungradable is not None:
            self.report.note(ungradable, example=instance_id)
        if not swebench_rows.has_gold_patch(task):
            self.report.note("no_gold_patch", example=instance_id)
        if instance["instance_id"] != instance_id:
            self.report.note("id_lower_cased", example=instance["instance_id"])


def _plain(name: Any) -> str | None:
    """A name as it may be shown, which a terminal does not take for a command; None for anything else."""
    return name if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _LONGEST_SHOWN else None


def _shown(name: Any) -> str:
    return _plain(name) or "(no name)"


def _instance(row: Any, *, place: str) -> Mapping[str, Any]:
    """The task in a row, which may be in Miles form already."""
    row = task_of(row)
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: expected a JSON object, found {type(row).__name__}")
    return row


# --- options --------------------------------------------------------------------


def read_selection(
    *, only: Path | None, exclude: Path | None, solve_rate: str | None, scan: Path | None, keep_known_flaky: bool
) -> Selection:
    """What the options say of tasks by their ids, with the files that they name.

    Args:
        only: file of the ids to keep.
        exclude: file of the ids to leave out.
        solve_rate: ``<lowest>:<highest>``; goes with ``scan``.
        scan: results of a policy scan.
        keep_known_flaky: do not leave out the tasks whose own patch is publicly known to fail or flake.

    Raises:
        DataError: a file cannot be read or holds something else, or one of two options is missing.
    """
    if (solve_rate is None) != (scan is None):
        found = "--from" if solve_rate is None else "--solve-rate"
        raise DataError(
            f"expected --solve-rate <lowest>:<highest> together with --from <policy scan's results>, found {found} alone"
        )
    chosen: dict[str, Any] = {"flaky": frozenset() if keep_known_flaky else known_flaky_ids()}
    if only is not None:
        chosen["only"] = read_ids(only, option="--only")
    if exclude is not None:
        chosen["exclude"] = read_ids(exclude, option="--exclude")
    if solve_rate is not None and scan is not None:
        chosen |= {"band": parse_band(solve_rate), "solve_rates": read_solve_rates(scan)}
    return Selection(**chosen)


def _check_options(source: str, output: Path, report_path: Path, *, subset: str | None, limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise DataError(f"expected --limit to be at least 1, found {limit}; leave it out to convert every row")
    if subset is not None and not swebench_rows.is_subset(subset):
        raise DataError(
            f"expected --subset to be letters, digits, '.', '_', '-' without '..', as the server makes a folder of it, "
            f"found {subset!r}"
        )
    if output.suffix != ".jsonl":
        raise DataError(f"expected --output to end in .jsonl, as Miles reads it (miles/utils/data.py), found {output}")
    for path in (output, report_path):
        if os.path.exists(path) and not path.is_file():
            raise DataError(f"expected --output to be a file, found {path}, which is none")
        if os.path.exists(source) and path.resolve().is_relative_to(Path(source).resolve()):
            raise DataError(f"expected --output outside of --input, found {path} and {source}")


def _check_apart(output: Path, named: Mapping[str, Path | None]) -> None:
    written = {path.resolve() for path in (output, report_path(output))}
    for option, path in named.items():
        if path is not None and path.resolve() in written:
            raise DataError(f"expected --output to be another file than that of {option}, found {output} for both")


# --- output ---------------------------------------------------------------------


def _write_report(path: Path, report: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(report, indent=2) + "\n")


class _Progress:
    """A bar on a terminal, a line per thousand rows elsewhere."""

    def __init__(self, *, total: int | None) -> None:
        self._count = 0
        self._on_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, unit="row", file=sys.stderr, disable=not self._on_terminal)

    def add(self) -> None:
        self._count += 1
        self._bar.update()
        if not self._on_terminal and self._count % _ROWS_PER_LINE == 0:
            print(f"{self._count} rows", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()


if __name__ == "__main__":
    typer.run(main)
