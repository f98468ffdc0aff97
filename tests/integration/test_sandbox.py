"""What a sandbox keeps in and what it keeps out."""

import os
import resource
import shutil
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .process_tree import ancestors, find_process

BOTH_WAYS_IN = pytest.mark.parametrize(
    "user_namespace",
    [pytest.param(True, id="user-namespace"), pytest.param(False, id="root")] if os.geteuid() == 0 else [True],
)


def outputs(results: list[dict]) -> list[str]:
    return [result["stdout"].strip() for result in results]


def python(code: str) -> str:
    """The command that runs ``code`` on the sandbox's interpreter."""
    return f"/opt/python/bin/python3 -I -S - <<'END_OF_CODE'\n{code}\nEND_OF_CODE"


@BOTH_WAYS_IN
def test_host_is_out_of_reach(in_sandboxes, user_namespace, tmp_path):
    mark = Path("/tmp") / f"host-{uuid.uuid4().hex}"
    home_mark = Path.home() / f".host-{uuid.uuid4().hex}"
    mark.write_text("secret")
    home_mark.write_text("secret")
    try:
        (results,) = in_sandboxes(
            [
                f"cat {mark} {home_mark}; ls -A /tmp {Path.home()}",
                "cat /etc/shadow",
                "touch /usr/written && echo written",
                "touch /written && echo written",
                "cat /proc/1/environ && echo read",
                "head -1 /etc/passwd; wc -l < /etc/passwd",
                "ls /sys /home /var/lib /srv",
                "mount -o remount,rw /usr && echo remounted",
                "grep CapEff /proc/self/status",
            ],
            user_namespace=user_namespace,
        )
    finally:
        mark.unlink()
        home_mark.unlink()
    listing, shadow, usr, root, environ, passwd, folders, remount, capabilities = outputs(results)
    assert "secret" not in listing and mark.name not in listing.replace(str(mark), "")
    assert "No such file" in shadow
    assert "Read-only file system" in usr and "written" not in usr.splitlines()
    assert "Read-only file system" in root and "written" not in root.splitlines()
    assert "read" not in environ.splitlines() and "LOCAL_STACK" not in environ
    assert passwd.splitlines()[0] == "root:x:0:0::/root:/bin/bash" and int(passwd.splitlines()[1]) <= 2
    assert folders.count("No such file") == 4
    assert "remounted" not in remount.splitlines()
    assert capabilities.split()[1] == "0" * 16


@BOTH_WAYS_IN
def test_no_file_of_the_host_is_inherited(in_sandboxes, user_namespace):
    (results,) = in_sandboxes(["for fd in /proc/$$/fd/*; do readlink $fd; done"], user_namespace=user_namespace)
    opened = sorted(set(outputs(results)[0].splitlines()))
    assert [path.split("#")[0] for path in opened] == ["/dev/null", "/run/"], opened


@BOTH_WAYS_IN
def test_no_network(in_sandboxes, user_namespace):
    connect = "python3 -c 'import socket; socket.create_connection((\"{}\", {}), 3)'"
    (results,) = in_sandboxes(
        [
            f"PATH=/opt/python/bin:$PATH; {connect.format('192.0.2.1', 53)}",
            f"PATH=/opt/python/bin:$PATH; {connect.format('localhost', 22)}",
            "cat /proc/net/dev",
        ],
        user_namespace=user_namespace,
    )
    unreachable, refused, devices = outputs(results)
    assert "Network is unreachable" in unreachable
    assert "Connection refused" in refused
    assert [line.split(":")[0].strip() for line in devices.splitlines() if ":" in line] == ["lo"]


def test_sandboxes_of_one_image_do_not_see_each_other(in_sandboxes):
    write = "echo mine > /testbed/mark; echo mine > /tmp/mark; echo mine > /root/mark"
    look = "sleep 1; cat /testbed/mark /tmp/mark /root/mark; git -C /testbed status --porcelain"
    writer, reader = in_sandboxes([write, "cat /testbed/mark"], [look])
    assert outputs(writer)[1] == "mine"
    assert outputs(reader)[0].count("No such file") == 3 and "mark" not in outputs(reader)[0].splitlines()[-1].split()


def test_state_is_kept_between_commands(in_sandboxes):
    (results,) = in_sandboxes(
        ["echo kept > /tmp/f; cd /tmp; (sleep 60 & echo $! > /tmp/pid)", "cat /tmp/f; kill -0 $(cat /tmp/pid) && pwd"]
    )
    assert outputs(results)[1].split() == ["kept", "/testbed"]


@BOTH_WAYS_IN
def test_fork_bomb_stays_inside(in_sandboxes, user_namespace):
    before = len(list(Path("/proc").glob("[0-9]*")))
    started = time.monotonic()
    (results,) = in_sandboxes([":(){ :|:& };: ; sleep 30", "echo alive"], timeout_s=4, user_namespace=user_namespace)
    assert outputs(results)[1] == "alive"
    assert time.monotonic() - started < 25
    assert len(list(Path("/proc").glob("[0-9]*"))) < before + 50


@BOTH_WAYS_IN
def test_memory_stays_inside(in_sandboxes, user_namespace):
    python = "/opt/python/bin/python3 -I -S -c"
    many = f"for i in 1 2 3 4 5 6; do {python} 'import time; x = bytearray(600 << 20); time.sleep(9)' & done; wait"
    (results,) = in_sandboxes(
        [f"{python} 'x = bytearray(4 << 30)'", many, "echo alive"], user_namespace=user_namespace
    )
    assert "MemoryError" in outputs(results)[0]
    assert "2048 MiB of memory" in results[1]["stderr"]
    assert outputs(results)[2] == "alive"


_TRY_TO_LEAVE = """
import ctypes, mmap, os, platform, socket
libc = ctypes.CDLL(None)
zero = os.open("/dev/zero", os.O_RDWR)
open("/tmp/file", "wb").close()
new_user_namespace = 0x10000000
def enlarge_buffer(option):
    with socket.socket(socket.AF_UNIX) as probe:
        before = probe.getsockopt(socket.SOL_SOCKET, option)
        probe.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
        return -1 if probe.getsockopt(socket.SOL_SOCKET, option) == before else 0
attempts = {
    "memfd": lambda: os.memfd_create("x"),
    "shared memory": lambda: mmap.mmap(-1, 4096),
    "shared memory of /dev/zero": lambda: mmap.mmap(zero, 4096),
    "System V segment": lambda: libc.shmget(0, 4096, 0o1600),
    "System V semaphores": lambda: libc.semget(0, 32000, 0o1600),
    "System V queue": lambda: libc.msgget(0, 0o1600),
    "vmsplice": lambda: libc.vmsplice(os.pipe()[1], 0, 0, 0),
    "io_uring": lambda: libc.syscall(425, 8, ctypes.create_string_buffer(120)),
    "access list": lambda: os.setxattr("/tmp/file", "user.x", b""),
    "unshare": lambda: libc.unshare(new_user_namespace),
    "clone": lambda: libc.syscall({"x86_64": 56, "aarch64": 220}[platform.machine()], new_user_namespace | 17, 0, 0, 0, 0),
    "vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
    "larger send buffer": lambda: enlarge_buffer(socket.SO_SNDBUF),
    "larger receive buffer": lambda: enlarge_buffer(socket.SO_RCVBUF),
    "private memory": lambda: mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE),
}
for name, attempt in attempts.items():
    try:
        refused = attempt() == -1
    except OSError:
        refused = True
    print(f"{name}: {'refused' if refused else 'done'}")
"""


@BOTH_WAYS_IN
def test_memory_and_namespaces_out_of_sight_are_refused(in_sandboxes, user_namespace):
    (results,) = in_sandboxes([python(_TRY_TO_LEAVE)], user_namespace=user_namespace)
    attempts = dict(line.split(": ") for line in outputs(results)[0].splitlines())
    assert len(attempts) == 15, results
    assert [name for name, found in attempts.items() if found == "done"] == ["private memory"]


_TAKE = {
    "unread messages": """
import resource, socket, time
held = []
for _ in range(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 10):
    held.append(socket.socketpair())
    for end in held[-1]:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        end.setblocking(False)
        try:
            while end.send(bytes(1 << 16)): pass
        except BlockingIOError: pass
time.sleep(60)
""",
    "empty files": """
import itertools, os
for number in itertools.count():
    os.close(os.open(f"/tmp/{number}", os.O_CREAT))
""",
    "page tables": """
import mmap, time
size = 1 << 36
held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
for place in range(0, size, 1 << 21):
    held[place]
time.sleep(60)
""",
}


@BOTH_WAYS_IN
def test_memory_of_the_kernel_counts(in_sandboxes, user_namespace):
    sandboxes = [[python(code), "echo alive"] for code in _TAKE.values()]
    every = in_sandboxes(*sandboxes, limits={"memory_mib": 100}, user_namespace=user_namespace)
    for taken, results in zip(_TAKE, every, strict=True):
        assert results[0]["stderr"].startswith("more than 100 MiB of memory"), (taken, results)
        assert outputs(results)[1] == "alive", (taken, results)


def test_files_of_the_host_do_not_count(in_sandboxes, paths):
    link = paths.images / f"linked-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(next(paths.images.glob("sweb.*")), f"{folder}/image", symlinks=True)
        for number in range(60_000):
            os.mknod(f"{folder}/{number}")
        link.symlink_to(f"{folder}/image")
        try:
            (results,) = in_sandboxes(["sleep 1; echo alive"], image=link.name, limits={"memory_mib": 100})
        finally:
            link.unlink()
    assert (results[0]["stdout"], results[0]["stderr"]) == ("alive\n", "")


@BOTH_WAYS_IN
def test_ordinary_programs_run(in_sandboxes, user_namespace):
    code = """
import mmap, multiprocessing, socket, subprocess, threading
from multiprocessing import shared_memory
def main():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    shared = shared_memory.SharedMemory(create=True, size=1 << 20)
    shared.buf[0] = 1
    shared.unlink()
    with open("/tmp/mapped", "w+b") as file:
        file.truncate(4096)
        mmap.mmap(file.fileno(), 4096)[0] = 1
    thread = threading.Thread(target=print, args=["thread"])
    thread.start()
    thread.join()
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname()).close()
    print(subprocess.run(["head", "-c", "3", "/dev/zero"], capture_output=True).stdout)
main()
"""
    (results,) = in_sandboxes([python(code)], user_namespace=user_namespace)
    assert outputs(results)[0].splitlines() == ["thread", r"b'\x00\x00\x00'"], results


@BOTH_WAYS_IN
def test_pid_1_is_out_of_reach(in_sandboxes, user_namespace):
    refused = ["prlimit --pid 1 --nofile=3:3", "prlimit --pid 1 --cpu=1:1", "renice -n 19 -p 1", "renice -n 19 -u 0"]
    refused += ["taskset -p 1 1", "chrt --idle -p 0 1"]
    survived = [f"kill -{signal} 1; kill -{signal} -1; sleep 0.3" for signal in ("INT", "HUP", "CHLD", "KILL", "XCPU")]
    (results,) = in_sandboxes([*refused, *survived, "echo alive"], user_namespace=user_namespace)
    for result in results[: len(refused)]:
        assert "Operation not permitted" in result["stdout"], results
    assert outputs(results)[-1] == "alive", results


@BOTH_WAYS_IN
def test_settings_below_proc_are_read_only(in_sandboxes, user_namespace):
    files = ("/proc/self/oom_score_adj", "/proc/1/oom_score_adj", "/proc/sys/kernel/core_pattern")
    (results,) = in_sandboxes([f"test -w {file}; echo $?" for file in files], user_namespace=user_namespace)
    assert outputs(results) == ["1"] * len(files)


@BOTH_WAYS_IN
def test_full_places_stay_inside(in_sandboxes, user_namespace):
    fill = "head -c 2G /dev/zero > {}/full; stat -c %s {}/full; rm {}/full"
    places = {"/tmp": 512, "/root": 128, "/testbed": 512, "/dev/shm": 64, "/var/tmp": 512}
    (results,) = in_sandboxes(
        [*(fill.format(place, place, place) for place in places), "yes", "echo x > /dev/full2 || echo alive"],
        user_namespace=user_namespace,
    )
    *filled, endless, last = results
    for result, mib in zip(filled, places.values(), strict=True):
        assert "No space left" in result["stdout"] and int(result["stdout"].split()[-1]) <= mib << 20
    assert len(endless["stdout"]) <= 16 << 20
    assert last["stdout"].strip().endswith("alive")


@BOTH_WAYS_IN
def test_kill_everything_stays_inside(in_sandboxes, user_namespace):
    (results,) = in_sandboxes(["kill -9 -1; kill -9 1", "echo alive"], user_namespace=user_namespace)
    assert outputs(results)[1] == "alive"


def test_a_host_out_of_files_breaks_no_sandbox(in_sandboxes):
    mark = f"3.{uuid.uuid4().int}"
    with ThreadPoolExecutor() as pool:
        # In a user namespace PID 1 is a process of ours, whose limits we may set.
        running = pool.submit(in_sandboxes, [f"sleep {mark}", "echo alive"], user_namespace=True)
        pid_1 = next(pid for pid, name in ancestors(find_process(mark)) if name.startswith("python"))
        soft, hard = resource.prlimit(pid_1, resource.RLIMIT_NOFILE)
        resource.prlimit(pid_1, resource.RLIMIT_NOFILE, (3, hard))
        time.sleep(1)
        resource.prlimit(pid_1, resource.RLIMIT_NOFILE, (soft, hard))
        (results,) = running.result()
    assert outputs(results) == ["", "alive"], results


def test_time_is_up(in_sandboxes):
    started = time.monotonic()
    (results,) = in_sandboxes(["echo begun; (setsid sleep 60 &) ; sleep 60", "pgrep sleep || echo none"], timeout_s=2)
    assert time.monotonic() - started < 20
    assert results[0]["error_type"] == "timeout" and results[0]["stdout"] == "begun\n"
    assert results[0]["stderr"] == "command timed out after 2s"
    assert outputs(results)[1] == "none"


def test_command_ends_while_its_children_live(in_sandboxes):
    started = time.monotonic()
    (results,) = in_sandboxes(["sleep 30 & echo done", "exit 7", "cat /nowhere", "kill -TERM $$"])
    assert time.monotonic() - started < 15
    assert [result["return_code"] for result in results] == [0, 7, 1, 128 + 15]


def test_many_short_commands_lose_no_exit_code(in_sandboxes):
    (results,) = in_sandboxes([f"(exit {number % 5}) & wait $!" for number in range(300)])
    assert [result["return_code"] for result in results] == [number % 5 for number in range(300)]


@pytest.mark.parametrize("image", ["docker.io/swebench/missing:latest", "", "..", "x/.."])
def test_missing_image_is_named(in_sandboxes, image):
    with pytest.raises(AssertionError, match="SandboxCreateError: no image"):
        in_sandboxes([], image=image)
