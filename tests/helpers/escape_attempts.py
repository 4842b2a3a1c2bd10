"""Attempts of code to get out of its confinement: `python escape_attempts.py`, with facts as JSON in ESCAPE_FACTS.

It prints a JSON object: name of each attempt -> "worked", or the reason why it did not. None does harm where it works.
Facts: `victim` (process id), `address` (of a secret in its memory), `folder` (with what the code must not reach).
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

FACTS: dict[str, Any] = json.loads(os.environ.get("ESCAPE_FACTS", "{}"))
VICTIM = int(FACTS.get("victim", 0))
FOLDER = Path(FACTS.get("folder", "/"))
NUMBERS = {
    "x86_64": dict(
        ptrace=101, pidfd_open=434, pidfd_getfd=438, process_vm_readv=310, setns=308, unshare=272, clone3=435,
        io_uring_setup=425, bpf=321, perf_event_open=298, keyctl=250, shmget=29, msgget=68, userfaultfd=323,
        pidfd_send_signal=424, rt_sigqueueinfo=129, inotify_init1=294, kcmp=312, memfd_secret=447,
    ),
    "aarch64": dict(
        ptrace=117, pidfd_open=434, pidfd_getfd=438, process_vm_readv=270, setns=268, unshare=97, clone3=435,
        io_uring_setup=425, bpf=280, perf_event_open=241, keyctl=219, shmget=194, msgget=186, userfaultfd=282,
        pidfd_send_signal=424, rt_sigqueueinfo=138, inotify_init1=26, kcmp=272, memfd_secret=447,
    ),
}[platform.machine()]  # fmt: skip

libc = ctypes.CDLL(None, use_errno=True)
ATTEMPTS: dict[str, Callable[[], object]] = {}
"""Name -> function that raises an error, or returns False, if the attempt does not work."""


def attempt(function: Callable[[], object]) -> Callable[[], object]:
    ATTEMPTS[function.__name__.replace("_", " ")] = function
    return function


def call(name: str, *arguments: object) -> int:
    """Make a system call."""
    result = int(libc.syscall(NUMBERS[name], *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


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
    return code == 0


# Network and sockets

for _family in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"):
    _kind = socket.SOCK_RAW if _family in ("AF_NETLINK", "AF_PACKET") else socket.SOCK_STREAM
    ATTEMPTS[f"socket of {_family}"] = partial(socket.socket, getattr(socket, _family), _kind)


@attempt
def datagram_to_a_socket_of_the_user() -> None:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    pair[0].sendto(b"x", str(FOLDER / "datagrams"))


@attempt
def connection_to_a_socket_of_the_user() -> None:
    socket.socket(socket.AF_UNIX).connect(str(FOLDER / "stream"))


# Memory, descriptors and variables of others


@attempt
def trace_of_the_victim() -> int:
    return call("ptrace", 0x4206, VICTIM, 0, 0)  # PTRACE_SEIZE, which does not stop it


@attempt
def memory_of_the_victim_by_a_call() -> int:
    buffer = ctypes.create_string_buffer(8)
    own = struct.pack("PN", ctypes.addressof(buffer), 8)
    theirs = struct.pack("PN", FACTS["address"], 8)
    return call("process_vm_readv", VICTIM, own, 1, theirs, 1, 0)


@attempt
def memory_of_the_victim() -> bytes:
    with open(f"/proc/{VICTIM}/mem", "rb", 0) as memory:
        memory.seek(FACTS["address"])
        return memory.read(8)


@attempt
def memory_of_the_parent() -> None:
    with open(f"/proc/{os.getppid()}/mem", "r+b", 0):
        pass


@attempt
def variables_of_the_victim() -> bytes:
    return Path(f"/proc/{VICTIM}/environ").read_bytes()


@attempt
def descriptors_of_the_victim() -> list[str]:
    return os.listdir(f"/proc/{VICTIM}/fd")


@attempt
def handle_of_the_victim() -> int:
    return call("pidfd_open", VICTIM, 0)


@attempt
def descriptor_of_the_parent() -> int:
    return call("pidfd_getfd", call("pidfd_open", os.getppid(), 0), 0, 0)


@attempt
def comparison_with_the_victim() -> int:
    return call("kcmp", os.getpid(), VICTIM, 1, 0, 0)


# Namespaces and the kernel


@attempt
def network_of_the_victim() -> bool:
    return in_child(lambda: call("setns", os.open(f"/proc/{VICTIM}/ns/net", os.O_RDONLY), 0x40000000))


@attempt
def own_user_namespace() -> bool:
    return in_child(lambda: call("unshare", 0x10000000))


@attempt
def process_in_own_namespace() -> bool:
    arguments = ctypes.create_string_buffer(struct.pack("8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0))
    if (child := call("clone3", arguments, 64)) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


@attempt
def asynchronous_calls() -> int:
    return call("io_uring_setup", 4, ctypes.create_string_buffer(120))


@attempt
def counters_of_the_processor() -> int:
    attributes = ctypes.create_string_buffer(b"\1\0\0\0\x78\0\0\0" + bytes(200))
    return call("perf_event_open", attributes, 0, -1, -1, 0)


@attempt
def handling_of_page_faults() -> int:
    return call("userfaultfd", 1)


@attempt
def watch_of_files() -> int:
    return call("inotify_init1", 0)


@attempt
def keyring_of_the_user() -> int:
    return call("keyctl", 0, -4, 1)


# Other processes


@attempt
def signal_to_the_victim() -> None:
    os.kill(VICTIM, 0)


@attempt
def signal_to_the_parent() -> None:
    os.kill(os.getppid(), 0)


@attempt
def signal_to_the_group_of_the_victim() -> None:
    os.killpg(int(FACTS["group"]), 0)


@attempt
def queued_signal_to_the_victim() -> int:
    return call("rt_sigqueueinfo", VICTIM, 0, ctypes.create_string_buffer(128))


@attempt
def ownership_of_a_pipe_by_the_victim() -> int:
    import fcntl

    return fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, VICTIM)


@attempt
def limits_of_the_victim() -> tuple[int, int]:
    return resource.prlimit(VICTIM, resource.RLIMIT_NOFILE)


@attempt
def cores_of_the_victim() -> None:
    os.sched_setaffinity(VICTIM, os.sched_getaffinity(VICTIM))


@attempt
def priority_of_the_victim() -> None:
    os.setpriority(os.PRIO_PROCESS, VICTIM, os.getpriority(os.PRIO_PROCESS, VICTIM))


@attempt
def process_group_of_its_own() -> bool:
    group = os.getpgid(0)

    def leave() -> bool:
        os.setsid()
        return os.getpgid(0) != group

    return in_child(leave)


# Limits


@attempt
def more_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = 100_000 if os.geteuid() == 0 else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (more, more))
    if more <= soft:
        raise OSError(errno.EPERM, "no more than before")


@attempt
def core_dumps() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))


@attempt
def capabilities() -> bool:
    sets = ctypes.create_string_buffer(24)
    libc.capget(ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0)), sets)
    return any(struct.unpack("6I", sets.raw))


# Files


@attempt
def list_of_the_neighbours() -> list[str]:
    return os.listdir("..")


@attempt
def file_of_a_neighbour() -> str:
    return (FOLDER / "neighbour" / "secret").read_text()


@attempt
def note_for_a_neighbour() -> int:
    return (FOLDER / "neighbour" / "note").write_text("x")


@attempt
def file_of_a_neighbour_by_a_symbolic_link() -> str:
    with contextlib.suppress(FileExistsError):
        os.symlink(FOLDER / "neighbour" / "secret", "link")
    return Path("link").read_text()


@attempt
def file_of_a_neighbour_by_a_hard_link() -> str:
    os.link(FOLDER / "neighbour" / "secret", "hard")
    return Path("hard").read_text()


@attempt
def file_moved_to_a_neighbour() -> None:
    Path("moved").write_text("x")
    os.rename("moved", FOLDER / "neighbour" / "moved")


@attempt
def file_of_the_user() -> str:
    return (FOLDER / "home" / "token").read_text()


@attempt
def home_of_the_user() -> list[str]:
    return os.listdir(FOLDER / "home")


@attempt
def passwords() -> bytes:
    return Path("/etc/shadow").read_bytes()


@attempt
def truncated_file_of_the_user() -> None:
    os.truncate(FOLDER / "home" / "truncated", 0)


@attempt
def mode_of_a_file_of_the_user() -> bool:
    file = FOLDER / "home" / "mode"
    before = file.stat().st_mode
    file.chmod(before ^ 0o040)
    return file.stat().st_mode != before


@attempt
def time_of_a_file_of_the_user() -> bool:
    file = FOLDER / "home" / "time"
    os.utime(file, (12345, 12345))
    return file.stat().st_mtime == 12345


def _note(folder: str) -> None:
    path = Path(folder, f"escape-attempt-{os.getpid()}")
    path.write_text("x")
    path.unlink()


for _folder in ("/tmp", "/var/tmp", "/dev/shm"):
    ATTEMPTS[f"note in {_folder}"] = partial(_note, _folder)


@attempt
def shared_memory() -> bool:
    number = call("shmget", 0, 4096, 0o1600)  # IPC_PRIVATE
    libc.shmctl(number, 0, 0)
    return True


@attempt
def queue_of_messages() -> bool:
    number = call("msgget", 0, 0o1600)
    libc.msgctl(number, 0, 0)
    return True


@attempt
def pipe_with_a_name() -> None:
    os.mkfifo("fifo")


def outcome(function: Callable[[], object]) -> str:
    """Return "worked", or why an attempt did not."""
    try:
        return "did nothing" if function() is False else "worked"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except Exception as error:  # each attempt is judged by itself
        return repr(error)


if __name__ == "__main__":
    json.dump({name: outcome(function) for name, function in ATTEMPTS.items()}, sys.stdout)
