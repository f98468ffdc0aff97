"""The count of how episodes ended, and its alarm."""

import logging

import pytest
from nemogym_contract import Outcome
from nemogym_metrics import Tally

GRADED = Outcome("Submitted", 1.0)
DOWN = Outcome("SandboxUnavailable", detail="docker is down")


def _errors(caplog) -> list[str]:
    return [r.message for r in caplog.records if r.levelno == logging.ERROR and r.name == "nemogym_metrics"]


def test_a_tally_starts_anew_when_it_is_taken():
    tally = Tally()
    assert tally.take() == {}
    for outcome in (GRADED, DOWN, DOWN, Outcome("Aborted")):
        tally.add(outcome)
    assert tally.take() == {
        "episodes": 4.0,
        "exit_status/Submitted": 1.0,
        "exit_status/SandboxUnavailable": 2.0,
        "exit_status/Aborted": 1.0,
        "no_verdict_share": pytest.approx(2 / 3),
    }
    assert tally.take() == {}


def test_aborted_episodes_alone_have_no_share():
    tally = Tally()
    tally.add(Outcome("Aborted"))
    assert tally.take() == {"episodes": 1.0, "exit_status/Aborted": 1.0}


def test_half_without_a_verdict_is_said_with_the_commonest_reason_once_a_window(caplog):
    tally = Tally()
    for outcome in [GRADED] * 40 + [DOWN] * 20:
        tally.add(outcome)
    assert _errors(caplog) == [], "20 of 60"

    for outcome in [Outcome("ServerError", detail="500")] * 10 + [DOWN] * 40:
        tally.add(outcome)
    (message,) = _errors(caplog)
    assert message.startswith("32 of the last 64") and "commonest SandboxUnavailable" in message
    assert "docker is down" in message

    for _ in range(64):
        tally.add(DOWN)
    assert len(_errors(caplog)) == 2


def test_a_few_failures_at_the_start_are_no_alarm(caplog):
    tally = Tally()
    for _ in range(15):
        tally.add(DOWN)
    assert _errors(caplog) == []
    tally.add(DOWN)
    assert len(_errors(caplog)) == 1


def test_an_abort_is_no_failure(caplog):
    tally = Tally()
    for _ in range(200):
        tally.add(Outcome("Aborted"))
    assert _errors(caplog) == []
