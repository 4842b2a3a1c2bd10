"""Tests of the import of functions and classes that a config names."""

from pathlib import Path

import pytest

from grpo_ray.config import import_path
from grpo_ray.config.import_path import import_callable
from grpo_ray.errors import ConfigError


def import_error(path: str) -> str:
    """Return the message with which a path is refused."""
    with pytest.raises(ConfigError) as caught:
        import_callable(path, "grpo.advantages")
    return str(caught.value)


def test_function_or_class_is_imported() -> None:
    assert import_callable("pathlib:Path", "model") is Path
    assert import_callable("os.path:join", "model")("a", "b") == "a/b"


@pytest.mark.parametrize("path", ["join", "os.path:", ":join", ":", ""])
def test_path_of_another_form_is_refused(path: str) -> None:
    assert import_error(path) == f"grpo.advantages: {path!r} must have the form package.module:name"


@pytest.mark.parametrize("file", ["rewards/short.py", "./rewards/short.py", "rewards/short", "rewards.short.py"])
def test_file_in_place_of_a_module_is_refused(file: str) -> None:
    message = f"grpo.advantages: '{file}:f' must name a module, not a file: write rewards.short:f"
    assert import_error(f"{file}:f") == message


def test_missing_module_is_named() -> None:
    assert import_error("nowhere.at_all:f") == (
        "grpo.advantages: 'nowhere.at_all:f' cannot be imported (No module named 'nowhere'); is its folder on "
        "PYTHONPATH?"
    )


def test_module_whose_import_fails_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("from os import no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "cannot be imported (cannot import name 'no_such_name' from 'os'" in import_error("broken_module:f")


def test_library_that_a_module_imports_is_not_looked_for_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_with_library.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_error("module_with_library:f") == (
        "grpo.advantages: 'module_with_library:f' cannot be imported (No module named 'no_such_library'); "
        "module_with_library imports it: is it installed?"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax ({file}, line 1)"),
        ("x = 1\ny = z\n", "NameError: name 'z' is not defined ({file}, line 2)"),
        ("import sys\n\nsys.exit('no\\nGPU')\n", "SystemExit: no GPU ({file}, line 3)"),
        ("import os\nos.environ['NO_KEY']\n", "KeyError: 'NO_KEY' ({file}, line 2)"),
        (
            "import json\njson.loads('')\n",
            "JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({file}, line 2)",
        ),
        (
            "from packaging.version import Version\n\nVersion('new')\n",
            "InvalidVersion: Invalid version: 'new' ({file}, line 3)",
        ),
    ],
    ids=["syntax", "name", "exit", "frozen", "stdlib", "package"],
)
def test_module_whose_code_fails_is_one_line_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, text: str, message: str
) -> None:
    name = f"failing_{request.node.callspec.id}"
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert import_error(f"{name}:f") == (f"grpo.advantages: '{name}:f' cannot be imported: {message.format(file=file)}")


def test_code_of_an_installed_package_is_named_with_the_place_that_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "installed_package.py"
    file.write_text("def fail():\n    raise ValueError('no')\n\nfail()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(import_path, "LIBRARIES", (*import_path.LIBRARIES, str(tmp_path)))
    assert import_error("installed_package:f").endswith(f"ValueError: no ({file}, line 2)")


@pytest.mark.parametrize(
    ("name", "meant"), [("jion", "; did you mean join?"), ("sep", ""), ("zzzzzz", "")], ids=["typo", "text", "unknown"]
)
def test_missing_name_suggests_the_nearest(name: str, meant: str) -> None:
    assert import_error(f"posixpath:{name}").startswith(f"grpo.advantages: posixpath has no {name!r}{meant}")
