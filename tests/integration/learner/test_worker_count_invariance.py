"""Worker-count invariance of the gradient: micro-batches of any size, and one or two workers, in float64."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from problem_stream import STREAM, StreamLearner, StreamTrainer, train_on_stream
from stock_trl import NEAR, VOCABULARY, Record, largest_difference
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from worker_cases import gradients_on_stream, micro_batches
from worker_group import run_workers

from grpo_ray.config.trl_fields import LOSS_TYPES
from grpo_ray.errors import ConfigError
from grpo_ray.learner.passes import PASS_COST

pytestmark = pytest.mark.usefixtures("one_thread")

RATIO_OF_EACH_TOKEN = {"vllm_importance_sampling_mode": "token_truncate"}
"""Importance sampling with a ratio for each token, the only one that a config allows for VESPO."""
TWO_STEPS_TWICE = {"parts": 2, "num_iterations": 2, "max_steps": 6, "epsilon": 0.02}
"""Settings of four steps on the first generation batch, and two on the next."""

EXACT: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in LOSS_TYPES if name != "bnpo"},
    **{f"{name}, sequence ratios": {"loss_type": name, "importance_sampling_level": "sequence"} for name in LOSS_TYPES
       if name not in ("bnpo", "vespo")},
    "truncated completions masked": {"mask_truncated_completions": True},
    "truncated completions masked, mean over rows": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "two-sided clipping": {"delta": 1.5, "num_iterations": 2, "epsilon": 0.01},
    "several iterations, sapo": {"loss_type": "sapo", "num_iterations": 2},
    "several iterations, vespo": {"loss_type": "vespo", "num_iterations": 2, **RATIO_OF_EACH_TOKEN},
    "off-policy mask": {"off_policy_mask_threshold": 0.1},
    "rewards scaled by the batch": {"scale_rewards": "batch"},
    "rewards not scaled": {"scale_rewards": "none"},
    "rewards normalised, then summed": {"multi_objective_aggregation": "normalize_then_sum"},
    "reference": {"beta": 0.1},
    "reference, bias corrected": {"beta": 0.1, "use_bias_correction_kl": True, "num_iterations": 2},
    "no importance correction": {"vllm_importance_sampling_correction": False},
    "importance by token, masked": {"vllm_importance_sampling_mode": "token_mask"},
    "importance by sequence, truncated": {"vllm_importance_sampling_mode": "sequence_truncate"},
    "high entropy tokens": {"top_entropy_quantile": 0.3},
    "high entropy tokens, two iterations": {"top_entropy_quantile": 0.3, "num_iterations": 2},
    "high entropy tokens, mean over rows": {"top_entropy_quantile": 0.3, "loss_type": "grpo"},
    "entropy bonus": {"entropy_coef": 0.01},
    "entropy bonus, mean over rows": {"entropy_coef": 0.01, "loss_type": "grpo"},
    "entropy bonus on high entropy tokens": {"entropy_coef": 0.01, "top_entropy_quantile": 0.3},
    "high entropy tokens, vespo": {"top_entropy_quantile": 0.3, "loss_type": "vespo"},
    "adaptive entropy bonus": {"use_adaptive_entropy": True, "entropy_target": 6.5, "entropy_coef": 0.02},
    "clipped gradient": {"max_grad_norm": 0.01},
    **{f"two steps twice, {name}": TWO_STEPS_TWICE | {"loss_type": name} for name in LOSS_TYPES
       if name not in ("bnpo", "vespo")},
    "two steps twice, vespo": {**TWO_STEPS_TWICE, "loss_type": "vespo", **RATIO_OF_EACH_TOKEN},
    "two steps": {"parts": 2, "importance_sampling_level": "sequence"},
    "three steps, rewards scaled by the batch": {"parts": 3, "max_steps": 3, "scale_rewards": "batch"},
    "two steps twice, reference": TWO_STEPS_TWICE | {"beta": 0.1},
    "two steps twice, high entropy tokens": TWO_STEPS_TWICE | {"top_entropy_quantile": 0.3},
    "two steps twice, entropy bonus": TWO_STEPS_TWICE | {"entropy_coef": 0.01},
    "two steps, adaptive entropy bonus": {
        "parts": 2, "max_steps": 4, "use_adaptive_entropy": True, "entropy_target": 6.5, "entropy_coef": 0.02,
    },
}  # fmt: skip
"""Settings under which a step does not depend on micro-batches and workers. Steps of 16 completions; `parts` of them
(1 unless given) from one generation batch."""

SPLITS = {"4x4": (4, 4), "1x16": (1, 16)}
"""Completions of a micro-batch, and micro-batches of a step, on one worker."""


@pytest.fixture(autouse=True)
def free_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cost of a pass to 0, so that the short rows of these tests are split like rows of hundreds of tokens."""
    monkeypatch.setitem(PASS_COST, "cpu", 0)


def train(kind: type, folder: Path, size: int, count: int, **settings: Any) -> Any:
    """Take two steps in `count` micro-batches of `size` completions each, and return the record."""
    return train_on_stream(kind, folder, range(len(STREAM)), **micro_batches(size, count, settings))[0]


@functools.cache
def trl_with_one(case: str) -> Record:
    """Return the record of TRL with one micro-batch, which two tests compare with their own."""
    with tempfile.TemporaryDirectory() as folder:
        record: Record = train(StreamTrainer, Path(folder), 16, 1, **EXACT[case])
    return record


@pytest.mark.parametrize("case", EXACT)
def test_gradient_any_micro_batches_equals_trl_with_one(tmp_path: Path, case: str) -> None:
    for size, count in ((16, 1), *SPLITS.values()):
        ours = train(StreamLearner, tmp_path, size, count, **EXACT[case])
        assert largest_difference(ours, trl_with_one(case)) < NEAR, f"{size}x{count}"


def test_gradient_two_workers_equals_trl_with_one(tmp_path: Path) -> None:
    cases = {case: (size, count) for case, size, count in zip(EXACT, [8, 2, 4] * 99, [1, 4, 2] * 99, strict=False)}
    arguments = [(EXACT[case], *split) for case, split in cases.items()]
    both = run_workers(gradients_on_stream, 2, str(tmp_path), arguments)
    for number, (case, split) in enumerate(cases.items()):
        for worker in both:
            gradients = [{name: torch.from_numpy(each) for name, each in step.items()} for step in worker[number]]
            assert largest_difference(Record(gradients), trl_with_one(case)) < NEAR, f"{case}, 2 workers with {split}"


# Mixture of experts


def tiny_experts() -> Qwen3MoeForCausalLM:
    """Return a mixture of experts of one layer, always with the same random weights."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
            bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.1,
            experts_implementation="eager",  # the default has no kernel for float64
        )
    ).double()  # fmt: skip


def difference_of_experts(folder: Path, kind: type, coefficient: float | None) -> float:
    """Return the largest difference between the gradients of one micro-batch (TRL) and four."""
    settings = {"make_model": tiny_experts, "router_aux_loss_coef": coefficient, "max_steps": 1}
    whole, parts = (
        train_on_stream(
            each, folder, range(len(STREAM)), per_device_train_batch_size=size, gradient_accumulation_steps=count,
            steps_per_generation=count, **settings,
        )[0]
        for each, size, count in ((StreamTrainer, 16, 1), (kind, 4, 4))
    )  # fmt: skip
    return largest_difference(parts, whole)


def test_gradient_experts_without_router_loss_any_micro_batches_equal(tmp_path: Path) -> None:
    assert difference_of_experts(tmp_path, StreamLearner, 0.0) < 1e-5  # transformers' router works in float32


def test_gradient_experts_router_loss_depends_on_micro_batches(tmp_path: Path) -> None:
    """The router loss is refused because TRL's own gradient differs."""
    assert difference_of_experts(tmp_path, StreamTrainer, 0.01) > 1e-3


def test_learner_router_loss_with_micro_batches_raises(tmp_path: Path) -> None:
    # Qwen3-MoE's own config has a coefficient of 0.001, which TRL takes.
    with pytest.raises(ConfigError, match=r"grpo\.router_aux_loss_coef=0\.001.*set grpo\.router_aux_loss_coef=0"):
        difference_of_experts(tmp_path, StreamLearner, None)
