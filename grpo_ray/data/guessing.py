"""The embedded dataset `guessing`: numbered games in which a secret number is to be guessed.

The rules are here, because the environment (`tools/examples.py`) and the demonstrations for the policy `tiny-guess`
(`models/demonstrations.py`) share them. A problem is only the number of a game. The secret depends on the seed with
which the environment is reset, which is derived from run, problem and epoch. There is no reference solution.
"""

from collections.abc import Iterator

from grpo_ray.data.problem import Problem, problem_id

LARGEST = 31
"""The secret is a whole number from 1 to this one, so that bisection needs at most 5 guesses."""

GAMES = {"heldout": 200, "train": 4000}
"""Split -> number of games."""


def question(game: int) -> str:
    """Return the prompt of a game; the environment appends `rules`."""
    return f"Game {game}: guess my number."


def rules(limit: int) -> str:
    """Return the text that `reset` appends to the prompt.

    Args:
        limit: number of guesses.
    """
    return f" It is from 1 to {LARGEST}. You have {limit} guesses."


def hint(secret: int, number: int) -> str:
    """Return the answer to a guess: "correct", or "higher" or "lower" for a secret above or below the guess."""
    if number == secret:
        return "correct"
    return "higher" if secret > number else "lower"


def guessing_problems(split: str) -> Iterator[Problem]:
    """Yield the games of one split, held-out games first."""
    first = 0 if split == "heldout" else GAMES["heldout"]
    for game in range(first, first + GAMES[split]):
        prompt = [{"role": "user", "content": question(game)}]
        yield Problem(id=problem_id(prompt, ""), prompt=prompt, solution="")
