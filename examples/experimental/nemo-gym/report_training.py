"""How a training run went, step by step: reward, kept and dropped groups, exit statuses.

    read_run(path)    the folder of --dump-details, or the log of a rollout

Read are, as Miles main writes them:
- ``<dump>/events/*.jsonl``: each logged metric as an event of type ``metric``
  (miles/utils/audit_utils/event_logger/models.py); the numbers of ``nemogym_generate.log_rollout`` are among them;
- ``<dump>/rollout_data/<rollout>.pt``, for the rewards of steps that no event tells: the kept samples, a pickle inside
  a zip archive (miles/ray/rollout/debug_data.py);
- a log: lines ``perf <rollout>: {...}`` (miles/ray/rollout/metrics.py) and ``rollout <rollout>: {...}``
  (miles/backends/training_utils/log_utils.py), with whatever ray puts before them.

A pickle can run code when it is opened. Here it cannot: every class and function that it names becomes an empty shell.
One that was made to do harm can still take all memory or crash the command: read dumps of people you trust.
"""

import pickle
import re
import statistics
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemogym_contract import EXIT_STATUSES
from report_text import counted, one_line, percent
from row_reader import DataError, json_lines

_STATUS = "rollout/nemo_gym/exit_status/"
_DROP = "rollout/dynamic_filter/drop_"
_KEPT = "rollout/nemo_gym/kept_groups"
_REWARD = "rollout/raw_reward"
_EVAL = re.compile(r"eval/nemo_gym/(.+)/mean_over_verdicts")

FOLDERS = ("events", "rollout_data")
_MOST = 10**12  # what no reward and no count reaches

_LOGGED = re.compile(r"(?:perf|rollout|eval) (\d{1,9}): \{")
_NUMBER = re.compile(r"'([^']{1,200})': (?:np\.\w+\()?(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?![\w.])", re.IGNORECASE)


@dataclass
class Step:
    """What is known of one rollout; None and empty where nothing is.

    Attributes:
        reward: mean of the kept samples.
        kept: groups that were trained.
        dropped: groups that were not, by the filter's reason.
        statuses: episodes by exit status, those of dropped groups too.
    """

    reward: float | None = None
    kept: float | None = None
    dropped: dict[str, float] = field(default_factory=dict)
    statuses: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """A training run: its steps by number, and for each eval set the mean over its verdicts by step.

    ``of_samples``: steps whose episodes only the kept samples tell of.
    """

    name: str
    steps: dict[int, Step] = field(default_factory=dict)
    evals: dict[str, dict[int, float]] = field(default_factory=dict)
    of_samples: int = 0

    @property
    def statuses(self) -> dict[str, int]:
        """Episodes of all steps by exit status, the commonest first."""
        counts: Counter[str] = Counter()
        for step in self.steps.values():
            counts.update({name: int(count) for name, count in step.statuses.items()})
        return dict(counts.most_common())

    @property
    def dropped(self) -> dict[str, int]:
        """Groups of all steps that the filter dropped, by reason."""
        counts: Counter[str] = Counter()
        for step in self.steps.values():
            counts.update({name: int(count) for name, count in step.dropped.items()})
        return dict(counts.most_common())

    @property
    def kept(self) -> int:
        return int(sum(step.kept or 0 for step in self.steps.values()))

    @property
    def rewards(self) -> dict[int, float]:
        return {number: step.reward for number, step in self.steps.items() if step.reward is not None}


def read_run(path: Path) -> Run:
    """The run of a dump or a log.

    Args:
        path: the folder that --dump-details named, or a text file.

    Raises:
        DataError: it cannot be read, or no step is in it.
    """
    run = Run(name=one_line(path.name or path, limit=60))
    metrics = _metrics_of_events(path / "events") if path.is_dir() else _metrics_of_log(path)
    for number, logged in metrics:
        _add(run, number, logged)
    for number, file in _sample_files(path) if path.is_dir() else ():
        if number not in run.rewards:
            step = run.steps.setdefault(number, Step())
            run.of_samples += not step.statuses
            _add_samples(step, file)
    if not run.steps:
        what = (
            "events/*.jsonl or rollout_data/*.pt of --dump-details"
            if path.is_dir()
            else "lines `perf <number>: {...}`"
        )
        raise DataError(
            f"expected {what} with rollouts in {path}, found none; name the folder given to --dump-details, the log of "
            "a rollout, or a scan's results (.jsonl)"
        )
    run.steps = dict(sorted(run.steps.items()))
    run.evals = {name: dict(sorted(points.items())) for name, points in sorted(run.evals.items())}
    return run


def _add(run: Run, number: int, logged: Mapping[str, Any]) -> None:
    for name, value in logged.items():
        if isinstance(value, bool) or not _is_known(value):
            continue
        if match := _EVAL.fullmatch(name):
            run.evals.setdefault(one_line(match[1], limit=40), {})[number] = float(value)
            continue
        if not name.startswith((_STATUS, _DROP)) and name not in (_KEPT, _REWARD):
            continue
        step = run.steps.setdefault(number, Step())
        if name == _REWARD:
            step.reward = float(value)
        elif value < 0:
            continue
        elif name == _KEPT:
            step.kept = float(value)
        elif name.startswith(_STATUS):
            step.statuses[one_line(name.removeprefix(_STATUS), limit=40)] = float(value)
        else:
            step.dropped[one_line(name.removeprefix(_DROP), limit=60)] = float(value)


def _is_known(value: Any) -> bool:
    """Whether a value is a number that can be counted with and drawn; an integer may have hundreds of digits."""
    return isinstance(value, (int, float)) and abs(value) <= _MOST


# --- events and logs --------------------------------------------------------------


def _metrics_of_events(folder: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for file in sorted(folder.glob("**/*.jsonl")):
        for _, event in json_lines(file, skip_cut_off_end=True):
            metrics = event.get("metrics") if isinstance(event, dict) and event.get("type") == "metric" else None
            if isinstance(metrics, dict):
                number = metrics.get("rollout/step", metrics.get("eval/step"))
                if isinstance(number, int) and not isinstance(number, bool) and _is_known(number):
                    yield number, metrics


def _metrics_of_log(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                # Apart from the search: a pattern that reaches to the end of the line takes time by its square.
                if line.rstrip().endswith("}") and (match := _LOGGED.search(line)):
                    yield int(match[1]), {name: float(value) for name, value in _NUMBER.findall(line, match.end())}
    except OSError as error:
        raise DataError(f"expected to read {path}, found: {error.strerror}") from None


# --- samples ----------------------------------------------------------------------


def _sample_files(dump: Path) -> list[tuple[int, Path]]:
    files = [(int(file.stem), file) for file in dump.glob("rollout_data/*.pt") if file.stem.isdecimal()]
    return sorted((number, file) for number, file in files if _is_known(number))


def _add_samples(step: Step, file: Path) -> None:
    samples = [sample for sample in _read_samples(file) if isinstance(sample, dict)]
    rewards = [sample.get("reward") for sample in samples]
    known = [float(reward) for reward in rewards if _is_known(reward)]
    if known:
        step.reward = statistics.fmean(known)
    if step.kept is None:
        groups = (sample.get("group_index") for sample in samples)
        step.kept = float(len({group for group in groups if isinstance(group, int)}))
    if not step.statuses:
        statuses: defaultdict[str, float] = defaultdict(float)
        for sample in samples:
            metadata = sample.get("metadata")
            status = metadata.get("exit_status") if isinstance(metadata, dict) else None
            statuses[status if isinstance(status, str) and status in EXIT_STATUSES else "unknown"] += 1
        step.statuses = dict(statuses)


def _read_samples(file: Path) -> list[Any]:
    """The samples of one rollout as plain values; nothing in the file is run.

    Memory and time have no limit: a file that was made for it can exhaust them, or crash the interpreter.

    Raises:
        DataError: it is no such file, or is still being written.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as pickled:
                samples = _PlainValues(pickled).load()["samples"]
    # A pickle that is broken on purpose can raise anything that its shells do not know.
    except Exception as error:
        raise DataError(
            f"expected the samples of one rollout in {file}, found {one_line(error, limit=120) or type(error).__name__}; "
            "if it is being written, try again when the step has ended"
        ) from None
    return samples if isinstance(samples, list) else []


class _Shell:
    """Stands for any object of a pickle; takes whatever is done to it and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> "_Shell":
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class _PlainValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        return _Shell

    def persistent_load(self, pid: Any) -> _Shell:
        return _Shell()


# --- what it says -----------------------------------------------------------------


def run_verdict(run: Run) -> str:
    """How the run went, in one sentence."""
    rewards, episodes = list(run.rewards.values()), sum(run.statuses.values())
    without = sum(count for name, count in run.statuses.items() if not is_verdict(name))
    said = f"In {counted(len(run.steps), 'step')} "
    if len(rewards) > 1:
        span = max(len(rewards) // 5, 1)
        first, last = statistics.fmean(rewards[:span]), statistics.fmean(rewards[-span:])
        which = f"first and last {span}" if span > 1 else "first and last"
        moved = f"{'rose' if last > first else 'fell'} from {first:.3f} to {last:.3f} ({which})"
        said += f"the mean reward of the kept samples {moved if last != first else f'stayed at {first:.3f}'}"
    else:
        said += f"the mean reward is {rewards[0]:.3f}" if rewards else "no reward was logged"
    groups = run.kept + sum(run.dropped.values())
    if groups:
        said += f"; {run.kept:,} of {counted(groups, 'group')} were trained"
    if episodes:
        said += f" and {percent(without, episodes)} of {counted(episodes, 'episode')} gave no verdict"
    return said + "."


def run_notes(run: Run) -> list[str]:
    """What to know before the figures are trusted, a sentence each."""
    said = []
    if run.of_samples:
        said.append(
            f"Of {counted(run.of_samples, 'step')} of {run.name} only the kept samples are known, not the groups that were "
            "dropped."
        )
    if not any(step.statuses for step in run.steps.values()):
        said.append(
            f"{run.name} tells no exit status: --custom-rollout-log-function-path nemogym_generate.log_rollout logs them."
        )
    return said


def is_verdict(status: str) -> bool:
    """Whether an episode that ended so has a reward that the policy can have caused."""
    return status in EXIT_STATUSES and EXIT_STATUSES[status].is_verdict


def run_figures(run: Run) -> dict[str, str]:
    """The totals of a run, by what they are."""
    rewards, episodes = list(run.rewards.values()), sum(run.statuses.values())
    without = sum(count for name, count in run.statuses.items() if not is_verdict(name))
    shown = {"steps": f"{len(run.steps):,}"}
    if rewards:
        shown["mean reward, first step"] = f"{rewards[0]:.3f}"
        shown["mean reward, last step"] = f"{rewards[-1]:.3f}"
    shown["groups kept"] = f"{run.kept:,}"
    shown |= {f"groups dropped, {name}": f"{count:,}" for name, count in run.dropped.items()}
    shown["episodes"] = f"{episodes:,}"
    shown["without a verdict"] = f"{without:,} ({percent(without, episodes)})"
    return shown | {f"{name}, last eval": f"{list(points.values())[-1]:.3f}" for name, points in run.evals.items()}
