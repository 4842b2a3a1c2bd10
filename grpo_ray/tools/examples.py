"""A tool and an environment for the two small examples of several turns; both are templates for your own.

rollout: {tools: ["grpo_ray.tools.examples:multiply"]}          # --example multiply-tool
rollout: {environment: "grpo_ray.tools.examples:Guess"}         # --example guessing-game
"""

import random
from typing import Any

from grpo_ray.data.guessing import LARGEST, hint, rules


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.

    Returns:
        The product.
    """
    return a * b


class Guess:
    """A game: guess a secret number from hints, in few guesses.

    Args:
        limit: number of guesses.
    """

    done = False
    """True if the game has ended: the number has been found, or no guess is left."""

    def __init__(self, limit: int = 8):
        if limit < 1:
            raise ValueError(f"limit={limit} must be at least 1")
        self._limit = limit

    def reset(self, *, seed: int, **columns: Any) -> str:
        """Choose the secret number, and return the rules, which are appended to the prompt.

        Args:
            seed: the same for all completions of a group, so that they play the same game.
            columns: the problem's columns; not used.
        """
        self._secret = random.Random(seed).randint(1, LARGEST)
        self._guesses = 0
        self._found = False
        self.done = False
        return rules(self._limit)

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.

        Returns:
            "correct", or "higher" or "lower" if the number is higher or lower than the guess.
        """
        if self.done:
            raise ValueError("the game has ended")
        self._guesses += 1
        self._found = number == self._secret
        self.done = self._found or self._guesses == self._limit
        return hint(self._secret, number)

    def get_reward(self) -> float:
        """Return 1 for a right first guess, 1 / limit less for each further guess; 0 if the number was not found."""
        return 1 - (self._guesses - 1) / self._limit if self._found else 0.0
