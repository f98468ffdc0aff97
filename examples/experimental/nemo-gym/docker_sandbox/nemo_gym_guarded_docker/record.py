"""What the engine's own record says about a command that failed; pure, standard library only.

The exit status and the output of ``docker exec`` prove nothing: a command can print and return whatever the client does
when the engine is gone. The events that the engine records cannot be made up inside a container.
"""

import json
from collections.abc import Iterable
from typing import NamedTuple


class Event(NamedTuple):
    """One line of ``docker events --format '{{json .}}'``, of one container.

    ``action``: its first word, such as ``exec_die``. ``time_s``: of the engine's clock. ``exit_code``: None where it has none.
    """

    action: str
    time_s: float
    exit_code: int | None


class SandboxDied(RuntimeError):
    """The container's own processes ended it."""


class SandboxLost(RuntimeError):
    """The host failed the sandbox: its engine stopped, its disk is full, or somebody removed the container."""


def parse_events(lines: str) -> list[Event]:
    """Read the output of ``docker events --format '{{json .}}'``."""
    events = []
    for line in lines.splitlines():
        fields = json.loads(line)
        exit_code = fields["Actor"]["Attributes"].get("exitCode")
        action = fields["Action"].partition(":")[0]
        events.append(Event(action, fields["timeNano"] / 1e9, None if exit_code is None else int(exit_code)))
    return events


def check_record(events: Iterable[Event], *, return_code: int, since_s: float, timed_out: bool) -> None:
    """Return if the engine has run the command, whatever came of it.

    Args:
        events: all that the engine remembers of the container.
        return_code: what ``docker exec`` returned, not 0.
        since_s: when it was started, in seconds of the engine's clock.
        timed_out: it was given up and may still run; an engine remembers its last 256 events only, perhaps not its start.

    Raises:
        SandboxDied: the container ended by itself.
        SandboxLost: the container was ended from outside or its time was up, or the engine knows nothing of the
            command: it was started again, which ends every container, or it did not take the command.
    """
    events = list(events)
    ends = [event for event in events if event.action == "die"]
    if any(event.action == "kill" for event in events):
        raise SandboxLost("the container was ended from outside: the engine was stopped, or somebody removed it")
    if ends and ends[-1].exit_code == 0:
        raise SandboxLost("the container's time, ttl_s, was up")
    if ends:
        raise SandboxDied(f"the container's processes ended it, with status {ends[-1].exit_code}")
    recent = [event for event in events if event.time_s >= since_s]
    was_taken = any(event.action == "exec_create" for event in recent)
    was_ended = any(event.action == "exec_die" and event.exit_code == return_code for event in recent)
    if not (was_taken or was_ended or timed_out):
        raise SandboxLost("the engine knows nothing of the command: it was started again or has lost the container")
