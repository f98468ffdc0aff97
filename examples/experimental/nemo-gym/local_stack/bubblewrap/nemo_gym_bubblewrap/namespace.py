"""The bwrap command line of a sandbox, as a pure function of its image and limits.

An image is a folder::

    image.json     {"python": <prefix of the interpreter>, "environment": <venv made from it>, "env": {<variables>}}
    testbed/       the repository, copied into each sandbox

Inside, everything writable is a tmpfs of bounded size that ends with the sandbox: nothing is ever left on the disk.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent

_HOST_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
_ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# bwrap makes the parents of a mount point readable by root alone, which init no longer is.
_FOLDERS = (
    *("/image", "/var", "/opt", "/opt/sandbox", "/opt/miniconda3", "/opt/miniconda3/bin", "/opt/miniconda3/envs"),
    *("/opt/miniconda3/etc", "/opt/miniconda3/etc/profile.d"),
)
# Read-only once bwrap has filled them; every writable place below is a mount of its own. /proc: it holds the host's
# settings and PID 1's.
_READ_ONLY = ("/", "/dev", "/proc")


@dataclass(frozen=True)
class Limits:
    """What one sandbox may take from the host.

    Args:
        memory_mib: memory of each process and of all of them together, MiB: anonymous memory, page tables, sockets and
            the kernel's records of files. The files' contents have the limits below.
        processes: processes and threads alive at once.
        cpu_s: CPU time of each process, seconds.
        testbed_mib: size of /testbed, MiB.
        tmp_mib: size of /tmp, MiB.
        home_mib: size of /root, MiB.
        shm_mib: size of /dev/shm, MiB.
        output_mib: largest output of one command, MiB; what is written beyond it fails. An episode's worker keeps the
            outputs of all its commands, each several times over.
    """

    memory_mib: int = 2048
    processes: int = 256
    cpu_s: int = 1800
    testbed_mib: int = 512
    tmp_mib: int = 512
    home_mib: int = 128
    shm_mib: int = 64
    output_mib: int = 16

    def as_dict(self) -> dict[str, int]:
        """Return the limits by name, as ``init`` reads them."""
        return asdict(self)


@dataclass(frozen=True)
class Image:
    """A sandbox image on this machine; see the module's docstring.

    Args:
        root: the image's folder.
        python: prefix of the interpreter, mounted at /opt/python.
        environment: virtual environment, mounted at /opt/miniconda3/envs/testbed.
        env: variables set for every command.
    """

    root: Path
    python: Path
    environment: Path
    env: dict[str, str]

    @classmethod
    def load(cls, root: Path) -> "Image":
        """Read ``root/image.json``.

        Raises:
            OSError: it is not there.
            ValueError, KeyError: it is not an image description.
        """
        fields = json.loads((root / "image.json").read_text())
        return cls(
            root=root,
            python=Path(fields["python"]),
            environment=Path(fields["environment"]),
            env=dict(fields.get("env", {})),
        )


def bwrap_command(*, bwrap: str, image: Image, limits: Limits, user_namespace: bool) -> list[str]:
    """Return the command that starts ``init`` in a new sandbox of ``image``.

    Args:
        bwrap: path of the bubblewrap binary.
        image: what the sandbox holds.
        limits: sizes of the writable places.
        user_namespace: True where the caller is not root; root sets the namespaces up itself and ``init`` then
            becomes an unprivileged user, so that the process limit binds (the kernel exempts root from it).
    """
    identity = (
        ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL"]
        if user_namespace
        else [word for name in ("SETUID", "SETGID", "CHOWN") for word in ("--cap-add", f"CAP_{name}")]
    )
    return [
        bwrap,
        *identity,
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv"),
        *_system_mounts(),
        *(word for path in _FOLDERS for word in ("--perms", "0755", "--dir", path)),
        *_tmpfs("/etc", mib=1, mode="0755"),
        *_host_etc(),
        *_tmpfs("/testbed", mib=limits.testbed_mib, mode="0755"),
        *_tmpfs("/tmp", mib=limits.tmp_mib, mode="1777"),
        *_tmpfs("/var/tmp", mib=limits.tmp_mib, mode="1777"),
        *_tmpfs("/root", mib=limits.home_mib, mode="0755"),
        *_tmpfs("/run", mib=limits.output_mib, mode="1777"),
        *_tmpfs("/dev/shm", mib=limits.shm_mib, mode="1777"),
        *_image_mounts(image),
        *(word for path in _READ_ONLY for word in ("--remount-ro", path)),
        *("--chdir", "/testbed", "--", "/opt/python/bin/python3", "-I", "-S", "/opt/sandbox/init.py"),
    ]


def command_environment(image: Image) -> dict[str, str]:
    """Return the variables that every command of a sandbox of ``image`` starts with."""
    loader = {"LD_LIBRARY_PATH": "/opt/python/lib"} if needs_library_path(image.python) else {}
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "USER": "root",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
        **loader,
        **image.env,
    }


def needs_library_path(python: Path) -> bool:
    """Tell whether an interpreter finds its libpython only at the prefix that it was built for."""
    return python != Path("/usr") and any((python / "lib").glob("libpython3*.so.*"))


def _tmpfs(path: str, *, mib: int, mode: str) -> list[str]:
    return ["--size", str(mib << 20), "--perms", mode, "--tmpfs", path]


def _system_mounts() -> list[str]:
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in _ROOT_LINKS:
        path = Path("/") / name
        if path.is_symlink():
            mounts += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            mounts += ["--ro-bind", str(path), str(path)]
    # /dev/full reads like /dev/zero but cannot be mapped; a shared mapping of /dev/zero is memory without a file.
    return [*mounts, "--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero", "--proc", "/proc"]


def _host_etc() -> list[str]:
    return [word for name in _HOST_ETC for word in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]


def _image_mounts(image: Image) -> list[str]:
    conda = str(PACKAGE / "conda.sh")
    mounts = {
        str(PACKAGE / "init.py"): ["/opt/sandbox/init.py"],
        conda: ["/opt/miniconda3/bin/activate", "/opt/miniconda3/etc/profile.d/conda.sh"],
        str(image.python): ["/opt/python"],
        str(image.environment): ["/opt/miniconda3/envs/testbed"],
        str(image.root / "testbed"): ["/image/testbed"],
    }
    binds = [
        word for source, targets in mounts.items() for target in targets for word in ("--ro-bind", source, target)
    ]
    if needs_library_path(image.python):
        binds += ["--setenv", "LD_LIBRARY_PATH", "/opt/python/lib"]
    return binds
