"""The pure parts of the benchmarks: payloads, statistics, tables, claims and their JSON. Nothing here takes the time."""

import json
import subprocess
import sys

import pytest

from tests.benchmarks.connector import claims
from tests.benchmarks.machine import EXAMPLE, REPOSITORY
from tests.benchmarks.payloads import ANSWER_BYTES, REQUEST_BYTES, graded_answer, task_row
from tests.benchmarks.report import Claim, Part, growth, medians, table

sys.path.insert(0, str(EXAMPLE))
from nemogym_contract import build_run_request, read_run_response


def test_payloads_have_their_size_and_are_what_the_connector_sends_and_reads():
    row = task_row(17)
    answer = graded_answer(row)
    outcome = read_run_response(200, answer, row)
    assert len(json.dumps(row)) == pytest.approx(REQUEST_BYTES, rel=0.05)
    assert len(answer) == pytest.approx(ANSWER_BYTES, rel=0.05)
    assert build_run_request(row, {})["instance_id"] == task_row(16)["instance_id"] != task_row(15)["instance_id"]
    assert (outcome.exit_status, outcome.reward) == ("Submitted", 1.0)
    assert outcome.agent_metrics["turns"] > 10 and not outcome.agent_metrics["tampered"]


def test_a_table_is_markdown_with_numbers_to_the_right():
    rows = [
        {"client": "connector", "cpu_ms": 0.71234, "sockets": 2001},
        {"client": "b", "cpu_ms": 123.4, "sockets": 7},
    ]
    assert table(rows).splitlines() == [
        "| client    | cpu_ms | sockets |",
        "| --------- | -----: | ------: |",
        "| connector |  0.712 |   2,001 |",
        "| b         |    123 |       7 |",
    ]


@pytest.mark.parametrize("rows", [[], [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"b": 1, "a": 1}]])
def test_a_table_without_rows_or_of_several_kinds_is_refused(rows):
    with pytest.raises(ValueError, match="expected"):
        table(rows)


def test_medians_are_taken_of_each_combination_in_its_order():
    rounds = [
        {"episodes": 500, "client": "b", "cpu_ms": 3.0},
        {"episodes": 500, "client": "a", "cpu_ms": 1.0},
        {"episodes": 500, "client": "b", "cpu_ms": 9.0},
        {"episodes": 500, "client": "b", "cpu_ms": 4.0},
    ]
    assert medians(rounds, by=("client", "episodes")) == [
        {"episodes": 500, "client": "b", "cpu_ms": 4.0},
        {"episodes": 500, "client": "a", "cpu_ms": 1.0},
    ]


def test_growth_is_a_share_of_the_first():
    assert growth([2.0, 2.2, 1.9]) == pytest.approx(0.1)
    assert growth([2.0, 1.8]) == growth([2.0]) == 0.0


@pytest.mark.parametrize("found, holds", [(0.99, True), (1.0, True), (1.01, False)])
def test_a_claim_holds_up_to_its_limit(found, holds):
    claim = Claim("cost of it", found, 1.0)
    assert claim.holds is holds and claim.as_json()["holds"] is holds
    assert str(claim).startswith("holds: cost of it" if holds else "DOES NOT HOLD: cost of it")


def test_a_part_is_json_and_says_what_holds():
    part = Part("data", "rows", [{"program": "a", "cpu_s": 1.5}], [Claim("cost of it", 0.5, 1.0)])
    assert json.loads(json.dumps(part.as_json())) == {
        "title": "rows",
        "rows": [{"program": "a", "cpu_s": 1.5}],
        "claims": [{"claim": "cost of it", "found": 0.5, "limit": 1.0, "holds": True}],
    }
    assert str(part).splitlines()[0] == "data: rows" and str(part).endswith("holds: cost of it: 0.5 (at most 1)")


def test_the_connector_is_held_to_its_figures_at_two_thousand_episodes():
    def row(client: str, cpu_ms: float, memory_mib: float, stall_s: float = 0.1, episodes: int = 2000) -> dict:
        figures = {"cpu_ms": cpu_ms, "memory_mib": memory_mib, "stall_s": stall_s}
        return {"client": client, "episodes": episodes, **figures}

    others = [
        row("bare_aiohttp", 1.0, 200),
        row("httpx_client_per_call", 3.0, 400),
        row("requests_in_threads", 2.3, 210),
    ]
    smaller = [row("connector", 99.0, 9999, episodes=500)]
    assert all(claim.holds for claim in claims([*smaller, row("connector", 1.1, 190), *others]))
    failing = claims([*smaller, row("connector", 1.6, 220, stall_s=0.6), *others])
    assert [claim.holds for claim in failing] == [False] * 6


@pytest.mark.parametrize(
    "options, said",
    [
        (["nonsense"], "expected parts of connector, growth, data, import, stack, found nonsense"),
        (["--rounds", "0"], "expected --rounds to be at least 1, found 0"),
        (["--output", "."], "expected --output to name a file that can be written"),
        (["--output", f"{__file__}/x.json"], "expected --output to name a file that can be written"),
    ],
)
def test_a_mistake_is_told_before_anything_is_installed_or_measured(options, said):
    command = [sys.executable, "-m", "tests.benchmarks", "--check-only", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_check_only_measures_nothing(tmp_path):
    output = tmp_path / "benchmarks.json"
    command = [sys.executable, "-m", "tests.benchmarks", "growth", "--check-only", "--output", str(output)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not output.exists()
