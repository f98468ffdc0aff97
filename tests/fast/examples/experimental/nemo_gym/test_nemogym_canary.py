"""The canary episode against a real /run server that calls back, and a real session port."""

import asyncio
import json
import socket

import nemogym_canary
import pytest
from nemogym_canary import fly_canaries, session_url

from .conftest import ROW, failed_body
from .gym_stand_in import NO_SANDBOX, UNKNOWN_VERSION, agent_that_calls, free_port


async def fly(stub, **options):
    options = {"session_host": "127.0.0.1", "session_ports": [free_port()], **options}
    (finding,) = await fly_canaries([stub.url], ROW, **options)
    return finding


async def test_one_short_episode(stub):
    stub.on_run = agent_that_calls
    port = free_port()
    finding = await fly(stub, session_host="0.0.0.0", session_ports=[port])
    assert finding.level == "ok", finding
    (request,) = stub.requests
    assert request["version"] != ROW["version"], "no test is to run"
    assert {key: request[key] for key in ("instance_id", "repo")} == {key: ROW[key] for key in ("instance_id", "repo")}
    assert request["image_name"] == "docker.io/xingyaoww/sweb.eval.x86_64.psf_s_requests-1:latest"
    # As the connector rewrites a wildcard: the address that routes to the server.
    assert request["policy_base_url"].startswith(f"http://127.0.0.1:{port}/sessions/")
    assert request["policy_base_url"].endswith("/v1")


async def test_the_turn_submits(stub):
    turns = []

    async def agent(body):
        answer = await agent_that_calls(body)
        turns.append(body["policy_answer"])
        return answer

    stub.on_run = agent
    await fly(stub)
    (choice,) = turns[0]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert isinstance(choice["message"]["content"], str)
    command = json.loads(call["function"]["arguments"])["command"]
    assert (call["function"]["name"], command) == ("bash", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


async def test_the_external_host_is_what_the_agent_gets(stub, monkeypatch):
    monkeypatch.setenv("MILES_ROUTER_EXTERNAL_HOST", "localhost")
    stub.on_run = agent_that_calls
    finding = await fly(stub)
    assert finding.level == "ok" and "http://localhost:" in finding.found


async def test_a_sandbox_that_does_not_run_the_command(stub):
    async def agent(body):
        answer = await agent_that_calls(body)
        await agent_that_calls(body, {"role": "tool", "content": "conda: command not found"})
        return answer

    stub.on_run = agent
    finding = await fly(stub)
    assert finding.level == "error" and "conda: command not found" in finding.found


@pytest.mark.parametrize(
    "trace, said",
    [(NO_SANDBOX, "toomanyrequests"), (UNKNOWN_VERSION, "run_golden"), ("Traceback:\nRuntimeError: odd", "odd")],
)
async def test_an_episode_that_never_calls(stub, trace, said):
    stub.on_run = lambda body: failed_body(trace)
    finding = await fly(stub)
    assert finding.level == "error" and said in str(finding)


async def test_no_answer_and_no_call_in_time(stub):
    stub.on_run = lambda body: stub.hang()
    finding = await fly(stub, timeout_s=0.3)
    assert finding.level == "error"
    assert "no call within" in finding.found and stub.requests[0]["policy_base_url"] in finding.expected


async def test_every_port_is_free_again(stub):
    ports = [free_port() for _ in range(3)]
    stub.on_run = agent_that_calls
    await fly(stub, session_ports=ports)
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


async def test_a_taken_port_is_named_and_no_episode_starts(stub):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = await fly(stub, session_ports=[free_port(), port])
    assert finding.level == "error" and str(port) in finding.expected
    assert stub.requests == []


async def test_an_address_of_another_machine_is_named(stub):
    finding = await fly(stub, session_host="192.0.2.1")
    assert finding.level == "error" and "192.0.2.1" in finding.expected


def test_an_interrupt_leaves_no_port(stub):
    port = free_port()

    async def interrupted():
        stub.on_run = lambda body: stub.hang()
        flight = asyncio.create_task(fly(stub, session_ports=[port]))
        while not stub.requests:
            await asyncio.sleep(0.05)
        flight.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flight

    asyncio.run(interrupted())
    socket.create_server(("127.0.0.1", port)).close()


def test_it_says_that_it_waits(stub, capsys, caplog):
    stub.on_run = lambda body: failed_body(NO_SANDBOX)
    asyncio.run(fly(stub))
    said = capsys.readouterr().err
    assert (
        said
        == f"waiting for 1 canary episode(s); each may pull an image first, {nemogym_canary.TIMEOUT_S:g} s at most\n"
    )


@pytest.mark.parametrize("host, shown", [("0.0.0.0", "0.0.0.0"), ("::", "[::]"), ("[::1]", "[::1]")])
def test_session_url(host, shown):
    assert session_url(host, 30000, "ab") == f"http://{shown}:30000/sessions/ab"
