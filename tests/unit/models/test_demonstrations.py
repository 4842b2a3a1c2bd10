"""Tests of the tokenizers, templates and demonstrations of the embedded policies that call tools."""

import random
from typing import Any

import pytest
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.data.guessing import LARGEST, hint
from grpo_ray.data.multiplication import Product
from grpo_ray.models.demonstrations import POLICIES, TOOL_SPECIAL_TOKENS, guesses, guessing, multiplication
from grpo_ray.models.tokenizer import load_tokenizer
from grpo_ray.models.warm_up import build_tokenizer

NAMES = ("tiny-tools", "tiny-guess")


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of a policy that calls tools, saved and loaded as a run does."""
    folder = tmp_path_factory.mktemp(request.param)
    build_tokenizer(request.param).save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def tools_tokenizer() -> Any:
    return build_tokenizer("tiny-tools")


def test_policies_are_those_that_the_config_names() -> None:
    assert tuple(POLICIES) == EMBEDDED_POLICIES


def test_tokenizer_digits_and_markers_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer.tokenize("1234567890") == list("1234567890")
    for marker in TOOL_SPECIAL_TOKENS:
        (token,) = tokenizer(marker)["input_ids"]
        assert tokenizer.decode([token], skip_special_tokens=True) == ""


@pytest.mark.parametrize("text", ["🧮 é 数学\u2028", '{"a": "b\\n"}', "\\boxed{1} don't", "\x00 \t\r\n"])
def test_tokenizer_any_text_is_decoded_unchanged(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_is_fit_for_tools(tokenizer: Any) -> None:
    assert supports_tool_calling(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)


def conversation(*rest: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "What is 37 * 48?"}, *rest]


def requested(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_chat_template_renders_calls_as_demonstrated(tools_tokenizer: Any) -> None:
    messages = conversation(
        {"role": "assistant", "content": "", "tool_calls": [requested("multiply", a=37, b=48)]},
        {"role": "tool", "name": "multiply", "content": "1776"},
        {"role": "assistant", "content": "\\boxed{1776}"},
    )
    expected = "".join(text for text, _ in multiplication(Product(37, 48), calls=True))
    assert tools_tokenizer.apply_chat_template(messages, tokenize=False) == expected
    # Calls without the wrapper, no content, the prompt alone
    messages[1] = {"role": "assistant", "content": None, "tool_calls": [requested("multiply", a=37, b=48)["function"]]}
    assert tools_tokenizer.apply_chat_template(messages, tokenize=False) == expected
    prompt = tools_tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True, tools=[])
    assert prompt == "<|user|>What is 37 * 48?<|end|><|assistant|>"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "tool_calls": [requested("multiply", a=37, b=48)]},
        {
            "role": "assistant",
            "content": "I compute.",
            "tool_calls": [requested("f", x='a"b{é', y=[1, None, {"z": 2.5}])],
        },
        {"role": "assistant", "content": "", "tool_calls": [requested("f", x=1), requested("g"), requested("f", x=2)]},
        {"role": "assistant", "content": "\\boxed{1776}"},
    ],
    ids=["call", "text and call", "three calls", "answer"],
)
def test_response_template_parses_rendered_turns(tokenizer: Any, message: dict[str, Any]) -> None:
    rendering = {"return_dict": False, "tokenize": True}
    prefix = tokenizer.apply_chat_template(conversation(), add_generation_prompt=True, **rendering)
    whole = tokenizer.apply_chat_template(conversation(message), **rendering)
    assert whole[: len(prefix)] == prefix
    assert parse_response(tokenizer, whole[len(prefix) :], prefix=prefix) == message


@pytest.mark.parametrize(
    "text", ['<|call|>{"name": "multiply", "argu', "<|call|>multiply<|end|>", "<|call|>[1]<|end|>"]
)
def test_response_template_damaged_call_is_no_call(tools_tokenizer: Any, text: str) -> None:
    prefix = tools_tokenizer.apply_chat_template(conversation(), add_generation_prompt=True, return_dict=False)
    assert "tool_calls" not in parse_response(tools_tokenizer, tools_tokenizer(text)["input_ids"], prefix=prefix)


def test_multiplication_without_a_call_ends_with_the_estimate() -> None:
    _, (text, learned) = multiplication(Product(37, 48), calls=False)
    assert (text, learned) == ("\\boxed{2000}<|end|>", True)


@pytest.mark.parametrize("secret", range(1, LARGEST + 1))
def test_guesses_bisection_finds_every_secret_in_five(secret: int) -> None:
    numbers = guesses(secret, 8, "bisection", random.Random(0))
    assert numbers[0] == 16 and numbers[-1] == secret and len(numbers) <= 5


def test_guesses_bad_styles_stop_at_secret_or_limit() -> None:
    rng = random.Random(0)
    assert guesses(3, 8, "counting", rng) == [1, 2, 3]
    assert guesses(20, 8, "counting", rng) == [1, 2, 3, 4, 5, 6, 7, 8]
    for secret in range(1, LARGEST + 1):
        numbers = guesses(secret, 8, "random", rng)
        assert secret not in numbers[:-1] and (len(numbers) == 8 or numbers[-1] == secret)


def test_guessing_demonstration_answers_each_guess_but_the_last() -> None:
    demonstration = guessing(7, 8, 20, [16, 24, 20])
    own = [text for text, learned in demonstration if learned]
    assert own == [f'<|call|>{{"name": "guess", "arguments": {{"number": {n}}}}}<|end|>' for n in (16, 24, 20)]
    told = [text for text, learned in demonstration if not learned]
    assert told == [
        "<|user|>Game 7: guess my number. It is from 1 to 31. You have 8 guesses.<|end|><|assistant|>",
        *(f"<|tool|>{hint(20, n)}<|end|><|assistant|>" for n in (16, 24)),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_fit_the_jobs_completions(name: str) -> None:
    # multiply-tool.yaml and guessing-game.yaml truncate completions at 96 and 224 tokens.
    tokenizer = build_tokenizer(name)
    (batch,) = POLICIES[name].batches({**POLICIES[name].recipe, "steps": 1})
    for demonstration in batch:
        completion = "".join(text for text, _ in demonstration[1:])
        assert len(tokenizer(completion)["input_ids"]) <= {"tiny-tools": 96, "tiny-guess": 224}[name]
