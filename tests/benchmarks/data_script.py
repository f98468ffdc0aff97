"""The data script beside a loop that only reads, wraps and writes."""

import json
import sys
import tempfile
from pathlib import Path

from .machine import EXAMPLE
from .payloads import task_row
from .processes import run_counted
from .report import Claim, Part, medians

ROWS = 20_000


def run(rounds: int) -> Part:
    """Both on the same rows of 20 KB, in turn, ``rounds`` times; whole processes, their start included."""
    with tempfile.TemporaryDirectory(prefix="nemo-gym-bench-") as folder:
        source, output = Path(folder, "rows.jsonl"), Path(folder, "prompts.jsonl")
        _write_rows(source)
        script = [EXAMPLE / "download_and_process_data.py", "--input", source, "--output", output]
        programs = {
            "data script": script,
            "bare loop": [Path(__file__).with_name("bare_loop.py"), source, output],
        }
        rows = [
            _row(name, [sys.executable, *program], output) for _ in range(rounds) for name, program in programs.items()
        ]
    rows = medians(rows, by=("program",))
    ours, bare = rows
    claims = [Claim("CPU of the data script, of a bare loop's", ours["cpu_s"] / bare["cpu_s"], 2.0)]
    return Part("data", f"{ROWS:,} rows of 20 KB, JSONL to JSONL", rows, claims)


def _row(name: str, command: list, output: Path) -> dict:
    found = run_counted(command)
    return {
        "program": name,
        "cpu_s": found["cpu_s"],
        "rows per CPU second": ROWS / found["cpu_s"],
        "wall_s": found["wall_s"],
        "memory_mib": found["memory_mib"],
        "output_mib": output.stat().st_size / 2**20,
    }


def _write_rows(path: Path) -> None:
    with path.open("w") as file:
        for index in range(ROWS):
            row = {**task_row(index), "instance_id": f"marshmallow-code__marshmallow-{index}"}
            file.write(json.dumps(row) + "\n")
