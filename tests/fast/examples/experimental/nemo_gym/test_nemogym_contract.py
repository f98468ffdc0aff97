"""The rules of the wire, without a server: what is sent for a row, and what an answer means."""

import json

import nemogym_contract as contract
import numpy as np
import pytest

from .conftest import CALL, CALL_OUTPUT, ROW, failed_body, graded_body


def _request(row, request_kwargs=None, **kwargs):
    return contract.build_run_request(row, request_kwargs or {}, **kwargs)


def _read(body, row=ROW, **kwargs):
    return contract.read_run_response(200, json.dumps(body), row, **kwargs)


# --- sampling -------------------------------------------------------------------


def test_native_settings_have_their_field_and_the_rest_rides_in_extra_body():
    params = contract.build_responses_create_params(
        {
            "temperature": 0.0,
            "top_p": 0.9,
            "max_tokens": 4096,
            "top_k": 40,
            "min_p": 0.05,
            "stop": ["</s>"],
            "seed": 0,
            "repetition_penalty": 1.1,
            "skip_special_tokens": False,
        }
    )

    extra_body = params.pop("metadata")["extra_body"]
    assert params == {"input": [], "temperature": 0.0, "top_p": 0.9, "max_output_tokens": 4096}
    assert json.loads(extra_body) == {
        "top_k": 40,
        "min_p": 0.05,
        "stop": ["</s>"],
        "seed": 0,
        "repetition_penalty": 1.1,
        "skip_special_tokens": False,
    }


@pytest.mark.parametrize("request_kwargs", [None, {}, {"temperature": None, "top_k": None, "extra_body": None}])
def test_unset_settings_are_left_out(request_kwargs):
    assert contract.build_responses_create_params(request_kwargs) == {"input": []}


def test_a_given_extra_body_is_unpacked_and_nothing_is_sent_twice():
    params = contract.build_responses_create_params(
        {"top_k": 5, "extra_body": {"top_k": 7, "temperature": 0.3, "min_p": 0.1}}
    )

    assert params["temperature"] == 0.3
    assert json.loads(params["metadata"]["extra_body"]) == {"top_k": 5, "min_p": 0.1}


def test_what_belongs_to_the_agent_is_no_setting():
    owned = {key: "x" for key in contract.AGENT_OWNED_KEYS}
    assert contract.build_responses_create_params({**owned, "top_p": 0.5}) == {"input": [], "top_p": 0.5}


@pytest.mark.parametrize("request_kwargs", [{"extra_body": "top_k=5"}, {"top_k": object()}, {"min_p": float("inf")}])
def test_unsendable_settings_are_refused(request_kwargs):
    with pytest.raises(ValueError, match="expected"):
        contract.build_responses_create_params(request_kwargs)


# --- URLs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "base, url",
    [
        ("http://gym:12000", "http://gym:12000/run"),
        ("http://gym:12000/", "http://gym:12000/run"),
        ("http://gym:12000//", "http://gym:12000/run"),
        ("https://gym/prefix/", "https://gym/prefix/run"),
        ("http://[fd00::1]:12000/", "http://[fd00::1]:12000/run"),
        ("http://gym:12000/run", "http://gym:12000/run"),
        ("http://gym:12000/prefix/run/", "http://gym:12000/prefix/run"),
    ],
)
def test_exactly_one_run(base, url):
    assert contract.join_url(base, "run") == url


def test_another_endpoint_stands_beside_run():
    assert contract.join_url("http://gym:12000/p/run", "openapi.json") == "http://gym:12000/p/openapi.json"


@pytest.mark.parametrize(
    "base", ["", "gym", "localhost:12000", "//gym:1", "http://", "ftp://gym", "http://[::1", None]
)
def test_a_url_without_scheme_or_host_says_what_was_expected(base):
    with pytest.raises(ValueError, match="expected a URL such as http://host:12000"):
        contract.join_url(base, "run")


def test_a_refused_url_does_not_show_its_password():
    with pytest.raises(ValueError) as raised:
        contract.join_url("ftp://user:secret@gym:1", "run")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "session, external, local, url",
    [
        ("http://host:3000/sessions/ab", None, None, "http://host:3000/sessions/ab/v1"),
        ("http://host:3000/sessions/ab/", None, "10.0.0.2", "http://host:3000/sessions/ab/v1"),
        ("http://host:3000/sessions/ab/v1", None, None, "http://host:3000/sessions/ab/v1"),
        ("https://host/p/sessions/ab", None, None, "https://host/p/sessions/ab/v1"),
        ("http://[fd00::1]:3000/sessions/ab", None, None, "http://[fd00::1]:3000/sessions/ab/v1"),
        ("http://0.0.0.0:3000/sessions/ab", None, "10.0.0.2", "http://10.0.0.2:3000/sessions/ab/v1"),
        ("http://[::]:3000/sessions/ab", None, "fd00::2", "http://[fd00::2]:3000/sessions/ab/v1"),
        ("http://0.0.0.0:3000/sessions/ab", None, None, "http://0.0.0.0:3000/sessions/ab/v1"),
        ("http://0.0.0.0:3000/sessions/ab", "trainer", "10.0.0.2", "http://trainer:3000/sessions/ab/v1"),
        ("http://host:3000/sessions/ab", "trainer", None, "http://trainer:3000/sessions/ab/v1"),
        ("http://host/sessions/ab", "fd00::9", None, "http://[fd00::9]/sessions/ab/v1"),
        ("http://[fd00::1]:3000/sessions/ab", "[fd00::9]", None, "http://[fd00::9]:3000/sessions/ab/v1"),
    ],
)
def test_policy_base_url(session, external, local, url):
    assert contract.build_policy_base_url(session, external, local) == url


@pytest.mark.parametrize("external", ["trainer:8000", "http://trainer", "a b", "x/y"])
def test_an_external_host_is_only_a_host(external):
    with pytest.raises(ValueError, match="without scheme and port"):
        contract.build_policy_base_url("http://host:3000/sessions/ab", external)


# --- request --------------------------------------------------------------------


def test_row_fields_are_at_top_level_beside_the_connectors():
    request = _request(
        {**ROW, "subset": "Verified", "extra": [1]},
        {"temperature": 1.0},
        policy_base_url="http://host:1/sessions/a/v1",
        policy_api_key="k",
    )

    assert request == {
        **ROW,
        "extra": [1],
        "subset": "verified",
        "split": "train",
        "image_name": "docker.io/swebench/sweb.eval.x86_64.psf_1776_requests-1:latest",
        "responses_create_params": {"input": [], "temperature": 1.0},
        "policy_base_url": "http://host:1/sessions/a/v1",
        "policy_api_key": "k",
    }


def test_a_row_overrides_nothing_and_brings_no_verdict():
    brought = {
        "responses_create_params": {"input": ["x"]},
        "policy_base_url": "http://evil/v1",
        "policy_api_key": "stolen",
        "_ng_rollout_id": "r",
        "max_seq_len": 1,
        "session_server_id": "s",
        "session_server_instance_id": "i",
        "reward": 1.0,
        "exit_status": "Submitted",
        "eval_report": {},
        "agent_metrics": {},
        "raw_reward": 1.0,
    }
    assert _request({**ROW, **brought}) == _request(ROW)


def test_an_episode_has_its_folder_and_keeps_its_image():
    request = _request({**ROW, "subset": "verified"})
    named = contract.name_episode(request, "run-3")
    assert named == {**request, "subset": "verified-run-3"}
    assert request["subset"] == "verified"


@pytest.mark.parametrize(
    "fields, image",
    [
        ({}, "docker.io/xingyaoww/sweb.eval.x86_64.django_s_django-1:latest"),
        ({"subset": "verified"}, "docker.io/swebench/sweb.eval.x86_64.django_1776_django-1:latest"),
        ({"subset": None, "image_name": None}, "docker.io/xingyaoww/sweb.eval.x86_64.django_s_django-1:latest"),
        ({"image_name": "registry/own:1", "subset": "verified"}, "registry/own:1"),
    ],
)
def test_image_is_explicit_and_follows_the_original_subset(fields, image):
    row = {"instance_id": "Django__django-1", **fields}
    request = _request(row)
    assert request["image_name"] == contract.image_name(row) == image
    assert request["instance_id"] == "django__django-1"


@pytest.mark.parametrize("value", ["-h", "--all-tags", ["x"], 7, False, "a\0b", "a b", "a\n", "bücher/a:1", "$(a)"])
def test_an_image_that_docker_could_take_for_something_else_is_refused(value):
    row = {**ROW, "image_name": value}
    for name in (_request, contract.image_name):
        with pytest.raises(ValueError, match="expected image_name to be") as raised:
            name(row)
        assert repr(value) in str(raised.value)


@pytest.mark.parametrize("value", ["debian", "Registry.example:5000/a/b_c-d.e:1", f"a/b@sha256:{'0' * 64}"])
def test_an_image_of_the_row_is_sent_as_it_is(value):
    assert _request({**ROW, "image_name": value})["image_name"] == value


@pytest.mark.parametrize("field", ["image_name", "problem_statement", "hints"])
def test_text_that_is_not_unicode_is_refused(field):
    with pytest.raises(ValueError, match=field):
        _request({**ROW, field: "broken \ud800"})


@pytest.mark.parametrize("value", ["../x", "a..b", "", ".hidden", "a/b", "a b", "a\n", 7, ["x"]])
@pytest.mark.parametrize("field", ["instance_id", "subset"])
def test_unsafe_folder_names_are_refused(field, value):
    with pytest.raises(ValueError, match=field) as raised:
        _request({**ROW, field: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("row", [{}, {"instance_id": None}, {"repo": "a/b"}, None, "row"])
def test_a_row_without_instance_id_is_refused(row):
    with pytest.raises(ValueError, match="expected"):
        _request(row)


@pytest.mark.parametrize("value", [object(), {"x": {1, 2}}, float("nan")])
def test_a_field_that_is_not_json_is_named(value):
    with pytest.raises(ValueError, match="created_at"):
        _request({**ROW, "created_at": value})


# --- response: not an answer ------------------------------------------------------


@pytest.mark.parametrize("status", [302, 404, 422, 429, 500, 503])
def test_other_than_200_is_no_verdict(status):
    outcome = contract.read_run_response(status, json.dumps(graded_body()), ROW)
    assert (outcome.exit_status, outcome.reward) == ("ServerError", None)
    assert str(status) in outcome.detail


def test_the_body_of_an_error_is_quoted_to_200_characters():
    detail = contract.read_run_response(500, "a" * 200 + "bbb", ROW).detail
    assert "a" * 200 in detail and "b" not in detail


@pytest.mark.parametrize("body", [b"", "<html>", "[]", "null", "1.0", b"\xff\xfe\xfa", "[" * 100_000])
def test_a_body_that_is_no_object_is_no_verdict(body):
    outcome = contract.read_run_response(200, body, ROW)
    assert (outcome.exit_status, outcome.reward) == ("ServerError", None)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), True, "1.0", [], 10**400])
def test_a_reward_that_is_no_finite_number_is_no_verdict(reward):
    outcome = _read(graded_body(reward))
    assert (outcome.exit_status, outcome.reward) == ("ServerError", None)


def test_an_absent_reward_is_not_zero():
    body = graded_body()
    del body["reward"]
    assert "reward" not in _read(body).as_metadata()


# --- response: the server reports a failure ---------------------------------------

_IN_RAY = """Traceback (most recent call last):
  File "/gym/responses_api_agents/mini_swe_agent_2/app.py", line 745, in run
    result = await future
             ^^^^^^^^^^^^
ray.exceptions.RayTaskError({cls}): \x1b[36mray::runner_ray_remote()\x1b[39m (pid=60, ip=192.0.2.2)
OSError: docker gone

The above exception was the direct cause of the following exception:

\x1b[36mray::runner_ray_remote()\x1b[39m (pid=60, ip=192.0.2.2)
  File "/gym/app.py", line 95, in runner_ray_remote
    return runner(**params)
           ~~~~~~^^^^^^^^^^
  File "/gym/{file}", line 209, in {frame}
    raise something
{last}
"""

# litellm's exceptions cannot be unpickled, so Ray cannot name their class in its own line.
_UNPICKLABLE = """Traceback (most recent call last):
  File "/gym/responses_api_agents/mini_swe_agent_2/app.py", line 745, in run
    result = await future
ray.exceptions.UnserializableException: Failed to deserialize exception. Refer to https://docs.ray.io for more.
Original exception:
ray.exceptions.RayTaskError: \x1b[36mray::runner_ray_remote()\x1b[39m (pid=60, ip=192.0.2.2)
        url=api_base,
    )
  File "/gym/litellm/llms/custom_httpx/http_handler.py", line 588, in _raise_masked_sync_error
    raise MaskedHTTPStatusError(e, message=_text, text=_text) from None
litellm.llms.custom_httpx.http_handler.MaskedHTTPStatusError: Client error '400 Bad Request' for url 'http://h/v1'
For more information check: https://developer.mozilla.org/en-US/docs/Web/HTTP/Status/400

During handling of the above exception, another exception occurred:

\x1b[36mray::runner_ray_remote()\x1b[39m (pid=60, ip=192.0.2.2)
  File "/gym/litellm/litellm_core_utils/exception_mapping_utils.py", line 375, in _map_openai_exception
    raise SomeError(
    ...<5 lines>...
    )
{last}
"""


def _in_ray(cls, last, *, file="provider.py", frame="create"):
    return _IN_RAY.format(cls=cls, last=last, file=file, frame=frame)


@pytest.mark.parametrize(
    "traceback, exit_status, reward",
    [
        (_in_ray("SandboxCreateError", "nemo_gym.sandbox.providers.base.SandboxCreateError: pull"), "SandboxUnavailable", None),
        (_in_ray("DockerCreateError", "a.b.DockerCreateError: exit 125\nstderr: no such image\n  more"), "SandboxUnavailable", None),
        (_in_ray("SandboxCreateVerificationError", "x.SandboxCreateVerificationError"), "SandboxUnavailable", None),
        (_in_ray("DaytonaCreateTimeoutError", "x.DaytonaCreateTimeoutError: 60 s"), "SandboxUnavailable", None),
        (_in_ray("SandboxDied", "nemo_gym_bubblewrap.provider.SandboxDied: exit 137"), "SandboxFailed", 0.0),
        (_in_ray("SandboxLost", "nemo_gym_guarded_docker.record.SandboxLost: the disk is full"), "SandboxLost", None),
        (_in_ray("KeyError", "KeyError: 'a/b'", file="test_spec.py", frame="make_test_spec"), "UngradableInstance", None),
        (_in_ray("KeyError", "KeyError: None", file="test_spec.py", frame="make_test_spec"), "UngradableInstance", None),
        (_in_ray("KeyError", "KeyError: 'psf__Requests-1'"), "UnknownError", None),
        (_in_ray("KeyError", "KeyError: 'see File, in make_test_spec'"), "UnknownError", None),
        (_in_ray("IndexError", "IndexError: list index out of range"), "UnknownError", None),
        (_in_ray("TypeError", "TypeError: argument of type 'int'", frame="parse_toolcall_actions"), "FormatError", 0.0),
        (_in_ray("TypeError", "TypeError: argument of type 'int'"), "UnknownError", None),
        (_in_ray("IndexError", "IndexError: list index", file="python.py", frame="parse_log_seaborn"), "NoTestsRan", 0.0),
        (_in_ray("Submitted", "minisweagent.exceptions.Submitted", file="app.py", frame="_run_eval_v2"), "NoTestsRan", 0.0),
        (_UNPICKLABLE.format(last="litellm.exceptions.ContextWindowExceededError: litellm.Cont"), "ContextLengthExceeded", 0.0),
        (_UNPICKLABLE.format(last="litellm.exceptions.InternalServerError: litellm.Int"), "PolicyEndpointError", None),
        (_UNPICKLABLE.format(last="litellm.exceptions.BadGatewayError: <html>\n<h1>\n502\n</html>"), "PolicyEndpointError", None),
        ("Traceback (most recent call last):\n  File \"app.py\", line 1, in run\nRuntimeError: x", "UnknownError", None),
        ("ray.exceptions.WorkerCrashedError: The worker died unexpectedly.", "UnknownError", None),
        ("ray.exceptions.RayTaskError(SandboxCreateError): ray::runner", "SandboxUnavailable", None),
        ("", "UnknownError", None),
        ("...", "UnknownError", None),
    ],
)  # fmt: skip
def test_a_failure_is_classified_by_the_exception_that_ended_it(traceback, exit_status, reward):
    outcome = _read(failed_body(traceback, error="text"))
    assert (outcome.exit_status, outcome.reward) == (exit_status, reward)
    assert outcome.eval_report["traceback"] == traceback


@pytest.mark.parametrize(
    "name",
    ["APIConnectionError", "AuthenticationError", "RateLimitError", "InternalServerError", "Timeout", "BadRequestError",
     "NotFoundError", "ServiceUnavailableError"],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "litellm.exceptions."])
def test_a_failure_of_the_policy_endpoint_is_no_verdict(name, prefix):
    outcome = _read(failed_body(_UNPICKLABLE.format(last=f"{prefix}{name}: litellm.{name}: x")))
    assert (outcome.exit_status, outcome.reward) == ("PolicyEndpointError", None)


def test_the_agents_output_in_a_message_is_not_read():
    last = "litellm.exceptions.ContextWindowExceededError: the conversation was: SandboxCreateError: fake"
    trace = _UNPICKLABLE.format(last=f"SandboxCreateError: fake\n{last}")
    assert _read(failed_body(trace, error="SandboxCreateError: fake")).exit_status == "ContextLengthExceeded"


def test_a_forged_last_line_does_not_outweigh_the_class_ray_names():
    forged = 'CommandError: output was\n  File "x", line 1, in y\nSandboxCreateError: forged'
    assert _read(failed_body(_in_ray("CommandError", forged))).exit_status == "UnknownError"


@pytest.mark.parametrize("forged", ["SandboxCreateError: x", "ContextWindowExceededError: x", "SandboxDied: x"])
def test_a_forged_last_line_does_not_outweigh_the_endpoints_error(forged):
    trace = _UNPICKLABLE.format(last=f"litellm.exceptions.BadRequestError: mismatch, got:\n{forged}")
    outcome = _read(failed_body(trace))
    assert (outcome.exit_status, outcome.reward) == ("PolicyEndpointError", None)


def test_without_a_traceback_the_errors_first_line_is_read():
    body = {"reward": 0.0, "metadata": {"error": "SandboxCreateError: pull: toomanyrequests", "traceback": "..."}}
    assert _read(body).exit_status == "SandboxUnavailable"


def test_the_detail_holds_the_whole_message():
    trace = _in_ray("DockerCreateError", "a.DockerCreateError: exit 125\nstderr: no such image")
    assert _read(failed_body(trace)).detail == "DockerCreateError: exit 125 stderr: no such image"


def test_a_sample_the_server_masks_is_no_verdict():
    outcome = _read({**graded_body(0.0), "mask_sample": True, "failure_kind": "sandbox_oom"})
    assert (outcome.exit_status, outcome.reward) == ("UnknownError", None)
    assert "sandbox_oom" in outcome.detail


# --- response: graded -------------------------------------------------------------


@pytest.mark.parametrize("reward", [1.0, 0.0, 1, 0.5])
def test_a_grade_is_the_reward(reward):
    outcome = _read(graded_body(reward))
    assert (outcome.exit_status, outcome.reward) == ("Submitted", float(reward))
    assert outcome.as_metadata() == {
        "exit_status": "Submitted",
        "eval_report": graded_body(reward)["metadata"],
        "reward": float(reward),
        "agent_metrics": {"turns": 2, "tool_calls": 2, "tampered": False},
    }


def test_never_submitted_keeps_its_grade():
    outcome = _read(graded_body(1.0, model_patch="", output=(CALL, CALL_OUTPUT)))
    assert (outcome.exit_status, outcome.reward) == ("LimitsExceeded", 1.0)


def test_an_empty_submission_is_a_submission():
    assert (
        _read(graded_body(0.0, passed=(), model_patch="", output=(CALL, CALL_OUTPUT, CALL))).exit_status == "Submitted"
    )


def test_a_policy_that_never_called_a_tool_has_earned_its_zero():
    outcome = _read(graded_body(0.0, passed=(), failed=("t.py::test_a", "t.py::test_b"), model_patch="", output=()))
    assert (outcome.exit_status, outcome.reward) == ("LimitsExceeded", 0.0)


def test_no_test_at_all_is_a_zero():
    body = graded_body(0.0)
    del body["metadata"]["eval_report"]["psf__requests-1"]["tests_status"]
    outcome = _read(body)
    assert (outcome.exit_status, outcome.reward) == ("NoTestsRan", 0.0)


def test_a_report_under_another_spelling_of_the_id_is_found():
    assert _read(graded_body(), {**ROW, "instance_id": "PSF__Requests-1"}).exit_status == "Submitted"


@pytest.mark.parametrize(
    "listed",
    ['["t.py::test_a", "t.py::test_b"]', ["t.py::test_a", "t.py::test_b"], "['t.py::test_a', 't.py::test_b']"],
)
def test_a_skipped_fail_to_pass_test_is_not_a_pass(listed):
    row = {**ROW, "FAIL_TO_PASS": listed}
    assert _read(graded_body(), row).reward == 1.0

    outcome = _read(graded_body(passed=("t.py::test_a",)), row)
    assert (outcome.exit_status, outcome.reward) == ("TestsSkipped", 0.0)
    assert "t.py::test_b" in outcome.detail


def test_a_gold_patch_on_a_training_server_is_no_verdict():
    outcome = _read(graded_body(output=()))
    assert (outcome.exit_status, outcome.reward) == ("GoldenServer", None)
    assert "run_golden" in outcome.detail


def test_a_gold_patch_is_a_grade_where_it_was_asked_for():
    assert _read(graded_body(output=()), golden=True).reward == 1.0
    assert _read(graded_body(output=()), golden=True).exit_status == "Submitted"


def test_a_policy_where_gold_patches_were_expected_is_no_verdict():
    assert _read(graded_body(), golden=True).exit_status == "PolicyServer"


# --- outcome ----------------------------------------------------------------------


def test_a_reward_goes_with_a_verdict_only():
    with pytest.raises(ValueError):
        contract.Outcome("ServerError", 0.0)
    with pytest.raises(ValueError):
        contract.Outcome("Submitted")
    assert "reward" not in contract.Outcome("ServerError").as_metadata()


@pytest.mark.parametrize(
    "body, exit_status",
    [
        ({"reward": 0.0}, "ServerError"),
        ({"reward": 1.0}, "ServerError"),
        ({"reward": 0.0, "error": "SandboxCreateError: pull"}, "ServerError"),
        ({"reward": 0, "metadata": '{"error": "x"}'}, "ServerError"),
        ({**graded_body(0.0), "failure_kind": "sandbox_oom"}, "UnknownError"),
        ({**graded_body(0.0), "mask_sample": 1}, "UnknownError"),
        ({**graded_body(1.0), "error": "docker gone"}, "UnknownError"),
    ],
)
def test_a_reward_beside_nothing_or_beside_a_failure_is_no_grade(body, exit_status):
    outcome = _read(body)
    assert (outcome.exit_status, outcome.reward) == (exit_status, None)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.int64(1)])
def test_a_verdict_may_be_a_number_of_numpy(number):
    assert contract.read_verdict({"exit_status": "Submitted", "reward": number}) == float(number)


# --- response: metrics ------------------------------------------------------------

MESSAGE = {"type": "message", "role": "assistant", "content": []}


@pytest.mark.parametrize(
    "output, expected",
    [
        ((CALL,), {"turns": 1, "tool_calls": 1}),
        ((MESSAGE, CALL, CALL_OUTPUT, MESSAGE, CALL), {"turns": 2, "tool_calls": 2}),
        ((CALL, CALL, CALL_OUTPUT, CALL_OUTPUT, CALL), {"turns": 2, "tool_calls": 3}),
        ((CALL, CALL_OUTPUT), {"turns": 1, "tool_calls": 1}),
    ],
)
def test_turns_and_tool_calls_are_counted(output, expected):
    assert _read(graded_body(0.0, model_patch="", output=output)).agent_metrics == expected


def test_what_is_unknown_is_absent():
    assert _read(graded_body(0.0, model_patch="", output=())).agent_metrics == {"tool_calls": 0}
    assert _read(failed_body("ValueError: x")).agent_metrics == {}
    assert _read({**graded_body(), "response": None}).agent_metrics == {"tampered": False}


@pytest.mark.parametrize(
    "patch, files",
    [
        ("diff --git a/src/a.py b/src/a.py\n--- a/src/a.py\n+++ b/src/a.py\n", []),
        ("diff --git a/src/latest.py b/src/latest.py\n--- a/src/latest.py\n+++ b/src/contest.py\n", []),
        ("diff --git a/conftest.py b/conftest.py\nnew file\n--- /dev/null\n+++ b/conftest.py\n", ["conftest.py"]),
        ("--- a/src/tests/x.py\n+++ b/src/tests/x.py\n", ["src/tests/x.py"]),
        ("--- a/src/test_x.py\n+++ /dev/null\n", ["src/test_x.py"]),
        ("diff --git a/a.py b/sitecustomize.py\nrename from a.py\nrename to sitecustomize.py\n", ["sitecustomize.py"]),
        ("--- a/setup.cfg\n+++ b/setup.cfg\n--- a/pytest.ini\n+++ b/pytest.ini\n", ["setup.cfg", "pytest.ini"]),
        ('--- /dev/null\n+++ "b/lib/a b.pth"\n', ["lib/a b.pth"]),
        ("", []),
    ],
)
def test_a_patch_that_reaches_for_its_tests_is_seen(patch, files):
    assert contract.tampered_files(patch) == files


def test_a_tampered_patch_is_counted_and_stays_what_it_was_graded():
    outcome = _read(graded_body(1.0, model_patch="--- a/conftest.py\n+++ b/conftest.py\n"))
    assert (outcome.reward, outcome.agent_metrics["tampered"]) == (1.0, True)


# --- outages ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "status, blames",
    [("SandboxUnavailable", True), ("ServerError", True), ("PolicyEndpointError", True), ("UnknownError", True)]
    + [("Aborted", False), ("UngradableInstance", False)],
)
def test_what_the_caller_or_the_task_did_is_not_the_servers_fault(status, blames):
    assert contract.Outcome(status).blames_server is blames
    assert not contract.Outcome("NoTestsRan", 0.0).blames_server


# --- JSON -----------------------------------------------------------------------


@pytest.fixture(params=["with orjson", "without"] if contract.orjson else ["without"])
def either_json(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setattr(contract, "orjson", None)


@pytest.mark.parametrize(
    "value",
    [{"text": "\u00fc \U0001f600 \n\x00", "numbers": [0, -1.5, 1e300, None]}, {"a": (1, 2)}, 2**70, {1: 2}, "\ud800"],
)
def test_what_is_written_is_what_json_writes(either_json, value):
    assert json.loads(contract.to_json(value)) == json.loads(json.dumps(value))


@pytest.mark.parametrize("text", [b'{"a": 1, "a": [2.5, "\\u00fc"]}', b'{"a": Infinity}', b'["\\ud800"]', '"text"'])
def test_what_is_read_is_what_json_reads(either_json, text):
    assert contract.from_json(text) == json.loads(text)


@pytest.mark.parametrize("text", [b"", b"{", b"[1] 2", b"\xff", b"nothing", b"[" * 100_000])
def test_what_is_no_json_is_refused(either_json, text):
    with pytest.raises((ValueError, RecursionError)):
        contract.from_json(text)


# --- what reaches Miles -----------------------------------------------------------


def _nested(levels: int) -> dict:
    value: dict = {}
    for _ in range(levels):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    "report, is_kept",
    [
        ({"text": "\u00fc", "tests": ["a", "b"], "score": 0.5, "none": None, "big": 2**70}, True),
        (_nested(20), True),
        (_nested(300), False),
        ({"score": float("nan")}, False),
        ({"scores": [1.0, float("inf")]}, False),
        ({"text": "\ud83d"}, False),
        ({"\ud83d": 1}, False),
    ],
)
def test_a_report_that_miles_cannot_copy_or_send_does_not_reach_it(report, is_kept):
    metadata = contract.Outcome("Graded", 1.0, eval_report=report).as_metadata()
    assert (metadata["exit_status"], metadata["reward"]) == ("Graded", 1.0)
    assert (metadata["eval_report"] == report) is is_kept
    assert is_kept or list(metadata["eval_report"]) == ["left_out"]


def test_a_row_whose_key_is_no_text_is_refused():
    with pytest.raises(ValueError, match="to be JSON"):
        contract.build_run_request({"instance_id": "a__b-1", ("a", 1): 1}, {})
