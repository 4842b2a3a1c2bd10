"""Work of the learner that is left out because the gradient is the same without it (law 5).

Three savings over TRL's GRPO trainer. `tests/test_thrift.py` holds the gradients against stock TRL's in float64.

1. One pass. TRL computes the learner's log-probabilities of a batch twice: once after generation, for the importance
   ratio between learner and engine, and again in the loss. While the policy has not moved in between they are the
   same numbers, so the ratio is taken from the loss's own forward pass, and so is the proof of sync (law 4): it is
   made before the optimizer's step. Off where a batch serves several steps (`grpo.num_iterations` > 1).
2. Rows without gradient. A completion whose advantage is exactly 0, or of which no token counts, takes no part in
   forward and backward. Each loss type's denominator stays what it was. Off with a KL term (`beta`), an entropy bonus,
   `top_entropy_quantile` below 1 or a router's auxiliary loss: through them such a row has a gradient.
3. Less padding. A micro-batch is cut to its own longest prompt and completion; and where a step has several, rows of
   similar length go together. Prompts are cut only if the model knows positions by rotation alone, so that nothing
   changes when all move. Rows keep their micro-batches with what 2 is off for (but for `beta`), and with `bnpo`, which
   divides by the tokens of each micro-batch.

All are off for a model with dropout or other noise, whose passes are never the same twice, and for images.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from grpo_ray.phases import Phases, in_phase

Batch = dict[str, Any]
"""One micro-batch, as TRL's loss takes it: tensors with a row for each completion, and scalars."""

PER_ROW = ("grpo", "sapo", "dr_grpo", "luspo")
"""Loss types that divide by the number of rows in a micro-batch. `bnpo` divides by its tokens, and `dapo`, `cispo` and
`vespo` by those of the whole batch over all workers, which stand in the batch."""

PER_TOKEN_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
"""TRL's means over all tokens (with ratios of sequences, over rows) to which a row without advantage adds nothing."""

COMPLETION_SIDE = (
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio",
)  # fmt: skip
KNOWN = {*COMPLETION_SIDE, "prompt_ids", "prompt_mask", "advantages", "num_items_in_batch"}
"""What a batch may hold; with anything more (images) it is left as it is."""

ENOUGH_TOKENS = 32
"""Tokens that a row should have to prove the sync alone: over a few, 16-bit rounding can look like a mismatch."""

SHIFTABLE = {
    "rope_theta", "rope_type", "factor", "original_max_position_embeddings", "partial_rotary_factor",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
    "truncate",
}  # fmt: skip
"""Parameters of rotary embeddings under which only the distance of two positions counts."""


@dataclass(frozen=True)
class Savings:
    """Which savings are exact."""

    one_pass: bool = False
    rows: bool = False
    regroup: bool = False
    trim_prompts: bool = False
    trim_completions: bool = False


def exact_savings(trainer: Any) -> Savings:
    """The savings that are exact under a GRPO trainer's settings and for its model."""
    if is_noisy(trainer.model):
        return Savings()
    args = trainer.args
    one_step = args.gradient_accumulation_steps % args.steps_per_generation == 0  # no step is taken inside a batch
    over_micro_batch = (
        trainer._entropy_bonus_enabled or trainer.top_entropy_quantile < 1.0 or bool(trainer.aux_loss_enabled)
    )
    # VESPO sums the ratio's logarithm over padding too: nothing, unless a ratio of 1 is itself clipped.
    low, high = _bounds(trainer)
    trims = args.pad_to_multiple_of is None and (trainer.loss_type != "vespo" or low <= 1 <= high)
    return Savings(
        one_pass=one_step and trainer.num_iterations == 1,
        rows=trainer.beta == 0.0 and not over_micro_batch,
        regroup=one_step and not over_micro_batch and trainer.loss_type != "bnpo",
        trim_prompts=trims and has_relative_positions(trainer.model),
        trim_completions=trims,
    )


def is_noisy(model: torch.nn.Module) -> bool:
    """Whether two forward passes of a model in training differ: dropout, dropped layers, a router's jitter."""
    for module in model.modules():
        rates = [value for name, value in vars(module).items() if "drop" in name or "jitter" in name]
        if isinstance(module, _DropoutNd):
            rates.append(module.p)
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            return True
    return False


def has_relative_positions(model: Any) -> bool:
    """Whether a causal model says the same when padding before the prompt is taken away; False where in doubt."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]  # one for each type of layer, or one
    return (
        all(
            kind.get("rope_type") in ("default", "linear", "llama3", "yarn") and kind.keys() <= SHIFTABLE
            for kind in kinds
        )
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}
        and not getattr(config, "attn_temperature_tuning", False)
        and not getattr(model, "_is_stateful", False)
    )


def importance_ratio(gap: torch.Tensor, mode: str, low: float, high: float) -> torch.Tensor:
    """Ratio of learner to engine that TRL weighs its loss with: (B, T), or (B, 1) for a mode of sequences.

    gap: (B, T), log-probabilities of learner minus engine, nats; 0 on padding, NaN where the engine gave none.
    mode: TRL's `vllm_importance_sampling_mode`: `token_` or `sequence_`, then `truncate` (to the bounds) or `mask` (0
    outside of them).
    """
    gap = torch.nan_to_num(gap, nan=0.0)
    if mode.startswith("sequence"):
        gap = gap.sum(dim=-1, keepdim=True)
    ratio = torch.exp(gap)
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def loss_mask(batch: Batch) -> torch.Tensor:
    """(B, T), 1 on tokens that count in the loss."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def has_gradient(batch: Batch) -> torch.Tensor:
    """(B,) bool: whether a row can move the policy."""
    return (batch["advantages"] != 0) & loss_mask(batch).any(dim=1)


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some rows of a batch, in the given order."""
    index = torch.tensor(rows, device=batch["advantages"].device)
    return {k: v[index] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in batch.items()}


def choose_rows(needed: Sequence[bool], lengths: Sequence[int], count: int) -> list[int]:
    """The rows that are needed, filled up to `count` with others, in their old order.

    Others are the cheapest that can prove the sync: the shortest of at least ENOUGH_TOKENS tokens, else the longest.
    """
    others = [row for row in range(len(needed)) if not needed[row]]
    others.sort(key=lambda row: (lengths[row] < ENOUGH_TOKENS, abs(lengths[row] - ENOUGH_TOKENS), row))
    chosen = [row for row in range(len(needed)) if needed[row]]
    return sorted(chosen + others[: count - len(chosen)])


def by_length(lengths: Sequence[int], rows: Sequence[int], parts: int) -> list[list[int]]:
    """Deal rows out to parts of equal number (or one less), the longest together, in a fixed order."""
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    least, more = divmod(len(ordered), parts)
    ends = [least * part + min(part, more) for part in range(parts + 1)]
    return [ordered[first:end] for first, end in itertools.pairwise(ends)]


def trimmed(batch: Batch, prompts: bool = True, completions: bool = True) -> Batch:
    """A batch without the columns that are padding in every row."""
    if prompts:
        first = _first(batch["prompt_mask"].any(dim=0))
        batch = batch | {key: batch[key][:, first:] for key in ("prompt_ids", "prompt_mask")}
    if completions:
        used = batch["completion_mask"].any(dim=0)
        width = max(1, len(used) - _first(used.flip(0)))
        batch = batch | {
            key: batch[key][:, :width] for key in COMPLETION_SIDE if isinstance(batch.get(key), torch.Tensor)
        }
    return batch


def _first(used: torch.Tensor) -> int:
    """Index of the first True; the length where there is none."""
    return int(used.int().argmax()) if used.any() else len(used)


@dataclass(frozen=True)
class Part:
    """What is left of a micro-batch, against what it was. Shares are over all workers."""

    loss_factor: float = 1.0
    """What the loss of the rows left is to be multiplied with, so that the denominator is the old one."""
    row_share: float = 1.0
    token_share: float = 1.0


def arrange(
    batches: list[Batch], savings: Savings, loss_type: str, over_workers: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[tuple[Batch, Part]], dict[str, float]]:
    """The micro-batches of a generation batch with less in them, and what was saved.

    over_workers: gives (workers, N) from each worker's (N,); every worker must call it.
    Every worker keeps as many rows in a micro-batch as the others, and at least one: the passes' collective calls stay
    the same, and each batch has something that proves the sync.
    Returns each micro-batch with its `Part`, and the metrics.
    """
    size, count = len(batches[0]["advantages"]), len(batches)
    # Rows stay in their micro-batch, or all go into one pot and are dealt out again.
    pots = [merged(batches)] if savings.regroup else batches
    facts = [_facts(pot, savings) for pot in pots]
    device = batches[0]["advantages"].device
    needed = over_workers(torch.tensor([float(sum(need)) for need, _, _ in facts], device=device)).amax(dim=0)
    chosen: list[tuple[Batch, list[int]]] = []
    for pot, (need, lengths, tokens), most in zip(pots, facts, needed.tolist(), strict=True):
        parts = count // len(pots)
        rows = choose_rows(need, tokens, max(int(most), parts))
        chosen += [(pot, part) for part in (by_length(lengths, rows, parts) if savings.regroup else [rows])]
    kept = []
    for pot, rows in chosen:
        batch = rows_of(pot, rows) if rows != list(range(size)) or savings.regroup else pot
        kept.append(trimmed(batch, savings.trim_prompts, savings.trim_completions))
    tokens_left = torch.tensor([float(loss_mask(batch).sum()) for batch in kept], device=device)
    tokens_all = torch.tensor([float(loss_mask(batch).sum()) for batch in batches], device=device)
    if savings.regroup:
        tokens_all = tokens_all.mean().expand(count)
    positions = torch.tensor([float(sum(map(_positions, each))) for each in (kept, batches)], device=device)
    totals = over_workers(torch.cat([tokens_left, tokens_all, positions])).sum(dim=0)
    shares = (totals[:count] / totals[count : 2 * count].clamp(min=1)).tolist()
    made = []
    for batch, own_left, own_all, share in zip(kept, tokens_left.tolist(), tokens_all.tolist(), shares, strict=True):
        row_share = len(batch["advantages"]) / size
        factor = row_share if loss_type in PER_ROW else 1.0
        if loss_type == "bnpo":
            factor = max(own_left, 1.0) / max(own_all, 1.0)
        made.append((batch, Part(factor, row_share, share)))
    metrics = {
        "learner/completions_share": sum(part.row_share for _, part in made) / count,
        "learner/positions_share": (totals[-2] / totals[-1]).item(),
        "learner/tokens_saved": (totals[count : 2 * count].sum() - totals[:count].sum()).item(),
    }
    return made, metrics


def merged(batches: Sequence[Batch]) -> Batch:
    """Micro-batches as one batch again."""
    return {
        key: torch.cat([batch[key] for batch in batches]) if isinstance(value, torch.Tensor) and value.ndim else value
        for key, value in batches[0].items()
    }


def _facts(batch: Batch, savings: Savings) -> tuple[list[bool], list[int], list[int]]:
    """Of each row: whether it must stay, its length with the prompt, and its tokens that count."""
    tokens = loss_mask(batch).sum(dim=1)
    lengths = batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)
    need = has_gradient(batch) if savings.rows else torch.ones_like(tokens, dtype=torch.bool)
    return need.tolist(), lengths.tolist(), tokens.tolist()


def _positions(batch: Batch) -> int:
    """Token positions that a pass reads, padding included."""
    return batch["prompt_ids"].numel() + batch["completion_ids"].numel()


def _bounds(trainer: Any) -> tuple[float, float]:
    """Least and greatest importance ratio between learner and engine."""
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    return -math.inf if low is None else low, math.inf if high is None else high


class Thrift:
    """Put before TRL's `GRPOTrainer` among a class's bases: its trainer with the savings above.

    Extends `_generate_and_score_completions`, `_prepare_inputs`, `_get_per_token_logps_and_entropies`, `_compute_loss`
    and `training_step`. A class with an engine overrides `prove`.
    """

    thrifty = True
    """Whether to save anything."""
    phases = Phases()
    """Told what the trainer is at; a class that is asked for it has one of its own."""

    @cached_property
    def savings(self: Any) -> Savings:
        """The savings that this trainer makes."""
        return exact_savings(self) if self.thrifty else Savings()

    def prove(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        """Told of log-probabilities of the same tokens, (B, T) in nats, before the step on them is taken (law 4)."""

    def _generate_and_score_completions(self: Any, inputs: list[dict[str, Any]]) -> Batch:
        """TRL's, without its own forward pass where the loss's will do; else it is proven on the spot."""
        corrects = self.vllm_importance_sampling_correction
        self._read: list[tuple[torch.Tensor, ...]] = []
        if self.savings.one_pass and self.model.training:
            self.vllm_importance_sampling_correction = False
        try:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        finally:
            self.vllm_importance_sampling_correction = corrects

    @in_phase("prepare")
    def _prepare_inputs(self: Any, generation_batch: Any) -> Batch:
        """TRL's; a batch that was just generated is arranged before its first micro-batch is given out."""
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        batches = self._buffered_inputs
        if batches is before or self.savings == Savings():
            return inputs
        if any(value is not None and key not in KNOWN for key, value in batches[0].items()):
            return inputs
        workers = self.accelerator.num_processes
        made, metrics = arrange(
            batches, self.savings, self.loss_type, lambda own: self.accelerator.gather(own).view(workers, -1)
        )
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        self._buffered_inputs = [batch | {"part": part} for batch, part in made]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    @in_phase("forward_backward")
    def _get_per_token_logps_and_entropies(self: Any, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """TRL's; what the loss's forward pass says is held against the engine before the loss goes on with it."""
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]
        if self._reading is not None:
            self._see(self._reading, found[0].detach())
        return found

    _reading: Batch | None = None
    """The micro-batch whose loss is being computed, where its forward pass is the only one."""

    def _compute_loss(self: Any, model: Any, inputs: Batch) -> torch.Tensor:
        """TRL's, over the rows that are left, as a share of all."""
        if self.savings.one_pass and self.model.training:
            self._reading = inputs
        try:
            loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
        finally:
            self._reading = None
        part = inputs.get("part")
        if part is None:
            return loss
        metrics = self._metrics["train"]
        share = part.row_share if self.importance_sampling_level == "sequence" else part.token_share
        for name in PER_TOKEN_MEANS:
            if name in metrics:
                metrics[name][-1] *= share
        if part.row_share < 1 and "clip_ratio/low_min" in metrics:
            metrics["clip_ratio/low_min"][-1] = 0.0  # a row without advantage is never clipped
        return loss * part.loss_factor

    def _see(self: Any, batch: Batch, logps: torch.Tensor) -> None:
        """Give a micro-batch its importance ratio, and keep what proves the sync. logps: (B, T), nats."""
        if (engine_logps := batch.get("sampling_per_token_logps")) is None:
            return
        mask = loss_mask(batch).bool()
        kept = [logps[mask], engine_logps[mask]]
        if self.use_vllm and self.vllm_importance_sampling_correction:
            ratio = importance_ratio((logps - engine_logps) * mask, self.vllm_importance_sampling_mode, *_bounds(self))
            batch["importance_sampling_ratio"] = ratio
            kept.append(ratio[mask] if ratio.shape == mask.shape else ratio.flatten())
        self._read.append(tuple(kept))

    def training_step(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's. With the last micro-batch of a generation batch comes the proof of sync: no step is taken yet."""
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if len(self._read) == self.args.steps_per_generation:
            learner_logps, engine_logps, *ratio = (torch.cat(each) for each in zip(*self._read, strict=True))
            self._read = []
            self.prove(learner_logps, engine_logps, torch.ones_like(learner_logps))
            if ratio:
                self._log_sampling(learner_logps - engine_logps, ratio[0])
        return loss

    def _log_sampling(self: Any, gaps: torch.Tensor, ratios: torch.Tensor) -> None:
        """TRL's metrics of learner against engine, which it takes after generation. Both (N,), of this worker."""
        gaps = gaps[~gaps.isnan()].abs()

        def of_workers(measure: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
            return self.accelerator.gather(measure(values) if values.numel() else values.new_zeros(()))

        for name, value in {
            "sampling_logp_difference/mean": of_workers(torch.mean, gaps).mean(),
            "sampling_logp_difference/max": of_workers(torch.max, gaps).max(),
            "importance_sampling_ratio/min": of_workers(torch.min, ratios).min(),
            "importance_sampling_ratio/mean": of_workers(torch.mean, ratios).mean(),
            "importance_sampling_ratio/max": of_workers(torch.max, ratios).max(),
        }.items():
            self._metrics["train"][f"sampling/{name}"].append(value.item())
