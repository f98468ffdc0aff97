#!/usr/bin/env python3
"""Scan tasks on a running NeMo Gym agent server, without trainer or GPU: golden scan and policy scan.

Golden scan, on a server started with run_golden=true:
1. Every row runs --passes times with its gold patch, which must score 1.0 each time.
2. In the first pass every row also runs with an empty patch, which must score 0.0 with its tests run: a task that passes
   anyway teaches nothing. Once is enough, as it is the task that is asked about here, not its steadiness.
   (--no-null-control leaves this out.)
3. What came of it is the task's class: supported (all as they should), flaky (1.0 and 0.0), broken (gold patch never
   1.0, or 1.0 without it), inconclusive (the environment failed). --supported-ids writes the ids of the supported ones.

Policy scan, on a server started with run_golden=false:
1. Every row runs --passes times with the policy at --policy-base-url, an OpenAI chat-completions endpoint that the agent
   server can reach. The reward is the policy's; what must not happen is an episode without a verdict.
2. The model name is the agent server's own (policy_model_name); what can be checked of it and of the endpoint is, before
   the first episode. Without --temperature the agent sends 0.0.
3. What comes of it is each task's solve rate, with a 95 % interval, and pass@k.

Rows of other NeMo Gym environments ({"responses_create_params", ...}) are scanned with a policy, too. Their agents reach it
through the model server in miles_session_model/, so the scan serves it sessions (scan_sessions.py) in the trainer's place
and hands their calls on to --policy-base-url; NEMO_GYM_URL names the agent server of these rows.

In both, requests, HTTP and reading of the answers are the connector's own, so that a pass covers all of it but the
session. Rows are Miles prompt rows ({"prompt", "metadata"}) or raw SWE-bench instances, one JSON object a line. The
passes run one after the other over all rows, so that those of one task lie apart.

Results go to --output, one JSON line per episode as it ends (scan_results.py). Run again with the same --output, a scan
that was interrupted or killed runs what is missing, and a finished one only tells its results.

Exit status: 0 all as expected (golden: every task supported; policy: every episode got a verdict, or ended as --expect-*
says), 1 not so, 2 the set-up or the input is wrong, 130 interrupted.

Environment: NEMO_GYM_URL (see --nemo-gym-url), NEMO_GYM_HEAD_URL (see --head-url), NEMO_GYM_RUN_TIMEOUT (see --timeout),
POLICY_MODEL (see --policy-model); OPENAI_API_KEY, else DEEPSEEK_API_KEY: the policy endpoint's key, never printed and
never in --output.

  python eval_nemogym_via_api.py --golden --input rows.jsonl --limit 5 --passes 3 --output golden.jsonl
  python eval_nemogym_via_api.py --policy-base-url http://localhost:8000/v1 --input rows.jsonl --temperature 0.7
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from nemogym_agent_function import run_episode
from nemogym_contract import Outcome, without_userinfo
from nemogym_environments import is_environment_row
from nemogym_preflight import (
    PolicyKey,
    PreflightError,
    check_agent_server,
    check_environment_server,
    check_policy_endpoint,
    read_policy_model,
)
from scan_input import Expectation, Options, SetUpError, check_options, load_rows
from scan_report import (
    Progress,
    as_expected,
    classes_of,
    print_golden_summary,
    print_policy_summary,
    reason,
    say_what_is_kept,
    say_what_was_found,
)
from scan_results import Results, fingerprint, open_results, write_ids
from scan_sessions import ScanSession, serving_sessions
from scan_statistics import Episode

EXIT_OK, EXIT_TASK_FAILED, EXIT_SET_UP, EXIT_INTERRUPTED = 0, 1, 2, 130

# One of these says that the server is not the one a golden scan needs, whatever the task.
_NOT_GOLDEN = frozenset({"PolicyServer", "PolicyEndpointError"})
# These can be one task's fault; when nothing else is seen at the start, they are the set-up's.
_NOTHING_RUNS = frozenset({"ServerUnreachable", "SandboxUnavailable"})
_FIRST_HANDFUL = 4
# No task causes these for others too: so many in a row mean that the server or the endpoint has gone.
_GONE = frozenset({"ServerUnreachable", "PolicyEndpointError"})
_IN_A_ROW = 8
# A golden server calls no policy; one that does is told to call nobody, and found out by the first episode at once.
_NO_POLICY = "http://127.0.0.1:9/v1"


@dataclass(frozen=True)
class Policy:
    """What a policy scan runs.

    Attributes:
        base_url: OpenAI base URL, as the agent server reaches it; for NeMo Gym rows, as the scan does.
        name: what its results are known by: the model name where it is known, else the URL.
        sampling: sampling settings, chat-completions names.
        key: its bearer key.
        open_session: opens a session in front of it; None for SWE-bench rows, whose agent calls it by itself.
    """

    base_url: str
    name: str
    sampling: dict[str, Any]
    key: PolicyKey | None = None
    open_session: Callable[[], ScanSession] | None = None


@dataclass(frozen=True)
class Job:
    """One episode to run: ``kind`` is gold, null or policy, ``attempt`` the number of the pass, from 1."""

    row: dict[str, Any]
    kind: str
    attempt: int = 1

    @property
    def key(self) -> tuple[str, str, int]:
        return self.row["instance_id"], self.kind, self.attempt

    @property
    def task(self) -> dict[str, Any]:
        return {**self.row, "patch": ""} if self.kind == "null" else self.row


# Plain tracebacks: the decorated ones show local variables, and one of them may be a key.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# --- orchestration --------------------------------------------------------------


@app.command()
def main(
    input_path: Annotated[
        Path | None, typer.Option("--input", help="Miles prompt rows or SWE-bench instances, JSONL.")
    ] = None,
    golden: Annotated[bool, typer.Option("--golden", help="The server applies patches: run_golden=true.")] = False,
    policy_base_url: Annotated[
        str | None, typer.Option(help="Run the policy at this OpenAI base URL, e.g. http://host:8000/v1.")
    ] = None,
    passes: Annotated[int, typer.Option(help="Episodes of each task.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Only the first N rows.")] = None,
    concurrency: Annotated[int, typer.Option(help="Episodes at a time.")] = 4,
    timeout: Annotated[float, typer.Option(envvar="NEMO_GYM_RUN_TIMEOUT", help="Seconds an episode.")] = 3600.0,
    output: Annotated[
        Path | None, typer.Option(help="Results, one JSON line per episode. What is in it is not run again.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Set a finished --output aside (<name>.previous) and run it again.")
    ] = False,
    retry_inconclusive: Annotated[
        bool, typer.Option("--retry-inconclusive", help="Run episodes of --output again that the environment failed.")
    ] = False,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop at the first episode that does not end as expected.")
    ] = False,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Check the other options, the files and the endpoint; run nothing.")
    ] = False,
    nemo_gym_url: Annotated[
        str, typer.Option(envvar="NEMO_GYM_URL", help="URL of the agent server.")
    ] = "http://localhost:12000",
    null_control: Annotated[bool, typer.Option(help="Golden: also run every row with an empty patch.")] = True,
    supported_ids: Annotated[
        Path | None, typer.Option(help="Golden: write the ids of the supported tasks there, one a line.")
    ] = None,
    policy_model: Annotated[
        str | None, typer.Option(envvar="POLICY_MODEL", help="Policy: model name that the endpoint expects.")
    ] = None,
    head_url: Annotated[
        str | None,
        typer.Option(
            envvar="NEMO_GYM_HEAD_URL", help="Policy: NeMo Gym's head server; default port 11000 of the same host."
        ),
    ] = None,
    session_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="NeMo Gym rows: port that their model server calls; 0 takes a free one."),
    ] = 0,
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
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    options = Options(
        input_path=input_path,
        golden=golden,
        policy_base_url=(policy_base_url or "").strip().rstrip("/") or None,
        policy_model=policy_model or None,
        sampling={name: value for name, value in sampling.items() if value is not None},
        expected=Expectation(reward=expect_reward, exit_status=expect_exit_status),
        passes=passes,
        null_control=null_control,
        limit=limit,
        concurrency=concurrency,
        timeout_s=timeout,
        output=output,
        again=again,
        retry_inconclusive=retry_inconclusive,
        fail_fast=fail_fast,
        supported_ids=supported_ids,
        server=nemo_gym_url,
        head_url=head_url or None,
        session_port=session_port,
    )
    try:
        status = check(options) if check_only else execute(options)
    except (SetUpError, PreflightError) as error:
        print(f"set-up: {error}", file=sys.stderr)
        status = EXIT_SET_UP
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    raise typer.Exit(status)


def check(options: Options) -> int:
    """Check all that can be checked before there is an agent server; run nothing and write nothing.

    Raises:
        SetUpError, PreflightError: what is wrong.
    """
    check_options(options, check_only=True)
    rows = _load(options) if options.input_path else []
    mode = True if options.golden else False if options.policy_base_url else None
    with open_results(options.output, golden=mode, tasks=_fingerprints(rows)) as results:
        if options.policy_base_url:
            _check_same_policy(results, options)
            key = PolicyKey.from_environment()
            check_policy_endpoint(options.policy_base_url, model=options.policy_model, key=key)
    return EXIT_OK


def execute(options: Options) -> int:
    """Run what the results file does not hold yet, and tell what all of it shows.

    Returns:
        The exit status.

    Raises:
        SetUpError, PreflightError: the set-up or the input is wrong.
    """
    check_options(options)
    rows = _load(options)
    jobs = plan(rows, golden=options.golden, passes=options.passes, null_control=options.null_control)
    with open_results(options.output, golden=options.golden, tasks=_fingerprints(rows)) as results:
        _check_same_policy(results, options)
        if options.retry_inconclusive:
            results.drop_inconclusive()
        to_run = _missing(jobs, results)
        if options.again and not to_run:
            print(f"set aside as {results.set_aside()}", file=sys.stderr)
            to_run = jobs
        say_what_was_found(results, options, to_run=len(to_run))
        failed = any(not as_expected(episode, options.expected) for episode in results.episodes)
        if to_run and not (options.fail_fast and failed):
            _run(to_run, results, options)
        if not_run := len(_missing(jobs, results)):
            print(f"--fail-fast: stopped at the first failure, {not_run} episode(s) are not run", file=sys.stderr)
        return _conclude([row["instance_id"] for row in rows], results.episodes, options)


def plan(rows: Sequence[dict[str, Any]], *, golden: bool, passes: int, null_control: bool) -> list[Job]:
    """The episodes of a scan, pass after pass: those of one task lie apart. The empty patch runs in the first.

    Args:
        rows: the tasks.
        golden: gold and null episodes, else policy ones.
        passes: how often each task runs.
        null_control: whether there are null ones.
    """
    jobs = []
    for attempt in range(1, passes + 1):
        kinds = (("gold", "null") if null_control and attempt == 1 else ("gold",)) if golden else ("policy",)
        jobs += [Job(row, kind, attempt) for row in rows for kind in kinds]
    return jobs


def _missing(jobs: Sequence[Job], results: Results) -> list[Job]:
    return [job for job in jobs if job.key not in results]


def _check_same_policy(results: Results, options: Options) -> None:
    """Refuse results of another policy, as far as that is known before the agent server is asked."""
    results.check("sampling", options.sampling)
    if options.policy_base_url and options.policy_model:
        results.check("policy", options.policy_model)


def _load(options: Options) -> list[dict[str, Any]]:
    needed = "problem_statement" if options.policy_base_url else "patch"
    return load_rows(options.input_path, limit=options.limit, needed=needed)


def _fingerprints(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {row["instance_id"]: fingerprint(row) for row in rows}


def _run(jobs: list[Job], results: Results, options: Options) -> None:
    """Check the server and run the episodes; say what is kept if that is cut short."""
    of_environment = is_environment_row(jobs[0].row)
    (check_environment_server if of_environment else check_agent_server)(options.server)
    policy = None if options.golden else ready_policy(options, of_environment=of_environment)
    if policy:
        results.check("policy", policy.name)
    scanning = _scan_through_sessions if of_environment else scan
    try:
        asyncio.run(scanning(jobs, results, options, policy=policy))
    except (SetUpError, KeyboardInterrupt):
        say_what_is_kept(results.added, options.output)
        raise


def _conclude(ids: list[str], episodes: list[Episode], options: Options) -> int:
    if not options.golden:
        print_policy_summary(ids, episodes, passes=options.passes, expected=options.expected)
        good = all(as_expected(episode, options.expected) for episode in episodes)
        return EXIT_OK if good else EXIT_TASK_FAILED
    classes = classes_of(ids, episodes, passes=options.passes, null_control=options.null_control)
    print_golden_summary(classes, episodes, passes=options.passes)
    supported = [instance_id for instance_id, name in classes.items() if name == "supported"]
    if options.supported_ids and "unfinished" in classes.values():
        print(f"{options.supported_ids} is not written: not every task has run", file=sys.stderr)
    elif options.supported_ids:
        write_ids(options.supported_ids, supported)
        print(f"{len(supported)} supported id(s) written to {options.supported_ids}")
    return EXIT_OK if len(supported) == len(classes) else EXIT_TASK_FAILED


def ready_policy(options: Options, *, of_environment: bool = False) -> Policy:
    """Check the endpoint and the model name before the first episode; warn of what cannot be checked, and of the key.

    Args:
        options: what was asked for.
        of_environment: for NeMo Gym rows: what is peculiar to mini-swe-agent does not concern them.

    Raises:
        SetUpError, PreflightError: an episode could not get a verdict with this endpoint or this model name.
    """
    base_url, expected_model, key = options.policy_base_url, options.policy_model, PolicyKey.from_environment()
    sent_model = read_policy_model(options.server, head_url=options.head_url)
    if sent_model and expected_model and sent_model != expected_model:
        raise SetUpError(
            f"expected the agent server to send the model name {expected_model!r} (--policy-model), found that it sends "
            f"{sent_model!r}; restart NeMo Gym with policy_model_name={expected_model} (local stack: POLICY_MODEL)"
        )
    model = sent_model or expected_model
    unchecked = check_policy_endpoint(base_url, model=model, key=key)
    if unchecked:
        print(f"warning: {unchecked}", file=sys.stderr)
    if options.passes > 1 and not options.sampling.get("temperature") and not of_environment:
        print(
            f"warning: at temperature 0.0, which the agent sends without --temperature, {options.passes} passes of one "
            "task are nearly the same episode",
            file=sys.stderr,
        )
    if key and not of_environment:
        print(
            f"warning: mini-swe-agent writes the key in {key.variable} in clear into its trajectory files on the agent "
            "server (results/ in its working folder); the local stack removes them when it ends or, if it was killed, "
            "at its next start",
            file=sys.stderr,
        )
    return Policy(base_url, name=model or without_userinfo(base_url), sampling=options.sampling, key=key)


# --- episodes -------------------------------------------------------------------


async def scan(jobs: list[Job], results: Results, options: Options, *, policy: Policy | None = None) -> None:
    """Run every job, keeping and showing each episode as it ends.

    Args:
        jobs: episodes to run; gold and null ones with ``policy`` None, policy ones with one.
        results: takes each episode; what it holds already counts as seen.
        options: what was asked for.
        policy: what the agent calls; None on a golden server.

    Raises:
        SetUpError: the episodes so far can only come from a wrong set-up, or the results file cannot be written.
    """
    seen = results.episodes
    total = len(seen) + len(jobs)
    with Progress(options, total=total, ended=len(seen)) as progress:
        async with aclosing(_episodes(jobs, options, policy=policy)) as ended:
            async for episode, eval_report in ended:
                seen.append(episode)
                # First, so that what only shows a wrong set-up is not kept as a result of its task.
                stop_if_set_up_is_wrong(seen, total=total, policy=policy)
                results.add(episode, eval_report)
                progress.show(episode)
                if options.fail_fast and not as_expected(episode, options.expected):
                    return


async def _scan_through_sessions(jobs: list[Job], results: Results, options: Options, *, policy: Policy) -> None:
    """``scan`` with a session for each episode in front of the policy."""
    key = policy.key.value if policy.key else None
    serving = serving_sessions(policy.base_url, api_key=key, server=options.server, port=options.session_port)
    async with serving as open_session:
        await scan(jobs, results, options, policy=replace(policy, open_session=open_session))


async def _episodes(
    jobs: list[Job], options: Options, *, policy: Policy | None
) -> AsyncIterator[tuple[Episode, dict[str, Any]]]:
    """Episodes in the order in which they end. The first runs alone: a wrong server costs one episode."""
    running: set[asyncio.Task] = set()
    try:
        for number, job in enumerate(jobs):
            running.add(asyncio.create_task(run_job(job, options, policy=policy)))
            is_last = number == len(jobs) - 1
            while running and (is_last or number == 0 or len(running) >= options.concurrency):
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def run_job(job: Job, options: Options, *, policy: Policy | None = None) -> tuple[Episode, dict[str, Any]]:
    """Run one episode; what comes back holds the policy's key nowhere.

    Returns:
        The episode, and the report that came with it.
    """
    start = time.monotonic()
    if policy is None:
        outcome = await run_episode(
            job.task,
            request_kwargs={},
            server=options.server,
            timeout_s=options.timeout_s,
            policy_base_url=_NO_POLICY,
            golden=True,
        )
    else:
        if policy.open_session:
            way: dict[str, Any] = {"session_url": policy.open_session().url}
        else:
            key = policy.key.value if policy.key else None
            way = {"policy_base_url": policy.base_url, "policy_api_key": key}
        outcome = await run_episode(
            job.task, request_kwargs=policy.sampling, server=options.server, timeout_s=options.timeout_s, **way
        )
        if policy.key:
            # An endpoint may quote the key that it refuses, and the server's traceback quotes the endpoint.
            outcome = replace(
                outcome, eval_report=policy.key.mask(outcome.eval_report), detail=policy.key.mask(outcome.detail)
            )
    return as_episode(job, outcome, seconds=time.monotonic() - start, policy=policy), outcome.eval_report


def as_episode(job: Job, outcome: Outcome, *, seconds: float, policy: Policy | None = None) -> Episode:
    """What is kept of a job's outcome."""
    return Episode(
        instance_id=job.row["instance_id"],
        repo=job.row.get("repo"),
        kind=job.kind,
        attempt=job.attempt,
        reward=outcome.reward,
        exit_status=outcome.exit_status,
        seconds=seconds,
        agent_metrics={name: value for name, value in outcome.agent_metrics.items() if name != "total_time"},
        detail=outcome.detail,
        task=fingerprint(job.row),
        policy=policy.name if policy else None,
        sampling=policy.sampling if policy else {},
    )


def stop_if_set_up_is_wrong(seen: Sequence[Episode], *, total: int, policy: Policy | None = None) -> None:
    """Raise SetUpError when the last episodes, or all of them so far, cannot be the tasks' fault.

    Args:
        seen: every episode so far, those of the results file first.
        total: episodes of the whole scan.
        policy: what the agent calls; None on a golden server.
    """
    last = seen[-1]
    status, said = last.exit_status, f"{last.instance_id}: {reason(last, Expectation())}"
    if policy is None and status in _NOT_GOLDEN:
        raise SetUpError(f"--golden needs a server started with run_golden=true; {said}")
    if policy is not None and status == "GoldenServer":
        raise SetUpError(f"a policy scan needs a server started with run_golden=false; {said}")

    if status in _GONE | _NOTHING_RUNS and all(episode.reward is None for episode in seen):
        if status == "PolicyEndpointError":
            raise SetUpError(
                f"the policy endpoint {without_userinfo(policy.base_url)} failed the agent before any episode got a "
                f"verdict, as the agent server reaches it; {said}"
            )
        handful = min(_FIRST_HANDFUL, total)
        if len(seen) >= handful and all(episode.exit_status in _NOTHING_RUNS for episode in seen):
            raise SetUpError(f"none of the first {len(seen)} episodes could run, so no task was tried; {said}")

    recent = seen[-_IN_A_ROW:]
    if len(recent) == _IN_A_ROW and all(episode.exit_status in _GONE for episode in recent):
        if len({episode.instance_id for episode in recent}) > 1:
            raise SetUpError(
                f"the last {_IN_A_ROW} episodes failed in a way that no task can cause: the agent server or the policy "
                f"endpoint has gone; run again with --retry-inconclusive once it is back; {said}"
            )


if __name__ == "__main__":
    app()
