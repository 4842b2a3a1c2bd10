"""Helpers of the config tests: errors of a load, configs of given sizes, hypothesis settings."""

from pathlib import Path

import hypothesis
import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import ClusterConfig, Config, GrpoConfig
from grpo_ray.errors import ConfigError


def examples(count: int) -> hypothesis.settings:
    """Return hypothesis settings for this number of examples, the same ones in each run."""
    return hypothesis.settings(max_examples=count, deadline=None, derandomize=True)


def config_error(*overrides: str, path: Path | None = None) -> str:
    """Return the message of the ConfigError that load_config raises."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def with_sizes(*, num_workers: int | tuple[int, int], **sizes: int | None) -> Config:
    """Return a config with this number of workers and these fields of `grpo`."""
    return Config(cluster=ClusterConfig(num_workers=num_workers), grpo=GrpoConfig(**sizes))  # type: ignore[arg-type]
