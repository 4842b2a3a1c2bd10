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
    assert load_config("config.yaml", text=written).data == config.data


ADAPTER = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("megatron_config", {"tensor_model_parallel_size": 1}),
        ("auto_mapping", {"base_model_class": "system", "parent_library": "os"}),
        ("corda_config", {"cache_file": "/tmp/payload.pt"}),
        ("layer_replication", [[0, 4]]),
        ("target_parameters", ["mlp.experts"]),
    ],
)
def test_adapter_config_with_other_fields_is_refused(tmp_path: Path, field: str, value: object) -> None:
    from grpo_ray.errors import CheckpointError
    from grpo_ray.models.adapter_folders import read_adapter_config

    settings = ADAPTER | {"base_model_name_or_path": "policy", "target_modules": ["q_proj"], "megatron_core": "os"}
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(settings | {"megatron_core": "megatron.core", field: None}))
    assert read_adapter_config(tmp_path).r == 8
    path.write_text(json.dumps(settings | {"megatron_core": "megatron.core", field: value}))
    with pytest.raises(CheckpointError, match=f"sets {field}="):
        read_adapter_config(tmp_path)
    path.write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="sets megatron_core='os'"):
        read_adapter_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"peft_type": "LORA", "r": "many"}'])
def test_adapter_config_damaged_is_one_line(tmp_path: Path, text: str) -> None:
    from grpo_ray.errors import CheckpointError
    from grpo_ray.models.adapter_folders import read_adapter_config

    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is damaged"):
        read_adapter_config(tmp_path)


def test_chat_template_of_a_checkpoint_is_sandboxed(policy: Path, tmp_path: Path) -> None:
    import shutil

    from jinja2.exceptions import SecurityError

    from grpo_ray.models.tokenizer import load_tokenizer, tokenize_prompts

    folder = Path(shutil.copytree(policy, tmp_path / "policy"))
    (folder / "chat_template.jinja").write_text(
        "{{ messages.__class__.__mro__[-1].__subclasses__() }}{{ cycler.__init__.__globals__.os.mkdir('"
        + str(tmp_path / "ran")
        + "') }}"
    )
    with pytest.raises(SecurityError):
        tokenize_prompts(load_tokenizer(str(folder)), [[{"role": "user", "content": "1 + 1"}]], {})
    assert not (tmp_path / "ran").exists()
