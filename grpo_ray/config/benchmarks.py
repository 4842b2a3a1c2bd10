"""Benchmarks that `grpo-ray eval --suite` and `data.heldout` name: where they are, and how completions are scored.

A benchmark is named as NAME, or as NAME=PATH if its files are elsewhere. `data/benchmarks.py` converts its rows to
problems.
"""

from dataclasses import dataclass

from grpo_ray.config.similar_names import suggestion
from grpo_ray.errors import ConfigError

SOURCE_PREFIX = "benchmark:"
"""Start of the `Problem.source` of a benchmark's problems; no source of a mixture has such a name."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark on the hub."""

    name: str
    path: str
    """URI of its files, which may be a glob pattern."""
    score: str
    """Score of a completion: a built-in value of `heldout.score`."""

    @property
    def source(self) -> str:
        """`Problem.source` of its problems."""
        return SOURCE_PREFIX + self.name


_HUB = "hf://datasets"

BENCHMARKS = {
    each.name: each
    for each in (
        Benchmark("math500", f"{_HUB}/HuggingFaceH4/MATH-500/test.jsonl", "correctness"),
        Benchmark("aime24", f"{_HUB}/HuggingFaceH4/aime_2024/data/train-*.parquet", "correctness"),
        Benchmark("aime25", f"{_HUB}/math-ai/aime25/test.jsonl", "correctness"),
        Benchmark("amc", f"{_HUB}/AI-MO/aimo-validation-amc/data/train-*.parquet", "correctness"),
        Benchmark(
            "olympiadbench",
            f"{_HUB}/Hothan/OlympiadBench/OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet",
            "correctness",
        ),
        Benchmark("gpqa", f"{_HUB}/Idavidrein/gpqa/gpqa_diamond.csv", "choice"),
        Benchmark("humaneval", f"{_HUB}/openai/openai_humaneval/openai_humaneval/test-*.parquet", "code_tests"),
        Benchmark("mbpp", f"{_HUB}/google-research-datasets/mbpp/full/test-*.parquet", "code_tests"),
        Benchmark("livecodebench", f"{_HUB}/livecodebench/code_generation_lite/test6.jsonl", "code_tests"),
    )
}
"""Name -> benchmark."""


def find_benchmark(dataset: str) -> tuple[Benchmark, str] | None:
    """Return the benchmark that a dataset names, and the path of its files; None for another dataset."""
    name, _, path = dataset.partition("=")
    benchmark = BENCHMARKS.get(name)
    return None if benchmark is None else (benchmark, path or benchmark.path)


def parse_suite(words: str) -> dict[str, str]:
    """Parse a value of `--suite`, a comma-separated list of NAME[=PATH].

    Returns:
        Name of each benchmark -> its entry, as a value of `data.heldout`.

    Raises:
        ConfigError: there is no such benchmark, or it is named twice.
    """
    sets: dict[str, str] = {}
    for word in words.split(","):
        name = word.partition("=")[0]
        if name not in BENCHMARKS:
            raise ConfigError(
                f"--suite: there is no benchmark {name!r}, but {', '.join(BENCHMARKS)}{suggestion(name, BENCHMARKS)}"
            )
        if name in sets:
            raise ConfigError(f"--suite names {name} twice")
        sets[name] = word
    return sets


def benchmark_score(source: str) -> str | None:
    """Return the score of completions of a benchmark's problems; None for another `Problem.source`."""
    benchmark = BENCHMARKS.get(source.removeprefix(SOURCE_PREFIX)) if source.startswith(SOURCE_PREFIX) else None
    return None if benchmark is None else benchmark.score
