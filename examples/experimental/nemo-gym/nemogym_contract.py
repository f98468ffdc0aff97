"""What goes over the wire to a NeMo Gym agent server, and what its answer means.

Pure: no I/O, no environment variables, standard library only; orjson is used where it is installed. The connector, the
scan and the tests all use it, so every rule about the wire is here once; what NeMo Gym's own rows have beyond that, both
ways, is in nemogym_environments.py.

    request    build_run_request(row, request_kwargs, policy_base_url)  -> body of POST /run
    response   read_run_response(status, body, row)                     -> Outcome

A reward is a verdict on the policy. What the policy cannot have caused is not a verdict: such an Outcome has an
``exit_status`` and no reward. ``EXIT_STATUSES`` is the only table of statuses.

The other side of the wire is ``responses_api_agents/mini_swe_agent_2/app.py`` in NVIDIA-NeMo/Gym (0.6 or newer); it
answers every failure it handles with HTTP 200, reward 0.0 and ``metadata = {"error", "traceback"}``.
"""

import ast
import contextlib
import functools
import ipaddress
import json
import math
import numbers
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

try:
    import orjson
except ImportError:
    orjson = None

# --- JSON ---------------------------------------------------------------------


def to_json(value: Any) -> bytes:
    """``value`` as JSON: by orjson, which SGLang brings along, in a quarter of the time; what that refuses, by ``json``."""
    if orjson is not None:
        with contextlib.suppress(TypeError):
            return orjson.dumps(value)
    return json.dumps(value).encode()


def from_json(text: bytes | str) -> Any:
    """The value of a JSON text, likewise; whole numbers beyond 64 bits may come as floats.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    if orjson is not None:
        with contextlib.suppress(ValueError):
            return orjson.loads(text)
    return json.loads(text)


# --- statuses -----------------------------------------------------------------


class ExitStatus(NamedTuple):
    """``is_verdict``: the policy can have caused it, so it carries a reward. ``cause``: one line, for people."""

    is_verdict: bool
    cause: str


EXIT_STATUSES: dict[str, ExitStatus] = {
    "Submitted": ExitStatus(True, "graded after the agent submitted"),
    "LimitsExceeded": ExitStatus(True, "graded although the agent never submitted"),
    "Graded": ExitStatus(True, "graded by another environment than SWE-bench"),
    "ContextLengthExceeded": ExitStatus(True, "the conversation outgrew the model's context"),
    "FormatError": ExitStatus(True, "a tool call whose arguments are JSON but no object, which ends the agent"),
    "TimeLimitExceeded": ExitStatus(True, "longer than NEMO_GYM_RUN_TIMEOUT, on a server that works"),
    "NoTestsRan": ExitStatus(
        True, "graded, but not one test was reported, or what the tests printed could not be read"
    ),
    "TestsSkipped": ExitStatus(True, "graded 1.0, but not every FAIL_TO_PASS test was seen to pass"),
    "SandboxFailed": ExitStatus(True, "the sandbox died under the agent's commands"),
    "SandboxUnavailable": ExitStatus(False, "the sandbox could not be created: image, engine, disk or quota"),
    "SandboxLost": ExitStatus(False, "the sandbox's host failed it during the episode: engine stopped, disk full"),
    "ServerUnreachable": ExitStatus(False, "refused, connection lost, or silence on a server that does not work"),
    "ServerError": ExitStatus(False, "the agent server's answer is not a graded episode"),
    "PolicyEndpointError": ExitStatus(False, "the policy endpoint failed the agent"),
    "UngradableInstance": ExitStatus(False, "the task is one that cannot be sent or graded"),
    "GoldenServer": ExitStatus(False, "the agent server runs gold patches instead of the policy"),
    "PolicyServer": ExitStatus(False, "the agent server runs a policy where gold patches were expected"),
    "Aborted": ExitStatus(False, "Miles called abort()"),
    "UnknownError": ExitStatus(False, "a failure this connector does not know"),
}

# Set by the grade itself; every other verdict is a fixed 0.0.
GRADED_STATUSES = frozenset({"Submitted", "LimitsExceeded", "Graded"})

# No verdict, and yet nothing against the server: the caller's own act, and a task that its grader does not know.
_BLAMELESS_STATUSES = frozenset({"Aborted", "UngradableInstance"})


@dataclass(frozen=True)
class Outcome:
    """How one episode ended.

    Attributes:
        exit_status: a key of ``EXIT_STATUSES``.
        reward: the verdict, or None when there is none.
        eval_report: the ``metadata`` of the server's response: the SWE-bench report and the patch, or the error.
        detail: what was found, for the log; never sent to training.
        agent_metrics: what was measured, each absent when unknown: ``turns`` (replies of the model in the transcript;
            NeMo Gym drops those without a tool call), ``tool_calls``, ``tampered`` (see ``tampered_files``) and
            ``total_time``, seconds from admission to the end.
    """

    exit_status: str
    reward: float | None = None
    eval_report: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    agent_metrics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if EXIT_STATUSES[self.exit_status].is_verdict != (self.reward is not None):
            raise ValueError(f"{self.exit_status} with reward {self.reward!r}: a reward goes with a verdict only")

    @property
    def blames_server(self) -> bool:
        """Whether it speaks for an outage: no verdict, for a reason that the next task may meet too."""
        return self.reward is None and self.exit_status not in _BLAMELESS_STATUSES

    def as_metadata(self) -> dict[str, Any]:
        """The dict Miles merges into ``sample.metadata``: without a verdict it has no ``reward`` key.

        Miles copies, pickles and sends it on as JSON (miles/rollout/session/): a report for which that would raise is left
        out.

        Session server v2 takes a ``reward`` key, whatever its value, as the sample's reward and then calls no reward
        hook (miles/rollout/session/v2/postprocessor_hub/default_postprocess.py).
        """
        report = self.eval_report if _is_storable(self.eval_report, _DEEPEST_REPORT) else _NOT_STORABLE
        metadata: dict[str, Any] = {"exit_status": self.exit_status, "eval_report": dict(report)}
        if self.reward is not None:
            metadata["reward"] = self.reward
        if self.agent_metrics:
            metadata["agent_metrics"] = self.agent_metrics
        return metadata


_DEEPEST_REPORT = 100
_NOT_STORABLE = {
    "left_out": "expected a report of JSON values, at most 100 levels deep, with finite numbers and UTF-8 text"
}


def _is_storable(value: Any, levels: int) -> bool:
    if isinstance(value, str):
        return value.isascii() or _encodes(value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return levels > 0 and all(_is_storable(part, levels - 1) for item in value.items() for part in item)
    if isinstance(value, list):
        return levels > 0 and all(_is_storable(part, levels - 1) for part in value)
    return True


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_verdict(metadata: Any) -> float | None:
    """The reward in a sample's metadata if it came from this connector as a verdict, else None.

    Args:
        metadata: ``sample.metadata``; any type is tolerated, a row may have brought anything.
    """
    if not isinstance(metadata, Mapping):
        return None
    exit_status = metadata.get("exit_status")
    if not isinstance(exit_status, str) or exit_status not in EXIT_STATUSES:
        return None
    return _finite_number(metadata.get("reward")) if EXIT_STATUSES[exit_status].is_verdict else None


# --- URLs ---------------------------------------------------------------------

_EXPECTED_URL = "expected a URL such as http://host:12000, with scheme and host"


def join_url(base: str, path: str) -> str:
    """``base`` with ``path`` appended exactly once; a prefix is kept, trailing slashes and a given ``/run`` are not.

    Args:
        base: URL of an agent server, e.g. ``http://[fd00::1]:12000/gym/``.
        path: endpoint without slashes, e.g. ``run``.

    Raises:
        ValueError: ``base`` is not an http(s) URL with a host.
    """
    return _with_endpoint(_split_url(base), path=path, replaces=("run", path))


def build_policy_base_url(session_url: str, external_host: str | None = None, local_address: str | None = None) -> str:
    """The OpenAI-compatible URL under which the agent server reaches this sample's session: exactly one ``/v1``.

    Args:
        session_url: ``base_url`` as Miles passes it, ``http://host:port/sessions/<id>``.
        external_host: host name or address that always replaces the host; the port is kept.
        local_address: address that replaces a wildcard host (0.0.0.0, ::) when there is no ``external_host``.

    Raises:
        ValueError: not an http(s) URL with a host, or ``external_host`` is more than a host.
    """
    url = _split_url(session_url)
    if external_host:
        url = _with_host(url, _checked_host(external_host))
    elif local_address and _wildcard_version(url) is not None:
        url = _with_host(url, local_address)
    return _with_endpoint(url, path="v1", replaces=("v1",))


def wildcard_ip_version(url: str) -> int | None:
    """4 for a URL with host 0.0.0.0, 6 for ``[::]``, else None.

    Raises:
        ValueError: not an http(s) URL with a host.
    """
    return _wildcard_version(_split_url(url))


def without_userinfo(url: str) -> str:
    """``url`` as it may be logged: a ``user:password@`` part is left out, however it is written."""
    return re.sub(r"//.*@", "//", url)


def _split_url(url: str) -> SplitResult:
    if not isinstance(url, str):
        raise ValueError(f"{_EXPECTED_URL}; found {url!r}")
    return _split_text(url)


@functools.lru_cache(maxsize=64)
def _split_text(url: str) -> SplitResult:
    shown = without_userinfo(url)
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
        (host or "").encode("idna")  # a name that no resolver takes
        url.encode()
    except ValueError as error:
        raise ValueError(f"{_EXPECTED_URL}; found {shown!r} ({error})") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{_EXPECTED_URL}; found {shown!r}")
    return parts


def _with_endpoint(url: SplitResult, *, path: str, replaces: tuple[str, ...]) -> str:
    prefix = url.path.rstrip("/")
    for endpoint in replaces:
        prefix = prefix.removesuffix(f"/{endpoint}").rstrip("/")
    return url._replace(path=f"{prefix}/{path}", fragment="").geturl()


def _with_host(url: SplitResult, host: str) -> SplitResult:
    userinfo, at, _ = url.netloc.rpartition("@")
    bracketed = f"[{host}]" if ":" in host else host
    port = f":{url.port}" if url.port is not None else ""
    return url._replace(netloc=f"{userinfo}{at}{bracketed}{port}")


def _checked_host(host: str) -> str:
    bare = host.strip()
    if bare.startswith("[") and bare.endswith("]"):
        bare = bare[1:-1]
    is_host = _ip_address(bare) is not None or re.fullmatch(r"[A-Za-z0-9._-]+", bare)
    if not is_host:
        raise ValueError(f"expected a host name or address without scheme and port, found {host!r}")
    return bare


@functools.lru_cache(maxsize=64)
def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _wildcard_version(url: SplitResult) -> int | None:
    address = _ip_address(url.hostname or "")
    return address.version if address is not None and address.is_unspecified else None


# --- request ------------------------------------------------------------------

# The agent writes its own messages and tools, names its own model and reads one choice of one unstreamed reply:
# from a caller these are no sampling settings, and sending them would break the agent's protocol.
AGENT_OWNED_KEYS = frozenset(
    {"messages", "model", "tools", "tool_choice", "functions", "function_call", "stream", "stream_options", "n"}
)

# Settings with a field of their own in responses_create_params (app.py, _responses_create_params_to_model_kwargs).
_NATIVE_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_output_tokens",
    "top_logprobs": "top_logprobs",
    "parallel_tool_calls": "parallel_tool_calls",
}

_CONNECTOR_FIELDS = frozenset({"responses_create_params", "policy_base_url", "policy_api_key", "_ng_rollout_id"})
# Added to metadata by miles/rollout/generate_hub/agentic_tool_call.py; meaningless to the server.
_MILES_FIELDS = frozenset({"max_seq_len", "session_server_id", "session_server_instance_id"})
# What a row brings must never look like a verdict.
VERDICT_FIELDS = frozenset({"reward", "exit_status", "eval_report", "agent_metrics", "raw_reward"})
# Fields of a row that never reach the server as the row has them.
NOT_FORWARDED = _CONNECTOR_FIELDS | _MILES_FIELDS | VERDICT_FIELDS

_DEFAULT_SUBSET = "gym"
_DEFAULT_SPLIT = "train"

# instance_id and subset become folder names on the server, which does not check them.
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][\w./:@-]*", re.ASCII)


def build_responses_create_params(request_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Miles' chat-completions sampling settings as NeMo Gym's ``responses_create_params``.

    ``temperature``, ``top_p``, ``max_tokens`` (as ``max_output_tokens``), ``top_logprobs`` and
    ``parallel_tool_calls`` have a field; every other setting (top_k, min_p, stop, seed, ...) rides in
    ``metadata.extra_body``, a JSON string the agent passes on as extra body. A setting of None is unset. Keys of
    ``AGENT_OWNED_KEYS`` are left out. A given ``extra_body`` is unpacked; a setting beside it wins.

    Args:
        request_kwargs: sampling settings, as ``build_chat_request_kwargs`` in
            miles/rollout/generate_hub/agentic_tool_call.py makes them.

    Returns:
        ``{"input": [], ...}``, each setting in it once.

    Raises:
        ValueError: ``extra_body`` is not an object, or a setting is not JSON.
    """
    settings = {key: value for key, value in (request_kwargs or {}).items() if value is not None}
    nested = settings.pop("extra_body", {})
    if not isinstance(nested, Mapping):
        raise ValueError(f"expected extra_body to be an object of sampling settings, found {nested!r}")
    settings = {**{key: value for key, value in nested.items() if value is not None}, **settings}

    params: dict[str, Any] = {"input": []}
    extra_body: dict[str, Any] = {}
    for key, value in settings.items():
        if key in AGENT_OWNED_KEYS:
            continue
        _check_json(value, name=f"sampling setting {key!r}")
        if key in _NATIVE_SAMPLING_KEYS:
            params[_NATIVE_SAMPLING_KEYS[key]] = value
        else:
            extra_body[key] = value
    if extra_body:
        params["metadata"] = {"extra_body": json.dumps(extra_body)}
    return params


def build_run_request(
    row: Mapping[str, Any],
    request_kwargs: Mapping[str, Any] | None,
    policy_base_url: str | None = None,
    policy_api_key: str | None = None,
) -> dict[str, Any]:
    """Body of ``POST /run``: the task's fields at top level, beside the connector's own.

    The server derives the image from the subset, which ``name_episode`` changes: so ``image_name`` is always in it.

    Args:
        row: SWE-bench instance fields, as they ride in ``sample.metadata``. Only JSON values.
        request_kwargs: sampling settings, see ``build_responses_create_params``.
        policy_base_url: OpenAI-compatible URL the agent calls; None leaves the server's own policy in place.
        policy_api_key: bearer token for it.

    Raises:
        ValueError: ``instance_id`` is missing or, like ``subset``, no safe folder name; ``image_name`` names no image; or a
            field is not JSON.
    """
    instance_id, subset = _checked_names(row)
    task = {key: value for key, value in row.items() if key not in NOT_FORWARDED}
    for key, value in task.items():
        if not (_is_ascii(key) and _is_ascii(value)):  # as most of a row is
            _check_json({key: None}, name=f"row field {key!r}")
            _check_json(value, name=f"row field {key!r}")

    request = {
        **task,
        "instance_id": instance_id,
        "subset": subset,
        "split": _default_if_none(row.get("split"), _DEFAULT_SPLIT),
        "image_name": _image(row, instance_id=instance_id, subset=subset),
        "responses_create_params": build_responses_create_params(request_kwargs),
    }
    if policy_base_url is not None:
        request["policy_base_url"] = policy_base_url
    if policy_api_key is not None:
        request["policy_api_key"] = policy_api_key
    return request


def name_episode(request: dict[str, Any], episode: str) -> dict[str, Any]:
    """The request with a folder of its own on the server: ``subset`` becomes ``<subset>-<episode>``.

    The server keeps one configuration file per subset and instance, which concurrent episodes of one instance overwrite
    for each other (app.py, ``run``).

    Args:
        request: as ``build_run_request`` makes it.
        episode: id unique among the episodes alive on any server, ``[A-Za-z0-9._-]+``.
    """
    return {**request, "subset": f"{request['subset']}-{episode}"}


def image_name(row: Mapping[str, Any]) -> str:
    """The image in which the agent server runs a task.

    Args:
        row: see ``build_run_request``.

    Raises:
        ValueError: ``instance_id`` is missing or, like ``subset``, no safe folder name; or ``image_name`` names no image.
    """
    instance_id, subset = _checked_names(row)
    return _image(row, instance_id=instance_id, subset=subset)


def _image(row: Mapping[str, Any], *, instance_id: str, subset: str) -> str:
    image = row.get("image_name")
    if image is None or image == "":
        return _default_image(instance_id, subset)
    if not isinstance(image, str) or not _IMAGE_NAME.fullmatch(image):
        raise ValueError(
            "expected image_name to be a docker image: letters, digits, '.', '_', '-', '/', ':', '@', a letter or digit "
            f"first, found {image!r}"
        )
    return image


def _default_image(instance_id: str, subset: str) -> str:
    """The server's own rule, ``_swebench_image_name`` in app.py, for a lower-cased id and subset."""
    if subset == "verified":
        return f"docker.io/swebench/sweb.eval.x86_64.{instance_id.replace('__', '_1776_')}:latest"
    return f"docker.io/xingyaoww/sweb.eval.x86_64.{instance_id.replace('__', '_s_')}:latest"


def _checked_names(row: Mapping[str, Any]) -> tuple[str, str]:
    """The row's instance_id and subset."""
    if not isinstance(row, Mapping):
        raise ValueError(f"expected the task as an object of SWE-bench fields, found {type(row).__name__}")
    if row.get("instance_id") is None:
        raise ValueError("expected a SWE-bench row, found one without instance_id")
    instance_id = _checked_folder_name(row["instance_id"], name="instance_id")
    return instance_id, _checked_folder_name(_default_if_none(row.get("subset"), _DEFAULT_SUBSET), name="subset")


def _checked_folder_name(value: Any, *, name: str) -> str:
    # Lower-cased because the server looks the graded report up under the lower-cased id.
    if not isinstance(value, str) or not _FOLDER_NAME.fullmatch(value) or ".." in value:
        raise ValueError(f"expected {name} to be letters, digits, '.', '_', '-' without '..', found {value!r}")
    return value.lower()


def _is_ascii(value: Any) -> bool:
    return isinstance(value, str) and value.isascii()


def _check_json(value: Any, *, name: str) -> None:
    if isinstance(value, list) and all(map(_is_ascii, value)):
        return  # as lists of tests are
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expected {name} to be JSON: {error}") from None


def _default_if_none(value: Any, default: Any) -> Any:
    return default if value is None else value


# --- response -----------------------------------------------------------------

_EXCEPTION_LINE = re.compile(r"((?:\w+\.)*[A-Z]\w*)(?:\((\w+)\))?(?::\s|:?$)")
_RAY_WRAPPER = re.compile(r"^ray\.exceptions\.RayTaskError\((\w+)\)", re.MULTILINE)
_MAKE_TEST_SPEC_FRAME = re.compile(r'^  File "[^"\n]*", line \d+, in make_test_spec$', re.MULTILINE)
# minisweagent/models/utils/actions_toolcall.py: it answers malformed arguments with a message, these with a TypeError.
_TOOL_CALL_FRAME = re.compile(r'^  File "[^"\n]*", line \d+, in parse_toolcall_actions$', re.MULTILINE)
# swebench/harness/log_parsers: they read what the tests printed, and nothing else.
_LOG_PARSER_FRAME = re.compile(r'^  File "[^"\n]*", line \d+, in parse_log_\w+$', re.MULTILINE)

_LITELLM = "litellm."
_SANDBOX_NOT_CREATED = re.compile(r"\w*Create\w*Error|E2BTemplateBuildError")
_POLICY_API_ERRORS = frozenset(
    {
        "APIConnectionError",
        "APIError",
        "APIResponseValidationError",
        "APIStatusError",
        "APITimeoutError",
        "AuthenticationError",
        "BadGatewayError",
        "BadRequestError",
        "InternalServerError",
        "InvalidRequestError",
        "NotFoundError",
        "PermissionDeniedError",
        "RateLimitError",
        "ServiceUnavailableError",
        "Timeout",
        "UnprocessableEntityError",
    }
)


# Set on answers of NeMo Gym whose sample it would not train.
_FAILURE_FLAGS = ("mask_sample", "failure_kind", "error")
# NeMo Gym hands a failure of a model server on with the server's name before it.
_SESSION_MODEL = "MilesSessionModel"


def read_run_response(status: int, body: bytes | str, row: Mapping[str, Any], *, golden: bool = False) -> Outcome:
    """What an answer to ``POST /run`` says about the policy.

    Args:
        status: HTTP status.
        body: the answer as received.
        row: the task that was sent; its FAIL_TO_PASS is compared with the report.
        golden: the caller asked for a gold (or null) patch, not for a policy.

    Returns:
        An Outcome; never raises for anything a server can send.
    """
    answer = read_answer(status, body)
    if isinstance(answer, Outcome):
        return answer
    report = _as_dict(answer.get("metadata"))
    if not report and not isinstance(answer.get("response"), dict):
        return Outcome("ServerError", detail=f"expected a report or a transcript with the reward: {_excerpt(body)}")

    if report.get("error") is not None or report.get("traceback") is not None:
        return _read_failure(report)
    if flags := {key: answer[key] for key in _FAILURE_FLAGS if answer.get(key)}:
        return Outcome("UnknownError", eval_report=report, detail=f"the server masks this sample: {flags}"[:500])
    outcome = _read_grade(answer["reward"], report, answer.get("response"), row, golden=golden)
    return outcome if golden else replace(outcome, agent_metrics=agent_metrics(answer.get("response"), report))


def read_answer(status: int, body: bytes | str) -> dict[str, Any] | Outcome:
    """The answer as an object with a finite ``reward``, or what became of the episode where it is none.

    Args:
        status: HTTP status.
        body: the answer as received.
    """
    if status != 200:
        text = body.decode(errors="replace") if isinstance(body, bytes) else body
        if (mention := text.find(_SESSION_MODEL)) >= 0:
            return Outcome("PolicyEndpointError", detail=text[mention : mention + 500])
        return Outcome("ServerError", detail=f"expected HTTP 200, found {status}: {_excerpt(body)}")
    try:
        answer = from_json(body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        return Outcome("ServerError", detail=f"expected a JSON object, found: {_excerpt(body)}")
    reward = _finite_number(answer.get("reward"))
    if reward is None:
        found = repr(answer["reward"]) if "reward" in answer else "none"
        report = _as_dict(answer.get("metadata"))
        return Outcome("ServerError", eval_report=report, detail=f"expected a finite reward, found {found[:200]}")
    return {**answer, "reward": reward}


def _read_failure(report: dict[str, Any]) -> Outcome:
    trace = str(report.get("traceback") or "")
    error = str(report.get("error") or "")
    exception = exception_class(trace) or exception_class(error.partition("\n")[0])
    status = _classify_exception(exception, trace)
    reward = 0.0 if EXIT_STATUSES[status].is_verdict else None
    return Outcome(status, reward, eval_report=report, detail=_message(trace or error, exception))


def _classify_exception(exception: str, trace: str) -> str:
    name = exception.rpartition(".")[2]
    if name == "ContextWindowExceededError":
        return "ContextLengthExceeded"
    if name == "SandboxDied":
        return "SandboxFailed"
    if name == "SandboxLost":
        return "SandboxLost"
    if _SANDBOX_NOT_CREATED.fullmatch(name):
        return "SandboxUnavailable"
    if name == "KeyError" and _MAKE_TEST_SPEC_FRAME.search(trace):
        return "UngradableInstance"
    if exception.startswith(_LITELLM) or name in _POLICY_API_ERRORS:
        return "PolicyEndpointError"
    if name == "TypeError" and _TOOL_CALL_FRAME.search(trace):
        return "FormatError"
    # The agent's loop ends with Submitted and never passes it on: here the tests' output posed as a submission.
    if name == "Submitted" or _LOG_PARSER_FRAME.search(trace):
        return "NoTestsRan"
    return "UnknownError"


def exception_class(trace: str) -> str:
    """Class, dotted if it was printed so, of the exception a traceback ends with; "" when it shows none.

    The class stands on the last line. Two complications come with Ray, in whose worker the episode runs:

    - a message of several lines ends on a line of the message, so the class is at the end of the last frame block;
    - the message may quote the agent's own output, down to something that looks like an exception line. Ray names the
      class once more, before any message: ``ray.exceptions.RayTaskError(<class>): ray::...``; where it does, a last
      line that disagrees is taken for part of the message. (An exception Ray could not unpickle, such as litellm's,
      has ``UnserializableException`` there instead, and the worker's traceback follows: of that a litellm class at the
      end of the last frame block outweighs the last line.)
    """
    lines = trace.rstrip().splitlines()
    wrapper = _RAY_WRAPPER.search(_outer_exception_line(lines))
    last = _exception_of(lines[-1]) if lines else ""
    if wrapper:
        return last if last.rpartition(".")[2] == wrapper[1] else wrapper[1]
    after_frames = _exception_of(_line_after_last_frame(lines))
    return after_frames if after_frames.startswith(_LITELLM) else last or after_frames


def _outer_exception_line(lines: list[str]) -> str:
    """The line that ends the first frame block: no message stands before it."""
    if not lines or not lines[0].startswith("Traceback "):
        return lines[0] if lines else ""
    return next((line for line in lines[1:] if line and not line[0].isspace()), "")


def _line_after_last_frame(lines: list[str]) -> str:
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else []
    return next((line for line in after if line and not line[0].isspace()), "")


def _exception_of(line: str) -> str:
    match = _EXCEPTION_LINE.match(line)
    return (match[2] or match[1]) if match else ""


def _read_grade(
    reward: float, report: dict[str, Any], response: Any, row: Mapping[str, Any], *, golden: bool
) -> Outcome:
    has_transcript = isinstance(response, dict)
    output = response.get("output") if has_transcript else None
    if has_transcript and not golden and reward == 1.0 and not output:
        return Outcome(
            "GoldenServer",
            eval_report=report,
            detail="reward 1.0 for an episode without one model call: the server runs with run_golden=true; "
            "point NEMO_GYM_URL at a server with run_golden=false",
        )
    if golden and output:
        return Outcome(
            "PolicyServer",
            eval_report=report,
            detail="the episode called a model: expected a server with run_golden=true, found run_golden=false",
        )

    tests = _as_dict(_instance_report(report, row).get("tests_status"))
    if not _lists_a_test(tests) and ("eval_report" in report or reward == 0.0):
        return Outcome("NoTestsRan", 0.0, eval_report=report)
    missing = _missing_tests(tests, row) if tests and reward == 1.0 else []
    if missing:
        detail = f"graded 1.0, but {len(missing)} FAIL_TO_PASS test(s) did not pass, e.g. {missing[0]}"
        return Outcome("TestsSkipped", 0.0, eval_report=report, detail=detail)
    submitted = golden or bool(report.get("model_patch")) or _ends_with_unanswered_call(output)
    return Outcome("Submitted" if submitted else "LimitsExceeded", reward, eval_report=report)


def _instance_report(report: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    reports = _as_dict(report.get("eval_report"))
    instance_id = str(row.get("instance_id")).lower()
    only = next(iter(reports.values())) if len(reports) == 1 else None
    return _as_dict(reports.get(instance_id, only))


def _lists_a_test(tests: dict[str, Any]) -> bool:
    return any(_as_dict(suite).get(result) for suite in tests.values() for result in ("success", "failure"))


def _missing_tests(tests: dict[str, Any], row: Mapping[str, Any]) -> list[str]:
    """Tests of the row's FAIL_TO_PASS that the report does not list as passed.

    swebench counts a test that was skipped neither as passed nor as failed, so skipping every test resolves a task
    (harness/grading.py, get_eval_tests_report).
    """
    passed = _as_dict(tests.get("FAIL_TO_PASS")).get("success")
    passed = {str(test) for test in passed} if isinstance(passed, list) else set()
    return [test for test in parse_test_list(row.get("FAIL_TO_PASS")) if test not in passed]


def parse_test_list(value: Any) -> list[str]:
    """A row's FAIL_TO_PASS or PASS_TO_PASS as names, whether it is a list, a JSON string or a Python repr.

    Returns:
        The names; an empty list for anything else.
    """
    if isinstance(value, str):
        value = parse_literal(value)
    return [str(test) for test in value] if isinstance(value, (list, tuple)) else []


def parse_literal(text: str) -> Any:
    """The value that ``text`` writes in JSON or as a Python literal; None when it is neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _ends_with_unanswered_call(output: Any) -> bool:
    """A submission ends the episode before its command's output is recorded; every other end leaves none open."""
    last = output[-1] if isinstance(output, list) and output else None
    return isinstance(last, dict) and last.get("type") == "function_call"


def agent_metrics(response: Any, report: dict[str, Any]) -> dict[str, Any]:
    """What an episode did: ``turns`` and ``tool_calls`` of its transcript, and whether its patch is ``tampered``.

    Args:
        response: the answer's transcript.
        report: the answer's ``metadata``.
    """
    metrics: dict[str, Any] = {}
    output = _as_dict(response).get("output")
    if isinstance(output, list):
        kinds = [item.get("type") for item in output if isinstance(item, dict)]
        metrics["tool_calls"] = kinds.count("function_call")
        if kinds:
            answered = [_is_of_the_environment(item) for item in output if isinstance(item, dict)]
            metrics["turns"] = sum(map(operator.gt, [True, *answered], answered))
    patch = report.get("model_patch")
    if isinstance(patch, str) and patch.strip():
        metrics["tampered"] = bool(tampered_files(patch))
    return metrics


def _is_of_the_environment(item: dict[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind == "function_call_output" or (kind == "message" and item.get("role") != "assistant")


_DIFF_HEADERS = ("diff --git ", "--- ", "+++ ", "rename ")
_DIFF_PATH = re.compile(r'(?:--- "?a/|\+\+\+ "?b/|rename (?:from|to) "?|diff --git "?a/)(.+?)"?(?: "?b/.*)?$')
_RUNNER_FILES = frozenset(
    {
        "conftest.py",
        "sitecustomize.py",
        "usercustomize.py",
        "pytest.ini",
        ".pytest.ini",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "runtests.py",
    }
)
_TEST_FILE = re.compile(r"test_.*|.*_tests?\.\w+|tests?\.py|.*\.pth")
_TEST_FOLDERS = frozenset({"test", "tests", "testing"})


def tampered_files(patch: str) -> list[str]:
    """Files of a patch that can change what its own tests say: tests, conftest, sitecustomize, the runner's configuration.

    A count for people, no verdict: a good patch may well add tests.

    Args:
        patch: a unified diff with ``a/`` and ``b/`` prefixes, as git writes it.

    Returns:
        Their paths, each once, in order.
    """
    headers = (_DIFF_PATH.match(line) for line in patch.split("\n") if line.startswith(_DIFF_HEADERS))
    paths = dict.fromkeys(match[1].strip() for match in headers if match)
    return [path for path in paths if _is_of_the_tests(path)]


def _is_of_the_tests(path: str) -> bool:
    *folders, name = path.lower().split("/")
    return name in _RUNNER_FILES or not _TEST_FOLDERS.isdisjoint(folders) or bool(_TEST_FILE.fullmatch(name))


def _finite_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _message(text: str, exception: str) -> str:
    """The end of a traceback from its exception's last mention on, as one line."""
    mention = text.rfind(exception.rpartition(".")[2]) if exception else -1
    start = mention if mention >= 0 else max(len(text) - 500, 0)
    return " ".join(text[start:].split())[:500]


def _excerpt(body: bytes | str) -> str:
    text = body[:800].decode(errors="replace") if isinstance(body, bytes) else body
    return repr(text[:200]) if text else "an empty body"
