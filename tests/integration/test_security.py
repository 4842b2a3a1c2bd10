"""Tests that real transformers code runs nothing that comes with a checkpoint or, unless allowed, with a model."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_ray.config.loader import load_config
from grpo_ray.driver.summary import describe_run
from grpo_ray.resilience.nodes import model_issue


class Payload:
    """An object whose unpickling creates a folder, in place of an attacker's code."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_payload_runs_when_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_trainer_checkpoint_with_payload_raises(tmp_path: Path, file: str) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(torch.nn.Linear(2, 2), TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True))
    trainer.create_optimizer_and_scheduler(num_training_steps=2)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    torch.save(trainer.optimizer.state_dict(), checkpoint / "optimizer.pt")
    torch.save(trainer.lr_scheduler.state_dict(), checkpoint / "scheduler.pt")
    torch.save(Payload(tmp_path / "ran"), checkpoint / file)
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights"):
        trainer._load_optimizer_and_scheduler(str(checkpoint))
        trainer._load_rng_state(str(checkpoint))
    assert not (tmp_path / "ran").exists()


def test_model_issue_runs_model_code_only_when_allowed(tmp_path: Path) -> None:
    model, ran = tmp_path / "model", tmp_path / "ran"
    model.mkdir()
    config = {"model_type": "unheard-of", "auto_map": {"AutoConfig": "configuration.TheirConfig"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "configuration.py").write_text(
        f"import os\nfrom transformers import PretrainedConfig\nos.makedirs({str(ran)!r}, exist_ok=True)\n"
        "class TheirConfig(PretrainedConfig):\n    model_type = 'unheard-of'\n"
    )
    refused = model_issue(load_config(None, [f"model.path={model}"]))
    assert refused and "trust_remote_code" in refused
    assert not ran.exists()
    assert model_issue(load_config(None, [f"model.path={model}", "model.trust_remote_code=true"])) is None
    assert ran.exists()


def test_describe_names_versions_and_loads_equal() -> None:
    config = load_config(None, ["data.system_prompt='a: [b'"])
    described = describe_run(config)
    assert {"python", "torch", "grpo_ray", "commit"} <= set(described["versions"])
    written = yaml.safe_dump(described, sort_keys=False, allow_unicode=True)
    assert load_config("config.yaml", text=written, drop=("versions",)).data == config.data
