"""Conversion of a config's local paths to absolute paths.

Workers have their own working folders, so they cannot resolve a path that is relative to the driver's.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grpo_ray.config.benchmarks import find_benchmark
from grpo_ray.config.heldout_keys import AUTO
from grpo_ray.config.reward_names import is_reward_model
from grpo_ray.config.sources import BUILT_IN_DATASETS, EMBEDDED_POLICIES, LOCAL_PREFIXES, names_files

if TYPE_CHECKING:
    from grpo_ray.config.schema import Config


def with_absolute_paths(config: "Config") -> dict[str, Any]:
    """Return section -> the section with absolute paths, for those sections of a config that have relative paths.

    Relative paths start from the driver's working folder, in which the command is run.
    """
    start, heldout, train = config.run.from_checkpoint, config.data.heldout, config.data.train
    if isinstance(train, str):
        train = absolute_dataset(train)
    else:
        train = {
            name: dataclasses.replace(
                source,
                path=absolute_dataset(source.path),
                rewards=source.rewards and tuple(map(absolute_reward, source.rewards)),
            )
            for name, source in train.items()
        }
    if isinstance(heldout, Mapping):
        heldout = {name: absolute_dataset(dataset) for name, dataset in heldout.items()}
    elif heldout not in (None, AUTO):
        heldout = absolute_dataset(heldout)
    sections = {
        "run": dataclasses.replace(
            config.run,
            storage_path=absolute_folder(config.run.storage_path),
            from_checkpoint=start and absolute_folder(start),
        ),
        "model": dataclasses.replace(
            config.model,
            path=config.model.path if config.model.path in EMBEDDED_POLICIES else absolute_model(config.model.path),
        ),
        "data": dataclasses.replace(config.data, train=train, heldout=heldout),
        "rewards": dataclasses.replace(
            config.rewards,
            functions=tuple(absolute_reward(name) for name in config.rewards.functions),
            settings={absolute_reward(name): settings for name, settings in config.rewards.settings.items()},
        ),
    }
    return {name: section for name, section in sections.items() if section != getattr(config, name)}


def absolute_folder(path: str) -> str:
    """Return a folder's absolute path; a URI stays as it is."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def absolute_model(name: str) -> str:
    """Return the absolute path of a model's folder; a hub id or URI stays as it is.

    An existing folder is preferred to a hub id of the same form, as in transformers.
    """
    is_folder = name.startswith(LOCAL_PREFIXES) or os.path.isdir(name)
    return absolute_folder(name) if is_folder else name


def absolute_reward(name: str) -> str:
    """Return an entry of `rewards.functions`, with the absolute path of a reward model's folder."""
    return absolute_model(name) if is_reward_model(name) else name


def absolute_dataset(name: str) -> str:
    """Return the absolute path of files of problems; the name of another dataset, or a URI, stays as it is."""
    if find_benchmark(name):
        benchmark, equals, path = name.partition("=")
        return f"{benchmark}={absolute_folder(path)}" if equals else name
    return absolute_folder(name) if name not in BUILT_IN_DATASETS and names_files(name) else name
