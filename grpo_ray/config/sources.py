"""Places that a config names: built-in names, local paths, hub ids and URIs; and where held-out problems come from."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from grpo_ray.config.heldout_keys import AUTO, HELDOUT, heldout_keys

if TYPE_CHECKING:
    from grpo_ray.config.schema import Config, DataConfig, SourceConfig

HUB_DATASETS = {"deepmath": "trl-lib/DeepMath-103K", "gsm8k": "openai/gsm8k"}
"""Built-in dataset on the hub -> its id there."""

HUB_SPLITS = {"train": "train", "heldout": "test"}
"""Our split -> prefix of the names of a hub dataset's files."""

BUILT_IN_DATASETS = ("arithmetic", "multiplication", "guessing", *HUB_DATASETS)
"""Names of built-in datasets (`data/registry.py`): generated ones, and those on the hub."""

EMBEDDED_POLICIES = ("tiny-arithmetic", "tiny-tools", "tiny-guess", "tiny-mixture")
"""Values of `model.path` that name an embedded policy (`models/demonstrations.py`)."""

FILE_SUFFIXES = (".parquet", ".jsonl", ".csv")
"""Suffixes of files of problems."""

LOCAL_PREFIXES = (".", "/", "~")
"""Prefixes that only local paths have."""

CHECKPOINT_PREFIX = "checkpoint-"
"""Prefix of checkpoint names. A path whose last part has it is a checkpoint's, not a run's."""

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


@dataclass(frozen=True, kw_only=True)
class TrainingSource:
    """One source of the training problems, with the defaults of the section `data` filled in."""

    name: str
    """Name in the mixture; "" for a single dataset."""
    dataset: str
    """Dataset, in the form of `data.train`."""
    share: Fraction
    """Share of the problems of the run, above 0, at most 1; all shares add up to 1."""
    rewards: tuple[str, ...] | None
    """Entries of `rewards.functions` that apply to its problems; None: all."""
    environment: str | None
    """Name of the environment of its problems; None: the column `environment` of a row, or none."""
    system_prompt: str | None
    columns: Mapping[str, str]
    """Our column name -> the file's."""
    limit: int | None
    """Largest number of its problems to use; None: all."""

    @property
    def label(self) -> str:
        """Name of its problems in messages."""
        return f"{self.name} ({self.dataset})" if self.name else self.dataset


def training_sources(data: "DataConfig") -> dict[str, TrainingSource]:
    """Return the sources of the training problems by name, sorted by name; a single dataset has the name ""."""
    defaults: dict[str, Any] = {"columns": data.columns, "system_prompt": data.system_prompt, "limit": data.limit}
    if isinstance(data.train, str):
        own = TrainingSource(name="", dataset=data.train, share=Fraction(1), rewards=None, environment=None, **defaults)
        return {"": own}
    # As written in the YAML: the float 0.1 itself is no tenth, and shares of 0.1 and 0.9 would not add up to 1.
    weights = {name: Fraction(str(source.weight)) for name, source in data.train.items()}
    return {
        name: TrainingSource(
            name=name,
            dataset=source.path,
            share=weights[name] / sum(weights.values()),
            rewards=source.rewards,
            environment=source.environment,
            **{
                field: default if (own := getattr(source, field)) is None else own
                for field, default in defaults.items()
            },
        )
        for name, source in sorted(data.train.items())
    }


def describe_training(config: "Config") -> str:
    """Return the training problems of a config in a few words: the dataset, or the names of a mixture's sources."""
    return str(shown_training(config.data.train))


def shown_training(train: Any) -> Any:
    """Return a value of `data.train` as it is shown: a mixture as the names of its sources, joined by "+"."""
    return " + ".join(map(str, train)) if isinstance(train, Mapping) else train


def train_paths(train: Any) -> list[str]:
    """Return the datasets that a value of `data.train` names; a value of another form names none."""
    if isinstance(train, Mapping):
        found = (
            each.get("path") if isinstance(each, Mapping) else getattr(each, "path", None) for each in train.values()
        )
        return [path for path in found if isinstance(path, str)]
    return [train] if isinstance(train, str) else []


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


def heldout_sources(
    train: "str | Mapping[str, SourceConfig]", heldout: str | Mapping[str, str] | None
) -> dict[str, HeldoutSource]:
    """Return the source of the problems of each held-out set, by the set's key.

    Args:
        train: `data.train`.
        heldout: `data.heldout`.
    """
    if isinstance(heldout, Mapping):
        sets = zip(heldout_keys(heldout), heldout.items(), strict=True)
        return {key: HeldoutSource(dataset, False, f"data.heldout names it {name}") for key, (name, dataset) in sets}
    if heldout not in (None, AUTO):
        return {HELDOUT: HeldoutSource(heldout, False, "data.heldout names it")}
    if isinstance(train, str):
        return {HELDOUT: _derived_source(train, heldout, "data.train")}
    return {
        f"{HELDOUT}/{name}": _derived_source(source.path, heldout, f"data.train.{name}")
        for name, source in train.items()
    }


def _derived_source(dataset: str, heldout: str | None, field: str) -> HeldoutSource:
    """Return the source of held-out problems that a training dataset determines.

    Args:
        heldout: `data.heldout`, null or "auto".
        field: field that names the training dataset.
    """
    value = "null" if heldout is None else heldout
    if heldout == AUTO and dataset in BUILT_IN_DATASETS:
        return HeldoutSource(dataset, False, f"data.heldout={value}: the held-out split of {field}")
    return HeldoutSource(dataset, True, f"data.heldout={value}: a part of {field}")


def derived_heldout_share(heldout: Any, rows: int) -> float:
    """Return the share of the problems that is held out of `data.train` if `data.heldout_share` is null.

    Args:
        heldout: `data.heldout`.
        rows: rows of the dataset.
    """
    return min(AUTO_SHARE, AUTO_PROBLEMS / max(1, rows)) if heldout == AUTO else SHARE_OF_NULL
