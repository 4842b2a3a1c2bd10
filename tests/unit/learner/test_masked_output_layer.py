"""Tests of the output layer that knows the tokens a form allows."""

import itertools
from typing import Any

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction

from grpo_ray.learner.masked_output_layer import POSITIONS, MaskedOutputLayer, allowed_tokens

HIDDEN, VOCABULARY, WORDS = 16, 75, 3
MODELS: list[dict[str, Any]] = [{}, {"softcap": 5.0, "logit_scale": 0.5}, {"bias": True}]


def case(positions: int, bias: bool = False) -> dict[str, Any]:
    random = torch.Generator().manual_seed(positions)
    allowed = torch.rand(positions, VOCABULARY, generator=random) < 0.3
    targets = torch.randint(VOCABULARY, (positions,), generator=random)
    allowed[torch.arange(positions), targets] = True
    values = {
        "hidden": torch.randn(positions, HIDDEN, generator=random),
        "weight": torch.randn(VOCABULARY, HIDDEN, generator=random),
        "bias": torch.randn(VOCABULARY, generator=random) if bias else None,
    }
    leaves = {name: None if value is None else value.requires_grad_() for name, value in values.items()}
    return {"allowed": allowed, "targets": targets, **leaves}


def words_of(allowed: torch.Tensor) -> torch.Tensor:
    """Pack (N, V) bool into (N, W) int32, as xgrammar does: the lowest bit first."""
    bits = torch.nn.functional.pad(allowed, (0, 32 * WORDS - allowed.shape[1])).view(len(allowed), WORDS, 32)
    return (bits.long() << torch.arange(32)).sum(dim=-1).to(torch.uint32).view(torch.int32)


def layer_of(masks: torch.Tensor) -> MaskedOutputLayer:
    rows = iter(masks)
    return MaskedOutputLayer(lambda count: torch.stack(list(itertools.islice(rows, count))))


def gradients(outputs: tuple[torch.Tensor, torch.Tensor], each: dict[str, Any]) -> list[torch.Tensor]:
    logps, entropies = outputs
    weights = torch.linspace(-1, 1, len(logps))
    loss = (weights * logps).sum() + 0.3 * (weights.flip(0) * entropies).sum()
    return list(
        torch.autograd.grad(loss, [each[name] for name in ("hidden", "weight", "bias") if each[name] is not None])
    )


def test_allowed_tokens_unpacks_what_xgrammar_packs() -> None:
    import xgrammar

    allowed = case(5)["allowed"]
    masks = xgrammar.allocate_token_bitmask(5, VOCABULARY)
    masks.copy_(words_of(allowed))
    logits = torch.zeros(5, VOCABULARY)
    xgrammar.apply_token_bitmask_inplace(logits, masks)
    assert torch.equal(allowed_tokens(masks, VOCABULARY), logits == 0)
    assert not allowed_tokens(masks, 32 * WORDS + 4)[:, 32 * WORDS :].any()  # rows of the output layer beyond


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("positions", [1, POSITIONS + 3])
def test_layer_with_all_tokens_allowed_is_trls(positions: int, model: dict[str, Any]) -> None:
    each = case(positions, model.get("bias", False))
    options: Any = (0.8, 32, model.get("softcap"), model.get("logit_scale", 1.0), ("entropy",))
    layer = layer_of(torch.full((positions, WORDS), -1, dtype=torch.int32))
    inputs = each["hidden"], each["weight"], each["bias"], each["targets"]
    ours = layer.apply(*inputs, *options)[:2]
    theirs = ChunkedLogProbFunction.apply(*inputs, *options)[:2]
    for first, second in zip((*ours, *gradients(ours, each)), (*theirs, *gradients(theirs, each)), strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("model", MODELS)
def test_layer_normalizes_over_the_allowed_tokens(model: dict[str, Any]) -> None:
    each = case(POSITIONS + 3, model.get("bias", False))
    softcap, scale = model.get("softcap"), model.get("logit_scale", 1.0)
    layer = layer_of(words_of(each["allowed"]))
    inputs = each["hidden"], each["weight"], each["bias"], each["targets"]
    ours = layer.apply(*inputs, 0.8, 32, softcap, scale, ("entropy",))[:2]
    logits = torch.nn.functional.linear(*inputs[:3]) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    policy = torch.distributions.Categorical(logits=(logits / 0.8).masked_fill(~each["allowed"], -1e9))
    expected = policy.log_prob(each["targets"]), policy.entropy()
    for first, second in zip((*ours, *gradients(ours, each)), (*expected, *gradients(expected, each)), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_layer_takes_the_masks_of_several_passes_in_order() -> None:
    each = case(10)
    layer, whole = (layer_of(words_of(each["allowed"])) for _ in range(2))
    parts = [
        layer.apply(each["hidden"][first:last], each["weight"], None, each["targets"][first:last], 1.0, 32)[0]
        for first, last in ((0, 4), (4, 4), (4, 10))
    ]
    torch.testing.assert_close(
        torch.cat(parts), whole.apply(each["hidden"], each["weight"], None, each["targets"], 1.0, 32)[0]
    )


@pytest.mark.parametrize("positions", [2_048, pytest.param(16_384, marks=pytest.mark.long)])
def test_gradients_of_many_positions_in_16_bits_are_as_near_as_trls(positions: int) -> None:
    """Sums of 16-bit gradients would be wrong by a percent and more."""
    each = case(positions)
    inputs = each["hidden"], each["weight"], None, each["targets"]
    masks = torch.full((positions, WORDS), -1, dtype=torch.int32)

    def weight_gradient(function: Any, precision: torch.dtype | None) -> torch.Tensor:
        with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
            logps = function(*inputs, 1.0, 32)[0]
        return torch.autograd.grad(logps.sum(), each["weight"])[0]

    exact = weight_gradient(ChunkedLogProbFunction.apply, None)
    theirs = weight_gradient(ChunkedLogProbFunction.apply, torch.bfloat16)
    ours = weight_gradient(layer_of(masks).apply, torch.bfloat16)
    errors = [((each - exact).norm() / exact.norm()).item() for each in (ours, theirs)]
    assert errors[0] <= 1.2 * errors[1] + 1e-6


def test_bias_of_another_precision_is_taken() -> None:
    each = case(4, bias=True)
    inputs = each["hidden"].bfloat16(), each["weight"], each["bias"], each["targets"]
    logps = layer_of(words_of(each["allowed"])).apply(*inputs, 1.0, 32)[0]
    torch.autograd.grad(logps.sum(), [each["weight"], each["bias"]])
    assert logps.isfinite().all()


def test_frozen_layer_has_no_gradient_and_the_same_one_of_its_inputs() -> None:
    each = case(POSITIONS + 3, bias=True)
    inputs = each["hidden"], each["weight"], each["bias"], each["targets"]
    frozen = each["hidden"], each["weight"].detach(), each["bias"].detach(), each["targets"]
    found = [
        torch.autograd.grad(layer_of(words_of(each["allowed"])).apply(*values, 1.0, 32)[0].sum(), each["hidden"])[0]
        for values in (inputs, frozen)
    ]
    torch.testing.assert_close(*found)
