"""Trainers on a stream of problems: ours, whose steps are topped up, and unmodified TRL on a given list of problems."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stock_trl import EQUAL, GROUP, LONGEST, PARTLY, SIGNAL, UNSCORABLE, Record, ScriptedEngine, train_steps
from trl import GRPOTrainer

from grpo_ray.data.problem import Problem
from grpo_ray.training.dynamic_sampling import CompletionRows, fill_step
from grpo_ray.training.exact_savings import ExactSavings
from grpo_ray.training.problem_loader import GroupBatches

STREAM = (
    SIGNAL, EQUAL, EQUAL, UNSCORABLE,  # one has signal
    PARTLY, EQUAL, SIGNAL, SIGNAL,  # three more: enough
    EQUAL, (0.0,) * 4, EQUAL, UNSCORABLE,
    EQUAL, SIGNAL, EQUAL, EQUAL,
    PARTLY, EQUAL, EQUAL, EQUAL,  # two in three rounds
    SIGNAL, PARTLY, (0.0, 1.0, None, 0.0), SIGNAL,
)  # fmt: skip
"""Rewards of the problems of a stream, in steps of four. With at most two more rounds these are three steps."""
CHOSEN = ((0, 4, 6, 7), (8, 9, 13, 16), (20, 21, 22, 23))
"""The problems that these steps are taken on, worked by hand. The second is filled up with the first two drawn."""


class EngineByProblem(ScriptedEngine):
    """Completions that depend on their problem and their index alone, like the real engine's."""

    rows: Sequence[dict[str, Any]] = ()

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        completions, logprobs = [], []
        for prompt, row in zip(prompts, self.rows, strict=True):
            self.rng = random.Random(f"{row['id']}/{row['index']}")
            _, made, sampled, _ = super().generate([prompt])
            completions += made
            logprobs += sampled
        return prompts, completions, logprobs, None


class StreamTrainer(GRPOTrainer):
    """Unmodified TRL on our problems."""

    problems: Sequence[int] = ()
    """Numbers of the problems of all steps, over all workers."""
    pays: Sequence[Any] = STREAM

    def get_train_dataloader(self) -> Any:
        workers, rank = self.accelerator.num_processes, self.accelerator.process_index
        step = self.args.per_device_train_batch_size * self.args.steps_per_generation * workers // GROUP
        share = step // workers
        mine = [n for at, n in enumerate(self.problems) if at // share % workers == rank]
        stream = [
            Problem(
                id=f"{n:016x}",
                prompt=[{"role": "user", "content": "7 + 5 " * (1 + n % 5)}],
                solution="12",
                columns={"pays": self.pays[n]},
            )
            for n in mine
        ]
        repeats = self.args.steps_per_generation * self.num_iterations
        self.batches = GroupBatches([(each, 0) for each in stream], share, GROUP, repeats)
        return self.batches

    def train(self) -> Any:
        self.vllm_generation = EngineByProblem(0, LONGEST)
        return super().train()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        self.vllm_generation.rows = inputs
        return super()._generate_and_score_completions(inputs)


class ToppedUpTrainer(ExactSavings, StreamTrainer):
    """Our trainer: the savings, and steps topped up with at most two more rounds."""

    rounds = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.trained_on: list[list[int]] = []
        self.drawn: list[list[list[int]]] = []
        self.kept: list[list[list[bool]]] = []
        super().__init__(*args, **kwargs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        own = rewards.chunk(self.accelerator.num_processes)[self.accelerator.process_index]
        self.part = {"rewards": own, "token_ids": completion_ids_list}
        return rewards

    def draw_round(self, inputs: list[dict[str, Any]]) -> CompletionRows:
        output = super()._generate_and_score_completions(inputs)
        self.drawn[-1].append([int(row["id"], 16) for row in inputs[::GROUP]])
        return CompletionRows(inputs=inputs, output=output, **self.part)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        self.drawn.append([])
        self.first = self.draw_round(inputs)
        step = fill_step(self, self.first, lambda: self.draw_round(self.batches.draw()), self.rounds)
        self.step = step.rows
        self.kept.append(step.kept)
        self.trained_on.append([int(row["id"], 16) for row in step.rows.inputs[::GROUP]])
        return step.rows.output


def train_on_stream(
    kind: type[StreamTrainer], folder: Path, problems: Sequence[int], **settings: Any
) -> tuple[Record, Any]:
    """Train on a stream of problems in steps of four. `pays` and `rounds` replace the trainer's attributes."""
    own = {name: settings.pop(name) for name in ("pays", "rounds") if name in settings}
    sizes = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 3}
    made = type(kind.__name__, (kind,), {"problems": problems, **own})
    return train_steps(made, folder, **(sizes | settings))


def whole_stream() -> range:
    """Return the numbers of all problems."""
    return range(len(STREAM))


def flat(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Concatenate lists."""
    return [each for part in lists for each in part]
