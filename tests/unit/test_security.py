"""Nothing that comes with a model, a dataset or a checkpoint is run, and none of its text is taken for code."""

import ast
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_ray.nodes import model_fault
from grpo_ray.settings import load
from grpo_ray.summary import describe

PACKAGE = Path(__file__).parents[2] / "grpo_ray"
HOSTILE = [
    "$(touch ran)", "`touch ran`", "; touch ran #", "'\"\\", "!!python/object/apply:os.system ['touch ran']", "{{7*7}}",
    "<script>alert(1)</script>", "a: [b", "- x\n- y", "%s%n", "\u202e\u0000", "yes", "~", "&a *a",
]  # fmt: skip
"""Texts that some shell, YAML reader, page or template would take for more than text."""


class Payload:
    """Unpickled, it makes a file: what an attacker's code would do first."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_the_payload_works_where_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_with_a_payload_is_refused_and_not_run(tmp_path: Path, file: str) -> None:
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


def test_a_models_own_code_is_not_run_unless_asked(tmp_path: Path) -> None:
    model, ran = tmp_path / "model", tmp_path / "ran"
    model.mkdir()
    settings = {"model_type": "unheard-of", "auto_map": {"AutoConfig": "configuration.TheirConfig"}}
    (model / "config.json").write_text(json.dumps(settings))
    (model / "configuration.py").write_text(
        f"import os\nfrom transformers import PretrainedConfig\nos.makedirs({str(ran)!r}, exist_ok=True)\n"
        "class TheirConfig(PretrainedConfig):\n    model_type = 'unheard-of'\n"
    )
    refused = model_fault(load(None, [f"model.path={model}"]))
    assert refused and "trust_remote_code" in refused
    assert not ran.exists()
    assert model_fault(load(None, [f"model.path={model}", "model.trust_remote_code=true"])) is None
    assert ran.exists()


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text_in_the_runs_config(text: str) -> None:
    config = load()
    config = replace(config, data=replace(config.data, system_prompt=text, columns={text: text}))
    written = yaml.safe_dump(describe(config), sort_keys=False, allow_unicode=True)
    read = yaml.safe_load(written)["data"]
    assert (read["system_prompt"], read["columns"]) == (text, {text: text})
    assert load("config.yaml", text=written, drop=("versions",)).data == config.data


@pytest.mark.parametrize("name", ["../up", "a/b", "$(x)", "", ".hidden", "a b", "x\n"])
def test_a_run_cannot_be_named_so_that_it_leaves_its_folder(name: str) -> None:
    from grpo_ray.errors import ConfigError

    with pytest.raises(ConfigError, match=r"run\.name"):
        load(None, [f"run.name={name!r}" if name else "run.name=''"])


def test_the_package_never_calls_a_shell_or_unpickles_a_file() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe = (
                called in ("os.system", "os.popen", "eval", "exec", "pickle.load", "pickle.loads")
                or keywords.get("shell") == "True"
                or (called == "torch.load" and keywords.get("weights_only") != "True")
                or (called == "np.load" and keywords.get("allow_pickle") != "False")
                or (called == "yaml.load" and "_Loader" not in ast.unparse(node))
            )
            if unsafe:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not found
