"""Attempts of code to get out of its confinement: `python escape_attempts.py`, with facts as JSON in ESCAPE_FACTS.

It prints a JSON object: name of each attempt -> "worked", or the reason why it did not. None does harm where it works.
Facts: `victim` (process id), `address` (of 8 bytes in its memory), `group` (of a process of the user), `socket` (a
descriptor of the victim), `port` and `abstract` (addresses of servers), `folder` (with what the code must not reach).

`docs/escape-attempts.md` has a table of them; `escape_table.py` writes it.
"""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

FACTS: dict[str, Any] = json.loads(os.environ.get("ESCAPE_FACTS", "{}"))
VICTIM = int(FACTS.get("victim", 0))
FOLDER = Path(FACTS.get("folder", "/"))
NUMBERS = {
    "x86_64": dict(
        ptrace=101, pidfd_open=434, pidfd_getfd=438, process_vm_readv=310, process_vm_writev=311, setns=308,
        unshare=272, clone3=435, io_uring_setup=425, bpf=321, perf_event_open=298, keyctl=250, add_key=248, shmget=29,
        msgget=68, semget=64, mq_open=240, userfaultfd=323, pidfd_send_signal=424, rt_sigqueueinfo=129,
        inotify_init1=294, fanotify_init=300, kcmp=312, memfd_secret=447, mount=165, fsopen=430, open_tree=428,
        chroot=161, init_module=175, kexec_load=246, reboot=169, swapon=167, sethostname=170, acct=163, syslog=103,
        name_to_handle_at=303, open_by_handle_at=304, get_robust_list=274, move_pages=279, seccomp=317,
        personality=135, ioprio_set=251, process_madvise=440,
    ),
    "aarch64": dict(
        ptrace=117, pidfd_open=434, pidfd_getfd=438, process_vm_readv=270, process_vm_writev=271, setns=268,
        unshare=97, clone3=435, io_uring_setup=425, bpf=280, perf_event_open=241, keyctl=219, add_key=217, shmget=194,
        msgget=186, semget=190, mq_open=180, userfaultfd=282, pidfd_send_signal=424, rt_sigqueueinfo=138,
        inotify_init1=26, fanotify_init=262, kcmp=272, memfd_secret=447, mount=40, fsopen=430, open_tree=428,
        chroot=51, init_module=105, kexec_load=104, reboot=142, swapon=224, sethostname=161, acct=89, syslog=116,
        name_to_handle_at=264, open_by_handle_at=265, get_robust_list=100, move_pages=239, seccomp=277,
        personality=92, ioprio_set=30, process_madvise=440,
    ),
}[platform.machine()]  # fmt: skip

Layer = Literal["Landlock", "seccomp", "limits", "capabilities"]
Who = Literal["anyone", "the same user", "root"]


@dataclass(frozen=True)
class Attempt:
    """One attempt to get out."""

    function: Callable[[], object]
    """Raises an error, or returns False, if the attempt does not work."""
    layer: Layer
    """Part of the confinement that stops it, even if it is the only part."""
    works_for: Who = "anyone"
    """Users for whom it works without confinement. Of the same user: the kernel may restrict it to root (Yama)."""
    needs: str = ""
    """Part of the kernel without which it works for nobody; "" if every kernel has it."""


libc = ctypes.CDLL(None, use_errno=True)
ATTEMPTS: dict[str, Attempt] = {}


def attempt(
    layer: Layer, works_for: Who = "anyone", needs: str = ""
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def add(function: Callable[[], object]) -> Callable[[], object]:
        ATTEMPTS[function.__name__.replace("_", " ")] = Attempt(function, layer, works_for, needs)
        return function

    return add


def call(name: str, *arguments: object) -> int:
    """Make a system call."""
    # As long as a register: of a shorter number the kernel would also read what happens to lie beside it.
    whole = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(libc.syscall(NUMBERS[name], *whole))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def is_judged(name: str, *arguments: object) -> bool:
    """Return True if the kernel accepts the caller of a system call, and refuses only the arguments, which do no harm.

    Whether the caller may make the call is checked first.
    """
    try:
        call(name, *arguments)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
    return True


def in_child(function: Callable[[], object]) -> bool:
    """Run a function in a forked process; its error is raised here."""
    if (pid := os.fork()) == 0:
        try:
            os._exit(0 if function() is not False else 255)
        except OSError as error:
            os._exit(error.errno or 254)
        except BaseException:  # the child must end here, whatever the attempt raises
            os._exit(254)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if 0 < code < 254:
        raise OSError(code, os.strerror(code))
    if code < 0:
        raise OSError(f"ended by signal {-code}")
    return code == 0


# Network and sockets

for _family, _needs in (
    ("AF_UNIX", ""),
    ("AF_INET", ""),
    ("AF_INET6", "IPv6"),
    ("AF_NETLINK", ""),
    ("AF_VSOCK", "sockets to the host of a virtual machine"),
):
    _kind = socket.SOCK_RAW if _family == "AF_NETLINK" else socket.SOCK_STREAM
    ATTEMPTS[f"socket of {_family}"] = Attempt(
        partial(socket.socket, getattr(socket, _family), _kind), "seccomp", needs=_needs
    )
ATTEMPTS["socket of AF_PACKET"] = Attempt(
    partial(socket.socket, socket.AF_PACKET, socket.SOCK_RAW), "seccomp", "root", "packet sockets"
)


@attempt("seccomp")
def socket_of_any_family() -> bool:
    for family in range(1, 64):
        for kind in (1, 2, 3, 5):
            with contextlib.suppress(OSError):
                socket.socket(family, kind).close()
                return True
    raise PermissionError(errno.EPERM, "no family at all")


@attempt("seccomp")
def pair_of_datagram_sockets() -> None:
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)


@attempt("seccomp")
def datagram_to_a_socket_of_the_user() -> None:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    pair[0].sendto(b"x", str(FOLDER / "datagrams"))


@attempt("seccomp")
def memory_in_the_queue_of_a_socket() -> None:
    """A file that a message holds after it was closed: nobody could measure it."""
    pair = socket.socketpair()
    socket.send_fds(pair[0], [b"x"], [os.memfd_create("x")])


@attempt("seccomp")
def connection_to_a_socket_of_the_user() -> None:
    socket.socket(socket.AF_UNIX).connect(str(FOLDER / "stream"))


@attempt("seccomp")
def connection_to_an_abstract_socket_of_the_user() -> None:
    socket.socket(socket.AF_UNIX).connect("\0" + FACTS["abstract"])


@attempt("seccomp")
def connection_to_a_port_of_this_machine() -> None:
    socket.create_connection(("127.0.0.1", FACTS["port"]), 10).close()


@attempt("seccomp")
def server_on_a_port() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()


# Memory, descriptors and variables of others


@attempt("seccomp", "the same user")
def trace_of_the_victim() -> bool:
    return in_child(lambda: call("ptrace", 0x4206, VICTIM, 0, 0))  # PTRACE_SEIZE, which does not stop it


@attempt("seccomp")
def trace_of_an_own_process() -> bool:
    return in_child(lambda: call("ptrace", 0, 0, 0, 0))  # PTRACE_TRACEME


def _vectors() -> tuple[Any, bytes, bytes]:
    buffer = ctypes.create_string_buffer(8)
    return buffer, struct.pack("PN", ctypes.addressof(buffer), 8), struct.pack("PN", FACTS["address"], 8)


@attempt("seccomp", "the same user")
def memory_of_the_victim_by_a_call() -> int:
    _buffer, own, theirs = _vectors()
    return call("process_vm_readv", VICTIM, own, 1, theirs, 1, 0)


@attempt("seccomp", "the same user")
def changed_memory_of_the_victim_by_a_call() -> int:
    buffer, own, theirs = _vectors()
    buffer.raw = b"secret 8"  # as it is
    return call("process_vm_writev", VICTIM, own, 1, theirs, 1, 0)


@attempt("Landlock", "the same user")
def memory_of_the_victim() -> bytes:
    with open(f"/proc/{VICTIM}/mem", "rb", 0) as memory:
        memory.seek(FACTS["address"])
        return memory.read(8)


@attempt("Landlock", "the same user")
def changed_memory_of_the_victim() -> int:
    with open(f"/proc/{VICTIM}/mem", "r+b", 0) as memory:
        memory.seek(FACTS["address"])
        return memory.write(b"secret 8")  # as it is


@attempt("Landlock", "the same user")
def memory_of_the_parent() -> None:
    with open(f"/proc/{os.getppid()}/mem", "r+b", 0):
        pass


@attempt("Landlock", "the same user")
def variables_of_the_victim() -> bytes:
    return Path(f"/proc/{VICTIM}/environ").read_bytes()


@attempt("Landlock")
def arguments_of_the_victim() -> bytes:
    return Path(f"/proc/{VICTIM}/cmdline").read_bytes()


@attempt("Landlock")
def list_of_all_processes() -> list[str]:
    return os.listdir("/proc")


@attempt("Landlock", "the same user")
def map_of_the_memory_of_the_victim() -> str:
    return Path(f"/proc/{VICTIM}/maps").read_text()


@attempt("Landlock", "the same user")
def descriptors_of_the_victim() -> list[str]:
    return os.listdir(f"/proc/{VICTIM}/fd")


@attempt("Landlock", "the same user")
def file_of_the_user_by_the_root_of_the_victim() -> str:
    return Path(f"/proc/{VICTIM}/root{FOLDER}/home/token").read_text()


@attempt("Landlock")
def file_of_the_user_by_the_own_root() -> str:
    return Path(f"/proc/self/root{FOLDER}/home/token").read_text()


@attempt("seccomp")
def handle_of_the_victim() -> int:
    return call("pidfd_open", VICTIM, 0)


@attempt("seccomp", "the same user")
def socket_of_the_victim() -> int:
    return call("pidfd_getfd", call("pidfd_open", VICTIM, 0), FACTS["socket"], 0)


@attempt("seccomp", "the same user")
def descriptor_of_the_parent() -> int:
    return call("pidfd_getfd", call("pidfd_open", os.getppid(), 0), 0, 0)


@attempt("seccomp", "the same user", "comparison of descriptors")
def comparison_with_the_victim() -> int:
    return call("kcmp", os.getpid(), VICTIM, 1, 0, 0)


@attempt("seccomp", "the same user")
def locks_of_the_victim() -> int:
    return call("get_robust_list", VICTIM, ctypes.create_string_buffer(8), ctypes.create_string_buffer(8))


@attempt("seccomp", "the same user", "several memory nodes")
def pages_of_the_victim() -> int:
    page = ctypes.c_void_p(FACTS["address"] & ~4095)
    return call("move_pages", VICTIM, 1, ctypes.byref(page), None, ctypes.create_string_buffer(4), 0)


# Namespaces, mounts and the kernel


@attempt("Landlock", "root")
def network_of_the_victim() -> bool:
    return in_child(lambda: call("setns", os.open(f"/proc/{VICTIM}/ns/net", os.O_RDONLY), 0x40000000))


@attempt("seccomp", "root")
def network_of_the_victim_by_its_handle() -> bool:
    return in_child(lambda: call("setns", call("pidfd_open", VICTIM, 0), 0x40000000))


@attempt("seccomp", needs="user namespaces")
def own_user_namespace() -> bool:
    return in_child(lambda: call("unshare", 0x10000000))


@attempt("seccomp", "root")
def own_mount_namespace() -> bool:
    return in_child(lambda: call("unshare", 0x00020000))


@attempt("seccomp", needs="user namespaces")
def process_in_own_namespace() -> bool:
    arguments = ctypes.create_string_buffer(struct.pack("8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0))
    if (child := call("clone3", arguments, 64)) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


def _mount_in_own_namespace() -> int:
    with contextlib.suppress(OSError):  # without one of its own the mount is refused anyway
        call("unshare", 0x00020000)
        call("mount", None, b"/", None, ctypes.c_ulong(1 << 18 | 1 << 14), None)
    return call("mount", b"tmpfs", b"/mnt", b"tmpfs", ctypes.c_ulong(0), None)


@attempt("seccomp", "root")
def mount_over_a_folder() -> bool:
    return in_child(_mount_in_own_namespace)


@attempt("seccomp", "root")
def file_system_without_a_mount() -> int:
    return call("fsopen", b"tmpfs", 0)


@attempt("seccomp", "root")
def copy_of_a_mount() -> int:
    return call("open_tree", -100, b"/", 1)


@attempt("seccomp", "root")
def root_of_its_own() -> bool:
    return in_child(lambda: call("chroot", b"."))


@attempt("seccomp", "root", "file handles")
def file_of_the_user_by_its_handle() -> int:
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    call("name_to_handle_at", -100, os.fsencode(FOLDER / "home" / "token"), handle, ctypes.byref(ctypes.c_int()), 0)
    return call("open_by_handle_at", os.open(FOLDER, os.O_RDONLY), handle, 0)


@attempt("seccomp", needs="io_uring")
def asynchronous_calls() -> int:
    return call("io_uring_setup", 4, ctypes.create_string_buffer(120))


@attempt("seccomp", "root", "programs in the kernel")
def program_in_the_kernel() -> bool:
    return is_judged("bpf", 11, ctypes.create_string_buffer(8), 8)  # BPF_PROG_GET_NEXT_ID


@attempt("seccomp", "root", "counters of the processor")
def counters_of_the_processor() -> int:
    attributes = ctypes.create_string_buffer(b"\1\0\0\0\x78\0\0\0" + bytes(200))
    return call("perf_event_open", attributes, 0, -1, -1, 0)


@attempt("seccomp", needs="userfaultfd")
def handling_of_page_faults() -> int:
    return call("userfaultfd", 1)


@attempt("seccomp", needs="memfd_secret")
def memory_that_nobody_measures() -> int:
    return call("memfd_secret", 0)


@attempt("seccomp")
def watch_of_files() -> int:
    return call("inotify_init1", 0)


@attempt("seccomp", "root", "fanotify")
def watch_of_all_files() -> int:
    return call("fanotify_init", 0, 0)


@attempt("seccomp", needs="keyrings")
def keyring_of_the_user() -> int:
    return call("keyctl", 0, -4, 1)


@attempt("seccomp", needs="keyrings")
def key_for_later_completions() -> int:
    return call("add_key", b"user", b"escape attempt", b"x", 1, -1)  # of this thread


@attempt("seccomp", "root", "modules")
def module_of_the_kernel() -> bool:
    return is_judged("init_module", ctypes.create_string_buffer(64), 64, b"")


@attempt("seccomp", "root", "kexec")
def another_kernel() -> bool:
    return is_judged("kexec_load", 0, 1 << 20, None, 0)  # more segments than there can be


@attempt("seccomp", "root")
def restart_of_the_machine() -> bool:
    return is_judged("reboot", 0, 0, 0, None)  # numbers that it does not take


@attempt("seccomp", "root")
def swap_space() -> bool:
    return is_judged("swapon", b"/does/not/exist", 0)


@attempt("seccomp", "root")
def name_of_the_machine() -> int:
    name = os.uname().nodename.encode()  # as it is
    return call("sethostname", name, len(name))


@attempt("seccomp", "root", "accounting")
def accounting_of_all_processes() -> bool:
    return is_judged("acct", b"/does/not/exist")


@attempt("seccomp", "root")
def messages_of_the_kernel() -> int:
    return call("syslog", 3, ctypes.create_string_buffer(64), 64)


@attempt("Landlock", "root")
def messages_of_the_kernel_by_the_device() -> int:
    return os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)


@attempt("seccomp")
def filter_of_calls_of_its_own() -> bool:
    allow = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(allow))
    return in_child(lambda: (libc.prctl(38, 1, 0, 0, 0) and False) or call("seccomp", 1, 0, program))


@attempt("seccomp")
def personality_of_an_old_kernel() -> bool:
    return in_child(lambda: call("personality", 0x0020000))  # UNAME26


def _call_of_32_bits() -> bool:
    """Call getpid by the entry of 32-bit programs, whose calls have other numbers."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # push rbx; mov eax, 20; int 0x80; pop rbx; ret
    code.write(bytes.fromhex("53b814000000cd805bc3"))
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(address)()) == os.getpid()


if platform.machine() == "x86_64":

    @attempt("seccomp", needs="calls of 32 bits")
    def call_of_32_bits() -> bool:
        return in_child(_call_of_32_bits)


# Settings of the system and devices

for _name, _path in {
    "pattern of core files": "/proc/sys/kernel/core_pattern",
    "keys of the console": "/proc/sysrq-trigger",
    "loader of modules": "/proc/sys/kernel/modprobe",
    "memory pages of the system": "/sys/kernel/mm/transparent_hugepage/enabled",
}.items():
    ATTEMPTS[_name] = Attempt(partial(os.open, _path, os.O_WRONLY), "Landlock", "root", f"`{_path}`")


@attempt("Landlock", "root", "control groups")
def control_group_of_its_own() -> None:
    version_1 = Path("/sys/fs/cgroup/cpu")
    group = (version_1 if version_1.is_dir() else version_1.parent) / f"escape-attempt-{os.getpid()}"
    group.mkdir()
    group.rmdir()


@attempt("Landlock")
def priority_when_memory_is_short() -> None:
    path = Path("/proc/self/oom_score_adj")
    path.write_text(path.read_text())


@attempt("Landlock")
def name_of_the_parent() -> None:
    Path(f"/proc/{os.getppid()}/comm").read_text()


def _device(kind: int, number: int) -> None:
    os.mknod("device", kind | 0o600, number)
    os.unlink("device")


@attempt("Landlock", "root")
def device_of_a_disk() -> None:
    _device(stat.S_IFBLK, os.makedev(7, 0))


@attempt("Landlock", "root")
def device_of_memory() -> None:
    _device(stat.S_IFCHR, os.makedev(1, 1))


@attempt("Landlock")
def terminal_of_its_own() -> int:
    return os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)


@attempt("Landlock")
def list_of_devices() -> list[str]:
    return os.listdir("/dev")


# Other processes


@attempt("seccomp", "the same user")
def signal_to_every_process() -> None:
    os.kill(-1, 0)


@attempt("Landlock", "the same user")
def signal_to_the_victim() -> None:
    os.kill(VICTIM, 0)


@attempt("Landlock", "the same user")
def signal_to_the_parent() -> None:
    os.kill(os.getppid(), 0)


@attempt("Landlock", "the same user")
def signal_to_the_group_of_the_victim() -> None:
    os.killpg(int(FACTS["group"]), 0)


@attempt("seccomp", "the same user")
def signal_to_the_victim_by_its_handle() -> int:
    return call("pidfd_send_signal", call("pidfd_open", VICTIM, 0), 0, None, 0)


@attempt("seccomp", "the same user")
def queued_signal_to_the_victim() -> int:
    information = ctypes.create_string_buffer(struct.pack("iii", 0, 0, -1) + bytes(116))  # SI_QUEUE
    return call("rt_sigqueueinfo", VICTIM, 0, information)


@attempt("seccomp", "the same user")
def ownership_of_a_pipe_by_the_victim() -> int:
    import fcntl

    return fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, VICTIM)


@attempt("seccomp")
def lease_on_a_file() -> int:
    import fcntl

    return fcntl.fcntl(os.open("leased", os.O_CREAT | os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)


@attempt("seccomp", "the same user")
def limits_of_the_victim() -> tuple[int, int]:
    return resource.prlimit(VICTIM, resource.RLIMIT_NOFILE)


@attempt("seccomp", "the same user")
def cores_of_the_victim() -> None:
    os.sched_setaffinity(VICTIM, os.sched_getaffinity(VICTIM))


@attempt("seccomp", "the same user")
def priority_of_the_victim() -> None:
    os.setpriority(os.PRIO_PROCESS, VICTIM, os.getpriority(os.PRIO_PROCESS, VICTIM))


@attempt("seccomp", "the same user")
def disk_priority_of_the_victim() -> int:
    return call("ioprio_set", 1, VICTIM, 0)


@attempt("seccomp")
def process_group_of_its_own() -> bool:
    group = os.getpgid(0)

    def leave() -> bool:
        os.setsid()
        return os.getpgid(0) != group

    return in_child(leave)


@attempt("seccomp")
def adoption_of_orphans() -> bool:
    return in_child(lambda: libc.prctl(36, 1, 0, 0, 0) == 0)


@attempt("seccomp")
def life_beyond_the_parent() -> bool:
    return in_child(lambda: libc.prctl(1, 0, 0, 0, 0) == 0)


# Limits and rights


@attempt("limits")
def more_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard <= soft:
        raise OSError(errno.EPERM, "no more than before")


@attempt("limits")
def more_memory() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    # 0x4000: MAP_NORESERVE
    return len(mmap.mmap(-1, 2 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000))


@attempt("limits")
def larger_files() -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    os.truncate(os.open("large", os.O_CREAT | os.O_RDWR), 1 << 32)
    os.unlink("large")
    return 1


@attempt("limits")
def core_dumps() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@attempt("capabilities", "root")
def capabilities() -> bool:
    sets = ctypes.create_string_buffer(24)
    libc.capget(ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0)), sets)
    return any(struct.unpack("6I", sets.raw))


@attempt("seccomp", "root")
def another_user() -> bool:
    return in_child(lambda: os.setresuid(65534, 65534, 65534))


@attempt("seccomp", "root")
def priority_over_others() -> bool:
    return in_child(lambda: os.setpriority(os.PRIO_PROCESS, 0, -5))


@attempt("seccomp", "root")
def cores_in_real_time() -> bool:
    return in_child(lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)))


# Files


@attempt("Landlock")
def list_of_the_neighbours() -> list[str]:
    return os.listdir("..")


@attempt("Landlock")
def file_of_a_neighbour() -> str:
    return (FOLDER / "neighbour" / "secret").read_text()


@attempt("Landlock")
def note_for_a_neighbour() -> int:
    return (FOLDER / "neighbour" / "note").write_text("x")


@attempt("Landlock")
def file_of_a_neighbour_by_a_symbolic_link() -> str:
    _link(os.symlink, FOLDER / "neighbour" / "secret", "link")
    return Path("link").read_text()


@attempt("Landlock")
def note_for_a_neighbour_by_a_symbolic_link() -> int:
    _link(os.symlink, FOLDER / "neighbour", "folder-link")
    return Path("folder-link", "note").write_text("x")


@attempt("Landlock")
def file_of_a_neighbour_by_a_hard_link() -> str:
    _link(os.link, FOLDER / "neighbour" / "secret", "hard")
    return Path("hard").read_text()


def _link(function: Callable[[Path, str], None], source: Path, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # from an attempt before
        os.unlink(name)
    function(source, name)


@attempt("Landlock")
def file_moved_to_a_neighbour() -> None:
    Path("moved").write_text("x")
    os.rename("moved", FOLDER / "neighbour" / "moved")


@attempt("Landlock")
def file_moved_from_a_neighbour() -> None:
    os.rename(FOLDER / "neighbour" / "movable", "moved")
    os.rename("moved", FOLDER / "neighbour" / "movable")


@attempt("Landlock")
def folder_of_a_neighbour_renamed() -> None:
    os.rename(FOLDER / "neighbour", FOLDER / "renamed")
    os.rename(FOLDER / "renamed", FOLDER / "neighbour")


@attempt("Landlock")
def file_of_a_neighbour_removed() -> None:
    os.unlink(FOLDER / "neighbour" / "removable")


@attempt("Landlock")
def folder_beside_the_neighbours() -> None:
    os.mkdir("../mine")
    os.rmdir("../mine")


@attempt("Landlock")
def file_of_the_user() -> str:
    return (FOLDER / "home" / "token").read_text()


@attempt("Landlock")
def home_of_the_user() -> list[str]:
    return os.listdir(FOLDER / "home")


@attempt("Landlock")
def program_of_the_user() -> int:
    return subprocess.run([str(FOLDER / "home" / "program")], check=True).returncode == 0


@attempt("Landlock")
def working_folder_of_the_user() -> str:
    os.chdir(FOLDER / "home")
    try:
        return Path("token").read_text()
    finally:
        os.chdir(os.environ["HOME"])


@attempt("Landlock", "root")
def passwords() -> bytes:
    return Path("/etc/shadow").read_bytes()


@attempt("Landlock")
def addresses_of_machines() -> bytes:
    return Path("/etc/hosts").read_bytes()


@attempt("Landlock")
def truncated_file_of_the_user() -> None:
    os.truncate(FOLDER / "home" / "truncated", 0)


@attempt("seccomp")
def mode_of_a_file_of_the_user() -> bool:
    file = FOLDER / "home" / "mode"
    before = file.stat().st_mode
    file.chmod(before ^ 0o040)
    return file.stat().st_mode != before


@attempt("seccomp")
def time_of_a_file_of_the_user() -> bool:
    file = FOLDER / "home" / "time"
    before = file.stat().st_mtime_ns
    os.utime(file, (12345, 12345))
    return file.stat().st_mtime_ns != before


@attempt("seccomp", "root")
def owner_of_a_file_of_the_user() -> bool:
    file = FOLDER / "home" / "mode"
    before = file.stat().st_uid
    os.chown(file, 65533, -1)
    return file.stat().st_uid != before


@attempt("seccomp", needs="extended attributes")
def attribute_of_a_file_of_the_user() -> None:
    os.setxattr(FOLDER / "home" / "mode", "user.note", b"x")


def _note(folder: str) -> None:
    path = Path(folder, f"escape-attempt-{os.getpid()}")
    path.write_text("x")
    path.unlink()


for _folder in ("/tmp", "/var/tmp", "/dev/shm"):
    ATTEMPTS[f"note in {_folder}"] = Attempt(partial(_note, _folder), "Landlock")


@attempt("seccomp")
def shared_memory() -> bool:
    number = call("shmget", 0, 4096, 0o1600)  # IPC_PRIVATE
    libc.shmctl(number, 0, 0)
    return True


@attempt("seccomp")
def queue_of_messages() -> bool:
    number = call("msgget", 0, 0o1600)
    libc.msgctl(number, 0, 0)
    return True


@attempt("seccomp")
def shared_counter() -> bool:
    number = call("semget", 0, 1, 0o1600)
    libc.semctl(number, 0, 0)
    return True


@attempt("seccomp", needs="message queues with names")
def queue_of_messages_with_a_name() -> int:
    number = call("mq_open", b"escape-attempt", os.O_CREAT | os.O_RDWR, 0o600, None)
    libc.mq_unlink(b"/escape-attempt")
    return number


@attempt("Landlock")
def pipe_with_a_name() -> None:
    os.mkfifo("fifo")
    os.unlink("fifo")


def outcome(function: Callable[[], object]) -> str:
    """Return "worked", or why an attempt did not."""
    try:
        return "did nothing" if function() is False else "worked"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except Exception as error:  # each attempt is judged by itself
        return repr(error)


if __name__ == "__main__":
    json.dump({name: outcome(each.function) for name, each in ATTEMPTS.items()}, sys.stdout)
