"""Make the project's virtual environment from requirements-dev.txt, again only when that file changes.

    python3 tools/setup_venv.py .venv

Standard library only; a second call that runs at the same time waits for the first.
"""

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

_LOCK = Path(__file__).resolve().parents[1] / "requirements-dev.txt"
_OLDEST = (3, 10)


def main() -> int:
    if sys.version_info < _OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        return _fail(f"Python {'.'.join(map(str, _OLDEST))} or newer is needed, found {found}: make PYTHON=<path>")
    folder = Path(sys.argv[1]).absolute()
    wanted = hashlib.sha256(_LOCK.read_bytes() + sys.version.encode()).hexdigest()
    with open(f"{folder}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = folder / "installed.sha256"
        if stamp.is_file() and stamp.read_text() == wanted:
            return 0
        print(f"installing the project's environment in {folder.name}", flush=True)
        try:
            _install(folder)
        except subprocess.CalledProcessError as error:
            output = (error.stderr or error.stdout or b"").decode(errors="replace").strip()
            reason = (
                "install the system's `python3-venv`" if "ensurepip" in output else "is the package index reachable?"
            )
            return _fail(f"{folder.name} could not be made; {reason}\n{output[-1500:]}")
        stamp.write_text(wanted)
    return 0


def _install(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    uv = re.search(r"^uv==\S+", _LOCK.read_text(), re.MULTILINE)[0]
    _run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", uv)
    _run(folder / "bin" / "uv", "pip", "sync", "--quiet", "--python", folder / "bin" / "python", _LOCK)


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
