import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import SMALL, VARIANTS, adapted, is_tied, load, logps, move, settings_of, state
from safetensors.torch import load_file

from grpo_ray.config.loader import load_config
from grpo_ray.config.peft_fields import MOVES_THE_BASE, NOT_QUANTIZED
from grpo_ray.errors import CheckpointError, ConfigError
from grpo_ray.inference.quantized_base import write_compressed_policy
from grpo_ray.inference.weight_proof import learner_weights
from grpo_ray.models import quantized
from grpo_ray.models.adapter_folders import write_policy
from grpo_ray.models.adapters import frozen_weights, merged_weights
from grpo_ray.models.memory import policy_shape
from grpo_ray.models.quantized import (
    QUANTIZATION,
    QUANTIZERS,
    Quantization,
    QuantizedLinear,
    kept_modules,
    quantizable_layers,
    quantize_policy,
    quantized_layers,
    read_quantization,
    record_quantization,
    require_quantizer,
    round_policy,
)
from grpo_ray.models.tokenizer import load_tokenizer

METHODS = sorted(QUANTIZERS)


def plain_layer(dtype: torch.dtype = torch.float32, inputs: int = 192, outputs: int = 96) -> torch.nn.Linear:
    torch.manual_seed(0)
    layer = torch.nn.Linear(inputs, outputs).to(dtype)
    layer.weight.requires_grad_(False)
    return layer


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)]
)
def test_layer_computes_as_torch_with_the_dequantized_weight(method: str, dtype: torch.dtype, autocast: bool) -> None:
    layer = QuantizedLinear(plain_layer(dtype), method)
    plain = plain_layer(dtype)
    plain.weight.data = layer.weight.clone()
    found = []
    for each in (layer, plain):
        torch.manual_seed(1)
        inputs = torch.randn(3, 7, 192, dtype=torch.float32 if autocast else dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = each(inputs)
        output.float().square().sum().backward()
        assert inputs.grad is not None and each.bias.grad is not None
        found.append((output.detach(), inputs.grad, each.bias.grad))
    assert all(torch.equal(ours, of_torch) for ours, of_torch in zip(*found, strict=True))


@pytest.mark.parametrize(("method", "largest"), [("nf4", 0.153), ("int4", 1 / 15 + 0.005)])
@pytest.mark.parametrize("inputs", [64, 192, 320])
def test_weights_move_by_less_than_half_of_the_widest_step(method: str, largest: float, inputs: int) -> None:
    # Of a block whose largest weight is 1: the widest step of nf4 is from -1 to -0.696, a step of int4 is 2 / 15.
    before = plain_layer(inputs=inputs).weight
    after = QuantizedLinear(plain_layer(inputs=inputs), method).weight
    blocks = before.view(-1, 64).abs().amax(1, keepdim=True)
    assert 0.02 < float(((before - after).view(-1, 64) / blocks).abs().max()) < largest
    assert torch.equal(QuantizedLinear(plain_layer(inputs=inputs), method).weight, after)


@pytest.mark.parametrize("method", METHODS)
def test_block_of_zeros_stays_zero(method: str) -> None:
    layer = plain_layer()
    layer.weight.data[:2] = 0
    layer.weight.data[2, 64:128] = 0
    weight = QuantizedLinear(layer, method).weight
    assert not weight[:2].any() and not weight[2, 64:128].any() and weight[2, :64].any()


@pytest.mark.parametrize(("method", "bytes_per_weight"), [("nf4", 0.5 + 4 / 64), ("int4", 0.5 + 2 / 64)])
def test_layer_takes_four_bits_and_a_scale_for_each_block(method: str, bytes_per_weight: float) -> None:
    layer = QuantizedLinear(plain_layer(torch.bfloat16), method)
    stored = sum(each.nbytes for name, each in layer.named_parameters() if name != "bias")
    assert stored == bytes_per_weight * 192 * 96
    assert not any(each.requires_grad for name, each in layer.named_parameters() if name != "bias")


@pytest.mark.parametrize("method", METHODS)
def test_converted_policy_rounds_the_dequantized_weight(method: str) -> None:
    layer = QuantizedLinear(plain_layer(), method)
    before, stored = layer.weight.clone(), (layer.codes.clone(), layer.scales.clone())
    for dtype in (torch.bfloat16, torch.float64):
        converted = torch.nn.Sequential(layer).to(dtype)[0]
        assert torch.equal(converted.weight, before.to(dtype)) and converted.bias.dtype == dtype
        assert torch.equal(converted.codes, stored[0]) and torch.equal(converted.scales, stored[1])


def quantized_policy(policy: Path, method: str, name: str, dtype: str = "float32") -> Any:
    model = load(policy, dtype, tied=is_tied(name))
    quantize_policy(model, method, kept_modules(settings_of(name)))
    return model


def test_all_linear_layers_but_the_output_layer_are_quantized(policy: Path) -> None:
    model = load(policy)
    linear = {name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)} - {"lm_head"}
    assert linear == set(quantizable_layers(model)) and len(linear) == 14
    quantize_policy(model, "nf4")
    assert linear == {name for name, _ in quantized_layers(model)}


def test_modules_that_are_trained_as_a_whole_are_not_quantized(policy: Path) -> None:
    adapter = {"type": "LORA", "target_modules": ["q_proj"], "modules_to_save": ["v_proj"]}
    names = quantizable_layers(load(policy), kept_modules(adapter))
    assert names and not any(name.endswith("v_proj") for name in names)
    inner = quantizable_layers(load(policy), ["layers.1.mlp", "self_attn"])
    assert inner == [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]


def test_layer_with_a_part_of_a_block_is_not_quantized() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=128))
    assert quantizable_layers(model) == ["model.layers.0.mlp.down_proj"]
    with pytest.raises(ConfigError, match="no linear layer with a multiple of 64 inputs"):
        quantizable_layers(LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48)))


@pytest.mark.parametrize("method", METHODS)
def test_rounded_policy_equals_the_quantized_one(policy: Path, method: str) -> None:
    plain, four_bits = load(policy), load(policy)
    round_policy(plain, method)
    quantize_policy(four_bits, method)
    assert not torch.equal(logps(plain), logps(load(policy)))
    assert torch.equal(logps(plain), logps(four_bits))


QUICK = ("LORA", "OFT", "DoRA", "norms", "some layers")
"""Tried in each run of the tests."""
IN_FOUR_BITS = [name for name in (*SMALL, *VARIANTS) if name not in (*NOT_QUANTIZED, "PiSSA", "OLoRA")]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in IN_FOUR_BITS]
)
def test_merged_adapter_computes_as_the_adapted_policy(policy: Path, name: str) -> None:
    model = adapted(quantized_policy(policy, "nf4", name), name)
    move(model)
    before = {each: tensor.clone() for each, tensor in state(model).items()}
    sent = {each: weight.clone() for each, weight in merged_weights(model)}
    read = {each: weight.clone() for each, weight in learner_weights(model)}
    assert state(model).keys() == before.keys()
    assert all(torch.equal(tensor, before[each]) for each, tensor in state(model).items())
    assert sent.keys() == read.keys() and all(torch.equal(weight, read[each]) for each, weight in sent.items())
    plain = load(policy, tied=is_tied(name))
    assert sent.keys() == dict(plain.named_parameters()).keys()
    expected = logps(model)
    plain.load_state_dict(sent, strict=False)
    assert float((logps(plain) - expected).abs().mean()) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_exported_adapter_has_the_dequantized_policy(policy: Path, tmp_path: Path, method: str) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint, target = tmp_path / "checkpoint", tmp_path / "exported"
    model = adapted(quantized_policy(policy, method, "LORA", "bfloat16"), "LORA")
    move(model)
    model.save_pretrained(checkpoint)
    load_tokenizer(str(policy)).save_pretrained(checkpoint)
    record_quantization(checkpoint, Quantization(method, "bfloat16"))
    write_policy(str(checkpoint), str(policy), target, "float32")
    exported = AutoModelForCausalLM.from_pretrained(target).state_dict()
    trained = dict(merged_weights(model))
    assert trained.keys() == exported.keys() - {"lm_head.weight"}
    assert all(torch.equal(exported[name], weight.float()) for name, weight in trained.items())


def test_refused_types_would_fail_or_train_another_policy(policy: Path) -> None:
    for name in NOT_QUANTIZED:
        with pytest.raises(ValueError, match="plain"):
            adapted(quantized_policy(policy, "nf4", name), name)
    # PEFT's change of the frozen weight would be lost, so the first policy would be another one.
    first = logps(quantized_policy(policy, "nf4", "LORA"))
    for init in MOVES_THE_BASE:
        model = adapted(quantized_policy(policy, "nf4", "LORA"), {"pissa": "PiSSA", "olora": "OLoRA"}[init])
        assert float((logps(model) - first).abs().mean()) > 0.01


@pytest.mark.parametrize("method", METHODS)
def test_checkpoint_says_how_its_policy_was_quantized(tmp_path: Path, method: str) -> None:
    config = load_config(None, [f"model.quantization={method}", "model.lora={}", "model.dtype=bfloat16"])
    base = Quantization.of(config)
    assert base == Quantization(method, "bfloat16")
    record_quantization(tmp_path, base)
    assert read_quantization(tmp_path) == base


def test_checkpoint_without_quantization_has_no_file(tmp_path: Path) -> None:
    record_quantization(tmp_path, Quantization.of(load_config()))
    assert not list(tmp_path.iterdir()) and read_quantization(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"method": "nf4"}',
        '{"method": "os:system", "dtype": "float32"}',
        '{"method": "nf4", "dtype": 1}',
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / QUANTIZATION).write_text(content)
    with pytest.raises(CheckpointError, match=f"{QUANTIZATION} is damaged"):
        read_quantization(tmp_path)
    (tmp_path / QUANTIZATION).write_text(json.dumps({"method": "nf4", "dtype": "float32"}))
    assert read_quantization(tmp_path) == Quantization("nf4", "float32")


def qwen_folder(folder: Path, **sizes: int) -> str:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    plain = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=1, vocab_size=32, **(plain | sizes))).save_pretrained(folder)
    return str(folder)


INT4 = ["model.quantization=int4", "model.dtype=bfloat16"]


def test_int4_refuses_an_adapter_on_a_layer_that_stays_plain(tmp_path: Path) -> None:
    folder = qwen_folder(tmp_path, intermediate_size=96)
    with pytest.raises(ConfigError, match=r"an adapter on model\.layers\.0\.mlp\.down_proj, which stays in 16 bits"):
        policy_shape(load_config(None, [*INT4, "model.lora={}"]), folder)


def test_slot_of_requests_is_counted_by_layer(tmp_path: Path) -> None:
    folder = qwen_folder(tmp_path)
    shape = policy_shape(load_config(None, [*INT4, "model.lora={target_modules: [q_proj, down_proj]}"]), folder)
    assert shape.adapter_sizes == 64 + 64 + 128 + 64
    assert policy_shape(load_config(None, ["model.lora={}"]), folder).adapter_sizes is None


def test_int4_refuses_a_mixture_of_experts(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=32, head_dim=32, **sizes, **experts)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"only \d+% of the policy's weights .* as in a mixture of experts"):
        policy_shape(load_config(None, [*INT4, "model.lora={target_modules: [q_proj, v_proj]}"]), str(tmp_path))


def test_written_policy_is_read_by_another_library(policy: Path, tmp_path: Path) -> None:
    """compressed-tensors decompresses the folder from which vLLM starts into the weights that are trained."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    model = adapted(quantized_policy(policy, "int4", "LORA", "bfloat16"), "LORA")
    write_compressed_policy(model, load_tokenizer(str(policy)), tmp_path / "int4")
    settings = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    (group,) = settings["config_groups"].values()
    assert len(group["targets"]) == 14 and "model.layers.1.mlp.up_proj" in group["targets"]
    tensors = load_file(tmp_path / "int4" / "model.safetensors")
    expected = dict(frozen_weights(model))
    stored = {name.removesuffix("_packed") for name in tensors if not name.endswith(("_scale", "_shape"))}
    assert stored == expected.keys()
    scheme = QuantizationScheme(targets=group["targets"], weights=QuantizationArgs(**group["weights"]))
    for name in group["targets"]:
        parts = {f"weight_{part}": tensors[f"{name}.weight_{part}"] for part in ("packed", "scale", "shape")}
        read = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        assert torch.equal(read, expected[f"{name}.weight"]), name


def test_installed_package_warns_of_nothing() -> None:
    """PEFT imports it, so that every command of a user would show its warnings."""
    command = [sys.executable, "-c", "import grpo_ray, bitsandbytes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_quantizer("nf4")
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    require_quantizer(None)
    require_quantizer("int4")
    with pytest.raises(
        ConfigError, match=r"nf4 needs bitsandbytes, which is not installed: pip install 'grpo-ray\[nf4\]'"
    ):
        require_quantizer("nf4")
