"""Work that the learner can skip without changing the gradient (exact savings), and the settings under which it does.

Four kinds of work that TRL's GRPO trainer does are left out. `tests/integration/learner/test_exact_savings.py`
compares the gradients with stock TRL's in float64, for every loss type.

1. One pass. TRL computes the learner's log-probabilities of a batch twice: after generation, for the importance ratio
   between learner and engine, and again in the loss. As long as the policy has not moved in between, both are equal.
   The ratio is then computed from the loss's own forward pass, and so is the check of the weight sync, before the
   optimizer step. This is off where a batch serves several steps (`grpo.steps_per_generation`, `grpo.epochs`).
2. Rows without gradient. A completion whose advantage is exactly 0, or none of whose tokens count, takes no part in
   forward and backward. The denominator of each loss type is kept. Off with a KL term (`beta`), an entropy bonus,
   `top_entropy_quantile` below 1 or a router's auxiliary loss, since these give such a row a gradient.
3. Padding. A micro-batch is cut to its own longest prompt and completion, and where a step has several micro-batches,
   rows of similar length are put together (`passes.py`). Their number minimizes the token positions read plus the
   fixed cost of each pass, within the limit of `grpo.tokens_per_micro_batch` or `grpo.micro_batch_size`. Rows are
   shifted so that all padding comes last, where a causal model needs no mask and only the longest row counts. With an
   attention for rows of different lengths (`attention.py`) they are packed one after the other, without padding.
   Prompts are cut, and rows shifted or packed, only if the model encodes positions by rotation alone, so that moving a
   whole row changes nothing.
   Rows stay in their own micro-batch with the loss type `bnpo`, which divides by the tokens of each micro-batch, and
   under the settings that turn off saving 2, except `beta`. Otherwise workers exchange rows if one of them has more to
   read than the others, which would have to wait for it.
4. Output layer. On a CPU it scores only the completions' tokens, not prompts and padding, as TRL does on a GPU.

All savings are off for a model with dropout or other noise, since no two of its passes are equal, and for images.
"""

from dataclasses import dataclass
from typing import Any

import torch

from grpo_ray.learner.attention import packs_rows
from grpo_ray.learner.passes import Layout, PassLimit
from grpo_ray.learner.sync_check import ImportanceSampling
from grpo_ray.learner.trl_internals import DropoutLayer, is_recurrent

SHIFTABLE = {
    "rope_theta", "rope_type", "factor", "original_max_position_embeddings", "partial_rotary_factor",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
    "truncate",
}  # fmt: skip
"""Parameters of rotary embeddings with which attention depends only on the distance between two positions."""


@dataclass(frozen=True, kw_only=True)
class SavingsPlan:
    """Savings that a learner makes; the module's docstring describes them by number."""

    one_pass: bool = False
    """1: compute importance ratio and sync check from the loss's forward pass."""
    rows: bool = False
    """2: leave out rows without gradient."""
    regroup: bool = False
    """3: put rows of similar length into one micro-batch."""
    share: bool = False
    """3: exchange rows between workers."""
    trim_prompts: bool = False
    """3: cut the padding that all prompts of a micro-batch have."""
    trim_completions: bool = False
    """3: cut the padding that all completions of a micro-batch have."""
    shift: bool = False
    """3: move all padding to the end of a row."""
    pack: bool = False
    """3: put rows one after the other without padding."""
    head: bool = False
    """4: compute the output layer for tokens of completions only."""

    @property
    def repacks(self) -> bool:
        """True if micro-batches are repacked after generation."""
        return self.rows or self.regroup or self.trim_prompts or self.trim_completions

    @property
    def layout(self) -> Layout:
        """Arrangement of the rows of text in a forward pass."""
        return "packed" if self.pack else "shifted" if self.shift else "padded"

    def pass_limit(self, rows: int, tokens: int | None) -> PassLimit:
        """Return the limit of a forward pass.

        Args:
            rows: number of rows that fit into a pass at any length.
            tokens: maximum token positions of a pass; None if only the number of rows is limited.
        """
        # The width of padded rows is that of the longest prompt and the longest completion, perhaps of different rows.
        if tokens is None or self.layout == "padded":
            return PassLimit(rows=rows, layout=self.layout)
        return PassLimit(tokens=tokens, layout=self.layout)


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Settings of a GRPO trainer that determine which savings are exact, under TRL's names where TRL has them."""

    loss_type: str
    beta: float
    num_iterations: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    top_entropy_quantile: float
    has_entropy_bonus: bool
    has_router_loss: bool
    """True if a mixture-of-experts router's auxiliary loss is part of the loss."""
    pad_to_multiple_of: int | None
    importance: ImportanceSampling


def plan_savings(model: torch.nn.Module, settings: LossSettings) -> SavingsPlan:
    """Return the savings that are exact for a model and the settings of its loss."""
    if is_noisy(model):
        return SavingsPlan()
    # True if no optimizer step is taken inside a generation batch.
    one_step = settings.gradient_accumulation_steps % settings.steps_per_generation == 0
    # Terms that are means over a micro-batch, to which rows without advantage contribute.
    over_micro_batch = settings.has_entropy_bonus or settings.top_entropy_quantile < 1.0 or settings.has_router_loss
    # VESPO sums the logarithm of the ratio over padding too. That adds 0, unless a ratio of 1 is itself clipped.
    ratio_of_one_kept = settings.importance.low <= 1 <= settings.importance.high
    trims = settings.pad_to_multiple_of is None and (settings.loss_type != "vespo" or ratio_of_one_kept)
    # Among the rows of one optimizer step only: each step's part of the generation batch is repacked separately.
    regroup = not over_micro_batch and settings.loss_type != "bnpo"
    relative = has_relative_positions(model)
    return SavingsPlan(
        one_pass=one_step and settings.num_iterations == 1,
        rows=settings.beta == 0.0 and not over_micro_batch,
        regroup=regroup,
        share=regroup and trims and relative,  # a row is sent without the padding of its prompt
        trim_prompts=trims and relative,
        trim_completions=trims,
        shift=trims and relative and not settings.has_router_loss,
        pack=can_pack(model, settings) and packs_rows(model),
        head=True,
    )


def can_pack(model: torch.nn.Module, settings: LossSettings) -> bool:
    """Return True if rows may follow each other in one pass, given an attention that keeps them apart."""
    return not is_noisy(model) and has_relative_positions(model) and not settings.has_router_loss


def is_noisy(model: torch.nn.Module) -> bool:
    """Return True if two forward passes in training mode differ: dropout, dropped layers, a router's jitter."""
    for module in model.modules():
        rates = [value for name, value in vars(module).items() if "drop" in name or "jitter" in name]
        rates += [rate for each in rates if isinstance(each, dict) for rate in each.values()]  # adapters of PEFT
        if isinstance(module, DropoutLayer) or type(module).__name__ == "MultiplicativeDropoutLayer":
            rates.append(module.p)
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            return True
    return False


def has_relative_positions(model: Any) -> bool:
    """Return True if a causal model's output does not change when padding before the prompt is removed.

    False for unknown kinds of position embeddings.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]  # one for each layer type, or one
    return (
        all(
            kind.get("rope_type") in ("default", "linear", "llama3", "yarn") and kind.keys() <= SHIFTABLE
            for kind in kinds
        )
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}
        and not getattr(config, "attn_temperature_tuning", False)
        and not is_recurrent(model)
    )
