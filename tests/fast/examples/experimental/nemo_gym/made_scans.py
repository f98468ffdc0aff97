"""Made-up results of scans: the same at every call, of invented tasks, in the shape of real ones.

    from the repository's root, the folder of the example on PYTHONPATH:
    python -m tests.fast.examples.experimental.nemo_gym.made_scans <folder> [number of tasks]
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from scan_results import as_record
from scan_statistics import Episode

# Invented repositories: share of all tasks, how often a policy solves one, median seconds of an episode.
REPOSITORIES = {
    "example/webframe": (0.36, 0.30, 240),
    "example/symbols": (0.17, 0.22, 420),
    "example/plots": (0.11, 0.34, 300),
    "example/learn": (0.10, 0.42, 200),
    "example/docs": (0.09, 0.24, 160),
    "example/arrays": (0.06, 0.38, 330),
    "example/stars": (0.05, 0.33, 280),
    "example/checks": (0.03, 0.27, 130),
    "example/http": (0.02, 0.62, 60),
    "example/tables": (0.01, 0.02, 520),
}
TRACEBACK = """Traceback (most recent call last):
  File "/opt/gym/app.py", line 311, in run
    sandbox = await provider.create(image)
  File "/opt/gym/sandbox.py", line 88, in create
    raise SandboxCreateError(message)
SandboxCreateError: pull of docker.io/swebench/sweb.eval.x86_64.{id}:latest failed: toomanyrequests
"""


def report_of(
    instance_id: str, *, failing: list[str] = (), passing: list[str] = ("tests/test_core.py::test_one",)
) -> dict:
    """A graded episode's report."""
    tests = {"FAIL_TO_PASS": {"success": list(passing), "failure": list(failing)}, "PASS_TO_PASS": {}}
    return {"instance_id": instance_id, "eval_report": {instance_id: {"tests_status": tests}}}


def record(instance_id: str = "a__b-1", **fields: Any) -> dict[str, Any]:
    """A line of a results file: a gold episode that scored 1.0, but for ``fields``."""
    eval_report = fields.pop("eval_report", report_of(instance_id))
    given = {"repo": "a/b", "kind": "gold", "attempt": 1, "reward": 1.0, "exit_status": "Submitted", "seconds": 2.0}
    return as_record(Episode(instance_id=instance_id, **{**given, "task": "0" * 16, **fields}), eval_report)


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def make_scans(folder: Path, *, tasks: int = 500, golden_passes: int = 3, passes: int = 8) -> dict[str, Path]:
    """Write ``golden.jsonl``, ``policy-base.jsonl`` and ``policy-step-200.jsonl``, the later policy a little better.

    Args:
        folder: where to.
        tasks: how many.
        golden_passes: episodes of each task with its gold patch; one more with an empty one.
        passes: episodes of each task and policy.

    Returns:
        The paths by the stems of their names.
    """
    chosen = random.Random(7)
    ids = [_task(number, chosen) for number in range(tasks)]
    files = {"golden": _golden(ids, chosen, golden_passes)}
    for name, gain in (("policy-base", 1.0), ("policy-step-200", 1.45)):
        files[name] = [one for task in ids for one in _policy(task, random.Random(f"{name}{task[0]}"), gain, passes)]
    return {name: write_lines(folder / f"{name}.jsonl", records) for name, records in files.items()}


def _task(number: int, chosen: random.Random) -> tuple[str, str, float, float]:
    """Id, repository, how often a policy solves it, how it fares with its own patch (0 to 1)."""
    repo = chosen.choices([*REPOSITORIES], weights=[share for share, _, _ in REPOSITORIES.values()])[0]
    mean = REPOSITORIES[repo][1]
    ease = chosen.betavariate(0.7 * mean + 0.08, 0.7 * (1 - mean) + 0.12)
    return f"{repo.replace('/', '__')}-{1000 + 7 * number}", repo, ease, chosen.random()


def _seconds(repo: str, chosen: random.Random, *, share: float = 1.0) -> float:
    return round(chosen.lognormvariate(0, 0.55) * REPOSITORIES[repo][2] * share, 3)


def _failing(instance_id: str, chosen: random.Random) -> list[str]:
    names = ("test_round_trip", "test_empty_input", "test_nested[None]", "test_raises_on_unknown_key", "test_unicode")
    return [f"tests/test_{instance_id[-3:]}.py::{name}" for name in names[: chosen.randint(1, len(names))]]


def _golden(ids: list, chosen: random.Random, passes: int) -> list[dict[str, Any]]:
    records = []
    for attempt in range(1, passes + 1):
        for instance_id, repo, _, fate in ids:
            about = {"repo": repo, "attempt": attempt, "seconds": _seconds(repo, chosen, share=0.12)}
            failing = _failing(instance_id, random.Random(instance_id))
            if fate < 0.035 or (fate < 0.06 and attempt == passes):
                fields = {"reward": 0.0, "eval_report": report_of(instance_id, failing=failing)}
            elif 0.06 <= fate < 0.072 and attempt == 1:
                trace = TRACEBACK.format(id=instance_id)
                fields = {
                    "reward": None,
                    "exit_status": "SandboxUnavailable",
                    "eval_report": {"error": "SandboxCreateError", "traceback": trace},
                    "detail": trace.splitlines()[-1],
                }
            else:
                fields = {}
            records.append(record(instance_id, **about, **fields))
            if attempt == 1:
                passes_anyway = 0.072 <= fate < 0.084
                null = {"kind": "null", "reward": 1.0} if passes_anyway else {"kind": "null", "reward": 0.0}
                report = report_of(instance_id, failing=[] if passes_anyway else failing)
                records.append(record(instance_id, **{**about, "attempt": 1}, **null, eval_report=report))
    return records


def _policy(task: tuple, chosen: random.Random, gain: float, passes: int) -> list[dict[str, Any]]:
    instance_id, repo, ease, fate = task
    ease = 0.0 if fate < 0.035 else ease ** (1 / gain)
    records = []
    for attempt in range(1, passes + 1):
        turns = max(int(chosen.gauss(24, 9)), 3)
        about = {
            "repo": repo,
            "kind": "policy",
            "attempt": attempt,
            "policy": "made-up-8b",
            "sampling": {"temperature": 1.0},
        }
        about |= {"seconds": _seconds(repo, chosen), "agent_metrics": {"turns": turns, "tool_calls": turns}}
        if chosen.random() < ease:
            fields = {"reward": 1.0}
        else:
            status = chosen.choices(
                ("Submitted", "LimitsExceeded", "ContextLengthExceeded", "TimeLimitExceeded", "PolicyEndpointError"),
                weights=(70, 18, 7, 3, 2),
            )[0]
            fields = {"reward": None if status == "PolicyEndpointError" else 0.0, "exit_status": status}
            if status == "PolicyEndpointError":
                trace = "Traceback (most recent call last):\nlitellm.InternalServerError: connection closed by the engine\n"
                fields |= {
                    "eval_report": {"error": "InternalServerError", "traceback": trace},
                    "detail": trace.split("\n")[1],
                }
            else:
                fields["eval_report"] = report_of(
                    instance_id, failing=_failing(instance_id, random.Random(instance_id))
                )
        records.append(record(instance_id, **about, **fields))
    return records


if __name__ == "__main__":
    for written in make_scans(Path(sys.argv[1]), tasks=int(sys.argv[2]) if len(sys.argv) > 2 else 500).values():
        print(written)


# --- what a server may send -------------------------------------------------------

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`&amp;{{7*7}}${1}<!--"


STEERING = "\x1b]0;owned\x07\x1b[2J\u202egnp.exe\u2066\x9b31m\r\x00"


def hostile_scans(folder: Path) -> list[Path]:
    """Scans in which every text that can come from outside is an attack."""
    about = {"repo": f"x/{EVIL}{STEERING}", "task": EVIL}
    ids = (f"a__{EVIL}{STEERING}", "javascript:alert(3)")
    trace = f"Traceback\n  {EVIL}\n{STEERING}: javascript:alert(4)\n"
    lines = []
    for instance_id in ids:
        tests = report_of(instance_id, failing=[f"t::{EVIL}", f"u::{STEERING}", "javascript:alert(5)"])
        lines.append(record(instance_id, **about, reward=0.0, eval_report=tests, detail=EVIL))
        error = {"traceback": trace, "error": EVIL}
        fields = {"reward": None, "exit_status": "ServerError", "detail": EVIL + STEERING}
        lines.append(record(instance_id, **about, **fields, kind="null", eval_report=error))
    golden = write_lines(folder / "golden.jsonl", lines)
    policy = {"kind": "policy", "policy": f"javascript:alert(6){EVIL}{STEERING}", "sampling": {"temperature": 1}}
    lines = [record(one, **about, **policy, attempt=n, reward=float(n == 1)) for one in ids for n in (1, 2)]
    return [golden, write_lines(folder / f"{EVIL[:9].replace('/', '')}.jsonl", lines)]
