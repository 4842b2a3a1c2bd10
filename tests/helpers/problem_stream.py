"""Trainers on a stream of problems: our learner with dynamic sampling, and unmodified TRL on given problems."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stock_trl import EQUAL, GROUP, LONGEST, PARTLY, SIGNAL, UNSCORABLE, Record, ScriptedEngine, train_steps
from trl import GRPOTrainer

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.learner.hooks import LearnerHooks
from grpo_ray.learner.learner import Learner
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.learner.rollouts.rollout import Rollout, Rows
from grpo_ray.learner.schedule import BatchSchedule
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.tokens import LossTokens

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


def stream_batches(trainer: GRPOTrainer, problems: Sequence[int], pays: Sequence[Any]) -> GroupBatches:
    """Make a worker's batches from the numbers of the problems of all steps, over all workers.

    The workers' parts of each optimizer step follow each other, as `data/split.py` has Ray Data divide the stream.
    """
    workers, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    schedule = BatchSchedule.of(trainer.args)
    share = trainer.args.per_device_train_batch_size * schedule.per_part // GROUP  # of an optimizer step
    mine = [n for at, n in enumerate(problems) if at // share % workers == rank]
    stream = [
        Problem(
            id=f"{n:016x}",
            prompt=[{"role": "user", "content": "7 + 5 " * (1 + n % 5)}],
            solution="12",
            columns={"pays": pays[n]},
        )
        for n in mine
    ]
    return GroupBatches([(each, 0) for each in stream], share * schedule.parts, GROUP, schedule.reads)


def numbers_of(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the numbers of the problems in rows of whole groups."""
    return [int(row["id"], 16) for row in rows[::GROUP]]


class StreamTrainer(GRPOTrainer):
    """Unmodified TRL on our problems."""

    numbers: Sequence[int] = ()
    """Numbers of the problems of all steps, over all workers."""
    pays: Sequence[Any] = STREAM
    engine_class = EngineByProblem

    def get_train_dataloader(self) -> GroupBatches:
        return stream_batches(self, self.numbers, self.pays)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        self.vllm_generation.rows = inputs
        return super()._generate_and_score_completions(inputs)


class DynamicSamplingLearner(Learner):
    """Our learner with at most two more rounds in a step; records the problems of each step."""

    overrides: Sequence[str] = ("grpo.dynamic_sampling=2",)
    """Settings of the config."""
    numbers: Sequence[int] = ()
    """Numbers of the problems of all steps, over all workers."""
    pays: Sequence[Any] = STREAM
    engine_class = EngineByProblem

    def __init__(self, **trl_trainer: Any) -> None:
        self.drawn: list[list[list[int]]] = []
        """Problems of each step and round that this worker drew."""
        self.trained: list[list[list[bool]]] = []
        """Flags of the drawn problems: True if the step was taken on the problem."""
        self.trained_on: list[list[int]] = []
        """Problems of each step that this worker trained on."""
        self.groups: list[GroupRecord] = []
        """All groups that this worker drew."""
        self.tokens: list[LossTokens] = []
        """Tokens of samples, of any worker's groups, that this worker read."""
        super().__init__(
            load_config(None, list(self.overrides)),
            problems=(),
            make_engine=lambda learner: EngineByProblem(0, LONGEST),  # type: ignore[arg-type, return-value]
            make_hooks=lambda learner: LearnerHooks(record_groups=self._record_step, record_tokens=self.tokens.extend),
            **trl_trainer,
        )
        roll_out = self.collector.roll_out

        def roll_out_by_problem(rows: Rows) -> Rollout:
            self.engine.rows = rows
            self.last_round = roll_out(rows)
            return self.last_round

        self.collector.roll_out = roll_out_by_problem  # type: ignore[method-assign]

    def get_train_dataloader(self) -> Any:
        return self.collector.attach(stream_batches(self, self.numbers, self.pays))

    def _record_step(self, groups: list[GroupRecord]) -> None:
        self.groups += groups
        assert self.rollout is not None
        share = len(self.rollout.rows) // GROUP
        rounds = [groups[first : first + share] for first in range(0, len(groups), share)]
        self.drawn.append([[int(group.problem, 16) for group in each] for each in rounds])
        self.trained.append([[group.trained for group in each] for each in rounds])
        self.trained_on.append(numbers_of(self.rollout.rows))


class StreamLearner(DynamicSamplingLearner):
    """Our learner without dynamic sampling."""

    overrides: Sequence[str] = ()


def train_on_stream(
    kind: type[GRPOTrainer], folder: Path, problems: Sequence[int], **settings: Any
) -> tuple[Record, Any]:
    """Train on a stream of problems in steps of four. `pays` and `overrides` replace the trainer's attributes."""
    own: dict[str, Any] = {name: settings.pop(name) for name in ("pays", "overrides") if name in settings}
    sizes: dict[str, Any] = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 3}
    made = type(kind.__name__, (kind,), {"numbers": problems, **own})
    return train_steps(made, folder, **(sizes | settings))


def whole_stream() -> range:
    """Return the numbers of all problems."""
    return range(len(STREAM))


def flat(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Concatenate lists."""
    return [each for part in lists for each in part]
