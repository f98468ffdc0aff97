"""Rows out of files and datasets: every format, their ends and faults, and memory that does not grow with the file."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow
import pyarrow.parquet
import pytest
from row_reader import DataError, json_lines, open_rows

from . import EXAMPLE_DIR

ROWS = [
    {"instance_id": "a", "text": 'é]},[{\\" \U0001f600'},
    {"instance_id": "b", "nested": [[], {}, [1.5, None]]},
    {},
]


def _read(path: Path) -> list:
    return [row for _, row in open_rows(str(path)).rows]


def _lines(rows: list) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


# --- JSON -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        _lines(ROWS),
        b"\xef\xbb\xbf" + _lines(ROWS),
        _lines(ROWS).replace(b"\n", b"\r\n"),
        b"\n \r\n" + _lines(ROWS).replace(b"\n", b"\n\n"),
        _lines(ROWS).rstrip(),
        json.dumps(ROWS).encode(),
        json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
        b"\xef\xbb\xbf\r\n " + json.dumps(ROWS, indent=2).replace("\n", "\r\n").encode() + b"\n\n",
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_json_in_every_form(tmp_path, content, packed):
    # What it is, its bytes say.
    path = tmp_path / "rows.anything"
    path.write_bytes(gzip.compress(content) if packed else content)
    assert _read(path) == ROWS


def test_places(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n" + _lines(ROWS[:2]))
    (tmp_path / "b.json").write_text(json.dumps(ROWS[:2]))
    assert [place for place, _ in open_rows(str(tmp_path / "a.jsonl")).rows] == [
        f"{tmp_path}/a.jsonl line 2",
        f"{tmp_path}/a.jsonl line 3",
    ]
    assert [place for place, _ in open_rows(str(tmp_path / "b.json")).rows] == [
        f"{tmp_path}/b.json element 1",
        f"{tmp_path}/b.json element 2",
    ]


@pytest.mark.parametrize("content", [b"", b" \n", b"[]", b" [ ] \n", b"\xef\xbb\xbf"])
def test_nothing_in_it(tmp_path, content):
    (tmp_path / "rows").write_bytes(content)
    assert _read(tmp_path / "rows") == []


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64])
def test_array_is_the_same_wherever_a_piece_ends(tmp_path, monkeypatch, piece):
    monkeypatch.setattr("row_reader._PIECE", piece)
    rows = [*ROWS, {"a": -1.5e-7, "b": [True, False, None, "\\u00e9\\\\"], "c": "x" * 50}, {"d": float("-inf")}]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    assert _read(tmp_path / "rows.json") == rows


@pytest.mark.parametrize(
    "content, said",
    [
        (b'{"a": 1}\n{oops\n', "rows line 2: expected a JSON object"),
        (b'{"a": 1}\n\xff\n', "rows line 2: .*utf-8"),
        (b'{"a": 1', "rows line 1: "),
        (b"\x28\xb5\x2f\xfd rest of something packed with zstd", "rows line 1: .*utf-8"),
        (b'[{"a": 1}, {oops]', "rows after element 1: expected a JSON array of rows, found Expecting property name"),
        (b'[{"a": 1} {"b": 2}]', "rows after element 1: .*'{' instead of ','"),
        (b'[{"a": 1},]', "rows after element 1: .*Expecting value"),
        (b'[{"a": 1},', "rows after element 1: .*Expecting value"),
        (b'[{"a": 1}', "rows after element 1: .*'the end' instead of ','"),
        (b"[", "rows after element 0: .*Expecting value"),
        (b'[{"a": "cut off', "rows after element 0: .*Unterminated string"),
        (b'[{"a": 1}] {"b": 2}', "rows after element 1: .*'{' instead of 'the end'"),
        (b'[{"a": "\xff"}]', "rows after element 0: .*utf-8"),
        (b"[" * 100_000, "rows after element 0: .*recursion"),
        (gzip.compress(_lines(ROWS))[:-12], "expected to read .*rows, found: Compressed file ended"),
        (gzip.compress(_lines(ROWS) * 500)[:100] + b"x" * 200, "expected to read .*rows, found: "),
        (b"PAR1 and then nothing", "expected to read .*rows as Parquet, found: "),
    ],
)
def test_faults_are_named_with_their_place(tmp_path, content, said):
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(DataError, match=said):
        _read(tmp_path / "rows")


def test_a_fault_early_in_an_array_is_found_without_reading_on(tmp_path, monkeypatch):
    monkeypatch.setattr("row_reader._PIECE", 64)
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1}, {"b": oops}, ' + " " * 100_000 + "\xff]", encoding="latin-1")
    with pytest.raises(DataError, match="after element 1: .*Expecting value"):
        _read(path)


def test_rows_of_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    feed = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=[_lines(ROWS) * 1000])
    feed.start()
    assert len(_read(tmp_path / "pipe")) == 3000
    feed.join(timeout=5)


def test_line_that_a_killed_writer_left(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(_lines(ROWS) + b'{"instance_id": "c')
    with pytest.raises(DataError, match="line 4"):
        list(json_lines(path))
    assert [row for _, row in json_lines(path, skip_cut_off_end=True)] == ROWS
    path.write_bytes(b'{"instance_id": "c\n' + _lines(ROWS))
    with pytest.raises(DataError, match="line 1"):
        list(json_lines(path, skip_cut_off_end=True))


# --- Parquet --------------------------------------------------------------------


def _parquet(rows: list, **options) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, **options)
    return file.getvalue()


def test_parquet_file(tmp_path):
    rows = [{"instance_id": str(number), "tests": ["a", "b"], "when": None} for number in range(200)]
    (tmp_path / "rows").write_bytes(_parquet(rows, row_group_size=70))
    opened = open_rows(str(tmp_path / "rows"))
    assert opened.total == 200
    places, read = zip(*opened.rows, strict=True)
    assert list(read) == rows and places[150] == f"{tmp_path}/rows row 151"


def test_parquet_that_is_damaged_further_on(tmp_path):
    rows = [{"text": hashlib.sha256(str(number).encode()).hexdigest() * 20} for number in range(3000)]
    content = bytearray(_parquet(rows, row_group_size=500, compression="gzip"))
    content[len(content) // 2 : len(content) // 2 + 200] = bytes(200)
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(DataError, match=r"rows: expected to read on after row \d+, found: "):
        _read(tmp_path / "rows")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "rows").write_bytes(_parquet([{"a": 1}]))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        _read(tmp_path / "rows")


# --- memory ---------------------------------------------------------------------

# Not ru_maxrss: a process inherits that from the one that started it.
_PEAK = """
import re, sys
from row_reader import open_rows
rows = sum(1 for _ in open_rows(sys.argv[1]).rows)
print(rows, int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024)
"""


def _peak_mib(path: Path, rows: int) -> int:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(EXAMPLE_DIR)}
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    read, peak = map(int, done.stdout.split())
    assert read == rows
    return peak


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "json", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, form):
    def write(count: int) -> Path:
        path = tmp_path / f"{count}.{form}"
        rows = [{"instance_id": str(number), "text": os.urandom(10_000).hex()} for number in range(count)]
        if form == "parquet":
            path.write_bytes(_parquet(rows))
        elif form == "json":
            path.write_text(json.dumps(rows))
        else:
            path.write_bytes(gzip.compress(_lines(rows), 1) if form.endswith("gz") else _lines(rows))
        return path

    # 20 MB and 180 MB. What Arrow's memory pool keeps differs by some 50 MB from run to run.
    growth = _peak_mib(write(9000), 9000) - _peak_mib(write(1000), 1000)
    assert growth < 100, f"{growth} MiB more for 160 MB more"


# --- datasets on the hub --------------------------------------------------------


class StubHub:
    """What the client of the Hugging Face hub asks of it, for the one dataset owner/name, with files per commit."""

    def __init__(self, commits: dict[str, dict[str, bytes]], names: dict[str, str]) -> None:
        self.paths: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.paths.append(path)
                if match := re.fullmatch(r"/api/datasets/owner/name(?:/revision/(.+))?", path):
                    commit = names.get(match[1] or "main", match[1])
                    if commit in commits:
                        files = [{"rfilename": name} for name in commits[commit]]
                        return self._answer({"id": "owner/name", "sha": commit, "siblings": files})
                    return self._answer({}, status=404, **{"X-Error-Code": "RevisionNotFound"})
                if match := re.fullmatch(r"/api/datasets/owner/name/tree/([^/]+)(?:/(.*))?", path):
                    return self._answer(_listing(commits[match[1]], folder=match[2] or ""))
                if match := re.fullmatch(r"/datasets/owner/name/resolve/([^/]+)/(.*)", path):
                    commit = names.get(match[1], match[1])
                    if match[2] in commits.get(commit, {}):
                        content = commits[commit][match[2]]
                        etag = hashlib.sha1(content).hexdigest()
                        return self._answer(content, ETag=f'"{etag}"', **{"X-Repo-Commit": commit})
                return self._answer({}, status=404, **{"X-Error-Code": "EntryNotFound"})

            do_HEAD = do_GET

            def _answer(self, body: bytes | list | dict, status: int = 200, **headers: str) -> None:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _listing(files: dict[str, bytes], *, folder: str) -> list[dict]:
    """Files and folders directly below ``folder``."""
    listed = {}
    for name, content in files.items():
        if folder and not name.startswith(f"{folder}/"):
            continue
        first, slash, _ = name.removeprefix(f"{folder}/" if folder else "").partition("/")
        path = f"{folder}/{first}" if folder else first
        listed[path] = {"type": "directory", "path": path, "oid": "0" * 40}
        if not slash:
            listed[path] = {"type": "file", "path": path, "size": len(content), "oid": "1" * 40}
    return list(listed.values())


MAIN, TAGGED = "a" * 40, "b" * 40


@pytest.fixture
def hub() -> Iterator[StubHub]:
    def files(word: str) -> dict[str, bytes]:
        shards = [_parquet([{"instance_id": f"{word}-{number}"}]) for number in range(3)]
        return {
            "data/test-00000-of-00002.parquet": shards[0],
            "data/test-00001-of-00002.parquet": shards[1],
            "data/dev-00000-of-00001.parquet": shards[2],
        }

    stub = StubHub({MAIN: files("main"), TAGGED: files("tagged")}, names={"main": MAIN, "v2": TAGGED})
    yield stub
    stub.close()


_READ_FROM_HUB = """
import json, sys
from row_reader import DataError, open_rows
for source, split, revision in json.loads(sys.argv[1]):
    try:
        rows = open_rows(source, split=split, revision=revision)
        print(json.dumps([[row["instance_id"] for _, row in rows.rows], rows.split, rows.total, rows.revision]))
    except DataError as error:
        print(json.dumps(str(error)))
"""


def test_dataset_on_the_hub_by_split_and_revision(hub, tmp_path):
    asked = [
        ("owner/name", None, None),
        ("owner/name", "test", "v2"),
        ("owner/name", "dev", TAGGED),
        ("owner/name", "train", None),
        ("owner/name", None, "v3"),
    ]
    environment = {
        **{"PATH": os.environ["PATH"], "PYTHONPATH": str(EXAMPLE_DIR)},
        **{"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"},
    }
    done = subprocess.run(
        [sys.executable, "-c", _READ_FROM_HUB, json.dumps(asked)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    main, tagged, dev, no_split, no_revision = map(json.loads, done.stdout.splitlines())
    assert main == [["main-0", "main-1"], "test", 2, MAIN]
    assert tagged == [["tagged-0", "tagged-1"], "test", 2, TAGGED]
    assert dev == [["tagged-2"], "dev", 1, TAGGED]
    assert re.search(r"--split to be one that owner/name has \((dev, test|test, dev)\), found 'train'", no_split)
    assert "expected to load the dataset owner/name, found: " in no_revision and "v3" in no_revision
    # Nothing but the split that was asked for is fetched.
    fetched = {path for path in hub.paths if path.endswith(".parquet")}
    assert f"/datasets/owner/name/resolve/{MAIN}/data/dev-00000-of-00001.parquet" not in fetched


def test_revision_of_a_file_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(_lines(ROWS))
    with pytest.raises(DataError, match="--revision with a dataset on the hub, found the local"):
        open_rows(str(tmp_path / "rows.jsonl"), revision="main")


@pytest.mark.parametrize("source", ["absent.jsonl", "./a/b/absent", "absent.parquet", "a/b/c", ""])
def test_what_is_no_input(source):
    with pytest.raises(DataError, match=f"found no file {re.escape(source)}"):
        open_rows(source)
