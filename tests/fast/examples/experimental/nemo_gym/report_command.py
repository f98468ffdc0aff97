"""report.py as its user runs it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from report import app
from typer.testing import CliRunner

from . import EXAMPLE_DIR

COMMAND = [sys.executable, str(EXAMPLE_DIR / "report.py")]


def report_process(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [*COMMAND, *arguments]
    return subprocess.run(command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=60)


def report_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Runs the report in this process, which imports matplotlib once, and in ``folder``."""
    monkeypatch.chdir(folder)

    def _report(*arguments: object) -> SimpleNamespace:
        done = CliRunner().invoke(app, [*map(str, arguments)])
        return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)

    return _report
