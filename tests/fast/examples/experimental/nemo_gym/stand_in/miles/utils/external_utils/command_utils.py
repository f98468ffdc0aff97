"""Stand-in for what a launcher uses of Miles' launch utilities, for machines on which Miles cannot be had."""

import dataclasses
import inspect
import json
import os
import shlex
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miles.utils.external_utils.exec_command import exec_command_cpu, exec_command_gpu, exec_command_multi_node

_ = exec_command_gpu, exec_command_multi_node

repo_base_dir = Path(__file__).resolve().parents[3]


@dataclass
class ExecuteTrainConfig:
    num_nodes: int = 1
    output_dir: str = "/root/shared_data"


def dataclass_cli(function: Callable) -> Callable:
    """Make a function of one dataclass a function of its fields."""
    cls = next(iter(typing.get_type_hints(function).values()))
    types = typing.get_type_hints(cls)

    def parameter(field: dataclasses.Field) -> inspect.Parameter:
        has_factory = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if has_factory else field.default
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(field.name, kind, default=default, annotation=types[field.name])

    def command(**fields: object) -> None:
        function(cls(**fields))

    command.__signature__ = inspect.Signature([parameter(field) for field in dataclasses.fields(cls)])
    return command


def create_run_id() -> str:
    return "261130-000000-000"


def get_bool_env_var(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("true", "1")


def get_default_wandb_args(test_file: str, run_id: str) -> str:
    key = os.environ.get("WANDB_API_KEY")
    return f"--use-wandb --wandb-group {run_id} --wandb-key '{key}' " if key else ""


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str,
    num_gpus_per_node: int,
    dir_dst: str,
    hf_checkpoint: str,
    megatron_path: str,
    extra_args: str = "",
) -> None:
    exec_command_gpu(f"convert {hf_checkpoint} {dir_dst}/{model_name}_torch_dist {extra_args}".strip())


def execute_train(
    train_args: str,
    config: ExecuteTrainConfig,
    num_gpus_per_node: int,
    megatron_model_type: str,
    megatron_path: str,
    extra_env_vars: dict[str, str],
) -> None:
    exec_command_cpu(f"ray start --num-gpus {num_gpus_per_node}")
    runtime_env = shlex.quote(json.dumps({"env_vars": extra_env_vars}))
    exec_command_cpu(
        f"ray job submit --runtime-env-json={runtime_env} -- python3 {repo_base_dir}/train.py {train_args}"
    )
