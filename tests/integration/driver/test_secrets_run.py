"""Test of a real run in which every secret is leaked wherever text can go: none of them is in what is written."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from secret_spies import ALL, ENVIRONMENT, FORMS, MARK, SETTINGS
from small_runs import small_settings
from tracker_readers import isolate_trackers
from webhook import webhook

from grpo_ray.pages.report import write_page
from grpo_ray.pages.report.read import open_run
from grpo_ray.pages.watch.live_run import LiveRun
from grpo_ray.storage.records.rollout_files import read_steps
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text.redaction import HIDDEN

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
HELPERS = Path(__file__).parents[2] / "helpers"


def command(*arguments: str, **environment: str) -> str:
    """Run a command of grpo-ray with the secrets in its environment; return its output."""
    inherited = os.environ | {"RAY_ADDRESS": "local"}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HELPERS), inherited.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "grpo_ray.cli", *arguments],
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def contents(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file of a folder; Parquet files as the texts of their rows."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes().decode("utf-8", "replace")
            if path.suffix == ".parquet":
                yield f"rows of {path}", json.dumps(pq.ParquetFile(path).read().to_pylist(), ensure_ascii=False)
                yield f"metadata of {path}", str(pq.ParquetFile(path).schema_arrow.metadata)


def watched(folder: Path) -> str:
    """Return all that the live page can show of a run."""
    snapshot = LiveRun(open_run(str(folder))).refresh()
    assert snapshot is not None
    shown: list[Any] = [snapshot.rollouts.detail(row) for row in range(len(snapshot.rollouts))]
    shown += [snapshot.run.config, snapshot.run.events, snapshot.run.notes, sorted(snapshot.run.metric_names())]
    rows, _ = snapshot.rollouts.search("judge", np.arange(len(snapshot.rollouts)), 0, 100)
    return json.dumps([*shown, rows], default=str, ensure_ascii=False)


@pytest.mark.slow
def test_planted_secrets_are_in_nothing_that_a_run_writes(policy: Path, tmp_path: Path) -> None:
    assert len(ALL) >= 30 and all(MARK in each or "PL4NTED" in each for each in ALL)
    planted = [*ENVIRONMENT.values(), *FORMS.values()]
    rows = [
        {
            "prompt": f"What is {number} + 1? The judge has {planted[number % len(planted)]}.",
            "solution": f"${number + 1}$",
            "note": planted[(number + 5) % len(planted)],
        }
        for number in range(52)
    ]
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with webhook() as hook:
        address = f"{hook.address}/hook09-{MARK}"
        config = {
            "run": {"notify": address, "trackers": list(TRACKERS)},
            "data": {"train": str(problems), "heldout": str(problems), "system_prompt": f"Use {planted[0]}."},
            "rewards": {
                "functions": ["correctness", "secret_spies:leak"],
                "settings": {"secret_spies:leak": {"mark": str(tmp_path / "failed"), "planted": SETTINGS}},
            },
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        overrides = [*small_settings("secrets", tmp_path / "runs", policy), "run.max_failures=3"]
        variables = {**ENVIRONMENT, **isolate_trackers(tmp_path / "trackers")}
        output = command("train", str(tmp_path / "run.yaml"), *overrides, **variables)
        messages = json.dumps(hook.bodies)
    folder = tmp_path / "runs" / "secrets"
    assert (tmp_path / "failed").exists() and "the judge refused" in (folder / "events.jsonl").read_text()
    output += command("export", str(folder), str(tmp_path / "exported"), **ENVIRONMENT)
    seen = {
        "output": output,
        "messages": messages,
        **dict(contents(tmp_path / "runs")),
        **dict(contents(tmp_path / "exported")),
        **dict(contents(tmp_path / "trackers")),
    }
    # These see secrets of a known form only: the run folder is read in another environment, as on another machine.
    seen |= {"live page": watched(folder), "report": Path(write_page([str(folder)])).read_text()}
    found = {
        (name, text[max(0, place - 60) : place + 40])
        for name, text in seen.items()
        for mark in (MARK, "PL4NTED")
        if (place := text.find(mark)) >= 0
    }
    assert not found
    samples = read_steps(RunFolder(str(tmp_path / "runs"), "secrets"), samples_only=True).to_pylist()
    assert samples and any(HIDDEN in each["prompt"] for each in samples)
    for part in ("events.jsonl", "metrics.jsonl", "config.yaml"):  # the secrets were there to be hidden
        assert HIDDEN in (folder / part).read_text(), part
    assert any(HIDDEN in text for name, text in seen.items() if "/logs/" in name)
    for tracker in TRACKERS:
        assert any(f"/{tracker}" in name and HIDDEN in text for name, text in seen.items()), tracker
    assert hook.bodies
