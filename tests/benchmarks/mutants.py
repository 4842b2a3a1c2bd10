"""Mutation score: change one expression or statement of a module at a time, and run its unit tests on it.

    python tests/benchmarks/mutants.py [--only NAME] [--sample N] [--seed S] [--json FILE] [--again FILE]

Of each package in `PACKAGES`, a seeded sample of all mutants is tried in a copy of the checkout. A mutant is caught if
a unit test fails on it, or if the tests exceed a limit of time or memory. The others survive: a survivor is either a
gap in the unit tests or computes the same as the original, which a row of `EQUIVALENT` then explains. The status is 1
if a package's score is below `LEAST_SCORE`.

Mutants are: another comparison, `and` for `or`, another arithmetic operator, another number or truth value, a sign or
`not` left out, a negated condition, a statement left out. Annotations, decorators, f-strings and `strict=` of `zip`
stay as they are: mypy, or no test at all, is what could tell the difference.

The tests of a module are chosen by place and imports, see `unit_tests_of`. They run in forks of this process, in which
the libraries are imported already, so that a mutant takes as long as its tests and not as long as an import of torch.
Hypothesis draws the same examples each time and does not shrink a failing one.

`planted_faults.py` has faults that a person chose, and runs all tiers on them.
"""

import argparse
import ast
import gc
import hashlib
import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from planted_faults import COPIED, PASSED, ROOT, TESTS, TIMED_OUT, Copy, Outcome, Paths

sys.path.append(str(ROOT / "tests" / "helpers"))

from slow_tests import imported_modules

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "grading": ("rewards/math/*.py",),
    "ledger": ("data/ledger.py",),
    "savings": (
        "learner/exact_savings.py",
        "learner/micro_batches.py",
        "learner/passes.py",
        "learner/batch.py",
        "learner/forward_pass.py",
    ),
    "checkpoints": ("storage/checkpoint*.py", "storage/fencing.py"),
    "sync": ("inference/sync_*.py", "inference/weight_*.py", "learner/sync_*.py"),
}
"""Name -> patterns of its modules below `grpo_ray/`."""

LEAST_SCORE = 0.9
"""Share of a package's mutants, without the equivalent ones, that its unit tests must catch."""


@dataclass(frozen=True)
class Equivalent:
    """Mutant that computes the same as the original."""

    file: str
    before: str
    """The changed lines, without indentation, joined by a space."""
    after: str
    reason: str


EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        "learner/passes.py",
        'return sum(lengths) if layout == "packed" else len(lengths) * max(lengths, default=0)',
        'return sum(lengths) if layout == "packed" else len(lengths) * max(lengths, default=1)',
        "without rows, the product is 0 with any default",
    ),
    Equivalent(
        "learner/micro_batches.py",
        'device = batches[0]["advantages"].device',
        'device = batches[-1]["advantages"].device',
        "all batches of a worker are on one device",
    ),
    Equivalent(
        "inference/weight_sums.py",
        "coordinate = mesh.get_coordinate() or [0] * mesh.ndim",
        "coordinate = mesh.get_coordinate() or [-1] * mesh.ndim",
        "a replica has a coordinate above 0",
    ),
    Equivalent(
        "rewards/math/words.py",
        "if last <= 2 or (last == 10 and size != 1):",
        "if last <= 3 or (last == 10 and size != 1):",
        "`last` is 1, 2, 10, 100 or 1,000",
    ),
    Equivalent(
        "inference/weight_sums.py",
        "rows = max(1, CHUNK[part.device.type] * length // part.numel())",
        "rows = max(2, CHUNK[part.device.type] * length // part.numel())",
        "a sum has no order, so it does not depend on the number of rows that are multiplied at a time",
    ),
    Equivalent(
        "rewards/math/compare.py",
        "return _same_formula(expected[0], answer.text)",
        "return _same_formula(expected[-1], answer.text)",
        "there is one quotient",
    ),
    Equivalent(
        "rewards/math/arithmetic.py",
        "return Fraction(0) if abs(result) <= _ZERO_TOLERANCE else result",
        "return Fraction(0) if (abs(result) < _ZERO_TOLERANCE) else result",
        "no binomial is the tolerance, a power of ten that is rounded to binary digits",
    ),
    *(
        Equivalent(
            "inference/weight_sums.py",
            'CHUNK = {"cpu": 1 << 17, "cuda": 1 << 23}',
            f'CHUNK = {{"cpu": {cpu}, "cuda": {cuda}}}',
            "a size for speed: a sum has no order, and at least one row is multiplied at a time",
        )
        for cpu, cuda in (
            *((size, "1 << 23") for size in ("(1 >> 17)", "2 << 17", "0 << 17", "1 << 18", "1 << 16")),
            *(("1 << 17", size) for size in ("(1 >> 23)", "2 << 23", "0 << 23", "1 << 24", "1 << 22")),
        )
    ),
)

COMPARISONS: Mapping[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
UNCHANGED_FIELDS = ("annotation", "returns", "decorator_list", "type_params")
"""Fields of syntax nodes in which nothing is changed."""

MAX_DATA_BYTES = 8 << 30
"""Memory of the tests of one mutant, which may append to a list for ever."""


@dataclass(frozen=True)
class Mutant:
    """Module with one change."""

    file: str
    """Path below `grpo_ray/`."""
    line: int
    before: str
    """The changed lines, without indentation, joined by a space."""
    after: str
    source: str = field(repr=False)
    """The whole changed module."""

    @property
    def key(self) -> tuple[str, int, str]:
        """Identity of the mutant as long as the module is not edited."""
        return self.file, self.line, self.after

    @property
    def equivalent(self) -> str | None:
        """Reason why the mutant computes the same as the original; None if no row gives one."""
        rows = (each.reason for each in EQUIVALENT if (each.file, each.before, each.after) == self._text)
        return next(rows, None)

    @property
    def _text(self) -> tuple[str, str, str]:
        return self.file, self.before, self.after


@dataclass(frozen=True)
class Result:
    """Outcome of the unit tests on one mutant."""

    package: str
    file: str
    line: int
    before: str
    after: str
    outcome: str
    """`caught`, `SURVIVED` or `equivalent`."""
    detail: str = ""
    """First failing test, the exceeded limit, or the reason why the mutant is equivalent."""
    seconds: float = 0.0
    tests: Paths = ()
    """Test files, in the order in which they run."""


def mutants_of(source: str, file: str = "") -> list[Mutant]:
    """Return all mutants of a module, in the order of its lines, each different from the original and the others."""
    seen = {digest_of(source)}
    found = []
    for mutant in candidates_of(source, file):
        digest = digest_of(mutant.source)
        if digest is not None and digest not in seen:
            seen.add(digest)
            found.append(mutant)
    return sorted(found, key=lambda each: each.line)


def candidates_of(source: str, file: str = "") -> Iterator[Mutant]:
    """Yield all changes of a module; some may equal the original or each other, and some may be no syntax."""
    encoded = source.encode()  # positions in syntax trees are in bytes
    starts = [0]
    for row in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    for node, text in _changes(ast.parse(source)):
        assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno and node.end_col_offset is not None
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        changed = (encoded[:begin] + text.encode() + encoded[end:]).decode()
        first, last = starts[node.lineno - 1], starts[node.end_lineno]
        after = (encoded[first:begin] + text.encode() + encoded[end:last]).decode()
        before = encoded[first:last].decode()
        yield Mutant(file, node.lineno, " ".join(before.split()), " ".join(after.split()), changed)


def digest_of(source: str) -> bytes | None:
    """Return a hash of a module's syntax tree, without positions and comments; None if the source is no syntax."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # as a name in parentheses, where a pattern is expected
        return None
    return hashlib.sha256(ast.dump(tree).encode()).digest()


def _changes(node: ast.AST, parent: ast.AST | None = None) -> Iterator[tuple[ast.AST, str]]:
    """Yield each node that can be replaced, with the source of a replacement."""
    if isinstance(node, ast.JoinedStr):
        return  # its parts have no positions before Python 3.12
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    if isinstance(node, ast.expr):
        inside = isinstance(node, ast.Constant)
        yield from ((node, text if inside else f"({text})") for text in _expressions(node))
    elif isinstance(node, ast.stmt):
        yield from ((node, text) for text in _statements(node, parent))
    tests = getattr(node, "ifs", [getattr(node, "test", None)])  # of a comprehension, an if, a while or an assert
    for test in tests:
        # A comparison has its opposite among its own replacements, and `not x` has x.
        if isinstance(test, ast.expr) and not isinstance(test, ast.Compare | ast.UnaryOp):
            yield test, f"(not ({ast.unparse(test)}))"
    for name, value in ast.iter_fields(node):
        if name not in UNCHANGED_FIELDS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _changes(child, node)


def _expressions(node: ast.expr) -> Iterator[str]:
    """Yield the source of each replacement of an expression as a whole."""
    match node:
        case ast.Compare(left, operators, comparators):
            for place, operator in enumerate(operators):
                for other in COMPARISONS[type(operator)]:
                    changed = [*operators[:place], other(), *operators[place + 1 :]]
                    yield ast.unparse(ast.Compare(left, changed, comparators))
        case ast.BoolOp(operator, values):
            yield ast.unparse(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values))
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield ast.unparse(operand)
        case ast.BinOp(left, operator, right) if not (_is_text(left) or _is_text(right)):
            if type(operator) in OPERATORS:
                yield ast.unparse(ast.BinOp(left, OPERATORS[type(operator)](), right))
        case ast.Constant(bool(value)):
            yield str(not value)
        case ast.Constant(int(value)):
            yield from (str(value + 1), str(value - 1))
        case ast.Constant(float(value)):
            yield from (repr(value * 2), repr(value / 2)) if value else ("1.0",)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _statements(node: ast.stmt, parent: ast.AST | None) -> Iterator[str]:
    """Yield the source of each replacement of a statement as a whole."""
    match node:
        case ast.AugAssign(target, operator, value) if not _is_text(value):
            if type(operator) in OPERATORS:
                yield ast.unparse(ast.AugAssign(target, OPERATORS[type(operator)](), value))
            yield "pass"
        case ast.Expr(ast.Call()) | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            yield "pass"
        case ast.Assign(targets) if all(isinstance(each, ast.Attribute | ast.Subscript) for each in targets):
            yield "pass"
        case ast.Return() if not isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "pass"  # an early return


def modules_of(name: str) -> list[str]:
    """Return the modules of a package of `PACKAGES`, or a single module, as paths below `grpo_ray/`."""
    package = ROOT / "grpo_ray"
    paths = {path for pattern in PACKAGES.get(name, (name,)) for path in package.glob(pattern)}
    return sorted(str(path.relative_to(package)) for path in paths)


def unit_tests_of(file: str) -> Paths:
    """Return the unit tests of a module as paths below `tests/`.

    First the file at the module's place, then those that `planted_faults.TESTS` names, then the others of its folder
    that import it, or import a module of the same package that does.
    """
    path = Path(file)
    folder = ROOT / "tests" / "unit" / path.parent
    module = ".".join(path.with_suffix("").parts)
    tests = [f"unit/{path.parent}/test_{path.name}"]
    tests += [f"unit/{each}" for each in (TESTS[file].unit if file in TESTS else ())]
    others = (str(each.relative_to(ROOT / "tests")) for each in sorted(folder.rglob("test_*.py")))
    tests += [each for each in others if module in imported_modules(each)]
    return tuple(each for each in dict.fromkeys(tests) if (ROOT / "tests" / each).is_file())


def choose(mutants: Sequence[Mutant], sample: int | None, seed: str) -> list[Mutant]:
    """Return a random sample of the mutants, in their order; all if `sample` is None or not below their number."""
    if sample is None or sample >= len(mutants):
        return list(mutants)
    return [mutants[place] for place in sorted(random.Random(seed).sample(range(len(mutants)), sample))]


HYPOTHESIS_PLUGIN = """
from hypothesis import HealthCheck, Phase, settings
settings.register_profile(
    "mutants",
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mutants")
"""
"""Plugin of pytest: no memory of earlier failures, nothing that depends on the machine's speed, no shrinking."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run of the tests."""

    seconds: float = 900.0
    cpu_seconds: float = 900.0
    """Processor time of the tests' own process; it ends an endless loop, on a busy machine too."""

    @staticmethod
    def from_baseline(seconds: float) -> "Limits":
        """Return limits for a mutant whose tests take `seconds` on the unchanged copy."""
        return Limits(5 * seconds + 30, 3 * seconds + 10)


class ForkedTests:
    """Runner of pytest in forks of this process, in which the imported libraries are shared."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self._plugins = copy.scratch / "plugins"
        (self._plugins / "mutants_hypothesis.py").write_text(HYPOTHESIS_PLUGIN)
        self._output = copy.scratch / "output"
        self._modules = copy.scratch / "modules.json"
        self._preloaded: set[str] = set()
        self._baselines: dict[Paths, Outcome] = {}

    def baseline(self, tests: Paths) -> Outcome:
        """Run tests on the unchanged copy, with the libraries imported before; later calls return the first outcome.

        Raises:
            RuntimeError: a test fails without a mutant, or the package is not imported from the copy.
        """
        if tests not in self._baselines:
            while True:
                outcome = self.run(tests, Limits())
                if outcome.code != PASSED:
                    raise RuntimeError(f"{tests} without a mutant: {outcome.failure}, {outcome.error}")
                if not self._preload():
                    break
            self._baselines[tests] = outcome
        return self._baselines[tests]

    def _preload(self) -> bool:
        """Import the libraries that the last run has imported; return False if it imported no others."""
        files = json.loads(self._modules.read_text())
        if not files["grpo_ray"].startswith(str(self.copy.tree)):
            raise RuntimeError(f"grpo_ray is imported from {files['grpo_ray']}, not from {self.copy.tree}")
        libraries = {name for name, file in files.items() if not file.startswith(str(self.copy.tree))}
        new = [name for name in files if name in libraries - self._preloaded and name not in sys.modules]
        for name in new:
            with suppress(ImportError):  # a part of a library that has no name of its own
                importlib.import_module(name)
        self._preloaded |= libraries
        return bool(new)

    def run(self, tests: Sequence[str], limits: Limits) -> Outcome:
        """Run pytest on test files below `tests/` up to the first failure."""
        sys.stdout.flush()
        sys.stderr.flush()
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            self._run_in_child(tests, limits)
        code = None
        while code is None and time.monotonic() - started < limits.seconds:
            time.sleep(0.02)
            ended, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
        with suppress(ProcessLookupError):  # the child, and what its tests have started
            os.killpg(child, signal.SIGKILL)
        if code is None:
            os.waitpid(child, 0)
        exceeded = code is None or code == -signal.SIGXCPU
        output = self._output.read_text(encoding="utf-8", errors="replace")
        return Outcome(TIMED_OUT if exceeded or code is None else code, time.monotonic() - started, output)

    def _run_in_child(self, tests: Sequence[str], limits: Limits) -> None:
        """Run pytest in place of this process, which ends with it."""
        code = 1
        # A collection would write to each object that this process has inherited, and so copy their memory: seconds
        # for a process that has collected all unit tests.
        gc.freeze()
        try:
            os.setsid()
            sys.stdout = sys.stderr = self._output.open("w", encoding="utf-8", errors="replace")
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (int(limits.cpu_seconds), int(limits.cpu_seconds) + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
            os.chdir(self.copy.tree)
            os.environ.update(self.copy.environment)
            self._import_from_copy()
            import pytest

            options = ["-q", "-x", "-rfE", "--tb=short", "-m", "not slow", "--hypothesis-seed=0"]
            options += [
                "-p",
                "no:cacheprovider",
                "-p",
                "mutants_hypothesis",
                "--basetemp",
                str(self.copy.scratch / "t"),
            ]
            code = int(pytest.main([*options, *(f"tests/{file}" for file in tests)]))
            files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
            self._modules.write_text(json.dumps({name: file for name, file in files.items() if isinstance(file, str)}))
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _import_from_copy(self) -> None:
        """Import the package, the tests and their helpers from the copy, and forget those already imported."""
        own = [ROOT, *(ROOT / "tests" / name for name in ("helpers", "benchmarks"))]
        kept = [each for each in sys.path if each and Path(each).resolve() not in own]
        sys.path[:] = [str(self.copy.tree), str(self._plugins), *kept]
        folders = tuple(f"{ROOT / name}{os.sep}" for name in COPIED)
        for name, module in list(sys.modules.items()):
            if name != "__main__" and (getattr(module, "__file__", None) or "").startswith(folders):
                del sys.modules[name]


def try_mutant(tests: ForkedTests, package: str, mutant: Mutant, files: Paths) -> Result:
    """Run a mutant's test files, paths below `tests/`, until a test fails; none for an equivalent mutant."""
    result = Result(package, mutant.file, mutant.line, mutant.before, mutant.after, "SURVIVED")
    if mutant.equivalent:
        return replace(result, outcome="equivalent", detail=mutant.equivalent)
    if not files:
        return replace(result, detail="the module has no unit tests")
    limits = Limits.from_baseline(tests.baseline(files).seconds)
    with tests.copy.changed(mutant.file, mutant.source):
        outcome = tests.run(files, limits)
    result = replace(result, seconds=round(outcome.seconds, 1), tests=files)
    if outcome.code == PASSED:
        return result
    detail = "limit of time" if outcome.code == TIMED_OUT else outcome.failure[0] or outcome.error
    return replace(result, outcome="caught", detail=detail)


def scores(results: Sequence[Result]) -> dict[str, tuple[int, int, int]]:
    """Return the number of caught, of surviving and of equivalent mutants of each package."""
    counted = {}
    for package in dict.fromkeys(each.package for each in results):
        outcomes = [each.outcome for each in results if each.package == package]
        counted[package] = outcomes.count("caught"), outcomes.count("SURVIVED"), outcomes.count("equivalent")
    return counted


def format_scores(results: Sequence[Result]) -> str:
    """Format the score of each package, and the survivors with file, line and changed source."""
    lines = []
    for package, (caught, survived, equivalent) in scores(results).items():
        share = f"{caught / (caught + survived):.0%}" if caught + survived else "-"
        lines.append(f"{package}: {caught} of {caught + survived} caught ({share}), {equivalent} equivalent")
    for each in results:
        if each.outcome == "SURVIVED":
            lines += ["", f"SURVIVED grpo_ray/{each.file}:{each.line} {each.detail}".rstrip()]
            lines += [f"  - {each.before}", f"  + {each.after}"]
    return "\n".join(lines)


def save(path: Path, results: Sequence[Result]) -> None:
    """Write results as JSON."""
    path.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n", encoding="utf-8")


def select(names: Sequence[str], sample: int | None, seed: int, again: Path | None) -> list[tuple[str, Mutant]]:
    """Return the chosen mutants with their packages: a sample, or the survivors of earlier results."""
    survivors = None
    if again:
        rows = json.loads(again.read_text(encoding="utf-8"))
        survivors = {(row["file"], row["line"], row["after"]) for row in rows if row["outcome"] == "SURVIVED"}
    chosen = []
    for name in names:
        sources = {file: (ROOT / "grpo_ray" / file).read_text(encoding="utf-8") for file in modules_of(name)}
        mutants = [mutant for file, source in sources.items() for mutant in mutants_of(source, file)]
        if survivors is None:
            mutants = choose(mutants, sample, f"{seed}/{name}")
        else:
            mutants = [each for each in mutants if each.key in survivors]
        chosen += [(name, each) for each in mutants]
    return chosen


def main() -> int:
    """Run the command; return 0 if enough of each package's mutants were caught, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help=f"{', '.join(PACKAGES)}, or a module below grpo_ray/; may be repeated",
    )
    parser.add_argument("--sample", type=int, default=20, metavar="N", help="mutants of each package; default: 20")
    parser.add_argument("--all", action="store_true", help="all mutants in place of a sample")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the sample; default: 0")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only the survivors of the results in this file")
    parser.add_argument("--list", action="store_true", help="print the chosen mutants, and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file too")
    options = parser.parse_args()
    names = options.only or list(PACKAGES)
    if unknown := [name for name in names if not modules_of(name)]:
        parser.error(f"--only {unknown[0]} must be a module below grpo_ray/, or one of {', '.join(PACKAGES)}")
    chosen = select(names, None if options.all else options.sample, options.seed, options.again)
    if options.list:
        for name, mutant in chosen:
            print(f"{name} {mutant.file}:{mutant.line}\n  - {mutant.before}\n  + {mutant.after}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # on the way out, the copy is deleted
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copy = Copy(ROOT, Path(scratch), Path(sys.executable), with_cluster=False, max_seconds=0.0)
        tests = ForkedTests(copy)
        files = {mutant.file: unit_tests_of(mutant.file) for _, mutant in chosen}
        for name, mutant in chosen:
            result = try_mutant(tests, name, mutant, files[mutant.file])
            results.append(result)
            print(f"{result.outcome:10} {result.file}:{result.line} {result.after[:90]} | {result.detail}", flush=True)
            if options.json:
                save(options.json, results)
    print(f"\n{format_scores(results)}")
    enough = all(caught >= LEAST_SCORE * (caught + survived) for caught, survived, _ in scores(results).values())
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
