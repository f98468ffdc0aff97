"""Environments that NeMo Gym ships and that need no sandbox, no network and no package of their own."""

from dataclasses import dataclass, field
from pathlib import Path

from local_stack.paths import SOURCE, Paths, StackError

# Found through NEMO_GYM_EXTRA_ROOTS.
SESSION_MODEL_ROOT = SOURCE.parent / "miles_session_model"
_SESSION_MODEL = "responses_api_models/miles_session_model"
_RELAY = "environment_servers/legacy_agent"


@dataclass(frozen=True)
class Environment:
    """An environment of NeMo Gym.

    Attributes:
        name: what it is called here and there.
        kind: how an episode goes.
        agent: name of its agent server.
        agent_type: which agent that is.
        folder: where NeMo Gym keeps its example rows.
        config: where NeMo Gym keeps its configuration.
        rewards: what the roles of ``environment_policy`` always get there, by role.
    """

    name: str
    kind: str
    agent: str
    agent_type: str
    folder: str
    config: str
    rewards: dict[str, float] = field(default_factory=dict)

    @property
    def servers(self) -> tuple[str, ...]:
        """Folders of the servers that it is made of."""
        return f"resources_servers/{self.name}", f"responses_api_agents/{self.agent_type}", _RELAY

    def rows(self, paths: Paths) -> Path:
        """Its example rows, JSONL, in an installed NeMo Gym."""
        return paths.site_packages / self.folder / "data" / "example.jsonl"


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(
            name="mcqa",
            kind="one step: a question with choices",
            agent="mcqa_simple_agent",
            agent_type="simple_agent",
            folder="resources_servers/mcqa",
            config="resources_servers/mcqa/configs/mcqa.yaml",
            rewards={"solve": 1.0, "wrong": 0.0},
        ),
        Environment(
            name="workplace_assistant",
            kind="several steps: tools of an office",
            agent="workplace_assistant_simple_agent",
            agent_type="simple_agent",
            folder="environments/workplace_assistant",
            config="environments/workplace_assistant/config.yaml",
            rewards={"solve": 1.0, "wrong": 0.0},
        ),
        Environment(
            name="blackjack",
            kind="a game in dialogue, up to 5 turns",
            agent="blackjack_gymnasium_agent",
            agent_type="gymnasium_agent",
            folder="environments/blackjack",
            config="environments/blackjack/config.yaml",
        ),
    )
}


def find_environment(name: str) -> Environment:
    """The environment of that name.

    Raises:
        StackError: there is none; those that there are are named.
    """
    if name not in ENVIRONMENTS:
        raise StackError(f"expected --env (make: ENV) to be one of {', '.join(ENVIRONMENTS)}, found {name!r}")
    return ENVIRONMENTS[name]


def servers_of(environments: tuple[Environment, ...]) -> tuple[str, ...]:
    """Folders of the servers of several environments, each once, with the model server."""
    return tuple(dict.fromkeys((_SESSION_MODEL, *(server for item in environments for server in item.servers))))


def environments_config(environments: tuple[Environment, ...], *, sessions: tuple[str, ...]) -> dict:
    """What ``gym env start`` needs of them, beside where to listen.

    Args:
        environments: which.
        sessions: session servers that may be called, ``host:port`` or ``host:first-last``.
    """
    configs = [f"{_SESSION_MODEL}/configs/miles_session_model.yaml", *(item.config for item in environments)]
    return {"config_paths": configs, "miles_sessions": list(sessions)}
