"""Which agent server runs a task, and which way its agent reaches the policy: asked of the servers and remembered.

A NeMo Gym row names its agent in ``agent_ref``; the head server knows where that listens, and the agent server's schema
tells the way. What was learnt is asked for again after a minute, as NeMo Gym may have been restarted on other ports; while
a server cannot be asked it still holds.

Needs aiohttp >= 3.12.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nemogym_contract import join_url, without_userinfo
from nemogym_environments import Way, agent_name_of, find_agent_url, way_of_agent
from nemogym_http import BadAnswer, NotDelivered, get_json

_HOLDS_S = 60.0


async def agent_servers(row: Mapping[str, Any], *, head_urls: Sequence[str], default: Sequence[str]) -> Sequence[str]:
    """URLs of the agent servers that can run a task.

    Args:
        row: the task.
        head_urls: URLs of the head servers that know the agent of its ``agent_ref``; none to leave that aside.
        default: URLs for a task without ``agent_ref``, and for any where there is no head server.

    Raises:
        NotDelivered: a head server cannot be asked.
        ValueError: no head server knows that agent, or a URL is none.
    """
    name = agent_name_of(row)
    if name is None or not head_urls:
        return default
    urls, unknown = [], None
    for head_url in head_urls:
        instances = await _ask(join_url(head_url, "server_instances"))
        try:
            urls.append(find_agent_url(instances, name, head_url=without_userinfo(head_url)))
        except ValueError as error:
            unknown = error
    if unknown and not urls:
        raise unknown
    return urls


async def way_to_policy(server: str) -> Way:
    """The way that an agent server takes.

    Raises:
        NotDelivered: it cannot be asked.
        ValueError: it is no agent server.
    """
    try:
        return way_of_agent(await _ask(join_url(server, "openapi.json")))
    except ValueError as error:
        raise ValueError(f"{without_userinfo(server)}: {error}") from None


_learnt: dict[str, tuple[float, Any]] = {}


async def _ask(url: str) -> Any:
    until, known = _learnt.get(url, (0.0, None))
    if time.monotonic() < until:
        return known
    try:
        found = await get_json(url)
    except (NotDelivered, BadAnswer):
        if known is None:
            raise
        return known
    _learnt[url] = (time.monotonic() + _HOLDS_S, found)
    return found
