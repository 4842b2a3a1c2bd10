"""Samples of a step: the choice of the groups whose texts and tokens are recorded, and their tokens in the loss.

The column `SAMPLED_ROWS` of a batch marks their completions, so that they are found again after dynamic sampling has
joined rounds, TRL has shuffled rows, and workers have exchanged them. It takes part in no computation, so training is
the same with and without it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from grpo_ray.learner.advantages import combine_rewards
from grpo_ray.learner.batch import SAMPLED_ROWS, Batch
from grpo_ray.learner.rollouts.dynamic_sampling import rewards_differ
from grpo_ray.learner.schedule import DrawOrder
from grpo_ray.storage.records.tokens import LossTokens, Sample, cut_middle, keep_ends

SAMPLES: tuple[Sample, ...] = ("first", "signal")
"""Kinds of samples: the first group, and the first with signal. The mark of a sample's row is the index of its kind
times `num_generations`, plus the row's index in the group; all other rows have -1."""


def round_logps(logps: torch.Tensor) -> NDArray[np.float32]:
    """Copy log-probabilities to the CPU, rounded to 0.0001 so that they can be compressed."""
    values: NDArray[np.float32] = logps.float().cpu().numpy()
    return np.rint(values * np.float32(1e4)) / np.float32(1e4) + np.float32(0)  # no negative zeros


@dataclass
class SampleChooser:
    """Chooser of a step's samples: the same groups on all workers, and with any number of workers."""

    num_generations: int
    reward_weights: torch.Tensor
    """(R,)"""
    order: DrawOrder
    _missing: set[Sample] = field(default_factory=set)
    """Samples that the current step does not have yet."""

    def start_step(self) -> None:
        """Begin a step, which has no samples yet."""
        self._missing = set(SAMPLES)

    def mark(self, batch: Batch, rewards: torch.Tensor) -> None:
        """Add the column `SAMPLED_ROWS` to this worker's batch of a round.

        Args:
            batch: changed in place.
            rewards: (W B, R), rewards of all workers' completions of the round, in the order in which their problems
                were drawn; NaN where a reward does not apply.
        """
        marks = torch.full((len(rewards),), -1)
        if self._missing:
            for group, sample in self._choose(rewards).items():
                first, number = group * self.num_generations, SAMPLES.index(sample) * self.num_generations
                marks[first : first + self.num_generations] = torch.arange(number, number + self.num_generations)
        batch[SAMPLED_ROWS] = self.order.own_rows(marks).to(batch["advantages"].device)

    def _choose(self, rewards: torch.Tensor) -> dict[int, Sample]:
        """Return the samples among all workers' groups of a round, by the group's place in the order of drawing."""
        chosen: dict[int, Sample] = {}
        if "first" in self._missing:
            self._missing.remove("first")
            chosen[0] = "first"
        if "signal" in self._missing:
            groups = combine_rewards(rewards, self.reward_weights).view(-1, self.num_generations).tolist()
            with_signal = next((number for number, group in enumerate(groups) if rewards_differ(group)), None)
            if with_signal is not None:
                self._missing.remove("signal")
                chosen.setdefault(with_signal, "signal")  # the first group may be both
        return chosen


def marked_rows(batch: Batch) -> list[tuple[int, int]]:
    """Return place and mark of each row of a batch that belongs to a sample."""
    marks = batch.get(SAMPLED_ROWS)
    return [] if marks is None else [(place, mark) for place, mark in enumerate(marks.tolist()) if mark >= 0]


@dataclass
class _SeenRows:
    """Rows of samples in one forward pass. N rows of T columns."""

    marks: list[int]
    """(N,)"""
    lengths: torch.Tensor
    """(N,), tokens of each completion that the pass has read."""
    logps: torch.Tensor
    """(N, T), nats."""
    gradient: torch.Tensor | None = None
    """(N, T), gradient of the loss with respect to `logps`; None before the backward pass, and outside of the loss."""


@dataclass
class SampleReader:
    """Collector of the learner's values for the tokens of samples on this worker.

    Nothing waits for the device before `collect`.
    """

    num_generations: int
    _step: int = 0
    _places: list[list[tuple[int, int]]] = field(default_factory=list)
    """Place and mark of the samples' rows in each micro-batch."""
    _seen: list[_SeenRows] = field(default_factory=list)

    def start_step(self, step: int) -> None:
        """Begin the batch that is drawn for a step."""
        self._step, self._seen, self._places = step, [], []

    def locate(self, batches: Sequence[Batch]) -> None:
        """Find the samples' rows in the micro-batches of a part, in the order in which they are read."""
        self._places = [marked_rows(batch) for batch in batches]

    def observe_scored(self, batch: Batch, logps: torch.Tensor) -> None:
        """Keep the learner's log-probabilities of a whole batch, (B, T) in nats, computed before the loss."""
        self._observe(marked_rows(batch), batch, logps)

    def observe_pass(self, number: int, batch: Batch, logps: torch.Tensor) -> None:
        """Keep the log-probabilities of the loss's pass over a micro-batch, (B, T), and their gradient once it exists.

        The gradient shows which tokens the loss masks or clips, for every type of loss.
        """
        if not (places := self._places[number] if self._places else []):
            return
        seen = self._observe(places, batch, logps)
        if logps.requires_grad:
            rows = [place for place, _ in places]

            def keep(gradient: torch.Tensor) -> None:
                seen.gradient = gradient[rows]

            logps.register_hook(keep)

    def _observe(self, places: Sequence[tuple[int, int]], batch: Batch, logps: torch.Tensor) -> _SeenRows:
        rows = [place for place, _ in places]
        lengths = batch["completion_mask"][rows].sum(dim=1)
        self._seen.append(_SeenRows([mark for _, mark in places], lengths, logps.detach()[rows]))
        return self._seen[-1]

    def collect(self) -> list[LossTokens]:
        """Return the tokens of the samples' completions observed since the last call."""
        found = []
        for seen in self._seen:
            lengths = seen.lengths.tolist()
            logps = round_logps(seen.logps)
            masked = None if seen.gradient is None else (seen.gradient == 0).cpu().numpy()
            for row, (mark, length) in enumerate(zip(seen.marks, lengths, strict=True)):
                if length == 0:  # masked as a whole, so the pass did not read it
                    continue
                number, index = divmod(mark, self.num_generations)
                head, tail = keep_ends(length, self.num_generations)
                found.append(
                    LossTokens(
                        self._step,
                        SAMPLES[number],
                        index,
                        cut_middle(array("f", logps[row, :length].tobytes()), head, tail),
                        None if masked is None else cut_middle(masked[row, :length].tobytes(), head, tail),
                    )
                )
        self._seen = []
        return found
