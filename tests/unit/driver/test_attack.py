"""Tests of the config of an attack's training, and of the completions that it shows."""

from dataclasses import replace
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


def attacked(config: Config, gpus: int = 0, has_plain_prompts: bool = False) -> Config:
    return attack_config(config, gpus=gpus, has_plain_prompts=has_plain_prompts)


def test_embedded_policy_is_trained_as_in_the_run(tmp_path: Path) -> None:
    grpo = {"prompts_per_step": 4, "learning_rate": 2e-3, "warmup_steps": 0.1}
    config = config_of(tmp_path, grpo=grpo, model={"path": "tiny-guess"})
    trial = attacked(config)
    assert trial.run.name == "r-attack-1" and trial.model == config.model and trial.cluster == config.cluster
    assert trial.grpo.learning_rate == 2e-3 and trial.grpo.prompts_per_step == 4
    assert dict(trial.grpo.trl) == {"lr_scheduler_type": "constant"}  # a warm-up would take all steps of an attack
    assert trial.data.heldout_limit == 32 and trial.data.limit == 2000


def test_steps_are_whole_batches(tmp_path: Path) -> None:
    assert attacked(config_of(tmp_path, grpo={"epochs": 3, "max_steps": 9, "save_steps": 9})).grpo.max_steps == 9999


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


@pytest.mark.parametrize(("gpus", "workers"), [(8, 8), (20, 8), (7, 4), (1, 1)])
def test_run_attacks_with_its_own_policy_on_the_gpus_there_are(tmp_path: Path, gpus: int, workers: int) -> None:
    config = config_of(tmp_path, **GPU_RUN)
    trial = attacked(config, gpus)
    assert trial.model == config.model and trial.cluster == replace(config.cluster, num_workers=workers)
    assert trial.grpo.trl == {**config.grpo.trl, "lr_scheduler_type": "constant"}


def test_run_without_gpus_attacks_with_an_embedded_policy(tmp_path: Path) -> None:
    run = {"name": "r", "storage_path": str(tmp_path), "from_checkpoint": "/other/run"}
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert attacked(from_mapping({**GPU_RUN, "rollout": form}), 1).rollout.structured_outputs is not None
    trial = attacked(from_mapping({**GPU_RUN, "run": run, "rollout": form}))
    assert trial.rollout.structured_outputs is None  # its tokens may not be able to write it
    assert trial.model.path == "tiny-arithmetic" and trial.model.lora is None and trial.run.from_checkpoint is None
    assert not trial.cluster.use_gpu and trial.cluster.num_workers == 2
    assert trial.engine.max_model_len is None and trial.data.max_prompt_length is None
    assert trial.rewards.functions == ("correctness", "boxed_format") and trial.data.limit == 50
    assert dict(trial.grpo.trl) == {"reward_weights": [1.0, 0.2]} and trial.grpo.max_completion_length == 128


TOOLS = {"tools": ["grpo_ray.tools.python_tool:python"]}


@pytest.mark.parametrize(("rollout", "is_plain"), [(TOOLS, False), ({}, True)])
def test_run_that_needs_its_own_policy_is_refused_without_gpus_only(
    tmp_path: Path, rollout: dict[str, Any], is_plain: bool
) -> None:
    config = config_of(tmp_path, **GPU_RUN | {"rollout": rollout})
    with pytest.raises(ConfigError, match=r"Qwen/Qwen2\.5-7B needs GPUs, of which this cluster has 0"):
        attacked(config, has_plain_prompts=is_plain)
    assert attacked(config, 2, is_plain).model.path == "Qwen/Qwen2.5-7B"
    on_cpu = config_of(tmp_path, model={"path": "own/tiny"}, rollout=rollout)
    assert attacked(on_cpu, has_plain_prompts=is_plain).model.path == "own/tiny"


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
