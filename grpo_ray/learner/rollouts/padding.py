"""Padding of completions to the columns that the loss reads: prompts on the left, completions on the right."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from grpo_ray.learner.batch import Batch
from grpo_ray.learner.rollouts.rollout import Completions, Logps


@dataclass(frozen=True)
class Padding:
    """TRL's padding of a batch."""

    token: int
    """Token id of padding."""
    multiple: int | None
    """Widths are a multiple of it; None for any width."""
    ratio: float | None
    """Importance ratio of a token of padding; None where a whole completion has one ratio."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def width(self, longest: int) -> int:
        """Return the width of a batch whose longest row has `longest` tokens."""
        return longest if self.multiple is None else -(-longest // self.multiple) * self.multiple

    def columns(self, completions: Completions) -> Batch:
        """Return token ids, masks and the engine's log-probabilities of completions, (B, P) and (B, T).

        `tool_mask` is present only for multi-turn completions, `unprocessed_per_token_logps` only with filters or
        penalties. A log-probability that the engine did not return is NaN.
        """
        prompts, ids = completions.prompt_ids, completions.token_ids
        batch = {
            "prompt_ids": self._column(prompts, self.token, left=True),
            "prompt_mask": self._column([[1] * len(row) for row in prompts], 0, left=True),
            "completion_ids": self._column(ids, self.token),
            "completion_mask": self._column([[1] * len(row) for row in ids], 0),
            "sampling_per_token_logps": self.logps(completions.logps),
        }
        if completions.own is not None:
            batch["tool_mask"] = self._column(completions.own, 1)
        if completions.unprocessed_logps is not None:
            batch["unprocessed_per_token_logps"] = self.logps(completions.unprocessed_logps)
        return batch

    def logps(self, logps: Logps) -> torch.Tensor:
        """Return log-probabilities as a column, (B, T); 0 on padding, NaN where there is none."""
        known = [[torch.nan if each is None else each for each in row] for row in logps]
        return self._column(known, 0.0, dtype=torch.float32)

    def _column(
        self, rows: Sequence[Sequence[float]], padding: float, *, left: bool = False, dtype: torch.dtype = torch.long
    ) -> torch.Tensor:
        width = self.width(max(map(len, rows)))
        column = torch.full((len(rows), width), padding, dtype=dtype)
        for padded, row in zip(column, rows, strict=True):
            if row:
                padded[slice(width - len(row), None) if left else slice(len(row))] = torch.tensor(row, dtype=dtype)
        return column.to(self.device)
