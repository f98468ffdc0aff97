"""Checks of a NeMo Gym agent server that cost seconds and are made before anything expensive starts.

Shared by the launcher (before GPUs) and the scan (before episodes).

  python -c 'import nemogym_preflight; nemogym_preflight.check_agent_server("http://localhost:12000")'
"""

from typing import Any

import requests
from nemogym_contract import join_url, without_userinfo

_TIMEOUT_S = 5.0
_REQUEST_SCHEMA = "MiniSWEAgentRunRequest"


class PreflightError(Exception):
    """The message says what was expected, what was found and what to do."""


def check_agent_server(url: str) -> None:
    """Check that ``url`` is a mini_swe_agent_2 server that takes a policy endpoint per request (NeMo Gym 0.6 or newer).

    Reads ``/openapi.json`` only; no episode is started.

    Args:
        url: URL of the agent server, as in NEMO_GYM_URL.

    Raises:
        PreflightError: it is not, or cannot be reached within 5 s.
    """
    openapi = _read_openapi(_openapi_url(url))
    url = without_userinfo(url)
    if "/run" not in _dict_at(openapi, "paths"):
        raise PreflightError(
            f"expected a NeMo Gym agent server with POST /run at {url}, found a server without it. "
            "Is this the head or a model server? `GET :11000/server_instances` lists the agent's URL."
        )
    schema = _dict_at(openapi, "components", "schemas", _REQUEST_SCHEMA)
    if not schema:
        raise PreflightError(
            f"expected the agent mini_swe_agent_2 at {url}, found a /run of another kind (no {_REQUEST_SCHEMA}). "
            "Start that agent, or point NEMO_GYM_URL at it."
        )
    if "policy_base_url" not in _dict_at(schema, "properties"):
        raise PreflightError(
            f"expected {_REQUEST_SCHEMA}.policy_base_url at {url}, found a server without it: it would ignore the "
            "trainer's session and call its own model. Install nemo-gym>=0.6 and restart it."
        )


def _openapi_url(url: str) -> str:
    try:
        return join_url(url, "openapi.json")
    except ValueError as error:
        raise PreflightError(f"URL of the agent server: {error}. Set NEMO_GYM_URL.") from None


def _read_openapi(openapi_url: str) -> Any:
    shown = without_userinfo(openapi_url)
    try:
        with requests.Session() as session:
            session.trust_env = False
            response = session.get(openapi_url, timeout=_TIMEOUT_S)
    except requests.Timeout:
        raise PreflightError(
            f"expected an answer from {shown} within {_TIMEOUT_S:g} s, found none. "
            "Is the host right, and is the server still starting or overloaded?"
        ) from None
    except requests.RequestException as error:
        raise PreflightError(
            f"expected a NeMo Gym agent server at {shown}, found no connection ({_cause(error)}). "
            "Start the server, or correct the host and port in NEMO_GYM_URL."
        ) from None
    if response.status_code != 200:
        raise PreflightError(
            f"expected HTTP 200 from {shown}, found {response.status_code}. "
            "Is this a NeMo Gym agent server, and is the path prefix in NEMO_GYM_URL right?"
        )
    try:
        return response.json()
    except ValueError:
        kind = response.headers.get("Content-Type", "no content type")
        raise PreflightError(
            f"expected JSON from {shown}, found {kind}: {response.text[:80]!r}. "
            "Something else, such as a proxy or a web page, listens there; correct NEMO_GYM_URL."
        ) from None


def _cause(error: BaseException) -> str:
    """The innermost reason, e.g. ``Connection refused``, without urllib3's wrapping."""
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    return str(reason or error).rpartition(": ")[2]


def _dict_at(value: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}
