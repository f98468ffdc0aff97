"""Data conversion as its user runs it (a process, files, exit statuses), and its pure part in process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy
import pytest
from download_and_process_data import DataError, as_json, convert, convert_row
from eval_nemogym_via_api import load_rows
from nemogym_contract import build_run_request

from . import EXAMPLE_DIR
from .conftest import ROW

SCRIPT = EXAMPLE_DIR / "download_and_process_data.py"


def _row(number: int = 1, **fields) -> dict:
    return {**ROW, "instance_id": f"psf__requests-{number}", **fields}


def _write(path, *rows, encoding: str = "utf-8"):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding=encoding)
    return path


def _lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _process(tmp_path, **environment: str) -> dict:
    # From another directory, without PYTHONPATH: the script finds its modules by itself. Never a real hub.
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "HF_"))}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    environment = {**clean, **offline, **environment}
    return {"cwd": tmp_path, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def _command(*options) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, options)]


def _run(tmp_path, *options, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(_command(*options), **_process(tmp_path, **environment), timeout=120)


def _refused(done: subprocess.CompletedProcess, *said: str) -> None:
    """Exit status 2 and one sentence holding ``said``."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ") and done.stderr.count("error:") == 1
    assert all(part in error for part in said), error


# --- one row --------------------------------------------------------------------


def test_row_holds_the_whole_instance():
    instance = _row(image_name="registry.example/task:7", extra={"a": [1, None]})
    assert convert_row(instance, "verified", "test") == {
        "prompt": ROW["problem_statement"],
        "metadata": {**instance, "subset": "verified", "split": "test"},
    }


def test_row_loses_what_looks_like_a_verdict_and_what_miles_reads_as_its_own():
    verdict = {"reward": 1.0, "exit_status": "Submitted", "eval_report": {}, "agent_metrics": {}, "raw_reward": 1.0}
    instance = _row(**verdict, rm_type="math", round_number=3)
    assert convert_row(instance, "verified", "test") == convert_row(_row(), "verified", "test")
    assert instance["reward"] == 1.0


def test_given_subset_and_split_replace_those_of_the_row_whatever_their_order():
    first = {"subset": "old", "split": 3, **_row()}
    assert json.dumps(convert_row(first, "gym", "dev")) == json.dumps(convert_row(_row(), "gym", "dev"))


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"problem_statement": None}, "problem_statement"),
        ({"problem_statement": " \n"}, "problem_statement"),
        ({"problem_statement": ["text"]}, "problem_statement"),
        ({"instance_id": None}, "instance_id"),
        ({"instance_id": "../../outside"}, "instance_id"),
        ({"version": float("nan")}, "'version'"),
        ({"nested": {"a": [1.0, float("inf")]}}, "'nested'"),
        ({"image": object()}, "'image'"),
    ],
)
def test_row_that_cannot_be_sent_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        convert_row(_row(**fields), "verified", "test")


@pytest.mark.parametrize("subset, split", [("a/b", "test"), ("..", "test"), ("", "test"), ("verified", 3)])
def test_subset_and_split_are_names(subset, split):
    with pytest.raises(ValueError, match="expected (subset|split)"):
        convert_row(_row(), subset, split)


@pytest.mark.parametrize(
    "value, expected",
    [
        (datetime(2024, 5, 1, 12, 30, tzinfo=timezone.utc), "2024-05-01T12:30:00+00:00"),
        (date(2024, 5, 1), "2024-05-01"),
        (timedelta(minutes=1), 60.0),
        (Decimal("3.10"), "3.10"),
        (numpy.int64(3), 3),
        (numpy.float32(0.5), 0.5),
        (numpy.bool_(True), True),
        (numpy.str_("x"), "x"),
        (numpy.array([["a"], ["b"]]), [["a"], ["b"]]),
        (numpy.array([{"a": numpy.int8(1)}], dtype=object), [{"a": 1}]),
        (numpy.datetime64("2024-05-01T12:30:00", "ns"), "2024-05-01T12:30:00"),
        (numpy.timedelta64(1_500_000_000, "ns"), 1.5),
        (("a", 1, None, True), ["a", 1, None, True]),
        ({"when": date(2024, 5, 1)}, {"when": "2024-05-01"}),
    ],
)
def test_values_that_are_not_json_become_json(value, expected):
    converted = as_json(value, name="field")
    assert converted == expected and type(converted) is type(json.loads(json.dumps(converted)))


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("-inf"), Decimal("nan"), numpy.float64("nan"), numpy.array([1.0, numpy.nan]), {1: 2}, b"x"],
)
def test_values_without_a_json_form_are_refused(value):
    with pytest.raises(ValueError, match="expected field to be JSON"):
        as_json(value, name="field")


# --- files ----------------------------------------------------------------------


def test_file_to_prompts(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1, reward=1.0), _row(2, reward=0, rm_type="x"), _row(3))
    output = tmp_path / "new" / "folder" / "prompts.jsonl"

    done = _run(tmp_path, "--input", rows, "--output", output)

    assert done.returncode == 0, done.stderr
    assert _lines(output) == [convert_row(_row(number), "verified", "test") for number in (1, 2, 3)]
    stripped, summary = done.stdout.splitlines()
    assert stripped == "left out of rows: reward in 2, rm_type in 1"
    assert summary.startswith(f"wrote 3 row(s) to {output} in ")
    assert summary.endswith("3 of subset verified, split test")
    assert done.stderr == ""
    assert [path.name for path in output.parent.iterdir()] == ["prompts.jsonl"]
    assert output.stat().st_mode & 0o777 == 0o644


def test_output_is_what_the_scan_and_the_connector_read(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1, instance_id="Psf__Requests-1"), _row(2))
    convert(str(rows), tmp_path / "prompts.jsonl", subset="gym", split="train")

    read = load_rows(tmp_path / "prompts.jsonl", limit=None)

    assert read == [line["metadata"] for line in _lines(tmp_path / "prompts.jsonl")]
    request = build_run_request(read[1], request_kwargs=None)
    assert request["image_name"] == "docker.io/xingyaoww/sweb.eval.x86_64.psf_s_requests-2:latest"
    assert (request["subset"], request["split"]) == ("gym", "train")


def test_same_input_gives_the_same_bytes_and_so_does_the_output_as_input(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1, problem_statement="é\u2028\ud800", z=1, a=0.1), _row(2, subset="x"))
    outputs = [tmp_path / f"{number}.jsonl" for number in range(3)]
    convert(str(rows), outputs[0])
    convert(str(rows), outputs[1])
    convert(str(outputs[1]), outputs[2])
    assert outputs[0].read_bytes() == outputs[1].read_bytes() == outputs[2].read_bytes()
    assert len(outputs[0].read_text(encoding="ascii").splitlines()) == 2


def test_rows_of_a_file_keep_their_own_subset_and_split_until_told_otherwise(tmp_path):
    miles_row = {"prompt": "another text", "metadata": _row(1, subset="gym", split="train")}
    rows = _write(tmp_path / "rows.jsonl", miles_row, _row(2))

    own = convert(str(rows), tmp_path / "own.jsonl")
    told = convert(str(rows), tmp_path / "told.jsonl", subset="multi", split="dev")

    assert own.written == {("gym", "train"): 1, ("verified", "test"): 1}
    assert _lines(tmp_path / "own.jsonl")[0] == convert_row(_row(1), "gym", "train")
    assert told.written == {("multi", "dev"): 2}


def test_limit_reads_no_further(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1), _row(2), "not JSON")
    convert(str(rows), tmp_path / "prompts.jsonl", limit=2)
    assert [line["metadata"]["instance_id"] for line in _lines(tmp_path / "prompts.jsonl")] == [
        "psf__requests-1",
        "psf__requests-2",
    ]


def test_blank_lines_and_a_byte_order_mark_are_tolerated(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1), "", " \r", _row(2), encoding="utf-8-sig")
    assert convert(str(rows), tmp_path / "prompts.jsonl").written.total() == 2


def test_file_needs_no_datasets_package(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1))
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "datasets.py").write_text("raise ImportError('not here')\n")
    shadow = {"PYTHONPATH": str(tmp_path / "shadow")}

    assert _run(tmp_path, "--input", rows, "--output", "prompts.jsonl", **shadow).returncode == 0
    _refused(_run(tmp_path, "--output", "other.jsonl", **shadow), "not here", "works offline")


def test_progress_is_plain_lines_when_there_is_no_terminal(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", *(_row(number) for number in range(2001)))
    done = _run(tmp_path, "--input", rows, "--output", "prompts.jsonl")
    assert done.returncode == 0 and done.stderr.splitlines() == ["1000 rows", "2000 rows"]


# --- refusals -------------------------------------------------------------------


def _deep(depth: int) -> str:
    return json.dumps({**ROW, "deep": 0})[:-2] + "[" * depth + "]" * depth + "}"


# The JSON parser takes it; a walk through it goes past the recursion limit.
_PARSED_DEPTH = 900 if sys.version_info < (3, 12) else 5000

_BAD_ROWS_ON_THE_COMMAND_LINE = [
    ("", ["at least one row", "rows.jsonl"]),
    (f"{json.dumps(ROW)}\n\n{{oops\n", ["rows.jsonl line 3", "JSON object"]),
    (f"{json.dumps(ROW)}\n[1]\n", ["rows.jsonl line 2", "list"]),
    (json.dumps({**ROW, "problem_statement": None}), ["rows.jsonl line 1", "problem_statement"]),
    (json.dumps({**ROW, "instance_id": None}), ["rows.jsonl line 1", "instance_id"]),
    (json.dumps({**ROW, "version": float("nan")}), ["rows.jsonl line 1", "'version'", "nan"]),
]


@pytest.mark.parametrize("text, said", _BAD_ROWS_ON_THE_COMMAND_LINE)
def test_bad_rows_are_one_sentence_and_nothing_is_written(tmp_path, text, said):
    (tmp_path / "rows.jsonl").write_text(text)
    before = sorted(tmp_path.iterdir())
    _refused(_run(tmp_path, "--input", "rows.jsonl", "--output", "new/folder/prompts.jsonl"), *said)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "text, said",
    [
        ("\n \n", "at least one row"),
        (b"\n\xff\n", "rows.jsonl line 2: expected a JSON object"),
        ('{"prompt": "p", "metadata": "x"}\n', "line 1: .*problem_statement"),
        (_deep(_PARSED_DEPTH), "line 1: .*recursion"),
        (_deep(200_000), "line 1: .*recursion"),
        (f"{json.dumps(_row(1))}\n{json.dumps(_row(1, instance_id='PSF__requests-1'))}", "line 2: .*line 1 too"),
    ],
)
def test_further_bad_rows(tmp_path, text, said):
    (tmp_path / "rows.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=said):
        convert(str(tmp_path / "rows.jsonl"), tmp_path / "prompts.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Current directory with a good input and things that are no output; checks that all stay as they are."""
    rows = _write(tmp_path / "rows.jsonl", _row(1))
    (tmp_path / "link.jsonl").symlink_to(rows)
    (tmp_path / "folder.jsonl").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir()), rows.read_bytes()
    yield tmp_path
    assert (sorted(tmp_path.iterdir()), rows.read_bytes()) == before


@pytest.mark.parametrize(
    "options, said",
    [
        (["--input", "absent.jsonl"], ["no file absent.jsonl"]),
        (["--limit", "0"], ["--limit", "at least 1", "found 0"]),
        (["--limit", "-3"], ["--limit", "at least 1", "found -3"]),
        (["--subset", "../up"], ["--subset", "../up"]),
        (["--output", "rows.jsonl"], ["--output", "rows.jsonl"]),
    ],
)
def test_bad_options_are_one_sentence_and_nothing_is_written(folder, options, said):
    _refused(_run(folder, "--input", "rows.jsonl", "--output", "prompts.jsonl", *options), *said)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"source": "./a/b/absent"}, "no file ./a/b/absent"),
        ({"subset": ""}, "--subset"),
        ({"output": "link.jsonl"}, "--output outside of --input, found link.jsonl"),
        ({"output": "prompts.json"}, "to end in .jsonl.*prompts.json"),
        ({"output": "folder.jsonl"}, "to be a file, found folder.jsonl"),
        ({"output": "rows.jsonl/prompts.jsonl"}, "rows.jsonl/prompts.jsonl"),
        ({"output": "link.jsonl/new/prompts.jsonl"}, "link.jsonl/new/prompts.jsonl"),
    ],
)
def test_further_bad_options(folder, options, said):
    options = {"source": "rows.jsonl", "output": "prompts.jsonl", **options}
    with pytest.raises(DataError, match=said):
        convert(options.pop("source"), Path(options.pop("output")), **options)


# --- one step or nothing --------------------------------------------------------


@pytest.fixture
def halfway(tmp_path):
    """A conversion that wrote part of its output and waits for more rows; yields it and the output."""
    pipe, output = tmp_path / "rows.jsonl", tmp_path / "prompts.jsonl"
    output.write_text("from an earlier run\n")
    os.mkfifo(pipe)
    process = subprocess.Popen(
        _command("--input", pipe, "--output", output),
        **_process(tmp_path),
        # A test run in the background may have been started with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with open(pipe, "w") as feed:
        feed.write("".join(f"{json.dumps(_row(number))}\n" for number in range(100)))
        feed.flush()
        deadline = time.monotonic() + 15
        while not any(path.stat().st_size for path in tmp_path.glob(".prompts.jsonl.*")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        yield process, output
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    "number, status, said", [(signal.SIGINT, 130, "interrupted; nothing was written\n"), (signal.SIGTERM, 143, "")]
)
def test_interrupted_conversion_leaves_the_old_output_and_nothing_else(halfway, tmp_path, number, status, said):
    process, output = halfway
    process.send_signal(number)
    _, stderr = process.communicate(timeout=10)
    assert (process.returncode, stderr) == (status, said)
    assert output.read_text() == "from an earlier run\n"
    assert list(tmp_path.glob(".prompts*")) == []


def test_killed_conversion_leaves_the_old_output(halfway):
    process, output = halfway
    process.kill()
    process.communicate(timeout=10)
    assert output.read_text() == "from an earlier run\n"


def test_failed_conversion_leaves_the_old_output_and_nothing_else(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", *(_row(number) for number in range(100)), "oops")
    output = tmp_path / "prompts.jsonl"
    output.write_text("from an earlier run\n")
    with pytest.raises(DataError, match="line 101"):
        convert(str(rows), output)
    assert output.read_text() == "from an earlier run\n" and list(tmp_path.glob(".prompts*")) == []


def test_full_disk_is_one_sentence(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", *(_row(number) for number in range(100)))
    limited = f'ulimit -f 8; trap "" XFSZ; exec {" ".join(_command("--input", rows, "--output", "new/p.jsonl"))}'
    done = subprocess.run(["bash", "-c", limited], **_process(tmp_path), timeout=20)
    _refused(done, "expected to write --output new/p.jsonl", "File too large")
    assert not (tmp_path / "new").exists()


# --- datasets -------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path):
    """A folder that the datasets library loads as splits dev (100 rows) and test (2 rows), of the same columns."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - {split: dev, path: dev.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
    )
    _write(folder / "dev.jsonl", *(_row(number, reward=1.0, hints_text="h") for number in range(100)))
    _write(folder / "test.jsonl", _row(1, reward=None), _row(2, hints_text="h"))
    return folder


def test_dataset_streams_the_split_it_is_told(dataset, tmp_path):
    output = tmp_path / "prompts.jsonl"

    assert convert(str(dataset), output).written == {("verified", "test"): 2}
    assert _lines(output) == [
        convert_row(_row(1, hints_text=None), "verified", "test"),
        convert_row(_row(2, hints_text="h"), "verified", "test"),
    ]
    assert len(load_rows(output, limit=None)) == 2

    summary = convert(str(dataset), output, split="dev", subset="gym", limit=3)
    assert summary.written == {("gym", "dev"): 3} and summary.stripped == {"reward": 3}


def test_parquet_dataset(tmp_path):
    from datasets import Dataset

    (tmp_path / "dataset").mkdir()
    Dataset.from_list([_row(1, when=datetime(2024, 5, 1), tests=["a"])]).to_parquet(tmp_path / "dataset/test.parquet")
    convert(str(tmp_path / "dataset"), tmp_path / "prompts.jsonl")
    (line,) = _lines(tmp_path / "prompts.jsonl")
    assert (line["metadata"]["when"], line["metadata"]["tests"]) == ("2024-05-01T00:00:00", ["a"])


def test_bad_datasets_are_named(dataset, tmp_path):
    output = tmp_path / "prompts.jsonl"
    with pytest.raises(DataError, match=r"--split .*\(dev, test\), found 'train'"):
        convert(str(dataset), output, split="train")
    with pytest.raises(DataError, match="outside of --input"):
        convert(str(dataset), dataset / "prompts.jsonl")
    _write(dataset / "test.jsonl", _row(1), _row(2, problem_statement=None))
    with pytest.raises(DataError, match="dataset split test row 2: .*problem_statement"):
        convert(str(dataset), output)
    _write(dataset / "test.jsonl", _row(1), '{"oops')
    with pytest.raises(DataError, match=r"split test: expected to read on after 0 row\(s\)"):
        convert(str(dataset), output)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="expected to load the dataset .*empty"):
        convert(str(tmp_path / "empty"), output)
    assert not output.exists()


@pytest.fixture
def hub_without_datasets():
    class NotFound(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_):
            pass

    hub = HTTPServer(("127.0.0.1", 0), NotFound)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{hub.server_port}"
    hub.shutdown()
    hub.server_close()


def test_bad_datasets_on_the_command_line(dataset, tmp_path, hub_without_datasets):
    online = {"HF_ENDPOINT": hub_without_datasets, "HF_HUB_OFFLINE": "0"}
    offline_advice = "a local JSONL file as --input works offline"
    cases = [
        (["--input", "dataset", "--split", "train"], {}, ["--split", "dev, test", "'train'"]),
        ([], {}, ["princeton-nlp/SWE-bench_Verified", "Couldn't reach", offline_advice]),
        (["--input", "nobody/nothing"], online, ["nobody/nothing", "doesn't exist on the Hub", offline_advice]),
    ]
    # Side by side: each takes seconds to import datasets.
    with ThreadPoolExecutor() as pool:
        ended = pool.map(lambda case: _run(tmp_path, "--output", "new/p.jsonl", *case[0], **case[1]), cases)
        for done, (_, _, said) in zip(ended, cases, strict=True):
            _refused(done, *said)
    assert not (tmp_path / "new").exists()
