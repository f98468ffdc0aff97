"""Command line of the local stack::

    python -m local_stack setup                     make what is missing
    python -m local_stack serve                     run NeMo Gym in the foreground
    python -m local_stack run --golden -- COMMAND   run a command beside it, with NEMO_GYM_URL set

Exit status: the command's own; 2 where the set-up is wrong; 130 after Ctrl-C.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from local_stack.install import set_up
from local_stack.paths import Paths, StackError
from local_stack.processes import end_with_parent, start_child
from local_stack.server import Options, Ports, running_stack

_INTERRUPT_GRACE_S = 10.0

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

_PORT = Annotated[int | None, typer.Option(envvar="PORT", min=1, max=65532, help="first of four ports in a row")]
_CONCURRENCY = Annotated[int, typer.Option(min=1, help="episodes at a time on each agent server")]
_POLICY_MODEL = Annotated[str, typer.Option(envvar="POLICY_MODEL", help="model name sent to the policy's endpoint")]
_WITH_PARENT = Annotated[bool, typer.Option("--with-parent", hidden=True, help="end when the parent process ends")]


@app.command()
def setup(with_parent: _WITH_PARENT = False) -> None:
    """Make NeMo Gym's environment and the tasks; nothing is done twice."""
    with _orderly(with_parent):
        set_up(Paths.from_environment())


@app.command()
def serve(
    port: _PORT = 12000,
    concurrency: _CONCURRENCY = 8,
    policy_model: _POLICY_MODEL = "model",
    with_parent: _WITH_PARENT = False,
) -> None:
    """Run NeMo Gym in the foreground until Ctrl-C."""
    with _orderly(with_parent):
        paths = Paths.from_environment()
        ports = Ports.block(port)
        set_up(paths)
        options = Options(policy_model=policy_model, concurrency=concurrency)
        with running_stack(paths, ports=ports, options=options) as stack:
            print(
                f"policy  {stack.policy_url}   (a trainer's NEMO_GYM_URL)\n"
                f"golden  {stack.golden_url}   (applies gold patches)\n"
                f"head    {stack.head_url}\n"
                f"tasks   {paths.tasks}\n"
                "Ctrl-C stops it.",
                flush=True,
            )
            stack.wait()


@app.command()
def run(
    command: Annotated[list[str], typer.Argument(help="the command, after --")],
    golden: Annotated[bool, typer.Option(help="NEMO_GYM_URL is the server that applies gold patches")] = False,
    port: _PORT = None,
    concurrency: _CONCURRENCY = 8,
    policy_model: _POLICY_MODEL = "model",
    with_parent: _WITH_PARENT = False,
) -> None:
    """Run a command with NEMO_GYM_URL and LOCAL_STACK_TASKS set, and stop NeMo Gym when it ends."""
    with _orderly(with_parent):
        if shutil.which(command[0]) is None:
            raise StackError(f"{command[0]} cannot be started: no such program")
        paths = Paths.from_environment()
        ports = None if port is None else Ports.block(port)
        set_up(paths)
        options = Options(policy_model=policy_model, concurrency=concurrency)
        with running_stack(paths, ports=ports, options=options) as stack:
            url = stack.golden_url if golden else stack.policy_url
            status = _run_command(command, {"NEMO_GYM_URL": url, "LOCAL_STACK_TASKS": str(paths.tasks)})
        raise typer.Exit(status)


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
    if with_parent:
        end_with_parent(signal.SIGTERM)
    try:
        yield
    except StackError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    app()
