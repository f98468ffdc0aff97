"""PID 1 of a sandbox: sets it up, gives up its privileges, then runs one command at a time.

Started by ``provider`` inside the namespaces that ``namespace`` describes; standard library only. It reads one JSON
object a line on stdin and answers each with one JSON line on stdout, for ``exec`` followed by ``size`` raw bytes of
output. End of file on stdin ends it, and with it the kernel ends every process of the sandbox.

Being PID 1 it cannot be killed from inside, not even by ``kill -9 -1``; the filter of ``seccomp`` keeps its limits and
its priority out of the commands' reach.
"""

import base64
import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

_PR_SET_DUMPABLE, _PR_SET_SECCOMP = 4, 22
_SECCOMP_MODE_FILTER = 2
_TICK_S = 0.2
_READ_BYTES = 1 << 16
# What the kernel keeps for an empty file on a tmpfs, its directory entry with the longest name included.
_FILE_BYTES = 2048


def main() -> None:
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # what NeMo Gym's worker let bwrap inherit
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a handler, such as Python's, is what lets a signal through to PID 1
    wakeup, _ = _wake_on_child_exit()
    setup = json.loads(sys.stdin.buffer.readline())
    try:
        _set_up(setup)
    except (OSError, RuntimeError, shutil.Error) as error:
        _reply({"error": f"{type(error).__name__}: {error}"})
        return
    _reply({"ready": True})
    limits = setup["limits"]
    supervisor = _Supervisor(wakeup=wakeup, memory_bytes=limits["memory_mib"] << 20, max_processes=limits["processes"])
    operations = {"exec": supervisor.run_command, "write": _write_file, "read": _read_file}
    while line := supervisor.next_request():
        request = json.loads(line)
        operations[request.pop("op")](**request)


def _set_up(setup: dict) -> None:
    """Write /etc, drop to the sandbox's user, set its limits and copy the repository into place."""
    uid = setup["uid"]
    _write_etc(uid)
    if uid:
        for path in ("/testbed", "/root"):
            os.chown(path, uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)  # keeps commands out of /proc/1
    if uid and _effective_capabilities():
        raise RuntimeError("capabilities are left after the change of user")
    _set_limits(setup["limits"])
    if Path("/image/testbed").is_dir():
        shutil.copytree("/image/testbed", "/testbed", symlinks=True, dirs_exist_ok=True)
    _refuse_calls(base64.b64decode(setup["refusals"]))


def _write_etc(uid: int) -> None:
    """Name the sandbox's only users; nothing of the host's /etc/passwd or /etc/shadow is there."""
    users = {"root": 0, "sandbox": uid} if uid else {"root": 0}
    passwd = [f"{name}:x:{number}:{number}::/root:/bin/bash\n" for name, number in users.items()]
    Path("/etc/passwd").write_text("".join(passwd))
    Path("/etc/group").write_text("".join(f"{name}:x:{number}:\n" for name, number in users.items()))
    Path("/etc/hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n")
    Path("/etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")


def _effective_capabilities() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("CapEff:")[1].split()[0], 16)


def _set_limits(limits: dict) -> None:
    memory = limits["memory_mib"] << 20
    for which, value in (
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (value, value))


class _Program(ctypes.Structure):
    """``struct sock_fprog`` of linux/filter.h."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def _refuse_calls(instructions: bytes) -> None:
    """Refuse system calls from here on, in every process of the sandbox."""
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(instructions) // 8, instructions)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


def _wake_on_child_exit() -> tuple[int, int]:
    """Return a pipe that becomes readable whenever a process of the sandbox ends."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader, writer


class _Supervisor:
    """Runs commands, reaps every process that ends and kills all of them when a limit or the time is passed.

    It counts processes and memory itself: the kernel's limits are by process, and do not bind root at all.
    """

    def __init__(self, *, wakeup: int, memory_bytes: int, max_processes: int) -> None:
        self._wakeup = wakeup
        self._memory_bytes = memory_bytes
        self._max_processes = max_processes
        self._tmpfs = _tmpfs_mounts()
        self._socket_bytes = _largest_socket_bytes()
        self._pending = b""
        self._ended: dict[int, int] = {}

    def next_request(self) -> bytes:
        """Wait for the next line on stdin; empty at end of file."""
        while b"\n" not in self._pending:
            self._wait(stdin=True)
            self._enforce_limits()
            if select.select([0], [], [], 0)[0]:
                chunk = os.read(0, _READ_BYTES)
                if not chunk:
                    return b""
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def run_command(self, *, command: str, cwd: str, env: dict, timeout_s: float) -> None:
        """Run ``command`` under bash and reply with its exit code and its merged output.

        Output goes to a file on a small tmpfs: it is bounded, and a process left in the background keeps its stdout.
        """
        with tempfile.TemporaryFile(dir="/run", buffering=0) as output:
            self._ended.clear()
            pid = self._fork()
            if not pid:
                _become_bash(command=command, cwd=cwd, env=env, output=output.fileno())
            _reply_output(self._wait_for(pid, timeout_s=timeout_s), output)

    def _fork(self) -> int:
        try:
            return os.fork()
        except BlockingIOError:  # an earlier command left the sandbox full of processes
            self._kill_all()
            return os.fork()

    def _wait_for(self, pid: int, *, timeout_s: float) -> dict:
        deadline = time.monotonic() + timeout_s
        note = None
        while pid not in self._ended:
            if time.monotonic() > deadline:
                self._kill_all()
                return {"return_code": 125, "error_type": "timeout", "note": f"command timed out after {timeout_s:g}s"}
            self._wait(stdin=False)
            note = self._enforce_limits() or note
        code = os.waitstatus_to_exitcode(self._ended[pid])
        return {"return_code": code if code >= 0 else 128 - code, "note": note}  # a signal as the shell reports it

    def _wait(self, *, stdin: bool) -> None:
        """Wait for a process to end, for a request where ``stdin`` says so, or for the next look at the limits; reap.

        Raises:
            SystemExit: the provider is gone; without PID 1 the kernel ends the whole sandbox.
        """
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(0, select.POLLIN if stdin else 0)  # a hang-up is reported in any case
        events = dict(poll.poll(_TICK_S * 1000))
        if events.get(0, 0) & (select.POLLHUP | select.POLLERR) and not events[0] & select.POLLIN:
            sys.exit()
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup, _READ_BYTES):
                pass
        self._reap()

    def _reap(self) -> None:
        """Collect every process that has ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                self._ended[pid] = status

    def _enforce_limits(self) -> str | None:
        try:
            processes = _processes()
            memory_bytes = self._memory_in_use(processes)
        except OSError:  # the host can open no file now; it is not this sandbox's fault
            return None
        if len(processes) > self._max_processes:
            limit = f"{self._max_processes} processes"
        elif memory_bytes > self._memory_bytes:
            limit = f"{self._memory_bytes >> 20} MiB of memory"
        else:
            return None
        self._kill_all()
        return f"more than {limit}: every process of the sandbox was killed"

    def _memory_in_use(self, processes: list[int]) -> int:
        """Bytes that the sandbox takes besides the contents of its files, which its mounts bound."""
        files = sum(found.f_files - found.f_ffree for found in map(os.statvfs, self._tmpfs))
        return sum(map(_process_bytes, processes)) + _sockets() * self._socket_bytes + files * _FILE_BYTES

    def _kill_all(self) -> None:
        """Kill every process and wait until the last is gone, so that none is counted against the next command."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        while _processes():
            self._wait(stdin=False)


def _become_bash(*, command: str, cwd: str, env: dict, output: int) -> None:
    """Turn the forked child into the command; never returns."""
    try:
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(cwd)
        os.execve("/bin/bash", ["bash", "-c", command], env)
    except OSError as error:
        os.write(output, f"the command could not be started: {error}\n".encode())
    finally:
        os._exit(126)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _process_bytes(pid: int) -> int:
    """Return the memory, in bytes, that a process shares with no file on a disk, its page tables included.

    It is 0 when the process has ended.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    counted = ("RssAnon", "RssShmem", "VmSwap", "VmPTE")
    return sum(int(fields[name].split()[0]) << 10 for name in counted if name in fields)


def _sockets() -> int:
    """Return how many sockets the sandbox has, those included that are closed but not yet read empty."""
    first = Path("/proc/net/sockstat").read_text().partition("\n")[0]
    return int(first.removeprefix("sockets: used "))


def _largest_socket_bytes() -> int:
    """Return what a socket's unread data can take: a message is accepted while the buffer is not full."""
    with socket.socket(socket.AF_UNIX) as probe:
        return 2 * probe.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _tmpfs_mounts() -> list[str]:
    """Return where the sandbox's own files are; a folder of the host may be on a tmpfs, too, but is read-only here."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [target for _, target, kind, options, *_ in mounts if kind == "tmpfs" and options.startswith("rw,")]


def _write_file(*, path: str, data: str) -> None:
    try:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(base64.b64decode(data))
        _reply({})
    except OSError as error:
        _reply({"error": str(error)})


def _read_file(*, path: str) -> None:
    try:
        _reply({"data": base64.b64encode(Path(path).read_bytes()).decode()})
    except OSError as error:
        _reply({"error": str(error)})


def _reply(message: dict) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def _reply_output(message: dict, output) -> None:
    """Send ``message`` with the size of the output, then the output itself.

    The size is taken once: a process left in the background may still be writing.
    """
    size = os.fstat(output.fileno()).st_size
    _reply({**message, "size": size})
    sent = 0
    while sent < size:
        chunk = os.pread(output.fileno(), min(_READ_BYTES, size - sent), sent)
        sys.stdout.buffer.write(chunk or b"\0" * (size - sent))
        sent += len(chunk) or size - sent
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
