"""The machine and the versions that figures belong to."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "experimental" / "nemo-gym"

_PACKAGES = ("aiohttp", "httpx", "orjson", "requests", "pyperf")


def circumstances(command: str) -> dict[str, Any]:
    """When, where and of what code: ``date``, ``command``, ``commit``, ``machine`` and ``versions``.

    Args:
        command: what was run, as a person would type it.
    """
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "command": command,
        "commit": _git("describe", "--always", "--dirty", "--abbrev=10"),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": f"{platform.freedesktop_os_release().get('PRETTY_NAME', '')}, Linux {platform.release()}",
            "load_before": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), **versions},
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout.strip() or None
