"""The connector against a real /run server: what arrives there, how often, and what run() returns."""

import asyncio
import gc
import logging
import os
import socket
import subprocess
import sys
import time

import nemogym_agent_function as connector
import pytest
from aiohttp import web

from . import EXAMPLE_DIR
from .conftest import ROW, StubServer, failed_body, graded_body

SESSION = "http://trainer:3000/sessions/0123abcd"


@pytest.fixture(autouse=True)
def use_stub(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", stub.url)
    monkeypatch.setattr(connector, "_BACKOFF_S", (0.15, 0.15))
    connector._error_once.cache_clear()
    connector._warn_agent_owned.cache_clear()


async def _run(base_url=SESSION, request_kwargs=None, metadata=ROW):
    return await connector.run(base_url=base_url, prompt="", request_kwargs=request_kwargs, metadata=metadata)


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
    everyone = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def answer_when_all_are_in(body):
        if len(stub.requests) == 8:
            loop.call_soon_threadsafe(everyone.set)
        while not everyone.is_set():
            await asyncio.sleep(0.01)
        return graded_body()

    stub.on_run = answer_when_all_are_in
    results = await asyncio.gather(*(_run() for _ in range(8)))

    assert [result["reward"] for result in results] == [1.0] * 8
    subsets = {request["subset"] for request in stub.requests}
    assert len(subsets) == 8 and all(subset.startswith("gym-") for subset in subsets)
    assert {request["image_name"] for request in stub.requests} == {
        "docker.io/xingyaoww/sweb.eval.x86_64.psf_s_requests-1:latest"
    }

    await _run()
    assert stub.requests[-1]["subset"] in subsets, "an ended episode's folder is used again"


async def test_a_folder_is_not_reused_while_the_server_may_still_be_in_it(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.2")
    stub.on_run = lambda body: stub.hang()
    await _run()
    stub.on_run = lambda body: graded_body()
    await _run()
    assert stub.requests[0]["subset"] != stub.requests[1]["subset"]


async def test_one_client_session_a_loop_and_no_cookie_or_idle_connection(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", f"http://localhost:{stub.port}")  # cookies are not kept for bare addresses
    stub.on_run = lambda body: web.json_response(graded_body(), headers={"Set-Cookie": "session=one"})
    await _run()
    session = connector._session()
    await _run()

    assert connector._session() is session
    assert all("Cookie" not in headers for headers in stub.headers)
    assert all(headers.get("Connection") == "close" for headers in stub.headers)
    assert session.connector.limit == 0


def test_a_closed_loops_session_is_dropped_quietly(stub, recwarn):
    for _ in range(3):
        assert asyncio.run(_run())["reward"] == 1.0
    gc.collect()
    assert len(connector._sessions) <= 2
    assert not [warning for warning in recwarn if "Unclosed" in str(warning.message)]


async def test_tcp_keepalive_keeps_a_silent_connection_alive(stub):
    stub.on_run = lambda body: stub.hang()
    episode = asyncio.create_task(_run())
    while not stub.requests:
        await asyncio.sleep(0.01)
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    with _open_socket_to(stub.port) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert [sock.getsockopt(socket.IPPROTO_TCP, name) for name in names] == [60, 30, 5]
    episode.cancel()


def _open_socket_to(port: int) -> socket.socket:
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        try:
            if sock.family == socket.AF_INET and sock.getpeername()[1] == port:
                return sock
        except OSError:
            pass
        sock.close()
    raise AssertionError(f"no connection to port {port}")


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


async def test_an_ipv4_wildcard_is_never_replaced_by_an_ipv6_address():
    url = await connector._reachable_policy_url("http://0.0.0.0:3000/sessions/ab", "http://[::1]:12000")
    assert url == "http://0.0.0.0:3000/sessions/ab/v1"


@pytest.mark.parametrize("host", ["0.0.0.0", "trainer"])
async def test_the_external_host_always_wins(stub, monkeypatch, host):
    monkeypatch.setenv("MILES_ROUTER_EXTERNAL_HOST", "100.64.0.7")
    await _run(base_url=f"http://{host}:3000/sessions/ab")
    assert stub.requests[0]["policy_base_url"] == "http://100.64.0.7:3000/sessions/ab/v1"


# --- delivery -------------------------------------------------------------------


async def test_a_lost_connection_after_the_request_is_never_repeated(stub):
    def drop(body):
        raise StubServer.Drop

    stub.on_run = drop
    result = await _run(metadata={**ROW, "reward": 1.0})

    assert result == {"exit_status": "ServerUnreachable", "eval_report": {}}
    await asyncio.sleep(0.3)
    assert len(stub.requests) == 1


async def test_an_answer_cut_short_is_a_lost_connection(stub):
    async def promise_more_than_is_sent(reader, writer):
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()

    seen = []
    server = await asyncio.start_server(promise_more_than_is_sent, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/run"
        with pytest.raises(connector.ConnectionLost):
            await connector.post_json(url, {})
    assert len(seen) == 1


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
        result = await _run()
    assert result == {"exit_status": "ServerUnreachable", "eval_report": {}}
    assert host in caplog.text and "secret" not in caplog.text


async def test_the_deadline_holds_while_connecting_and_is_then_no_verdict(monkeypatch):
    monkeypatch.setattr(connector, "_BACKOFF_S", (60, 60))
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.2")
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        monkeypatch.setenv("NEMO_GYM_URL", f"http://127.0.0.1:{refusing.getsockname()[1]}")
        assert await asyncio.wait_for(_run(), timeout=5) == {"exit_status": "ServerUnreachable", "eval_report": {}}


async def test_the_deadline_is_a_verdict(stub, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "0.3")
    stub.on_run = lambda body: stub.hang()
    start = time.monotonic()

    assert await _run() == {"exit_status": "TimeLimitExceeded", "reward": 0.0, "eval_report": {}}
    assert 0.3 <= time.monotonic() - start < 3
    assert len(stub.requests) == 1


async def test_cancellation_propagates_at_once(stub):
    stub.on_run = lambda body: stub.hang()
    episode = asyncio.create_task(_run())
    while not stub.requests:
        await asyncio.sleep(0.01)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(episode, timeout=2)


# --- answers --------------------------------------------------------------------


@pytest.mark.parametrize("status", [404, 422, 429, 500, 503])
async def test_another_status_is_logged_and_not_repeated(stub, caplog, status):
    stub.status = status
    stub.on_run = lambda body: "b" * 200 + "TOO MUCH"

    assert await _run() == {"exit_status": "ServerError", "eval_report": {}}
    assert len(stub.requests) == 1
    assert str(status) in caplog.text and "b" * 200 in caplog.text and "TOO MUCH" not in caplog.text


async def test_a_redirect_is_not_followed(stub):
    stub.on_run = lambda body: web.Response(status=307, headers={"Location": "/run"})
    assert (await _run())["exit_status"] == "ServerError"
    assert len(stub.requests) == 1


@pytest.mark.parametrize(
    "body", ["<html></html>", "", "[]", '{"metadata": {}}', '{"reward": NaN}', '{"reward": true}']
)
async def test_an_answer_without_a_reward_is_no_verdict(stub, body):
    stub.on_run = lambda request: body
    assert "reward" not in await _run()


async def test_a_failure_on_the_server_keeps_its_report(stub):
    stub.on_run = lambda body: failed_body("...", error="SandboxCreateError: pull: toomanyrequests")
    result = await _run()
    assert result["exit_status"] == "SandboxUnavailable" and "reward" not in result
    assert result["eval_report"]["error"] == "SandboxCreateError: pull: toomanyrequests"


async def test_a_golden_server_gives_no_verdict_and_one_error(stub, caplog):
    stub.on_run = lambda body: graded_body(output=())
    assert {(await _run())["exit_status"] for _ in range(3)} == {"GoldenServer"}
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "run_golden" in record.message


async def test_skipped_tests_are_a_zero(stub):
    stub.on_run = lambda body: graded_body(passed=("t.py::test_a",))
    result = await _run()
    assert (result["exit_status"], result["reward"]) == ("TestsSkipped", 0.0)


# --- mistakes of the caller -------------------------------------------------------


@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan", "inf"])
async def test_a_timeout_that_is_none_is_named_once(stub, monkeypatch, caplog, value):
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", value)
    for _ in range(2):
        assert await _run() == {"exit_status": "UnknownError", "eval_report": {}}
    (record,) = caplog.records
    assert "NEMO_GYM_RUN_TIMEOUT" in record.message and value in record.message
    assert stub.requests == []


async def test_a_server_url_that_is_none_is_named(monkeypatch, caplog):
    monkeypatch.setenv("NEMO_GYM_URL", "localhost:12000")
    assert await _run() == {"exit_status": "UnknownError", "eval_report": {}}
    assert "NEMO_GYM_URL" in caplog.text


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
