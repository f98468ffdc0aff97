"""The table of NeMo Gym's agents in docs/user-guide/nemo-gym.md, as sets of names."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLE_DIR = REPOSITORY / "examples" / "experimental" / "nemo-gym"
_PAGE = REPOSITORY / "docs" / "user-guide" / "nemo-gym.md"
_MARK = "{/* tests: agents */}\n\n"


def _rows() -> list[list[set[str]]]:
    """Each cell's names in backquotes, row by row."""
    _, _, *rows = _PAGE.read_text().split(_MARK, 1)[1].split("\n\n", 1)[0].splitlines()
    return [[set(re.findall(r"`(\w+)`", cell)) for cell in row.strip("|").split("|")] for row in rows]


def agents_by_reach() -> list[set[str]]:
    """The agents of each row: by URL, as they are, with a sandbox, without the rollout id, with a caller outside."""
    return [agents for agents, *_ in _rows()]


def agents_run() -> set[str]:
    """The agents that are said to have been run."""
    return set().union(*(run for *_, run in _rows()))
