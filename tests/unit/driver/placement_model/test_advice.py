"""Tests of the advice of `grpo-ray check`: when there is some, its text, and the steps that a run recorded."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.cli import print_placement
from grpo_ray.config.loader import from_mapping
from grpo_ray.config.schema import Config
from grpo_ray.driver.placement_model.advice import (
    RecordedSteps,
    advise_placement,
    fit_recorded,
    learner_fits,
    model_size,
    possible_stalenesses,
    recorded_steps,
    workload_of,
)
from grpo_ray.driver.placement_model.placements import colocated_step
from grpo_ray.models.memory import ModelShape
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.rollout_files import write_rollouts
from grpo_ray.storage.run_folder import RunFolder

SHAPE = ModelShape(
    parameters=7_615_616_512, layers=28, hidden_size=3584, intermediate_size=18944, query_size=3584,
    key_value_size=512, vocabulary=152_064, tied_embeddings=False, context_length=32_768,
)  # fmt: skip
"""Qwen2.5-7B."""


FULL = {"path": "org/model"}
"""Policy of which all weights are trained."""


def run_of(**settings: Any) -> Config:
    """Return a run that trains an adapter, whose learner fits on one GPU."""
    grpo = {"prompts_per_step": 16, "max_completion_length": 8192} | settings.pop("grpo", {})
    cluster = {"use_gpu": True, "num_workers": 8} | settings.pop("cluster", {})
    return from_mapping({"grpo": grpo, "cluster": cluster, "model": FULL | {"lora": {"rank": 16}}, **settings})


def recorded_of(generate: float, learn: float, lengths: Sequence[int]) -> RecordedSteps:
    return RecordedSteps(
        generate_seconds=generate, learn_seconds=learn, other_seconds=2.0, workers=8, lengths=[lengths]
    )


def test_size_of_a_dense_model_uses_all_but_the_embedding() -> None:
    size = model_size(SHAPE)
    assert size.cache_bytes == 57_344  # 2 (keys, values) x 28 layers x 512 x 2 bytes
    assert size.active == pytest.approx(7.07e9, rel=0.01) and size.parameters == SHAPE.parameters


@pytest.mark.parametrize(
    ("grpo", "stalenesses"),
    [
        ({}, (1, 2, 4)),
        ({"max_completion_length": 1020}, (1, 2)),
        ({"max_completion_length": 400}, (1,)),
        ({"dynamic_sampling": 2}, ()),
        ({"importance_sampling_level": "sequence"}, (1,)),
        ({"epochs": 2}, ()),
    ],
)
def test_staleness_follows_the_settings(grpo: dict[str, Any], stalenesses: tuple[int, ...]) -> None:
    assert possible_stalenesses(run_of(grpo=grpo)) == stalenesses


@pytest.mark.parametrize(
    "settings",
    [
        {"cluster": {"use_gpu": False, "num_workers": 2}},
        {"cluster": {"num_workers": 1}},
        {"grpo": {"dynamic_sampling": 1}},
    ],
)
def test_advice_is_none_without_gpus_or_staleness(settings: dict[str, Any]) -> None:
    assert advise_placement(run_of(**settings), SHAPE) is None


def test_advice_for_long_tails_is_dedicated() -> None:
    # Most of a step is the longest completion.
    found = advise_placement(run_of(), SHAPE, recorded_of(100, 10, [8000, *[500] * 7]))
    assert found is not None and found.comparison.best.staleness > 1
    first, second = found.lines()
    assert "from recorded steps" in first and "dedicated engines on" in first and "of 8 GPUs" in first
    assert "rollout.max_staleness=" in first and "times with 1" in second
    assert found.to_dict()["recommended"] is True
    json.dumps(found.to_dict())


def test_advice_for_a_slow_learner_is_colocated() -> None:
    found = advise_placement(run_of(), SHAPE, recorded_of(10, 200, [500] * 8))
    assert found is not None and found.to_dict()["recommended"] is False
    (line,) = found.lines()
    assert "colocated engines suit this run" in line


def test_advice_without_steps_names_its_assumptions() -> None:
    found = advise_placement(run_of(), SHAPE)
    assert found is not None and not found.is_recorded
    assert "assuming H100s and 2" in found.lines()[0]  # 0.3 of 8,192 tokens


def test_advice_learner_divides_the_step() -> None:
    found = advise_placement(run_of(grpo={"prompts_per_step": 8}), SHAPE)
    assert found is not None
    assert all(8 % split.learner_gpus == 0 for split in found.comparison.dedicated)


def test_advice_for_dedicated_engines_counts_their_gpus() -> None:
    engine = {"placement": "dedicated", "replicas": [2, 3], "tensor_parallel_size": 2}
    config = run_of(cluster={"num_workers": 4}, engine=engine)
    found = advise_placement(config, SHAPE)
    assert found is not None and found.comparison.gpus == 4 + 2 * 2  # with the fewest engines
    assert all(split.engine_gpus % 2 == 0 for split in found.comparison.dedicated)
    # An engine reads half of the weights on each of its GPUs.
    one, two = (workload_of(each, SHAPE, None).engine for each in (run_of(), config))
    assert two.context_seconds == one.context_seconds / 2 and two.cache_tokens > 2 * one.cache_tokens


def test_advice_for_shared_and_sleeping_engines_is_for_dedicated_ones_without_these_settings() -> None:
    config = run_of(grpo={"vllm_enable_sleep_mode": True, "vllm_tensor_parallel_size": 2})
    assert possible_stalenesses(config) == (1, 2, 4)
    found = advise_placement(config, SHAPE)
    assert found is not None and found.comparison.gpus == 8
    assert all(split.engine_gpus % 2 == 0 for split in found.comparison.dedicated)  # engines of the same size


def test_advice_gives_the_learner_enough_memory() -> None:
    def learners(**cluster: Any) -> set[int]:
        found = advise_placement(run_of(model=FULL, cluster=cluster), SHAPE)
        return set() if found is None else {split.learner_gpus for split in found.comparison.dedicated}

    # Weights, optimizer states and gradients in 32 bits: 16 bytes for each of 7.6e9 parameters, 122 of 80 GB.
    assert not learner_fits(run_of(model=FULL), SHAPE, 8) and learners() == set()
    # Divided over the workers, 2 of them have 61 GB each, and a single one all of it.
    sharded = run_of(model=FULL, cluster={"shard_learner": True})
    assert [learner_fits(sharded, SHAPE, gpus) for gpus in (1, 2, 4)] == [False, True, True]
    assert learners(shard_learner=True, num_workers=2) == set()
    assert learners(shard_learner=True) <= {2, 4}


def test_recorded_durations_are_those_of_a_colocated_step() -> None:
    recorded = recorded_of(80, 30, [4000, 1000])
    work = fit_recorded(workload_of(run_of(), SHAPE, replace(recorded)), recorded)
    step = colocated_step(work, gpus=8)
    assert step.engine_seconds == pytest.approx(80) and step.learner_seconds == pytest.approx(30)
    assert step.seconds == pytest.approx(112)


def write_run(tmp_path: Path, rows: Sequence[dict[str, Any]], steps: int) -> RunFolder:
    folder = RunFolder(str(tmp_path), "run")
    if steps:
        groups = [
            GroupRecord(
                step=step, epoch=0, problem=f"{step}", rewards=(1.0, 0.0), correct=(1.0, 0.0), lengths=(step, 2 * step),
                truncated=(False, False),
            )
            for step in range(1, steps + 1)
        ]  # fmt: skip
        write_rollouts(folder, groups)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "events.jsonl").write_text(
        "".join(json.dumps({"event": "began", "at": 1.0, "step": 0, "workers": count}) + "\n" for count in (2, 4))
    )
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_recorded_steps_are_medians_of_the_run(tmp_path: Path) -> None:
    def row(step: int, generate: float) -> dict[str, Any]:
        phases = {"wait_workers": 1.0, "forward_backward": 3.0, "optimizer": 0.5, "score": 0.25, "measure": 100.0}
        return {"step": step, "phase/generate": generate} | {f"phase/{name}": value for name, value in phases.items()}

    folder = write_run(tmp_path, [row(1, 90.0), row(2, 5.0), row(3, 6.0), {"step": 4}], steps=30)
    found = recorded_steps(folder)
    assert found is not None
    assert found.workers == 4  # of the latest attempt
    assert (found.generate_seconds, found.learn_seconds, found.other_seconds) == (7.0, 3.5, 0.25)
    assert [list(group) for group in found.lengths] == [[step, 2 * step] for step in range(11, 31)]


def test_recorded_steps_of_a_new_run_are_none(tmp_path: Path) -> None:
    assert recorded_steps(write_run(tmp_path, [], steps=0)) is None
    assert recorded_steps(write_run(tmp_path, [{"step": 1, "phase/generate": 1.0}], steps=0)) is None


@pytest.mark.parametrize("name", ["engine/count", "engine/idle_share"])
def test_recorded_steps_are_those_of_colocated_engines_that_wait(tmp_path: Path, name: str) -> None:
    """A run may go on with another placement: the phases of the earlier steps then show something else."""
    row = {"phase/generate": 7.0, "phase/forward_backward": 3.0}
    folder = write_run(tmp_path, [{"step": 1, **row, name: 1.0, "phase/generate": 90.0}, {"step": 2, **row}], steps=2)
    found = recorded_steps(folder)
    assert found is not None and found.generate_seconds == 7.0
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, **row, name: 1.0}) + "\n")
    assert recorded_steps(folder) is None


def printed(config: Config, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    recorded: dict[str, Any] = {}
    print_placement(config, SHAPE, folder, recorded.__setitem__)
    return capsys.readouterr().out, recorded


def test_check_prints_and_records_the_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    phases = {"generate": 100.0, "forward_backward": 10.0, "optimizer": 1.0, "other": 1.0}
    folder = write_run(tmp_path, [{"step": 1} | {f"phase/{name}": value for name, value in phases.items()}], steps=30)
    text, recorded = printed(run_of(), folder, capsys)
    assert text.startswith("engines (simulated, from recorded steps): ")
    assert recorded["placement"]["is_recorded"] is True and len(recorded["placement"]["comparison"]["dedicated"]) == 3
    # Steps during which the engine works do not show how long generating takes.
    text, recorded = printed(run_of(rollout={"max_staleness": 1}), folder, capsys)
    assert "assuming H100s" in text and recorded["placement"]["is_recorded"] is False


def test_check_without_gpus_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = {"use_gpu": False, "num_workers": 2}
    assert printed(run_of(cluster=cluster), write_run(tmp_path, [], steps=0), capsys) == ("", {})
