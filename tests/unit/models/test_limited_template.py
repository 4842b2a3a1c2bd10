"""Tests that a limited chat template gives the tokens of transformers, and ends at its limits."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from grpo_ray.errors import ConfigError
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.models.limited_template import LimitedTemplate
from grpo_ray.models.tokenizer import load_tokenizer, overlong_lengths, tokenize_prompts

PROMPTS = [
    [{"role": "user", "content": "1 + 1"}],
    [{"role": "system", "content": "x"}, {"role": "user", "content": "2 + 2\n"}],
]


@pytest.fixture(scope="module")
def limited() -> Iterator[Any]:
    tokenizer = load_tokenizer(str(embedded_policy("tiny-tools")), limits_template=True)
    yield tokenizer
    tokenizer.apply_chat_template.close()


@pytest.mark.long
def test_limited_template_gives_the_same_tokens(limited: Any) -> None:
    plain = load_tokenizer(str(embedded_policy("tiny-tools")))
    many = PROMPTS * 200  # more than one request
    for arguments in ({}, {"enable_thinking": False}):
        assert tokenize_prompts(limited, many, arguments) == tokenize_prompts(plain, many, arguments)
    assert overlong_lengths(limited, PROMPTS, 3, {}) == overlong_lengths(plain, PROMPTS, 3, {})
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    options: dict[str, Any] = {"tools": [tool], "add_generation_prompt": True, "return_dict": False}
    copied = copy.deepcopy(limited)
    ids = [each.apply_chat_template(PROMPTS[0], **options) for each in (plain, limited, copied)]
    assert ids[0] == ids[1] == ids[2] and isinstance(copied.apply_chat_template, LimitedTemplate)


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 10**10 }}", "takes more than 1024 MiB of memory"),
        ("{{ 'a' * 10**7 }}", "renders too long a text"),
        ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "memory"),
        ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{% nothing", "TemplateSyntaxError"),
        ("{{ messages[7].x.y }}", "UndefinedError"),
        ("{{ raise_exception('no') }}", "fails: TemplateError: no"),
    ],
)
def test_limited_template_that_fails_is_one_line(limited: Any, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        limited.apply_chat_template(PROMPTS[0], chat_template=template)
    assert isinstance(caught.value, TemplateError) and len(str(caught.value).splitlines()) == 1
    assert limited.apply_chat_template(PROMPTS[0], chat_template="1", tokenize=False) == "1"  # the next one works


def test_limited_template_with_large_libraries_renders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a machine with many processors, the libraries themselves have more memory than the limit.
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, mmap\nbuiltins.reserved = mmap.mmap(-1, 3 << 29, flags=mmap.MAP_PRIVATE)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = load_tokenizer(str(embedded_policy("tiny-tools")), limits_template=True)
    template: Any = tokenizer.apply_chat_template
    try:
        text = template(PROMPTS[0], chat_template="{{ ('a' * 10**8) | length }}", tokenize=False)
        assert text == "100000000"
        with pytest.raises(ConfigError, match="takes more than 1024 MiB of memory"):
            template(PROMPTS[0], chat_template="{{ 'a' * 10**10 }}")
    finally:
        template.close()


def test_limited_template_has_one_thread_in_libraries(limited: Any) -> None:
    template = limited.apply_chat_template
    template(PROMPTS[0])
    with open(f"/proc/{template._client.pid}/environ", "rb") as variables:
        names = variables.read().split(b"\0")
    assert {b"OMP_NUM_THREADS=1", b"OPENBLAS_NUM_THREADS=1", b"MKL_NUM_THREADS=1"} <= set(names)


def test_limited_template_sees_no_secret(limited: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "unguessable")
    template = LimitedTemplate(limited, "policy")
    try:
        template(PROMPTS[0], tokenize=False)
        with open(f"/proc/{template._client.pid}/environ", "rb") as variables:
            assert b"unguessable" not in variables.read()
    finally:
        template.close()
