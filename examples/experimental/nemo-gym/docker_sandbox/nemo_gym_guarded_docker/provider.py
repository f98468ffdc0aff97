"""NeMo Gym's docker sandbox (``nemo_gym.sandbox.providers.docker``) that never takes the engine's failure for a command's.

NeMo Gym's own provider answers a command with exit status 125 when the engine is gone, and the agent server grades what
is left: a zero that no policy earned. This one asks the engine after every command that failed and raises instead::

    SandboxDied          the container's own processes ended it
    SandboxLost          the engine stopped or was started again, its disk is full, or the container was removed from outside
    DockerCreateError    either of them before there is a container to hand out

Registered through the entry-point group ``nemo_gym.sandbox_providers``; takes the options of ``docker``::

    sandbox:
      guarded_docker:
        create: {start_timeout_s: 1200}

The engine and this process share a clock. A disk that is full only while a command runs, no longer when it has ended,
is not seen.
"""

import re
import time
from typing import Any

from nemo_gym.sandbox.providers.base import SandboxExecResult, SandboxHandle, SandboxSpec
from nemo_gym.sandbox.providers.docker import DockerCreateError, DockerProvider
from nemo_gym_guarded_docker.record import SandboxDied, SandboxLost, check_record, parse_events

_ASK_TIMEOUT_S = 60.0
# What a container's end leaves of a command; the engine records it a moment before the container's own end.
_KILLED = 137
_SETTLE_S = 2.0
_FULL = re.compile(r"no space left on device|disk is full|errno 28\b|\benospc\b", re.IGNORECASE)
_DISK_IS_FULL = "the disk of the docker engine is full"
_SPACE = "stat -f -c '%f %S %d %c' /"  # free blocks, their size, free inodes, inodes (0 where there is no limit)
_LEAST_BYTES = 1 << 20


class GuardedDockerProvider(DockerProvider):
    """Sandboxes in docker, as NeMo Gym makes them; see the module's docstring."""

    name = "guarded_docker"

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Start a container, as NeMo Gym's own provider does.

        Raises:
            DockerCreateError: it did not start or did not last, or the engine's disk is full.
        """
        try:
            handle = await super().create(spec)
        except (SandboxDied, SandboxLost) as error:
            raise DockerCreateError(f"a container of {spec.image!r} did not last: {error}") from None
        if await self._is_full(handle):
            await self.close(handle)
            raise DockerCreateError(_DISK_IS_FULL)
        return handle

    async def exec(self, handle: SandboxHandle, command: str, **options: Any) -> SandboxExecResult:
        """Run a command, as NeMo Gym's own provider does.

        Raises:
            SandboxDied, SandboxLost: see the module's docstring.
        """
        started_s = time.time()
        result = await super().exec(handle, command, **options)
        if result.return_code:
            await self._check_record(handle, result, started_s=started_s)
        if _FULL.search(f"{result.stdout}{result.stderr}") and await self._is_full(handle):
            raise SandboxLost(_DISK_IS_FULL)
        return result

    async def _check_record(self, handle: SandboxHandle, result: SandboxExecResult, *, started_s: float) -> None:
        until_s = time.time() + (_SETTLE_S if result.return_code == _KILLED else 0)
        command = [self._binary, "events", "--since", "0", "--until", f"{until_s:.9f}"]
        command += ["--filter", f"container={handle.sandbox_id}", "--format", "{{json .}}"]
        try:
            code, output, error = await self._run(command, timeout_s=_ASK_TIMEOUT_S)
        except TimeoutError as error:
            raise SandboxLost(f"the docker engine does not answer within {_ASK_TIMEOUT_S:g} s") from error
        if code:
            raise SandboxLost(f"the docker engine cannot be asked: {error.strip()}")
        check_record(
            parse_events(output),
            return_code=result.return_code,
            since_s=started_s,
            timed_out=result.error_type == "timeout",
        )

    async def _is_full(self, handle: SandboxHandle) -> bool:
        command = [self._binary, "exec", "--user", "0", handle.sandbox_id, "sh", "-c", _SPACE]
        try:
            _, output, _ = await self._run(command, timeout_s=_ASK_TIMEOUT_S)
            blocks, size, inodes, all_inodes = map(int, output.split())
        except (TimeoutError, ValueError):
            return False  # an engine that does not answer fails the next command
        return blocks * size < _LEAST_BYTES or (all_inodes > 0 and inodes == 0)
