"""Take down what the parser of Miles knows, and put every recorded launch of the launcher through it. No GPU is needed.

    make miles-flags MILES=<checkout>

1. Each launch of tests/fast/examples/experimental/nemo_gym/data/launches.json goes through tools/train_dry_run.py.
2. Its options go through the checkout's own ``parse_args``, validation included: Miles', Megatron's and SGLang's options, a
   model folder that holds the model's published config.json, and an H100's compute capability, which Megatron asks for.
   One option that no parser knows is tried too, and has to be refused.
3. Every option of that parser is written, with its type, number of values and choices, to miles_flags.json beside the
   launches: what the offline tests compare the launcher with.

Runs in an environment of its own (miles_flags.txt; Megatron from miles_megatron.txt, named by --megatron). Nothing of Miles
is replaced. Exit status: 0 all launches are accepted, 1 one is refused, 2 the checkout is none.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_DATA = _ROOT / "tests/fast/examples/experimental/nemo_gym/data"
_LAUNCHES, _INVENTORY = _DATA / "launches.json", _DATA / "miles_flags.json"
_PARSER = "miles/utils/arguments.py"

# Of each model's config.json on Hugging Face, what Miles compares with its model definition.
_QWEN3 = {"head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": 151936, "max_position_embeddings": 262144}
_MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-4B-Instruct-2507": {
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B-Instruct-2507": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rope_theta": 10000000,
        "tie_word_embeddings": False,
    },
}


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("checkout", type=Path)
    arguments.add_argument("--megatron", type=Path, required=True, help="environment that holds Megatron")
    options = arguments.parse_args()
    checkout = options.checkout.absolute()
    if not (checkout / _PARSER).is_file():
        print(
            f"error: expected a checkout of Miles, found {checkout} without {_PARSER}; "
            "`git clone https://github.com/radixark/miles <folder>`, then make miles-flags MILES=<folder>",
            file=sys.stderr,
        )
        return 2
    launches = json.loads(_LAUNCHES.read_text())
    with tempfile.TemporaryDirectory() as folder:
        model_dir = _make_models(Path(folder))
        recorded = {
            name: record_launch(checkout, ["--model-dir", str(model_dir), *words]) for name, words in launches.items()
        }
        parse = import_parser(checkout, next((options.megatron / "lib").glob("python3.*/site-packages")))
        accepted, parser = try_launches(recorded, parse)
    write_inventory(parser, commit=_commit(checkout))
    return 0 if accepted else 1


def _make_models(folder: Path) -> Path:
    """A folder of models as the launcher leaves one, without weights."""
    for name, config in _MODEL_CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / f"{name}_torch_dist").mkdir()
    return folder


# --- the launcher -----------------------------------------------------------------


def record_launch(checkout: Path, options: list[str]) -> tuple[dict[str, str], list[str]]:
    """The environment of a launch's job and the words of its train.py command line.

    Args:
        checkout: of Miles.
        options: of the launcher.

    Raises:
        CalledProcessError: the dry run failed.
    """
    command = [sys.executable, str(_ROOT / "tools/train_dry_run.py"), str(checkout), *options]
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("MILES_", "NEMO_GYM_", "WANDB_"))
    }
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=clean).stdout.splitlines()
    start, end = lines.index("# environment of the job"), lines.index(f"# {checkout}/train.py")
    environment = dict(line.split("=", 1) for line in lines[start + 1 : end] if line)
    return environment, [word for line in lines[end + 1 :] for word in shlex.split(line)]


# --- Miles ------------------------------------------------------------------------


def import_parser(checkout: Path, megatron: Path) -> Callable[[], argparse.Namespace]:
    """``parse_args`` of the checkout, importable on a machine without GPU.

    Args:
        checkout: of Miles; goes first on the path, for ``miles``.
        megatron: site-packages with Megatron; goes last, for the older Miles and SGLang beside it.
    """
    sys.path.insert(0, str(checkout))
    sys.path.append(str(megatron))
    # What is missing for a GPU is no news here.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import torch

    # torchvision declares kernels of its own for these two, which only its CUDA build defines.
    with contextlib.suppress(RuntimeError):
        for operator in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", schema)
    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)
    torch.cuda.get_device_properties = lambda *args, **kwargs: types.SimpleNamespace(major=9, minor=0)
    from miles.utils.arguments import parse_args

    return parse_args


def try_launches(
    recorded: dict[str, tuple[dict[str, str], list[str]]], parse: Callable[[], argparse.Namespace]
) -> tuple[bool, argparse.ArgumentParser]:
    """Put each launch through the parser and say how it went.

    Returns:
        Whether all were accepted, and the parser.
    """
    with _noted_parsers() as parsers:
        problems = {name: _refusal(parse, *launch) for name, launch in recorded.items()}
        environment, words = next(iter(recorded.values()))
        control = _refusal(parse, environment, [*words, "--no-such-option"])
    for name, problem in problems.items():
        print(f"refused   {name}: {problem}" if problem else f"accepted  {name}: {len(recorded[name][1])} words")
    if control is None or "--no-such-option" not in control:
        print(f"error: expected --no-such-option to be refused, found {control or 'it accepted'}", file=sys.stderr)
    return control is not None and not any(problems.values()), max(parsers, key=lambda parser: len(parser._actions))


@contextlib.contextmanager
def _noted_parsers() -> Iterator[list[argparse.ArgumentParser]]:
    """The parsers that parse something while the block runs."""
    parsers: list[argparse.ArgumentParser] = []
    original = argparse.ArgumentParser.parse_known_args

    def noting(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parsers.append(parser)
        return original(parser, *args, **kwargs)

    argparse.ArgumentParser.parse_known_args = noting
    try:
        yield parsers
    finally:
        argparse.ArgumentParser.parse_known_args = original


def _refusal(parse: Callable[[], argparse.Namespace], environment: dict[str, str], words: list[str]) -> str | None:
    """What the parser has against a command line; None when it takes it."""
    os.environ.update({name: value for name, value in environment.items() if name.startswith(("CUDA_", "MILES_"))})
    sys.argv = ["train.py", *words]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            parse()
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


# --- the inventory ----------------------------------------------------------------


def write_inventory(parser: argparse.ArgumentParser, *, commit: str) -> None:
    """Write every option of the parser, one a line, in place of the inventory that is there."""
    options = {name: describe(action) for action in parser._actions for name in action.option_strings}
    lines = [f" {json.dumps(name)}: {json.dumps(options[name])}" for name in sorted(options) if name.startswith("--")]
    text = f'{{"miles": {json.dumps(commit)}, "options": {{\n' + ",\n".join(lines) + "\n}}\n"
    temporary = _INVENTORY.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(_INVENTORY)
    print(f"{len(lines)} options of Miles {commit[:12]} in {_INVENTORY.relative_to(_ROOT)}")


def describe(action: argparse.Action) -> dict[str, Any]:
    """An option's type, number of values and choices, each only where it is not argparse's default."""
    nargs = action.nargs
    described = {
        "type": getattr(action.type, "__name__", None),
        "nargs": str(nargs) if nargs is not None else None,
        # Some come from a set, in another order each time.
        "choices": sorted(map(str, action.choices)) if action.choices is not None else None,
    }
    return {key: value for key, value in described.items() if value is not None}


if __name__ == "__main__":
    sys.exit(main())
