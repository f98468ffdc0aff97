#!/usr/bin/env python3
"""Golden scan: prove tasks on a running NeMo Gym agent server, without model, trainer or GPU.

1. Every row runs with its gold patch, which must score 1.0.
2. Every row runs again with an empty patch, which must score 0.0 with its tests run: a task that passes anyway teaches
   nothing. (--no-null-control leaves this out.)
3. Requests, HTTP and reading of the answers are the connector's own, so that a pass covers all of it but the session.

The agent server must be started with run_golden=true. Rows are Miles prompt rows ({"prompt", "metadata"}) or raw
SWE-bench instances, one JSON object a line. Results go to --output, one JSON line per episode as it ends.

Exit status: 0 all as expected, 1 a task failed, 2 the set-up or the input is wrong, 130 interrupted.

Environment: NEMO_GYM_URL (see --nemo-gym-url), NEMO_GYM_RUN_TIMEOUT (see --timeout).

  python eval_nemogym_via_api.py --golden --input rows.jsonl --limit 5 --output results.jsonl
"""

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from nemogym_agent_function import run_episode
from nemogym_contract import EXIT_STATUSES, GRADED_STATUSES, Outcome, build_run_request
from nemogym_preflight import PreflightError, check_agent_server
from tqdm import tqdm

EXIT_OK, EXIT_TASK_FAILED, EXIT_SET_UP, EXIT_INTERRUPTED = 0, 1, 2, 130

# One of these says that the server is not the one a golden scan needs, whatever the task.
_WRONG_SERVER = frozenset({"PolicyServer", "PolicyEndpointError"})
# These can be one task's fault; when nothing else is seen at the start, they are the set-up's.
_NOTHING_RUNS = frozenset({"ServerUnreachable", "SandboxUnavailable"})
_FIRST_HANDFUL = 4


class SetUpError(Exception):
    """Ends the scan with exit status 2; the message is one sentence for the user."""


@dataclass(frozen=True)
class Job:
    """One episode to run; ``kind`` is gold or null."""

    row: dict[str, Any]
    kind: str

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
        if self.job.kind == "null":
            # A 0.0 without a run of the tests would say nothing about the task.
            return self.outcome.exit_status in GRADED_STATUSES and self.outcome.reward == 0.0
        return self.outcome.reward == 1.0

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
        """Why it did not pass, in one line."""
        outcome = self.outcome
        expected = "1.0" if self.job.kind == "gold" else "0.0 with tests run"
        found = "no verdict" if outcome.reward is None else f"reward {outcome.reward}"
        cause = EXIT_STATUSES[outcome.exit_status].cause
        text = f"expected {expected}, found {found}, {outcome.exit_status} ({cause})"
        return " ".join(f"{text}: {outcome.detail}".rstrip(": ").split())[:400]


# --- orchestration --------------------------------------------------------------


def main(
    input_path: Annotated[Path, typer.Option("--input", help="Miles prompt rows or SWE-bench instances, JSONL.")],
    golden: Annotated[bool, typer.Option("--golden", help="The server applies patches: run_golden=true.")] = False,
    limit: Annotated[int | None, typer.Option(help="Only the first N rows.")] = None,
    concurrency: Annotated[int, typer.Option(help="Episodes at a time.")] = 4,
    timeout: Annotated[float | None, typer.Option(envvar="NEMO_GYM_RUN_TIMEOUT", help="Seconds an episode.")] = None,
    output: Annotated[Path | None, typer.Option(help="Results, one JSON line per episode.")] = None,
    nemo_gym_url: Annotated[
        str, typer.Option(envvar="NEMO_GYM_URL", help="URL of the agent server.")
    ] = "http://localhost:12000",
    null_control: Annotated[bool, typer.Option(help="Also run every row with an empty patch.")] = True,
) -> None:
    """Prove on a running NeMo Gym agent server that gold patches score 1.0 and empty patches 0.0."""
    # What the connector logs about an episode, the scan reports itself.
    logging.getLogger("nemogym_agent_function").addHandler(logging.NullHandler())
    results: list[Result] = []
    try:
        timeout_s = check_options(golden=golden, limit=limit, concurrency=concurrency, timeout=timeout)
        rows = load_rows(input_path, limit=limit)
        jobs = [Job(row, kind) for row in rows for kind in (("gold", "null") if null_control else ("gold",))]
        check_agent_server(nemo_gym_url)
        with new_output(output, input_path=input_path) as sink:
            report = Report(results=results, total=len(jobs), sink=sink)
            asyncio.run(scan(jobs, report, server=nemo_gym_url, timeout_s=timeout_s, concurrency=concurrency))
    except (SetUpError, PreflightError) as error:
        say_what_is_kept(results, output)
        print(f"set-up: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_SET_UP) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        say_what_is_kept(results, output)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print_summary(rows, results)
    raise typer.Exit(EXIT_OK if all(result.passed for result in results) else EXIT_TASK_FAILED)


async def scan(jobs: list[Job], report: "Report", *, server: str, timeout_s: float, concurrency: int) -> None:
    """Run every job, reporting each as it ends.

    Raises:
        SetUpError: the results so far can only come from a wrong set-up.
    """
    async with aclosing(_episodes(jobs, server=server, timeout_s=timeout_s, concurrency=concurrency)) as episodes:
        with report:
            async for result in episodes:
                report.add(result)
                stop_if_set_up_is_wrong(report.results, total=len(jobs))


async def _episodes(jobs: list[Job], *, server: str, timeout_s: float, concurrency: int) -> AsyncIterator[Result]:
    """Results in the order in which they end. The first runs alone: a wrong server costs one episode."""
    places = asyncio.Semaphore(concurrency)

    async def run_in_place(job: Job) -> Result:
        async with places:
            return await run_job(job, server=server, timeout_s=timeout_s)

    yield await run_in_place(jobs[0])
    tasks = [asyncio.create_task(run_in_place(job)) for job in jobs[1:]]
    try:
        for ended in asyncio.as_completed(tasks):
            yield await ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_job(job: Job, *, server: str, timeout_s: float) -> Result:
    start = time.monotonic()
    outcome = await run_episode(job.task, request_kwargs={}, server=server, timeout_s=timeout_s, golden=True)
    return Result(job, outcome, seconds=time.monotonic() - start)


def stop_if_set_up_is_wrong(results: list[Result], *, total: int) -> None:
    """Raise SetUpError when the last result, or all of the first handful, cannot be the tasks' fault."""
    last = results[-1]
    if last.outcome.exit_status in _WRONG_SERVER:
        raise SetUpError(
            f"--golden needs a server started with run_golden=true; {last.job.row['instance_id']}: {last.reason()}"
        )
    handful = min(_FIRST_HANDFUL, total)
    if len(results) == handful and all(result.outcome.exit_status in _NOTHING_RUNS for result in results):
        raise SetUpError(f"none of the first {handful} episodes could run, so no task was tried: {last.reason()}")


# --- input ----------------------------------------------------------------------


def check_options(*, golden: bool, limit: int | None, concurrency: int, timeout: float | None) -> float:
    """Return the timeout in seconds.

    Raises:
        SetUpError: an option has a value the scan cannot work with.
    """
    if not golden:
        raise SetUpError("expected --golden: this scan runs gold patches on a server with run_golden=true")
    if limit is not None and limit < 1:
        raise SetUpError(f"expected --limit to be at least 1, found {limit}; leave it out to run every row")
    if concurrency < 1:
        raise SetUpError(f"expected --concurrency to be at least 1, found {concurrency}")
    timeout_s = 3600.0 if timeout is None else timeout
    if not 0 < timeout_s < float("inf"):
        raise SetUpError(f"expected --timeout (or NEMO_GYM_RUN_TIMEOUT) in seconds above 0, found {timeout_s:g}")
    return timeout_s


def load_rows(path: Path, *, limit: int | None) -> list[dict[str, Any]]:
    """The first ``limit`` tasks of a JSONL file, each fit to be sent.

    Raises:
        SetUpError: naming the line that is unreadable, unfit, without a gold patch, or a repeated task.
    """
    rows: list[dict[str, Any]] = []
    line_of: dict[str, int] = {}
    for number, row in _parsed_lines(path):
        if limit is not None and len(rows) == limit:
            break
        where = f"{path} line {number}"
        try:
            instance_id = build_run_request(row, {}, episode="check")["instance_id"]
        except ValueError as error:
            raise SetUpError(f"{where}: {error}") from None
        if instance_id in line_of:
            raise SetUpError(
                f"{where}: expected every task once, found {instance_id} on line {line_of[instance_id]} too"
            )
        if not isinstance(row.get("patch"), str) or not row["patch"].strip():
            raise SetUpError(f"{where}: expected {instance_id} to have its gold patch in 'patch', found none")
        line_of[instance_id] = number
        rows.append(row)
    if not rows:
        raise SetUpError(f"expected at least one row in {path}, found none")
    return rows


def _parsed_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SetUpError(f"expected rows in {path}, found it unreadable: {error.strerror}") from None
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except ValueError as error:
            raise SetUpError(f"{path} line {number}: expected a JSON object, found {error}") from None
        if isinstance(row, dict) and "instance_id" not in row and isinstance(row.get("metadata"), dict):
            row = row["metadata"]
        if not isinstance(row, dict):
            raise SetUpError(f"{path} line {number}: expected a JSON object, found {type(row).__name__}")
        yield number, row


# --- output ---------------------------------------------------------------------


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
        if not result.passed:
            self._say(f"FAIL {head} {result.seconds:.1f}s: {result.reason()}")
        elif not self._on_terminal:
            self._say(f"ok   {head} {result.seconds:.1f}s")

    def _say(self, line: str) -> None:
        counted = line if self._on_terminal else f"[{len(self.results)}/{self._bar.total}] {line}"
        self._bar.write(counted, file=sys.stdout)
        sys.stdout.flush()


def say_what_is_kept(results: list[Result], output: Path | None) -> None:
    if results:
        kept = f"in {output}" if output else "and not kept: there was no --output"
        print(f"{len(results)} episode(s) had ended, {kept}", file=sys.stderr)


def print_summary(rows: list[dict[str, Any]], results: list[Result]) -> None:
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
    reward = "none" if result.outcome.reward is None else f"{result.outcome.reward:g}"
    return f"{reward:>6} {result.seconds:>7.1f}"


if __name__ == "__main__":
    typer.run(main)
