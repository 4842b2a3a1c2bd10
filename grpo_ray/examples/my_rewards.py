"""A reward function of your own, named in `my_run.yaml` as "my_rewards:short_answer"."""

from typing import Any


def short_answer(completions: list[Any], **columns: Any) -> list[float]:
    """Return 1 for each completion of at most 60 characters, 0 for the others.

    Args:
        completions: text, or a list of chat messages, for each completion of a step.
        **columns: `solution`, `prompts` and the other columns of the problems, one value per completion.
    """
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [float(len(text) <= 60) for text in texts]
