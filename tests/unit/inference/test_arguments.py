"""Tests of request seeds and of the engine's arguments."""

import pytest

from grpo_ray.errors import ConfigError
from grpo_ray.inference.arguments import capture_sizes, request_seed, require_known


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


def test_capture_sizes_cover_every_sequence_in_few_steps() -> None:
    sizes = capture_sizes(1000)
    assert sizes[:5] == [1, 2, 4, 8, 16] and 512 in sizes
    assert sizes[-5:] == [512, 640, 768, 896, 1000]
    assert capture_sizes(640)[-2:] == [512, 640]
    assert sizes == sorted(set(sizes))


def test_require_known_names_argument_of_another_release() -> None:
    require_known({"block_size": 16}, {"block_size", "dtype"}, "0.22.1")
    with pytest.raises(ConfigError, match=r"^engine\.vllm\.watermark: the installed vLLM 0\.22\.1 does not have"):
        require_known({"watermark": 0.1, "block_size": 16}, {"block_size", "dtype"}, "0.22.1")
