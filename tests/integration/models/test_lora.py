"""Tests of training adapters: merged weights in the engine, checkpoints, resume, evaluation and export."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import events_of, rows_of, same_weights

from grpo_ray.config.loader import load_config
from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.errors import CheckpointError, ConfigError, TrainingError
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.models.quantized import QUANTIZATION
from grpo_ray.models.tokenizer import load_tokenizer
from grpo_ray.resilience.chaos import Fault
from grpo_ray.storage.run_folder import RunFolder

LORA = "model.lora={rank: 8, alpha: 16}"
SIGNAL = "rewards.functions=['reward_spies:vary']"


def adapter_of(checkpoint: str | Path) -> dict[str, Any]:
    """Return the adapter's weights in a checkpoint folder, by name."""
    from safetensors.torch import load_file

    return load_file(Path(checkpoint, "adapter_model.safetensors"))


def with_adapter(policy: Path, dtype: str) -> Any:
    """Return the embedded policy with an adapter whose update is not zero."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from grpo_ray.models.adapters import peft_config

    lora = peft_config(load_config(None, [LORA]))
    assert lora is not None
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(policy, dtype=getattr(torch, dtype)), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model


# Merging


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_policy_plus_update(policy: Path, dtype: str) -> None:
    import torch

    from grpo_ray.models.adapters import merged_weights

    model = with_adapter(policy, dtype)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    merged = {name: weight.clone() for name, weight in merged_weights(model)}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())

    bare = {name.replace(".base_layer", ""): parameter for name, parameter in model.get_base_model().named_parameters()}
    assert merged.keys() == {name for name in bare if "lora_" not in name}
    changed = {name for name in merged if not torch.equal(merged[name], bare[name])}
    layers = model.config.num_hidden_layers
    assert len(changed) == 7 * layers  # q, k, v, o, gate, up, down
    name = "model.layers.1.mlp.up_proj"
    layer = model.get_base_model().get_submodule(name)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    by_hand = before[f"base_model.model.{name}.base_layer.weight"].float() + 16 / 8 * b @ a  # alpha 16, rank 8
    torch.testing.assert_close(merged[f"{name}.weight"], by_hand, rtol=0, atol=0)


def test_merged_policy_equals_policy_with_adapter(policy: Path) -> None:
    import torch

    from grpo_ray.models.adapters import merge_adapter

    model = with_adapter(policy, "float32").eval()
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        together, alone = model(ids).logits, model.get_base_model().model.embed_tokens(ids)
        merged = merge_adapter(model)
        torch.testing.assert_close(merged(ids).logits, together, rtol=0, atol=1e-5)
    assert alone.isfinite().all() and not any("lora_" in name for name, _ in merged.named_parameters())


def test_without_dropout_training_mode_model_has_none(policy: Path) -> None:
    from grpo_ray.learner.learner import without_dropout

    model = with_adapter(policy, "float32").train()
    frozen = model.get_submodule("base_model.model.model.layers.0.mlp").eval()
    with without_dropout(model):
        assert model.training and not any(module.training for module in model.modules() if module is not model)
    assert all(module.training for module in model.modules() if module not in set(frozen.modules()))
    assert not any(module.training for module in frozen.modules())


@pytest.mark.parametrize("name", EMBEDDED_POLICIES)
def test_adapter_of_embedded_policy_finds_it_in_the_run_folder(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from grpo_ray.models.adapter_folders import merged_policy_path, record_base_policy
    from grpo_ray.models.adapters import merge_adapter

    base, checkpoint = embedded_policy(name), tmp_path / "run" / "checkpoint-000002"
    model = with_adapter(base, "float32")
    model.save_pretrained(checkpoint)
    load_tokenizer(str(base)).save_pretrained(checkpoint)
    config = load_config(None, [LORA, f"model.path={name}", "model.dtype=float32"])
    record_base_policy(checkpoint, config)
    with pytest.raises(CheckpointError, match="has no folder `policy`"):
        merged_policy_path(str(checkpoint), config, str(tmp_path))
    shutil.copytree(base, tmp_path / "run" / "policy")
    merged = AutoModelForCausalLM.from_pretrained(merged_policy_path(str(checkpoint), config, str(tmp_path)))
    expected = merge_adapter(model).state_dict()
    for key, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, expected[key], rtol=0, atol=0)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_adapter_finds_a_base_policy_that_has_moved(scheme: str, tmp_path: Path) -> None:
    from grpo_ray.models.adapter_folders import base_policy_path

    adapter, run = tmp_path / "run" / "checkpoint-000002", RunFolder(str(tmp_path), "run")
    adapter.mkdir(parents=True)
    settings = {"peft_type": "LORA", "base_model_name_or_path": f"{scheme}{tmp_path}/old"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text("{}")
    run.write_text(json.dumps({"model": {"path": f"{scheme}{tmp_path}/new"}}), "config.yaml")
    found = base_policy_path(str(adapter), run, str(tmp_path))
    assert (Path(found) / "config.json").read_text() == "{}"
    assert (found == f"{tmp_path}/new") == (scheme == "")  # a store's folder is fetched


# Settings


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("{rank: 0}", "model.lora.rank=0 must be a whole number of at least 1"),
        ("{alpha: -1}", "model.lora.alpha=-1 must be a whole number of at least 1"),
        ("{dropout: 1.0}", "model.lora.dropout=1.0 must be a number of at least 0 and below 1"),
        ("{dropout: .nan}", "model.lora.dropout=nan"),
        ("{target_modules: []}", r"model.lora.target_modules=\[\] must be non-empty text"),
        ("{rnk: 8}", "unknown key model.lora.rnk"),
        ("8", "model.lora=8 must be a section"),
    ],
)
def test_lora_config_invalid_is_refused(lora: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"model.lora={lora}"])


def test_lora_config_survives_yaml() -> None:
    from grpo_ray.config.loader import from_mapping

    assert load_config(None, ["model.lora={}"]).to_dict()["model"]["lora"] == {
        "rank": 64, "alpha": 128, "dropout": 0.0, "target_modules": "all-linear",
    }  # fmt: skip
    config = load_config(None, ["model.lora={target_modules: [q_proj, v_proj]}"])
    plain = config.to_dict()
    assert plain["model"]["lora"]["target_modules"] == ["q_proj", "v_proj"]
    assert from_mapping(plain) == config


def test_lora_frozen_weights_have_the_engines_precision() -> None:
    from grpo_ray.learner.trl_config import trl_arguments

    settings = ["model.dtype=bfloat16", "grpo.model_init_kwargs={attn_implementation: eager}"]
    args = trl_arguments(load_config(None, [*settings, "model.lora={}"]), "out")
    assert args.model_init_kwargs == {"dtype": "bfloat16", "attn_implementation": "eager"}
    assert "dtype" not in trl_arguments(load_config(None, settings), "out").model_init_kwargs


# Whole runs


DORA = "model.peft={type: LORA, r: 8, lora_alpha: 16, use_dora: true}"
OFT = "model.peft={type: OFT, oft_block_size: 8}"


@pytest.mark.main_path
@pytest.mark.parametrize(
    ("adapter", "method", "tensors"),
    [
        pytest.param(DORA, "nf4", 3, id="DoRA-nf4"),
        pytest.param(DORA, None, 3, id="DoRA", marks=pytest.mark.slow),
        pytest.param(LORA, None, 2, id="LoRA", marks=pytest.mark.slow),
        pytest.param(OFT, None, 1, id="OFT", marks=pytest.mark.slow),
    ],
)
def test_adapter_run_is_saved_resumed_measured_and_exported(
    small_run: Callable[..., Any],
    policy: Path,
    capsys: pytest.CaptureFixture[str],
    adapter: str,
    method: str | None,
    tensors: int,
) -> None:
    """An adapter has so many tensors in each of the seven linear layers of the policy's two blocks."""
    from grpo_ray.cli import main

    quantized = f"model.quantization={method or 'null'}"
    whole, folder = small_run("whole", adapter, quantized, SIGNAL)
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["engine/logprob_gap_mean"] for row in rows) < 1e-4
    files = {path.name for path in Path(whole.latest_checkpoint).iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "tokenizer.json"} <= files
    assert not files & {"model.safetensors", "README.md"}
    assert (QUANTIZATION in files) == (method is not None)
    assert json.loads(Path(whole.latest_checkpoint, "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(policy)
    weights = adapter_of(whole.latest_checkpoint)
    assert len(weights) == tensors * 7 * 2 and all(w.abs().max() > 0 for w in weights.values())
    best = next(row for row in rows if row.get("checkpoint") == Path(whole.best_checkpoint).name)
    assert whole.heldout_after == best["heldout/accuracy"]

    killed, folder = small_run(
        "killed", adapter, quantized, SIGNAL, "run.max_failures=1",
        faults=[Fault("kill-backward", step=4)],
    )  # fmt: skip
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2]
    assert same_weights(adapter_of(killed.latest_checkpoint), weights)

    field = adapter.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{field}=None differs.*grpo-ray export"):
        small_run("whole-again", SIGNAL, f"run.from_checkpoint={folder}", "grpo.max_steps=6")
    with pytest.raises(ConfigError, match=f"{field}=None differs"):
        small_run("killed", SIGNAL, "grpo.max_steps=6")

    capsys.readouterr()
    assert main(["export", whole.best_checkpoint, str(folder / "plain")]) == 0
    assert not list((folder / "plain").glob("*.pt")) and (folder / "plain" / "model.safetensors").exists()
    # `grpo-ray eval` in another process, with its own engine and the merged weights, measures the same accuracy.
    assert main(["eval", whole.best_checkpoint, "--trust-rewards", "--json", str(folder / "evaluation.json")]) == 0
    assert json.loads((folder / "evaluation.json").read_text())["pass_at_1"]["value"] == whole.heldout_after


@pytest.mark.slow
def test_adapter_as_request_trains_and_resumes_with_the_same_bits(small_run: Callable[..., Any]) -> None:
    settings = [LORA, "engine.adapter=request", SIGNAL]
    whole, folder = small_run("whole", *settings)
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["engine/logprob_gap_mean"] for row in rows) < 1e-5
    weights = adapter_of(whole.latest_checkpoint)
    assert all(weight.abs().max() > 0 for weight in weights.values())

    killed, folder = small_run("killed", *settings, "run.max_failures=1", faults=[Fault("kill-backward", step=4)])
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2]
    assert same_weights(adapter_of(killed.latest_checkpoint), weights)

    shared, _ = small_run("shared", LORA, SIGNAL, "model.share_base=true")
    assert same_weights(adapter_of(shared.latest_checkpoint), weights)

    small_run("killed", LORA, SIGNAL, "grpo.max_steps=6")  # the rest with merged weights
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_int4_run_is_saved_resumed_measured_and_exported(
    small_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from grpo_ray.cli import main

    settings = (LORA, SIGNAL, "model.quantization=int4", "model.dtype=bfloat16")
    whole, folder = small_run("whole", *settings)
    rows = rows_of(folder)
    assert max(row["engine/logprob_gap_mean"] for row in rows) < 0.01
    weights = adapter_of(whole.latest_checkpoint)
    assert all(weight.abs().max() > 0 for weight in weights.values())
    assert json.loads(Path(whole.latest_checkpoint, QUANTIZATION).read_text()) == {
        "method": "int4",
        "dtype": "bfloat16",
    }

    killed, folder = small_run("killed", *settings, "run.max_failures=1", faults=[Fault("kill-backward", step=4)])
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2]
    assert same_weights(adapter_of(killed.latest_checkpoint), weights)
    with pytest.raises(ConfigError, match=r"quantization=.*nf4.* differs"):
        small_run("killed", LORA, SIGNAL, "model.quantization=nf4", "model.dtype=bfloat16", "grpo.max_steps=6")

    capsys.readouterr()
    assert main(["export", whole.best_checkpoint, str(folder / "plain")]) == 0
    assert "int4" in (folder / "plain" / "README.md").read_text()
    # The engine of `grpo-ray eval` has the merged weights in 16 bits, which are rounded once more.
    assert main(["eval", whole.best_checkpoint, "--trust-rewards", "--json", str(folder / "evaluation.json")]) == 0
    measured = json.loads((folder / "evaluation.json").read_text())["pass_at_1"]["value"]
    assert measured == pytest.approx(whole.heldout_after, abs=0.1)


@pytest.mark.slow
def test_lora_one_worker_takes_the_same_steps_as_two(small_run: Callable[..., Any]) -> None:
    import torch

    weights = {}
    for workers in (1, 2):
        summary, _ = small_run(
            f"workers-{workers}", LORA, SIGNAL, f"cluster.num_workers={workers}", "grpo.learning_rate=1e-4"
        )  # fmt: skip
        weights[workers] = adapter_of(summary.latest_checkpoint)
    assert weights[1].keys() == weights[2].keys()
    for name in weights[1]:
        torch.testing.assert_close(weights[1][name], weights[2][name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
def test_lora_adapter_withheld_from_the_engine_stops_the_run(small_run: Callable[..., Any]) -> None:
    with pytest.raises(TrainingError, match=r"SyncError.*does not hold the learner's weights") as caught:
        small_run(
            "withheld", LORA, "rewards.functions=['reward_spies:withhold_the_adapter']", "heldout.score=correctness",
            "grpo.max_steps=20",
            "grpo.save_steps=20", "grpo.learning_rate=1e-2",
        )  # fmt: skip
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("spy", ["withhold_a_layer", "freeze_a_layer"])
def test_lora_sync_with_a_broken_layer_stops_the_run(small_run: Callable[..., Any], spy: str) -> None:
    with pytest.raises(TrainingError, match="SyncError"):
        small_run(spy.replace("_", "-"), LORA, f"rewards.functions=['reward_spies:{spy}']", "heldout.score=correctness",
            "grpo.max_steps=40",
                  "grpo.learning_rate=1e-2")  # fmt: skip


@pytest.mark.slow
def test_lora_reference_is_the_policy_without_adapter(
    small_run: Callable[..., Any],
) -> None:
    _, folder = small_run("reference", "model.lora={rank: 8, alpha: 16, dropout: 0.2}", SIGNAL, "grpo.beta=0.05")
    rows = rows_of(folder)
    # Before the first step the adapter's update is zero, so the policy equals the reference.
    assert rows[0]["policy/kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["policy/kl"] > 1e-6
    assert max(row["engine/logprob_gap_mean"] for row in rows) < 1e-4
