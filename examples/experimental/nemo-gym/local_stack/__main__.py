"""Command line of the local stack::

    python -m local_stack setup                     make what is missing
    python -m local_stack serve                     run NeMo Gym in the foreground
    python -m local_stack run --golden -- COMMAND   run a command beside it, with NEMO_GYM_URL set
    python -m local_stack run --policy ROLE -- COMMAND   with POLICY_BASE_URL too: a scripted policy (scripted_policy.py)
    python -m local_stack run --env NAME -- COMMAND      with another environment of NeMo Gym, behind the session model
    python -m local_stack envs                      list these
    python -m local_stack clear                     end and remove what a killed run has left, as each start does

Exit status: the command's own; 2 where the set-up is wrong; 130 after Ctrl-C.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from local_stack import environment_policy
from local_stack.environments import ENVIRONMENTS, Environment, find_environment
from local_stack.install import set_up
from local_stack.paths import Paths, StackError
from local_stack.processes import end_with_parent, start_child
from local_stack.scripted_policy import FAULTS, ROLES, load_tasks, make_app, role_url, serving_in_thread
from local_stack.server import Options, Ports, Sandbox, Stack, clear_killed_runs, running_stack

_INTERRUPT_GRACE_S = 10.0
_RUN_TIMEOUT_S = "600"  # the local tasks take seconds
# A scripted policy asks for no key: the user's stays out of what the agent writes down.
_WITHOUT_KEYS = {"OPENAI_API_KEY": "", "DEEPSEEK_API_KEY": ""}

_HELP = "NeMo Gym on this machine: its tasks and environments, its servers, and sandboxes for the episodes."
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=_HELP)

_PORT = Annotated[int | None, typer.Option(envvar="PORT", min=1, max=65532, help="first of four ports in a row")]
_CONCURRENCY = Annotated[int, typer.Option(min=1, help="episodes at a time on each agent server")]
_POLICY_MODEL = Annotated[str, typer.Option(envvar="POLICY_MODEL", help="model name sent to the policy's endpoint")]
_SANDBOX = Annotated[Sandbox, typer.Option(envvar="SANDBOX", help="what an episode runs in")]
_ENV = Annotated[str | None, typer.Option("--env", help=f"another environment: {', '.join(ENVIRONMENTS)}")]
_WITH_PARENT = Annotated[bool, typer.Option("--with-parent", hidden=True, help="end when the parent process ends")]


@app.command()
def setup(sandbox: _SANDBOX = Sandbox.BUBBLEWRAP, with_parent: _WITH_PARENT = False) -> None:
    """Make NeMo Gym's environment and the tasks; nothing is done twice."""
    with _orderly(with_parent):
        set_up(Paths.from_environment(), docker=sandbox is Sandbox.DOCKER)


@app.command()
def serve(
    port: _PORT = 12000,
    concurrency: _CONCURRENCY = 8,
    policy_model: _POLICY_MODEL = "model",
    sandbox: _SANDBOX = Sandbox.BUBBLEWRAP,
    env: _ENV = None,
    with_parent: _WITH_PARENT = False,
) -> None:
    """Run NeMo Gym in the foreground until Ctrl-C."""
    with _orderly(with_parent):
        paths = Paths.from_environment()
        environments = () if env is None else (find_environment(env),)
        ports = Ports.block(port)
        set_up(paths, docker=sandbox is Sandbox.DOCKER)
        options = Options(
            policy_model=policy_model, concurrency=concurrency, sandbox=sandbox, environments=environments
        )
        with running_stack(paths, ports=ports, options=options) as stack:
            print(f"{_addresses(stack, paths, environments)}\nCtrl-C stops it.", flush=True)
            stack.wait()


@app.command()
def run(
    command: Annotated[list[str], typer.Argument(help="the command, after --")],
    golden: Annotated[bool, typer.Option(help="NEMO_GYM_URL is the server that applies gold patches")] = False,
    policy: Annotated[str | None, typer.Option(help=f"play a policy, at POLICY_BASE_URL: {', '.join(ROLES)}")] = None,
    port: _PORT = None,
    concurrency: _CONCURRENCY = 8,
    policy_model: _POLICY_MODEL = "model",
    sandbox: _SANDBOX = Sandbox.BUBBLEWRAP,
    env: _ENV = None,
    with_parent: _WITH_PARENT = False,
) -> None:
    """Run a command with NEMO_GYM_URL, NEMO_GYM_HEAD_URL and LOCAL_STACK_TASKS set; stop NeMo Gym when it ends."""
    with _orderly(with_parent):
        if golden and policy:
            raise StackError("expected --golden or --policy, found both: a server that applies patches runs no policy")
        environment = None if env is None else find_environment(env)
        if golden and environment:
            raise StackError(
                f"expected --golden without --env, found --env {env}: only SWE-bench tasks have gold patches"
            )
        roles = (*environment_policy.PLAYERS[environment.name], *FAULTS) if environment else ROLES
        if policy is not None and policy not in roles:
            raise StackError(f"expected --policy to be one of {', '.join(roles)}, found {policy!r}")
        if shutil.which(command[0]) is None:
            raise StackError(f"{command[0]} cannot be started: no such program")
        paths = Paths.from_environment()
        ports = None if port is None else Ports.block(port)
        set_up(paths, docker=sandbox is Sandbox.DOCKER)
        environments = (environment,) if environment else ()
        options = Options(
            policy_model=policy_model, concurrency=concurrency, sandbox=sandbox, environments=environments
        )
        with running_stack(paths, ports=ports, options=options) as stack:
            tasks = environment.rows(paths) if environment else paths.tasks
            variables = {
                "NEMO_GYM_RUN_TIMEOUT": os.environ.get("NEMO_GYM_RUN_TIMEOUT") or _RUN_TIMEOUT_S,
                "NEMO_GYM_URL": stack.golden_url if golden else stack.policy_url,
                "NEMO_GYM_HEAD_URL": stack.head_url,
                "LOCAL_STACK_TASKS": str(tasks),
            }
            if environment:
                variables["NEMO_GYM_URL"] = stack.agent_url(environment.agent)
                for role, reward in environment.rewards.items():
                    variables[f"LOCAL_STACK_EXPECT_{role.upper()}"] = f"--expect-reward {reward:g}"
            with scripted_policy(policy, tasks=tasks, model=policy_model, environment=environment) as policy_variables:
                status = _run_command(command, {**variables, **policy_variables})
        raise typer.Exit(status)


@app.command()
def envs() -> None:
    """List the environments of NeMo Gym that run here beside SWE-bench."""
    for environment in ENVIRONMENTS.values():
        print(f"{environment.name:<20} {environment.agent_type:<17} {environment.kind}")


@app.command()
def clear() -> None:
    """End and remove what a killed run has left."""
    with _orderly(with_parent=False):
        paths = Paths.from_environment()
        if paths.runs.exists():
            clear_killed_runs(paths)


def _addresses(stack: Stack, paths: Paths, environments: tuple[Environment, ...]) -> str:
    """What a user needs of a running stack, a line each."""
    if not environments:
        return (
            f"policy  {stack.policy_url}   (a trainer's NEMO_GYM_URL)\n"
            f"golden  {stack.golden_url}   (applies gold patches)\n"
            f"head    {stack.head_url}   (NEMO_GYM_HEAD_URL of the preflight)\n"
            f"tasks   {paths.tasks}"
        )
    lines = [f"head    {stack.head_url}   (a trainer's NEMO_GYM_HEAD_URL, for rows with agent_ref)"]
    for environment in environments:
        lines.append(f"agent   {stack.agent_url(environment.agent)}   (a trainer's NEMO_GYM_URL)")
        lines.append(f"rows    {environment.rows(paths)}")
    return "\n".join(lines)


@contextlib.contextmanager
def scripted_policy(
    role: str | None, *, tasks: Path, model: str, environment: Environment | None = None
) -> Iterator[dict[str, str]]:
    """Play a role, with every other one beside it, in a thread of this process while the block runs.

    Args:
        role: one of ``ROLES``, or of the environment's; None plays nothing.
        tasks: the tasks that it knows, JSONL.
        model: the model name that it serves.
        environment: where the tasks are from; None for SWE-bench.

    Yields:
        The variables that a command needs for it; none without a role, so that the user's own pass through.

    Raises:
        StackError: the tasks cannot be read.
    """
    if role is None:
        yield {}
        return
    try:
        if environment:
            rows, players = environment_policy.load_rows(tasks), environment_policy.PLAYERS[environment.name]
            endpoint = make_app(rows, model=model, players=players, find=environment_policy.find_row)
        else:
            endpoint = make_app(load_tasks(tasks), model=model)
    except ValueError as error:
        raise StackError(str(error)) from None
    with serving_in_thread(endpoint) as url:
        yield {**_WITHOUT_KEYS, "POLICY_BASE_URL": role_url(url, role)}


def _run_command(command: list[str], variables: dict[str, str]) -> int:
    """Run the command and return its exit status; on Ctrl-C, which it gets too, give it time to end by itself."""
    process = start_child(command, env={**os.environ, **variables})
    try:
        status = process.wait()
    except BaseException:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_INTERRUPT_GRACE_S)
        process.kill()
        raise
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _orderly(with_parent: bool) -> Iterator[None]:
    """Make a known fault one sentence, and SIGTERM, Ctrl-C and the parent's end an orderly stop."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    if with_parent:
        end_with_parent(signal.SIGTERM)
    try:
        yield
    except (StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    app()
