"""make data: what it reads and writes, as the script is called."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make_data(tmp_path: Path, *settings: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``make data`` with a Python that only prints its arguments; the project's environment is not made."""
    stand_in = tmp_path / "venv" / "bin" / "python"
    stand_in.parent.mkdir(parents=True, exist_ok=True)
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    unset = ("INPUT", "OUTPUT", "DATA", "SPLIT", "SUBSET", "LIMIT", "ARGS", "MAKEFLAGS", "MAKELEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    command = ["make", "--no-print-directory", "data", f"VENV={stand_in.parents[1]}", "PYTHON=true", *settings]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**inherited, **environment})


@pytest.mark.parametrize(
    "settings, options",
    [
        ([], "--output outputs/swe_verified.jsonl"),
        (["OUTPUT=a b.jsonl", "LIMIT=5"], "--output 'a b.jsonl' --limit 5"),
        (["INPUT=x.json", "OUTPUT=y.jsonl", "SPLIT=dev", "SUBSET=gym"], None),
        (
            ["ARGS=--only ids.txt --no-known-flaky"],
            "--output outputs/swe_verified.jsonl --only ids.txt --no-known-flaky",
        ),
    ],
)
def test_settings_become_options(tmp_path, settings, options):
    options = options or "--output y.jsonl --input x.json --split dev --subset gym"
    done = make_data(tmp_path, *settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == shlex.split(options)


@pytest.mark.parametrize(
    "settings, said",
    [
        (["INPUT=rows.jsonl"], "make data INPUT=rows.jsonl OUTPUT=<file.jsonl>"),
        (["DATA=rows.jsonl"], "DATA names what a scan reads; here INPUT is read and OUTPUT is written"),
    ],
)
def test_what_would_be_written_under_a_wrong_name_is_refused(tmp_path, settings, said):
    done = make_data(tmp_path, *settings)
    assert done.returncode == 2 and said in done.stderr and done.stdout == ""


def test_rows_of_a_scan_in_the_environment_are_not_an_input(tmp_path):
    done = make_data(tmp_path, DATA="rows.jsonl")
    assert done.returncode == 0 and done.stdout.splitlines()[1:] == ["--output", "outputs/swe_verified.jsonl"]
