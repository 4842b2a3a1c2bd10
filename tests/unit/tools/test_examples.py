"""Tests of the example tool and environment, which import nothing heavy."""

import subprocess
import sys

import pytest
from transformers.utils import get_json_schema

from grpo_ray.tools.examples import Guess, multiply


def secret_of(seed: int) -> int:
    """Find the secret of a game by counting."""
    game = Guess(limit=31)
    game.reset(seed=seed)
    return next(number for number in range(1, 32) if game.guess(number) == "correct")


def test_multiply_has_a_schema() -> None:
    schema = get_json_schema(multiply)["function"]
    assert schema["name"] == "multiply" and schema["parameters"]["required"] == ["a", "b"]
    assert multiply(37, 48) == 1776


def test_guess_has_a_schema() -> None:
    schema = get_json_schema(Guess().guess)["function"]
    assert schema["parameters"]["properties"] == {"number": {"type": "integer", "description": "The guess."}}


def test_guess_secret_follows_the_seed_and_ignores_columns() -> None:
    secrets = [secret_of(seed) for seed in range(200)]
    assert set(secrets) == set(range(1, 32))
    game = Guess()
    game.reset(seed=5, prompt="x", id="y")
    assert game.guess(secrets[5]) == "correct"


@pytest.mark.parametrize(("tries", "reward"), [(1, 1.0), (2, 0.875), (5, 0.5), (8, 0.125)])
def test_guess_reward_falls_with_each_guess(tries: int, reward: float) -> None:
    secret = secret_of(3)
    wrong = 1 if secret > 1 else 2
    game = Guess(limit=8)
    game.reset(seed=3)
    for _ in range(tries - 1):
        assert game.guess(wrong) == "higher" and not game.done
    assert game.guess(secret) == "correct"
    assert game.done and game.get_reward() == reward


def test_guess_not_found_ends_at_the_limit_with_reward_0() -> None:
    game = Guess(limit=2)
    assert game.reset(seed=0) == " It is from 1 to 31. You have 2 guesses."
    assert game.get_reward() == 0.0
    assert game.guess(40) == "lower" and not game.done
    assert game.guess(0) == "higher" and game.done
    assert game.get_reward() == 0.0
    with pytest.raises(ValueError, match="has ended"):
        game.guess(5)


def test_guess_reset_begins_a_new_game() -> None:
    game = Guess(limit=1)
    game.reset(seed=0)
    game.guess(0)
    game.reset(seed=1)
    assert not game.done and game.guess(secret_of(1)) == "correct" and game.get_reward() == 1.0


def test_guess_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit=0"):
        Guess(limit=0)


def test_examples_import_no_heavy_library() -> None:
    code = (
        "import sys, grpo_ray.tools.examples; print({'torch', 'transformers', 'trl', 'vllm', 'ray'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
