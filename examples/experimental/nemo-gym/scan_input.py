"""What a scan was asked to do, checked before anything starts: its options and its rows."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemogym_contract import EXIT_STATUSES, build_run_request
from nemogym_environments import agent_name_of, build_environment_request, is_environment_row, task_of


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
class Options:
    """What was asked for.

    Attributes:
        input_path: rows, JSONL; None only to check the other options.
        golden: the server applies patches.
        policy_base_url: OpenAI base URL of the policy, without golden.
        policy_model: model name that the policy's endpoint expects; None when the user did not say.
        sampling: the policy's sampling settings, chat-completions names; those left to the agent are absent.
        expected: what every policy episode must end with.
        passes: episodes of each task with its gold patch, or with the policy.
        null_control: golden: also run each task once with an empty patch.
        limit: only the first rows; None takes all.
        concurrency: episodes at a time.
        timeout_s: seconds until an episode is given up.
        output: results file; None keeps none.
        again: a finished results file is set aside and the scan run again.
        retry_inconclusive: episodes of the results file that say nothing about their task are run again.
        fail_fast: stop at the first episode that did not end as expected.
        supported_ids: golden: file for the ids of the supported tasks; None writes none.
        server: URL of the agent server.
        head_url: URL of its head server; None guesses it.
        session_port: port of the sessions that NeMo Gym rows are scanned through; 0 takes a free one.
    """

    input_path: Path | None = None
    golden: bool = False
    policy_base_url: str | None = None
    policy_model: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    expected: Expectation = Expectation()
    passes: int = 1
    null_control: bool = True
    limit: int | None = None
    concurrency: int = 4
    timeout_s: float = 3600.0
    output: Path | None = None
    again: bool = False
    retry_inconclusive: bool = False
    fail_fast: bool = False
    supported_ids: Path | None = None
    server: str = "http://localhost:12000"
    head_url: str | None = None
    session_port: int = 0


def check_options(options: Options, *, check_only: bool = False) -> None:
    """Refuse what the scan cannot work with.

    Args:
        options: what was asked for.
        check_only: neither the input nor what to run needs to be named.

    Raises:
        SetUpError: naming the option, what it must be and what it is.
    """
    if options.input_path is None and not check_only:
        raise SetUpError("expected rows to scan with --input, found none")
    if options.golden == bool(options.policy_base_url) and (options.golden or not check_only):
        raise SetUpError(
            "expected exactly one of --golden (the server has run_golden=true) and --policy-base-url (it has "
            f"run_golden=false), found {'both' if options.golden else 'neither'}"
        )
    if options.golden and (options.expected != Expectation() or options.sampling):
        raise SetUpError(
            "expected sampling settings and --expect-* with --policy-base-url only, found them with --golden"
        )
    if options.policy_base_url and options.supported_ids:
        raise SetUpError("expected --supported-ids with --golden only, found it with --policy-base-url")
    if options.limit is not None and options.limit < 1:
        raise SetUpError(f"expected --limit to be at least 1, found {options.limit}; leave it out to run every row")
    for name, value in (("concurrency", options.concurrency), ("passes", options.passes)):
        if value < 1:
            raise SetUpError(f"expected --{name} to be at least 1, found {value}")
    if not 0 < options.timeout_s < math.inf:
        raise SetUpError(
            f"expected --timeout (or NEMO_GYM_RUN_TIMEOUT) in seconds above 0, found {options.timeout_s:g}"
        )
    _check_policy_options(options)
    _check_files(options)


def _check_policy_options(options: Options) -> None:
    for name, lowest, highest in (("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0), ("max_tokens", 1, math.inf)):
        value = options.sampling.get(name)
        if value is not None and not (lowest <= value <= highest and math.isfinite(value)):
            option = name.replace("_", "-")
            raise SetUpError(f"expected --{option} to be a number from {lowest:g} to {highest:g}, found {value:g}")
    if options.expected.exit_status not in (None, *EXIT_STATUSES):
        raise SetUpError(
            f"expected --expect-exit-status to be one of {', '.join(EXIT_STATUSES)}, "
            f"found {options.expected.exit_status}"
        )


def _check_files(options: Options) -> None:
    """Each file that is written is one of its own, in a folder that is there."""
    taken = {options.input_path.resolve(): "--input"} if options.input_path else {}
    for name, path in (("--output", options.output), ("--supported-ids", options.supported_ids)):
        if path is None:
            continue
        if path.resolve() in taken:
            raise SetUpError(f"expected {name} to be another file than {taken[path.resolve()]}, found {path} for both")
        if path.exists() and not path.is_file():
            raise SetUpError(f"expected {name} to be a file, found {path}, which is none")
        if not path.absolute().parent.is_dir():
            raise SetUpError(f"expected {name} in a folder that is there, found no {path.absolute().parent}")
        taken[path.resolve()] = name


# --- rows -------------------------------------------------------------------------

_NEEDED = {"patch": "its gold patch", "problem_statement": "its problem statement"}


def load_rows(path: Path, *, limit: int | None, needed: str = "patch") -> list[dict[str, Any]]:
    """The first ``limit`` tasks of a JSONL file, each fit to be sent.

    Args:
        path: the file: Miles prompt rows ({"prompt", "metadata"}), SWE-bench instances or NeMo Gym rows; of the last one
            without ``instance_id`` is called by its agent and line.
        limit: number of tasks; None takes all.
        needed: field without which a row cannot be scanned: ``patch`` or ``problem_statement``.

    Raises:
        SetUpError: naming the line that is unreadable, unfit, without that field, or a repeated task.
    """
    rows: list[dict[str, Any]] = []
    line_of: dict[str, int] = {}
    for number, row in _parsed_lines(path):
        if limit is not None and len(rows) == limit:
            break
        where = f"{path} line {number}"
        if is_environment_row(row) and needed != "patch":
            row = {"instance_id": f"{agent_name_of(row) or path.stem}-{number}", **row}
        try:
            instance_id = _checked_id(row, needed=needed)
        except ValueError as error:
            raise SetUpError(f"{where}: {error}") from None
        if rows and is_environment_row(row) != is_environment_row(rows[0]):
            raise SetUpError(f"{where}: expected SWE-bench tasks or NeMo Gym rows, found both: scan them apart")
        if instance_id in line_of:
            raise SetUpError(
                f"{where}: expected every task once, found {instance_id} on line {line_of[instance_id]} too"
            )
        if not is_environment_row(row) and not str(row.get(needed) or "").strip():
            raise SetUpError(f"{where}: expected {instance_id} to have {_NEEDED[needed]} in {needed!r}, found none")
        line_of[instance_id] = number
        rows.append(row)
    if not rows:
        raise SetUpError(f"expected at least one row in {path}, found none")
    return rows


def _checked_id(row: dict[str, Any], *, needed: str) -> str:
    if not is_environment_row(row):
        return build_run_request(row, {})["instance_id"]
    if needed == "patch":
        raise ValueError(
            "expected a SWE-bench task, found a NeMo Gym row, which has no gold patch; --policy-base-url scans it"
        )
    return str(build_environment_request(row, {})["instance_id"])


def _parsed_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield number, _parsed(line, where=f"{path} line {number}")
    except OSError as error:
        raise SetUpError(f"expected rows in {path}, found it unreadable: {error.strerror}") from None


def _parsed(line: bytes, *, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except ValueError as error:
        raise SetUpError(f"{where}: expected a JSON object, found {error}") from None
    row = task_of(row)
    if not isinstance(row, dict):
        raise SetUpError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row
