"""Runs whose problems have no solutions: rewards of the user's own train, measure and rank."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from own_rewards import digits
from small_runs import FinishedRun, events_of, rows_of, same_weights, small_settings, weights_of

from grpo_ray.cli import main
from grpo_ray.config.loader import load_config
from grpo_ray.driver.run import train
from grpo_ray.errors import DataError
from grpo_ray.resilience.chaos import Fault
from grpo_ray.rewards.format import boxed_format
from grpo_ray.storage.records.heldout_files import read_heldout, read_measurements
from grpo_ray.storage.run_folder import RunFolder

STEPS = ("grpo.max_steps=3", "grpo.save_steps=1")
REWARDS = "rewards.functions=['own_rewards:digits', boxed_format]"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of prompts without solutions."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + {n % 7}"}) + "\n" for n in range(120)))
    return path


@pytest.fixture(scope="module")
def settings(prompts: Path) -> list[str]:
    """Overrides of a run on the prompts, a part of which is held out."""
    weights = "grpo.reward_weights=[1.0, 0.25]"
    return [REWARDS, weights, f"data.train={prompts}", "data.heldout=auto", "data.heldout_share=0.2", "data.limit=null"]


@pytest.fixture(scope="module")
def run(cluster: None, policy: Path, settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run on the prompts; tests change nothing in its folder."""
    folder = tmp_path_factory.mktemp("run")
    overrides = [*small_settings("style", folder, policy), *settings, *STEPS]
    return FinishedRun(train(load_config(None, overrides)), folder / "style")


def test_run_without_solutions_is_measured_and_ranked_by_its_rewards(
    run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, summary = run.folder, run.summary
    rows = {row["step"]: row for row in rows_of(folder)}
    assert summary.heldout_before is not None and summary.has_own_score
    for measurement in read_measurements(RunFolder(str(folder.parent), folder.name), "heldout"):
        recorded = read_heldout(RunFolder(str(folder.parent), folder.name), measurement.file).to_pylist()
        texts = [row["completions"][0] for row in recorded]
        own = digits([[{"content": text}] for text in texts])
        scores = [each + 0.25 * boxed for each, boxed in zip(own, boxed_format(texts), strict=True)]
        assert [row["correct"] for row in recorded] == [[score] for score in scores]
        mean = sum(scores) / len(scores)
        step = measurement.file.step
        measured = rows[step]["heldout/accuracy"] if step else summary.heldout_before
        assert measured == pytest.approx(mean)
    ranked = {step: row["heldout/accuracy"] for step, row in rows.items()}
    best = min(ranked, key=lambda step: (-ranked[step], step))
    assert Path(summary.best_checkpoint).name == f"checkpoint-{best:06d}"
    assert summary.heldout_after == ranked[best]

    # `eval` measures the same, but runs the folder's rewards only if it may.
    assert main(["eval", summary.best_checkpoint]) == 2
    assert re.search("own code or model own_rewards:digits.*--trust-rewards", capsys.readouterr().err)
    assert main(["eval", summary.best_checkpoint, "--trust-rewards", "--json", str(tmp_path / "eval.json")]) == 0
    assert "mean score" in capsys.readouterr().out
    evaluation = json.loads((tmp_path / "eval.json").read_text())
    assert evaluation["pass_at_1"]["value"] == pytest.approx(ranked[best])
    assert evaluation["maj_at_k"] is None

    page = tmp_path / "report.html"
    assert main(["report", str(folder), "--out", str(page)]) == 0
    assert "Held-out score" in page.read_text() and "Held-out accuracy" not in page.read_text()


@pytest.mark.slow
def test_killed_run_without_solutions_ends_with_the_same_bits(
    run: FinishedRun, settings: list[str], small_run: Callable[..., Any]
) -> None:
    faults = [Fault("kill-backward", step=3)]
    summary, folder = small_run("killed", *settings, *STEPS, "run.max_failures=1", faults=faults)
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2]
    assert same_weights(weights_of(summary.latest_checkpoint), weights_of(run.summary.latest_checkpoint))
    assert [row["heldout/accuracy"] for row in rows_of(folder)] == [
        row["heldout/accuracy"] for row in rows_of(run.folder)
    ]


def test_reward_that_needs_a_solution_names_the_first_row_without_one(
    small_run: Callable[..., Any], settings: list[str], prompts: Path
) -> None:
    for overrides in (
        ["rewards.functions=['own_rewards:answer_with']", "grpo.reward_weights=null"],
        ["heldout.score=own_rewards:answer_with"],
        ["heldout.score=correctness"],
    ):
        with pytest.raises(DataError, match=r"prompts\.jsonl, row 1: no column 'solution', which a reward"):
            small_run("refused", *settings, *overrides)


def test_check_of_problems_without_solutions_tries_the_rewards(
    cluster: None, policy: Path, settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, config = tmp_path / "check.json", tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump(load_config(None, [*small_settings("style", tmp_path, policy), *settings]).to_dict())
    )
    assert main(["check", str(config), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    (style, boxed) = report["rewards"]
    assert "get -1 -1" in style["note"] and "get 0 0" in boxed["note"]
    assert report["training"]["verified"] == 0 and report["unverifiable_ids"] == []
    assert "solutions verified" not in capsys.readouterr().out
