r"""Comparison of two answers: structure by structure, down to the values inside.

The first argument of every comparison is the solution's side (`gold`). It determines the expected kind of answer: an
answer of another kind, or one with an unevaluated operation that the solution does not have, is wrong.
`values`, and with it sympy, is imported only where two values are compared, so that importing this module stays cheap.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations, product
from typing import TypeGuard, TypeVar

from grpo_ray.rewards.math.families import (
    Quantified,
    parse_congruence,
    same_classes,
    split_quantifier,
    with_same_parameter,
)
from grpo_ray.rewards.math.limits import has_unevaluated_operator
from grpo_ray.rewards.math.linear import rational
from grpo_ray.rewards.math.normalize import strip_spacing
from grpo_ray.rewards.math.notation import fraction_text, rename_symbols, symbols, without_degrees
from grpo_ray.rewards.math.real_sets import Interval, real_set, with_open_infinity
from grpo_ray.rewards.math.structure import (
    INEQUALITIES,
    MIRRORED,
    NAME,
    Collection,
    Leaf,
    Matrix,
    Ratio,
    Relation,
    SetBuilder,
    SetOperation,
    Structure,
    Union,
    is_name,
    parse_structure,
)
from grpo_ray.rewards.math.words import split_unit

_BARE_LOG = re.compile(r"\\log(?![_a-zA-Z]|\s*_)")
_PLUS_MINUS = re.compile(r"\\[pm][mp](?![a-zA-Z])")
_DIGITS_IN_BASE = re.compile(r"(?:\\text\{)?\(?([\dA-F]*\d|[A-F][\dA-F]+)\)?\}?_\{?(\d+)\}?\}?")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_MULTIPLE_OF_PI = re.compile(r"[-+]?\d*\\pi")
_INDEXED = re.compile(r"(.+?)(?:\(([a-zA-Z])\)|_\{?([a-zA-Z])\}?)")
"""A function of one letter or a sequence with one index: `f(x)`, `a_n`."""
_CASES = r"\begin{cases}"
_ANGLE = re.compile(r"\\(?:angle|measuredangle|widehat)\s*\{?\s*([A-Z]{3})\s*\}?")
_ORDERED_LETTERS = re.compile(
    r"\\(?:angle|measuredangle|widehat)\s*\{?\s*[A-Z]{2,}\s*\}?|\\overrightarrow\{[A-Z]+\}|[A-Z]{3,}"
)
_INVERSE_MATRIX = re.compile(r"[A-Z)]\s*\^\s*\{\s*(?:-1|T|\\top)\s*\}")
_DERIVATIVE = re.compile(r"\\frac\{d([a-zA-Z])\}\{d[a-zA-Z]\}")
_BOUND = re.compile(r"\\(?:sum|prod)\s*_\s*\{\s*([a-z])\s*=")
_SIGNS = re.compile(r"\\([pm][mp])(?![a-zA-Z])")
_MAX_SIGNS = 3
"""Maximum independent double signs of one formula; n of them give 2^n values."""
_CONSTANT = re.compile(r"[ABCDK]|c|[ABCKabck]_\d")
"""Names of the free constants in the general solution of an equation or in an antiderivative."""
_EVENT = re.compile(r"[a-zA-Z}] ?[(\[] ?[A-Z] ?(?:[|,)\]]|\\(?:cap|cup)(?![a-zA-Z]))")
"""A named argument, as in `P(A|B)` or `n(A)`, which is not a free constant."""
_INTEGRATION_CONSTANT = re.compile(r"[CK]|[CcKk]_\d")
_MAX_CONSTANTS = 3
_CAPITAL_NAME = r"\|?[A-Z][A-Za-z]{0,3}(?:_(?:\{[^{}]{1,20}\}|\w))?\|?|\\overline\{[A-Z]{2}\}"
_QUOTIENT_OF_NAMES = re.compile(
    rf"\\frac\{{({_CAPITAL_NAME})\}}\{{({_CAPITAL_NAME})\}}|({_CAPITAL_NAME})/({_CAPITAL_NAME})"
)
_MONOMIAL = re.compile(r"(-?\d{1,30}) ?(?:\\cdot ?)?([a-zA-Z])")
_SEGMENT = re.compile(r"\\overline ?\{ ?([A-Z]{2}) ?\}")
_REAL_PARAMETERS = ("t", "s", r"\lambda", r"\mu")
"""Names of the parameter of a line."""
_REAL = "R"
"""Domain of a parameter that is any real number."""
_COORDINATES = frozenset("xyz")
_MAX_PROGRESSION = 500
r"""Values that `1,2,\dots,10` may stand for."""

T = TypeVar("T")


def same_answer(gold: str, answer: str) -> bool:
    """Return True if two normalized texts state the same answer."""
    gold_family, answer_family = split_quantifier(gold), split_quantifier(answer)
    gold_classes, answer_classes = parse_congruence(gold), parse_congruence(answer)
    if gold_classes is not None:
        if answer_classes is not None:
            return gold_classes.agrees_with(answer_classes)
        if rational(answer) is not None:
            # A remainder may be stated by the number alone; x=5 is not all of x = 5 mod 12.
            return gold_classes.name is None and gold_classes.residues == {rational(answer)}
        return _same_family(gold_classes.as_family(), answer_family._replace(domain=answer_family.domain or "Z"))
    if gold_family.parameter is not None or answer_family.parameter is not None:
        return _same_family(gold_family, answer_family)
    if _same_text(gold, answer):
        return True
    renamed = _with_line_parameter_of(gold, answer)
    if renamed is not None and _same_text(gold, renamed):
        return True
    in_angles = all(r"\pi" in text or r"\circ" in text for text in (gold, answer))
    return in_angles and _same_family(gold_family, answer_family)


def _with_line_parameter_of(gold: str, answer: str) -> str | None:
    """Rename the real parameter of an answer's vector to the solution's, `(1+s,2s)` for `(1+t,2t)`; None for others."""
    if not ("," in gold or r"\begin" in gold):
        return None
    names, stated = ([name for name in _REAL_PARAMETERS if _has_name(text, name)] for text in (gold, answer))
    if len(names) != 1 or len(stated) != 1 or names == stated:
        return None
    structure = parse_structure(gold)
    if not isinstance(structure, Matrix) and not _is_tuple(structure) and _assignments(structure) is None:
        return None
    if stated[0].startswith("\\"):
        answer = re.sub(rf"\{stated[0]}(?![a-zA-Z])", "s" if names[0] == "t" else "t", answer)
        stated = ["s" if names[0] == "t" else "t"]
    return rename_symbols(answer, {stated[0]: names[0]})


def _has_name(text: str, name: str) -> bool:
    return re.search(rf"\{name}(?![a-zA-Z])", text) is not None if name.startswith("\\") else name in symbols(text)


def _same_text(gold: str, answer: str) -> bool:
    if _same_alternatives(parse_structure(gold), parse_structure(answer)):
        return True
    if _BARE_LOG.search(gold) or _BARE_LOG.search(answer):
        # A bare log is natural in analysis and decimal at school; one reading must hold for both sides.
        gold, answer = _BARE_LOG.sub(r"\\ln ", gold), _BARE_LOG.sub(r"\\ln ", answer)
        return _same_alternatives(parse_structure(gold), parse_structure(answer))
    return False


def _same_alternatives(gold: Structure, answer: Structure) -> bool:
    r"""Compare two whole answers; `\frac72 \text{ or } 3.5` states one value twice, and `\{5\}` is 5."""
    gold = _expanded(gold)
    if isinstance(gold, Leaf) and isinstance(answer, Collection):
        if not answer.opening and answer.joiner == "or":
            return all(_same_structure(gold, item) for item in answer.items)
        if _is_singleton(answer):
            return _same_structure(gold, answer.items[0])
    if isinstance(answer, Leaf) and (_is_singleton(gold) or _is_bracketed_value(gold)):
        return _same_structure(gold.items[0], answer)
    return _same_structure(gold, answer)


def _same_structure(gold: Structure, answer: Structure) -> bool:
    gold, answer = _expanded(gold), _expanded(answer)
    if isinstance(gold, Relation) and r"\approx" in gold.operators:
        return any(_same_structure(value, answer) for value in _approximated_values(gold))
    if isinstance(answer, Relation) and r"\approx" in answer.operators:
        exact, *rounded = _approximated_values(answer) or (None,)
        # An exact solution is not answered by a rounded value: 31/6 is not 5.
        accepted = rounded if isinstance(gold, Leaf) and "." in gold.text else ()
        return any(value is not None and _same_structure(gold, value) for value in (exact, *accepted))
    labelled = _assignments(gold)
    if labelled is not None:
        return _same_assignments(labelled, answer)
    is_ordered = isinstance(gold, Matrix) or (isinstance(gold, Collection) and gold.opening == "(")
    if is_ordered and (stated := _assignments(answer)) is not None:
        return _same_structure(gold, _in_label_order(stated))
    if isinstance(gold, Relation):
        return _matches_relation(gold, answer)
    if isinstance(answer, Relation) and INEQUALITIES.isdisjoint(answer.operators):
        statement = _statement(answer)
        return statement is not None and _same_alternatives(gold, statement.value)
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return _same_formula(gold.text, answer.text) or _same_up_to_constants(gold.text, answer.text)
    if isinstance(gold, Collection) and isinstance(answer, Collection):
        return _same_collection(gold, answer) or _same_real_set(gold, answer)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _same_matrix(gold, answer)
    if isinstance(gold, Ratio):
        return _same_ratio(gold, answer)
    return _same_set_operation(gold, answer) or _same_real_set(gold, answer)


def _is_singleton(structure: Structure) -> TypeGuard[Collection]:
    r"""Return True if the structure is a set of one value, `\{5\}`; `\{\emptyset\}` is a set of a set."""
    return (
        isinstance(structure, Collection)
        and structure.opening == "{"
        and len(structure.items) == 1
        and structure.items[0] != Leaf(r"\emptyset")
    )


def _is_bracketed_value(structure: Structure) -> TypeGuard[Collection]:
    """Return True if the structure is one value in square brackets, `[5]`, which may be a rounded value or a list."""
    return isinstance(structure, Collection) and structure.opening == "[" and len(structure.items) == 1


def _expanded(structure: Structure) -> Structure:
    r"""Expand `a \pm b` into its two values, and `n=2,3,4` into a relation between n and a list of values."""
    if isinstance(structure, Leaf) and _PLUS_MINUS.search(structure.text):
        return Collection("", "", tuple(map(Leaf, _values_of_signs(structure.text))))
    if isinstance(structure, Collection) and not structure.opening and len(structure.items) > 1:
        first, *rest = structure.items
        are_values = not any(isinstance(item, Relation) for item in rest)
        if isinstance(first, Relation) and first.operators == ("=",) and are_values:
            name, value = first.operands
            return Relation((name, Collection("", "", (value, *rest))), ("=",))
        if isinstance(first, Relation) and first.operators == (r"\ne",) and are_values:
            excluded = (first.operands[1], *rest)
            relations = tuple(Relation((first.operands[0], value), (r"\ne",)) for value in excluded)
            return Collection("", "", relations, "and")
        named = _one_name(structure)
        if named is not None:
            return named
    return structure


def _values_of_signs(text: str) -> list[str]:
    r"""Return the values of a formula with double signs: two for each `\pm`, all of them independent.

    A `\mp` takes the opposite of every `\pm`, so that a formula with both has two values.
    """
    signs = _SIGNS.findall(text)
    independent = set(signs) == {"pm"} and len(signs) <= _MAX_SIGNS
    choices = product("+-", repeat=len(signs)) if independent else ("+" * len(signs), "-" * len(signs))
    values = []
    for choice in choices:
        pieces = iter(choice)
        value = _PLUS_MINUS.sub(lambda match: _signed(match[0], next(pieces)), text)  # noqa: B023 (called at once)
        values.append(value.strip().removeprefix("+").strip())
    return values


def _signed(sign: str, upper: str) -> str:
    return upper if sign == r"\pm" else {"+": "-", "-": "+"}[upper]


def _one_name(structure: Collection) -> Relation | None:
    """Return `x=2,x=1` and `x=2,1,x=3` as one relation between x and a list of values; None for other lists."""
    names = {item.operands[0] for item in structure.items if isinstance(item, Relation)}
    if len(names) != 1 or not (is_name(name := next(iter(names))) or _is_tuple_of_names(name)):
        return None
    if any(isinstance(item, Relation) and item.operators != ("=",) for item in structure.items):
        return None
    values = tuple(item.operands[1] if isinstance(item, Relation) else item for item in structure.items)
    return Relation((name, Collection("", "", values, structure.joiner)), ("=",))


def _is_tuple_of_names(structure: Structure) -> TypeGuard[Collection]:
    return (
        isinstance(structure, Collection)
        and structure.opening == "("
        and all(is_name(item) for item in structure.items)
    )


def is_readable(text: str) -> bool:
    """Return True if all values in a normalized answer can be parsed, and so be compared."""
    from grpo_ray.rewards.math.values import parse_formula

    texts = _leaf_texts(parse_structure(split_quantifier(text).text))
    return all(parse_formula(split_unit(each)[0]) is not None for each in texts)


def _leaf_texts(structure: Structure) -> list[str]:
    """Return the texts of all values in a structure, without names, dots and the empty set."""
    if isinstance(structure, Leaf):
        known = is_name(structure) or structure.text in (r"\dots", r"\emptyset")
        return [] if known else [structure.text.replace(r"\pm", "+").replace(r"\mp", "-")]
    parts: tuple[Structure, ...]
    if isinstance(structure, Relation):
        parts = structure.operands
    elif isinstance(structure, SetBuilder):
        parts = (structure.condition,)
    elif isinstance(structure, Matrix):
        parts = _entries(structure)
    elif isinstance(structure, Ratio):
        parts = structure.terms
    else:
        parts = structure.items
    return [text for part in parts for text in _leaf_texts(part)]


# --- families with an integer parameter


def _same_family(gold: Quantified, answer: Quantified) -> bool:
    """Compare two answers as families of values, regardless of the parameter's name.

    Without a quantifier on either side, the parameter is a letter in a formula of angles.
    """
    is_quantified = gold.parameter is not None or answer.parameter is not None
    may_agree = not gold.domain or not answer.domain or gold.domain == answer.domain
    if is_quantified and may_agree and _same_text(gold.text, answer.text):
        return True
    shared = with_same_parameter(gold, answer)
    if shared is None:
        return False
    gold_text, answer_text, parameter = shared
    if _REAL in (gold.domain, answer.domain) and not _has_free_parameter(gold_text, parameter):
        return False
    gold_name, gold_values = _family_values(parse_structure(gold_text))
    name, values = _family_values(parse_structure(answer_text))
    if (name is not None and gold_name is not None and name != gold_name) or not gold_values or not values:
        return is_quantified and _same_text(gold_text, answer_text)
    if not is_quantified:
        # Without a quantifier the letter may stand for a given number, so the texts may differ only in its name.
        return same_classes(gold_values, gold_values, parameter, of_angles=True) and _same_text(gold_text, answer_text)
    if _same_text(gold_text, answer_text):
        return True
    return {gold.domain, answer.domain} <= {"", "Z"} and same_classes(gold_values, values, parameter, of_angles=False)


def _has_free_parameter(text: str, parameter: str) -> bool:
    """Return True if a real parameter's name does not matter: in a vector, or on the right of an equation.

    In `x>1` or `y=x^2` it is the variable that the answer is about.
    """
    structure = parse_structure(text)
    if isinstance(structure, Matrix) or _is_tuple(structure) or _assignments(structure) is not None:
        return True
    return (
        isinstance(structure, Relation)
        and structure.operators == ("=",)
        and parameter not in _COORDINATES
        and isinstance(structure.operands[0], Leaf)
        and parameter not in symbols(structure.operands[0].text)
    )


def _family_values(structure: Structure) -> tuple[str | None, tuple[str, ...]]:
    """Return the name and the formulas of `x=a, b` or of a list or set of formulas; no formulas for others."""
    structure = _expanded(structure)
    if (
        isinstance(structure, Relation)
        and structure.operators in (("=",), (r"\in",))
        and is_name(structure.operands[0])
    ):
        _, values = _family_values(structure.operands[1])
        return strip_spacing(structure.operands[0].text), values
    if isinstance(structure, Leaf):
        return None, (structure.text,)
    if isinstance(structure, Collection) and structure.opening in ("", "{"):
        parts = [_family_values(item) for item in structure.items]
        names = {name for name, _ in parts if name is not None}
        if len(names) <= 1 and all(values for _, values in parts):
            return next(iter(names), None), tuple(value for _, values in parts for value in values)
    return None, ()


# --- labelled values


def _assignments(structure: Structure) -> dict[str, Structure] | None:
    """Return the values of `x=1, y=2` or `(x,y)=(1,2)` by name; None for other structures and for one name alone."""
    if isinstance(structure, Relation):
        names, *values = structure.operands
        if len(values) > 1 and set(structure.operators) == {"="} and all(map(is_name, structure.operands[:-1])):
            # x=y=2 gives both names one value.
            equal_names = {strip_spacing(name.text): values[-1] for name in structure.operands[:-1] if is_name(name)}
            return equal_names if len(equal_names) == len(values) and not is_name(values[-1]) else None
        if structure.operators != ("=",) or not isinstance(names, Collection) or not isinstance(values[0], Collection):
            return None
        if names.opening != "(" or values[0].opening != "(" or len(names.items) != len(values[0].items):
            return None
        pairs = list(zip(names.items, values[0].items, strict=True))
    elif isinstance(structure, Collection) and structure.opening in ("", "(") and structure.joiner != "or":
        relations = [item for item in structure.items if isinstance(item, Relation) and item.operators == ("=",)]
        if len(relations) < len(structure.items):
            return None
        pairs = [(relation.operands[0], relation.operands[1]) for relation in relations]
    else:
        return None
    labelled = {strip_spacing(name.text): value for name, value in pairs if is_name(name)}
    return labelled if len(labelled) == len(pairs) > 1 else None


def _in_label_order(labelled: dict[str, Structure]) -> Collection:
    """Return the values as a tuple: coordinates in the order x, y, z, other names as they are listed."""
    names = sorted(labelled) if _COORDINATES.issuperset(labelled) else list(labelled)
    return Collection("(", ")", tuple(labelled[name] for name in names))


def _same_assignments(gold: dict[str, Structure], answer: Structure) -> bool:
    """Compare an answer with named values: it must have the same names, or only the values, in the names' order."""
    stated = _assignments(answer)
    if stated is not None:
        return stated.keys() == gold.keys() and all(
            _same_structure(value, stated[name]) for name, value in gold.items()
        )
    expected = _in_label_order(gold)
    if isinstance(answer, Leaf):
        return len(set(expected.items)) == 1 and _same_structure(expected.items[0], answer)
    if isinstance(answer, Collection):
        is_ordered = (answer.opening, answer.closing) in (("", ""), ("(", ")"))
        return (
            is_ordered
            and len(answer.items) == len(expected.items)
            and all(_same_structure(one, other) for one, other in zip(expected.items, answer.items, strict=True))
        )
    return isinstance(answer, Matrix) and _same_matrix(expected, answer)


# --- values


def _same_formula(gold: str, answer: str) -> bool:
    """Return True if two single values are the same, each with or without its unit."""
    if strip_spacing(gold) == strip_spacing(answer):
        return True
    if _SEGMENT.fullmatch(answer) and _SEGMENT.fullmatch(gold) is None:
        # The solution may omit the line over a segment's name. A line in the solution stays: it may negate a product.
        answer = _SEGMENT.sub(r"\1", answer)
    if _is_ordered_product(gold) or _is_ordered_product(answer):
        return _angle_letters(gold) is not None and _angle_letters(gold) == _angle_letters(answer)
    if gold.startswith(_CASES) and answer.startswith(_CASES):
        return _same_cases(gold, answer)
    answer = _with_bound_variable_of(gold, answer)
    if strip_spacing(gold) == strip_spacing(answer):
        return True
    if has_unevaluated_operator(answer, gold):
        return False
    gold_value, gold_unit = split_unit(gold)
    value, unit = split_unit(answer)
    if gold_unit is not None and unit is not None and unit != gold_unit:
        return False
    from grpo_ray.rewards.math.values import same_value

    if (gold_unit == "degree") != (unit == "degree") and r"\pi" in (value if unit is None else gold_value):
        # A solution in degrees: an integer multiple of pi without a unit counts as a number, not as an angle.
        return (gold_unit != "degree" or _MULTIPLE_OF_PI.fullmatch(strip_spacing(value)) is None) and same_value(
            gold, answer
        )
    if _DIGITS_IN_BASE.fullmatch(strip_spacing(gold_value)) or _DIGITS_IN_BASE.fullmatch(strip_spacing(value)):
        return _same_digits(strip_spacing(gold_value), strip_spacing(value))
    if (r"\circ" in gold_value) != (r"\circ" in value) and not any(
        r"\pi" in text or _TRIGONOMETRIC.search(text) for text in (gold_value, value)
    ):
        gold_value, value = without_degrees(gold_value), without_degrees(value)
    return same_value(gold_value, value)


def _is_ordered_product(text: str) -> bool:
    r"""Return True if the order of a formula's letters counts: an angle, a ranking such as BCA, or a matrix product.

    The grammar reads such letters as factors, which commute.
    """
    if _ORDERED_LETTERS.fullmatch(text) is not None:
        return True
    if _INVERSE_MATRIX.search(text) is None:
        return False
    names = symbols(text)
    return len(names) > 1 and all(name[0].isupper() for name in names)


def _angle_letters(text: str) -> str | None:
    r"""Return the letters of `\angle ABC`, the same for `\angle CBA`; None for other texts."""
    match = _ANGLE.fullmatch(text)
    return None if match is None else min(match[1], match[1][::-1])


def _same_cases(gold: str, answer: str) -> bool:
    """Compare the cases of a piecewise formula, which may stand in any order."""
    gold_cases, cases = _cases(gold), _cases(answer)
    return (
        bool(gold_cases)
        and len(gold_cases) == len(cases)
        and _match_one_to_one(gold_cases, cases, lambda one, other: all(map(_same_text, one, other)))
    )


def _cases(text: str) -> list[tuple[str, str]]:
    """Return the values of a piecewise formula with their conditions; an empty list if a row has another form."""
    body = text.removeprefix(_CASES).removesuffix(r"\end{cases}")
    # A comma may stand for the alignment mark: `x, x>0`.
    rows = [row.split("&") if "&" in row else row.rsplit(",", 1) for row in body.split(r"\\") if row.strip()]
    if r"\begin" in body or any(len(row) != 2 for row in rows):
        return []
    return [(value.strip(), condition.strip()) for value, condition in rows]


def _with_bound_variable_of(gold: str, answer: str) -> str:
    r"""Rename the bound variable of an answer's only sum or product, `\sum_{j=1}^n`, to the solution's."""
    expected, stated = _BOUND.findall(gold), _BOUND.findall(answer)
    if len(expected) != 1 or len(stated) != 1 or expected == stated or expected[0] in symbols(answer):
        return answer
    return rename_symbols(answer, {stated[0]: expected[0]})


def _same_digits(gold: str, answer: str) -> bool:
    """Compare numbers in a base, which the answer may omit: for `101_2`, `101` is right and `5` is wrong."""
    expected, stated = _DIGITS_IN_BASE.fullmatch(gold), _DIGITS_IN_BASE.fullmatch(answer)
    if expected is None:
        return stated is not None and stated[2] == "10" and stated[1].isdigit() and _same_formula(gold, stated[1])
    if stated is None:
        return answer.removeprefix(r"\text{").removesuffix("}") == expected[1]
    return expected.groups() == stated.groups()


def _same_up_to_constants(gold: str, answer: str) -> bool:
    """Return True if two formulas differ only in the names of their free constants: `C_1e^x` and `Ae^x`."""
    gold_names, names = symbols(gold), symbols(answer)
    if _EVENT.search(gold) or _EVENT.search(answer):
        return False
    gold_constants = [name for name in sorted(gold_names) if _CONSTANT.fullmatch(name)]
    constants = [name for name in sorted(names) if _CONSTANT.fullmatch(name)]
    if not 0 < len(gold_constants) == len(constants) <= _MAX_CONSTANTS:
        return False
    variables = gold_names.difference(gold_constants) - {"e", "i"}
    if not variables or variables != names.difference(constants) - {"e", "i"}:
        return False
    if not all(_is_additive(gold, name) for name in gold_constants):
        # c/a, mc^2 and (ab sin C)/2 have quantities with these names, not free constants.
        if any(name == "c" for name in gold_constants) or not variables.isdisjoint("abcmABC"):
            return False
        are_swapped = gold_constants == constants == ["A", "B"] and len(variables) == 1
        if not are_swapped and not any(map(_INTEGRATION_CONSTANT.fullmatch, (*gold_constants, *constants))):
            return False
    return any(
        _same_formula(gold, rename_symbols(answer, dict(zip(order, gold_constants, strict=True))))
        for order in permutations(constants)
        if list(order) != gold_constants
    )


def _is_additive(text: str, name: str) -> bool:
    """Return True if a formula adds a constant at its start or end: `x^2+C`."""
    plain = strip_spacing(text)
    return plain.endswith(f"+{name}") or plain.startswith(f"{name}+")


def _is_constant(text: str) -> bool:
    from grpo_ray.rewards.math.values import is_constant

    return is_constant(text)


# --- lists, tuples and sets


def _same_collection(gold: Collection, answer: Collection) -> bool:
    are_alternatives = {gold.joiner, answer.joiner} == {"and", "or"}
    if are_alternatives and any(isinstance(item, Relation) for item in gold.items) and real_set(gold) is not None:
        return False
    gold, answer = _spelled_out(gold), _spelled_out(answer)
    if gold.opening == "{":
        return answer.opening in ("", "{") and _same_elements(gold.items, answer.items)
    if not gold.opening:
        # The answer to a bare list may be bare, a tuple or a set. A value that is listed twice counts twice.
        if (answer.opening, answer.closing) == ("(", ")"):
            # A tuple is ordered, so its values must be in the list's order.
            return len(gold.items) == len(answer.items) and all(map(_same_structure, gold.items, answer.items))
        if (answer.opening, answer.closing) not in (("", ""), ("{", "}")):
            return False
        if all(map(_is_tuple, (*gold.items, *answer.items))):
            # Each tuple is one solution; a repeated solution counts once.
            return _same_elements(gold.items, answer.items)
        return _match_one_to_one(gold.items, answer.items, _same_structure)
    if len(gold.items) != len(answer.items):
        return False
    as_vector = len(gold.items) > 2 and (answer.opening, answer.closing) in (("(", ")"), ("[", "]"))
    if answer.opening and not as_vector and (answer.opening, answer.closing) != (gold.opening, gold.closing):
        return False
    if not answer.opening and (gold.opening, gold.closing) != ("(", ")"):
        return False
    if _signs(gold) != _signs(answer):
        return False
    return all(_same_structure(one, other) for one, other in zip(gold.items, answer.items, strict=True))


def _is_tuple(structure: Structure) -> bool:
    return isinstance(structure, Collection) and (structure.opening, structure.closing) == ("(", ")")


def _signs(collection: Collection) -> list[str]:
    r"""Return the double signs of a tuple in order: `(\pm1,\mp2)` pairs them differently from `(\pm1,\pm2)`."""
    return [sign for item in collection.items if isinstance(item, Leaf) for sign in _SIGNS.findall(item.text)]


def _same_elements(gold: Sequence[Structure], answer: Sequence[Structure]) -> bool:
    """Compare the elements of two sets, in which a value listed twice is one element."""
    return all(any(_same_structure(one, other) for one in gold) for other in answer) and all(
        any(_same_structure(one, other) for other in answer) for one in gold
    )


def _spelled_out(collection: Collection) -> Collection:
    r"""Replace `\pm 1` by its two values and `1,2,\dots,10` by all values, in a list or a set."""
    if collection.opening not in ("", "{"):
        return collection
    items: list[Structure] = []
    for item in collection.items:
        expanded = _expanded(item) if isinstance(item, Leaf) else item
        items.extend(expanded.items if isinstance(expanded, Collection) and isinstance(item, Leaf) else (item,))
    return replace(collection, items=_without_dots(items))


def _without_dots(items: list[Structure]) -> tuple[Structure, ...]:
    r"""Spell out an arithmetic progression with `\dots`; without a numeric end, keep two terms and the dots."""
    dots = [index for index, item in enumerate(items) if isinstance(item, Leaf) and item.text.strip() == r"\dots"]
    if len(dots) != 1 or not 1 <= dots[0] <= len(items) - 1 or len(items) - dots[0] > 2:
        return tuple(items)
    known = [rational(item.text) if isinstance(item, Leaf) else None for item in items[: dots[0]]]
    terms = [term for term in known if term is not None]
    if len(terms) < len(known):
        return tuple(items)
    step = terms[1] - terms[0] if len(terms) > 1 else 1
    if step == 0 or any(term != terms[0] + index * step for index, term in enumerate(terms)):
        return tuple(items)
    last = items[-1]
    end = rational(last.text) if isinstance(last, Leaf) and len(items) > dots[0] + 1 else None
    if end is None:
        if len(terms) == 1 and len(items) == dots[0] + 1:
            return tuple(items)
        return (Leaf(str(terms[0])), Leaf(str(terms[0] + step)), *items[dots[0] :])
    count = (end - terms[0]) / step
    if count.denominator != 1 or not len(terms) - 1 <= count <= _MAX_PROGRESSION:
        return tuple(items)
    return tuple(Leaf(str(terms[0] + index * step)) for index in range(int(count) + 1))


def _same_matrix(gold: Structure, answer: Structure) -> bool:
    """Compare a matrix or vector; a row or a column may be written as a tuple."""
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        # A row and a column with the same entries differ; only a tuple has no orientation.
        return _shape(gold) == _shape(answer) and _same_entries(gold, answer)
    tuples = [side for side in (gold, answer) if isinstance(side, Collection)]
    matrix = gold if isinstance(gold, Matrix) else answer
    if not tuples or not isinstance(matrix, Matrix) or 1 not in _shape(matrix):
        return False
    return (tuples[0].opening, tuples[0].closing) in (("(", ")"), ("[", "]")) and _same_entries(gold, answer)


def _shape(matrix: Matrix) -> tuple[int, int]:
    return len(matrix.rows), len(matrix.rows[0])


def _same_entries(gold: Structure, answer: Structure) -> bool:
    expected, stated = _entries(gold), _entries(answer)
    return len(expected) == len(stated) and all(
        _same_structure(one, other) for one, other in zip(expected, stated, strict=True)
    )


def _entries(structure: Structure) -> tuple[Structure, ...]:
    if isinstance(structure, Matrix):
        return tuple(entry for row in structure.rows for entry in row)
    return structure.items if isinstance(structure, Collection) else ()


def _same_ratio(gold: Ratio, answer: Structure) -> bool:
    """Compare the quotients of a ratio's terms; a ratio of two terms may be answered by their quotient."""
    expected = _quotients(gold)
    if isinstance(answer, Leaf) and len(expected) == 1:
        return _same_formula(expected[0], answer.text)
    if not isinstance(answer, Ratio) or not expected:
        return False
    stated = _quotients(answer)
    return len(expected) == len(stated) and all(
        _same_formula(one, other) for one, other in zip(expected, stated, strict=True)
    )


def _quotients(ratio: Ratio) -> tuple[str, ...]:
    first, *others = (term.text if isinstance(term, Leaf) else "" for term in ratio.terms)
    return tuple(rf"\frac{{{first}}}{{{other}}}" for other in others) if first and all(others) else ()


def _same_set_operation(gold: Structure, answer: Structure) -> bool:
    r"""Compare sets that are not sets of reals: `A\cup B` is `B\cup A`; `\{x:P(x)\}` needs the same variable."""
    if isinstance(gold, Union) and isinstance(answer, Union):
        return _match_one_to_one(gold.items, answer.items, _same_structure)
    if isinstance(gold, SetOperation) and isinstance(answer, SetOperation) and gold.operator == answer.operator:
        if gold.operator == r"\setminus":
            return len(gold.items) == len(answer.items) and all(map(_same_structure, gold.items, answer.items))
        return _match_one_to_one(gold.items, answer.items, _same_structure)
    if isinstance(gold, SetBuilder) and isinstance(answer, SetBuilder):
        return gold.variable == answer.variable and _same_structure(gold.condition, answer.condition)
    return False


def _same_real_set(gold: Structure, answer: Structure) -> bool:
    """Return True if both are sets of reals, of the same intervals in any order, for the same variable."""
    gold_set, answer_set = real_set(gold), real_set(answer)
    if gold_set is None or answer_set is None or len(gold_set.intervals) != len(answer_set.intervals):
        return False
    if (open_gold := with_open_infinity(gold_set)) != gold_set:
        # Only where the solution itself includes infinity may the answer do so.
        gold_set, answer_set = open_gold, with_open_infinity(answer_set)
    if None not in (gold_set.variable, answer_set.variable) and gold_set.variable != answer_set.variable:
        return False
    return _match_one_to_one(gold_set.intervals, answer_set.intervals, _same_interval)


def _same_interval(gold: Interval, answer: Interval) -> bool:
    return (
        (gold.low_open, gold.high_open) == (answer.low_open, answer.high_open)
        and _same_formula(gold.low, answer.low)
        and _same_formula(gold.high, answer.high)
    )


def _match_one_to_one(gold: Iterable[T], answer: Iterable[T], same: Callable[[T, T], bool]) -> bool:
    """Return True if each item of the answer matches a different gold item and no gold item is left."""
    unmatched = list(gold)
    for item in answer:
        match = next((index for index, candidate in enumerate(unmatched) if same(candidate, item)), None)
        if match is None:
            return False
        del unmatched[match]
    return not unmatched


# --- relations


def _matches_relation(gold: Relation, answer: Structure) -> bool:
    """Compare an answer with a solution that is an equation or inequality."""
    if not INEQUALITIES.isdisjoint(gold.operators):
        if _same_real_set(gold, answer) or _same_real_set(_with_divided_bound(gold), _with_divided_bound(answer)):
            return True
        return isinstance(answer, Relation) and real_set(gold) is None and _same_relation(gold, answer)
    if gold.operators == ("=",) and _is_tuple_of_names(gold.operands[0]):
        # (a,b)=(1,2),(2,1) may be answered without the names.
        is_named = (
            isinstance(answer, Relation) and answer.operators == ("=",) and answer.operands[0] == gold.operands[0]
        )
        stated = answer.operands[1] if isinstance(answer, Relation) and is_named else answer
        return not isinstance(stated, Relation) and _same_alternatives(gold.operands[1], stated)
    if gold.operators == ("=",) and (label := _quotient_label(gold.operands[0])) is not None:
        if not isinstance(answer, Relation):
            return _same_alternatives(gold.operands[1], answer)
        if answer.operators == ("=",) and _quotient_label(answer.operands[0]) is not None:
            is_named_alike = label == _quotient_label(answer.operands[0])
            return is_named_alike and _same_alternatives(gold.operands[1], answer.operands[1])
    statement = _statement(gold)
    if statement is None or statement.name is None or isinstance(statement.value, Relation):
        return isinstance(answer, Relation) and _same_relation(gold, answer)
    name, value = statement.name, statement.value
    if not isinstance(answer, Relation):
        return _same_alternatives(value, answer)
    if not INEQUALITIES.isdisjoint(answer.operators):
        return _same_real_set(value, answer)
    given = _statement(answer)
    if given is not None:
        if _same_name(name, given.name) and _same_alternatives(value, given.value):
            return True
        renamed = _with_argument_of(name, given.name, given.value)
        if renamed is not None and _same_structure(value, renamed):
            return True
    # y=x+1 may be written x-y+1=0, but x=5 may not be written 2x=10, which is not solved.
    return isinstance(value, Leaf) and not _is_constant(value.text) and _same_relation(gold, answer)


def _quotient_label(structure: Structure) -> str | None:
    r"""Return the text of a quotient of two named lengths or areas, `\frac{NO}{BO}` or `S_1:S_2`; None for others.

    The names begin with capitals: `\frac{y}{x}=2` is an equation of two unknowns.
    """
    if isinstance(structure, Ratio):
        names = [strip_spacing(term.text) for term in structure.terms if is_name(term)]
        are_capital = len(names) == len(structure.terms) and all(name.lstrip("|")[:1].isupper() for name in names)
        return ":".join(names) if are_capital else None
    match = _QUOTIENT_OF_NAMES.fullmatch(structure.text) if isinstance(structure, Leaf) else None
    return None if match is None else f"{strip_spacing(match[1])}:{strip_spacing(match[2])}"


def _with_divided_bound(structure: Structure) -> Structure:
    r"""Return `4k>1` as `k>\frac14`, where the coefficient is the bound's denominator; others as they are.

    `2x>4` is not solved and stays.
    """
    if not isinstance(structure, Relation) or len(structure.operands) != 2:
        return structure
    left, right = structure.operands
    (operator,) = structure.operators
    if operator not in MIRRORED or not isinstance(left, Leaf) or not isinstance(right, Leaf):
        return structure
    product, bound = left.text, right.text
    if rational(product) is not None:
        product, operator, bound = bound, MIRRORED[operator], product
    term, number = _MONOMIAL.fullmatch(product), rational(bound)
    if term is None or number is None:
        return structure
    coefficient = int(term[1])
    if coefficient == 0 or (number / coefficient).denominator != abs(coefficient):
        return structure
    operator = MIRRORED[operator] if coefficient < 0 else operator
    return Relation((Leaf(term[2]), Leaf(fraction_text(number / coefficient))), (operator,))


@dataclass(frozen=True)
class Statement:
    """The value that an equation states."""

    name: str | None
    """Name of the quantity, None if the equation names none (`2+3=5`)."""
    value: Structure


def _statement(relation: Relation) -> Statement | None:
    r"""Return the value that an equation states, None if it states none.

    `x=5`, `f(2)=5`, `m+n=5`, `2+3=5`, `x=\frac{10}{2}=5` and `\int ... = 5` state 5. A number that differs from the
    value (`7=5`), an identity (`5=5`) and an unsolved equation (`2x=10`) state none.
    """
    if any(operator not in ("=", r"\in") for operator in relation.operators):
        return None
    operands = relation.operands
    last = operands[-1]
    if isinstance(last, Leaf) and NAME.fullmatch(last.text) and not is_name(operands[0]):
        operands = operands[::-1]
    *left_sides, value = operands
    if not all(_may_equal(side, value) for side in left_sides):
        return None
    first = left_sides[0]
    return Statement(strip_spacing(first.text) if is_name(first) else None, value)


def _may_equal(side: Structure, value: Structure) -> bool:
    """Return True if a side of an equation may stand before the value that it states."""
    if not isinstance(side, Leaf):
        # (x,y)=(1,2) names a tuple of symbols.
        return isinstance(side, Collection) and all(is_name(item) for item in side.items)
    if NAME.fullmatch(side.text) or has_unevaluated_operator(side.text, ""):
        return True
    from grpo_ray.rewards.math.values import free_names, parse_formula, same_value

    if _is_constant(side.text):
        # The side may be unevaluated arithmetic (2+3=5), so it is compared as if it were the solution.
        return (
            isinstance(value, Leaf)
            and strip_spacing(side.text) != strip_spacing(value.text)
            and same_value(side.text, value.text)
        )
    expression = parse_formula(side.text)
    # An expression of one unknown (2x, x^2) is an equation still to be solved; m+n is a named quantity.
    return expression is None or len(free_names(expression)) != 1 or side.text.startswith("|")


def _approximated_values(relation: Relation) -> tuple[Structure, ...]:
    r"""Return the exact and the rounded value of `x = 10\sqrt{3} \approx 17.3`.

    An empty tuple if the exact value does not round to the other: `100 \approx 101` would be two guesses.
    """
    *exact, rounded = relation.operands
    if relation.operators.index(r"\approx") != len(relation.operators) - 1 or not isinstance(rounded, Leaf):
        return ()
    head = exact[0] if len(exact) == 1 else Relation(tuple(exact), relation.operators[:-1])
    if is_name(head):
        return (Relation((head, rounded), ("=",)),)
    from grpo_ray.rewards.math.values import rounds_to

    last = exact[-1]
    if not isinstance(last, Leaf) or not rounds_to(last.text, rounded.text):
        return ()
    return (head, Relation((exact[0], rounded), ("=",)) if len(exact) > 1 else rounded)


def _with_argument_of(gold: str, answer: str | None, value: Structure) -> Structure | None:
    """Return the value of `f(n)` or `a_k` with its letter renamed to the solution's, as in `f(x)` or `a_n`.

    None if the names differ in another way, or if the letter stands for something else in the answer.
    """
    expected, stated = _INDEXED.fullmatch(gold), None if answer is None else _INDEXED.fullmatch(answer)
    if expected is None or stated is None or expected[1] != stated[1] or not isinstance(value, Leaf):
        return None
    letter, other = expected[2] or expected[3], stated[2] or stated[3]
    if not letter.islower() or not other.islower():
        return None  # P(A) and P(B) are two events.
    if letter == other or (expected[2] is None) != (stated[2] is None) or letter in symbols(value.text):
        return None
    return Leaf(rename_symbols(value.text, {other: letter}))


def _same_name(gold: str, answer: str | None) -> bool:
    """Return True if two names are equal, case included; `f(x)` may be called `f`."""
    gold, answer = _DERIVATIVE.sub(r"\1'", gold), answer and _DERIVATIVE.sub(r"\1'", answer)
    return answer is not None and (answer in (gold, gold.split("(")[0]) or gold == answer.split("(")[0])


def _same_relation(gold: Relation, answer: Relation) -> bool:
    """Return True if two relations of values are the same up to a factor and an exchange of sides.

    Two chains of equal values (`x=y=z`) are the same if their values agree in any order, or each of their equations.
    """
    if len(gold.operands) > 2:
        if INEQUALITIES.issuperset(gold.operators):
            mirrored = tuple(MIRRORED[operator] for operator in reversed(gold.operators))
            return any(
                answer.operators == operators and all(map(_same_structure, operands, answer.operands))
                for operators, operands in ((gold.operators, gold.operands), (mirrored, gold.operands[::-1]))
            )
        if set(gold.operators) != {"="} or gold.operators != answer.operators:
            return False
        if _match_one_to_one(gold.operands, answer.operands, _same_structure):
            return True
        return all(map(_same_relation, _links(gold), _links(answer)))
    gold_sides, answer_sides = _two_formulas(gold), _two_formulas(answer)
    if gold_sides is None or answer_sides is None:
        return False
    (gold_operator,), (operator,) = gold.operators, answer.operators
    if operator != gold_operator:
        if MIRRORED.get(operator) != gold_operator:
            return False
        answer_sides = answer_sides[::-1]
    from grpo_ray.rewards.math.values import proportional_relations

    return proportional_relations(gold_sides, answer_sides, directed=operator not in ("=", r"\ne"))


def _links(chain: Relation) -> list[Relation]:
    """Return the equations between neighbours of a chain."""
    return [Relation(pair, ("=",)) for pair in pairwise(chain.operands)]


def _two_formulas(relation: Relation) -> tuple[str, str] | None:
    """Return both sides of a relation of two values, None for any other."""
    if len(relation.operands) != 2:
        return None
    left, right = relation.operands
    return (left.text, right.text) if isinstance(left, Leaf) and isinstance(right, Leaf) else None
