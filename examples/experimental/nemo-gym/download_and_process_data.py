#!/usr/bin/env python3
"""SWE-bench-family data -> Miles prompt data, ready for NeMo Gym.

1. One line per task: {"prompt": problem_statement, "metadata": {the whole instance, "subset", "split"}}.
2. Keys that would look like a verdict on the policy, or that Miles reads as its own, are left out of the metadata.
3. Every row written is one the connector can send; the first that is not ends the conversion.
4. Rows are streamed. The output appears in one step at the end; same input, same bytes.

--input is a dataset on the Hugging Face hub, a folder with one data file per split, or a JSONL file of instances or of
Miles prompt rows. A file needs no network, and does not need the package datasets.

Exit status: 0 written, 2 the options or the input are wrong, 130 interrupted; only with 0 is the output touched.

  python download_and_process_data.py --output swe_verified.jsonl
  python download_and_process_data.py --input rows.jsonl --output prompts.jsonl --subset gym --split train
"""

import json
import logging
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date, datetime
from datetime import time as time_of_day
from datetime import timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

import typer
from nemogym_contract import VERDICT_FIELDS, build_run_request
from tqdm import tqdm

EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 2, 130, 143

DEFAULT_INPUT = "princeton-nlp/SWE-bench_Verified"
DEFAULT_SPLIT = "test"
DEFAULT_SUBSET = "verified"

# rm_type sends the reward of a row past the reward hook (miles/rollout/rm_hub/__init__.py); round_number of the first
# sample makes Miles read it from all (miles/ray/rollout/train_data_conversion.py).
STRIPPED_FIELDS = VERDICT_FIELDS | {"rm_type", "round_number"}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".gz", ".zst")
_ROWS_PER_LINE = 1000


class DataError(Exception):
    """Ends the conversion with exit status 2; the message is one sentence for the user."""


@dataclass
class Summary:
    """What a conversion wrote.

    Attributes:
        written: rows by (subset, split).
        stripped: how many rows a key of ``STRIPPED_FIELDS`` was left out of, by key.
    """

    written: Counter[tuple[str, str]] = field(default_factory=Counter)
    stripped: Counter[str] = field(default_factory=Counter)


class _Source(NamedTuple):
    """``rows`` come with their place, for messages. ``split`` and ``total`` are None where only the rows know."""

    rows: Iterator[tuple[str, Any]]
    split: str | None
    total: int | None


# --- orchestration --------------------------------------------------------------


def main(
    output: Annotated[Path, typer.Option(help="Miles prompt data, .jsonl; its folder is made.")],
    source: Annotated[
        str, typer.Option("--input", help="Dataset on the Hugging Face hub, folder of split files, or JSONL file.")
    ] = DEFAULT_INPUT,
    split: Annotated[
        str | None,
        typer.Option(
            help="Split of a dataset to read, or what the rows of a file are to be called.",
            show_default=f"{DEFAULT_SPLIT}; rows of a file keep their own",
        ),
    ] = None,
    subset: Annotated[
        str | None,
        typer.Option(
            help="Picks the image family on the server: 'verified' is the official docker.io/swebench/..., any other "
            "name docker.io/xingyaoww/...; a row's own image_name goes before both.",
            show_default=f"{DEFAULT_SUBSET}; rows keep their own",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N rows.")] = None,
) -> None:
    """Convert SWE-bench-family data to Miles prompt data for NeMo Gym."""
    # What datasets and the hub's client log about a failure, their exception says as well.
    logging.disable(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    start = time.monotonic()
    try:
        summary = convert(source, output, split=split, subset=subset, limit=limit)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _print_summary(summary, output, seconds=time.monotonic() - start)


def convert(
    source: str, output: Path, *, split: str | None = None, subset: str | None = None, limit: int | None = None
) -> Summary:
    """Convert ``source`` to Miles prompt data at ``output``, one row at a time.

    Args:
        source: dataset id on the hub, folder with one data file per split, or JSONL file.
        output: the ``.jsonl`` file to write; it is replaced in one step, or not touched at all.
        split: split of a dataset to read, ``test`` when None. Rows of a file get it as their name; None leaves their
            own.
        subset: image family of every row; None leaves a row its own, or makes it ``verified``.
        limit: only the first rows.

    Returns:
        What was written and left out.

    Raises:
        DataError: an option or the input is wrong, or the output cannot be written.
    """
    _check_options(source, output, subset=subset, limit=limit)
    opened = _open_source(source, split=split)
    split = opened.split or split
    summary = Summary()
    place_of: dict[str, str] = {}
    with _replacing(output) as file, closing(_Progress(total=_smallest(opened.total, limit))) as progress:
        for place, row in islice(opened.rows, limit):
            instance = _instance(row, place=place)
            try:
                converted = convert_row(
                    instance,
                    subset or instance.get("subset") or DEFAULT_SUBSET,
                    split or instance.get("split") or DEFAULT_SPLIT,
                )
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place}: {error}") from None
            metadata = converted["metadata"]
            _check_new(metadata["instance_id"], place=place, place_of=place_of)
            file.write(json.dumps(converted, allow_nan=False) + "\n")
            summary.written[metadata["subset"], metadata["split"]] += 1
            summary.stripped.update(STRIPPED_FIELDS & instance.keys())
            progress.add()
        if not summary.written:
            raise DataError(f"expected at least one row in {source}, found none")
    return summary


def convert_row(instance: Mapping[str, Any], subset: str, split: str) -> dict[str, Any]:
    """One Miles prompt row. Converting its metadata again gives the same row.

    Args:
        instance: SWE-bench fields; datetimes, numpy values and the like become JSON, see ``as_json``.
        subset: plain name; the server derives the image from it (``nemogym_contract.build_run_request``).
        split: name of the split.

    Returns:
        ``{"prompt": problem_statement, "metadata": {**instance, "subset", "split"}}`` without ``STRIPPED_FIELDS``.

    Raises:
        ValueError: no ``problem_statement`` or ``instance_id``, a field that is not JSON, or a row that cannot be sent.
    """
    own = STRIPPED_FIELDS | {"subset", "split"}
    metadata = {key: as_json(value, name=f"field {key!r}") for key, value in instance.items() if key not in own}
    metadata |= {"subset": subset, "split": as_json(split, name="field 'split'")}
    problem_statement = metadata.get("problem_statement")
    if not isinstance(problem_statement, str) or not problem_statement.strip():
        raise ValueError("expected the task as text in problem_statement, found none")
    if not isinstance(metadata["split"], str):
        raise ValueError(f"expected split to be a name, found {split!r}")
    build_run_request(metadata, request_kwargs=None)
    return {"prompt": problem_statement, "metadata": metadata}


def as_json(value: Any, *, name: str) -> Any:
    """``value`` as JSON types: dates in ISO 8601, durations in seconds, numpy as Python, Decimal as its exact text.

    Args:
        value: a value of a row as ``json`` or ``datasets`` reads it.
        name: what it is, for the message.

    Raises:
        ValueError: NaN or infinite, or of a type without a JSON form.
    """
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        if value.dtype.kind in "mM":
            # tolist() makes bare integers of times finer than microseconds.
            value = value.astype(f"{value.dtype.kind}8[us]")
        return as_json(value.tolist(), name=name)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, Decimal)):
        if not math.isfinite(value):
            raise ValueError(f"expected {name} to be JSON, found the number {value}")
        return str(value) if isinstance(value, Decimal) else value
    if isinstance(value, (datetime, date, time_of_day)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (list, tuple)):
        return [as_json(item, name=name) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: as_json(item, name=name) for key, item in value.items()}
    raise ValueError(f"expected {name} to be JSON, found {type(value).__name__}")


# --- checks ---------------------------------------------------------------------


def _check_options(source: str, output: Path, *, subset: str | None, limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise DataError(f"expected --limit to be at least 1, found {limit}; leave it out to convert every row")
    if subset is not None:
        try:
            build_run_request({"instance_id": "any", "subset": subset}, request_kwargs=None)
        except ValueError as error:
            raise DataError(f"--subset: {error}") from None
    if output.suffix != ".jsonl":
        raise DataError(f"expected --output to end in .jsonl, as Miles reads it (miles/utils/data.py), found {output}")
    if os.path.exists(output) and not output.is_file():
        raise DataError(f"expected --output to be a file, found {output}, which is none")
    if os.path.exists(source) and output.resolve().is_relative_to(Path(source).resolve()):
        raise DataError(f"expected --output outside of --input, found {output} and {source}")


def _check_new(instance_id: str, *, place: str, place_of: dict[str, str]) -> None:
    # The server lower-cases ids: two that differ in case only are one task to it.
    earlier = place_of.setdefault(instance_id.lower(), place)
    if earlier != place:
        raise DataError(f"{place}: expected every task once, found {instance_id} at {earlier} too")


def _smallest(*counts: int | None) -> int | None:
    return min((count for count in counts if count is not None), default=None)


# --- input ----------------------------------------------------------------------


def _open_source(source: str, *, split: str | None) -> _Source:
    if os.path.exists(source) and not os.path.isdir(source):
        return _Source(_file_rows(Path(source)), split=None, total=None)
    if not os.path.exists(source) and (not _HUB_ID.fullmatch(source) or source.endswith(_FILE_SUFFIXES)):
        raise DataError(f"expected --input to be a file, a folder or a dataset on the hub, found no file {source}")
    return _open_dataset(source, split=split or DEFAULT_SPLIT)


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row of a JSONL file; blank lines and a byte order mark are tolerated."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    place = f"{path} line {number}"
                    yield place, _parsed(line, place=place)
    except OSError as error:
        raise DataError(f"expected to read --input {path}, found: {error.strerror}") from None


def _parsed(line: bytes, *, place: str) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: expected a JSON object, found {error}") from None


def _open_dataset(source: str, *, split: str) -> _Source:
    is_local = os.path.isdir(source)
    if not is_local:
        print(f"asking the Hugging Face hub for {source}", file=sys.stderr, flush=True)
    try:
        # Takes seconds to import, and a JSONL file does without it.
        import datasets

        datasets.disable_progress_bars()
        splits = datasets.load_dataset(source, streaming=True)
    except Exception as error:
        advice = "" if is_local else "; a local JSONL file as --input works offline"
        raise DataError(f"expected to load the dataset {source}, found: {_sentence(error)}{advice}") from None
    if split not in splits:
        raise DataError(f"expected --split to be one that {source} has ({', '.join(splits)}), found {split!r}")
    known = (splits[split].info.splits or {}).get(split)
    total = known.num_examples if known else None
    return _Source(_dataset_rows(splits[split], name=f"{source} split {split}"), split=split, total=total or None)


def _dataset_rows(dataset: Any, *, name: str) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        for number, row in enumerate(dataset, start=1):
            yield f"{name} row {number}", row
    except Exception as error:
        raise DataError(f"{name}: expected to read on after {number} row(s), found: {_sentence(error)}") from None


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:400] or type(error).__name__


def _instance(row: Any, *, place: str) -> Mapping[str, Any]:
    """The SWE-bench instance in a row, which may be in Miles form already."""
    if isinstance(row, Mapping) and "instance_id" not in row and isinstance(row.get("metadata"), Mapping):
        row = row["metadata"]
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: expected a JSON object, found {type(row).__name__}")
    return row


# --- output ---------------------------------------------------------------------


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """A new file that takes the place of ``path`` at the end, or leaves no trace when the block raises."""
    new_folders = [folder for folder in path.parents if not os.path.exists(folder)]
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside it: os.replace is atomic only within one file system.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(descriptor, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if temporary:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        with suppress(OSError):
            for folder in new_folders:
                folder.rmdir()
        if isinstance(error, OSError):
            raise DataError(f"expected to write --output {path}, found: {error.strerror}") from None
        raise


class _Progress:
    """A bar on a terminal, a line per thousand rows elsewhere."""

    def __init__(self, *, total: int | None) -> None:
        self._count = 0
        self._on_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, unit="row", file=sys.stderr, disable=not self._on_terminal)

    def add(self) -> None:
        self._count += 1
        self._bar.update()
        if not self._on_terminal and self._count % _ROWS_PER_LINE == 0:
            print(f"{self._count} rows", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()


def _print_summary(summary: Summary, output: Path, *, seconds: float) -> None:
    if summary.stripped:
        counts = ", ".join(f"{key} in {count}" for key, count in sorted(summary.stripped.items()))
        print(f"left out of rows: {counts}")
    kinds = ", ".join(
        f"{count} of subset {subset}, split {split}" for (subset, split), count in sorted(summary.written.items())
    )
    print(f"wrote {summary.written.total()} row(s) to {output} in {seconds:.1f} s: {kinds}")


if __name__ == "__main__":
    typer.run(main)
