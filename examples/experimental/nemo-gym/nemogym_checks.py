"""What has to hold before a job starts, as pure functions from facts to findings. nemogym_preflight reads the facts.

    check_settings(settings)             variables of the environment
    check_agent(server, agent, ...)      one agent server's configuration, as its head server tells it
    check_session_url(url, server, ...)  the address under which the agent server is to call the trainer
    check_tasks(tasks), check_apart()    prompt data and evaluation data
    check_training(options, ...)         what train.py is told

No I/O, no environment variables, standard library only. A Finding says what was expected, what was found and what to do;
only an ``error`` stands in the way of a launch.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from nemogym_contract import Outcome, build_policy_base_url, join_url, wildcard_ip_version, without_userinfo


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        level: ``error`` where a job would fail or train the wrong thing, ``warning`` where something could not be checked
            or is unwise.
        subject: what was looked at.
        found: what it is.
        expected: what it should be; empty when it is.
        remedy: what to do, in sentences; empty when there is nothing to do.
    """

    level: Literal["ok", "warning", "error"]
    subject: str
    found: str
    expected: str = ""
    remedy: str = ""

    @classmethod
    def ok(cls, subject: str, found: str) -> "Finding":
        """All is as it should be."""
        return cls("ok", subject, found)

    @classmethod
    def warning(cls, subject: str, *, expected: str, found: str, remedy: str) -> "Finding":
        """Does not stand in the way of a launch."""
        return cls("warning", subject, found, expected, remedy)

    @classmethod
    def error(cls, subject: str, *, expected: str, found: str, remedy: str) -> "Finding":
        """Stands in the way of a launch."""
        return cls("error", subject, found, expected, remedy)

    @classmethod
    def of_message(cls, subject: str, message: str, *, remedy: str) -> "Finding":
        """An error from ``expected ..., found ...``, as the modules of this example word their exceptions."""
        parts = re.fullmatch(r"expected (.+?)[,;] found (.+?)\.?", message, re.DOTALL)
        expected, found = parts.groups() if parts else ("a value that can be used", message)
        return cls.error(subject, expected=expected, found=found, remedy=remedy)

    def __str__(self) -> str:
        said = f"expected {self.expected}, found {self.found}" if self.expected else self.found
        return f"{self.level:<8} {self.subject}: {said}" + (f". {self.remedy}" if self.remedy else "")


# --- settings ---------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What the environment says: the connector's variables (nemogym_agent_function) and the head servers' URLs.

    Attributes:
        servers: URLs in NEMO_GYM_URL.
        head_urls: URLs in NEMO_GYM_HEAD_URL: one for all servers, or one each; empty to try the default port.
        run_timeout_s, drain_timeout_s: seconds.
        max_concurrency: episodes at a time on each server.
        ungraded: ``drop`` or ``zero``, what becomes of a sample without a verdict.
        external_host: MILES_ROUTER_EXTERNAL_HOST, or "".
    """

    servers: tuple[str, ...] = ("http://localhost:12000",)
    head_urls: tuple[str, ...] = ()
    run_timeout_s: float = 3600.0
    drain_timeout_s: float = 2400.0
    max_concurrency: int = 64
    ungraded: str = "drop"
    external_host: str = ""

    def head_url(self, server: str) -> str | None:
        """The head server that configures this agent server; None to try the default port of its host."""
        if len(self.head_urls) == len(self.servers):
            return self.head_urls[self.servers.index(server)]
        return self.head_urls[0] if self.head_urls else None


def check_settings(settings: Settings) -> list[Finding]:
    """Whether variables that the connector does not read itself, or not at once, have values that can be used."""
    findings = []
    for url in settings.head_urls:
        try:
            join_url(url, "readyz")
        except ValueError as problem:
            findings.append(Finding.of_message("NEMO_GYM_HEAD_URL", str(problem), remedy="Correct it, or unset it."))
    if len(settings.head_urls) not in (0, 1, len(settings.servers)):
        findings.append(
            Finding.error(
                "NEMO_GYM_HEAD_URL",
                expected=f"one URL, or one for each of the {len(settings.servers)} in NEMO_GYM_URL",
                found=f"{len(settings.head_urls)}",
                remedy="List them in the same order, separated by commas.",
            )
        )
    if settings.ungraded not in ("drop", "zero"):
        findings.append(
            Finding.error(
                "NEMO_GYM_UNGRADED",
                expected="drop or zero",
                found=repr(settings.ungraded),
                remedy="Correct it, or unset it for drop.",
            )
        )
    try:
        build_policy_base_url("http://0.0.0.0:1/sessions/0", external_host=settings.external_host)
    except ValueError as problem:
        findings.append(
            Finding.of_message("MILES_ROUTER_EXTERNAL_HOST", str(problem), remedy="Correct it, or unset it.")
        )
    return findings


# --- an agent server's configuration ------------------------------------------------


@dataclass(frozen=True)
class AgentConfig:
    """An agent server's block of the head server's configuration. A field is None when it is not told.

    The defaults are those of ``MiniSWEAgentConfig`` (responses_api_agents/mini_swe_agent_2/app.py in NVIDIA-NeMo/Gym).

    Attributes:
        run_golden: it applies the row's patch instead of running a policy.
        skip_if_exists: it answers with the verdict of an earlier episode.
        step_timeout, eval_timeout: seconds for one command and for the run of the tests.
        step_limit: model calls of one episode.
        concurrency: episodes at a time.
        provider: kind of sandbox, e.g. ``docker``.
    """

    run_golden: bool | None = False
    skip_if_exists: bool | None = False
    step_timeout: float | None = 600
    eval_timeout: float | None = 1800
    step_limit: int | None = 250
    concurrency: int | None = None
    provider: str | None = None


def find_agent_config(config: Any, *, port: int) -> AgentConfig | None:
    """The configuration of the mini_swe_agent_2 server on ``port``; None when the head server configures none there.

    Args:
        config: the head server's whole configuration, parsed. It holds keys: nothing but the fields of AgentConfig is
            taken from it.
        port: the agent server's.
    """
    for block in agent_blocks(config):
        if block.get("port") == port:
            return AgentConfig(
                run_golden=_told(block, "run_golden", False, bool),
                skip_if_exists=_told(block, "skip_if_exists", False, bool),
                step_timeout=_told(block, "step_timeout", 600, (int, float)),
                eval_timeout=_told(block, "eval_timeout", 1800, (int, float)),
                step_limit=_told(block, "step_limit", 250, int),
                concurrency=_told(block, "concurrency", None, int),
                provider=_provider(block.get("sandbox_provider"), config),
            )
    return None


def agent_blocks(config: Any) -> list[Mapping[str, Any]]:
    """The blocks of all agent servers in a head server's configuration."""
    servers = config.values() if isinstance(config, Mapping) else ()
    kinds = [server.get("responses_api_agents") for server in servers if isinstance(server, Mapping)]
    blocks = [block for kind in kinds if isinstance(kind, Mapping) for block in kind.values()]
    return [block for block in blocks if isinstance(block, Mapping)]


def _told(block: Mapping[str, Any], key: str, default: Any, kind: type | tuple[type, ...]) -> Any:
    """The value, None for one of another kind, such as an interpolation that the head server does not resolve."""
    value = block.get(key, default)
    is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return value if is_kind else None


def _provider(value: Any, config: Mapping[str, Any]) -> str | None:
    """A provider is given in place, or by the name of a block of the whole configuration."""
    if isinstance(value, str):
        value = config.get(value)
    return str(next(iter(value))) if isinstance(value, Mapping) and len(value) == 1 else None


def check_agent(server: str, agent: AgentConfig, settings: Settings, *, in_flight: int | None = None) -> list[Finding]:
    """Whether an agent server is one to train against.

    Args:
        server: its URL.
        agent: its configuration.
        settings: the connector's.
        in_flight: samples that the trainer has in flight at a time; None when it is not known.
    """
    name = f"agent server {without_userinfo(server)}"
    return [
        *_check_mode(name, agent),
        *_check_timeouts(name, agent, settings),
        *_check_places(name, agent, settings, in_flight),
        _check_provider(name, agent),
    ]


def _check_mode(name: str, agent: AgentConfig) -> list[Finding]:
    findings = []
    if agent.run_golden:
        findings.append(
            Finding.error(
                name,
                expected="run_golden: false",
                found="run_golden: true, so that it applies gold patches and calls no policy",
                remedy="Point NEMO_GYM_URL at the policy's port.",
            )
        )
    if agent.skip_if_exists:
        findings.append(
            Finding.error(
                name,
                expected="skip_if_exists: false",
                found="skip_if_exists: true, so that it answers with verdicts of earlier episodes",
                remedy="Set skip_if_exists: false in its configuration and restart it.",
            )
        )
    if agent.run_golden is False and agent.skip_if_exists is False:
        findings.append(
            Finding.ok(name, f"runs the policy that a request names, at most {agent.step_limit} model calls")
        )
    return findings


def _check_timeouts(name: str, agent: AgentConfig, settings: Settings) -> list[Finding]:
    if agent.step_timeout is None or agent.eval_timeout is None:
        return []
    own = agent.step_timeout + agent.eval_timeout
    sum_of = f"step_timeout {agent.step_timeout:g} s + eval_timeout {agent.eval_timeout:g} s = {own:g} s"
    if settings.run_timeout_s < own:
        return [
            Finding.error(
                name,
                expected=f"NEMO_GYM_RUN_TIMEOUT to be at least {sum_of}",
                found=f"{settings.run_timeout_s:g} s, so that slow grading would count as the policy's failure",
                remedy="Raise NEMO_GYM_RUN_TIMEOUT, or lower the server's timeouts.",
            )
        ]
    findings = [Finding.ok(name, f"NEMO_GYM_RUN_TIMEOUT {settings.run_timeout_s:g} s outlasts {sum_of}")]
    if settings.drain_timeout_s < own:
        findings.append(
            Finding.warning(
                name,
                expected=f"NEMO_GYM_DRAIN_TIMEOUT to be at least {sum_of}",
                found=f"{settings.drain_timeout_s:g} s, so that a place counts as free before the server is done",
                remedy="Raise NEMO_GYM_DRAIN_TIMEOUT.",
            )
        )
    return findings


def _check_places(name: str, agent: AgentConfig, settings: Settings, in_flight: int | None) -> list[Finding]:
    sent = settings.max_concurrency if in_flight is None else min(settings.max_concurrency, in_flight)
    if agent.concurrency is None or agent.concurrency >= sent:
        return []
    return [
        Finding.warning(
            name,
            expected=f"concurrency of at least {sent:g}, the episodes that this job sends at a time",
            found=f"{agent.concurrency}: the others wait inside the server while their NEMO_GYM_RUN_TIMEOUT runs",
            remedy=f"Set NEMO_GYM_MAX_CONCURRENCY={agent.concurrency}, or raise the server's concurrency.",
        )
    ]


def _check_provider(name: str, agent: AgentConfig) -> Finding:
    if agent.provider == "local":
        return Finding.error(
            name,
            expected="a sandbox for each episode",
            found="the sandbox provider 'local', whose episodes share one /testbed and see each other's edits",
            remedy="Configure docker or another provider that isolates episodes.",
        )
    return Finding.ok(name, f"sandbox provider {agent.provider or 'not told'}")


# --- the way back to the trainer ----------------------------------------------------


def check_session_url(url: str, server: str, *, external_host: str) -> Finding:
    """Whether an agent server can be expected to reach a session under this URL.

    Args:
        url: what the connector would send as ``policy_base_url``.
        server: URL of the agent server.
        external_host: MILES_ROUTER_EXTERNAL_HOST, or "".
    """
    name = f"session URL for {without_userinfo(server)}"
    expected = "an address of this machine that the agent server reaches"
    remedy = "Set MILES_ROUTER_EXTERNAL_HOST to a host name or address of this machine that the agent server reaches."
    if wildcard_ip_version(url) is not None:
        found = f"{url}: no route from here to the agent server tells one"
        return Finding.error(name, expected=expected, found=found, remedy=remedy)
    if not external_host and _is_loopback(url) and not _is_loopback(server):
        return Finding.warning(
            name, expected=expected, found=f"{url}, which is the agent server itself there", remedy=remedy
        )
    return Finding.ok(name, url)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url.strip()).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- tasks --------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskFile:
    """What is in a file of prompt data.

    Attributes:
        path: as the trainer is told.
        ids: instance ids of its rows, lower-cased.
        raw: number of rows that are SWE-bench instances, not prompt rows.
        unfit: what is wrong with rows that cannot be sent or would mislead the trainer, each with its line.
        ungradable: the same for rows that can be sent and would not be graded rightly.
        first: the first row's task that is none of these; None without one. A NeMo Gym row is never it.
        agents: agent servers that its NeMo Gym rows name; "" stands for rows that name none.
        unreadable: why it cannot be read; "" when it can.
        unchecked: why it was not looked into; "" when it was.
    """

    path: str
    ids: Sequence[str] = ()
    raw: int = 0
    unfit: Sequence[str] = ()
    ungradable: Sequence[str] = ()
    first: Mapping[str, Any] | None = field(default=None, repr=False)
    agents: frozenset[str] = frozenset()
    unreadable: str = ""
    unchecked: str = ""


def check_tasks(tasks: TaskFile) -> list[Finding]:
    """Whether a file of prompt data holds tasks that can be sent and graded."""
    name = f"tasks {tasks.path}"
    expected = "Miles prompt rows, {prompt, metadata: <SWE-bench instance>}"
    make = "Make them with `python download_and_process_data.py {}--output {}`."
    output = tasks.path if tasks.path.endswith(".jsonl") else "swe.jsonl"
    if tasks.unchecked:
        return [
            Finding.warning(name, expected="rows as JSONL", found=tasks.unchecked, remedy="Nothing of it was checked.")
        ]
    if tasks.unreadable:
        return [Finding.error(name, expected=expected, found=tasks.unreadable, remedy=make.format("", output))]
    if tasks.raw:
        remedy = make.format(f"--input {tasks.path} ", f"{output.removesuffix('.jsonl')}_prompts.jsonl")
        return [Finding.error(name, expected=expected, found=f"{tasks.raw} raw SWE-bench row(s)", remedy=remedy)]
    if tasks.unfit:
        return [Finding.error(name, expected=expected, found=_first_of(tasks.unfit), remedy=make.format("", output))]
    if not tasks.ids:
        return [Finding.error(name, expected=expected, found="no row", remedy=make.format("", output))]
    remedy = "Leave such rows out: they get no verdict, or a wrong one."
    if len(tasks.ungradable) == len(tasks.ids):
        found = f"none, {_first_of(tasks.ungradable)}"
        return [Finding.error(name, expected="tasks that can be graded", found=found, remedy=remedy)]
    findings = [Finding.ok(name, f"{len(tasks.ids)} row(s), {len(set(tasks.ids))} task(s)")]
    if tasks.ungradable:
        found = f"of {len(tasks.ids)}, {_first_of(tasks.ungradable)}"
        findings.append(Finding.warning(name, expected="tasks that can be graded", found=found, remedy=remedy))
    return findings


def check_session_model(name: str, config: Any) -> Finding:
    """Whether a NeMo Gym leads the calls of its agents to the trainer's sessions.

    Args:
        name: what the configuration is called.
        config: of the head server.
    """
    config = config if isinstance(config, Mapping) else {}
    models = [block.get("responses_api_models") for block in config.values() if isinstance(block, Mapping)]
    allowed = [
        server.get("allowed_sessions")
        for block in models
        if isinstance(block, Mapping)
        for kind, server in block.items()
        if kind == "miles_session_model" and isinstance(server, Mapping)
    ]
    if not allowed or config.get("observability_enabled") is not True:
        return Finding.error(
            name,
            expected="the model server miles_session_model, with observability_enabled: true",
            found="no such model server" if not allowed else "observability_enabled is not true",
            remedy="Start NeMo Gym with miles_session_model's configuration: see Other environments in the README.",
        )
    return Finding.ok(name, f"its model server calls sessions of {allowed[0]}")


def check_apart(training: TaskFile, evaluation: TaskFile) -> list[Finding]:
    """Whether the evaluation's tasks are none of those trained on."""
    if not training.ids or not evaluation.ids:
        return []
    name = f"evaluation tasks {evaluation.path}"
    shared = sorted(set(training.ids) & set(evaluation.ids))
    if not shared:
        return [Finding.ok(name, f"none of them is in {training.path}")]
    return [
        Finding.error(
            name,
            expected=f"tasks apart from those of {training.path}",
            found=f"{len(shared)} of {len(set(evaluation.ids))} in both, e.g. {shared[0]}",
            remedy="Evaluate on tasks that are not trained on, for example path.jsonl@[0:400] and path.jsonl@[400:].",
        )
    ]


def _first_of(problems: Sequence[str]) -> str:
    more = f", and {len(problems) - 1} more such row(s)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


# --- what train.py is told ----------------------------------------------------------

_FILTERS = "miles.rollout.filter_hub.dynamic_sampling_filters"
CHECK_NO_ABORTED, KEEP_GROUP = f"{_FILTERS}.check_no_aborted", "nemogym_generate.keep_group"
_NONZERO_STD = f"{_FILTERS}.check_reward_nonzero_std"


def read_options(argv: Sequence[str]) -> dict[str, list[str]]:
    """Options of a command line with their values; of one given twice the last counts, as for argparse."""
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in argv:
        if word.startswith("--"):
            option, has_value, value = word.partition("=")
            values = options[option] = [value] if has_value else []
        else:
            values.append(word)
    return options


def check_training(options: Mapping[str, Sequence[str]], settings: Settings) -> list[Finding]:
    """Whether train.py's options fit together and keep verdicts honest.

    Args:
        options: as ``read_options`` reads them.
        settings: the connector's.
    """
    return [
        _check_batches(options),
        _check_filter(options, settings),
        _check_parser(options),
        *_check_lengths(options),
    ]


def _check_batches(options: Mapping[str, Sequence[str]]) -> Finding:
    prompts, samples = read_number(options, "--rollout-batch-size"), read_number(options, "--n-samples-per-prompt")
    batch = read_number(options, "--global-batch-size")
    if not (prompts and samples and batch):
        return Finding.ok("batches", "left to train.py")
    rollout = f"rollout_batch_size {prompts} * n_samples_per_prompt {samples} = {prompts * samples}"
    if prompts * samples % batch:
        return Finding.error(
            "batches",
            expected=f"{rollout} to be a multiple of global_batch_size",
            found=f"global_batch_size {batch}",
            remedy="Choose --global-batch-size so that a rollout makes whole training steps.",
        )
    return Finding.ok("batches", f"{rollout} samples a rollout make {prompts * samples // batch} training step(s)")


def _check_filter(options: Mapping[str, Sequence[str]], settings: Settings) -> Finding:
    path = next(iter(options.get("--dynamic-sampling-filter-path", [])), "")
    if path in (CHECK_NO_ABORTED, KEEP_GROUP) or settings.ungraded == "zero":
        return Finding.ok("group filter", path or "none")
    expected = f"{CHECK_NO_ABORTED} or {KEEP_GROUP}"
    if path == _NONZERO_STD or not path:
        return Finding.error(
            "group filter",
            expected=expected,
            found=f"{path or 'none'}, which trains the zeros of samples without a verdict",
            remedy=f"Use {KEEP_GROUP} (--keep-group), which drops their groups, and groups of equal rewards too.",
        )
    remedy = "See to it that it drops every group with a sample whose status is ABORTED."
    return Finding.warning("group filter", expected=expected, found=path, remedy=remedy)


def _check_parser(options: Mapping[str, Sequence[str]]) -> Finding:
    parser = next(iter(options.get("--sglang-tool-call-parser", [])), "")
    if parser:
        return Finding.ok("tool calls", f"SGLang parses them with {parser}")
    return Finding.error(
        "tool calls",
        expected="--sglang-tool-call-parser of the model's family",
        found="none: SGLang would return tool calls as text, the agent would see none and every reward would be 0",
        remedy="Set --tool-call-parser, for example qwen25 for Qwen3.",
    )


def _check_lengths(options: Mapping[str, Sequence[str]]) -> list[Finding]:
    kept, context = read_number(options, "--max-seq-len"), read_number(options, "--sglang-context-length")
    reply = read_number(options, "--rollout-max-response-len")
    if kept is None:
        return []
    if context != kept:
        return [
            Finding.error(
                "lengths",
                expected=f"--sglang-context-length to be --max-seq-len, {kept}: the agent is stopped where the trainer cuts",
                found=f"{context or 'the limit of the model'}, so that a reward would be for turns that are cut",
                remedy="Set both to the same number of tokens.",
            )
        ]
    if reply is not None and reply >= kept:
        return [
            Finding.error(
                "lengths",
                expected=f"--rollout-max-response-len below --max-seq-len, {kept}",
                found=f"{reply}: SGLang refuses a request whose prompt and reply may not fit into its context",
                remedy="Lower --rollout-max-response-len.",
            )
        ]
    return [Finding.ok("lengths", f"{kept} tokens a conversation, for engine and trainer alike")]


def read_number(options: Mapping[str, Sequence[str]], option: str) -> int | None:
    """The option's value; None where it is not given or no whole number, which train.py's own parser refuses."""
    text = next(iter(options.get(option, [])), "")
    return int(text) if text.isdigit() else None


# --- one episode --------------------------------------------------------------------


@dataclass(frozen=True)
class Canary:
    """How a canary episode went (nemogym_canary).

    Attributes:
        server: URL of the agent server.
        url: session URL that the agent was given.
        image: the sandbox's.
        outcome: how it ended.
        seconds: how long it took.
        called_after: seconds until the agent's first model call; None without one.
        said: what its command answered, when the agent went on although its command submits; else None.
    """

    server: str
    url: str
    image: str
    outcome: Outcome
    seconds: float
    called_after: float | None = None
    said: str | None = None


def check_canary(canary: Canary) -> Finding:
    """What a canary episode proves: the image, the sandbox, and the way back to the trainer."""
    name = f"canary episode on {without_userinfo(canary.server)}"
    status, detail = canary.outcome.exit_status, canary.outcome.detail or canary.outcome.exit_status
    if canary.said is not None:
        return Finding.error(
            name,
            expected="its sandbox to run one echo",
            found=repr(canary.said[-300:]),
            remedy="Look at the image and at sandbox_environment_kwargs of the agent server.",
        )
    if canary.called_after is not None and status in _GRADED:
        return Finding.ok(
            name, f"called {canary.url} after {canary.called_after:.0f} s, ended after {canary.seconds:.0f} s"
        )
    if status == "SandboxUnavailable":
        return Finding.error(
            name,
            expected=f"a sandbox of {canary.image}",
            found=detail,
            remedy="On the agent server's machine: is its sandbox engine up, and can it pull that image?",
        )
    if canary.called_after is None and status in ("PolicyEndpointError", "TimeLimitExceeded"):
        return _no_call(name, canary, detail)
    if canary.called_after is None and status in _GRADED | {"GoldenServer"}:
        return Finding.error(
            name,
            expected="the agent to call the policy",
            found="an episode without one model call: the server applies gold patches (run_golden: true)",
            remedy="Point NEMO_GYM_URL at the policy's port.",
        )
    return Finding.error(name, expected="one short episode", found=detail, remedy="The agent server's log says more.")


# The canary's version is unknown to the grader, which ends the episode: nothing of it is left to run then.
_GRADED = frozenset({"UngradableInstance", "Submitted", "LimitsExceeded", "NoTestsRan", "TestsSkipped"})


def _no_call(name: str, canary: Canary, detail: str) -> Finding:
    if canary.outcome.exit_status == "TimeLimitExceeded":
        detail = f"no call within {canary.seconds:.0f} s"
        slow = f" If it is still pulling {canary.image}, pull that image there first."
    else:
        slow = ""
    return Finding.error(
        name,
        expected=f"a call from the agent server at {canary.url}",
        found=detail,
        remedy="Open that port to the agent server, or set MILES_ROUTER_EXTERNAL_HOST to a host name or address of this "
        f"machine that it reaches.{slow}",
    )
