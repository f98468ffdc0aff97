"""What the data script knows of the grader, against the grader itself: swebench as the local stack has it."""

import json
import os
import subprocess
from pathlib import Path

from download_and_process_data import convert
from swebench_rows import eval_script_bytes, ungradable_reason

ROOT = Path(__file__).resolve().parents[2]

_SCRIPT_LENGTHS = """
import json, sys
from swebench.harness.test_spec.test_spec import make_test_spec
for line in open(sys.argv[1]):
    print(len(make_test_spec(json.loads(line)["metadata"]).eval_script.encode()))
"""


def _in_gym(paths, *command: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [paths.gym_python, *command], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300
    )


def test_list_is_that_of_the_pinned_grader(paths):
    done = _in_gym(paths, "tools/eval_specs.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_local_tasks_can_be_graded_and_their_scripts_are_as_long_as_thought(paths, tasks):
    done = _in_gym(paths, "-c", _SCRIPT_LENGTHS, paths.tasks)
    assert done.returncode == 0, done.stderr
    for task, length in zip(tasks, map(int, done.stdout.split()), strict=True):
        assert ungradable_reason(task) is None
        assert length <= eval_script_bytes(task) <= length + 2048, task["instance_id"]


def test_local_tasks_convert_to_what_can_be_scanned(paths, tmp_path):
    report = convert(str(paths.tasks), tmp_path / "prompts.jsonl")
    assert (report.left_out, report.kept) == ({}, {})
    converted = [json.loads(line)["metadata"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    originals = [json.loads(line)["metadata"] for line in paths.tasks.read_text().splitlines()]
    assert [row["image_name"] for row in converted] == [row["image_name"] for row in originals]
