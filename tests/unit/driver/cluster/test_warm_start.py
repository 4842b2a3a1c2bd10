"""Tests of the lists of modules that the warm servers import."""

import importlib.util

import pytest

from grpo_ray.driver.cluster.warm_start import HEAVY, LIGHT

OWN = [name for name in (*LIGHT.early, *LIGHT.late, *HEAVY.early, *HEAVY.late) if name.startswith("grpo_ray.")]


@pytest.mark.parametrize("name", OWN)
def test_preloaded_module_of_the_package_exists(name: str) -> None:
    # A server skips a module that it cannot import, so a renamed one would only make workers start slowly.
    assert importlib.util.find_spec(name) is not None
