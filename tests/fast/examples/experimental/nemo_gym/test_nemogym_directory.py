"""The connector on NeMo Gym rows: which server they reach, which way the session is named, how they end."""

import asyncio
import json

import nemogym_agent_function as connector
import nemogym_directory
import nemogym_metrics
import nemogym_servers
import pytest
import yaml
from aiohttp import web
from local_stack.scripted_policy import serving_in_thread
from nemogym_preflight import Job, run_checks

from .conftest import OPENAPI
from .conftest import ROW as INSTANCE
from .conftest import StubServer, graded_body
from .test_nemogym_environments import ROW

SESSION = "http://10.0.0.5:30000/sessions/0123abcd"
ROLLOUT_ID = "http__10.0.0.5__30000__0123abcd"
# A row of the mini-swe agents as NeMo Gym has them.
MINI_SWE = {**ROW, **{key: value for key, value in INSTANCE.items() if key != "problem_statement"}}
AGENT = {"paths": {"/run": {}}, "components": {"schemas": {"SimpleAgentRunRequest": {"properties": {}}}}}


@pytest.fixture(autouse=True)
def agent(stub, monkeypatch):
    """The stub as an agent of any environment."""
    monkeypatch.setattr(connector, "_BACKOFF_S", (0.05, 0.05))
    monkeypatch.setattr(connector, "TALLY", nemogym_metrics.Tally())
    monkeypatch.setattr(nemogym_directory, "_learnt", {})
    monkeypatch.setattr(nemogym_servers, "_FIRST_PAUSE_S", 0.1)
    stub.openapi = AGENT
    stub.on_run = lambda body: {"reward": 0.25, "response": {"output": []}}
    return stub


class Head:
    """A head server: ``agents`` are URLs by name, ``asked`` counts, ``status`` is what it answers with."""

    def __init__(self) -> None:
        self.agents: dict[str, str] = {}
        self.asked, self.status = 0, 200
        self.config = {
            "observability_enabled": True,
            "policy_model": {
                "responses_api_models": {"miles_session_model": {"allowed_sessions": ["10.0.0.5:30000"]}}
            },
        }

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        listed = [
            {"process_name": name, "server_type": "responses_api_agents", "url": url}
            for name, url in self.agents.items()
        ]
        return web.json_response(listed, status=self.status)


@pytest.fixture
def head(stub, monkeypatch):
    head = Head()
    app = web.Application()
    app.router.add_get("/server_instances", head.answer)

    async def configuration(request: web.Request) -> web.Response:
        return web.json_response(yaml.safe_dump(head.config))

    app.router.add_get("/global_config_dict_yaml", configuration)
    with serving_in_thread(app) as url:
        monkeypatch.setenv("NEMO_GYM_HEAD_URL", url)
        head.agents["blackjack_agent"] = stub.url
        yield head


async def run(metadata=ROW, **request_kwargs):
    result = await connector.run(base_url=SESSION, prompt="", request_kwargs=request_kwargs, metadata=metadata)
    return result["exit_status"], result.get("reward")


async def test_a_row_goes_to_the_server_of_the_url(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    assert await run(temperature=0.7) == ("Graded", 0.25)
    params = {**ROW["responses_create_params"], "temperature": 0.7}
    assert stub.requests == [{**ROW, "responses_create_params": params, "_ng_rollout_id": ROLLOUT_ID}]


async def test_a_row_goes_to_the_agent_that_it_names(stub, stubs, head, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stubs[0].url)
    assert await run() == ("Graded", 0.25)
    assert len(stub.requests) == 1 and stubs[0].requests == []


async def test_two_agents_of_one_dataset_each_get_their_rows(stub, stubs, head):
    stubs[0].openapi, stubs[0].on_run = AGENT, lambda body: {"reward": -1.0, "response": {"output": []}}
    head.agents["other_agent"] = stubs[0].url
    assert await run() == ("Graded", 0.25)
    assert await run({**ROW, "agent_ref": {"name": "other_agent"}}) == ("Graded", -1.0)


async def test_a_row_without_an_agent_goes_to_the_url(stub, head, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    row = {key: value for key, value in ROW.items() if key != "agent_ref"}
    assert await run(row) == ("Graded", 0.25)
    assert head.asked == 0


async def test_an_unknown_agent_is_no_verdict_and_starts_nothing(stub, head, caplog):
    assert await run({**ROW, "agent_ref": {"name": "chess"}}) == ("UngradableInstance", None)
    assert "'chess'" in caplog.text and "found blackjack_agent" in caplog.text
    assert stub.requests == []


async def test_a_dead_head_server_is_no_verdict(monkeypatch, unused_port):
    monkeypatch.setenv("NEMO_GYM_HEAD_URL", f"http://127.0.0.1:{unused_port}")
    assert await run() == ("ServerUnreachable", None)


async def test_a_failing_head_server_is_no_verdict(head):
    head.status = 502
    assert await run() == ("ServerError", None)


async def test_servers_are_asked_once_a_minute(stub, head, monkeypatch):
    asked = []
    monkeypatch.setattr(stub, "_response", lambda answer, inner=stub._response: asked.append(answer) or inner(answer))
    for _ in range(3):
        await run()
    assert (head.asked, asked.count(AGENT)) == (1, 1)


async def test_an_agent_that_moved_is_found_again_and_a_dead_head_server_forgets_nothing(
    stub, stubs, head, monkeypatch
):
    monkeypatch.setattr(nemogym_directory, "_HOLDS_S", 0.0)
    stubs[0].openapi, stubs[0].on_run = AGENT, stub.on_run
    await run()
    head.agents["blackjack_agent"] = stubs[0].url
    await run()
    head.status = 502
    await run()
    assert (len(stub.requests), len(stubs[0].requests)) == (1, 2)


# --- ways -------------------------------------------------------------------------


async def test_an_agent_that_takes_a_url_gets_it(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    stub.openapi, stub.on_run = OPENAPI, lambda body: graded_body()
    assert await run(MINI_SWE) == ("Submitted", 1.0)
    assert stub.requests[0]["policy_base_url"] == f"{SESSION}/v1" and "_ng_rollout_id" not in stub.requests[0]


@pytest.mark.parametrize(
    "openapi, way, expected",
    [(OPENAPI, "session_model", "_ng_rollout_id"), (AGENT, "policy_base_url", "policy_base_url")],
)
async def test_the_way_can_be_forced(stub, monkeypatch, openapi, way, expected):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    monkeypatch.setenv("NEMO_GYM_POLICY_VIA", way)
    stub.openapi = openapi
    await run(MINI_SWE)
    assert {"_ng_rollout_id", "policy_base_url"} & stub.requests[0].keys() == {expected}


async def test_a_swebench_instance_has_one_way(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    stub.on_run = lambda body: graded_body()
    assert await run(INSTANCE) == ("Submitted", 1.0)
    assert stub.requests[0]["policy_base_url"] == f"{SESSION}/v1"


async def test_an_unknown_way_is_told(stub, monkeypatch, caplog):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    monkeypatch.setenv("NEMO_GYM_POLICY_VIA", "magic")
    connector._error_once.cache_clear()
    assert await run() == ("UnknownError", None)
    assert "NEMO_GYM_POLICY_VIA: expected auto, policy_base_url or session_model, found 'magic'" in caplog.text


async def test_what_is_no_agent_server_is_no_verdict(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    stub.openapi = {"paths": {"/v1/responses": {}}}
    assert await run() == ("UngradableInstance", None)
    assert stub.requests == []


async def test_the_rollout_id_names_the_host_that_nemo_gym_reaches(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    result = await connector.run(base_url="http://0.0.0.0:3/sessions/ab", prompt="", metadata=ROW)
    assert result["exit_status"] == "Graded"
    monkeypatch.setenv("MILES_ROUTER_EXTERNAL_HOST", "fd00::7")
    await connector.run(base_url="http://0.0.0.0:3/sessions/ab", prompt="", metadata=ROW)
    assert [request["_ng_rollout_id"] for request in stub.requests] == [
        "http__127.0.0.1__3__ab",
        "http__fd00_3a_3a7__3__ab",
    ]


# --- the same contract ------------------------------------------------------------


async def test_a_lost_connection_is_not_sent_again(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)

    def drop(body):
        raise StubServer.Drop

    stub.on_run = drop
    assert await run() == ("ServerUnreachable", None)
    assert len(stub.requests) == 1


async def test_a_timeout_is_a_verdict_on_a_server_that_works(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.3")
    monkeypatch.setenv("NEMO_GYM_DRAIN_TIMEOUT", "0.1")
    stub.on_run = lambda body: stub.hang()
    assert await run() == ("TimeLimitExceeded", 0.0)


async def test_sixty_four_episodes_each_name_their_session(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    urls = [f"http://10.0.0.5:30000/sessions/{number:032x}" for number in range(64)]
    await asyncio.gather(*(connector.run(base_url=url, prompt="", metadata={**ROW, "id": url}) for url in urls))
    named = {request["id"]: request["_ng_rollout_id"] for request in stub.requests}
    assert named == {url: f"http__10.0.0.5__30000__{url[-32:]}" for url in urls}


# --- preflight --------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path):
    """Writes prompt data of these rows' metadata."""

    def write(*rows):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(f"{json.dumps({'prompt': 'p', 'metadata': row})}\n" for row in rows))
        return str(path)

    return write


def findings(*paths):
    return [(finding.level, str(finding)) for finding in run_checks(Job(prompt_data=paths))]


def test_preflight_finds_the_agents_of_rows_and_their_session_model(head, prompts):
    found = findings(prompts(ROW, ROW))
    assert {level for level, _ in found} == {"ok"}
    told = "\n".join(text for _, text in found)
    assert "agent blackjack_agent: " in told and "by session_model" in told
    assert "calls sessions of ['10.0.0.5:30000']" in told and "2 row(s), 1 task(s)" in told


def test_preflight_names_an_agent_that_is_not_there(head, prompts):
    found = findings(prompts({**ROW, "agent_ref": {"name": "chess"}}))
    assert any(level == "error" and "'chess'" in text and "blackjack_agent" in text for level, text in found)


@pytest.mark.parametrize(
    "config, told",
    [
        ({"observability_enabled": False}, "observability_enabled is not true"),
        ({"policy_model": {"responses_api_models": {"vllm_model": {}}}}, "no such model server"),
    ],
)
def test_preflight_names_a_server_that_would_not_call_the_session(head, prompts, config, told):
    head.config |= config
    assert any(level == "error" and told in text for level, text in findings(prompts(ROW)))


def test_preflight_names_rows_that_cannot_be_sent(head, prompts):
    unfit = {"responses_create_params": {}, "reward": 1.0}
    assert any(level == "error" and "its metadata holds reward" in text for level, text in findings(prompts(unfit)))


@pytest.fixture
def unused_port():
    stub = StubServer()
    stub.close()
    return stub.port
