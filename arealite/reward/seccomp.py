"""Builds the seccomp filter of the sandbox: which system calls code of a model may not make.

A filter is a list of BPF instructions that the kernel runs at every system call. Refused calls fail with EPERM, calls
that are newer than this list with ENOSYS. Allowed are those that computing, threads, child processes, pipes and files
need.
"""

import struct
from collections.abc import Iterator

# Numbers on x86-64 and on 64-bit ARM; None where the architecture does not have the call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Memory, descriptors and state of other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "migrate_pages": (256, 238), "mbind": (237, 235),
    "move_pages": (279, 239), "set_mempolicy": (238, 237),
    # Networks. `socketpair` and `sendto` have rules of their own.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # Mounts and namespaces. `clone` has a rule of its own.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    # Memory that the limits do not count.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "vmsplice": (278, 75),
    # Parts of the kernel with a large surface, and administration of the machine.
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "lookup_dcookie": (212, 18), "fanotify_init": (300, 262), "vhangup": (153, 58),
    "personality": (135, 92), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "uselib": (134, None), "mknod": (133, None), "mknodat": (259, 33), "inotify_add_watch": (254, 27),
    "seccomp": (317, 277),
}  # fmt: skip
# Without namespaces: signals and sessions, so that no process is reached or left, and changes of files that Landlock
# does not control.
_REFUSED_WITHOUT_NAMESPACES: dict[str, tuple[int | None, int | None]] = {
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setsid": (112, 157),
    "setpgid": (109, 154), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "truncate": (76, 45),
}  # fmt: skip
# Identifiers and column of each architecture.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NEWEST_CALL = 451
_CLONE, _CLONE3, _SOCKETPAIR, _SENDTO, _PRLIMIT = (56, 220), (435, 435), (53, 199), (44, 206), (302, 261)
_KILL, _TGKILL = (62, 129), (234, 131)
_NEW_NAMESPACES = 0x7E020000
_AF_UNIX = 1

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026

_Instruction = tuple[int, int, int, int]


def seccomp_filter(machine: str, has_namespaces: bool) -> bytes | None:
    """Return the filter for a machine as `platform.machine()` names it, or None if it is not known here.

    Without namespaces, signals are refused except to the own process group.
    """
    if machine not in _MACHINES:
        return None
    identifier, column = _MACHINES[machine]
    program = [(_LOAD, 0, 0, 4), (_IF_EQUAL, 1, 0, identifier), (_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, 0)]
    program += [(_IF_AT_LEAST, 0, 1, _NEWEST_CALL + 1), (_RETURN, 0, 0, _ENOSYS)]
    refused = dict(_REFUSED) if has_namespaces else _REFUSED | _REFUSED_WITHOUT_NAMESPACES
    for numbers in refused.values():
        if numbers[column] is not None:
            program += [(_IF_EQUAL, 0, 1, numbers[column] or 0), (_RETURN, 0, 0, _EPERM)]
    # The flags of clone3 are in memory, where a filter cannot see them; libraries then use clone.
    program += [(_IF_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ENOSYS)]
    program += _if_bits(_CLONE[column], 0, _NEW_NAMESPACES)
    program += _unless_equal(_SOCKETPAIR[column], 0, _AF_UNIX)
    # The address: a datagram could leave a socket pair.
    program += _unless_equal(_SENDTO[column], 4, 0)
    program += _unless_equal(_PRLIMIT[column], 0, 0)
    if not has_namespaces:
        program += _unless_equal(_KILL[column], 0, 0)
        program += _unless_equal(_TGKILL[column], 0, 0)
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _unless_equal(number: int, argument: int, value: int) -> Iterator[_Instruction]:
    """Refuse a call unless both halves of an argument have a value."""
    yield (_IF_EQUAL, 0, 6, number)
    yield (_LOAD, 0, 0, 16 + 8 * argument)
    yield (_IF_EQUAL, 0, 2, value)
    yield (_LOAD, 0, 0, 20 + 8 * argument)
    yield (_IF_EQUAL, 1, 0, 0)
    yield (_RETURN, 0, 0, _EPERM)
    yield (_LOAD, 0, 0, 0)


def _if_bits(number: int, argument: int, bits: int) -> Iterator[_Instruction]:
    """Refuse a call if one of some bits of an argument is set."""
    yield (_IF_EQUAL, 0, 4, number)
    yield (_LOAD, 0, 0, 16 + 8 * argument)
    yield (_IF_BITS, 0, 1, bits)
    yield (_RETURN, 0, 0, _EPERM)
    yield (_LOAD, 0, 0, 0)
