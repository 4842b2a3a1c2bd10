"""Infinite rewards, which count as None: subtracting a group's mean from one gives no number for the whole group."""

import logging

logger = logging.getLogger(__name__)


def warn_of_infinite(reward: str, infinite: int, completions: int) -> None:
    """Log a warning if a reward function returned infinite numbers.

    Args:
        reward: name of the function.
        infinite: number of its rewards that are infinite.
        completions: number of its rewards.
    """
    if infinite:
        logger.warning(
            "the reward %s is infinite for %d of %d completions, which counts as None (does not apply): return a "
            "finite number",
            reward, infinite, completions,
        )  # fmt: skip
