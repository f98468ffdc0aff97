"""The connector against real /run servers: what arrives there, how often, when, and what run() returns."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time

import nemogym_agent_function as connector
import nemogym_http
import nemogym_metrics
import nemogym_servers
import pytest
from aiohttp import web

from . import EXAMPLE_DIR
from .conftest import ROW, StubServer, failed_body, graded_body

SESSION = "http://trainer:3000/sessions/0123abcd"


@pytest.fixture(autouse=True)
def use_stub(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    monkeypatch.setattr(connector, "_BACKOFF_S", (0.15, 0.15))
    monkeypatch.setattr(nemogym_servers, "_FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(connector, "TALLY", nemogym_metrics.Tally())
    connector._error_once.cache_clear()
    connector._warn_agent_owned.cache_clear()


async def _run(base_url=SESSION, request_kwargs=None, metadata=ROW):
    """What run() returns, without its agent_metrics."""
    result = await connector.run(base_url=base_url, prompt="", request_kwargs=request_kwargs, metadata=metadata)
    return {key: value for key, value in result.items() if key != "agent_metrics"}


def _row(number: int) -> dict:
    return {**ROW, "instance_id": f"psf__requests-{number}"}


async def _until(condition, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        await asyncio.sleep(0.01)


class Gate:
    """An ``on_run`` that holds every episode until it is opened, from any thread."""

    def __init__(self, answer=graded_body) -> None:
        self._open, self._answer = threading.Event(), answer

    async def __call__(self, body):
        while not self._open.is_set():
            await asyncio.sleep(0.01)
        return self._answer()

    def open(self) -> None:
        self._open.set()


# --- the ordinary path ----------------------------------------------------------


async def test_one_episode(stub):
    result = await _run(request_kwargs={"temperature": 0.7, "max_tokens": 64, "top_k": 20})

    assert result == {"exit_status": "Submitted", "reward": 1.0, "eval_report": graded_body()["metadata"]}
    (request,) = stub.requests
    assert stub.paths == ["/run"]
    assert request["policy_base_url"] == f"{SESSION}/v1"
    assert request["instance_id"] == ROW["instance_id"]
    assert request["responses_create_params"] == {
        "input": [],
        "temperature": 0.7,
        "max_output_tokens": 64,
        "metadata": {"extra_body": '{"top_k": 20}'},
    }


async def test_every_sampling_setting_arrives_once(stub):
    settings = {"top_k": 20, "min_p": 0.1, "stop": ["x"], "seed": 7, "repetition_penalty": 1.2}
    await _run(request_kwargs={**settings, "temperature": 1.0})
    params = stub.requests[0]["responses_create_params"]
    assert json.loads(params.pop("metadata")["extra_body"]) == settings
    assert params == {"input": [], "temperature": 1.0}


async def test_what_was_measured_of_an_episode_rides_along(stub):
    stub.on_run = lambda body: asyncio.sleep(0.1, graded_body())
    metrics = (await connector.run(SESSION, "", metadata=ROW))["agent_metrics"]
    assert 0.1 <= metrics.pop("total_time") < 5
    assert metrics == {"turns": 2, "tool_calls": 2, "tampered": False}


@pytest.mark.parametrize("suffix, path", [("/", "/run"), ("/gym/", "/gym/run"), ("/run", "/run")])
async def test_exactly_one_run_in_the_path(stub, monkeypatch, suffix, path):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url + suffix)
    await _run(base_url=f"{SESSION}/")

    assert stub.paths == [path]
    assert stub.requests[0]["policy_base_url"] == f"{SESSION}/v1"


async def test_a_proxy_in_the_environment_is_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert (await _run())["reward"] == 1.0


async def test_concurrent_episodes_of_one_instance_have_folders_of_their_own(stub):
    stub.on_run = gate = Gate()
    episodes = [asyncio.create_task(_run()) for _ in range(8)]
    await _until(lambda: len(stub.requests) >= 8)
    gate.open()

    assert [(await episode)["reward"] for episode in episodes] == [1.0] * 8
    subsets = {request["subset"] for request in stub.requests}
    assert len(subsets) == 8 and all(subset.startswith("gym-") for subset in subsets)
    assert {request["image_name"] for request in stub.requests} == {
        "docker.io/xingyaoww/sweb.eval.x86_64.psf_s_requests-1:latest"
    }

    await _run()
    assert stub.requests[-1]["subset"] in subsets, "an ended episode's folder is used again"


def test_the_connector_loads_with_aiohttp_alone():
    code = (
        "import sys, nemogym_agent_function\n"
        "assert not {'miles', 'torch', 'datasets', 'requests', 'httpx', 'typer'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=EXAMPLE_DIR)


# --- hosts ----------------------------------------------------------------------


async def test_a_wildcard_session_host_becomes_the_address_that_routes_to_the_server(stub):
    await _run(base_url="http://0.0.0.0:3000/sessions/ab")
    assert stub.requests[0]["policy_base_url"] == "http://127.0.0.1:3000/sessions/ab/v1"


async def test_an_ipv4_wildcard_is_never_replaced_by_an_ipv6_address(caplog):
    connector._warn_unroutable.cache_clear()
    for _ in range(3):
        url = await connector.reachable_policy_url(
            "http://0.0.0.0:3000/sessions/ab", "http://[::1]:12000", connector.Settings()
        )
        assert url == "http://0.0.0.0:3000/sessions/ab/v1"
    assert caplog.text.count("no local IPv4 address routes to ::1") == 1, "once for all episodes"


@pytest.mark.parametrize("host", ["0.0.0.0", "trainer"])
async def test_the_external_host_always_wins(stub, monkeypatch, host):
    monkeypatch.setenv("MILES_ROUTER_EXTERNAL_HOST", "100.64.0.7")
    await _run(base_url=f"http://{host}:3000/sessions/ab")
    assert stub.requests[0]["policy_base_url"] == "http://100.64.0.7:3000/sessions/ab/v1"


async def test_an_ipv6_server_and_session_keep_their_brackets(monkeypatch):
    seen = []

    async def answer(request):
        seen.append(await request.json())
        return web.json_response(graded_body())

    app = web.Application()
    app.router.add_post("/run", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "::1", 0)
    await site.start()
    try:
        monkeypatch.setenv("NEMO_GYM_URL", f"http://[::1]:{runner.addresses[0][1]}")
        assert (await _run(base_url="http://[fd00::1]:3000/sessions/ab"))["reward"] == 1.0
    finally:
        await runner.cleanup()
    assert seen[0]["policy_base_url"] == "http://[fd00::1]:3000/sessions/ab/v1"


# --- delivery -------------------------------------------------------------------


async def test_a_lost_connection_after_the_request_is_never_repeated(stub):
    def drop(body):
        raise StubServer.Drop

    stub.on_run = drop
    result = await _run(metadata={**ROW, "reward": 1.0})

    assert result == {"exit_status": "ServerUnreachable", "eval_report": {}}
    await asyncio.sleep(0.3)
    assert len(stub.requests) == 1


async def test_a_folder_is_not_reused_after_a_lost_connection(stub):
    def drop(body):
        raise StubServer.Drop

    stub.on_run = drop
    await _run()
    stub.on_run = lambda body: graded_body()
    await _run()
    assert stub.requests[0]["subset"] != stub.requests[1]["subset"], "the server may still be in it"


async def test_a_refused_connection_is_tried_again_until_it_is_accepted(monkeypatch):
    delivered = []

    async def answer(request):
        delivered.append(await request.json())
        return web.json_response(graded_body())

    app = web.Application()
    app.router.add_post("/run", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))  # bound but not listening: refuses
    monkeypatch.setenv("NEMO_GYM_URL", f"http://127.0.0.1:{sock.getsockname()[1]}")

    episode = asyncio.create_task(_run())
    await asyncio.sleep(0.2)  # attempts at 0 and 0.15 s are refused, the third comes at 0.3 s
    assert not episode.done()
    await web.SockSite(runner, sock).start()
    try:
        assert (await episode)["reward"] == 1.0
        assert len(delivered) == 1
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
async def test_a_server_that_cannot_be_reached_is_no_verdict(monkeypatch, caplog, host):
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        monkeypatch.setenv("NEMO_GYM_URL", f"http://user:secret@{host}:{refusing.getsockname()[1]}")
        start = time.monotonic()
        result = await _run()
    assert result == {"exit_status": "ServerUnreachable", "eval_report": {}}
    assert time.monotonic() - start >= 0.3, "three attempts"
    assert host in caplog.text and "secret" not in caplog.text


async def test_a_server_that_refuses_is_stood_in_for_by_another(stub, monkeypatch):
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        monkeypatch.setenv("NEMO_GYM_URL", f"http://127.0.0.1:{refusing.getsockname()[1]}, {stub.url}")
        results = await asyncio.gather(*(_run(metadata=_row(number)) for number in range(20)))
    assert {result["exit_status"] for result in results} == {"Submitted"}
    assert len(stub.requests) == 20


async def test_a_sandbox_that_could_not_be_created_is_tried_once_more_on_a_fresh_place(stub):
    answers = [failed_body("nemo_gym.sandbox.SandboxCreateError: no space left on device"), graded_body()]
    stub.on_run = lambda body: answers.pop(0)
    assert (await _run())["reward"] == 1.0
    assert len(stub.requests) == 2


async def test_a_fresh_place_is_on_another_server_when_there_is_one(stubs, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", ",".join(stub.url for stub in stubs))
    failures = []

    def fail_first(body):
        failures.append(body)
        return failed_body("SandboxCreateError: pull: toomanyrequests") if len(failures) == 1 else graded_body()

    for stub in stubs:
        stub.on_run = fail_first
    assert (await _run())["reward"] == 1.0
    assert sorted(len(stub.requests) for stub in stubs) == [0, 1, 1]


async def test_twice_without_a_sandbox_is_no_verdict(stub):
    stub.on_run = lambda body: failed_body("...", error="SandboxCreateError: pull: toomanyrequests")
    result = await _run()
    assert result["exit_status"] == "SandboxUnavailable" and "reward" not in result
    assert result["eval_report"]["error"] == "SandboxCreateError: pull: toomanyrequests"
    assert len(stub.requests) == 2


async def test_a_sandbox_that_was_lost_on_the_way_is_not_tried_again(stub):
    stub.on_run = lambda body: failed_body("nemo_gym_guarded_docker.record.SandboxLost: the engine stopped")
    result = await _run()
    assert result["exit_status"] == "SandboxLost" and "reward" not in result
    assert len(stub.requests) == 1


# --- time -----------------------------------------------------------------------


async def test_the_deadline_is_a_verdict_on_a_server_that_works(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.3")
    stub.on_run = lambda body: stub.hang()
    start = time.monotonic()

    assert await _run() == {"exit_status": "TimeLimitExceeded", "reward": 0.0, "eval_report": {}}
    assert 0.3 <= time.monotonic() - start < 3
    assert len(stub.requests) == 1


async def test_the_deadline_is_no_verdict_on_a_server_whose_health_fails(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.2")
    stub.on_run = lambda body: stub.hang()
    stub.healthy = False
    assert await _run() == {"exit_status": "ServerUnreachable", "eval_report": {}}


async def test_the_deadline_is_no_verdict_when_none_of_eight_has_ended(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.4")
    stub.on_run = lambda body: stub.hang()
    results = await asyncio.gather(*(_run() for _ in range(8)))
    assert results == [{"exit_status": "ServerUnreachable", "eval_report": {}}] * 8


async def test_the_deadline_is_a_verdict_when_one_of_eight_was_graded_meanwhile(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.5")
    stub.on_run = lambda body: graded_body() if body["instance_id"] == "psf__requests-7" else stub.hang()
    results = await asyncio.gather(*(_run(metadata=_row(number)) for number in range(8)))
    assert [result["exit_status"] for result in results] == ["TimeLimitExceeded"] * 7 + ["Submitted"]


async def test_the_clock_starts_with_the_place(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "8")
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "1")
    stub.on_run = lambda body: asyncio.sleep(0.15, graded_body())
    start = time.monotonic()
    results = await asyncio.gather(*(_run() for _ in range(100)))
    assert time.monotonic() - start > 1.5, "most have waited longer than an episode may take"
    assert {result["exit_status"] for result in results} == {"Submitted"}
    assert stub.most_in_flight == 8


async def test_two_hundred_wait_for_sixty_four_slow_ones(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "5")
    stub.on_run = gate = Gate()
    episodes = [asyncio.create_task(_run()) for _ in range(264)]
    await _until(lambda: len(stub.requests) >= 64)
    await asyncio.sleep(0.3)
    assert len(stub.requests) == 64, "the default of NEMO_GYM_MAX_CONCURRENCY"
    gate.open()
    assert {(await episode)["exit_status"] for episode in episodes} == {"Submitted"}


async def test_a_place_is_free_only_when_the_server_has_answered(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "1")
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.2")
    stub.on_run = gate = Gate()
    assert (await _run())["exit_status"] == "TimeLimitExceeded"

    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "10")
    following = asyncio.create_task(_run())
    await asyncio.sleep(0.2)
    assert len(stub.requests) == 1, "the server is still at the first"
    gate.open()
    assert (await following)["reward"] == 1.0
    assert stub.most_in_flight == 1
    assert stub.requests[0]["subset"] == stub.requests[1]["subset"], "its folder is free then"


async def test_draining_has_an_end(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "1")
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.2")
    monkeypatch.setenv("NEMO_GYM_DRAIN_TIMEOUT", "0.3")
    stub.on_run = lambda body: stub.hang()
    await _run()
    stub.on_run = lambda body: graded_body()
    start = time.monotonic()
    assert (await asyncio.wait_for(_run(), timeout=5))["reward"] == 1.0
    assert time.monotonic() - start > 0.2
    assert stub.requests[0]["subset"] != stub.requests[1]["subset"], "the server may still be in that folder"


async def test_the_deadline_holds_while_connecting_and_is_then_no_verdict(monkeypatch):
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.2")
    with socket.socket() as full:  # a backlog that is never accepted from leaves connecting without an end
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        monkeypatch.setenv("NEMO_GYM_URL", f"http://127.0.0.1:{address[1]}")
        try:
            result = await asyncio.wait_for(_run(), timeout=5)
        finally:
            for filler in fillers:
                filler.close()
    assert result == {"exit_status": "ServerUnreachable", "eval_report": {}}


# --- outages --------------------------------------------------------------------


async def test_an_outage_costs_what_was_in_flight_and_some_trials(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "8")
    asked: list[float] = []

    def answer(body):
        asked.append(time.monotonic())
        return failed_body("RuntimeError: disk") if asked[-1] < asked[0] + 2.0 else graded_body()

    stub.on_run = answer
    results = await asyncio.gather(*(_run(metadata=_row(number % 5)) for number in range(300)))
    lost = [result for result in results if "reward" not in result]
    # eight to see it, what was in flight with them, and trials at 0.1, 0.3, 0.7, 1.5 s
    assert 8 <= len(lost) <= 8 + 8 + 5
    assert {result["exit_status"] for result in lost} == {"UnknownError"}


async def test_a_restart_costs_only_what_was_in_flight(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "4")
    stub.on_run = lambda body: asyncio.sleep(0.4, graded_body())
    episodes = [asyncio.create_task(_run(metadata=_row(number))) for number in range(32)]
    await _until(lambda: len(stub.requests) >= 10)
    in_flight = stub.in_flight
    stub.stop()
    await asyncio.sleep(1.0)
    assert not all(episode.done() for episode in episodes)
    stub.restart()
    results = await asyncio.wait_for(asyncio.gather(*episodes), timeout=20)
    lost = [result for result in results if "reward" not in result]
    assert {result["exit_status"] for result in lost} == {"ServerUnreachable"}
    assert 0 < len(lost) <= max(in_flight, 4)


async def test_a_restart_in_the_middle_of_long_episodes_costs_only_what_was_in_flight(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "2")
    monkeypatch.setenv("NEMO_GYM_OUTAGE_WAIT", "0.5")
    stub.on_run = lambda body: asyncio.sleep(1.5, graded_body())
    episodes = [asyncio.create_task(_run(metadata=_row(number))) for number in range(6)]
    await _until(lambda: len(stub.requests) >= 3)
    stub.stop()
    stub.restart()
    results = await asyncio.wait_for(asyncio.gather(*episodes), timeout=30)
    assert sum("reward" not in result for result in results) <= 2


@pytest.fixture
async def killed(stub, monkeypatch, caplog):
    """A server that has worked and has two places; ``killed()`` loses what it runs and brings it back after its outage.

    As a killed process whose listener the kernel closes after the connections.
    """
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "2")
    monkeypatch.setattr(nemogym_servers, "_FIRST_PAUSE_S", 1.0)
    assert (await _run())["reward"] == 1.0

    async def lose(body):
        await _until(lambda: stub.dying)
        raise StubServer.Drop

    async def kill():
        stub.dying = True
        await _until(lambda: "is failing" in caplog.text)
        stub.on_run = lambda body: graded_body()
        stub.dying = False

    stub.on_run = lose
    return kill


async def test_a_dying_server_is_sent_no_episode_after_those_it_loses(stub, killed):
    episodes = [asyncio.create_task(_run(metadata=_row(number))) for number in range(8)]
    await _until(lambda: stub.in_flight == 2)
    await killed()
    results = await asyncio.wait_for(asyncio.gather(*episodes), timeout=20)
    assert [result["exit_status"] for result in results].count("ServerUnreachable") == 2
    assert sum("reward" in result for result in results) == 6


async def test_a_connection_that_an_aborted_episode_loses_is_one_too(stub, killed):
    aborted = [asyncio.create_task(_run(metadata=_row(number))) for number in range(2)]
    await _until(lambda: stub.in_flight == 2)
    await connector.abort(None)
    assert [result["exit_status"] for result in await asyncio.gather(*aborted)] == ["Aborted"] * 2
    following = [asyncio.create_task(_run(metadata=_row(number))) for number in range(4)]
    await asyncio.sleep(0.1)
    await killed()
    assert [result["exit_status"] for result in await asyncio.gather(*following)] == ["Submitted"] * 4


async def test_a_lost_connection_to_a_server_that_answers_is_no_outage(stub, caplog):
    def drop(body):
        raise StubServer.Drop

    assert (await _run())["reward"] == 1.0
    stub.on_run = drop
    await asyncio.gather(*(_run(metadata=_row(number)) for number in range(4)))
    stub.on_run = lambda body: graded_body()
    assert (await _run())["reward"] == 1.0
    assert "is failing" not in caplog.text


@pytest.mark.parametrize("health", ["fails", "is slow"])
async def test_a_trial_is_sent_whatever_health_says(stub, monkeypatch, health):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "1")
    assert (await _run())["reward"] == 1.0
    stub.healthy = health == "is slow"
    monkeypatch.setattr(nemogym_http, "_HEALTH_TIMEOUT_S", 0.2)
    stub.health_takes_s = 1.0 if stub.healthy else 0.0
    answers = [StubServer.Drop()]

    def answer(body):
        if answers:
            raise answers.pop()
        return graded_body()

    stub.on_run = answer
    results = await asyncio.wait_for(asyncio.gather(*(_run(metadata=_row(number)) for number in range(10))), 10)
    assert [result["exit_status"] for result in results].count("ServerUnreachable") == 1
    assert len(stub.requests) == 11


async def test_a_wedged_server_gives_one_zero_and_not_one_after_the_other(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "1")
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.1")
    monkeypatch.setenv("NEMO_GYM_DRAIN_TIMEOUT", "0.05")
    stub.on_run = lambda body: stub.hang()
    results = [await _run(metadata=_row(number)) for number in range(4)]
    assert [result["exit_status"] for result in results] == ["TimeLimitExceeded"] + ["ServerUnreachable"] * 3


async def test_an_aborted_trial_makes_room_for_the_next(stub, monkeypatch):
    stub.on_run = lambda body: failed_body("RuntimeError: disk")
    await asyncio.gather(*(_run(metadata=_row(number)) for number in range(8)))
    stub.on_run = lambda body: stub.hang()
    trial = asyncio.create_task(_run())
    await _until(lambda: len(stub.requests) >= 9)
    await connector.abort(None)
    assert (await trial)["exit_status"] == "Aborted"
    stub.on_run = lambda body: graded_body()
    assert (await asyncio.wait_for(_run(), timeout=5))["reward"] == 1.0


async def test_an_outage_without_an_end_fails_the_rest_at_once(stub, monkeypatch, caplog):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "4")
    monkeypatch.setenv("NEMO_GYM_OUTAGE_WAIT", "0.5")
    stub.on_run = lambda body: failed_body("SandboxCreateError: docker is down")
    start = time.monotonic()
    results = await asyncio.gather(*(_run(metadata=_row(number)) for number in range(200)))
    assert time.monotonic() - start < 5
    assert {result["exit_status"] for result in results} == {"SandboxUnavailable"}
    assert len(stub.requests) < 30
    said = [record.message for record in caplog.records if "every other episode fails at once" in record.message]
    assert len(said) == 1 and "docker is down" in said[0]


# --- several servers ------------------------------------------------------------


async def test_an_image_stays_on_its_server_and_images_spread(stubs, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", " , ".join(stub.url for stub in stubs))
    await asyncio.gather(*(_run(metadata=_row(number)) for number in [*range(30)] * 2))
    assert min(len(stub.requests) for stub in stubs) >= 2
    for number in range(30):
        seen_by = [stub for stub in stubs if any(r["instance_id"] == f"psf__requests-{number}" for r in stub.requests)]
        assert len(seen_by) == 1


async def test_a_server_named_twice_is_one_server(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", f"{stub.url},{stub.url}/,{stub.url.upper().replace('HTTP', 'http')}/run")
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "2")
    stub.on_run = lambda body: asyncio.sleep(0.05, graded_body())
    await asyncio.gather(*(_run(metadata=_row(number)) for number in range(12)))
    assert stub.most_in_flight == 2


async def test_a_failing_server_loses_its_work_to_the_others(stubs, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", ",".join(stub.url for stub in stubs))
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "2")
    stubs[0].on_run = lambda body: failed_body("RuntimeError: disk")
    results = await asyncio.gather(*(_run(metadata=_row(number)) for number in range(200)))
    lost = sum("reward" not in result for result in results)
    assert lost == len(stubs[0].requests) <= 15
    assert len(stubs[1].requests) + len(stubs[2].requests) == 200 - lost


# --- abort and cancellation -----------------------------------------------------


async def test_cancellation_propagates_at_once(stub):
    stub.on_run = lambda body: stub.hang()
    episode = asyncio.create_task(_run())
    await _until(lambda: stub.requests)
    episode.cancel()
    start = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert time.monotonic() - start < 2


async def test_a_cancelled_episode_keeps_its_place_until_the_server_has_answered(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "1")
    stub.on_run = gate = Gate()
    episode = asyncio.create_task(_run())
    await _until(lambda: stub.requests)
    episode.cancel()
    following = asyncio.create_task(_run())
    await asyncio.sleep(0.2)
    assert len(stub.requests) == 1
    gate.open()
    assert (await following)["reward"] == 1.0


async def test_abort_ends_every_run_at_once_and_the_next_one_runs(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "3")
    stub.on_run = gate = Gate()
    episodes = [asyncio.create_task(_run()) for _ in range(6)]
    await _until(lambda: len(stub.requests) >= 3)
    start = time.monotonic()
    await connector.abort(None)
    results = await asyncio.gather(*episodes)
    assert time.monotonic() - start < 2
    assert results == [{"exit_status": "Aborted", "eval_report": {}}] * 6
    gate.open()
    assert (await _run())["reward"] == 1.0
    assert len(stub.requests) == 4, "those that waited were never sent"


async def test_abort_without_an_episode_does_nothing():
    await connector.abort(None)


async def test_an_aborted_sample_is_not_a_cancelled_one(stub):
    """Miles awaits the sample's task after abort(); were that task cancelled, its whole rollout would raise."""
    stub.on_run = lambda body: stub.hang()

    async def sample():
        result = await _run()
        return result, asyncio.current_task().cancelling() if hasattr(asyncio.Task, "cancelling") else 0

    task = asyncio.create_task(sample())
    await _until(lambda: stub.requests)
    await connector.abort(None)
    assert await task == ({"exit_status": "Aborted", "eval_report": {}}, 0)


def test_abort_reaches_every_event_loop(stub):
    stub.on_run = lambda body: stub.hang()
    results = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(_run()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while len(stub.requests) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    asyncio.run(connector.abort(None))
    for thread in threads:
        thread.join(timeout=5)
    assert results == [{"exit_status": "Aborted", "eval_report": {}}] * 3


def test_event_loops_one_after_the_other_and_side_by_side(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "4")
    stub.on_run = lambda body: asyncio.sleep(0.02, graded_body())
    results = []

    async def many():
        results.extend(await asyncio.gather(*(_run() for _ in range(20))))

    asyncio.run(many())
    threads = [threading.Thread(target=lambda: asyncio.run(many())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [result["reward"] for result in results] == [1.0] * 80
    assert stub.most_in_flight == 4


# --- what is left behind --------------------------------------------------------


async def test_ten_thousand_episodes_leave_nothing_behind(canned_server, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", canned_server)

    async def some(count):
        results = await asyncio.gather(*(connector.run(SESSION, "", metadata=ROW) for _ in range(count)))
        assert all(result["reward"] == 1.0 for result in results)

    def held():
        return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())

    await some(500)
    await asyncio.sleep(0.2)
    before = held()
    for _ in range(19):
        await some(500)
    await asyncio.sleep(0.2)
    assert all(now <= then + 2 for now, then in zip(held(), before, strict=True)), (held(), before)
    pool = nemogym_servers.pool_of((canned_server,), connector.Settings().limits)
    assert [server.taken for server in pool.servers] == [0]
    assert not pool._waiters and not connector._alive and not connector._draining


@pytest.fixture
def canned_server():
    """A server in a thread that answers every request alike, without looking at it."""
    answer = json.dumps(graded_body()).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n".encode()

    async def serve(reader, writer):
        request = await reader.readuntil(b"\r\n\r\n")
        (length,) = [
            line.split(b":")[1] for line in request.splitlines() if line.lower().startswith(b"content-length")
        ]
        await reader.readexactly(int(length))
        writer.write(head + answer)
        await writer.drain()
        writer.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    start = asyncio.start_server(serve, "127.0.0.1", 0, backlog=1000)
    server = asyncio.run_coroutine_threadsafe(start, loop).result(timeout=5)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


# --- answers --------------------------------------------------------------------


@pytest.mark.parametrize("status", [404, 422, 429, 500, 503])
async def test_another_status_is_logged_and_not_repeated(stub, caplog, status):
    stub.status = status
    stub.on_run = lambda body: "b" * 200 + "TOO MUCH"

    assert await _run() == {"exit_status": "ServerError", "eval_report": {}}
    assert len(stub.requests) == 1
    assert str(status) in caplog.text and "b" * 200 in caplog.text and "TOO MUCH" not in caplog.text


@pytest.mark.parametrize(
    "body",
    ["<html></html>", "", "[]", '{"metadata": {}}', '{"reward": NaN}', '{"reward": true}', '{"reward": null}']
    + ['{"reward": "1.0"}', '{"reward": []}'],
)
async def test_an_answer_without_a_reward_is_no_verdict(stub, body):
    stub.on_run = lambda request: body
    result = await _run()
    assert result["exit_status"] == "ServerError" and "reward" not in result


@pytest.mark.parametrize("said", ["", "the agent saw: SandboxCreateError: no such image\n"])
async def test_a_conversation_that_outgrew_the_model_is_the_policys(stub, said):
    stub.on_run = lambda body: failed_body(f"{said}litellm.exceptions.ContextWindowExceededError: too long")
    result = await _run()
    assert (result["exit_status"], result["reward"]) == ("ContextLengthExceeded", 0.0)
    assert len(stub.requests) == 1


async def test_a_golden_server_gives_no_verdict_and_one_error(stub, caplog):
    stub.on_run = lambda body: graded_body(output=())
    assert {(await _run())["exit_status"] for _ in range(3)} == {"GoldenServer"}
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "run_golden" in record.message


async def test_skipped_tests_are_a_zero(stub):
    stub.on_run = lambda body: graded_body(passed=("t.py::test_a",))
    result = await _run()
    assert (result["exit_status"], result["reward"]) == ("TestsSkipped", 0.0)


async def test_a_policy_that_never_called_a_tool_has_a_verdict(stub):
    stub.on_run = lambda body: graded_body(0.0, passed=(), failed=("t.py::test_a",), model_patch="", output=())
    result = await _run()
    assert (result["exit_status"], result["reward"]) == ("LimitsExceeded", 0.0)


# --- mistakes of the caller -------------------------------------------------------

_SECONDS = ["NEMO_GYM_RUN_TIMEOUT", "NEMO_GYM_DRAIN_TIMEOUT", "NEMO_GYM_OUTAGE_WAIT"]


@pytest.mark.parametrize(
    "name, value",
    [(name, value) for name in _SECONDS for value in ("abc", "0", "-1", "nan", "inf")]
    + [("NEMO_GYM_MAX_CONCURRENCY", value) for value in ("abc", "0", "-1", "1.5", "inf")]
    + [
        ("NEMO_GYM_URL", value) for value in ("localhost:12000", "ftp://host:1", "http://", ",", " , ", "http://a:1,b")
    ],
)
async def test_a_setting_that_cannot_be_worked_with_is_named_once(stub, monkeypatch, caplog, name, value):
    monkeypatch.setenv(name, value)
    for _ in range(2):
        assert await _run() == {"exit_status": "UnknownError", "eval_report": {}}
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert name in record.message and "expected" in record.message and "found" in record.message
    assert stub.requests == []

    monkeypatch.setenv(name, {"NEMO_GYM_URL": stub.url, "MILES_ROUTER_EXTERNAL_HOST": "host"}.get(name, "5"))
    assert (await _run())["reward"] == 1.0, "the run is alive"


@pytest.mark.parametrize(
    "metadata",
    [None, {}, [1], {"instance_id": "../../x"}, {**ROW, "created_at": object()}, {**ROW, "n": float("nan")}],
)
async def test_a_row_that_cannot_be_sent_is_ungradable(stub, metadata):
    assert await _run(metadata=metadata) == {"exit_status": "UngradableInstance", "eval_report": {}}
    assert stub.requests == []


async def test_a_session_url_that_is_none_is_no_verdict(stub):
    assert (await _run(base_url="trainer:3000"))["exit_status"] == "PolicyEndpointError"
    assert stub.requests == []


async def test_whatever_else_goes_wrong_is_a_dict_with_its_text_in_the_log(stub, caplog):
    assert await _run(request_kwargs=[1]) == {"exit_status": "UnknownError", "eval_report": {}}
    assert "AttributeError" in caplog.text


async def test_a_setting_left_to_the_agent_is_said_once(stub, caplog):
    for _ in range(2):
        await _run(request_kwargs={"tools": [{"x": 1}], "tool_choice": "auto", "top_p": 0.5})
    assert stub.requests[0]["responses_create_params"] == {"input": [], "top_p": 0.5}
    (record,) = caplog.records
    assert "tool_choice, tools" in record.message


async def test_the_environment_is_read_at_every_call(stub, monkeypatch):
    assert (await _run())["exit_status"] == "Submitted"
    monkeypatch.setenv("NEMO_GYM_URL", f"{stub.url}/other")
    monkeypatch.setenv("MILES_ROUTER_EXTERNAL_HOST", "elsewhere")
    await _run()
    assert stub.paths == ["/run", "/other/run"]
    assert stub.requests[1]["policy_base_url"] == "http://elsewhere:3000/sessions/0123abcd/v1"


# --- the count ------------------------------------------------------------------


async def test_what_is_set_after_a_call_does_not_concern_it(stub, monkeypatch):
    episodes = [asyncio.create_task(_run()) for _ in range(100)]
    await asyncio.sleep(0)  # the calls
    await asyncio.sleep(0)  # their episodes
    monkeypatch.setenv("NEMO_GYM_URL", "http://127.0.0.1:9")
    assert {result["exit_status"] for result in await asyncio.gather(*episodes)} == {"Submitted"}
    assert len(stub.requests) == 100


async def test_every_end_is_counted(stub):
    await _run()
    await _run(metadata={})
    stub.on_run = lambda body: "nothing"
    await _run()
    assert connector.TALLY.take() == {
        "episodes": 3.0,
        "exit_status/Submitted": 1.0,
        "exit_status/UngradableInstance": 1.0,
        "exit_status/ServerError": 1.0,
        "no_verdict_share": pytest.approx(2 / 3),
    }
