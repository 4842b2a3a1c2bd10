"""Comparison of the engine's log-probabilities with the learner's: importance ratio, metrics and the check of the sync.

The engine and the learner compute the log-probabilities of the same tokens with different code. Their difference has
two uses: TRL corrects the loss for it by an importance ratio, and grpo_ray uses it to check that the engine generated
with the learner's weights (proven weight sync). With filters or penalties (`top_p` ...) the two uses take different
log-probabilities of the engine: the ratio takes those with which a token was sampled, the check those before filters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from grpo_ray.learner.batch import Batch, follows_result, loss_mask, proof_logps
from grpo_ray.learner.collectives import Workers


@dataclass(frozen=True)
class ImportanceSampling:
    """TRL's correction of the loss for the difference between learner and engine (`vllm_importance_sampling_*`).

    With r_t, the learner's probability of token t over that with which the engine sampled it, and R, the product of a
    completion's r_t, the loss of each token is multiplied by

        token_truncate       min(max(r_t, low), high)                truncated importance sampling (TIS)
        token_mask           r_t if low <= r_t <= high, otherwise 0  masked (MIS); IcePop with 0.5 and 5
        sequence_truncate    min(max(R, low), high)
        sequence_mask        R if low <= R <= high, otherwise 0

    If the engine has sampled with older weights, the first is decoupled PPO (arXiv 2110.00641): the learner's weights
    of the step are the proximal policy, by whose ratio the loss clips.
    """

    mode: str
    """`token_` or `sequence_`, then `truncate` (clamp to the bounds) or `mask` (0 outside of the bounds)."""
    low: float = -math.inf
    """Lower bound of the importance ratio."""
    high: float = math.inf
    """Upper bound of the importance ratio."""

    def ratio(self, gap: torch.Tensor) -> torch.Tensor:
        """Compute the ratio of learner to engine by which TRL multiplies the loss.

        Args:
            gap: (B, T), log-probabilities of learner minus engine, nats; 0 on padding, NaN where the engine returned
                none.

        Returns:
            (B, T), or (B, 1) in the modes of sequences.
        """
        gap = torch.nan_to_num(gap, nan=0.0)
        if self.mode.startswith("sequence"):
            gap = gap.sum(dim=-1, keepdim=True)
        ratio = torch.exp(gap)
        if self.mode.endswith("truncate"):
            return ratio.clamp(self.low, self.high)
        return ratio.masked_fill((ratio < self.low) | (ratio > self.high), 0.0)

    @property
    def padding_ratio(self) -> float | None:
        """Ratio of a token of padding; None in the modes of sequences, which have one ratio for each completion."""
        return self.ratio(torch.zeros(1, 1)).item() if self.mode.startswith("token") else None


@dataclass(frozen=True)
class TokenLogps:
    """Log-probabilities of the same completion tokens by learner and engine, nats. N tokens count in the loss."""

    learner: torch.Tensor
    """(N,)"""
    engine: torch.Tensor
    """(N,), NaN where the engine returned none."""
    ratios: torch.Tensor | None
    """(N,) importance ratios, or (B,) in the modes of sequences; None without importance sampling."""
    proof: torch.Tensor
    """(N,), the engine's log-probabilities before filters and penalties, which the learner's must equal."""
    later: torch.Tensor
    """(N,) bool, True on tokens of a turn after the completion's first."""

    @staticmethod
    def join(parts: list["TokenLogps"]) -> "TokenLogps":
        """Concatenate the tokens of several micro-batches."""
        ratios = [part.ratios for part in parts if part.ratios is not None]
        return TokenLogps(
            torch.cat([part.learner for part in parts]),
            torch.cat([part.engine for part in parts]),
            torch.cat(ratios) if ratios else None,
            torch.cat([part.proof for part in parts]),
            torch.cat([part.later for part in parts]),
        )


def compare_logps(batch: Batch, logps: torch.Tensor, importance: ImportanceSampling | None) -> TokenLogps | None:
    """Compare the learner's log-probabilities of a batch with the engine's, and add the importance ratio to the batch.

    Args:
        batch: changed in place: the column `importance_sampling_ratio` is added, if there is importance sampling.
        logps: (B, T), the learner's log-probabilities, nats, without gradient.
        importance: correction of the loss; None if it is off.

    Returns:
        The tokens that count in the loss, or None if the batch has no log-probabilities of the engine.
    """
    if (engine_logps := batch.get("sampling_per_token_logps")) is None:
        return None
    mask = loss_mask(batch).bool()
    ratios = None
    if importance is not None:
        ratio = importance.ratio((logps - engine_logps) * mask)
        batch["importance_sampling_ratio"] = ratio
        ratios = ratio[mask] if ratio.shape == mask.shape else ratio.flatten()
    return TokenLogps(logps[mask], engine_logps[mask], ratios, proof_logps(batch)[mask], follows_result(batch)[mask])


def anchor_to_behaviour(batch: Batch, logps: torch.Tensor) -> None:
    """Make the policy that sampled a batch TRL's old policy (`rollout.anchor=behaviour`), so that clipping acts on it.

    The loss then clips the ratio of the new policy to that which sampled, pi_theta / mu, which is the product of the
    ratio to the step's own weights and the importance ratio: pi_theta / pi_prox * pi_prox / mu. So the importance ratio
    becomes 1.

    Args:
        batch: changed in place: the columns `old_per_token_logps` and, if present, `importance_sampling_ratio`.
        logps: (B, T), the learner's log-probabilities, nats, without gradient; used where the engine returned none.
    """
    engine_logps = batch["sampling_per_token_logps"]
    batch["old_per_token_logps"] = torch.where(engine_logps.isnan(), logps, engine_logps)
    if "importance_sampling_ratio" in batch:
        batch["importance_sampling_ratio"] = torch.ones_like(batch["importance_sampling_ratio"])


def turn_gap_metrics(tokens: TokenLogps, workers: Workers) -> dict[str, float]:
    """Compute the mean gap of learner and engine in first and in later turns, nats, over all workers; collective.

    A gap in later turns alone shows that learner and engine read different results of tools. A metric without tokens is
    left out.
    """
    gaps = (tokens.learner - tokens.proof).abs().float()
    metrics = {}
    for name, chosen in ("first_turn", ~tokens.later), ("later_turns", tokens.later):
        total, count = workers.sum(gaps[chosen].sum()).item(), workers.sum(chosen.sum()).item()
        if count:
            metrics[f"engine/logprob_gap_{name}"] = total / count
    return metrics


def sampling_metrics(tokens: TokenLogps, workers: Workers) -> dict[str, float]:
    """Compute TRL's metrics that compare learner and engine, over all workers; collective.

    TRL computes them after generation. If exact savings skip that forward pass, they come from the loss's pass.
    """
    if tokens.ratios is None:
        return {}
    gaps, ratios = tokens.learner - tokens.engine, tokens.ratios
    gaps = gaps[~gaps.isnan()].abs()

    def of_workers(measure: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        return workers.gather((measure(values) if values.numel() else values.new_zeros(())).view(1))

    return {
        "sampling/sampling_logp_difference/mean": of_workers(torch.mean, gaps).mean().item(),
        "sampling/sampling_logp_difference/max": of_workers(torch.max, gaps).max().item(),
        "sampling/importance_sampling_ratio/min": of_workers(torch.min, ratios).min().item(),
        "sampling/importance_sampling_ratio/mean": of_workers(torch.mean, ratios).mean().item(),
        "sampling/importance_sampling_ratio/max": of_workers(torch.max, ratios).max().item(),
    }


@dataclass
class SyncChecker:
    """Collector of a step's log-probabilities, micro-batch by micro-batch, for one check of the sync.

    The check is made after the last micro-batch, before the optimizer step.
    """

    check: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """Compare log-probabilities of learner and engine under a mask, all of one shape; raise SyncError if they differ
    beyond the tolerance."""
    _seen: list[TokenLogps] = field(default_factory=list)

    def reset(self) -> None:
        """Discard all tokens, before a new batch."""
        self._seen = []

    def observe(self, tokens: TokenLogps | None) -> None:
        """Add the tokens of a micro-batch."""
        if tokens is not None:
            self._seen.append(tokens)

    def take_observed(self, *, is_on_policy: bool) -> TokenLogps | None:
        """Return all tokens observed since the last call; None if there are none.

        Args:
            is_on_policy: check the sync with these tokens. Those of older weights differ although the sync is right.
        """
        if not self._seen:
            return None
        tokens, self._seen = TokenLogps.join(self._seen), []
        if is_on_policy:
            self.check(tokens.learner, tokens.proof, torch.ones_like(tokens.learner))
        return tokens
