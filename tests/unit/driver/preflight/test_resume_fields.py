"""Tests of the decision for each field when a run continues with another value."""

import dataclasses
from typing import Any

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import SECTIONS
from grpo_ray.config.trl_fields import PASSED
from grpo_ray.driver.preflight.resume_fields import APPLIED, FIXED, changed_settings, require_same_fields
from grpo_ray.errors import ConfigError

NAMES = [*FIXED, *(name for names in APPLIED.values() for name in names)]


def refusal(recorded: dict[str, Any], *overrides: str, is_other_run: bool = False) -> str | None:
    """Return the message that refuses a config after the recorded one; None if it is accepted."""
    try:
        require_same_fields(load_config(None, overrides), recorded, "runs/a", is_other_run=is_other_run)
    except ConfigError as error:
        return str(error)
    return None


def test_every_field_has_one_decision() -> None:
    own = {f"{section}.{field.name}" for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
    all_fields = own - {"grpo.trl"} | {f"grpo.{name}" for name in PASSED}
    assert set(NAMES) == all_fields, "decide in driver/preflight/resume_fields.py"
    assert len(NAMES) == len(set(NAMES))


def test_require_same_fields_names_values_reason_and_mend() -> None:
    recorded = load_config(None, ["run.seed=3"]).to_dict()
    assert refusal(recorded, "run.seed=4") == (
        "run.seed=4 differs from 3, the value of the run runs/a, and cannot change: it determines the order of "
        "problems, which the ledger relies on; set run.seed=3, another run.name, or run.resume=never to start over"
    )
    assert refusal(recorded, "run.seed=3", "grpo.learning_rate=1", "grpo.temperature=0.5") is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("grpo.num_iterations", "5"), ("grpo.optim", "sgd"), ("model.lora", "{}"), ("cluster.shard_learner", "true")],
)
def test_require_same_fields_absent_field_had_its_default(field: str, value: str) -> None:
    section, name = field.split(".")
    recorded = load_config().to_dict()
    recorded[section].pop(name, None)
    assert str(refusal(recorded, f"{field}={value}", "grpo.save_steps=50")).startswith(f"{field}=")
    assert refusal(recorded) is None


def test_require_same_fields_default_written_out_is_no_change() -> None:
    assert refusal(load_config().to_dict(), "grpo.num_iterations=1", "grpo.sync_ref_model=false") is None


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("null", "null", True),
        ("{name: loraplus, ratio: 16}", "{name: loraplus, ratio: 8}", True),
        ("null", "{name: loraplus}", False),
        ("{name: lorafa}", "{name: loraplus}", False),
    ],
)
def test_require_same_fields_optimizer_of_an_adapter(old: str, new: str, is_same: bool) -> None:
    recorded = load_config(None, ["model.lora={}", f"model.adapter_optimizer={old}"]).to_dict()
    message = refusal(recorded, "model.lora={}", f"model.adapter_optimizer={new}", is_other_run=True)
    assert message is None if is_same else str(message).startswith("model.adapter_optimizer=")


def test_require_same_fields_moved_files_are_no_change() -> None:
    recorded = load_config(None, ["data.train=/jobs/one/problems.jsonl"]).to_dict()
    assert refusal(recorded, "data.train=/jobs/two/problems.jsonl") is None  # their contents are compared later
    assert refusal(recorded, "data.train=gsm8k") is not None
    assert refusal(recorded, "data.train=s3://bucket/problems.jsonl") is None
    stored = load_config(None, ["data.train=s3://bucket/one/"]).to_dict()
    assert refusal(stored, "data.train=s3://bucket/two/") is None and refusal(stored, "data.train=/jobs/two") is None
    assert refusal({"data": {"train": "gsm8k"}}, "data.train=/jobs/two/problems.jsonl") is not None


def test_require_same_fields_path_recorded_with_home_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    assert refusal({"model": {"path": "~/policy"}}, "model.path=~/policy") is None
    assert refusal({"model": {"path": "~/policy"}}, "model.path=~/other") is not None


def test_require_same_fields_other_run_compares_contents_of_checkpoints() -> None:
    recorded = load_config(None, ["run.seed=3"]).to_dict()
    assert refusal(recorded, "grpo.prompts_per_step=4", is_other_run=True) is None
    message = refusal(recorded, "cluster.shard_learner=true", is_other_run=True)
    assert message is not None and "grpo-ray export" in message


def test_require_same_fields_entropy_coef_is_a_state_if_adaptive() -> None:
    recorded = load_config(None, ["grpo.entropy_coef=0.1"]).to_dict()
    assert refusal(recorded, "grpo.entropy_coef=0.2") is None
    assert refusal(recorded, "grpo.entropy_coef=0.2", "grpo.use_adaptive_entropy=true") is not None


def test_require_same_fields_credentials_are_not_compared_or_shown() -> None:
    recorded = load_config(None, ["model.path=s3://bucket/a"]).to_dict()
    assert refusal(recorded, "model.path=s3://key:secret@bucket/a") is None
    message = refusal(recorded, "model.path=s3://key:secret@bucket/b")
    assert message is not None and "secret" not in message


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("grpo.learning_rate=0.5", {"grpo.learning_rate": (1e-6, 0.5)}),
        ("grpo.beta=0.5", {"grpo.beta": (0.0, 0.5)}),  # a field of TRL, whose default was not recorded
        ("data.heldout_limit=7", {"data.heldout_limit": (600, 7)}),
        ("cluster.num_workers=1", {}),  # processes
        ("health.window=5", {}),  # warnings
        ("run.name=other", {}),
    ],
)
def test_changed_settings_are_those_that_change_a_result(override: str, changed: dict[str, Any]) -> None:
    recorded = load_config(None, []).to_dict()
    assert changed_settings(load_config(None, [override]), recorded) == changed


def test_changed_settings_files_of_the_same_name_may_have_moved() -> None:
    recorded = load_config(None, ["data.train=/jobs/1/a.jsonl"]).to_dict()
    assert changed_settings(load_config(None, ["data.train=/jobs/2/a.jsonl"]), recorded) == {}
    assert list(changed_settings(load_config(None, ["data.train=/jobs/2/b.jsonl"]), recorded)) == ["data.train"]


@pytest.mark.parametrize("field", ["data.train", "data.heldout"])
def test_changed_settings_files_of_a_mapping_may_have_moved(field: str) -> None:
    def changed(value: str) -> list[str]:
        return list(changed_settings(load_config(None, [f"{field}={value}"]), recorded))

    form = "{{a: {}, b: gsm8k}}" if field == "data.heldout" else "{{a: {{path: {}}}, b: {{path: gsm8k}}}}"
    recorded = load_config(None, [f"{field}={form.format('/jobs/1/a.jsonl')}"]).to_dict()
    assert changed(form.format("/jobs/2/a.jsonl")) == []
    assert changed(form.format("/jobs/2/b.jsonl")) == [field]
    assert changed(form.format("/jobs/2/a.jsonl").replace("b:", "c:")) == [field]
    assert changed(form.format("/jobs/2/a.jsonl").replace("gsm8k", "deepmath")) == [field]
