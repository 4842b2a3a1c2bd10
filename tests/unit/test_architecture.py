"""Tests of the import structure: which module may import which, and where heavy libraries are imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "grpo_ray"

LAYERS = [
    {"errors", "warm_client", "warm_start"},  # the last two are scripts, run where the package is not imported
    {"sections"},
    {"board", "config", "estimate", "failures", "ledger", "patience", "phases", "price", "problem"},
    {"warm_client", "warm_start"},  # import nothing of the package
    {"storage"},
    {"fence"},
    {"adapter", "batches", "checkpoint", "rollouts", "rowfiles", "sampling", "settings"},
    {"data"},
    {
        "arguments",
        "chaos",
        "course",
        "elastic",
        "engine",
        "memory",
        "monitor",
        "nodes",
        "rewards",
        "stop",
        "thrift",
        "tiny",
    },
    {"scores", "topup"},
    {"before", "learner", "report"},
    {"ahead"},
    {"deal", "worker"},
    {"check", "evaluate", "export", "preflight", "progress", "runpage", "summary"},  # the driver's own
    {"launch"},
    {"cli"},
]
"""Lowest first. A module imports from lower layers only; inside a package (data, rewards) any import is allowed."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

AT_IMPORT = {
    "vllm": {"engine"},
    "trl": {"engine", "learner", "arguments", "thrift"},
    "ray": {
        "check",
        "checkpoint",
        "cli",
        "course",
        "deal",
        "elastic",
        "evaluate",
        "export",
        "launch",
        "monitor",
        "nodes",
        "preflight",
        "progress",
        "report",
        "runpage",
        "stop",
        "worker",
    },
}
"""Library -> the modules that may import it when they are imported."""

ANYWHERE = {
    "vllm": {"engine", "evaluate", "sampling"},
    "trl": {"engine", "learner", "arguments", "rewards", "thrift"},
    "ray": AT_IMPORT["ray"] | {"data"},
}
"""Library -> the modules that may import it at all, inside functions too."""


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
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"grpo_ray.{self.module} imports {self.target} (line {self.line})"


def name_of(path: Path) -> str:
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
            assert node.level == 0, f"grpo_ray.{module}, line {node.lineno}: use absolute imports"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole.removeprefix("grpo_ray.") in MODULES and not defines(node.module, alias.name)
                yield Import(module, whole if is_module else node.module, inside, node.lineno)
        yield from imports_of(module, node, inside)


def defines(package: str, name: str) -> bool:
    """Whether a package's `__init__` defines the name itself (`data.arithmetic` is a function)."""
    path = MODULES.get(package.removeprefix("grpo_ray").removeprefix("."))
    if path is None:
        return False
    own = {
        alias.asname or alias.name for n in ast.walk(parse(path)) if isinstance(n, ast.ImportFrom) for alias in n.names
    }
    return name in own


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


IMPORTS = [each for module, path in MODULES.items() for each in imports_of(module, parse(path))]
OURS = [each for each in IMPORTS if each.library == "grpo_ray"]


def inner(target: str) -> str:
    """`grpo_ray.data.files` -> `data.files`."""
    return target.removeprefix("grpo_ray").removeprefix(".")


def test_layers_every_module_has_one():
    tops = {module.partition(".")[0] for module in MODULES} - {""}
    assert tops <= set(LEVEL), "add the new module to LAYERS, and to the package tree of the README"


def test_imports_of_package_name_existing_modules():
    assert [str(each) for each in OURS if inner(each.target) not in MODULES] == []


def test_imports_go_to_lower_layers_only():
    upward = [
        str(each)
        for each in OURS
        if (target := inner(each.target).partition(".")[0]) and target != each.top and LEVEL[target] >= LEVEL[each.top]
    ]
    assert upward == []


def test_imports_of_driver_come_from_driver_only():
    driver = {"launch", "cli", "progress", "evaluate", "export", "runpage"}
    found = [str(e) for e in OURS if e.top not in driver and inner(e.target).partition(".")[0] in driver]
    assert found == []


def test_package_init_imports_nothing():
    assert [str(each) for each in IMPORTS if each.module == ""] == []


def test_imports_have_no_cycle():
    imported: dict[str, set[str]] = {module: set() for module in MODULES}
    for each in OURS:
        if each.when == "import":
            imported[each.module].add(inner(each.target))

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(imported[module]):
                walk(target, (*path, module))
            done.add(module)

    done: set[str] = set()
    for module in MODULES:
        walk(module, ())


@pytest.mark.parametrize("library", sorted(AT_IMPORT))
def test_heavy_library_is_imported_in_listed_modules_only(library):
    outside = [
        str(each)
        for each in IMPORTS
        if each.library == library
        and each.when != "typing"
        and each.top not in (AT_IMPORT if each.when == "import" else ANYWHERE)[library]
    ]
    assert outside == []


def test_heavy_library_list_has_no_stale_module():
    for library in ("vllm", "trl"):
        for allowed, when in ((AT_IMPORT, ("import",)), (ANYWHERE, ("import", "call"))):
            used = {each.top for each in IMPORTS if each.library == library and each.when in when}
            assert allowed[library] <= used, f"{library} is no longer used in {allowed[library] - used}"


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.py")), ids=lambda path: path.name)
def test_job_has_docstring_and_at_most_fifty_lines(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 50
    assert ast.get_docstring(ast.parse(text)), "the module docstring must describe the job"


def test_jobs_train_and_evaluate_exist():
    assert {path.name for path in (ROOT / "jobs").glob("*.py")} >= {"train.py", "evaluate.py"}


def test_imports_of_function_is_not_taken_for_module():
    # `from grpo_ray.data import arithmetic` gives the function, `from grpo_ray import config` the module.
    tree = ast.parse("from grpo_ray import config as c\ndef f():\n    from grpo_ray.data import arithmetic\n")
    assert [(e.target, e.when) for e in imports_of("x", tree)] == [
        ("grpo_ray.config", "import"),
        ("grpo_ray.data", "call"),
    ]
