"""One POST: delivered, not delivered, or lost on the way back."""

import asyncio
import gc
import os
import socket

import nemogym_http as http
import pytest
from aiohttp import web

from .conftest import StubServer, graded_body


async def _post(url: str) -> tuple[int, bytes]:
    return await http.post(url, b"{}", http.Delivery())


async def test_an_answer_is_status_and_body(stub):
    stub.status = 418
    stub.on_run = lambda body: "short and stout"
    assert await _post(f"{stub.url}/run") == (418, b"short and stout")


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
async def test_without_a_connection_nothing_is_delivered(host):
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        delivery = http.Delivery()
        with pytest.raises(http.NotDelivered, match=host) as raised:
            await http.post(f"http://user:secret@{host}:{refusing.getsockname()[1]}/run", b"{}", delivery)
    assert not delivery.connected
    assert "secret" not in str(raised.value)


async def test_a_connection_that_ends_without_an_answer_is_lost(stub):
    def drop(body):
        raise StubServer.Drop

    stub.on_run = drop
    delivery = http.Delivery()
    with pytest.raises(http.ConnectionLost):
        await http.post(f"{stub.url}/run", b"{}", delivery)
    assert delivery.connected
    await asyncio.sleep(0.2)
    assert len(stub.requests) == 1


async def test_an_answer_cut_short_is_a_lost_connection():
    async def promise_more_than_is_sent(reader, writer):
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()

    seen = []
    server = await asyncio.start_server(promise_more_than_is_sent, "127.0.0.1", 0)
    async with server:
        with pytest.raises(http.ConnectionLost):
            await _post(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/run")
    assert len(seen) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"220 smtp.example ESMTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_what_is_no_answer_is_not_a_lost_connection(answer):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(http.BadAnswer):
            await _post(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/run")


async def test_an_answer_has_a_largest_size(stub, monkeypatch):
    monkeypatch.setattr(http, "_LARGEST_ANSWER", 1 << 20)
    stub.on_run = lambda body: b"x" * (1 << 20)
    assert len((await _post(f"{stub.url}/run"))[1]) == 1 << 20
    stub.on_run = lambda body: b"x" * ((1 << 20) + 1)
    with pytest.raises(http.BadAnswer, match="larger"):
        await _post(f"{stub.url}/run")
    assert stub.headers[0]["Accept-Encoding"] == "identity"


async def test_a_redirect_is_not_followed(stub):
    stub.on_run = lambda body: web.Response(status=307, headers={"Location": "/run"})
    assert (await _post(f"{stub.url}/run"))[0] == 307
    assert len(stub.requests) == 1


async def test_health_is_an_answer_that_no_gateway_made(stub):
    assert await http.answers(f"{stub.url}/health")
    stub.healthy = False
    assert not await http.answers(f"{stub.url}/health")
    stub.stop()
    assert not await http.answers(f"{stub.url}/health")


async def test_one_client_session_a_loop_and_no_cookie_or_idle_connection(stub):
    url = f"http://localhost:{stub.port}/run"  # cookies are not kept for bare addresses
    stub.on_run = lambda body: web.json_response(graded_body(), headers={"Set-Cookie": "session=one"})
    await _post(url)
    session = http._client().session
    await _post(url)

    assert http._client().session is session
    assert all("Cookie" not in headers for headers in stub.headers)
    assert all(headers.get("Connection") == "close" for headers in stub.headers)
    assert session.connector.limit == 0


def test_a_closed_loops_session_is_dropped_quietly(stub, recwarn):
    for _ in range(3):
        assert asyncio.run(_post(f"{stub.url}/run"))[0] == 200
    gc.collect()
    assert len(http._clients) <= 2
    assert not [warning for warning in recwarn if "Unclosed" in str(warning.message)]


async def test_few_come_back_in_one_turn_of_the_loop_and_in_their_order():
    turns, order = [0], []

    async def start(number: int) -> None:
        await http.turn()
        turns[-1] += 1
        order.append(number)

    starts = asyncio.gather(*map(start, range(500)))
    while not starts.done():
        await asyncio.sleep(0)
        turns.append(0)
    assert order == list(range(500))
    assert 0 < max(turns) <= http._STARTS_IN_A_TURN


async def test_a_proxy_in_the_environment_is_not_used(stub, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert (await _post(f"{stub.url}/run"))[0] == 200


async def test_tcp_keepalive_keeps_a_silent_connection_alive(stub):
    stub.on_run = lambda body: stub.hang()
    exchange = asyncio.create_task(_post(f"{stub.url}/run"))
    while not stub.requests:
        await asyncio.sleep(0.01)
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    with _open_socket_to(stub.port) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert [sock.getsockopt(socket.IPPROTO_TCP, name) for name in names] == [60, 30, 5]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 210_000
    exchange.cancel()


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
