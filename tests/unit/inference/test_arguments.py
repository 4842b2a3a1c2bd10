"""Tests of request seeds."""

from grpo_ray.inference.arguments import request_seed


def test_request_seed_depends_on_each_of_its_arguments() -> None:
    first = (0, "aaaaaaaaaaaaaaaa", 0, 0)
    others = [(1, *first[1:]), (0, "b" * 16, 0, 0), (*first[:2], 1, 0), (*first[:3], 1)]
    seeds = {request_seed(*arguments) for arguments in [first, *others]}
    assert len(seeds) == 5 and request_seed(*first) in seeds


def test_request_seed_is_a_signed_64_bit_integer() -> None:
    seeds = [request_seed(0, "aaaaaaaaaaaaaaaa", 0, index) for index in range(100)]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_request_seed_never_changes() -> None:
    # A resumed run must draw the seeds of the run that it continues.
    assert request_seed(0, "aaaaaaaaaaaaaaaa", 0, 0) == 2366360179402671454
