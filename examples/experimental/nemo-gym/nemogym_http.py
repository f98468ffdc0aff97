"""HTTP to an agent server: one POST that either was delivered or was not, for thousands of requests open at a time.

``/run`` starts an episode and is not idempotent, so whether a failed POST can have reached the server is what decides
if it may be sent again: ``NotDelivered`` says that it cannot have, ``ConnectionLost`` that it may have.

Needs aiohttp >= 3.12.
"""

import asyncio
import atexit
import contextlib
import contextvars
import socket
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError
from nemogym_contract import from_json, without_userinfo

_CONNECT_TIMEOUT_S = 30.0
_HEALTH_TIMEOUT_S = 10.0
_GET_TIMEOUT_S = 30.0
_LARGEST_ANSWER = 256 << 20
_STARTS_IN_A_TURN = 32
# NATs and load balancers forget a silent connection after about four minutes; a /run is silent until it answers.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 60, 30, 5


class NotDelivered(ConnectionError):
    """No connection was made: the server has seen nothing of the request."""


class ConnectionLost(ConnectionError):
    """The connection ended without an answer: the server may have started the episode."""


class BadAnswer(ValueError):
    """The server answered with what is no HTTP, cannot be decoded or is too large."""


@dataclass
class Delivery:
    """How far a POST has got. ``connected``: from here on the server may have seen it."""

    connected: bool = False


# Of the task that posts. Tracing would tell the same and make an object of every step of every request.
_delivery: contextvars.ContextVar[Delivery | None] = contextvars.ContextVar("delivery", default=None)


async def post(url: str, data: bytes, delivery: Delivery) -> tuple[int, bytes]:
    """POST a JSON body once and wait for the answer, without a deadline of its own but for connecting.

    Args:
        url: http(s) URL; redirects are not followed.
        data: the body.
        delivery: kept up to date while this runs.

    Returns:
        HTTP status and body.

    Raises:
        NotDelivered: refused, DNS, connecting timed out.
        ConnectionLost: the connection broke after it was made.
        BadAnswer: what came back is no answer of an agent server.
    """
    # Compressed, a small answer may be one that does not fit into memory.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    _delivery.set(delivery)
    try:
        async with _client().session.post(url, data=data, headers=headers, allow_redirects=False) as response:
            return response.status, await _read(response)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        found = f"{without_userinfo(url)}: {str(error)[:500] or type(error).__name__}"
        if not delivery.connected:
            raise NotDelivered(f"no connection to {found}") from error
        if isinstance(error, aiohttp.ClientResponseError) or isinstance(error.__cause__, ContentEncodingError):
            raise BadAnswer(f"cannot read the answer of {found}") from error
        raise ConnectionLost(f"connection lost to {found}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _LARGEST_ANSWER:
            raise BadAnswer(f"expected an answer of at most {_LARGEST_ANSWER >> 20} MiB, found a larger one")
    return b"".join(parts)


async def turn() -> None:
    """Return in a later turn of the event loop, in which few others do: thousands of starts in one would hold it up."""
    async with _client().starts:
        await asyncio.sleep(0)


async def answers(url: str) -> bool:
    """Whether a GET gets an HTTP answer that no gateway made (below 500), within seconds."""
    with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        async with _client().session.get(url, timeout=timeout) as response:
            return response.status < 500
    return False


async def get_json(url: str) -> Any:
    """The JSON that a GET is answered with, within seconds.

    Raises:
        NotDelivered: there is no answer.
        BadAnswer: the answer is not HTTP 200 with JSON.
    """
    found = without_userinfo(url)
    try:
        timeout = aiohttp.ClientTimeout(total=_GET_TIMEOUT_S)
        async with _client().session.get(url, timeout=timeout) as response:
            status, body = response.status, await _read(response)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise NotDelivered(f"no answer from {found}: {str(error)[:500] or type(error).__name__}") from error
    try:
        if status == 200:
            return from_json(body)
    except (ValueError, RecursionError):
        pass
    raise BadAnswer(f"expected JSON from {found}, found HTTP {status}: {body[:200]!r}")


# --- client session -------------------------------------------------------------


@dataclass(frozen=True)
class _Client:
    """What an event loop has of its own: thousands of requests stay open at a time, and none is pooled."""

    session: aiohttp.ClientSession
    starts: asyncio.Semaphore


_clients: dict[asyncio.AbstractEventLoop, _Client] = {}


def _client() -> _Client:
    """The running event loop's client.

    A session holds its loop, so weak keys would never be dropped: sessions of closed loops are dropped here.
    """
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        for stale in [known for known in list(_clients) if known.is_closed()]:
            if (client := _clients.pop(stale, None)) is not None:
                client.session.detach()
        _clients[loop] = _Client(_new_session(), asyncio.Semaphore(_STARTS_IN_A_TURN))
    return _clients[loop]


def _new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        # An idle connection is one the server may be closing just as the next /run is written to it.
        connector=_Connector(limit=0, force_close=True, socket_factory=_keepalive_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        # The agent server is inside the cluster; a proxy from the environment is not on the way to it.
        trust_env=False,
    )


class _Connector(aiohttp.TCPConnector):
    """Notes on the task's delivery that there is a connection for it."""

    async def connect(self, *args: Any, **kwargs: Any) -> Any:
        connection = await super().connect(*args, **kwargs)
        if delivery := _delivery.get():
            delivery.connected = True
        return connection


def _keepalive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family=family, type=kind, proto=protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))  # macOS has the second name
    if idle is not None:
        sock.setsockopt(socket.IPPROTO_TCP, idle, _KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # keepalive does not watch over what is sent and not acknowledged
        silent_s = _KEEPALIVE_IDLE_S + _KEEPALIVE_INTERVAL_S * _KEEPALIVE_PROBES
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_s * 1000)
    return sock


@atexit.register
def _detach_sessions() -> None:
    for client in _clients.values():
        client.session.detach()
