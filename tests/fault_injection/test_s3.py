"""Test of a run whose folder is in an object store, from the first step to the report, with a real S3 server."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_storage import S3Server, storage_path, wait_for
from faulty_runs import SETTINGS, outcome_of, same, start, undisturbed
from small_runs import events_of, small_settings

from grpo_ray.resilience.chaos import Fault
from grpo_ray.storage.run_folder import RunFolder

LONG = 600.0
"""Time limit for an event on a busy machine, seconds."""
SECRET = "the-secret-of-somebody"


def command(*arguments: str) -> str:
    """Run a `grpo-ray` command and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "grpo_ray.cli", *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_run_on_s3_is_killed_resumed_evaluated_and_reported(
    small_run: Callable[..., Any], policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = undisturbed(small_run)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with S3Server() as s3:
        where = storage_path(s3.port, user=f"somebody:{SECRET}@")
        folder = RunFolder(where, "far")
        overrides = [*small_settings("far", where, policy), *SETTINGS]
        run = start(overrides, [Fault("hang", step=5)])  # stops the run in the middle on any machine
        wait_for(lambda: folder.exists("chaos", Fault("hang", 5).marker), "step 5", LONG)
        wait_for(lambda: folder.exists("checkpoint-000003", "manifest.json"), "the checkpoint of step 3", LONG)
        run.send_signal(signal.SIGKILL)
        outputs = [run.communicate(timeout=LONG)[0]]

        again = start(overrides)
        outputs.append(again.communicate(timeout=LONG)[0])
        assert again.returncode == 0, outputs[-1]
        assert "resuming from checkpoint-000003" in outputs[-1]
        fetched = Path(folder.fetch())
        same(outcome_of(fetched), whole)
        # Events that the killed driver had not yet written are lost.
        assert events_of(fetched, "began")[-1]["step"] == 3

        best, _, query = where.partition("?")
        name = Path(json.loads((fetched / "summary.json").read_text())["best_checkpoint"].partition("?")[0]).name
        measured = tmp_path / "measured.json"
        outputs.append(command("eval", f"{best}/far/{name}?{query}", "--json", str(measured)))
        summary = json.loads((fetched / "summary.json").read_text())
        assert json.loads(measured.read_text())["pass_at_1"]["value"] == summary["heldout_after"]

        page = tmp_path / "page.html"
        outputs.append(command("report", f"{best}/far?{query}", "--out", str(page)))
        outputs.append(page.read_text())
        assert "<svg" in outputs[-1] and name in outputs[-1]

        left = [file.read_bytes() for file in Path(folder.fetch()).rglob("*") if file.is_file()]
        assert len(left) > 20
        assert not [text for text in outputs if SECRET in text]
        assert not [data for data in left if SECRET.encode() in data]
