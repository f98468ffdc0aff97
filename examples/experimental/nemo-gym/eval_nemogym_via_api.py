#!/usr/bin/env python3
"""Scan tasks on a running NeMo Gym agent server, without trainer or GPU: golden scan and policy scan.

Golden scan, on a server started with run_golden=true:
1. Every row runs with its gold patch, which must score 1.0.
2. Every row runs again with an empty patch, which must score 0.0 with its tests run: a task that passes anyway teaches
   nothing. (--no-null-control leaves this out.)

Policy scan, on a server started with run_golden=false:
1. Every row runs once with the policy at --policy-base-url, an OpenAI chat-completions endpoint that the agent server
   can reach. The reward is the policy's; what must not happen is an episode without a verdict.
2. The model name is the agent server's own (policy_model_name); what can be checked of it and of the endpoint is, before
   the first episode. Without --temperature the agent sends 0.0.

In both, requests, HTTP and reading of the answers are the connector's own, so that a pass covers all of it but the
session. Rows are Miles prompt rows ({"prompt", "metadata"}) or raw SWE-bench instances, one JSON object a line. Results
go to --output, one JSON line per episode as it ends.

Exit status: 0 all as expected (policy: every episode got a verdict, or ended as --expect-* says), 1 not so, 2 the
set-up or the input is wrong, 130 interrupted.

Environment: NEMO_GYM_URL (see --nemo-gym-url), NEMO_GYM_HEAD_URL (see --head-url), NEMO_GYM_RUN_TIMEOUT (see --timeout),
POLICY_MODEL (see --policy-model); OPENAI_API_KEY, else DEEPSEEK_API_KEY: the policy endpoint's key, never printed and
never in --output.

  python eval_nemogym_via_api.py --golden --input rows.jsonl --limit 5 --output results.jsonl
  python eval_nemogym_via_api.py --policy-base-url http://localhost:8000/v1 --input rows.jsonl --temperature 0.7
"""

import asyncio
import json
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from nemogym_agent_function import run_episode
from nemogym_contract import EXIT_STATUSES, build_run_request, without_userinfo
from nemogym_preflight import PolicyKey, PreflightError, check_agent_server, check_policy_endpoint, read_policy_model
from scan_report import (
    Expectation,
    Job,
    Report,
    Result,
    SetUpError,
    new_output,
    print_golden_summary,
    print_policy_summary,
    say_what_is_kept,
)

EXIT_OK, EXIT_TASK_FAILED, EXIT_SET_UP, EXIT_INTERRUPTED = 0, 1, 2, 130

# One of these says that the server is not the one a golden scan needs, whatever the task.
_NOT_GOLDEN = frozenset({"PolicyServer", "PolicyEndpointError"})
# These can be one task's fault; when nothing else is seen at the start, they are the set-up's.
_NOTHING_RUNS = frozenset({"ServerUnreachable", "SandboxUnavailable"})
_FIRST_HANDFUL = 4
# A golden server calls no policy; one that does is told to call nobody, and found out by the first episode at once.
_NO_POLICY = "http://127.0.0.1:9/v1"


@dataclass(frozen=True)
class Policy:
    """What a policy scan runs.

    Attributes:
        base_url: OpenAI base URL, as the agent server reaches it.
        key: its bearer key.
        request_kwargs: sampling settings, chat-completions names; None leaves one out.
    """

    base_url: str
    key: PolicyKey | None = None
    request_kwargs: dict[str, Any] = field(default_factory=dict)


# Plain tracebacks: the decorated ones show local variables, and one of them may be a key.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# --- orchestration --------------------------------------------------------------


@app.command()
def main(
    input_path: Annotated[Path, typer.Option("--input", help="Miles prompt rows or SWE-bench instances, JSONL.")],
    golden: Annotated[bool, typer.Option("--golden", help="The server applies patches: run_golden=true.")] = False,
    policy_base_url: Annotated[
        str | None, typer.Option(help="Run the policy at this OpenAI base URL, e.g. http://host:8000/v1.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N rows.")] = None,
    concurrency: Annotated[int, typer.Option(help="Episodes at a time.")] = 4,
    timeout: Annotated[float | None, typer.Option(envvar="NEMO_GYM_RUN_TIMEOUT", help="Seconds an episode.")] = None,
    output: Annotated[Path | None, typer.Option(help="Results, one JSON line per episode.")] = None,
    nemo_gym_url: Annotated[
        str, typer.Option(envvar="NEMO_GYM_URL", help="URL of the agent server.")
    ] = "http://localhost:12000",
    null_control: Annotated[bool, typer.Option(help="Golden: also run every row with an empty patch.")] = True,
    policy_model: Annotated[
        str | None, typer.Option(envvar="POLICY_MODEL", help="Policy: model name that the endpoint expects.")
    ] = None,
    head_url: Annotated[
        str | None,
        typer.Option(
            envvar="NEMO_GYM_HEAD_URL", help="Policy: NeMo Gym's head server; default port 11000 of the same host."
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Policy: sampling temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Policy: nucleus sampling.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Policy: tokens of one reply.")] = None,
    expect_reward: Annotated[float | None, typer.Option(help="Policy: fail unless every reward is this.")] = None,
    expect_exit_status: Annotated[
        str | None, typer.Option(help="Policy: fail unless every episode ends so, e.g. LimitsExceeded.")
    ] = None,
) -> None:
    """Prove tasks with their gold patches (--golden), or run a policy on them (--policy-base-url)."""
    # What the connector logs about an episode, the scan reports itself.
    logging.getLogger("nemogym_agent_function").addHandler(logging.NullHandler())
    expected = Expectation(reward=expect_reward, exit_status=expect_exit_status)
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    rows: list[dict[str, Any]] = []
    results: list[Result] = []
    try:
        timeout_s = check_options(
            golden=golden,
            limit=limit,
            concurrency=concurrency,
            timeout=timeout,
            policy_base_url=policy_base_url,
            sampling=sampling,
            expected=expected,
        )
        rows = load_rows(input_path, limit=limit, needed="patch" if golden else "problem_statement")
        jobs = [Job(row, kind, expected) for row in rows for kind in _kinds(golden=golden, null_control=null_control)]
        check_agent_server(nemo_gym_url)
        policy = None
        if not golden:
            policy = Policy(policy_base_url.strip().rstrip("/"), PolicyKey.from_environment(), sampling)
            check_policy(policy, server=nemo_gym_url, head_url=head_url or None, expected_model=policy_model or None)
        with new_output(output, input_path=input_path) as sink:
            report = Report(results=results, total=len(jobs), sink=sink)
            asyncio.run(
                scan(jobs, report, server=nemo_gym_url, timeout_s=timeout_s, concurrency=concurrency, policy=policy)
            )
    except (SetUpError, PreflightError) as error:
        say_what_is_kept(results, output)
        print(f"set-up: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_SET_UP) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        say_what_is_kept(results, output)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if golden:
        print_golden_summary(rows, results)
    else:
        print_policy_summary(rows, results, expected=expected)
    raise typer.Exit(EXIT_OK if all(result.as_expected for result in results) else EXIT_TASK_FAILED)


def _kinds(*, golden: bool, null_control: bool) -> tuple[str, ...]:
    if not golden:
        return ("policy",)
    return ("gold", "null") if null_control else ("gold",)


def check_policy(policy: Policy, *, server: str, head_url: str | None, expected_model: str | None) -> None:
    """Check the endpoint and the model name before the first episode; warn of what cannot be checked, and of the key.

    Args:
        policy: what will run.
        server: URL of the agent server.
        head_url: URL of its head server; None guesses it.
        expected_model: the model name that the endpoint expects, as the user says.

    Raises:
        SetUpError, PreflightError: an episode could not get a verdict with this endpoint or this model name.
    """
    sent_model = read_policy_model(server, head_url=head_url)
    if sent_model and expected_model and sent_model != expected_model:
        raise SetUpError(
            f"expected the agent server to send the model name {expected_model!r} (--policy-model), found that it sends "
            f"{sent_model!r}; restart NeMo Gym with policy_model_name={expected_model} (local stack: POLICY_MODEL)"
        )
    unchecked = check_policy_endpoint(policy.base_url, model=sent_model or expected_model, key=policy.key)
    if unchecked:
        print(f"warning: {unchecked}", file=sys.stderr)
    if policy.key:
        print(
            f"warning: mini-swe-agent writes the key in {policy.key.variable} in clear into its trajectory files on the "
            "agent server (results/ in its working folder); the local stack removes them when it ends or, if it was "
            "killed, at its next start",
            file=sys.stderr,
        )


async def scan(
    jobs: list[Job],
    report: Report,
    *,
    server: str,
    timeout_s: float,
    concurrency: int,
    policy: Policy | None = None,
) -> None:
    """Run every job, reporting each as it ends.

    Args:
        jobs: episodes to run; gold and null ones with ``policy`` None, policy ones with one.
        report: takes each result.
        server: URL of the agent server.
        timeout_s: seconds until an episode is given up.
        concurrency: episodes at a time.
        policy: what the agent calls; None on a golden server.

    Raises:
        SetUpError: the results so far can only come from a wrong set-up.
    """
    episodes = _episodes(jobs, server=server, timeout_s=timeout_s, concurrency=concurrency, policy=policy)
    async with aclosing(episodes):
        with report:
            async for result in episodes:
                report.add(result)
                stop_if_set_up_is_wrong(report.results, total=len(jobs), policy=policy)


async def _episodes(
    jobs: list[Job], *, server: str, timeout_s: float, concurrency: int, policy: Policy | None
) -> AsyncIterator[Result]:
    """Results in the order in which they end. The first runs alone: a wrong server costs one episode."""
    places = asyncio.Semaphore(concurrency)

    async def run_in_place(job: Job) -> Result:
        async with places:
            return await run_job(job, server=server, timeout_s=timeout_s, policy=policy)

    yield await run_in_place(jobs[0])
    tasks = [asyncio.create_task(run_in_place(job)) for job in jobs[1:]]
    try:
        for ended in asyncio.as_completed(tasks):
            yield await ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_job(job: Job, *, server: str, timeout_s: float, policy: Policy | None = None) -> Result:
    """Run one episode; what comes back holds the policy's key nowhere."""
    start = time.monotonic()
    if policy is None:
        outcome = await run_episode(
            job.task,
            request_kwargs={},
            server=server,
            timeout_s=timeout_s,
            policy_base_url=_NO_POLICY,
            golden=True,
        )
    else:
        key = policy.key
        outcome = await run_episode(
            job.task,
            request_kwargs=policy.request_kwargs,
            server=server,
            timeout_s=timeout_s,
            policy_base_url=policy.base_url,
            policy_api_key=key.value if key else None,
        )
        if key:
            # An endpoint may quote the key that it refuses, and the server's traceback quotes the endpoint.
            outcome = replace(outcome, eval_report=key.mask(outcome.eval_report), detail=key.mask(outcome.detail))
    return Result(job, outcome, seconds=time.monotonic() - start)


def stop_if_set_up_is_wrong(results: list[Result], *, total: int, policy: Policy | None = None) -> None:
    """Raise SetUpError when the last result, or all of the first handful, cannot be the tasks' fault."""
    last = results[-1]
    status, instance_id = last.outcome.exit_status, last.job.row["instance_id"]
    if policy is None and status in _NOT_GOLDEN:
        raise SetUpError(f"--golden needs a server started with run_golden=true; {instance_id}: {last.reason()}")
    if policy is not None and status == "GoldenServer":
        raise SetUpError(f"a policy scan needs a server started with run_golden=false; {instance_id}: {last.reason()}")
    if policy is not None and status == "PolicyEndpointError" and len(results) == 1:
        raise SetUpError(
            f"the policy endpoint {without_userinfo(policy.base_url)} failed the agent in the first episode, as the agent "
            f"server reaches it; {instance_id}: {last.reason()}"
        )
    handful = min(_FIRST_HANDFUL, total)
    if len(results) == handful and all(result.outcome.exit_status in _NOTHING_RUNS for result in results):
        raise SetUpError(f"none of the first {handful} episodes could run, so no task was tried: {last.reason()}")


# --- input ----------------------------------------------------------------------


def check_options(
    *,
    golden: bool,
    limit: int | None,
    concurrency: int,
    timeout: float | None,
    policy_base_url: str | None = None,
    sampling: dict[str, Any] | None = None,
    expected: Expectation | None = None,
) -> float:
    """Return the timeout in seconds.

    Raises:
        SetUpError: an option has a value the scan cannot work with.
    """
    sampling, expected = sampling or {}, expected or Expectation()
    if golden == bool(policy_base_url and policy_base_url.strip()):
        raise SetUpError(
            "expected exactly one of --golden (the server has run_golden=true) and --policy-base-url (it has "
            f"run_golden=false), found {'both' if golden else 'neither'}"
        )
    if golden and (expected != Expectation() or any(value is not None for value in sampling.values())):
        raise SetUpError(
            "expected sampling settings and --expect-* with --policy-base-url only, found them with --golden"
        )
    if limit is not None and limit < 1:
        raise SetUpError(f"expected --limit to be at least 1, found {limit}; leave it out to run every row")
    if concurrency < 1:
        raise SetUpError(f"expected --concurrency to be at least 1, found {concurrency}")
    for name, lowest, highest in (("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0), ("max_tokens", 1, math.inf)):
        value = sampling.get(name)
        if value is not None and not (lowest <= value <= highest and math.isfinite(value)):
            option = name.replace("_", "-")
            raise SetUpError(f"expected --{option} to be a number from {lowest:g} to {highest:g}, found {value:g}")
    if expected.exit_status is not None and expected.exit_status not in EXIT_STATUSES:
        raise SetUpError(
            f"expected --expect-exit-status to be one of {', '.join(EXIT_STATUSES)}, found {expected.exit_status}"
        )
    timeout_s = 3600.0 if timeout is None else timeout
    if not 0 < timeout_s < float("inf"):
        raise SetUpError(f"expected --timeout (or NEMO_GYM_RUN_TIMEOUT) in seconds above 0, found {timeout_s:g}")
    return timeout_s


_NEEDED = {"patch": "its gold patch", "problem_statement": "its problem statement"}


def load_rows(path: Path, *, limit: int | None, needed: str = "patch") -> list[dict[str, Any]]:
    """The first ``limit`` tasks of a JSONL file, each fit to be sent.

    Args:
        path: the file.
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
        try:
            instance_id = build_run_request(row, {})["instance_id"]
        except ValueError as error:
            raise SetUpError(f"{where}: {error}") from None
        if instance_id in line_of:
            raise SetUpError(
                f"{where}: expected every task once, found {instance_id} on line {line_of[instance_id]} too"
            )
        if not isinstance(row.get(needed), str) or not row[needed].strip():
            raise SetUpError(f"{where}: expected {instance_id} to have {_NEEDED[needed]} in {needed!r}, found none")
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


if __name__ == "__main__":
    app()
