"""Set the local stack up: an interpreter, NeMo Gym's environment, the sandbox provider, the tasks.

Everything is made once, kept, and made again when what it is made from changes.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from local_stack.docker_engine import check_engine
from local_stack.docker_images import load_images
from local_stack.paths import GYM_PYTHON, GYM_REQUIREMENTS, SOURCE, TASK_RECIPE, Paths, StackError
from local_stack.processes import locked, run_child

_DESCRIBE = "import json, sys; print(json.dumps([sys.base_prefix, sys.version_info[:3]]))"
_FULL = ".".join(map(str, GYM_PYTHON))
_SERIES = ".".join(map(str, GYM_PYTHON[:2]))
_PROVIDERS = (SOURCE / "bubblewrap", SOURCE.parent / "docker_sandbox")


@dataclass(frozen=True)
class Interpreter:
    """A CPython on this machine.

    Args:
        prefix: where it is installed.
        version: major, minor, micro.
    """

    prefix: Path
    version: tuple[int, int, int]

    @property
    def executable(self) -> Path:
        """Its program."""
        return self.prefix / "bin" / "python3"


def set_up(paths: Paths, *, docker: bool = False) -> None:
    """Make whatever of the local stack is missing or out of date.

    Args:
        paths: where it is kept.
        docker: make docker images of the tasks, too. The tasks are proven in bubblewrap either way.

    Raises:
        StackError: a step failed; what was finished before it is kept.
    """
    os.umask(0o022)  # as root a sandbox runs as another user, who must be able to read what is installed here
    with locked(paths.root / "setup.lock", waiting="waiting for another set-up of the local stack to finish"):
        uv = find_uv()
        if shutil.which("git") is None:
            raise StackError("git is needed to build the tasks: install the system's `git` package")
        if docker:
            check_engine()
        python = _find_python_once(paths, uv=uv)
        _install_gym(paths, uv=uv, python=python)
        _check_sandbox(paths)
        _build_tasks(paths, uv=uv, python=python)
        if docker:
            tasks = [json.loads(line)["metadata"] for line in paths.tasks.read_text().splitlines()]
            load_images(paths.images, tasks=tasks)


def find_uv() -> str:
    """Return the path of uv: the one of this environment, else the one on PATH.

    Raises:
        StackError: there is none.
    """
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if not found:
        raise StackError("uv is needed to install NeMo Gym: `pip install uv`")
    return found


def find_python(uv: str) -> Interpreter:
    """Find or fetch the interpreter for NeMo Gym: LOCAL_STACK_PYTHON, one that it declares, or an older 3.13.

    Args:
        uv: path of uv.

    Raises:
        StackError: there is no Python 3.13.
    """
    if chosen := os.environ.get("LOCAL_STACK_PYTHON"):
        interpreter = _describe(chosen)
        if interpreter is None or interpreter.version[:2] != GYM_PYTHON[:2]:
            raise StackError(f"LOCAL_STACK_PYTHON={chosen}: expected a Python {_SERIES} interpreter")
        return interpreter
    declared = f">={_FULL},<{GYM_PYTHON[0]}.{GYM_PYTHON[1] + 1}"
    if interpreter := _uv_find(uv, declared):
        return interpreter
    print(f"fetching Python {_SERIES} (NeMo Gym declares >= {_FULL})", flush=True)
    fetched = run_child([uv, "python", "install", "--quiet", _SERIES], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if interpreter := _uv_find(uv, declared):
        return interpreter
    older = [found for found in (_uv_find(uv, _SERIES), *map(_describe, _pyenv_pythons())) if found]
    if not older:
        reason = (fetched.stderr.strip().splitlines() or ["no message"])[-1].strip()
        raise StackError(
            f"NeMo Gym needs Python {_SERIES}: none was found and uv could not fetch one ({reason}). "
            "Install it and name it in LOCAL_STACK_PYTHON."
        )
    best = max(older, key=lambda interpreter: interpreter.version)
    found = ".".join(map(str, best.version))
    print(f"NeMo Gym declares Python >= {_FULL}, which could not be fetched; going on with {found}", flush=True)
    return best


def _find_python_once(paths: Paths, *, uv: str) -> Interpreter:
    """Find the interpreter again only when the one found before is gone or another is asked for."""
    record = paths.root / "python.json"
    chosen = os.environ.get("LOCAL_STACK_PYTHON", "")
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads(record.read_text())
        interpreter = _describe(str(Path(known["prefix"]) / "bin" / "python3"))
        if interpreter and known["chosen"] == chosen:
            return interpreter
    interpreter = find_python(uv)
    record.write_text(json.dumps({"prefix": str(interpreter.prefix), "chosen": chosen}))
    return interpreter


def _uv_find(uv: str, request: str) -> Interpreter | None:
    done = run_child(
        [uv, "python", "find", "--no-project", "--system", request], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return _describe(done.stdout.strip()) if done.returncode == 0 else None


def _describe(executable: str) -> Interpreter | None:
    try:
        done = run_child([executable, "-I", "-c", _DESCRIBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        prefix, version = json.loads(done.stdout)
    except (OSError, ValueError):
        return None
    return Interpreter(prefix=Path(prefix), version=tuple(version))


def _pyenv_pythons() -> list[str]:
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    return [str(prefix / "bin" / "python3") for prefix in sorted(versions.glob(f"{_SERIES}.*"))]


def _install_gym(paths: Paths, *, uv: str, python: Interpreter) -> None:
    """Install NeMo Gym and the sandbox providers; the stamps are written last, so that half an install is redone."""
    stamp = paths.gym / "requirements.sha256"
    wanted = _digest([GYM_REQUIREMENTS.read_text(), str(python.prefix), *map(str, python.version)])
    if not stamp.is_file() or stamp.read_text() != wanted:
        print("installing NeMo Gym in an environment of its own (about 1.4 GB)", flush=True)
        shutil.rmtree(paths.gym, ignore_errors=True)
        _uv_run([uv, "venv", "--quiet", "--python", str(python.executable), str(paths.gym)])
        # An interpreter older than declared is accepted by resolving for the declared version.
        version = [] if python.version >= GYM_PYTHON else ["--python-version", _FULL]
        _uv_pip(uv, paths, "install", *version, "--no-deps", "--requirements", str(GYM_REQUIREMENTS))
        stamp.write_text(wanted)
    for provider in _PROVIDERS:
        stamp = paths.gym / f"{provider.name}.sha256"
        sources = sorted(path for path in provider.rglob("*") if path.suffix in (".py", ".sh", ".toml"))
        wanted = _digest([path.read_text() for path in sources])
        if not stamp.is_file() or stamp.read_text() != wanted:
            _uv_pip(uv, paths, "install", "--no-deps", "--reinstall", "--no-cache", str(provider))
            stamp.write_text(wanted)


def _uv_pip(uv: str, paths: Paths, *arguments: str) -> None:
    command, *rest = arguments
    _uv_run([uv, "pip", command, "--quiet", "--python", str(paths.gym_python), *rest])


def _uv_run(command: list[str]) -> None:
    done = run_child(command, stderr=subprocess.PIPE)
    if done.returncode:
        raise StackError(f"`{' '.join(command[1:3])}` failed; is the package index reachable?\n{done.stderr.strip()}")


def _check_sandbox(paths: Paths) -> None:
    done = run_child([str(paths.gym_python), "-m", "nemo_gym_bubblewrap.provider"], stderr=subprocess.PIPE)
    if done.returncode:
        raise StackError(
            f"this machine does not let a sandbox start: {done.stderr.strip()}\n"
            "Expected: root, or unprivileged user namespaces. Try `sudo sysctl -w kernel.unprivileged_userns_clone=1` "
            "(Debian), `sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu); inside a container, "
            "start it with --privileged."
        )


def _build_tasks(paths: Paths, *, uv: str, python: Interpreter) -> None:
    builder = SOURCE / "build_tasks.py"
    stamp = paths.root / "tasks.sha256"
    wanted = _digest([TASK_RECIPE.read_text(), builder.read_text(), str(python.prefix), *map(str, python.version)])
    if paths.tasks.is_file() and stamp.is_file() and stamp.read_text() == wanted:
        return
    print("building the tasks and proving each: gold patch 1.0, empty patch 0.0", flush=True)
    command = [str(paths.gym_python), str(builder), "--recipe", str(TASK_RECIPE)]
    command += ["--root", str(paths.root), "--python", str(python.prefix), "--uv", uv]
    if run_child(command).returncode:
        raise StackError("the tasks were not built; the reason is above. What was finished is kept: run it again.")
    stamp.write_text(wanted)


def _digest(parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
