"""Places that a config names: built-in names, local paths, hub ids and URIs; and where held-out problems come from."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.heldout_keys import HELDOUT, heldout_keys

HUB_DATASETS = {"deepmath": "trl-lib/DeepMath-103K", "gsm8k": "openai/gsm8k"}
"""Built-in dataset on the hub -> its id there."""

BUILT_IN_DATASETS = ("arithmetic", "multiplication", "guessing", *HUB_DATASETS)
"""Names of built-in datasets (`data/registry.py`): generated ones, and those on the hub."""

EMBEDDED_POLICIES = ("tiny-arithmetic", "tiny-tools", "tiny-guess")
"""Values of `model.path` that name an embedded policy (`models/demonstrations.py`)."""

FILE_SUFFIXES = (".parquet", ".jsonl", ".csv")
"""Suffixes of files of problems."""

LOCAL_PREFIXES = (".", "/", "~")
"""Prefixes that only local paths have."""

CHECKPOINT_PREFIX = "checkpoint-"
"""Prefix of checkpoint names. A path whose last part has it is a checkpoint's, not a run's."""

AUTO = "auto"
"""Default of `data.heldout`: problems of the same kind as `data.train`."""
AUTO_SHARE = 0.05
"""Share of a dataset that is held out by default, unless this exceeds AUTO_PROBLEMS."""
AUTO_PROBLEMS = 500
"""Expected number of problems held out of a large dataset by default. Their 95 % interval is at most +-4.4 points."""
SHARE_OF_NULL = 0.005
"""Default of `data.heldout_share` with `data.heldout=null`."""


@dataclass(frozen=True)
class HeldoutSource:
    """Place that the problems of a held-out set come from."""

    dataset: str
    """Dataset, in the form of `data.train`."""
    is_part_of_training: bool
    """True if they are a part of `data.train` that is not trained on; False for a dataset, or a split, of their own."""
    reason: str
    """Setting that selects this dataset, and how, for messages."""


def names_files(dataset: str) -> bool:
    """Return True if the name of a dataset that is not built in refers to files (path, folder, glob or URI).

    Any other name is a hub id.
    """
    return (
        dataset.endswith(FILE_SUFFIXES)
        or "://" in dataset
        or dataset.startswith(LOCAL_PREFIXES)
        or os.path.exists(dataset)
    )


def heldout_sources(train: str, heldout: str | Mapping[str, str] | None) -> dict[str, HeldoutSource]:
    """Return the source of the problems of each held-out set, by the set's key.

    Args:
        train: `data.train`.
        heldout: `data.heldout`.
    """
    if isinstance(heldout, Mapping):
        sets = zip(heldout_keys(heldout), heldout.items(), strict=True)
        return {key: HeldoutSource(dataset, False, f"data.heldout names it {name}") for key, (name, dataset) in sets}
    if heldout is None:
        return {HELDOUT: HeldoutSource(train, True, "data.heldout=null: a part of data.train")}
    if heldout != AUTO:
        return {HELDOUT: HeldoutSource(heldout, False, "data.heldout names it")}
    if train in BUILT_IN_DATASETS:
        return {HELDOUT: HeldoutSource(train, False, "data.heldout=auto: the held-out split of data.train")}
    return {HELDOUT: HeldoutSource(train, True, "data.heldout=auto: a part of data.train")}


def derived_heldout_share(heldout: Any, rows: int) -> float:
    """Return the share of the problems that is held out of `data.train` if `data.heldout_share` is null.

    Args:
        heldout: `data.heldout`.
        rows: rows of the dataset.
    """
    return min(AUTO_SHARE, AUTO_PROBLEMS / max(1, rows)) if heldout == AUTO else SHARE_OF_NULL
