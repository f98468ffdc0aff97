"""The launcher: what it hands to Miles' launch utilities, and what it says where they are missing.

Miles' own parser needs GPUs' libraries; data/miles_flags.json is what it says about the options used here.
"""

import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import EXAMPLE_DIR

HERE = Path(__file__).resolve().parent
STAND_IN = HERE / "stand_in"
INVENTORY = json.loads((HERE / "data" / "miles_flags.json").read_text())


class Launcher:
    """run.py with the commands that it has issued."""

    def __init__(self, module: types.ModuleType, commands: list[str]) -> None:
        self.module = module
        self.commands = commands

    def execute(self, **fields: object) -> tuple[dict[str, list[str]], dict[str, str]]:
        """Options of train.py with their values, and the job's environment."""
        self.module.execute(self.module.ScriptArgs(**fields))
        words = shlex.split(self.commands[-1])
        environment = next(word for word in words if word.startswith("--runtime-env-json=")).partition("=")[2]
        return options_of(words[words.index("--") + 3 :]), json.loads(environment)["env_vars"]


def options_of(words: list[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in options, f"{word} is given twice"
            options[word] = []
        else:
            options[list(options)[-1]].append(word)
    return options


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    for name in [name for name in sys.modules if name == "miles" or name.startswith("miles.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("WANDB_API_KEY", "MILES_SCRIPT_EXTERNAL_RAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(STAND_IN))
    spec = importlib.util.spec_from_file_location("nemogym_run", EXAMPLE_DIR / "run.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    commands = importlib.import_module("miles.utils.external_utils.exec_command").COMMANDS
    yield Launcher(module, commands)
    for name in [name for name in sys.modules if name == "miles" or name.startswith("miles.")]:
        del sys.modules[name]


# --- options --------------------------------------------------------------------


def test_every_option_is_one_of_miles_and_its_value_parses(launcher):
    options, _ = launcher.execute()
    known = INVENTORY["options"]
    assert sorted(options) == sorted(known), "data/miles_flags.json holds the options that run.py uses, and no others"
    for option, values in options.items():
        assert_parses(option, values, **known[option])


def assert_parses(
    option: str, values: list[str], type: str | None, choices: list[str] | None, nargs: str | None
) -> None:
    fewest, most = {None: (1, 1), "flag": (0, 0), "?": (0, 1), "+": (1, 99), "*": (0, 99)}[nargs]
    assert fewest <= len(values) <= most, (option, values)
    for value in values:
        {"int": int, "float": float, "human_readable_int": int}.get(type, str)(value)
        assert choices is None or value in names_of(choices, type), (option, value)


def names_of(choices: list[str], type: str | None) -> list[str]:
    """What is typed for a choice; Megatron takes an enum's member by its bare name."""
    return [choice.rpartition(".")[2] for choice in choices] if type == "enum_type_handler" else choices


def test_the_chain(launcher):
    options, _ = launcher.execute(max_seq_len=32768)
    chain = {option: " ".join(options[option]) for option in options}
    assert chain["--custom-generate-function-path"] == "miles.rollout.generate_hub.agentic_tool_call.generate"
    assert chain["--dynamic-sampling-filter-path"].endswith("dynamic_sampling_filters.check_no_aborted")
    assert chain["--session-server-ip"] == "0.0.0.0"
    assert chain["--use-session-server"] == ""
    assert (chain["--tito-model"], chain["--sglang-tool-call-parser"]) == ("qwen3", "qwen25")
    assert chain["--sglang-context-length"] == chain["--max-seq-len"] == chain["--max-tokens-per-gpu"] == "32768"


@pytest.mark.parametrize("option", ["--custom-agent-function-path", "--custom-rm-path"])
def test_functions_named_on_the_command_line_exist(launcher, option):
    options, _ = launcher.execute()
    module, _, function = options[option][0].partition(".")
    tree = ast.parse((EXAMPLE_DIR / f"{module}.py").read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.AsyncFunctionDef)}


def test_the_defaults_are_whole_batches(launcher):
    args = launcher.module.ScriptArgs()
    assert args.rollout_batch_size * args.n_samples_per_prompt % args.global_batch_size == 0


def test_no_folder_is_hardcoded(launcher, tmp_path):
    folders = {name: f"{tmp_path}/{name}" for name in ("model_dir", "data_dir", "output_dir", "megatron_path")}
    launcher.module.prepare(launcher.module.ScriptArgs(**folders))
    launcher.execute(**folders)
    assert "/root" not in " ".join(launcher.commands)
    assert f"--prompt-data {tmp_path}/data_dir/swe_verified.jsonl" in launcher.commands[-1]


def test_prompt_data_and_extra_options_are_taken_as_given(launcher):
    launcher.execute(prompt_data="/data/mine.jsonl", extra_args="--debug-rollout-only")
    assert "--prompt-data /data/mine.jsonl " in launcher.commands[-1]
    assert launcher.commands[-1].split()[-1] == "--debug-rollout-only"


# --- environment ----------------------------------------------------------------


def test_environment_of_the_job(launcher):
    _, environment = launcher.execute()
    assert environment.pop("PYTHONPATH").split(":") == ["/root/Megatron-LM", str(EXAMPLE_DIR), str(STAND_IN)]
    assert environment == {
        "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR": "1",
        "NEMO_GYM_URL": "http://localhost:12000",
    }


def test_environment_is_read_when_the_job_is_launched(launcher, monkeypatch):
    given = {
        "NEMO_GYM_URL": "http://gym:12000",
        "NEMO_GYM_RUN_TIMEOUT": "5400",
        "MILES_ROUTER_EXTERNAL_HOST": "trainer.example",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    _, environment = launcher.execute()
    assert {name: environment[name] for name in given} == given
    _, environment = launcher.execute(nemo_gym_url="http://other:12000")
    assert environment["NEMO_GYM_URL"] == "http://other:12000"


def test_wandb_only_with_a_key(launcher, monkeypatch):
    launcher.execute()
    assert "wandb" not in launcher.commands[-1]
    monkeypatch.setenv("WANDB_API_KEY", "k3y")
    launcher.execute()
    assert "--use-wandb" in launcher.commands[-1]


# --- main -----------------------------------------------------------------------


def run_main(launcher: Launcher, **fields: object) -> None:
    args = launcher.module.ScriptArgs(**fields)
    launcher.module.main(**vars(args))


@pytest.mark.parametrize("gpus", [None, 0, 3])
def test_without_gpus_nothing_is_started(launcher, monkeypatch, capsys, gpus):
    set_torch(monkeypatch, gpus)
    with pytest.raises(SystemExit) as end:
        run_main(launcher)
    assert end.value.code == 2
    assert launcher.commands == []
    message = capsys.readouterr().err
    assert re.fullmatch(rf"error: expected 4 GPUs .* found {gpus or 0}; .*docker run --gpus all`\n", message)


def test_a_ray_of_its_own_has_the_gpus(launcher, monkeypatch):
    set_torch(monkeypatch, None)
    monkeypatch.setenv("MILES_SCRIPT_EXTERNAL_RAY", "1")
    run_main(launcher)
    assert "ray job submit" in launcher.commands[-1]


def test_prepare_comes_first_and_can_be_skipped(launcher, monkeypatch):
    set_torch(monkeypatch, 4)
    run_main(launcher)
    kinds = Counter(command.split()[0] for command in launcher.commands)
    assert (kinds["mkdir"], kinds["hf"], kinds["convert"]) == (1, 1, 1)
    assert launcher.commands[1].startswith("hf download Qwen/Qwen3-4B-Instruct-2507 --local-dir /root/models/")
    launcher.commands.clear()
    run_main(launcher, skip_prepare=True)
    assert {command.split()[0] for command in launcher.commands} == {"ray"}


def set_torch(monkeypatch: pytest.MonkeyPatch, gpus: int | None) -> None:
    torch = None
    if gpus is not None:
        torch = types.ModuleType("torch")
        torch.cuda = types.SimpleNamespace(device_count=lambda: gpus)
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_without_miles_one_sentence():
    # A None in sys.modules makes the import fail wherever this runs.
    code = f"import runpy, sys; sys.modules['miles'] = None; runpy.run_path({str(EXAMPLE_DIR / 'run.py')!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert re.fullmatch(r"error: Miles cannot be imported .*radixark/miles:latest.*\n", ended.stderr)
