"""The system calls that a sandbox refuses, as a seccomp filter.

Three kinds: those that take memory which ``init`` cannot count, those that lead out of the sandbox's namespaces, and
those that reach PID 1. A filter sees numbers only, neither paths nor what a pointer points to.
"""

import errno
import os
import socket
import struct
from typing import NamedTuple

# Offsets in the kernel's ``struct seccomp_data``; both machines are little-endian.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
# Instructions of linux/bpf_common.h, each with how many to skip when true and when false, and its operand.
_LOAD, _AND, _JUMP, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000
_X32 = 0x40000000  # numbers from here on are x86-64's second, 32-bit table

# linux/audit.h, asm/unistd_64.h, asm-generic/unistd.h
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {
    "bpf": (321, 280),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fsetxattr": (190, 7),
    "io_uring_setup": (425, 425),
    "lsetxattr": (189, 6),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mmap": (9, 222),
    "msgget": (68, 186),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "setpriority": (141, 140),
    "setsockopt": (54, 208),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmget": (29, 194),
    "socket": (41, 198),
    "unshare": (272, 97),
    "vmsplice": (278, 75),
}


class _Argument(NamedTuple):
    """Holds when the lower 32 bits of argument ``index``, as far as ``mask`` keeps them, are one of ``values``."""

    index: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


class _Refusal(NamedTuple):
    """``call`` fails with ``error`` when every one of ``arguments`` holds; with error 0 it does nothing and succeeds."""

    call: str
    error: int
    arguments: tuple[_Argument, ...] = ()


_SHARED_ANONYMOUS = 0x01 | 0x20
_NEW_USER_NAMESPACE = 0x10000000
_KNOWN_FAMILIES = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
_OTHER_FAMILIES = tuple(family for family in range(64) if family not in _KNOWN_FAMILIES)

_REFUSALS = (
    # Memory that outlives its last mapping, and that no file system bounds.
    _Refusal("memfd_create", errno.ENOSYS),
    _Refusal("memfd_secret", errno.ENOSYS),
    _Refusal("mmap", errno.ENOMEM, (_Argument(3, (_SHARED_ANONYMOUS,), mask=_SHARED_ANONYMOUS),)),
    _Refusal("shmget", errno.ENOSYS),
    _Refusal("semget", errno.ENOSYS),
    _Refusal("msgget", errno.ENOSYS),
    _Refusal("vmsplice", errno.ENOSYS),
    _Refusal("bpf", errno.ENOSYS),
    # An access list of up to 64 KiB on every file.
    _Refusal("setxattr", errno.ENOTSUP),
    _Refusal("lsetxattr", errno.ENOTSUP),
    _Refusal("fsetxattr", errno.ENOTSUP),
    _Refusal("setxattrat", errno.ENOTSUP),
    # ``init`` counts sockets, each with the buffer that it starts with.
    _Refusal(
        "setsockopt", 0, (_Argument(1, (socket.SOL_SOCKET,)), _Argument(2, (socket.SO_SNDBUF, socket.SO_RCVBUF)))
    ),
    # It makes system calls that no filter sees.
    _Refusal("io_uring_setup", errno.ENOSYS),
    # In a user namespace of its own a process may mount file systems. clone3 has its flags behind a pointer; the C
    # library falls back to clone.
    _Refusal("unshare", errno.EPERM, (_Argument(0, (_NEW_USER_NAMESPACE,), mask=_NEW_USER_NAMESPACE),)),
    _Refusal("clone", errno.EPERM, (_Argument(0, (_NEW_USER_NAMESPACE,), mask=_NEW_USER_NAMESPACE),)),
    _Refusal("clone3", errno.ENOSYS),
    # A network namespace does not hold every family: vsock reaches the host of a virtual machine.
    _Refusal("socket", errno.EAFNOSUPPORT, (_Argument(0, _OTHER_FAMILIES),)),
    # PID 1 runs as the user of the commands.
    _Refusal("prlimit64", errno.EPERM, (_Argument(0, (1,)),)),
    _Refusal("sched_setaffinity", errno.EPERM, (_Argument(0, (1,)),)),
    _Refusal("sched_setattr", errno.EPERM, (_Argument(0, (1,)),)),
    _Refusal("sched_setparam", errno.EPERM, (_Argument(0, (1,)),)),
    _Refusal("sched_setscheduler", errno.EPERM, (_Argument(0, (1,)),)),
    _Refusal("setpriority", errno.EPERM, (_Argument(1, (1,)),)),
    _Refusal("setpriority", errno.EPERM, (_Argument(0, (os.PRIO_USER,)),)),
)


def refusals(machine: str) -> bytes:
    """Return the filter as an array of ``struct sock_filter``.

    Args:
        machine: as ``platform.machine()`` names it.

    Raises:
        ValueError: its system calls are not known here.
    """
    if machine not in _ARCHITECTURES:
        raise ValueError(f"expected a machine of {', '.join(_ARCHITECTURES)}, found {machine}")
    column = list(_ARCHITECTURES).index(machine)
    foreign = (_RETURN, 0, 0, _FAIL_WITH | errno.ENOSYS)
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]), foreign]
    program += [(_LOAD, 0, 0, _NUMBER), (_JUMP_IF_AT_LEAST, 0, 1, _X32), foreign]
    for refusal in _REFUSALS:
        body = _instructions(refusal)
        program += [(_JUMP_IF_EQUAL, 0, len(body), _CALLS[refusal.call][column]), *body]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _instructions(refusal: _Refusal) -> list[tuple[int, int, int, int]]:
    """Return the error when all arguments hold, else go on with the call's number loaded; made from the end on."""
    program = [(_RETURN, 0, 0, _FAIL_WITH | refusal.error)]
    for argument in reversed(refusal.arguments):
        count = len(argument.values)
        program = [
            (_LOAD, 0, 0, _ARGUMENTS + 8 * argument.index),
            (_AND, 0, 0, argument.mask),
            *((_JUMP_IF_EQUAL, count - place, 0, value) for place, value in enumerate(argument.values)),
            (_JUMP, 0, 0, len(program)),
            *program,
        ]
    return [*program, (_LOAD, 0, 0, _NUMBER)]
