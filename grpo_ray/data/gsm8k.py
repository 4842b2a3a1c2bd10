"""GSM8K: grade-school math word problems (arXiv 2110.14168).

`openai/gsm8k` has 7,473 training and 1,319 held-out problems. Its rows have a `question` and an `answer`, which is a
worked solution that ends with `####` and a number. Only that number can be verified, so it becomes the solution, as
LaTeX: `... #### 1,200` becomes `$1200$`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from grpo_ray.config.sources import HUB_DATASETS, HUB_SPLITS
from grpo_ray.data.files import FileShard, file_shards
from grpo_ray.data.problem import Problem, problem_id
from grpo_ray.errors import DataError

FOLDER = f"hf://datasets/{HUB_DATASETS['gsm8k']}/main"
"""Folder of its parquet files. The hub's other folder, `socratic`, has the same problems, worked in sub-questions."""

COLUMNS = {"prompt": "question", "solution": "answer"}


@dataclass(frozen=True)
class Gsm8kShard:
    """Rows of one GSM8K file; each worked answer is reduced to its number."""

    file: FileShard
    system_prompt: str | None = None

    @property
    def num_rows(self) -> int:
        return self.file.num_rows

    def read(self) -> Iterator[Problem]:
        """Yield the shard's problems in the file's order.

        Raises:
            DataError: a row has no number; the message names file and row.
        """
        for row, problem in enumerate(self.file.read(), start=self.file.first_row):
            solution = final_number(problem.solution, where=f"{self.file.path}, row {row}")
            ids = [problem_id(problem.prompt, solution, columns) for columns in (problem.columns, None)]
            short = replace(problem, solution=solution, id=ids[0], question_id=ids[1])
            yield short if self.system_prompt is None else short.with_system_prompt(self.system_prompt)


def gsm8k_shards(
    split: str, columns: Mapping[str, str] | None = None, system_prompt: str | None = None
) -> list[Gsm8kShard]:
    """Return the shards of GSM8K's training or held-out split."""
    files = file_shards(f"{FOLDER}/{HUB_SPLITS[split]}-*.parquet", COLUMNS | dict(columns or {}))
    return [Gsm8kShard(file, system_prompt) for file in files]


def final_number(answer: str, *, where: str) -> str:
    """Return the number after the last `####` of a worked answer, as LaTeX and without thousands separators."""
    _, mark, number = answer.rpartition("####")
    number = number.strip().replace(",", "")
    if not mark or not number:
        raise DataError(f"{where}: 'answer' must end with #### and the number, not {answer[-60:]!r}")
    return f"${number}$"
