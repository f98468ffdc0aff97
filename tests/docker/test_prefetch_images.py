"""prefetch_images.py on a real engine and a real registry, both started here."""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import prefetch_images
import pytest
from aiohttp import web
from local_stack.processes import start_child
from local_stack.server import HOST
from prefetch_images import PullLimit, find_engine, pull_all

from .conftest import EXAMPLE_DIR, start_container

_IMAGES = 6


@dataclass
class Registry:
    """A registry behind a gate that may refuse, delay or hold what it is asked for.

    ``limited``: so many requests for a manifest are answered with a registry's pull limit. ``delay_s``: before each
    answer. ``most``: the most images at once.
    """

    port: int
    host: str = ""
    limited: int = 0
    delay_s: float = 0.0
    asked: Counter = field(default_factory=Counter)
    now: Counter = field(default_factory=Counter)
    most: int = 0

    def image(self, number: int | str) -> str:
        """Name of an image."""
        return f"{self.host}/swebench/image-{number}:latest"

    async def answer(self, request: web.Request) -> web.Response:
        """Pass a request on to the registry, unless it is refused."""
        image = request.path.removeprefix("/v2/swebench/").partition("/")[0]
        self.now[image] += 1
        self.most = max(self.most, len(+self.now))
        try:
            await asyncio.sleep(self.delay_s)
            if "/manifests/" in request.path:
                self.asked[image] += 1
                if self.limited > 0:
                    self.limited -= 1
                    error = {"code": "TOOMANYREQUESTS", "message": "You have reached your pull rate limit."}
                    return web.json_response({"errors": [error]}, status=429)
            url = f"http://{HOST}:{self.port}{request.path_qs}"
            accepted = {"Accept": ", ".join(request.headers.getall("Accept", ["*/*"]))}
            async with (
                aiohttp.ClientSession() as session,
                session.request(request.method, url, headers=accepted) as answer,
            ):
                kept = {key: value for key, value in answer.headers.items() if key.startswith(("Content-", "Docker"))}
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)
        finally:
            self.now[image] -= 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def registry_port(engine, tmp_path_factory):
    """A registry with a few small images, none of which the engine has."""
    folder, port = tmp_path_factory.mktemp("registry"), _free_port()
    configuration = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"{HOST}:{port}"},
    }
    (folder / "config.yml").write_text(json.dumps(configuration))
    process = start_child(["docker-registry", "serve", str(folder / "config.yml")], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while socket.socket().connect_ex((HOST, port)):
            assert process.poll() is None and time.monotonic() < deadline, "docker-registry does not start"
            time.sleep(0.1)
        for number in range(_IMAGES):
            name = f"{HOST}:{port}/swebench/image-{number}:latest"
            subprocess.run(
                ["docker", "import", "-", name], input=_file_system(number), check=True, capture_output=True
            )
            engine.docker("push", name)
            engine.docker("rmi", name)
        yield port
    finally:
        process.kill()
        process.wait()


def _file_system(number: int) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        content = os.urandom(1 << 20)
        member = tarfile.TarInfo(f"file-{number}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


@pytest.fixture
async def registry(registry_port, engine):
    """The registry behind its gate; what was pulled from it is removed afterwards."""
    registry = Registry(registry_port)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", registry.answer)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    registry.host = f"{HOST}:{runner.addresses[0][1]}"
    yield registry
    await runner.cleanup()
    if pulled := _pulled(engine, registry):
        engine.docker("rmi", *pulled)


def _pulled(engine, registry: Registry) -> list[str]:
    names = engine.docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
    return sorted(name for name in names if name.startswith(f"{registry.host}/"))


@pytest.fixture
def prefetch(command_environment, tmp_path):
    """Start prefetch_images.py on rows with these images, each row twice as in a group of samples."""

    def start(images: list[str], *options: str) -> subprocess.Popen:
        rows = [{"instance_id": f"a__b-{number}", "image_name": image} for number, image in enumerate(images)]
        lines = [json.dumps({"prompt": "", "metadata": row}) for row in rows] * 2
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        command = [sys.executable, str(EXAMPLE_DIR / "prefetch_images.py"), "--input", str(tmp_path / "rows.jsonl")]
        return subprocess.Popen(
            [*command, "--keep-free", "0", *options],
            env=command_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    async def run(images: list[str], *options: str) -> tuple[int, str, str]:
        process = start(images, *options)
        stdout, stderr = await asyncio.to_thread(process.communicate, timeout=120)
        return process.returncode, stdout, stderr

    run.start = start
    return run


async def test_what_is_missing_is_listed_and_pulled_once(engine, registry, prefetch):
    images = [registry.image(number) for number in range(3)]
    status, stdout, stderr = await prefetch(images, "--list")
    assert (status, stdout.split()) == (0, images) and "3 image(s)" in stderr and "3 missing" in stderr
    assert not registry.asked

    await asyncio.to_thread(engine.docker, "pull", images[1])
    registry.asked.clear()
    status, stdout, stderr = await prefetch(images)
    assert status == 0, stderr
    assert "2 missing" in stderr and "GB free" in stderr and "GB free" in stdout
    assert stderr.count("pulled ") == 2 and "3 of 3 image(s) are there" in stdout
    assert _pulled(engine, registry) == images and not registry.asked["image-1"]

    registry.asked.clear()
    status, stdout, stderr = await prefetch(images)
    assert status == 0 and "0 missing" in stderr and not registry.asked


async def test_an_image_that_no_registry_has_is_named(engine, registry, prefetch):
    images = [registry.image(0), registry.image("none"), registry.image(1)]
    status, stdout, _ = await prefetch(images)
    assert status == 1 and "2 of 3 image(s) are there" in stdout
    assert [line for line in stdout.splitlines() if line.startswith("missing")][0].startswith(f"missing {images[1]}: ")
    assert _pulled(engine, registry) == [images[0], images[2]]
    assert registry.asked["image-none"] <= 2, "not tried again"


async def test_pulls_are_bounded(registry, prefetch):
    registry.delay_s = 0.1
    status, _, stderr = await prefetch([registry.image(number) for number in range(_IMAGES)], "--parallel", "2")
    assert status == 0, stderr
    assert registry.most == 2


async def test_all_wait_at_a_pull_limit_and_go_on(engine, registry, capfd):
    registry.limited = 12
    images = [registry.image(number) for number in range(4)]
    limit = PullLimit(first_s=0.5, longest_s=1.0)
    started = time.monotonic()
    assert await pull_all(images, engine=find_engine(), parallel=2, limit=limit) == {}
    assert _pulled(engine, registry) == images
    waits = [line for line in capfd.readouterr().err.splitlines() if "pull limit" in line]
    assert len(waits) >= 2 and time.monotonic() - started > 1.5, waits


async def test_patience_with_a_pull_limit_ends(registry):
    registry.limited = 1000
    images = [registry.image(number) for number in range(3)]
    limit = PullLimit(first_s=0.2, longest_s=0.2, patience_s=1.0)
    failed = await pull_all(images, engine=find_engine(), parallel=3, limit=limit)
    assert list(failed) == images and all("pull limit" in reason for reason in failed.values())


async def test_a_full_disk_ends_it(breakable, registry, tasks):
    filler = start_container(breakable, tasks[0]["image_name"])
    breakable.docker("exec", filler, "sh", "-c", "head -c 4G /dev/zero > /full", check=False)
    images = [registry.image(number) for number in range(3)]
    failed = await pull_all(images, engine=find_engine(), parallel=1)
    assert list(failed) == images and all("no space left" in reason for reason in failed.values())
    assert sum(registry.asked.values()) <= 2, "the others were not even asked for"


async def test_space_is_left_free(engine, registry, prefetch):
    status, stdout, _ = await prefetch([registry.image(0)], "--keep-free", "1e9")
    assert status == 1 and "expected 1e+09 GB of the engine's disk to stay free" in stdout
    assert not registry.asked


async def test_ctrl_c_leaves_no_pull_behind(registry, prefetch):
    registry.delay_s = 60
    process = prefetch.start([registry.image(0)])
    while not +registry.now:
        await asyncio.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 130 and "interrupted" in stderr and "Traceback" not in stderr
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert registry.image(0) not in listed


async def test_without_an_engine_it_says_so(command_environment, prefetch):
    command_environment = {**command_environment, "DOCKER_HOST": "unix:///nowhere"}
    command = [sys.executable, str(EXAMPLE_DIR / "prefetch_images.py"), "--input", "rows.jsonl"]
    done = subprocess.run(command, env=command_environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("set-up: expected a docker engine that answers")
    assert "Traceback" not in done.stderr


def test_the_engine_is_described():
    engine = find_engine()
    assert engine.is_x86 == (os.uname().machine == "x86_64") and engine.free_gb() > 0
    assert prefetch_images.describe_space(engine).endswith(str(engine.folder))
