"""Where problems come from. `DATASETS` is the table of built-in ones; files and hub ids need no row in it.

A dataset is a list of shards. A shard is small, picklable, has `rows` (how many) and `read()`, which yields its
problems in a fixed order wherever it is called. `stream.py` makes Ray Datasets of them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from grpo_ray.config.schema import DataConfig
from grpo_ray.data.arithmetic import arithmetic, tasks
from grpo_ray.data.deepmath import deepmath, hub_shards
from grpo_ray.data.files import SUFFIXES, file_shards
from grpo_ray.data.gsm8k import gsm8k
from grpo_ray.data.problem import Problem


class Shard(Protocol):
    """A piece of a dataset, small enough to hold in memory."""

    @property
    def rows(self) -> int: ...

    def read(self) -> Iterator[Problem]: ...


@dataclass(frozen=True)
class ArithmeticShard:
    """The embedded problems of one split; they are made, not read."""

    split: str
    rows: int
    system_prompt: str | None = None

    def read(self) -> Iterator[Problem]:
        for problem in arithmetic(self.split):
            yield problem if self.system_prompt is None else problem.told(self.system_prompt)


def _arithmetic(split: str, columns: Mapping[str, str], system_prompt: str | None) -> Sequence[Shard]:
    return [ArithmeticShard(split, len(tasks(split)), system_prompt)]


DATASETS: dict[str, Callable[[str, Mapping[str, str], str | None], Sequence[Shard]]] = {
    "arithmetic": _arithmetic,
    "deepmath": deepmath,
    "gsm8k": gsm8k,
}
"""Name -> function(split, columns, system_prompt) that gives the shards. `split` is "train" or "heldout"."""


def open_dataset(name: str, split: str, config: DataConfig) -> Sequence[Shard]:
    """The shards of a built-in dataset, of files, or of a hub dataset, in that order of trial."""
    if name in DATASETS:
        return DATASETS[name](split, config.columns, config.system_prompt)
    looks_like_files = (
        name.endswith(SUFFIXES) or "://" in name or name.startswith((".", "/", "~")) or os.path.exists(name)
    )
    if not looks_like_files and name.count("/") == 1:
        return hub_shards(name, split, config.columns, config.system_prompt)
    return file_shards(name, config.columns, config.system_prompt)


def is_heldout(problem_id: str, share: float) -> bool:
    """Whether a problem belongs to the part cut off for measuring, by a hash of its content.

    The part does not depend on the order or number of files, so a problem never wanders into training.
    """
    return int(problem_id, 16) < share * 2**64
