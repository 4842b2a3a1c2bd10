"""Tests that text from datasets and configs is never treated as code, and that the package starts no shell."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import assume, example, given, settings

from grpo_ray.config.loader import load_config
from grpo_ray.driver import summary
from grpo_ray.errors import ConfigError
from grpo_ray.text.redaction import is_secret_name, redact_text

PACKAGE = Path(__file__).parents[2] / "grpo_ray"
HOSTILE = [
    "$(touch ran)", "`touch ran`", "; touch ran #", "'\"\\", "!!python/object/apply:os.system ['touch ran']", "{{7*7}}",
    "<script>alert(1)</script>", "a: [b", "- x\n- y", "%s%n", "\u202e\u0000", "yes", "~", "&a *a",
]  # fmt: skip
"""Texts with a special meaning for a shell, a YAML reader, a page or a template."""


@pytest.fixture(scope="module", autouse=True)
def fixed_versions() -> Iterator[None]:
    """Replace the versions of this machine: reading the commit starts a git process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "versions", lambda: {"torch": "2.0.0", "commit": "none"})
        yield


def with_hostile_examples(test: Callable[..., None]) -> Callable[..., None]:
    for text in HOSTILE:
        test = example(text=text)(test)
    return test


@with_hostile_examples
@given(text=st.text(max_size=30))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_describe_any_text_is_read_back_as_text(text: str) -> None:
    # Hypothesis also tries constants of the sources, such as names of secrets, whose values are hidden.
    assume(not is_secret_name(text) and redact_text(text) == text)
    config = load_config()
    config = replace(config, data=replace(config.data, system_prompt=text, columns={text: text}))
    written = yaml.safe_dump(summary.describe_run(config), sort_keys=False, allow_unicode=True)
    read = yaml.safe_load(written)["data"]
    assert (read["system_prompt"], read["columns"]) == (text, {text: text})
    assert load_config("config.yaml", text=written).data == config.data


@given(name=st.text("ab/\\.-_~$( \n\0é0", max_size=6))
@example(name="../up")
@example(name="a/b")
@example(name="$(x)")
@example(name="")
@example(name=".hidden")
@example(name="a b")
@example(name="x\n")
@settings(max_examples=60, deadline=None, derandomize=True)
def test_config_run_name_is_one_safe_folder_name_or_raises(name: str) -> None:
    safe = name.isascii() and name.replace("_", "").replace(".", "").replace("-", "").isalnum() and name[0].isalnum()
    text = yaml.safe_dump({"run": {"name": name}})
    if safe:
        assert Path("runs", load_config("run.yaml", text=text).run.name).parts == ("runs", name)
    else:
        with pytest.raises(ConfigError, match=r"run\.name"):
            load_config("run.yaml", text=text)


def called_name(function: ast.expr) -> str:
    """The dotted name of the function of a call, "" if it is not a plain name."""
    if isinstance(function, ast.Name):
        return function.id
    return f"{called_name(function.value)}.{function.attr}" if isinstance(function, ast.Attribute) else ""


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


RUNS_CODE = ("tools/python_child.py", "rewards/code/program_driver.py", "rewards/code/assertions.py")
"""Programs of processes of their own that run code: of the policy, confined, and the dataset's tests of it."""

READS_YAML = "config/yaml_documents.py"
"""The only module that parses YAML, with loaders of plain data."""

SAFETY = ("shell", "weights_only", "allow_pickle")
"""Keyword arguments that decide whether a call is safe."""


def test_package_has_no_shell_and_no_unpickling() -> None:
    found = []
    for path in sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / each for each in RUNS_CODE}):
        for node in calls(path):
            called = called_name(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg in SAFETY}
            unsafe = (
                called in ("os.system", "os.popen", "eval", "exec", "pickle.load", "pickle.loads")
                or keywords.get("shell") == "True"
                or (called == "torch.load" and keywords.get("weights_only") != "True")
                or (called == "np.load" and keywords.get("allow_pickle") != "False")
                or (called.startswith("yaml.") and "load" in called and path != PACKAGE / READS_YAML)
            )
            if unsafe:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not found
