"""The tool of the embedded policy, and versions of it that go wrong for some of its problems."""

import hostile_tools

KINDS = ("hang", "megabyte", "bomb", "segfault", "remove_folder", "eat_memory")
"""Faults by the remainder of the first factor divided by `MODULUS`; nothing for further remainders."""
MODULUS = 9


def multiply(a: int, b: int) -> object:
    """Multiply two whole numbers, or go wrong.

    Args:
        a: The first factor.
        b: The second factor.
    """
    kind = a % MODULUS
    return getattr(hostile_tools, KINDS[kind])() if kind < len(KINDS) else a * b


def leak(a: int, b: int) -> int:
    """Return a product that is wrong if an earlier call was made in this process by another completion.

    Args:
        a: The first factor.
        b: The second factor.
    """
    hostile_tools.SEEN.append(a)
    return a * b if set(hostile_tools.SEEN) == {a} else -1
