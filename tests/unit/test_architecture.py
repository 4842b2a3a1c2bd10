"""The arrows of the house: which module may import which, and which heavy library lives in which room."""

import ast
import subprocess
import sys
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
"""From the ground up. A module imports from lower layers only; inside a package (data, rewards) it is free."""

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

HEAVY = ("torch", "ray", "vllm", "trl", "transformers", "pandas", "pyarrow")

TOP_LEVEL_ROOMS = {
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
"""Library -> the rooms that may import it whenever they are imported themselves."""

INSIDE_FUNCTIONS = {
    "vllm": {"engine", "evaluate", "sampling"},
    "trl": {"engine", "learner", "arguments", "rewards", "thrift"},
    "ray": TOP_LEVEL_ROOMS["ray"] | {"data"},
}
"""Library -> the rooms that may import it at all."""


@dataclass(frozen=True)
class Import:
    """One import statement's target."""

    module: str
    """Who imports, dotted, without `grpo_ray.`; "" is the package itself."""
    target: str
    """What is imported, dotted and whole."""
    when: str
    """`import` (whenever the module is), `call` (inside a function) or `typing` (never at run time)."""
    line: int

    @property
    def library(self) -> str:
        return self.target.partition(".")[0]

    @property
    def room(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"grpo_ray.{self.module} imports {self.target} (line {self.line})"


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(module: str, tree: ast.AST, when: str = "import") -> Iterator[Import]:
    """Every import of a module, wherever it stands."""
    for node in ast.iter_child_nodes(tree):
        inside = when
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = "call" if when == "import" else when
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inside = "typing"
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, inside, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"grpo_ray.{module}, line {node.lineno}: imports are written out"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole.removeprefix("grpo_ray.") in MODULES and not defines(node.module, alias.name)
                yield Import(module, whole if is_module else node.module, inside, node.lineno)
        yield from imports_of(module, node, inside)


def defines(package: str, name: str) -> bool:
    """Whether a package's `__init__` has something of its own by that name (`data.arithmetic` is a function)."""
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


def test_every_room_has_its_place_on_the_map():
    rooms = {module.partition(".")[0] for module in MODULES} - {""}
    assert rooms <= set(LEVEL), "give the new room a layer here, and a line on the map in the README"


def test_every_import_of_ours_names_a_module_that_is_there():
    assert [str(each) for each in OURS if inner(each.target) not in MODULES] == []


def test_arrows_point_down_only():
    upward = [
        str(each)
        for each in OURS
        if (target := inner(each.target).partition(".")[0])
        and target != each.room
        and LEVEL[target] >= LEVEL[each.room]
    ]
    assert upward == []


def test_nothing_below_the_driver_knows_it():
    driver = {"launch", "cli", "progress", "evaluate", "export", "runpage"}
    known = [str(e) for e in OURS if e.room not in driver and inner(e.target).partition(".")[0] in driver]
    assert known == []


def test_the_package_itself_imports_nothing():
    assert [str(each) for each in IMPORTS if each.module == ""] == []


def test_no_module_imports_itself_in_a_circle():
    arrows: dict[str, set[str]] = {module: set() for module in MODULES}
    for each in OURS:
        if each.when == "import":
            arrows[each.module].add(inner(each.target))

    def walk(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for target in sorted(arrows[module]):
                walk(target, (*way, module))
            done.add(module)

    done: set[str] = set()
    for module in MODULES:
        walk(module, ())


@pytest.mark.parametrize("library", sorted(TOP_LEVEL_ROOMS))
def test_a_heavy_library_is_imported_in_its_own_rooms_only(library):
    outside = [
        str(each)
        for each in IMPORTS
        if each.library == library
        and each.when != "typing"
        and each.room not in (TOP_LEVEL_ROOMS if each.when == "import" else INSIDE_FUNCTIONS)[library]
    ]
    assert outside == []


def test_the_map_of_libraries_names_no_room_that_moved_out():
    for library in ("vllm", "trl"):
        for rooms, when in ((TOP_LEVEL_ROOMS, ("import",)), (INSIDE_FUNCTIONS, ("import", "call"))):
            used = {each.room for each in IMPORTS if each.library == library and each.when in when}
            assert rooms[library] <= used, f"{library} is no longer used in {rooms[library] - used}"


@pytest.mark.parametrize(
    "module",
    [
        *["board", "config", "data.stream", "errors", "failures", "ledger", "price", "problem", "rewards", "rollouts"],
        *["storage", "tiny"],
    ],
)
def test_a_light_module_can_be_imported_without_a_heavy_library(module):
    code = f"import sys, grpo_ray.{module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_importing_the_package_takes_nothing_heavy_and_no_time():
    code = (
        "import sys, time; begun = time.perf_counter(); import grpo_ray; seconds = time.perf_counter() - begun; "
        f"print(seconds, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(
            maxsplit=1
        )
        for _ in range(5)
    ]
    assert {heavy.strip() for _, heavy in runs} == {"[]"}
    assert min(float(seconds) for seconds, _ in runs) < 0.3  # the best of five: a busy machine is not a slow import


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.py")), ids=lambda path: path.name)
def test_a_job_is_a_story_of_at_most_fifty_lines(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 50
    assert ast.get_docstring(ast.parse(text)), "a job opens with its story"


def test_there_are_jobs():
    assert {path.name for path in (ROOT / "jobs").glob("*.py")} >= {"train.py", "evaluate.py"}


def test_a_function_is_told_from_the_module_of_its_name():
    # `from grpo_ray.data import arithmetic` gives the function, `from grpo_ray import config` the module.
    tree = ast.parse("from grpo_ray import config as c\ndef f():\n    from grpo_ray.data import arithmetic\n")
    assert [(e.target, e.when) for e in imports_of("x", tree)] == [
        ("grpo_ray.config", "import"),
        ("grpo_ray.data", "call"),
    ]
