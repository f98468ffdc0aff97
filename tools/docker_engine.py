"""A docker engine of one's own, beside any that runs, gone without a trace when its command ends.

    python tools/docker_engine.py make golden-scan SANDBOX=docker
    python tools/docker_engine.py --check

Runs a command with DOCKER_HOST set, or only looks whether it could. Needs Linux, root, and docker's programs. Where those
are missing on Debian their packages are fetched and unpacked below LOCAL_STACK_DIR; nothing is installed, no service started.

1. The engine has its own mount and PID namespace. When this process ends, by SIGKILL too, the kernel ends the engine,
   its containers and its mounts.
2. Images and containers are in memory, at most DOCKER_ENGINE_MIB (2048) of it.
3. It reaches registries on 127.0.0.1 and no others: a pull from anywhere else fails at once.

What is left after SIGKILL, a folder with a log and empty control groups, is removed by the next start.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "experimental" / "nemo-gym"))

from local_stack.paths import Paths, StackError
from local_stack.processes import is_locked, locked, run_child, start_child

_FOLDERS = Path("/tmp")  # a socket's path has to fit into 107 bytes
_PREFIX = "own-docker-"
_CGROUPS = Path("/sys/fs/cgroup")
_READY_TIMEOUT_S = 60.0
_POLL_S = 0.1
# By Debian's package; the registry is for tests of pulling.
_PROGRAMS = {
    "docker.io": ("docker", "dockerd", "containerd", "runc", "docker-init"),
    "docker-registry": ("docker-registry",),
    "util-linux": ("unshare", "nsenter", "mount"),
}
# Of the host's file system the engine sees all but /run, where it keeps its state, and its data folder.
_INIT = (
    "mount -t tmpfs none /run && mount -t tmpfs -o size={mib}m none {data} && exec docker-init -s -- sleep infinity"
)
_SEARCH_PATHS = {"PATH": ("usr/bin", "usr/sbin"), "LD_LIBRARY_PATH": ("lib/*-linux-gnu", "usr/lib/*-linux-gnu")}
_NO_REGISTRY = "http://127.0.0.1:9"


class EngineError(Exception):
    """There can be no engine here; the message says what is missing."""


@dataclass
class Engine:
    """An engine in namespaces of its own; it can be killed and started again on the same images.

    Args:
        folder: its socket, log and data.
        mib: room for its images and containers, MiB.
    """

    folder: Path
    mib: int = 2048
    _init: subprocess.Popen | None = field(default=None, init=False)
    _daemon: subprocess.Popen | None = field(default=None, init=False)

    @property
    def host(self) -> str:
        """The value of DOCKER_HOST."""
        return f"unix://{self.folder / 'socket'}"

    def docker(self, *arguments: str, check: bool = True, **options) -> str:
        """Run the docker client on this engine and return its output.

        Raises:
            subprocess.CalledProcessError: it failed, unless ``check`` is False.
        """
        command = ["docker", "--host", self.host, *arguments]
        return subprocess.run(command, check=check, stdout=subprocess.PIPE, text=True, **options).stdout

    def start(self) -> None:
        """Start the engine, or start it again after ``kill``.

        Raises:
            EngineError: it did not get ready; the message holds the end of its log.
        """
        if self._init is None:
            self._start_namespaces()
        command = ["dockerd", "--data-root", str(self.folder / "data"), "--host", self.host]
        command += ["--bridge=none", "--iptables=false", "--ip6tables=false"]
        command += ["--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", f"/{self.folder.name}"]
        proxies = {"HTTP_PROXY": _NO_REGISTRY, "HTTPS_PROXY": _NO_REGISTRY, "NO_PROXY": "127.0.0.1"}
        with (self.folder / "log").open("ab") as log:
            self._daemon = start_child(
                [*self._enter(), *command], stdout=log, stderr=log, env={**os.environ, **proxies}
            )
        self._wait_until_ready()

    def is_alive(self) -> bool:
        """Whether it has been started and has not ended since."""
        return self._daemon is not None and self._daemon.poll() is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the engine a signal, SIGKILL by default, and wait for its end; containers may live on for a moment."""
        script = f"kill -{number} $(cat /run/docker.pid)"
        subprocess.run([*self._enter(), "sh", "-c", script], check=True)
        self._daemon.wait()

    def stop(self) -> None:
        """End the engine, its containers and its mounts, and remove its folder."""
        if self._init is not None:
            # The namespace's first process ends after all others in it, and unshare after that one.
            for pid in self._children() or [self._init.pid]:
                os.kill(pid, signal.SIGKILL)
            self._init.wait()
        if self._daemon is not None:
            self._daemon.wait()
        _remove(self.folder)

    def _start_namespaces(self) -> None:
        data = self.folder / "data"
        data.mkdir()
        script = _INIT.format(mib=self.mib, data=data)
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
        with (self.folder / "log").open("ab") as log:
            self._init = start_child(command, stdin=subprocess.DEVNULL, stderr=log)

    def _enter(self) -> list[str]:
        """The command that runs another in the engine's namespaces."""
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not (pids := self._children()) or not _is_init(pids[0]):
            if self._init.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"no mount and PID namespace for an engine; root, but confined?\n{self._log_end()}")
            time.sleep(_POLL_S)
        return ["nsenter", "--target", str(pids[0]), "--mount", "--pid"]

    def _children(self) -> list[int]:
        """The first process of the namespaces, where there is one."""
        with contextlib.suppress(OSError):
            return list(map(int, Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()))
        return []

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        command = ["docker", "--host", self.host, "version"]
        while subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"dockerd did not get ready. The end of its log:\n{self._log_end()}")
            time.sleep(_POLL_S)

    def _log_end(self) -> str:
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-15:])


@contextlib.contextmanager
def running_engine(*, mib: int = 2048) -> Iterator[Engine]:
    """An engine of one's own while the block runs.

    Args:
        mib: room for its images and containers, MiB.

    Raises:
        EngineError: this machine cannot run one; the message says what is missing.
    """
    provide_programs()
    for left in _FOLDERS.glob(f"{_PREFIX}*"):
        if (left / "lock").exists() and not is_locked(left / "lock"):
            _remove(left)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_FOLDERS))
    with locked(folder / "lock"):
        engine = Engine(folder, mib=mib)
        try:
            engine.start()
            yield engine
        finally:
            engine.stop()


def provide_programs() -> None:
    """Put the programs that an engine needs on this process's PATH, from the packages of Debian where they are missing.

    Raises:
        EngineError: there can be no engine; the message names all that is missing.
    """
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise EngineError("a docker engine of one's own needs Linux and root")
    if _missing_packages() and shutil.which("apt-get"):
        _fetch_packages(_missing_packages(), folder=Paths.from_environment().root / "docker")
    if missing := _missing_packages():
        programs = ", ".join(name for package in missing for name in _PROGRAMS[package])
        raise EngineError(f"a docker engine of one's own needs the programs {programs}: install them and try again")


def _missing_packages() -> list[str]:
    return [package for package, names in _PROGRAMS.items() if not all(map(shutil.which, names))]


def _fetch_packages(packages: list[str], *, folder: Path) -> None:
    """Unpack packages of Debian, and those that they need, into a folder that programs are then found in."""
    root = folder / "root"
    with locked(folder / "lock"):
        if not root.is_dir():
            print(f"fetching Debian's {', '.join(packages)} into {folder}", flush=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                (Path(scratch) / "partial").mkdir()
                _run(["apt-get", "update", "-qq"])
                fetch = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "--download-only"]
                _run([*fetch, "-o", f"Dir::Cache::archives={scratch}", *packages])
                for package in Path(scratch).glob("*.deb"):
                    _run(["dpkg-deb", "--extract", str(package), f"{scratch}/root"])
                Path(scratch, "root").rename(root)
    for variable, folders in _SEARCH_PATHS.items():
        found = [str(place) for pattern in folders for place in sorted(root.glob(pattern))]
        os.environ[variable] = os.pathsep.join(filter(None, [*found, os.environ.get(variable)]))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise EngineError(f"`{' '.join(command[:2])}` failed: {done.stderr.strip()[-500:]}")


def _is_init(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == "docker-init"
    return False


def _remove(folder: Path) -> None:
    """Remove an ended engine's folder and the control groups of its containers."""
    for group in sorted(_CGROUPS.glob(f"**/{folder.name}"), reverse=True):
        for inner, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(inner)
    shutil.rmtree(folder, ignore_errors=True)


def _room() -> int:
    text = os.environ.get("DOCKER_ENGINE_MIB") or "2048"
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise EngineError(
            f"DOCKER_ENGINE_MIB: expected MiB as a whole number from 1 to this machine's memory, {most}, found {text!r}"
        )
    return int(text)


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if sys.argv[1] == "--check":
            provide_programs()
            return 0
        if shutil.which(sys.argv[1]) is None:
            raise EngineError(f"{sys.argv[1]} cannot be started: no such program")
        with running_engine(mib=_room()) as engine:
            status = run_child(sys.argv[1:], env={**os.environ, "DOCKER_HOST": engine.host}).returncode
            return status if status >= 0 else 128 - status
    except (EngineError, StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
