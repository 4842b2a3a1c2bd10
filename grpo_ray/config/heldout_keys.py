"""Keys of the held-out sets: the prefixes of their metrics.

The key is "heldout" if `data.heldout` names one dataset, and "heldout/<name>" for each set of a mapping, and for each
source of a mixture whose problems are held out. The primary set ranks checkpoints; its metrics are also reported under
"heldout", so that runs with one and with several sets can be compared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

AUTO = "auto"
"""Default of `data.heldout`: problems of the same kind as `data.train`."""

HELDOUT = "heldout"
"""Key of the only held-out set, and prefix of the primary set's metrics."""


def heldout_keys(heldout: Any, train: Any = "") -> list[str]:
    """Return the keys of the held-out sets that a value of `data.heldout` names, in its order.

    Args:
        train: value of `data.train`, whose sources have a set each if `heldout` is null or "auto".
    """
    sets = train if heldout in (None, AUTO) else heldout
    return [f"{HELDOUT}/{name}" for name in sets] if isinstance(sets, Mapping) else [HELDOUT]


def heldout_label(key: str) -> str:
    """Return the name of a held-out set; "" for the only one."""
    return key.removeprefix(HELDOUT).removeprefix("/")


def split_name(key: str) -> str:
    """Return the name by which messages refer to a held-out set."""
    return f"held-out {heldout_label(key)}".strip()


def training_name(source: str) -> str:
    """Return the name by which messages refer to the training problems of a source; "" for a single dataset."""
    return f"training {source}".strip()


def ranking_metric(best_metric: str, keys: Sequence[str]) -> str:
    """Return the metric that checkpoints are ranked by: `run.best_metric`, with the primary set in place of "heldout".

    Args:
        keys: keys of the held-out sets; the first is the primary one unless `best_metric` names another.
    """
    prefix, _, measure = best_metric.rpartition("/")
    return f"{keys[0]}/{measure}" if prefix == HELDOUT else best_metric


def primary_key(best_metric: str, keys: Sequence[str]) -> str:
    """Return the key of the primary held-out set: the one that `run.best_metric` names, else the first."""
    prefix = ranking_metric(best_metric, keys).rpartition("/")[0]
    return prefix if prefix in keys else keys[0]
