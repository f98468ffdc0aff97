"""Which Miles session an episode belongs to, and which sessions this server may call.

The trainer names the session in the episode's rollout id, since that is what NeMo Gym passes from an agent to its model
server, in every URL::

    http://10.0.0.5:30000/sessions/3f2a...   <->   http__10.0.0.5__30000__3f2a...

NeMo Gym allows letters, digits, '.', '_' and '-' in it; of the host every other character, and '_', is written as '_'
and two hexadecimal digits of its UTF-8. ``nemogym_environments.rollout_id_of`` is the other half.

Pure: standard library only.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_ROLLOUT_ID = re.compile(
    r"(?P<scheme>https?)__(?P<host>(?:[A-Za-z0-9.-]|_[0-9a-f]{2})+)__(?P<port>[0-9]{1,5})__(?P<session>[A-Za-z0-9-]+)",
    re.ASCII,
)
_ESCAPED = re.compile(r"_([0-9a-f]{2})")
_PORTS = re.compile(r"(?P<server>.*):(?P<first>[0-9]+)-(?P<last>[0-9]+)")


class SessionRefused(ValueError):
    """The call belongs to no session that this server may call; the message says why and what to do."""


@dataclass(frozen=True)
class Session:
    """A session of a Miles trainer.

    Attributes:
        scheme: http or https.
        host: name or address as the allow-list compares it: lower-case ASCII, IPv6 shortened and without brackets.
        port: TCP port.
        name: its id on the session server.
    """

    scheme: str
    host: str
    port: int
    name: str

    @property
    def base_url(self) -> str:
        """Its OpenAI-compatible URL."""
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}/sessions/{self.name}/v1"


class AllowList:
    """Session servers that may be called, by host and port.

    Args:
        entries: ``host:port`` or ``host:first-last``, an IPv6 address in brackets. A name is compared as it is written,
            case and a dot at its end aside, and never resolved; one beyond ASCII has to be in its ``xn--`` form.

    Raises:
        ValueError: an entry is not of that form, or there is none.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = [str(entry).strip() for entry in entries]
        self._ports = [_parsed_entry(entry) for entry in self._entries]
        if not self._ports:
            raise ValueError(
                "allowed_sessions: expected the trainer's session servers, such as [10.0.0.5:30000], found none"
            )

    def __contains__(self, session: Session) -> bool:
        host = _normal_host(session.host)
        return any(host == allowed and session.port in ports for allowed, ports in self._ports)

    def __str__(self) -> str:
        return ", ".join(self._entries)


def session_of(rollout_id: str | None, allowed: AllowList) -> Session:
    """The session that a rollout id names.

    Args:
        rollout_id: as NeMo Gym passes it; None for a call that came without.
        allowed: what may be called.

    Raises:
        SessionRefused: there is none, it names no session, or one that is not allowed.
    """
    if rollout_id is None:
        raise SessionRefused(
            "expected a model call of a Miles episode, under /ng-rollout/<id>/, found one without a rollout id: start "
            "NeMo Gym with observability_enabled=true, and give judges and simulated users a model server of their own"
        )
    match = _ROLLOUT_ID.fullmatch(rollout_id)
    host = _unescaped(match["host"]) if match else ""
    if not match or not _is_host(host) or not 0 < int(match["port"]) < 65536:
        raise SessionRefused(
            "expected a rollout id that names a Miles session, <scheme>__<host>__<port>__<session>, found "
            f"{rollout_id[:200]!r}: this model server is for episodes of the Miles connector only"
        )
    session = Session(scheme=match["scheme"], host=_normal_host(host), port=int(match["port"]), name=match["session"])
    if session not in allowed:
        raise SessionRefused(
            f"expected a session of {allowed}, found {_bracketed(session.host)}:{session.port}: add it to allowed_sessions "
            "of this model server if that is where the trainer's session server listens"
        )
    return session


def restore_tool_call_indices(messages: Iterable[dict[str, Any]], tools: Iterable[dict[str, Any]]) -> None:
    """Give replayed tool calls the ``index`` back that the Responses API has no place for, in place.

    SGLang sets it to the tool's place among the tools (function_call/base_format_detector.py), and Miles compared it until
    its matcher left it out (message_matcher_hub): where it differs, all turns before are lost.

    Args:
        messages: of a chat-completions request.
        tools: of the same request.
    """
    places = {(tool.get("function") or {}).get("name"): place for place, tool in enumerate(tools)}
    for message in messages:
        for call in message.get("tool_calls") or []:
            call.setdefault("index", places.get((call.get("function") or {}).get("name"), -1))


def _parsed_entry(entry: str) -> tuple[str, range]:
    match = _PORTS.fullmatch(entry)
    server = f"{match['server']}:{match['first']}" if match else entry
    try:
        url = urlsplit(f"//{server}")
        host, port = url.hostname or "", url.port
    except ValueError:
        host, port = "", None
    last = int(match["last"]) if match else port
    if not _is_host(host) or server != f"{server.rpartition(':')[0]}:{port}" or not 0 < port <= last < 65536:
        raise ValueError(
            "allowed_sessions: expected host:port or host:first-last, such as 10.0.0.5:30000 or [fd00::1]:30000-30003, "
            f"found {entry!r}"
        )
    return _normal_host(host), range(port, last + 1)


def _unescaped(text: str) -> str:
    octets = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text).encode("latin-1")
    return octets.decode(errors="replace")


def _is_host(host: str) -> bool:
    """Whether it stays a host inside a URL."""
    return _address(host) is not None or re.fullmatch(r"[^\W_](?:[\w.-]*\w)?\.?", host, re.ASCII) is not None


def _normal_host(host: str) -> str:
    return str(_address(host) or host.lower().rstrip("."))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
