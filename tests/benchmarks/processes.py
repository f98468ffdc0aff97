"""Programs in processes of their own, and what they cost."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from .machine import EXAMPLE, REPOSITORY

_LOOK_S = 0.25
# With thousands of threads that are ready at once a run now and then does nothing but hand Python's lock around. Such a
# one is stopped and taken again, to the advantage of that client.
_CLIENT_TIMEOUT_S = 120
_TRIES = 3


def run_counted(command: Sequence[str | Path]) -> dict[str, float]:
    """Run a command to its end: ``cpu_s`` (user and system), ``wall_s`` and ``memory_mib`` (its peak).

    Raises:
        RuntimeError: it failed; the message holds what it said.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(process.stderr.read()))
    reader.start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.monotonic() - start
    reader.join()
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {''.join(said)[-2000:]}")
    return {"cpu_s": usage.ru_utime + usage.ru_stime, "wall_s": wall, "memory_mib": usage.ru_maxrss / 1024}


@contextlib.contextmanager
def sleeping_server() -> Iterator[str]:
    """An agent server whose episodes only sleep, while the block runs; yields its URL."""
    command = [sys.executable, "-m", "tests.benchmarks.sleeping_server"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def run_client(name: str, server: str, *, seconds: float, episodes: int, at_a_time: int, waves: int = 1) -> dict:
    """Run one of ``clients.CLIENTS`` in a process of its own.

    Args:
        name: which.
        server: URL of a sleeping server.
        seconds: how long each episode sleeps.
        episodes: how many are started at once.
        at_a_time: how many of them may be open.
        waves: how often.

    Returns:
        As ``clients.measure``, with ``open`` (the most episodes that the server had at a time) and ``sockets`` (the most
        that the client had open).

    Raises:
        RuntimeError: the client failed; the message holds what it said.
        subprocess.TimeoutExpired: it did not end, time and again.
    """
    command = [sys.executable, "-m", "tests.benchmarks.clients", name, server, seconds, episodes, at_a_time, waves]
    for _ in range(_TRIES - 1):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return _run_client(command, server)
        print(f"{name}, {episodes} episodes: had not ended after {_CLIENT_TIMEOUT_S} s, once more", file=sys.stderr)
    return _run_client(command, server)


def _run_client(command: list, server: str) -> dict:
    _most_open(server)
    with subprocess.Popen(
        [str(word) for word in command],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            with _counting_sockets(process.pid) as sockets:
                answer, said = process.communicate(timeout=_CLIENT_TIMEOUT_S)
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the client {command[3]} ended with {process.returncode}: {said[-2000:]}")
    return {**json.loads(answer), "open": _most_open(server), "sockets": max(sockets)}


def _most_open(server: str) -> int:
    with urllib.request.urlopen(f"{server}/most", timeout=10) as response:
        return json.load(response)


@contextlib.contextmanager
def _counting_sockets(pid: int) -> Iterator[list[int]]:
    """Look from outside how many sockets a process has open, now and then while the block runs."""
    counts, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_S):
            counts.append(_sockets(pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield counts
    finally:
        ended.set()
        looking.join()


def _sockets(pid: int) -> int:
    count = 0
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                count += os.readlink(entry.path).startswith("socket:")
    return count
