"""Work of the learner that is left out because the gradient is the same without it (law 5).

Four savings over TRL's GRPO trainer. `tests/integration/test_thrift.py` compares the gradients with stock TRL's in
float64.

1. One pass. TRL computes the learner's log-probabilities of a batch twice: once after generation, for the importance
   ratio between learner and engine, and again in the loss. While the policy has not moved in between they are the
   same numbers, so the ratio is taken from the loss's own forward pass, and so is the proof of sync (law 4): it is
   made before the optimizer's step. Off where a batch serves several steps (`grpo.num_iterations` > 1).
2. Rows without gradient. A completion whose advantage is exactly 0, or of which no token counts, takes no part in
   forward and backward. Each loss type's denominator stays what it was. Off with a KL term (`beta`), an entropy bonus,
   `top_entropy_quantile` below 1 or a router's auxiliary loss: through them such a row has a gradient.
3. Less padding. A micro-batch is cut to its own longest prompt and completion, and where a step has several, rows of
   similar length go together: on a CPU in as many micro-batches as read the least, weighed against what each costs
   beside; on a GPU in as few as they fill, since a small pass takes as long there as a larger one. Rows are shifted so
   that all padding comes last, where no mask is needed and only the longest row counts; with flash attention they are
   packed one after the other, without any padding. Prompts are cut, and rows shifted or packed, only if the model
   knows positions by rotation alone, so that nothing changes when all move.
   Rows keep their micro-batches with what 2 is off for (but for `beta`), and with `bnpo`, which divides by the tokens
   of each; otherwise workers share them where one has more to read than the others, which would wait for it.
4. The output layer on the CPU scores the completions' tokens alone, as it does on a GPU, and not prompts and padding.

All are off for a model with dropout or other noise, whose passes are never the same twice, and for images.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import trl.trainer.utils
from accelerate.utils import gather_object
from torch.nn.modules.dropout import _DropoutNd

from grpo_ray.telemetry.profiler import PhaseProfiler, in_phase
from grpo_ray.training.micro_batches import (
    Batch,
    RowIndex,
    SavingsPlan,
    Workers,
    is_text,
    loss_mask,
    pack_rows,
    plan_micro_batches,
    shift_rows,
)

PER_TOKEN_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
"""TRL's means over all tokens (with ratios of sequences, over rows) to which a row without advantage adds nothing."""

SHIFTABLE = {
    "rope_theta", "rope_type", "factor", "original_max_position_embeddings", "partial_rotary_factor",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
    "truncate",
}  # fmt: skip
"""Parameters of rotary embeddings under which only the distance of two positions counts."""


def exact_savings(trainer: Any) -> SavingsPlan:
    """The savings that are exact under a GRPO trainer's settings and for its model."""
    if is_noisy(trainer.model):
        return SavingsPlan()
    args = trainer.args
    one_step = args.gradient_accumulation_steps % args.steps_per_generation == 0  # no step is taken inside a batch
    over_micro_batch = (
        trainer._entropy_bonus_enabled or trainer.top_entropy_quantile < 1.0 or bool(trainer.aux_loss_enabled)
    )
    # VESPO sums the ratio's logarithm over padding too: nothing, unless a ratio of 1 is itself clipped.
    low, high = _bounds(trainer)
    trims = args.pad_to_multiple_of is None and (trainer.loss_type != "vespo" or low <= 1 <= high)
    regroup = one_step and not over_micro_batch and trainer.loss_type != "bnpo"
    relative = has_relative_positions(trainer.model)
    return SavingsPlan(
        one_pass=one_step and trainer.num_iterations == 1,
        rows=trainer.beta == 0.0 and not over_micro_batch,
        regroup=regroup,
        share=regroup,
        fewer_passes=regroup and trainer.accelerator.device.type != "cpu",
        trim_prompts=trims and relative,
        trim_completions=trims,
        shift=trims and relative and not trainer.aux_loss_enabled,
        pack=relative and not trainer.aux_loss_enabled and has_flash_attention(trainer.model),
        head=True,
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


def has_flash_attention(model: Any) -> bool:
    """Whether a model's attention keeps packed rows apart at no cost; others would fill a mask of all against all."""
    return "flash" in str(getattr(model.config.get_text_config(), "_attn_implementation", ""))


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


def _bounds(trainer: Any) -> tuple[float, float]:
    """Least and greatest importance ratio between learner and engine."""
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    return -math.inf if low is None else low, math.inf if high is None else high


class ExactSavings:
    """Put before TRL's `GRPOTrainer` among a class's bases: its trainer with the savings above.

    Extends `_generate_and_score_completions`, `_prepare_inputs`, `_get_per_token_logps_and_entropies`, `_compute_loss`
    and `training_step`. A class with an engine overrides `prove`.
    """

    thrifty = True
    """Whether to save anything."""
    phases = PhaseProfiler()
    """Told what the trainer is at; a class that is asked for it has one of its own."""

    @cached_property
    def savings(self: Any) -> SavingsPlan:
        """The savings that this trainer makes."""
        return exact_savings(self) if self.thrifty else SavingsPlan()

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
        if batches is before or not self.savings.arranges or not is_text(batches[0]):
            return inputs
        made, metrics = plan_micro_batches(batches, self.savings, self.loss_type, self._workers)
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        self._buffered_inputs = [batch | {"part": part} for batch, part in made]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    @in_phase("forward_backward")
    def _get_per_token_logps_and_entropies(
        self: Any,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """TRL's, of packed rows if they can be, and with an output layer that reads no more than it must.

        What the loss's forward pass says is held against the engine before the loss goes on with it.
        """
        with scoring_labels_only(self.savings.head):
            if self._reads == "packed":
                rows = pack_rows(input_ids, attention_mask, logits_to_keep)
                with self.accelerator.autocast():
                    said = model(
                        input_ids=rows.input_ids, position_ids=rows.position_ids, labels=rows.labels, fused_lm_head=True
                    )
                logps, entropies = (rows.spread(each, logits_to_keep) for each in (said.log_probs, said.entropy))
                found = (logps, entropies, None)
            elif self._reads == "shifted":
                moved = shift_rows(input_ids, attention_mask, logits_to_keep)
                with self.accelerator.autocast():
                    said = model(input_ids=moved.input_ids, labels=moved.labels, fused_lm_head=True)
                found = (moved.spread(said.log_probs), moved.spread(said.entropy), None)
            else:
                found = super()._get_per_token_logps_and_entropies(  # type: ignore[misc]
                    model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
                )
        if self._reading is not None:
            self._see(self._reading, found[0].detach())
        return found

    @cached_property
    def _workers(self: Any) -> Workers:
        """The workers that take the step together."""
        count = self.accelerator.num_processes

        def exchange(away: dict[RowIndex, Batch]) -> dict[RowIndex, Batch]:
            return {place: row for each in gather_object([away]) for place, row in each.items()}

        return Workers(
            self.accelerator.process_index, lambda own: self.accelerator.gather(own).view(count, -1), exchange
        )

    _reading: Batch | None = None
    """The micro-batch whose loss is being computed, where its forward pass is the only one."""

    _reads = "as they are"
    """How the present forward pass reads its rows: packed, shifted or as they are."""

    def _compute_loss(self: Any, model: Any, inputs: Batch) -> torch.Tensor:
        """TRL's, over the rows that are left, as a share of all."""
        part = inputs.get("part")
        if part is not None and not len(inputs["advantages"]):
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        if is_text(inputs):
            self._reads = "packed" if self.savings.pack else "shifted" if self.savings.shift else "as they are"
        if self.savings.one_pass and self.model.training:
            self._reading = inputs
        try:
            loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
        finally:
            self._reading, self._reads = None, "as they are"
        if part is None:
            return loss
        metrics = self._metrics["train"]
        weight = part.row_weight if self.importance_sampling_level == "sequence" else part.token_weight
        for name in PER_TOKEN_MEANS:
            if name in metrics:
                metrics[name][-1] *= weight
        if not part.whole and "clip_ratio/low_min" in metrics:
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
        if self._read and self._step % self.args.steps_per_generation == 0:
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


@contextmanager
def scoring_labels_only(on: bool) -> Iterator[None]:
    """Have TRL's output layer read the positions that have a label, on any device.

    It reads all of them where Triton is not, so that compilers see the same shapes; torch on the CPU compiles nothing.
    """
    before = trl.trainer.utils._use_triton
    if on:
        trl.trainer.utils._use_triton = lambda device: device.type == "cpu" or before(device)
    try:
        yield
    finally:
        trl.trainer.utils._use_triton = before
