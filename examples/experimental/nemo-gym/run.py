"""Launch one GRPO job whose episodes run on a NeMo Gym agent server (4 GPUs, Qwen3-4B-Instruct-2507).

What must exist: Miles with its requirements (its container has them), a running ``mini_swe_agent_2`` server (README.md)
that can reach this machine, and the tasks as Miles prompt data (download_and_process_data.py). The defaults are a smoke
test of a few episodes: for training raise --num-rollout and the batch sizes.

Miles' launch utilities end every sglang, ray, miles and redis process on this machine before they start theirs, so
keep NeMo Gym, which uses ray, on another machine or in another container. MILES_SCRIPT_EXTERNAL_RAY=1 leaves ray alone.

Args, besides those of ``ExecuteTrainConfig`` (each is also MILES_SCRIPT_<NAME> in the environment):
    --model-name: repository of the Qwen organisation on Hugging Face, and its folder below --model-dir.
    --megatron-model-type: model definition, a file of Miles' scripts/models.
    --tito-model: chat-template family with which the session server tokenizes what the agent adds.
    --tool-call-parser: SGLang's parser for the tool calls of this model. Without one tool calls stay text, the agent
        sees none and every reward is 0.
    --num-gpus-per-node: GPUs, used by the trainer and the engines in turn.
    --model-dir, --data-dir, --output-dir: folders of the checkpoints, the prompt data and what the run writes.
    --prompt-data: Miles prompt data, JSONL; by default <data-dir>/swe_verified.jsonl.
    --megatron-path: checkout of Megatron-LM.
    --skip-prepare: do not download and convert the model.
    --max-seq-len: tokens of one whole conversation, for the trainer and the engine alike.
    --rollout-max-response-len: tokens of one reply.
    --nemo-gym-url, --nemo-gym-run-timeout, --router-external-host: the connector's NEMO_GYM_URL, NEMO_GYM_RUN_TIMEOUT
        and MILES_ROUTER_EXTERNAL_HOST, from the environment unless given.
    --extra-args: options added to the end of train.py's, where they win.

Examples:
    NEMO_GYM_URL=http://<host>:12000 python run.py
    python run.py --nemo-gym-url http://<host>:12000 --num-rollout 200 --rollout-batch-size 16 --global-batch-size 64
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

try:
    import typer

    import miles.utils.external_utils.command_utils as U
except ImportError as error:
    print(
        f"error: Miles cannot be imported ({error}); run this in its container, radixark/miles:latest, or with a checkout "
        "of https://github.com/radixark/miles on PYTHONPATH (make train MILES=<checkout>) and its requirements installed",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

_EXAMPLE_DIR = Path(__file__).resolve().parent


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    run_id: str = field(default_factory=lambda: U.create_run_id())

    model_name: str = "Qwen3-4B-Instruct-2507"
    megatron_model_type: str = "qwen3-4B-Instruct-2507"
    tito_model: str = "qwen3"
    tool_call_parser: str = "qwen25"

    num_gpus_per_node: int = 4
    model_dir: str = "/root/models"
    data_dir: str = "/root/datasets"
    prompt_data: str = ""
    megatron_path: str = "/root/Megatron-LM"
    skip_prepare: bool = False

    max_seq_len: int = 16384
    rollout_max_response_len: int = 4096
    num_rollout: int = 3
    rollout_batch_size: int = 2
    n_samples_per_prompt: int = 4
    global_batch_size: int = 8
    rollout_temperature: float = 1.0
    save_interval: int = 20

    nemo_gym_url: str = field(default_factory=lambda: os.environ.get("NEMO_GYM_URL") or "http://localhost:12000")
    nemo_gym_run_timeout: str = field(default_factory=lambda: os.environ.get("NEMO_GYM_RUN_TIMEOUT", ""))
    router_external_host: str = field(default_factory=lambda: os.environ.get("MILES_ROUTER_EXTERNAL_HOST", ""))

    extra_args: str = ""

    def __post_init__(self) -> None:
        self.prompt_data = self.prompt_data or f"{self.data_dir}/swe_verified.jsonl"

    @property
    def hf_checkpoint(self) -> str:
        """The model as Hugging Face has it."""
        return f"{self.model_dir}/{self.model_name}"

    @property
    def megatron_checkpoint(self) -> str:
        """The model as ``convert_checkpoint`` leaves it."""
        return f"{self.model_dir}/{self.model_name}_torch_dist"


def prepare(args: ScriptArgs) -> None:
    """Download the model and convert it for Megatron; what is there already is kept."""
    U.exec_command_cpu(f"mkdir -p {args.model_dir} {args.data_dir}")
    U.exec_command_cpu(f"hf download Qwen/{args.model_name} --local-dir {args.hf_checkpoint}")
    U.convert_checkpoint(
        model_name=args.model_name,
        megatron_model_type=args.megatron_model_type,
        num_gpus_per_node=args.num_gpus_per_node,
        dir_dst=args.model_dir,
        hf_checkpoint=args.hf_checkpoint,
        megatron_path=args.megatron_path,
    )


def execute(args: ScriptArgs) -> None:
    """Submit the training job and wait for its end."""
    ckpt_args = (
        f"--hf-checkpoint {args.hf_checkpoint} "
        f"--ref-load {args.megatron_checkpoint} "
        f"--save {args.output_dir}/{args.run_id}/checkpoints "
        f"--save-interval {args.save_interval} "
    )

    rollout_args = (
        f"--prompt-data {args.prompt_data} "
        "--input-key prompt "
        "--metadata-key metadata "
        "--rollout-shuffle "
        f"--num-rollout {args.num_rollout} "
        f"--rollout-batch-size {args.rollout_batch_size} "
        f"--n-samples-per-prompt {args.n_samples_per_prompt} "
        f"--rollout-temperature {args.rollout_temperature} "
        f"--rollout-max-response-len {args.rollout_max_response_len} "
        f"--max-seq-len {args.max_seq_len} "
        f"--global-batch-size {args.global_batch_size} "
        "--balance-data "
    )

    agent_args = (
        "--custom-generate-function-path miles.rollout.generate_hub.agentic_tool_call.generate "
        "--custom-agent-function-path nemogym_agent_function.run "
        "--custom-rm-path nemogym_generate.reward_func "
        "--dynamic-sampling-filter-path miles.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted "
        "--use-session-server "
        # Any interface: the agent server calls back from another host.
        "--session-server-ip 0.0.0.0 "
        "--session-server-port 30000 "
        f"--tito-model {args.tito_model} "
    )

    sglang_args = (
        "--rollout-num-gpus-per-engine 1 "
        "--sglang-mem-fraction-static 0.7 "
        # The agent has to be stopped where the trainer cuts: past that point its turns would be lost.
        f"--sglang-context-length {args.max_seq_len} "
    )
    if args.tool_call_parser:
        sglang_args += f"--sglang-tool-call-parser {args.tool_call_parser} "

    grpo_args = (
        "--advantage-estimator grpo "
        "--use-kl-loss "
        "--kl-loss-coef 0.01 "
        "--kl-loss-type low_var_kl "
        "--entropy-coef 0.0 "
        "--eps-clip 0.2 "
        "--eps-clip-high 0.28 "
    )

    optimizer_args = (
        "--optimizer adam "
        "--lr 1e-6 "
        "--lr-decay-style constant "
        "--weight-decay 0.1 "
        "--adam-beta1 0.9 "
        "--adam-beta2 0.98 "
    )

    perf_args = (
        "--tensor-model-parallel-size 2 "
        "--sequence-parallel "
        "--pipeline-model-parallel-size 1 "
        "--context-parallel-size 1 "
        "--recompute-granularity full "
        "--recompute-method uniform "
        "--recompute-num-layers 1 "
        "--use-dynamic-batch-size "
        f"--max-tokens-per-gpu {args.max_seq_len} "
    )

    misc_args = (
        # Megatron's default dropout is 0.1.
        "--attention-dropout 0.0 "
        "--hidden-dropout 0.0 "
        "--accumulate-allreduce-grads-in-fp32 "
        "--attention-softmax-in-fp32 "
        "--attention-backend flash "
        "--colocate "
        f"--actor-num-nodes {args.num_nodes} "
        f"--actor-num-gpus-per-node {args.num_gpus_per_node} "
        f"--num-gpus-per-node {args.num_gpus_per_node} "
    )

    U.execute_train(
        train_args=(
            f"{ckpt_args} "
            f"{rollout_args} "
            f"{agent_args} "
            f"{sglang_args} "
            f"{grpo_args} "
            f"{optimizer_args} "
            f"{perf_args} "
            f"{misc_args} "
            f"{U.get_default_wandb_args(__file__, run_id=args.run_id)} "
            f"{args.extra_args} "
        ),
        config=args,
        num_gpus_per_node=args.num_gpus_per_node,
        megatron_model_type=args.megatron_model_type,
        megatron_path=args.megatron_path,
        extra_env_vars=_runtime_env(args),
    )


def _runtime_env(args: ScriptArgs) -> dict[str, str]:
    """What the ray workers get: the connector reads its settings from the environment, by call."""
    optional = {
        "NEMO_GYM_RUN_TIMEOUT": args.nemo_gym_run_timeout,
        "MILES_ROUTER_EXTERNAL_HOST": args.router_external_host,
    }
    return {
        # Older releases have the agentic options only with this; on current main it is the default.
        "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR": "1",
        "PYTHONPATH": os.pathsep.join([args.megatron_path, str(_EXAMPLE_DIR), str(U.repo_base_dir)]),
        "NEMO_GYM_URL": args.nemo_gym_url,
        **{name: value for name, value in optional.items() if value},
    }


def _check_gpus(args: ScriptArgs) -> None:
    """Exit with status 2 where the job could not start: ray would wait for GPUs for ever."""
    if U.get_bool_env_var("MILES_SCRIPT_EXTERNAL_RAY"):
        return
    try:
        import torch  # not at the top: prepare and execute are recorded on machines without it

        found = torch.cuda.device_count()
    except ImportError:
        found = 0
    if found < args.num_gpus_per_node:
        print(
            f"error: expected {args.num_gpus_per_node} GPUs (--num-gpus-per-node), found {found}; run this on a GPU "
            "machine in Miles' container, radixark/miles:latest, started with `docker run --gpus all`",
            file=sys.stderr,
        )
        raise SystemExit(2)


@U.dataclass_cli
def main(args: ScriptArgs) -> None:
    """Launch one GRPO job whose episodes run on a NeMo Gym agent server."""
    _check_gpus(args)
    if not args.skip_prepare:
        prepare(args)
    execute(args)


if __name__ == "__main__":
    typer.run(main)
