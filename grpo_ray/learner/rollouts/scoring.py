"""Scoring of completions by the run's rewards, with TRL's interface of rewards.

A function receives keyword arguments: (B,) lists as `prompts`, `completions`, `completion_ids` and each column of the
dataset; and `trainer_state`, `log_metric` and `log_extra`. It returns a number for each completion, or None where it
does not apply. NaN and infinite numbers count as None. Coroutine functions run concurrently.
"""

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerState
from trl.trainer.utils import is_async_callable

from grpo_ray.data.problem import SOURCE, reward_columns
from grpo_ray.errors import RewardError
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.rollout import Completions, Rows
from grpo_ray.models.plain_prompts import plain_text, uses_plain_prompts
from grpo_ray.rewards.completions import select_rows
from grpo_ray.rewards.environment import COLUMN as ENVIRONMENT_REWARD
from grpo_ray.rewards.infinite import warn_of_infinite
from grpo_ray.rewards.metrics import reward_metric
from grpo_ray.telemetry.profiler import PhaseProfiler
from grpo_ray.tools.template import assistant_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]

NOT_PASSED = ("prompt", "completion", "completion_ids")
"""Columns of a row that are not passed to functions, or only under another name."""


@dataclass(frozen=True)
class Reward:
    """Reward of a run."""

    name: str
    function: Any
    """Function or coroutine function."""


@dataclass(frozen=True)
class Scores:
    """Rewards of all workers' completions."""

    of_all: torch.Tensor
    """(W B, R), by rank (`DrawOrder.sort` brings them to the order of drawing); NaN where a reward does not apply."""
    own: torch.Tensor
    """(B, R), those of this worker."""
    metrics: Mapping[str, float]
    """Metrics that reward functions logged, over all workers."""


@dataclass
class Scorer:
    """Scorer of one worker's completions; collective."""

    rewards: Sequence[Reward]
    functions: Sequence[str]
    """`rewards.functions`."""
    tokenizer: "PreTrainedTokenizerBase"
    workers: Workers
    profiler: PhaseProfiler
    state: Callable[[], TrainerState]
    notify: Callable[[str], None]
    """Shows the user a line."""
    rewards_of: Callable[[str], Collection[str]] | None = None
    """Returns the entries of `rewards.functions` that apply to the problems of a source; None: all apply to all."""

    def __post_init__(self) -> None:
        self._dropped_columns: set[str] = set()

    @functools.cached_property
    def _runner(self) -> asyncio.Runner:
        """Event loop of all coroutines, kept between steps so that clients held by coroutines stay usable."""
        return asyncio.Runner()

    def score(self, rows: Rows, completions: Completions) -> Scores:
        """Compute the rewards of completions, and gather those of all workers.

        Raises:
            RewardError: a function did not return one value for each completion, or logged a metric under a name that
                is not its own.
        """
        with self.profiler.span("score"):
            logged: dict[str, list[float]] = defaultdict(list)
            rewards = self._compute(rows, completions, logged)
            of_all = self.workers.gather(rewards.flatten()).view(-1, len(self.rewards))
            if completions.conversations is not None:  # no reward may penalize a failed environment
                own = [
                    each.is_unscorable(self.rewards_of(row.get(SOURCE, "")) if self.rewards_of else self.functions)
                    for row, each in zip(rows, completions.conversations, strict=True)
                ]
                unscorable = [flag for flags in self.workers.gather_objects(own) for flag in flags]
                of_all[torch.tensor(unscorable, device=of_all.device)] = torch.nan
            # Rewards are gathered by rank, and all workers have equally many.
            mine = of_all.chunk(self.workers.count)[self.workers.rank].clone()
            return Scores(of_all, mine, self._average(logged))

    def _compute(self, rows: Rows, completions: Completions, logged: dict[str, list[float]]) -> torch.Tensor:
        """Return the rewards of this worker's completions, (B, R)."""
        is_plain = completions.conversations is None and uses_plain_prompts(self.tokenizer)
        prompts = [plain_text(row["prompt"]) if is_plain else row["prompt"] for row in rows]
        answers = self._answers(completions)
        arguments = self._arguments(rows, completions) | {
            "prompts": prompts,
            "completions": answers,
            "trainer_state": self.state(),
            "log_metric": lambda name, value: self._log_metric(logged, name, value),
            "log_extra": self._log_extra,
        }
        rewards = torch.full((len(rows), len(self.rewards)), torch.nan, device=self.workers.device)
        awaited: list[tuple[int, list[int], Coroutine[Any, Any, Any]]] = []
        for number, reward in enumerate(self.rewards):
            places = self._rows_of(number, rows)
            if not places:
                continue
            own = arguments if len(places) == len(rows) else select_rows(arguments, places)
            if is_async_callable(reward.function):
                awaited.append((number, places, reward.function(**own)))
            else:
                rewards[places, number] = self._column(reward, reward.function(**own), len(places))
        if awaited:
            returned = self._runner.run(_gather([each for *_, each in awaited]))
            for (number, places, _), values in zip(awaited, returned, strict=True):
                rewards[places, number] = self._column(self.rewards[number], values, len(places))
        if (unscored := rewards.isnan().all(dim=1)).any():
            first = rows[int(unscored.nonzero()[0])]
            logger.warning("no reward function applies to problem %s: its advantages are 0", first["id"])
        return rewards

    def _rows_of(self, reward: int, rows: Rows) -> list[int]:
        """Return the places of the rows to which a reward applies: in a mixture, those of some sources.

        Args:
            reward: its place in `functions`.
        """
        if self.rewards_of is None:
            return list(range(len(rows)))
        sources = {row.get(SOURCE, "") for row in rows}
        applies = {source: self.functions[reward] in self.rewards_of(source) for source in sources}
        return [place for place, row in enumerate(rows) if applies[row.get(SOURCE, "")]]

    def _answers(self, completions: Completions) -> list[Any]:
        """Return the messages of each completion, (B,); its text if prompts are plain text, as in TRL."""
        if completions.conversations is not None:
            return [each.messages for each in completions.conversations]
        messages = assistant_messages(self.tokenizer, completions.prompt_ids, completions.token_ids)
        return [message["content"] if uses_plain_prompts(self.tokenizer) else [message] for message in messages]

    def _arguments(self, rows: Rows, completions: Completions) -> dict[str, Any]:
        """Return the columns of the rows as lists; for multi-turn completions also the environments' rewards."""
        columns = [reward_columns(row) for row in rows]
        ids = completions.token_ids
        if completions.conversations is not None:
            ids = [each.own_ids for each in completions.conversations]
            for row, conversation in zip(columns, completions.conversations, strict=True):
                row.update({ENVIRONMENT_REWARD: conversation.reward, **conversation.columns})
        names = [name for name in columns[0] if name not in NOT_PASSED]
        return {name: [row[name] for row in columns] for name in names} | {"completion_ids": ids}

    def _column(self, reward: Reward, values: Sequence[float | None], rows: int) -> torch.Tensor:
        """Return the result of a reward function as a tensor, (B,) float32, NaN where it does not apply."""
        column = [torch.nan if value is None else value for value in values]
        if len(column) != rows:
            raise RewardError(
                f"the reward {reward.name} returned {len(column)} rewards for {rows} completions; return one for each, "
                "None where it does not apply"
            )
        rewards = torch.tensor(column, dtype=torch.float32)
        infinite = rewards.isinf()  # also numbers beyond float32
        warn_of_infinite(reward.name, int(infinite.sum()), rows)
        return rewards.masked_fill(infinite, torch.nan).to(self.workers.device)

    def _log_metric(self, logged: dict[str, list[float]], name: str, value: float) -> None:
        """Record a metric of a reward. Raises RewardError if the name is one of the run's own metrics."""
        name, value = reward_metric(name, value, [reward.name for reward in self.rewards])
        logged[name].append(value)

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Notify once per column that values of `log_extra` are not kept, since TRL's table of completions is off."""
        if column not in self._dropped_columns and self.workers.rank == 0:
            self._dropped_columns.add(column)
            self.notify(
                f"a reward calls log_extra({column!r}), whose values are not kept; record a number with log_metric"
            )

    def _average(self, logged: Mapping[str, list[float]]) -> dict[str, float]:
        """Return the mean of each logged metric over all workers' calls."""
        of_workers = self.workers.gather_objects(dict(logged))
        averages = {}
        for name in sorted({name for each in of_workers for name in each}):
            sums = torch.tensor([[sum(each.get(name, ())), len(each.get(name, ()))] for each in of_workers])
            total, count = sums.sum(dim=0).tolist()
            averages[name] = total / count
        return averages


async def _gather(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*coroutines)
