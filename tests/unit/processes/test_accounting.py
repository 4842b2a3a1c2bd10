"""Tests of memory and disk space in sum, and of the removal of folders that code has made."""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from grpo_ray.processes.accounting import disk_excess, disk_in_use, exceeds_memory, memory_in_use, remove_folder


def as_another_user(function: Callable[[], object]) -> int:
    """Call a function in a forked process, of the user nobody if this is root's. Returns its exit code."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setresuid(65534, 65534, 65534)
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def reachable() -> Iterator[Path]:
    """Folder that another user can reach, unlike those of pytest, and owns."""
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o755)
        folder = Path(above, "own")
        folder.mkdir()
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
        yield folder


def test_folder_with_closed_folders_is_removed_by_its_owner(reachable: Path) -> None:
    folder = reachable

    def make() -> None:
        for name, mode in (("unlistable", 0o300), ("unlistable/closed", 0), ("readonly", 0o700)):
            os.mkdir(folder / name, mode)
        (folder / "unlistable" / "file").touch()
        (folder / "readonly" / "below").mkdir()
        (folder / "readonly" / "below" / "file").touch()
        os.chmod(folder / "readonly" / "below", 0o500)
        os.chmod(folder / "readonly", 0o500)

    assert as_another_user(make) == 0
    assert as_another_user(lambda: remove_folder(str(folder))) == 0
    assert not folder.exists() or not any(folder.iterdir())  # it is itself in a folder of root


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    for name in ("outside", "own"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "file").touch()
    (tmp_path / "own" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "own" / "hard").hardlink_to(tmp_path / "outside" / "file")
    remove_folder(str(tmp_path / "own"))
    assert not (tmp_path / "own").exists() and (tmp_path / "outside" / "file").exists()


def test_folder_nested_deeper_than_any_path_is_removed(tmp_path: Path) -> None:
    here = os.getcwd()
    (tmp_path / "own").mkdir()
    os.chdir(tmp_path / "own")
    try:
        for _ in range(2000):
            os.mkdir("x" * 20)
            os.chdir("x" * 20)
    finally:
        os.chdir(here)
    assert disk_excess(str(tmp_path / "own"), (), 1 << 30, 10_000) is not None  # it cannot be measured
    remove_folder(str(tmp_path / "own"))
    assert not (tmp_path / "own").exists()


def test_removal_of_a_part_counts_files_at_all_depths(tmp_path: Path) -> None:
    inner = tmp_path / "own" / "inner"
    inner.mkdir(parents=True)
    for number in range(300):
        (inner / str(number)).touch()
    assert not remove_folder(str(tmp_path / "own"), 100)
    assert len(list(inner.iterdir())) == 201  # "inner" itself is the first of the 100
    assert remove_folder(str(tmp_path / "own"), 1000) and not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("max_bytes", "max_files", "excess"),
    [(1 << 30, 10, None), (1 << 30, 3, "more than 3 files"), (1 << 20, 10, "more than 0.000976562 GiB of files")],
)
def test_files_count_in_sum_and_links_once(tmp_path: Path, max_bytes: int, max_files: int, excess: str | None) -> None:
    (tmp_path / "a").mkdir()
    for name in ("one", "a/two"):
        (tmp_path / name).write_bytes(os.urandom(800_000))
    for number in range(5):
        (tmp_path / f"link{number}").hardlink_to(tmp_path / "one")
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 40)  # of which nothing is allocated
    assert disk_excess(str(tmp_path), (), max_bytes, max_files) == excess


def test_deleted_files_count_as_long_as_they_are_open(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb", 0) as file:
        os.unlink(tmp_path / "file")
        file.write(bytes(2 << 20))
        assert disk_excess(str(tmp_path), [os.getpid()], 1 << 20, 10**6) == "more than 0.000976562 GiB of files"
        assert disk_excess(str(tmp_path), [], 1 << 20, 10) is None


def test_shared_memory_counts_once_even_if_it_is_not_resident(tmp_path: Path) -> None:
    size = 40 << 20
    memory = mmap.mmap(-1, size)
    before = memory_in_use([os.getpid()])
    memory.write(bytes(size))
    memory.madvise(mmap.MADV_DONTNEED)
    assert memory_in_use([os.getpid()]) < before + size // 2
    fork = os.fork()
    if fork == 0:
        try:
            os.read(os.pipe()[0], 1)
        finally:
            os._exit(0)
    both = [os.getpid(), fork]
    try:
        assert disk_excess(str(tmp_path), both, 20 << 20, 10**6) is None  # of open files only
        assert disk_excess(str(tmp_path), both, 20 << 20, 10**6, both) == "more than 0.0195312 GiB of files"
        assert disk_excess(str(tmp_path), both, 60 << 20, 10**6, both) is None
        assert disk_in_use(str(tmp_path), both, both) in range(size, size + (1 << 20))
    finally:
        os.kill(fork, 9)
        os.waitpid(fork, 0)


@pytest.mark.parametrize("is_open", [True, False])
def test_deleted_file_that_is_mapped_counts_once(tmp_path: Path, is_open: bool) -> None:
    size = 2 << 20
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.write(file, os.urandom(size))
    os.unlink(tmp_path / "file")
    map_file = ctypes.CDLL(None).mmap  # Python's `mmap` would keep the file open
    map_file.restype = ctypes.c_void_p
    before = disk_in_use(str(tmp_path), [], [os.getpid()])
    address = map_file(None, ctypes.c_long(size), mmap.PROT_READ, mmap.MAP_SHARED, file, ctypes.c_long(0))
    if not is_open:
        os.close(file)
    try:
        own = [os.getpid()]
        assert disk_in_use(str(tmp_path), own, own) in range(size, size + (1 << 20))
        assert disk_in_use(str(tmp_path), own) >= size * is_open
        assert disk_in_use(str(tmp_path), [], own) >= before + size
    finally:
        assert ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_long(size)) == 0
        if is_open:
            os.close(file)
    assert disk_in_use(str(tmp_path), own, own) < size


def test_memory_counts_shared_pages_once() -> None:
    size = 64 << 20
    memory = mmap.mmap(-1, size)  # shared with forks
    memory.write(bytes(size))
    readable, writable = os.pipe()
    forks = []
    for _ in range(4):
        if (pid := os.fork()) == 0:
            try:
                sum(memory[each] for each in range(0, size, 4096))  # each page is resident here
                os.write(writable, b".")
                os.read(os.pipe()[0], 1)
            finally:
                os._exit(0)
        forks.append(pid)
    try:
        for _ in forks:
            assert os.read(readable, 1) == b"."
        assert exceeds_memory(forks, 32 << 20)
        if os.access(f"/proc/{forks[0]}/smaps_rollup", os.R_OK):
            # The parent has a fifth; 4 fifths are left, not 4 times all.
            resident = sum(psutil.Process(pid).memory_info().rss for pid in forks)
            assert memory_in_use(forks) < resident - 2 * size
            assert not exceeds_memory(forks, resident - 2 * size)
    finally:
        for pid in forks:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        for descriptor in (readable, writable):
            os.close(descriptor)


def test_memory_of_a_process_that_has_ended_is_nothing() -> None:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not exceeds_memory([pid], 0)
