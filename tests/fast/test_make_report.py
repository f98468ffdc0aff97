"""make report: what it reads and writes, as the script is called."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make_report(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Run ``make report`` in a folder, with a Python that only prints its arguments."""
    stand_in = folder / "venv" / "bin" / "python"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    unset = ("SCANS", "OUTPUT", "ARGS", "MAKEFLAGS", "MAKELEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), "report", f"VENV={folder}/venv"]
    command += ["PYTHON=true", *settings]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    "settings, arguments",
    [
        ([], ["outputs/golden.jsonl", "outputs/policy.jsonl", "--output", "outputs/report.html"]),
        (["SCANS=a.jsonl dump/", "OUTPUT=a b.html"], ["a.jsonl", "dump/", "--output", "a b.html"]),
        (
            ["SCANS=a.jsonl", "ARGS=--solve-rate 0.1:0.9"],
            ["a.jsonl", "--output", "outputs/report.html", "--solve-rate", "0.1:0.9"],
        ),
    ],
)
def test_settings_become_arguments(tmp_path, settings, arguments):
    (tmp_path / "outputs").mkdir()
    for name in ("golden.jsonl", "policy.jsonl", "policy-solve.jsonl"):
        (tmp_path / "outputs" / name).touch()
    done = make_report(tmp_path, *settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == arguments


def test_without_a_scan_it_says_what_to_run(tmp_path):
    done = make_report(tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "error: no results of a scan are in outputs; run make golden-scan" in done.stderr
