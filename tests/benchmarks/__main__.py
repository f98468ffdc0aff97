"""Benchmarks: ``make bench``, or ``make bench PART=connector`` for one of them.

    python -m tests.benchmarks [part ...] [--rounds 3] [--output outputs/benchmarks.json] [--check-only]

Each part prints a table and what has to hold of it. Figures are of this machine as it is now: leave it alone meanwhile.

Exit status: 0 measured, 1 measured and a claim does not hold, 2 a part does not exist or the file cannot be written, 130 interrupted.
"""

import argparse
import importlib
import json
import os
import resource
import shlex
import signal
import sys
import tempfile
from pathlib import Path

from .machine import REPOSITORY, circumstances
from .report import Part

# By name, the module whose ``run`` measures it: what they import is installed only where something is measured.
PARTS = {
    "connector": "connector",
    "growth": "growth",
    "data": "data_script",
    "import": "import_time",
    "stack": "stack",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="See tests/benchmarks/README.md.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; all when none is named")
    parser.add_argument("--rounds", type=int, default=1, help="how often each figure is taken; the median is shown")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "outputs" / "benchmarks.json")
    parser.add_argument("--check-only", action="store_true", help="check the other options and measure nothing")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"expected parts of {', '.join(PARTS)}, found {', '.join(unknown)}")
    if options.rounds < 1:
        parser.error(f"expected --rounds to be at least 1, found {options.rounds}")
    _check_writable(options.output)
    if options.check_only:
        return 0
    _allow_many_sockets()
    found = circumstances(shlex.join(["python", "-m", "tests.benchmarks", *sys.argv[1:]]))
    parts: list[Part] = []
    for name in options.parts or PARTS:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        parts.append(importlib.import_module(f".{PARTS[name]}", __package__).run(options.rounds))
        print(f"\n{parts[-1]}\n", flush=True)
        _write(options.output, {**found, "parts": {part.name: part.as_json() for part in parts}})
    print(f"written to {options.output}", file=sys.stderr)
    return int(not all(claim.holds for part in parts for claim in part.claims))


def _allow_many_sockets() -> None:
    """As many open files as this user may have, for this process and those that it starts."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _check_writable(path: Path) -> None:
    """Measuring takes minutes: whether its result can be written is told before."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        print(f"error: expected --output to name a file that can be written, found {error}", file=sys.stderr)
        sys.exit(2)


def _write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without an orderly stop of what was started
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
