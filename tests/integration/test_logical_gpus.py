"""Tests of the GPU path on a machine without GPUs: Ray counts four of them, and workers compute on the CPU.

Everything but the device is the GPU path: resources and placement of workers and of engines that measure, preflight,
elastic worker counts, tensor-parallel groups, the end of a run (`grpo_ray/device.py`).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import REFERENCE, FinishedRun, assert_near, events_of, rows_of, same_weights, small_settings, weights_of

from grpo_ray.cli import main
from grpo_ray.device import LOGICAL_GPUS
from grpo_ray.errors import ConfigError
from grpo_ray.evaluation.baseline import baseline_file
from grpo_ray.resilience.chaos import Fault
from grpo_ray.resilience.gpu_driver import cuda_of_torch

GPUS = [
    "cluster.use_gpu=true",
    "model.dtype=float32",  # as without GPUs, so that weights can be compared
]
SPIES = ["rewards.functions=[correctness, 'reward_spies:vary', 'reward_spies:on_a_gpu']"]

pytestmark = pytest.mark.skipif(cuda_of_torch() is not None, reason="the installed torch computes on real GPUs")


@pytest.fixture(autouse=True)
def gpus(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drivers and workers use the GPUs that the cluster declares."""
    monkeypatch.setenv(LOGICAL_GPUS, "4")


def evaluation(policy: str, file: Path, *overrides: str) -> dict[str, Any]:
    """Evaluate a policy with `grpo-ray eval` and return the result without its rate."""
    assert main(["eval", policy, "--json", str(file), *overrides]) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    assert result.pop("completions_per_second") > 0
    return result


def baseline(folder: Path) -> dict[str, Any]:
    """Return the baseline of a run without its rate."""
    result: dict[str, Any] = json.loads((folder / baseline_file("heldout")).read_text())
    result.pop("completions_per_second")
    return result


def test_run_on_gpus_takes_the_steps_of_one_without(
    small_run: Callable[..., Any], reference_run: FinishedRun, tmp_path: Path
) -> None:
    summary, folder = small_run("gpus", *REFERENCE, *GPUS, *SPIES)
    assert same_weights(weights_of(summary.latest_checkpoint), weights_of(reference_run.summary.latest_checkpoint))
    assert baseline(folder) == baseline(reference_run.folder)
    written = json.loads((folder / "summary.json").read_text())
    assert (written["steps"], written["heldout_after"]) == (5, reference_run.summary.heldout_after)
    assert written["heldout_before"] == reference_run.summary.heldout_before
    memory = written["memory"]
    assert memory["estimated"]["total_gib"] == 80 and memory["estimated"]["fits"]
    assert memory["measured"]["resident_peak_gib"] > 0  # of the process, since there is no GPU to measure
    assert any("estimated use" in event["what"] for event in events_of(folder, "notice"))
    result = evaluation(summary.best_checkpoint, tmp_path / "evaluation.json")
    assert result["problems"] == 24 and result["pass_at_1"]["value"] == summary.heldout_after


@pytest.mark.slow
def test_run_derives_its_passes_from_gpu_memory(small_run: Callable[..., Any]) -> None:
    summary, folder = small_run("derived", *GPUS, "grpo.micro_batch_size=null", "grpo.max_steps=3")
    estimated = summary.memory["estimated"]
    assert summary.steps == 3 and not estimated["gradient_checkpointing"]
    line = f"passes of up to {estimated['tokens_per_micro_batch']:,} tokens without recomputation"
    assert [line in event["what"] for event in events_of(folder, "notice") if "passes" in event["what"]] == [True]


@pytest.mark.slow
def test_killed_worker_resumes_on_its_gpu(
    small_run: Callable[..., Any], reference_run: FinishedRun, tmp_path: Path
) -> None:
    summary, folder = small_run("killed", *REFERENCE, *GPUS, *SPIES, faults=[Fault("kill-backward", step=3, rank=1)])
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2]
    assert same_weights(weights_of(summary.latest_checkpoint), weights_of(reference_run.summary.latest_checkpoint))
    assert summary.price.gpu_seconds_lost > 0
    exported = tmp_path / "exported"
    assert main(["export", summary.latest_checkpoint, str(exported)]) == 0
    result = evaluation(str(exported), tmp_path / "exported.json", *GPUS, "data.heldout_limit=24")
    assert result["problems"] == 24
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(page)]) == 0
    assert "2 on GPUs" in page.read_text()


@pytest.mark.slow
def test_baseline_is_measured_where_the_workers_did_not(
    small_run: Callable[..., Any], reference_run: FinishedRun
) -> None:
    """The driver starts an engine on a GPU before it resumes a run, and at the end of one."""
    settings = [*REFERENCE, *GPUS, "run.trace=false"]
    _, folder = small_run("baseline", *settings, "grpo.max_steps=2")
    for max_steps in (4, 4):  # one launch trains, the other finds no step left
        (folder / baseline_file("heldout")).unlink()
        (folder / "summary.json").unlink()
        small_run("baseline", *settings, f"grpo.max_steps={max_steps}")
        assert (folder / "summary.json").exists()
        assert baseline(folder) == baseline(reference_run.folder)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
def test_worker_counts_on_gpus_take_the_same_steps(
    small_run: Callable[..., Any], reference_run: FinishedRun, workers: int
) -> None:
    summary, _ = small_run(f"workers-{workers}", *REFERENCE, *GPUS, *SPIES, f"cluster.num_workers={workers}")
    assert_near(weights_of(summary.latest_checkpoint), weights_of(reference_run.summary.latest_checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["null", "80"])
def test_token_limit_takes_the_same_steps(
    small_run: Callable[..., Any], reference_run: FinishedRun, tokens: str
) -> None:
    """The limit of the memory plan, which the whole step stays below, and one of two or three completions."""
    limit = ["grpo.micro_batch_size=null", f"grpo.tokens_per_micro_batch={tokens}"]
    summary, folder = small_run(f"tokens-{tokens}", *REFERENCE, *GPUS, *limit)
    assert_near(weights_of(summary.latest_checkpoint), weights_of(reference_run.summary.latest_checkpoint))
    assert all(row["learner/positions_share"] <= 1 for row in rows_of(folder))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["2", "[2, 4]"])
def test_checkpoints_are_measured_on_a_gpu_beside_training(
    small_run: Callable[..., Any], reference_run: FinishedRun, workers: str
) -> None:
    """An elastic run leaves a GPU for it: of four GPUs two are used, since three workers do not divide the step."""
    summary, folder = small_run(
        "background", *REFERENCE, *GPUS, *SPIES, "run.measure=background", f"cluster.num_workers={workers}"
    )
    assert [event["workers"] for event in events_of(folder, "began")] == [2]
    assert {event["step"] for event in events_of(folder, "measured")} == {2, 4, 5}
    assert summary.heldout_after == reference_run.summary.heldout_after


def test_background_measuring_without_a_free_gpu_is_refused(small_run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"run\.measure=background needs 1 GPU .* has 4; use fewer workers, or "):
        small_run("refused", *GPUS, "run.measure=background", "cluster.num_workers=4")


@pytest.mark.slow
def test_elastic_run_uses_all_gpus(small_run: Callable[..., Any]) -> None:
    _, folder = small_run("elastic", *GPUS, *SPIES, "cluster.num_workers=[2, 4]", "grpo.max_steps=2")
    assert [event["workers"] for event in events_of(folder, "began")] == [4]
    assert len(rows_of(folder)) == 2


@pytest.mark.slow
def test_tensor_parallel_engines_train_and_measure(
    small_run: Callable[..., Any], reference_run: FinishedRun, tmp_path: Path
) -> None:
    """Engines of two GPUs: workers share one while training, and an evaluation's engine has two processes."""
    settings = [*REFERENCE, *GPUS, *SPIES, "grpo.vllm_tensor_parallel_size=2"]
    summary, folder = small_run("shared", *settings)
    assert_near(weights_of(summary.latest_checkpoint), weights_of(reference_run.summary.latest_checkpoint))
    result = evaluation(summary.best_checkpoint, tmp_path / "evaluation.json")
    assert result["pass_at_1"]["value"] == summary.heldout_after
    (folder / baseline_file("heldout")).unlink()
    small_run("shared", *settings)
    assert baseline(folder) == baseline(reference_run.folder)


def test_engine_larger_than_any_node_is_refused(
    small_run: Callable[..., Any], policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = ["cluster.num_workers=8", "grpo.vllm_tensor_parallel_size=8", "grpo.prompts_per_step=8"]
    with pytest.raises(ConfigError, match=r"cluster\.num_workers=8 .* needs 8 GPUs, and the cluster has 4"):
        small_run("refused", *GPUS, *shared)
    assert main(["eval", str(policy), *small_settings("refused", tmp_path, policy), *GPUS, *shared]) == 2
    assert "needs 8 GPUs of one node, and the largest node has 4" in capsys.readouterr().err
