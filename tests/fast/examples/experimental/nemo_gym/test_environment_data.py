"""NeMo Gym rows as data: from a dataset to Miles prompts, through a scan, and as the scripted policy reads them."""

import json
import subprocess
import sys

import aiohttp
import pytest
from data_report import NothingLeftError, print_written
from download_and_process_data import convert
from local_stack import environment_policy
from local_stack.environment_policy import PLAYERS, find_row, load_rows
from local_stack.environments import ENVIRONMENTS, environments_config, find_environment, servers_of
from local_stack.paths import StackError
from local_stack.scripted_policy import UnknownTask, make_app, role_url, serving_in_thread
from nemogym_environments import build_environment_request
from row_reader import DataError
from scan_input import SetUpError
from scan_input import load_rows as load_scan_rows
from task_selection import Selection

from . import EXAMPLE_DIR
from .conftest import ROW as INSTANCE
from .test_nemogym_directory import AGENT
from .test_nemogym_environments import ROW

ANSWERED = {
    "responses_create_params": {"input": "2 + 2?"},
    "expected_answer": "B",
    "options": [{"A": "3"}, {"B": "4"}],
}
QUESTION = {**ANSWERED, "metadata": {"source": "sums"}}


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def converted(tmp_path, *rows, **options):
    output = tmp_path / "prompts.jsonl"
    report = convert(str(write(tmp_path / "rows.jsonl", *rows)), output, **options)
    return [json.loads(line) for line in output.read_text().splitlines()], report


# --- data -----------------------------------------------------------------------


def test_rows_become_prompts_with_the_whole_row_as_metadata(tmp_path):
    prompts, report = converted(tmp_path, ROW, QUESTION)
    assert prompts == [
        {"prompt": "You play.\n\nDeal.", "metadata": ROW},
        {"prompt": "2 + 2?", "metadata": {**ANSWERED, "nemo_gym_fields": {"metadata": {"source": "sums"}}}},
    ]
    assert dict(report.written) == {("blackjack_agent", "test"): 1, ("without agent_ref", "test"): 1}


def test_what_is_sent_of_a_prompt_is_the_row(tmp_path):
    row = {**ROW, "reward": 0.5, "rm_type": "math", "raw_reward": [1], "round_number": 3, "max_seq_len": 7}
    (prompt,), report = converted(tmp_path, row)
    assert not {"reward", "rm_type", "raw_reward", "round_number", "max_seq_len"} & prompt["metadata"].keys()
    as_miles_adds = {"max_seq_len": 1, "session_server_id": "a", "session_server_instance_id": "b"}
    assert build_environment_request(prompt["metadata"] | as_miles_adds, {}) == row
    assert report.set_aside["reward"] == 1


def test_prompts_that_were_converted_are_converted_to_the_same(tmp_path):
    first, _ = converted(tmp_path, {**ROW, "reward": 1.0}, QUESTION)
    assert converted(tmp_path, *first)[0] == first


def test_an_agent_is_named_where_a_row_names_none(tmp_path):
    prompts, _ = converted(tmp_path, ROW, QUESTION, agent="mcqa_simple_agent")
    assert [prompt["metadata"]["agent_ref"]["name"] for prompt in prompts] == ["blackjack_agent", "mcqa_simple_agent"]


def test_rows_without_input_are_left_out_and_counted(tmp_path):
    empty = {"responses_create_params": {"tools": []}}
    prompts, report = converted(tmp_path, empty, ROW)
    assert len(prompts) == 1 and report.left_out["no_input"].rows == 1
    with pytest.raises(NothingLeftError, match="without input"):
        converted(tmp_path, empty)


@pytest.mark.parametrize(
    "fields",
    [
        {"nemo_gym_fields": 5},
        {"nemo_gym_fields": [["a", 1]]},
        {"responses_create_params": {"input": "2 + 2?", "metadata": "text"}},
        {"responses_create_params": {"input": "2 + 2?", "metadata": {"extra_body": "[1]"}}},
    ],
)
def test_rows_that_cannot_be_sent_are_left_out_and_counted(tmp_path, fields):
    prompts, report = converted(tmp_path, {**ROW, **fields}, {**ROW, "nemo_gym_fields": None})
    assert [prompt["metadata"] for prompt in prompts] == [ROW]
    assert report.left_out["no_input"].rows == 1


def test_what_was_set_aside_before_is_sent_after_a_second_conversion(tmp_path):
    row = {**ROW, "nemo_gym_fields": {"reward": 5}, "exit_status": "x"}
    (prompt,), _ = converted(tmp_path, row)
    assert build_environment_request(prompt["metadata"], {}) == {**ROW, "reward": 5, "exit_status": "x"}


@pytest.mark.parametrize("name", ["\x1b[2J", "long" * 100, "\u202e"])
def test_names_that_would_steer_a_terminal_are_not_shown(tmp_path, capsys, name):
    rows = [{**ROW, "agent_ref": {"name": name}}, {**ROW, "split": name}]
    _, report = converted(tmp_path, *rows)
    print_written(report, tmp_path / "prompts.jsonl", tmp_path / "report.json", seconds=1.0)
    said = capsys.readouterr().out
    assert name not in said and "1 of subset (no name), split test" in said
    assert "1 of subset blackjack_agent, split (no name)" in said


def test_both_kinds_of_rows_may_be_in_one_file(tmp_path):
    instance = {**INSTANCE, "test_patch": "diff --git a/t b/t\n--- a/t\n+++ b/t\n", "base_commit": "a" * 40}
    prompts, report = converted(tmp_path, instance, ROW)
    assert [("instance_id" in prompt["metadata"]) for prompt in prompts] == [True, False], report.left_out


def test_a_choice_by_id_is_refused_for_rows_without_one(tmp_path):
    with pytest.raises(DataError, match="NeMo Gym row"):
        converted(tmp_path, ROW, selection=Selection(only=frozenset({"a"})))


# --- scan -----------------------------------------------------------------------


def test_a_scan_calls_rows_by_agent_and_line(tmp_path):
    path = write(tmp_path / "questions.jsonl", ROW, QUESTION, ROW, {**ROW, "instance_id": "own"})
    rows = load_scan_rows(path, limit=None, needed="problem_statement")
    assert [row["instance_id"] for row in rows] == ["blackjack_agent-1", "questions-2", "blackjack_agent-3", "own"]
    assert {**rows[1], "instance_id": None} == {**QUESTION, "instance_id": None}


def test_a_scan_reads_prompts_and_rows_alike(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROW, {"prompt": "p", "metadata": ROW})
    first, second = load_scan_rows(path, limit=None, needed="problem_statement")
    assert {**first, "instance_id": None} == {**second, "instance_id": None}


@pytest.mark.parametrize(
    "rows, needed, expected",
    [
        ([ROW], "patch", "no gold patch"),
        ([ROW, {**INSTANCE}], "problem_statement", "scan them apart"),
        ([{"responses_create_params": {"tools": []}}], "problem_statement", "input"),
    ],
)
def test_rows_that_cannot_be_scanned_are_told(tmp_path, rows, needed, expected):
    with pytest.raises(SetUpError, match=expected):
        load_scan_rows(write(tmp_path / "rows.jsonl", *rows), limit=None, needed=needed)


def test_a_scan_gives_each_episode_a_session_in_front_of_the_policy(stub, tmp_path):
    stub.openapi = AGENT
    asked = {"model": "model", "messages": [{"role": "user", "content": "2 + 2?"}]}

    async def run(body):
        scheme, host, port, name = body["_ng_rollout_id"].split("__")
        async with aiohttp.ClientSession() as client:
            url = f"{scheme}://{host}:{port}/sessions/{name}/v1/chat/completions"
            async with client.post(url, json=asked) as answer:
                said = (await answer.json())["choices"][0]["message"]["content"]
        return {"reward": float("{B}" in said), "response": {"output": []}, "session": name}

    stub.on_run = run
    row = {**QUESTION, "responses_create_params": {"input": [{"role": "user", "content": "2 + 2?"}]}}
    app = make_app([row], players=PLAYERS["mcqa"], find=find_row, api_key="sk-secret")
    output = tmp_path / "results.jsonl"
    with serving_in_thread(app) as url:
        command = [sys.executable, str(EXAMPLE_DIR / "eval_nemogym_via_api.py"), "--nemo-gym-url", stub.url]
        command += ["--input", str(write(tmp_path / "rows.jsonl", row, row)), "--output", str(output), "--passes", "2"]
        command += ["--policy-base-url", role_url(url, "solve"), "--policy-model", "model", "--expect-reward", "1"]
        environment = {"PATH": "/usr/bin:/bin", "OPENAI_API_KEY": "sk-secret"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(record["reward"], record["exit_status"]) for record in records] == [(1.0, "Graded")] * 4
    assert len({request["_ng_rollout_id"] for request in stub.requests}) == 4
    assert all("policy_base_url" not in request for request in stub.requests)
    assert "sk-secret" not in done.stdout + done.stderr + output.read_text() + json.dumps(stub.requests)


# --- local stack ------------------------------------------------------------------


def test_every_environment_has_the_roles_solve_and_wrong():
    assert PLAYERS.keys() == ENVIRONMENTS.keys()
    assert all(players.keys() == {"solve", "wrong"} for players in PLAYERS.values())


def test_an_unknown_environment_is_told_with_those_there_are():
    with pytest.raises(StackError, match="mcqa, workplace_assistant, blackjack, found 'chess'"):
        find_environment("chess")


def test_servers_shared_by_environments_are_there_once():
    servers = servers_of(tuple(ENVIRONMENTS.values()))
    assert len(servers) == len(set(servers))
    assert servers[0] == "responses_api_models/miles_session_model"


def test_the_configuration_starts_the_session_model_and_allows_what_is_named():
    config = environments_config(tuple(ENVIRONMENTS.values()), sessions=("127.0.0.1:30000",))
    assert config["miles_sessions"] == ["127.0.0.1:30000"]
    assert (EXAMPLE_DIR / "miles_session_model" / config["config_paths"][0]).is_file()


def test_a_player_finds_its_row_by_what_the_user_said_first():
    messages = [{"role": "user", "content": "2 + 2?\n\n[a mark]"}, {"role": "user", "content": "Deal."}]
    question = {**QUESTION, "responses_create_params": {"input": [{"role": "user", "content": "2 + 2?"}]}}
    assert find_row([ROW, question], messages) == question
    with pytest.raises(UnknownTask):
        find_row([ROW], messages)


def test_a_file_of_something_else_is_told(tmp_path):
    with pytest.raises(ValueError, match="line 2: expected a NeMo Gym row"):
        load_rows(write(tmp_path / "rows.jsonl", ROW, INSTANCE))


@pytest.mark.parametrize("hand, action", [(12, "hit"), (16, "hit"), (17, "stand"), (21, "stand")])
def test_the_card_player_stands_at_17(hand, action):
    messages = [{"role": "user", "content": f"Your hand: [K, 2] = {hand}\nDealer shows: 7"}]
    assert f"<action>{action}</action>" in environment_policy.PLAYERS["blackjack"]["solve"](ROW, messages).text
