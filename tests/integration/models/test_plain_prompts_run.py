"""A run of a policy without a chat template: prompts, completions and rewards are plain text."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import rows_of
from transformers import AutoTokenizer

from grpo_ray.cli import main
from grpo_ray.errors import ConfigError
from grpo_ray.storage.records.heldout_files import read_heldout, read_measurements
from grpo_ray.storage.run_folder import RunFolder


def test_base_model_is_trained_and_measured_on_plain_text(
    small_run: Callable[..., Any], policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(policy, base)
    (base / "chat_template.jinja").unlink()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} + {n % 7}"}) + "\n" for n in range(120)))
    summary, folder = small_run(
        "plain", f"model.path={base}", f"data.train={prompts}", "data.heldout=auto", "data.heldout_share=0.2",
        "data.limit=null", "rewards.functions=['own_rewards:characters']", "grpo.max_steps=3", "grpo.save_steps=1",
    )  # fmt: skip
    rows = rows_of(folder)
    assert len(rows) == 3 and summary.has_own_score
    run = RunFolder(str(folder.parent), folder.name)
    for measurement in read_measurements(run, "heldout"):
        for row in read_heldout(run, measurement.file).to_pylist():
            assert row["correct"] == [float(len(row["completions"][0]))]  # `characters` of a text, not of messages
    assert AutoTokenizer.from_pretrained(summary.best_checkpoint).chat_template is None
    assert main(["eval", summary.best_checkpoint, "--trust-rewards", "--json", str(tmp_path / "eval.json")]) == 0
    evaluation = json.loads((tmp_path / "eval.json").read_text())
    assert evaluation["pass_at_1"]["value"] == pytest.approx(max(row["heldout/accuracy"] for row in rows))
    assert "mean score" in capsys.readouterr().out


def test_tools_need_a_chat_template(small_run: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(policy, base)
    (base / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template, which completions of several turns need"):
        small_run("tools", f"model.path={base}", "rollout.tools=['grpo_ray.tools.python_tool:python']")
