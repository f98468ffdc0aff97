"""Pull the docker images that a data file needs, before an episode has to wait for one or fails for want of it.

    python prefetch_images.py --input /root/datasets/swe_verified.jsonl

Run it on the agent server's machine, with the docker engine that the server uses.

1. The image of a row is the one that the connector asks for. Images that the engine has are left alone.
2. At a registry's pull limit all pulls wait, 60 s first, then twice as long up to 16 minutes, until one goes through;
   after eight hours without one the rest is given up. Log in with `docker login` for a higher limit.
3. Nothing is pulled while less than --keep-free GB of the engine's disk is free.
4. Where the engine is not an x86-64 one the x86-64 images are pulled all the same; it has to emulate them.

Exit status: 0 every image is there; 1 some are not, each named with its reason; 2 the set-up is wrong; 130 after Ctrl-C.
"""

import asyncio
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from nemogym_contract import image_name
from row_reader import DataError, json_lines
from tqdm import tqdm

EXIT_OK, EXIT_MISSING, EXIT_SET_UP, EXIT_INTERRUPTED = 0, 1, 2, 130

_GB = 1e9
_ATTEMPTS = 3
_ASK_TIMEOUT_S = 60.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class SetUpError(Exception):
    """Nothing can be pulled with this file or this engine."""


class Failure(Enum):
    """Why a pull failed, as far as it decides what to do next."""

    FULL_DISK = "full disk"
    PULL_LIMIT = "pull limit"
    NO_IMAGE = "no such image"
    OTHER = "other"


# What docker says, lower-cased; the first that fits.
_SIGNS = (
    (Failure.FULL_DISK, ("no space left on device", "disk quota exceeded")),
    (Failure.PULL_LIMIT, ("toomanyrequests", "too many requests", "rate limit")),
    (
        Failure.NO_IMAGE,
        ("manifest unknown", "not found", "pull access denied", "does not exist", "no matching manifest"),
    ),
    (Failure.NO_IMAGE, ("invalid reference format", "unauthorized")),
)


@dataclass(frozen=True)
class Engine:
    """The docker engine.

    Args:
        architecture: as the engine names it, e.g. ``x86_64``.
        folder: where it keeps images; None where that is not on this machine.
    """

    architecture: str
    folder: Path | None

    @property
    def is_x86(self) -> bool:
        """Whether it runs SWE-bench's images without emulation."""
        return self.architecture in ("x86_64", "amd64")

    def free_gb(self) -> float | None:
        """Free space of its disk, GB; None where it is not known."""
        return shutil.disk_usage(self.folder).free / _GB if self.folder else None


@dataclass
class PullLimit:
    """The pause that all pulls make together at a registry's limit.

    Args:
        first_s: first pause, seconds; each further one is twice as long, until a pull goes through.
        longest_s: longest pause.
        patience_s: how long to go on without one pull going through.
    """

    first_s: float = 60.0
    longest_s: float = 960.0
    patience_s: float = 8 * 3600.0
    _pause_s: float = field(default=0.0, init=False)
    _resume_s: float = field(default=0.0, init=False)
    _since_s: float | None = field(default=None, init=False)

    async def wait(self) -> None:
        """Wait until pulls go on."""
        while (rest := self._resume_s - time.monotonic()) > 0:
            await asyncio.sleep(rest)

    def is_met(self) -> float | None:
        """Note that a pull met the limit.

        Returns:
            The seconds that all wait now; 0.0 where a wait has begun already; None when patience is over.
        """
        now = time.monotonic()
        self._since_s = now if self._since_s is None else self._since_s
        if now - self._since_s > self.patience_s:
            return None
        if now < self._resume_s:
            return 0.0
        self._pause_s = min(self._pause_s * 2, self.longest_s) if self._pause_s else self.first_s
        self._resume_s = now + self._pause_s
        return self._pause_s

    def is_over(self) -> None:
        """Note that a pull went through."""
        self._pause_s, self._since_s = 0.0, None


@app.command()
def main(
    input_path: Annotated[Path, typer.Option("--input", help="Miles prompt rows or SWE-bench instances, JSONL.")],
    parallel: Annotated[int, typer.Option(min=1, help="Pulls at a time.")] = 4,
    keep_free: Annotated[float, typer.Option(min=0, help="GB of the engine's disk to leave free.")] = 10.0,
    list_only: Annotated[bool, typer.Option("--list", help="Print the missing images, pull nothing.")] = False,
) -> None:
    """Pull the docker images that a data file needs."""
    try:
        engine = find_engine()
        images = read_images(input_path)
        missing = without_present(images)
        say(f"{len(images)} image(s) for {input_path}, {len(missing)} missing; {describe_space(engine)}")
        if list_only:
            for image in missing:
                print(image)
            raise typer.Exit(EXIT_OK)
        if missing and not engine.is_x86:
            say(
                f"warning: SWE-bench's images are x86-64 ones, the engine is {engine.architecture}: it has to emulate them"
            )
        failed = asyncio.run(pull_all(missing, engine=engine, parallel=parallel, keep_free_gb=keep_free))
    except SetUpError as error:
        print(f"set-up: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_SET_UP) from None
    except KeyboardInterrupt:
        say("interrupted; what was pulled is kept")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    for image, reason in failed.items():
        print(f"missing {image}: {reason}")
    print(f"{len(images) - len(failed)} of {len(images)} image(s) are there; {describe_space(engine)}")
    raise typer.Exit(EXIT_MISSING if failed else EXIT_OK)


def read_images(path: Path) -> list[str]:
    """The images that the rows of a JSONL file need, each once, in the order of their first use.

    Raises:
        SetUpError: the file is unreadable or empty, or a line is no task; the line is named.
    """
    images: dict[str, None] = {}
    try:
        for place, row in json_lines(path):
            is_prompt = isinstance(row, dict) and "instance_id" not in row and "metadata" in row
            try:
                images[image_name(row["metadata"] if is_prompt else row)] = None
            except ValueError as error:
                raise SetUpError(f"{place}: {error}") from None
    except DataError as error:
        raise SetUpError(str(error)) from None
    if not images:
        raise SetUpError(f"expected at least one row in {path}, found none")
    return list(images)


def find_engine() -> Engine:
    """Ask the docker engine what it is.

    Raises:
        SetUpError: there is no docker, or no engine that answers.
    """
    architecture, _, folder = (
        _docker("info", "--format", "{{.Architecture}} {{.DockerRootDir}}").strip().partition(" ")
    )
    if not architecture:
        raise SetUpError("expected a docker engine that answers, found one that does not say what it is")
    return Engine(architecture, Path(folder) if Path(folder).is_dir() else None)


def without_present(images: Iterable[str]) -> list[str]:
    """Those of ``images`` that the engine does not have.

    Raises:
        SetUpError: the engine does not say.
    """
    present = set(_docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split())
    return [image for image in images if short_name(image) not in present]


def short_name(image: str) -> str:
    """An image's name as docker lists it: without Docker Hub's own host, and with a tag."""
    name = image.removeprefix("docker.io/").removeprefix("library/")
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


async def pull_all(
    images: list[str], *, engine: Engine, parallel: int, keep_free_gb: float = 0.0, limit: PullLimit | None = None
) -> dict[str, str]:
    """Pull images, at most ``parallel`` at a time.

    Args:
        images: their names.
        engine: where they go.
        parallel: pulls at a time.
        keep_free_gb: space to leave free on the engine's disk, GB.
        limit: the pause at a registry's limit.

    Returns:
        Of each that could not be pulled, the reason.
    """
    places, limit = asyncio.Semaphore(parallel), limit or PullLimit()
    failed: dict[str, str] = {}
    full = ""
    platform = [] if engine.is_x86 else ["--platform", "linux/amd64"]
    progress = tqdm(total=len(images), desc="pulling", unit="image", disable=not sys.stderr.isatty())

    async def pull(image: str) -> None:
        nonlocal full
        async with places:
            started = time.monotonic()
            full = full or no_space(engine, keep_free_gb)
            reason = full or await pull_patiently(image, options=platform, limit=limit)
        if reason:
            failed[image] = reason
        if classify(reason) is Failure.FULL_DISK:
            full = reason
        progress.update()
        if progress.disable:
            say(f"{reason or 'pulled'} {image} ({time.monotonic() - started:.0f} s)")

    with progress:
        await asyncio.gather(*(pull(image) for image in images))
    return {image: failed[image] for image in images if image in failed}


async def pull_patiently(image: str, *, options: list[str], limit: PullLimit) -> str:
    """Pull one image, again after a pull limit or what may pass; return why it could not be, or an empty text."""
    attempts = 0
    while True:
        await limit.wait()
        error = await run_pull(image, options=options)
        if error is None:
            limit.is_over()
            return ""
        failure = classify(error)
        if failure is Failure.PULL_LIMIT:
            pause_s = limit.is_met()
            if pause_s is None:
                return f"the registry's pull limit: {error}"
            if pause_s:
                say(f"the registry's pull limit is reached; all pulls wait {pause_s:.0f} s")
            continue
        attempts += 1
        if failure in (Failure.FULL_DISK, Failure.NO_IMAGE) or attempts == _ATTEMPTS:
            return error
        await asyncio.sleep(attempts)


def no_space(engine: Engine, keep_free_gb: float) -> str:
    """Why nothing may be pulled for want of space, or an empty text."""
    free_gb = engine.free_gb()
    if free_gb is None or free_gb >= keep_free_gb:
        return ""
    return f"expected {keep_free_gb:g} GB of the engine's disk to stay free (--keep-free), found {free_gb:.1f} GB"


def classify(error: str) -> Failure:
    """What a failed pull's message means."""
    text = error.lower()
    return next((failure for failure, signs in _SIGNS if any(sign in text for sign in signs)), Failure.OTHER)


async def run_pull(image: str, *, options: list[str]) -> str | None:
    """Run ``docker pull``; return its last line when it fails, else None."""
    async with _started("docker", "pull", "--quiet", *options, "--", image) as process:
        _, error = await process.communicate()
    lines = error.decode(errors="replace").strip().splitlines()
    return None if process.returncode == 0 else (lines or ["no message"])[-1]


@contextlib.asynccontextmanager
async def _started(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that does not outlive the block; it gets no Ctrl-C of its own."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _docker(*arguments: str) -> str:
    command = ["docker", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S)
    except FileNotFoundError:
        raise SetUpError("expected the program `docker`, found none; run this on the agent server's machine") from None
    except subprocess.TimeoutExpired:
        raise SetUpError(f"expected the docker engine to answer within {_ASK_TIMEOUT_S:g} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetUpError(f"expected a docker engine that answers, found: {reason}")
    return done.stdout


def describe_space(engine: Engine) -> str:
    """One clause on the free space of the engine's disk."""
    free_gb = engine.free_gb()
    return (
        "the engine's disk is not on this machine" if free_gb is None else f"{free_gb:.1f} GB free in {engine.folder}"
    )


def say(line: str) -> None:
    """Print one line to stderr, above a progress bar where there is one."""
    tqdm.write(line, file=sys.stderr)


if __name__ == "__main__":
    app()
