"""Build the local tasks from pairs of PyPI releases and prove each of them.

A task is a SWE-bench instance: the older release is the repository, the change of its source files to the newer one is
the gold patch, the change of its test files the test patch. The tests are run in the sandbox, with swebench's own
evaluation script and log parser, twice without the gold patch and twice with it: FAIL_TO_PASS are those that fail
before and pass after, PASS_TO_PASS those that pass throughout. The last two runs are graded: gold must be resolved,
the empty patch must not. Runs in NeMo Gym's environment (swebench, the sandbox provider)::

    python build_tasks.py --recipe tasks.toml --root <folder> --python <prefix> --uv uv
"""

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
import tomllib
from nemo_gym.sandbox.providers.base import SandboxSpec
from nemo_gym_bubblewrap.provider import BubblewrapProvider
from pypi_simple import PYPI_SIMPLE_ENDPOINT, NoSuchProjectError, PyPISimple, UnsupportedContentTypeError
from swebench.harness.grading import get_eval_report, get_logs_eval
from swebench.harness.test_spec.test_spec import make_test_spec
from tqdm import tqdm

_EVAL_TIMEOUT_S = 300.0
_FETCH_TIMEOUT_S = 60.0
_PASSED = "PASSED"
_IMAGE_ENV = {"PYTHONDONTWRITEBYTECODE": "1"}
_IGNORED = "*.egg-info/\n.pytest_cache/\n__pycache__/\n"
# The same commits, and so the same base_commit, on every machine.
_GIT_ENV = {
    "GIT_AUTHOR_DATE": "2020-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2020-01-01T00:00:00Z",
    "GIT_AUTHOR_NAME": "local stack",
    "GIT_AUTHOR_EMAIL": "local-stack@example.invalid",
    "GIT_COMMITTER_NAME": "local stack",
    "GIT_COMMITTER_EMAIL": "local-stack@example.invalid",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}
_OPT_HOME = "home = /opt/python/bin"
# pytest's own repository runs the pytest in its checkout.
_PYTEST_SCRIPT = '#!/bin/sh\nexec "$(dirname -- "$0")/python" -m pytest "$@"\n'


class BuildError(Exception):
    """A task could not be built or did not prove itself."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, required=True, help="TOML: environments and tasks")
    parser.add_argument(
        "--root", type=Path, required=True, help="folder for sdists, environments, images, tasks.jsonl"
    )
    parser.add_argument("--python", type=Path, required=True, help="prefix of the interpreter the tests run on")
    parser.add_argument("--uv", required=True, help="path of uv")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tasks at a time")
    args = parser.parse_args()
    os.umask(0o022)  # the sandbox's user must be able to read the images
    try:
        build_all(recipe=args.recipe, root=args.root, python=args.python, uv=args.uv, jobs=args.jobs)
    except BuildError as error:
        sys.exit(f"error: {error}")


def build_all(*, recipe: Path, root: Path, python: Path, uv: str, jobs: int) -> None:
    """Build what the recipe names and is not there yet, then write ``root/tasks.jsonl`` in the recipe's order.

    Args:
        recipe: TOML file with ``environments`` and ``tasks``.
        root: folder of the local stack.
        python: prefix of the interpreter that the tests run on.
        uv: path of uv.
        jobs: tasks built at a time.

    Raises:
        BuildError: a download, a build or a proof failed; what was finished is kept.
    """
    for unfinished in [*(root / "images").glob(".building-*"), *(root / "sdists").glob(".fetching-*")]:
        shutil.rmtree(unfinished)  # left by a builder that was killed
    plan = tomllib.loads(recipe.read_text())
    environments = {
        name: build_environment(root=root, python=python, uv=uv, requirements=entry["requirements"])
        for name, entry in plan["environments"].items()
    }
    pending = [task for task in plan["tasks"] if not _is_built(task, root=root, environments=environments)]
    progress = tqdm(total=len(pending), desc="tasks", unit="task", disable=not (pending and sys.stderr.isatty()))

    def build(task: dict) -> None:
        summary = build_task(task, root=root, python=python, environment=environments[task["environment"]])
        progress.write(f"proven {summary}", file=sys.stderr)
        progress.update()

    with progress, ThreadPoolExecutor(max_workers=jobs) as pool:
        for future in [pool.submit(build, task) for task in pending]:
            future.result()
    rows = [json.loads((_image_folder(root, task) / "row.json").read_text()) for task in plan["tasks"]]
    _write_atomically(root / "tasks.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def build_task(task: dict, *, root: Path, python: Path, environment: Path) -> str:
    """Build one task's image and row; nothing is left of it unless it proves itself.

    Args:
        task: its entry in the recipe.
        root: folder of the local stack.
        python: prefix of the interpreter.
        environment: virtual environment that the tests run in.

    Returns:
        One line on what was found.

    Raises:
        BuildError: see ``build_all``.
    """
    images = root / "images"
    images.mkdir(parents=True, exist_ok=True)
    folder = _image_folder(root, task)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=images) as scratch:
        draft = Path(scratch) / folder.name
        instance = _make_repository(task, sdists=root / "sdists", folder=draft)
        description = {"python": str(python), "environment": str(environment), "env": _IMAGE_ENV}
        (draft / "image.json").write_text(json.dumps(description))
        logs = asyncio.run(_run_tests(instance, image_root=Path(scratch), image=folder.name))
        instance = _with_test_lists(instance, logs=logs, test_files=task["tests"])
        _prove(instance, logs=logs)
        row = {"prompt": instance["problem_statement"], "metadata": instance}
        (draft / "row.json").write_text(json.dumps(row))
        (draft / "recipe.sha256").write_text(_recipe_digest(task, environment=environment))
        _replace_folder(draft, folder)
    counts = [len(json.loads(instance[key])) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")]
    return f"{task['instance_id']}: gold 1.0, empty 0.0 ({counts[0]} FAIL_TO_PASS, {counts[1]} PASS_TO_PASS)"


def build_environment(*, root: Path, python: Path, uv: str, requirements: list[str]) -> Path:
    """Make a read-only environment for the sandbox, with no pip in it; its interpreter is the one at /opt/python.

    Args:
        root: folder of the local stack.
        python: prefix of the interpreter.
        uv: path of uv.
        requirements: every package, pinned.

    Returns:
        The environment's folder.

    Raises:
        BuildError: a package could not be installed.
    """
    digest = _digest([requirements, str(python), Path(__file__).read_text()])
    folder = root / "environments" / digest[:16]
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    _run([uv, "venv", "--quiet", "--relocatable", "--python", str(python / "bin" / "python3"), str(folder)])
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--compile-bytecode"]
    install += ["--link-mode", "copy"]  # a file of the cache has whatever permissions it was cached with
    _run([*install, "--python", str(folder / "bin" / "python"), *requirements])
    site_packages = next((folder / "lib").glob("python3.*/site-packages"))
    (site_packages / "testbed.pth").write_text("/testbed/src\n/testbed\n")
    if not (site_packages / "pytest").exists():
        script = folder / "bin" / "pytest"
        script.write_text(_PYTEST_SCRIPT)
        script.chmod(0o755)
    _point_at_opt_python(folder)
    _run(["chmod", "-R", "a+rX", str(folder)])
    (folder / "complete").touch()
    return folder


def fetch_sdist(project: str, filename: str, sha256: str, *, folder: Path) -> Path:
    """Download one release file from the package index and check its hash.

    Args:
        project: name on the index (PIP_INDEX_URL or UV_DEFAULT_INDEX, else PyPI).
        filename: the file.
        sha256: its hash, hexadecimal.
        folder: where it is kept.

    Returns:
        The file's path.

    Raises:
        BuildError: it cannot be fetched or is not the file expected.
    """
    path = folder / filename
    if path.is_file() and _digest_bytes(path.read_bytes()) == sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch, PyPISimple(index) as client:
        partial = Path(scratch) / filename
        try:
            packages = client.get_project_page(project, timeout=_FETCH_TIMEOUT_S).packages
            package = next((package for package in packages if package.filename == filename), None)
            if package is None:
                raise BuildError(f"{project}: the package index does not list {filename}")
            client.download_package(package, partial, timeout=_FETCH_TIMEOUT_S)
        except (requests.RequestException, NoSuchProjectError, UnsupportedContentTypeError, ValueError) as error:
            raise BuildError(
                f"{filename} could not be fetched: {type(error).__name__} from the package index"
            ) from error
        if (found := _digest_bytes(partial.read_bytes())) != sha256:
            raise BuildError(f"{filename}: expected sha256 {sha256}, found {found}")
        partial.replace(path)
    return path


def _make_repository(task: dict, *, sdists: Path, folder: Path) -> dict:
    """Lay the older release out as a git repository in ``folder/testbed`` and return the instance, without its tests."""
    testbed = folder / "testbed"
    newer = folder.parent / "newer"
    for release, target in (("old", testbed), ("new", newer)):
        sdist = fetch_sdist(task["project"], **task[release], folder=sdists)
        _extract(sdist, target)
    base_commit = _commit(testbed)
    instance = {
        "instance_id": task["instance_id"],
        "repo": task["repo"],
        "version": task["version"],
        "base_commit": base_commit,
        "environment_setup_commit": base_commit,
        "problem_statement": task["problem_statement"].strip(),
        "hints_text": "",
        "created_at": "2020-01-01T00:00:00Z",
        "patch": _diff(testbed, newer=newer, files=task["source"]),
        "test_patch": _diff(testbed, newer=newer, files=task["tests"]),
        "image_name": f"docker.io/swebench/{folder.name}:latest",
        "subset": "local",
        "split": "test",
    }
    _git(testbed, "repack", "-adq")
    return instance


def _extract(sdist: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent.parent) as scratch, tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
        (top,) = Path(scratch).iterdir()
        target.parent.mkdir(parents=True, exist_ok=True)
        top.rename(target)
    for metadata in list(target.rglob("*.egg-info")):
        shutil.rmtree(metadata)


def _commit(testbed: Path) -> str:
    _git(testbed, "init", "--quiet", "--initial-branch=main")
    (testbed / ".git" / "info").mkdir(exist_ok=True)
    (testbed / ".git" / "info" / "exclude").write_text(_IGNORED)
    _git(testbed, "add", "--all", "--force")
    _git(testbed, "commit", "--quiet", "--message", "Release")
    # swebench's script prints `git show` of the base commit: an empty one keeps the log small.
    _git(testbed, "commit", "--quiet", "--allow-empty", "--message", "Base")
    return _git(testbed, "rev-parse", "HEAD").strip()


def _diff(testbed: Path, *, newer: Path, files: list[str]) -> str:
    for file in files:
        shutil.copyfile(newer / file, testbed / file)
    patch = _git(testbed, "diff")
    _git(testbed, "checkout", "--quiet", "--", ".")
    return patch


def _git(folder: Path, *arguments: str) -> str:
    return _run(["git", *arguments], cwd=folder, env={**os.environ, **_GIT_ENV})


async def _run_tests(instance: dict, *, image_root: Path, image: str) -> dict[str, list[str]]:
    """Return the logs of two runs with the gold patch and two with the empty one."""
    script = make_test_spec({**instance, "FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"}).eval_script
    logs: dict[str, list[str]] = {"gold": [], "empty": []}
    for kind, runs in logs.items():
        patch = instance["patch"] if kind == "gold" else ""
        for _ in range(2):
            runs.append(await _run_once(script, patch=patch, image_root=image_root, image=image))
    return logs


async def _run_once(script: str, *, patch: str, image_root: Path, image: str) -> str:
    provider = BubblewrapProvider(str(image_root))
    sandbox = await provider.create(SandboxSpec(image=image))
    try:
        if patch:
            applied = await provider.exec(sandbox, f"git apply - <<'EOF_PATCH'\n{patch}\nEOF_PATCH")
            if applied.return_code:
                raise BuildError(f"{image}: the gold patch does not apply: {applied.stdout.strip()}")
        return (await provider.exec(sandbox, script, timeout_s=_EVAL_TIMEOUT_S)).stdout
    finally:
        await provider.close(sandbox)


def _with_test_lists(instance: dict, *, logs: dict[str, list[str]], test_files: list[str]) -> dict:
    """Add FAIL_TO_PASS and PASS_TO_PASS: JSON lists as strings, as SWE-bench has them."""
    spec = make_test_spec({**instance, "FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"})
    gold, empty = ([_statuses(spec, log) for log in logs[kind]] for kind in ("gold", "empty"))
    # A runner that tests a test runner prints the names of inner tests, too.
    steady = sorted(
        name for name in gold[0] if name.split("::")[0] in test_files and all(run.get(name) == _PASSED for run in gold)
    )
    fail_to_pass = [name for name in steady if all(run.get(name) != _PASSED for run in empty)]
    pass_to_pass = [name for name in steady if all(run.get(name) == _PASSED for run in empty)]
    if not fail_to_pass or not pass_to_pass:
        raise BuildError(
            f"{instance['instance_id']}: found {len(fail_to_pass)} FAIL_TO_PASS and {len(pass_to_pass)} PASS_TO_PASS "
            f"tests, expected at least one of each; last lines of the gold run:\n{logs['gold'][-1][-1500:]}"
        )
    return {**instance, "FAIL_TO_PASS": json.dumps(fail_to_pass), "PASS_TO_PASS": json.dumps(pass_to_pass)}


def _prove(instance: dict, *, logs: dict[str, list[str]]) -> None:
    resolved = {
        kind: _is_resolved(instance, log=runs[-1], patch=instance["patch"] if kind == "gold" else "")
        for kind, runs in logs.items()
    }
    if resolved != {"gold": True, "empty": False}:
        raise BuildError(f"{instance['instance_id']}: expected gold resolved and empty not, found {resolved}")


def _is_resolved(instance: dict, *, log: str, patch: str) -> bool:
    spec = make_test_spec(instance)
    prediction = {"instance_id": instance["instance_id"], "model_patch": patch}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(log)
        file.flush()
        report = get_eval_report(
            test_spec=spec, prediction=prediction, test_log_path=file.name, include_tests_status=True
        )
    return report[instance["instance_id"]]["resolved"]


def _statuses(spec, log: str) -> dict[str, str]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(log)
        file.flush()
        statuses, found = get_logs_eval(spec, file.name)
    if not found:
        raise BuildError(f"{spec.instance_id}: the tests did not run; last lines:\n{log[-1500:]}")
    return statuses


def _is_built(task: dict, *, root: Path, environments: dict[str, Path]) -> bool:
    stamp = _image_folder(root, task) / "recipe.sha256"
    digest = _recipe_digest(task, environment=environments[task["environment"]])
    return stamp.is_file() and stamp.read_text() == digest


def _recipe_digest(task: dict, *, environment: Path) -> str:
    return _digest([task, str(environment), Path(__file__).read_text()])


def _image_folder(root: Path, task: dict) -> Path:
    """Return the image's folder, named as SWE-bench's official images are."""
    return root / "images" / f"sweb.eval.x86_64.{task['instance_id'].replace('__', '_1776_')}"


def _point_at_opt_python(environment: Path) -> None:
    """Make the environment's interpreter the one that every sandbox has at /opt/python."""
    config = environment / "pyvenv.cfg"
    lines = config.read_text().splitlines()
    config.write_text("".join(f"{_OPT_HOME if line.startswith('home =') else line}\n" for line in lines))
    interpreter = environment / "bin" / "python"
    interpreter.unlink()
    interpreter.symlink_to("/opt/python/bin/python3")


def _replace_folder(source: Path, target: Path) -> None:
    if target.exists():
        target.rename(source.parent / "replaced")
    source.rename(target)


def _write_atomically(path: Path, content: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(content)
    partial.replace(path)


def _digest(value) -> str:
    return _digest_bytes(json.dumps(value, sort_keys=True).encode())


def _digest_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _run(command: list[str], **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:3])} failed: {done.stderr.strip()[-1500:]}")
    return done.stdout


if __name__ == "__main__":
    main()
