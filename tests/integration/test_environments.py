"""Other environments than SWE-bench on a real NeMo Gym: episodes by the connector, each with a session of its own."""

import asyncio
import copy
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import nemogym_agent_function as connector
import pytest
import requests
from aiohttp import web
from local_stack.environment_policy import PLAYERS, find_row, load_rows
from local_stack.environments import ENVIRONMENTS
from local_stack.scripted_policy import make_app, role_url, serving, serving_in_thread
from local_stack.server import Options, Ports, Stack, running_stack
from nemogym_environments import is_environment_row

from tests.agent_table import agents_by_reach

from .conftest import EXAMPLE_DIR, TIMEOUT_S

MODEL = "a-model"
RESULTS = {"win": 1.0, "draw": 0.0, "loss": -1.0, "bust": -1.0}


@dataclass
class Session:
    """One episode's session: ``requests`` are the bodies that came in, ``play`` answers the next."""

    row: dict[str, Any]
    play: Any
    requests: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def session_port() -> int:
    """The only port that the session model may call."""
    return Ports.free().policy


@pytest.fixture(scope="module")
def environments(paths, session_port) -> Iterator[Stack]:
    """One NeMo Gym with every environment of the local stack."""
    options = Options(
        environments=tuple(ENVIRONMENTS.values()), sessions=(f"127.0.0.1:{session_port}",), policy_model=MODEL
    )
    with running_stack(paths, options=options) as stack:
        yield stack


@pytest.fixture
def rows(paths) -> dict[str, list[dict]]:
    """Example rows by environment, each with its agent."""
    return {
        name: [{**row, "agent_ref": {"name": environment.agent}} for row in load_rows(environment.rows(paths))]
        for name, environment in ENVIRONMENTS.items()
    }


@pytest.fixture
async def sessions(session_port, environments, monkeypatch) -> AsyncIterator[dict[str, Session]]:
    """A session server in Miles' place, on the allowed port; it answers 404 for a session that it does not know."""
    monkeypatch.delenv("NEMO_GYM_URL", raising=False)
    monkeypatch.setenv("NEMO_GYM_HEAD_URL", environments.head_url)
    opened: dict[str, Session] = {}
    async with serving(_session_app(opened), port=session_port):
        yield opened


def _session_app(opened: dict[str, Session]) -> web.Application:
    async def complete(request: web.Request) -> web.Response:
        session = opened.get(request.match_info["name"])
        if session is None:
            return web.json_response({"error": "session not found"}, status=404)
        body = await request.json()
        session.requests.append(body)
        turn = session.play(session.row, body["messages"])
        calls = [
            {"id": f"call_{number}", "type": "function", "index": 0, "function": {"name": name, "arguments": text}}
            for number, (name, text) in enumerate(turn.tool_calls, start=100 * len(session.requests))
        ]
        message = {"role": "assistant", "content": turn.text, "tool_calls": calls or None}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response(answer)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/sessions/{name}/v1/chat/completions", complete)
    return app


def marked(row: dict, mark: str) -> dict:
    row = copy.deepcopy(row)
    next(item for item in row["responses_create_params"]["input"] if item["role"] == "user")["content"] += mark
    return row


async def run(row: dict, session: str, port: int, **sampling: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}/sessions/{session}"
    return await connector.run(base_url=url, prompt="", request_kwargs=sampling, metadata=row)


async def test_sixty_four_episodes_at_once_each_keep_their_session(sessions, session_port, rows):
    kinds = [(name, role) for name in PLAYERS for role in ("solve", "wrong")]
    plan = [(number, *kinds[number % len(kinds)]) for number in range(64)]
    for number, name, role in plan:
        known = rows[name]
        row = marked(known[number % len(known)], f" [episode {number}]")
        sessions[f"{number:032x}"] = Session(row, PLAYERS[name][role])
    results = await asyncio.gather(
        *(
            run(sessions[f"{number:032x}"].row, f"{number:032x}", session_port, temperature=number / 64, seed=number)
            for number, _, _ in plan
        )
    )
    for (number, name, role), result in zip(plan, results, strict=True):
        session = sessions[f"{number:032x}"]
        assert result["exit_status"] == "Graded", result
        rewards = ENVIRONMENTS[name].rewards or {role: _game_reward(result)}
        assert result["reward"] == rewards[role], (name, role, result)
        assert len(session.requests) == result["agent_metrics"]["turns"] == _turns(name, role, session), (name, role)
        for body in session.requests:
            assert f"[episode {number}]" in json.dumps(body["messages"]) and (body["seed"], body["model"]) == (
                number,
                MODEL,
            )
            assert body["temperature"] == number / 64
            assert str(body["messages"]).count("[episode ") == 1
        for before, after in zip(session.requests, session.requests[1:], strict=False):
            assert after["messages"][: len(before["messages"])] == before["messages"]


def _game_reward(result: dict) -> float:
    info = result["eval_report"]["info"]
    return RESULTS[info["result"]] if "result" in info else 0.0  # five cards and still not bust: cut off


def _turns(name: str, role: str, session: Session) -> int:
    if name == "workplace_assistant":
        return 2 if role == "wrong" else len(session.row["ground_truth"]) + 1
    return 1 if name == "mcqa" else len(session.requests)


async def test_a_session_of_another_port_is_refused_and_never_called(sessions, rows):
    elsewhere: dict[str, Session] = {"ab": Session(rows["mcqa"][0], PLAYERS["mcqa"]["solve"])}
    async with serving(_session_app(elsewhere)) as url:
        result = await run(rows["mcqa"][0], "ab", int(url.rpartition(":")[2]))
    assert (result["exit_status"], result.get("reward")) == ("PolicyEndpointError", None)
    assert elsewhere["ab"].requests == []


async def test_a_session_that_is_gone_ends_the_episode_without_a_verdict(sessions, session_port, rows):
    result = await run(rows["workplace_assistant"][0], "gone", session_port)
    assert (result["exit_status"], result.get("reward")) == ("PolicyEndpointError", None)


async def test_a_session_server_that_is_down_ends_the_episode_without_a_verdict(
    environments, session_port, rows, monkeypatch
):
    monkeypatch.setenv("NEMO_GYM_HEAD_URL", environments.head_url)
    result = await run(rows["blackjack"][0], "ab", session_port)
    assert (result["exit_status"], result.get("reward")) == ("PolicyEndpointError", None)


def test_an_episode_without_a_session_calls_nothing(environments, rows):
    url = environments.agent_url(ENVIRONMENTS["mcqa"].agent)
    answer = requests.post(f"{url}/run", json=rows["mcqa"][0], timeout=30)
    assert answer.status_code == 500 and "observability_enabled=true" in answer.text


async def test_no_request_is_written_to_the_disk(sessions, session_port, environments, rows):
    sessions["ab"] = Session(marked(rows["mcqa"][0], " [not on disk]"), PLAYERS["mcqa"]["solve"])
    await run(sessions["ab"].row, "ab", session_port)
    assert len(sessions["ab"].requests) == 1
    written = [path for path in environments.run.rglob("*") if path.is_file() and "capture" in path.name]
    assert written == []
    assert "[not on disk]" not in environments.log.read_text(errors="replace")


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_scan_runs_an_environment(environments, session_port, paths, name, tmp_path, command_environment):
    environment, output = ENVIRONMENTS[name], tmp_path / "policy.jsonl"
    known = load_rows(environment.rows(paths))
    assert all(map(is_environment_row, known))
    with serving_in_thread(make_app(known, model=MODEL, players=PLAYERS[name], find=find_row)) as url:
        command = [sys.executable, str(EXAMPLE_DIR / "eval_nemogym_via_api.py"), "--concurrency", "4"]
        command += ["--input", str(environment.rows(paths)), "--output", str(output)]
        command += ["--policy-base-url", role_url(url, "solve"), "--head-url", environments.head_url]
        command += ["--session-port", str(session_port), "--expect-exit-status", "Graded"]
        if environment.rewards:
            command += ["--expect-reward", f"{environment.rewards['solve']:g}"]
        settings = {**command_environment, "NEMO_GYM_URL": environments.agent_url(environment.agent)}
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(output.read_text().splitlines()) == len(known)


# --- the docs' table of agents --------------------------------------------------------

_HANDS_ON = re.compile(r"url_path_for_run|base_url_for_run|rollout_id_from_run|current_rollout_id|\(SimpleAgent\)")
# They call their model inside of /run, where NeMo Gym's own client adds the rollout id.
_CALL_IN_RUN = {"image_tools_agent", "toolsandbox_agent", "vcqa_agent"}


def test_the_docs_name_every_agent_of_nemo_gym_and_what_its_source_shows(paths):
    folder = paths.site_packages / "responses_api_agents"
    sources = {
        path.parent.name: "".join(file.read_text() for file in path.parent.glob("*.py"))
        for path in folder.glob("*/app.py")
    }
    by_url, as_they_are, with_sandbox, without_id, outside = agents_by_reach()
    assert set().union(*agents_by_reach()) == sources.keys()
    assert {agent for agent, source in sources.items() if "policy_base_url: Optional" in source} == by_url
    hands_on = {agent for agent, source in sources.items() if _HANDS_ON.search(source)} | _CALL_IN_RUN
    assert (as_they_are | with_sandbox) - hands_on == set()
    assert without_id & hands_on == set()
    assert {agent for agent in as_they_are if "sandbox.providers" in sources[agent]} == set()
