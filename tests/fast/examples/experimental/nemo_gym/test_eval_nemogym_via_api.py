"""The golden scan as its user runs it: a process, a server, files and exit statuses."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import eval_nemogym_via_api
import pytest

from . import EXAMPLE_DIR
from .conftest import CALL, OPENAPI, ROW, failed_body, golden_answer, graded_body

SCRIPT = EXAMPLE_DIR / "eval_nemogym_via_api.py"


def _row(number: int, **fields) -> dict:
    return {**ROW, "instance_id": f"psf__requests-{number}", **fields}


@pytest.fixture
def scan(stub, tmp_path):
    """Runs the scan on ``rows``; a str is written as it is."""
    stub.on_run = golden_answer

    def _scan(rows, *options: str, golden: bool = True) -> subprocess.CompletedProcess:
        return subprocess.run(_command(rows, *options, golden=golden), **_process(tmp_path), timeout=20)

    def _command(rows, *options: str, golden: bool = True) -> list[str]:
        path = tmp_path / "rows.jsonl"
        text = rows if isinstance(rows, (str, bytes)) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        flags = ["--golden"] if golden else []
        return [sys.executable, str(SCRIPT), *flags, "--input", str(path), "--nemo-gym-url", stub.url, *options]

    _scan.command = _command
    return _scan


def _process(cwd) -> dict:
    # From another directory, without PYTHONPATH: the script finds its modules by itself.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "NEMO_GYM"))}
    return {"cwd": cwd, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def _records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_runs_with_its_patch_and_without(scan, stub, tmp_path):
    output = tmp_path / "results.jsonl"
    output.write_text("from an earlier scan\n")
    rows = [_row(1), {"prompt": "p", "metadata": _row(2, subset="verified")}]

    done = scan(rows, "--output", str(output))

    assert done.returncode == 0, done.stderr
    assert sorted((request["instance_id"], request["patch"]) for request in stub.requests) == sorted(
        (f"psf__requests-{number}", patch) for number in (1, 2) for patch in (ROW["patch"], "")
    )
    assert all(request["policy_base_url"] == "http://127.0.0.1:9/v1" for request in stub.requests)
    assert len({request["image_name"] for request in stub.requests}) == 2
    records = _records(output)
    assert sorted((record["instance_id"], record["kind"], record["reward"]) for record in records) == [
        ("psf__requests-1", "gold", 1.0),
        ("psf__requests-1", "null", 0.0),
        ("psf__requests-2", "gold", 1.0),
        ("psf__requests-2", "null", 0.0),
    ]
    keys = ["instance_id", "repo", "kind", "pass", "reward", "exit_status", "seconds", "eval_report"]
    assert all(list(record) == keys and record["pass"] and record["repo"] == "psf/requests" for record in records)
    assert "2 of 2 tasks as expected" in done.stdout
    assert "golden scan passed: every gold patch scored 1.0 and every empty patch 0.0" in done.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_limit_and_no_null_control(scan, stub):
    assert scan([_row(1), _row(2)], "--limit", "1", "--no-null-control").returncode == 0
    assert [request["instance_id"] for request in stub.requests] == ["psf__requests-1"]


def test_blank_lines_and_a_byte_order_mark_are_tolerated(scan, stub):
    text = f"\n\n{json.dumps(_row(1, problem_statement='é'), ensure_ascii=False)}\r\n\n"
    assert scan(b"\xef\xbb\xbf" + text.encode(), "--no-null-control").returncode == 0
    assert stub.requests[0]["problem_statement"] == "é"


def _gold_scores_zero(body):
    return golden_answer({**body, "patch": ""})


def _null_scores_one(body):
    return golden_answer({**body, "patch": "x"})


def _null_runs_no_test(body):
    answer = golden_answer(body)
    if not body["patch"]:
        del answer["metadata"]["eval_report"][body["instance_id"]]["tests_status"]
    return answer


def _gold_skips_a_test(body):
    if not body["patch"]:
        return golden_answer(body)
    return graded_body(1.0, instance_id=body["instance_id"], passed=("t.py::test_a",), output=())


def _gold_is_ungradable(body):
    if not body["patch"]:
        return golden_answer(body)
    return failed_body('Traceback (most recent call last):\n  File "t.py", line 2, in make_test_spec\nKeyError: None')


def test_a_task_that_does_not_score_as_its_patch_should_fails(scan, stub, tmp_path):
    misbehave = {
        "psf__requests-1": (_gold_scores_zero, "gold", "found reward 0.0, Submitted"),
        "psf__requests-2": (_null_scores_one, "null", "found reward 1.0, Submitted"),
        "psf__requests-3": (_null_runs_no_test, "null", "NoTestsRan"),
        "psf__requests-4": (_gold_skips_a_test, "gold", "TestsSkipped"),
        "psf__requests-5": (_gold_is_ungradable, "gold", "found no verdict, UngradableInstance"),
        "psf__requests-6": (golden_answer, None, None),
    }
    stub.on_run = lambda body: misbehave[body["instance_id"]][0](body)
    output = tmp_path / "results.jsonl"

    done = scan([_row(number) for number in range(1, 7)], "--output", str(output))

    assert done.returncode == 1, done.stderr
    failures = [line for line in done.stdout.splitlines() if "FAIL " in line]
    failed = {(record["instance_id"], record["kind"]) for record in _records(output) if not record["pass"]}
    assert len(failures) == len(failed) == 5
    for instance_id, (_, kind, said) in list(misbehave.items())[:5]:
        (line,) = [line for line in failures if f"FAIL {kind} {instance_id}" in line]
        assert said in line and (instance_id, kind) in failed
    assert "1 of 6 tasks as expected" in done.stdout and "golden scan FAILED: 5 task(s)" in done.stdout


def test_a_slow_episode_fails_at_its_timeout(scan, stub):
    stub.on_run = lambda body: golden_answer(body) if not body["patch"] else stub.hang()
    done = scan([_row(1)], "--timeout", "0.3")
    assert done.returncode == 1 and "TimeLimitExceeded" in done.stdout


@pytest.mark.parametrize(
    "rows, options, said",
    [
        ([_row(1)], ["--limit", "0"], "--limit"),
        (json.dumps(_row(1)) + "\n{broken\n", [], "line 2"),
        ([_row(1)], ["--output", "missing-folder/results.jsonl"], "--output"),
        ([_row(1)], ["--output", "rows.jsonl"], "--output"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(scan, stub, tmp_path, rows, options, said):
    kept = tmp_path / "results.jsonl"
    kept.write_text("kept\n")

    done = scan(rows, "--output", str(kept), *options)

    assert done.returncode == 2
    assert said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert kept.read_text() == "kept\n" and stub.requests == []
    assert (tmp_path / "rows.jsonl").stat().st_size > 0


@pytest.mark.parametrize(
    "rows, said",
    [
        (None, "rows.jsonl, found it unreadable: No such file"),
        (b"", "at least one row"),
        (b"\n \n", "at least one row"),
        (json.dumps(_row(1)).encode() + b"\n\xff\xfe\n", "line 2"),
        (json.dumps(_row(1)).encode() + b"\n[]\n", "line 2: expected a JSON object, found list"),
        ([_row(1), _row(2), _row(1)], "line 3: expected every task once, found psf__requests-1 on line 1 too"),
        ([_row(1), _row(2, patch=" ")], "line 2: expected psf__requests-2 to have its gold patch"),
        ([_row(1), {"prompt": "p", "metadata": {"instance_id": "a__b-1"}}], "line 2: expected a__b-1 to have"),
        ([{"repo": "psf/requests", "patch": "x"}], "line 1: expected a SWE-bench row, found one without instance_id"),
        ([_row(1, instance_id="../x")], "line 1: expected instance_id"),
    ],
)
def test_a_row_that_cannot_be_scanned_is_named(tmp_path, rows, said):
    path = tmp_path / "rows.jsonl"
    if rows is not None:
        path.write_bytes(rows if isinstance(rows, bytes) else "\n".join(map(json.dumps, rows)).encode())
    with pytest.raises(eval_nemogym_via_api.SetUpError) as raised:
        eval_nemogym_via_api.load_rows(path, limit=None)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "option, value", [("limit", -3), ("concurrency", 0), ("timeout", 0.0), ("timeout", float("nan"))]
)
def test_an_option_without_sense_is_named(option, value):
    sensible = {"golden": True, "limit": None, "concurrency": 1, "timeout": None}
    assert eval_nemogym_via_api.check_options(**sensible) == 3600
    with pytest.raises(eval_nemogym_via_api.SetUpError, match=f"--{option}"):
        eval_nemogym_via_api.check_options(**{**sensible, option: value})


def test_golden_must_be_asked_for(scan, stub):
    done = scan([_row(1)], golden=False)
    assert done.returncode == 2 and "--golden" in done.stderr and stub.requests == []


def test_no_server_is_named_within_seconds(scan):
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{refusing.getsockname()[1]}"
        start = time.monotonic()
        done = scan([_row(1)], "--nemo-gym-url", url)
    assert done.returncode == 2 and url in done.stderr and time.monotonic() - start < 10


def test_a_server_of_another_kind_is_named(scan, stub):
    stub.openapi = {**OPENAPI, "paths": {}}
    done = scan([_row(1)])
    assert done.returncode == 2 and "POST /run" in done.stderr and stub.requests == []


def test_a_policy_server_costs_one_episode(scan, stub):
    stub.on_run = lambda body: graded_body(instance_id=body["instance_id"], output=(CALL,))
    done = scan([_row(1), _row(2), _row(3)])
    assert done.returncode == 2 and "run_golden=true" in done.stderr
    assert len(stub.requests) == 1


def test_a_dead_policy_endpoint_behind_the_server_is_the_set_up(scan, stub):
    stub.on_run = lambda body: failed_body("litellm.exceptions.AuthenticationError: 401")
    done = scan([_row(1), _row(2)])
    assert done.returncode == 2 and "PolicyEndpointError" in done.stderr


def test_a_server_that_can_create_no_sandbox_stops_the_scan(scan, stub, tmp_path):
    stub.on_run = lambda body: failed_body("nemo_gym.sandbox.providers.base.SandboxCreateError: no docker")
    output = tmp_path / "results.jsonl"

    done = scan([_row(number) for number in range(20)], "--output", str(output))

    assert done.returncode == 2
    kept, set_up = done.stderr.splitlines()
    assert f"4 episode(s) had ended, in {output}" == kept and "no docker" in set_up
    assert len(stub.requests) < 20 and len(_records(output)) == 4


def test_ctrl_c_stops_at_once_and_keeps_what_ended(scan, stub, tmp_path):
    stub.on_run = lambda body: golden_answer(body) if body["instance_id"] == "psf__requests-1" else stub.hang()
    output = tmp_path / "results.jsonl"
    command = scan.command([_row(1), _row(2), _row(3)], "--output", str(output))
    # A test run in the background may have been started with SIGINT ignored.
    process = subprocess.Popen(
        command, **_process(tmp_path), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    deadline = time.monotonic() + 15
    while not (output.exists() and len(_records(output)) == 2 and len(stub.requests) > 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, stderr = process.communicate(timeout=10)

    assert process.returncode == 130 and time.monotonic() - start < 3
    assert f"2 episode(s) had ended, in {output}" in stderr and "Traceback" not in stderr
    assert len(_records(output)) == 2
