"""Commands of the documents that no other test runs, as a user runs them; `tests/unit/test_commands.py` lists all."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser_page import BROWSERS
from small_runs import FinishedRun, small_settings
from synthetic_runs import SyntheticRun

from grpo_ray.cli import main

ROOT = Path(__file__).parents[2]


def output_of(*arguments: str, **environment: str) -> str:
    """Run Python with the arguments, on no cluster unless `environment` names one; return its output."""
    inherited = os.environ | {"RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=inherited | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def address(cluster: None) -> str:
    """Address of the tests' cluster."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


@pytest.mark.main_path
def test_check_of_a_sound_config_passes(
    cluster: None, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "check.json"
    config = [str(ROOT / "jobs/configs/arithmetic.yaml"), *small_settings("checked", tmp_path, policy), "data.limit=20"]
    assert main(["check", *config, "--json", str(written)]) == 0
    text = capsys.readouterr().out
    assert "rewards, tried on the first problems" in text and "GPU memory of one worker" in text
    training = json.loads(written.read_text())["training"]
    assert (training["problems"], training["verified"]) == (20, 20)
    left_out = tmp_path / "checked" / "unverifiable.json"
    assert json.loads(left_out.read_text()) == []
    left_out.write_text('["0123456789abcdef"]')  # as of an earlier check
    assert main(["check", *config, "--sample", "5"]) == 0
    assert "will leave out" not in capsys.readouterr().out
    assert json.loads(left_out.read_text()) == ["0123456789abcdef"]  # a sample replaces no complete list


@pytest.mark.main_path
def test_train_job_takes_its_steps(policy: Path, tmp_path: Path) -> None:
    config = ["jobs/configs/arithmetic.yaml", *small_settings("job", tmp_path, policy)]
    text = output_of("jobs/train.py", *config, "cluster.num_workers=1")
    assert "step 4/4" in text
    summary = json.loads((tmp_path / "job" / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["heldout_after"] is not None


@pytest.mark.main_path
def test_evaluate_job_measures_a_checkpoint(address: str, reference_run: FinishedRun, tmp_path: Path) -> None:
    written = tmp_path / "evaluation.json"
    checkpoint = str(reference_run.summary.best_checkpoint)
    output_of("jobs/evaluate.py", checkpoint, "--json", str(written), "data.heldout_limit=4", RAY_ADDRESS=address)
    evaluation = json.loads(written.read_text())
    assert evaluation["problems"] == 4 and 0 <= evaluation["pass_at_1"]["value"] <= 1


@pytest.mark.main_path
def test_replay_shows_a_recorded_run(reference_run: FinishedRun) -> None:
    text = output_of("tests/helpers/replay.py", str(reference_run.folder), "--speed", "1000")
    assert "5/5" in text  # steps


@pytest.mark.main_path
def test_run_histories_counts_what_happened() -> None:
    text = output_of("tests/helpers/run_histories.py", "--histories", "1")
    begin, _, counts = text.partition(" s: ")
    assert begin.startswith("1 histories in ") and "'steps'" in counts


@pytest.mark.main_path
def test_synthetic_run_is_reported(tmp_path: Path) -> None:
    folder, page = tmp_path / "run", tmp_path / "page.html"
    output_of("tests/helpers/synthetic_runs.py", str(folder), "--steps", "20", "--groups", "2")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 20
    output_of("-m", "grpo_ray.cli", "report", str(folder), "--out", str(page))
    assert page.stat().st_size > 10_000


@pytest.mark.main_path
def test_terminal_recording_draws_the_screen(tmp_path: Path) -> None:
    picture, text = tmp_path / "run.svg", "a short line"
    output_of("tests/helpers/terminal_recording.py", str(picture), "--", "echo", text)
    assert text in picture.read_text()


def test_page_picture_of_a_run_is_taken(tmp_path: Path) -> None:
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip("no browser")
    run = SyntheticRun(str(tmp_path), groups_per_step=2, num_generations=4, save_steps=4, num_problems=8, max_steps=4)
    run.grow(4)
    picture = tmp_path / "page.png"
    output_of("tests/helpers/page_picture.py", str(run.folder.local), str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
