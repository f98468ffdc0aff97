"""Whether an episode costs the same in a batch of 10,000 as in one of 100."""

from .processes import run_client, sleeping_server
from .report import Claim, Part, growth, medians

EPISODES = (100, 1000, 10_000)

_ALL = "all"
_PLACES = 64
# Before a server that answers at once a small batch goes through in step, with fewer turns of the event loop an episode.
_SECONDS = 0.1
_IN_ALL = 10_000


def run(rounds: int) -> Part:
    """Batches of each size, of which 64 episodes run at a time and the others wait, and all of which run at once."""
    rows = []
    with sleeping_server() as server:
        for _ in range(rounds):
            for episodes in EPISODES:
                rows.append(_row(server, episodes, at_a_time=_PLACES, seconds=_SECONDS))
            for episodes in EPISODES:
                rows.append(_row(server, episodes, at_a_time=episodes, seconds=episodes / 500))
    rows = medians(rows, by=("episodes", "at a time"))
    title = "CPU of the connector per episode by the size of the batch"
    claims = [
        Claim(f"growth of CPU per episode from 100 to 10,000, {many} at a time", _growth(rows, many), 0.1)
        for many in (_ALL, str(_PLACES))
    ]
    return Part("growth", title, rows, claims)


def _growth(rows: list[dict], at_a_time: str) -> float:
    return growth([row["cpu_ms"] for row in rows if row["at a time"] == at_a_time])


def _row(server: str, episodes: int, *, at_a_time: int, seconds: float) -> dict:
    # As many episodes each time, whose results are kept: what differs is how many are started together.
    waves = _IN_ALL // episodes
    found = run_client("connector", server, seconds=seconds, episodes=episodes, at_a_time=at_a_time, waves=waves)
    return {
        "episodes": episodes,
        "at a time": _ALL if at_a_time == episodes else str(at_a_time),
        "cpu_ms": 1000 * found["cpu_s"] / (episodes * waves),
        "memory_mib": found["memory_mib"],
        "stall_s": found["stall_s"],
        "sockets": found["sockets"],
    }
