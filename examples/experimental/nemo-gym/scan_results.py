"""The results file of a scan: one JSON line per episode, written as it ends, read again by the next scan.

1. One scan writes a file at a time; another is refused at once (flock).
2. Lines are only ever appended. A scan that is killed leaves at most its last line half written; the next one cuts that
   half off and runs that episode again.
3. A file is resumed only by the scan that it belongs to: golden or policy, the same policy and sampling settings, the
   same tasks under the same ids. Anything else is refused and stays as it is. Results of tasks that are not in the input
   belong to nobody's question here: kept and not counted.
4. An episode that is run again gets a second line: of two with the same (instance_id, kind, attempt) the later counts.

A line: instance_id, repo, kind (gold, null, policy), attempt (which of the passes), pass, reward, exit_status, seconds,
agent_metrics, detail, task (fingerprint of the row), policy, sampling, eval_report (what the server sent with it).
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemogym_contract import EXIT_STATUSES
from scan_input import SetUpError
from scan_statistics import KINDS, Episode, Reading

_NOT_IN_MEMORY = ("pass", "eval_report")
_LINE_START = b'{"instance_id": '
_TYPES: dict[str, tuple[type, ...]] = {
    "instance_id": (str,),
    "repo": (str, type(None)),
    "kind": (str,),
    "attempt": (int,),
    "reward": (int, float, type(None)),
    "exit_status": (str,),
    "seconds": (int, float),
    "agent_metrics": (dict,),
    "detail": (str,),
    "task": (str,),
    "policy": (str, type(None)),
    "sampling": (dict,),
}


class Results:
    """The episodes of a scan: those found in its file, and those added. Made by ``open_results``."""

    def __init__(self, path: Path | None, *, tasks: Mapping[str, str]) -> None:
        self.added = 0
        self.others: list[Episode] = []
        self._path = path
        self._tasks = tasks
        self._episodes: dict[tuple[str, str, int], Episode] = {}
        self._file = -1
        self._whole: int | None = None

    @property
    def episodes(self) -> list[Episode]:
        """One for each (instance_id, kind, attempt), in the order in which they ended."""
        return list(self._episodes.values())

    def __contains__(self, key: tuple[str, str, int]) -> bool:
        return key in self._episodes

    def drop_inconclusive(self) -> None:
        """Forget, not delete, what says nothing about its task, so that it counts as not yet run."""
        self._episodes = {key: one for key, one in self._episodes.items() if one.reading != Reading.INCONCLUSIVE}

    def add(self, episode: Episode, eval_report: Mapping[str, Any]) -> None:
        """Append one episode.

        Raises:
            SetUpError: the file cannot be written.
        """
        if self._path is not None:
            self._write(json.dumps(as_record(episode, eval_report)).encode() + b"\n")
        self._keep(episode)
        self.added += 1

    def check(self, name: str, value: Any) -> None:
        """Refuse the file where an episode in it differs from this scan in ``policy`` or ``sampling``.

        Raises:
            SetUpError: naming both values.
        """
        for episode in [*self._episodes.values(), *self.others]:
            if getattr(episode, name) != value:
                raise self._foreign(
                    f"{name} {_shown(value)}", f"{_shown(getattr(episode, name))} ({episode.instance_id})"
                )

    def set_aside(self) -> Path:
        """Rename the file to ``<name>.previous``, in place of an older one, and go on with an empty one.

        Returns:
            The new name.

        Raises:
            SetUpError: it cannot be renamed, or another scan came in between.
        """
        previous = self._path.with_name(f"{self._path.name}.previous")
        before = self._file
        try:
            os.replace(self._path, previous)
        except OSError as error:
            raise self._unwritable(error) from None
        os.close(before)  # its lock kept other scans out until it was renamed
        self._file = -1
        self._lock()
        self._episodes, self.others, self._whole = {}, [], None
        return previous

    # --- the file -------------------------------------------------------------

    def _open(self, *, kinds: tuple[str, ...]) -> None:
        self._lock()
        with os.fdopen(os.dup(self._file), "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    # Repaired before the first write: a scan that writes nothing changes nothing.
                    self._whole = file.tell() - (len(line) if _is_half_a_line(line) else 0)
                    if _is_half_a_line(line):
                        break
                try:
                    self._keep(read_record(json.loads(line)))
                except ValueError as error:
                    raise self._foreign("results of a scan", f"line {number}: {error}") from None
        for episode in [*self._episodes.values(), *self.others]:
            if episode.kind not in kinds:
                raise self._foreign(f"{' and '.join(kinds)} episodes", f"{episode.kind} {episode.instance_id}")

    def _keep(self, episode: Episode) -> None:
        task = self._tasks.get(episode.instance_id)
        if self._tasks and task is None:
            self.others.append(episode)
            return
        if task is not None and task != episode.task:
            raise self._foreign(f"{episode.instance_id} as it is in --input", "results of another row of this id")
        self._episodes.pop(episode.key, None)
        self._episodes[episode.key] = episode

    def _lock(self) -> None:
        """Open the file, made if need be, and keep every other scan out of it."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between the two calls its owner may have renamed or removed it.
            mine = os.path.samestat(os.fstat(file), os.stat(self._path))
        except (BlockingIOError, FileNotFoundError):
            mine = False
        except OSError as error:
            os.close(file)
            raise self._unwritable(error) from None
        if not mine:
            os.close(file)
            raise SetUpError(
                f"expected --output {self._path} for this scan alone, found another one writing it; wait for that or "
                "name another file"
            )
        self._file = file

    def _write(self, data: bytes) -> None:
        try:
            if self._whole is not None:
                os.ftruncate(self._file, self._whole)
                data = data if self._ends_with_newline() else b"\n" + data
                self._whole = None
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise self._unwritable(error) from None

    def _ends_with_newline(self) -> bool:
        return self._whole == 0 or os.pread(self._file, 1, self._whole - 1) == b"\n"

    def _close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                if os.fstat(self._file).st_size == 0:
                    os.unlink(self._path)
            os.close(self._file)

    def _unwritable(self, error: OSError) -> SetUpError:
        return SetUpError(f"expected to write --output {self._path}, found: {error.strerror}")

    def _foreign(self, expected: str, found: str) -> SetUpError:
        return SetUpError(
            f"expected --output {self._path} to hold {expected}, found {found}; it is left as it is, name another file"
        )


@contextlib.contextmanager
def open_results(
    path: Path | None, *, golden: bool | None, tasks: Mapping[str, str] | None = None
) -> Iterator[Results]:
    """Open a scan's results file, locked, with what an earlier run of the same scan left in it.

    Args:
        path: the file; None keeps results in memory only. A file that stays empty is removed.
        golden: gold and null episodes belong in it, not policy ones; None takes all.
        tasks: fingerprint of each task by id; None or empty takes all.

    Raises:
        SetUpError: it cannot be opened, another scan is writing it, or it belongs to another scan.
    """
    results = Results(path, tasks=tasks or {})
    try:
        if path is not None:
            results._open(kinds={None: KINDS, True: ("gold", "null"), False: ("policy",)}[golden])
        yield results
    finally:
        results._close()


def write_ids(path: Path, ids: Iterable[str]) -> None:
    """Write one id a line, in one step.

    Raises:
        SetUpError: it cannot be written.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            os.fchmod(file.fileno(), 0o644)
            file.writelines(f"{instance_id}\n" for instance_id in ids)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise SetUpError(f"expected to write --supported-ids {path}, found: {error.strerror}") from None


# --- one line ---------------------------------------------------------------------


def fingerprint(row: Mapping[str, Any]) -> str:
    """What tells a row from another one of the same id: 16 hex digits of its SHA-256, key order aside."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def as_record(episode: Episode, eval_report: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object of one line."""
    fields = {**asdict(episode), "seconds": round(episode.seconds, 3)}
    shown = ("instance_id", "repo", "kind", "attempt")
    return {
        **{name: fields.pop(name) for name in shown},
        "pass": episode.reading == Reading.PASS,
        **fields,
        "eval_report": eval_report,
    }


def read_record(record: Any) -> Episode:
    """The episode of one line; its ``eval_report`` is left out, which may be large.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    for name, types in _TYPES.items():
        if name not in record:
            raise ValueError(f"expected an episode, found one without {name!r}")
        if not isinstance(record[name], types) or isinstance(record[name], bool):
            raise ValueError(f"expected {name!r} of an episode, found {record[name]!r}"[:200])
    if record["attempt"] < 1:
        raise ValueError(f"expected 'attempt' of an episode to be at least 1, found {record['attempt']}"[:200])
    status = record["exit_status"]
    if status not in EXIT_STATUSES or record["kind"] not in KINDS:
        raise ValueError(f"expected an episode, found one of kind {record['kind']!r} that ended as {status!r}")
    if EXIT_STATUSES[status].is_verdict != (record["reward"] is not None):
        raise ValueError(f"expected an episode, found {status} with reward {record['reward']!r}")
    return Episode(**{name: record[name] for name in _TYPES})


def _is_half_a_line(line: bytes) -> bool:
    """Whether it is the beginning of a line of ours, cut before its end."""
    try:
        json.loads(line)
    except ValueError:
        return line.startswith(_LINE_START) or _LINE_START.startswith(line)
    return False


def _shown(value: Any) -> str:
    return json.dumps(value) if value else "none"
