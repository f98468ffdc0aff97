"""Reward hook of the NeMo Gym example (``--custom-rm-path nemogym_generate.reward_func``).

The grade was made while the episode ran: ``nemogym_agent_function.run`` left ``exit_status`` and, when there is a
verdict, ``reward`` in ``sample.metadata``. A sample without a verdict gets 0.0 and is marked ABORTED, so that
``check_no_aborted`` (miles/rollout/filter_hub/dynamic_sampling_filters.py) drops its group instead of training it.

  --custom-rm-path nemogym_generate.reward_func \\
  --dynamic-sampling-filter-path miles.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted
"""

from typing import Any

from nemogym_contract import read_verdict

from miles.utils.types import Sample


async def reward_func(args: Any, samples: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """Reward of one sample, or of each in a list (session server v2, ``--group-rm``).

    Never raises: one exception here costs the whole group, in fully-async mode the run.

    Args:
        args: unused.
        samples: what Miles scores; those without a verdict are marked ABORTED.

    Returns:
        The verdict, 0.0 where there is none.
    """
    if isinstance(samples, (list, tuple)):
        return [_reward_of(sample) for sample in samples]
    return _reward_of(samples)


def _reward_of(sample: Any) -> float:
    verdict = read_verdict(getattr(sample, "metadata", None))
    if verdict is not None:
        return verdict
    if isinstance(sample, Sample):
        sample.status = Sample.Status.ABORTED
    return 0.0
