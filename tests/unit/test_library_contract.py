"""The check of our source against libraries' sources: it finds each kind of missing thing, and its tables are complete.

The check of releases that are not installed is `tests/integration/test_library_contract.py`.
"""

import ast
import importlib.util
import zipfile
from pathlib import Path

import pytest
from library_contract.check import ROOT, Result, format_results, our_files
from library_contract.releases import (
    LIBRARIES,
    Release,
    _unpack,
    oldest,
    requirement_conflicts,
    requirements,
    supported,
)
from library_contract.source_tree import UNKNOWN, Class, Function, SourceTree
from library_contract.table import (
    INHERITED,
    KEYWORDS,
    PATHS,
    WORDS,
    Keywords,
    check_path,
    check_table,
    check_word,
    keywords_of,
)
from library_contract.uses import Uses, check_uses, inherited_names
from packaging.requirements import Requirement

# A library

ENGINE = """
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from .deep import Runner

@dataclass
class Options:
    level: int
    name: str = "a"
    made: int = field(init=False)

class Output:
    def __init__(self):
        self.text: str = ""

class Base:
    _step = 0
    def sleep(self, level=1, *, tags=None) -> list[Output]: ...

class Engine(Base):
    runner: "Runner"
    def __init__(self, model, **kwargs):
        kwargs.pop("seed", None)
        options = Options(level=1, **kwargs)
        self.size: int = 0
    @property
    def options(self) -> Options: ...
    def on_step(self, state): ...

def start(path, *, port=0) -> Engine: ...
"""

FAKE = {
    "fake/__init__.py": "from .engine import *\nfrom .engine import Base as Root\n",
    "fake/engine.py": ENGINE,
    "fake/deep.py": "class Runner:\n    model = None\n    def __init__(self):\n        (self.sampler, self.x) = 1, 2\n",
    "fake/open.py": "import other\nclass Open(other.Base): ...\nclass Any:\n    def __getattr__(self, name): ...\n",
}

USER = """
import fake
import fake.engine
from fake import Engine, Options, Root, start
from fake.open import Any, Open

class Mine(Root):
    def sleep(self, level=1, *, tags=None):
        return super().sleep(level, tags=tags)
    def steps(self):
        return self._step + self.own
    own: int = 1

def use(engine: Engine, open: Open, any: Any):
    engine.sleep(2, tags=["weights"])
    for output in engine.sleep():
        output.text
    engine.options.level
    engine.runner.sampler
    started = start("p", port=1)
    started.size
    Engine("m", seed=1, name="b")
    Options(level=2)
    fake.engine.Base
    open.unknown.thing
    any.unknown
"""


def tree_of(folder: Path, **files: str) -> SourceTree:
    """Return a source tree of the fake library, with some of its files in another version, and of `user.py`."""
    for name, text in (FAKE | {"user.py": USER} | files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return SourceTree([folder])


def problems(folder: Path, engine: str = ENGINE, user: str = USER) -> list[str]:
    """Return the findings of the check about `user.py` with this version of the library."""
    tree = tree_of(folder, **{"fake/engine.py": engine, "user.py": user})
    uses = check_uses(tree, folder, [folder / "user.py"], ["fake"])
    return [str(check) for check in uses.checks if check.problem]


def test_check_right_uses_no_problem(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    checks = check_uses(tree, tmp_path, [tmp_path / "user.py"], ["fake"]).checks
    assert [str(each) for each in checks if each.problem] == []
    uses = {each.use for each in checks}
    assert {
        "fake.engine.Base.sleep",
        "fake.engine.Base._step",
        "fake.engine.Base.sleep(tags)",
        "fake.engine.Engine(seed, name)",
        "fake.engine.Options(level)",
        "fake.engine.Output.text",
        "fake.engine.Options.level",
        "fake.engine.Engine.size",
        "fake.deep.Runner.sampler",
        "fake.engine.start(port)",
    } <= uses


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("class Output", "class Result", None),  # no name that we use
        ("class Options", "class Settings", "fake.Options is not there; the module has nothing like it"),
        ("_step = 0", "_stop = 0", "fake.engine.Base._step is not there; it has _stop"),
        ("self.size: int", "self.sizes: int", "fake.engine.Engine.size is not there; it has sizes"),
        ("self.text: str", "self.texts: str", "fake.engine.Output.text is not there; it has texts"),
        ("def sleep(", "def nap(", "fake.engine.Base.sleep is not there; it has _step"),
        ("tags=None", "tag=None", "fake.engine.Base.sleep(tags) has no parameter tags; it takes level, tag"),
        ("level=1, *, tags", "*, tags", "fake.engine.Base.sleep(tags) takes 0 positional arguments (), not 1"),
        ("path, *, port=0", "path, *, host", "fake.engine.start(port) has no parameter port; it takes host, path"),
        ("port=0)", "port=0, host)", "fake.engine.start(port) also requires host"),
        ("name: str", "title: str", "fake.engine.Engine(seed, name) has no parameter name; it takes"),
        ('.pop("seed", None)', "", None),  # the dictionary goes where it cannot be read
        ('"seed"', '"port"', "fake.engine.Engine(seed, name) has no parameter seed; it takes"),
        ("level: int", "depth: int", "fake.engine.Options.level is not there"),
        ("tags=None) ->", "tags=None, mode=0) ->", "fake.engine.Base.sleep has parameter mode, which the override"),
        ("sleep(self, level=1", "sleep(self, depth=1", "fake.engine.Base.sleep has parameter depth where the over"),
    ],
)
def test_check_changed_library_names_the_change(tmp_path: Path, old: str, new: str, problem: str | None) -> None:
    assert ENGINE.count(old) >= 1
    found = problems(tmp_path, ENGINE.replace(old, new))
    if problem is None:
        assert found == []
    else:
        assert any(problem in each for each in found), found


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("from fake import Missing", "fake.Missing is not there; the module has nothing like it"),
        ("import fake.missing", "fake.missing is no module"),
        ("from fake.gone import x", "fake.gone.x cannot be imported: there is no module fake.gone"),
        ("import fake.engine\nfake.engine.strat", "fake.engine.strat is not there; it has start"),
        ("import fake\nfake.engine.Base = None\nfake.engine.base = None", "fake.engine.base is not there"),
        ("from fake import Engine\nEngine('m').on_steps()", "fake.engine.Engine.on_steps is not there; it has on_step"),
        ("from fake import start\n[each.texts for each in start('p').sleep()]", "fake.engine.Output.texts is not"),
        ("from fake import start\n(e := start('p')).sizes", "fake.engine.Engine.sizes is not there"),
        ("from fake import start\nstart('p', port=1, host=2)", "fake.engine.start(port, host) has no parameter host"),
        (
            "from fake import Options\nOptions(made=1, level=1)",
            "fake.engine.Options(made, level) has no parameter made",
        ),
        ("from fake import Options\nOptions()", "fake.engine.Options() also requires level"),
    ],
)
def test_check_wrong_use_is_found(tmp_path: Path, line: str, problem: str) -> None:
    found = problems(tmp_path, user=line)
    assert len(found) == 1 and problem in found[0], found


@pytest.mark.parametrize(
    "body",
    [
        "if isinstance(engine, Special): engine.special",  # narrowed by the test
        "engine = make(); engine.special",
        "with open() as engine: engine.special",
        "engine.sleep(**options)",
        "engine.sleep(*levels)",
        "getattr(engine, 'special', None) or engine.special",
        "def inner(engine): engine.special",
        "[engine.special for engine in engines]",
    ],
)
def test_check_object_of_unknown_type_says_nothing(tmp_path: Path, body: str) -> None:
    code = f"from fake import Engine\ndef use(engine: Engine, options, levels, engines):\n    {body}\n"
    assert problems(tmp_path, user=code) == []


def test_check_lists_attributes_of_unknown_objects(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    uses = check_uses(tree, tmp_path, [tmp_path / "user.py"], ["fake"])
    assert uses.unseen == {("user.py", "unknown"), ("user.py", "thing")}


# Signatures


@pytest.mark.parametrize(
    ("code", "keywords"),
    [
        ("def f(a, /, b, *, c=1): ...", {"b", "c"}),
        ("def f(**options):\n    options.get('x'); g(**options)\ndef g(y): ...", {"x", "y"}),
        ("def f(**options):\n    if 'x' in options: options['x']", {"x"}),
        ("def f(**options):\n    unknown(**options)", None),
        ("def f(**options):\n    g(options)\ndef g(y): ...", None),
        ("def f(**options): ...", None),
    ],
)
def test_signature_follows_keyword_dictionaries(tmp_path: Path, code: str, keywords: set[str] | None) -> None:
    tree = tree_of(tmp_path, **{"fake/functions.py": code})
    function = tree.find("fake.functions:f")
    assert isinstance(function, Function)
    signature = tree.signature(function, bound=False)
    assert signature.is_open == (keywords is None)
    assert keywords is None or signature.keyword == keywords


def test_constructor_of_inherited_init_follows_super(tmp_path: Path) -> None:
    code = """
class A:
    def __init__(self, a): ...
class B(A):
    def __init__(self, b, **options):
        super().__init__(**options)
class C(B): ...
"""
    tree = tree_of(tmp_path, **{"fake/classes.py": code})
    found = tree.find("fake.classes:C")
    assert isinstance(found, Class)
    signature = tree.constructor(found)
    assert signature is not None and signature.keyword == {"a", "b"} and signature.required == {"b"}


def test_member_of_class_with_unknown_base_is_unknown(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    assert tree.find("fake.open:Open.anything") is UNKNOWN
    assert tree.find("fake.open:Any.anything") is UNKNOWN
    assert tree.find("fake.engine:Engine.anything") is None
    assert isinstance(tree.find("fake:Root.sleep"), Function)


# Tables


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("fake.deep:Runner.model", None),
        ("fake.deep:Runner.sampler", None),
        ("fake.deep:Runner.models", "is not there; it has model"),
        ("fake.deeper:Runner.model", "is not there; there is no module fake.deeper"),
        ("fake.engine:Base.sleep(level, tags=)", None),
        ("fake.engine:Base.sleep(level, tag=)", "has no parameter tag; it takes level, tags"),
        ("fake.engine:start(path, port)", "takes 1 positional arguments (path), not 2"),
    ],
)
def test_path_missing_in_library_is_found(tmp_path: Path, path: str, problem: str | None) -> None:
    tree = tree_of(tmp_path)
    check = check_path(tree, tmp_path, "user.py", path)
    assert check is not None and check.problem == problem


def test_path_through_unknown_class_is_no_check(tmp_path: Path) -> None:
    assert check_path(tree_of(tmp_path), tmp_path, "user.py", "fake.open:Open.model") is None


def test_word_missing_in_library_is_found(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    assert check_word(tree, tmp_path, "user.py", "weights", "fake.engine").problem == "is not in fake.engine"
    assert check_word(tree, tmp_path, "user.py", "weights", "fake.gone").problem == (
        "cannot be looked up: there is no module fake.gone"
    )
    found = check_word(tree, tmp_path, "user.py", "seed", "fake.engine")
    assert (found.problem, found.line) == (None, 22)  # `seed=` in `USER`


def test_keywords_of_function_reads_its_dictionaries() -> None:
    code = """
def f(x):
    d: dict = {"a": 1} | x
    d |= {"b": {"inner": 1}}
    d["c"] = 2
    other = {"no": 1}
    return {"r": 1}
"""
    row = Keywords("x.py", "f", ("d", "return"), "fake:f")
    assert sorted(name for name, _ in keywords_of(ast.parse(code), row)) == ["a", "b", "c", "r"]


# The installed releases

PRIVATE_MODULES = (
    "grpo_ray/inference/cpu_packing.py",
    "grpo_ray/inference/lora_requests.py",
    "grpo_ray/inference/unprocessed_logprobs.py",
    "grpo_ray/inference/vllm_internals.py",
    "grpo_ray/learner/trl_internals.py",
    "grpo_ray/resilience/ray_internals.py",
    "grpo_ray/resilience/ray_train_internals.py",
    "grpo_ray/storage/ray_snapshot.py",
)
"""Modules that hold the access to libraries' private parts."""

NOT_THEIRS = {
    *("append", "get", "glob", "items", "join", "replace", "unlink", "serial"),  # Python's, and ours
    *("cache_clear", "close", "read_text", "rpartition", "strip"),
    *("lstrip", "setdefault", "startswith", "values", "__module__", "__name__"),
    "stored",  # ours
    *("dtype", "eval", "float", "gather", "is_meta", "log_softmax", "long", "ndim", "numel"),  # torch's
    *("bias", "clone", "detach", "named_parameters", "shape", "type", "unsqueeze", "weight", "where"),
    *("count_nonzero", "stride", "to", "_modules"),
    *("FromString", "HasField", "ParseFromString", "json"),  # protobuf's and pydantic's
    # Fields of Ray's messages: tests/unit/resilience/test_ray_internals.py
    *("creator_actor_dead", "creator_actor_id", "creator_job_id", "state", "binary"),
    "fromhex",
    *("config", "remote"),
}
"""Attributes of untyped objects in these modules that belong to no library which is checked."""


@pytest.fixture(scope="module")
def installed_tree() -> SourceTree:
    """Our source and that of the installed releases."""
    places = {library: importlib.util.find_spec(library) for library in LIBRARIES}
    return SourceTree([ROOT], {name: Path(str(place.origin)).parents[1] for name, place in places.items() if place})


@pytest.fixture(scope="module")
def uses(installed_tree: SourceTree) -> Uses:
    return check_uses(installed_tree, ROOT, our_files(ROOT), LIBRARIES)


@pytest.mark.long
def test_installed_releases_have_all_that_we_use(uses: Uses, installed_tree: SourceTree) -> None:
    checks = [*uses.checks, *check_table(installed_tree, ROOT, our_files(ROOT))]
    assert [str(each) for each in checks if each.problem] == []
    # Far below what is found: the check has not become blind.
    assert {library: sum(each.library == library for each in checks) >= 40 for library in LIBRARIES} == dict.fromkeys(
        LIBRARIES, True
    )


@pytest.mark.long
def test_untyped_objects_of_private_modules_are_in_the_table(uses: Uses) -> None:
    listed = {
        (file, path.partition("(")[0].rpartition(".")[2].rpartition(":")[2]) for file in PATHS for path in PATHS[file]
    }
    listed |= {(file, word) for file in WORDS for word in WORDS[file]}
    missing = {
        f"{file}: {name}"
        for file, name in uses.unseen
        if file in PRIVATE_MODULES and name not in NOT_THEIRS and (file, name) not in listed
    }
    assert missing == set(), (
        "add a row to PATHS in tests/helpers/library_contract/table.py for each attribute of a library, "
        "or the name to NOT_THEIRS here"
    )


@pytest.mark.parametrize(("file", "path"), [(file, path) for file in PATHS for path in PATHS[file]])
def test_path_is_used_and_can_be_checked(installed_tree: SourceTree, file: str, path: str) -> None:
    check = check_path(installed_tree, ROOT, file, path)
    assert check is not None, f"{path} goes through a class that cannot be read; name the class that defines it"
    assert check.line > 0, f"{file} no longer uses {path}; remove the row of PATHS"


@pytest.mark.parametrize(("file", "word"), [(file, word) for file in WORDS for word in WORDS[file]])
def test_word_is_used(installed_tree: SourceTree, file: str, word: str) -> None:
    check = check_word(installed_tree, ROOT, file, word, WORDS[file][word])
    assert check.line > 0, f"{file} no longer uses {word}; remove the row of WORDS"


@pytest.mark.parametrize("row", KEYWORDS, ids=lambda row: row.place)
def test_keywords_are_found_in_our_source(row: Keywords) -> None:
    assert keywords_of(ast.parse((ROOT / row.file).read_text(encoding="utf-8")), row)


@pytest.mark.long
def test_inherited_lists_all_that_we_override_or_set(installed_tree: SourceTree) -> None:
    found: dict[str, tuple[str, ...]] = {}
    for file in our_files(ROOT):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            cls = installed_tree.find(f"{module}:{node.name}") if isinstance(node, ast.ClassDef) else None
            if isinstance(cls, Class):
                names = tuple(name for name, _, _ in inherited_names(installed_tree, cls, set(LIBRARIES)))
                found |= {f"{module}:{cls.name}": names} if names else {}
    assert found == {cls: tuple(sorted(names)) for cls, names in INHERITED.items()}, (
        "update INHERITED in tests/helpers/library_contract/table.py: a method or attribute that is no longer in the "
        "list was renamed by the library, a new one overrides or sets something of the library's"
    )


# Releases


def test_supported_ranges_have_an_oldest_release() -> None:
    ranges = supported(ROOT / "pyproject.toml")
    assert set(ranges) == set(LIBRARIES)
    assert all(oldest(requirement) for requirement in ranges.values())


def test_oldest_of_range_without_lower_bound_is_refused() -> None:
    assert oldest(Requirement("vllm>=0.22,<=0.31")) == "0.22"
    with pytest.raises(ValueError, match=r"trl<2 must have one lower bound \(>=\)"):
        oldest(Requirement("trl<2"))


def test_requirements_leave_out_extras_and_other_systems() -> None:
    lines = [
        "torch==2.11.0",
        "datasets; extra == 'bench'",
        "x; platform_machine == 'arm64'",
        "y; sys_platform == 'linux'",
    ]
    assert [each.name for each in requirements(lines)] == ["torch", "y"]


def test_requirement_that_another_release_does_not_meet_is_a_conflict() -> None:
    releases = [
        Release("vllm", "0.20.0", Path(), requirements(["transformers<5", "numpy"])),
        Release("transformers", "5.17.0", Path()),
    ]
    assert requirement_conflicts(releases) == [
        "vllm 0.20.0 requires transformers<5, but transformers 5.17.0 is supported"
    ]


def test_unpack_keeps_python_files_and_names_of_compiled_ones(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("a/x.py", "a/y.pyi", "a/z.abi3.so", "a/data.json", "a-1.dist-info/METADATA"):
            archive.writestr(name, "content")
    _unpack(wheel, tmp_path / "out")
    files = {
        path.relative_to(tmp_path / "out").as_posix(): path
        for path in (tmp_path / "out").rglob("*.*")
        if path.is_file()
    }
    assert set(files) == {"a/x.py", "a/y.pyi", "a/z.abi3.so"}
    assert files["a/z.abi3.so"].stat().st_size == 0
    assert (tmp_path / "out" / "a-1.dist-info" / "METADATA").is_file()


def test_format_results_lists_counts_and_each_problem_once(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, **{"user.py": "from fake import Engine, Gone\n"})
    checks = check_uses(tree, tmp_path, [tmp_path / "user.py"], ["fake"]).checks
    result = Result(Release("fake", "1.0", tmp_path), (*checks, *checks), ("fake 1.0 requires x",))
    assert format_results([result]).splitlines() == [
        "library       release    checked  problems",
        "fake          1.0              4         2",
        "",
        "fake 1.0",
        "  user.py:1: fake.Gone is not there; the module has nothing like it",
        "  fake 1.0 requires x",
    ]
