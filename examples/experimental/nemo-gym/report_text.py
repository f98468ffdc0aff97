"""Text of servers and of files, made fit to be shown: on a page, on a terminal, in a message.

Pure, standard library only.
"""

from collections.abc import Iterable

_KEPT = frozenset("\n\t")


def printable(text: object, *, limit: int = 400) -> str:
    """``text`` with every character that shows nothing or moves others written as its escape, such as ``\\u202e``.

    These are control characters, with which a terminal is steered, and the marks of writing direction, with which one
    text is made to look like another. Line ends and tabs stay.

    Args:
        text: anything; not a string, its ``str``.
        limit: characters of ``text`` that are shown; more are cut, marked by an ellipsis.
    """
    text = str(text)
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    if shown.isprintable():
        return shown
    return "".join(
        char if char in _KEPT or char.isprintable() else char.encode("unicode_escape").decode() for char in shown
    )


def one_line(text: object, *, limit: int = 400) -> str:
    """``printable`` with every run of white space as one space."""
    return " ".join(printable(" ".join(str(text).split()), limit=limit).split())


def last_lines(text: str, *, count: int, width: int = 240) -> list[str]:
    """The last ``count`` lines of a text that are not blank, each ``printable`` and at most ``width`` characters."""
    lines = [line for line in text[-count * 4096 :].splitlines() if line.strip()]
    return [printable(line.rstrip(), limit=width) for line in lines[-count:]]


def counted(count: int, one: str, many: str | None = None) -> str:
    """``1 task``, ``2 tasks``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(parts: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def percent(part: int, whole: int) -> str:
    """``41 %``; shares above 0 and below 1 are not shown as 0 or 100."""
    if not whole:
        return "0 %"
    share = 100 * part / whole
    if 0 < share < 1:
        return "under 1 %"
    return "over 99 %" if 99 < share < 100 else f"{share:.0f} %"
