"""Which rows can be sent and graded, and the form in which they are sent; pure."""

import json
import subprocess
import sys
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal

import numpy
import pandas
import pytest
from nemogym_contract import NOT_FORWARDED, build_run_request
from swebench_rows import (
    REASONS,
    REMOVED_FIELDS,
    UNSENDABLE,
    NotJsonError,
    as_json,
    eval_script_bytes,
    grader,
    has_gold_patch,
    is_known_repository,
    normalised_task,
    prompt_row,
    ungradable_reason,
)

from . import EXAMPLE_DIR
from .conftest import ROW

TEST_PATCH = "diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-a\n+b\n"


def _task(**fields) -> dict:
    return normalised_task({**ROW, **fields}, subset="verified", split="test")


# --- form -----------------------------------------------------------------------


def test_task_is_the_whole_instance_with_test_lists():
    instance = {**ROW, "image_name": "registry.example/task:7", "extra": {"a": [1, None]}}
    assert normalised_task(instance, subset="verified", split="dev") == {
        **instance,
        "FAIL_TO_PASS": ["t.py::test_a", "t.py::test_b"],
        "PASS_TO_PASS": ["t.py::test_c"],
        "subset": "verified",
        "split": "dev",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"instance_id": "Psf__Requests-1"},
        {"version": 2.27, "created_at": datetime(2024, 5, 1)},
        {"FAIL_TO_PASS": "['t.py::a']", "PASS_TO_PASS": None},
        {"FAIL_TO_PASS": "no list", "version": Decimal("3.10"), "repo": "marshmallow-code/marshmallow"},
        {"image_name": "registry.example/task:7", "reward": 1.0, "subset": "gym"},
    ],
)
def test_normalised_again_it_stays_as_it_is(fields):
    once = prompt_row(_task(**fields))
    again = prompt_row(normalised_task(once["metadata"], subset="verified", split="test"))
    assert json.dumps(again) == json.dumps(once)


def test_what_looks_like_a_verdict_or_is_written_by_others_is_removed():
    brought = {
        **{"reward": 1.0, "exit_status": "Submitted", "eval_report": {}, "agent_metrics": {}, "raw_reward": 1.0},
        **{"rm_type": "math", "round_number": 3, "messages": [], "lifecycle": {}, "tito_session_mismatch": "x"},
        **{"policy_base_url": "http://elsewhere.invalid/v1", "policy_api_key": "k", "_ng_rollout_id": "other"},
        **{"responses_create_params": {"input": []}, "max_seq_len": 5, "session_server_id": "s", "metadata": {"a": 1}},
        "session_server_instance_id": "i",
    }
    assert brought.keys() == REMOVED_FIELDS >= NOT_FORWARDED
    assert _task(**brought) == _task()


def test_upper_case_id_is_lowered_and_kept_beside_it():
    task = _task(instance_id="Psf__Requests-1")
    assert (task["instance_id"], task["original_instance_id"]) == ("psf__requests-1", "Psf__Requests-1")
    assert "original_instance_id" not in _task()


@pytest.mark.parametrize(
    "value, expected",
    [
        ('["a", "b"]', ["a", "b"]),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        (numpy.array(["a", "b"], dtype=object), ["a", "b"]),
        ("['a', \"b's\"]", ["a", "b's"]),
        ("('a', 'b')", ["a", "b"]),
        ("[]", []),
        ("a", "a"),
        ('{"a": 1}', '{"a": 1}'),
        (3, 3),
    ],
)
def test_test_lists(value, expected):
    task = _task(FAIL_TO_PASS=value, PASS_TO_PASS=value)
    assert task["FAIL_TO_PASS"] == task["PASS_TO_PASS"] == expected


def test_missing_test_lists():
    task = _task(FAIL_TO_PASS=None, PASS_TO_PASS=None)
    assert (task["FAIL_TO_PASS"], task["PASS_TO_PASS"]) == (None, [])
    without = {key: value for key, value in ROW.items() if key not in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    assert not {"FAIL_TO_PASS", "PASS_TO_PASS"} & normalised_task(without, subset="a", split="b").keys()


MARSHMALLOW, PYLINT, DRUID = "marshmallow-code/marshmallow", "pylint-dev/pylint", "apache/druid"


@pytest.mark.parametrize(
    "repo, version, expected",
    [
        (MARSHMALLOW, "3.10", "3.10"),
        (MARSHMALLOW, 3.0, "3.0"),
        (MARSHMALLOW, 3, "3.0"),
        (MARSHMALLOW, numpy.float64(3.0), "3.0"),
        (MARSHMALLOW, Decimal("3.0"), "3.0"),
        (MARSHMALLOW, 3.11, "3.11"),
        (MARSHMALLOW, Decimal("3.2"), "3.2"),
        (DRUID, 13704, "13704"),
        (DRUID, 13704.0, "13704"),
        # 3.1 may have been 3.10, and a column of decimals writes 3.1 as 3.10.
        (MARSHMALLOW, 3.1, 3.1),
        (MARSHMALLOW, Decimal("3.1"), 3.1),
        (MARSHMALLOW, Decimal("3.10"), 3.1),
        # The grader knows 2.10; this may have been pylint 2.1.
        (PYLINT, 2.1, 2.1),
        (MARSHMALLOW, 99.9, 99.9),
        (MARSHMALLOW, True, True),
        ("getmoto/moto", 4.1, 4.1),
        (None, 4.1, 4.1),
        (["a"], 4.1, 4.1),
        (MARSHMALLOW, [3.0], [3.0]),
    ],
)
def test_version_that_is_a_number(repo, version, expected):
    found = _task(repo=repo, version=version)["version"]
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    "repo, version, reason",
    [
        (MARSHMALLOW, 3.1, "version"),
        (MARSHMALLOW, Decimal("3.10"), "version"),
        (PYLINT, 2.1, "version"),
        (PYLINT, 99.9, "no_eval_spec"),
        (PYLINT, True, "no_eval_spec"),
        (PYLINT, None, "no_eval_spec"),
        (PYLINT, ["2.10"], "no_eval_spec"),
        (["pylint"], "2.10", "no_eval_spec"),
        (None, 2.1, "no_eval_spec"),
        ("swe-bench/humaneval", "1.0", "no_eval_spec"),
        ("dbt-labs/dbt-core", "1.7", "no_eval_spec"),
    ],
)
def test_version_that_cannot_be_told_or_graded(repo, version, reason):
    assert ungradable_reason(_task(repo=repo, version=version)) == reason


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
        (pandas.Timestamp("2024-05-01"), "2024-05-01T00:00:00"),
        (("a", 1, None, True), ["a", 1, None, True]),
        ({"when": date(2024, 5, 1)}, {"when": "2024-05-01"}),
        ("\U0001f600\u2028", "\U0001f600\u2028"),
    ],
)
def test_values_that_are_not_json_become_json(value, expected):
    converted = as_json(value, name="field")
    assert converted == expected and type(converted) is type(json.loads(json.dumps(converted)))


def _nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("-inf"), Decimal("nan"), numpy.float64("nan"), numpy.array([1.0, numpy.nan])),
        *(pandas.NaT, {1: 2}, b"x", object(), "half of a pair: \ud800", {"\udc00": 1}, _nested(100_000)),
    ],
)
def test_values_without_a_json_form_are_refused(value):
    with pytest.raises(NotJsonError, match="expected field to be JSON, found"):
        as_json(value, name="field")


def test_prompt_row_names_the_image_that_the_contract_sends():
    for fields in ({}, {"subset": "gym"}, {"image_name": "registry.example/task:7"}, {"image_name": ""}):
        task = normalised_task({**ROW, **fields}, subset=fields.get("subset", "verified"), split="test")
        row = prompt_row(task)
        sent = build_run_request(task, request_kwargs=None)["image_name"]
        assert row == {"prompt": "It fails.", "metadata": {**task, "image_name": sent}}
    assert prompt_row(_task())["metadata"]["image_name"].startswith("docker.io/swebench/sweb.eval.x86_64.psf_1776_")


# --- fitness --------------------------------------------------------------------


def test_a_task_that_can_be_graded():
    assert ungradable_reason(_task()) is None and has_gold_patch(_task())
    assert UNSENDABLE < REASONS.keys()


@pytest.mark.parametrize(
    "reason, fields",
    [
        ("instance_id", {"instance_id": None}),
        ("instance_id", {"instance_id": 7}),
        ("instance_id", {"instance_id": "../../outside"}),
        ("instance_id", {"instance_id": "a/b"}),
        ("instance_id", {"instance_id": "x" * 198}),
        ("subset", {"subset": "../up"}),
        ("subset", {"subset": 3}),
        ("not_json", {"extra": float("nan")}),
        ("not_json", {"image_name": "--all-tags"}),
        ("problem_statement", {"problem_statement": None}),
        ("problem_statement", {"problem_statement": " \n"}),
        ("problem_statement", {"problem_statement": ["text"]}),
        ("no_eval_spec", {"repo": "getmoto/moto"}),
        ("no_eval_spec", {"version": "99.9"}),
        ("no_eval_spec", {"version": None}),
        ("version", {"version": 2.27}),
        ("test_patch", {"test_patch": None}),
        ("test_patch", {"test_patch": ""}),
        ("test_patch", {"test_patch": "--- a/t.py\n+++ b/t.py\n"}),
        ("test_patch", {"test_patch": TEST_PATCH + "\0"}),
        ("not_json", {"test_patch": TEST_PATCH + "\ud800"}),
        ("base_commit", {"base_commit": None}),
        ("base_commit", {"base_commit": ""}),
        ("base_commit", {"base_commit": "HEAD; rm -rf /"}),
        ("base_commit", {"base_commit": "--help"}),
        ("fail_to_pass", {"FAIL_TO_PASS": None}),
        ("fail_to_pass", {"FAIL_TO_PASS": []}),
        ("fail_to_pass", {"FAIL_TO_PASS": "[]"}),
        ("fail_to_pass", {"FAIL_TO_PASS": "['t.py::test_a']"}),
        ("fail_to_pass", {"FAIL_TO_PASS": [None]}),
        ("fail_to_pass", {"FAIL_TO_PASS": "[3]"}),
        ("fail_to_pass", {"FAIL_TO_PASS": ["a", " "]}),
        ("fail_to_pass", {"FAIL_TO_PASS": {"a": 1}}),
        ("pass_to_pass", {"PASS_TO_PASS": None}),
        ("pass_to_pass", {"PASS_TO_PASS": "t.py::test_c"}),
        ("pass_to_pass", {"PASS_TO_PASS": ["a", 3]}),
        ("eval_script", {"test_patch": TEST_PATCH + "x" * 131_071}),
    ],
)
def test_a_row_is_judged_as_it_would_be_sent(reason, fields):
    assert ungradable_reason({**ROW, **fields}) == reason


def test_a_row_without_pass_to_pass_can_be_graded():
    assert ungradable_reason({key: value for key, value in ROW.items() if key != "PASS_TO_PASS"}) is None


def test_longest_id_and_longest_script_are_exact():
    assert ungradable_reason({**ROW, "instance_id": "x" * 197}) is None
    room = 131_071 - 512 - eval_script_bytes({**ROW, "test_patch": TEST_PATCH})
    fits = {**ROW, "test_patch": TEST_PATCH + "é" * (room // 2) + "x" * (room % 2)}
    assert ungradable_reason(fits) is None
    assert ungradable_reason({**fits, "test_patch": fits["test_patch"] + "x"}) == "eval_script"


def test_script_is_bounded_by_what_its_parts_need():
    # make_eval_script_list_py of swebench 4.1.0: reset, apply, run, reset.
    files = [f"tests/some_folder/test_{number}.py" for number in range(40)]
    patch = "".join(
        f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n@@ -1 +1 @@\n-a\n+b\n" for file in files
    )
    commit = "c" * 40
    parts = [f"git checkout {commit} {' '.join(files)}\n"] * 2 + [patch, f"pytest -rA {' '.join(files)}\n"]
    parts.append(f"git -c core.fileMode=false diff {commit}\n")
    assert eval_script_bytes({"test_patch": patch, "base_commit": commit}) > sum(map(len, parts))


@pytest.mark.parametrize("patch", [None, "", " \n", 3, "a\0b", "x" * 131_000])
def test_patches_that_a_golden_scan_cannot_apply(patch):
    task = {**ROW, "patch": patch}
    assert not has_gold_patch(task) and ungradable_reason(task) is None


def test_what_the_grader_knows():
    assert grader() == "swebench 4.1.0"
    known = json.loads((EXAMPLE_DIR / "data" / "eval_specs.json").read_text())["versions"]
    assert len(known) == 64 and sum(map(len, known.values())) == 671
    assert is_known_repository("astropy/astropy") and "v5.3" in known["astropy/astropy"]
    assert not any(map(is_known_repository, ("getmoto/moto", "Psf/Requests", None, ["psf/requests"])))


def test_needs_the_standard_library_only():
    blocked = "import sys; sys.modules.update(dict.fromkeys(('numpy', 'pandas', 'datasets', 'pyarrow', 'typer')));"
    code = f"{blocked} import swebench_rows; print(swebench_rows.ungradable_reason({{'instance_id': '..'}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(EXAMPLE_DIR)}
    )
    assert (done.stdout, done.stderr) == ("instance_id\n", "")
