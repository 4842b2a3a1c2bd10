"""Digests of a library's functions, to detect changes in what our code extends."""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def digest(function: Callable[..., Any]) -> str:
    """Return a digest of a function's code without docstring, comments and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]
