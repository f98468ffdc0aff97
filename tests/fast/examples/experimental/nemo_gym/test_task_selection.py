"""Tasks kept and left out by their ids."""

import json
import re

import pytest
from row_reader import DataError
from task_selection import Band, Selection, known_flaky_ids, parse_band, read_ids, read_solve_rates

from . import EXAMPLE_DIR

KNOWN_FLAKY = json.loads((EXAMPLE_DIR / "data" / "known_flaky.json").read_text())


def _episode(instance_id: str, reward: float | None, **fields) -> dict:
    status = "Submitted" if reward is not None else "ServerError"
    return {"instance_id": instance_id, "kind": "policy", "reward": reward, "exit_status": status, **fields}


def _scan(path, *episodes):
    path.write_text("".join(f"{json.dumps(episode)}\n" for episode in episodes))
    return path


# --- ids ------------------------------------------------------------------------


def test_ids_of_a_file(tmp_path):
    path = tmp_path / "ids.txt"
    path.write_bytes(b"\xef\xbb\xbf# supported\r\nPsf__Requests-1\r\n\r\n  sympy__sympy-2  \nsympy__sympy-2")
    assert read_ids(path, option="--only") == {"psf__requests-1", "sympy__sympy-2"}


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "at least one id in --only .*ids.txt"),
        (b"# only this\n", "at least one id"),
        (b'{"instance_id": "a"}\n', "one id a line in --only"),
        (b"a b\n", "one id a line"),
        (b"../../a\n", "one id a line"),
        (b"\xff\n", "expected ids in --only .*utf-8"),
    ],
)
def test_files_that_hold_no_ids(tmp_path, content, said):
    (tmp_path / "ids.txt").write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_ids(tmp_path / "ids.txt", option="--only")


def test_file_of_ids_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="--exclude .*absent.txt, found: No such file"):
        read_ids(tmp_path / "absent.txt", option="--exclude")


def test_reasons_in_their_order():
    selection = Selection(
        only=frozenset({"a", "b", "c", "d", "e", "f"}),
        exclude=frozenset({"b", "z"}),
        flaky=frozenset({"c"}),
        solve_rates={"a": 0.5, "c": 0.5, "e": 0.0, "f": 1.0, "z": 0.5},
        band=Band(0.05, 0.95),
    )
    assert [selection.unasked_reason(name) for name in ("a", "b", "z", None)] == [
        *(None, "in_exclude", "not_in_only", "not_in_only"),
    ]
    assert [selection.unfit_reason(name) for name in "acdef"] == [
        *(None, "known_flaky", "not_scanned", "solved_too_rarely", "solved_too_often"),
    ]
    assert Selection().unasked_reason(None) is None and Selection().unfit_reason("a") is None


# --- known to flake -------------------------------------------------------------


def test_each_known_flaky_task_has_two_public_sources():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", KNOWN_FLAKY["as_of"])
    for source in KNOWN_FLAKY["sources"].values():
        assert source["url"].startswith("https://github.com/") and re.fullmatch(r"\d{4}-\d\d-\d\d", source["date"])
        assert source["date"] <= KNOWN_FLAKY["as_of"] and source["found"]
    for instance_id, sources in KNOWN_FLAKY["tasks"].items():
        assert re.fullmatch(r"[a-z-]+__[a-z-]+-\d+", instance_id)
        assert len(set(sources)) >= 2 and set(sources) <= KNOWN_FLAKY["sources"].keys(), instance_id
    assert known_flaky_ids() == KNOWN_FLAKY["tasks"].keys() and len(known_flaky_ids()) == 14


# --- solve rates ----------------------------------------------------------------


def test_solve_rate_is_the_share_of_verdicts(tmp_path):
    scan = _scan(
        tmp_path / "policy.jsonl",
        _episode("A", 1.0, attempt=1),
        _episode("a", 0.0, attempt=2),
        _episode("a", None, attempt=3),
        _episode("a", 1.0, attempt=4),
        _episode("b", 0.5, attempt=1),
        _episode("c", None, attempt=1),
        # Run again: the later line counts.
        _episode("d", None, attempt=1),
        _episode("d", 1.0, attempt=1),
        # What is no verdict of this project's, whatever its reward.
        _episode("e", 1.0, exit_status="ServerError"),
        {"instance_id": "g", "kind": "gold", "reward": 1.0, "exit_status": "Submitted"},
    )
    assert read_solve_rates(scan) == {"a": pytest.approx(2 / 3), "b": 0.0, "d": 1.0}


def test_episodes_without_an_attempt_count_each(tmp_path):
    scan = _scan(tmp_path / "policy.jsonl", *(_episode("a", reward) for reward in (1.0, 0.0, 0.0, 0.0)))
    assert read_solve_rates(scan) == {"a": 0.25}


def test_scan_that_was_killed_in_a_line(tmp_path):
    scan = _scan(tmp_path / "policy.jsonl", _episode("a", 1.0))
    scan.write_text(scan.read_text() + '{"instance_id": "a", "kind": "pol')
    assert read_solve_rates(scan) == {"a": 1.0}


@pytest.mark.parametrize(
    "lines, said",
    [
        ("", "no verdict on a policy"),
        (json.dumps({"instance_id": "a", "kind": "gold", "reward": 1.0}), "no verdict on a policy"),
        (json.dumps(_episode("a", None)), "no verdict on a policy"),
        ("[1]", "line 1: expected an episode of a policy scan"),
        (json.dumps({"prompt": "p", "metadata": {}}), "line 1: expected an episode"),
        ("oops\n{}", "line 1: expected a JSON object"),
    ],
)
def test_files_that_are_no_policy_scan(tmp_path, lines, said):
    (tmp_path / "scan.jsonl").write_text(lines + "\n")
    with pytest.raises(DataError, match=said):
        read_solve_rates(tmp_path / "scan.jsonl")


def test_bands():
    assert parse_band("0.05:0.95") == Band(0.05, 0.95)
    assert parse_band(" 0:1 ") == Band(0.0, 1.0)
    assert parse_band(".5:0.5") == Band(0.5, 0.5)
    # Both ends belong to it.
    selection = Selection(solve_rates={"low": 0.25, "high": 0.75}, band=parse_band("0.25:0.75"))
    assert selection.unfit_reason("low") is selection.unfit_reason("high") is None


@pytest.mark.parametrize(
    "text", ["", "0.5", "0.9:0.1", "0:1.1", "-0.1:0.5", "nan:1", "a:b", "0..1:1", "0:1:1", "5%:95%"]
)
def test_what_is_no_band(text):
    with pytest.raises(DataError, match="--solve-rate to be two shares in order, such as 0.05:0.95, found"):
        parse_band(text)
