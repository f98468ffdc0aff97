"""The tables of exit statuses in README and docs say what the contract says."""

import importlib
import re
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[2]
_EXAMPLE = _REPOSITORY / "examples" / "experimental" / "nemo-gym"
_PAGES = {
    "README": (_EXAMPLE / "README.md", "## Verdicts and failures"),
    "docs": (_REPOSITORY / "docs" / "user-guide" / "nemo-gym.md", "## Verdicts"),
}


@pytest.fixture
def contract(monkeypatch):
    monkeypatch.syspath_prepend(str(_EXAMPLE))
    return importlib.import_module("nemogym_contract")


def _rewards_by_status(page: Path, heading: str) -> dict[str, str]:
    section = page.read_text().split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    header, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    columns = [cell.strip(" `") for cell in header.strip("|").split("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    status, reward = columns.index("exit_status"), [name.lower() for name in columns].index("reward")
    names = [row[status] for row in cells]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"`\w+`", name) for name in names)
    return {row[status].strip("`"): row[reward] for row in cells}


@pytest.mark.parametrize("page", _PAGES)
def test_a_table_has_every_status_and_its_reward(page, contract):
    expected = {
        status: "the grade" if status in contract.GRADED_STATUSES else "0.0" if known.is_verdict else "none"
        for status, known in contract.EXIT_STATUSES.items()
    }
    assert _rewards_by_status(*_PAGES[page]) == expected
