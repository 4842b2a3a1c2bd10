"""Check of a node's NVIDIA driver: reports one that is too old before anything is installed or a worker starts.

Also a script for `make setup`, which runs it before the package is installed: it imports nothing outside the standard
library, and exits with status 1 if the driver is too old.
"""

import ctypes
import importlib.util
import re
import sys
from pathlib import Path

SUPPORTED_CUDA = "13.0"
"""CUDA version of the torch that the supported vLLM releases pin."""
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> oldest NVIDIA driver on Linux that runs programs built for it (release notes of the CUDA
Toolkit, "Minor version compatibility")."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""File with the version of the loaded driver; it does not exist under WSL."""


def driver_issue(torch_cuda: str | None, driver_cuda: int | None, driver: str | None) -> str | None:
    """Return the reason why this node's driver cannot run the installed torch, with the remedy; None if it can.

    Args:
        torch_cuda: CUDA version that torch was built for, such as "13.0"; None if built without CUDA.
        driver_cuda: newest CUDA version that the driver supports, such as 12040 for 12.4; None without a driver.
        driver: version of the driver, such as "550.54.15"; None if it is unknown.
    """
    if torch_cuda is None:
        return "the installed torch is not built for CUDA; install grpo-ray[gpu], or set cluster.use_gpu=false"
    if driver_cuda is None:
        return (
            "no NVIDIA driver is loaded (libcuda.so.1 cannot be used); install one, or start the container with GPUs "
            "(docker run --gpus all)"
        )
    needed = int(torch_cuda.partition(".")[0])
    if driver_cuda // 1000 >= needed:
        return None
    oldest = f"driver {OLDEST_DRIVERS[needed]} or newer" if needed in OLDEST_DRIVERS else "a newer driver"
    return (
        f"the NVIDIA driver{' ' + driver if driver else ''} supports CUDA {driver_cuda // 1000}."
        f"{driver_cuda % 1000 // 10} at most, and torch is built for CUDA {torch_cuda}, which needs {oldest}; update "
        "the driver"
    )


def driver_issue_here() -> str | None:
    """Return the result of `driver_issue` for this node and the installed torch."""
    return driver_issue(cuda_of_torch(), cuda_of_driver(), driver_version())


def parse_driver_version(text: str) -> str | None:
    """Return the driver's version in the text of `DRIVER_FILE`; None if there is none."""
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    return found[1] if found else None


def driver_version() -> str | None:
    """Return the version of the loaded NVIDIA driver; None if it cannot be read."""
    try:
        return parse_driver_version(DRIVER_FILE.read_text())
    except OSError:
        return None


def cuda_of_driver(library: str = "libcuda.so.1") -> int | None:
    """Return the newest CUDA version that the driver supports, 1000 x major + 10 x minor; None without a driver.

    The result comes from the driver's library, not from its version: with NVIDIA's package for forward compatibility
    (cuda-compat) an older driver runs newer CUDA. No CUDA context is created, so no memory of a GPU is taken.
    """
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # no such library, or another library of this name
        return None
    return None if failed else version.value


def cuda_of_torch() -> str | None:
    """Return the CUDA version that the installed torch is built for, without importing it; None without CUDA."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    return parse_torch_cuda((folder / "version.py").read_text()) if folder else None


def parse_torch_cuda(text: str) -> str | None:
    """Return the CUDA version in the text of torch's `version.py`; None if it has none."""
    found = re.search(r"""^cuda\b[^=]*=\s*['"](\d+(?:\.\d+)*)['"]""", text, re.MULTILINE)
    return found[1] if found else None


def main() -> int:
    """Print why this machine's driver cannot run the supported stack, if it cannot, and return the exit status."""
    issue = driver_issue(SUPPORTED_CUDA, cuda_of_driver(), driver_version())
    if issue:
        print(f"grpo-ray: {issue}", file=sys.stderr)
    return 1 if issue else 0


if __name__ == "__main__":
    sys.exit(main())
