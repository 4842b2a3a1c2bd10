"""The embedded dataset `multiplication`: products of two-digit numbers, which the policy `tiny-tools` cannot compute.

Both splits are cut from one shuffled list of all products, so they have no problem in common.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_ray.data.problem import Problem, problem_id

HELDOUT = 500
"""Problems in the held-out split."""

HARD = 60
"""A product counts as hard if both numbers are at least this large: 20 % of all products."""


@dataclass(frozen=True)
class Product:
    """One task: two whole numbers from 10 to 99 to be multiplied."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"What is {self.a} * {self.b}?"

    @property
    def answer(self) -> int:
        return self.a * self.b

    @property
    def estimate(self) -> int:
        """The product of both numbers rounded to tens, halves upwards: the mistake of the policy `tiny-tools`."""
        return (self.a + 5) // 10 * ((self.b + 5) // 10) * 100

    @property
    def is_hard(self) -> bool:
        return min(self.a, self.b) >= HARD

    def problem(self) -> Problem:
        """Return the task as a problem."""
        prompt = [{"role": "user", "content": self.question}]
        solution = f"${self.answer}$"
        return Problem(id=problem_id(prompt, solution), prompt=prompt, solution=solution)


def list_products(split: str, seed: int = 0) -> list[Product]:
    """Return all tasks of one split, "train" (7,600) or "heldout" (500), in an order that the seed determines."""
    numbers = range(10, 100)
    products = [Product(a, b) for a in numbers for b in numbers]
    random.Random(seed).shuffle(products)
    return {"heldout": products[:HELDOUT], "train": products[HELDOUT:]}[split]


def multiplication_problems(split: str) -> Iterator[Problem]:
    """Yield the problems of one split, in the order of `list_products`."""
    return (product.problem() for product in list_products(split))
