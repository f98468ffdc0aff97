"""The engine's context length has to be the trainer's --max-seq-len: what is past it is graded but not trained."""

import pytest

from miles.utils.types import Sample

from .tokens import assert_lossless, trained_runs
from .trainer import running_trainer


@pytest.fixture(scope="session")
async def calls(trainer, task):
    """A solved episode's five calls."""
    _, calls = await trainer.run_episode(task, "solve")
    return calls


def _end(call) -> int:
    return len(call.prompt_ids) + len(call.token_ids)


@pytest.mark.parametrize(
    "short_by, status, reward", [(-10, Sample.Status.COMPLETED, 1.0), (10, Sample.Status.TRUNCATED, 0.0)]
)
async def test_an_engine_with_more_context_has_turns_graded_that_are_cut(
    checkpoint, tasks, task, calls, short_by, status, reward
):
    """Why run.py sets both to one value: a sample that ends before its submission may carry the submission's reward."""
    length = _end(calls[3]) - short_by
    with running_trainer(checkpoint, tasks, max_seq_len=length) as trainer:
        sample, said = await trainer.run_episode(task, "solve")
    assert (sample.status, sample.reward, sample.metadata["exit_status"]) == (status, reward, "Submitted")
    assert len(said) == 5 and len(trained_runs(sample)) == 4


@pytest.mark.parametrize("short_by, turns", [(-10, 4), (10, 3)])
async def test_an_engine_with_the_same_context_stops_the_agent_where_the_trainer_cuts(
    checkpoint, tasks, task, calls, short_by, turns
):
    """A reply that the context cuts inside its tool call is one without a call: the agent drops it."""
    length = _end(calls[3]) - short_by
    with running_trainer(
        checkpoint, tasks, max_seq_len=length, context_length=length, rollout_max_response_len=None
    ) as trainer:
        group = await trainer.run_group((task, "solve"))
    (sample,), (said,) = group.samples, group.calls
    assert (sample.status, sample.reward, len(said)) == (Sample.Status.COMPLETED, 0.0, 4)
    assert sample.metadata["exit_status"] == "ContextLengthExceeded" and group.kept
    assert_lossless(sample, said[:turns], trainer.state.tokenizer)


async def test_the_longest_reply_counts_against_the_context(checkpoint, tasks, task, calls):
    """SGLang refuses a prompt that leaves less than max_tokens, however short the reply would have been."""
    reply = 2000
    length = len(calls[2].prompt_ids) + reply
    with running_trainer(
        checkpoint, tasks, max_seq_len=length, context_length=length, rollout_max_response_len=reply
    ) as trainer:
        sample, said = await trainer.run_episode(task, "solve")
    assert (sample.reward, sample.metadata["exit_status"], len(said)) == (0.0, "ContextLengthExceeded", 3)
    assert_lossless(sample, said, trainer.state.tokenizer)
