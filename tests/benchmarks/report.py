"""What a benchmark found: rows of figures and the claims that they bear, as a table and as JSON. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Claim:
    """Something that has to hold: ``found`` is at most ``limit``."""

    text: str
    found: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.found <= self.limit

    def as_json(self) -> dict[str, Any]:
        return {"claim": self.text, "found": round(self.found, 4), "limit": self.limit, "holds": self.holds}

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.text}: {self.found:.3g} (at most {self.limit:g})"


@dataclass(frozen=True)
class Part:
    """One part of the benchmarks.

    Attributes:
        name: as ``PART=`` names it.
        title: what was measured, with units where a column's name has none.
        rows: figures by column; every row has the same columns.
        claims: what has to hold.
    """

    name: str
    title: str
    rows: Sequence[Mapping[str, Any]]
    claims: Sequence[Claim] = field(default=())

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "rows": [dict(row) for row in self.rows],
            "claims": [claim.as_json() for claim in self.claims],
        }

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {self.title}", "", table(self.rows), "", *map(str, self.claims)]).rstrip()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table, numbers to three figures and to the right.

    Raises:
        ValueError: there is no row, or one has other columns than the first.
    """
    if not rows:
        raise ValueError("expected at least one row, found none")
    columns = list(rows[0])
    for row in rows:
        if list(row) != columns:
            raise ValueError(f"expected the columns {columns} in every row, found {list(row)}")
    cells = [columns, *([_shown(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_number = [all(isinstance(row[column], (int, float, type(None))) for row in rows) for column in columns]
    lines = [
        [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ]
        for line in cells
    ]
    rule = ["-" * (width - 1) + ":" if right else "-" * width for width, right in zip(widths, is_number, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


def medians(rows: Iterable[Mapping[str, Any]], *, by: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each combination of the columns ``by``, in order of appearance, with the median of every other column."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in by), []).append(row)
    return [
        {
            column: value if column in by else statistics.median(row[column] for row in group)
            for column, value in group[0].items()
        }
        for group in groups.values()
    ]


def growth(values: Sequence[float]) -> float:
    """How much more than the first the largest is, as a share of the first."""
    return max(values) / values[0] - 1
