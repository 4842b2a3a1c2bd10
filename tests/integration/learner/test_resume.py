"""Exact resume of the learner with TRL's own training loop: options that hold state, and settings that change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from problem_stream import STREAM, StreamLearner, train_on_stream
from stock_trl import exact_llama

from grpo_ray.config.loader import load_config
from grpo_ray.errors import CheckpointError
from grpo_ray.learner.checkpoint_kind import check_checkpoint_kind
from grpo_ray.learner.learner import REFERENCE

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS: dict[str, Any] = {
    "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "ignore_data_skip": True, "optim": "adamw_torch",
    "learning_rate": 1e-2, "lr_scheduler_type": "linear", "weight_decay": 0.1, "max_grad_norm": 1.0,
}  # fmt: skip
"""Settings of a run of four steps with checkpoints after the second and the fourth."""

STATEFUL: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "cosine with warmup": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "minimum rate": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "two iterations": {"num_iterations": 2, "save_steps": 2},
    "two steps of a batch": {"steps_per_generation": 4},
    "two steps of a batch, twice": {
        "steps_per_generation": 4, "num_iterations": 2, "save_steps": 4, "max_steps": 8,
    },
    "reference": {"beta": 0.5},
    "reference that follows": {
        "beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.7,
    },
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_delta": 0.02},
    "high entropy tokens": {"top_entropy_quantile": 0.5, "loss_type": "vespo"},
}  # fmt: skip


@pytest.fixture(scope="module")
def saved_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a policy, by whose name TRL loads the reference."""
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    initial = exact_llama()
    plain = LlamaForCausalLM(initial.config)
    plain.load_state_dict({name: weight for name, weight in initial.state_dict().items()}, strict=False)
    plain.save_pretrained(folder)
    return str(folder)


def train(folder: Path, policy: str, resume: Path | None = None, **settings: Any) -> Any:
    """Train on the stream, from its beginning or from a checkpoint; return the record and the trainer."""
    drawn = 0 if resume is None else 4 * int(resume.name.rpartition("-")[2]) // settings.get("num_iterations", 1)
    merged: dict[str, Any] = STEPS | settings
    return train_on_stream(
        StreamLearner, folder, range(len(STREAM))[drawn:], make_model=lambda: policy, resume=resume, **merged
    )


@pytest.mark.parametrize("case", STATEFUL)
def test_learner_resumed_ends_with_the_same_weights(tmp_path: Path, saved_policy: str, case: str) -> None:
    settings = STATEFUL[case]
    saved = settings.get("save_steps", STEPS["save_steps"])
    whole, ended = train(tmp_path, saved_policy, **settings)
    again, resumed = train(tmp_path, saved_policy, tmp_path / f"checkpoint-{saved}", **settings)
    assert len(whole.logs) == 2 * saved and len(again.logs) == saved
    for mine, theirs in zip(again.gradients, whole.gradients[saved:], strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    expected = dict(ended.model.named_parameters())
    assert all(torch.equal(weight, expected[name]) for name, weight in resumed.model.named_parameters())


def test_learner_resumed_reference_differs_from_initial_policy(tmp_path: Path, saved_policy: str) -> None:
    """The reference is saved because without its file a run would continue with the initial policy as its reference."""
    settings = STATEFUL["reference that follows"]
    _, ended = train(tmp_path, saved_policy, **settings)
    saved = torch.load(tmp_path / "checkpoint-4" / REFERENCE, weights_only=True)
    assert all(torch.equal(saved[name], weight) for name, weight in ended.ref_model.state_dict().items())
    initial = exact_llama().state_dict()
    assert any((saved[name] - initial[name]).abs().max() > 1e-3 for name in saved if name in initial)
    (tmp_path / "checkpoint-2" / REFERENCE).unlink()
    with pytest.raises(CheckpointError, match=r"grpo\.sync_ref_model=true: the checkpoint has no reference\.pt"):
        train(tmp_path, saved_policy, tmp_path / "checkpoint-2", **settings)


def test_learner_resumed_with_new_settings_applies_them(tmp_path: Path, saved_policy: str) -> None:
    train(tmp_path, saved_policy)
    changed = {
        "learning_rate": 2e-2, "max_steps": 8, "weight_decay": 0.3, "adam_beta1": 0.5, "adam_beta2": 0.6,
        "adam_epsilon": 1e-3, "save_steps": 3, "logging_steps": 2,
    }  # fmt: skip
    record, trainer = train(tmp_path, saved_policy, tmp_path / "checkpoint-2", **(changed | {"max_steps": 5}))
    decayed, others = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert (decayed["betas"], decayed["eps"], decayed["initial_lr"]) == ((0.5, 0.6), 1e-3, 2e-2)
    # Linear from 2e-2 at step 0 to 0 at step 5. TRL logs the rate with which the step was taken.
    assert [log["learning_rate"] for log in record.logs] == pytest.approx([2e-2 * 2 / 5])  # step 4; logged every 2
    assert (tmp_path / "checkpoint-3").exists() and (tmp_path / "checkpoint-5").exists()


def test_learner_resumed_first_step_takes_the_new_rate(tmp_path: Path, saved_policy: str) -> None:
    train(tmp_path, saved_policy, lr_scheduler_type="constant")
    settings = {"lr_scheduler_type": "constant", "max_steps": 3}
    checkpoint = tmp_path / "checkpoint-2"
    _, stopped = train(tmp_path / "a", saved_policy, checkpoint, **settings, learning_rate=0.0)
    _, moved = train(tmp_path / "b", saved_policy, checkpoint, **settings)
    from safetensors.torch import load_file

    before = load_file(checkpoint / "model.safetensors")
    after = [dict(each.model.named_parameters()) for each in (stopped, moved)]
    assert all(torch.equal(after[0][name], weight) for name, weight in before.items())
    assert not all(torch.equal(after[1][name], weight) for name, weight in before.items())


def test_learner_resumed_with_another_schedule_takes_its_rate(tmp_path: Path, saved_policy: str) -> None:
    train(tmp_path, saved_policy)
    record, _ = train(tmp_path, saved_policy, tmp_path / "checkpoint-2", lr_scheduler_type="cosine")
    # (1 + cos(pi * 2/4)) / 2 = 1/2 in step 3, (1 + cos(pi * 3/4)) / 2 = 0.1464 in step 4.
    assert [log["learning_rate"] for log in record.logs] == pytest.approx([5e-3, 1.464e-3], rel=1e-3)


@pytest.mark.parametrize(
    ("file", "overrides", "message"),
    [
        ("adapter_config.json", [], "the checkpoint holds an adapter, which does not match model.lora or model.peft"),
        ("model.safetensors", ["model.lora={}"], "the checkpoint holds a whole policy"),
        ("shards/policy", [], "written with cluster.shard_learner=true"),
        ("model.safetensors", ["cluster.shard_learner=true"], "written with cluster.shard_learner=false"),
    ],
)
def test_check_checkpoint_kind_of_another_kind_raises(
    tmp_path: Path, file: str, overrides: list[str], message: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint_kind(str(tmp_path), load_config(None, overrides))
