"""Tests of `export`: the folder is a plain Hugging Face model with the outputs of the checkpoint."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from failing_storage import S3Server
from small_runs import same_weights, small_settings, weights_of

from grpo_ray.cli import main
from grpo_ray.export.checkpoint import export, find_checkpoint
from grpo_ray.storage.checkpoint_upload import CheckpointUploader
from grpo_ray.storage.run_folder import RunFolder

PLAIN = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "README.md",
    "export.json",
}

"""Files that the exported folder of the embedded policy may contain."""


def logits(folder: Any, adapter: Any = None) -> Any:
    """Return the logits of the policy in a folder for some tokens, with an adapter applied if one is given."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.arange(3, 19)[None]).logits


def weights_in(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def runs(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders with checkpoints of steps 2 and 4, as workers upload them: `whole`, and `adapted` with LoRA."""
    import ray.train
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_ray.config.loader import load_config
    from grpo_ray.models.adapter_folders import record_base_policy
    from grpo_ray.models.adapters import peft_config

    torch.manual_seed(1)
    storage = tmp_path_factory.mktemp("runs")
    for name, *overrides in (["whole"], ["adapted", "model.lora={rank: 8, alpha: 16}"]):
        config = load_config(None, [*small_settings(name, storage, policy), *overrides])
        folder = RunFolder(str(storage), name)
        folder.write_text(yaml.safe_dump(config.to_dict()), "config.yaml")
        model = AutoModelForCausalLM.from_pretrained(policy)
        if lora := peft_config(config):
            model = get_peft_model(model, lora)
        for serial, step in enumerate((2, 4), start=1):
            local = tmp_path_factory.mktemp("local")
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn_like(parameter), alpha=0.02)
            model.save_pretrained(local)
            AutoTokenizer.from_pretrained(policy, padding_side="left").save_pretrained(local)
            if config.model.lora:
                record_base_policy(local, config)
            for file in ("optimizer.pt", "training_args.bin", "rng_state_0.pth", "trainer_state.json", "ledger.npz"):
                (local / file).write_bytes(b"none of a policy's files")
            metrics = {"step": step, "heldout/accuracy": step / 10, "reward/mean": -step / 10}
            upload = CheckpointUploader(folder, 0, 1, metrics, serial, 0.0, on_progress=print)
            upload(ray.train.Checkpoint(str(local)), f"checkpoint-{step:06d}")
    return storage


@pytest.fixture(scope="module")
def exported(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The last checkpoint of each run, exported with the weights as they are."""
    folders = {name: tmp_path_factory.mktemp("exported") / "plain" for name in ("whole", "adapted")}
    for name, folder in folders.items():
        export(str(runs / name / "checkpoint-000004"), folder)
    return folders


@pytest.mark.main_path
def test_export_checkpoint_gives_same_logits_and_weights(runs: Path, tmp_path: Path) -> None:
    import torch

    checkpoint = runs / "whole" / "checkpoint-000004"
    assert main(["export", str(checkpoint), str(tmp_path / "new" / "plain")]) == 0
    plain = tmp_path / "new" / "plain"
    assert {path.name for path in plain.iterdir()} <= PLAIN and len(list(plain.parent.iterdir())) == 1
    assert torch.equal(logits(plain), logits(checkpoint))
    assert same_weights(weights_in(plain), weights_of(checkpoint))


def test_export_tokenizer_encodes_prompts_alike(exported: dict[str, Path], policy: Path) -> None:
    from grpo_ray.models.tokenizer import load_tokenizer, tokenize_prompts

    prompts = [[{"role": "user", "content": "What is 17 + 25?"}]]
    ours, theirs = (tokenize_prompts(load_tokenizer(str(p)), prompts, {}) for p in (exported["adapted"], policy))
    assert ours == theirs


@pytest.mark.parametrize("run", ["whole", "adapted"])
def test_export_dtype_rounds_weights_once(runs: Path, exported: dict[str, Path], tmp_path: Path, run: str) -> None:
    import torch

    checkpoint = runs / run / "checkpoint-000004"
    assert main(["export", str(checkpoint), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert {weight.dtype for weight in weights_in(tmp_path / "half").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    whole, half = weights_in(exported[run]), weights_in(tmp_path / "half")
    assert {weight.dtype for weight in whole.values()} == {torch.float32}
    for name, weight in whole.items():
        assert torch.equal(half[name], weight.to(torch.bfloat16)), name


def test_export_adapter_is_merged(runs: Path, exported: dict[str, Path], policy: Path) -> None:
    import torch

    checkpoint = runs / "adapted" / "checkpoint-000004"
    assert {path.name for path in exported["adapted"].iterdir()} <= PLAIN
    merged, together = logits(exported["adapted"]), logits(policy, adapter=checkpoint)
    torch.testing.assert_close(merged, together, rtol=0, atol=1e-4)
    assert (together - logits(policy)).abs().max() > 1e-2  # the adapter changes the logits


def test_export_run_folder_takes_best_checkpoint(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "whole", run)
    assert export(str(run), tmp_path / "plain") == str(run / "checkpoint-000004")
    # The best by the metric that the run is configured with.
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("best_metric: heldout/accuracy", "best_metric: reward/mean"))
    assert find_checkpoint(str(run)).name == "checkpoint-000002"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda run, to: (run / "checkpoint-000004" / "model.safetensors").write_bytes(b""), "is damaged: model"),
        (lambda run, to: (run / "checkpoint-000004" / "manifest.json").unlink(), "is neither a complete checkpoint"),
        (lambda run, to: shutil.rmtree(run), "is neither a complete checkpoint nor a run folder"),
        (lambda run, to: to.mkdir(), "exists; name a new folder"),
    ],
    ids=["cut short", "without a manifest", "not there", "target there"],
)
def test_export_bad_input_is_refused_in_one_line(
    runs: Path, tmp_path: Path, break_it: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = tmp_path / "run", tmp_path / "plain"
    shutil.copytree(runs / "whole", run)
    break_it(run, target)
    capsys.readouterr()
    assert main(["export", str(run / "checkpoint-000004"), str(target)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0], lines
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "plain"}


def test_export_pickled_weights_are_not_read(runs: Path, tmp_path: Path) -> None:
    import torch

    from grpo_ray.errors import ConfigError
    from grpo_ray.models.adapter_folders import write_policy

    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(runs / "whole" / "checkpoint-000004", checkpoint)
    torch.save(weights_in(checkpoint), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        write_policy(str(checkpoint), None, tmp_path / "plain", None)


@pytest.mark.slow
def test_export_s3_adapter_of_embedded_policy_is_merged(
    runs: Path,
    exported: dict[str, Path],
    policy: Path,
    tmp_path: Path,
    s3_server: S3Server,
) -> None:
    import torch

    run = tmp_path / "run"
    shutil.copytree(runs / "adapted", run)
    shutil.copytree(policy, run / "policy")
    checkpoint = run / "checkpoint-000004"
    # As a run of the embedded policy writes it.
    described = json.loads((checkpoint / "adapter_config.json").read_text())
    text = json.dumps(described | {"base_model_name_or_path": "tiny-arithmetic"})
    (checkpoint / "adapter_config.json").write_text(text)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest["files"]["adapter_config.json"] = {"bytes": len(text), "sha256": digest}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))

    (tmp_path / "scratch").mkdir()
    far = RunFolder(s3_server.storage_path, "exported-run")
    far.upload(run)
    where = far.uri_of("checkpoint-000004")
    command = [sys.executable, "-m", "grpo_ray.cli", "export", where, str(tmp_path / "plain")]
    environment = os.environ | {"TMPDIR": str(tmp_path / "scratch")}  # to see what an export leaves there
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"the policy of {where} is in" in done.stdout
    assert not list((tmp_path / "scratch").iterdir())
    assert torch.equal(logits(tmp_path / "plain"), logits(exported["adapted"]))
