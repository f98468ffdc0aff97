"""What only a checkout of Miles has: the abort of oversampling, session server v2, message matchers.

Where it differs from the release on what both have is here too.
"""

import json
import time
from argparse import Namespace

import pytest
from report_training import Step, read_run

from miles.ray.rollout.debug_data import save_debug_rollout_data
from miles.utils.audit_utils.event_logger.logger import EventLogger
from miles.utils.audit_utils.event_logger.models import MetricEvent
from miles.utils.audit_utils.process_identity import RolloutManagerProcessIdentity
from miles.utils.types import Sample

from .engine import ask
from .tokens import assert_lossless, trained_runs
from .trainer import running_trainer, write_prompt_data

# --- session server v1 ------------------------------------------------------------


async def test_a_turn_cut_after_its_tool_call_ends_the_sample_which_has_no_reward_for_the_rest(trainer, task):
    """The agent goes on after it, is graded 1.0, and what it said then is not trained."""
    group = await trainer.run_group((task, "cut-after-call"))
    (sample,), (calls,) = group.samples, group.calls
    assert (sample.status, sample.reward, len(calls)) == (Sample.Status.TRUNCATED, 0.0, 5)
    assert sample.metadata["reward"] == 1.0
    assert_lossless(sample, calls[:3], trainer.state.tokenizer)
    assert group.kept


async def test_of_a_policy_that_never_calls_the_tool_the_last_reply_is_trained(trainer, task):
    """Its own words are the only reason for the 0: the agent's complaints follow no recorded turn."""
    group = await trainer.run_group((task, "never-call"))
    (sample,), (calls,) = group.samples, group.calls
    assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, 0.0)
    assert sample.metadata["exit_status"] == "LimitsExceeded" and group.kept
    assert len(calls) == 10
    assert_lossless(sample, calls[-1:], trainer.state.tokenizer)


# --- session server v2 ------------------------------------------------------------


@pytest.fixture(scope="session")
def tree_trainer(checkpoint, tasks):
    """A rollout side with --use-session-server v2: a sample is a list, one for each branch that is kept."""
    with running_trainer(checkpoint, tasks, use_session_server="v2") as trainer:
        yield trainer


@pytest.mark.parametrize("policy, reward", [("solve", 1.0), ("wrong", 0.0), ("odd", 1.0)])
async def test_v2_makes_one_sample_of_an_unbranched_episode(tree_trainer, task, policy, reward):
    (sample,), calls = await tree_trainer.run_episode(task, policy)
    assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, reward)
    assert sample.metadata["exit_status"] == "Submitted"
    assert_lossless(sample, calls, tree_trainer.state.tokenizer)


async def test_v2_leaves_a_turn_without_a_tool_call_out(tree_trainer, task):
    (sample,), calls = await tree_trainer.run_episode(task, "talk-once")
    assert (sample.reward, len(calls)) == (1.0, 6)
    del calls[2]
    assert_lossless(sample, calls, tree_trainer.state.tokenizer)


async def test_v2_refuses_to_go_on_after_a_cut_turn(tree_trainer, task):
    """409: the agent's endpoint failed it, so that there is no verdict."""
    group = await tree_trainer.run_group((task, "solve"), (task, "cut-after-call"))
    (solved,), (sample,) = group.samples
    assert (solved.reward, sample.reward, sample.status) == (1.0, 0.0, Sample.Status.ABORTED)
    assert sample.metadata["exit_status"] == "PolicyEndpointError"
    assert not group.kept


@pytest.mark.parametrize("policy", ["fail-late", "refuse-late"])
async def test_v2_does_not_train_what_has_no_verdict(tree_trainer, task, policy):
    group = await tree_trainer.run_group((task, "solve"), (task, policy))
    (solved,), (sample,) = group.samples
    assert (solved.reward, sample.reward, sample.status) == (1.0, 0.0, Sample.Status.ABORTED)
    assert sample.metadata["exit_status"] == "PolicyEndpointError"
    assert not group.kept


# --- message matchers --------------------------------------------------------------


class Reserialising:
    """An agent that writes the arguments of earlier tool calls anew, in front of the session server."""

    def __init__(self, app) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/chat/completions"):
            return await self._app(scope, receive, send)
        body = json.loads(await _read(receive))
        for message in body["messages"]:
            for call in message.get("tool_calls") or []:
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        changed = json.dumps(body).encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(changed)).encode()))

        async def receive_changed() -> dict:
            return {"type": "http.request", "body": changed, "more_body": False}

        await self._app({**scope, "headers": headers}, receive_changed, send)


async def _read(receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


@pytest.mark.parametrize("matcher", ["strict", "loose_tool_call"])
async def test_the_agent_replays_its_history_as_it_was(checkpoint, tasks, task, matcher):
    with running_trainer(checkpoint, tasks, session_message_matcher=matcher) as trainer:
        sample, calls = await trainer.run_episode(task, "solve")
    assert (sample.reward, len(calls)) == (1.0, 5)
    assert_lossless(sample, calls, trainer.state.tokenizer)


@pytest.mark.parametrize("matcher, runs", [("strict", 1), ("loose_tool_call", 5)])
async def test_a_history_that_is_written_anew_is_lost_in_silence(checkpoint, tasks, task, matcher, runs):
    """Every call is answered 200, the reward is 1.0, and one turn of five is trained: so the tests count runs."""
    with running_trainer(checkpoint, tasks, session_message_matcher=matcher, around_sessions=Reserialising) as trainer:
        sample, calls = await trainer.run_episode(task, "solve")
    assert (sample.status, sample.reward, len(calls)) == (Sample.Status.COMPLETED, 1.0, 5)
    assert len(trained_runs(sample)) == runs


async def test_v2_makes_samples_of_each_lost_history(checkpoint, tasks, task):
    with running_trainer(checkpoint, tasks, use_session_server="v2", around_sessions=Reserialising) as trainer:
        samples, calls = await trainer.run_episode(task, "solve")
    assert len(calls) == 5
    assert [(sample.reward, len(trained_runs(sample))) for sample in samples] == [(1.0, 1)] * 5


# --- oversampling --------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_what_was_oversampled_is_aborted(checkpoint, tasks, task, tmp_path, version):
    """Miles stops at its batch and calls abort(): the episodes that still run end at once, and the rollout goes on."""
    rows = [ask(task, policy, policy) for policy in ("solve", "hang-late")]
    with running_trainer(
        checkpoint,
        tasks,
        use_session_server=version,
        prompt_data=str(write_prompt_data(tmp_path / "tasks.jsonl", rows)),
        rollout_batch_size=1,
        over_sampling_batch_size=2,
        n_samples_per_prompt=2,
    ) as trainer:
        started = time.monotonic()
        output = await trainer.run_rollout()
        assert time.monotonic() - started < 150, "the rollout waited for NEMO_GYM_RUN_TIMEOUT, 300 s"
        (group,) = output.samples
        samples = group if version == "v1" else [sample for branches in group for sample in branches]
        assert [(sample.reward, len(trained_runs(sample))) for sample in samples] == [(1.0, 5)] * 2
        assert trainer.engine.aborts == 1
        assert len(trainer.engine.calls["hang-late"]) >= 1, "an episode was running when it was aborted"
        # What comes after an abort is not disturbed by it.
        sample, calls = await trainer.run_episode(task, "solve")
        assert_lossless(sample if version == "v1" else sample[0], calls, trainer.state.tokenizer)


# --- what a run leaves behind -----------------------------------------------------


def test_the_report_reads_what_dump_details_writes(tmp_path):
    """The paths are those of miles/utils/arguments.py."""
    args = Namespace(
        save_debug_rollout_data=f"{tmp_path}/rollout_data/{{rollout_id}}.pt",
        save_debug_trajectory_data=f"{tmp_path}/trajectory/{{rollout_id}}.jsonl",
    )
    samples = [
        Sample(group_index=index // 2, index=index, reward=float(index == 0), metadata={"exit_status": status})
        for index, status in enumerate(("Submitted", "Submitted", "LimitsExceeded", "Submitted"))
    ]
    for rollout_id in (0, 1):
        save_debug_rollout_data(args, samples, rollout_id, evaluation=False)
    save_debug_rollout_data(args, {"held_out": {"samples": samples}}, 1, evaluation=True)
    events = EventLogger(log_dir=tmp_path / "events", source=RolloutManagerProcessIdentity())
    logged = {"rollout/nemo_gym/exit_status/Aborted": 3.0, "rollout/nemo_gym/kept_groups": 7.0, "rollout/step": 1}
    events.log(MetricEvent, {"metrics": logged}, print_log=False)

    of_samples = Step(reward=0.25, kept=2.0, statuses={"Submitted": 3.0, "LimitsExceeded": 1.0})
    assert read_run(tmp_path).steps == {0: of_samples, 1: Step(reward=0.25, kept=7.0, statuses={"Aborted": 3.0})}
