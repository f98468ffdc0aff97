"""Run a command and leave nothing of it behind, however its parent or itself ends.

    python keeper.py command ...

Standard input is the parent's end of a pipe: when the parent is gone, killed with SIGKILL even, it closes. As child
subreaper the keeper inherits every orphan of the command, so that killing its children until there are none ends them
all. A locked file that it inherits stays locked for as long as it lives. Standard library only.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys

_PR_SET_CHILD_SUBREAPER = 36
_POLL_MS = 200


def main() -> int:
    # A terminal's Ctrl-C and the end of its session are the parent's to handle.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
        return _wait(child)
    finally:
        _kill_descendants()


def _wait(child: subprocess.Popen) -> int:
    """Wait for the command or for the parent to end and return the command's status, 143 where it has none."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while child.poll() is None:
        if poll.poll(_POLL_MS) and not os.read(0, 1):
            return 143
    return child.returncode


def _kill_descendants() -> None:
    """Kill children until there are none: what they leave behind becomes a child in turn."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    """Return this process's children, from field 4 of /proc/<pid>/stat."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main())
