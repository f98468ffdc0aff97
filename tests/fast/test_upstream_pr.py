"""make upstream-pr on a Miles-shaped checkout and a repository of a few files, both made here, with real git."""

import ast
import contextlib
import copy
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/experimental/nemo-gym"
TESTS = "tests/fast/examples/experimental/nemo_gym"

sys.path.insert(0, str(ROOT / "tools"))
import check_docs
import upstream_plan
import upstream_pr
from upstream_plan import RefusedError, files_of
from upstream_pr import SliceError

_BAN = {"name": "Ban old_name", "language": "pygrep", "entry": "old_name", "types": ["python"], "id": "ban"}

MILES = {
    "miles/__init__.py": "",
    "miles/utils/external_utils/command_utils.py": "",
    "pyproject.toml": "[tool.black]\nline_length = 79\n\n[tool.pytest.ini_options]\nasyncio_mode = 'auto'\n",
    ".pre-commit-config.yaml": yaml.safe_dump({"repos": [{"repo": "local", "hooks": [_BAN]}]}),
    "scripts/tools/sync_example_docs.py": (
        "from pathlib import Path\n"
        "Path('docs/examples/index.md').write_text('generated\\n' + Path('examples/README.md').read_text())\n"
    ),
    "docs/docs.json": json.dumps(
        {
            "navigation": {
                "pages": ["index", {"group": "Agents", "pages": ["guide/all", "guide/verifiers", "guide/hud"]}]
            }
        },
        indent=1,
    )
    + "\n",
    "docs/examples/index.md": "generated\n# Examples\n\n- **[zoo](./experimental/zoo)**: Animals.\n",
    "docs/user-guide/environments.md": (
        "---\ntitle: All\ndescription: All of them.\n---\n\nOdd   text stays.\n\n"
        "| Integration | Plugs in at | Guide |\n|---|---|---|\n"
        "| [Harbor](https://h) | agent function | [guide](https://g) |\n| [Zoo](https://z)  |  odd spacing³ | - |\n\n"
        "| Sandbox provider | Used within | Guide |\n|---|---|---|\n| [E2B](https://e) | Harbor, Zoo | - |\n"
    ),
    "examples/README.md": "# Examples\n\n- **[zoo](./experimental/zoo)**: Animals.\n",
    f"{EXAMPLE}/README.md": "# Old\n\nOld text.\n\n## Old data\n\nOld way.\n\n## Troubleshooting\n\n`make it`.\n",
    f"{EXAMPLE}/connector.py": "def post():\n    return 'old'\n",
    f"{EXAMPLE}/scan.py": (
        "import sys\n\nfrom connector import post  # noqa: E402\n\n\ndef one():\n    return post()\n\n\ndef two():\n    return 2\n"
    ),
    f"{TESTS}/__init__.py": "",
    f"{TESTS}/test_connector.py": "def test_old():\n    pass\n",
}

SOURCE = {
    f"{EXAMPLE}/README.md": (
        "# New\n\n| file | role |\n| --- | --- |\n| `connector.py` | it |\n| `local.py` | the other |\n\n"
        "## Verdicts\n\nTrue.\n\n## Data\n\nNew way.\n\n- always\n- with the other\n\n## Local\n\nRun `local.py`.\n\n"
        "## Only here\n\n`make all`\n\n## Status\n\nOn 2026-11-30.\n\n| claim | how |\n| --- | --- |\n| it runs | here |\n"
    ),
    f"{EXAMPLE}/connector.py": "def run():\n    return 'new'\n",
    f"{EXAMPLE}/data.py": "def rows( ):\n    return [ 1 ]\n",
    f"{EXAMPLE}/local.py": "",
    f"{TESTS}/test_connector.py": "def test_new():\n    pass\n\n\ndef test_new_too():\n    pass\n",
    f"{TESTS}/test_data.py": "def test_rows():\n    pass\n",
    "docs/user-guide/nemo-gym.md": "---\ntitle: NeMo Gym\ndescription: It.\n---\n\n{/* run */}\n```bash\ntrue\n```\n",
    "docs/docs.json": "{}",
    "docs/user-guide/environments.md": (
        "| Integration | Plugs in at | Guide |\n|---|---|---|\n| [NeMo Gym](https://n) | agent function | [guide](https://o) |\n\n"
        "| Sandbox provider | Used within | Guide | More |\n|---|---|---|---|\n| [Docker](https://d) | NeMo Gym | - | x |\n"
        "| [E2B](https://e) | NeMo Gym | new | x |\n"
    ),
    "README.md": "# Here\n",
    "tools/upstream/scan.py": "from connector import run\n\n\ndef one():\n    return run()\n",
    "tools/upstream/1-contract.md": "feat: contract\n\nBecause.\n\n---\n\n## Motivation\n\n{size}\n\n{validation}\n",
    "tools/upstream/2-data.md": "feat: data\n\nBecause.\n\n---\n\n{validation}\n",
    "tools/upstream/3-docs.md": "docs: all\n\nBecause.\n\n---\n\n{validation}\n",
    "tools/upstream/4-local.md": "feat: local\n\nBecause.\n\n---\n\n{validation}\n",
}

PLAN = {
    "miles": {"commit": "0" * 40, "seen": {}},
    "slices": {
        1: {
            "name": "contract",
            "files": [f"{EXAMPLE}/connector.py", f"{TESTS}/test_connector.py"],
            "bridges": {f"{EXAMPLE}/scan.py": "tools/upstream/scan.py"},
            "sections": [{"heading": "## Verdicts", "before": "## Troubleshooting"}],
            "evidence": ["it runs"],
        },
        2: {
            "name": "data",
            "after": 1,
            "files": [f"{EXAMPLE}/data.py", f"{TESTS}/test_data.py"],
            "sections": [{"heading": "## Data", "instead_of": "## Old data", "before": "## Troubleshooting"}],
        },
        3: {
            "name": "docs",
            "after": 2,
            "files": [f"{EXAMPLE}/README.md", "docs/user-guide/nemo-gym.md"],
            "merges": True,
        },
        4: {"name": "local", "after": 3, "files": [f"{EXAMPLE}/local.py"]},
        5: {"name": "later", "files": []},
    },
    "merged": {
        "navigation": {"file": "docs/docs.json", "group": "Agents", "page": "guide/nemo-gym"},
        "tables": {
            "file": "docs/user-guide/environments.md",
            "first_columns": ["Integration", "Sandbox provider"],
            "union": "Used within",
        },
        "examples": {"file": "examples/README.md", "bullet": "- **[nemo-gym](./experimental/nemo-gym)**: It."},
        "generated": ["docs/examples/index.md"],
    },
    "withheld": {
        4: {f"{EXAMPLE}/README.md": ["## Local", "| `local.py` |", "- with the other"]},
        "never": {f"{EXAMPLE}/README.md": ["## Only here"]},
    },
    "stays": ["README.md", "tools/"],
}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make_repository(folder: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "config", "user.name", "Someone")
    git(folder, "config", "user.email", "someone@example.com")
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "all")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both repositories, made once and copied for each test."""
    folder = tmp_path_factory.mktemp("made")
    miles = make_repository(folder / "miles", MILES)
    source = make_repository(folder / "source", SOURCE)
    plan(source, seen=seen(miles, *MILES))
    return folder


@pytest.fixture
def miles(tmp_path: Path, made: Path) -> Path:
    return Path(shutil.copytree(made / "miles", tmp_path / "miles"))


@pytest.fixture
def source(tmp_path: Path, made: Path) -> Path:
    return Path(shutil.copytree(made / "source", tmp_path / "source"))


def plan(source: Path, seen: dict[str, str] | None = None, **blocks: object) -> None:
    """Write the plan; ``slices`` in ``blocks`` is merged slice by slice."""
    path = source / "tools/upstream/slices.yaml"
    known = yaml.safe_load(path.read_text()) if path.exists() else copy.deepcopy(PLAN)
    known["miles"]["seen"] |= seen or {}
    for number, block in blocks.pop("slices", {}).items():
        known["slices"][number] |= block
    path.write_text(yaml.safe_dump({**known, **blocks}, sort_keys=False))


def seen(miles: Path, *paths: str) -> dict[str, str]:
    return {path: git(miles, "rev-parse", f"HEAD:{path}") for path in paths if path.startswith((EXAMPLE, TESTS))}


@pytest.fixture
def run(source: Path, miles: Path, tmp_path: Path):
    """Makes a branch; tests of the example are left out unless asked for."""
    arguments = {"base": "HEAD", "check": False, "skip_tests": True, "output": tmp_path / "texts"}

    def _run(number: int | None = None, **options: object) -> int:
        return upstream_pr.make_branch(source, miles, **{**arguments, "number": number, **options})

    return _run


def state(checkout: Path) -> dict[str, str]:
    """All that a user of a checkout could see changed: its files, and what git knows of them, objects apart."""
    files = (path for path in checkout.rglob("*") if path.is_file() and ".git/objects" not in str(path))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def changed_files(miles: Path, branch: str) -> set[str]:
    return set(git(miles, "diff", "--name-only", "main", branch).splitlines())


def at(miles: Path, branch: str, path: str) -> str:
    return git(miles, "show", f"{branch}:{path}") + "\n"


# --- branches -------------------------------------------------------------------


def test_a_slice_is_a_commit_on_main_with_its_files_only(run, miles):
    before = state(miles)
    assert run(1) == 0

    assert git(miles, "log", "--format=%s|%an", "main..nemo-gym-1-contract") == "feat: contract|Someone"
    assert git(miles, "log", "-1", "--format=%b", "nemo-gym-1-contract") == "Because.\n\nSlice: nemo-gym 1"
    expected = {f"{EXAMPLE}/{name}" for name in ("README.md", "connector.py", "scan.py")}
    assert changed_files(miles, "nemo-gym-1-contract") == {*expected, f"{TESTS}/test_connector.py"}
    new = set(state(miles).items()) - set(before.items())
    assert {Path(path).relative_to(miles).parts[:2] for path, _ in new} <= {(".git", "refs"), (".git", "logs")}
    assert (git(miles, "status", "--porcelain"), git(miles, "branch", "--show-current")) == ("", "main")


def test_a_bridge_replaces_functions_and_imports_by_name(run, miles):
    run(1)
    assert at(miles, "nemo-gym-1-contract", f"{EXAMPLE}/scan.py") == (
        "import sys\n\nfrom connector import run  # noqa: E402\n\n\ndef one():\n    return run()\n\n\ndef two():\n    return 2\n"
    )


def test_a_later_slice_stands_on_the_commits_of_the_earlier(run, miles):
    _with_formatters(miles)
    run(1)
    run(2)
    assert git(miles, "rev-parse", "nemo-gym-2-data^") == git(miles, "rev-parse", "nemo-gym-1-contract")
    assert at(miles, "nemo-gym-2-data", f"{EXAMPLE}/data.py") == "def rows():\n    return [1]\n"  # as Miles formats
    assert at(miles, "nemo-gym-2-data", f"{EXAMPLE}/README.md") == (
        "# Old\n\nOld text.\n\n## Data\n\nNew way.\n\n- always\n\n## Verdicts\n\nTrue.\n\n## Troubleshooting\n\n`make it`.\n"
    )


def test_without_a_slice_all_are_one_branch_with_a_commit_each(run, miles):
    run()
    assert git(miles, "log", "--format=%s", "main..nemo-gym").splitlines() == [
        "feat: local",
        "docs: all",
        "feat: data",
        "feat: contract",
    ]


def test_a_second_run_changes_nothing(run, miles, capsys):
    run()
    before = state(miles)
    assert run() == 0 and run(check=True) == 0
    assert state(miles) == before
    assert capsys.readouterr().out.count("is up to date") == 2


def test_settings_of_git_change_nothing(run, miles, tmp_path, monkeypatch, capsys):
    settings = tmp_path / "gitconfig"
    settings.write_text("[clone]\n\tdefaultRemoteName = upstream\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    run(1)
    time.sleep(1.1)  # a new commit would have another second, and so another name
    assert run(1, check=True) == 0
    assert "is up to date" in capsys.readouterr().out


def test_gits_own_variables_lead_nowhere_else(run, source, miles, tmp_path, monkeypatch):
    other = make_repository(tmp_path / "other", {"stray.txt": ""})
    before = state(other)
    with monkeypatch.context() as set_here:
        set_here.setenv("GIT_DIR", str(other / ".git"))
        set_here.setenv("GIT_WORK_TREE", str(other))
        files = upstream_plan.repository_files(source)
        assert run(1) == 0
    assert files == upstream_plan.repository_files(source)
    assert f"{EXAMPLE}/connector.py" in changed_files(miles, "nemo-gym-1-contract")
    assert state(other) == before


def test_check_says_what_would_change_and_changes_nothing(run, miles, capsys):
    before = state(miles)
    assert run(1, check=True) == 1
    assert state(miles) == before
    said = capsys.readouterr().out
    assert f"{EXAMPLE}/connector.py" in said and "nemo-gym-1-contract would be made; nothing was changed" in said


def test_a_change_here_moves_the_branch_and_names_where_it_was(run, source, miles, capsys):
    run(1)
    old = git(miles, "rev-parse", "nemo-gym-1-contract")
    (source / EXAMPLE / "connector.py").write_text("def run():\n    return 'newer'\n")
    assert run(1) == 0
    assert f"it was {old[:12]}" in capsys.readouterr().out
    assert git(miles, "rev-list", "--count", "main..nemo-gym-1-contract") == "1"


def test_what_stands_on_a_merged_slice_goes_on_main(run, source, miles):
    run(1)
    _merge(miles, "nemo-gym-1-contract")
    plan(source, seen=seen(miles, *MILES), slices={1: {"merged": True}})
    assert run(2) == 0
    assert git(miles, "log", "--format=%s", "main..nemo-gym-2-data") == "feat: data"
    with pytest.raises(RefusedError, match="slice 1 .contract. is marked as merged"):
        run(1)


def _merge(miles: Path, branch: str) -> None:
    git(miles, "merge", "--quiet", branch)
    git(miles, "branch", "--quiet", "--delete", branch)


# --- pages ----------------------------------------------------------------------


def test_pages_are_merged_by_name_and_nothing_else_is_touched(run, miles):
    run(3)
    branch = "nemo-gym-3-docs"
    nav = json.loads(at(miles, branch, "docs/docs.json"))["navigation"]["pages"][1]["pages"]
    assert nav == ["guide/all", "guide/nemo-gym", "guide/verifiers", "guide/hud"]
    assert at(miles, branch, "docs/user-guide/environments.md") == MILES["docs/user-guide/environments.md"].replace(
        "| [Zoo]", "| [NeMo Gym](https://n) | agent function | [guide](https://o) |\n| [Zoo]"
    ).replace(
        "| [E2B](https://e) | Harbor, Zoo | - |",
        "| [Docker](https://d) | NeMo Gym | - |\n| [E2B](https://e) | Harbor, NeMo Gym, Zoo | - |",
    )
    listed = (
        "# Examples\n\n- **[nemo-gym](./experimental/nemo-gym)**: It.\n- **[zoo](./experimental/zoo)**: Animals.\n"
    )
    assert at(miles, branch, "examples/README.md") == listed
    assert at(miles, branch, "docs/examples/index.md") == f"generated\n{listed}"


def test_a_page_says_what_is_true_by_then(run, miles):
    run(4)
    before, after = (at(miles, branch, f"{EXAMPLE}/README.md") for branch in ("nemo-gym-4-local^", "nemo-gym-4-local"))
    local = ("local.py", "with the other", "## Local")
    assert not any(part in before for part in local) and all(part in after for part in local)
    assert "Only here" not in after and "{/*" not in at(miles, "nemo-gym-4-local", "docs/user-guide/nemo-gym.md")


def test_what_is_in_its_place_already_stays_as_it_is(run, source, miles):
    run(3)
    _merge(miles, "nemo-gym-3-docs")
    plan(source, slices={1: {"merged": True}, 2: {"merged": True}})
    assert run(3) == 0
    assert git(miles, "rev-parse", "nemo-gym-3-docs") == git(miles, "rev-parse", "main")


# --- refusals -------------------------------------------------------------------


def _modified(miles: Path) -> None:
    (miles / "pyproject.toml").write_text("")


def _untracked(miles: Path) -> None:
    (miles / "new.txt").write_text("")


def _foreign(miles: Path) -> None:
    (miles / "miles/utils/external_utils/command_utils.py").unlink()
    commit(miles)


def _no_git(miles: Path) -> None:
    shutil.rmtree(miles / ".git")


def _changed_there(miles: Path) -> None:
    (miles / EXAMPLE / "connector.py").write_text("def post():\n    return 'theirs'\n")
    commit(miles)


def _own_commit(miles: Path) -> None:
    git(miles, "switch", "--quiet", "--create", "nemo-gym-1-contract")
    (miles / "review.txt").write_text("")
    commit(miles)
    git(miles, "switch", "--quiet", "main")


def _checked_out(miles: Path) -> None:
    git(miles, "switch", "--quiet", "--create", "nemo-gym-1-contract")


@pytest.mark.parametrize(
    "spoil, said",
    [
        (_modified, "expected a clean checkout, found 1 changed or new file(s)"),
        (_untracked, "expected a clean checkout, found 1 changed or new file(s)"),
        (_foreign, "expected a checkout of Miles, found"),
        (_no_git, "expected a git checkout of Miles, found no git repository"),
        (_changed_there, f"expected {EXAMPLE}/connector.py in Miles as in 000000000000, found it changed since"),
        (_own_commit, "expected commits of this command on nemo-gym-1-contract, found"),
        (_checked_out, "expected nemo-gym-1-contract not to be checked out"),
    ],
)
def test_a_checkout_that_is_not_clean_miles_is_refused_and_left_alone(run, miles, spoil, said):
    spoil(miles)
    before = state(miles)
    with pytest.raises(RefusedError, match=_literally(said)):
        run(1)
    assert state(miles) == before


def test_what_git_says_of_a_checkout_that_it_does_not_open_is_told(miles, tmp_path, monkeypatch):
    # As if the checkout were somebody else's; settings of this machine could allow that.
    settings = {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RefusedError, match="dubious ownership in repository at"):
        upstream_pr.check_checkout(miles, "HEAD")


def test_a_folder_inside_a_checkout_is_refused(run, miles):
    inner = miles / "inner"
    shutil.copytree(miles / "miles", inner / "miles")
    commit(miles)
    with pytest.raises(RefusedError, match="expected the top folder of a checkout of Miles"):
        upstream_pr.check_checkout(inner, "HEAD")


@pytest.mark.parametrize(
    "number, options, said",
    [
        (9, {}, "expected SLICE to be one of 1, 2, 3, 4, 5, found 9"),
        (5, {}, "slice 5 (later) has no files yet"),
        (1, {"base": "nowhere"}, "expected the branch or commit nowhere in"),
    ],
)
def test_settings_that_name_nothing_are_refused(run, number, options, said):
    with pytest.raises(RefusedError, match=_literally(said)):
        run(number, **options)


def _literally(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "()[].+*?|{}" else letter for letter in text)


@pytest.mark.parametrize("arguments", [["/nowhere"], ["/nowhere", "--seen"], [str(ROOT), "--slice", "1"]])
def test_the_command_says_in_one_sentence_what_it_needs(arguments):
    command = [sys.executable, ROOT / "tools/upstream_pr.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: expected a checkout of Miles, found ") and done.stderr.count("\n") == 1


def test_what_miles_holds_is_printed_as_the_plan_takes_it(source, miles, capsys):
    assert upstream_pr.print_seen(source, miles, "HEAD") == 0
    printed = yaml.safe_load(capsys.readouterr().out)["miles"]
    known = upstream_plan.Plan.read(source)
    assert printed == {"commit": git(miles, "rev-parse", "HEAD"), "seen": known.seen}


# --- failures -------------------------------------------------------------------


def _banned_name(source: Path, miles: Path) -> None:
    (source / EXAMPLE / "data.py").write_text("old_name = 1\n")


def _stray_writer(source: Path, miles: Path) -> None:
    plan(source, slices={2: {"merges": True}})
    (miles / "scripts/tools/sync_example_docs.py").write_text("open('train.py', 'w').close()\n")
    commit(miles)


def _with_formatters(miles: Path, **versions: str) -> None:
    named = {name: importlib.metadata.version(name) for name in ("isort", "black")} | versions
    repositories = [{"repo": f"https://github.com/of/{name}", "rev": rev, "hooks": []} for name, rev in named.items()]
    (miles / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": repositories}))
    commit(miles)


def _other_black(source: Path, miles: Path) -> None:
    _with_formatters(miles, black="99.1")


def _broken_link(source: Path, miles: Path) -> None:
    page = source / EXAMPLE / "README.md"
    page.write_text(page.read_text().replace("New way.", "[New](#nowhere) way."))


def _no_heading(source: Path, miles: Path) -> None:
    plan(source, slices={2: {"sections": [{"heading": "## Data", "before": "## Nowhere"}]}})


def _not_collected(source: Path, miles: Path) -> None:
    (miles / "tests/ci").mkdir()
    (miles / "tests/ci/run_suite.py").write_text(f"import miles\nprint('{TESTS}/test_connector.py')\n")
    commit(miles)


def _failing_test(source: Path, miles: Path) -> None:
    (source / TESTS / "test_data.py").write_text("def test_rows():\n    assert 0, 'too few'\n")


@pytest.mark.parametrize(
    "spoil, said",
    [
        (_banned_name, f"{EXAMPLE}/data.py: Ban old_name"),
        (_stray_writer, "train.py: expected no change outside of the example"),
        (_other_black, "expected black 99.1, as in Miles' .pre-commit-config.yaml, found"),
        (_broken_link, "expected the heading #nowhere"),
        (_no_heading, "expected the heading '## Nowhere', found none"),
        (_not_collected, f"{TESTS}/test_data.py: expected it in the suite stage-a-cpu, found it nowhere"),
        (_failing_test, "its tests fail: 1 failed, 2 passed"),
    ],
)
def test_a_slice_that_fails_leaves_the_checkout_as_it_was(run, source, miles, spoil, said):
    spoil(source, miles)
    before = state(miles)
    with pytest.raises(SliceError, match=_literally(said)):
        run(2, skip_tests=False)
    assert state(miles) == before


def test_a_killed_run_leaves_the_checkout_as_it_was(source, miles, tmp_path):
    reached = tmp_path / "reached"
    script = f"import pathlib, time\npathlib.Path({str(reached)!r}).touch()\ntime.sleep(60)\n"
    (miles / "scripts/tools/sync_example_docs.py").write_text(script)
    commit(miles)
    before = state(miles)
    code = (
        f"import sys, pathlib; sys.path.insert(0, {str(ROOT / 'tools')!r}); import upstream_pr\n"
        f"upstream_pr.make_branch(pathlib.Path({str(source)!r}), pathlib.Path({str(miles)!r}), number=3, base='HEAD', "
        f"check=False, skip_tests=True, output=pathlib.Path({str(tmp_path)!r}))"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        deadline = time.monotonic() + 60
        while not reached.exists():
            assert time.monotonic() < deadline and killed.poll() is None
            time.sleep(0.02)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert state(miles) == before


def test_a_terminated_run_leaves_no_process_and_no_folder(source, miles, tmp_path):
    reached, temporary = tmp_path / "reached", tmp_path / "temporary"
    temporary.mkdir()
    (source / TESTS / "test_connector.py").write_text(
        "import os, pathlib, time\n\n\ndef test_long():\n"
        f"    pathlib.Path({str(reached) + '.part'!r}).write_text(str(os.getpid()))\n"
        f"    os.rename({str(reached) + '.part'!r}, {str(reached)!r})\n    time.sleep(60)\n"
    )
    code = (
        f"import sys, pathlib; sys.path.insert(0, {str(ROOT / 'tools')!r}); import upstream_pr\n"
        f"upstream_pr._ROOT = pathlib.Path({str(source)!r})\n"
        f"sys.argv[1:] = [{str(miles)!r}, '--slice', '1', '--output', {str(tmp_path / 'texts')!r}]\n"
        "sys.exit(upstream_pr.main())"
    )
    ended = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(temporary)})
    try:
        deadline = time.monotonic() + 60
        while not reached.exists():
            assert time.monotonic() < deadline and ended.poll() is None
            time.sleep(0.02)
        ended.terminate()
        assert ended.wait(timeout=30) == 143
        with pytest.raises(ProcessLookupError):
            os.kill(int(reached.read_text()), 0)
        assert list(temporary.glob("upstream-pr-*")) == []
    finally:
        ended.kill()
        ended.wait()
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(reached.read_text()), signal.SIGKILL)


# --- what a pull request says -----------------------------------------------------


def test_runs_of_the_same_slice_do_not_share_a_file(tmp_path):
    others = tmp_path / "nemo-gym-1-contract.partial"
    others.write_text("of another run")
    upstream_pr._write_texts(tmp_path, "nemo-gym-1-contract", ["text"])
    assert (tmp_path / "nemo-gym-1-contract.md").read_text() == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nemo-gym-1-contract.md", others.name]


def test_the_text_has_size_tests_and_status(run, miles, tmp_path):
    run(1)
    assert not (tmp_path / "texts").exists()
    run(1, skip_tests=False)
    text = (tmp_path / "texts/nemo-gym-1-contract.md").read_text()
    assert text.startswith("# feat: contract\n\n## Motivation\n\n4 files changed, ")
    assert "in a checkout of Miles with this change: 2 passed in " in text
    assert (
        "- In the repository that this comes from, whose `make` targets these are:\n  - 2026-11-30: it runs; here"
        in text
    )


def test_evidence_that_no_table_has_is_named(run, source):
    plan(source, slices={1: {"evidence": ["it flies"]}})
    with pytest.raises(SliceError, match="no row of a status table begins with 'it flies'"):
        run(1)


# --- the plan -------------------------------------------------------------------


def test_a_new_file_has_to_find_its_place(run, source):
    (source / EXAMPLE / "new.py").write_text("")
    with pytest.raises(
        RefusedError, match=f"{EXAMPLE}/new.py: decide in tools/upstream/slices.yaml: a slice, or stays"
    ):
        run(1)


def test_a_slice_with_files_has_a_text(run, source):
    plan(source, slices={5: {"files": [f"{EXAMPLE}/late.py"]}})
    (source / EXAMPLE / "late.py").write_text("")
    with pytest.raises(
        RefusedError, match="tools/upstream/5-later.md: expected the slice's text, found none; write it"
    ):
        run(1)


def test_places_that_name_the_same_file_or_none_are_problems(source):
    plan(source, stays=["README.md", "tools/", f"{EXAMPLE}/data.py", "gone.py"])
    known = upstream_plan.Plan.read(source)
    assert upstream_plan.plan_problems(known, upstream_plan.repository_files(source)) == [
        f"{EXAMPLE}/data.py: named in tools/upstream/slices.yaml by slice 2 and stays, expected one",
        "tools/upstream/slices.yaml: stays: gone.py names no file; remove the line",
    ]


@functools.cache
def _real_plan() -> tuple[upstream_plan.Plan, list[str]]:
    return upstream_plan.Plan.read(ROOT), upstream_plan.repository_files(ROOT)


def test_every_file_of_this_repository_has_its_place():
    assert upstream_plan.plan_problems(*_real_plan()) == []


def test_no_slice_imports_what_a_later_one_brings():
    known, files = _real_plan()
    owner = {path: one.number for one in known.everything() for path in upstream_plan.files_of(one.files, files)}
    modules = {_module(path): number for path, number in owner.items() if path.endswith(".py")}
    for path, number in owner.items():
        if path.endswith(".py"):
            late = [name for name in _imports(ROOT / path) if modules.get(name, number) > number]
            assert not late, f"{path} of slice {number} imports {late}"


def _module(path: str) -> str:
    relative = path.removeprefix(f"{EXAMPLE}/").removeprefix(f"{TESTS}/").removesuffix(".py").removesuffix("/__init__")
    return relative.replace("/", ".")


def _imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_what_goes_to_miles_names_no_make_target():
    """Miles has no Makefile of ours; pages are checked by tools/check_docs.py."""
    known, files = _real_plan()
    targets = "|".join(check_docs.Tree(ROOT).make_targets)
    for one in known.everything():
        for path in files_of(one.files, files):
            if not path.endswith((".md", ".json", ".jsonl")):
                found = re.findall(rf"\bmake (?:{targets})\b", (ROOT / path).read_text())
                assert not found, f"{path} goes to Miles and names {found}"


def test_every_slice_has_its_text_and_its_evidence():
    known, _ = _real_plan()
    for one in known.everything():
        text = upstream_pr.pull_request(ROOT, one, tested="9 passed in 9 s", stat="9 files changed")
        for part in ("Motivation", "What changes for existing users", "Validation", "Limits", "Test plan", "Related"):
            assert f"\n## {part}\n" in text, (one.name, part)
        subject, blank, *reason = upstream_pr.commit_message(ROOT, one).splitlines()
        assert len(subject) < 70 and blank == "" and reason[0] and "{" not in text


def test_the_repository_itself_goes_onto_a_checkout_slice_by_slice(tmp_path, capsys):
    """All slices of this repository on files that stand for those of Miles, unformatted, without the example's tests."""
    known, files = _real_plan()
    source = tmp_path / "source"
    for path in files:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    make_repository(source, {})
    headings = [section for one in known.slices.values() for section in one.sections]
    old = "".join(f"{section['instead_of']}\n\nOld.\n\n" for section in headings if "instead_of" in section)
    of_miles = {path: text for path, text in MILES.items() if not path.startswith((EXAMPLE, TESTS, ".pre-commit"))}
    group = {"group": known.merged["navigation"]["group"], "pages": ["user-guide/environments"]}
    miles = make_repository(
        tmp_path / "miles",
        {
            **of_miles,
            "docs/docs.json": json.dumps({"navigation": {"pages": [group]}}, indent=1) + "\n",
            f"{EXAMPLE}/README.md": f"# Old\n\n{old}## Troubleshooting\n\nAsk.\n",
            f"{EXAMPLE}/eval_nemogym_via_api.py": (
                "import time\nfrom nemogym_agent_function import post_json\n\n\nasync def _run_one(args, instance):\n    pass\n"
            ),
        },
    )
    plan_file = source / "tools/upstream/slices.yaml"
    plan_of_this = yaml.safe_load(plan_file.read_text())
    plan_of_this["miles"]["seen"] = seen(miles, f"{EXAMPLE}/README.md", f"{EXAMPLE}/eval_nemogym_via_api.py")
    plan_file.write_text(yaml.safe_dump(plan_of_this))
    options = {"base": "HEAD", "check": False, "skip_tests": True, "output": tmp_path}
    assert upstream_pr.make_branch(source, miles, number=None, **options) == 0
    outside = {path for path in changed_files(miles, "nemo-gym") if not path.startswith((f"{EXAMPLE}/", f"{TESTS}/"))}
    pages = ("docs.json", "examples/index.md", "user-guide/environments.md", "user-guide/nemo-gym.md")
    assert outside == {*(f"docs/{page}" for page in pages), "examples/README.md"}
    assert capsys.readouterr().out.count("files changed") == len(known.everything())
