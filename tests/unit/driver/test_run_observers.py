"""Tests of the choice of a run's followers."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from grpo_ray.config.loader import load_config
from grpo_ray.driver.cluster.connection import WarmStartEnd
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.driver.run_observers import TAG_CHARS, build_observers, tag
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.storage.run_folder import RunFolder

TOOLS = ["rollout.tools=['grpo_ray.tools.examples:multiply']"]


@pytest.mark.parametrize(
    ("settings", "owns_cluster", "ends"),
    [(TOOLS, True, True), (TOOLS, False, False), ([], True, False)],
    ids=["tools", "cluster of the caller", "no tools"],
)
def test_build_observers_warm_start_ends_in_runs_with_tools(
    settings: list[str], owns_cluster: bool, ends: bool, tmp_path: Path
) -> None:
    context = RunContext(
        load_config(None, settings),
        RunFolder(str(tmp_path), "run"),
        ProgressLine(1, Console(file=io.StringIO())),
        owns_cluster=owns_cluster,
    )
    observers = build_observers(context, publish=lambda entry: None, request_stop=lambda reason: None)
    assert any(isinstance(each, WarmStartEnd) for each in observers) == ends


def test_tag_of_a_long_path_is_its_end() -> None:
    path = f"/mnt/{'folder/' * 20}problems.jsonl"
    assert tag("tiny-arithmetic") == "tiny-arithmetic" and tag("x" * TAG_CHARS) == "x" * TAG_CHARS
    assert len(tag(path)) == TAG_CHARS and tag(path).endswith("folder/problems.jsonl")


def test_longest_tag_is_that_of_wandb() -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed; it belongs to the extra `test`")
    wandb.Settings(run_tags=("x" * TAG_CHARS,))
    with pytest.raises(ValueError, match="between 1 and 64 characters"):
        wandb.Settings(run_tags=("x" * (TAG_CHARS + 1),))
