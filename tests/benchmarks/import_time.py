"""How long Python takes to import the connector, beside what it needs: aiohttp, and the interpreter itself."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyperf

from .machine import EXAMPLE
from .report import Part

_STATEMENTS = {
    "nothing": "pass",
    "aiohttp": "import aiohttp",
    "nemogym_agent_function": "import nemogym_agent_function",
    "nemogym_preflight": "import nemogym_preflight",
}


def run(rounds: int) -> Part:
    """pyperf's mean of whole interpreters that import one module each."""
    with tempfile.TemporaryDirectory(prefix="nemo-gym-bench-") as folder:
        rows = [_row(name, statement, Path(folder, f"{name}.json")) for name, statement in _STATEMENTS.items()]
    return Part("import", "a fresh interpreter that imports", rows)


def _row(name: str, statement: str, result: Path) -> dict:
    pyperf_command = [sys.executable, "-m", "pyperf", "command", "--fast", "--quiet", "-o", str(result)]
    subprocess.run(
        [*pyperf_command, "--inherit-environ=PYTHONPATH", "--", sys.executable, "-c", statement],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    benchmark = pyperf.Benchmark.load(str(result))
    return {"module": name, "ms": 1000 * benchmark.mean(), "stdev_ms": 1000 * benchmark.stdev()}
