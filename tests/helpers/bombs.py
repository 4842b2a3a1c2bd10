"""Code for the Python tool that uses much in sum, of which each part alone is allowed."""

from dataclasses import dataclass

EIGHT = "import os, time\nfor _ in range(7):\n    if not os.fork(): break\n"
"""Beginning of code whose rest runs in eight processes."""
STAY = "import time\ntime.sleep(1000)"


@dataclass(frozen=True)
class Bomb:
    """Code, and the status with which its call ends."""

    code: str
    status: str


BOMBS = {
    "fork bomb": Bomb(f"import os\nfor _ in range(6):\n    os.fork()\n{STAY}", "processes"),
    "processes from a thread": Bomb(
        "import subprocess, threading\ndef start():\n    for _ in range(40): subprocess.Popen(['sleep', '99'])\n"
        f"threading.Thread(target=start).start()\n{STAY}",
        "processes",
    ),
    "threads": Bomb(
        # M_ARENA_MAX: threads share the address space that malloc reserves, which would end the limit of each process.
        "import _thread, ctypes, time\nctypes.CDLL(None).mallopt(-8, 1)\n_thread.stack_size(32768)\n"
        f"for _ in range(3000): _thread.start_new_thread(time.sleep, (999,))\n{STAY}",
        "processes",
    ),
    "processes that are not waited for": Bomb(
        f"import os\nfor _ in range(3000):\n    if not os.fork(): os._exit(0)\n{STAY}", "processes"
    ),
    "processes without their main thread": Bomb(
        "import ctypes, os, threading\nfor _ in range(40):\n    if not os.fork():\n"
        f'        threading.Thread(target=exec, args=("""{STAY}""",)).start()\n'
        f"        ctypes.CDLL(None).pthread_exit(None)\n{STAY}",
        "processes",
    ),
    "memory of several processes": Bomb(f"{EIGHT}kept = bytearray(os.urandom(1 << 20)) * 60\n{STAY}", "memory"),
    "memory without an address": Bomb(
        "import os\nfor _ in range(8):\n    file = os.memfd_create('x')\n"
        f"    for _ in range(20): os.write(file, bytes(1 << 20))\n{STAY}",
        "disk",
    ),
    "shared memory that is not resident": Bomb(
        "import mmap\nkept = []\nfor _ in range(8):\n    kept.append(mmap.mmap(-1, 20 << 20))\n"
        f"    kept[-1].write(bytes(20 << 20))\n    kept[-1].madvise(mmap.MADV_DONTNEED)\n{STAY}",
        "disk",
    ),
    "memory of files that are mapped and closed": Bomb(
        # `mmap.mmap` would keep the file open.
        "import ctypes, os\nmap_file, number = ctypes.CDLL(None).mmap, ctypes.c_long\n"
        "for _ in range(8):\n    file = os.memfd_create('x')\n"
        "    for _ in range(20): os.write(file, bytes(1 << 20))\n"
        f"    map_file(None, number(20 << 20), 1, 1, file, number(0))\n    os.close(file)\n{STAY}",
        "disk",
    ),
    "space of several files": Bomb(
        f"for number in range(9):\n    with open(str(number), 'wb') as file: file.write(bytes(20 << 20))\n{STAY}",
        "disk",
    ),
    "space of deleted files": Bomb(
        "import os\nkept = []\nfor _ in range(9):\n    kept.append(open('file', 'wb', 0))\n    os.unlink('file')\n"
        f"    kept[-1].write(bytes(20 << 20))\n{STAY}",
        "disk",
    ),
    "many files": Bomb(f"for number in range(700):\n    open(str(number), 'w').close()\n{STAY}", "disk"),
    "many folders": Bomb(f"import os\nfor number in range(700):\n    os.mkdir(str(number))\n{STAY}", "disk"),
    "path longer than the system takes": Bomb(
        f"import os\nfor _ in range(400):\n    os.mkdir('x' * 100)\n    os.chdir('x' * 100)\n{STAY}", "disk"
    ),
    "time without end": Bomb("while True: pass", "timeout"),
    "output without end": Bomb("while True: print('x' * 1000)", "timeout"),
}
"""Name -> code that exceeds the limits `SMALL`."""
SMALL = {"max_processes": 30, "memory_gib": 0.3, "disk_gib": 0.1, "max_files": 500}
"""Limits in the section `rollout`."""
