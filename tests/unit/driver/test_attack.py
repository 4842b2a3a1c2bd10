"""Tests of the config of an attack's training, and of the completions that it shows."""

from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config.loader import from_mapping
from grpo_ray.config.schema import Config
from grpo_ray.driver.attack import attack_config, paid_completions
from grpo_ray.errors import ConfigError
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.rollout_files import write_rollouts
from grpo_ray.storage.run_folder import RunFolder


def config_of(tmp_path: Path, **sections: Any) -> Config:
    return from_mapping({"run": {"name": "r", "storage_path": str(tmp_path)}, **sections})


def test_embedded_policy_is_trained_as_in_the_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, grpo={"prompts_per_step": 4, "learning_rate": 2e-3}, model={"path": "tiny-guess"})
    attacked = attack_config(config, can_use_gpus=False)
    assert attacked.run.name == "r-attack-1" and attacked.model == config.model and attacked.cluster == config.cluster
    assert attacked.grpo.learning_rate == 2e-3 and attacked.grpo.prompts_per_step == 4
    assert attacked.data.heldout_limit == 1 and attacked.data.limit == 2000


GPU_RUN: dict[str, Any] = {
    "model": {"path": "Qwen/Qwen2.5-7B", "lora": {}},
    "cluster": {"num_workers": 8, "use_gpu": True},
    "data": {"limit": 50, "max_prompt_length": 512},
    "engine": {"max_model_len": 2048},
    "rewards": {"functions": ["correctness", "boxed_format"]},
    "grpo": {
        "prompts_per_step": 64, "max_completion_length": 1024, "beta": 0.1, "reward_weights": [1.0, 0.2],
        "tokens_per_micro_batch": 8192, "steps_per_generation": 2,
    },
}  # fmt: skip


def test_run_with_gpus_attacks_with_its_own_policy(tmp_path: Path) -> None:
    config = config_of(tmp_path, **GPU_RUN)
    attacked = attack_config(config, can_use_gpus=True)
    assert (
        attacked.model == config.model and attacked.cluster == config.cluster and attacked.grpo.trl == config.grpo.trl
    )


def test_run_without_its_gpus_attacks_with_an_embedded_policy(tmp_path: Path) -> None:
    attacked = attack_config(config_of(tmp_path, **GPU_RUN), can_use_gpus=False)
    assert attacked.model.path == "tiny-arithmetic" and attacked.model.lora is None
    assert not attacked.cluster.use_gpu and attacked.cluster.num_workers == 2
    assert attacked.engine.max_model_len is None and attacked.data.max_prompt_length is None
    assert attacked.rewards.functions == ("correctness", "boxed_format") and attacked.data.limit == 50
    assert dict(attacked.grpo.trl) == {"reward_weights": [1.0, 0.2]} and attacked.grpo.max_completion_length == 128


def test_run_with_tools_without_its_gpus_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, **GPU_RUN | {"rollout": {"tools": ["grpo_ray.tools.python_tool:python"]}})
    with pytest.raises(ConfigError, match=r"Qwen/Qwen2\.5-7B needs GPUs, which this cluster lacks"):
        attack_config(config, can_use_gpus=False)


def test_paid_completions_are_the_best_of_the_last_steps_each_text_once(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "r")

    def group(step: int, **texts: float) -> GroupRecord:
        rewards, count = tuple(texts.values()), len(texts)
        return GroupRecord(
            step=step, epoch=0, problem=f"{step:016x}", rewards=rewards, correct=None, lengths=(1,) * count,
            truncated=(False,) * count, prompt="p", completions=tuple(texts), sample="first",
            advantages=(0.0,) * count,
        )  # fmt: skip

    write_rollouts(folder, [group(1, early=9.0), group(5, a=1.0, b=float("nan"), c=0.5), group(6, a=2.0, d=1.0)])
    shown = [(each.completion, each.reward, each.step) for each in paid_completions(folder, steps=6)]
    assert shown == [("a", 2.0, 6), ("d", 1.0, 6), ("c", 0.5, 5)]
