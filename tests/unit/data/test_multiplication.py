"""Tests of the embedded products: splits, answers, estimates and the order by seed."""

from collections.abc import Sequence

import pytest

from grpo_ray.config.schema import DataConfig
from grpo_ray.data.multiplication import HELDOUT, Product, list_products, multiplication_problems
from grpo_ray.data.problem import parse_problem
from grpo_ray.data.registry import open_dataset

TRAIN, HELD_OUT = list_products("train"), list_products("heldout")
EVERY = (*TRAIN, *HELD_OUT)
HELD_OUT_BEGIN = [(25, 60), (31, 51), (53, 98)]
TRAIN_BEGIN = [(35, 50), (89, 29), (71, 60)]


def test_products_splits_have_no_problem_in_common_or_twice() -> None:
    assert len(HELD_OUT) == HELDOUT == 500 and len(EVERY) == 90 * 90
    assert len({product.problem().id for product in EVERY}) == len(EVERY)


@pytest.mark.parametrize(
    ("product", "answer", "estimate"),
    [
        (Product(37, 48), 1776, 2000),  # 40 * 50
        (Product(34, 45), 1530, 1500),  # 30 * 50
        (Product(99, 95), 9405, 10_000),
        (Product(10, 14), 140, 100),
        (Product(20, 30), 600, 600),
    ],
    ids=str,
)
def test_product_answer_and_estimate_by_hand(product: Product, answer: int, estimate: int) -> None:
    assert (product.answer, product.estimate) == (answer, estimate)


def test_products_estimate_is_nearly_always_wrong() -> None:
    assert sum(product.estimate == product.answer for product in EVERY) < 0.02 * len(EVERY)


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT], ids=["train", "heldout"])
def test_products_a_fifth_of_each_split_is_hard(split: Sequence[Product]) -> None:
    # 40 of 90 first numbers and 40 of 90 second ones: 0.198
    assert 0.17 < sum(product.is_hard for product in split) / len(split) < 0.23


def test_products_order_is_the_same_in_every_process_and_version() -> None:
    # A resumed run continues in this order, and its held-out problems must stay out of training.
    assert [(p.a, p.b) for p in HELD_OUT[:3]] == HELD_OUT_BEGIN
    assert [(p.a, p.b) for p in TRAIN[:3]] == TRAIN_BEGIN


def test_multiplication_problems_have_the_shape_of_files() -> None:
    problem = next(multiplication_problems("heldout"))
    a, b = HELD_OUT_BEGIN[0]
    assert problem.prompt == [{"role": "user", "content": f"What is {a} * {b}?"}] and problem.solution == f"${a * b}$"
    assert parse_problem({"prompt": problem.prompt, "solution": problem.solution}, where="here") == problem


def test_open_dataset_multiplication_reads_these_problems() -> None:
    (shard,) = open_dataset("multiplication", "heldout", DataConfig())
    assert list(shard.read()) == [product.problem() for product in HELD_OUT] and shard.num_rows == 500
