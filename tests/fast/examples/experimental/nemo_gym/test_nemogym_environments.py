"""Rows of NeMo Gym's environments: what is sent, where to, which way, and what an answer means."""

import copy
import json

import pytest
from nemogym_environments import (
    build_environment_request,
    find_agent_url,
    policy_fields,
    read_environment_response,
    row_metadata,
    task_key,
    way_of_agent,
)

TOOLS = [{"type": "function", "name": "hit", "parameters": {"type": "object", "properties": {}}, "strict": True}]
ROW = {
    "responses_create_params": {
        "input": [{"role": "system", "content": "You play."}, {"role": "user", "content": "Deal."}],
        "tools": TOOLS,
        "temperature": 1.0,
        "parallel_tool_calls": False,
        "metadata": {"chat_template_kwargs": "{}", "extra_body": '{"top_k": 1, "min_p": 0.5}'},
    },
    "agent_ref": {"type": "responses_api_agents", "name": "blackjack_agent"},
    "ground_truth": [{"name": "hit", "arguments": "{}"}],
    "id": 7,
}


# --- requests -------------------------------------------------------------------


def test_a_row_goes_as_it_is():
    row = copy.deepcopy(ROW)
    assert build_environment_request(row, {}) == ROW
    assert row == ROW


def test_the_trainers_sampling_is_laid_over_the_rows_and_nothing_else_changes():
    request = build_environment_request(ROW, {"temperature": 0.7, "max_tokens": 64, "top_k": 20, "tools": [], "n": 3})
    params = request["responses_create_params"]
    assert (params["temperature"], params["max_output_tokens"]) == (0.7, 64)
    assert json.loads(params["metadata"]["extra_body"]) == {"top_k": 20, "min_p": 0.5}
    assert params["metadata"]["chat_template_kwargs"] == "{}"
    unchanged = ("input", "tools", "parallel_tool_calls")
    assert {key: params[key] for key in unchanged} == {key: ROW["responses_create_params"][key] for key in unchanged}
    assert {**request, "responses_create_params": None} == {**ROW, "responses_create_params": None}


def test_fields_of_trainer_connector_and_collection_are_not_sent():
    foreign = {
        "max_seq_len": 1,
        "session_server_id": "s",
        "reward": 1.0,
        "exit_status": "Submitted",
        "policy_base_url": "http://evil/v1",
        "_ng_rollout_id": "other",
        "_ng_task_index": 3,
        "_ng_attempt_index": 2,
    }
    assert build_environment_request({**ROW, **foreign}, {}) == ROW


def test_what_was_set_aside_in_metadata_is_sent_again():
    row = {**ROW, "reward": 0.5, "raw_reward": 0.25, "_ng_rollout_index": 1}
    metadata = row_metadata(row, misread={"reward", "raw_reward", "exit_status"})
    assert "reward" not in metadata and "raw_reward" not in metadata
    assert build_environment_request({**metadata, "max_seq_len": 9}, {}) == {**ROW, "reward": 0.5, "raw_reward": 0.25}


def test_metadata_of_a_row_that_nobody_misreads_is_the_row():
    assert row_metadata(ROW, misread={"reward"}) == ROW


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"instance_id": "a"}, "responses_create_params"),
        ({"responses_create_params": {}}, "input"),
        ({"instance_id": "a", "problem_statement": "b", "responses_create_params": {"input": []}}, "NeMo Gym row"),
        ({"responses_create_params": {"input": 7}}, "input"),
        ({**ROW, "answer": float("nan")}, "JSON"),
        ({**ROW, "answer": "\ud800"}, "JSON"),
        ({**ROW, "answer": {1, 2}}, "JSON"),
    ],
)
def test_a_row_that_cannot_be_sent_is_told(row, expected):
    with pytest.raises(ValueError, match=expected):
        build_environment_request(row, {})


@pytest.mark.parametrize("request_kwargs", [{}, {"top_k": 20}])
@pytest.mark.parametrize(
    "metadata, expected",
    [
        ("text", "metadata to be an object or null, found 'text'"),
        ([], r"metadata to be an object or null, found \[\]"),
        ({"extra_body": "[1]"}, r"extra_body to be JSON text of an object, found '\[1\]'"),
        ({"extra_body": "notjson"}, "extra_body to be JSON text of an object, found 'notjson'"),
        ({"extra_body": ""}, "extra_body to be JSON text of an object, found ''"),
        ({"extra_body": 5}, "extra_body to be JSON text of an object, found 5"),
        ({"extra_body": {"top_k": 1}}, "extra_body to be JSON text of an object, found {'top_k': 1}"),
    ],
)
def test_settings_of_a_row_that_cannot_be_read_are_told_whatever_the_trainer_sets(metadata, expected, request_kwargs):
    with pytest.raises(ValueError, match=expected):
        build_environment_request(with_metadata(metadata), request_kwargs)


@pytest.mark.parametrize("metadata", [None, {}, {"extra_body": None}, {"extra_body": "{}"}])
def test_a_row_may_have_no_settings(metadata):
    assert build_environment_request(with_metadata(metadata), {}) == with_metadata(metadata)
    sent = build_environment_request(with_metadata(metadata), {"top_k": 20})["responses_create_params"]["metadata"]
    assert sent == {"extra_body": '{"top_k": 20}'}


def with_metadata(metadata):
    return {**ROW, "responses_create_params": {"input": "Deal.", "metadata": metadata}}


@pytest.mark.parametrize("aside", [5, "text", [["a", 1]], []])
def test_what_was_set_aside_is_an_object_or_told(aside):
    with pytest.raises(ValueError, match="expected nemo_gym_fields to be an object or null, found"):
        build_environment_request({**ROW, "nemo_gym_fields": aside}, {})


def test_what_is_set_aside_joins_what_was():
    row = {**ROW, "nemo_gym_fields": {"reward": 5}, "exit_status": "x"}
    assert row_metadata(row, misread={"reward", "exit_status"}) == {
        **ROW,
        "nemo_gym_fields": {"reward": 5, "exit_status": "x"},
    }
    assert row_metadata({**ROW, "nemo_gym_fields": None}, misread={"reward"}) == ROW


def test_tasks_are_told_apart_by_id_or_input():
    other = {"responses_create_params": {"input": "another"}}
    assert task_key({"instance_id": 5, **ROW}) == "5"
    assert task_key(ROW) == task_key({**ROW, "id": 8}) != task_key(other)


# --- ways -------------------------------------------------------------------------


def openapi(**properties):
    return {"paths": {"/run": {}}, "components": {"schemas": {"RunRequest": {"properties": properties}, "Other": {}}}}


def test_the_schema_tells_the_way():
    assert way_of_agent(openapi(policy_base_url={})) == "policy_base_url"
    assert way_of_agent(openapi(instance_id={})) == "session_model"


@pytest.mark.parametrize("document", [None, [], {}, {"paths": {"/v1/responses": {}}}])
def test_a_server_without_run_is_no_agent(document):
    with pytest.raises(ValueError, match="POST /run"):
        way_of_agent(document)


@pytest.mark.parametrize(
    "document",
    [
        {"paths": 5},
        {"paths": "/run"},
        {"paths": {"/run": {}}, "components": [1]},
        {"paths": {"/run": {}}, "components": {"schemas": [{}]}},
        {"paths": {"/run": {}}, "components": {"schemas": {"A": 5}}},
        {"paths": {"/run": {}}, "components": {"schemas": {"A": {"properties": 5}}}},
    ],
)
def test_a_description_of_another_form_is_told(document):
    with pytest.raises(ValueError, match="of its openapi.json to be an object or null, found"):
        way_of_agent(document)


def test_each_way_names_the_session_in_a_field_of_its_own():
    url = "http://10.0.0.5:30000/sessions/3f2a/v1"
    assert policy_fields("policy_base_url", url) == {"policy_base_url": url}
    assert policy_fields("session_model", url) == {"_ng_rollout_id": "http__10.0.0.5__30000__3f2a"}


# --- the head server ----------------------------------------------------------------

INSTANCES = [
    {"process_name": "policy_model", "server_type": "responses_api_models", "url": "http://127.0.0.1:1"},
    {"process_name": "blackjack_agent", "server_type": "responses_api_agents", "url": "http://127.0.0.1:2"},
    {"process_name": "far_agent", "server_type": "responses_api_agents", "url": "http://10.0.0.9:3"},
    {"process_name": "starting", "server_type": "responses_api_agents", "url": None},
]


@pytest.mark.parametrize(
    "name, head_url, expected",
    [
        ("blackjack_agent", "http://127.0.0.1:11000", "http://127.0.0.1:2"),
        ("blackjack_agent", "http://gym:11000", "http://gym:2"),
        ("blackjack_agent", "http://[fd00::1]:11000", "http://[fd00::1]:2"),
        ("far_agent", "http://gym:11000", "http://10.0.0.9:3"),
    ],
)
def test_an_agent_is_found_by_name(name, head_url, expected):
    assert find_agent_url(INSTANCES, name, head_url=head_url) == expected


def test_an_agent_without_a_port_has_that_of_its_scheme():
    listed = [{"process_name": "a", "server_type": "responses_api_agents", "url": "http://127.0.0.1/agent"}]
    assert find_agent_url(listed, "a", head_url="http://gym:11000") == "http://gym/agent"


@pytest.mark.parametrize("name", ["policy_model", "starting", "blackjack"])
def test_an_unknown_agent_is_told_with_those_there_are(name):
    with pytest.raises(ValueError, match="found blackjack_agent, far_agent"):
        find_agent_url(INSTANCES, name, head_url="http://gym:11000")


@pytest.mark.parametrize("instances", [None, {}, "text", [None, 3]])
def test_a_head_server_that_lists_nothing_knows_no_agent(instances):
    with pytest.raises(ValueError, match="found none"):
        find_agent_url(instances, "a", head_url="http://gym:11000")


# --- answers ------------------------------------------------------------------------

USER, SAID = {"role": "user", "content": "hit or stand"}, {"type": "message", "role": "assistant", "content": []}
CALL, RESULT = {"type": "function_call", "name": "hit"}, {"type": "function_call_output", "output": "9"}


def read(status=200, **answer):
    return read_environment_response(status, json.dumps({"response": {"output": []}, **answer}), ROW)


@pytest.mark.parametrize("reward", [1, 0.0, -1.0, 1.6, 1e9])
def test_any_finite_reward_is_a_verdict(reward):
    outcome = read(reward=reward)
    assert (outcome.exit_status, outcome.reward) == ("Graded", float(reward))


@pytest.mark.parametrize("reward", [None, "1.0", True, float("nan"), float("inf"), [1.0]])
def test_anything_else_is_none(reward):
    outcome = read(reward=reward)
    assert (outcome.exit_status, outcome.reward) == ("ServerError", None)


def test_a_masked_sample_has_no_verdict():
    outcome = read(reward=0.0, mask_sample=True, failure_kind="judge_unavailable", failure_reason="timeout")
    assert (outcome.exit_status, outcome.reward) == ("UnknownError", None)
    assert "judge_unavailable" in outcome.detail and "timeout" in outcome.detail


def test_a_named_failure_that_is_not_masked_was_measured():
    assert read(reward=0.0, mask_sample=False, failure_kind="timeout").exit_status == "Graded"


def test_metadata_of_the_row_is_no_report_of_a_failure():
    assert read(reward=1.0, metadata={"error": "a word of the task"}).exit_status == "Graded"


def test_the_report_is_what_the_answer_adds_to_the_row():
    outcome = read(reward=1.0, info={"result": "win"}, ground_truth=[], id=7, ng_trajectory={}, mask_sample=False)
    assert outcome.eval_report == {"info": {"result": "win"}}


@pytest.mark.parametrize(
    "output, turns, tool_calls",
    [
        ([SAID], 1, 0),
        ([SAID, USER, SAID, USER, SAID], 3, 0),
        ([{"type": "reasoning"}, SAID, CALL, CALL, RESULT, RESULT, CALL, RESULT, SAID], 3, 3),
    ],
)
def test_turns_are_replies_of_the_model(output, turns, tool_calls):
    metrics = read(reward=1.0, response={"output": output}).agent_metrics
    assert metrics == {"turns": turns, "tool_calls": tool_calls}


def test_a_failure_of_the_session_model_is_the_policy_endpoints():
    text = "Hit an exception in SimpleAgent calling an inner server: b'MilesSessionModel: no answer from the session'"
    outcome = read_environment_response(500, json.dumps(text), ROW)
    assert (outcome.exit_status, outcome.reward) == ("PolicyEndpointError", None)
    assert outcome.detail.startswith("MilesSessionModel: no answer")
    assert read_environment_response(500, "boom", ROW).exit_status == "ServerError"


def test_keys_of_several_types_are_refused():
    content = {1: 1, "a": 2}
    row = {**ROW, "responses_create_params": {"input": [{"role": "user", "content": content}]}}
    with pytest.raises(ValueError, match="to be JSON"):
        build_environment_request(row, {})
