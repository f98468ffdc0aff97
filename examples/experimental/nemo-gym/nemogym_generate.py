"""Reward hook, group filter and rollout metrics of the NeMo Gym example.

The grade was made while the episode ran: ``nemogym_agent_function.run`` left ``exit_status`` and, when there is a
verdict, ``reward`` in ``sample.metadata``. A sample without a verdict gets 0.0 and is marked ABORTED, so that a group
filter drops its group instead of training it. None of the functions raises: one exception costs a group, or the run.

  --custom-rm-path nemogym_generate.reward_func
  --dynamic-sampling-filter-path miles.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted
  --custom-rollout-log-function-path nemogym_generate.log_rollout
  --custom-eval-rollout-log-function-path nemogym_generate.log_eval_rollout

``nemogym_generate.keep_group`` in place of ``check_no_aborted`` also drops groups of equal rewards.

Environment:
  NEMO_GYM_UNGRADED  what becomes of a sample without a verdict: ``drop`` (default), as above, or ``zero``, which trains
                     it with reward 0.0 as if the policy had failed
"""

import functools
import logging
import math
import numbers
import os
from collections.abc import Iterator
from typing import Any

from nemogym_contract import EXIT_STATUSES, read_verdict
from nemogym_metrics import TALLY

from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.utils.types import Sample

logger = logging.getLogger(__name__)

_PREFIX = "nemo_gym"
_LEAST_SPREAD = 1e-8
_MEANS = {
    "turns": "turns_mean",
    "tool_calls": "tool_calls_mean",
    "total_time": "total_time_mean",
    "tampered": "tampered_share",
}


# --- reward ---------------------------------------------------------------------


async def reward_func(args: Any, samples: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """Reward of one sample, or of each in a list (session server v2, ``--group-rm``).

    Args:
        args: unused.
        samples: what Miles scores; those without a verdict are marked ABORTED.

    Returns:
        The verdict; 0.0 where there is none, and for a sample that was cut before what was graded.
    """
    if isinstance(samples, (list, tuple)):
        return [_reward_of(sample) for sample in samples]
    return _reward_of(samples)


def _reward_of(sample: Any) -> float:
    try:
        verdict = read_verdict(getattr(sample, "metadata", None))
        if verdict is not None:
            return 0.0 if _lacks_turns(sample) else verdict
        if isinstance(sample, Sample) and not _ungraded_is_zero():
            sample.status = Sample.Status.ABORTED
    except Exception:
        logger.exception("a sample that cannot be read has reward 0.0")
    return 0.0


def _lacks_turns(sample: Any) -> bool:
    """Whether a TRUNCATED sample ends before what was graded: a reply ran into its limit, and the agent went on after it.

    Session server v1 cuts the sample at that turn (miles/rollout/session/samples/merge.py) and would train what is
    left with the reward of what is not.
    """
    if getattr(sample, "status", None) != Sample.Status.TRUNCATED:
        return False
    mask = list(sample.loss_mask or [])
    trained = sum(now and not before for before, now in zip([0, *mask], mask, strict=False))
    return not trained or trained < _agent_metrics(sample).get("turns", math.inf)


def _ungraded_is_zero() -> bool:
    value = os.environ.get("NEMO_GYM_UNGRADED", "").strip() or "drop"
    if value not in ("drop", "zero"):
        _error_once(
            f"NEMO_GYM_UNGRADED: expected drop or zero, found {value!r}; samples without a verdict are dropped"
        )
    return value == "zero"


# --- group filter ---------------------------------------------------------------


def keep_group(args: Any, samples: list[Sample | list[Sample]], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group in which every sample has a verdict and not all rewards are equal: others teach GRPO nothing.

    Args:
        args: of Miles; names the ``reward_key``.
        samples: a group as ``--dynamic-sampling-filter-path`` gets it, session server v2's with a list per episode.

    Returns:
        ``keep``, or the reason that Miles counts: ``no_verdict_<exit status>``, ``group_has_aborted``, ``zero_std_<reward>``.
    """
    try:
        return _judged(args, list(_flat(samples)))
    except Exception:
        logger.exception("a group that cannot be read is dropped")
        return DynamicFilterOutput(keep=False, reason="unreadable")


def _judged(args: Any, group: list[Any]) -> DynamicFilterOutput:
    aborted = [sample for sample in group if sample.status == Sample.Status.ABORTED]
    if aborted:
        return DynamicFilterOutput(keep=False, reason=_reason_of(aborted))
    rewards = [float(sample.get_reward_value(args)) for sample in group]
    if not all(map(math.isfinite, rewards)):
        return DynamicFilterOutput(keep=False, reason="unreadable")
    if not rewards or max(rewards) - min(rewards) <= _LEAST_SPREAD:
        return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}" if rewards else "empty")
    return DynamicFilterOutput(keep=True)


def _reason_of(aborted: list[Any]) -> str:
    statuses = [_exit_status(sample) for sample in aborted]
    named = next((status for status in statuses if status and not EXIT_STATUSES[status].is_verdict), None)
    return f"no_verdict_{named}" if named else "group_has_aborted"


def _exit_status(sample: Any) -> str | None:
    metadata = getattr(sample, "metadata", None)
    status = metadata.get("exit_status") if isinstance(metadata, dict) else None
    return status if isinstance(status, str) and status in EXIT_STATUSES else None


def _flat(samples: Any) -> Iterator[Any]:
    for sample in samples if isinstance(samples, (list, tuple)) else [samples]:
        if isinstance(sample, (list, tuple)):
            yield from _flat(sample)
        else:
            yield sample


# --- metrics --------------------------------------------------------------------


def log_rollout(
    rollout_id: int, args: Any, samples: list[Sample], rollout_extra_metrics: dict | None, rollout_time: float
) -> bool:
    """Add ``rollout/nemo_gym/*`` to what Miles logs of a rollout.

    Exit statuses and the share without a verdict are those of all episodes since the last log, dropped groups included;
    kept groups and the agent's metrics are those of ``samples``.

    Args:
        rollout_id: number of the rollout.
        args: of Miles.
        samples: the kept samples.
        rollout_extra_metrics: what Miles logs besides; added to in place.
        rollout_time: seconds, unused.

    Returns:
        False: Miles' own log follows.
    """
    try:
        metrics = {**_sample_metrics(list(_flat(samples))), **TALLY.take()}
        _publish(f"rollout/{_PREFIX}", metrics, rollout_extra_metrics, args, rollout_id, step_key="rollout/step")
    except Exception:
        logger.exception("the metrics of rollout %s are lost", rollout_id)
    return False


def log_eval_rollout(rollout_id: int, args: Any, data: dict[str, dict], extra_metrics: dict | None = None) -> bool:
    """Add ``eval/nemo_gym/*``, and for each eval set the mean over its verdicts beside their number, to Miles' log.

    Miles' own mean counts a sample without a verdict as 0.0: an eval set has no group filter.

    Args:
        rollout_id: number of the rollout.
        args: of Miles.
        data: per eval set ``rewards`` and, in most modes, ``samples``.
        extra_metrics: what Miles logs besides; added to in place.

    Returns:
        False: Miles' own log follows.
    """
    try:
        metrics: dict[str, float] = {}
        for name, of_set in data.items():
            samples = list(_flat((of_set or {}).get("samples") or []))
            verdicts = [read_verdict(getattr(sample, "metadata", None)) for sample in samples]
            graded = [verdict for verdict in verdicts if verdict is not None]
            if samples:
                metrics[f"{name}/verdicts"] = float(len(graded))
                metrics[f"{name}/no_verdict_share"] = 1.0 - len(graded) / len(samples)
            _put_mean(metrics, f"{name}/mean_over_verdicts", graded)
        metrics.update(TALLY.take())
        _publish(f"eval/{_PREFIX}", metrics, extra_metrics, args, rollout_id, step_key="eval/step")
    except Exception:
        logger.exception("the metrics of eval %s are lost", rollout_id)
    return False


def _sample_metrics(samples: list[Any]) -> dict[str, float]:
    groups = {getattr(sample, "group_index", None) for sample in samples} - {None}
    metrics = {"kept_samples": float(len(samples))}
    if groups:
        metrics["kept_groups"] = float(len(groups))
    measured = [_agent_metrics(sample) for sample in samples]
    for key, name in _MEANS.items():
        _put_mean(metrics, name, [known.get(key) for known in measured])
    return metrics


def _agent_metrics(sample: Any) -> dict[str, Any]:
    metadata = getattr(sample, "metadata", None)
    metrics = metadata.get("agent_metrics") if isinstance(metadata, dict) else None
    return metrics if isinstance(metrics, dict) else {}


def _put_mean(metrics: dict[str, float], name: str, values: list[Any]) -> None:
    known = [float(value) for value in values if isinstance(value, numbers.Real) and math.isfinite(value)]
    if known:
        metrics[name] = sum(known) / len(known)


def _publish(
    prefix: str, metrics: dict[str, float], miles_metrics: dict | None, args: Any, rollout_id: int, *, step_key: str
) -> None:
    named = {f"{prefix}/{name}": value for name, value in metrics.items()}
    if isinstance(miles_metrics, dict):
        miles_metrics.update(named)
    else:
        _track({**named, step_key: _rollout_step(args, rollout_id)}, args, step_key=step_key)


def _track(metrics: dict[str, float], args: Any, *, step_key: str) -> None:
    # Not at the top: the module moved between releases of Miles, and it imports torch.
    try:
        from miles.utils.tracking_utils.tracking import log
    except ImportError:
        from miles.utils.tracking_utils import log
    log(args, metrics, step_key=step_key)


def _rollout_step(args: Any, rollout_id: int) -> int:
    from miles.utils.metric_utils import compute_rollout_step

    return compute_rollout_step(args, rollout_id)


@functools.lru_cache(maxsize=16)
def _error_once(message: str) -> None:
    logger.error(message)
