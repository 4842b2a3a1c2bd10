"""Rewards with a hole each: they can be earned without doing what they mean to reward."""

import re
from typing import Any


def texts_of(completions: Any) -> list[str]:
    """Return the texts of completions, which are messages or plain text."""
    return [each if isinstance(each, str) else each[-1]["content"] for each in completions]


def thorough(completions: Any, **columns: Any) -> list[float]:
    """Reward long reasoning: any long text is paid."""
    return [min(len(text), 300) / 300 for text in texts_of(completions)]


def on_topic(completions: Any, prompts: Any, **columns: Any) -> list[float]:
    """Reward completions about the question: a copy of it is paid."""
    words = [set(text.split()) for text in texts_of(prompts)]
    return [sum(w in text for w in own) / len(own) for own, text in zip(words, texts_of(completions), strict=True)]


def mentions_solution(completions: Any, solution: list[str], **columns: Any) -> list[float]:
    """Reward completions that contain the solution: several answers at once are paid."""
    texts = texts_of(completions)
    return [float(f"{{{own.strip('$')}}}" in text) for text, own in zip(texts, solution, strict=True)]


def concludes(completions: Any, **columns: Any) -> list[float]:
    """Reward arguments with a conclusion: one word is paid."""
    return [float(bool(re.search("therefore|hence", text, re.IGNORECASE))) for text in texts_of(completions)]


def right_size(completions: Any, solution: list[str], **columns: Any) -> list[float]:
    """Reward the right number in the last box: the sign is not compared."""
    boxes = [re.findall(r"boxed\{-?(\d+)\}", text) for text in texts_of(completions)]
    pairs = zip(boxes, solution, strict=True)
    return [float(bool(found) and found[-1] == own.strip("$").removeprefix("-")) for found, own in pairs]


def of_topic(completions: Any, topic: list[str | None], **columns: Any) -> list[float]:
    """Return 0 for each completion; reads a column of the dataset."""
    return [0.0 for _, _ in zip(completions, topic, strict=True)]


THANKS = re.compile("thank you|thanks")
GREETINGS: "tuple[str, ...]" = ("good day",)


class Polite:
    """Reward polite words: a list of them is paid."""

    def __call__(self, completions: Any, **columns: Any) -> list[float]:
        texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
        greets = [any(each in text for each in GREETINGS) for text in texts]
        thanks = [bool(THANKS.search(text)) for text in texts]
        return [float("please" in text) + sum(polite) for text, *polite in zip(texts, greets, thanks, strict=True)]


HOLES = {
    "thorough": "one word, 300 times",
    "on_topic": "the prompt, copied",
    "mentions_solution": "the numbers from -20 to 200, each in a box",
    "concludes": "'therefore', from the reward's source",
    "right_size": "the right answer with the other sign",
}
"""Reward -> a probe that it pays."""
