"""Building the tasks: proven or not kept, made once, made again when their recipe changes."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from local_stack.install import find_python, find_uv
from local_stack.paths import SOURCE, TASK_RECIPE, Paths, StackError

_TASK = "psf__requests-2.27.1"
_AS_JSON = "import json, sys, tomllib; print(json.dumps(tomllib.load(open(sys.argv[1], 'rb'))))"


@pytest.fixture
def recipe(paths) -> dict:
    """The recipe, read by NeMo Gym's interpreter: the project's may have no tomllib."""
    command = [str(paths.gym_python), "-c", _AS_JSON, str(TASK_RECIPE)]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.fixture
def build(paths, recipe, tmp_path):
    """Run the builder on a recipe with one task, in a folder of its own that shares the sdists."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "sdists").symlink_to(paths.root / "sdists")
    recipe_file = tmp_path / "tasks.toml"
    prefix = json.loads((paths.root / "python.json").read_text())["prefix"]

    def run(task: dict, environment: dict | None = None) -> tuple[subprocess.CompletedProcess, Path]:
        recipe_file.write_text(_as_toml(task, recipe["environments"]["common"]))
        command = [str(paths.gym_python), str(SOURCE / "build_tasks.py"), "--recipe", str(recipe_file)]
        command += ["--root", str(root), "--python", prefix, "--uv", find_uv()]
        done = subprocess.run(
            command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, timeout=180
        )
        return done, root

    return run


@pytest.fixture
def recipe_task(recipe) -> dict:
    """One entry of the recipe."""
    (task,) = (task for task in recipe["tasks"] if task["instance_id"] == _TASK)
    return task


def _as_toml(task: dict, environment: dict) -> str:
    """Write what the recipe needs; JSON's strings and lists of strings are TOML's."""
    lines = ["[environments.common]", f"requirements = {json.dumps(environment['requirements'])}", "[[tasks]]"]
    for key, value in task.items():
        if isinstance(value, dict):
            value = ", ".join(f"{inner} = {json.dumps(text)}" for inner, text in value.items())
            lines.append(f"{key} = {{ {value} }}")
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _images(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "images").glob("*"))


def test_a_task_is_built_once_and_again_when_its_recipe_changes(build, recipe_task):
    done, root = build(recipe_task)
    assert done.returncode == 0, done.stderr
    assert f"proven {_TASK}: gold 1.0, empty 0.0" in done.stderr
    image = root / "images" / "sweb.eval.x86_64.psf_1776_requests-2.27.1"
    made = image.stat().st_ino
    first = (root / "tasks.jsonl").read_text()

    done, _ = build(recipe_task)
    assert done.returncode == 0 and "proven" not in done.stderr and image.stat().st_ino == made

    done, _ = build({**recipe_task, "problem_statement": "Something else is wrong."})
    assert done.returncode == 0 and "proven" in done.stderr and image.stat().st_ino != made
    changed = json.loads((root / "tasks.jsonl").read_text())
    assert changed["prompt"] == changed["metadata"]["problem_statement"] == "Something else is wrong."
    assert changed["metadata"]["base_commit"] == json.loads(first)["metadata"]["base_commit"]
    assert _images(root) == [image.name]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"source": ["HISTORY.md"]}, "found 0 FAIL_TO_PASS"),
        ({"new": {"filename": "requests-2.27.1.tar.gz", "sha256": "0" * 64}}, "expected sha256 000"),
        ({"new": {"filename": "requests-2.27.99.tar.gz", "sha256": "0" * 64}}, "does not list requests-2.27.99"),
    ],
)
def test_what_does_not_prove_itself_is_not_kept(build, recipe_task, change, message):
    done, root = build({**recipe_task, **change})
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
    assert _images(root) == [] and not (root / "tasks.jsonl").exists()


def test_an_unreachable_index_is_one_sentence(build, recipe_task):
    old = {"filename": "requests-2.26.99.tar.gz", "sha256": "0" * 64}
    done, root = build({**recipe_task, "old": old}, {"PIP_INDEX_URL": "http://127.0.0.1:9/simple"})
    assert done.returncode == 1
    assert "requests-2.26.99.tar.gz could not be fetched" in done.stderr and "Traceback" not in done.stderr
    assert _images(root) == []


@pytest.mark.parametrize("chosen", ["/no/such/python", "/bin/true"])
def test_a_wrong_interpreter_is_named(monkeypatch, chosen):
    monkeypatch.setenv("LOCAL_STACK_PYTHON", chosen)
    with pytest.raises(StackError, match=f"LOCAL_STACK_PYTHON={chosen}: expected a Python 3.13"):
        find_python(find_uv())


@pytest.mark.parametrize("folder", ["/tmp/with space", "/tmp/with'quote", "/tmp/with$dollar"])
def test_a_folder_that_ray_cannot_start_from_is_named(monkeypatch, folder):
    monkeypatch.setenv("LOCAL_STACK_DIR", folder)
    with pytest.raises(StackError, match="choose one with LOCAL_STACK_DIR"):
        Paths.from_environment()
