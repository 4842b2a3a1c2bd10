"""Tests of the description of a run at the top of its report."""

from pathlib import Path
from typing import Any

import pytest
from page_samples import CONFIG, write_run

from grpo_ray.pages.report.read import read_run
from grpo_ray.pages.report.settings import Setting, run_facts, run_settings
from grpo_ray.text.redaction import HIDDEN


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"steps_per_generation": 1, "epochs": 1, "num_iterations": 1}, None),
        ({"steps_per_generation": 2, "epochs": 1}, "2 steps x 1 epochs"),
        ({"steps_per_generation": 1, "epochs": 1, "num_iterations": 3}, "1 steps x 3 epochs"),
    ],
)
def test_run_facts_name_the_uses_of_a_generation_batch(
    tmp_path: Path, fields: dict[str, int], expected: str | None
) -> None:
    folder = write_run(tmp_path, config=CONFIG | {"grpo": CONFIG["grpo"] | fields})
    assert dict(run_facts(read_run(str(folder.local)))).get("per generation batch") == expected


@pytest.mark.parametrize(
    ("engine", "use_gpu", "expected"),
    [
        ({}, True, None),
        ({"placement": "colocated", "replicas": 1}, True, None),
        ({"placement": "dedicated"}, True, "1 dedicated, each on 1 GPU"),
        ({"placement": "dedicated", "replicas": [2, 4]}, True, "[2, 4] dedicated, each on 1 GPU"),
        ({"placement": "dedicated", "replicas": 2, "tensor_parallel_size": 4}, True, "2 dedicated, each on 4 GPUs"),
        ({"placement": "dedicated", "replicas": 2}, False, "2 dedicated on CPU"),
        ({"placement": "dedicated", "tensor_parallel_size": 2}, False, "1 dedicated, each of 2 processes on CPU"),
    ],
)
def test_run_facts_name_dedicated_engines(
    tmp_path: Path, engine: dict[str, Any], use_gpu: bool, expected: str | None
) -> None:
    config = CONFIG | {"engine": engine, "cluster": CONFIG["cluster"] | {"use_gpu": use_gpu}}
    assert dict(run_facts(read_run(str(write_run(tmp_path, config=config).local)))).get("engines") == expected


def test_run_facts_of_fine_tuning_count_demonstrations(tmp_path: Path) -> None:
    folder = write_run(tmp_path, config=CONFIG | {"run": CONFIG["run"] | {"kind": "sft"}})
    facts = dict(run_facts(read_run(str(folder.local))))
    assert facts["per step"] == f"{CONFIG['grpo']['prompts_per_step']} demonstrations" and "rewards" not in facts


@pytest.mark.parametrize(("notify", "shown", "changed"), [(None, "null", False), ("https://chat/hook", HIDDEN, True)])
def test_run_settings_masked_only_with_a_value(tmp_path: Path, notify: str | None, shown: str, changed: bool) -> None:
    folder = write_run(tmp_path, config=CONFIG | {"run": CONFIG["run"] | {"notify": notify}})
    assert Setting("run.notify", shown, changed) in run_settings(read_run(str(folder.local)))
