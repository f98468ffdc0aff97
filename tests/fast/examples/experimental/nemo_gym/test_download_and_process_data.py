"""Data conversion as its user runs it (a process, files, exit statuses), and in process."""

import fcntl
import gzip
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from data_report import LEFT_OUT, NothingLeftError
from download_and_process_data import convert, report_path
from nemogym_contract import build_run_request
from row_reader import DataError
from swebench_rows import normalised_task, prompt_row
from task_selection import Selection, known_flaky_ids

from . import EXAMPLE_DIR
from .conftest import ROW

SCRIPT = EXAMPLE_DIR / "download_and_process_data.py"
CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "data_rows.jsonl").read_text().splitlines()]


def _row(number: int = 1, **fields) -> dict:
    return {**ROW, "instance_id": f"psf__requests-{number}", **fields}


def _write(path, *rows, encoding: str = "utf-8"):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding=encoding)
    return path


def _prompt(instance: dict, subset: str = "verified", split: str = "test") -> dict:
    return prompt_row(normalised_task(instance, subset=subset, split=split))


def _ids(path) -> list[str]:
    return [line["metadata"]["instance_id"] for line in _lines(path)]


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
    return subprocess.run(_command(*options), **_process(tmp_path, **environment), timeout=300)


def _refused(done: subprocess.CompletedProcess, *said: str) -> None:
    """Exit status 2 and one sentence holding ``said``."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ") and done.stderr.count("error:") == 1
    assert all(part in error for part in said), error


# --- the cases of public bug reports --------------------------------------------


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case["case"] for case in CASES])
def test_case(number, tmp_path):
    case = CASES[number]
    # The second of two cases with one id is about the first.
    before = [other["row"] for other in CASES[:number] if other["row"]["instance_id"] == case["row"]["instance_id"]]
    rows = _write(tmp_path / "rows.jsonl", *(before or [_row(77)]), case["row"])

    report = convert(str(rows), tmp_path / "prompts.jsonl")

    kept = _lines(tmp_path / "prompts.jsonl")
    if case["expect"] == "excluded":
        assert {reason: tally.rows for reason, tally in report.left_out.items()} == {case["reason"]: 1}
        assert report.left_out[case["reason"]].example == case["row"]["instance_id"] and len(kept) == 1
    else:
        assert report.left_out == {} and len(kept) == 2
        _CHECK_OF_KEPT[case["expect"]](kept[1]["metadata"], case["row"], report)


def _check_as_it_was(metadata, row, report) -> None:
    assert metadata["FAIL_TO_PASS"] == ["tests/test_a.py::test_y"] and metadata["instance_id"] == row["instance_id"]


def _check_own_image(metadata, row, report) -> None:
    assert metadata["image_name"] == row["image_name"] == "registry.example/team/task:7"


def _check_lower_cased(metadata, row, report) -> None:
    assert metadata["instance_id"] == row["instance_id"].lower() != row["instance_id"]
    assert metadata["original_instance_id"] == row["instance_id"] == report.kept["id_lower_cased"].example


def _check_version(metadata, row, report) -> None:
    assert metadata["version"] == "3.0"


def _check_no_gold_patch(metadata, row, report) -> None:
    assert (report.kept["no_gold_patch"].rows, report.kept["no_gold_patch"].example) == (1, row["instance_id"])


def _check_connector_fields(metadata, row, report) -> None:
    request = build_run_request(metadata, None, policy_base_url="http://trainer/v1", policy_api_key="t")
    sent = json.dumps(request)
    assert "elsewhere.invalid" not in sent and '"other"' not in sent and "reward" not in request
    assert request["policy_api_key"] == "t" and request["responses_create_params"] == {"input": []}
    assert "metadata" not in request and report.removed["policy_api_key"] == 1


_CHECK_OF_KEPT = {
    "kept": _check_as_it_was,
    "kept: id lower-cased, original kept beside it": _check_lower_cased,
    "kept: as the string 3.0": _check_version,
    "kept for training, unusable for a golden scan: counted and said so": _check_no_gold_patch,
    "kept: they never reach the wire as the row gave them": _check_connector_fields,
    "kept: image_name unchanged": _check_own_image,
}


def test_cases_together_as_a_user_sees_them(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", *(case["row"] for case in CASES))

    done = _run(tmp_path, "--input", rows, "--output", "prompts.jsonl")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "left out 13 of 22 row(s):"
    (no_spec,) = [line for line in done.stdout.splitlines() if line.startswith("  no_eval_spec")]
    assert no_spec.split()[1] == "4" and no_spec.endswith("; e.g. getmoto__moto-5960")
    report = json.loads((tmp_path / "prompts.jsonl.report.json").read_text())
    assert {reason: entry["rows"] for reason, entry in report["left_out"].items()} == {
        **{"instance_id": 1, "problem_statement": 1, "no_eval_spec": 4, "test_patch": 1, "base_commit": 1},
        **{"fail_to_pass": 4, "duplicate": 1},
    }
    assert report["left_out"]["fail_to_pass"] == {
        "rows": 4,
        "example": "marshmallow-code__marshmallow-2003",
        "meaning": LEFT_OUT["fail_to_pass"],
    }
    assert (report["rows_read"], report["rows_written"]) == (22, 9) == (22, len(_ids(tmp_path / "prompts.jsonl")))
    assert report["unknown_repositories"] == {"getmoto/moto": 1} and report["grader"] == "swebench 4.1.0"
    assert report["kept_all_the_same"].keys() == {"no_gold_patch", "id_lower_cased"}


# --- what is left out -----------------------------------------------------------

SWE_GYM = (
    *("Project-MONAI/MONAI", "bokeh/bokeh", "conan-io/conan", "dask/dask", "facebookresearch/hydra", "getmoto/moto"),
    *("iterative/dvc", "modin-project/modin", "pandas-dev/pandas", "pydantic/pydantic", "python/mypy"),
)


def _swe_gym_row(repo: str) -> dict:
    instance_id = f"{repo.replace('/', '__')}-1"
    return _row(instance_id=instance_id, repo=repo, version="1.0", FAIL_TO_PASS=["t.py::test_a"], PASS_TO_PASS=[])


def test_swe_gym_cannot_be_graded_and_the_sentence_says_why(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", *map(_swe_gym_row, SWE_GYM))

    done = _run(tmp_path, "--input", rows, "--output", "new/prompts.jsonl")

    assert done.returncode == 1
    assert done.stdout.splitlines()[:1] == ["left out 11 of 11 row(s):"] and "no_eval_spec" in done.stdout
    (error,) = done.stderr.splitlines()
    assert error == (
        "error: no task is left of 11 row(s): swebench 4.1.0, with which the agent grades, knows none of their "
        f"repositories ({', '.join(SWE_GYM)}). It cannot grade SWE-Gym; it can grade SWE-bench, its Lite and its Verified"
    )
    assert not (tmp_path / "new").exists()


def test_nothing_left_leaves_the_old_output_and_names_the_commonest_reason(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1, base_commit=""), _row(2, version=None), _row(3, base_commit=None))
    (tmp_path / "prompts.jsonl").write_text("from an earlier run\n")
    with pytest.raises(NothingLeftError) as raised:
        convert(str(rows), tmp_path / "prompts.jsonl")
    assert str(raised.value) == (
        "no task is left of 3 row(s): there is no base commit that git can check out for 2 of them (base_commit, e.g. "
        "psf__requests-1)"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl", "rows.jsonl"]
    assert (tmp_path / "prompts.jsonl").read_text() == "from an earlier run\n"


def test_known_flaky_tasks_are_left_out_unless_asked_for(tmp_path):
    flaky = sorted(known_flaky_ids())
    rows = _write(tmp_path / "rows.jsonl", _row(1), *(_row(instance_id=instance_id) for instance_id in flaky))

    by_default = _run(tmp_path, "--input", rows, "--output", "a.jsonl")
    with_them = _run(tmp_path, "--input", rows, "--output", "b.jsonl", "--no-known-flaky")

    assert (by_default.returncode, with_them.returncode) == (0, 0)
    assert _ids(tmp_path / "a.jsonl") == ["psf__requests-1"]
    assert f"known_flaky     {len(flaky)} " in by_default.stdout and "--no-known-flaky" in by_default.stdout
    assert _ids(tmp_path / "b.jsonl") == ["psf__requests-1", *flaky]
    assert convert(str(rows), tmp_path / "c.jsonl").left_out["known_flaky"].rows == len(flaky)


def test_keep_ungradable_keeps_what_can_be_sent(tmp_path):
    ungradable = [_swe_gym_row("getmoto/moto"), _row(2, FAIL_TO_PASS="no list"), _row(3, version=Decimal("2.1"))]
    rows = _write(tmp_path / "rows.jsonl", *(json.dumps(row, default=float) for row in ungradable))
    with open(rows, "a") as file:
        for row in (_row(4, problem_statement=""), _row("../x"), _row(5, extra=float("nan")), _row(2)):
            file.write(json.dumps(row) + "\n")

    report = convert(str(rows), tmp_path / "prompts.jsonl", keep_ungradable=True)

    assert _ids(tmp_path / "prompts.jsonl") == ["getmoto__moto-1", "psf__requests-2", "psf__requests-3"]
    assert {reason: tally.rows for reason, tally in report.kept.items()} == {
        **{"no_eval_spec": 1, "fail_to_pass": 1, "version": 1},
    }
    assert report.left_out.keys() == {"problem_statement", "instance_id", "not_json", "duplicate"}


def test_only_and_exclude_take_a_scans_ids_and_tell_which_are_not_there(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", *(_row(number) for number in range(5)), _row(instance_id="PSF__requests-9"))
    (tmp_path / "supported.txt").write_text("psf__requests-1\nPsf__Requests-3\npsf__requests-9\npsf__requests-77\n")
    (tmp_path / "bad.txt").write_text("psf__requests-3\n")

    done = _run(
        *(tmp_path, "--input", rows, "--output", "prompts.jsonl"),
        *("--only", "supported.txt", "--exclude", "bad.txt"),
    )

    assert done.returncode == 0, done.stderr
    assert _ids(tmp_path / "prompts.jsonl") == ["psf__requests-1", "psf__requests-9"]
    assert "warning: 1 id(s) of --only are not in the input, e.g. psf__requests-77" in done.stdout.splitlines()
    report = json.loads((tmp_path / "prompts.jsonl.report.json").read_text())
    assert {reason: entry["rows"] for reason, entry in report["left_out"].items()} == {
        "not_in_only": 3,
        "in_exclude": 1,
    }
    assert report["ids_not_found"] == {"--only": {"ids": 1, "example": "psf__requests-77"}}


def test_what_the_user_does_not_want_is_not_looked_into(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1), _row(2, extra=float("nan")), _row(3, version=None))
    report = convert(str(rows), tmp_path / "prompts.jsonl", selection=Selection(only=frozenset({"psf__requests-1"})))
    assert report.left_out.keys() == {"not_in_only"}


def test_solve_rates_of_a_policy_scan_make_a_trainable_set(tmp_path):
    solved = {1: [0, 0, 0, 0], 2: [1, 0, 0, 0], 3: [1, 1, 1, 0], 4: [1, 1, 1, 1], 5: [None]}
    scan = [
        {
            "instance_id": f"psf__requests-{number}",
            "kind": "policy",
            "attempt": attempt,
            "reward": reward,
            "exit_status": "ServerUnreachable" if reward is None else "Submitted",
        }
        for number, rewards in solved.items()
        for attempt, reward in enumerate(rewards)
    ]
    _write(tmp_path / "policy.jsonl", *scan)
    rows = _write(tmp_path / "rows.jsonl", *(_row(number) for number in range(1, 7)))

    done = _run(
        *(tmp_path, "--input", rows, "--output", "train.jsonl"),
        *("--solve-rate", "0.05:0.95", "--from", "policy.jsonl"),
    )

    assert done.returncode == 0, done.stderr
    assert _ids(tmp_path / "train.jsonl") == ["psf__requests-2", "psf__requests-3"]
    report = json.loads((tmp_path / "train.jsonl.report.json").read_text())
    assert {reason: entry["rows"] for reason, entry in report["left_out"].items()} == {
        **{"not_scanned": 2, "solved_too_rarely": 1, "solved_too_often": 1},
    }


def test_names_that_are_no_names_are_not_shown(tmp_path):
    unshown = ("\x1b[2J", "", "x" * 300, None, ["a"])
    rows = _write(tmp_path / "rows.jsonl", *(_row(instance_id=name) for name in unshown))
    with open(rows, "a") as file:
        file.write(json.dumps(_row(1, repo="\x1b[2J")) + "\n")

    done = _run(tmp_path, "--input", rows, "--output", "prompts.jsonl")

    assert done.returncode == 1 and "\x1b" not in done.stdout + done.stderr
    assert f"e.g. {rows} line 1" in done.stdout and "e.g. psf__requests-1" in done.stdout


def test_limit_counts_the_tasks_that_are_kept(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1, version=None), _row(2), _row(2), _row(3), "not JSON")
    report = convert(str(rows), tmp_path / "prompts.jsonl", limit=2)
    assert _ids(tmp_path / "prompts.jsonl") == ["psf__requests-2", "psf__requests-3"]
    assert (report.read, report.written.total()) == (4, 2)


def test_first_of_two_rows_of_one_id_that_is_fit_is_the_one_kept(tmp_path):
    unfit, fit = _row(1, version=None), _row(instance_id="PSF__requests-1", hints_text="this one")
    rows = _write(tmp_path / "rows.jsonl", unfit, fit, _row(1))
    report = convert(str(rows), tmp_path / "prompts.jsonl")
    assert [line["metadata"].get("hints_text") for line in _lines(tmp_path / "prompts.jsonl")] == ["this one"]
    assert {reason: tally.rows for reason, tally in report.left_out.items()} == {"no_eval_spec": 1, "duplicate": 1}


# --- files ----------------------------------------------------------------------


def test_file_to_prompts(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1, reward=1.0), _row(2, reward=0, rm_type="x"), _row(3))
    output = tmp_path / "new" / "folder" / "prompts.jsonl"

    done = _run(tmp_path, "--input", rows, "--output", output)

    assert done.returncode == 0, done.stderr
    assert _lines(output) == [_prompt(_row(number)) for number in (1, 2, 3)]
    removed, summary, reported = done.stdout.splitlines()
    assert removed == "fields removed: reward in 2, rm_type in 1"
    assert summary.startswith(f"wrote 3 row(s) to {output} in ")
    assert summary.endswith("3 of subset verified, split test")
    assert reported == f"what was left out and why: {output}.report.json"
    assert done.stderr == ""
    assert sorted(path.name for path in output.parent.iterdir()) == ["prompts.jsonl", "prompts.jsonl.report.json"]
    assert {path.stat().st_mode & 0o777 for path in output.parent.iterdir()} == {0o644}


def test_output_is_what_the_connector_sends(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1, instance_id="Psf__Requests-1"), _row(2))
    convert(str(rows), tmp_path / "prompts.jsonl", subset="gym", split="train")

    request = build_run_request(_lines(tmp_path / "prompts.jsonl")[1]["metadata"], request_kwargs=None)
    assert request["image_name"] == "docker.io/xingyaoww/sweb.eval.x86_64.psf_s_requests-2:latest"
    assert (request["subset"], request["split"]) == ("gym", "train")


def test_same_input_gives_the_same_bytes_and_so_does_the_output_as_input(tmp_path):
    rows = _write(
        tmp_path / "rows.jsonl", _row(1, problem_statement="é\u2028\U0001f600", z=1, a=0.1), _row(2, subset="x")
    )
    outputs = [tmp_path / f"{number}.jsonl" for number in range(3)]
    convert(str(rows), outputs[0])
    convert(str(rows), outputs[1])
    convert(str(outputs[1]), outputs[2])
    assert outputs[0].read_bytes() == outputs[1].read_bytes() == outputs[2].read_bytes()
    assert report_path(outputs[0]).read_bytes() == report_path(outputs[1]).read_bytes()
    assert len(outputs[0].read_text(encoding="ascii").splitlines()) == 2


def test_rows_of_a_file_keep_their_own_subset_and_split_until_told_otherwise(tmp_path):
    miles_row = {"prompt": "another text", "metadata": _row(1, subset="gym", split="train")}
    rows = _write(tmp_path / "rows.jsonl", miles_row, _row(2))

    own = convert(str(rows), tmp_path / "own.jsonl")
    told = convert(str(rows), tmp_path / "told.jsonl", subset="multi", split="dev")

    assert own.written == {("gym", "train"): 1, ("verified", "test"): 1}
    assert _lines(tmp_path / "own.jsonl")[0] == _prompt(_row(1), "gym", "train")
    assert told.written == {("multi", "dev"): 2}


def test_limit_reads_no_further(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", _row(1), _row(2), "not JSON")
    convert(str(rows), tmp_path / "prompts.jsonl", limit=2)
    assert _ids(tmp_path / "prompts.jsonl") == ["psf__requests-1", "psf__requests-2"]


def test_every_form_of_file_gives_the_same_bytes(tmp_path):
    from datasets import Dataset

    rows = [_row(1, tests=["a"], z=None), _row(2, tests=["b"], z="é")]
    lines = _write(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(
        gzip.compress(b"\xef\xbb\xbf" + lines.read_bytes().replace(b"\n", b"\r\n"))
    )
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=2))
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    _write(tmp_path / "prompts.jsonl", *map(_prompt, rows))
    outputs = []
    for source in ("rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.parquet", "prompts.jsonl"):
        convert(str(tmp_path / source), tmp_path / "out" / f"{source}.jsonl")
        outputs.append((tmp_path / "out" / f"{source}.jsonl").read_bytes())
    assert outputs == [outputs[0]] * 5 and len(outputs[0].splitlines()) == 2


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


def test_progress_is_a_bar_on_a_terminal(tmp_path):
    rows = _write(tmp_path / "rows.jsonl", *(_row(number) for number in range(50)))
    terminal, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    options = {**_process(tmp_path), "stderr": its_end}
    done = subprocess.run(_command("--input", rows, "--output", "prompts.jsonl"), **options, timeout=60)
    os.close(its_end)
    shown = b""
    # Linux ends the reading of a terminal whose other end is closed with an error.
    with suppress(OSError), open(terminal, "rb", buffering=0) as file:
        while piece := file.read(1000):
            shown += piece
    assert done.returncode == 0 and b"50row" in shown and b"row/s" in shown


# --- refusals -------------------------------------------------------------------


def _deep(depth: int) -> str:
    return json.dumps({**ROW, "deep": 0})[:-2] + "[" * depth + "]" * depth + "}"


_BAD_ROWS_ON_THE_COMMAND_LINE = [
    ("", ["at least one row", "rows.jsonl"]),
    (f"{json.dumps(ROW)}\n\n{{oops\n", ["rows.jsonl line 3", "JSON object"]),
    (f"{json.dumps(ROW)}\n[1]\n", ["rows.jsonl line 2", "list"]),
    (json.dumps([ROW, "text"]), ["rows.jsonl element 2", "str"]),
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
        ("[]", "at least one row"),
        (b"\n\xff\n", "rows.jsonl line 2: expected a JSON object"),
        ('{"prompt": "p", "metadata": "x"}\n"text"\n', "line 2: .*str"),
        (_deep(200_000), "line 1: .*recursion"),
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
    (tmp_path / "other.jsonl.report.json").mkdir()
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
        (["--revision", "main"], ["--revision", "rows.jsonl"]),
        (["--only", "absent.txt"], ["--only", "absent.txt"]),
        (["--solve-rate", "0.05:0.95"], ["--from", "found --solve-rate alone"]),
        (["--from", "rows.jsonl"], ["--solve-rate", "found --from alone"]),
        (["--solve-rate", "5:95", "--from", "rows.jsonl"], ["--solve-rate", "0.05:0.95", "'5:95'"]),
        (["--solve-rate", "0:1", "--from", "rows.jsonl"], ["rows.jsonl", "no verdict on a policy"]),
        (["--solve-rate", "0:1", "--from", "prompts.jsonl"], ["--output", "--from", "prompts.jsonl for both"]),
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
        ({"output": "other.jsonl"}, "to be a file, found other.jsonl.report.json"),
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
        _prompt(_row(1, hints_text=None)),
        _prompt(_row(2, hints_text="h")),
    ]

    summary = convert(str(dataset), output, split="dev", subset="gym", limit=3)
    assert summary.written == {("gym", "dev"): 3} and summary.removed == {"reward": 3}


def test_parquet_dataset(tmp_path):
    from datasets import Dataset

    (tmp_path / "dataset").mkdir()
    row = _row(1, when=datetime(2024, 5, 1), tests=["a"], version=2.27)
    for number in range(2):
        shard = Dataset.from_list([{**row, "instance_id": f"psf__requests-{number}"}])
        shard.to_parquet(tmp_path / f"dataset/test-{number:05}-of-00002.parquet")
    report = convert(str(tmp_path / "dataset"), tmp_path / "prompts.jsonl")
    first, second = (line["metadata"] for line in _lines(tmp_path / "prompts.jsonl"))
    assert (first["when"], first["tests"], first["version"]) == ("2024-05-01T00:00:00", ["a"], "2.27")
    assert (first["instance_id"], second["instance_id"]) == ("psf__requests-0", "psf__requests-1")
    assert report.written == {("verified", "test"): 2}
    with pytest.raises(DataError, match=r"--split .*\(test\), found 'dev'"):
        convert(str(tmp_path / "dataset"), tmp_path / "other.jsonl", split="dev")


def test_bad_datasets_are_named(dataset, tmp_path):
    output = tmp_path / "prompts.jsonl"
    with pytest.raises(DataError, match=r"--split .*\(dev, test\), found 'train'"):
        convert(str(dataset), output, split="train")
    with pytest.raises(DataError, match="outside of --input"):
        convert(str(dataset), dataset / "prompts.jsonl")
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
    offline_advice = "a local file as --input works offline"
    cases = [
        (["--input", "dataset", "--split", "train"], {}, ["--split", "dev, test", "'train'"]),
        ([], {}, ["SWE-bench/SWE-bench_Verified", "Couldn't reach", offline_advice]),
        (["--input", "nobody/nothing"], online, ["nobody/nothing", "doesn't exist on the Hub", offline_advice]),
    ]
    # Side by side: each takes seconds to import datasets.
    with ThreadPoolExecutor() as pool:
        ended = pool.map(lambda case: _run(tmp_path, "--output", "new/p.jsonl", *case[0], **case[1]), cases)
        for done, (_, _, said) in zip(ended, cases, strict=True):
            _refused(done, *said)
    assert not (tmp_path / "new").exists()
