"""Places that a config names: built-in names, local paths, hub ids and URIs; local paths are made absolute.

Workers have working folders of their own, so a path that is relative to the driver's means nothing to them.
"""

import os

BUILT_IN_DATASETS = ("arithmetic", "multiplication", "guessing", "deepmath", "gsm8k")
"""Datasets with a name (`data/registry.py`)."""

FILE_SUFFIXES = (".parquet", ".jsonl", ".csv")
"""Suffixes of files of problems."""

LOCAL_PREFIXES = (".", "/", "~")
"""Beginnings of what can only be a local path."""


def absolute_folder(path: str) -> str:
    """Return a folder's absolute path; a URI stays as it is."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def absolute_model(name: str) -> str:
    """Return the absolute path of a model's folder; a hub id or URI stays as it is.

    As in transformers, a folder that exists is preferred to the hub id that looks like it.
    """
    is_folder = name.startswith(LOCAL_PREFIXES) or os.path.isdir(name)
    return absolute_folder(name) if is_folder else name


def absolute_reward(name: str) -> str:
    """Return an entry of `rewards.functions`, with the absolute path of a reward model's folder."""
    return absolute_model(name) if is_reward_model(name) else name


def is_reward_model(name: str) -> bool:
    """Return True if a name in `rewards.functions` is that of a model: a folder or a hub id, with a slash."""
    return "/" in name and ":" not in name


def absolute_dataset(name: str) -> str:
    """Return the absolute path of files of problems; the name of another dataset, or a URI, stays as it is."""
    return absolute_folder(name) if name not in BUILT_IN_DATASETS and names_files(name) else name


def names_files(dataset: str) -> bool:
    """Return True if a dataset that is not built in is given by files (path, folder, glob or URI), not by a hub id."""
    return (
        dataset.endswith(FILE_SUFFIXES)
        or "://" in dataset
        or dataset.startswith(LOCAL_PREFIXES)
        or os.path.exists(dataset)
    )
