"""Make a virtual environment from a lock file, again only when that file changes.

    python3 tools/setup_venv.py .venv requirements-dev.txt
    .venv/bin/python tools/setup_venv.py .venv-miles tests/miles/requirements.txt 3.11

Without a version the environment is of the Python that runs this; with one uv, which has to be installed beside that
Python, finds or fetches it. Standard library only. A second call for the same folder waits for the first, also where
that one was killed and an installer of it still runs. A lock file that names torch gets its CPU build: the one that
pip finds where it is configured to look, else PyTorch's own.
"""

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).resolve().parents[1]
_DEV_LOCK = _ROOT / "requirements-dev.txt"


def main() -> int:
    folder, requirements, *version = sys.argv[1:]
    folder, requirements = Path(folder).absolute(), Path(requirements)
    parts = [requirements.read_text(), sys.version, *version]
    wanted = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    with open(f"{folder}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = folder / "installed.sha256"
        if stamp.is_file() and stamp.read_text() == wanted:
            return 0
        print(f"installing {folder.name} from {requirements}", flush=True)
        try:
            _Installer(folder, lock).install(requirements, *version)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            return _fail(folder, error)
        stamp.write_text(wanted)
    return 0


class _Installer:
    """Runs the installers, each of which holds the folder's lock for as long as it lives."""

    def __init__(self, folder: Path, lock: IO[str]) -> None:
        self._folder = folder
        self._python = folder / "bin" / "python"
        self._lock = lock

    def install(self, requirements: Path, version: str | None = None) -> None:
        """Make the environment anew.

        Raises:
            CalledProcessError: an installer failed.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        uv = self._make_with_uv(version) if version else self._make()
        arguments = [] if self._pip_has_cpu_torch(requirements) else ["--torch-backend", "cpu"]
        self._run(uv, "pip", "sync", "--quiet", "--python", self._python, *arguments, requirements)

    def _make(self) -> Path:
        self._run(sys.executable, "-m", "venv", self._folder)
        self._pip("install", _pinned("uv", _DEV_LOCK))
        return self._folder / "bin" / "uv"

    def _make_with_uv(self, version: str) -> Path:
        uv = Path(sys.executable).parent / "uv"
        self._run(uv, "venv", "--quiet", "--seed", "--python", version, self._folder)
        return uv

    def _pip_has_cpu_torch(self, requirements: Path) -> bool:
        """Install torch's CPU build with pip; True where it did, or where the lock file names no torch."""
        torch = _pinned("torch", requirements)
        if torch is None:
            return True
        try:
            self._pip("install", "--no-deps", "--no-compile", f"{torch}+cpu")
        except subprocess.CalledProcessError:
            return False
        return True

    def _pip(self, *arguments: str) -> None:
        self._run(self._python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)

    def _run(self, *command: object) -> None:
        subprocess.run(
            [str(word) for word in command], check=True, capture_output=True, pass_fds=[self._lock.fileno()]
        )


def _pinned(package: str, requirements: Path) -> str | None:
    """The lock file's ``package==version``."""
    match = re.search(rf"^{package}==[^\s;]+", requirements.read_text(), re.MULTILINE)
    return match[0] if match else None


def _fail(folder: Path, error: Exception) -> int:
    output = (getattr(error, "stderr", None) or getattr(error, "stdout", None) or b"").decode(errors="replace")
    reason = "install the system's `python3-venv`" if "ensurepip" in output else "is the package index reachable?"
    print(f"error: {folder.name} could not be made; {reason}\n{error}\n{output.strip()[-1500:]}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
