"""tools/check_docs.py: the pages pass, each mistake is found, and the commands that a page marks do what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/experimental/nemo-gym"

sys.path.insert(0, str(ROOT / "tools"))
import check_docs

FRONT = "---\ntitle: Page\ndescription: What it is.\n---\n\n"
MARKED = [
    pytest.param(command, id=f"{page.relative_to(ROOT)}-{number}")
    for page in check_docs.Tree(ROOT).pages()
    for number, command in enumerate(check_docs.marked_commands(page.read_text()), start=1)
]


@pytest.fixture
def tree(tmp_path: Path) -> check_docs.Tree:
    files = {
        "Makefile": "build: venv  ## it\n\t@true\n",
        "README.md": "# Top\n\n## Two words, or `three`\n",
        "docs/docs.json": '{"navigation": {"tabs": [{"pages": ["guide/page", {"group": "G", "pages": ["guide/all"]}]}]}}',
        "docs/guide/page.md": FRONT,
        "docs/guide/all.md": f"{FRONT}## A heading\n",
        f"{EXAMPLE}/run.py": 'print(f"expected {1} GPUs, found none")\nNAME = "Schema"\nprint(f"{NAME}.field is missing")\n',
        f"{EXAMPLE}/README.md": "# Example\n",
        f"{EXAMPLE}/configs/docker.yaml": "",
        f"{EXAMPLE}/local_stack/requirements.in": "nemo-gym[sandbox]==0.7.0\nmini-swe-agent==2.1.0\nswebench==4.1.0\n",
        "tools/upstream/slices.yaml": "miles: {commit: 0123456789abcdef}\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return check_docs.Tree(tmp_path)


def problems(tree: check_docs.Tree, page: str, text: str) -> list[str]:
    path = tree.root / page
    path.write_text(text)
    return [problem.partition(f"{page}:")[2] for problem in check_docs.page_problems(path, tree)]


# --- this repository --------------------------------------------------------------


def test_the_pages_of_this_repository_are_right():
    done = subprocess.run([sys.executable, ROOT / "tools/check_docs.py"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_hidden_folders_have_no_pages(tree):
    before = tree.pages()
    (tree.root / "tests" / ".pytest_cache").mkdir(parents=True)
    (tree.root / "tests" / ".pytest_cache" / "README.md").write_text("# Cache\n")
    assert before == tree.pages() != []


@pytest.mark.parametrize("command", MARKED)
def test_a_marked_command_runs(command):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-euc", command], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_commands_are_marked_in_readme_contributing_and_pages():
    ids = " ".join(str(param.id) for param in MARKED)
    assert all(page in ids for page in ("CONTRIBUTING.md", f"{EXAMPLE}/README.md", "docs/user-guide/nemo-gym.md"))


@pytest.mark.parametrize("script", ["download_and_process_data.py", "eval_nemogym_via_api.py", "nemogym_preflight.py"])
def test_options_in_the_pages_are_options_of_the_scripts(script):
    command = [sys.executable, ROOT / EXAMPLE / script, "--help"]
    known = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "240"}
    ).stdout
    named = {
        option
        for page in check_docs.Tree(ROOT).pages()
        for line in page.read_text().replace("\\\n", " ").splitlines()
        for use in line.split(script)[1:]
        for option in re.findall(r"(?<= )--[a-z][a-z-]+", re.split(r"`|\.py", use)[0])
    }
    assert named and {option for option in named if not re.search(rf"{option}\b(?!-)", known)} == set()


# --- links ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[x](/guide/all) [y](/guide/all#a-heading) [z](https://example.com/x.md#y) [m](mailto:a@b)",
        "`[x](nowhere)` is code\n\n```\n[x](nowhere)\n```\n",
        "[one\nlink](/guide/all)",
    ],
)
def test_links_that_lead_somewhere(tree, text):
    assert problems(tree, "docs/guide/page.md", FRONT + text) == []


@pytest.mark.parametrize(
    "link, said",
    [
        ("/guide/none", "6: expected /guide/none to lead to a file, found none"),
        ("/guide/all#none", "6: expected the heading #none in docs/guide/all.md, found none"),
        ("#none", "6: expected the heading #none in docs/guide/page.md, found none"),
        ("all", "6: expected an absolute link, found all"),
        ("/guide/all.md", "6: expected a link without its suffix, found /guide/all.md"),
        (
            f"https://github.com/radixark/miles/blob/main/{EXAMPLE}/gone.py",
            f"6: expected {EXAMPLE}/gone.py in this tree, which mirrors Miles; found none",
        ),
    ],
)
def test_links_of_a_page_that_lead_nowhere(tree, link, said):
    assert problems(tree, "docs/guide/page.md", f"{FRONT}[a\nlink]({link})") == [said]


def test_a_link_behind_code_that_is_longer_or_shorter_has_its_own_line(tree):
    code = "`a`\n" * 8 + "`a long piece of code in this line`\n" * 3
    said = problems(tree, "docs/guide/page.md", f"{FRONT}{code}[a](/guide/none)\n\n\n[b](/guide/void)\n`{'c' * 99}`")
    first = FRONT.count("\n") + 12
    assert [problem.partition(":")[0] for problem in said] == [str(first), str(first + 3)]


def test_links_of_a_readme_are_relative_to_it(tree):
    good = "[up](../../../README.md#two-words-or-three) [folder](configs/) [here](#example)\n"
    assert problems(tree, f"{EXAMPLE}/README.md", f"# Example\n\n{good}") == []
    assert problems(tree, f"{EXAMPLE}/README.md", "# Example\n\n[up](../README.md)\n") == [
        "3: expected ../README.md to lead to a file, found none"
    ]


def test_the_second_heading_of_a_name_has_a_number():
    assert check_docs.anchors("# A b\n\n## A b\n\n```\n# no\n```\n\n## C_d: e-f!\n") == {"a-b", "a-b-1", "c_d-e-f"}


# --- front matter and navigation ----------------------------------------------------


@pytest.mark.parametrize(
    "text, said",
    [
        ("No front matter.", ["1: expected a description in the front matter, found None"]),
        (
            f"---\ntitle: P\ndescription: {'x' * 160}\n---\n",
            ["1: expected a description of less than 160 characters, found 160"],
        ),
        ("---\ntitle: P: Q\n---\n", ["1: expected a description in the front matter, found None"]),
        (f"{FRONT}# Again\n", ["6: expected no heading of the first level: the title is one"]),
        (f"{FRONT}<!-- a -->\n", ["6: expected no HTML comment, which Mintlify refuses; {/* ... */} is one"]),
    ],
)
def test_front_matter_and_what_mintlify_refuses(tree, text, said):
    assert [problem for problem in problems(tree, "docs/guide/page.md", text) if "title in" not in problem] == said


def test_a_description_may_be_as_long_as_miles_allows(tree):
    assert problems(tree, "docs/guide/page.md", f"---\ntitle: P\ndescription: {'x' * 159}\n---\n") == []


def test_navigation_and_files_have_the_same_pages(tree):
    assert check_docs.navigation_problems(tree) == []
    (tree.docs / "guide/page.md").rename(tree.docs / "guide/other.md")
    assert check_docs.navigation_problems(tree) == [
        "docs/docs.json: lists guide/page, found no such file",
        "docs/guide/other.md: expected it in docs.json, or nobody finds it",
    ]


# --- code -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "make build X=1",
        "A=1 make B=2 build",
        f"python {EXAMPLE}/run.py",
        "gym env start --config configs/docker.yaml",
        "cat outputs/golden.jsonl /root/datasets/rows.py",
        "python run.py  # make nowhere/at/all.py",
        "train.py",
        "configs/*.yaml",
        "miles/rollout/x.py",
    ],
)
def test_paths_and_targets_that_are_there_or_of_others(tree, code):
    assert problems(tree, "README.md", f"# Top\n\n`{code}`\n\n```bash\n{code}\n```\n") == []


def test_what_commands_have_made_before_is_not_looked_for(tree):
    (tree.root / ".gitignore").write_text("/outputs/\n*.pyc\n")
    (tree.root / "outputs").mkdir()
    assert problems(tree, "README.md", "# Top\n\nIn `outputs/upstream/` and `outputs/golden.jsonl`.\n") == []


@pytest.mark.parametrize(
    "code, said",
    [
        ("make biuld", "expected `make biuld` to be a target of the Makefile, found none"),
        ("A=1 make B=2 biuld", "expected `make biuld` to be a target of the Makefile, found none"),
        (f"python {EXAMPLE}/rnu.py", f"expected {EXAMPLE}/rnu.py in this tree, found none"),
        ("python rnu.py", "expected rnu.py in this tree, found none"),
        ("configs/podman.yaml", "expected configs/podman.yaml in this tree, found none"),
        ("configs/*.toml", "expected configs/*.toml in this tree, found none"),
        ("docs/guides/", "expected docs/guides/ in this tree, found none"),
    ],
)
def test_paths_and_targets_that_are_not_there(tree, code, said):
    assert problems(tree, "README.md", f"# Top\n\nSee `{code}`.\n\n```bash\n{code}\n```\n") == [
        f"3: {said}",
        f"6: {said}",
    ]


# --- messages and versions ----------------------------------------------------------


def _troubles(tree: check_docs.Tree, *messages: str) -> list[str]:
    page = tree.root / EXAMPLE / "README.md"
    rows = "".join(f"| `{message}` | do |\n" for message in messages)
    page.write_text(
        f"# Example\n\n## Troubleshooting\n\n| see | do |\n| --- | --- |\n{rows}\n## After\n\n| `not one of them` | |\n"
    )
    return check_docs.message_problems(page, tree)


def test_messages_as_the_code_prints_them(tree):
    assert (
        _troubles(tree, "expected 4 GPUs, found none", "Schema.field is missing", "unrecognized arguments: --x") == []
    )


def test_a_message_that_no_code_prints_is_found(tree):
    (problem,) = _troubles(tree, "expected 4 GPUs, found some")
    assert problem.endswith(
        "expected code that prints 'expected 4 GPUs, found some', found none that has 'found some'"
    )


@pytest.mark.parametrize(
    "line, said",
    [
        ("NeMo Gym 0.7.0, `nemo-gym[sandbox]==0.7.0`, NeMo Gym 0.6", []),
        ("NeMo Gym 0.8.0", ["README.md:3: expected nemo-gym 0.7.0, found 0.8.0"]),
        ("`nemo-gym[sandbox]==0.6.0`", ["README.md:3: expected nemo-gym 0.7.0, found 0.6.0"]),
        ("| swebench | 5.0.0 |", ["README.md:3: expected swebench 4.1.0, found 5.0.0"]),
        ("Miles `ffffffffffff`", ["README.md:3: expected Miles 0123456789ab, found ffffffffffff"]),
    ],
)
def test_versions_are_the_pinned_ones(tree, line, said):
    (tree.root / "README.md").write_text(f"# Top\n\n{line}\n")
    assert check_docs.version_problems(tree.root / "README.md", tree) == said


# --- marks ------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["<!-- run -->", "{/* run */}"])
def test_marked_blocks_are_extracted_and_marks_removed(mark):
    text = f"a\n\n{mark}\n```bash\none\ntwo\n```\n\n```bash\nthree\n```\n"
    assert check_docs.marked_commands(text) == ["one\ntwo"]
    assert check_docs.without_marks(text) == text.replace(f"{mark}\n", "")


def test_a_mark_without_a_block_is_an_error():
    with pytest.raises(ValueError, match="expected a code block behind the mark in line 1, found 'text'"):
        check_docs.marked_commands("<!-- run -->\ntext\n")
