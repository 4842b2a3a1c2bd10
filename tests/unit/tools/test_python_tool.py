"""Tests of the tool that runs Python code; each call starts a real interpreter."""

import os
import random
import time
from pathlib import Path

import psutil
import pytest
from transformers.utils import get_json_schema

from grpo_ray.tools.python_child import compile_code
from grpo_ray.tools.python_tool import END_BYTES, BoundedOutput, python
from grpo_ray.tools.sandbox.protocol import cut_middle


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_has_a_schema() -> None:
    schema = get_json_schema(python)["function"]
    assert schema["name"] == "python" and schema["parameters"]["required"] == ["code"]


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2\n"),
        ("print('a')\nx = 3\nx * 2", "a\n6\n"),
        ("'text'", "'text'\n"),
        ("x = 3", "[no output]"),
        ("", "[no output]"),
        ("None", "[no output]"),
        ("print('é' + chr(0x1F600))", "é\U0001f600\n"),
        ("if True:\n    5", "[no output]"),  # the last statement is no expression
        ("raise SystemExit", "[no output]"),
        ("import sys; sys.exit('bye')", "bye\n[exit code 1]"),
        ("import sys; sys.stdout.write('a') and sys.exit(3)", "a\n[exit code 3]"),
        ("import os; os.kill(os.getpid(), 11)", "[ended by SIGSEGV]"),
        ("import os; os.kill(os.getpid(), 40)", "[ended by signal 40]"),  # real-time signals have no name
        ("__name__", "'__main__'\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)\n"),
        ("import sys\nfor i in '12':\n    print(i)\n    print(i * 2, file=sys.stderr)", "1\n11\n2\n22\n"),
    ],
)
def test_python_returns_output_and_last_value(code: str, output: str) -> None:
    assert python(code) == output


def error_of(code: str) -> str:
    """Return the class of the error with which Python compiles a program; one differs between patch releases."""
    try:
        compile(code, "program", "exec")
    except (SyntaxError, ValueError) as error:
        return type(error).__name__
    raise AssertionError("the program compiles")


@pytest.mark.parametrize(
    ("code", "last_line"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("a\0b", error_of("a\0b") + ": source code string cannot contain null bytes"),
        ("def f():\n    return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("input()", "EOFError: EOF when reading a line"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("int('a')", "ValueError: invalid literal for int() with base 10: 'a'"),
    ],
)
def test_python_error_is_short_and_names_no_own_file(code: str, last_line: str) -> None:
    lines = python(code).splitlines()
    assert lines[-1].startswith(last_line) and len(lines) < 20
    assert not any("python_child" in line for line in lines)


def test_python_error_shows_the_line_after_the_output() -> None:
    lines = python("print('before')\ndef half(x):\n    return x / 0\nhalf(4)").splitlines()
    assert lines[:2] == ["before", "Traceback (most recent call last):"]
    assert '  File "<code>", line 4, in <module>' in lines and "    return x / 0" in lines


@pytest.mark.long
def test_python_long_output_is_bounded() -> None:
    output = python("for i in range(300_000):\n    print(i)")  # 1,988,890 bytes
    assert output.startswith("0\n1\n2\n") and output.endswith("299998\n299999\n")
    assert f"[... {1_988_890 - 2 * END_BYTES} bytes omitted ...]" in output
    assert cut_middle(output) == output


def test_python_keeps_files_and_no_variables(folder: Path) -> None:
    assert python("x = 1\nopen('note.txt', 'w').write('kept')") == "4\n"
    assert (folder / "note.txt").read_text() == "kept"
    assert python("open('note.txt').read()") == "'kept'\n"
    assert python("x").splitlines()[-1] == "NameError: name 'x' is not defined"


def test_python_imports_packages_and_no_files_of_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "random.py").write_text("raise ValueError('imported')")
    (folder / "answers.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    assert python("import random, math_verify\nrandom.random() < 1") == "True\n"
    assert python("import answers").splitlines()[-1] == "ModuleNotFoundError: No module named 'answers'"


OPEN_DESCRIPTORS = """
import os
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
print(list(filter(is_open, range(1000))))
"""


def test_python_sees_no_variables_and_no_descriptors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert python("import os\n'HF_TOKEN' in os.environ, os.environ['HOME'] == os.getcwd()") == "(False, True)\n"
    with open(folder / "held.txt", "w") as held:
        os.set_inheritable(held.fileno(), True)
        assert python(OPEN_DESCRIPTORS) == "[0, 1, 2]\n"


def test_python_opens_a_bounded_number_of_files() -> None:
    assert "Too many open files" in python("import os\nkept = [open(os.devnull) for _ in range(1000)]")


def test_python_random_numbers_follow_the_seed() -> None:
    drawn = []
    for seed in (1, 1, 2):
        random.seed(seed)
        drawn.append([python("import random\nrandom.random()") for _ in range(2)])
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0][0] != drawn[0][1]


def test_python_set_order_is_the_same_in_every_call() -> None:
    assert python("{'a', 'b', 'c', 'd', 'e'}") == python("{'a', 'b', 'c', 'd', 'e'}")


def test_python_ends_processes_that_the_code_left() -> None:
    output = python("import os, time\npid = os.fork()\nif pid == 0:\n    time.sleep(1000)\nprint(pid)")
    for _ in range(600):
        if not is_running(int(output)):
            return
        time.sleep(0.1)
    raise AssertionError("the process still runs")


def is_running(pid: int) -> bool:
    """Return False for a process that has ended, whether or not it has been reaped."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_bounded_output_keeps_both_ends() -> None:
    output = BoundedOutput()
    for byte in (b"a", b"b", b"c"):
        output.append(byte * END_BYTES)
    assert output.value() == b"a" * END_BYTES + f" [... {END_BYTES} bytes omitted ...] ".encode() + b"c" * END_BYTES


def test_bounded_output_below_the_bound_is_whole() -> None:
    output = BoundedOutput()
    output.append(b"a" * END_BYTES)
    output.append(b"b")
    assert output.value() == b"a" * END_BYTES + b"b"


def test_compile_code_splits_off_a_last_expression() -> None:
    assert compile_code("x = 1")[1] is None and compile_code("x = 1\nx")[1] is not None
