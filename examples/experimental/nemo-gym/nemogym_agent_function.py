"""NeMo Gym connector for Miles: one episode on a NeMo Gym agent server per sample.

Miles calls ``run`` once per sample (``--custom-agent-function-path nemogym_agent_function.run`` with
``--custom-generate-function-path miles.rollout.generate_hub.agentic_tool_call.generate``). It posts the task to the
server's ``/run`` together with the sample's session URL; the agent calls that URL as its policy, so that the session
server records every turn, and the server grades the sandbox. A task is a SWE-bench instance or a row of any other NeMo Gym
environment, which goes as it is (``nemogym_environments``).

Contract: ``run`` always returns a dict with ``exit_status`` and ``eval_report`` for ``sample.metadata``, with
``agent_metrics`` as far as they were measured, and with ``reward`` only when the episode is a verdict on the policy
(``nemogym_contract.EXIT_STATUSES``). It raises nothing but ``CancelledError``. ``abort`` ends every ``run`` at once.

1. An episode waits for a place on a server (``nemogym_servers``). Its clock starts when it has one.
2. ``/run`` starts an episode and is not idempotent. It is sent again only when it cannot have been delivered, and once
   more when the server says that the sandbox could not be created: no model call was made yet.
3. Neither a timeout nor an abort stops an episode on the server. Its request stays open in the background until the
   server has answered, and its place and its folder stay taken.
4. A timeout is a verdict only on a server that works: it answers ``/health``, and another of its episodes was graded
   meanwhile or it had no other, the latter once until it has graded again.

Environment, read at every call:
  NEMO_GYM_URL                URL of the agent server, or several, comma-separated (default http://localhost:12000)
  NEMO_GYM_HEAD_URL           URL of the head server, or several: a row that names its agent goes to that agent; unset
                              while NEMO_GYM_URL is set, every row goes there (default http://localhost:11000)
  NEMO_GYM_POLICY_VIA         policy_base_url or session_model: how the agent of a NeMo Gym row reaches the session; auto
                              (default) asks its schema
  NEMO_GYM_RUN_TIMEOUT        seconds one episode may take (default 3600); must outlast the server's own limits
  NEMO_GYM_DRAIN_TIMEOUT      seconds for which a given-up episode keeps its place (default 2400, the server's
                              step_timeout + eval_timeout)
  NEMO_GYM_MAX_CONCURRENCY    episodes at a time on each server (default 64)
  NEMO_GYM_OUTAGE_WAIT        seconds for which episodes wait while every server is failing (default 1800)
  MILES_ROUTER_EXTERNAL_HOST  host under which the agent server reaches the session server; unset, only a wildcard
                              host (0.0.0.0, ::) is replaced, by the local address that routes to the agent server

Needs aiohttp >= 3.12 and nothing of Miles. Try it with a task row and a policy of your own:
  python -c 'import asyncio, json, nemogym_agent_function as f; print(asyncio.run(f.run("http://localhost:8000", "",
  metadata=json.loads(open("rows.jsonl").readline())["metadata"]))["exit_status"])'
"""

import asyncio
import contextlib
import functools
import logging
import math
import os
import random
import socket
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from nemogym_contract import (
    AGENT_OWNED_KEYS,
    EXIT_STATUSES,
    Outcome,
    build_policy_base_url,
    build_run_request,
    join_url,
    name_episode,
    read_run_response,
    to_json,
    wildcard_ip_version,
    without_userinfo,
)
from nemogym_directory import agent_servers, way_to_policy
from nemogym_environments import (
    WAYS,
    Way,
    build_environment_request,
    is_environment_row,
    policy_fields,
    read_environment_response,
    task_key,
    task_name,
)
from nemogym_http import BadAnswer, ConnectionLost, Delivery, NotDelivered, answers, post, turn
from nemogym_metrics import TALLY
from nemogym_servers import Limits, OutageError, Place, Pool, pool_of

__all__ = ["Settings", "abort", "locate", "reachable_policy_url", "run", "run_episode"]

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_BACKOFF_S = (1.0, 5.0)


# --- what Miles calls -----------------------------------------------------------


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
        metadata: the task, fields of a SWE-bench instance or of a NeMo Gym row at top level.

    Returns:
        ``{"exit_status", "eval_report"}``, ``"agent_metrics"`` when some were measured, and ``"reward"`` when there is a
        verdict.

    Raises:
        asyncio.CancelledError: this call was cancelled.
    """
    episode = asyncio.create_task(_run_for_session(base_url, metadata or {}, request_kwargs or {}))
    _alive[episode] = asyncio.get_running_loop()
    try:
        # Its own task, and waited for like this, abort() can cancel it without cancelling the sample's task, which
        # would make the whole rollout raise.
        await asyncio.wait({episode})
    finally:
        _alive.pop(episode, None)
        episode.cancel()
    outcome = _outcome_of(episode)
    TALLY.add(outcome)
    return outcome.as_metadata()


async def abort(args: Any) -> None:
    """Make every ``run`` of this process return at once, as ``Aborted`` (agent abort hook of miles/utils/misc.py).

    Args:
        args: unused.
    """
    for episode, loop in list(_alive.items()):
        with contextlib.suppress(RuntimeError):  # that loop has ended
            loop.call_soon_threadsafe(episode.cancel)


# Weak: of a loop that ends without cancelling its tasks nothing is kept.
_alive: MutableMapping[asyncio.Task, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()


def _outcome_of(episode: asyncio.Task) -> Outcome:
    try:
        return episode.result()
    except asyncio.CancelledError:
        return Outcome("Aborted", detail="abort() was called")
    except Exception as error:
        # Raising would lose the exit status; Miles would train the recorded turns with whatever reward the row has.
        logger.exception("NeMo Gym episode failed in the connector")
        return Outcome("UnknownError", detail=repr(error))


async def _run_for_session(base_url: str, row: Mapping[str, Any], request_kwargs: Mapping[str, Any]) -> Outcome:
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        _error_once(str(error))
        return Outcome("UnknownError", detail=str(error))
    await turn()
    try:
        policy_base_url = build_policy_base_url(base_url, external_host=settings.external_host)
        if not settings.external_host and wildcard_ip_version(base_url):
            policy_base_url = None
    except ValueError as error:
        return _logged(Outcome("PolicyEndpointError", detail=f"session URL: {error}"), row)
    _warn_agent_owned(
        frozenset(key for key in AGENT_OWNED_KEYS & request_kwargs.keys() if request_kwargs[key] is not None)
    )
    try:
        servers, way = await _when_reachable(lambda: locate(row, settings))
        build_request = build_run_request if way == "policy_base_url" else build_environment_request
        request = build_request(row, request_kwargs)
    except NotDelivered as error:
        return _logged(Outcome("ServerUnreachable", detail=str(error)), row)
    except BadAnswer as error:
        return _logged(Outcome("ServerError", detail=str(error)), row)
    except ValueError as error:
        return _logged(Outcome("UngradableInstance", detail=str(error)), row)
    if tuple(servers) != settings.servers:
        settings = replace(settings, servers=tuple(servers))
    return await _run_to_its_end(
        _Episode(row, request, settings, way=way, session_url=base_url, policy_base_url=policy_base_url)
    )


async def locate(row: Mapping[str, Any], settings: "Settings") -> tuple[Sequence[str], Way]:
    """The agent servers that can run a task, and the way by which their agent reaches the policy.

    With a SWE-bench instance that is by URL; with a NeMo Gym row it is as the setting or the agent's schema says.

    Args:
        row: the task.
        settings: which servers there are.

    Raises:
        NotDelivered: a server that has to be asked cannot be reached.
        ValueError: none can run it.
    """
    servers = await agent_servers(row, head_urls=settings.head_urls, default=settings.servers)
    if not is_environment_row(row):
        return servers, "policy_base_url"
    return servers, settings.way or await way_to_policy(servers[0])


async def _when_reachable(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Ask a server something, again where it cannot be reached."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return await ask()
        except NotDelivered:
            await asyncio.sleep(random.uniform(*_BACKOFF_S))
    return await ask()


async def run_episode(
    row: Mapping[str, Any],
    *,
    request_kwargs: Mapping[str, Any],
    server: str,
    timeout_s: float,
    policy_base_url: str | None = None,
    policy_api_key: str | None = None,
    golden: bool = False,
    session_url: str | None = None,
) -> Outcome:
    """One episode outside of training, for scans: as in ``run``, but at once, whatever the others met, and sent once.

    Args:
        row: the task, SWE-bench fields, or a NeMo Gym row with ``session_url``.
        request_kwargs: sampling settings, chat-completions names.
        server: URL of the agent server.
        timeout_s: seconds until the episode is given up.
        policy_base_url: what the agent calls; None leaves the server's own policy in place.
        policy_api_key: bearer token for it.
        golden: the server is expected to apply the row's patch instead of running a policy.
        session_url: what the agent of a NeMo Gym row calls through its model server, ``http://host:port/sessions/<id>``.

    Returns:
        An Outcome for everything that can go wrong on the way or on the server.
    """
    settings = Settings(servers=(server,), timeout_s=timeout_s, limits=Limits(), sandbox_attempts=1)
    way: Way = "policy_base_url" if session_url is None else "session_model"
    try:
        join_url(server, "run")
        if way == "session_model":
            request = build_environment_request(row, request_kwargs)
        else:
            request = build_run_request(row, request_kwargs, policy_base_url, policy_api_key)
    except ValueError as error:
        return _logged(Outcome("UngradableInstance", detail=str(error)), row)
    return await _run_to_its_end(_Episode(row, request, settings, way=way, session_url=session_url, golden=golden))


# --- one episode ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Episode:
    """``session_url``: the sample's session, as Miles knows it; None leaves the request's policy as it is.

    ``policy_base_url``: the same, as every server reaches it; None where that is another URL for each.
    """

    row: Mapping[str, Any]
    request: dict[str, Any]
    settings: "Settings"
    way: Way = "policy_base_url"
    session_url: str | None = None
    policy_base_url: str | None = None
    golden: bool = False

    def read(self, status: int, body: bytes) -> Outcome:
        """What the server's answer says."""
        if self.way == "session_model":
            return read_environment_response(status, body, self.row)
        return read_run_response(status, body, self.row, golden=self.golden)

    async def request_in(self, place: Place) -> dict[str, Any]:
        """The request as it is sent to the server of a place.

        Raises:
            ValueError: the session cannot be named to that server.
        """
        request = name_episode(self.request, place.episode) if self.way == "policy_base_url" else self.request
        if self.session_url is None:
            return request
        url = self.policy_base_url
        if url is None:
            url = await reachable_policy_url(self.session_url, place.server.url, self.settings)
        return {**request, **policy_fields(self.way, url)}


async def _run_to_its_end(episode: _Episode) -> Outcome:
    """Wait for a place and deliver there; again only where no model call can have been made."""
    settings, pool = episode.settings, pool_of(episode.settings.servers, episode.settings.limits)
    tried: set[str] = set()
    refusals = sandbox_failures = 0
    while True:
        try:
            place = await pool.admit(
                instance=task_key(episode.request),
                image=episode.request.get("image_name") or task_key(episode.request),
                limits=settings.limits,
                avoid=tried,
                first=refusals > 0,
            )
        except OutageError as error:
            return error.outcome  # the pool has said it, once for all
        tried.add(place.server.url)
        try:
            outcome = await _run_in_place(episode, place, pool)
        except NotDelivered as error:
            refusals += 1
            if refusals >= _ATTEMPTS and not pool.is_worth_waiting_for(settings.limits):
                return _logged(Outcome("ServerUnreachable", detail=str(error)), episode.row)
            await asyncio.sleep(random.uniform(*_BACKOFF_S))
            continue
        sandbox_failures += outcome.exit_status == "SandboxUnavailable"
        if outcome.exit_status == "SandboxUnavailable" and sandbox_failures < settings.sandbox_attempts:
            continue
        return _logged(outcome, episode.row)


async def _run_in_place(episode: _Episode, place: Place, pool: Pool) -> Outcome:
    """Deliver one ``/run`` and wait for its answer, at most for the episode's time.

    Raises:
        NotDelivered: the server has seen nothing of it.
    """
    settings, delivery = episode.settings, Delivery()
    exchange: asyncio.Task | None = None
    try:
        request = await episode.request_in(place)
        exchange = asyncio.create_task(_exchange(request, episode, place, pool, delivery))
        await asyncio.wait({exchange}, timeout=settings.timeout_s - (time.monotonic() - place.started))
        if exchange.done():
            outcome = _outcome_of_exchange(exchange)
        elif delivery.connected:
            outcome = await _out_of_time(place, pool, settings)
        else:
            raise NotDelivered(f"no connection to {without_userinfo(place.server.url)} in {settings.timeout_s:g} s")
        total_time = round(time.monotonic() - place.started, 3)
        outcome = replace(outcome, agent_metrics={**outcome.agent_metrics, "total_time": total_time})
        pool.ended(place, outcome, settings.limits)
        return outcome
    except NotDelivered as error:
        pool.refused(place, Outcome("ServerUnreachable", detail=str(error)), settings.limits)
        raise
    except asyncio.CancelledError:
        pool.ended(place, Outcome("Aborted"), settings.limits)
        raise
    except Exception as error:
        pool.ended(place, Outcome("UnknownError", detail=repr(error)), settings.limits)
        raise
    finally:
        _leave(episode, place, pool, exchange, delivery)


async def _exchange(
    request: dict[str, Any], episode: _Episode, place: Place, pool: Pool, delivery: Delivery
) -> Outcome:
    """Deliver the request and read the answer as soon as it is there: thousands of answers would fill the memory."""
    url = place.server.url
    if pool.is_in_doubt(place, episode.settings.limits) and not await answers(join_url(url, "health")):
        raise NotDelivered(f"{without_userinfo(url)} lost an episode, and its /health does not answer below HTTP 500")
    status, answer = await post(join_url(url, "run"), to_json(request), delivery)
    return episode.read(status, answer)


def _outcome_of_exchange(exchange: asyncio.Task) -> Outcome:
    try:
        return exchange.result()
    except ConnectionLost as error:
        return Outcome("ServerUnreachable", detail=str(error))
    except BadAnswer as error:
        return Outcome("ServerError", detail=str(error))


async def _out_of_time(place: Place, pool: Pool, settings: "Settings") -> Outcome:
    url, waited = place.server.url, f"no answer from {without_userinfo(place.server.url)} in {settings.timeout_s:g} s"
    if not pool.worked_during(place):
        return Outcome("ServerUnreachable", detail=f"{waited}, nor did it grade any other episode meanwhile")
    if not await answers(join_url(url, "health")):
        return Outcome("ServerUnreachable", detail=f"{waited}, nor from its /health")
    return Outcome("TimeLimitExceeded", 0.0, detail=waited)


def _leave(episode: _Episode, place: Place, pool: Pool, exchange: asyncio.Task | None, delivery: Delivery) -> None:
    """Free the place; where the server may still be running the episode, once it has answered."""
    if exchange is None or not (exchange.done() or delivery.connected):
        if exchange is not None:
            exchange.cancel()
        pool.left(place)
    elif exchange.done():
        pool.left(place, reusable=not isinstance(_error_of(exchange), ConnectionLost))
    else:
        draining = asyncio.create_task(_drain(episode, place, pool, exchange))
        _draining.add(draining)
        draining.add_done_callback(_draining.discard)


async def _drain(episode: _Episode, place: Place, pool: Pool, exchange: asyncio.Task) -> None:
    answered = False
    try:
        await asyncio.wait({exchange}, timeout=episode.settings.drain_timeout_s)
        answered = exchange.done() and not isinstance(_error_of(exchange), ConnectionLost)
        if exchange.done() and not answered:
            pool.lost(place)
        if answered and (outcome := _outcome_of_exchange(exchange)).reward is not None:
            pool.ended(place, outcome, episode.settings.limits)  # too late for its sample, but the server works
    finally:
        exchange.cancel()
        pool.left(place, reusable=answered)


_draining: set[asyncio.Task] = set()


def _error_of(exchange: asyncio.Task) -> BaseException | None:
    return None if exchange.cancelled() else exchange.exception()


# --- environment ----------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What the environment sets; times in seconds.

    Attributes:
        servers: URLs of the agent servers.
        timeout_s: time of one episode, from admission.
        drain_timeout_s: time for which a given-up episode keeps its place.
        limits: see ``nemogym_servers``.
        sandbox_attempts: how often ``/run`` is sent in all where the sandbox cannot be created.
        external_host: host that replaces the session URL's; empty for none.
        head_urls: URLs of head servers.
        way: how agents of NeMo Gym rows reach the session; None to ask.
    """

    servers: tuple[str, ...] = ("http://localhost:12000",)
    timeout_s: float = 3600.0
    drain_timeout_s: float = 2400.0
    limits: Limits = Limits(concurrency=64, outage_wait_s=1800.0)
    sandbox_attempts: int = 2
    external_host: str = ""
    head_urls: tuple[str, ...] = ()
    way: Way | None = None

    @classmethod
    def from_environment(cls) -> "Settings":
        """Read the variables of the module's docstring; one that is unset or empty has its default.

        Raises:
            ValueError: one has a value that cannot be worked with; it is named.
        """
        return _settings_of(tuple(os.environ.get(name, "").strip() for name in _VARIABLES))


_VARIABLES = (
    *("NEMO_GYM_URL", "NEMO_GYM_HEAD_URL", "NEMO_GYM_POLICY_VIA", "NEMO_GYM_RUN_TIMEOUT", "NEMO_GYM_DRAIN_TIMEOUT"),
    *("NEMO_GYM_MAX_CONCURRENCY", "NEMO_GYM_OUTAGE_WAIT", "MILES_ROUTER_EXTERNAL_HOST"),
)


@functools.lru_cache(maxsize=16)
def _settings_of(values: tuple[str, ...]) -> Settings:
    """Settings from the values of ``_VARIABLES``: the same object for the same values, which thousands of episodes hold."""
    texts, default = dict(zip(_VARIABLES, values, strict=True)), Settings()
    head = texts["NEMO_GYM_HEAD_URL"] or ("" if texts["NEMO_GYM_URL"] else "http://localhost:11000")
    return Settings(
        servers=_servers_of("NEMO_GYM_URL", texts["NEMO_GYM_URL"] or default.servers[0]),
        head_urls=_servers_of("NEMO_GYM_HEAD_URL", head) if head else (),
        way=_way(texts["NEMO_GYM_POLICY_VIA"] or "auto"),
        timeout_s=_seconds("NEMO_GYM_RUN_TIMEOUT", texts, default.timeout_s),
        drain_timeout_s=_seconds("NEMO_GYM_DRAIN_TIMEOUT", texts, default.drain_timeout_s),
        limits=Limits(
            concurrency=_count("NEMO_GYM_MAX_CONCURRENCY", texts, default.limits.concurrency),
            outage_wait_s=_seconds("NEMO_GYM_OUTAGE_WAIT", texts, default.limits.outage_wait_s),
        ),
        external_host=_external_host(texts["MILES_ROUTER_EXTERNAL_HOST"]),
    )


def _servers_of(name: str, text: str) -> tuple[str, ...]:
    urls: dict[tuple, str] = {}
    try:
        for url in filter(None, map(str.strip, text.split(","))):
            run = urlsplit(join_url(url, "run"))
            urls.setdefault((run.hostname, run.port or run.scheme, run.path, run.query), url)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not urls:
        raise ValueError(f"{name}: expected URLs of servers, comma-separated, found {text!r}")
    return tuple(urls.values())


def _way(text: str) -> Way | None:
    if text not in ("auto", *WAYS):
        raise ValueError(f"NEMO_GYM_POLICY_VIA: expected auto, {' or '.join(WAYS)}, found {text!r}")
    return None if text == "auto" else text


def _external_host(host: str) -> str:
    try:
        build_policy_base_url("http://any", external_host=host)
    except ValueError as error:
        raise ValueError(f"MILES_ROUTER_EXTERNAL_HOST: {error}") from None
    return host


def _seconds(name: str, texts: Mapping[str, str], default: float) -> float:
    text = texts[name]
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name}: expected seconds as a number above 0, found {text!r}")
    return seconds


def _count(name: str, texts: Mapping[str, str], default: int) -> int:
    text = texts[name]
    try:
        count = int(text) if text else default
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, found {text!r}")
    return count


# --- addresses ------------------------------------------------------------------


async def reachable_policy_url(session_url: str, server: str, settings: Settings) -> str:
    """The URL under which an agent server is to reach a session: its ``policy_base_url``, in training and in preflight.

    Args:
        session_url: ``http://host:port/sessions/<id>``; a wildcard host stays where no local address routes to ``server``.
        server: URL of the agent server.
        settings: for the external host.

    Raises:
        ValueError: not an http(s) URL with a host, or the external host is more than a host.
    """
    ip_version = None if settings.external_host else wildcard_ip_version(session_url)
    local_address = await _local_address_towards(server, ip_version) if ip_version else None
    return build_policy_base_url(session_url, external_host=settings.external_host, local_address=local_address)


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
    _warn_unroutable(ip_version, url.hostname)
    return None


# --- log ------------------------------------------------------------------------


def _logged(outcome: Outcome, row: Mapping[str, Any]) -> Outcome:
    status = EXIT_STATUSES[outcome.exit_status]
    instance_id = task_name(row) if isinstance(row, Mapping) else None
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
def _warn_unroutable(ip_version: int, host: str | None) -> None:
    logger.warning("no local IPv%d address routes to %s: the session URL's host stays as it is", ip_version, host)


@functools.lru_cache(maxsize=64)
def _warn_agent_owned(keys: frozenset[str]) -> None:
    if keys:
        logger.warning("not sampling settings, left to the agent: %s", ", ".join(sorted(keys)))
