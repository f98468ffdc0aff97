"""Check the pages of this repository: what a reader would trip over, and what Mintlify would refuse.

    python tools/check_docs.py

Pages are the READMEs, CONTRIBUTING.md and all below docs/. Of each is checked: internal links and their anchors; paths
and make targets in code; of those below docs/ also title and description, that no heading repeats the title, links as
Miles wants them (absolute, without .md), and docs.json against the files, both ways. A message in a troubleshooting table
has to be one that the code prints, a version of NeMo Gym or Miles the pinned one. Commands behind a mark (``<!-- run -->``, in pages below docs/ ``{/* run */}``) are
run by tests/fast/test_docs.py. One line per problem; exit status 1 if there is one.

Pure but for reading files; tools/upstream_pr.py checks the pages of a checkout of Miles with it.
"""

import ast
import functools
import glob
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

_ROOT = Path(__file__).resolve().parents[1]
_EXAMPLE = "examples/experimental/nemo-gym"
# docs/README.md of Miles: the description stays under it.
_DESCRIPTION_LENGTH = 160
_MIRROR = re.compile(r"https://github\.com/radixark/miles/(?:tree|blob)/main/([^#]+)")

# Files of Miles and of NeMo Gym that a page speaks of.
_FOREIGN = frozenset({"train.py", "app.py", "sync_example_docs.py"})
# Messages that programs of others print.
_FOREIGN_MESSAGES = ("unrecognized arguments:",)

_GLUE = re.compile(r" ?\.\.\. ?|<[^>]+>|\d+|: |, |^expected |(?<=: )expected ")

_FENCE = re.compile(r"\s*(```+|~~~+)")
_MARK = re.compile(r"\s*(?:<!-- run -->|\{/\* run \*/\})\s*")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*([^)\s]+)[^)]*\)")
_SPAN = re.compile(r"(`+)(.+?)\1")  # within a line
_COMMENT = re.compile(r"(?:^|\s)# .*")
_MAKE = re.compile(r"\bmake (?:[A-Z_]+=\S+ )*([a-z][a-z-]*)")
_PATH = re.compile(r"(?<![\w./<>{}$~:=*-])((?:[\w.*-]+/)*[\w.*-]+\.(?:py|md|ya?ml|toml|in)|(?:[\w.*-]+/)+)(?![\w/*<])")


@dataclass(frozen=True)
class Tree:
    """A repository of the shape of Miles, and its folder."""

    root: Path

    @property
    def docs(self) -> Path:
        return self.root / "docs"

    @property
    def example(self) -> Path:
        return self.root / _EXAMPLE

    @functools.cached_property
    def make_targets(self) -> frozenset[str]:
        """Targets of the Makefile; none without one."""
        makefile = self.root / "Makefile"
        text = makefile.read_text() if makefile.is_file() else ""
        return frozenset(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))

    @functools.cached_property
    def printed(self) -> str:
        """All that the example's code can print."""
        return "\n".join(_printed(self.example))

    def pages(self) -> list[Path]:
        """READMEs, CONTRIBUTING.md and all below docs/, without hidden folders and those that git ignores."""
        top = [path for path in self.root.glob("*.md")]
        below = [
            path for folder in ("docs", "examples", "tests", "tools") for path in (self.root / folder).rglob("*.md")
        ]
        upstream = self.root / "tools" / "upstream"
        return sorted(path for path in [*top, *below] if upstream not in path.parents and not self._is_hidden(path))

    def _is_hidden(self, path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(self.root).parts)


class Line(NamedTuple):
    """A line of a page and whether it is inside a code block."""

    number: int
    text: str
    is_code: bool


# --- one page -------------------------------------------------------------------


def page_problems(page: Path, tree: Tree) -> list[str]:
    """What is wrong with a page, each with its place."""
    lines = list(_lines(page.read_text()))
    problems = [*_link_problems(page, tree, lines), *_code_problems(page, tree, lines)]
    if tree.docs in page.parents:
        problems += _site_problems(page, lines)
    where = page.relative_to(tree.root)
    return [f"{where}:{number}: {problem}" for number, problem in sorted(problems)]


def _lines(text: str) -> Iterator[Line]:
    fence = None
    for number, line in enumerate(text.splitlines(), start=1):
        mark = _FENCE.match(line)
        if mark and fence is None:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = None
        else:
            yield Line(number, line, fence is not None)


def _site_problems(page: Path, lines: list[Line]) -> Iterator[tuple[int, str]]:
    front = re.match(r"---\n(.*?)\n---\n", page.read_text(), re.DOTALL)
    try:
        matter = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        matter = None
    matter = matter if isinstance(matter, dict) else {}
    for key in ("title", "description"):
        if not isinstance(matter.get(key), str) or not matter[key].strip():
            yield 1, f"expected a {key} in the front matter, found {matter.get(key)!r}"
    length = len(str(matter.get("description", "")))
    if length >= _DESCRIPTION_LENGTH:
        yield 1, f"expected a description of less than {_DESCRIPTION_LENGTH} characters, found {length}"
    for line in lines:
        if not line.is_code and line.text.startswith("# "):
            yield line.number, "expected no heading of the first level: the title is one"
        if not line.is_code and "<!--" in line.text:
            yield line.number, "expected no HTML comment, which Mintlify refuses; {/* ... */} is one"


# --- links ----------------------------------------------------------------------


def _link_problems(page: Path, tree: Tree, lines: list[Line]) -> Iterator[tuple[int, str]]:
    prose = _SPAN.sub("code", "\n".join("" if line.is_code else line.text for line in lines))
    for found in _LINK.finditer(prose):
        if problem := _link_problem(page, tree, found[1]):
            yield lines[prose.count("\n", 0, found.start())].number, problem


def _link_problem(page: Path, tree: Tree, link: str) -> str | None:
    if mirrored := _MIRROR.match(link):
        target = tree.root / mirrored[1].rstrip("/")
        known = target.exists() or not mirrored[1].startswith((_EXAMPLE, "docs/user-guide/nemo-gym"))
        return None if known else f"expected {mirrored[1]} in this tree, which mirrors Miles; found none"
    if re.match(r"[a-z]+:", link):
        return None
    path, _, anchor = link.partition("#")
    is_site = tree.docs in page.parents
    if not path:
        target = page
    elif is_site and not path.startswith("/"):
        return f"expected an absolute link, found {link}"
    elif is_site and path.endswith((".md", ".mdx")):
        return f"expected a link without its suffix, found {link}"
    else:
        target = _site_file(tree, path) if is_site else (page.parent / path).resolve()
    if target is None or not target.exists():
        return f"expected {link} to lead to a file, found none"
    if anchor and target.suffix in (".md", ".mdx") and anchor not in anchors(target.read_text()):
        return f"expected the heading #{anchor} in {target.relative_to(tree.root)}, found none"
    return None


def _site_file(tree: Tree, path: str) -> Path | None:
    base = tree.docs / path.strip("/")
    candidates = [base, base.with_name(f"{base.name}.md"), base.with_name(f"{base.name}.mdx"), base / "index.md"]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and Mintlify make them."""
    found: set[str] = set()
    for line in _lines(text):
        heading = re.match(r"#{1,6} (.+)", line.text)
        if heading and not line.is_code:
            words = re.sub(r"[^\w\- ]", "", heading[1].strip().lower()).replace(" ", "-")
            taken = (words, *(f"{words}-{number}" for number in range(1, 100)))
            found.add(next(name for name in taken if name not in found))
    return found


# --- paths and make targets ---------------------------------------------------------


def _code_problems(page: Path, tree: Tree, lines: list[Line]) -> Iterator[tuple[int, str]]:
    for line in lines:
        for code in [line.text] if line.is_code else [span for _, span in _SPAN.findall(line.text)]:
            code = _COMMENT.sub("", code)
            for target in _MAKE.findall(code):
                if target not in tree.make_targets:
                    yield line.number, f"expected `make {target}` to be a target of the Makefile, found none"
            for path in _PATH.findall(code):
                if not _is_there(path, page, tree):
                    yield line.number, f"expected {path} in this tree, found none"


def _is_there(path: str, page: Path, tree: Tree) -> bool:
    """Whether a path is in the tree, or is none of the tree's: made by a command, or of another project."""
    places = (tree.root, page.parent, tree.example)
    if any(glob.glob(str(place / path)) for place in places):
        return True
    if path in _FOREIGN or path.startswith(_made_folders(tree)):
        return True
    first, rest, _ = path.partition("/")
    if not rest:
        return path.endswith((".yaml", ".yml", ".toml", ".in")) and "*" not in path
    return not any((place / first).is_dir() for place in places)


def _made_folders(tree: Tree) -> tuple[str, ...]:
    """Folders that commands make at the root, such as ``outputs/``: those that .gitignore names."""
    ignored = tree.root / ".gitignore"
    lines = ignored.read_text().splitlines() if ignored.is_file() else []
    return tuple(line[1:] for line in lines if line.startswith("/") and line.endswith("/") and "*" not in line)


# --- navigation -----------------------------------------------------------------


def navigation_problems(tree: Tree) -> list[str]:
    """Where docs.json and the files below docs/ differ."""
    config = json.loads((tree.docs / "docs.json").read_text())
    listed = list(_listed_pages(config["navigation"]))
    files = {
        str(path.relative_to(tree.docs).with_suffix(""))
        for path in tree.docs.rglob("*")
        if path.suffix in (".md", ".mdx") and path.name != "README.md"
    }
    problems = [f"docs/docs.json: lists {page}, found no such file" for page in listed if page not in files]
    problems += [f"docs/docs.json: lists {page} twice" for page in sorted(set(listed)) if listed.count(page) > 1]
    problems += [
        f"docs/{page}.md: expected it in docs.json, or nobody finds it" for page in sorted(files - set(listed))
    ]
    return problems


def _listed_pages(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _pages_of(value) if key == "pages" else _listed_pages(value)
    elif isinstance(node, list):
        for value in node:
            yield from _listed_pages(value)


def _pages_of(pages: list) -> Iterator[str]:
    for page in pages:
        if isinstance(page, str):
            yield page
        else:
            yield from _listed_pages(page)


# --- messages -------------------------------------------------------------------


def message_problems(page: Path, tree: Tree) -> list[str]:
    """Messages in a page's troubleshooting table that no code of the example prints.

    ``...``, ``<name>`` and digits stand for what changes, and the words of ``Finding`` (nemogym_checks.py) for what it puts
    together; what is between them has to be in a string of the code.
    """
    problems = []
    for message in _troubles(page.read_text()):
        missing = [part for part in _GLUE.split(message) if part.strip() and part.strip() not in tree.printed]
        if missing and not message.startswith(_FOREIGN_MESSAGES):
            where = page.relative_to(tree.root)
            problems.append(
                f"{where}: expected code that prints {message!r}, found none that has {missing[0].strip()!r}"
            )
    return problems


def _troubles(text: str) -> list[str]:
    _, _, section = text.partition("\n## Troubleshooting\n")
    rows = [line for line in section.split("\n## ", 1)[0].splitlines() if line.startswith("|")][2:]
    return [message for row in rows for _, message in _SPAN.findall(row.strip("|").split("|")[0]) if " " in message]


def _printed(folder: Path) -> Iterator[str]:
    """String constants of all modules and keys of their tables, one a line; what is put into them as ``{}``."""
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        named = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield " ".join(node.value.split())
            elif isinstance(node, ast.JoinedStr):
                yield " ".join("".join(_piece(piece, named) for piece in node.values).split())


def _piece(piece: ast.expr, named: dict[str, object]) -> str:
    if isinstance(piece, ast.Constant):
        return str(piece.value)
    value = piece.value if isinstance(piece, ast.FormattedValue) else None
    return str(named.get(value.id, "{}")) if isinstance(value, ast.Name) else "{}"


# --- versions -------------------------------------------------------------------


def version_problems(page: Path, tree: Tree) -> list[str]:
    """Versions in a page that are not the pinned ones: each is raised in one place, and this names the others."""
    problems = []
    for name, (pin, pattern) in _pins(tree).items():
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            for found in re.findall(pattern, line):
                if found != pin:
                    problems.append(f"{page.relative_to(tree.root)}:{number}: expected {name} {pin}, found {found}")
    return problems


def _pins(tree: Tree) -> dict[str, tuple[str, str]]:
    """Per name the pinned version, and the pattern that finds one in a page."""
    requirements = (tree.example / "local_stack" / "requirements.in").read_text()
    plan = yaml.safe_load((tree.root / "tools" / "upstream" / "slices.yaml").read_text())
    names = {
        "nemo-gym": r"(?:NeMo Gym(?: \|)? |nemo-gym(?:\[\w+\])?==)",
        "mini-swe-agent": r"mini-swe-agent(?: \|)?(?: |==)",
    }
    names["swebench"] = r"swebench(?: \|)?(?: |==)"
    pins = {
        name: (re.search(rf"^{name}(?:\[\w+\])?==(\S+)", requirements, re.MULTILINE)[1], rf"{before}(\d+\.\d+\.\d+)")
        for name, before in names.items()
    }
    return {**pins, "Miles": (plan["miles"]["commit"][:12], r"`([0-9a-f]{12})`")}


# --- marked commands --------------------------------------------------------------


def marked_commands(text: str) -> list[str]:
    """The code blocks behind a mark, in order."""
    blocks, lines = [], text.splitlines()
    for number, line in enumerate(lines):
        if not _MARK.fullmatch(line):
            continue
        start = next(place for place in range(number + 1, len(lines)) if lines[place].strip())
        fence = _FENCE.match(lines[start])
        if fence is None:
            raise ValueError(f"expected a code block behind the mark in line {number + 1}, found {lines[start]!r}")
        end = next(place for place in range(start + 1, len(lines)) if lines[place].strip() == fence[1])
        blocks.append("\n".join(lines[start + 1 : end]))
    return blocks


def without_marks(text: str) -> str:
    """A page without the marks."""
    return "".join(line for line in text.splitlines(keepends=True) if not _MARK.fullmatch(line.rstrip("\n")))


def main() -> int:
    tree = Tree(_ROOT)
    pages = tree.pages()
    problems = navigation_problems(tree)
    for page in pages:
        problems += page_problems(page, tree)
        problems += message_problems(page, tree)
        problems += version_problems(page, tree)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{len(pages)} pages: links, anchors, paths, make targets, navigation, messages and versions are right")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
