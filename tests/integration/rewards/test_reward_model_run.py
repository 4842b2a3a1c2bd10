"""Reward models on an actor of their own: in real runs, beside logical GPUs, and after their process has died."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from failing_storage import wait_for
from faulty_runs import outcome_of, same
from reward_models import rendered, score_alone, score_with_trl, write_reward_model
from small_runs import groups_of, rows_of
from worker_group import run_workers

from grpo_ray.cli import main
from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.device import LOGICAL_GPUS
from grpo_ray.errors import RewardError
from grpo_ray.resilience.chaos import Fault
from grpo_ray.resilience.gpu_driver import cuda_of_torch
from grpo_ray.rewards.registry import load_rewards
from grpo_ray.rewards.reward_models import RewardModels, actor_name, running_reward_models

PROMPTS = [[{"role": "user", "content": "7+5"}], [{"role": "user", "content": "1+2+3"}]]
ON_LOGICAL_GPUS = pytest.mark.skipif(cuda_of_torch() is not None, reason="the installed torch computes on real GPUs")
COMPLETIONS = [[{"role": "assistant", "content": "12"}], [{"role": "assistant", "content": "It may be 7."}]]


@pytest.fixture(scope="module")
def judge(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("models") / "judge", policy)


def config_of(*overrides: str) -> Config:
    return load_config(None, list(overrides))


def score(config: Config) -> list[float]:
    """Return the rewards of the first reward for the conversations above."""
    [reward, *_] = load_rewards(config.rewards)
    rewards: list[float] = asyncio.run(reward(prompts=PROMPTS, completions=COMPLETIONS))
    return rewards


def test_scores_equal_those_of_trl(policy: Path, judge: Path) -> None:
    cases: list[tuple[list[Any], list[Any]]] = [(PROMPTS, COMPLETIONS), (["7+5=", "1+2+3="], ["12", " It may be 7."])]
    [expected] = run_workers(score_with_trl, 1, str(judge), str(policy), cases)
    models = RewardModels(
        [str(judge)], device="cpu", arguments={"dtype": "float32"}, threads=1, trust_remote_code=False,
        chat_template_kwargs={},
    )  # fmt: skip
    for (prompts, completions), rewards in zip(cases, expected, strict=True):
        assert models.score(str(judge), prompts, completions) == pytest.approx(rewards, abs=1e-5)
        assert abs(rewards[0] - rewards[1]) > 0.01


def wait_until_gone(name: str) -> None:
    def is_gone() -> bool:
        try:
            ray.get_actor(name)
        except ValueError:
            return True
        return False

    wait_for(is_gone, "the end of the actor", 120)


def test_actor_answers_again_after_its_process_has_died(cluster: None, judge: Path) -> None:
    config = config_of(f"rewards.functions=['{judge}']")
    texts = [rendered(judge, prompt + answer) for prompt, answer in zip(PROMPTS, COMPLETIONS, strict=True)]
    with running_reward_models(config):
        with running_reward_models(config):
            first = score(config)
        ray.kill(ray.get_actor(actor_name(config.rewards)), no_restart=False)
        assert score(config) == first == pytest.approx(score_alone(judge, texts), abs=1e-5)
    wait_until_gone(actor_name(config.rewards))
    with pytest.raises(RewardError, match="judge is not running; it runs while"):
        score(config)


@pytest.mark.slow
def test_models_that_cannot_be_loaded_are_one_line(cluster: None, judge: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((judge / "config.json").read_text())
    with (
        pytest.raises(
            RewardError, match=rf"^rewards\.functions: .* {tmp_path} cannot be loaded: Error no file"
        ) as caught,
        running_reward_models(config_of(f"rewards.functions=['{tmp_path}']")),
    ):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "gpus", [pytest.param(True, marks=ON_LOGICAL_GPUS), pytest.param(False, marks=pytest.mark.slow)]
)
def test_reward_model_scores_beside_a_function(
    small_run: Callable[..., Any], judge: Path, monkeypatch: pytest.MonkeyPatch, gpus: bool
) -> None:
    options = ["cluster.use_gpu=true", "model.dtype=float32", "cluster.num_workers=2"] if gpus else []
    if gpus:
        monkeypatch.setenv(LOGICAL_GPUS, "4")
    summary, folder = small_run(
        "judged", f"rewards.functions=[correctness, {judge}]", "grpo.reward_weights=[1.0, 0.5]", "grpo.max_steps=2",
        "heldout.score=reward", "data.heldout_limit=4", *options,
    )  # fmt: skip
    for row in rows_of(folder):
        # The model's scores are not whole numbers, and the reward is the weighted sum.
        whole = row["reward/correctness_mean"] + 0.5 * row["reward/judge_mean"]
        assert row["reward/mean"] == pytest.approx(whole, abs=1e-5) and row["reward/judge_std"] > 0
    texts, rewards = [], []
    for group in groups_of(folder):
        for completion, reward, correct in zip(
            group["completions"] or (), group["rewards"], group["correct"], strict=False
        ):
            messages = [{"role": "user", "content": group["prompt"]}, {"role": "assistant", "content": completion}]
            texts.append(rendered(judge, messages))
            rewards.append((reward - correct) / 0.5)
    assert len(texts) >= 8 and score_alone(judge, texts) == pytest.approx(rewards, abs=1e-4)
    assert summary.heldout_before % 0.25 != 0  # correctness alone is a number of quarters
    wait_until_gone(actor_name(config_of(f"rewards.functions=[{judge}]").rewards))


@pytest.mark.slow
@ON_LOGICAL_GPUS
@pytest.mark.parametrize("share", ["0.4", "1"])
def test_checkpoints_are_measured_in_the_background_with_the_models_of_training(
    small_run: Callable[..., Any], judge: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    monkeypatch.setenv(LOGICAL_GPUS, "4")
    summary, folder = small_run(
        "background", f"rewards.functions=[{judge}]", f"rewards.model_gpus={share}", "run.measure=background",
        "cluster.use_gpu=true", "model.dtype=float32", "cluster.num_workers=2", "data.heldout_limit=4",
    )  # fmt: skip
    measured = [row["heldout/accuracy"] for row in rows_of(folder) if "heldout/accuracy" in row]
    assert len(measured) == 2 and summary.heldout_after in measured  # steps 2 and 4


@pytest.mark.slow
def test_run_is_exact_when_killed_and_its_checkpoint_is_measured_again(
    small_run: Callable[..., Any], judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"rewards.functions=[{judge}]", "grpo.max_steps=4", "run.max_failures=1", "data.heldout_limit=8"]
    summary, whole = small_run("whole", *options)
    _, killed = small_run("killed", *options, faults=[Fault("kill-backward", step=3)])
    same(outcome_of(killed), outcome_of(whole))
    file = tmp_path / "measured.json"
    words = ["eval", summary.best_checkpoint, "--json", str(file)]
    assert main(words) == 2
    assert "its own code or model" in capsys.readouterr().err
    assert main([*words, "--trust-rewards"]) == 0
    assert json.loads(file.read_text())["pass_at_1"]["value"] == pytest.approx(summary.heldout_after, abs=1e-5)
