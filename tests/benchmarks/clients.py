"""One HTTP client in a process of its own: ``python -m tests.benchmarks.clients <name> <server> <seconds> <episodes>
<at a time> <waves>``.

It runs all episodes on one event loop, as Miles does, and prints what they cost as JSON. Each client sends the same
request, reads the same answer and keeps the reward and the report, as a sample does.
"""

import asyncio
import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .payloads import task_row

Episode = Callable[[str, int, dict[str, Any]], Awaitable[dict[str, Any]]]

_TICK_S = 0.01
_WARM_UP = 32


# --- clients --------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connector(at_a_time: int) -> AsyncIterator[Episode]:
    """The project's own: ``nemogym_agent_function.run``."""
    from nemogym_agent_function import run

    os.environ["NEMO_GYM_MAX_CONCURRENCY"] = str(at_a_time)

    async def episode(url: str, index: int, row: dict[str, Any]) -> dict[str, Any]:
        os.environ["NEMO_GYM_URL"] = url
        return await run(_session(index), "", request_kwargs={"temperature": 1.0}, metadata=row)

    yield episode


@contextlib.asynccontextmanager
async def bare_aiohttp(at_a_time: int) -> AsyncIterator[Episode]:
    """One aiohttp session without a limit, and nothing else: the least that can be done."""
    import aiohttp

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def episode(url: str, index: int, row: dict[str, Any]) -> dict[str, Any]:
            async with session.post(f"{url}/run", json=_request(index, row)) as response:
                return _kept(await response.json())

        yield episode


@contextlib.asynccontextmanager
async def httpx_client_per_call(at_a_time: int) -> AsyncIterator[Episode]:
    """A new httpx client for each call; they share their TLS settings, which cost 20 ms to load."""
    import httpx

    tls = httpx.create_ssl_context()

    async def episode(url: str, index: int, row: dict[str, Any]) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=None, verify=tls) as client:
            response = await client.post(f"{url}/run", json=_request(index, row))
            response.raise_for_status()
            return _kept(response.json())

    yield episode


@contextlib.asynccontextmanager
async def requests_in_threads(at_a_time: int) -> AsyncIterator[Episode]:
    """``requests.post`` in a thread for each open call."""
    import requests

    def call(url: str, index: int, row: dict[str, Any]) -> dict[str, Any]:
        response = requests.post(f"{url}/run", json=_request(index, row))
        response.raise_for_status()
        return _kept(response.json())

    with ThreadPoolExecutor(at_a_time) as threads:

        async def episode(url: str, index: int, row: dict[str, Any]) -> dict[str, Any]:
            return await asyncio.get_running_loop().run_in_executor(threads, call, url, index, row)

        yield episode


CLIENTS = {client.__name__: client for client in (connector, bare_aiohttp, httpx_client_per_call, requests_in_threads)}


def _session(index: int) -> str:
    return f"http://127.0.0.1:9/sessions/{index:032x}"


def _request(index: int, row: dict[str, Any]) -> dict[str, Any]:
    params = {"input": [], "temperature": 1.0}
    return {**row, "responses_create_params": params, "policy_base_url": f"{_session(index)}/v1"}


def _kept(answer: dict[str, Any]) -> dict[str, Any]:
    return {"reward": answer["reward"], "eval_report": answer["metadata"]}


# --- measurement ----------------------------------------------------------------


async def measure(
    name: str, server: str, *, seconds: float, episodes: int, at_a_time: int, waves: int
) -> dict[str, float]:
    """Start all episodes at once and wait for them.

    Args:
        name: a key of ``CLIENTS``.
        server: URL of the sleeping server.
        seconds: how long each episode sleeps.
        episodes: how many.
        at_a_time: how many of them may be open.
        waves: how often all of them are started, each time when the last has ended.

    Returns:
        ``cpu_s`` of this process while they ran, ``wall_s``, ``stall_s`` (the longest time for which the event loop did not
        turn) and ``memory_mib`` (the process's peak).
    """
    stall = _Stall()
    samples = [(index, task_row(index)) for index in range(episodes * waves)]  # no two are one, as in a run of Miles
    async with CLIENTS[name](at_a_time) as episode:
        await asyncio.gather(*(episode(f"{server}/0", *sample) for sample in samples[:_WARM_UP]))
        watching = asyncio.create_task(stall.watch())
        cpu, start = time.process_time(), time.monotonic()
        results = []
        for first in range(0, len(samples), episodes):
            wave = samples[first : first + episodes]
            results += await asyncio.gather(*(episode(f"{server}/{seconds:g}", *sample) for sample in wave))
        wall = time.monotonic() - start
        watching.cancel()
    cpu = time.process_time() - cpu  # closing what was kept open is part of it
    if {result.get("reward") for result in results} != {1.0}:
        raise RuntimeError(f"{name}: expected the reward 1.0 of every episode, found {results[0]}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"cpu_s": cpu, "wall_s": wall, "stall_s": stall.longest_s, "memory_mib": peak / 1024}


class _Stall:
    """The longest time for which the event loop was late for a timer."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        while True:
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - due)


if __name__ == "__main__":
    _name, _server, _seconds, *_counts = sys.argv[1:]
    _episodes, _at_a_time, _waves = map(int, _counts)
    print(
        json.dumps(
            asyncio.run(
                measure(
                    _name, _server, seconds=float(_seconds), episodes=_episodes, at_a_time=_at_a_time, waves=_waves
                )
            )
        )
    )
