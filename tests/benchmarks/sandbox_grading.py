"""One task's grading without NeMo Gym: a JSON request on stdin, seconds of each step on stdout.

Runs in NeMo Gym's environment, which has the sandbox's provider and swebench. It does in the same sandbox what
``_run_eval_v2`` of ``responses_api_agents/mini_swe_agent_2/app.py`` does there: it applies the gold patch, runs swebench's
script of the tests and reads what they printed.
"""

import asyncio
import json
import sys
import tempfile
import time
from contextlib import contextmanager

from nemo_gym.sandbox.providers.base import SandboxSpec
from nemo_gym_bubblewrap.provider import BubblewrapProvider
from swebench.harness.grading import get_eval_report
from swebench.harness.test_spec.test_spec import make_test_spec

_MARKS = {">>>>> Start Test Output": "start", ">>>>> End Test Output": "end"}


async def grade(provider: BubblewrapProvider, request: dict) -> dict[str, float]:
    """Seconds of one grading, by step.

    Raises:
        RuntimeError: the gold patch is not graded as resolved.
    """
    task, seconds = request["task"], {}

    @contextmanager
    def timed(step: str):
        start = time.monotonic()
        yield
        seconds[step] = time.monotonic() - start

    with timed("sandbox"):
        sandbox = await provider.create(SandboxSpec(image=request["image"]))
    try:
        spec = make_test_spec(task)
        patch = f"git apply - <<'EOF_OF_PATCH'\n{task['patch']}\nEOF_OF_PATCH"
        with timed("patch"):
            await provider.exec(sandbox, patch, cwd="/testbed", timeout_s=60)
        with timed("script"):
            ran = await provider.exec(sandbox, _with_clock(spec.eval_script), cwd="/testbed", timeout_s=300)
        with timed("report"), tempfile.NamedTemporaryFile("w", suffix=".txt") as log:
            log.write(ran.stdout)
            log.flush()
            prediction = {"instance_id": spec.instance_id, "model_patch": task["patch"]}
            report = get_eval_report(spec, prediction, log.name, include_tests_status=True)
    finally:
        with timed("close"):
            await provider.close(sandbox)
    if not report[spec.instance_id]["resolved"]:
        raise RuntimeError(f"expected the gold patch of {spec.instance_id} to be resolved: {ran.stdout[-1000:]}")
    clock = dict(line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("clock-of-the-benchmark "))
    return {**seconds, "tests": float(clock["end"]) - float(clock["start"])}


def _with_clock(script: str) -> str:
    """The script with the time printed where its tests start and end."""
    lines = []
    for line in script.replace("#!/bin/bash", "").splitlines():
        mark = next((name for text, name in _MARKS.items() if text in line), None)
        tell = f'echo "clock-of-the-benchmark {mark} $EPOCHREALTIME"'
        lines += {"start": [tell, line], "end": [line, tell]}.get(mark, [line])
    return "\n".join(lines)


async def main() -> None:
    request = json.load(sys.stdin)
    provider = BubblewrapProvider(request["image_root"])
    print(json.dumps(await grade(provider, request)))


if __name__ == "__main__":
    asyncio.run(main())
