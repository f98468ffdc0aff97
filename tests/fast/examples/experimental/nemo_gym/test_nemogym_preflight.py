"""What is wrong with servers and tasks is named before anything expensive starts."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import nemogym_preflight
import pytest
from aiohttp import web
from nemogym_checks import Settings
from nemogym_preflight import Job, PreflightError, read_agent_config, read_settings, read_tasks, run_checks

from . import EXAMPLE_DIR
from .conftest import OPENAPI, ROW
from .gym_stand_in import SECRET, free_port, running_gym


def _message(url: str) -> str:
    with pytest.raises(nemogym_preflight.PreflightError) as raised:
        nemogym_preflight.check_agent_server(url)
    return str(raised.value)


@pytest.mark.parametrize("suffix", ["", "/", "/run", "/prefix/"])
def test_an_agent_server_passes(stub, suffix, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    nemogym_preflight.check_agent_server(stub.url + suffix)


def test_no_scheme():
    message = _message("localhost:12000")
    assert "NEMO_GYM_URL" in message and "localhost:12000" in message and "http://" in message


def test_refused_names_the_url_but_no_password():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        message = _message(f"http://user:secret@127.0.0.1:{unused.getsockname()[1]}")
    assert "refused" in message and "127.0.0.1" in message and "secret" not in message


def test_unknown_host():
    assert "nowhere.invalid" in _message("http://nowhere.invalid:12000")


def test_silent_server(monkeypatch):
    monkeypatch.setattr(nemogym_preflight, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "within 0.2 s" in _message(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_web_page(stub):
    stub.openapi = web.Response(text="<html>login</html>", content_type="text/html")
    message = _message(stub.url)
    assert "text/html" in message and "<html>login" in message


@pytest.mark.parametrize("status", [404, 502])
def test_other_status(stub, status):
    stub.openapi = web.Response(status=status)
    assert f"found {status}" in _message(stub.url)


@pytest.mark.parametrize("openapi", ["[]", "null", json.dumps({"paths": {"/v1/responses": {}}})])
def test_no_run_endpoint(stub, openapi):
    stub.openapi = openapi
    assert "POST /run" in _message(stub.url)


def test_agent_of_another_kind(stub):
    stub.openapi = {**OPENAPI, "components": {"schemas": {"OtherRunRequest": {}}}}
    assert "mini_swe_agent_2" in _message(stub.url)


def test_gym_too_old(stub):
    schema = {"type": "object", "properties": {"responses_create_params": {}}}
    stub.openapi = {**OPENAPI, "components": {"schemas": {"MiniSWEAgentRunRequest": schema}}}
    assert "nemo-gym>=0.6" in _message(stub.url)


# --- the head server --------------------------------------------------------------


@pytest.fixture
def gym(stub, monkeypatch):
    with running_gym(stub) as gym:
        monkeypatch.setenv("NEMO_GYM_URL", gym.url)
        monkeypatch.setenv("NEMO_GYM_HEAD_URL", gym.head_url)
        yield gym


def test_the_head_server_tells_the_agents_configuration(gym):
    gym.agent.update(step_timeout=60, eval_timeout=300)
    agent, _ = read_agent_config(gym.url, head_url=gym.head_url)
    assert (agent.step_timeout, agent.eval_timeout, agent.concurrency, agent.provider) == (60, 300, 16, "docker")
    assert SECRET not in repr(agent)


def test_the_head_server_of_the_same_host_is_tried(gym, monkeypatch):
    monkeypatch.setattr(nemogym_preflight, "_HEAD_PORT", int(gym.head_url.rpartition(":")[2]))
    agent, _ = read_agent_config(gym.url, head_url=None)
    assert agent.provider == "docker"
    agent, reason = read_agent_config("http://user:pw@127.0.0.1:1", head_url=None)
    assert agent is None and "no agent on port 1" in reason and "pw" not in reason
    monkeypatch.setattr(nemogym_preflight, "_HEAD_PORT", free_port())
    agent, reason = read_agent_config(gym.url, head_url=None)
    assert agent is None and "refused" in reason


def test_a_head_server_that_was_named_must_answer(gym, stub):
    with pytest.raises(PreflightError, match="NEMO_GYM_HEAD_URL"):
        read_agent_config(gym.url, head_url=f"http://127.0.0.1:{free_port()}")
    stub.on_run = lambda body: "{"
    with pytest.raises(PreflightError, match="expected a NeMo Gym head server"):
        read_agent_config(gym.url, head_url=stub.url)


# --- tasks ------------------------------------------------------------------------


def _write(path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def _prompt(**task) -> dict:
    return {"prompt": "p", "metadata": {**ROW, **task}}


def test_rows_are_sorted_by_what_they_are(tmp_path):
    rows = [
        _prompt(instance_id="A__b-1", FAIL_TO_PASS="[]"),
        "",
        _prompt(instance_id="A__b-2"),
        ROW,
        {"prompt": "p"},
        "{",
        {**_prompt(), "prompt": ""},
        _prompt(reward=1.0, round_number=3),
        _prompt(instance_id="../../x"),
        _prompt(problem_statement=" "),
        _prompt(instance_id="a__b-3", repo="SWE-Gym/unknown"),
    ]
    tasks = read_tasks(_write(tmp_path / "t.jsonl", *rows))
    assert tasks.ids == ["a__b-1", "a__b-2", "a__b-3"]
    assert tasks.first["instance_id"] == "A__b-2"
    assert tasks.raw == 1
    lines = [int(problem.partition(":")[0].removeprefix("line ")) for problem in tasks.unfit]
    assert lines == [5, 6, 7, 8, 9, 10]
    assert "reward, round_number" in tasks.unfit[3]
    assert [problem.partition(",")[0] for problem in tasks.ungradable] == [
        "line 1: FAIL_TO_PASS is no list with a test in it",
        "line 11: the grader does not know the repository",
    ]


@pytest.mark.parametrize("ends, ids", [("[1:3]", ["t-1", "t-2"]), ("[2:]", ["t-2", "t-3"]), ("[:1]", ["t-0"])])
def test_a_slice_is_read_as_miles_reads_it(tmp_path, ends, ids):
    path = _write(tmp_path / "t.jsonl", *(_prompt(instance_id=f"t-{number}") for number in range(4)))
    assert read_tasks(f"{path}@{ends}").ids == ids


@pytest.mark.parametrize("ends", ["[-1:]", "[:-1]"])
def test_a_slice_that_miles_does_not_take(tmp_path, ends):
    path = _write(tmp_path / "t.jsonl", _prompt())
    assert "slice" in read_tasks(f"{path}@{ends}").unreadable


def test_files_that_cannot_be_read(tmp_path):
    assert read_tasks(str(tmp_path / "none.jsonl")).unreadable == "no such file"
    assert ".parquet" in read_tasks(str(tmp_path)).unreadable
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    assert read_tasks(str(tmp_path / "t.parquet")).unchecked
    (tmp_path / "d.jsonl").mkdir()
    assert read_tasks(str(tmp_path / "d.jsonl")).unreadable


# --- all checks -------------------------------------------------------------------


def _job(tmp_path, **fields) -> Job:
    tasks = _write(tmp_path / "t.jsonl", _prompt())
    return Job(**{"prompt_data": [tasks], "session_host": "127.0.0.1", "session_ports": [free_port()], **fields})


def _wrong(findings) -> list[str]:
    return [str(finding) for finding in findings if finding.level != "ok"]


def test_all_is_well(gym, tmp_path):
    findings = list(run_checks(_job(tmp_path, in_flight=8)))
    assert _wrong(findings) == []
    assert [finding.subject.split()[0] for finding in findings] == [
        "settings",
        *4 * ["agent"],
        "session",
        "tasks",
        "canary",
    ]
    assert SECRET not in str(findings)


def test_no_episode_where_the_server_is_none(gym, tmp_path):
    gym.agent.update(run_golden=True)
    (line,) = _wrong(run_checks(_job(tmp_path, in_flight=8)))
    assert "run_golden" in line and gym.stub.requests == []


def test_without_a_head_server_the_canary_still_flies(gym, tmp_path, monkeypatch):
    monkeypatch.delenv("NEMO_GYM_HEAD_URL")
    monkeypatch.setattr(nemogym_preflight, "_HEAD_PORT", free_port())
    (line,) = _wrong(run_checks(_job(tmp_path)))
    assert line.startswith("warning") and "NEMO_GYM_HEAD_URL" in line
    assert len(gym.stub.requests) == 1


def test_without_tasks_the_canary_is_a_warning(gym):
    (line,) = _wrong(run_checks(Job(in_flight=8)))
    assert line.startswith("warning  canary episode") and gym.stub.requests == []


def test_settings_are_the_connectors(monkeypatch):
    given = {
        "NEMO_GYM_URL": " http://a:1, http://u:pw@b:2 ,",
        "NEMO_GYM_HEAD_URL": "http://a:11000, http://b:11000",
        "NEMO_GYM_RUN_TIMEOUT": "90.5",
        "NEMO_GYM_MAX_CONCURRENCY": "8",
        "NEMO_GYM_UNGRADED": "zero",
        "NEMO_GYM_OUTAGE_WAIT": "",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings, (finding,) = read_settings(os.environ)
    assert settings == Settings(
        servers=("http://a:1", "http://u:pw@b:2"),
        head_urls=("http://a:11000", "http://b:11000"),
        run_timeout_s=90.5,
        max_concurrency=8,
        ungraded="zero",
    )
    assert finding.level == "ok" and "pw" not in str(finding)


@pytest.mark.parametrize(
    "name, value",
    [
        ("NEMO_GYM_URL", "gym:12000"),
        ("NEMO_GYM_URL", ","),
        ("NEMO_GYM_RUN_TIMEOUT", "ten"),
        ("NEMO_GYM_DRAIN_TIMEOUT", "-1"),
        ("NEMO_GYM_OUTAGE_WAIT", "nan"),
        ("NEMO_GYM_MAX_CONCURRENCY", "1.5"),
    ],
)
def test_wrong_variables_are_all_that_is_said_of_servers(gym, monkeypatch, tmp_path, name, value):
    monkeypatch.setenv(name, value)
    wrong, tasks = run_checks(_job(tmp_path))
    assert (wrong.level, wrong.subject) == ("error", name) and wrong.expected and wrong.found and wrong.remedy
    assert tasks.subject.startswith("tasks")


@pytest.mark.parametrize(
    "options, job",
    [
        ({}, Job()),
        (
            {
                "--prompt-data": ["t.jsonl"],
                "--eval-prompt-data": ["a", "a.jsonl", "b", "b.jsonl"],
                "--session-server-ip": ["::"],
                "--session-server-port": ["7", "9"],
                "--rollout-batch-size": ["2"],
                "--n-samples-per-prompt": ["4"],
            },
            Job(
                prompt_data=["t.jsonl"],
                eval_data=["a.jsonl", "b.jsonl"],
                session_host="::",
                session_ports=range(7, 9),
                in_flight=8,
            ),
        ),
        ({"--eval-prompt-data": ["a.jsonl"], "--session-server-port": ["x"]}, Job(eval_data=["a.jsonl"])),
    ],
)
def test_a_job_is_what_train_py_is_told(options, job):
    read = Job.from_options(options)
    assert list(read.session_ports) == list(job.session_ports)
    assert [read.prompt_data, read.eval_data, read.session_host, read.in_flight] == [
        job.prompt_data,
        job.eval_data,
        job.session_host,
        job.in_flight,
    ]


# --- as a command -----------------------------------------------------------------


def _start_doctor(*options: str, **variables: str) -> subprocess.Popen[str]:
    dropped = ("NEMO_GYM_", "MILES_", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    command = [sys.executable, str(EXAMPLE_DIR / "nemogym_preflight.py"), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env={**environment, **variables}, **pipes)


def _doctor(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    process = _start_doctor(*options, **variables)
    out, err = process.communicate(timeout=180)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_doctor_prints_each_finding_and_counts_them(gym, tmp_path):
    tasks = _write(tmp_path / "t.jsonl", _prompt())
    options = ["--prompt-data", tasks, "--session-server-ip", "127.0.0.1", "--session-server-port", str(free_port())]
    given = {"NEMO_GYM_URL": gym.url, "NEMO_GYM_HEAD_URL": gym.head_url}
    done = _doctor(*options, **given, NEMO_GYM_MAX_CONCURRENCY="16")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == f"{len(lines)} ok, 0 warning(s), 0 error(s)" and all(line.startswith("ok ") for line in lines)
    assert len(gym.stub.requests) == 1
    assert _doctor(*options, "--no-canary", **given).returncode == 0
    assert len(gym.stub.requests) == 1


def test_doctor_names_what_is_wrong(tmp_path):
    done = _doctor("--prompt-data", str(tmp_path / "t.jsonl"), NEMO_GYM_URL=f"http://u:pw@127.0.0.1:{free_port()}")
    assert done.returncode == 2
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert len(errors) == 2 and "refused" in errors[0] and "no such file" in errors[1]
    assert "pw" not in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_doctor_is_interrupted_without_a_trace(gym, tmp_path):
    gym.stub.on_run = lambda body: gym.stub.hang()
    port = free_port()
    options = ["--prompt-data", _write(tmp_path / "t.jsonl", _prompt()), "--session-server-port", str(port)]
    given = {"NEMO_GYM_URL": gym.url, "NEMO_GYM_HEAD_URL": gym.head_url}
    process = _start_doctor(*options, "--session-server-ip", "127.0.0.1", **given)
    while not gym.stub.requests and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert err.splitlines()[1:] == ["interrupted"]
    socket.create_server(("127.0.0.1", port)).close()
