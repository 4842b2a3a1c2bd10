"""Tests of whole runs that follow one another, with real components: fine-tuning on demonstrations, then GRPO."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import assert_near, groups_of, rows_of, same_weights, weights_of, without_timings

from grpo_ray.cli import main
from grpo_ray.driver.stage_config import Stages, load_stages
from grpo_ray.driver.stage_runs import train_stages
from grpo_ray.errors import ConfigError, TrainingError
from grpo_ray.resilience.chaos import Fault

DEMONSTRATIONS = [{"prompt": f"What is {a} + {a + 1}?", "completion": f"\\boxed{{{2 * a + 1}}}"} for a in range(2, 14)]


@pytest.fixture
def write_stages(cluster: None, policy: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a YAML of small stages, whose run folders are in `tmp_path`, and returns it."""
    demonstrations = tmp_path / "demonstrations.jsonl"
    demonstrations.write_text("".join(json.dumps(row) + "\n" for row in DEMONSTRATIONS))

    def write(name: str, *stages: dict[str, Any]) -> Path:
        shared = {
            "run": {"name": name, "storage_path": str(tmp_path), "max_failures": 0},
            "model": {"path": str(policy)},
            "data": {"heldout": "arithmetic", "heldout_limit": 8},
            "grpo": {"prompts_per_step": 4, "num_generations": 4, "max_steps": 2, "save_steps": 1}
            | {"learning_rate": 1e-4, "adam_epsilon": 1e-6, "max_completion_length": 24},
            "rewards": {"functions": ["correctness", "reward_spies:vary"]},
        }
        warm = {"name": "warm", "kind": "sft", "data": {"train": str(demonstrations)}}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(shared | {"stages": [warm, *stages]}))
        return path

    return write


def names(results: Sequence[Any]) -> list[tuple[str, bool]]:
    """Return the name of each stage, and whether its run was skipped."""
    return [(result.stage.name, result.summary is None) for result in results]


def test_killed_stage_continues_and_finished_ones_are_skipped(
    write_stages: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker is killed in the second step of the fine-tuning; the same command then runs both stages."""
    path = write_stages("two", {"name": "hard", "grpo": {"save_steps": 2}})
    stages = load_stages(path)
    with pytest.raises(TrainingError):
        train_stages(stages, faults={"warm": [Fault("kill-backward", 2)]})
    assert not (tmp_path / "two" / "02-hard" / "config.yaml").exists()
    assert names(train_stages(stages)) == [("warm", False), ("hard", False)]
    warm, hard = tmp_path / "two" / "01-warm", tmp_path / "two" / "02-hard"
    assert [row["step"] for row in rows_of(warm)] == [1, 2]
    assert {"learner/loss", "learner/token_accuracy", "heldout/accuracy"} <= rows_of(warm)[-1].keys()
    problems = [group["problem"] for group in groups_of(warm)]
    assert len(problems) == len(set(problems)) == 8  # 2 steps of 4 demonstrations, none used twice
    best = json.loads((warm / "summary.json").read_text())["best_checkpoint"]
    assert yaml.safe_load((hard / "config.yaml").read_text())["model"]["path"] == best
    assert {"reward/mean", "heldout/accuracy"} <= rows_of(hard)[-1].keys()
    before = json.loads((hard / "heldout_before.json").read_text())["pass_at_1"]["value"]
    assert before == json.loads((warm / "summary.json").read_text())["heldout_after"]
    # All have ended: nothing is run, and a change is refused.
    assert main(["train", str(path)]) == 0
    assert "stage 2 of 2, hard: has ended before" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"stage warm has ended with grpo.learning_rate=0.0001, and it is now 0.01"):
        train_stages(load_stages(path, ["stages.warm.grpo.learning_rate=0.01"]))
    assert names(train_stages(load_stages(path, ["run.trace=true"]))) == [("warm", True), ("hard", True)]
    assert main(["report", str(tmp_path / "two")]) == 0
    page = (tmp_path / "two" / "report.html").read_text()
    assert "01-warm" in page and "02-hard" in page


@pytest.mark.slow
def test_kill_in_each_of_three_stages_changes_no_bit(write_stages: Callable[..., Path], tmp_path: Path) -> None:
    """Fine-tuning and two stages of GRPO; in each a worker is killed, and the same command continues."""
    last = ({"name": "short"}, {"name": "long", "grpo": {"max_completion_length": 32}})
    train_stages(load_stages(write_stages("whole", *last)))
    stages = load_stages(write_stages("killed", *last))
    for name in ("warm", "short", "long"):
        with pytest.raises(TrainingError):
            train_stages(stages, faults={name: [Fault("kill-backward", 2)]})
    train_stages(stages)
    for folder in ("01-warm", "02-short", "03-long"):
        whole, killed = tmp_path / "whole" / folder, tmp_path / "killed" / folder
        assert without_timings(rows_of(killed)) == without_timings(rows_of(whole))
        assert same_weights(final_weights(killed), final_weights(whole))


@pytest.mark.slow
def test_one_and_two_workers_take_the_same_steps(write_stages: Callable[..., Path], tmp_path: Path) -> None:
    for workers in (1, 2):
        path = write_stages(f"of-{workers}", {"name": "hard"})
        train_stages(load_stages(path, [f"cluster.num_workers={workers}"]))
    for folder in ("01-warm", "02-hard"):
        assert_near(final_weights(tmp_path / "of-1" / folder), final_weights(tmp_path / "of-2" / folder))


@pytest.mark.slow
def test_adapter_of_a_stage_is_merged_for_the_next(write_stages: Callable[..., Path], tmp_path: Path) -> None:
    path = write_stages("adapted", {"name": "hard"})
    train_stages(load_stages(path, ["model.lora={rank: 4, alpha: 8}"]))
    hard = tmp_path / "adapted" / "02-hard"
    merged = tmp_path / "adapted" / "policies" / "01-warm"
    assert yaml.safe_load((hard / "config.yaml").read_text())["model"]["path"] == str(merged)
    assert (merged / "model.safetensors").exists() and not (merged / "adapter_config.json").exists()
    before = json.loads((hard / "heldout_before.json").read_text())["pass_at_1"]["value"]
    assert before == json.loads((tmp_path / "adapted" / "01-warm" / "summary.json").read_text())["heldout_after"]


def final_weights(run: Path) -> dict[str, Any]:
    """Return the weights of the latest checkpoint of a run."""
    return weights_of(json.loads((run / "summary.json").read_text())["latest_checkpoint"])


def test_stages_are_checked_before_the_first_begins(write_stages: Callable[..., Path], tmp_path: Path) -> None:
    """The second stage's data has a mistake, which is found before a worker starts."""
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "1 + 1", "solution": "2"}\n{"prompt": "1 + 1"}\n')
    stages: Stages = load_stages(write_stages("broken", {"name": "hard", "data": {"train": str(broken)}}))
    with pytest.raises(Exception, match=r"stage hard: .*broken.jsonl, row 2: no column 'solution'"):
        train_stages(stages)
    assert not (tmp_path / "broken" / "01-warm" / "config.yaml").exists()
