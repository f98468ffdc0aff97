"""Every way an episode can end, as a member of a group: its reward, and whether the stock filter keeps the group.

``check_no_aborted`` is Miles' own. A fault comes from a real NeMo Gym wherever it can be had there, else from a small
``/run`` server. The other member of each group solves its task, where both share a server.
"""

import asyncio
import os
import signal
import socket
import time

import nemogym_agent_function
import pytest
from local_stack.scripted_policy import HOST, serving_in_thread
from nemogym_generate import keep_group

from miles.utils.types import Sample

from ..integration.process_tree import ancestors, find_process
from .agent_server import Answer, make_agent_server
from .policies import SLEEP_S
from .tokens import assert_lossless
from .trainer import running_trainer


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@pytest.fixture
def ended_as(caplog):
    """Whether the connector logged an end without a verdict. Where no turn was recorded, Miles drops its answer."""
    return lambda exit_status: f"no verdict, {exit_status}" in caplog.text


# --- verdicts -------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, exit_status, reward",
    [
        ("solve", "Submitted", 1.0),
        ("wrong", "Submitted", 0.0),
        ("never-submit", "LimitsExceeded", 0.0),
        ("break-tests", "NoTestsRan", 0.0),
        ("skip-tests", "TestsSkipped", 0.0),
    ],
)
async def test_a_verdict_is_trained(trainer, task, policy, exit_status, reward):
    group = await trainer.run_group((task, "solve"), (task, policy))
    solved, sample = group.samples
    assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, reward)
    assert sample.metadata["exit_status"] == exit_status
    assert solved.reward == 1.0 and group.kept
    assert_lossless(sample, group.calls[1], trainer.state.tokenizer)


async def test_a_sandbox_that_dies_under_the_agent_is_trained(trainer, task):
    episode = asyncio.create_task(trainer.run_group((task, "solve"), (task, "sleep")))
    sleeping = await asyncio.to_thread(find_process, SLEEP_S)
    os.kill(next(pid for pid, name in ancestors(sleeping) if name.startswith("python")), signal.SIGKILL)
    group = await episode
    solved, sample = group.samples
    assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, 0.0)
    assert sample.metadata["exit_status"] == "SandboxFailed"
    assert solved.reward == 1.0 and group.kept
    assert_lossless(sample, group.calls[1], trainer.state.tokenizer)


async def test_running_out_of_time_is_trained(checkpoint, tasks, task, monkeypatch):
    with running_trainer(checkpoint, tasks) as trainer:  # its end ends the call that hangs
        started = time.monotonic()
        await trainer.run_episode(task, "solve")
        monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", str(max(8, 5 * (time.monotonic() - started))))
        group = await trainer.run_group((task, "solve"), (task, "hang-late"))
    solved, sample = group.samples
    assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, 0.0)
    assert sample.metadata["exit_status"] == "TimeLimitExceeded"
    assert solved.reward == 1.0 and group.kept
    assert_lossless(sample, group.calls[1], trainer.state.tokenizer)


# --- no verdict, turns recorded: only the reward hook keeps Miles from training them -----------


@pytest.mark.parametrize("policy", ["fail-late", "refuse-late"])
async def test_a_failing_engine_is_not_trained(trainer, task, policy):
    group = await trainer.run_group((task, "solve"), (task, policy))
    solved, sample = group.samples
    assert (sample.status, sample.reward) == (Sample.Status.ABORTED, 0.0)
    assert sample.metadata["exit_status"] == "PolicyEndpointError"
    assert len(group.calls[1]) == 2 and solved.reward == 1.0
    assert not group.kept


async def test_a_task_that_cannot_be_graded_is_not_trained(trainer, task):
    group = await trainer.run_group((task, "solve"), ({**task, "version": "0.0"}, "solve"))
    solved, sample = group.samples
    assert (sample.status, sample.reward) == (Sample.Status.ABORTED, 0.0)
    assert sample.metadata["exit_status"] == "UngradableInstance"
    assert len(group.calls[1]) == 5 and solved.reward == 1.0
    assert not group.kept


_TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nRuntimeError: something else'


@pytest.mark.parametrize(
    "answer, exit_status",
    [
        (Answer(status=500, body="boom"), "ServerError"),
        (Answer(body="no JSON"), "ServerError"),
        (Answer(body={"reward": None, "metadata": {}}), "ServerError"),
        (Answer(body={"reward": 0.0, "metadata": {"error": "e", "traceback": _TRACEBACK}}), "UnknownError"),
        (Answer(hangs_up=True), "ServerUnreachable"),
    ],
)
async def test_a_failing_server_is_not_trained(trainer, task, monkeypatch, answer, exit_status):
    with serving_in_thread(make_agent_server(answer)) as url:
        monkeypatch.setenv("NEMO_GYM_URL", url)
        group = await trainer.run_group((task, "solve"), (task, "solve"))
    for sample, calls in zip(group.samples, group.calls, strict=True):
        assert (sample.status, sample.reward) == (Sample.Status.ABORTED, 0.0)
        assert sample.metadata["exit_status"] == exit_status
        assert len(calls) == 2, "the episode has turns that could be trained"
    assert not group.kept


# --- no verdict, no turn recorded -------------------------------------------------


async def test_a_missing_image_is_not_trained(trainer, task, ended_as):
    group = await trainer.run_group((task, "solve"), ({**task, "image_name": "no/such:image"}, "solve"))
    solved, sample = group.samples
    assert sample.status == Sample.Status.ABORTED and solved.reward == 1.0
    assert ended_as("SandboxUnavailable") and not group.kept


async def test_an_engine_that_fails_at_once_is_not_trained(trainer, task, ended_as):
    group = await trainer.run_group((task, "solve"), (task, "fail-first"))
    solved, sample = group.samples
    assert sample.status == Sample.Status.ABORTED and solved.reward == 1.0
    assert ended_as("PolicyEndpointError") and not group.kept


async def test_a_dead_engine_is_not_trained(checkpoint, tasks, task, ended_as):
    with running_trainer(checkpoint, tasks, engine_url=f"http://{HOST}:{closed_port()}") as trainer:
        group = await trainer.run_group((task, "solve"), (task, "solve"))
    assert [sample.status for sample in group.samples] == [Sample.Status.ABORTED] * 2
    assert ended_as("PolicyEndpointError") and not group.kept


async def test_a_dead_server_is_not_trained(trainer, task, monkeypatch, ended_as):
    monkeypatch.setenv("NEMO_GYM_URL", f"http://{HOST}:{closed_port()}")
    monkeypatch.setattr(nemogym_agent_function, "_BACKOFF_S", (0.1, 0.1))
    group = await trainer.run_group((task, "solve"), (task, "solve"))
    assert [sample.status for sample in group.samples] == [Sample.Status.ABORTED] * 2
    assert ended_as("ServerUnreachable") and not group.kept


async def test_a_server_that_applies_gold_patches_is_not_trained(trainer, stack, task, monkeypatch, ended_as):
    monkeypatch.setenv("NEMO_GYM_URL", stack.golden_url)
    group = await trainer.run_group((task, "solve"), (task, "wrong"))
    assert [sample.status for sample in group.samples] == [Sample.Status.ABORTED] * 2
    assert group.calls == [[], []]
    assert ended_as("GoldenServer") and not group.kept


# --- the example's own filter and switch -------------------------------------------


@pytest.mark.parametrize(
    "policies, keep, reason",
    [
        (("solve", "wrong"), True, None),
        (("solve", "solve"), False, "zero_std_1.0"),
        (("solve", "fail-late"), False, "no_verdict_PolicyEndpointError"),
    ],
)
async def test_keep_group_drops_what_teaches_nothing(trainer, task, policies, keep, reason):
    group = await trainer.run_group(*((task, policy) for policy in policies))
    judged = keep_group(trainer.args, group.samples)
    assert (judged.keep, judged.reason) == (keep, reason)


async def test_a_user_may_have_the_rest_trained_as_0(trainer, task, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_UNGRADED", "zero")
    group = await trainer.run_group((task, "solve"), (task, "fail-late"))
    sample = group.samples[1]
    assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, 0.0)
    assert sample.metadata["exit_status"] == "PolicyEndpointError" and group.kept
