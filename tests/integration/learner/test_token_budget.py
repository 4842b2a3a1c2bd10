"""Micro-batches by a number of tokens, shifted and packed: every gradient equals unmodified TRL's, in float64."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from problem_stream import STREAM, StreamLearner, StreamTrainer, train_on_stream
from stale_learners import UNGRADED, SegmentEngine
from stock_trl import (
    LONGEST,
    NEAR,
    Record,
    ScriptedLearner,
    accumulated,
    exact_llama,
    largest_difference,
    reference_steps,
    train_steps,
)
from trl import GRPOTrainer
from varlen_reference import grouped_varlen_by_definition
from worker_cases import gradients_on_stream
from worker_group import run_workers

from grpo_ray.config.trl_fields import LOSS_TYPES
from grpo_ray.learner.attention import VARLEN, register_varlen
from grpo_ray.learner.passes import PASS_COST

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST_ROW = 31 + LONGEST
"""Tokens of the longest prompt with the longest completion."""
TOKENS = 2 * LONGEST_ROW
BUDGET = ("grpo.max_completion_length=12", f"grpo.tokens_per_micro_batch={TOKENS}")
SPLIT: dict[str, Any] = {"per_device_train_batch_size": 2} | accumulated(8)
"""Sixteen completions of a step, in micro-batches of as many as fit at any length."""


class BudgetLearner(ScriptedLearner):
    """Our learner with a limit of tokens."""

    overrides: Sequence[str] = BUDGET


@pytest.fixture(autouse=True)
def cheap_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the cost of a pass like the length of rows, so that the number of passes is a choice."""
    monkeypatch.setitem(PASS_COST, "cpu", 8)


def packing_llama() -> Any:
    """Return the model of `exact_llama` with an attention for packed rows."""
    register_varlen(grouped_varlen_by_definition)
    model = exact_llama()
    model.set_attn_implementation(VARLEN)
    return model


MODELS: dict[str, Callable[[], Any]] = {"shifted": exact_llama, "packed": packing_llama}


def watched(make_model: Callable[[], Any], seen: list[int]) -> Any:
    """Return a model that records the token positions of each forward pass."""
    model = make_model()
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return model


def compare(folder: Path, make_model: Callable[[], Any], **settings: Any) -> tuple[list[int], Any]:
    """Compare the gradients with TRL's; return the positions of each forward pass, and our trainer."""
    stock = reference_steps(GRPOTrainer, folder, **SPLIT, **settings)
    seen: list[int] = []
    ours, trainer = train_steps(
        BudgetLearner, folder, make_model=partial(watched, make_model, seen), **SPLIT, **settings
    )
    assert largest_difference(ours, stock) < NEAR
    assert seen and max(seen) <= TOKENS
    return seen, trainer


@pytest.mark.parametrize("layout", MODELS)
@pytest.mark.parametrize("loss_type", sorted({*LOSS_TYPES} - {"bnpo"}))
def test_token_budget_any_loss_type_same_gradient_in_fewer_passes(tmp_path: Path, loss_type: str, layout: str) -> None:
    seen, trainer = compare(tmp_path, MODELS[layout], loss_type=loss_type)
    assert trainer.savings.layout == layout
    # A third of the rows has a gradient, and most are shorter than the longest that a micro-batch must hold.
    assert 2 <= len(seen) <= 2 * 3


@pytest.mark.parametrize("layout", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_iterations": 2},
        {"beta": 0.1},
        {"beta": 0.1, "num_iterations": 2, "mask_truncated_completions": True},
        {"vllm_importance_sampling_mode": "token_truncate", "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_token_budget_scoring_passes_keep_it_too(tmp_path: Path, settings: dict[str, Any], layout: str) -> None:
    """Log-probabilities before the loss, of the policy and of a reference, are computed in passes of that size."""
    compare(tmp_path, MODELS[layout], **settings)


class GpuLearner(BudgetLearner):
    """Our learner as on a Hopper GPU. The kernel that it chooses is replaced by its definition."""

    overrides = (*BUDGET, "model.dtype=bfloat16")  # of the settings alone: the model stays in float64

    def __init__(self, **trl_trainer: Any) -> None:
        super().__init__(**trl_trainer)
        self._pack_rows((9, 0))
        register_varlen(grouped_varlen_by_definition)


@pytest.mark.parametrize("adapter", [False, True], ids=["", "adapter"])
def test_token_budget_learner_on_gpu_chooses_packing(tmp_path: Path, adapter: bool) -> None:
    make_model = partial(adapted, exact_llama) if adapter else exact_llama
    stock = train_steps(GRPOTrainer, tmp_path, make_model=make_model, **SPLIT)[0]
    ours, trainer = train_steps(GpuLearner, tmp_path, make_model=make_model, **SPLIT)
    assert trainer.savings.layout == "packed"
    assert largest_difference(ours, stock) < NEAR


class AheadLearner(BudgetLearner):
    """Our learner, one step off-policy."""

    overrides = (*BUDGET, "rollout.max_staleness=1", UNGRADED)
    engine_class = SegmentEngine


@pytest.mark.parametrize("layout", MODELS)
def test_token_budget_generating_ahead_keeps_it_too(tmp_path: Path, layout: str) -> None:
    """The pass that proves a round, and the loss on tokens of older weights, against TRL on the same batches."""
    settings: dict[str, Any] = {"max_steps": 4, "vllm_importance_sampling_mode": "token_truncate"} | SPLIT
    stock = reference_steps(GRPOTrainer, tmp_path, **settings)
    seen: list[int] = []
    ours, _ = train_steps(AheadLearner, tmp_path, make_model=partial(watched, MODELS[layout], seen), **settings)
    assert largest_difference(ours, stock) < NEAR
    assert max(seen) <= TOKENS


def adapted(make_model: Callable[[], Any]) -> Any:
    """Return a model with an adapter whose weights are not 0, always the same."""
    base = make_model()
    torch.manual_seed(1)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    model = get_peft_model(base, lora).double()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


@pytest.mark.parametrize("layout", MODELS)
def test_token_budget_adapter_same_gradient(tmp_path: Path, layout: str) -> None:
    stock = train_steps(GRPOTrainer, tmp_path, make_model=partial(adapted, exact_llama), **SPLIT)[0]
    ours, trainer = train_steps(BudgetLearner, tmp_path, make_model=partial(adapted, MODELS[layout]), **SPLIT)
    assert trainer.savings.layout == layout and all("lora" in name for name in ours.gradients[0])
    assert largest_difference(ours, stock) < NEAR


# Workers

CASES: list[dict[str, Any]] = [
    {"loss_type": "dapo"},
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "num_iterations": 2},
    {"top_entropy_quantile": 0.3, "entropy_coef": 0.01},
]


@pytest.mark.parametrize("shards", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "sharded"])
def test_token_budget_two_workers_equal_trl_with_one(tmp_path: Path, shards: bool) -> None:
    """Workers with rows of different lengths make as many passes, or a sharded learner would wait for ever."""
    own: dict[str, Any] = {"overrides": BUDGET}
    if shards:
        own = {"overrides": (*BUDGET, "cluster.shard_learner=true"), "fsdp": True, "fsdp_config": {"version": 2}}
    both = run_workers(gradients_on_stream, 2, str(tmp_path), [(case | own, 2, 4) for case in CASES])
    for number, case in enumerate(CASES):
        steps = {"max_steps": 2, "per_device_train_batch_size": 16} | accumulated(1)
        whole = train_on_stream(StreamTrainer, tmp_path, range(len(STREAM)), **steps, **case)[0]
        for worker in both:
            gradients = [{name: torch.from_numpy(each) for name, each in step.items()} for step in worker[number]]
            assert largest_difference(Record(gradients), whole) < NEAR, case


def test_token_budget_one_worker_equals_trl(tmp_path: Path) -> None:
    for case in CASES:
        steps = {"max_steps": 2} | SPLIT
        ours = train_on_stream(StreamLearner, tmp_path, range(len(STREAM)), overrides=BUDGET, **steps, **case)[0]
        steps = {"max_steps": 2, "per_device_train_batch_size": 16} | accumulated(1)
        whole = train_on_stream(StreamTrainer, tmp_path, range(len(STREAM)), **steps, **case)[0]
        assert largest_difference(ours, whole) < NEAR, case
