"""The docker engine of this machine, through its own client: is it there, and what of a run is left in it?"""

import platform
import shutil
from pathlib import Path
from subprocess import PIPE, TimeoutExpired

from local_stack.paths import StackError
from local_stack.processes import is_locked, run_child

_RUN_LABEL = "miles-nemo-gym.run"
_ASK_TIMEOUT_S = 30.0
_ADVICE = {
    "permission denied": "Let your user use it, `sudo usermod -aG docker $USER`, and log in again.",
    "cannot connect": "Start it, `sudo systemctl start docker`, or name another in DOCKER_HOST.",
}


def docker(*arguments: str, timeout_s: float | None = None) -> str:
    """Run the docker client and return what it prints.

    Args:
        arguments: after ``docker``.
        timeout_s: seconds; None waits for as long as it takes.

    Raises:
        StackError: there is no client, or it failed; the message holds its last line.
    """
    if shutil.which("docker") is None:
        raise StackError(
            "SANDBOX=docker needs docker, and there is no program `docker`: install it, or leave SANDBOX out"
        )
    command = ["docker", *arguments]
    try:
        done = run_child(command, timeout_s=timeout_s, stdout=PIPE, stderr=PIPE)
    except TimeoutExpired:
        raise StackError(
            f"`{' '.join(command[:3])}` did not end within {timeout_s:g} s: the engine does not answer"
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise StackError(f"`{' '.join(command[:3])}` failed: {reason}")
    return done.stdout


def check_engine() -> None:
    """Check that a docker engine answers.

    Raises:
        StackError: none does; the message says what to do.
    """
    try:
        docker("version", "--format", "{{.Server.Version}}", timeout_s=_ASK_TIMEOUT_S)
    except StackError as error:
        advice = next((advice for sign, advice in _ADVICE.items() if sign in str(error).lower()), "")
        said = str(error) if str(error).endswith(("?", ".")) else f"{error}."
        raise StackError(f"no docker engine for SANDBOX=docker: {said} {advice}".rstrip()) from None


def run_arguments(run: Path, *, machine: str | None = None) -> list[str]:
    """Arguments of ``docker run`` for the sandboxes of a run.

    Args:
        run: the run's folder, by which its containers are found.
        machine: kind of this machine, as ``platform.machine()`` says when None. SWE-bench's images are x86-64 ones:
            elsewhere they are asked for as such and emulated.
    """
    foreign = (machine or platform.machine()).lower() not in ("x86_64", "amd64")
    return ["--label", f"{_RUN_LABEL}={run}", *(["--platform", "linux/amd64"] if foreign else [])]


def remove_containers(runs: Path) -> list[str]:
    """Remove the containers of runs that have ended.

    Args:
        runs: folder of the runs, each with a file ``lock`` that is held for as long as it is alive.

    Returns:
        Their ids.

    Raises:
        StackError: the engine does not do so.
    """
    shown = f'{{{{.ID}}}} {{{{.Label "{_RUN_LABEL}"}}}}'
    listed = docker("ps", "--all", "--filter", f"label={_RUN_LABEL}", "--format", shown, timeout_s=_ASK_TIMEOUT_S)
    containers = [line.partition(" ") for line in listed.splitlines()]
    dead = [name for name, _, run in containers if Path(run).parent == runs and not is_locked(Path(run) / "lock")]
    if dead:
        docker("rm", "--force", *dead)
    return dead
