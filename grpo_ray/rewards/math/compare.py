r"""Are two answers the same? Compared by their shapes, down to the values inside.

The first argument of every comparison is the solution's side: it says which kind is asked for, and an answer
that is of another kind, or that leaves work undone which the solution does not leave, is wrong. `value`, and
with it sympy, is imported only where two values are compared, so that the rest of the package stays light.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

from grpo_ray.rewards.math.limits import restates
from grpo_ray.rewards.math.normalize import strip_spacing
from grpo_ray.rewards.math.structure import Chain, Items, Leaf, Structure, parse_structure
from grpo_ray.rewards.math.words import without_unit

_INEQUALITIES = frozenset({"<", ">", r"\le", r"\ge", r"\ne"})
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|widehat|measuredangle|vec|hat|bar|mathbb|mathcal)(?![a-zA-Z])\s*)?"
    r"(?:[a-zA-Z]+|\\[a-zA-Z]+|\\text\{[^{}]*\}|\{[a-zA-Z]+\}|\|[a-zA-Z]+\|)'*"
    r"(?:_(?:\{[^{}]*(?:\{[^{}]*\})?\}|\w|\\[a-zA-Z]+))?'*(?:\([^()=]*\))?"
)
_NATURAL_LOG = re.compile(r"\\log(?![_a-zA-Z]|\s*_)")


def same_answer(gold: str, answer: str) -> bool:
    """Whether two cleaned texts state the same answer."""
    if _same(parse_structure(gold), parse_structure(answer)):
        return True
    if _NATURAL_LOG.search(gold) or _NATURAL_LOG.search(answer):
        # A bare log is natural in analysis and decimal at school; one reading must hold for both sides.
        gold, answer = _NATURAL_LOG.sub(r"\\ln ", gold), _NATURAL_LOG.sub(r"\\ln ", answer)
        return _same(parse_structure(gold), parse_structure(answer))
    return False


def _same(gold: Structure, answer: Structure) -> bool:
    gold, answer = _spread(gold), _spread(answer)
    if isinstance(gold, Chain) and r"\approx" in gold.ops:
        return any(_same(reading, answer) for reading in _readings(gold))
    if isinstance(answer, Chain) and r"\approx" in answer.ops:
        return any(_same(gold, reading) for reading in _readings(answer))
    if isinstance(gold, Chain):
        return _same_as_chain(gold, answer)
    if isinstance(answer, Chain) and not _INEQUALITIES & set(answer.ops):
        stated = _stated(answer)
        return stated is not None and _same(gold, stated[1])
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return _same_leaf(gold.text, answer.text) or _same_set(gold, answer)
    if isinstance(gold, Items) and isinstance(answer, Items):
        return _same_items(gold, answer) or _same_set(gold, answer)
    if isinstance(gold, Items) and gold.opening == "{" and len(gold.items) == 1 and isinstance(answer, Leaf):
        return _same(gold.items[0], answer)
    if isinstance(answer, Items) and answer.opening == "{" and len(answer.items) == 1 and isinstance(gold, Leaf):
        return _same(gold, answer.items[0])
    return _same_set(gold, answer)


def _same_leaf(gold: str, answer: str) -> bool:
    if strip_spacing(gold) == strip_spacing(answer):
        return True
    if restates(answer, gold):
        return False
    gold_value, gold_unit = without_unit(gold)
    value, unit = without_unit(answer)
    if gold_unit is not None and unit is not None and unit != gold_unit:
        return False
    base = re.fullmatch(r"(\d+)_\{?(\d+)\}?", strip_spacing(value))
    if base is not None or ":" in value:
        # Digits in another base, and times of day, are names of numbers that the grammar would misread.
        return False
    if (base := re.fullmatch(r"(\d+)_\{?\d+\}?", strip_spacing(gold_value))) is not None:
        return strip_spacing(value) == base[1]
    from grpo_ray.rewards.math.values import same_value

    return same_value(gold_value, value)


def _spread(shape: Structure) -> Structure:
    r"""A value with \pm as the two values that it stands for, and `n=2,3,4` as a list of values of n."""
    if isinstance(shape, Leaf) and re.search(r"\\[pm][mp](?![a-zA-Z])", shape.text):
        upper = shape.text.replace(r"\pm", "+").replace(r"\mp", "-")
        lower = shape.text.replace(r"\pm", "-").replace(r"\mp", "+")
        return Items("", "", (Leaf(upper.strip().removeprefix("+").strip()), Leaf(lower.strip())))
    if isinstance(shape, Items) and not shape.opening and len(shape.items) > 1:
        first, *rest = shape.items
        if isinstance(first, Chain) and first.ops == ("=",) and not any(isinstance(item, Chain) for item in rest):
            return Chain((first.parts[0], Items("", "", (first.parts[1], *rest))), ("=",))
    return shape


def _same_items(gold: Items, answer: Items) -> bool:
    if gold.opening in ("", "{"):
        # A bare list may be answered in any brackets but an interval's; braces only by braces or none.
        if answer.opening not in ("", "{", *(() if gold.opening else ("(",))):
            return False
        # A value listed twice is one value of a set.
        return _paired(list(dict.fromkeys(gold.items)), list(dict.fromkeys(answer.items)))
    if len(gold.items) != len(answer.items):
        return False
    as_vector = len(gold.items) > 2 and answer.opening in ("(", "[")
    if answer.opening and not as_vector and (answer.opening, answer.closing) != (gold.opening, gold.closing):
        return False
    if not answer.opening and gold.opening != "(":
        return False
    return all(_same(one, other) for one, other in zip(gold.items, answer.items, strict=True))


def _paired(gold: list[Structure], answer: list[Structure]) -> bool:
    """Whether the answers match the gold items one to one."""
    for item in answer:
        match = next((index for index, other in enumerate(gold) if _same(other, item)), None)
        if match is None:
            return False
        del gold[match]
    return not gold


# --- relations


def _same_as_chain(gold: Chain, answer: Structure) -> bool:
    if _INEQUALITIES & set(gold.ops):
        if _same_set(gold, answer):
            return True
        return isinstance(answer, Chain) and _pieces(gold) is None and _same_relation(gold, answer)
    stated = _stated(gold)
    name, value = stated if stated is not None else (None, None)
    if name is None or value is None or isinstance(value, Chain):
        return isinstance(answer, Chain) and _same_relation(gold, answer)
    if not isinstance(answer, Chain):
        return _same(value, answer)
    if _INEQUALITIES & set(answer.ops):
        return _same_set(value, answer)
    given = _stated(answer)
    if given is not None and given[0] is not None and _same_name(name, given[0]) and _same(value, given[1]):
        return True
    # y=x+1 may be written x-y+1=0, but x=5 not 2x=10: that is still to be solved.
    return isinstance(value, Leaf) and not _is_constant(value.text) and _same_relation(gold, answer)


def _stated(chain: Chain) -> tuple[str | None, Structure] | None:
    r"""What an equation states: (its name or None, its value); None where it states no value.

    `x=5`, `f(2)=5`, `m+n=5`, `2+3=5`, `x=\frac{10}{2}=5` and `\int ... = 5` state 5. A number that differs
    from the value (`7=5`), an identity (`5=5`) or an unsolved equation (`2x=10`) states none.
    """
    parts, ops = chain.parts, chain.ops
    if any(op not in ("=", r"\in") for op in ops):
        return None
    if isinstance(parts[-1], Leaf) and _NAME.fullmatch(parts[-1].text) and not _is_name(parts[0]):
        parts = parts[::-1]
    value = parts[-1]
    for part in parts[:-1]:
        if not isinstance(part, Leaf):
            # (x,y)=(1,2) names a tuple of symbols.
            if isinstance(part, Items) and all(_is_name(item) for item in part.items):
                continue
            return None
        if not _agrees(part.text, value):
            return None
    first = parts[0]
    return (strip_spacing(first.text) if isinstance(first, Leaf) and _is_name(first) else None), value


def _readings(chain: Chain) -> tuple[Structure, ...]:
    r"""What `x = 10\sqrt{3} \approx 17.3` states: its exact and its rounded value.

    Nothing where the one does not round to the other: `100 \approx 101` would be two guesses.
    """
    *rest, tail = chain.parts
    if chain.ops.index(r"\approx") != len(chain.ops) - 1 or not isinstance(tail, Leaf):
        return ()
    head = rest[0] if len(rest) == 1 else Chain(tuple(rest), chain.ops[:-1])
    if _is_name(head):
        return (Chain((head, tail), ("=",)),)
    from grpo_ray.rewards.math.values import rounds

    if not isinstance(rest[-1], Leaf) or not rounds(rest[-1].text, tail.text):
        return ()
    return (head, Chain((rest[0], tail), ("=",)) if len(rest) > 1 else tail)


def _agrees(part: str, value: Structure) -> bool:
    """Whether an equation's left side may stand before its value."""
    from grpo_ray.rewards.math.values import names, parse, same_value

    if _NAME.fullmatch(part) or restates(part, ""):
        return True
    if _is_constant(part):
        # The left side may be undone arithmetic (2+3=5), so it stands as the solution here.
        return (
            isinstance(value, Leaf)
            and strip_spacing(part) != strip_spacing(value.text)
            and same_value(part, value.text)
        )
    expression = parse(part)
    # One unknown with something done to it (2x, x^2) is an equation still to be solved; m+n is a named
    # quantity.
    return expression is None or len(names(expression)) != 1 or part.startswith("|")


def _is_name(shape: Structure) -> bool:
    return isinstance(shape, Leaf) and _NAME.fullmatch(shape.text) is not None and shape.text not in ("e", r"\pi")


def _is_constant(text: str) -> bool:
    from grpo_ray.rewards.math.values import is_constant

    return is_constant(text)


def _same_name(one: str, other: str) -> bool:
    """`f(x)` may be called `f`; otherwise names must be the same, case included."""
    return other in (one, one.split("(")[0]) or one == other.split("(")[0]


def _same_relation(gold: Chain, answer: Chain) -> bool:
    if len(gold.parts) != 2 or len(answer.parts) != 2:
        return False
    sides = [part.text for part in (*gold.parts, *answer.parts) if isinstance(part, Leaf)]
    if len(sides) != 4:
        return False
    (gold_op,), (op,) = gold.ops, answer.ops
    if op != gold_op:
        if _FLIPPED.get(op) != gold_op:
            return False
        sides[2], sides[3] = sides[3], sides[2]
    from grpo_ray.rewards.math.values import same_relation

    return same_relation((sides[0], sides[1]), (sides[2], sides[3]), directed=op not in ("=", r"\ne"))


# --- sets of reals


@dataclass(frozen=True)
class Piece:
    """An interval, or a point where both ends are the same."""

    low: str
    high: str
    low_open: bool
    high_open: bool


def _same_set(gold: Structure, answer: Structure) -> bool:
    expected, given = _pieces(gold), _pieces(answer)
    if expected is None or given is None or len(expected[1]) != len(given[1]):
        return False
    if expected[0] is not None and given[0] is not None and expected[0] != given[0]:
        return False
    rest = list(expected[1])
    for piece in given[1]:
        match = next((other for other in rest if _same_piece(other, piece)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _same_piece(gold: Piece, answer: Piece) -> bool:
    return (
        (gold.low_open, gold.high_open) == (answer.low_open, answer.high_open)
        and _same_leaf(gold.low, answer.low)
        and _same_leaf(gold.high, answer.high)
    )


def _pieces(shape: Structure) -> tuple[str | None, list[Piece]] | None:
    """A set of reals as (the variable it restricts, or None; its intervals and points). None for others."""
    if isinstance(shape, Leaf):
        return _leaf_pieces(shape.text)
    if isinstance(shape, Chain):
        return _chain_pieces(shape)
    if isinstance(shape, Items) and shape.opening in ("(", "["):
        ends = [item.text for item in shape.items if isinstance(item, Leaf)]
        if len(ends) != 2 or len(shape.items) != 2:
            return None
        return None, [_piece(ends[0], ends[1], shape.opening == "(", shape.closing == ")")]
    if isinstance(shape, Items) and shape.opening == "{":
        points = [item.text for item in shape.items if isinstance(item, Leaf)]
        return (
            (None, [Piece(point, point, False, False) for point in points]) if len(points) == len(shape.items) else None
        )
    parts = [_pieces(item) for item in shape.items]
    if isinstance(shape, Items) and not all(isinstance(item, Chain) for item in shape.items):
        return None
    known = [part for part in parts if part is not None]
    variables = {variable for variable, _ in known if variable is not None}
    if len(known) < len(parts) or len(variables) > 1:
        return None
    return next(iter(variables), None), [piece for _, pieces in known for piece in pieces]


def _leaf_pieces(text: str) -> tuple[str | None, list[Piece]] | None:
    if text == r"\emptyset":
        return None, []
    removed = re.fullmatch(r"\\mathbb\{R\}\s*(?:\\setminus|\\backslash|-|\\)\s*\\\{(.*)\\\}", text)
    if removed is None:
        return None
    from grpo_ray.rewards.math.values import ascending

    points = ascending(tuple(point.strip() for point in removed[1].split(",")))
    if points is None:
        return None
    ends = (r"-\infty", *points, r"\infty")
    return None, [Piece(low, high, True, True) for low, high in pairwise(ends)]


def _chain_pieces(chain: Chain) -> tuple[str | None, list[Piece]] | None:
    """A solved inequality (`3<x`, `-1<x\\le 1`, `x\\ne 0`) or membership as a set; None where it is still to
    be solved.
    """
    parts = [part.text for part in chain.parts if isinstance(part, Leaf)]
    if chain.ops == (r"\in",) and _is_name(chain.parts[0]) and isinstance(chain.parts[0], Leaf):
        inner = _pieces(chain.parts[1])
        return None if inner is None else (strip_spacing(chain.parts[0].text), inner[1])
    if len(parts) != len(chain.parts) or not set(chain.ops) <= _INEQUALITIES or len(parts) > 3:
        return None
    ops = chain.ops
    if len(parts) == 2 and not _is_name(chain.parts[0]):
        parts, ops = parts[::-1], (_FLIPPED[ops[0]],)
    if len(parts) == 3 and ops[0] in (">", r"\ge"):
        parts, ops = parts[::-1], (_FLIPPED[ops[1]], _FLIPPED[ops[0]])
    middle = len(parts) - 2
    variable, bounds = parts[middle], parts[:middle] + parts[middle + 1 :]
    if _NAME.fullmatch(variable) is None or not all(_is_constant(bound) for bound in bounds):
        return None
    name = strip_spacing(variable)
    if len(parts) == 3:
        if not set(ops) <= {"<", r"\le"}:
            return None
        return name, [_piece(parts[0], parts[2], ops[0] == "<", ops[1] == "<")]
    (op,), (bound,) = ops, bounds
    if op == r"\ne":
        return name, [_piece(r"-\infty", bound, True, True), _piece(bound, r"\infty", True, True)]
    if op in ("<", r"\le"):
        return name, [_piece(r"-\infty", bound, True, op == "<")]
    return name, [_piece(bound, r"\infty", op == ">", True)]


def _piece(low: str, high: str, low_open: bool, high_open: bool) -> Piece:
    return Piece(
        low.strip(),
        high.strip(),
        low_open or low.strip() == r"-\infty",
        high_open or high.strip() == r"\infty",
    )
