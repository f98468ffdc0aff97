"""How pages of this repository become pages of a checkout of Miles: pure, text to text.

    without(text, parts)                 what is not said there (yet)
    put_section(text, section, ...)      one section into a page that Miles has
    merge_rows(theirs, ours)             rows of tables, by name
    add_page(text, group, page)          an entry of the navigation
    add_bullet(text, bullet)             a line of the list of examples
    replace_definitions(theirs, ours)    functions and imports of a module

Each raises PageError where it does not find what it needs, and returns the text as it was where nothing is to be done.
"""

import ast
import json
import re

_HEADING = re.compile(r"(#{1,6}) ")
_FENCE = re.compile(r"\s*(```+|~~~+)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_BULLET = re.compile(r"- \*\*\[[^\]]+\]\((\./[^)]+)\)\*\*: ")


class PageError(Exception):
    """A page is not what the merge was made for; the message says what was expected and found."""


# --- sections -------------------------------------------------------------------


def section_of(text: str, heading: str) -> str:
    """A heading and all below it, up to the next heading of its level or above.

    Raises:
        PageError: no such heading.
    """
    lines = text.splitlines(keepends=True)
    start, end = _span(lines, heading)
    return "".join(lines[start:end]).rstrip("\n") + "\n"


def put_section(text: str, section: str, *, instead_of: str | None = None, before: str) -> str:
    """A page with one more section, or with another one in the place of the one it had.

    Args:
        text: the page.
        section: heading and body.
        instead_of: heading of the section that it replaces, if the page has that one.
        before: heading that it goes before, where it replaces nothing.

    Raises:
        PageError: neither heading is there.
    """
    lines = text.splitlines(keepends=True)
    own = section.splitlines()[0]
    for heading in (own, instead_of):
        if heading is not None and heading in map(str.strip, lines):
            start, end = _span(lines, heading)
            break
    else:
        start = end = _span(lines, before)[0]
    after = "".join(lines[end:])
    return "".join(lines[:start]) + section.rstrip("\n") + "\n" + ("\n" + after if after else "")


def without(text: str, parts: list[str]) -> str:
    """A page without the sections, table rows and list items that are named.

    Args:
        text: the page.
        parts: a heading such as ``## Knobs`` stands for its section; anything else for the table rows and list items
            that contain it.

    Raises:
        PageError: a part is not in the page.
    """
    for part in parts:
        lines = text.splitlines(keepends=True)
        if _HEADING.match(part):
            start, end = _span(lines, part)
            kept = lines[:start] + lines[end:]
        else:
            kept = _without_items(lines, part)
        if kept == lines:
            raise PageError(f"expected a heading, table row or list item with {part!r}, found none")
        text = "".join(kept).rstrip("\n") + "\n"
    return text


def _without_items(lines: list[str], part: str) -> list[str]:
    kept: list[str] = []
    item: list[str] = []  # a list item goes with the lines that continue it, empty ones between them too
    empty: list[str] = []
    for line in [*lines, "end\n"]:
        if item and not line.strip():
            empty.append(line)
            continue
        if item and line.startswith("  "):
            item += [*empty, line]
            empty = []
            continue
        if part not in "".join(item):
            kept += [*item, *empty]
        elif kept and kept[-1].strip():
            kept += empty
        item, empty = [], []
        if re.match(r"(- |\d+\. |\|)", line):
            item = [line]
        else:
            kept.append(line)
    return kept[:-1]


def _span(lines: list[str], heading: str) -> tuple[int, int]:
    level = len(heading.split(" ", 1)[0])
    starts = [number for number, title in _headings(lines) if title == heading]
    if not starts:
        raise PageError(f"expected the heading {heading!r}, found none")
    ends = [number for number, title in _headings(lines) if number > starts[0] and title.index(" ") <= level]
    return starts[0], ends[0] if ends else len(lines)


def _headings(lines: list[str]) -> list[tuple[int, str]]:
    found, fence = [], None
    for number, line in enumerate(lines):
        mark = _FENCE.match(line)
        if mark and (fence is None or line.strip().startswith(fence)):
            fence = mark[1] if fence is None else None
        elif fence is None and _HEADING.match(line):
            found.append((number, line.strip()))
    return found


# --- tables ---------------------------------------------------------------------


def merge_rows(theirs: str, ours: str, *, tables: list[str], union: str) -> str:
    """A page with the rows of our tables in its own, in alphabetical order and each once.

    Tables belong together by the name of their first column, rows by the visible text of their first cell. A row that
    is there keeps its cells but for those of the column ``union``, lists of names to which ours are added. A new row is
    put before the first that comes after it; columns go by name, and those that only we have are left out.

    Args:
        theirs: the page of Miles.
        ours: the page of this repository.
        tables: first columns of the tables that are merged.
        union: name of a column.

    Raises:
        PageError: a table is missing on either side, or ours lacks a column of theirs.
    """
    known = {head[0]: (head, rows) for head, rows in _tables(ours)}
    for name in tables:
        if name not in known:
            raise PageError(f"expected a table of ours whose first column is {name!r}, found {sorted(known)}")
        theirs = _merge_table(theirs, *known[name], union)
    return theirs


def _merge_table(text: str, head: list[str], rows: list[list[str]], union: str) -> str:
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _cells(line)[:1] == head[:1] and line.startswith("|")]
    if not starts:
        raise PageError(f"expected a table whose first column is {head[0]!r}, found none")
    columns = _cells(lines[starts[0]])
    if missing := [column for column in columns if column not in head]:
        raise PageError(
            f"expected our table {head[0]!r} to have the columns {columns}, found none named {missing[0]!r}"
        )
    first = end = starts[0] + 2
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    table = lines[first:end]
    for row in rows:
        cells = [row[head.index(column)] for column in columns]
        names = [_name(_cells(line)[0]) for line in table]
        if _name(cells[0]) in names:
            place = names.index(_name(cells[0]))
            table[place] = _with_union(table[place], columns, cells, union)
        else:
            place = next((place for place, name in enumerate(names) if name > _name(cells[0])), len(names))
            table.insert(place, _line(cells))
    return "\n".join(lines[:first] + table + lines[end:]) + "\n"


def _with_union(line: str, columns: list[str], ours: list[str], union: str) -> str:
    if union not in columns:
        return line
    place = columns.index(union)
    theirs = _cells(line)
    listed = theirs[place].split(", ")
    wanted = [name for name in ours[place].split(", ") if name not in listed]
    if not wanted:
        return line
    theirs[place] = ", ".join(sorted([*listed, *wanted], key=str.casefold))
    return _line(theirs)


def _tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    tables, block = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append(_cells(line))
        elif block:
            tables.append((block[0], block[2:]))
            block = []
    return tables


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _name(cell: str) -> str:
    return _LINK.sub(r"\1", cell).strip("`* ").casefold()


# --- navigation and list of examples -----------------------------------------------


def add_page(text: str, *, group: str, page: str) -> str:
    """``docs.json`` with a page in a group, in alphabetical order behind the group's first page, its landing page.

    Raises:
        PageError: no such group, or the file is not written as Miles' scripts/tools/sync_example_docs.py writes it, so
            that more than an entry would change.
    """
    config = json.loads(text)
    pages = _group_pages(config, group)
    if pages is None:
        raise PageError(f"expected a group {group!r} in the navigation of docs.json, found none")
    if page in pages:
        return text
    if _as_json(config) != text:
        raise PageError("expected docs.json with an indent of 1, found another layout; run sync_example_docs.py first")
    later = (place for place, other in enumerate(pages) if place and isinstance(other, str) and other > page)
    pages.insert(next(later, len(pages)), page)
    return _as_json(config)


def _as_json(config: object) -> str:
    return json.dumps(config, indent=1, ensure_ascii=False) + "\n"


def _group_pages(node: object, group: str) -> list | None:
    if isinstance(node, dict) and node.get("group") == group:
        return node["pages"]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return next((pages for child in children if (pages := _group_pages(child, group)) is not None), None)


def add_bullet(text: str, bullet: str) -> str:
    """The list of examples with one more, in alphabetical order among those of its folder.

    Raises:
        PageError: no example of that folder is listed.
    """
    path = _BULLET.match(bullet)[1]
    folder = path.rpartition("/")[0]
    lines = text.splitlines(keepends=True)
    listed = {number: found[1] for number, line in enumerate(lines) if (found := _BULLET.match(line))}
    if path in listed.values():
        return text
    siblings = {number: other for number, other in listed.items() if other.rpartition("/")[0] == folder}
    if not siblings:
        raise PageError(f"expected examples of {folder} in the list, found none")
    later = (number for number, other in siblings.items() if other.casefold() > path.casefold())
    place = next(later, max(siblings) + 1)
    return "".join([*lines[:place], f"{bullet}\n", *lines[place:]])


# --- modules --------------------------------------------------------------------


def replace_definitions(theirs: str, ours: str) -> str:
    """A module with our functions for those of the same name, and our imports for those of the same module.

    Args:
        theirs: source of Miles' module.
        ours: source that holds nothing but functions and ``from`` imports; further imports are left out.

    Raises:
        PageError: it has nothing of that name.
    """
    lines = theirs.splitlines(keepends=True)
    nodes = {_defined(node): node for node in ast.parse(theirs).body}
    replacements = []
    for node in ast.parse(ours).body:
        name = _defined(node)
        if name is None:
            continue
        if name not in nodes:
            raise PageError(f"expected {name} at top level, found none")
        replacements.append((nodes[name].lineno - 1, nodes[name].end_lineno, ast.get_source_segment(ours, node)))
    for start, end, source in sorted(replacements, reverse=True):
        trailing = re.search(r"  #.*$", lines[end - 1].rstrip("\n"))
        lines[start:end] = [source + (trailing[0] if trailing else "") + "\n"]
    return "".join(lines)


def _defined(node: ast.stmt) -> str | None:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"function {node.name}"
    return f"import from {node.module}" if isinstance(node, ast.ImportFrom) else None
