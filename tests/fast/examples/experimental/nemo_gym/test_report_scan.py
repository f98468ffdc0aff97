"""Results files as the report reads them: whole, cut off, empty, of something else; and text made fit to be shown."""

import json

import pytest
from report_scan import check_same_tasks, error_lines, failing_tests, read_scan
from report_text import counted, last_lines, listed, one_line, percent, printable
from row_reader import DataError

from .made_scans import record, report_of, write_lines

POLICY = {"kind": "policy", "policy": "m", "sampling": {"temperature": 1.0}}


@pytest.fixture
def scan_of(tmp_path):
    def _scan_of(*records, name="scan.jsonl"):
        return read_scan(write_lines(tmp_path / name, list(records)))

    return _scan_of


def test_reads_what_a_scan_writes(scan_of):
    scan = scan_of(
        record("a__b-1", attempt=1),
        record("a__b-1", attempt=2, reward=0.0),
        record("a__b-1", kind="null", reward=0.0),
        record("a__b-2", kind="null", reward=0.0),
        record("a__b-2"),
    )
    assert scan.golden and scan.passes == 2 and not scan.cut_off
    assert scan.classes == {"a__b-1": "flaky", "a__b-2": "unfinished"}
    assert scan.missing == 1


def test_reads_rates_of_a_policy(scan_of):
    verdictless = {"reward": None, "exit_status": "PolicyEndpointError"}
    scan = scan_of(
        *(record(attempt=attempt, reward=float(attempt == 1), **POLICY) for attempt in (1, 2, 3)),
        record(attempt=4, **POLICY, **verdictless),
    )
    assert not scan.golden and (scan.policy, scan.temperature, scan.passes) == ("m", 1.0, 4)
    assert (scan.rates["a__b-1"].solved, scan.rates["a__b-1"].verdicts) == (1, 3)


def test_a_later_line_of_an_episode_takes_the_place_of_the_earlier(scan_of):
    first = record(reward=None, exit_status="SandboxUnavailable")
    scan = scan_of(first, record(), record(kind="null", reward=0.0))
    assert len(scan.episodes) == 2 and scan.classes == {"a__b-1": "supported"}


@pytest.mark.parametrize("left", [1, 20, 300])
def test_a_last_line_that_is_being_written_is_left_out_and_stays(tmp_path, left):
    path = write_lines(tmp_path / "scan.jsonl", [record("a__b-1"), record("a__b-2")])
    whole = path.read_bytes()
    cut = whole[: whole.index(b"\n") + 1 + left]
    path.write_bytes(cut)
    scan = read_scan(path)
    assert list(scan.tasks) == ["a__b-1"] and scan.cut_off
    assert path.read_bytes() == cut


def test_a_line_broken_in_the_middle_is_no_last_line(tmp_path):
    path = tmp_path / "scan.jsonl"
    path.write_text('{"instance_id": "a__b-1", "re\n' + json.dumps(record()) + "\n")
    with pytest.raises(DataError, match="scan.jsonl line 1: expected a JSON object, found"):
        read_scan(path)


@pytest.mark.parametrize("content", ["", "\n\n", '{"instance_id": "a'])
def test_nothing_to_report_is_said(tmp_path, content):
    path = tmp_path / "scan.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"expected at least one ended episode in .*scan.jsonl, found none; wait"):
        read_scan(path)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(DataError, match="expected to read .*no.jsonl, found: No such file"):
        read_scan(tmp_path / "no.jsonl")


@pytest.mark.parametrize(
    "value, said",
    [
        ([1], "expected a JSON object, found list"),
        ({"instance_id": "a"}, "expected an episode, found one without 'repo'"),
        ({**record(), "exit_status": "Nonsense"}, "that ended as 'Nonsense'"),
        ({**record(), "reward": None}, "found Submitted with reward None"),
        ({**record(), "seconds": float("nan")}, "expected finite numbers, found nan seconds"),
        ({**record(), "reward": float("inf")}, "expected finite numbers, found 2.0 seconds, reward inf"),
        ({**record(), "seconds": 10**400}, "expected finite numbers, found 1000"),
        ({**record(), "reward": 10**400}, "expected finite numbers, found 2.0 seconds, reward 1000"),
        ({**record(), "attempt": 0}, "expected 'attempt' of an episode to be at least 1, found 0"),
    ],
)
def test_lines_of_something_else_are_named(tmp_path, value, said):
    path = tmp_path / "scan.jsonl"
    path.write_text(json.dumps(value) + "\n")
    with pytest.raises(DataError) as error:
        read_scan(path)
    assert f"{path} line 1: " in str(error.value) and said in str(error.value)
    assert "name results of eval_nemogym_via_api.py" in str(error.value)


def test_numbers_too_large_to_count_with_are_left_out(scan_of):
    scan = scan_of(record(**{**POLICY, "sampling": {"temperature": 10**400}}, agent_metrics={"turns": 10**400}))
    assert scan.temperature == 0.0 and scan.episodes[0].agent_metrics == {}


@pytest.mark.parametrize(
    "other, said",
    [
        (record("a__b-2", **POLICY), "a golden or a policy scan"),
        (record("a__b-1", attempt=2, task="f" * 16), "one row of a__b-1"),
    ],
)
def test_two_scans_in_one_file_are_refused(scan_of, other, said):
    with pytest.raises(DataError, match=f"to hold {said}, found two kinds of results"):
        scan_of(record(), other)


def test_two_policies_in_one_file_are_refused(scan_of):
    for change in ({"policy": "n"}, {"sampling": {}}):
        with pytest.raises(DataError, match="to hold one policy"):
            scan_of(record(**POLICY), record(attempt=2, **{**POLICY, **change}))


def test_scans_of_other_rows_are_not_put_together(scan_of):
    golden = scan_of(record("a__b-1"), record("a__b-2"), name="golden.jsonl")
    check_same_tasks([golden, scan_of(record("a__b-2", **POLICY), name="policy.jsonl")])
    with pytest.raises(
        DataError, match="found two of a__b-2: 0000000000000000 in golden.jsonl, 1{16} in policy.jsonl"
    ):
        check_same_tasks([golden, scan_of(record("a__b-2", task="1" * 16, **POLICY), name="policy.jsonl")])
    with pytest.raises(DataError, match="found none of policy.jsonl's 1 in golden.jsonl; make a report of each"):
        check_same_tasks([golden, scan_of(record("c__d-1", **POLICY), name="policy.jsonl")])


def test_metrics_and_settings_of_any_kind_are_tolerated(scan_of):
    odd = {"sampling": {"temperature": "hot"}, "agent_metrics": {"turns": float("nan"), "tool_calls": "3", "other": 2}}
    scan = scan_of(record(**{**POLICY, **odd}))
    assert scan.temperature == 0.0 and scan.episodes[0].agent_metrics == {"other": 2}


# --- what went wrong --------------------------------------------------------------


def test_of_what_went_wrong_the_failing_tests_are_kept(scan_of):
    failing = [f"t.py::test_{number}" for number in range(13)]
    scan = scan_of(
        record(reward=0.0, eval_report=report_of("a__b-1", failing=failing)),
        record(kind="null", reward=0.0, eval_report=report_of("a__b-1", failing=failing)),
    )
    gold, null = scan.ended
    assert gold.failing == tuple(failing[:10]) and gold.more_failing == 3
    assert null.failing == (), "an empty patch is to fail"


def test_of_an_error_the_last_lines_are_kept(scan_of):
    trace = "\n".join(f"line {number}" for number in range(50)) + "\n\n"
    [one] = scan_of(
        record(reward=None, exit_status="ServerError", eval_report={"traceback": trace, "error": "e"})
    ).ended
    assert one.lines == tuple(f"line {number}" for number in range(42, 50))
    assert error_lines({"traceback": None, "error": "only this"}) == ["only this"]


@pytest.mark.parametrize(
    "report",
    [
        None,
        [],
        {"eval_report": 1},
        {"eval_report": {"a": None, "b": {"tests_status": [1]}}},
        {"eval_report": {"a": {"tests_status": {"FAIL_TO_PASS": {"failure": "t"}, "x": 1}}}},
        {"traceback": 5, "error": {"a": 1}},
    ],
)
def test_reports_of_any_shape_are_read(report):
    assert failing_tests(report) == [] and error_lines(report) == []


# --- text -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain ünïcödé ✓ 漢字", "plain ünïcödé ✓ 漢字"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("a\u202egnp.exe", r"a\u202egnp.exe"),
        ("\u2066x\u2069\u200f\u061c\ufeff\u200b", r"\u2066x\u2069\u200f\u061c\ufeff\u200b"),
        ("back\x08\rspace\x7f\x9b", r"back\x08\rspace\x7f\x9b"),
        ("line\u2028end\ud800", r"line\u2028end\ud800"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ({"a": 1}, "{'a': 1}"),
    ],
)
def test_what_shows_nothing_or_moves_text_is_written_as_its_escape(text, shown):
    assert printable(text) == shown


def test_long_text_is_cut():
    assert printable("x" * 500, limit=10) == "x" * 9 + "…"
    assert one_line(" a\n\n b\r\n\tc \x1b ") == r"a b c \x1b"
    assert last_lines("a\n\n  b \n" + "c" * 300, count=2, width=5) == ["  b", "cccc…"]


def test_numbers_in_words():
    assert [counted(1, "task"), counted(1200, "task"), counted(2, "pass", "passes")] == [
        "1 task",
        "1,200 tasks",
        "2 passes",
    ]
    assert [listed(["a"]), listed(["a", "b"]), listed("abc")] == ["a", "a and b", "a, b and c"]
    assert [percent(*of) for of in ((0, 0), (0, 5), (1, 500), (1, 3), (499, 500), (5, 5))] == [
        *("0 %", "0 %", "under 1 %", "33 %", "over 99 %", "100 %")
    ]
