"""The golden scan as its user runs it: a process, a server, files and exit statuses."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from download_and_process_data import convert
from eval_nemogym_via_api import load_rows, plan
from scan_input import Options, SetUpError, check_options

from . import EXAMPLE_DIR
from .conftest import CALL, OPENAPI, ROW, failed_body, golden_answer, graded_body

SCRIPT = EXAMPLE_DIR / "eval_nemogym_via_api.py"
RECORD_KEYS = ["instance_id", "repo", "kind", "attempt", "pass", "reward", "exit_status", "seconds"]
RECORD_KEYS += ["agent_metrics", "detail", "task", "policy", "sampling", "eval_report"]


def _row(number: int, **fields) -> dict:
    return {**ROW, "instance_id": f"psf__requests-{number}", **fields}


@pytest.fixture
def scan(stub, tmp_path):
    """Runs the scan on ``rows``; a str is written as it is."""
    stub.on_run = golden_answer

    def _scan(rows, *options: str, golden: bool = True, **process) -> subprocess.CompletedProcess:
        return subprocess.run(_command(rows, *options, golden=golden), **_process(tmp_path), **process, timeout=90)

    def _command(rows, *options: str, golden: bool = True) -> list[str]:
        path = tmp_path / "rows.jsonl"
        text = rows if isinstance(rows, (str, bytes)) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        flags = ["--golden"] if golden else []
        return [sys.executable, str(SCRIPT), *flags, "--input", str(path), "--nemo-gym-url", stub.url, *options]

    @contextlib.contextmanager
    def _running(rows, *options: str) -> Iterator[subprocess.Popen]:
        # A test run in the background may have been started with SIGINT ignored.
        default_sigint = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        process = subprocess.Popen(_command(rows, *options), **_process(tmp_path), **default_sigint)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    _scan.running = _running
    return _scan


def _process(cwd) -> dict:
    # From another directory, without PYTHONPATH: the script finds its modules by itself.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "NEMO_GYM"))}
    return {"cwd": cwd, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def _records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _keys(records: list[dict]) -> Counter:
    return Counter((record["instance_id"], record["kind"], record["attempt"]) for record in records)


def _wait_until(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def _classes(stdout: str) -> dict[str, str]:
    """Class by task, from the summary's table."""
    lines = [line.split() for line in stdout.splitlines() if line.startswith("psf__requests-")]
    return {words[0]: words[-1] for words in lines}


def _failures(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if "FAIL " in line]


_UNAVAILABLE = failed_body("nemo_gym.sandbox.providers.base.SandboxCreateError: no image")


def _scripted(gold: dict[str, list]) -> Callable[[dict], dict]:
    """A golden server whose gold patches get these answers one after the other: 1, 0, or a whole answer."""
    left = defaultdict(lambda: iter(()), {instance_id: iter(answers) for instance_id, answers in gold.items()})

    def answer(body):
        if not body["patch"]:
            return golden_answer(body)
        given = next(left[body["instance_id"]], 1)
        return given if isinstance(given, dict) else golden_answer({**body, "patch": "x" if given else ""})

    return answer


def test_every_row_runs_with_its_patch_and_without(scan, stub, tmp_path):
    output = tmp_path / "results.jsonl"
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
    assert all(list(record) == RECORD_KEYS and record["pass"] for record in records)
    assert {(record["repo"], record["attempt"], record["policy"]) for record in records} == {("psf/requests", 1, None)}
    assert _classes(done.stdout) == {"psf__requests-1": "supported", "psf__requests-2": "supported"}
    assert "4 of 4 episodes and 2 of 2 tasks as expected" in done.stdout and done.stderr == ""
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
    failures = _failures(done.stdout)
    failed = {(record["instance_id"], record["kind"]) for record in _records(output) if not record["pass"]}
    assert len(failures) == len(failed) == 5
    for instance_id, (_, kind, said) in list(misbehave.items())[:5]:
        (line,) = [line for line in failures if f"FAIL {kind} {instance_id}" in line]
        assert said in line and (instance_id, kind) in failed
    assert "1 of 6 tasks as expected" in done.stdout and "golden scan FAILED: 5 task(s)" in done.stdout
    assert list(_classes(done.stdout).values()) == [
        "broken",
        "broken",
        "inconclusive",
        "broken",
        "broken",
        "supported",
    ]


def test_a_slow_episode_fails_at_its_timeout(scan, stub):
    stub.on_run = lambda body: golden_answer(body) if not body["patch"] else stub.hang()
    done = scan([_row(1)], "--timeout", "0.3")
    assert done.returncode == 1 and "TimeLimitExceeded" in done.stdout


@pytest.mark.parametrize(
    "rows, options, said",
    [
        ([_row(1)], ["--limit", "0"], "--limit"),
        ("", [], "at least one row"),
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
    assert (tmp_path / "rows.jsonl").stat().st_size > 0 or not rows


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
    with pytest.raises(SetUpError) as raised:
        load_rows(path, limit=None)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "option, value",
    [("limit", -3), ("concurrency", 0), ("passes", 0), ("timeout", 0.0), ("timeout", float("nan"))],
)
def test_an_option_without_sense_is_named(tmp_path, option, value):
    field = {"timeout": "timeout_s"}.get(option, option)
    check_options(Options(input_path=tmp_path, golden=True))
    with pytest.raises(SetUpError, match=f"--{option}"):
        check_options(Options(input_path=tmp_path, golden=True, **{field: value}))


@pytest.mark.parametrize(
    "files, said",
    [
        ({"output": "rows.jsonl"}, "--output to be another file than --input"),
        ({"supported_ids": "rows.jsonl"}, "--supported-ids to be another file than --input"),
        ({"supported_ids": "out", "output": "./out"}, "--supported-ids to be another file than --output"),
        ({"output": "."}, "--output to be a file"),
        ({"output": "/dev/null"}, "--output to be a file"),
        ({"supported_ids": "missing/ids.txt"}, "--supported-ids in a folder that is there"),
    ],
)
def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch, files, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    paths = {name: Path(path) for name, path in files.items()}
    with pytest.raises(SetUpError, match=said):
        check_options(Options(input_path=tmp_path / "rows.jsonl", golden=True, **paths))


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
    assert f"3 episode(s) had ended, in {output}" == kept and "no docker" in set_up
    assert len(stub.requests) < 20 and len(_records(output)) == 3


def test_ctrl_c_stops_at_once_and_keeps_what_ended(scan, stub, tmp_path):
    stub.on_run = lambda body: golden_answer(body) if body["instance_id"] == "psf__requests-1" else stub.hang()
    output = tmp_path / "results.jsonl"
    with scan.running([_row(1), _row(2), _row(3)], "--output", str(output)) as process:
        _wait_until(lambda: output.exists() and len(_records(output)) == 2 and len(stub.requests) > 2, process)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=10)

    assert process.returncode == 130
    assert f"2 episode(s) had ended, in {output}" in stderr and "Traceback" not in stderr
    assert len(_records(output)) == 2


# --- several passes ---------------------------------------------------------------

_OF_THREE_PASSES = {
    "psf__requests-1": ([1, 1, 1], "supported"),
    "psf__requests-2": ([1, 0, 1], "flaky"),
    "psf__requests-3": ([0, 0, 0], "broken"),
    "psf__requests-4": ([_UNAVAILABLE, 1, 1], "inconclusive"),
}


def test_three_passes_tell_the_class_of_each_task(scan, stub, tmp_path):
    stub.on_run = _scripted({instance_id: answers for instance_id, (answers, _) in _OF_THREE_PASSES.items()})
    output, ids = tmp_path / "results.jsonl", tmp_path / "supported.txt"
    options = ["--passes", "3", "--output", str(output), "--supported-ids", str(ids)]

    done = scan([_row(number) for number in range(1, 5)], *options)

    assert done.returncode == 1, done.stderr
    assert _classes(done.stdout) == {instance_id: name for instance_id, (_, name) in _OF_THREE_PASSES.items()}
    assert "classes: supported 1, flaky 1, broken 1, inconclusive 1\n" in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("psf__")] == [
        "111",
        "101",
        "000",
        "?11",
    ]
    assert ids.read_text() == "psf__requests-1\n"
    assert Counter(record["kind"] for record in _records(output)) == {"gold": 12, "null": 4}
    assert "1 episode(s) say nothing about their task: --retry-inconclusive" in done.stdout


def test_only_inconclusive_episodes_are_run_again(scan, stub, tmp_path):
    stub.on_run = _scripted({"psf__requests-2": [_UNAVAILABLE, 1, 1]})
    rows, output = [_row(1), _row(2)], tmp_path / "results.jsonl"
    options = ["--passes", "3", "--output", str(output)]
    assert scan(rows, *options).returncode == 1
    ran = len(stub.requests)

    without = scan(rows, *options)
    assert without.returncode == 1 and len(stub.requests) == ran
    assert "FAIL gold psf__requests-2 1/3" in without.stdout and "none to run" in without.stderr

    done = scan(rows, *options, "--retry-inconclusive")
    assert done.returncode == 0, done.stdout
    assert [(request["instance_id"], request["patch"]) for request in stub.requests[ran:]] == [
        ("psf__requests-2", ROW["patch"])
    ]
    assert (
        "golden scan passed: every gold patch scored 1.0 in each of 3 passes and every empty patch 0.0" in done.stdout
    )
    assert [count for count in _keys(_records(output)).values() if count > 1] == [2], "the failed one is kept, too"


def test_a_task_that_passes_without_its_patch_is_broken(scan, stub):
    stub.on_run = lambda body: golden_answer({**body, "patch": "x"})
    done = scan([_row(1)], "--passes", "2")
    assert done.returncode == 1 and _classes(done.stdout) == {"psf__requests-1": "broken"}
    assert "FAIL null psf__requests-1 " in done.stdout


def test_the_passes_of_a_task_lie_apart(scan, stub):
    rows = [_row(1), _row(2)]
    done = scan(rows, "--passes", "3", "--concurrency", "1")
    assert done.returncode == 0
    order = [(request["instance_id"][-1], bool(request["patch"])) for request in stub.requests]
    first, later = [("1", True), ("1", False), ("2", True), ("2", False)], [("1", True), ("2", True)]
    assert order == first + later + later
    assert [job.key for job in plan(rows, golden=False, passes=2, null_control=True)] == [
        ("psf__requests-1", "policy", 1),
        ("psf__requests-2", "policy", 1),
        ("psf__requests-1", "policy", 2),
        ("psf__requests-2", "policy", 2),
    ]


def test_many_at_a_time_are_never_more_than_asked_for_and_none_is_lost(scan, stub, tmp_path):
    running, most = 0, 0

    async def answer(body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01 * (len(stub.requests) % 3))
        running -= 1
        return golden_answer(body)

    stub.on_run = answer
    output = tmp_path / "results.jsonl"
    done = scan([_row(n) for n in range(6)], "--passes", "5", "--concurrency", "5", "--output", str(output))
    assert done.returncode == 0 and most == 5
    assert len(stub.requests) == 36 and set(_keys(_records(output)).values()) == {1}


def test_fail_fast_stops_at_the_first_failure(scan, stub, tmp_path):
    stub.on_run = _scripted({"psf__requests-1": [0]})
    output, ids = tmp_path / "results.jsonl", tmp_path / "supported.txt"
    options = ["--fail-fast", "--output", str(output), "--supported-ids", str(ids)]

    done = scan([_row(number) for number in range(1, 7)], *options)

    assert done.returncode == 1 and len(stub.requests) == 1 and len(_records(output)) == 1
    assert "11 episode(s) are not run" in done.stderr
    assert not ids.exists() and "is not written" in done.stderr
    again = scan([_row(number) for number in range(1, 7)], *options)
    assert again.returncode == 1 and len(stub.requests) == 1 and "FAIL gold psf__requests-1" in again.stdout


def test_the_list_of_supported_ids_comes_from_a_finished_file_without_a_server(scan, stub, tmp_path):
    output, ids = tmp_path / "results.jsonl", tmp_path / "supported.txt"
    rows = [_row(2), _row(1)]
    assert scan(rows, "--output", str(output)).returncode == 0
    before = output.read_bytes()
    gone = ["--nemo-gym-url", "http://127.0.0.1:9"]
    done = scan(rows, "--output", str(output), "--supported-ids", str(ids), *gone)
    assert done.returncode == 0 and ids.read_text() == "psf__requests-2\npsf__requests-1\n"
    assert output.read_bytes() == before and "4 episode(s) are in it, none to run" in done.stderr


# --- resuming ---------------------------------------------------------------------


def test_an_interrupted_scan_runs_what_is_missing(scan, stub, tmp_path):
    rows, output = [_row(number) for number in range(10)], tmp_path / "results.jsonl"
    options = ["--no-null-control", "--concurrency", "1", "--output", str(output)]
    stub.on_run = lambda body: golden_answer(body) if len(stub.requests) <= 3 else stub.hang()
    with scan.running(rows, *options) as process:
        _wait_until(lambda: len(stub.requests) == 4, process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    assert process.returncode == 130 and len(_records(output)) == 3
    stub.on_run, stub.requests = golden_answer, []

    done = scan(rows, *options)

    assert done.returncode == 0, done.stderr
    assert "3 episode(s) are in it, 7 to run" in done.stderr and "[4/10] ok" in done.stdout
    assert len(stub.requests) == 7
    assert _keys(_records(output)) == {(row["instance_id"], "gold", 1): 1 for row in rows}


def test_a_killed_scan_ends_as_an_undisturbed_one(scan, stub, tmp_path):
    answers = {"psf__requests-2": [0, 0, 0], "psf__requests-5": [1, 1, 1]}
    rows = [_row(number) for number in range(8)]

    async def answer(body, script):
        await asyncio.sleep(0.02)
        return script(body)

    def run_with(output) -> list[str]:
        script = _scripted(answers)
        stub.on_run, stub.requests = (lambda body: answer(body, script)), []
        return ["--passes", "3", "--concurrency", "3", "--output", str(tmp_path / output)]

    undisturbed = scan(rows, *run_with("undisturbed.jsonl"))
    options, ran, output = run_with("killed.jsonl"), 0, tmp_path / "killed.jsonl"
    for at_least in (3, 12, 20):
        with scan.running(rows, *options) as process:
            _wait_until(lambda least=at_least: output.exists() and output.read_bytes().count(b"\n") >= least, process)
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=10)
        ran += len(stub.requests)
        run_with("killed.jsonl")
    resumed = scan(rows, *options)

    assert (undisturbed.returncode, resumed.returncode) == (1, 1)
    assert _classes(resumed.stdout) == _classes(undisturbed.stdout)
    results = [{**record, "seconds": 0} for record in _records(output)]
    expected = [{**record, "seconds": 0} for record in _records(tmp_path / "undisturbed.jsonl")]
    assert sorted(map(json.dumps, results)) == sorted(map(json.dumps, expected))
    assert len(results) == 32 and len(stub.requests) <= 32 - 20
    assert ran + len(stub.requests) <= 32 + 3 * 3, "of each kill only what was in flight runs twice"


def test_half_a_last_line_is_run_again(scan, stub, tmp_path):
    rows, output = [_row(1), _row(2)], tmp_path / "results.jsonl"
    options = ["--no-null-control", "--concurrency", "1", "--output", str(output)]
    assert scan(rows, *options).returncode == 0
    whole = output.read_bytes()
    output.write_bytes(whole[: whole.index(b"\n") + 60])
    stub.requests.clear()

    assert scan(rows, *options).returncode == 0
    assert [request["instance_id"] for request in stub.requests] == ["psf__requests-2"]
    assert _keys(_records(output)) == {("psf__requests-1", "gold", 1): 1, ("psf__requests-2", "gold", 1): 1}


def test_more_passes_and_more_rows_add_to_what_is_there(scan, stub, tmp_path):
    rows, output = [_row(1), _row(2)], tmp_path / "results.jsonl"
    assert scan(rows, "--limit", "1", "--output", str(output)).returncode == 0
    assert scan(rows, "--passes", "2", "--output", str(output)).returncode == 0
    assert len(stub.requests) == 6 and set(_keys(_records(output)).values()) == {1}
    done = scan([_row(2)], "--passes", "2", "--output", str(output))
    assert done.returncode == 0 and "1 task(s) of other scans: not counted" in done.stderr
    assert "3 of 3 episodes and 1 of 1 tasks" in done.stdout


def test_again_runs_a_finished_scan_and_resumes_another(scan, stub, tmp_path):
    output = tmp_path / "results.jsonl"
    options = ["--output", str(output), "--again"]
    assert scan([_row(1)], *options).returncode == 0
    first = output.read_bytes()
    done = scan([_row(1), _row(2)], *options)
    assert done.returncode == 0 and "2 episode(s) are in it, 2 to run" in done.stderr
    assert output.read_bytes().startswith(first) and len(stub.requests) == 4
    finished = output.read_bytes()
    done = scan([_row(1), _row(2)], *options)
    assert done.returncode == 0 and len(stub.requests) == 8 and len(_records(output)) == 4
    assert (tmp_path / "results.jsonl.previous").read_bytes() == finished


def test_a_second_scan_of_the_same_output_is_refused(scan, stub, tmp_path):
    stub.on_run = lambda body: stub.hang()
    output = tmp_path / "results.jsonl"
    with scan.running([_row(1)], "--output", str(output)) as process:
        _wait_until(lambda: stub.requests, process)
        second = scan([_row(1)], "--output", str(output))
        assert second.returncode == 2 and len(second.stderr.splitlines()) == 1, second.stderr
        assert "another one writing it" in second.stderr and len(stub.requests) == 1
        assert process.poll() is None and output.exists()
    stub.on_run = golden_answer
    assert scan([_row(1)], "--output", str(output)).returncode == 0, "its lock went with it"


@pytest.mark.parametrize(
    "content, rows, said",
    [
        ("my notes\n", [_row(1)], "line 1"),
        (None, [_row(1, patch="diff --git a/b b/b\n")], "another row of this id"),
    ],
)
def test_a_file_that_is_not_this_scans_is_left_alone(scan, stub, tmp_path, content, rows, said):
    output = tmp_path / "results.jsonl"
    if content is None:
        scan([_row(1)], "--output", str(output))
    else:
        output.write_text(content)
    before, ran = output.read_bytes(), len(stub.requests)
    done = scan(rows, "--output", str(output))
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert output.read_bytes() == before and len(stub.requests) == ran


def test_a_full_disk_ends_the_scan_and_is_resumed(scan, stub, tmp_path):
    rows, output = [_row(number) for number in range(1, 6)], tmp_path / "results.jsonl"
    options = ["--no-null-control", "--concurrency", "1", "--output", str(output)]
    assert scan(rows, "--limit", "1", *options).returncode == 0
    most = int(output.stat().st_size * 2.5)

    done = scan(rows, *options, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"expected to write --output {output}, found: File too large" in done.stderr
    assert output.stat().st_size == most, "half a line"

    assert scan(rows, *options).returncode == 0
    assert set(_keys(_records(output)).values()) == {1} and len(_records(output)) == 5


# --- a wrong set-up ---------------------------------------------------------------


def test_the_episode_that_shows_a_wrong_server_is_no_result(scan, stub, tmp_path):
    output = tmp_path / "results.jsonl"
    stub.on_run = lambda body: graded_body(instance_id=body["instance_id"], output=(CALL,))
    assert scan([_row(1)], "--output", str(output)).returncode == 2
    assert not output.exists() and len(stub.requests) == 1
    stub.on_run = golden_answer
    assert scan([_row(1)], "--output", str(output)).returncode == 0


def test_a_server_that_goes_away_in_the_middle_stops_the_scan(scan, stub, tmp_path):
    def answer(body):
        if len(stub.requests) > 4:
            raise stub.Drop
        return golden_answer(body)

    stub.on_run = answer
    rows, output = [_row(number) for number in range(20)], tmp_path / "results.jsonl"
    done = scan(rows, "--output", str(output), "--concurrency", "2")
    assert done.returncode == 2 and len(stub.requests) < 16, done.stdout
    assert "the last 8 episodes" in done.stderr and "--retry-inconclusive" in done.stderr

    stub.on_run = golden_answer
    assert scan(rows, "--output", str(output), "--retry-inconclusive").returncode == 0


def test_tasks_that_still_cannot_run_do_not_stop_their_second_try(scan, stub, tmp_path):
    missing = {f"psf__requests-{number}" for number in range(2, 8)}
    stub.on_run = lambda body: _UNAVAILABLE if body["instance_id"] in missing else golden_answer(body)
    rows, output = [_row(number) for number in range(1, 8)], tmp_path / "results.jsonl"
    assert scan(rows, "--output", str(output)).returncode == 1
    done = scan(rows, "--output", str(output), "--retry-inconclusive")
    assert done.returncode == 1 and "classes: supported 1, flaky 0, broken 0, inconclusive 6" in done.stdout
    assert len(stub.requests) == 14 + 12


# --- checks before there is a server ------------------------------------------------


@pytest.mark.parametrize(
    "options, said",
    [
        (["--limit", "0"], "--limit"),
        (["--concurrency", "0"], "--concurrency"),
        (["--passes", "0"], "--passes"),
        (["--limit", "three"], "--limit"),
        (["--input", "missing.jsonl"], "missing.jsonl"),
        (["--output", "rows.jsonl"], "--output"),
    ],
)
def test_check_only_names_a_mistake(scan, stub, options, said):
    done = scan([_row(1)], *options, "--check-only")
    assert done.returncode == 2 and said in done.stderr and stub.requests == []


def test_check_only_leaves_no_trace(scan, stub, tmp_path):
    done = scan([_row(1)], "--output", "new.jsonl", "--check-only", "--nemo-gym-url", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"] and stub.requests == []
    without_rows = [sys.executable, str(SCRIPT), "--check-only", "--limit", "3"]
    assert subprocess.run(without_rows, **_process(tmp_path)).returncode == 0


def test_rows_of_the_data_script_are_read_as_they_are(tmp_path):
    rows, prompts = tmp_path / "rows.jsonl", tmp_path / "prompts.jsonl"
    rows.write_text("".join(f"{json.dumps(_row(number))}\n" for number in (1, 2)))
    convert(str(rows), prompts)

    assert load_rows(prompts, limit=None) == [json.loads(line)["metadata"] for line in prompts.open()]
