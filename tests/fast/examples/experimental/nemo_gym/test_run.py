"""The launcher: what it hands to Miles' launch utilities, and what it refuses before anything is started.

Miles' own parser needs all that Miles imports; data/miles_flags.json is what it says about its options.
"""

import ast
import contextlib
import difflib
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from . import EXAMPLE_DIR
from .conftest import ROW, StubServer, failed_body
from .gym_stand_in import NO_SANDBOX, Gym, free_port, running_gym

HERE = Path(__file__).resolve().parent
STAND_IN = HERE / "stand_in"
INVENTORY = json.loads((HERE / "data" / "miles_flags.json").read_text())["options"]
LAUNCHES = json.loads((HERE / "data" / "launches.json").read_text())
SNAPSHOTS = HERE / "data" / "launches"


class Launcher:
    """run.py with the commands that it has issued."""

    def __init__(self, module: types.ModuleType, commands: list[str]) -> None:
        self.module = module
        self.commands = commands

    def execute(self, **fields: object) -> tuple[dict[str, list[str]], dict[str, str]]:
        """Options of train.py with their values, and the job's environment."""
        self.module.execute(self.module.ScriptArgs(**fields))
        return self._submitted()

    def launch(self, options: list[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
        """The same for a command line of the launcher, without its checks."""
        module = self.module

        def record(args: module.ScriptArgs) -> None:
            module.prepare(args)
            module.execute(args)

        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(module.U.dataclass_cli(record))
        app(args=options, standalone_mode=False)
        return self._submitted()

    def main(self, **fields: object) -> None:
        args = self.module.ScriptArgs(**fields)
        self.module.main(**vars(args))

    def _submitted(self) -> tuple[dict[str, list[str]], dict[str, str]]:
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
    for name in [name for name in os.environ if name.startswith(("MILES_", "NEMO_GYM_", "WANDB_"))]:
        monkeypatch.delenv(name)
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


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_option_is_one_of_miles_and_its_value_parses(launcher, name):
    options, _ = launcher.launch(LAUNCHES[name])
    for option, values in options.items():
        assert option in INVENTORY, f"Miles has no {option}"
        assert_parses(option, values, **INVENTORY[option])


def assert_parses(
    option: str, values: list[str], type: str | None = None, nargs: str | None = None, choices: list[str] | None = None
) -> None:
    fewest, most = {None: (1, 1), "0": (0, 0), "?": (0, 1), "+": (1, 99), "*": (0, 99)}[nargs]
    assert fewest <= len(values) <= most, (option, values)
    for value in values:
        {"int": int, "float": float, "human_readable_int": int}.get(type, str)(value)
        assert choices is None or value in names_of(choices, type), (option, value)


def names_of(choices: list[str], type: str | None) -> list[str]:
    """What is typed for a choice; Megatron takes an enum's member by its bare name."""
    return [choice.rpartition(".")[2] for choice in choices] if type == "enum_type_handler" else choices


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_is_what_it_was(launcher, name):
    """A change of an option or a variable shows as a diff of data/launches/<name>.txt; UPDATE_SNAPSHOTS=1 writes it."""
    options, environment = launcher.launch(LAUNCHES[name])
    lines = [f"$ {command}" for command in launcher.commands[:-1]]
    lines += ["", *(f"{name}={value}" for name, value in sorted(environment.items())), ""]
    lines += [shlex.join([option, *values]) for option, values in options.items()]
    places = {str(STAND_IN): "<miles>", str(EXAMPLE_DIR): "<example>"}
    text = re.sub("|".join(map(re.escape, places)), lambda found: places[found[0]], "\n".join(lines)) + "\n"
    snapshot = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        snapshot.parent.mkdir(exist_ok=True)
        snapshot.write_text(text)
    recorded = snapshot.read_text().splitlines() if snapshot.exists() else []
    difference = list(difflib.unified_diff(recorded, text.splitlines(), "recorded", "now", lineterm="", n=0))
    assert not difference, "\n".join([*difference, "UPDATE_SNAPSHOTS=1 records it"])


def test_no_snapshot_without_its_launch():
    assert {path.stem for path in SNAPSHOTS.iterdir()} == set(LAUNCHES)


@pytest.mark.parametrize("mode", ["normal", "debug_rollout_only"])
def test_every_model_in_every_mode_is_a_recorded_launch(launcher, mode):
    default = launcher.module.ScriptArgs().model_name
    recorded = [
        (dict(zip(options[::2], options[1::2], strict=False)))
        for options in LAUNCHES.values()
        if set(options[::2]) <= {"--model-name", "--mode"}
    ]
    models = {launch.get("--model-name", default) for launch in recorded if launch.get("--mode", "normal") == mode}
    assert models == set(launcher.module.MODELS)


def test_the_chain(launcher):
    options, _ = launcher.execute(max_seq_len=32768)
    chain = {option: " ".join(options[option]) for option in options}
    assert chain["--custom-generate-function-path"] == "miles.rollout.generate_hub.agentic_tool_call.generate"
    assert chain["--dynamic-sampling-filter-path"].endswith("dynamic_sampling_filters.check_no_aborted")
    assert chain["--session-server-ip"] == "0.0.0.0"
    assert chain["--use-session-server"] == ""
    assert chain["--sglang-context-length"] == chain["--max-seq-len"] == chain["--max-tokens-per-gpu"] == "32768"


@pytest.mark.parametrize("model_name", ["Qwen3-4B-Instruct-2507", "Qwen3-30B-A3B-Instruct-2507"])
def test_tool_calls_are_parsed_by_the_engine(launcher, model_name):
    """Upstream's launcher sets no parser: every turn is a format error then, and every reward 0."""
    options, _ = launcher.execute(model_name=model_name)
    # The pair of miles/utils/chat_template_utils/tito_tokenizer.py.
    assert (options["--tito-model"], options["--sglang-tool-call-parser"]) == (["qwen3"], ["qwen25"])


@pytest.mark.parametrize("name", LAUNCHES)
def test_functions_named_on_the_command_line_exist(launcher, name):
    options, _ = launcher.launch(LAUNCHES[name])
    ours = [values[0] for values in options.values() if values and re.fullmatch(r"nemogym_\w+\.\w+", values[0])]
    assert len(ours) == (5 if "--keep-group" in LAUNCHES[name] else 4)
    for path in ours:
        module, _, function = path.partition(".")
        tree = ast.parse((EXAMPLE_DIR / f"{module}.py").read_text())
        functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        assert function in {node.name for node in functions}, path


def test_switches(launcher):
    plain, _ = launcher.execute()
    assert not {"--debug-rollout-only", "--dump-details", "--eval-interval", "--eval-prompt-data"} & set(plain)
    options, _ = launcher.execute(
        mode="debug_rollout_only",
        dump_details=True,
        keep_group=True,
        session_server="v2",
        num_session_servers=3,
        eval_prompt_data="/data/eval.jsonl",
        run_id="r1",
        output_dir="/out",
    )
    assert options["--debug-rollout-only"] == []
    assert options["--dump-details"] == ["/out/r1/dump_details"]
    assert options["--dynamic-sampling-filter-path"] == ["nemogym_generate.keep_group"]
    assert options["--use-session-server"] == ["v2"]
    assert options["--session-server-port"] == ["30000", "30003"], "a half-open range"
    assert options["--eval-prompt-data"] == ["nemo_gym", "/data/eval.jsonl"]


def test_a_model_of_its_own_gets_what_the_user_says(launcher):
    options, _ = launcher.execute(
        model_name="Other", megatron_model_type="other", tito_model="glm47", tool_call_parser="glm47"
    )
    assert (options["--tito-model"], options["--sglang-tool-call-parser"]) == (["glm47"], ["glm47"])


def test_no_folder_is_hardcoded(launcher, tmp_path):
    folders = {name: f"{tmp_path}/{name}" for name in ("model_dir", "data_dir", "output_dir", "megatron_path")}
    launcher.module.prepare(launcher.module.ScriptArgs(**folders))
    launcher.execute(**folders, dump_details=True)
    assert "/root" not in " ".join(launcher.commands)
    assert f"--prompt-data {tmp_path}/data_dir/swe_verified.jsonl" in launcher.commands[-1]


def test_prompt_data_and_extra_options_are_taken_as_given(launcher):
    launcher.execute(prompt_data="/data/mine.jsonl", extra_args="--debug-rollout-only")
    assert "--prompt-data /data/mine.jsonl " in launcher.commands[-1]
    assert launcher.commands[-1].split()[-1] == "--debug-rollout-only"


# --- environment ----------------------------------------------------------------

CONNECTOR = {
    "NEMO_GYM_URL": "http://gym:12000,http://gym2:12000",
    "NEMO_GYM_RUN_TIMEOUT": "5400",
    "NEMO_GYM_DRAIN_TIMEOUT": "3000",
    "NEMO_GYM_OUTAGE_WAIT": "60",
    "NEMO_GYM_MAX_CONCURRENCY": "16",
    "NEMO_GYM_UNGRADED": "zero",
    "MILES_ROUTER_EXTERNAL_HOST": "trainer.example",
}


def test_environment_of_the_job(launcher):
    _, environment = launcher.execute()
    assert environment.pop("PYTHONPATH").split(":") == ["/root/Megatron-LM", str(EXAMPLE_DIR), str(STAND_IN)]
    assert environment == {
        "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR": "1",
        "NEMO_GYM_URL": "http://localhost:12000",
    }


def test_every_variable_of_the_connector_reaches_the_job(launcher, monkeypatch):
    for name, value in CONNECTOR.items():
        monkeypatch.setenv(name, value)
    _, environment = launcher.execute()
    assert {name: environment.get(name) for name in CONNECTOR} == CONNECTOR
    _, environment = launcher.execute(nemo_gym_url="http://other:12000")
    assert environment["NEMO_GYM_URL"] == "http://other:12000"


def test_wandb_only_with_a_key(launcher, monkeypatch):
    launcher.execute()
    assert "wandb" not in launcher.commands[-1]
    monkeypatch.setenv("WANDB_API_KEY", "k3y")
    launcher.execute()
    assert "--use-wandb" in launcher.commands[-1]


# --- main -----------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [None, 0, 3])
def test_without_gpus_nothing_is_started(launcher, monkeypatch, capsys, gpus):
    set_torch(monkeypatch, gpus)
    with pytest.raises(SystemExit) as end:
        launcher.main()
    assert end.value.code == 2
    assert launcher.commands == []
    message = capsys.readouterr().err
    assert re.fullmatch(rf"error: expected 4 GPUs .* found {gpus or 0}; .*docker run --gpus all`\n", message)


def test_a_larger_model_asks_for_its_gpus(launcher, monkeypatch, capsys):
    set_torch(monkeypatch, 4)
    with pytest.raises(SystemExit):
        launcher.main(model_name="Qwen3-30B-A3B-Instruct-2507")
    assert "expected 8 GPUs" in capsys.readouterr().err


def test_a_ray_of_its_own_has_the_gpus(launcher, monkeypatch):
    set_torch(monkeypatch, None)
    monkeypatch.setenv("MILES_SCRIPT_EXTERNAL_RAY", "1")
    launcher.main(skip_preflight=True)
    assert "ray job submit" in launcher.commands[-1]


def test_prepare_comes_first_and_can_be_skipped(launcher, monkeypatch):
    set_torch(monkeypatch, 4)
    launcher.main(skip_preflight=True)
    kinds = Counter(command.split()[0] for command in launcher.commands)
    assert (kinds["mkdir"], kinds["hf"], kinds["convert"]) == (1, 1, 1)
    assert launcher.commands[1].startswith("hf download Qwen/Qwen3-4B-Instruct-2507 --local-dir /root/models/")
    launcher.commands.clear()
    launcher.main(skip_prepare=True, skip_preflight=True)
    assert {command.split()[0] for command in launcher.commands} == {"ray"}


def test_a_model_that_differs_from_its_definition_is_converted_as_it_is_trained(launcher):
    args = launcher.module.ScriptArgs(model_name="Qwen3-30B-A3B-Instruct-2507")
    launcher.module.prepare(args)
    assert launcher.commands[-1].endswith("--rotary-base 10000000")
    options, _ = launcher.execute(model_name=args.model_name)
    assert options["--rotary-base"] == ["10000000"]


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


# --- what is refused before anything is started -------------------------------------


@pytest.fixture
def gym(stub: StubServer) -> Iterator[Gym]:
    with running_gym(stub) as gym:
        yield gym


class Case:
    """A launch that would work, to be spoilt in one place."""

    def __init__(self, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, gym: Gym, folder: Path) -> None:
        self._launcher = launcher
        self.gym = gym
        self.tasks = folder / "tasks.jsonl"
        self.write(self.tasks, [ROW])
        set_torch(monkeypatch, 4)
        monkeypatch.setenv("NEMO_GYM_HEAD_URL", gym.head_url)
        self.fields: dict[str, object] = {
            "prompt_data": str(self.tasks),
            "nemo_gym_url": gym.url,
            "session_server_ip": "127.0.0.1",
            "session_server_port": free_port(),
        }

    @staticmethod
    def write(path: Path, tasks: list[dict]) -> None:
        path.write_text("".join(json.dumps({"prompt": "p", "metadata": task}) + "\n" for task in tasks))

    def launch(self, **fields: object) -> str:
        """Run main; what it printed."""
        self._launcher.commands.clear()
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            self._launcher.main(**{**self.fields, **fields})
        assert "ray job submit" in self._launcher.commands[-1]
        return said.getvalue()

    def refused(self, **fields: object) -> list[str]:
        """Run main, which refuses; its error lines."""
        self._launcher.commands.clear()
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.raises(SystemExit) as end:
            self._launcher.main(**{**self.fields, **fields})
        assert end.value.code == 2, said.getvalue()
        assert self._launcher.commands == [], "nothing is started"
        *errors, last = [line for line in said.getvalue().splitlines() if line.startswith("error")]
        assert last == "error: nothing was started; --skip-preflight launches all the same"
        return errors


@pytest.fixture
def case(launcher, monkeypatch, gym, tmp_path) -> Case:
    # The launcher sets the connector's variables for its own checks; what it sets goes with the test.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return Case(launcher, monkeypatch, gym, tmp_path)


def only(errors: list[str], *said: str) -> None:
    (line,) = errors
    assert all(text in line for text in said), line


def test_a_launch_that_has_what_it_needs(case):
    said = case.launch()
    assert "error" not in said.replace("0 error(s)", "")
    assert "canary episode" in said and len(case.gym.stub.requests) == 1


def test_skip_preflight_launches_all_the_same(case):
    case.launch(nemo_gym_url=f"http://127.0.0.1:{free_port()}", skip_preflight=True)


def test_l1_no_way_back_to_the_trainer(case):
    # A listener on 0.0.0.0 has no address that routes to an IPv6 host.
    errors = case.refused(nemo_gym_url="http://[::1]:9", session_server_ip="0.0.0.0")
    way_back = [line for line in errors if "session URL" in line]
    only(way_back, "MILES_ROUTER_EXTERNAL_HOST", "0.0.0.0")
    errors = case.refused(
        nemo_gym_url="http://[::1]:9", session_server_ip="0.0.0.0", router_external_host="trainer.example"
    )
    assert not [line for line in errors if "session URL" in line]


def test_l2_an_episode_shorter_than_the_servers_own_timeouts(case):
    case.gym.agent.update(step_timeout=600, eval_timeout=1800)
    only(case.refused(nemo_gym_run_timeout="2399"), "600 s", "1800 s", "2399 s", "NEMO_GYM_RUN_TIMEOUT")
    case.launch(nemo_gym_run_timeout="2400")


@pytest.mark.parametrize(
    "content, found",
    [(None, "no such file"), ("", "no row"), ("\n", "no row"), (json.dumps(ROW), "1 raw SWE-bench row(s)")],
)
def test_l3_prompt_data_that_is_none(case, content, found):
    case.tasks.unlink()
    if content is not None:
        case.tasks.write_text(content)
    only(case.refused(), found, "python download_and_process_data.py", "--output")


def test_l4_evaluation_on_the_training_tasks(case, tmp_path):
    only(case.refused(eval_prompt_data=str(case.tasks)), "evaluation tasks", "1 of 1 in both")
    other = tmp_path / "other.jsonl"
    case.write(other, [{**ROW, "instance_id": "psf__requests-2"}])
    case.launch(eval_prompt_data=str(other))


def test_l5_a_server_without_policy_base_url(case):
    schema = {"properties": {"responses_create_params": {}}}
    case.gym.stub.openapi = {"paths": {"/run": {}}, "components": {"schemas": {"MiniSWEAgentRunRequest": schema}}}
    only(case.refused(), "policy_base_url", "nemo-gym>=0.6")


def test_l7_rollouts_that_make_no_whole_steps(case):
    only(case.refused(global_batch_size=6), "rollout_batch_size 2 * n_samples_per_prompt 4 = 8", "global_batch_size 6")


def test_l8_a_filter_that_trains_aborted_zeros(case):
    path = "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    only(case.refused(extra_args=f"--dynamic-sampling-filter-path {path}"), path, "nemogym_generate.keep_group")
    case.launch(keep_group=True)


def test_l9_a_server_that_replays_old_verdicts(case):
    case.gym.agent.update(skip_if_exists=True)
    only(case.refused(), "skip_if_exists")


def test_l10_a_model_without_tool_call_parser(case):
    errors = case.refused(model_name="Qwen3-Other", megatron_model_type="qwen3-4B")
    assert any("--sglang-tool-call-parser" in line and "every reward would be 0" in line for line in errors), errors
    assert any("without tito_model and tool_call_parser" in line for line in errors), errors
    case.launch(
        model_name="Qwen3-Other", megatron_model_type="qwen3-4B", tito_model="qwen3", tool_call_parser="qwen25"
    )


def test_l11_a_canary_that_cannot_call_back(case):
    trace = "Traceback (most recent call last):\nlitellm.InternalServerError: Connection error."
    case.gym.stub.on_run = lambda body: failed_body(trace)
    (line,) = case.refused()
    tried = case.gym.stub.requests[-1]["policy_base_url"]
    assert tried in line and "MILES_ROUTER_EXTERNAL_HOST" in line


def test_an_image_that_cannot_be_had(case):
    case.gym.stub.on_run = lambda body: failed_body(NO_SANDBOX)
    only(case.refused(), "canary", "toomanyrequests", "docker.io/xingyaoww/sweb.eval.x86_64.psf_s_requests-1")


def test_the_session_port_is_free_after_the_canary_and_named_when_it_is_not(case):
    case.launch()
    port = case.fields["session_server_port"]
    with socket.create_server(("127.0.0.1", port)):
        only(case.refused(), "session port", str(port), "--session-server-port")


def test_wrong_options_cost_no_episode(case):
    case.refused(global_batch_size=6)
    assert case.gym.stub.requests == []


def test_every_server_gets_its_canary(case, monkeypatch):
    other = StubServer()
    try:
        with running_gym(other) as second:
            monkeypatch.setenv("NEMO_GYM_HEAD_URL", f"{case.gym.head_url},{second.head_url}")
            case.fields["nemo_gym_url"] = f"{case.gym.url}, {second.url}"
            said = case.launch()
            assert len(case.gym.stub.requests) == len(other.requests) == 1
            assert said.count("ok       canary episode") == 2
            second.agent.update(run_golden=True)
            only(case.refused(), second.url, "run_golden")
    finally:
        other.close()


def test_a_conversation_longer_than_the_models_context(case):
    only(case.refused(max_seq_len=262145), "262144", "--max-seq-len")


def test_an_engine_that_goes_on_where_the_trainer_cuts(case):
    only(case.refused(extra_args="--sglang-context-length 32768"), "--sglang-context-length", "16384", "32768")
    only(case.refused(rollout_max_response_len=16384), "--rollout-max-response-len", "16384")
