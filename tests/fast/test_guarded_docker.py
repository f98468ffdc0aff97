"""What the docker sandbox makes of the engine's record of a command."""

import importlib
import json
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parents[2] / "examples" / "experimental" / "nemo-gym" / "docker_sandbox"
_STARTED_S = 100.0


@pytest.fixture
def record(monkeypatch):
    monkeypatch.syspath_prepend(str(_PACKAGE))
    return importlib.import_module("nemo_gym_guarded_docker.record")


def _line(action: str, time_s: float, exit_code: int | None = None) -> str:
    attributes = {"name": "nemo-gym-1"} if exit_code is None else {"name": "nemo-gym-1", "exitCode": str(exit_code)}
    return json.dumps({"Action": action, "Actor": {"Attributes": attributes}, "timeNano": int(time_s * 1e9)})


_TAKEN = [("exec_create: bash -c x", 100.1), ("exec_start: bash -c x", 100.2)]


@pytest.mark.parametrize(
    "events, return_code, timed_out, raised",
    [
        ([*_TAKEN, ("exec_die", 101.0, 1)], 1, False, None),
        (_TAKEN, 126, False, None),  # the container has no such shell
        ([("exec_die", 400.0, 2)], 2, False, None),  # a long command on a busy engine: its start is forgotten
        ([("exec_die", 99.0, 255)], 255, False, "SandboxLost"),  # of an earlier command
        ([("exec_die", 101.0, 127)], 255, False, "SandboxLost"),  # of an engine started again over a live container
        ([], 125, False, "SandboxLost"),
        ([], 125, True, None),
        ([("create", 1.0), ("start", 1.1)], 255, False, "SandboxLost"),
        ([*_TAKEN, ("exec_die", 101.0, 137), ("die", 101.1, 143), ("destroy", 101.2)], 137, False, "SandboxDied"),
        ([("die", 50.0, 137), ("destroy", 50.1)], 125, False, "SandboxDied"),
        ([*_TAKEN, ("oom", 100.5), ("die", 101.1, 137)], 137, True, "SandboxDied"),
        ([*_TAKEN, ("kill", 100.9), ("exec_die", 101.0, 137), ("die", 101.1, 137)], 137, False, "SandboxLost"),
        ([*_TAKEN, ("exec_die", 101.0, 137), ("die", 101.1, 0)], 137, False, "SandboxLost"),  # its time was up
        ([("kill", 50.0), ("die", 50.1, 137)], 125, False, "SandboxLost"),
    ],
)
def test_a_failed_command_is_judged_by_the_engines_record(record, events, return_code, timed_out, raised):
    parsed = record.parse_events("\n".join(_line(*event) for event in events))
    arguments = {"return_code": return_code, "since_s": _STARTED_S, "timed_out": timed_out}
    if raised is None:
        record.check_record(parsed, **arguments)
        return
    with pytest.raises(getattr(record, raised)) as error:
        record.check_record(parsed, **arguments)
    assert type(error.value).__name__ == raised


def test_events_are_read_without_the_commands_in_them(record):
    lines = _line("exec_create: bash -c 'echo die: 1'", 1.5) + "\n" + _line("exec_die", 2.25, 3) + "\n"
    assert record.parse_events(lines) == [("exec_create", 1.5, None), ("exec_die", 2.25, 3)]
