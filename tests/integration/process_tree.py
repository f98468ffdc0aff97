"""Find what runs in a sandbox among the processes of this machine."""

import contextlib
import time
from pathlib import Path


def find_process(argument: str, *, timeout_s: float = 60) -> int:
    """Wait for a process that was started with ``argument`` as one of its own, and return its id."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if argument.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                    return int(folder.name)
        time.sleep(0.1)
    raise AssertionError(f"no process was started with the argument {argument} within {timeout_s:g} s")


def ancestors(pid: int) -> list[tuple[int, str]]:
    """Return the ids and names of a process's parent, that one's parent, and so on."""
    found = []
    while pid := int(_status(pid)["PPid"]):
        found.append((pid, _status(pid)["Name"]))
    return found


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
