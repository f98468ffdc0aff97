"""Where the release on PyPI (May 2026) differs from a checkout: stricter, and loud about it."""

import pytest

from miles.utils.types import Sample

from .tokens import trained_runs
from .trainer import running_trainer


async def test_a_turn_cut_after_its_tool_call_fails_the_group(trainer, task):
    """The agent goes on after it, and Miles refuses to merge what follows a cut turn: the group is lost, not trained."""
    with pytest.raises(AssertionError, match="a.status must be COMPLETED, got Status.TRUNCATED"):
        await trainer.run_group((task, "solve"), (task, "cut-after-call"))


async def test_a_policy_that_never_calls_the_tool_is_refused(trainer, task):
    """Its session server keeps the first turn and takes no other history; the agent drops such a turn and complains."""
    group = await trainer.run_group((task, "solve"), (task, "never-call"))
    sample = group.samples[1]
    assert (sample.status, sample.reward) == (Sample.Status.ABORTED, 0.0)
    assert sample.metadata["exit_status"] == "PolicyEndpointError"
    assert len(trained_runs(sample)) == 1 and not group.kept


async def test_the_agents_complaint_has_to_be_allowed(checkpoint, tasks, task):
    """--tito-allowed-append-roles, which a checkout no longer has: by default only tools may be appended."""
    with running_trainer(checkpoint, tasks, tito_allowed_append_roles=["tool"]) as trainer:
        group = await trainer.run_group((task, "talk-once"))
    assert group.samples[0].metadata["exit_status"] == "PolicyEndpointError"
    assert not group.kept
