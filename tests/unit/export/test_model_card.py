"""Tests of the model card: what it states about a run, and that nothing of a run folder can be markup or a secret."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from page_samples import CONFIG, metric_rows, write_run

from grpo_ray.config.loader import from_mapping
from grpo_ray.export.card_facts import gather_facts
from grpo_ray.export.checkpoint import find_checkpoint
from grpo_ray.export.model_card import render_card
from grpo_ray.storage.records.heldout_files import HeldoutRecord, write_heldout
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text.redaction import HIDDEN

CONDITIONS = {"count": 4, "num_samples": 1}
BASE, BETTER = (0.0, 0.0, 1.0, 0.0), (1.0, 1.0, 0.0, 1.0)
"""Verdicts of four problems: three are solved by the checkpoint only, one by the base policy only."""


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a run with some fields changed."""
    return CONFIG | {name: CONFIG.get(name, {}) | fields for name, fields in sections.items()}


def measure(folder: RunFolder, *, records: bool = True, conditions: dict[str, Any] | None = None) -> None:
    """Record a baseline and, for each checkpoint, the conditions of its measurement; with verdicts per problem."""
    baseline = {"problems": 4, "pass_at_1": {"value": 0.25, "low": 0.05, "high": 0.7}}
    folder.write_json(baseline | {"measured_on": CONDITIONS}, "heldout_before.json")
    for name in folder.list_folders("checkpoint-"):
        manifest = folder.read_json(name, "manifest.json")
        manifest["measured_on"] = {"heldout": conditions or CONDITIONS}
        folder.write_json(manifest, name, "manifest.json")
    if records:
        write_records(folder, 0, "", BASE)
        write_records(folder, 40, "checkpoint-000040", BETTER)


def write_records(folder: RunFolder, step: int, policy: str, verdicts: tuple[float, ...], count: int = 4) -> None:
    """Write the held-out records of one policy."""
    records = [
        HeldoutRecord(problem=f"p{number}", correct=(verdict,), lengths=(3,), truncated=(False,))
        for number, verdict in enumerate(verdicts)
    ]
    conditions = CONDITIONS | {"count": count}
    write_heldout(folder, "heldout", step, records, policy=policy, conditions=conditions)


def card_of(folder: RunFolder) -> str:
    return render_card(gather_facts(find_checkpoint(str(folder.local))))


def data_of(card: str) -> Any:
    """Return the metadata as the hub reads it; an object whose attributes are those that the card has."""
    return ModelCard(card).data


def test_card_metadata_is_what_the_hub_reads(tmp_path: Path) -> None:
    config = changed(model={"path": "Qwen/Qwen2.5-0.5B"}, data={"train": "deepmath", "heldout": "gsm8k"})
    folder = write_run(tmp_path, config=config)
    measure(folder)
    data = data_of(card_of(folder))
    assert (data.base_model, data.datasets, data.library_name) == (
        "Qwen/Qwen2.5-0.5B",
        ["trl-lib/DeepMath-103K"],
        "transformers",
    )
    assert {"grpo", "ray", "trl", "vllm"} <= set(data.tags) and data.license is None
    (result,) = data.eval_results
    assert (result.dataset_type, result.metric_type, result.metric_value) == ("openai/gsm8k", "accuracy", 0.9)


@pytest.mark.parametrize("path", ["tiny-arithmetic", "/models/qwen", "./qwen", "s3://bucket/qwen"])
def test_card_policy_from_elsewhere_is_no_base_model(tmp_path: Path, path: str) -> None:
    data = {"train": "problems/train.jsonl"}
    metadata = data_of(card_of(write_run(tmp_path, config=changed(model={"path": path}, data=data))))
    assert metadata.base_model is None and metadata.datasets is None


def test_card_heldout_result_has_intervals_and_paired_test(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    measure(folder)
    card = card_of(folder)
    # Three of four changes in favour: p = 2 (4 + 1) / 2^4. Differences 1, 1, -1, 1 and the added 1, -1: mean 1 / 3,
    # half 1.96 sqrt((1 - 1 / 9) / 6) = 0.754, and the upper end is clipped.
    assert "| 4 | 0.250 [0.050, 0.700] | 0.900 [0.880, 0.920] | +0.500 [-0.421, +1.000] | 0.6250 |" in card
    assert "exact sign-flip test over 4 problems with one completion each (McNemar): 3 have more" in card
    assert "chose its best checkpoint among 4 by `heldout/accuracy`" in card


def test_card_without_records_has_no_paired_test(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    measure(folder, records=False)
    card = card_of(folder)
    assert "| 0.900 [0.880, 0.920] | not available | not available |" in card
    assert "the run has no verdicts per problem of both policies" in card


@pytest.mark.parametrize(
    ("policy", "count"),
    [("checkpoint-000040.2", 4), ("checkpoint-000040", 5)],
    ids=["other checkpoint", "other problems"],
)
def test_card_records_of_something_else_are_not_compared(tmp_path: Path, policy: str, count: int) -> None:
    folder = write_run(tmp_path)
    measure(folder)
    write_records(folder, 40, policy, BETTER, count)
    assert gather_facts(find_checkpoint(str(folder.local))).results[0].paired is None


def test_card_baseline_of_other_problems_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    measure(folder, records=False, conditions={"count": 5})
    (result,) = gather_facts(find_checkpoint(str(folder.local))).results
    assert result.before is None and result.after is not None and result.after.value == 0.9


def test_card_several_sets_have_a_row_each(tmp_path: Path) -> None:
    config = changed(data={"heldout": {"math": "m.jsonl", "gsm8k": "gsm8k"}}, run={"best_metric": "reward/mean"})
    rows = [
        row | {"heldout/gsm8k/accuracy": 0.5, "heldout/gsm8k/low": 0.4, "heldout/gsm8k/high": 0.6}
        for row in metric_rows(40)
    ]
    card = card_of(write_run(tmp_path, config=config, metrics=rows))
    assert "| `gsm8k gsm8k` | ? | not available | 0.500 [0.400, 0.600] |" in card
    assert "| `math m.jsonl` | ? | not available | not available |" in card
    assert "biased upwards" not in card  # the best checkpoint was chosen by the reward


def test_card_config_reproduces_the_run(tmp_path: Path) -> None:
    config = changed(run={"storage_path": "/home/alice/runs"}, data={"train": "gsm8k", "system_prompt": "a ```` fence"})
    card = card_of(write_run(tmp_path, config=config))
    block = re.search(r"^(`{3,})yaml\n(.*?)^\1$", card, re.MULTILINE | re.DOTALL)
    assert block
    shown = from_mapping(yaml.safe_load(block[2])).to_dict()
    expected = from_mapping({name: fields for name, fields in config.items() if name != "versions"}).to_dict()
    for each in (shown, expected):
        del each["run"]["storage_path"]
    assert shown == expected
    assert "| `torch` | `2.13.0` |" in card and "| `commit` | `0123456789ab` |" in card


def test_card_training_time_and_hardware(tmp_path: Path) -> None:
    memory = {
        "event": "memory",
        "at": 1.0,
        "device": "NVIDIA H200",
        "measured": {"total_gib": 139.8},
        "estimated": None,
    }
    config = changed(cluster={"use_gpu": True, "num_workers": 4})
    folder = write_run(tmp_path, config=config, events=[memory])
    folder.delete_folder("checkpoint-000040")
    card = card_of(folder)
    assert "| hardware | `4` workers, each with one `NVIDIA H200` (140 GiB) |" in card
    assert "| time of the steps | 0.02 hours |" in card  # 30 steps of 2 s
    assert "`checkpoint-000030` of the run `run`, after 30 steps." in card


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ({"replicas": 2, "tensor_parallel_size": 4}, "`2` engines, each with `4` GPUs of its own |"),
        ({"replicas": [1, 2]}, "`[1, 2]` engines, each with one GPU of its own |"),
        ({"replicas": "<b>|"}, "engines, each with one GPU of its own |"),  # a run folder may be a stranger's
    ],
)
def test_card_counts_dedicated_engines(tmp_path: Path, engine: dict[str, Any], text: str) -> None:
    config = changed(cluster={"use_gpu": True, "num_workers": 4}, engine={"placement": "dedicated"} | engine)
    (line,) = (each for each in card_of(write_run(tmp_path, config=config)).splitlines() if "| hardware |" in each)
    assert line.startswith("| hardware | `4` workers, each with one GPU, and ") and line.endswith(text)
    assert "<b>" not in line.replace("`<b>", "")


def test_card_of_fine_tuning_does_not_claim_grpo(tmp_path: Path) -> None:
    config = changed(run={"kind": "sft"}, data={"train": "shown.jsonl"})
    card = card_of(write_run(tmp_path, config=config))
    assert "`tiny-arithmetic`, fine-tuned on demonstrations of `shown.jsonl`." in card
    assert "| method | `supervised fine-tuning of all weights` |" in card
    assert f"| demonstrations per step | `{CONFIG['grpo']['prompts_per_step']}` |" in card
    head = card.partition("## How to reproduce it")[0]
    assert not any(text in head for text in ("GRPO", "completions per problem", "| rewards |", "KL coefficient"))
    tags = data_of(card).tags
    assert "sft" in tags and "grpo" not in tags


def test_card_names_the_checkpoint_that_the_run_began_with(tmp_path: Path) -> None:
    folder = write_run(tmp_path, config=changed(run={"from_checkpoint": "/home/alice/runs/other/checkpoint-000075"}))
    measure(folder)
    card = card_of(folder)
    # The measurement before training is that of the checkpoint.
    assert "| set | problems | initial policy | this policy |" in card
    assert "more correct completions than with the initial policy" in card
    assert "| begun with | `.../checkpoint-000075` |" in card and "| base policy | `tiny-arithmetic` |" in card


def test_card_of_empty_run_folder_is_written(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "bare")
    manifest = {"metrics": {"step": 2}, "serial": 1, "files": {}}
    folder.write_json(manifest, "checkpoint-000002", "manifest.json")
    card = card_of(folder)
    assert "Not available: this checkpoint has no measurement" in card
    assert "Not available: the run has no readable config.yaml" in card
    assert data_of(card).library_name == "transformers"


def test_card_hides_secrets_and_the_authors_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "value-of-a-token-1234")
    config = changed(
        model={"path": "/home/alice/models/qwen"},
        data={"train": "s3://KEY:SECRET@bucket/train.jsonl", "system_prompt": "value-of-a-token-1234"},
        rewards={"settings": {"judge": {"api_key": "sk-abcdef", "url": "https://host/?token=abcdefgh"}}},
        run={"storage_path": "/home/alice/runs", "notify": "https://hooks/T000/secret-hook"},
    )
    card = card_of(write_run(tmp_path, config=config))
    for secret in ("SECRET", "value-of-a-token", "sk-abcdef", "abcdefgh", "alice", "secret-hook"):
        assert secret not in card
    assert HIDDEN in card and "`.../qwen`" in card


def test_card_shortens_paths_of_benchmarks_and_reward_models(tmp_path: Path) -> None:
    heldout = {"math": "math500=/home/alice/math500.jsonl"}
    rewards = {"functions": ["/home/alice/judge"], "settings": {"/home/alice/judge": {"scale": 2}}}
    card = card_of(write_run(tmp_path, config=changed(data={"heldout": heldout}, rewards=rewards)))
    assert "alice" not in card
    shown = yaml.safe_load(card.partition("```yaml\n")[2].partition("\n```")[0])
    assert shown["data"]["heldout"] == {"math": "math500=.../math500.jsonl"}
    assert shown["rewards"]["settings"] == {".../judge": {"scale": 2}}


HOSTILE = "x`</code><script>alert(1)</script>|**b**\n# h\n```\n---\n![i](http://h/i.png)\u202e"


def test_card_hostile_texts_stay_inside_code(tmp_path: Path) -> None:
    config = changed(
        model={"path": HOSTILE, HOSTILE: HOSTILE},
        data={"train": HOSTILE, "heldout": {HOSTILE: HOSTILE, "../other": "x", "math": HOSTILE}},
        grpo={"loss_type": HOSTILE, "max_steps": [HOSTILE] * 999},
        run={"best_metric": HOSTILE},
        cluster={"num_workers": HOSTILE},
        versions={HOSTILE: HOSTILE},
    )
    memory = {"event": "memory", "at": 1.0, "device": HOSTILE, "measured": {"total_gib": "much"}}
    card = card_of(write_run(tmp_path, config=config, events=[memory]))
    assert "\u202e" not in card and len(card) < 200_000
    body = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", card.partition("\n---\n")[2], flags=re.MULTILINE | re.DOTALL)
    outside = re.sub(r"`[^`\n]*`", "", body)
    for markup in ("<script", "**b**", "![", "\n# h", "</code>"):
        assert markup not in outside
    assert outside.count("<") == 4  # our own: details and summary
    yaml.safe_load(card.split("\n---\n")[0])


@pytest.mark.parametrize("value", [math.inf, "0.5", None, [], {"low": 1}, 10**400])
def test_card_malformed_measurements_are_left_out(tmp_path: Path, value: object) -> None:
    folder = write_run(tmp_path)
    measure(folder)
    baseline = {"problems": value, "pass_at_1": {"value": value, "low": 0.1, "high": 0.2}, "measured_on": CONDITIONS}
    folder.write_text(json.dumps(baseline), "heldout_before.json")
    folder.write_bytes(b"no parquet", "heldout", "step-00000000.parquet")
    (result,) = gather_facts(find_checkpoint(str(folder.local))).results
    assert result.before is None and result.paired is None


def test_card_names_the_steps_and_epochs_of_a_generation_batch(tmp_path: Path) -> None:
    once = card_of(write_run(tmp_path / "once", config=changed(grpo={"steps_per_generation": 1, "epochs": 1})))
    assert "generation batch" not in once
    several = {"steps_per_generation": 2, "epochs": 1, "num_iterations": 3}
    card = card_of(write_run(tmp_path / "several", config=changed(grpo=several)))
    assert "optimizer steps per generation batch | `2`" in card and "epochs of a generation batch | `3`" in card
