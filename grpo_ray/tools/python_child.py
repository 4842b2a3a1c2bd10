"""Script that runs Python code from standard input and shows its last value, as a REPL does: `python_child.py SEED`.

It is started by `grpo_ray.tools.python_tool` and imports nothing of grpo_ray: the code gets an interpreter of its own.
"""

import ast
import linecache
import os
import random
import sys
import traceback
from types import CodeType, ModuleType

FILENAME = "<code>"
"""Name of the code in tracebacks."""
TRACEBACK_FRAMES = 5
"""Innermost frames of a traceback that are shown."""


def compile_code(source: str) -> tuple[CodeType, CodeType | None]:
    """Compile code in two parts: its statements, and a last expression, whose value is printed.

    Raises:
        SyntaxError: the code is not Python; ValueError: it has a null byte.
    """
    tree = ast.parse(source, FILENAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    statements = compile(tree, FILENAME, "exec", dont_inherit=True)
    if last is None:
        return statements, None
    return statements, compile(ast.Interactive([last]), FILENAME, "single", dont_inherit=True)


def error_text(error: BaseException) -> str:
    """Return the innermost frames of a traceback, without those of this script, and its last line."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    if isinstance(error, SyntaxError | ValueError) and not any(
        frame.f_code.co_filename == FILENAME for frame, _ in traceback.walk_tb(frames)
    ):
        frames = None  # raised while compiling: only frames of the compiler
    text = traceback.TracebackException(type(error), error, frames, limit=-TRACEBACK_FRAMES).format()
    return "".join(text)


def run(source: str) -> None:
    """Run code as the module `__main__`, and print the value of its last expression, or its error."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    linecache.cache[FILENAME] = (len(source), None, source.splitlines(keepends=True), FILENAME)
    try:
        statements, last = compile_code(source)
        exec(statements, module.__dict__)
        if last is not None:
            exec(last, module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # the code may raise anything; the policy reads it
        sys.stdout.flush()
        sys.stderr.write(error_text(error))


def main() -> None:
    source = sys.stdin.buffer.read().decode("utf-8", "replace")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    random.seed(int(sys.argv[1]))
    sys.argv = [""]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # keeps the order with standard error
    run(source)


if __name__ == "__main__":
    main()
