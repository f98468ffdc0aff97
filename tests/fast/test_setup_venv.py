"""tools/setup_venv.py and the Makefile's use of it, without a package index: the installers are stand-ins."""

import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "setup_venv.py"


@pytest.fixture
def installer(tmp_path):
    """A module ``venv`` on PYTHONPATH that says it started and waits to be let go."""
    package = tmp_path / "stand_in" / "venv"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "folder.with_suffix('.started').touch()\n"
        "while not folder.with_suffix('.go').exists(): time.sleep(0.02)\n"
    )
    return package.parent


def start(folder: Path, requirements: Path, stand_in: Path, *version: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, SCRIPT, folder, requirements, *version],
        env={**os.environ, "PYTHONPATH": str(stand_in)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)


def is_locked(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_an_installer_that_outlives_a_killed_script_keeps_the_lock(tmp_path, installer):
    requirements = tmp_path / "requirements.txt"
    requirements.touch()
    folder = tmp_path / "environment"
    script = start(folder, requirements, installer)
    try:
        wait_for(folder.with_suffix(".started").exists)
        script.kill()
        script.wait()
        assert is_locked(Path(f"{folder}.lock"))
    finally:
        folder.with_suffix(".go").touch()
    wait_for(lambda: not is_locked(Path(f"{folder}.lock")))


def test_half_an_environment_is_not_taken_for_one(tmp_path, installer):
    requirements = tmp_path / "requirements.txt"
    requirements.touch()
    folder = tmp_path / "environment"
    folder.with_suffix(".go").touch()  # the stand-in makes no Python, so that the next step fails
    for _ in range(2):
        script = start(folder, requirements, installer)
        output, _ = script.communicate(timeout=60)
        assert script.returncode == 2 and "installing environment" in output
        assert "error: environment could not be made" in output


@pytest.mark.parametrize("version", ["Python 2.7.18", "Python 3.9.18"])
def test_make_names_a_python_that_is_too_old(tmp_path, version):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} >&2\nexit 1\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "-C", ROOT, "venv", f"PYTHON={python}"], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"Python 3.10 or newer is needed, found {version}: make PYTHON=<path>" in done.stderr
    assert "Traceback" not in done.stderr and "SyntaxError" not in done.stderr


@pytest.mark.parametrize("package", ["orjson", "jinja2", "matplotlib"])
def test_the_tests_run_with_what_is_used_where_it_is_installed(package):
    assert importlib.util.find_spec(package), f"expected {package}, which requirements-dev.txt lists"
