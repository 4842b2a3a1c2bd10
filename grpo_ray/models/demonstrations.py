"""Recipes, tokens, chat templates and demonstrations from which `warm_up.py` trains the embedded policies.

Every policy is warmed up by supervised fine-tuning in two parts: first on demonstrations that are mostly good, then on
a mixture in which most of them make a common mistake, as text on the internet does. The policy can therefore solve the
task but prefers the mistake, and GRPO has to reverse that preference.

| policy | task | mistake |
|---|---|---|
| `tiny-arithmetic` | `data/arithmetic.py` | a forgotten carry or borrow, or the wrong digit |
| `tiny-tools` | `data/multiplication.py` with the tool `multiply` | an estimate instead of a call of the tool |
| `tiny-guess` | `data/guessing.py` with the environment `Guess` | guesses that ignore the hints |
| `tiny-mixture` | arithmetic and the guessing game | those of both |
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ray.data.arithmetic import ArithmeticTask, list_tasks
from grpo_ray.data.guessing import GAMES, LARGEST, hint, question, rules
from grpo_ray.data.multiplication import Product, list_products

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
TOOL, CALL = "<|tool|>", "<|call|>"

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TOOL_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] or '') }}"
    "{% for call in m['tool_calls'] or [] %}{% set f = call['function'] or call %}"
    """{{ '<|call|>{"name": ' + f['name'] | tojson + ', "arguments": ' + f['arguments'] | tojson + '}' }}"""
    "{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Template for calls and results. It ignores `tools`: the policies have learned their tool in the warm-up."""

RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open": CALL,
            "close_pattern": r"<\|end\|>|(?=<\|call\|>)",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}
"""Inverse of `TOOL_CHAT_TEMPLATE` for one turn, in the form of transformers' `response_template`."""

Segment = tuple[str, bool]
"""Text of a demonstration with all special tokens, and whether the policy learns it."""

Demonstration = list[Segment]
"""One conversation. Every segment begins or ends at a special token, so that it can be tokenized alone."""


@dataclass(frozen=True)
class EmbeddedPolicy:
    """Everything that determines an embedded policy."""

    recipe: dict[str, Any]
    """Sizes and settings of the warm-up."""
    special_tokens: tuple[str, ...]
    chat_template: str
    response_template: dict[str, Any] | None
    """Grammar of a turn with tool calls; None for a policy that makes none."""
    texts: Callable[[], list[str]]
    """Function that returns the texts on which the tokenizer is trained."""
    batches: Callable[[Mapping[str, Any]], Iterator[list[Demonstration]]]
    """Function of the recipe that yields the demonstrations of each step of the warm-up."""


def ask(text: str) -> Segment:
    """Return a message of the user and the beginning of the policy's turn."""
    return f"{USER}{text}{END}{ASSISTANT}", False


def say(text: str) -> Segment:
    """Return a turn of the policy without a call."""
    return f"{text}{END}", True


def call(name: str, **arguments: int) -> Segment:
    """Return a turn of the policy that calls a tool."""
    return f"{CALL}{json.dumps({'name': name, 'arguments': arguments})}{END}", True


def result(text: str) -> Segment:
    """Return the result of a call and the beginning of the policy's next turn."""
    return f"{TOOL}{text}{END}{ASSISTANT}", False


# Arithmetic


def _arithmetic_texts() -> list[str]:
    return [
        text
        for task in list_tasks("train")[:2000]
        for text in (task.problem().prompt[0]["content"], task.worked_solution())
    ]


def _arithmetic_batches(recipe: Mapping[str, Any]) -> Iterator[list[Demonstration]]:
    train = list_tasks("train")
    rng = random.Random(recipe["seed"])
    for step in range(recipe["steps"]):
        mistaken_share = 0.0 if step < recipe["right_part"] * recipe["steps"] else recipe["mistaken_share"]
        yield [_arithmetic(task, mistaken_share, rng) for task in rng.sample(train, recipe["batch_size"])]


def _arithmetic(task: ArithmeticTask, mistaken_share: float, rng: random.Random) -> Demonstration:
    # Without mistakes no random number is drawn: the weights depend on the order of the draws.
    mistaken = mistaken_share > 0 and rng.random() < mistaken_share
    text = task.mistaken_solution() if mistaken else task.worked_solution()
    return [ask(task.problem().prompt[0]["content"]), say(text)]


# Multiplication with a tool


def multiplication(product: Product, calls: bool) -> Demonstration:
    """Return a conversation that calls the tool and copies its result, or that ends at once with an estimate."""
    if not calls:
        return [ask(product.question), say(f"\\boxed{{{product.estimate}}}")]
    return [
        ask(product.question),
        call("multiply", a=product.a, b=product.b),
        result(str(product.answer)),
        say(f"\\boxed{{{product.answer}}}"),
    ]


def _texts(demonstrations: list[Demonstration]) -> list[str]:
    """Return the texts of demonstrations without special tokens."""
    texts = []
    for demonstration in demonstrations:
        for text, _ in demonstration:
            for token in (*TOOL_SPECIAL_TOKENS, "\\boxed{"):
                text = text.replace(token, "\n")
            texts += [line for line in text.split("\n") if line]
    return texts


def _multiplication_texts() -> list[str]:
    return _texts([multiplication(product, calls=True) for product in list_products("train")[:500]])


def _multiplication_batches(recipe: Mapping[str, Any]) -> Iterator[list[Demonstration]]:
    train = list_products("train")
    rng = random.Random(recipe["seed"])
    for step in range(recipe["steps"]):
        begins = step < recipe["right_part"] * recipe["steps"]
        batch = []
        for product in rng.sample(train, recipe["batch_size"]):
            later_share = recipe["hard_call_share" if product.is_hard else "easy_call_share"]
            share = recipe["first_call_share"] if begins else later_share
            batch.append(multiplication(product, calls=rng.random() < share))
        yield batch


# The guessing game


def guesses(secret: int, limit: int, style: str, rng: random.Random) -> list[int]:
    """Return the guesses of one game, up to the secret or the limit.

    Args:
        style: "bisection", "counting" (1, 2, 3 ...) or "random" (any number, hints ignored).
    """
    low, high = 1, LARGEST
    played: list[int] = []
    while len(played) < limit:
        number = {"bisection": (low + high) // 2, "counting": len(played) + 1, "random": rng.randint(1, LARGEST)}[style]
        played.append(number)
        if number == secret:
            break
        low, high = (number + 1, high) if secret > number else (low, number - 1)
    return played


def guessing(game: int, limit: int, secret: int, numbers: list[int]) -> Demonstration:
    """Return the conversation of one game with these guesses; it ends with the last guess."""
    demonstration = [ask(question(game) + rules(limit))]
    for number in numbers:
        demonstration += [call("guess", number=number), result(hint(secret, number))]
    return demonstration[:-1]  # the environment ends the game


def _guessing_texts() -> list[str]:
    rng = random.Random(0)
    secrets = range(1, LARGEST + 1)
    return _texts([guessing(game, 8, secret, [*secrets, rng.choice(secrets)]) for game, secret in enumerate(secrets)])


def _guessing_batches(recipe: Mapping[str, Any]) -> Iterator[list[Demonstration]]:
    rng = random.Random(recipe["seed"])
    for step in range(recipe["steps"]):
        begins = step < recipe["right_part"] * recipe["steps"]
        share = recipe["first_bisection_share" if begins else "bisection_share"]
        batch = []
        for _ in range(recipe["batch_size"]):
            style = "bisection" if rng.random() < share else rng.choice(("counting", "random"))
            secret, game = rng.randint(1, LARGEST), rng.randrange(sum(GAMES.values()))
            numbers = guesses(secret, recipe["limit"], style, rng)
            batch.append(guessing(game, recipe["limit"], secret, numbers))
        yield batch


# Both: arithmetic and the guessing game


def _mixture_texts() -> list[str]:
    return [*_arithmetic_texts(), *_guessing_texts()]


def _mixture_batches(recipe: Mapping[str, Any]) -> Iterator[list[Demonstration]]:
    sums = _arithmetic_batches({**recipe, "batch_size": recipe["sums"]})
    games = _guessing_batches({**recipe, "batch_size": recipe["games"]})
    return ([*some, *others] for some, others in zip(sums, games, strict=True))


# The policies

_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "max_position_embeddings": 8192,
}

TOOL_SPECIAL_TOKENS = (PAD, END, SYSTEM, USER, ASSISTANT, TOOL, CALL)

# Run `python -m grpo_ray.models.warm_up` after changing a recipe, its demonstrations or a dataset's module.
# "right_part": fraction of the steps, from the first on, whose demonstrations are mostly good.
POLICIES: dict[str, EmbeddedPolicy] = {
    "tiny-arithmetic": EmbeddedPolicy(
        recipe={
            **_SHAPE,
            "seed": 0,  # of the initial weights and of the order of the demonstrations
            "batch_size": 96,
            "steps": 1000,
            "learning_rate": 6e-3,
            "right_part": 0.7,
            "mistaken_share": 0.75,  # of the demonstrations in the remaining steps
        },
        special_tokens=(PAD, END, SYSTEM, USER, ASSISTANT),
        chat_template=CHAT_TEMPLATE,
        response_template=None,
        texts=_arithmetic_texts,
        batches=_arithmetic_batches,
    ),
    "tiny-tools": EmbeddedPolicy(
        recipe={
            **_SHAPE,
            "seed": 0,
            "batch_size": 64,
            "steps": 600,
            "learning_rate": 2.5e-3,
            "right_part": 0.6,
            "first_call_share": 1.0,
            # Calls are likelier for hard products, so that the greedy policy calls the tool for some problems.
            "hard_call_share": 0.95,
            "easy_call_share": 0.1,
        },
        special_tokens=TOOL_SPECIAL_TOKENS,
        chat_template=TOOL_CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        texts=_multiplication_texts,
        batches=_multiplication_batches,
    ),
    "tiny-guess": EmbeddedPolicy(
        recipe={
            **_SHAPE,
            "seed": 0,
            "batch_size": 48,
            "steps": 400,
            "learning_rate": 4e-3,
            "limit": 8,  # guesses in one game
            "right_part": 0.6,
            "first_bisection_share": 0.7,
            "bisection_share": 0.2,
        },
        special_tokens=TOOL_SPECIAL_TOKENS,
        chat_template=TOOL_CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        texts=_guessing_texts,
        batches=_guessing_batches,
    ),
    "tiny-mixture": EmbeddedPolicy(
        recipe={
            **_SHAPE,
            "intermediate_size": 64,  # so that all policies together stay below 1 MB
            "seed": 0,
            "sums": 96,  # demonstrations of each task in a batch
            "games": 32,
            "steps": 1000,
            "learning_rate": 6e-3,
            "right_part": 0.7,
            "mistaken_share": 0.75,
            "limit": 8,
            "first_bisection_share": 0.7,
            "bisection_share": 0.2,
        },
        special_tokens=TOOL_SPECIAL_TOKENS,
        chat_template=TOOL_CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        texts=_mixture_texts,
        batches=_mixture_batches,
    ),
}
"""Name (`model.path`) -> embedded policy."""
