"""The rollout side of a Miles trainer: its session server, its generate function, its reward hook, its group filter.

Everything here is Miles' own. What a training job would parse from its command line is ``trainer_args``; the engine
behind the session server is the stub of engine.py.
"""

import contextlib
import itertools
import json
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_stack.scripted_policy import HOST, serving_in_thread

from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput, RolloutFnTrainOutput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.filter_hub.dynamic_sampling_filters import check_no_aborted
from miles.rollout.inference_rollout.inference_rollout_common import (
    GenerateState,
    InferenceRolloutFn,
    generate_and_rm_group,
)
from miles.utils.chat_template_utils import resolve_fixed_chat_template
from miles.utils.http_utils import init_http_client
from miles.utils.processing_utils import load_tokenizer
from miles.utils.test_utils.uvicorn_thread_server import UvicornThreadServer
from miles.utils.types import Sample

from .engine import Call, Engine, Task, ask

try:
    from miles.rollout.session.server import SessionServer

    CHAT_TEMPLATE, TEMPLATE_SETTINGS = resolve_fixed_chat_template("qwen3")
except ImportError:  # the release of May 2026, whose wheel lacks the template that parse_args names
    from miles.rollout.session.session_server import SessionServer

    CHAT_TEMPLATE, TEMPLATE_SETTINGS = None, {"clear_thinking": False}


def trainer_args(checkpoint: Path, **overrides: Any) -> Namespace:
    """What ``parse_args`` leaves in a trainer launched as run.py launches it, as far as a rollout reads it.

    Args:
        checkpoint: folder of the tokenizer.
        overrides: other values, by name.
    """
    values = {
        # what run.py sets
        "hf_checkpoint": str(checkpoint),
        "custom_generate_function_path": "miles.rollout.generate_hub.agentic_tool_call.generate",
        "custom_agent_function_path": "nemogym_agent_function.run",
        "custom_rm_path": "nemogym_generate.reward_func",
        "dynamic_sampling_filter_path": "miles.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted",
        "use_session_server": "v1",
        "session_server_ip": HOST,
        "session_message_matcher": "strict",
        "tito_model": "qwen3",
        "input_key": "prompt",
        "metadata_key": "metadata",
        "rollout_temperature": 0.7,
        "rollout_max_response_len": 4096,
        "max_seq_len": 1 << 20,
        # only the release of May 2026 has it; it takes the format error that an agent answers a turn without call with
        "tito_allowed_append_roles": ["tool", "user"],
        # what follows from the model's family
        "chat_template_path": CHAT_TEMPLATE,
        "apply_chat_template_kwargs": TEMPLATE_SETTINGS,
        # Miles' defaults
        "apply_chat_template": False,
        "label_key": None,
        "tool_key": None,
        "multimodal_keys": None,
        "rollout_max_prompt_len": None,
        "rollout_global_dataset": True,
        "rollout_shuffle": False,
        "rollout_seed": 42,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_submission_granularity": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
        "buffer_filter_path": None,
        "dump_details": None,
        "dumper_enable": False,
        "dumper_inference": None,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "generate_multi_samples": False,
        "group_rm": False,
        "rm_type": None,
        "reward_key": None,
        "lora_rank": 0,
        "lora_adapter_path": None,
        "use_rollout_routing_replay": False,
        "use_rollout_indexer_replay": False,
        "use_distributed_post": False,
        "use_miles_router": True,
        "sglang_speculative_algorithm": None,
        "sglang_router_policy": None,
        "sglang_server_concurrency": 64,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "eval_num_gpus": 0,
        "miles_router_timeout": 600.0,
        "save_debug_trajectory_data": None,
        "session_sample_picker_path": "miles.rollout.session.v2.picker_hub.drop_retries.drop_retries",
        "session_sample_postprocessor_path": (
            "miles.rollout.session.v2.postprocessor_hub.default_postprocess.default_postprocess"
        ),
    }
    return Namespace(**{**values, **overrides})


@dataclass
class Group:
    """One finished group.

    Attributes:
        samples: what Miles made of it, in order.
        kept: whether the group filter lets it be trained.
        calls: of each episode, what the engine answered with 200.
    """

    samples: list[Sample]
    kept: bool
    calls: list[list[Call]]


@dataclass
class Trainer:
    """A running rollout side."""

    args: Namespace
    engine: Engine
    state: GenerateState
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run_group(self, *episodes: tuple[Task, str]) -> Group:
        """Generate, score and filter one group.

        Args:
            episodes: for each sample its task and the policy that plays it.
        """
        numbers = [next(self._numbers) for _ in episodes]
        rows = [ask(task, policy, str(number)) for number, (task, policy) in zip(numbers, episodes, strict=True)]
        group = [
            Sample(index=number, group_index=numbers[0], prompt=row.get("problem_statement", "a task"), metadata=row)
            for number, row in zip(numbers, rows, strict=True)
        ]
        samples = await generate_and_rm_group(self.state, group, self.state.sampling_params.copy())
        kept = check_no_aborted(self.args, samples).keep
        return Group(samples, kept, [self.engine.accepted(str(number)) for number in numbers])

    async def run_episode(self, task: Task, policy: str) -> tuple[Any, list[Call]]:
        """A group of one: its sample, or under session server v2 its samples, and the engine's accepted calls."""
        group = await self.run_group((task, policy))
        return group.samples[0], group.calls[0]

    async def run_rollout(self) -> RolloutFnTrainOutput:
        """One rollout as the trainer makes it: prompts from ``prompt_data`` until the batch is full."""
        data_source = RolloutDataSourceWithBuffer(self.args)
        rollout = InferenceRolloutFn(RolloutFnConstructorInput(args=self.args, data_source=data_source))
        return await rollout(RolloutFnTrainInput(rollout_id=0))


def write_prompt_data(path: Path, rows: Sequence[Task]) -> Path:
    """Write tasks as Miles prompt data.

    Args:
        path: JSONL.
        rows: in the order in which they are taken.

    Returns:
        The path.
    """
    lines = [json.dumps({"prompt": row["problem_statement"], "metadata": row}) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@contextlib.contextmanager
def running_trainer(
    checkpoint: Path,
    tasks: Sequence[Task],
    *,
    tool_call_parser: str | None = "qwen25",
    context_length: int = 1 << 20,
    engine_url: str | None = None,
    around_sessions: Callable[[Any], Any] = lambda app: app,
    **overrides: Any,
) -> Iterator[Trainer]:
    """Serve engine and sessions while the block runs.

    Args:
        checkpoint: folder of the tokenizer.
        tasks: those that the engine knows.
        tool_call_parser: see ``Engine``.
        context_length: see ``Engine``.
        engine_url: where the session server looks for an engine instead.
        around_sessions: wraps the session server's ASGI application, to disturb what passes.
        overrides: see ``trainer_args``.
    """
    args = trainer_args(checkpoint, **overrides)
    tokenizer = load_tokenizer(args.hf_checkpoint, chat_template_path=args.chat_template_path, trust_remote_code=True)
    engine = Engine(tokenizer, list(tasks), tool_call_parser=tool_call_parser, context_length=context_length)
    with serving_in_thread(engine.app) as engine.url:
        args.sglang_router_ip, args.sglang_router_port = HOST, int(engine.url.rpartition(":")[2])
        sessions = UvicornThreadServer(
            around_sessions(SessionServer(args, backend_url=engine_url or engine.url).app), HOST, _free_port()
        )
        args.session_server_port, args.session_server_ports = sessions.port, [sessions.port]
        sessions.start()
        try:
            init_http_client(args)
            yield Trainer(args=args, engine=engine, state=GenerateState(args))
        finally:
            sessions.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
