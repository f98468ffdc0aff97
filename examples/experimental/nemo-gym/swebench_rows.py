"""Which SWE-bench rows a NeMo Gym agent can run and its grader can grade, and the form in which a row is sent.

    normalised_task(instance, subset=, split=)  -> the row's fields as they are sent: JSON, lower-case id, test lists
    ungradable_reason(task)                     -> why it cannot be sent or graded, a key of REASONS; None if it can
    prompt_row(task)                            -> Miles prompt data: {"prompt", "metadata"}

No I/O but the list of what the grader knows, ``data/eval_specs.json``, made from swebench 4.1.0; no package beside the
standard library. A rule about the wire itself is the contract's. The others are those of swebench, the grader:
harness/test_spec/test_spec.py (``make_test_spec``) and harness/grading.py (``get_logs_eval``), as ``_run_eval_v2`` in
responses_api_agents/mini_swe_agent_2/app.py of NVIDIA-NeMo/Gym calls them: it does so when the episode is over, so that
each row found here would cost a whole one.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from datetime import time as time_of_day
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Any

from nemogym_contract import NOT_FORWARDED, build_run_request, parse_literal

REASONS: dict[str, str] = {
    "not_json": "a field has no JSON form: NaN, infinite, bytes or broken Unicode; or image_name names no image",
    "instance_id": "the id is missing, or no name that the server can call a folder",
    "subset": "the subset is no name that the server can call a folder",
    "problem_statement": "there is no problem statement to give to the agent",
    "no_eval_spec": "the grader does not know the repository, or not in this version",
    "version": "the version is a number, which drops zeros: 3.1 may be 3.1 or 3.10; give it as text",
    "test_patch": "there is no test patch that git can apply",
    "base_commit": "there is no base commit that git can check out",
    "fail_to_pass": "FAIL_TO_PASS is no list with a test in it, so that nothing shows the fix",
    "pass_to_pass": "PASS_TO_PASS is no list of tests",
    "eval_script": "the grader's script is too long for one argument of a command",
}
# Not a matter of grading: such a row cannot even be sent.
UNSENDABLE = frozenset({"not_json", "instance_id", "subset", "problem_statement"})

# rm_type sends the reward of a row past the reward hook (miles/rollout/rm_hub/__init__.py); round_number of the first
# sample makes Miles read it from all (miles/ray/rollout/train_data_conversion.py). The others Miles writes itself and
# takes for its own: the mismatch metric (miles/ray/rollout/metrics.py), the transcript and the timeline of a sample
# (miles/rollout/generate_utils/sample_utils.py). ``metadata`` in a row's metadata is what a prompt row wraps it in.
_MILES_OWN = frozenset({"rm_type", "round_number", "tito_session_mismatch", "messages", "lifecycle", "metadata"})
REMOVED_FIELDS = NOT_FORWARDED | _MILES_OWN

# Linux limits one argument of a program to 128 KiB, its final NUL included (MAX_ARG_STRLEN), and the script travels as
# one, maybe after the lines that activate conda (some 330 bytes; ``_command`` in the agent's sandbox_environment.py).
_LONGEST_ARGUMENT = 131_071
_CONDA_ACTIVATION_BYTES = 512
# The server's longest file name is <id>_<ten digits>_<uuid>.traj.json; file systems end at 255.
_LONGEST_ID = 255 - len("_0123456789_.traj.json") - 36

_DIFF_HEADER = re.compile(r"^diff --git a/.* b/.*$", re.MULTILINE)
_GIT_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


class NotJsonError(ValueError):
    """A field of a row has no JSON form; the message names it."""


# --- form -----------------------------------------------------------------------


def normalised_task(instance: Mapping[str, Any], *, subset: str, split: str) -> dict[str, Any]:
    """The fields of a row as they are sent; normalised again they stay as they are.

    Every value becomes JSON (``as_json``). The id becomes lower-case, as the server looks the grade up; where that
    changes it, ``original_instance_id`` keeps it. FAIL_TO_PASS and PASS_TO_PASS become lists, whether they are lists,
    JSON or a Python repr; PASS_TO_PASS of None is an empty one. A version that is a number becomes the grader's text
    where only one version can be meant. What cannot be made sense of stays as it is, for ``ungradable_reason``.

    Args:
        instance: SWE-bench fields, with values as ``json``, ``pyarrow`` or ``datasets`` read them.
        subset: image family on the server.
        split: name of the split.

    Raises:
        NotJsonError: a field has no JSON form.
    """
    own = REMOVED_FIELDS | {"subset", "split"}
    task = {key: as_json(value, name=f"field {key!r}") for key, value in instance.items() if key not in own}
    original_id = task.get("instance_id")
    if isinstance(original_id, str) and original_id != original_id.lower():
        task |= {"instance_id": original_id.lower(), "original_instance_id": original_id}
    if "version" in task:
        task["version"] = _version_text(instance["version"], task["version"], repo=task.get("repo"))
    if task.get("PASS_TO_PASS", []) is None:
        task["PASS_TO_PASS"] = []
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        if key in task:
            task[key] = _test_list(task[key])
    return task | {"subset": subset, "split": split}


def prompt_row(task: Mapping[str, Any]) -> dict[str, Any]:
    """Miles prompt data of a normalised task: ``{"prompt": problem_statement, "metadata": {the task, image_name}}``.

    A row's own ``image_name`` stays; the others get the one that the contract sends.
    """
    named = {key: task[key] for key in ("instance_id", "subset", "image_name") if key in task}
    image = {"image_name": _request(named)["image_name"]}
    names = {key: task[key] for key in ("subset", "split")}
    fields = {key: value for key, value in task.items() if key not in names}
    return {"prompt": task["problem_statement"], "metadata": {**fields, **image, **names}}


def as_json(value: Any, *, name: str) -> Any:
    """``value`` as JSON types: dates in ISO 8601, durations in seconds, numpy as Python, Decimal as its exact text.

    Args:
        value: a value of a row as ``json``, ``pyarrow`` or ``datasets`` reads it.
        name: what it is, for the message.

    Raises:
        NotJsonError: NaN or infinite, text that is no Unicode, a type without a JSON form, or nested too deeply.
    """
    try:
        return _as_json(value, name=name)
    except RecursionError:
        raise NotJsonError(f"expected {name} to be JSON, found it nested too deeply") from None


def _as_json(value: Any, *, name: str) -> Any:
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        if value.dtype.kind in "mM":
            # tolist() makes bare integers of times finer than microseconds.
            value = value.astype(f"{value.dtype.kind}8[us]")
        return _as_json(value.tolist(), name=name)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return _checked_text(value, name=name)
    if isinstance(value, (float, Decimal)):
        if not math.isfinite(value):
            raise NotJsonError(f"expected {name} to be JSON, found the number {value}")
        return str(value) if isinstance(value, Decimal) else value
    if isinstance(value, (datetime, date, time_of_day)):
        if value != value:  # pandas' missing time is a datetime
            raise NotJsonError(f"expected {name} to be JSON, found a time that is none")
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (list, tuple)):
        return [_as_json(item, name=name) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {_checked_text(key, name=name): _as_json(item, name=name) for key, item in value.items()}
    raise NotJsonError(f"expected {name} to be JSON, found {type(value).__name__}")


def _checked_text(text: str, *, name: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise NotJsonError(f"expected {name} to be JSON, found half of a surrogate pair in it") from None
    return text


def _version_text(raw: Any, value: Any, *, repo: Any) -> Any:
    """The grader's text for a version that is a number, if only one can be meant; else ``value``.

    A fraction may have lost zeros at its end (3.10 is the number 3.1), or have got some (a column of decimals has as
    many places everywhere), so that its own text must be the one known version of its value.
    """
    number = raw if isinstance(raw, Decimal) else value
    if isinstance(number, bool) or not isinstance(number, (int, float, Decimal)):
        return value
    same = _versions_equal_to(number, repo=repo)
    if len(same) == 1 and (same[0] == str(number) or number == int(number)):
        return same[0]
    return float(number) if isinstance(number, Decimal) else number


def _versions_equal_to(number: int | float | Decimal, *, repo: Any) -> list[str]:
    exact = Decimal(str(number))
    return [version for version in _known_versions(repo) if _decimal(version) == exact]


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def _test_list(value: Any) -> Any:
    parsed = parse_literal(value) if isinstance(value, str) else value
    return list(parsed) if isinstance(parsed, (list, tuple)) else value


# --- fitness --------------------------------------------------------------------


def ungradable_reason(task: Mapping[str, Any]) -> str | None:
    """Why a row cannot be sent, or would cost an episode that the grader then cannot grade.

    Args:
        task: a row's fields as they would be sent, such as the metadata of a prompt row. It is judged as it is: what
            ``normalised_task`` would mend, such as a version that is a number, is a reason here.

    Returns:
        The first that applies, a key of ``REASONS``; None for a row that can be graded.
    """
    reason = _unsendable_reason(task)
    return reason or next((reason for reason, is_fit in _GRADABLE.items() if not is_fit(task)), None)


def is_subset(name: Any) -> bool:
    """Whether the server can call a folder so, as it does with a row's subset."""
    return _can_be_sent({"instance_id": "any", "subset": name})


def has_gold_patch(task: Mapping[str, Any]) -> bool:
    """Whether a golden scan can apply the row's patch; the agent writes it to a file in one command."""
    patch = task.get("patch")
    return _is_text(patch) and len(patch.encode()) <= _LONGEST_ARGUMENT - _CONDA_ACTIVATION_BYTES


def is_known_repository(repo: Any) -> bool:
    """Whether the grader knows the repository, in whatever version."""
    return bool(_known_versions(repo))


def grader() -> str:
    """Name and version of the grader whose rules these are, e.g. ``swebench 4.1.0``."""
    return _eval_specs().grader


def eval_script_bytes(task: Mapping[str, Any]) -> int:
    """Upper bound of the length of the grader's script for a row with a test patch and a base commit.

    It holds the test patch, the names of the patched files (``patch_bytes``), and the commands of the version's spec, of
    which the longest of any version are assumed: the bound is 1 or 2 KB above for most rows, and never below.
    """
    return patch_bytes(task) + _eval_specs().longest_commands_bytes


def patch_bytes(task: Mapping[str, Any]) -> int:
    """What the test patch and the base commit add to the script at most, in bytes.

    A file is named at most three times (reset, run, reset), a commit too. A file's header line in the patch, three
    times, is longer than its names and what a command puts around them.
    """
    test_patch = task["test_patch"].encode()
    headers = sum(len(line) for line in test_patch.splitlines() if line.startswith(b"diff --git "))
    return len(test_patch) + 3 * headers + 3 * len(task["base_commit"])


def _unsendable_reason(task: Mapping[str, Any]) -> str | None:
    if not _can_be_sent(task):
        if not _can_be_sent({"instance_id": task.get("instance_id")}):
            return "instance_id"
        return "not_json" if is_subset(task.get("subset")) else "subset"
    if len(task["instance_id"]) > _LONGEST_ID:
        return "instance_id"
    problem_statement = task.get("problem_statement")
    is_text = isinstance(problem_statement, str) and problem_statement.strip()
    return None if is_text else "problem_statement"


def _has_eval_spec(task: Mapping[str, Any]) -> bool:
    version = task.get("version")
    return version in _known_versions(task.get("repo")) or _is_number_of_a_version(task)


def _is_number_of_a_version(task: Mapping[str, Any]) -> bool:
    version = task.get("version")
    if isinstance(version, bool) or not isinstance(version, (int, float)):
        return False
    return bool(_versions_equal_to(version, repo=task.get("repo")))


def _has_test_patch(task: Mapping[str, Any]) -> bool:
    test_patch = task.get("test_patch")
    return _is_text(test_patch) and bool(_DIFF_HEADER.search(test_patch))


def _has_base_commit(task: Mapping[str, Any]) -> bool:
    base_commit = task.get("base_commit")
    return isinstance(base_commit, str) and bool(_GIT_REVISION.fullmatch(base_commit))


def _tests(value: Any) -> list[str] | None:
    """The names as ``make_test_spec`` reads them, from a list or JSON of one; None where it cannot."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    is_list = isinstance(value, list) and all(isinstance(test, str) and test.strip() for test in value)
    return value if is_list else None


def _is_text(value: Any) -> bool:
    """Text that can be an argument of a command."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _can_be_sent(task: Mapping[str, Any]) -> bool:
    try:
        _request(task)
    except ValueError:
        return False
    return True


def _request(task: Mapping[str, Any]) -> dict[str, Any]:
    return build_run_request(task, request_kwargs=None)


_GRADABLE = {
    "no_eval_spec": _has_eval_spec,
    "version": lambda task: isinstance(task.get("version"), str),
    "test_patch": _has_test_patch,
    "base_commit": _has_base_commit,
    "fail_to_pass": lambda task: bool(_tests(task.get("FAIL_TO_PASS"))),
    "pass_to_pass": lambda task: _tests(task.get("PASS_TO_PASS", [])) is not None,
    "eval_script": lambda task: eval_script_bytes(task) <= _LONGEST_ARGUMENT - _CONDA_ACTIVATION_BYTES,
}


# --- what the grader knows --------------------------------------------------------


@dataclass(frozen=True)
class _EvalSpecs:
    """``versions``: those the grader can grade, by repository. ``longest_commands_bytes``: see ``eval_script_bytes``."""

    grader: str
    longest_commands_bytes: int
    versions: dict[str, list[str]]


@cache
def _eval_specs() -> _EvalSpecs:
    return _EvalSpecs(**json.loads((Path(__file__).parent / "data" / "eval_specs.json").read_text()))


def _known_versions(repo: Any) -> list[str]:
    return _eval_specs().versions.get(repo, []) if isinstance(repo, str) else []
