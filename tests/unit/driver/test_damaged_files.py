"""Tests that a damaged small file of a run folder gives one clear error, or a notice and a sound fallback."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from page_samples import CONFIG, write_run
from rich.console import Console

from grpo_ray.cli import build_parser, load_eval_config, sort_overrides
from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.driver import launch
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.driver.preflight.same_run import check_dataset, check_same_run
from grpo_ray.driver.summary import HeldoutSummary, summarize_run
from grpo_ray.errors import DamagedFileError, GrpoRayError
from grpo_ray.evaluation.baseline import Baseline, baseline_setup
from grpo_ray.evaluation.metrics import EvaluationResult, measurement_conditions, summarize_evaluation
from grpo_ray.export.checkpoint import find_checkpoint
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.pages.report import write_page
from grpo_ray.storage.checkpoints import damaged_measurements, list_checkpoints
from grpo_ray.storage.ray_snapshot import SNAPSHOT, repair_ray_snapshot
from grpo_ray.storage.run_folder import RunFolder

FINGERPRINT = DatasetFingerprint.of(["0" * 16])
CONDITIONS = measurement_conditions({"heldout": FINGERPRINT}, load_config())
SETUP = baseline_setup("policy")
EVALUATION = summarize_evaluation([{"scores": [1.0], "answers": [""], "truncated": [False], "seconds": 1.0}], 1)
CHECKPOINT = "checkpoint-000040"

FILES = [
    "config.yaml", "policy.json", "problems.json", "unverifiable.json", "heldout_before.json", "metrics.jsonl",
    "events.jsonl", "summary.json", SNAPSHOT, f"{CHECKPOINT}/manifest.json", f"{CHECKPOINT}/measured.json",
]  # fmt: skip

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "torn": lambda content: content[: len(content) // 2],
    "zeros": lambda content: b"\0" * len(content),
    "not text": lambda content: b"\xff\xfe\x80 {",
    "prose": lambda content: b"<html>504 Gateway Timeout: [</html>",
    "list": lambda content: b"[1, 2]\n",
    "null": lambda content: b"null\n",
    "number": lambda content: b"3\n",
    "text": lambda content: b'"text"\n',
    "empty mapping": lambda content: b"{}\n",
    "wrong fields": lambda content: (
        b'{"metrics": 3, "run": 4, "measured_on": [5], "count": "x", "step": "y", "event": {}}\n'
    ),
    "nested": lambda content: b"[" * 100_000,
}
QUICK = ("torn", "not text", "null", "wrong fields")
"""Damages of the test that is not long."""


def prepare(folder: RunFolder) -> None:
    """Call what `grpo-ray train` does with the files of a run that exists, in its order."""
    config = load_config(None, ["run.name=run", f"run.storage_path={folder.storage_path}"])
    context = RunContext(config, folder, ProgressLine(40, Console(file=io.StringIO())))
    # The sample's config has other settings; a run that differs is refused with a ConfigError, as it should be.
    check_same_run(context)
    launch.read_unverifiable(config, folder)
    check_dataset(context, FINGERPRINT)
    repair_ray_snapshot(folder, "heldout/accuracy")
    list_checkpoints(folder)
    damaged_measurements(folder)
    before = Baseline(folder, CONDITIONS, SETUP).read()
    measures = EvaluationResult.from_dict(before["heldout"]).measures() if before else {}
    summarize_run(config, folder, {"heldout": HeldoutSummary(problems=9, before=measures, after={})}, 60.0)


def evaluate(folder: RunFolder) -> None:
    arguments = build_parser().parse_args(["eval", str(folder.local / CHECKPOINT)])  # type: ignore[operator]
    sort_overrides(arguments)
    load_eval_config(arguments)


COMMANDS: dict[str, Callable[[RunFolder], object]] = {
    "train": prepare,
    "eval": evaluate,
    "export": lambda folder: find_checkpoint(str(folder.local)),
    "report": lambda folder: write_page([str(folder.local)]),
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with all files, none of them damaged."""
    folder = write_run(tmp_path_factory.mktemp("runs"))
    folder.write_text(yaml.safe_dump(CONFIG), "config.yaml")
    folder.write_json({"commit": "0" * 40}, "policy.json")
    folder.write_json(asdict(FINGERPRINT), "problems.json")
    folder.write_json(["0" * 16], "unverifiable.json")
    measured = {"measured_on": CONDITIONS["heldout"], "setup": SETUP}
    folder.write_json(EVALUATION.to_dict() | measured, "heldout_before.json")
    folder.write_json({"steps": 40, "reward_last": 1.0}, "summary.json")
    measured = {"metrics": {"heldout/accuracy": 0.9}, "measured_on": CONDITIONS}
    folder.write_json(measured, CHECKPOINT, "measured.json")
    repair_ray_snapshot(folder, "heldout/accuracy")
    assert folder.local
    return folder.local


def damaged_copy(sample: Path, target: Path, file: str, damage: str) -> RunFolder:
    shutil.copytree(sample, target / "run")
    path = target / "run" / file
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    return RunFolder(str(target), "run")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_on_sound_files_succeeds(sample: Path, tmp_path: Path, command: str) -> None:
    shutil.copytree(sample, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(load_config(None, ["run.name=run"]).to_dict()))
    COMMANDS[command](RunFolder(str(tmp_path), "run"))


@pytest.mark.parametrize(
    "damage", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.long]) for each in DAMAGES]
)
@pytest.mark.parametrize("file", FILES)
def test_command_on_damaged_file_is_one_line_or_falls_back(
    sample: Path, tmp_path: Path, file: str, damage: str
) -> None:
    for command, call in COMMANDS.items():
        folder = damaged_copy(sample, tmp_path / command, file, damage)
        try:
            call(folder)
        except GrpoRayError as error:
            assert len(str(error).splitlines()) == 1 and len(str(error)) < 700
            assert not isinstance(error, DamagedFileError) or (file in str(error) and ";" in str(error))


@pytest.mark.parametrize(
    ("file", "command", "advice"),
    [
        ("config.yaml", "train", "delete it to continue"),
        ("config.yaml", "eval", "--config"),
        ("config.yaml", "export", "name one of the run's checkpoints"),
        ("problems.json", "train", "data.accept_changes=true"),
        ("unverifiable.json", "train", "run grpo-ray check again"),
    ],
)
def test_damaged_file_error_names_the_way_out(
    sample: Path, tmp_path: Path, file: str, command: str, advice: str
) -> None:
    folder = damaged_copy(sample, tmp_path, file, "torn")
    if file != "config.yaml":
        (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(load_config(None, ["run.name=run"]).to_dict()))
    else:
        (tmp_path / "run" / file).write_bytes(b"run: {name: [")
    with pytest.raises(DamagedFileError, match=advice):
        COMMANDS[command](folder)


def test_damaged_measurement_leaves_checkpoint_unmeasured(sample: Path, tmp_path: Path) -> None:
    folder = damaged_copy(sample, tmp_path, f"{CHECKPOINT}/measured.json", "torn")
    checkpoint = list_checkpoints(folder)[-1]
    assert checkpoint.name == CHECKPOINT and checkpoint.measured_on is None
    assert damaged_measurements(folder) == [CHECKPOINT]
    assert damaged_measurements(RunFolder(str(sample.parent), sample.name)) == []


def test_damaged_measurement_is_a_notice_on_resume(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = damaged_copy(sample, tmp_path, f"{CHECKPOINT}/measured.json", "empty")
    config = load_config(None, ["run.name=run", f"run.storage_path={tmp_path}"])
    printed = io.StringIO()
    context = RunContext(config, folder, ProgressLine(40, Console(file=printed, width=200)))
    index: Any = SimpleNamespace(fingerprint=FINGERPRINT)
    resume = launch.find_resume_point(context, launch.DatasetIndexes(index, {"heldout": index}))
    assert resume.checkpoint and resume.checkpoint.name == CHECKPOINT
    assert f"{CHECKPOINT}: measured.json is damaged; the checkpoint counts as not measured" in printed.getvalue()


def test_damaged_baseline_is_measured_again(sample: Path, tmp_path: Path) -> None:
    folder = damaged_copy(sample, tmp_path, "heldout_before.json", "torn")
    assert Baseline(folder, CONDITIONS, SETUP).missing() == ["heldout"]
    sound = RunFolder(str(sample.parent), sample.name)
    assert Baseline(sound, CONDITIONS, SETUP).read()["heldout"]["pass_at_1"]["value"] == 1.0


def test_damaged_lines_lose_only_themselves(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:10], "{torn", "[1]", '{"no": "step"}', *lines[10:]]) + '\n{"step": 9')
    from grpo_ray.storage.jsonl import read_metrics

    assert list(read_metrics(RunFolder(str(tmp_path), "run"))) == [json.loads(line) for line in lines]
