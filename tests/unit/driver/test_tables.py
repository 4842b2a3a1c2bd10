"""Tests of the tables that the commands print."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.driver.summary import HeldoutSummary, summarize_run
from grpo_ray.driver.tables import print_fault_outcomes, print_summary, show_memory
from grpo_ray.models.memory import GPU_CARDS, ModelShape, plan_cards
from grpo_ray.resilience.chaos import Fault, FaultOutcome
from grpo_ray.storage.run_folder import RunFolder


def test_print_summary_unmeasured_values_are_dashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = {"accuracy": 0.5, "low": 0.25, "high": 0.75}
    heldout = {"heldout": HeldoutSummary(problems=9, before={}, after=after)}
    summary = summarize_run(load_config(), RunFolder(str(tmp_path), "run"), heldout, 60)
    print_summary(summary)
    lines = capsys.readouterr().out.splitlines()
    assert any("held-out before" in line and "-  (9 problems)" in line for line in lines)
    assert any("held-out after" in line and "0.500 [0.250, 0.750]  (9 problems)" in line for line in lines)
    assert not any("evaluate it with" in line for line in lines)  # there is no checkpoint


def test_print_summary_gives_each_line_one_scope(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's time of startup is that of all its launches, and may exceed the wall time of the last one."""
    heldout = {"heldout": HeldoutSummary(problems=9, before={}, after={})}
    summary = summarize_run(load_config(), RunFolder(str(tmp_path), "run"), heldout, 45, stopped="SIGTERM")
    print_summary(replace(summary, price=replace(summary.price, startup_seconds=94.0)))
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert rows["wall time"] == "45 s of this launch; all else is of the whole run"
    assert rows["startup"] == "94 s"
    assert rows["held-out after"] == "not measured: the launch was stopped by SIGTERM"


def test_print_summary_command_is_quoted_for_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heldout = {"heldout": HeldoutSummary(problems=9, before={}, after={})}
    summary = summarize_run(load_config(), RunFolder(str(tmp_path), "run"), heldout, 60)
    checkpoint = "s3://bucket/my runs/a?region=x&b=$HOME/checkpoint-000001"
    print_summary(replace(summary, best_checkpoint=checkpoint))
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "evaluate it with" in each)
    command = shlex.split(line.partition("evaluate it with")[2])
    assert command[1:] == ["eval", checkpoint, "--num-samples", "8"]


@pytest.mark.parametrize(
    ("tool", "is_own"), [("grpo_ray.tools.examples:multiply", False), ("hostile_tools:Counter", True)]
)
def test_print_summary_names_the_command_that_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: str, is_own: bool
) -> None:
    heldout = {"heldout": HeldoutSummary(problems=9, before={}, after={})}
    config = load_config(overrides=[f"rollout.tools=['{tool}']"])
    summary = summarize_run(config, RunFolder(str(tmp_path), "run"), heldout, 60)
    print_summary(replace(summary, best_checkpoint="/runs/checkpoint-000001"))
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "evaluate it with" in each)
    assert line.endswith("eval /runs/checkpoint-000001 --num-samples 8" + " --trust-tools" * is_own)


def test_print_fault_outcomes_shows_effect_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [
        FaultOutcome(Fault("kill-backward", 3, rank=1), injected=True, recovery_seconds=4.25),
        FaultOutcome(Fault("non-finite", 4), injected=True, recovery_seconds=None),
        FaultOutcome(Fault("hang", 9), injected=False, recovery_seconds=None),
    ]
    print_fault_outcomes(outcomes, missing=2, repeated=0)
    output = " ".join(capsys.readouterr().out.split())
    assert "again after 4.2 s" in output and "training continued" in output and "was not injected" in output
    assert "2 groups are missing from the run's steps; no problems were used twice in an epoch" in output


def test_print_summary_path_with_brackets_is_not_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heldout = {"heldout": HeldoutSummary(problems=9, before={}, after={})}
    summary = summarize_run(load_config(), RunFolder(str(tmp_path), "run"), heldout, 60)
    print_summary(replace(summary, best_checkpoint="/runs/[red]old[/red]/checkpoint-000001"))
    output = capsys.readouterr().out
    assert output.startswith("── summary ──")
    assert "best checkpoint         /runs/[red]old[/red]/checkpoint-000001\n" in output


BILLION = ModelShape(
    parameters=1_500_000_000,
    layers=28,
    hidden_size=1536,
    intermediate_size=8960,
    query_size=1536,
    key_value_size=256,
    vocabulary=150_000,
    tied_embeddings=True,
    context_length=32_768,
)


def memory_tables(*overrides: str) -> dict[str, list[dict[str, str]]]:
    """Return the tables of GPU memory that a check shows: title -> rows, by column."""
    config = load_config(None, ["cluster.use_gpu=true", "cluster.num_workers=1", *overrides])
    shown: dict[str, list[dict[str, str]]] = {}

    def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        shown[title] = [dict(zip(columns, map(str, row), strict=True)) for row in rows]

    show_memory(plan_cards(config, BILLION, 4096), config, show)
    return shown


def test_show_memory_of_dedicated_engines_has_both_kinds_of_gpus() -> None:
    worker, engine, parts = memory_tables("engine.placement=dedicated", "engine.replicas=[1, 4]").items()
    assert worker[0] == (
        "GPU memory of a worker (cluster.num_workers=1), which holds the learner alone, 1,500.0M parameters (GiB, "
        "estimated, not measured)"
    )
    assert engine[0] == (
        "GPU memory of a dedicated engine (engine.replicas=[1, 4], engine.tensor_parallel_size=1, "
        "engine.gpu_memory_utilization=0.9)"
    )
    assert [row["GPU"] for row in worker[1]] == [row["GPU"] for row in engine[1]] == list(GPU_CARDS)
    of_worker, of_engine = ({row["GPU"]: row for row in table[1]} for table in (worker, engine))
    # 16 bytes for each of 1.5e9 parameters are 22.4 GiB, above a GPU of 24 GB; the engine's 2 bytes are 2.8 GiB.
    assert (of_worker["24 GB"]["fits"], of_engine["24 GB"]["fits"]) == ("no", "yes")
    assert of_worker["40 GB"]["fits"] == "yes"
    assert float(of_engine["40 GB"]["used"]) == pytest.approx(0.9 * GPU_CARDS["40 GB"], abs=0.05)
    assert parts[0] == "parts on a worker's GPU of 40 GB and on an engine's GPU"
    colocated = next(iter(memory_tables().values()))
    (beside,) = (row for row in colocated if row["GPU"] == "40 GB")
    assert int(of_engine["40 GB"]["completions at once"]) > int(beside["completions at once"])
    assert not any("recommended fraction" in row for row in (*worker[1], *engine[1]))
