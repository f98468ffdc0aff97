"""Which tasks to keep by their ids: those the user names, those not known to flake, those a policy can learn from.

    read_ids(path)            one id a line, such as a golden scan's --supported-ids
    known_flaky_ids()         tasks whose own patch is publicly known to fail or flake, ``data/known_flaky.json``
    read_solve_rates(path)    each task's share of solved episodes, from the results of a policy scan
    parse_band("0.05:0.95")   the solve rates that are worth training on
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nemogym_contract import read_verdict
from row_reader import DataError, json_lines

REASONS: dict[str, str] = {
    "not_in_only": "not among the ids of --only",
    "in_exclude": "among the ids of --exclude",
    "known_flaky": "its own patch is publicly known to fail or flake; --no-known-flaky keeps it",
    "not_scanned": "the scan has no verdict on it",
    "solved_too_rarely": "solved more rarely than --solve-rate asks for: groups of zeros, no gradient",
    "solved_too_often": "solved more often than --solve-rate asks for: groups of ones, no gradient",
}

_BAND = re.compile(r"([0-9.]+):([0-9.]+)")


class Band(NamedTuple):
    """Solve rates from ``lowest`` to ``highest``, both included."""

    lowest: float
    highest: float


@dataclass(frozen=True)
class Selection:
    """What a task's id decides. Ids are lower-case.

    Attributes:
        only: keep no other; None keeps all.
        exclude: leave these out.
        flaky: leave these out too.
        solve_rates: from a policy scan; None asks for none.
        band: solve rates to keep, where there are ``solve_rates``.
    """

    only: frozenset[str] | None = None
    exclude: frozenset[str] = frozenset()
    flaky: frozenset[str] = frozenset()
    solve_rates: Mapping[str, float] | None = None
    band: Band = field(default=Band(0.0, 1.0))

    def unasked_reason(self, instance_id: Any) -> str | None:
        """Why the user does not want a task, whatever it is like: a key of ``REASONS``, or None."""
        if self.only is not None and instance_id not in self.only:
            return "not_in_only"
        return "in_exclude" if instance_id in self.exclude else None

    def unfit_reason(self, instance_id: str) -> str | None:
        """Why a task that could be graded teaches nothing: a key of ``REASONS``, or None."""
        if instance_id in self.flaky:
            return "known_flaky"
        if self.solve_rates is None:
            return None
        rate = self.solve_rates.get(instance_id)
        if rate is None:
            return "not_scanned"
        if rate < self.band.lowest:
            return "solved_too_rarely"
        return "solved_too_often" if rate > self.band.highest else None


def read_ids(path: Path, *, option: str) -> frozenset[str]:
    """The ids of a file, lower-cased: one a line; blank lines and lines that start with # are passed over.

    Args:
        path: the file.
        option: the option that named it, for messages.

    Raises:
        DataError: it cannot be read, or holds no id, or something else.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"expected ids in {option} {path}, found: {getattr(error, 'strerror', error)}") from None
    ids = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    for instance_id in ids:
        if not re.fullmatch(r"[\w.-]+", instance_id):
            raise DataError(f"expected one id a line in {option} {path}, found {instance_id[:80]!r}")
    if not ids:
        raise DataError(f"expected at least one id in {option} {path}, found none")
    return frozenset(instance_id.lower() for instance_id in ids)


def known_flaky_ids() -> frozenset[str]:
    """The tasks of ``data/known_flaky.json``, which names its sources."""
    return frozenset(json.loads((Path(__file__).parent / "data" / "known_flaky.json").read_text())["tasks"])


def read_solve_rates(path: Path) -> dict[str, float]:
    """The share of its verdicts that are 1.0, for each task of a policy scan's results.

    Episodes without a verdict count nowhere; of several lines for one attempt the last one counts.

    Args:
        path: results of ``eval_nemogym_via_api.py``, one JSON line per episode.

    Raises:
        DataError: it cannot be read, or holds no verdict on a policy.
    """
    verdicts: dict[str, dict[Any, float | None]] = {}
    for place, episode in json_lines(path, skip_cut_off_end=True):
        if not isinstance(episode, Mapping) or not isinstance(episode.get("instance_id"), str):
            raise DataError(f"{place}: expected an episode of a policy scan, found none")
        if episode.get("kind") == "policy":
            attempt = episode.get("attempt", place)
            verdicts.setdefault(episode["instance_id"].lower(), {})[attempt] = read_verdict(episode)
    rates = {}
    for instance_id, rewards in verdicts.items():
        known = [reward for reward in rewards.values() if reward is not None]
        if known:
            rates[instance_id] = sum(reward == 1.0 for reward in known) / len(known)
    if not rates:
        raise DataError(f"expected results of a policy scan in --from {path}, found no verdict on a policy in it")
    return rates


def parse_band(text: str) -> Band:
    """Read ``<lowest>:<highest>``.

    Raises:
        DataError: it is not two numbers from 0 to 1 in order.
    """
    match = _BAND.fullmatch(text.strip())
    try:
        band = Band(float(match[1]), float(match[2])) if match else None
    except ValueError:
        band = None
    if band is None or not 0.0 <= band.lowest <= band.highest <= 1.0:
        raise DataError(f"expected --solve-rate to be two shares in order, such as 0.05:0.95, found {text!r}")
    return band
