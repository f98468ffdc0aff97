"""What the scripted policy says in the environments of ``environments.py``: roles ``solve`` and ``wrong`` of each.

    mcqa                  solve answers rightly (reward 1.0), wrong names another choice (0.0)
    workplace_assistant   solve makes the calls that the task wants, one a turn (1.0), wrong looks something up (0.0)
    blackjack             solve stands at 17 (1.0, 0.0 or -1.0, as the cards fall), wrong hits until it is bust (-1.0)
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from local_stack.scripted_policy import Messages, Turn, UnknownTask, read_json_lines, text_of

Row = dict[str, Any]

_HAND = re.compile(r"Your hand: .* = (\d+)")
_STAND_AT = 17


def _answer(row: Row, messages: Messages) -> Turn:
    return Turn(f"The answer is \\boxed{{{row['expected_answer']}}}.")


def _answer_wrongly(row: Row, messages: Messages) -> Turn:
    letters = [letter for option in row["options"] for letter in option]
    return Turn(f"\\boxed{{{next(letter for letter in letters if letter != row['expected_answer'])}}}")


def _make_the_calls(row: Row, messages: Messages) -> Turn:
    done, wanted = _answered_calls(messages), row["ground_truth"]
    if done == len(wanted):
        return Turn("All of it is done.")
    return Turn(f"Call {done + 1} of {len(wanted)}.", calls=((wanted[done]["name"], wanted[done]["arguments"]),))


def _look_something_up(row: Row, messages: Messages) -> Turn:
    if _answered_calls(messages):
        return Turn("I found nothing to do.")
    return Turn("", calls=(("company_directory_find_email_address", json.dumps({"name": "nobody"})),))


def _stand_at_17(row: Row, messages: Messages) -> Turn:
    return _act("stand" if _hand(messages) >= _STAND_AT else "hit")


def _always_hit(row: Row, messages: Messages) -> Turn:
    return _act("hit")


PLAYERS: dict[str, dict[str, Callable[[Row, Messages], Turn]]] = {
    "mcqa": {"solve": _answer, "wrong": _answer_wrongly},
    "workplace_assistant": {"solve": _make_the_calls, "wrong": _look_something_up},
    "blackjack": {"solve": _stand_at_17, "wrong": _always_hit},
}


def load_rows(path: Path) -> list[Row]:
    """Read NeMo Gym rows.

    Args:
        path: JSONL.

    Raises:
        ValueError: unreadable, or a line is no NeMo Gym row; the line is named.
    """
    rows = []
    for number, row in read_json_lines(path):
        if not isinstance(row, dict) or not isinstance(row.get("responses_create_params"), dict):
            raise ValueError(f"{path} line {number}: expected a NeMo Gym row, found none")
        rows.append(row)
    return rows


def find_row(rows: list[Row], messages: Messages) -> Row:
    """The row that a conversation began with.

    Raises:
        UnknownTask: it is none of them.
    """
    said = [text_of(message) for message in messages if message.get("role") == "user"]
    for row in rows:
        if said and row_text(row) in said[0]:
            return row
    raise UnknownTask(f"The conversation begins with none of the {len(rows)} known tasks.")


def row_text(row: Row) -> str:
    """The first thing that a row's user says."""
    return next(text_of(item) for item in row["responses_create_params"]["input"] if item.get("role") == "user")


def _answered_calls(messages: Messages) -> int:
    return sum(message.get("role") == "tool" for message in messages)


def _hand(messages: Messages) -> int:
    return int(_HAND.findall(text_of(messages[-1]))[-1])


def _act(action: str) -> Turn:
    return Turn(f"I {action}. <action>{action}</action>")
