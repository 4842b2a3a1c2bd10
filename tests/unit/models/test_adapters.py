"""Tests of adapters: each type that is not refused is merged exactly, and the learner stays as it is."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import SMALL, adapted, is_tied, load, logps, move, narrow_llama, settings_of, state, tried
from peft import get_peft_model
from peft.optimizers import create_lorafa_optimizer

from grpo_ray.config.loader import load_config
from grpo_ray.config.peft_fields import moves_the_base, peft_types, starts_elsewhere
from grpo_ray.errors import ConfigError
from grpo_ray.inference.weight_proof import learner_weights, request_weights
from grpo_ray.models.adapter_folders import read_adapter_config
from grpo_ray.models.adapters import (
    MERGE_READS_WEIGHTS,
    READS_WEIGHTS,
    adapter_optimizer,
    build_config,
    frozen_weights,
    lora_updates,
    merge_adapter,
    merged_weights,
    require_plain_lora,
    try_adapter,
)

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("LORA", "OFT", "IA3", "LN_TUNING", "TRAINABLE_TOKENS", "DoRA", "norms", "biases")
"""Tried in each run of the tests; every other one is slow in sum, but for its merge."""

ROUNDING = 1e-4
"""Largest difference of log-probabilities, nats, of two ways to compute the same policy in float32."""


def moved(policy: Path, name: str, dtype: str = "float32") -> Any:
    """Return a policy with an adapter that has been trained for a while."""
    model = adapted(load(policy, dtype, tied=is_tied(name)), name)
    move(model)
    return model


def test_every_type_is_tried() -> None:
    assert SMALL.keys() == peft_types().keys()


@tried(QUICK, pytest.mark.long)
def test_merged_weights_are_those_that_the_learner_computes_with(policy: Path, name: str) -> None:
    model = moved(policy, name)
    expected, plain = logps(model), load(policy, tied=is_tied(name))
    assert (expected - logps(plain)).abs().max() > 10 * ROUNDING  # the adapter has an effect
    merged = dict(merged_weights(model))
    assert list(merged) == [each for each, _ in plain.named_parameters()]
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logps(plain), expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@tried(QUICK, pytest.mark.long)
def test_merging_leaves_the_learner_as_it_was(policy: Path, name: str, dtype: str) -> None:
    model = moved(policy, name, dtype)
    objects = state(model)
    before, attributes = copy.deepcopy(objects), {n: list(vars(m)) for n, m in model.named_modules()}
    expected = logps(model)
    for _ in range(3):
        for _ in merged_weights(model):
            pass
    after = state(model)
    assert after.keys() == objects.keys() and all(after[each] is objects[each] for each in after)
    assert all(torch.equal(after[each], before[each]) for each in after)
    assert {n: list(vars(m)) for n, m in model.named_modules()} == attributes
    assert torch.equal(logps(model), expected)


@tried(QUICK)
def test_proof_reads_the_weights_that_are_sent(policy: Path, name: str) -> None:
    model = moved(policy, name, "bfloat16")
    sent = dict(merged_weights(model))
    for each, weight in learner_weights(model):
        assert torch.equal(sent.pop(each), weight), each
    assert not sent


@tried(QUICK)
def test_new_adapter_begins_as_the_policy(policy: Path, name: str) -> None:
    base = logps(load(policy, tied=is_tied(name)))
    model = adapted(load(policy, tied=is_tied(name)), name)
    assert starts_elsewhere(settings_of(name)) == bool((logps(model) - base).abs().max() > ROUNDING)
    move(model)  # trains its biases too, if it has any
    with model.disable_adapter():
        assert moves_the_base(settings_of(name)) == bool((logps(model) - base).abs().max() > ROUNDING)


@pytest.mark.parametrize("kind", ["FOURIERFT", "C3A"])
def test_type_begins_elsewhere_without_its_field(policy: Path, kind: str) -> None:
    from peft import get_peft_model

    settings = {**settings_of(kind), "init_weights": False}
    model = get_peft_model(load(policy), build_config(settings))
    assert starts_elsewhere(settings) and (logps(model) - logps(load(policy))).abs().max() > ROUNDING


@tried(QUICK)
def test_saved_adapter_continues_in_another_process(policy: Path, name: str, tmp_path: Path) -> None:
    """The seed is that of the run; other random numbers were drawn since."""
    model = moved(policy, name)
    model.save_pretrained(tmp_path)
    torch.manual_seed(7)
    other = adapted(load(policy, tied=is_tied(name)), name)
    other.load_adapter(str(tmp_path), "default", is_trainable=True)
    assert state(other).keys() == state(model).keys()
    assert all(torch.equal(weight, state(model)[each]) for each, weight in state(other).items())
    merged = dict(merged_weights(model))
    assert all(torch.equal(weight, merged[each]) for each, weight in merged_weights(other))


@tried(QUICK)
def test_saved_adapter_is_merged_by_an_export(policy: Path, name: str, tmp_path: Path) -> None:
    """An export reads the saved config as a stranger's, and knows no seed."""
    from peft import PeftModel

    model = moved(policy, name)
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "policy"}))
    torch.manual_seed(11)
    base = load(policy, tied=is_tied(name))
    other = PeftModel.from_pretrained(base, tmp_path, config=read_adapter_config(tmp_path))
    expected = dict(merged_weights(model))
    assert all(torch.equal(weight, expected[each]) for each, weight in merged_weights(other))


@tried(QUICK)
def test_merged_policy_has_no_adapter(policy: Path, name: str) -> None:
    model = moved(policy, name)
    expected = {each: weight.clone() for each, weight in merged_weights(model)}
    merged = merge_adapter(model, torch.bfloat16)
    found = dict(merged.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[each], expected[each].bfloat16()) for each in found)


@tried(QUICK)
def test_trained_weights_are_float32(policy: Path, name: str) -> None:
    model = adapted(load(policy, "bfloat16", tied=is_tied(name)), name)
    trained = [each for each in model.parameters() if each.requires_grad]
    assert trained and {each.dtype for each in trained} == {torch.float32}


# Before a run


def without_weights(policy: Path, tied: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(policy)
    config.tie_word_embeddings = tied
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@tried(QUICK)
def test_trial_without_weights_counts_the_trained_ones(policy: Path, name: str) -> None:
    counted = try_adapter(without_weights(policy, is_tied(name)), settings_of(name))
    if name in READS_WEIGHTS:
        assert counted is None
    else:
        model = adapted(load(policy, tied=is_tied(name)), name)
        assert counted == sum(each.numel() for each in model.parameters() if each.requires_grad)


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(READS_WEIGHTS | MERGE_READS_WEIGHTS))
def test_types_that_read_weights_cannot_be_tried_without(policy: Path, kind: str) -> None:
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    with pytest.raises((NotImplementedError, RuntimeError)), torch.device("meta"):
        model = get_peft_model(without_weights(policy, tied=True), build_config(settings_of(kind)))
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.merge()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "LORA", "target_modules": ["qproj"]}, "with LORA: Target modules .*qproj.* not found"),
        ({"type": "LORA", "target_modules": ["lm_head"]}, "the output layer.*cannot have an adapter"),
        ({"type": "LORA", "modules_to_save": ["lm_head"]}, "the output layer.*cannot have an adapter"),
        ({"type": "LORA", "trainable_token_indices": [3]}, "the output layer.*cannot have an adapter"),
        (
            {"type": "TRAINABLE_TOKENS", "token_indices": [3], "target_modules": ["embed_tokens"]},
            "the output layer.*cannot have an adapter",
        ),
        ({"type": "BEFT", "target_modules": ["o_proj"]}, "with BEFT: Base layer has no bias"),
        ({"type": "ROAD", "group_size": 48}, "with ROAD: .*divisible by group_size"),
        ({"type": "LORA", "r": 0}, "with LORA: .*r.* should be a positive integer"),
        ({"type": "OFT", "r": 8, "oft_block_size": 8}, "does not accept the settings of OFT"),
        ({"type": "LORA", "target_modules": "q_proj("}, "with LORA: "),
        ({"type": "VERA", "r": 0}, "with VERA: "),
        ({"type": "BOFT", "target_modules": ["qproj"]}, "with BOFT: Target modules .*qproj.* not found"),
        ({"type": "SHIRA", "target_modules": ["lm_head"]}, "the output layer.*cannot have an adapter"),
        (
            {"type": "TRAINABLE_TOKENS", "token_indices": [3], "target_modules": ["q_proj"]},
            "trains rows of embeddings, and model.layers.0.self_attn.q_proj is none",
        ),
    ],
    ids=str,
)
def test_adapter_that_does_not_fit_is_refused(policy: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        try_adapter(without_weights(policy, tied=True), settings)
    assert "\n" not in str(caught.value)


# Adapters as LoRA requests of the engine

REQUESTED = ("LORA", "rsLoRA", "ranks", "PiSSA", "OLoRA")


@pytest.mark.parametrize("name", REQUESTED)
def test_updates_and_frozen_weights_add_up_to_the_merged_ones(policy: Path, name: str) -> None:
    model = moved(policy, name)
    before = copy.deepcopy(state(model))
    frozen, merged = dict(frozen_weights(model)), dict(merged_weights(model))
    assert list(frozen) == list(merged)
    updates = list(lora_updates(model))
    assert [each.layer for each in updates] == list(require_plain_lora(model))
    for update in updates:
        weight = frozen[f"{update.layer}.weight"]
        assert not torch.equal(weight, merged[f"{update.layer}.weight"])
        torch.testing.assert_close(
            weight + update.second @ update.first, merged[f"{update.layer}.weight"], rtol=0, atol=1e-6
        )
    adapted_layers = {f"{each.layer}.weight" for each in updates}
    assert all(torch.equal(frozen[each], merged[each]) for each in frozen.keys() - adapted_layers)
    assert all(torch.equal(before[each], tensor) for each, tensor in state(model).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", REQUESTED)
def test_proof_of_requests_reads_what_is_sent(policy: Path, name: str, dtype: str) -> None:
    model = moved(policy, name, dtype)
    read, sent = dict(request_weights(model)), dict(frozen_weights(model))
    for update in lora_updates(model):
        sent |= {f"{update.layer}.lora_A": update.first, f"{update.layer}.lora_B": update.second}
    assert read.keys() == sent.keys()
    assert all(torch.equal(read[each], sent[each]) and read[each].dtype == sent[each].dtype for each in sent)


@pytest.mark.parametrize("settings", [settings_of(each) for each in REQUESTED], ids=REQUESTED)
def test_trial_of_a_request_takes_lora(policy: Path, settings: dict[str, Any]) -> None:
    found = try_adapter(without_weights(policy, tied=True), settings | {"init_lora_weights": True}, requested=True)
    assert found is not None and found > 0


@pytest.mark.parametrize("name", ["DoRA", "MiCA", "norms", "bias of the adapter", "IA3", "embedding"])
def test_adapter_that_vllm_does_not_apply_is_refused(policy: Path, name: str) -> None:
    settings = {"type": "LORA", "target_modules": ["embed_tokens"]} if name == "embedding" else settings_of(name)
    model = get_peft_model(load(policy, tied=False), build_config(settings))
    with pytest.raises(
        ConfigError, match=r"engine\.adapter=request: model\..* has an adapter that vLLM does not apply"
    ):
        require_plain_lora(model)


def test_policy_without_adapter_has_no_request(policy: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.adapter=request: the policy has no LoRA adapter"):
        require_plain_lora(load(policy))


# Optimizers for LoRA


def optimizer_of(model: Any, name: str) -> torch.optim.Optimizer:
    settings = ["model.lora={rank: 8, alpha: 16}", f"model.adapter_optimizer={name}", "grpo.weight_decay=0.1"]
    return adapter_optimizer(model, load_config(None, settings), torch.optim.AdamW, {"lr": 0.01})


def set_gradients(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator) if weight.requires_grad else None


@pytest.mark.parametrize("name", ["{name: loraplus, ratio: 4}", "{name: lorafa}"])
def test_optimizer_step_without_gradients_changes_nothing(name: str) -> None:
    model = narrow_llama("LORA")
    move(model)
    optimizer = optimizer_of(model, name)
    optimizer.step()  # the first step of a run may be skipped
    assert not optimizer.state
    set_gradients(model, seed=0)
    optimizer.step()
    assert optimizer.state
    optimizer.zero_grad(set_to_none=True)
    weights, moments = copy.deepcopy(state(model)), copy.deepcopy(optimizer.state_dict()["state"])
    assert optimizer.step(lambda: 0.5) == 0.5
    assert all(torch.equal(weight, weights[each]) for each, weight in state(model).items())
    torch.testing.assert_close(optimizer.state_dict()["state"], moments, rtol=0, atol=0)


def test_lorafa_takes_the_steps_of_peft() -> None:
    ours, of_peft = narrow_llama("LORA"), narrow_llama("LORA")
    first = copy.deepcopy(state(ours))
    optimizers = optimizer_of(ours, "{name: lorafa}"), create_lorafa_optimizer(of_peft, 8, 16, 0.01, 0.1)
    for seed in range(2):
        for model, optimizer in zip((ours, of_peft), optimizers, strict=True):
            set_gradients(model, seed)
            optimizer.step()
    changed = {name for name, weight in state(ours).items() if not torch.equal(weight, first[name])}
    assert changed and all("lora_B" in name for name in changed)
    assert all(torch.equal(weight, state(of_peft)[name]) for name, weight in state(ours).items())
