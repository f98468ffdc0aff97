"""Launch one GRPO job whose episodes run on NeMo Gym agent servers.

What must exist: Miles with its requirements (its container has them), a running ``mini_swe_agent_2`` server (README.md)
that can reach this machine, and the tasks as Miles prompt data (download_and_process_data.py). The defaults are a smoke
test of a few episodes on 4 GPUs: for training raise --num-rollout and the batch sizes.

Before anything is started, nemogym_preflight checks the servers, the tasks and the options, and runs one short episode on
each server; an error there ends the launch.

Miles' launch utilities end every sglang, ray, miles and redis process on this machine before they start theirs, so
keep NeMo Gym, which uses ray, on another machine or in another container. MILES_SCRIPT_EXTERNAL_RAY=1 leaves ray alone.

Args, besides those of ``ExecuteTrainConfig`` (each is also MILES_SCRIPT_<NAME> in the environment):
    --mode: normal, or debug_rollout_only: rollouts without training.
    --run-id: name of the run, in its folders and on Weights & Biases.
    --model-name: a model of ``MODELS``, whose entry gives the next four; of any other model of the Qwen organisation on
        Hugging Face they have to be given.
    --megatron-model-type: model definition, a file of Miles' scripts/models.
    --tito-model: chat-template family with which the session server tokenizes what the agent adds.
    --tool-call-parser: SGLang's parser for the tool calls of this model. Without one tool calls stay text, the agent
        sees none and every reward is 0.
    --num-gpus-per-node: GPUs, used by the trainer and the engines in turn.
    --model-dir, --data-dir, --output-dir: folders of the checkpoints, the prompt data and what the run writes.
    --prompt-data: Miles prompt data, JSONL; by default <data-dir>/swe_verified.jsonl.
    --megatron-path: checkout of Megatron-LM.
    --skip-prepare: do not download and convert the model.
    --skip-preflight: launch without the checks.
    --max-seq-len: tokens of one whole conversation, for the trainer and the engine alike.
    --rollout-max-response-len: tokens of one reply.
    --eval-prompt-data: tasks to evaluate on, of which none is trained on; without them there is no evaluation.
    --eval-interval: rollouts from one evaluation to the next.
    --n-samples-per-eval-prompt: episodes of each of them.
    --keep-group: drop groups of equal rewards too, which teach nothing, and sample others in their place.
    --dump-details: keep every sample and trajectory below <output-dir>/<run-id>/dump_details.
    --session-server: v1, or v2, which keeps branches of a conversation that v1 rolls back.
    --session-server-ip, --session-server-port: where the session servers listen; 0.0.0.0 because agent servers call back
        from other hosts.
    --num-session-servers: how many, each on a port of its own from --session-server-port on.
    --session-message-matcher: how a session server compares what the agent sends again with what it recorded: strict,
        loose_tool_call, role_content_only or an import path.
    --nemo-gym-url, --nemo-gym-run-timeout, --nemo-gym-drain-timeout, --nemo-gym-outage-wait,
        --nemo-gym-max-concurrency, --nemo-gym-ungraded, --nemo-gym-head-url, --nemo-gym-policy-via,
        --router-external-host: the connector's variables
        (nemogym_agent_function), from the environment unless given.
    --extra-args: options added to the end of train.py's, where they win.

Examples:
    NEMO_GYM_URL=http://<host>:12000 python run.py
    python run.py --nemo-gym-url http://<host>:12000 --num-rollout 200 --rollout-batch-size 16 --global-batch-size 64
    python run.py --mode debug_rollout_only --dump-details
"""

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

try:
    import typer
    from nemogym_checks import CHECK_NO_ABORTED, KEEP_GROUP, Finding, check_training, read_options
    from nemogym_preflight import Job, print_findings, read_settings, run_checks

    import miles.utils.external_utils.command_utils as U
except ImportError as error:
    print(
        f"error: Miles cannot be imported ({error}); run this in its container, radixark/miles:latest, or with a checkout "
        "of https://github.com/radixark/miles on PYTHONPATH and its requirements installed",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

_EXAMPLE_DIR = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Model:
    """What belongs to a model of the Qwen organisation on Hugging Face.

    Attributes:
        megatron_model_type: its definition, a file of Miles' scripts/models.
        tito_model: its chat-template family (miles/utils/chat_template_utils/tito_tokenizer.py).
        tool_call_parser: the parser that goes with that family.
        context_length: tokens that the model takes; None when it is not known.
        num_gpus_per_node: GPUs that the recipe below needs.
        parallel_args: how the trainer splits it over them.
        rollout_args: how the engines do.
        model_args: where it differs from its definition.
    """

    megatron_model_type: str = ""
    tito_model: str = ""
    tool_call_parser: str = ""
    context_length: int | None = None
    num_gpus_per_node: int = 4
    parallel_args: str = "--tensor-model-parallel-size 2 "
    rollout_args: str = "--rollout-num-gpus-per-engine 1 "
    model_args: str = ""


# No recipe has been run. The first is that of Miles' own example, the second is scripts/run_qwen3_30b_a3b.py for 8 H100.
MODELS = {
    "Qwen3-4B-Instruct-2507": Model(
        megatron_model_type="qwen3-4B-Instruct-2507",
        tito_model="qwen3",
        tool_call_parser="qwen25",
        context_length=262144,
    ),
    "Qwen3-30B-A3B-Instruct-2507": Model(
        megatron_model_type="qwen3-30B-A3B",
        tito_model="qwen3",
        tool_call_parser="qwen25",
        context_length=262144,
        num_gpus_per_node=8,
        parallel_args=(
            "--tensor-model-parallel-size 4 "
            "--expert-model-parallel-size 8 "
            "--expert-tensor-parallel-size 1 "
            # The optimizer's state does not fit beside the weights.
            "--optimizer-cpu-offload "
            "--overlap-cpu-optimizer-d2h-h2d "
            "--use-precision-aware-optimizer "
        ),
        rollout_args="--rollout-num-gpus-per-engine 8 ",
        model_args="--rotary-base 10000000 ",
    ),
}


def _from_environment(name: str) -> Any:
    """Default of a field: a variable of the environment, read when the job is launched."""
    return field(default_factory=lambda: os.environ.get(name, ""))


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    mode: Literal["normal", "debug_rollout_only"] = "normal"
    run_id: str = field(default_factory=lambda: U.create_run_id())

    model_name: str = "Qwen3-4B-Instruct-2507"
    megatron_model_type: str = ""
    tito_model: str = ""
    tool_call_parser: str = ""
    num_gpus_per_node: int | None = None

    model_dir: str = "/root/models"
    data_dir: str = "/root/datasets"
    prompt_data: str = ""
    megatron_path: str = "/root/Megatron-LM"
    skip_prepare: bool = False
    skip_preflight: bool = False

    max_seq_len: int = 16384
    rollout_max_response_len: int = 4096
    num_rollout: int = 3
    rollout_batch_size: int = 2
    n_samples_per_prompt: int = 4
    global_batch_size: int = 8
    rollout_temperature: float = 1.0
    keep_group: bool = False
    save_interval: int = 20
    dump_details: bool = False

    eval_prompt_data: str = ""
    eval_interval: int = 20
    n_samples_per_eval_prompt: int = 1

    session_server: Literal["v1", "v2"] = "v1"
    session_server_ip: str = "0.0.0.0"
    session_server_port: int = 30000
    num_session_servers: int = 1
    session_message_matcher: str = "strict"

    nemo_gym_url: str = field(default_factory=lambda: os.environ.get("NEMO_GYM_URL") or "http://localhost:12000")
    nemo_gym_run_timeout: str = _from_environment("NEMO_GYM_RUN_TIMEOUT")
    nemo_gym_drain_timeout: str = _from_environment("NEMO_GYM_DRAIN_TIMEOUT")
    nemo_gym_outage_wait: str = _from_environment("NEMO_GYM_OUTAGE_WAIT")
    nemo_gym_max_concurrency: str = _from_environment("NEMO_GYM_MAX_CONCURRENCY")
    nemo_gym_ungraded: str = _from_environment("NEMO_GYM_UNGRADED")
    nemo_gym_head_url: str = _from_environment("NEMO_GYM_HEAD_URL")
    nemo_gym_policy_via: str = _from_environment("NEMO_GYM_POLICY_VIA")
    router_external_host: str = _from_environment("MILES_ROUTER_EXTERNAL_HOST")

    extra_args: str = ""

    def __post_init__(self) -> None:
        self.prompt_data = self.prompt_data or f"{self.data_dir}/swe_verified.jsonl"
        for name in ("megatron_model_type", "tito_model", "tool_call_parser", "num_gpus_per_node"):
            setattr(self, name, getattr(self, name) or getattr(self.model, name))

    @property
    def model(self) -> Model:
        """The model's entry of ``MODELS``; one with nothing in it for another model."""
        return MODELS.get(self.model_name, Model())

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
        extra_args=args.model.model_args,
        dir_dst=args.model_dir,
        hf_checkpoint=args.hf_checkpoint,
        megatron_path=args.megatron_path,
    )


def execute(args: ScriptArgs) -> None:
    """Submit the training job and wait for its end."""
    U.execute_train(
        train_args=_train_args(args),
        config=args,
        num_gpus_per_node=args.num_gpus_per_node,
        megatron_model_type=args.megatron_model_type,
        megatron_path=args.megatron_path,
        extra_env_vars=_runtime_env(args),
    )


def _train_args(args: ScriptArgs) -> str:
    """The options of train.py, but for the model definition's."""
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
        f"{args.model.parallel_args} "
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
    if args.dump_details:
        misc_args += f"--dump-details {args.output_dir}/{args.run_id}/dump_details "

    debug_args = "--debug-rollout-only " if args.mode == "debug_rollout_only" else ""

    return (
        f"{args.model.model_args} "
        f"{ckpt_args} "
        f"{rollout_args} "
        f"{_eval_args(args)} "
        f"{_agent_args(args)} "
        f"{_sglang_args(args)} "
        f"{grpo_args} "
        f"{optimizer_args} "
        f"{perf_args} "
        f"{misc_args} "
        f"{debug_args} "
        f"{U.get_default_wandb_args(__file__, run_id=args.run_id)} "
        f"{args.extra_args} "
    )


def _eval_args(args: ScriptArgs) -> str:
    if not args.eval_prompt_data:
        return ""
    return (
        f"--eval-interval {args.eval_interval} "
        f"--eval-prompt-data nemo_gym {args.eval_prompt_data} "
        f"--n-samples-per-eval-prompt {args.n_samples_per_eval_prompt} "
    )


def _agent_args(args: ScriptArgs) -> str:
    ports = f"{args.session_server_port}"
    if args.num_session_servers > 1:
        # A half-open range, one server on each port of it.
        ports += f" {args.session_server_port + args.num_session_servers}"
    agent_args = (
        "--custom-generate-function-path miles.rollout.generate_hub.agentic_tool_call.generate "
        "--custom-agent-function-path nemogym_agent_function.run "
        "--custom-rm-path nemogym_generate.reward_func "
        f"--dynamic-sampling-filter-path {KEEP_GROUP if args.keep_group else CHECK_NO_ABORTED} "
        "--custom-rollout-log-function-path nemogym_generate.log_rollout "
        "--custom-eval-rollout-log-function-path nemogym_generate.log_eval_rollout "
        # Bare is v1.
        f"--use-session-server {'v2 ' if args.session_server == 'v2' else ''}"
        f"--session-server-ip {args.session_server_ip} "
        f"--session-server-port {ports} "
        f"--tito-model {args.tito_model} "
    )
    if args.session_message_matcher != "strict":
        # Releases before v2 have no such option, and no other matcher.
        agent_args += f"--session-message-matcher {args.session_message_matcher} "
    return agent_args


def _sglang_args(args: ScriptArgs) -> str:
    sglang_args = (
        f"{args.model.rollout_args}"
        "--sglang-mem-fraction-static 0.7 "
        # The agent has to be stopped where the trainer cuts: past that point its turns would be lost.
        f"--sglang-context-length {args.max_seq_len} "
    )
    if args.tool_call_parser:
        sglang_args += f"--sglang-tool-call-parser {args.tool_call_parser} "
    return sglang_args


def _runtime_env(args: ScriptArgs) -> dict[str, str]:
    """What the ray workers get: the connector reads its settings from the environment, by call."""
    return {
        # Older releases have the agentic options only with this; on current main it is the default.
        "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR": "1",
        "PYTHONPATH": os.pathsep.join([args.megatron_path, str(_EXAMPLE_DIR), str(U.repo_base_dir)]),
        **_connector_env(args),
    }


def _connector_env(args: ScriptArgs) -> dict[str, str]:
    variables = {
        "NEMO_GYM_URL": args.nemo_gym_url,
        "NEMO_GYM_RUN_TIMEOUT": args.nemo_gym_run_timeout,
        "NEMO_GYM_DRAIN_TIMEOUT": args.nemo_gym_drain_timeout,
        "NEMO_GYM_OUTAGE_WAIT": args.nemo_gym_outage_wait,
        "NEMO_GYM_MAX_CONCURRENCY": args.nemo_gym_max_concurrency,
        "NEMO_GYM_UNGRADED": args.nemo_gym_ungraded,
        "NEMO_GYM_HEAD_URL": args.nemo_gym_head_url,
        "NEMO_GYM_POLICY_VIA": args.nemo_gym_policy_via,
        "MILES_ROUTER_EXTERNAL_HOST": args.router_external_host,
    }
    return {name: value for name, value in variables.items() if value}


# --- before the launch ----------------------------------------------------------


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


def _preflight(args: ScriptArgs) -> None:
    """Print what nemogym_preflight finds; exit with status 2 where it finds an error."""
    # The checks read the connector's variables where the connector does, and have to see those of the job.
    os.environ.update(_connector_env(args))
    errors = print_findings(_findings(args))
    if errors:
        print("error: nothing was started; --skip-preflight launches all the same", file=sys.stderr)
        raise SystemExit(2)


def _findings(args: ScriptArgs) -> Iterator[Finding]:
    options = read_options(shlex.split(_train_args(args)))
    settings, _ = read_settings(os.environ)
    about_options = [_check_model(args), *check_training(options, settings)]
    yield from about_options
    # An episode is worth its time only where the job could start.
    fits = all(finding.level != "error" for finding in about_options)
    yield from run_checks(Job.from_options(options), canary=fits)


def _check_model(args: ScriptArgs) -> Finding:
    known = f"one of {', '.join(MODELS)}, or --megatron-model-type, --tito-model and --tool-call-parser"
    missing = [name for name in ("megatron_model_type", "tito_model", "tool_call_parser") if not getattr(args, name)]
    if missing:
        return Finding.error(
            "model",
            expected=known,
            found=f"{args.model_name} without {' and '.join(missing)}",
            remedy="Name what belongs to the model, also with --extra-args how it is split over the GPUs.",
        )
    longest = args.model.context_length
    if longest is not None and args.max_seq_len > longest:
        return Finding.error(
            "model",
            expected=f"--max-seq-len of at most {longest} tokens, the context of {args.model_name}",
            found=f"{args.max_seq_len}",
            remedy="Lower --max-seq-len.",
        )
    return Finding.ok("model", f"{args.model_name}, {args.tito_model} chat template")


@U.dataclass_cli
def main(args: ScriptArgs) -> None:
    """Launch one GRPO job whose episodes run on NeMo Gym agent servers."""
    _check_gpus(args)
    if not args.skip_preflight:
        _preflight(args)
    if not args.skip_prepare:
        prepare(args)
    execute(args)


if __name__ == "__main__":
    typer.run(main)
