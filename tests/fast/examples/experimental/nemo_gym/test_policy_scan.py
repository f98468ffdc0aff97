"""The policy scan as its user runs it: a process, a /run server, a policy endpoint, a head server and files."""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nemogym_preflight
import pytest
from aiohttp import web
from eval_nemogym_via_api import Job, as_episode
from local_stack.scripted_policy import make_app, role_url, serving_in_thread
from nemogym_preflight import PolicyKey, PreflightError, check_policy_endpoint, read_policy_model
from scan_input import Expectation, Options, SetUpError, check_options, load_rows
from scan_report import print_policy_summary
from scan_statistics import Episode

from . import EXAMPLE_DIR
from .conftest import CALL, CALL_OUTPUT, ROW, failed_body, graded_body

SCRIPT = EXAMPLE_DIR / "eval_nemogym_via_api.py"
KEY = "sk-0123456789-never-shown"
TASK = {**ROW, "patch": "--- a/a.py\n"}


def _row(number: int, **fields) -> dict:
    return {**ROW, "instance_id": f"psf__requests-{number}", **fields}


@pytest.fixture
def serve():
    """Serves an aiohttp application, or a function of the request for every path, while the test runs."""
    with contextlib.ExitStack() as stack:

        def _serve(handler) -> str:
            app = handler
            if not isinstance(handler, web.Application):
                app = web.Application()
                app.router.add_route("*", "/{path:.*}", handler)
            return stack.enter_context(serving_in_thread(app))

        yield _serve


@pytest.fixture
def endpoint(serve) -> str:
    return role_url(serve(make_app([TASK], model="my-model")), "solve")


@pytest.fixture
def scan(stub, tmp_path, endpoint):
    """Runs a policy scan of ``rows`` against ``stub`` and keeps its output in results.jsonl."""
    stub.on_run = lambda body: graded_body(instance_id=body["instance_id"])

    def _scan(rows, *options: str, url: str | None = endpoint, env: dict[str, str] | None = None):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, str(SCRIPT), "--input", str(path), "--nemo-gym-url", stub.url]
        command += ["--output", str(tmp_path / "results.jsonl"), *options]
        command += ["--policy-base-url", url] if url is not None else []
        left_out = (
            "PYTHONPATH",
            "NEMO_GYM",
            "POLICY_",
            "OPENAI_",
            "DEEPSEEK_",
            "http",
            "HTTP",
            "NO_PROXY",
            "no_proxy",
        )
        environment = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
        return subprocess.run(
            command, cwd=tmp_path, env={**environment, **(env or {})}, text=True, capture_output=True, timeout=90
        )

    return _scan


def _records(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]


def _is_one_sentence(done, *said: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr, done.stderr
    assert all(text in done.stderr for text in said), done.stderr


# --- a scan that runs -------------------------------------------------------------


def test_every_task_runs_once_with_the_policy_and_its_sampling(scan, stub, tmp_path, endpoint):
    rows = [_row(1), {"prompt": "p", "metadata": _row(2, patch="")}]
    options = ["--policy-model", "my-model", "--temperature", "0.7", "--top-p", "0.9", "--max-tokens", "512"]

    done = scan(rows, *options, url=endpoint + "/")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert sorted(request["instance_id"] for request in stub.requests) == ["psf__requests-1", "psf__requests-2"]
    for request in stub.requests:
        assert request["policy_base_url"] == endpoint and "policy_api_key" not in request
        assert request["responses_create_params"] == {
            "input": [],
            "temperature": 0.7,
            "top_p": 0.9,
            "max_output_tokens": 512,
        }
    for record in _records(tmp_path):
        assert (record["kind"], record["pass"], record["reward"]) == ("policy", True, 1.0)
        assert record["policy"] == "my-model"
        assert record["sampling"] == {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512}
    assert "policy scan passed: every episode ended with a verdict" in done.stdout


def test_the_summary_shows_each_task_the_statuses_and_the_mean(scan, stub):
    answers = {
        "psf__requests-1": graded_body(instance_id="psf__requests-1"),
        "psf__requests-2": graded_body(0.0, instance_id="psf__requests-2", failed=("t.py::test_a",), passed=()),
        "psf__requests-3": graded_body(
            0.0,
            instance_id="psf__requests-3",
            passed=(),
            failed=("t.py::test_a",),
            model_patch="",
            output=(CALL, CALL_OUTPUT),
        ),
        "psf__requests-4": failed_body("litellm.exceptions.ContextWindowExceededError: too long"),
    }
    stub.on_run = lambda body: answers[body["instance_id"]]

    done = scan([_row(number) for number in range(1, 5)])

    assert done.returncode == 0, done.stdout + done.stderr
    table = [line.split() for line in done.stdout.splitlines() if line.startswith("psf__requests-")]
    assert [(words[0], words[1], words[2], words[-1]) for words in table] == [
        ("psf__requests-1", "1/1", "1.00", "Submitted"),
        ("psf__requests-2", "0/1", "0.00", "Submitted"),
        ("psf__requests-3", "0/1", "0.00", "LimitsExceeded"),
        ("psf__requests-4", "0/1", "0.00", "ContextLengthExceeded"),
    ]
    assert "exit statuses: Submitted 2, ContextLengthExceeded 1, LimitsExceeded 1" in done.stdout
    assert "solve rate 0.250 over 4 verdict(s), 95 % interval 0.05 to 0.70 (Wilson, of these tasks)" in done.stdout
    assert "tasks: 1 always solved, 0 sometimes solved, 3 never solved" in done.stdout
    assert "an episode, median (9 of 10 within): seconds" in done.stdout


def test_an_episode_without_a_verdict_fails_the_scan_and_leaves_the_mean_alone(scan, stub, tmp_path):
    answers = {
        "psf__requests-1": graded_body(instance_id="psf__requests-1"),
        "psf__requests-2": failed_body("litellm.exceptions.RateLimitError: slow down"),
        "psf__requests-3": failed_body("nemo_gym.sandbox.providers.base.SandboxCreateError: no image"),
    }
    stub.on_run = lambda body: answers[body["instance_id"]]

    done = scan([_row(number) for number in range(1, 4)])

    assert done.returncode == 1 and "solve rate 1.000 over 1 verdict(s)" in done.stdout
    assert "1 always solved, 0 sometimes solved, 0 never solved, 2 without a verdict" in done.stdout
    assert "policy scan FAILED: 2 of 3 episode(s)" in done.stdout
    assert {record["exit_status"]: record["reward"] for record in _records(tmp_path)} == {
        "Submitted": 1.0,
        "PolicyEndpointError": None,
        "SandboxUnavailable": None,
    }


@pytest.mark.parametrize(
    "options, status",
    [
        (["--expect-reward", "1", "--expect-exit-status", "Submitted"], 0),
        (["--expect-reward", "0"], 1),
        (["--expect-exit-status", "LimitsExceeded"], 1),
    ],
)
def test_an_expectation_is_checked(scan, options, status):
    done = scan([_row(1)], *options)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("FAIL policy psf__requests-1" in done.stdout) == bool(status)


# --- several passes ---------------------------------------------------------------


def _playing(rewards: dict[str, list]):
    """A policy server whose episodes of a task get these rewards one after the other; None is no verdict."""
    left = {instance_id: iter(values) for instance_id, values in rewards.items()}

    def answer(body):
        reward = next(left[body["instance_id"]])
        if reward is None:
            return failed_body("nemo_gym.sandbox.providers.base.SandboxCreateError: no image")
        tests = ("t.py::test_a", "t.py::test_b")
        passed, failed = (tests, ()) if reward else ((), tests)
        return graded_body(float(reward), instance_id=body["instance_id"], passed=passed, failed=failed)

    return answer


def test_passes_give_solve_rates_and_pass_at_k(scan, stub, tmp_path):
    stub.on_run = _playing(
        {
            "psf__requests-1": [1, 1, 1, 1],
            "psf__requests-2": [0, 1, 0, 0],
            "psf__requests-3": [0, 0, 0, 0],
            "psf__requests-4": [1, None, 0, 0],
        }
    )
    rows = [_row(number) for number in range(1, 5)]

    done = scan(rows, "--passes", "4", "--concurrency", "1", "--temperature", "1", "--policy-model", "my-model")

    assert done.returncode == 1 and done.stderr == ""
    table = [line.split() for line in done.stdout.splitlines() if line.startswith("psf__requests-")]
    assert [" ".join(words[1:6]) for words in table] == [
        "4/4 1.00 0.51 to 1.00",
        "1/4 0.25 0.05 to 0.70",
        "0/4 0.00 0.00 to 0.49",
        "1/3 0.33 0.06 to 0.79",
    ]
    assert "Submitted 3, SandboxUnavailable 1  FAIL" in done.stdout
    assert "solve rate 0.400 over 15 verdict(s), 95 % interval 0.20 to 0.64" in done.stdout
    # pass@1: the mean of 1, 1/4, 0, 1/3. pass@2: 1, 1/2, 0, 2/3. pass@4 without the task that has three verdicts.
    assert "pass@1 0.396, pass@2 0.542, pass@4 0.667 (3 of 4 tasks)" in done.stdout
    assert "tasks: 1 always solved, 2 sometimes solved, 1 never solved" in done.stdout

    stub.on_run, stub.requests = _playing({"psf__requests-4": [0]}), []
    options = ["--passes", "4", "--temperature", "1", "--policy-model", "my-model"]
    again = scan(rows, *options, "--retry-inconclusive")
    assert again.returncode == 0 and len(stub.requests) == 1
    assert "solve rate 0.375 over 16 verdict(s)" in again.stdout
    records = [record for record in _records(tmp_path) if record["instance_id"] == "psf__requests-4"]
    assert [(record["attempt"], record["reward"]) for record in records] == [
        (1, 1.0),
        (2, None),
        (3, 0.0),
        (4, 0.0),
        (2, 0.0),
    ]


def test_turns_and_tool_calls_are_told_where_they_are_known(capsys):
    metrics = itertools.cycle([{"turns": 4, "tool_calls": 5}, {"turns": 7, "tool_calls": 6}, {}])
    episodes = [
        Episode("a__b-1", "a/b", "policy", attempt, 1.0, "Submitted", seconds=attempt, agent_metrics=next(metrics))
        for attempt in range(1, 4)
    ]
    print_policy_summary(["a__b-1"], episodes, passes=3, expected=Expectation())
    out = capsys.readouterr().out
    assert "an episode, median (9 of 10 within): seconds 2 (3), turns 4 (7), tool calls 5 (6)" in out
    assert [line.split()[6] for line in out.splitlines() if line.startswith("a__b-1")] == ["5.5"]


def test_what_the_agent_counted_is_kept():
    outcome = SimpleNamespace(
        reward=1.0, exit_status="Submitted", detail="", agent_metrics={"turns": 3, "total_time": 1.0}
    )
    episode = as_episode(Job(_row(1), "policy", attempt=2), outcome, seconds=1.0)
    assert episode.agent_metrics == {"turns": 3} and episode.key == ("psf__requests-1", "policy", 2)


def test_several_passes_without_a_temperature_are_warned_of(scan):
    done = scan([_row(1)], "--passes", "2", "--policy-model", "my-model")
    assert done.returncode == 0
    (warning,) = done.stderr.splitlines()
    assert "--temperature" in warning and "2 passes" in warning


@pytest.mark.parametrize("options", [["--temperature", "0.5"], ["--policy-model", "another"]])
def test_results_of_another_policy_are_refused(scan, stub, tmp_path, options):
    assert scan([_row(1)], "--temperature", "1", "--policy-model", "my-model").returncode == 0
    before = (tmp_path / "results.jsonl").read_bytes()
    done = scan([_row(1), _row(2)], "--temperature", "1", *options)
    _is_one_sentence(done, "results.jsonl", "name another file")
    assert (tmp_path / "results.jsonl").read_bytes() == before and len(stub.requests) == 1


def test_a_policy_without_a_known_name_goes_by_its_url(scan, stub, tmp_path, serve, endpoint):
    scan([_row(1)])
    assert _records(tmp_path)[0]["policy"] == endpoint
    other = role_url(serve(make_app([TASK], model="my-model")), "solve")
    done = scan([_row(1), _row(2)], url=other)
    assert done.returncode == 2 and endpoint in done.stderr and other in done.stderr and len(stub.requests) == 1


def test_an_endpoint_that_fails_in_the_middle_stops_the_scan(scan, stub):
    def answer(body):
        if len(stub.requests) > 3:
            return failed_body("litellm.exceptions.AuthenticationError: 401")
        return graded_body(instance_id=body["instance_id"])

    stub.on_run = answer
    done = scan([_row(number) for number in range(30)], "--concurrency", "2")
    assert done.returncode == 2 and len(stub.requests) < 16
    assert "policy endpoint has gone" in done.stderr and "401" in done.stderr


def test_check_only_asks_the_endpoint_and_no_server(scan, stub, tmp_path, endpoint):
    options = ["--check-only", "--nemo-gym-url", "http://127.0.0.1:9"]
    done = scan([_row(1)], *options, "--policy-model", "my-model")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    _is_one_sentence(scan([_row(1)], *options, "--policy-model", "another"), "'another'")
    _is_one_sentence(scan([_row(1)], *options, url="http://127.0.0.1:9/v1"), "127.0.0.1:9")
    assert not (tmp_path / "results.jsonl").exists()


# --- the key ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "env, sent",
    [
        ({"OPENAI_API_KEY": KEY, "DEEPSEEK_API_KEY": "sk-other"}, KEY),
        ({"OPENAI_API_KEY": " ", "DEEPSEEK_API_KEY": f"{KEY}\n"}, KEY),
        ({}, None),
    ],
)
def test_the_key_comes_from_the_environment_and_a_warning_says_where_it_goes(scan, stub, env, sent):
    done = scan([_row(1)], "--policy-model", "my-model", env=env)
    assert done.returncode == 0 and stub.requests[0].get("policy_api_key") == sent
    warnings = done.stderr.splitlines()
    assert len(warnings) == (1 if sent else 0) and KEY not in done.stderr + done.stdout
    if sent:
        assert "trajectory files" in warnings[0] and "_API_KEY" in warnings[0]


def test_a_key_that_comes_back_is_masked_everywhere(scan, stub, tmp_path):
    quoted = f"litellm.exceptions.AuthenticationError: Incorrect API key provided: {KEY}"
    answers = {
        "psf__requests-1": graded_body(instance_id="psf__requests-1", model_patch=f"+key = '{KEY}'\n"),
        "psf__requests-2": failed_body(quoted, error=quoted),
        "psf__requests-3": {"reward": KEY, "metadata": {KEY: [KEY]}},
    }
    stub.on_run = lambda body: answers[body["instance_id"]]

    done = scan([_row(number) for number in range(1, 4)], env={"OPENAI_API_KEY": KEY})

    assert done.returncode == 1
    for path in tmp_path.iterdir():
        assert KEY not in path.read_text(), path
    assert KEY not in done.stdout + done.stderr and "Incorrect API key provided: ***" in done.stdout
    patches = [record["eval_report"].get("model_patch") for record in _records(tmp_path)]
    assert "+key = '***'\n" in patches


def test_a_refused_key_is_named_by_its_variable(scan, stub, serve):
    url = role_url(serve(make_app([TASK], api_key="sk-another")), "solve")
    done = scan([_row(1)], url=url, env={"DEEPSEEK_API_KEY": KEY})
    _is_one_sentence(done, "the policy endpoint refused the key in DEEPSEEK_API_KEY", "401")
    assert KEY not in done.stderr and stub.requests == []


def _message(url: str, *, model: str | None = "my-model", key: PolicyKey | None = None) -> str:
    with pytest.raises(PreflightError) as raised:
        check_policy_endpoint(url, model=model, key=key)
    return str(raised.value)


def test_an_endpoint_that_asks_for_a_key_is_named(serve):
    url = role_url(serve(make_app([TASK], api_key=KEY)), "solve")
    assert "asks for a key" in _message(url) and "OPENAI_API_KEY" in _message(url)


@pytest.mark.parametrize("status", [200, 403, 503])
def test_a_key_that_the_endpoint_quotes_is_masked(serve, status):
    async def quote(request: web.Request) -> web.Response:
        text = f"<html>{request.headers['Authorization']}</html>"
        return web.Response(text=text, content_type="text/html", status=status)

    message = _message(serve(quote) + "/v1", key=PolicyKey("OPENAI_API_KEY", KEY))
    assert KEY not in message and ("OPENAI_API_KEY" if status == 403 else "Bearer ***") in message


def test_a_key_no_header_can_carry_is_not_shown(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\nÄ")
    with pytest.raises(PreflightError, match="OPENAI_API_KEY") as raised:
        PolicyKey.from_environment()
    assert KEY not in str(raised.value)


def test_a_netrc_does_not_replace_the_key(serve, tmp_path, monkeypatch):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login other password other\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    url = role_url(serve(make_app([TASK], api_key=KEY)), "solve")
    assert check_policy_endpoint(url, model="model", key=PolicyKey("OPENAI_API_KEY", KEY)) is None
    assert KEY not in repr(PolicyKey("OPENAI_API_KEY", KEY))


# --- the endpoint -----------------------------------------------------------------


@pytest.mark.parametrize(
    "url, said",
    [
        ("localhost:8000/v1", "expected a URL such as"),
        ("http://127.0.0.1:8000/v1/chat/completions", "expected a base URL"),
        ("http://127.0.0.1:8000/v1?key=1", "expected a base URL"),
        ("http://nowhere.invalid/v1", "nowhere.invalid"),
    ],
)
def test_what_is_no_endpoint_is_named(url, said):
    assert said in _message(url)


def test_a_refused_connection_is_one_sentence_without_a_password(scan, stub):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        done = scan([_row(1)], url=f"http://user:secret@127.0.0.1:{port}/v1")
    _is_one_sentence(done, "refused", f"127.0.0.1:{port}")
    assert "secret" not in done.stderr and stub.requests == []


@pytest.mark.parametrize(
    "answer, said",
    [
        ({"status": 404, "text": "<h1>Not Found</h1>", "content_type": "text/html"}, "found 404"),
        ({"status": 404, "text": '{"detail": "Not Found"}', "content_type": "application/json"}, "found 404"),
        ({"status": 200, "text": "<html>welcome</html>", "content_type": "text/html"}, "welcome"),
        ({"status": 503, "text": '{"error": "loading"}', "content_type": "application/json"}, "found 503"),
        ({"status": 301, "headers": {"Location": "https://elsewhere.invalid/"}}, "301 to https://elsewhere.invalid/"),
    ],
)
def test_a_server_of_another_kind_is_named(serve, answer, said):
    async def respond(request: web.Request) -> web.Response:
        return web.Response(**answer)

    assert said in _message(serve(respond) + "/v1")


def test_silence_is_named(monkeypatch):
    monkeypatch.setattr(nemogym_preflight, "_MODELS_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "within 0.2 s" in _message(f"http://127.0.0.1:{silent.getsockname()[1]}/v1")


@pytest.mark.parametrize("status, works", [(200, True), (400, True), (429, True), (404, False), (500, False)])
def test_without_models_one_completion_decides(serve, status, works):
    asked = []

    async def respond(request: web.Request) -> web.Response:
        if request.method != "POST" or request.path != "/v1/chat/completions":
            return web.Response(status=404)
        asked.append(await request.json())
        return web.json_response({"choices": []}, status=status)

    url = serve(respond) + "/v1"
    if works:
        assert check_policy_endpoint(url, model="my-model", key=None) is None
    else:
        assert f"found {status}" in _message(url)
    assert len(asked) == 1 and asked[0]["model"] == "my-model" and asked[0]["max_tokens"] == 1


def test_a_first_episode_that_the_endpoint_fails_stops_the_scan(scan, stub, tmp_path, endpoint):
    stub.on_run = lambda body: failed_body("litellm.exceptions.InternalServerError: out of memory")
    done = scan([_row(number) for number in range(1, 9)])
    assert done.returncode == 2 and len(stub.requests) == 1
    assert not (tmp_path / "results.jsonl").exists(), "the next scan runs that task"
    assert f"set-up: the policy endpoint {endpoint} failed the agent" in done.stderr and "out of memory" in done.stderr


def test_a_golden_server_stops_the_scan(scan, stub):
    stub.on_run = lambda body: graded_body(instance_id=body["instance_id"], output=())
    done = scan([_row(1), _row(2)])
    assert done.returncode == 2 and "run_golden=false" in done.stderr and len(stub.requests) == 1


# --- the model name ---------------------------------------------------------------


def _head(config: str):
    async def respond(request: web.Request) -> web.Response:
        if request.path != "/global_config_dict_yaml":
            return web.Response(status=404)
        return web.json_response(config)

    return respond


def test_the_servers_own_model_name_is_compared_with_the_endpoints(scan, stub, serve):
    head = serve(_head("policy_api_key: sk-of-the-server\npolicy_model_name: another\n"))
    done = scan([_row(1)], "--head-url", head)
    _is_one_sentence(done, "'another'", "my-model", "policy_model_name")
    assert "sk-of-the-server" not in done.stderr and stub.requests == []
    assert scan([_row(1)], "--head-url", serve(_head("policy_model_name: my-model\n"))).returncode == 0


def test_the_users_model_name_is_compared_with_both(scan, serve):
    _is_one_sentence(scan([_row(1)], env={"POLICY_MODEL": "another"}), "'another'", "my-model")
    head = serve(_head("policy_model_name: my-model\n"))
    done = scan([_row(1)], "--policy-model", "another", env={"NEMO_GYM_HEAD_URL": head})
    _is_one_sentence(done, "--policy-model", "'another'", "'my-model'")


def test_an_unknown_model_name_is_a_warning(scan):
    done = scan([_row(1)])
    assert done.returncode == 0
    (warning,) = done.stderr.splitlines()
    assert "my-model" in warning and "--policy-model" in warning


def test_a_given_head_server_must_answer(endpoint):
    with pytest.raises(PreflightError, match="expected a NeMo Gym head server at .*--head-url"):
        read_policy_model("http://127.0.0.1:1", head_url=endpoint)


@pytest.mark.parametrize(
    "line, name",
    [
        ("policy_model_name: Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("policy_model_name: 'it''s: one'", "it's: one"),
        ('policy_model_name: "a\\tb"', "a\tb"),
        ("policy_model_name: null", None),
        ("policy_model_name: ${other}", None),
        ("agent:\n  policy_model_name: nested", None),
    ],
)
def test_the_model_name_is_read_from_the_configuration(serve, line, name):
    assert read_policy_model("http://127.0.0.1:1", head_url=serve(_head(f"a: 1\n{line}\nb: 2\n"))) == name


def test_a_head_server_that_was_not_named_must_know_the_agent(serve, monkeypatch):
    head = serve(_head("agent:\n  host: 127.0.0.1\n  port: 12000\npolicy_model_name: my-model\n"))
    monkeypatch.setattr(nemogym_preflight, "_HEAD_PORT", int(head.rpartition(":")[2]))
    assert read_policy_model("http://user:pw@127.0.0.1:12000/run") == "my-model"
    assert read_policy_model("http://127.0.0.1:1200") is None


# --- options ----------------------------------------------------------------------


@pytest.mark.parametrize("url, golden, found", [(None, False, "neither"), ("http://127.0.0.1:1/v1", True, "both")])
def test_exactly_one_of_golden_and_a_policy_is_asked_for(scan, stub, url, golden, found):
    done = scan([_row(1)], *(["--golden"] if golden else []), url=url)
    _is_one_sentence(done, "--golden", "--policy-base-url", f"found {found}")
    assert stub.requests == []


@pytest.mark.parametrize(
    "options, said",
    [
        ({"golden": True, "policy_base_url": None, "sampling": {"temperature": 1.0}}, "--golden"),
        ({"golden": True, "policy_base_url": None, "expected": Expectation(reward=1.0)}, "--golden"),
        ({"sampling": {"temperature": float("nan")}}, "--temperature"),
        ({"sampling": {"temperature": -1.0}}, "--temperature"),
        ({"sampling": {"top_p": 1.5}}, "--top-p"),
        ({"sampling": {"max_tokens": 0}}, "--max-tokens"),
        ({"expected": Expectation(exit_status="Sumbitted")}, "Submitted"),
        ({"supported_ids": Path("ids.txt")}, "--supported-ids"),
    ],
)
def test_an_option_without_sense_is_named(tmp_path, options, said):
    sensible = {"input_path": tmp_path, "policy_base_url": "http://h/v1"}
    check_options(Options(**sensible))
    with pytest.raises(SetUpError, match=said):
        check_options(Options(**{**sensible, **options}))


def test_a_row_needs_a_problem_statement_and_no_patch(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [_row(1, patch=""), _row(2, problem_statement=" ")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SetUpError, match="line 2: .*problem statement"):
        load_rows(path, limit=None, needed="problem_statement")
    assert len(load_rows(path, limit=1, needed="problem_statement")) == 1
