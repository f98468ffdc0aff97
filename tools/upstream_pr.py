"""Make the branches of the pull requests to Miles from this repository.

    make upstream-pr MILES=<checkout> [SLICE=n] [ARGS="--check --skip-tests"]

With SLICE the branch ``nemo-gym-<n>-<name>`` of the checkout holds that slice, a commit on those that it needs; without,
``nemo-gym`` holds them all. tools/upstream/slices.yaml says what is in a slice and what stays here, a page beside it
what its pull request is for. Per slice:

1. files are copied, pages of Miles merged by structure, Miles' formatters and sync_example_docs.py run;
2. it is refused if it touches anything but its own places, or overwrites what Miles has changed meanwhile;
3. the example's tests run there, and their figures go into outputs/upstream/<branch>.md, the pull request's text.

All of this happens in a clone of its own in the temporary folder. The checkout, which has to be clean, is only read,
until at the end its branches are set, all or none: its work tree, index and current branch are never touched. A commit
that is there already is used again, so that a second run changes nothing. A branch with a commit of somebody else is
left alone.

Exit status: 0 done, or with --check nothing to do; 1 a slice fails its checks or tests, or with --check would change
something; 2 refused: wrong checkout, wrong settings; 130 interrupted, 143 terminated.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import check_docs
import upstream_pages
import yaml
from upstream_plan import (
    GIT_PLACES,
    PLAN,
    PREFIX,
    Plan,
    RefusedError,
    Slice,
    files_of,
    plan_problems,
    repository_files,
)

_ROOT = Path(__file__).resolve().parents[1]
_EXAMPLE = "examples/experimental/nemo-gym/"
_TESTS = "tests/fast/examples/experimental/nemo_gym/"
_README = f"{_EXAMPLE}README.md"
_PAGE = "docs/user-guide/nemo-gym.md"
_SYNC = "scripts/tools/sync_example_docs.py"
_SUITES = "tests/ci/run_suite.py"
_LARGEST_FILE = 1000 * 1024  # check-added-large-files of Miles' .pre-commit-config.yaml
_TRAILER = "Slice: nemo-gym"


class SliceError(Exception):
    """A slice does not pass its checks or tests."""


# --- the checkout ---------------------------------------------------------------


def check_checkout(checkout: Path, base: str) -> str:
    """Whether branches may be made in a checkout.

    Args:
        checkout: its folder.
        base: branch or commit that the slices go on.

    Returns:
        The hash of that commit.

    Raises:
        RefusedError: it is no checkout of Miles, not clean, or has no such commit.
    """
    clone = "git clone https://github.com/radixark/miles <folder>, then make upstream-pr MILES=<folder>"
    if not (checkout / "miles/utils/external_utils/command_utils.py").is_file():
        raise RefusedError(f"expected a checkout of Miles, found {str(checkout)!r}: {clone}")
    try:
        top = Path(_git(checkout, "rev-parse", "--show-toplevel").strip())
    except subprocess.CalledProcessError as error:
        said = (error.stderr.splitlines() or ["no message"])[0]
        raise RefusedError(
            f"expected a git checkout of Miles, found no git repository that git opens in {checkout} ({said}): {clone}"
        ) from None
    if top.resolve() != checkout.resolve():
        raise RefusedError(f"expected the top folder of a checkout of Miles, found {checkout}, which is inside {top}")
    if changed := _git(checkout, "status", "--porcelain").splitlines():
        raise RefusedError(
            f"expected a clean checkout, found {len(changed)} changed or new file(s) in {checkout}, the first "
            f"{changed[0][3:]}: commit, stash or remove them"
        )
    try:
        return _git(checkout, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        raise RefusedError(
            f"expected the branch or commit {base} in {checkout}, found none: name one with --base"
        ) from None


def check_branch(checkout: Path, branch: str, base: str) -> str | None:
    """Whether a branch may be set.

    Returns:
        The commit that it is at; None where there is none.

    Raises:
        RefusedError: it is checked out, or has a commit of somebody else.
    """
    old = _git(checkout, "for-each-ref", "--format=%(objectname)", f"refs/heads/{branch}").strip() or None
    worktrees = _git(checkout, "worktree", "list", "--porcelain").splitlines()
    if f"branch refs/heads/{branch}" in worktrees:
        raise RefusedError(f"expected {branch} not to be checked out, found it in a work tree: git switch main")
    if old:
        log = _git(checkout, "log", "-z", "--format=%h %s%n%B", f"{base}..{old}")
        foreign = [one.splitlines()[0] for one in log.split("\0") if one and _TRAILER not in one]
        if foreign:
            raise RefusedError(
                f"expected commits of this command on {branch}, found {foreign[0]!r}: rename the branch "
                f"(git branch -m {branch} <name>), or delete it"
            )
    return old


@contextlib.contextmanager
def clone_of(checkout: Path) -> Iterator[Path]:
    """A clone that shares the checkout's objects, in a temporary folder that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="upstream-pr-") as folder:
        clone = Path(folder) / "miles"
        options = ["--quiet", "--shared", "--no-checkout", "--origin", "origin"]
        _git(Path(folder), "clone", *options, str(checkout.absolute()), str(clone))
        _git(clone, "config", "commit.gpgsign", "false")  # a signature would make each run's commit another one
        yield clone


# --- one slice ------------------------------------------------------------------


@dataclass
class Builder:
    """Makes slices in a clone.

    Attributes:
        source: this repository.
        clone: of the checkout, at the commit that the next slice goes on.
        plan: what is in which slice.
        base: commit of Miles that all go on.
        skip_tests: leave out the example's tests.
    """

    source: Path
    clone: Path
    plan: Plan
    base: str
    skip_tests: bool = False

    def build(self, one: Slice, *, is_last: bool) -> tuple[str, str]:
        """Commit a slice on what the clone is at, or take the commit that an earlier run made of it.

        Args:
            one: the slice.
            is_last: its tests are run in any case; of another one only where its commit is new.

        Returns:
            Its commit, and one line about its tests; the line is empty where they were left out.

        Raises:
            SliceError: it fails.
        """
        problems_before = self._page_problems()
        try:
            self._write(one)
        except upstream_pages.PageError as error:
            raise SliceError(f"slice {one.number} ({one.name}): {error}") from None
        self._format()
        files = files_of(one.files, repository_files(self.source))
        self._check_seen([*files, *one.bridges, *one.adds])
        self._sync_docs(one)
        changed = self._changed()
        problems = [*self._out_of_place(changed), *self._banned(changed), *self._uncollected(changed)]
        known = {_without_line(problem) for problem in problems_before}
        problems += [problem for problem in self._page_problems() if _without_line(problem) not in known]
        if problems:
            raise SliceError(f"slice {one.number} ({one.name}):\n  " + "\n  ".join(problems))
        message = commit_message(self.source, one)
        known = self._known_commit(message)
        skip_tests = self.skip_tests or (known and not is_last)
        tested = "" if skip_tests else self._run_tests(one)
        if known:
            _git(self.clone, "reset", "--quiet", "--hard", known)
        else:
            _git(self.clone, "commit", "--quiet", "--no-verify", "-m", message)
        return _git(self.clone, "rev-parse", "HEAD").strip(), tested

    def _check_seen(self, paths: list[str]) -> None:
        """Whether what was overwritten is what this repository takes into account, or what has been put there.

        Raises:
            RefusedError: Miles has changed a file since.
        """
        for path in paths:
            theirs = blob_of(self.clone, self.base, path)
            ours = _git(self.clone, "hash-object", "--", path).strip()
            if theirs not in (None, self.plan.seen.get(path), ours):
                raise RefusedError(
                    f"expected {path} in Miles as in {self.plan.commit[:12]}, found it changed since: carry over what "
                    f"`git log -p {self.plan.commit[:12]}.. -- {path}` shows there, then raise miles.commit and miles.seen "
                    f"in {PLAN}"
                )

    def _write(self, one: Slice) -> None:
        for path in files_of(one.files, repository_files(self.source)):
            self._copy(path, path, one)
        for target, origin in one.adds.items():
            self._copy(origin, target, one)
        for target, origin in one.bridges.items():
            self._rewrite(target, upstream_pages.replace_definitions, (self.source / origin).read_text())
        self._put_sections(one)
        for page in self.plan.withheld.get(one.number, {}):
            if any(page in earlier.files for earlier in self.plan.up_to(one.number) if earlier is not one):
                self._copy(page, page, one)
        if one.merges:
            self._merge(one)

    def _put_sections(self, one: Slice) -> None:
        """Into Miles' README, as long as no slice has replaced it, the parts of ours that are true by now."""
        by_now = self.plan.up_to(one.number)
        if any(_README in each.files for each in by_now):
            return
        ours = self._page(_README, one)
        for section in (section for each in by_now for section in each.sections):
            places = {key: section[key] for key in ("instead_of", "before") if key in section}
            said = upstream_pages.section_of(ours, section["heading"])
            self._rewrite(_README, upstream_pages.put_section, said, **places)

    def _copy(self, origin: str, target: str, one: Slice) -> None:
        path = self.clone / target
        path.parent.mkdir(parents=True, exist_ok=True)
        if target.endswith(".md"):
            path.write_text(self._page(target, one))
        else:
            shutil.copy(self.source / origin, path)

    def _page(self, page: str, one: Slice) -> str:
        text = upstream_pages.without((self.source / page).read_text(), self.plan.not_said(page, one.number))
        return check_docs.without_marks(text)

    def _merge(self, one: Slice) -> None:
        navigation, tables, examples = (self.plan.merged[kind] for kind in ("navigation", "tables", "examples"))
        self._rewrite(navigation["file"], upstream_pages.add_page, group=navigation["group"], page=navigation["page"])
        ours = self._page(tables["file"], one)
        names = {"tables": tables["first_columns"], "union": tables["union"]}
        self._rewrite(tables["file"], upstream_pages.merge_rows, ours, **names)
        self._rewrite(examples["file"], upstream_pages.add_bullet, examples["bullet"])

    def _rewrite(self, target: str, change: Any, *arguments: Any, **options: Any) -> None:
        path = self.clone / target
        if not path.is_file():
            raise upstream_pages.PageError(f"expected {target} in Miles, found none")
        before = path.read_text()
        try:
            after = change(before, *arguments, **options)
        except upstream_pages.PageError as error:
            raise upstream_pages.PageError(f"{target}: {error}") from None
        if after != before:
            path.write_text(after)

    def _format(self) -> None:
        """Miles' formatters with Miles' settings on what has changed."""
        changed = [path for path in self._changed() if path.endswith(".py") and (self.clone / path).is_file()]
        for name, options in _formatters(self.clone):
            if changed:
                self._run([sys.executable, "-m", name, *options, *changed], what=name)

    def _sync_docs(self, one: Slice) -> None:
        if one.merges and (self.clone / _SYNC).is_file():
            self._run([sys.executable, _SYNC], what=_SYNC)

    def _run(self, command: list[str], *, what: str, **variables: str) -> str:
        environment = {**_environment(), **variables}
        done = subprocess.run(command, cwd=self.clone, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SliceError(f"{what} fails:\n{(done.stdout + done.stderr).strip()[-3000:]}")
        return done.stdout

    def _changed(self) -> list[str]:
        listed = _git(self.clone, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all")
        return [entry[3:] for entry in listed.split("\0") if entry]

    def _out_of_place(self, changed: list[str]) -> list[str]:
        merged = self.plan.merged
        places = {
            _PAGE,
            *merged["generated"],
            *(merged[kind]["file"] for kind in ("navigation", "tables", "examples")),
        }
        strays = [path for path in changed if not path.startswith((_EXAMPLE, _TESTS)) and path not in places]
        return [f"{path}: expected no change outside of the example, its tests and its pages" for path in strays]

    def _banned(self, changed: list[str]) -> list[str]:
        """What hooks of Miles' .pre-commit-config.yaml that need no program of their own would refuse."""
        problems = []
        for path in changed:
            file = self.clone / path
            if not file.is_file():
                continue
            if file.stat().st_size > _LARGEST_FILE:
                problems.append(
                    f"{path}: expected at most {_LARGEST_FILE // 1024} KB, found {file.stat().st_size} bytes"
                )
            for hook in _local_hooks(self.clone):
                excluded = hook.get("exclude") and re.search(hook["exclude"], path)
                meant = (
                    path.endswith(".py") if hook.get("types") == ["python"] else re.search(hook.get("files", ""), path)
                )
                if meant and not excluded and re.search(hook["entry"], file.read_text()):
                    problems.append(f"{path}: {hook['name']}")
        return problems

    def _uncollected(self, changed: list[str]) -> list[str]:
        """Test files that Miles' CI would not run, as its own list says."""
        if not (self.clone / _SUITES).is_file():
            return []
        options = ["--hw", "cpu", "--suite", "stage-a-cpu", "--match-all-labels", "--list-only"]
        listed = self._run([sys.executable, _SUITES, *options], what=_SUITES, PYTHONPATH=str(self.clone))
        tests = [path for path in changed if Path(path).name.startswith("test_") and path.endswith(".py")]
        return [
            f"{path}: expected it in the suite stage-a-cpu, found it nowhere" for path in tests if path not in listed
        ]

    def _page_problems(self) -> list[str]:
        tree = check_docs.Tree(self.clone)
        pages = [self.clone / path for path in (_README, _PAGE, self.plan.merged["tables"]["file"])]
        return [problem for page in pages if page.is_file() for problem in check_docs.page_problems(page, tree)]

    def _run_tests(self, one: Slice) -> str:
        """The example's tests as a process with nothing of this repository on its path."""
        started = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={_TESTS}", _TESTS]
        done = subprocess.run(command, cwd=self.clone, env=_environment(), capture_output=True, text=True)
        last = (done.stdout.strip().splitlines() or [""])[-1].strip("= ")
        if done.returncode:
            raise SliceError(
                f"slice {one.number} ({one.name}): its tests fail: {last}\n{done.stdout[-6000:]}{done.stderr}"
            )
        return f"{last.rpartition(' in ')[0]} in {time.monotonic() - started:.0f} s"

    def _known_commit(self, message: str) -> str | None:
        """The commit that holds and says the same: of an earlier run, or the one below where nothing has changed."""
        _git(self.clone, "add", "--all")
        tree, parent = _git(self.clone, "write-tree").strip(), _git(self.clone, "rev-parse", "HEAD").strip()
        if tree == _git(self.clone, "rev-parse", "HEAD^{tree}").strip():
            return parent
        log = _git(self.clone, "log", "-z", "--format=%H %T %P%n%B", f"--remotes=origin/{PREFIX}*", f"^{self.base}")
        for entry in filter(None, log.split("\0")):
            head, _, body = entry.partition("\n")
            if head.split()[1:] == [tree, parent] and body.strip() == message.strip():
                return head.split()[0]
        return None


def _without_line(problem: str) -> str:
    """A problem of a page wherever it is: lines above it come and go."""
    return re.sub(r":\d+:", ":", problem, count=1)


def _formatters(tree: Path) -> list[tuple[str, list[str]]]:
    """The formatters of Miles' .pre-commit-config.yaml, in its order.

    Raises:
        SliceError: one of them is not installed here in that version.
    """
    config = tree / ".pre-commit-config.yaml"
    if not config.is_file():
        return []
    options = {"ruff": ["check", "--fix", "--quiet"], "autoflake": ["--in-place", "--remove-all-unused-imports"]}
    options |= {"isort": ["--profile=black", "--quiet"], "black": ["--quiet"]}
    wanted = []
    for repository in yaml.safe_load(config.read_text())["repos"]:
        name = next((name for name in options if re.search(rf"/{name}(-pre-commit)?$", repository["repo"])), None)
        if name is None:
            continue
        version, found = repository["rev"].lstrip("v"), importlib.metadata.version(name)
        if version != found:
            raise SliceError(
                f"expected {name} {version}, as in Miles' .pre-commit-config.yaml, found {found}: raise it in pyproject.toml "
                "and .pre-commit-config.yaml, then make lock format"
            )
        wanted.append((name, options[name]))
    return wanted


def _local_hooks(tree: Path) -> list[dict[str, Any]]:
    config = tree / ".pre-commit-config.yaml"
    repositories = yaml.safe_load(config.read_text())["repos"] if config.is_file() else []
    hooks = [hook for repository in repositories if repository["repo"] == "local" for hook in repository["hooks"]]
    return [hook for hook in hooks if hook["language"] == "pygrep"]


# --- what a pull request says -----------------------------------------------------


def commit_message(source: Path, one: Slice) -> str:
    """Subject and reason: the description's page up to its first rule."""
    said = (source / one.description).read_text().partition("\n---\n")[0].strip()
    return f"{said}\n\n{_TRAILER} {one.number}\n"


def pull_request(source: Path, one: Slice, *, tested: str, stat: str) -> str:
    """The pull request's text.

    Args:
        source: this repository.
        one: the slice.
        tested: one line about the example's tests; empty where they were not run.
        stat: what ``git diff --shortstat`` says of the slice.

    Raises:
        SliceError: a row of the status tables that it needs is not there.
    """
    head, _, body = (source / one.description).read_text().partition("\n---\n")
    subject = head.splitlines()[0]
    today = datetime.date.today().isoformat()
    lines = [f"- {today}, in a checkout of Miles with this change: {tested}." if tested else "- Tests: not run."]
    if rows := _status_rows(source, one):
        lines += ["- In the repository that this comes from, whose `make` targets these are:"]
        lines += [f"  - {row}" for row in rows]
    filled = body.strip().replace("{validation}", "\n".join(lines)).replace("{size}", stat.strip() + ".")
    return f"# {subject}\n\n{filled}\n"


def _status_rows(source: Path, one: Slice) -> list[str]:
    dated_rows: dict[str, str] = {}
    for page in ("README.md", _README):
        status = re.split(r"\n## (?:Validation status|Status)\n", (source / page).read_text())[-1].split("\n## ")[0]
        date = re.search(r"\d{4}-\d{2}-\d{2}", status)
        rows = [line for line in status.splitlines() if line.startswith("|")]
        dated_rows |= {row: date[0] if date else "undated" for row in rows}
    said = []
    for start in one.evidence:
        row = next((row for row in dated_rows if row.startswith(f"| {start}")), None)
        if row is None:
            raise SliceError(
                f"slice {one.number} ({one.name}): no row of a status table begins with {start!r}; see {PLAN}"
            )
        said.append(f"{dated_rows[row]}: " + "; ".join(cell.strip() for cell in row.strip("|").split("|")))
    return said


# --- command --------------------------------------------------------------------


def blob_of(checkout: Path, commit: str, path: str) -> str | None:
    """The hash of a file's content in a commit; None where it has no such file."""
    # Not `ls-tree --format`: git knows it from 2.36 on.
    return (_git(checkout, "ls-tree", commit, "--", path).split() or [None] * 3)[2]


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=_environment()).stdout


def _environment() -> dict[str, str]:
    """Without what would tie a child to this repository: git's own variables, the module path, settings of make."""
    tied = {*GIT_PLACES, "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    kept = {name: value for name, value in os.environ.items() if name not in tied and not name.startswith("NEMO_GYM_")}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", "GIT_OPTIONAL_LOCKS": "0", **_identity}


_identity: dict[str, str] = {}


def _take_identity(checkout: Path) -> None:
    """Commit as the checkout's user would."""
    for role in ("AUTHOR", "COMMITTER"):
        try:
            ident = _git(checkout, "var", f"GIT_{role}_IDENT")
        except subprocess.CalledProcessError:
            raise RefusedError(
                "expected git to know who commits, found no name: git config --global user.name"
            ) from None
        name, email = re.match(r"(.*) <(.*)>", ident).groups()
        _identity.update({f"GIT_{role}_NAME": name, f"GIT_{role}_EMAIL": email})


def make_branch(
    source: Path, checkout: Path, *, number: int | None, base: str, check: bool, skip_tests: bool, output: Path
) -> int:
    """Set the branch of a slice, or of all.

    Args:
        source: this repository.
        checkout: of Miles.
        number: the slice; None for all in one branch.
        base: branch or commit of Miles.
        check: only say what would change.
        skip_tests: leave out the example's tests.
        output: folder for the pull requests' texts.

    Returns:
        The exit status.

    Raises:
        RefusedError, SliceError: see there; nothing has changed then.
    """
    plan = Plan.read(source)
    if problems := plan_problems(plan, repository_files(source)):
        raise RefusedError("\n  ".join(["every file has to have its place:", *problems]))
    chain = plan.everything() if number is None else plan.chain(number)
    branch = PREFIX if number is None else chain[-1].branch
    commit = check_checkout(checkout, base)
    old = check_branch(checkout, branch, commit)
    _take_identity(checkout)

    with clone_of(checkout) as clone:
        _git(clone, "checkout", "--quiet", "--detach", commit)
        builder = Builder(source=source, clone=clone, plan=plan, base=commit, skip_tests=skip_tests or check)
        texts = []
        for one in chain:
            parent = _git(clone, "rev-parse", "HEAD").strip()
            new, tested = builder.build(one, is_last=one is chain[-1])
            stat = _git(clone, "diff", "--shortstat", parent, new).strip() or "no change"
            print(f"slice {one.number} {one.name}: {stat}{f'; {tested}' if tested else ''}", flush=True)
            texts.append(pull_request(source, one, tested=tested, stat=stat))
        if not builder.skip_tests:
            _write_texts(output, branch, texts if number is None else texts[-1:])
        elif not check:
            print("no text is written: it says what the tests did, and they were left out")
        if new == old:
            print(f"{branch} is up to date: {new[:12]}")
            return 0
        if check:
            print(_git(clone, "diff", "--stat", old or commit, new).rstrip())
            print(f"{branch} would {'change' if old else 'be made'}; nothing was changed")
            return 1
        _git(clone, "branch", "--force", branch, new)
        fetch = ("fetch", "--quiet", "--atomic", "--no-tags", "--no-write-fetch-head", "--no-auto-gc")
        _git(checkout, *fetch, str(clone), f"+refs/heads/{branch}:refs/heads/{branch}")
    print(f"{branch} is {new[:12]} on {commit[:12]}" + (f"; it was {old[:12]}" if old else ""))
    return 0


def _write_texts(output: Path, branch: str, texts: list[str]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{branch}.md"
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text("\n".join(texts))
    partial.replace(path)
    print(f"the pull request's text: {path}")


def print_seen(source: Path, checkout: Path, base: str) -> int:
    """The block ``miles`` of the plan as the checkout has it."""
    commit = check_checkout(checkout, base)
    print(f"miles:\n  commit: {commit}\n  seen:")
    for path in sorted({*repository_files(source), *Plan.read(source).seen}):
        theirs = blob_of(checkout, commit, path)
        if theirs and (path.startswith((_EXAMPLE, _TESTS)) or path == _PAGE):
            print(f"    {path}: {theirs}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], epilog="tools/upstream/slices.yaml says what is in a slice."
    )
    parser.add_argument("checkout", help="folder of a clean checkout of Miles")
    parser.add_argument("--slice", type=int, help="number of a slice; without it all go into one branch")
    parser.add_argument("--base", default="HEAD", help="branch or commit of Miles that they go on (default HEAD)")
    parser.add_argument("--check", action="store_true", help="say what would change and change nothing; runs no tests")
    parser.add_argument(
        "--skip-tests", action="store_true", help="do not run the example's tests; writes no text either"
    )
    parser.add_argument("--seen", action="store_true", help="print the plan's block of Miles' files as they are there")
    parser.add_argument("--output", type=Path, default=_ROOT / "outputs/upstream", help="folder for the texts")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    checkout = Path(options.checkout).absolute()
    try:
        if options.seen:
            return print_seen(_ROOT, checkout, options.base)
        return make_branch(
            _ROOT,
            checkout,
            number=options.slice,
            base=options.base,
            check=options.check,
            skip_tests=options.skip_tests,
            output=options.output,
        )
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SliceError as error:
        print(f"error: {error}\nnothing was changed in {checkout}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip()
        print(f"error: {' '.join(error.cmd[:4])} failed: {said}\nnothing was changed in {checkout}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
