"""NeMo Gym connector for Miles: one episode on a NeMo Gym agent server per sample.

Miles calls ``run`` once per sample (``--custom-agent-function-path nemogym_agent_function.run`` with
``--custom-generate-function-path miles.rollout.generate_hub.agentic_tool_call.generate``). It posts the task to the
server's ``/run`` together with the sample's session URL; the agent calls that URL as its policy, so that the session
server records every turn, and the server grades the sandbox.

Contract: ``run`` always returns a dict with ``exit_status`` and ``eval_report`` for ``sample.metadata``, and with
``reward`` only when the episode is a verdict on the policy (``nemogym_contract.EXIT_STATUSES``). It raises nothing but
``CancelledError``. ``/run`` starts an episode and is not idempotent: it is sent again only when it cannot have been
delivered.

Environment, read at every call:
  NEMO_GYM_URL                URL of the agent server (default http://localhost:12000)
  NEMO_GYM_RUN_TIMEOUT        seconds one episode may take (default 3600); must outlast the server's own limits
  MILES_ROUTER_EXTERNAL_HOST  host under which the agent server reaches the session server; unset, only a wildcard
                              host (0.0.0.0, ::) is replaced, by the local address that routes to the agent server

Needs aiohttp >= 3.12 and nothing of Miles. Try it with a task row and a policy of your own:
  python -c 'import asyncio, json, nemogym_agent_function as f; print(asyncio.run(f.run("http://localhost:8000", "",
  metadata=json.loads(open("rows.jsonl").readline())["metadata"]))["exit_status"])'
"""

import asyncio
import atexit
import functools
import heapq
import itertools
import json
import logging
import math
import os
import random
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from nemogym_contract import (
    AGENT_OWNED_KEYS,
    EXIT_STATUSES,
    Outcome,
    build_policy_base_url,
    build_responses_create_params,
    build_run_request,
    join_url,
    read_run_response,
    wildcard_ip_version,
    without_userinfo,
)

__all__ = [
    "ConnectionLost",
    "NotDelivered",
    "build_responses_create_params",
    "post_json",
    "run",
    "run_episode",
    "run_timeout_s",
    "server_url",
]

logger = logging.getLogger(__name__)

_DEFAULT_URL = "http://localhost:12000"
_DEFAULT_TIMEOUT_S = 3600.0

_ATTEMPTS = 3
_BACKOFF_S = (1.0, 5.0)
_CONNECT_TIMEOUT_S = 30.0
# NATs and load balancers forget a silent connection after about four minutes; a /run is silent until it answers.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 60, 30, 5


async def run(
    base_url: str,
    prompt: Any,
    request_kwargs: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run one sample's episode (agent function of miles/rollout/generate_hub/agentic_tool_call.py).

    Args:
        base_url: URL of the sample's session, ``http://host:port/sessions/<id>``.
        prompt: unused; the task is in ``metadata``.
        request_kwargs: sampling settings, chat-completions names.
        metadata: the task, SWE-bench fields at top level.

    Returns:
        ``{"exit_status", "eval_report"}``, and ``"reward"`` when there is a verdict.
    """
    try:
        outcome = await _run_for_session(base_url, metadata or {}, request_kwargs or {})
    except Exception as error:
        # Raising would lose the exit status; Miles would train the recorded turns with whatever reward the row has.
        logger.exception("NeMo Gym episode failed in the connector")
        outcome = Outcome("UnknownError", detail=repr(error))
    return outcome.as_metadata()


async def _run_for_session(base_url: str, row: Mapping[str, Any], request_kwargs: Mapping[str, Any]) -> Outcome:
    try:
        timeout_s, server = run_timeout_s(), server_url()
    except ValueError as error:
        _error_once(str(error))
        return Outcome("UnknownError", detail=str(error))
    try:
        policy_base_url = await _reachable_policy_url(base_url, server)
    except ValueError as error:
        return _logged(Outcome("PolicyEndpointError", detail=f"session URL: {error}"), row)
    _warn_agent_owned(frozenset(key for key in AGENT_OWNED_KEYS if request_kwargs.get(key) is not None))
    return await run_episode(
        row, request_kwargs=request_kwargs, server=server, timeout_s=timeout_s, policy_base_url=policy_base_url
    )


async def run_episode(
    row: Mapping[str, Any],
    *,
    request_kwargs: Mapping[str, Any],
    server: str,
    timeout_s: float,
    policy_base_url: str | None = None,
    policy_api_key: str | None = None,
    golden: bool = False,
) -> Outcome:
    """One episode of one task: build the request, post it once, read the answer. Shared by training and scan.

    Args:
        row: the task, SWE-bench fields.
        request_kwargs: sampling settings, chat-completions names.
        server: URL of the agent server.
        timeout_s: seconds until the episode is given up.
        policy_base_url: what the agent calls; None leaves the server's own policy in place.
        policy_api_key: bearer token for it.
        golden: the server is expected to apply the row's patch instead of running a policy.

    Returns:
        An Outcome for everything that can go wrong on the way or on the server.
    """
    slot = _take_slot()
    try:
        request = build_run_request(
            row, request_kwargs, policy_base_url, policy_api_key, episode=f"{_RUN_TOKEN}-{slot}"
        )
        url = join_url(server, "run")
    except ValueError as error:
        _free_slot(slot)
        return _logged(Outcome("UngradableInstance", detail=str(error)), row)
    # A slot names a folder on the server. It is taken again only after the server is known to be done with it:
    # neither a timeout nor a lost connection nor a cancellation stops an episode there.
    try:
        status, body = await post_json(url, request, timeout_s=timeout_s)
    except NotDelivered as error:
        _free_slot(slot)
        return _logged(Outcome("ServerUnreachable", detail=str(error)), row)
    except ConnectionLost as error:
        return _logged(Outcome("ServerUnreachable", detail=str(error)), row)
    except asyncio.TimeoutError:
        return _logged(Outcome("TimeLimitExceeded", 0.0, detail=f"no answer within {timeout_s:g} s"), row)
    _free_slot(slot)
    return _logged(read_run_response(status, body, row, golden=golden), row)


# --- environment ----------------------------------------------------------------


def server_url() -> str:
    """NEMO_GYM_URL.

    Raises:
        ValueError: it is no http(s) URL with a host.
    """
    url = os.environ.get("NEMO_GYM_URL", "").strip() or _DEFAULT_URL
    try:
        join_url(url, "run")
    except ValueError as error:
        raise ValueError(f"NEMO_GYM_URL: {error}") from None
    return url


def run_timeout_s() -> float:
    """NEMO_GYM_RUN_TIMEOUT in seconds.

    Raises:
        ValueError: it is not a finite number above 0.
    """
    text = os.environ.get("NEMO_GYM_RUN_TIMEOUT", "").strip()
    if not text:
        return _DEFAULT_TIMEOUT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not math.isfinite(timeout_s) or timeout_s <= 0:
        raise ValueError(f"NEMO_GYM_RUN_TIMEOUT: expected seconds as a number above 0, found {text!r}")
    return timeout_s


async def _reachable_policy_url(session_url: str, server: str) -> str:
    external_host = os.environ.get("MILES_ROUTER_EXTERNAL_HOST", "").strip()
    ip_version = None if external_host else wildcard_ip_version(session_url)
    local_address = await _local_address_towards(server, ip_version) if ip_version else None
    return build_policy_base_url(session_url, external_host=external_host, local_address=local_address)


async def _local_address_towards(server: str, ip_version: int) -> str | None:
    """The address of this machine from which packets to ``server`` leave; None when it cannot be told.

    Connecting a UDP socket chooses the route and sends no packet. A listener on 0.0.0.0 has no IPv6 address.
    """
    url = urlsplit(server)
    loop = asyncio.get_running_loop()
    families = [socket.AF_INET] if ip_version == 4 else [socket.AF_INET6, socket.AF_INET]
    for family in families:
        try:
            found = await loop.getaddrinfo(url.hostname, url.port or 80, family=family, type=socket.SOCK_DGRAM)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(found[0][4])
                return probe.getsockname()[0]
        except OSError:
            continue
    logger.warning("no local IPv%d address routes to %s: its host stays as it is", ip_version, url.hostname)
    return None


# --- episode slots --------------------------------------------------------------

_RUN_TOKEN = secrets.token_hex(4)
_new_slots = itertools.count()
_free_slots: list[int] = []


def _take_slot() -> int:
    try:
        return heapq.heappop(_free_slots)
    except IndexError:
        return next(_new_slots)


def _free_slot(slot: int) -> None:
    heapq.heappush(_free_slots, slot)


# --- HTTP -----------------------------------------------------------------------


class NotDelivered(ConnectionError):
    """No connection was made: the server has seen nothing of the request."""


class ConnectionLost(ConnectionError):
    """The connection ended without an answer: the server may have started the episode."""


async def post_json(url: str, payload: Any, timeout_s: float | None = None) -> tuple[int, bytes]:
    """POST ``payload``; repeated only while no connection could be made, three attempts in all.

    Args:
        url: http(s) URL; redirects are not followed.
        payload: JSON-serialisable.
        timeout_s: seconds for everything, connecting and backing off included; None waits for ever.

    Returns:
        HTTP status and body.

    Raises:
        NotDelivered: refused, DNS, connect timeout, or ``timeout_s`` was over before there was a connection.
        ConnectionLost: the connection broke after it was made.
        asyncio.TimeoutError: no complete answer within ``timeout_s``.
    """
    data = json.dumps(payload).encode()
    deadline = time.monotonic() + timeout_s if timeout_s is not None else math.inf
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return await _post_once(url, data, deadline)
        except NotDelivered:
            pause_s = random.uniform(*_BACKOFF_S)
            if attempt == _ATTEMPTS or time.monotonic() + pause_s >= deadline:
                raise
            await asyncio.sleep(pause_s)
    raise AssertionError("unreachable")


async def _post_once(url: str, data: bytes, deadline: float) -> tuple[int, bytes]:
    connected = asyncio.Event()
    left_s = None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
    try:
        return await asyncio.wait_for(_exchange(url, data, connected), timeout=left_s)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        found = f"{without_userinfo(url)}: {error or type(error).__name__}"
        if not connected.is_set():
            raise NotDelivered(f"no connection to {found}") from error
        if isinstance(error, asyncio.TimeoutError):
            raise
        raise ConnectionLost(f"connection lost to {found}") from error


async def _exchange(url: str, data: bytes, connected: asyncio.Event) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    async with _session().post(
        url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=connected
    ) as response:
        return response.status, await response.read()


_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}


def _session() -> aiohttp.ClientSession:
    """The running event loop's client session: thousands of requests stay open at a time, and none is pooled.

    A session holds its loop, so weak keys would never be dropped: sessions of closed loops are dropped here.
    """
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        for stale in [known for known in _sessions if known.is_closed()]:
            _sessions.pop(stale).detach()
        _sessions[loop] = _new_session()
    return _sessions[loop]


def _new_session() -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(_mark_connected)
    return aiohttp.ClientSession(
        # An idle connection is one the server may be closing just as the next /run is written to it.
        connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_keepalive_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[trace],
        # The agent server is inside the cluster; a proxy from the environment is not on the way to it.
        trust_env=False,
    )


async def _mark_connected(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
    context.trace_request_ctx.set()


def _keepalive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family=family, type=kind, proto=protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))  # macOS has the second name
    if idle is not None:
        sock.setsockopt(socket.IPPROTO_TCP, idle, _KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    return sock


@atexit.register
def _detach_sessions() -> None:
    for session in _sessions.values():
        session.detach()


# --- log ------------------------------------------------------------------------


def _logged(outcome: Outcome, row: Mapping[str, Any]) -> Outcome:
    status = EXIT_STATUSES[outcome.exit_status]
    instance_id = row.get("instance_id") if isinstance(row, Mapping) else None
    if status.is_verdict:
        logger.debug("%s: %s, reward %s. %s", instance_id, outcome.exit_status, outcome.reward, outcome.detail)
    elif outcome.exit_status == "GoldenServer":
        _error_once(f"no verdict, GoldenServer: {outcome.detail}")
    else:
        logger.error("%s: no verdict, %s (%s): %s", instance_id, outcome.exit_status, status.cause, outcome.detail)
    return outcome


@functools.lru_cache(maxsize=64)
def _error_once(message: str) -> None:
    """For mistakes of set-up, which every episode would report again."""
    logger.error(message)


@functools.lru_cache(maxsize=64)
def _warn_agent_owned(keys: frozenset[str]) -> None:
    if keys:
        logger.warning("not sampling settings, left to the agent: %s", ", ".join(sorted(keys)))
