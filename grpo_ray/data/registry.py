"""Datasets by name: the table of built-in ones (`DATASETS`), files, and Hugging Face hub ids.

A dataset is a list of shards. A shard is small and picklable, has `num_rows`, and its `read()` yields its problems
in the same order on every machine. `stream.py` builds Ray Datasets from shards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from grpo_ray.config.benchmarks import BENCHMARKS, find_benchmark
from grpo_ray.config.heldout_keys import heldout_label
from grpo_ray.config.schema import Config, DataConfig
from grpo_ray.config.similar_names import suggestion
from grpo_ray.config.sources import TrainingSource, names_files
from grpo_ray.data.arithmetic import arithmetic_problems
from grpo_ray.data.benchmarks import benchmark_shards, not_trained_on
from grpo_ray.data.deepmath import deepmath_shards, hub_shards
from grpo_ray.data.files import FileShard, file_shards, find_files
from grpo_ray.data.gsm8k import gsm8k_shards
from grpo_ray.data.guessing import guessing_problems
from grpo_ray.data.multiplication import multiplication_problems
from grpo_ray.data.problem import Problem
from grpo_ray.errors import DataError
from grpo_ray.storage.retry import retry_transient


class Shard(Protocol):
    """Part of a dataset whose problems fit in memory."""

    @property
    def num_rows(self) -> int: ...

    def read(self) -> Iterator[Problem]: ...


EMBEDDED: dict[str, Callable[[str], Iterator[Problem]]] = {
    "arithmetic": arithmetic_problems,
    "guessing": guessing_problems,
    "multiplication": multiplication_problems,
}
"""Name of an embedded dataset -> function that yields the problems of a split in their fixed order."""


@dataclass(frozen=True)
class EmbeddedShard:
    """The generated problems of one split of an embedded dataset."""

    name: str
    split: str
    num_rows: int
    system_prompt: str | None = None

    def read(self) -> Iterator[Problem]:
        """Yield the problems in their fixed order."""
        for problem in EMBEDDED[self.name](self.split):
            yield problem if self.system_prompt is None else problem.with_system_prompt(self.system_prompt)


def embedded_shards(name: str, split: str, columns: Mapping[str, str], system_prompt: str | None) -> Sequence[Shard]:
    """Return the only shard of a split of an embedded dataset; `columns` has no effect."""
    return [EmbeddedShard(name, split, sum(1 for _ in EMBEDDED[name](split)), system_prompt)]


DATASETS: dict[str, Callable[[str, Mapping[str, str], str | None], Sequence[Shard]]] = {
    **{name: partial(embedded_shards, name) for name in EMBEDDED},
    "deepmath": deepmath_shards,
    "gsm8k": gsm8k_shards,
}
"""Name -> function(split, columns, system_prompt) that returns the shards; `split` is "train" or "heldout". The names
are also in `BUILT_IN_DATASETS` (`config/sources.py`)."""


@dataclass(frozen=True)
class SourceShard:
    """Shard of a source of a mixture."""

    shard: Shard
    source: str
    environment: str | None

    @property
    def num_rows(self) -> int:
        return self.shard.num_rows

    def read(self) -> Iterator[Problem]:
        """Yield the problems of the shard as those of the source."""
        return (problem.of_source(self.source, self.environment) for problem in self.shard.read())


def open_dataset(
    name: str,
    split: str,
    config: DataConfig | TrainingSource,
    needs_solutions: bool = True,
    columns_decide: bool = False,
    has_tests: bool = False,
) -> Sequence[Shard]:
    """Return the shards of a dataset: a benchmark, a built-in one, files, or a hub dataset, tried in this order.

    Args:
        name: key of `DATASETS`, path, folder, glob, URI, or hub id (`owner/name`).
        split: "train" or "heldout".
        config: section `data`, or a source of it, for the names of the columns and the system prompt.
        needs_solutions: False if rows may lack a solution, because no reward reads it.
        columns_decide: True if the columns determine the task (`parse_problem`).
        has_tests: True if the column `tests` holds tests of programs, which are checked.

    Raises:
        DataError: there are no such files, or they cannot be read.
    """
    shards = _open_dataset(name, split, config)
    if has_tests:
        shards = [replace(each, has_tests=True) if isinstance(each, FileShard) else each for each in shards]
    return [
        replace(each, needs_solution=needs_solutions, columns_decide=columns_decide)
        if isinstance(each, FileShard)
        else each
        for each in shards
    ]


def as_demonstrations(shards: Sequence[Shard], dataset: str) -> list[Shard]:
    """Return the shards of a dataset for supervised fine-tuning.

    Raises:
        DataError: the dataset is built in, and has no demonstrations.
    """
    if not all(isinstance(each, FileShard) for each in shards):
        raise DataError(
            f"data.train={dataset} has no demonstrations, which run.kind=sft trains on; name files, or a dataset of "
            "the hub, with the columns prompt and completion"
        )
    return [replace(each, is_demonstration=True) for each in shards if isinstance(each, FileShard)]


def beside_demonstrations(shards: Sequence[Shard]) -> list[Shard]:
    """Return the shards of held-out problems of supervised fine-tuning: a completion in a row is no part of it."""
    return [replace(each, ignores_completion=True) if isinstance(each, FileShard) else each for each in shards]


def _open_dataset(name: str, split: str, config: DataConfig | TrainingSource) -> Sequence[Shard]:
    if found := find_benchmark(name):
        return benchmark_shards(*found, split, config.system_prompt)
    if name in DATASETS:
        return DATASETS[name](split, config.columns, config.system_prompt)
    if _is_hub_id(name):
        return hub_shards(name, split, config.columns, config.system_prompt)
    _require_known_name(name)
    return file_shards(name, config.columns, config.system_prompt)


def _is_hub_id(name: str) -> bool:
    """Return True if the name of a dataset that is not built in is an id of the hub."""
    return not names_files(name) and name.count("/") == 1


def _require_known_name(name: str) -> None:
    """Raise DataError for a name that can only be a misspelled one of a built-in dataset or benchmark, or is empty."""
    if names_files(name) or "/" in name or any(each in name for each in "*?["):
        return
    raise DataError(
        f"{name!r} is no dataset, and there is no such file or folder; built-in datasets are {', '.join(DATASETS)}"
        f"{suggestion(name, [*DATASETS, *BENCHMARKS])}"
    )


def _local_path(name: str, is_trained_on: bool) -> str | None:
    """Return the path of a dataset's files on local disk; None for a dataset that is elsewhere, or is generated.

    Raises:
        DataError: there is no dataset of this name, or it is a benchmark and is trained on.
    """
    if found := find_benchmark(name):
        benchmark, path = found
        if is_trained_on:
            raise not_trained_on(benchmark)
    elif name in DATASETS or _is_hub_id(name):
        return None
    else:
        _require_known_name(name)
        path = name
    return None if "://" in path else path


def require_local_files(config: Config) -> None:
    """Find the files of all datasets of a config that are on local disk, without reading them.

    Raises:
        DataError: a dataset has none, or is a benchmark and is trained on; the message names the field.
    """
    training = {name: source.dataset for name, source in config.training_sources.items()}
    heldout = {
        heldout_label(key): each.dataset for key, each in config.heldout_sources.items() if not each.is_part_of_training
    }
    for field, datasets in (("data.train", training), ("data.heldout", heldout)):
        for key, name in datasets.items():
            try:
                if (path := _local_path(name, is_trained_on=field == "data.train")) is not None:
                    retry_transient(partial(find_files, path))
            except DataError as error:
                raise DataError(f"{field}.{key}: {error}" if key else f"{field}: {error}") from None


def is_heldout(question_id: str, share: float) -> bool:
    """Return True if a problem belongs to the held-out share of its dataset, decided by a hash of prompt and solution.

    The result is independent of the order and number of files and of the other problems, so while the share stays the
    same, no problem moves between the held-out and the training part.

    Args:
        question_id: `Problem.question_id`, 16 hex digits.
        share: held-out share of all problems, 0 to 1.
    """
    return int(question_id, 16) < share * 2**64
