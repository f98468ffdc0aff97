"""Rows of a data file or dataset, one at a time, each with its place for messages.

    open_rows(source)         JSONL, a JSON array, Parquet (the first two also .gz), or a dataset of the hub or a folder
    json_lines(path)          the values of a JSONL file

What a file is, its first bytes say, not its name. Memory holds a piece and not the whole. A dataset on the hub that is
Parquet, as most are, is downloaded into the hub's cache first. Parquet needs the package pyarrow, a dataset the package
datasets.
"""

import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

DEFAULT_SPLIT = "test"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".gz", ".zst")
_HUB_COMMIT = re.compile(r"^hf://[^@]+@([0-9a-f]{40})/")
_SPACE = re.compile(r"[ \t\n\r]*")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_PIECE = 1 << 20
_PARQUET_ROWS = 64


class DataError(Exception):
    """The input is not what it has to be; the message is one sentence for the user."""


class Rows(NamedTuple):
    """Rows of a source.

    Attributes:
        rows: a row, as the file's format has it, after its place.
        split: split of the dataset that they are; None where only the rows may know.
        total: how many there are; None where only reading tells.
        revision: the commit of a dataset on the hub.
    """

    rows: Iterator[tuple[str, Any]]
    split: str | None = None
    total: int | None = None
    revision: str | None = None


def open_rows(source: str, *, split: str | None = None, revision: str | None = None) -> Rows:
    """Open a file, a dataset on the Hugging Face hub, or a folder with a data file for each split.

    Args:
        source: path, or id on the hub.
        split: split of a dataset, ``DEFAULT_SPLIT`` when None; a file has none.
        revision: branch, tag or commit of a dataset on the hub.

    Raises:
        DataError: it cannot be opened; while rows are read, also that they cannot be read on.
    """
    if os.path.exists(source):
        if revision is not None:
            raise DataError(f"expected --revision with a dataset on the hub, found the local {source}")
        if not os.path.isdir(source):
            return _open_file(Path(source))
    elif not _HUB_ID.fullmatch(source) or source.endswith(_FILE_SUFFIXES):
        raise DataError(f"expected --input to be a file, a folder or a dataset on the hub, found no file {source}")
    return _open_dataset(source, split=split or DEFAULT_SPLIT, revision=revision)


def json_lines(path: Path, *, skip_cut_off_end: bool = False) -> Iterator[tuple[str, Any]]:
    """The values of a JSONL file after their places; blank lines and a byte order mark are tolerated.

    Args:
        path: the file.
        skip_cut_off_end: leave out a last line without its end, such as a writer that was killed leaves behind.

    Raises:
        DataError: it cannot be read, or a line is not JSON.
    """
    with _opened(path) as file:
        yield from _lines(file, path=path, skip_cut_off_end=skip_cut_off_end)


# --- files ----------------------------------------------------------------------


def _open_file(path: Path) -> Rows:
    # A pipe can be opened only once.
    if path.is_file():
        with _readable(path), open(path, "rb") as file:
            if file.read(len(_PARQUET)) == _PARQUET:
                return _open_parquet([path], name=str(path))
    return Rows(_json_rows(path))


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with _opened(path) as file:
        start = file.peek(64).removeprefix(_BYTE_ORDER_MARK).lstrip()
        if start.startswith(b"["):
            yield from _elements(io.TextIOWrapper(file, encoding="utf-8-sig"), path=path)
        else:
            yield from _lines(file, path=path)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked."""
    with _readable(path), open(path, "rb") as file:
        if file.peek(len(_GZIP)).startswith(_GZIP):
            with gzip.open(file) as unpacked:
                yield unpacked
        else:
            yield file


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"expected to read {path}, found: {reason}") from None


def _lines(file: BinaryIO, *, path: Path, skip_cut_off_end: bool = False) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            value = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            if skip_cut_off_end and not line.endswith(b"\n"):
                return
            raise DataError(f"{place}: expected a JSON object, found {error}") from None
        yield place, value


def _elements(file: TextIO, *, path: Path) -> Iterator[tuple[str, Any]]:
    """The elements of a file that is one JSON array."""
    window = _Window(file)
    number = 0
    try:
        window.take("[")
        while number or window.next() != "]":
            yield f"{path} element {number + 1}", window.take_value()
            number += 1
            if window.next() == "]":
                break
            window.take(",")
        window.take("]")
        window.take("")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} after element {number}: expected a JSON array of rows, found {error}") from None


class _Window:
    """The piece of a JSON text that is being parsed."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._parse = json.JSONDecoder().raw_decode

    def next(self) -> str:
        """The next character that is no white space; "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()
            if self._at < len(self._text) or not self._grow():
                return self._text[self._at : self._at + 1]

    def take(self, expected: str) -> None:
        """Go past ``expected``; "" is the end."""
        found = self.next()
        if found != expected:
            raise ValueError(f"{found or 'the end'!r} instead of {expected or 'the end'!r}")
        self._at += len(expected)

    def take_value(self) -> Any:
        """Go past a value and return it."""
        self.next()
        while True:
            try:
                value, self._at = self._parse(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                if not self._may_be_cut_off(error) or not self._grow():
                    raise ValueError(error.msg) from None

    def _may_be_cut_off(self, error: json.JSONDecodeError) -> bool:
        # The longest token that is wrong only for want of its end is -Infinity.
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - len("-Infinity")

    def _grow(self) -> bool:
        # As much again as is there, so that a long element is not parsed over and over.
        piece = self._file.read(max(_PIECE, len(self._text) - self._at))
        self._text = self._text[self._at :] + piece
        self._at = 0
        return bool(piece)


def _open_parquet(paths: Sequence[Path], *, name: str) -> Rows:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"expected the package pyarrow, to read {name}; pip install pyarrow") from None
    try:
        total = sum(pyarrow.parquet.read_metadata(path).num_rows for path in paths)
    except (OSError, ValueError, NotImplementedError) as error:
        raise DataError(f"expected to read {name} as Parquet, found: {_sentence(error)}") from None
    return Rows(_parquet_rows(paths, name=name), total=total)


def _parquet_rows(paths: Sequence[Path], *, name: str) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    number = 0
    try:
        for path in paths:
            # Buffered ahead, the whole file ends up in memory.
            with pyarrow.parquet.ParquetFile(path, buffer_size=_PIECE, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{name} row {number}", row
    except (OSError, ValueError, NotImplementedError) as error:
        raise DataError(f"{name}: expected to read on after row {number}, found: {_sentence(error)}") from None


# --- datasets -------------------------------------------------------------------


def _open_dataset(source: str, *, split: str, revision: str | None) -> Rows:
    is_local = os.path.isdir(source)
    if not is_local:
        print(f"asking the Hugging Face hub for {source}", file=sys.stderr, flush=True)
    try:
        # Takes seconds to import, and a file does without it.
        import datasets

        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        builder = datasets.load_dataset_builder(source, revision=revision)
        files = builder.config.data_files or {}
        splits = files if builder.name == "parquet" else builder.as_streaming_dataset()
        if split not in splits:
            raise DataError(
                f"expected --split to be one that {source} has ({', '.join(map(str, splits))}), found {split!r}"
            )
        name = f"{source} split {split}"
        if builder.name == "parquet":
            # datasets would stream it with whole row groups in memory, often more than once.
            rows = _open_parquet(datasets.DownloadManager().download(list(files[split])), name=name)
        else:
            rows = Rows(_dataset_rows(splits[split], name=name), total=_known_total(builder, split))
    except DataError:
        raise
    except Exception as error:
        advice = "" if is_local else "; a local file as --input works offline"
        raise DataError(f"expected to load the dataset {source}, found: {_sentence(error)}{advice}") from None
    return rows._replace(split=split, revision=_commit(files.get(split) or []))


def _known_total(builder: Any, split: str) -> int | None:
    info = (builder.info.splits or {}).get(split)
    return info.num_examples or None if info else None


def _commit(files: Sequence[str]) -> str | None:
    """The commit in the address of a file on the hub, ``hf://datasets/<id>@<commit>/<path>``."""
    match = _HUB_COMMIT.search(str(files[0])) if files else None
    return match[1] if match else None


def _dataset_rows(dataset: Any, *, name: str) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        for number, row in enumerate(dataset, start=1):
            yield f"{name} row {number}", row
    except Exception as error:
        raise DataError(f"{name}: expected to read on after {number} row(s), found: {_sentence(error)}") from None


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:400] or type(error).__name__
