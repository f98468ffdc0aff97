"""Training runs as the report reads them: dumps with events or samples, logs; and that a pickle runs nothing."""

import os
import random
import time

import pytest
from report_training import Run, Step, is_verdict, read_run, run_figures, run_notes, run_verdict
from row_reader import DataError

from .made_runs import Tensor, metrics_of_step, sample, write_events, write_run, write_samples

PREFIX = "(RolloutManager pid=71, ip=10.0.0.2) [2026-11-30 10:00:00.000 rollout_manager] metrics.py:89 - "


def test_reads_the_events_of_a_dump(tmp_path):
    run = read_run(write_run(tmp_path / "dump_details", steps=30))
    assert run.name == "dump_details" and list(run.steps) == list(range(30))
    step, logged = run.steps[20], metrics_of_step(0, random.Random(3))
    assert step.kept == 16 and step.statuses["SandboxUnavailable"] == 24 and step.statuses["LimitsExceeded"] == 40
    assert step.dropped["no_verdict_SandboxUnavailable"] == 5
    assert run.rewards[0] == logged["rollout/raw_reward"]
    assert list(run.evals) == ["held_out"] and list(run.evals["held_out"]) == [0, 10, 20]


def test_metrics_of_one_step_come_together_from_several_processes(tmp_path):
    dump = write_events(tmp_path, [{"rollout/nemo_gym/kept_groups": 3.0, "rollout/step": 0}])
    more = '{"type": "metric", "metrics": {"rollout/raw_reward": 0.5, "rollout/step": 0}}\n{"type": "metric", "met'
    (dump / "events" / "actor_cell0_rank0.jsonl").write_text(more)
    assert read_run(dump).steps == {0: Step(reward=0.5, kept=3.0)}


def test_rewards_that_no_event_tells_are_read_from_the_samples(tmp_path):
    dump = write_events(tmp_path, [{"rollout/nemo_gym/kept_groups": 9.0, "rollout/step": 0}])
    write_samples(dump, 0, [sample(0, 1.0), sample(0, 0.0, exit_status="Submitted")])
    write_samples(dump, 10, [sample(4, 1.0, exit_status="Submitted"), sample(5, None, exit_status="<b>")])
    write_samples(dump, "eval_10", "never read")
    run = read_run(dump)
    assert run.steps[0] == Step(reward=0.5, kept=9.0, statuses={"unknown": 1.0, "Submitted": 1.0})
    assert run.steps[10] == Step(reward=1.0, kept=2.0, statuses={"Submitted": 1.0, "unknown": 1.0})
    assert list(run.steps) == [0, 10] and run.of_samples == 2
    assert run_notes(run) == [
        "Of 2 steps of " + run.name + " only the kept samples are known, not the groups that were dropped."
    ]


def test_samples_with_tensors_and_objects_are_read_without_torch(tmp_path):
    samples = [{**sample(0, 1.0), "rollout_log_probs": Tensor(), "extra": [Tensor(), {"a": Tensor()}]}]
    write_samples(tmp_path, 3, samples)
    assert read_run(tmp_path).rewards == {3: 1.0}


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_runs_nothing(tmp_path):
    proof = tmp_path / "proof"
    write_samples(tmp_path, 0, [{**sample(0, 1.0), "metadata": Attack(proof)}])
    assert read_run(tmp_path).steps == {0: Step(reward=1.0, kept=1.0, statuses={"unknown": 1.0})}
    write_samples(tmp_path, 0, Attack(proof))
    assert read_run(tmp_path).steps == {0: Step(kept=0.0)}
    assert not proof.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half", b"\x80\x02}q\x00."])
def test_samples_that_are_being_written_are_said(tmp_path, content):
    file = write_samples(tmp_path, 0, [sample(0, 1.0)])
    file.write_bytes(content)
    with pytest.raises(
        DataError, match="expected the samples of one rollout in .*0.pt, found .*; if it is being written"
    ):
        read_run(tmp_path)


def test_reads_a_log(tmp_path):
    log = tmp_path / "train.log"
    log.write_bytes(
        f"{PREFIX}perf 4: {{'rollout/nemo_gym/kept_groups': 2.0, 'rollout/dynamic_filter/drop_group_has_aborted': 3, "
        "'rollout/nemo_gym/exit_status/Submitted': 8.0, 'rollout/ratio': nan, 'perf/x': np.float64(1.5)}\n".encode()
        + b"noise \xff\xfe {'rollout/raw_reward': 0.9}\n"
        + f"{PREFIX}rollout 4: {{'rollout/raw_reward': np.float64(2.5e-01), 'rollout/response_lengths': 2}}\n".encode()
        + b"eval 4: {'eval/nemo_gym/held-out/mean_over_verdicts': 1, 'eval/held-out': 0.5}\n"
        + b"perf 5: {'rollout/nemo_gym/kept_groups': 1.0}\nperf 6: {'rollout/nemo_gym/kept_"
    )
    run = read_run(log)
    assert run.steps == {
        4: Step(reward=0.25, kept=2.0, dropped={"group_has_aborted": 3.0}, statuses={"Submitted": 8.0}),
        5: Step(kept=1.0),
    }
    assert run.evals == {"held-out": {4: 1.0}}


def test_nothing_to_report_is_said(tmp_path):
    with pytest.raises(
        DataError, match=r"expected events/\*.jsonl or rollout_data/\*.pt of --dump-details with rollouts"
    ):
        read_run(tmp_path)
    log = tmp_path / "train.log"
    log.write_text("starting\n")
    with pytest.raises(DataError, match="expected lines `perf <number>: .*; name the folder given to --dump-details"):
        read_run(log)


def test_a_broken_event_is_named(tmp_path):
    dump = write_events(tmp_path, [{"rollout/raw_reward": 1.0, "rollout/step": 0}])
    with open(dump / "events" / "rollout_manager.jsonl", "a") as file:
        file.write("broken\n{}\n")
    with pytest.raises(DataError, match="rollout_manager.jsonl line 3: expected a JSON object"):
        read_run(dump)


def test_names_and_values_of_any_kind_are_tolerated(tmp_path):
    odd = {
        "rollout/nemo_gym/exit_status/\x1b[31m": 1.0,
        "rollout/raw_reward": True,
        "rollout/nemo_gym/kept_groups": "3",
    }
    dump = write_events(tmp_path, [{**odd, "rollout/step": 0}, {**odd, "rollout/step": "x"}, {"rollout/step": 1}])
    assert read_run(dump).steps == {0: Step(statuses={r"\x1b[31m": 1.0})}


HUGE = 10**400


def test_numbers_too_large_to_count_with_are_left_out(tmp_path):
    counts = {"rollout/nemo_gym/kept_groups": 1e300, "rollout/nemo_gym/exit_status/Submitted": -1.0}
    logged = {"rollout/raw_reward": HUGE, "rollout/dynamic_filter/drop_x": 2, **counts}
    dump = write_events(tmp_path, [{**logged, "rollout/step": 0}, {"rollout/raw_reward": 1.0, "rollout/step": HUGE}])
    write_samples(dump, 0, [sample(0, HUGE), sample([1], 0.5, exit_status="Submitted")])
    write_samples(dump, "9" * 200, [sample(0, 1.0)])
    assert read_run(dump).steps == {
        0: Step(reward=0.5, kept=1.0, dropped={"x": 2.0}, statuses={"unknown": 1.0, "Submitted": 1.0})
    }


def test_numbers_of_a_log_that_are_none_are_left_out(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "perf 1: {'rollout/raw_reward': 1.2.3, 'rollout/nemo_gym/kept_groups': 2.}\n"
        f"perf {'9' * 5000}: {{'rollout/raw_reward': 1.0}}\n"
        f"perf 2: {{'rollout/raw_reward': {'9' * 5000}, 'rollout/nemo_gym/kept_groups': 1}}\n"
    )
    assert read_run(log).steps == {1: Step(kept=2.0), 2: Step(kept=1.0)}


@pytest.mark.parametrize("end", ["", "x", "}"])
def test_a_log_is_read_in_time_that_grows_with_its_length(tmp_path, end):
    log = tmp_path / "train.log"
    log.write_text("perf 1: {" * 40_000 + f"{end}\nperf 2: {{'rollout/raw_reward': 0.5}}\n")
    started = time.perf_counter()
    assert read_run(log).rewards == {2: 0.5}
    assert time.perf_counter() - started < 5


# --- what it says -----------------------------------------------------------------


def test_the_run_in_one_sentence(tmp_path):
    run = read_run(write_run(tmp_path / "d", steps=60))
    said = run_verdict(run)
    assert said == (
        "In 60 steps the mean reward of the kept samples rose from 0.233 to 0.520 (first and last 12); 960 of 1,457 groups "
        "were trained and under 1 % of 11,059 episodes gave no verdict."
    )
    assert sum(run.statuses.values()) == 11059 and run.statuses["SandboxUnavailable"] == 96
    found = run_figures(run)
    assert (found["steps"], found["groups kept"]) == ("60", "960")
    assert found["groups dropped, no_verdict_SandboxUnavailable"] == "20"
    assert found["without a verdict"] == "96 (under 1 %)" and found["held_out, last eval"] == "0.440"


def test_a_run_of_which_little_is_known():
    assert run_verdict(Run("r", {0: Step(kept=2.0)})) == "In 1 step no reward was logged; 2 of 2 groups were trained."
    assert run_verdict(Run("r", {0: Step(reward=0.5)})) == "In 1 step the mean reward is 0.500."
    flat = {step: Step(reward=0.5) for step in range(2)}
    assert "the mean reward of the kept samples stayed at 0.500" in run_verdict(Run("r", flat))
    assert run_figures(Run("r", {0: Step()}))["groups kept"] == "0"
    assert run_notes(Run("r", {0: Step(reward=0.5)}))[0].startswith("r tells no exit status: --custom-rollout-log")
    assert run_notes(Run("r", {0: Step(statuses={"Submitted": 1.0})})) == []
    assert is_verdict("Submitted") and not is_verdict("Aborted") and not is_verdict("unknown")
