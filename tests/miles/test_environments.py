"""Other environments than SWE-bench: their agents, the session model, the session server and what becomes a sample."""

from collections.abc import Iterator

import pytest

from miles.utils.types import Sample

from .tokens import assert_lossless, trained_runs
from .trainer import Trainer, running_trainer

RESULTS = {"win": 1.0, "draw": 0.0, "loss": -1.0, "bust": -1.0}


@pytest.fixture(scope="module")
def trainer(checkpoint, rows, environments) -> Iterator[Trainer]:
    """A rollout side whose connector finds the agents through the head server."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NEMO_GYM_HEAD_URL", environments.head_url)
        with running_trainer(checkpoint, [row for known in rows.values() for row in known]) as trainer:
            yield trainer


def assert_own_conversation(calls, episode_mark: str) -> None:
    """No call of another episode: each conversation is marked in its first message, and each call goes on from the last."""
    assert all(f"episode {episode_mark}]" in str(call.messages) for call in calls)
    for before, after in zip(calls, calls[1:], strict=False):
        so_far = before.prompt_ids + before.token_ids
        assert after.prompt_ids[: len(so_far)] == so_far


async def test_eight_episodes_of_two_environments_at_once(trainer, rows):
    """Several steps of tool calls, each replayed as it was said, beside a game in dialogue."""
    office, game = rows["workplace_assistant"], rows["blackjack"][0]
    plan = [
        *((row, "workplace_assistant-solve") for row in office[1:4]),
        (office[0], "workplace_assistant-wrong"),
        *((game, f"blackjack-{role}") for role in ("solve", "solve", "wrong", "wrong")),
    ]
    group = await trainer.run_group(*plan)
    assert group.kept
    for sample, calls in zip(group.samples, group.calls, strict=True):
        assert sample.status == Sample.Status.COMPLETED and sample.metadata["exit_status"] == "Graded"
        assert_lossless(sample, calls, trainer.state.tokenizer)
        assert_own_conversation(calls, sample.index)
        assert sample.metadata["agent_metrics"]["turns"] == len(calls) == len(trained_runs(sample))

    assert [sample.reward for sample in group.samples[:4]] == [1.0, 1.0, 1.0, 0.0]
    wanted = [len(row["ground_truth"]) + 1 for row in office[1:4]]
    assert [len(calls) for calls in group.calls[:4]] == [*wanted, 2]
    assert max(wanted) >= 4, "an episode of several steps is among them"
    for sample in group.samples[4:]:
        assert sample.reward == RESULTS[sample.metadata["eval_report"]["info"]["result"]]


async def test_a_question_is_one_turn(trainer, rows):
    row = rows["mcqa"][0]
    group = await trainer.run_group((row, "mcqa-solve"), (row, "mcqa-wrong"))
    assert [sample.reward for sample in group.samples] == [1.0, 0.0] and group.kept
    for sample, calls in zip(group.samples, group.calls, strict=True):
        assert len(calls) == 1
        assert_lossless(sample, calls, trainer.state.tokenizer)


async def test_several_calls_in_one_turn_and_any_text_survive(trainer, rows):
    row = rows["workplace_assistant"][2]
    sample, calls = await trainer.run_episode(row, "workplace_assistant-at-once")
    assert (sample.reward, len(calls)) == (1.0, 2)
    assert calls[0].text.count("<tool_call>") == len(row["ground_truth"]) > 1
    assert_lossless(sample, calls, trainer.state.tokenizer)


async def test_sampling_settings_reach_the_engine(trainer, rows):
    _, (call,) = await trainer.run_episode(rows["mcqa"][0], "mcqa-solve")
    args = trainer.args
    wanted = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_tokens": args.rollout_max_response_len,
        "skip_special_tokens": args.rollout_skip_special_tokens,
    }
    assert {key: call.parameters.get(key) for key in wanted} == wanted


async def test_a_failing_engine_is_not_trained(trainer, rows):
    row = rows["workplace_assistant"][2]
    group = await trainer.run_group((row, "workplace_assistant-solve"), (row, "workplace_assistant-fail"))
    solved, sample = group.samples
    assert (sample.status, sample.reward) == (Sample.Status.ABORTED, 0.0)
    assert sample.metadata["exit_status"] == "PolicyEndpointError"
    assert len(group.calls[1]) == 1 and solved.reward == 1.0
    assert not group.kept
