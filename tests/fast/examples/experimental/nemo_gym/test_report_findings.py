"""What to do with each task, the verdict, the figures, two scans compared."""

from collections import Counter

import pytest
from report_findings import (
    DECISIONS,
    compare,
    figures,
    graded,
    judge,
    notes,
    outcomes,
    repositories,
    sign_test,
    status_counts,
    verdict,
)
from report_scan import Ended, Scan, _read_ended
from scan_statistics import CLASSES, SolveRate
from task_selection import Band

from .made_scans import record, report_of

TEMPERATURE = {"temperature": 1.0}


def scan(name: str, *records: dict) -> Scan:
    return Scan(name=name, ended=[_read_ended(one) for one in records])


def golden(name: str = "golden.jsonl", passes: int = 2, **fates: str) -> Scan:
    """A golden scan of tasks by what their gold patches score, a character each, and after a comma the empty one's."""
    records = []
    for instance_id, fate in fates.items():
        gold, _, null = fate.partition(",")
        for attempt, score in enumerate(gold, start=1):
            ended = {"reward": None, "exit_status": "SandboxUnavailable"} if score == "?" else {"reward": float(score)}
            records.append(record(instance_id, attempt=attempt, **ended))
        if null != "-":
            records.append(record(instance_id, kind="null", reward=float(null or 0)))
    return scan(name, *records)


def policy(name: str = "policy.jsonl", sampling: dict = TEMPERATURE, **fates: str) -> Scan:
    """A policy scan of tasks by their rewards, a character each; ``?`` is an episode without a verdict."""
    records = []
    for instance_id, fate in fates.items():
        for attempt, score in enumerate(fate, start=1):
            ended = (
                {"reward": None, "exit_status": "PolicyEndpointError"} if score == "?" else {"reward": float(score)}
            )
            about = {"kind": "policy", "attempt": attempt, "policy": "m", "sampling": sampling}
            records.append(record(instance_id, **about, **ended))
    return scan(name, *records)


def decisions(*scans: Scan, **options) -> dict[str, str]:
    return {task.instance_id: task.decision for task in judge(scans, **options)}


# --- decisions --------------------------------------------------------------------


def test_a_golden_scan_decides_what_to_drop_and_to_scan_again():
    found = decisions(golden(good="11", flaky="10", broken="00", anyway="11,1", mended="1?", half="1", many="11"))
    assert found == {
        **{"good": "sound", "many": "sound", "mended": "rescan", "half": "rescan"},
        **dict.fromkeys(("flaky", "broken", "anyway"), "drop"),
    }


def test_a_policy_scan_decides_on_the_rest():
    tasks = {"a": "1100", "b": "0000", "c": "1111", "d": "??1?", "e": "????", "f": "11??"}
    assert decisions(policy(**tasks)) == {
        **{"a": "train", "b": "too_hard", "c": "too_easy", "d": "too_easy", "e": "rescan", "f": "too_easy"}
    }
    both = decisions(golden(a="10", b="11", c="11", g="11", h="00"), policy(**tasks))
    assert both == {**decisions(policy(**tasks)), "a": "drop", "g": "sound", "h": "drop"}


def test_the_band_is_that_of_the_data_script():
    scans = policy(a="1000", b="1100", c="1110")
    assert decisions(scans, band=Band(0.3, 0.7)) == {"a": "too_hard", "b": "train", "c": "too_easy"}
    assert set(decisions(scans, band=Band(0.25, 0.75)).values()) == {"train"}


def test_a_task_that_the_grader_does_not_know_is_dropped_whatever_else_failed():
    unknown = {"kind": "policy", "policy": "m", "reward": None, "exit_status": "UngradableInstance"}
    assert decisions(scan("p", record(**unknown), record(attempt=2, **unknown))) == {"a__b-1": "drop"}
    with_another = {**unknown, "exit_status": "ServerError"}
    assert decisions(scan("p", record(**unknown), record(attempt=2, **with_another))) == {"a__b-1": "rescan"}


def test_of_several_scans_of_a_kind_the_last_decides():
    assert decisions(policy(a="0000"), policy(a="1100")) == {"a": "train"}
    assert decisions(golden(a="00"), golden(a="11")) == {"a": "sound"}


# --- the verdict ------------------------------------------------------------------


@pytest.mark.parametrize(
    "scans, said",
    [
        ([golden(a="11", b="11")], "All 2 tasks are sound, and a policy scan will tell what a policy learns from."),
        ([golden(a="11")], "The one task is sound, and a policy scan will tell what a policy learns from."),
        (
            [golden(a="11", b="00", c="1?", d="11")],
            "Drop 1 and rescan 1 of 4 tasks; the other 2 are sound, and a policy scan will tell what a policy learns from.",
        ),
        ([golden(a="00")], "Drop 1 of 1 task; there is nothing left to learn from."),
        (
            [golden(a="11", b="00", c="11", d="11", e="11"), policy(a="10", b="10", c="00", d="11", e="01")],
            "Drop 1 of 5 tasks; on the other 4 the policy can learn from 2 (50 %), while 1 is too hard for it and 1 is "
            "too easy.",
        ),
        (
            [policy(a="10", b="00", c="00")],
            "Of 3 tasks the policy can learn from 1 (33 %), while 2 are too hard for it.",
        ),
        ([policy(a="00", b="00")], "Of 2 tasks the policy can learn from none, while 2 are too hard for it."),
        ([policy(a="10", b="01")], "Of 2 tasks the policy can learn from all."),
        ([policy(a="??")], "Rescan 1 of 1 task; there is nothing left to learn from."),
        (
            [policy(a="1", b="0", c="0")],
            "Of 3 tasks the policy solves 1 in its one pass, and one pass cannot tell what it learns from.",
        ),
        (
            [golden(a="11", b="11", c="11"), policy(a="10", b="00")],
            "Of 3 tasks the policy can learn from 1 (50 % of those tried), while 1 is too hard for it and 1 has not "
            "been tried.",
        ),
    ],
)
def test_one_sentence_says_what_to_drop_and_whether_the_policy_learns(scans, said):
    assert verdict(judge(scans), scans) == said


def test_notes_say_what_to_know_first():
    cut = policy(a="1100", b="10")
    cut.cut_off = True
    assert notes([cut], judge([cut])) == [
        "policy.jsonl does not end with a whole line: its scan is still running, or was killed.",
        "policy.jsonl lacks 2 episodes of 4 passes over its tasks.",
        "No golden scan is in this report: a task that is never solved may also be broken.",
    ]
    both = [golden(a="1,-", b="1,-"), policy(a="00", sampling={})]
    assert notes(both, judge(both)) == [
        "golden.jsonl ran no empty patches: a task that passes without its fix is not noticed.",
        "golden.jsonl ran each gold patch once, which does not tell flaky tasks from sound ones.",
        "policy.jsonl was sampled at temperature 0: its passes are nearly the same episode.",
        "1 sound task is not in policy.jsonl.",
    ]
    once = [golden(a="11"), policy(a="1")]
    assert notes(once, judge(once)) == [
        "policy.jsonl ran each task once: solved is not always solved, and failed is not too hard."
    ]
    good = [golden(a="11"), policy(a="10")]
    assert notes(good, judge(good)) == []


# --- figures ----------------------------------------------------------------------


def test_figures_of_a_golden_scan():
    found = figures(golden(a="11", b="10", c="0?", d="11,1"))
    assert {name: found[name] for name in CLASSES if name in found} == {
        **{"supported": "1", "flaky": "1", "broken": "1", "inconclusive": "1"}
    }
    assert (found["tasks"], found["episodes"], found["passes"]) == ("4", "12", "2")
    assert found["without a verdict"] == "1 (8 %)"


def test_figures_of_a_policy_scan_are_those_of_the_scan():
    found = figures(policy(a="1100", b="0000", c="111?"))
    assert found["solve rate"] == "0.455 (95 %: 0.21 to 0.72)"
    assert (found["pass@1"], found["pass@2"], found["pass@4"]) == ("0.500", "0.611", "0.500 (2 tasks)")
    assert (found["always solved"], found["sometimes solved"], found["never solved"]) == ("1", "1", "1")
    assert found["seconds, median (9 of 10 within)"] == "2 (2)" and "turns, median (9 of 10 within)" not in found
    assert figures(policy(a="?"))["solve rate"] == "no verdict"


def test_statuses_come_with_the_commonest_first():
    assert list(status_counts(policy(a="0?0", b="?0?")).items()) == [("PolicyEndpointError", 3), ("Submitted", 3)]


def test_repositories_are_rated_by_what_is_left():
    about = {"kind": "policy", "policy": "m", "sampling": TEMPERATURE}
    tried = [
        record(task, repo=repo, attempt=n, reward=reward, **about)
        for task, repo, rewards in (
            ("a", "x/x", (1.0, 0.0)),
            ("b", "x/x", (0.0, 0.0)),
            ("c", "y/y", (1.0, 1.0)),
            ("d", None, (0.0, 0.0)),
        )
        for n, reward in enumerate(rewards, start=1)
    ]
    scans = [golden(a="11", b="00", c="11", d="11"), scan("p", *tried)]
    for one in scans[0].ended:
        assert one.episode.repo == "a/b"
    rows = repositories(judge(scans[1:]))
    assert [(row.name, row.tasks, row.rate) for row in rows] == [
        ("y/y", 1, SolveRate(2, 2)),
        ("x/x", 2, SolveRate(1, 4)),
        ("unknown", 1, SolveRate(0, 2)),
    ]
    [row] = repositories(judge(scans))
    assert row.rate == SolveRate(3, 6) and row.counts == Counter(train=1, drop=1, too_easy=1, too_hard=1)
    assert [task.instance_id for task in graded(judge(scans))] == ["a", "c", "d"]


# --- two scans --------------------------------------------------------------------


def test_two_golden_scans_compared():
    [pair] = compare([golden("one", a="11", b="10", c="11"), golden("two", a="11", b="11", d="11")])
    assert pair.sentence == "1 task of the 2 in both changed class."
    assert pair.moves == {("supported", "supported"): 1, ("flaky", "supported"): 1}
    assert pair.changed == [("b", "flaky", "supported")] and pair.labels == ("supported", "flaky")


def test_two_policy_scans_compared():
    before = policy("one", a="0000", b="1000", c="1111", d="0000")
    after = policy("two", a="1110", b="1100", c="1011", d="0000")
    [pair] = compare([golden(a="11"), before, policy("between", a="0000"), after])
    assert (pair.before.name, pair.after.name) == ("one", "two")
    assert pair.changed == [("a", "0/4", "3/4"), ("b", "1/4", "2/4"), ("c", "4/4", "3/4")]
    assert pair.sentence == (
        "The mean solve rate of the 4 tasks in both changed by +0.188; 2 rose and 1 fell, which can be chance (sign test, "
        "p = 1.000)."
    )
    assert pair.moves[("never", "sometimes")] == 1 and pair.moves[("always", "sometimes")] == 1
    assert compare([before]) == []


def test_a_clear_difference_is_called_one():
    ids = [f"t{number}" for number in range(30)]
    before = policy("one", **dict.fromkeys(ids, "0000"))
    after = policy("two", **{one: "1000" if n % 2 else "1100" for n, one in enumerate(ids)})
    assert compare([before, after])[0].sentence.endswith(
        "30 rose and 0 fell, which chance alone hardly makes (sign test, p under 0.001)."
    )
    assert compare([before, before])[0].sentence == "No solve rate of the 30 tasks in both changed."
    assert compare([before, policy("two", t1="????")])[0].sentence == "No task has a verdict in both."


@pytest.mark.parametrize(
    "up, down, chance", [(0, 0, 1.0), (2, 0, 0.5), (5, 0, 0.0625), (0, 6, 0.03125), (8, 2, 0.109375)]
)
def test_the_sign_test(up, down, chance):
    assert sign_test(up, down) == sign_test(down, up) == pytest.approx(chance)
    assert sign_test(3000, 1000) < 1e-9


# --- a row of the table -----------------------------------------------------------


def test_episodes_that_ended_alike_are_shown_as_one():
    failing = report_of("a__b-1", failing=["t::a"])
    about = {"kind": "policy", "policy": "m", "agent_metrics": {"turns": 4}}
    ended = scan(
        "p",
        *(record(attempt=n, reward=0.0, eval_report=failing, seconds=float(n), **about) for n in (3, 1, 2)),
        record(attempt=4, **about),
    ).ended
    wrong, right = outcomes(ended)
    assert wrong["attempts"] == [1, 2, 3] and wrong["failing"] == ["t::a"] and not wrong["ok"]
    assert (wrong["seconds"], wrong["turns"]) == (2.0, 4.0) and "graded after the agent submitted" in wrong["why"]
    assert right["ok"] and right["why"] == "" and right["attempts"] == [4]


def test_a_row_says_what_was_expected_of_a_patch():
    [gold] = outcomes(golden(a="0,-").ended)
    assert gold["why"] == "expected 1.0, found reward 0.0, Submitted (graded after the agent submitted)"
    [null] = outcomes([Ended(golden(a=",1").episodes[0])])
    assert null["why"].startswith("expected 0.0 with tests run, found reward 1.0")


def test_every_decision_has_its_words():
    assert all(one.title and one.meaning.endswith(".") for one in DECISIONS.values())
