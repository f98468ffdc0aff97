"""What a sample has to hold when nothing was lost between the engine and the trainer."""

from itertools import groupby
from typing import Any

from .engine import Call


def trained_runs(sample: Any) -> list[list[int]]:
    """The token ids of the response that are trained, one list for each unbroken run of mask 1."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    pairs = zip(sample.loss_mask, response, strict=True)
    return [[token for _, token in run] for mask, run in groupby(pairs, key=lambda pair: pair[0]) if mask]


def assert_lossless(sample: Any, calls: list[Call], tokenizer: Any) -> None:
    """Each call is one run of trained tokens, id by id and logprob by logprob; nothing else is trained.

    Counting the runs is what shows a lost history: a session server that starts over answers 200 all the same.

    Args:
        sample: of Miles.
        calls: the engine's, those that the sample should be made of.
        tokenizer: of the checkpoint.
    """
    sample.validate()
    assert trained_runs(sample) == [call.token_ids for call in calls]
    assert [tokenizer.decode(run) for run in trained_runs(sample)] == [call.text for call in calls]

    for call in calls:
        so_far = call.prompt_ids + call.token_ids
        assert sample.tokens[: len(so_far)] == so_far, "the engine was given another history than the one trained"
    assert sample.tokens == so_far
    assert len(sample.tokens) - sample.response_length == len(calls[0].prompt_ids)

    said = iter([logprob for call in calls for logprob in call.logprobs])
    assert sample.rollout_log_probs == [next(said) if mask else 0.0 for mask in sample.loss_mask]
