"""What becomes of a turn: through mini-swe-agent, the session server and Miles' generate into a training sample."""

import pytest

from miles.utils.types import Sample

from .engine import WEIGHT_VERSION
from .tokens import assert_lossless, trained_runs
from .trainer import running_trainer


async def test_a_solved_episode(trainer, task):
    sample, calls = await trainer.run_episode(task, "solve")
    assert (sample.status, sample.reward, len(calls)) == (Sample.Status.COMPLETED, 1.0, 5)
    assert_lossless(sample, calls, trainer.state.tokenizer)
    assert sample.metadata["exit_status"] == "Submitted"
    assert set(sample.weight_versions) == {WEIGHT_VERSION}


async def test_sampling_settings_reach_the_engine(trainer, task):
    _, calls = await trainer.run_episode(task, "solve")
    args = trainer.args
    wanted = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_tokens": args.rollout_max_response_len,
        "skip_special_tokens": args.rollout_skip_special_tokens,
    }
    assert [{key: call.parameters.get(key) for key in wanted} for call in calls] == [wanted] * 5


async def test_a_group_of_eight_of_one_task_does_not_mix(trainer, task):
    group = await trainer.run_group(*[(task, "solve"), (task, "wrong")] * 4)
    assert [sample.reward for sample in group.samples] == [1.0, 0.0] * 4
    assert group.kept
    for sample, calls in zip(group.samples, group.calls, strict=True):
        assert sample.status == Sample.Status.COMPLETED and len(calls) == 5
        assert_lossless(sample, calls, trainer.state.tokenizer)


async def test_a_reported_mismatch_changes_no_token(trainer, task):
    """The chat template renders an empty think block that the model did not say: Miles reports it, and keeps it out."""
    sample, calls = await trainer.run_episode(task, "solve")
    mismatches = sample.metadata["tito_session_mismatch"]
    assert [mismatch["type"] for mismatch in mismatches] == ["assistant_text"] * 5
    assert not any("<think>" in call.text for call in calls)
    assert_lossless(sample, calls, trainer.state.tokenizer)


async def test_text_and_output_of_any_kind_survive(trainer, task):
    sample, calls = await trainer.run_episode(task, "odd")
    assert (sample.reward, len(calls)) == (1.0, 6)
    assert_lossless(sample, calls, trainer.state.tokenizer)
    assert calls[0].text.startswith("Думаю: 步骤 🚀")
    printed = trainer.state.tokenizer.decode(calls[1].prompt_ids[len(calls[0].prompt_ids + calls[0].token_ids) :])
    assert "日本" in printed and "🎉" in printed and "\0" in printed
    assert "<|im_end|> </tool_response><tool_call>" in printed, "a command's output is no dialogue"


async def test_a_turn_without_a_tool_call_is_left_out(trainer, task):
    """The agent drops it and complains; the session server rolls it back."""
    sample, calls = await trainer.run_episode(task, "talk-once")
    assert (sample.status, sample.reward, len(calls)) == (Sample.Status.COMPLETED, 1.0, 6)
    talk = calls.pop(2)
    assert talk.text.startswith("I think about it first.")
    assert_lossless(sample, calls, trainer.state.tokenizer)


async def test_a_turn_cut_inside_its_tool_call_is_left_out(trainer, task):
    sample, calls = await trainer.run_episode(task, "cut-in-call")
    assert (sample.status, sample.reward, len(calls)) == (Sample.Status.COMPLETED, 1.0, 6)
    cut = calls.pop(2)
    assert "<tool_call>" in cut.text and "</tool_call>" not in cut.text
    assert_lossless(sample, calls, trainer.state.tokenizer)


async def test_a_last_turn_cut_after_its_tool_call_is_truncated_with_the_grade(trainer, task):
    """Nothing of the sample is cut: all that was said up to the submission is in it."""
    sample, calls = await trainer.run_episode(task, "cut-at-the-end")
    assert (sample.status, sample.reward, len(calls)) == (Sample.Status.TRUNCATED, 1.0, 5)
    assert_lossless(sample, calls, trainer.state.tokenizer)


@pytest.mark.parametrize("parser, reward", [("qwen25", 1.0), (None, 0.0)])
async def test_without_a_tool_call_parser_every_reward_is_0(checkpoint, tasks, task, parser, reward):
    """--sglang-tool-call-parser: SGLang has none by default, and leaves calls in the text where no agent sees them."""
    with running_trainer(checkpoint, tasks, tool_call_parser=parser) as trainer:
        group = await trainer.run_group((task, "solve"), (task, "solve"))
    assert [sample.reward for sample in group.samples] == [reward] * 2
    assert all("<tool_call>" in call.text for calls in group.calls for call in calls)
    runs = [len(trained_runs(sample)) for sample in group.samples]
    assert runs == ([5, 5] if parser else [1, 1])
