"""Which file goes to Miles in which pull request, and which stays here: tools/upstream/slices.yaml, read and checked."""

import fnmatch
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PLAN = Path("tools/upstream/slices.yaml")
PREFIX = "nemo-gym"

# With these git works on the repository that they name, wherever it is called.
GIT_PLACES = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"})


class RefusedError(Exception):
    """Nothing can be done with this checkout or these settings."""


@dataclass(frozen=True)
class Slice:
    """One pull request.

    Attributes:
        number, name: of the branch.
        after: number of the slice that it stands on; None for Miles' main.
        merged: Miles has it.
        files: lines of the plan.
        bridges: file of Miles to the source of the functions that replace its own.
        adds: file in Miles to the file here that is copied to it.
        sections: parts of the example's README that go into the one of Miles.
        merges: whether the navigation, the tables and the list of examples are merged.
        evidence: beginnings of rows of the status tables that speak for it.
    """

    number: int
    name: str
    after: int | None = None
    merged: bool = False
    files: tuple[str, ...] = ()
    bridges: dict[str, str] = field(default_factory=dict)
    adds: dict[str, str] = field(default_factory=dict)
    sections: tuple[dict[str, str], ...] = ()
    merges: bool = False
    evidence: tuple[str, ...] = ()

    @property
    def branch(self) -> str:
        return f"{PREFIX}-{self.number}-{self.name}"

    @property
    def description(self) -> Path:
        return PLAN.parent / f"{self.number}-{self.name}.md"


@dataclass(frozen=True)
class Plan:
    """tools/upstream/slices.yaml. ``seen``: file of Miles to the hash of the content that this repository knows."""

    commit: str
    seen: dict[str, str]
    slices: dict[int, Slice]
    merged: dict[str, Any]
    withheld: dict[int | str, dict[str, list[str]]]
    stays: tuple[str, ...]

    @classmethod
    def read(cls, source: Path) -> "Plan":
        """The plan of a repository.

        Raises:
            RefusedError: it cannot be read.
        """
        try:
            plan = yaml.safe_load((source / PLAN).read_text())
            slices = {number: Slice(number=number, **block) for number, block in plan["slices"].items()}
            return cls(
                commit=plan["miles"]["commit"],
                seen=plan["miles"]["seen"],
                slices=slices,
                merged=plan["merged"],
                withheld=plan["withheld"],
                stays=tuple(plan["stays"]),
            )
        except (OSError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
            raise RefusedError(f"expected the slices in {PLAN}, found {error!r}") from None

    def chain(self, number: int) -> list[Slice]:
        """A slice behind those that it needs and Miles has not.

        Raises:
            RefusedError: no such slice, it has no file yet, or Miles has it.
        """
        if number not in self.slices:
            raise RefusedError(f"expected SLICE to be one of {', '.join(map(str, self.slices))}, found {number}")
        one = self.slices[number]
        if not one.files:
            raise RefusedError(f"slice {number} ({one.name}) has no files yet: name them in {PLAN}")
        if one.merged:
            raise RefusedError(f"slice {number} ({one.name}) is marked as merged in {PLAN}")
        is_first = one.after is None or self.slices[one.after].merged
        return [*([] if is_first else self.chain(one.after)), one]

    def everything(self) -> list[Slice]:
        """All slices that have files and that Miles has not, in order."""
        return [one for one in self.slices.values() if one.files and not one.merged]

    def up_to(self, number: int) -> list[Slice]:
        """All slices that are there with this one, merged or not."""
        return [one for one in self.slices.values() if one.number <= number]

    def not_said(self, page: str, number: int) -> list[str]:
        """What a page leaves out in Miles as long as no later slice than this one is there."""
        later = [parts for until, parts in self.withheld.items() if until == "never" or int(until) > number]
        return [part for parts in later for part in parts.get(page, [])]


def repository_files(source: Path) -> list[str]:
    """Paths of all files of a repository that are tracked or new, and not ignored."""
    command = ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    environment = {name: value for name, value in os.environ.items() if name not in GIT_PLACES}
    listed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return sorted(path for path in set(listed.split("\0")) if path and (source / path).is_file())


def files_of(lines: tuple[str, ...], files: list[str]) -> list[str]:
    """Those files that a line of the plan names."""
    return [path for path in files if any(_names(line, path) for line in lines)]


def plan_problems(plan: Plan, files: list[str]) -> list[str]:
    """What is wrong with a plan: files that no line names or that two do, lines that name nothing, texts that are missing."""
    merged = tuple(plan.merged[kind]["file"] for kind in ("navigation", "tables"))
    places = {f"slice {one.number}": one.files for one in plan.slices.values()}
    places |= {"merged": merged, "stays": plan.stays}
    problems = []
    for path in files:
        found = [place for place, lines in places.items() if any(_names(line, path) for line in lines)]
        if not found:
            problems.append(f"{path}: decide in {PLAN}: a slice, or stays here")
        elif len(found) > 1:
            problems.append(f"{path}: named in {PLAN} by {' and '.join(found)}, expected one")
    for place, lines in places.items():
        unused = [line for line in lines if not any(_names(line, path) for path in files)]
        problems += [f"{PLAN}: {place}: {line} names no file; remove the line" for line in unused]
    texts = [str(one.description) for one in plan.slices.values() if one.files]
    return problems + [
        f"{text}: expected the slice's text, found none; write it" for text in texts if text not in files
    ]


def _names(line: str, path: str) -> bool:
    if line.endswith("/"):
        return path.startswith(line)
    return fnmatch.fnmatchcase(path, line) and path.count("/") == line.count("/")
