"""The connector beside what people would use instead, with thousands of episodes open at a time."""

import sys

from .clients import CLIENTS
from .processes import run_client, sleeping_server
from .report import Claim, Part, medians

EPISODES = (500, 2000, 4000)

_CLAIMED_AT = 2000


def run(rounds: int) -> Part:
    """Every client at each number of episodes, in turn, ``rounds`` times; figures are medians of the rounds."""
    rows = []
    with sleeping_server() as server:
        for _ in range(rounds):
            for episodes in EPISODES:
                rows += [_row(name, server, episodes) for name in CLIENTS]
    rows = medians(rows, by=("client", "episodes"))
    title = "an agent server that sleeps, all episodes open at once, 20 KB up and 100 KB down"
    return Part("connector", title, rows, claims(rows))


def claims(rows: list[dict]) -> list[Claim]:
    """What has to hold of the connector at 2,000 episodes."""
    at = {row["client"]: row for row in rows if row["episodes"] == _CLAIMED_AT}
    ours, bare = at["connector"], at["bare_aiohttp"]
    httpx, threads = at["httpx_client_per_call"], at["requests_in_threads"]

    def share(column: str, other: dict) -> float:
        return ours[column] / other[column]

    return [
        Claim("CPU per episode, of an httpx client per call", share("cpu_ms", httpx), 0.5),
        Claim("CPU per episode, of requests in threads", share("cpu_ms", threads), 0.5),
        Claim("CPU per episode, of bare aiohttp", share("cpu_ms", bare), 1.15),
        Claim("memory, of an httpx client per call", share("memory_mib", httpx), 0.5),
        Claim("memory, of requests in threads", share("memory_mib", threads), 1.0),
        Claim("longest stall of the event loop, seconds", ours["stall_s"], 0.5),
    ]


def _row(name: str, server: str, episodes: int) -> dict:
    # Long enough for the slowest client to have all of them open.
    found = run_client(name, server, seconds=6 + episodes / 400, episodes=episodes, at_a_time=episodes)
    print(f"{name}, {episodes} episodes: {found['cpu_s']:.2f} s of CPU", file=sys.stderr, flush=True)
    return {
        "episodes": episodes,
        "client": name,
        "cpu_ms": 1000 * found["cpu_s"] / episodes,
        "memory_mib": found["memory_mib"],
        "stall_s": found["stall_s"],
        "sockets": found["sockets"],
        "open": found["open"],
        "wall_s": found["wall_s"],
    }
