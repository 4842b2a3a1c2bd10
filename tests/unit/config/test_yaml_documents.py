"""Tests of YAML as it is read and written here."""

from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from config_cases import examples
from hypothesis import example, given

from grpo_ray.config.loader import load_config
from grpo_ray.config.yaml_documents import MAX_BYTES, RepeatedKeyError, YamlError, dump_yaml, parse_yaml

# PyYAML writes the line separators of Unicode (categories Cc, Zl and Zp) without a quote that keeps them.
TEXTS = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


@given(value=VALUES)
@example(value={"name": "1e5", "number": 1e5, "small": 1e-7, "text": "-1.e+3"})
@examples(300)
def test_dumped_value_is_parsed_as_an_equal_one(value: Any) -> None:
    text = dump_yaml(value)
    for is_trusted in (True, False):
        parsed = parse_yaml(text, is_trusted=is_trusted)
        assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize("name", ["1e5", "1.e5"])
def test_config_with_text_like_a_number_loads_equal(name: str) -> None:
    config = load_config(None, [f"run.name={name}"])
    assert load_config("config.yaml", text=dump_yaml(config.to_dict())).run.name == name


def test_dump_keeps_order_and_letters() -> None:
    assert dump_yaml({"b": "où", "a": [1e-6]}) == "b: où\na:\n- 1.0e-06\n"


def test_parse_alias_is_for_trusted_documents_only() -> None:
    text = "a: &a [x]\nb: *a\n"
    assert parse_yaml(text) == {"a": ["x"], "b": ["x"]}
    with pytest.raises(YamlError, match=r"^it has an alias$"):
        parse_yaml(text, is_trusted=False)


def test_parse_size_is_limited_for_strangers_only() -> None:
    text = "x" * (MAX_BYTES + 1)
    assert parse_yaml(text) == text and parse_yaml(text[1:], is_trusted=False) == text[1:]
    with pytest.raises(YamlError, match=rf"^it has {MAX_BYTES + 1} bytes; the limit is {MAX_BYTES}$"):
        parse_yaml(text, is_trusted=False)


@pytest.mark.long
@pytest.mark.parametrize("is_trusted", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: b: c",
        "day: 2020-13-45",
        "a: !!bool maybe",
        "a: !!int ''",
        "a: !!timestamp soon",
        "a: !!python/name:os.system {}",
        "? [a]\n: b",
        "a: " + "[" * 5_000,
        b"a: \xff",
        "a: " + "9" * 5_000,
        "a: !!set [1]",
        "a: 1" + ":00" * 200 + ".0",
    ],
)
def test_parse_other_text_raises_one_line(text: str | bytes, is_trusted: bool) -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text, is_trusted=is_trusted)
    assert str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_parse_repeated_key_names_both_lines(is_trusted: bool) -> None:
    with pytest.raises(RepeatedKeyError, match="repeats the key 'a' of line 1") as caught:
        parse_yaml("a: 1\nb: 2\na: 3\n", is_trusted=is_trusted)
    assert caught.value.line == 3


def test_parse_leaves_the_yaml_library_unchanged() -> None:
    assert parse_yaml("1e-6") == 1e-6
    assert yaml.safe_load("1e-6") == "1e-6" and yaml.safe_dump("1e-6") == "1e-6\n...\n"
