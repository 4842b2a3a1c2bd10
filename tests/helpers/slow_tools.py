"""The tool of the embedded policy, which takes as long as its first factor says."""

import time


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first factor; the call takes as many hundredths of a second.
        b: The second factor.
    """
    time.sleep(a / 100)
    return a * b
