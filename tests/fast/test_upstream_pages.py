"""tools/upstream_pages.py: what a merge changes, what it leaves, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from upstream_pages import (
    PageError,
    add_bullet,
    add_page,
    merge_rows,
    put_section,
    replace_definitions,
    section_of,
    without,
)

PAGE = "# T\n\nIntro.\n\n## A\n\na\n\n### A1\n\n```bash\n## no heading\n```\n\n## B\n\nb\n"


def test_a_section_ends_at_the_next_heading_of_its_level_outside_of_code():
    assert section_of(PAGE, "## A") == "## A\n\na\n\n### A1\n\n```bash\n## no heading\n```\n"
    assert section_of(PAGE, "## B") == "## B\n\nb\n"
    with pytest.raises(PageError, match="expected the heading '## no heading', found none"):
        section_of(PAGE, "## no heading")


@pytest.mark.parametrize(
    "own, instead_of, expected",
    [
        ("## B", None, PAGE.replace("## B\n\nb\n", "## B\n\nnew\n")),
        ("## C", "## B", PAGE.replace("## B\n\nb\n", "## C\n\nnew\n")),
        ("## C", "## Gone", PAGE.replace("## B", "## C\n\nnew\n\n## B")),
        ("## C", None, PAGE.replace("## B", "## C\n\nnew\n\n## B")),
    ],
)
def test_a_section_takes_the_place_of_its_own_or_of_another_or_a_new_one(own, instead_of, expected):
    section = f"{own}\n\nnew\n"
    once = put_section(PAGE, section, instead_of=instead_of, before="## B")
    assert once == expected
    assert put_section(once, section, instead_of=instead_of, before="## B") == once


@pytest.mark.parametrize(
    "text, part, expected",
    [
        (PAGE, "### A1", "# T\n\nIntro.\n\n## A\n\na\n\n## B\n\nb\n"),
        (PAGE, "## B", PAGE.partition("\n## B")[0]),
        ("- one\n  and more\n- two\n\nend\n", "more", "- two\n\nend\n"),
        ("1. one\n2. two\n", "two", "1. one\n"),
        ("1. one\n\n2. two\n\n   | a |\n\n   more\n\nend\n", "two", "1. one\n\nend\n"),
        ("1. one\n\n   more\n\n2. two\n\nend\n", "more", "2. two\n\nend\n"),
        ("- one\n\n    code of the page\n\n- two\n", "two", "- one\n\n    code of the page\n"),
        ("| a | b |\n| - | - |\n| x | y |\n| z | x |\n", "| z |", "| a | b |\n| - | - |\n| x | y |\n"),
    ],
)
def test_parts_are_left_out_whole(text, part, expected):
    assert without(text, [part]) == expected


def test_a_part_that_is_not_there_is_an_error():
    with pytest.raises(PageError, match="expected a heading, table row or list item with 'prose', found none"):
        without("prose\n", ["prose"])


TABLE = (
    "Text.\n\n| Name | Used within | Guide |\n|---|:---:|---|\n| [B](u) |  Z   | x |\n| [d](u) | A, N | x |\n\nMore.\n"
)


def _merged(theirs: str, *rows: str, head: str = "| Name | Guide | Used within | Extra |") -> str:
    ours = "\n".join([head, "|---|---|---|---|", *rows, ""])
    return merge_rows(theirs, ours, tables=["Name"], union="Used within")


@pytest.mark.parametrize(
    "row, line",
    [
        ("| [A](v) | g | N | e |", "| [A](v) | N | g |\n| [B](u) |"),
        ("| `c` | g | N | e |", "|  Z   | x |\n| `c` | N | g |\n| [d]"),
        ("| E | g | N | e |", "| A, N | x |\n| E | N | g |\n\nMore."),
    ],
)
def test_a_new_row_goes_where_its_name_belongs_with_their_columns(row, line):
    merged = _merged(TABLE, row)
    assert line in merged and len(merged.splitlines()) == len(TABLE.splitlines()) + 1
    assert _merged(merged, row) == merged


def test_a_row_that_is_there_gains_a_name_and_keeps_the_rest():
    assert _merged(TABLE, "| [b](v) | g | N | e |") == TABLE.replace("| [B](u) |  Z   | x |", "| [B](u) | N, Z | x |")
    assert _merged(TABLE, "| D | g | N | e |") == TABLE


def test_tables_that_do_not_fit_are_errors():
    with pytest.raises(PageError, match="expected a table whose first column is 'Name', found none"):
        _merged("no table\n", "| A | g | N | e |")
    with pytest.raises(PageError, match="to have the columns .* found none named 'Guide'"):
        _merged(TABLE, "| A | N |", head="| Name | Used within |")
    with pytest.raises(PageError, match="expected a table of ours whose first column is 'Name'"):
        _merged(TABLE, head="| Other |")


def _nav(*pages: object, indent: int | None = 1) -> str:
    return (
        json.dumps({"tabs": [{"pages": ["x", {"group": "É", "pages": [*pages]}]}]}, indent=indent, ensure_ascii=False)
        + "\n"
    )


def test_a_page_goes_behind_the_landing_page_in_alphabetical_order():
    assert add_page(_nav("z", "a", "n"), group="É", page="m") == _nav("z", "a", "m", "n")
    assert add_page(_nav("z", "a"), group="É", page="m") == _nav("z", "a", "m")
    assert add_page(_nav("z", "n", "m"), group="É", page="m") == _nav("z", "n", "m")


def test_a_navigation_of_another_layout_is_touched_by_nobody():
    with pytest.raises(PageError, match="expected docs.json with an indent of 1"):
        add_page(_nav("z", indent=2), group="É", page="m")
    with pytest.raises(PageError, match="expected a group 'G' in the navigation"):
        add_page(_nav("z"), group="G", page="m")


def test_an_example_is_listed_among_those_of_its_folder():
    first, last = "- **[a](./x/a)**: A.\n", "- **[z](./x/z)**: Z.\n"
    other = "- **[m](./m)**: M.\n\n"
    bullet = "- **[n](./x/n)**: N."
    assert add_bullet(other + first + last, bullet) == f"{other}{first}{bullet}\n{last}"
    assert add_bullet(other + first, bullet) == f"{other}{first}{bullet}\n"
    assert add_bullet(f"{other}- **[n](./x/n)**: Theirs.\n", bullet) == f"{other}- **[n](./x/n)**: Theirs.\n"
    with pytest.raises(PageError, match="expected examples of ./x in the list, found none"):
        add_bullet(other, bullet)


def test_definitions_are_replaced_by_name_and_the_rest_is_left():
    theirs = "from m import a  # why\nfrom n import b\n\n\nasync def f(x):\n    return a(x)\n\n\ndef g():\n    pass\n"
    ours = '"""Of ours."""\n\nimport os\n\nfrom m import c\n\n\nasync def f(x):\n    return c(x, os)\n'
    assert replace_definitions(theirs, ours) == theirs.replace("import a ", "import c ").replace("a(x)", "c(x, os)")
    with pytest.raises(PageError, match="expected function h at top level, found none"):
        replace_definitions(theirs, "def h():\n    pass\n")
