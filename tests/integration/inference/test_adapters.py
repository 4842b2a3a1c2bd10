"""Adapters of every type in a real engine: proven syncs, equal log-probabilities, an untouched learner."""

from pathlib import Path

import pytest
from adapters import SMALL, VARIANTS
from worker_tasks import call_in_worker

from grpo_ray.config.peft_fields import NOT_QUANTIZED

QUICK = ("LORA", "OFT", "LN_TUNING", "norms")
"""Tried in each run of the tests, in 16 bits."""

ALL = (*SMALL, *VARIANTS)
IN_FOUR_BITS = tuple(name for name in ALL if name not in (*NOT_QUANTIZED, "PiSSA", "OLoRA"))
"""Types and variants that `model.quantization` goes with."""

OWN, SHARED = "model.share_base=false", "model.share_base=true"

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}
"""Largest mean difference of the log-probabilities of engine and learner, nats; in 16 bits that of a run."""


REQUEST_TOLERANCE = {"float32": 2e-6, "bfloat16": 0.01}
"""The same with the adapter as a LoRA request; measured 4e-7 and 0.0055."""


@pytest.mark.parametrize(
    ("dtype", "method", "names"),
    [
        ("bfloat16", None, QUICK),
        pytest.param("bfloat16", "nf4", ("LORA", "norms"), marks=pytest.mark.slow),
        pytest.param("bfloat16", None, ALL, marks=pytest.mark.slow, id="bfloat16-all"),
        pytest.param("float32", None, ALL, marks=pytest.mark.slow, id="float32-all"),
        pytest.param("bfloat16", "nf4", IN_FOUR_BITS, marks=pytest.mark.slow, id="bfloat16-nf4-all"),
        pytest.param("float32", "nf4", IN_FOUR_BITS, marks=pytest.mark.slow, id="float32-nf4-all"),
    ],
)
def test_engine_has_the_merged_adapter(
    cluster: None, policy: Path, dtype: str, method: str | None, names: tuple[str, ...]
) -> None:
    from adapter_probe import STEPS, observe_adapters

    found = call_in_worker(observe_adapters, str(policy), dtype, names, method)
    assert found.keys() == set(names)
    for name, seen in found.items():
        print(name, [f"{gap:.1e}" for gap in seen.gaps], f"{seen.moved:.1e}")
        assert len(seen.gaps) == STEPS + 1 and max(seen.gaps) < TOLERANCE[dtype], name
        assert seen.moved > 0 and seen.is_kept, name
        assert "does not hold the learner's weights" in seen.stale, name
        # FROD computes the layer from what it read when it was built, so the frozen weight has no effect any more.
        assert name == "FROD" or "does not hold the learner's weights" in seen.of_other_base, name


@pytest.mark.parametrize(
    ("dtype", "name", "setting"),
    [
        ("bfloat16", "ranks", SHARED),
        pytest.param("bfloat16", "ranks", OWN, marks=pytest.mark.slow),
        pytest.param("bfloat16", "rsLoRA", OWN, marks=pytest.mark.slow),
        pytest.param("float32", "LORA", OWN, marks=pytest.mark.slow),
        pytest.param("float32", "LORA", SHARED, marks=pytest.mark.slow),
        pytest.param("float32", "PiSSA", OWN, marks=pytest.mark.slow),
        pytest.param("bfloat16", "LORA", "model.quantization=nf4", marks=pytest.mark.slow),
    ],
)
def test_engine_applies_the_adapter_of_its_requests(
    cluster: None, policy: Path, dtype: str, name: str, setting: str
) -> None:
    from adapter_probe import STEPS, observe_request

    seen = call_in_worker(observe_request, str(policy), dtype, name, setting)
    print([f"{gap:.1e}" for gap in seen.gaps], f"{seen.moved:.1e}", seen.faults)
    assert len(seen.gaps) == STEPS + 1 and max(seen.gaps) < REQUEST_TOLERANCE[dtype]
    assert seen.moved > 0.05 and seen.is_kept
    assert seen.sent_weights == 1 and seen.has_first_base
    first = seen.versions[0]
    assert seen.versions == [first, first + 1, first + 2] and seen.listed == [[each] for each in seen.versions]
    assert seen.cached[0] > 0 and seen.cached[1] == 0
    assert "layers.0.self_attn.q_proj.lora_A, model.layers.0.self_attn.q_proj.lora_B" in seen.stale
    layer = "model.layers.1.self_attn"
    outside = f"{layer}.qkv_proj.lora_B.0 has numbers that are not the adapter's"
    # Embedding, output layer, norms, 14 linear layers and six biases of two blocks.
    assert seen.shared == (27 if setting == SHARED else 0)
    changed = f"{layer}.v_proj.weight, which both share, have changed since the first sync"
    expected = {
        "frozen weight": changed if setting == SHARED else f"checksums of {layer}.v_proj.weight differ",
        "first matrix": f"checksums of {layer}.q_proj.lora_A differ",
        "second matrix": f"checksums of {layer}.v_proj.lora_B differ",
        # The slot is larger than the adapter's rank where other layers have a larger one.
        "outside of the matrices": outside if name == "ranks" else f"checksums of {layer}.q_proj.lora_B differ",
        "scale": f"checksums of {layer}.v_proj.lora_B differ",
        "adapter removed": "its adapter is None",
    }
    assert seen.faults.keys() == expected.keys()
    for fault, message in expected.items():
        assert message in seen.faults[fault], fault


def test_engine_reads_the_learners_base_in_four_bits(cluster: None, policy: Path) -> None:
    from adapter_probe import STEPS, observe_int4

    seen, faults = call_in_worker(observe_int4, str(policy))
    print([f"{gap:.1e}" for gap in seen.gaps], f"{seen.moved:.1e}", faults)
    assert len(seen.gaps) == STEPS + 1 and max(seen.gaps) < 0.01
    assert seen.moved > 0.05 and seen.is_kept
    assert "layers.0.self_attn.q_proj.lora_A, model.layers.0.self_attn.q_proj.lora_B" in seen.stale
    expected = {
        "parts exchanged": "products of model.layers.1.mlp.gate_up_proj differ by a part of",
        "of another layer": "products of model.layers.0.self_attn.o_proj differ by a part of",
        "scales": "products of model.layers.1.self_attn.qkv_proj differ by a part of",
        "norm": "model.layers.1.input_layernorm.weight differs",
        "bias": "model.layers.1.self_attn.v_proj.bias differs",
    }
    assert faults.keys() == expected.keys()
    for fault, message in expected.items():
        assert message in faults[fault], fault


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["model.quantization=int4", "engine.adapter=request", "model.quantization=nf4"])
@pytest.mark.parametrize("hidden", [256, 512, 1024])
def test_engines_weights_take_what_is_estimated(
    cluster: None, policy: Path, tmp_path: Path, hidden: int, setting: str
) -> None:
    from adapter_probe import weigh_engine
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from grpo_ray.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(policy))
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=5 * hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        num_hidden_layers=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    stored, estimated = call_in_worker(weigh_engine, str(tmp_path), "model.lora={rank: 16}", setting)
    print(stored, estimated)
    assert estimated == pytest.approx(stored, rel=0.1)
