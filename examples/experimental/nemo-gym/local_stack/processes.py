"""Child processes that end with this one, and what an ended run may have left."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_REAP_PAUSE_S = 0.05
# Every process of a run carries its folder in this variable.
RUN_VARIABLE = "LOCAL_STACK_RUN"


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def start_child(command: list[str], **options) -> subprocess.Popen:
    """Start a command that is killed when this process ends.

    Args:
        command: program and arguments.
        options: as of ``subprocess.Popen``.
    """
    return subprocess.Popen(command, preexec_fn=end_with_parent, **options)


def run_child(command: list[str], *, timeout_s: float | None = None, **options) -> subprocess.CompletedProcess:
    """Run a command to its end, as text; it is killed when this process ends.

    Args:
        command: program and arguments.
        timeout_s: seconds until it is killed; None waits for as long as it takes.
        options: as of ``subprocess.Popen``.

    Raises:
        subprocess.TimeoutExpired: it was.
    """
    with start_child(command, text=True, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@contextlib.contextmanager
def locked(path: Path, *, waiting: str = "") -> Iterator[IO[str]]:
    """Hold an exclusive lock on a file; yields it open.

    Args:
        path: the lock file; made when missing.
        waiting: printed when another process holds it, before waiting for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                print(waiting, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def is_locked(path: Path) -> bool:
    """Tell whether a live process holds the lock on a file."""
    with contextlib.suppress(FileNotFoundError), path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def clear_dead_runs(runs: Path) -> list[int]:
    """End the processes and remove the folders of runs whose keeper was killed.

    Args:
        runs: folder of the runs, each with a file ``lock`` that its keeper holds; no run may be in the making.

    Returns:
        The ids of the processes ended.
    """
    found = sorted(run for run in runs.glob("*") if run.is_dir())
    dead = [run for run in found if not is_locked(run / "lock")]
    return [pid for run in dead for pid in remove_run(run)]


def remove_run(run: Path) -> list[int]:
    """End what is left of a run, then remove its folder and the one that Ray used for it.

    Args:
        run: the run's folder.

    Returns:
        The ids of the processes ended: none, unless the keeper was killed.
    """
    ended = []
    while left := _processes_of(run):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended += [pid for pid in left if pid not in ended]
        time.sleep(_REAP_PAUSE_S)
    with contextlib.suppress(OSError):
        shutil.rmtree((run / "ray").resolve(), ignore_errors=True)
    shutil.rmtree(run, ignore_errors=True)
    return ended


def _processes_of(run: Path) -> list[int]:
    """Those with the run's mark, and those with an open file below the folder that Ray used for it.

    Ray's processes change their titles, which overwrites what is first in their environment.
    """
    mark, ray = f"{RUN_VARIABLE}={run}".encode(), (run / "ray").resolve()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                process = Path("/proc", name)
                if mark in (process / "environ").read_bytes().split(b"\0") or _has_open_below(ray, process):
                    found.append(int(name))
    return found


def _has_open_below(folder: Path, process: Path) -> bool:
    for file in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(file).startswith(f"{folder}/"):
                return True
    return False
