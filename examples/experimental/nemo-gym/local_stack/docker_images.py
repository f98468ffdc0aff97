"""Docker images of the local tasks, named as SWE-bench names its own and made without a registry.

The root filesystem is a few of this machine's programs with the libraries that they load. All images go into the engine
as one archive for ``docker load``, in layers that they share: programs and interpreter, environment, repository.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE

from local_stack.bubblewrap.nemo_gym_bubblewrap.namespace import PACKAGE, Image, command_environment
from local_stack.docker_engine import docker
from local_stack.paths import StackError
from local_stack.processes import run_child

LABEL = "miles-nemo-gym.images"
_PROGRAMS = """
    awk basename bash cat chmod chown cmp cp cut date dd df diff dirname du echo env expr false find git grep gzip
    head hostname id kill ln ls mkdir mktemp mv nice nproc od paste printf pwd readlink realpath rm rmdir sed seq
    sh sleep sort stat sync tail tar tee test timeout touch tr true truncate uname uniq wc whoami xargs
""".split()
_ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_FOLDERS = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o755, "proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755}
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
}
_ENVIRONMENT = "opt/miniconda3/envs/testbed"
_CONDA = ("opt/miniconda3/bin/activate", "opt/miniconda3/etc/profile.d/conda.sh")
# Parts of an interpreter that no task needs; packages come with the environment.
_LEFT_OUT = re.compile(r"/(test|idlelib|turtledemo|ensurepip|site-packages|dist-packages|config-[^/]*)$")
_LIBRARY = re.compile(r"^\s+(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)
_EPOCH = "1970-01-01T00:00:00Z"


@dataclass(frozen=True)
class _Layer:
    file: str
    diff_id: str


def load_images(images: Path, *, tasks: list[dict]) -> None:
    """Make the images of the tasks in the engine, unless it has them all as they would be made now.

    Args:
        images: folder of the sandbox images, as ``build_tasks`` makes them.
        tasks: SWE-bench instances with an ``image_name``.

    Raises:
        StackError: a program is missing on this machine, or the engine does not take the images.
    """
    folders = {task["image_name"]: images / _folder_name(task["image_name"]) for task in tasks}
    recipes = [(folder / "recipe.sha256").read_text() for folder in folders.values()]
    digest = hashlib.sha256(json.dumps([Path(__file__).read_text(), *recipes]).encode()).hexdigest()
    present = docker(
        "image", "ls", "--filter", f"label={LABEL}={digest}", "--format", "{{.Repository}}:{{.Tag}}"
    ).split()
    if {name.removeprefix("docker.io/") for name in folders} <= {name.removeprefix("docker.io/") for name in present}:
        return
    print("making docker images of the tasks (about 200 MB)", flush=True)
    with tempfile.TemporaryDirectory(prefix=".docker-images-", dir=images.parent) as scratch:
        archive = Path(scratch) / "images.tar"
        _write_archive(archive, folders=folders, digest=digest)
        docker("load", "--quiet", "--input", str(archive))


def _folder_name(image_name: str) -> str:
    return image_name.rsplit("/", 1)[-1].removesuffix(":latest")


def _write_archive(archive: Path, *, folders: dict[str, Path], digest: str) -> None:
    """Write what ``docker load`` reads: layers, a configuration for each image, a manifest."""
    layers: dict[Path, _Layer] = {}
    manifest = []
    with tarfile.open(archive, "w") as tar:

        def layer(key: Path, write: Callable[[tarfile.TarFile], None]) -> _Layer:
            if key not in layers:
                layers[key] = _add_layer(tar, name=f"layer-{len(layers)}.tar", write=write, scratch=archive.parent)
            return layers[key]

        for name, folder in folders.items():
            image = Image.load(folder)
            stack = [
                layer(image.python, partial(_write_system, python=image.python)),
                layer(image.environment, partial(_write_environment, image=image)),
                layer(folder, partial(_write_tree, source=folder / "testbed", target="testbed")),
            ]
            config = json.dumps(_configuration(image, stack, digest=digest)).encode()
            config_name = f"{hashlib.sha256(config).hexdigest()}.json"
            _write_file(tar, config_name, config)
            manifest.append({"Config": config_name, "RepoTags": [name], "Layers": [part.file for part in stack]})
        _write_file(tar, "manifest.json", json.dumps(manifest).encode())


def _configuration(image: Image, layers: list[_Layer], *, digest: str) -> dict:
    environment = [f"{key}={value}" for key, value in command_environment(image).items()]
    return {
        # As the official images whose names they have, also where this machine's programs are of another kind.
        "architecture": "amd64",
        "os": "linux",
        "created": _EPOCH,
        "config": {"Env": environment, "WorkingDir": "/testbed", "Cmd": ["bash"], "Labels": {LABEL: digest}},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": _EPOCH, "created_by": "local stack"} for _ in layers],
    }


def _add_layer(
    archive: tarfile.TarFile, *, name: str, write: Callable[[tarfile.TarFile], None], scratch: Path
) -> _Layer:
    file = scratch / name
    with tarfile.open(file, "w") as tar:
        write(tar)
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    archive.add(file, arcname=name)
    file.unlink()
    return _Layer(file=name, diff_id=f"sha256:{digest.hexdigest()}")


def _write_system(tar: tarfile.TarFile, *, python: Path) -> None:
    """Programs, the interpreter at /opt/python, the libraries of both, and what stands in for conda."""
    programs = [_find_program(name) for name in _PROGRAMS]
    interpreter = (python / "bin" / "python3").resolve()
    standard_library = [folder for lib in ("lib", "lib64") if (folder := python / lib / interpreter.name).is_dir()]
    modules = [module for folder in standard_library for module in folder.glob("lib-dynload/*.so")]

    for name in _ROOT_LINKS:
        if os.path.islink(f"/{name}"):
            _write_link(tar, name, os.readlink(f"/{name}").lstrip("/"))
    for name, mode in _FOLDERS.items():
        folder = tarfile.TarInfo(name)
        folder.type, folder.mode = tarfile.DIRTYPE, mode
        tar.addfile(folder)
    for name, content in _FILES.items():
        _write_file(tar, name, content.encode())
    libraries = _libraries([*programs, interpreter, *modules], inside=python)
    _write_host_files(tar, ["/etc/ld.so.cache", *programs, *libraries])
    for name in _CONDA:
        tar.add(PACKAGE / "conda.sh", arcname=name, filter=_as_root)
    tar.add(interpreter, arcname=f"opt/python/bin/{interpreter.name}", filter=_as_root)
    _write_link(tar, "opt/python/bin/python3", interpreter.name)
    for path in [*python.glob("lib/libpython3*.so*"), *standard_library]:
        _write_tree(tar, source=path, target=f"opt/python/{path.relative_to(python)}", leave_out=_LEFT_OUT)


def _write_environment(tar: tarfile.TarFile, *, image: Image) -> None:
    _write_tree(tar, source=image.environment, target=_ENVIRONMENT)
    _write_host_files(tar, _libraries(image.environment.rglob("*.so*"), inside=image.environment))


def _find_program(name: str) -> str:
    if (found := shutil.which(name)) is None:
        raise StackError(f"the docker images need the program {name!r}, which this machine lacks")
    return found


def _libraries(files: Iterable[str | Path], *, inside: Path) -> set[str]:
    """The shared libraries that programs and modules load, but for those ``inside`` a folder that is there anyway."""
    environment = {**os.environ, "LC_ALL": "C", "LD_LIBRARY_PATH": str(inside / "lib")}
    listed = run_child([_find_program("ldd"), *map(str, files)], env=environment, stdout=PIPE, stderr=PIPE).stdout
    return {path for path in _LIBRARY.findall(listed) if inside not in Path(path).parents}


def _write_host_files(tar: tarfile.TarFile, paths: Iterable[str]) -> None:
    """Add files of this machine where they really are; what a link leads to goes in its place."""
    places = {f"{os.path.realpath(os.path.dirname(path))}/{os.path.basename(path)}" for path in paths}
    for place in sorted(filter(os.path.exists, places)):
        tar.add(os.path.realpath(place), arcname=place.lstrip("/"), filter=_as_root)


def _write_tree(tar: tarfile.TarFile, *, source: Path, target: str, leave_out: re.Pattern[str] | None = None) -> None:
    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if leave_out and leave_out.search(member.name) else _as_root(member)

    tar.add(source, arcname=target, filter=keep)


def _write_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    link = tarfile.TarInfo(name)
    link.type, link.linkname = tarfile.SYMTYPE, target
    tar.addfile(link)


def _write_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    file = tarfile.TarInfo(name)
    file.size, file.mode = len(content), 0o644
    tar.addfile(file, io.BytesIO(content))


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
