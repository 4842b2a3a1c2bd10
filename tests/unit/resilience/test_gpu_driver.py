"""Tests of the check of a node's NVIDIA driver, from the texts that driver and torch leave on a machine."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_ray.resilience import gpu_driver
from grpo_ray.resilience.gpu_driver import (
    OLDEST_DRIVERS,
    SUPPORTED_CUDA,
    cuda_of_driver,
    cuda_of_torch,
    driver_issue,
    parse_driver_version,
    parse_torch_cuda,
)

PROPRIETARY = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""
OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)  Sun Jul 27 2025
GCC version:  gcc version 11.4.0
"""
TORCH_CUDA = "__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
TORCH_CPU = "__version__ = '2.13.0+cpu'\ndebug = False\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"


@pytest.mark.parametrize(("text", "version"), [(PROPRIETARY, "550.54.15"), (OPEN, "580.65.06"), ("", None)])
def test_parse_driver_version_reads_both_kernel_modules(text: str, version: str | None) -> None:
    assert parse_driver_version(text) == version


@pytest.mark.parametrize(("text", "cuda"), [(TORCH_CUDA, "13.0"), (TORCH_CPU, None), ("cuda = '12.8'\n", "12.8")])
def test_parse_torch_cuda_reads_builds(text: str, cuda: str | None) -> None:
    assert parse_torch_cuda(text) == cuda


def test_cuda_of_torch_is_that_of_the_installed_build() -> None:
    import torch

    assert cuda_of_torch() == torch.version.cuda


@pytest.mark.parametrize(
    ("torch_cuda", "driver_cuda"),
    [
        ("13.0", 13000),
        ("13.2", 13000),  # minor version compatibility
        ("12.8", 13000),  # a newer driver
    ],
)
def test_driver_issue_new_enough_driver_has_none(torch_cuda: str, driver_cuda: int) -> None:
    assert driver_issue(torch_cuda, driver_cuda, "580.65.06") is None


def test_driver_issue_old_driver_names_versions_and_remedy() -> None:
    assert driver_issue("13.0", 12040, "550.54.15") == (
        "the NVIDIA driver 550.54.15 supports CUDA 12.4 at most, and torch is built for CUDA 13.0, which needs driver "
        "580 or newer; update the driver"
    )
    assert "the NVIDIA driver supports CUDA 12.4" in str(driver_issue("13.0", 12040, None))


def test_driver_issue_without_cuda_or_driver_says_so() -> None:
    assert "the installed torch is not built for CUDA" in str(driver_issue(None, 13000, "580.65.06"))
    assert "no NVIDIA driver is loaded" in str(driver_issue("13.0", None, None))


def test_oldest_drivers_know_the_supported_cuda() -> None:
    assert OLDEST_DRIVERS[int(SUPPORTED_CUDA.partition(".")[0])] == 580


def test_cuda_of_driver_without_library_is_none() -> None:
    assert cuda_of_driver("libcuda-that-does-not-exist.so") is None
    assert cuda_of_driver("libc.so.6") is None  # a library without the function


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(("status", "expected"), [(0, 12040), (100, None)])  # 100: no device
def test_cuda_of_driver_asks_its_library(tmp_path: Path, status: int, expected: int | None) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(f"int cuDriverGetVersion(int *version) {{ *version = 12040; return {status}; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert cuda_of_driver(str(library)) == expected


@pytest.mark.skipif(cuda_of_driver() is not None, reason="this machine has an NVIDIA driver")
def test_script_without_driver_fails_with_one_line() -> None:
    """`make setup` runs the file alone, before the package is installed."""
    result = subprocess.run([sys.executable, "-I", gpu_driver.__file__], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("grpo-ray: no NVIDIA driver is loaded") and result.stderr.count("\n") == 1
