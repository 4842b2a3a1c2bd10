"""Import statements of the package and of the tests, read from their source."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "grpo_ray"


@dataclass(frozen=True)
class Import:
    """Target of one import statement."""

    module: str
    """Importing module, dotted, without `grpo_ray.`; "" is the package itself."""
    target: str
    """Imported module, dotted and complete."""
    when: str
    """`import` (with the module), `call` (inside a function) or `typing` (never at run time)."""
    line: int

    @property
    def library(self) -> str:
        return self.target.partition(".")[0]

    @property
    def top(self) -> str:
        """Package of the importing module."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"grpo_ray.{self.module} imports {self.target} (line {self.line})"


def name_of(path: Path) -> str:
    """Return `data.files` for `grpo_ray/data/files.py`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(module: str, tree: ast.AST, when: str = "import") -> Iterator[Import]:
    """Yield every import of a module, those inside functions too."""
    for node in ast.iter_child_nodes(tree):
        inside = when
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = "call" if when == "import" else when
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inside = "typing"
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, inside, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"grpo_ray.{module}, line {node.lineno}: use absolute imports"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole.removeprefix("grpo_ray.") in MODULES and not defines(node.module, alias.name)
                yield Import(module, whole if is_module else node.module, inside, node.lineno)
        yield from imports_of(module, node, inside)


def defines(package: str, name: str) -> bool:
    """Return True if a package's `__init__` defines the name itself."""
    path = MODULES.get(package.removeprefix("grpo_ray").removeprefix("."))
    if path is None:
        return False
    own = {
        alias.asname or alias.name for n in ast.walk(parse(path)) if isinstance(n, ast.ImportFrom) for alias in n.names
    }
    return name in own


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def all_imports() -> list[Import]:
    """Return every import of the package."""
    return [each for module, path in MODULES.items() for each in imports_of(module, parse(path))]


@cache
def own_imports() -> list[Import]:
    """Return every import of one of the package's modules by another one."""
    return [each for each in all_imports() if each.library == "grpo_ray"]


def inner(target: str) -> str:
    """`grpo_ray.data.files` -> `data.files`."""
    return target.removeprefix("grpo_ray").removeprefix(".")
