"""Uses of libraries in our source, each checked against the sources of one release.

Checked are imported names, attributes of modules, classes and objects whose type is known, arguments of calls, and
methods and attributes of a library's class that a subclass of ours reads, overrides or sets. What the types do not
show is in `table.py`.
"""

import ast
import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from library_contract.inference import Inference, Instance, Itself, Scope, Super, Type
from library_contract.source_tree import (
    UNKNOWN,
    Class,
    Definition,
    Function,
    FunctionNode,
    Module,
    SourceTree,
    Unknown,
    Value,
    bound_names,
    imported_module,
    last_name,
)


@dataclass(frozen=True)
class Check:
    """One use of a library, and the mistake in it."""

    library: str
    file: str
    """Path of our file below the repository."""
    line: int
    use: str
    """Name that is used, as in `trl.trainer.grpo_trainer.GRPOTrainer._step`."""
    problem: str | None = None
    """Difference in the release; None if the use is right."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.use} {self.problem or 'is there'}"


@dataclass(frozen=True)
class Uses:
    """Uses in our source."""

    checks: tuple[Check, ...]
    unseen: frozenset[tuple[str, str]]
    """Attributes of objects whose type is not known: file, name."""


def check_uses(tree: SourceTree, root: Path, files: Sequence[Path], libraries: Sequence[str]) -> Uses:
    """Check all uses of libraries in files of ours.

    Args:
        tree: our source and that of the libraries.
        root: folder that our packages are in.
        files: below `root`.
        libraries: names of their packages.
    """
    checks: list[Check] = []
    unseen: set[tuple[str, str]] = set()
    for file in files:
        name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        module = tree.module(name)
        assert isinstance(module, Module), f"{file} is not in the source tree"
        reader = _Reader(tree, module, file.relative_to(root).as_posix(), set(libraries))
        reader.read()
        checks += reader.checks
        unseen |= reader.unseen
    return Uses(tuple(checks), frozenset(unseen))


class _Reader:
    """Reader of one file of ours."""

    def __init__(self, tree: SourceTree, module: Module, file: str, libraries: set[str]) -> None:
        self.tree = tree
        self.module = module
        self.file = file
        self.libraries = libraries
        self.inference = Inference(tree)
        self.checks: list[Check] = []
        self.unseen: set[tuple[str, str]] = set()
        self.optional: frozenset[str] = frozenset()
        """Attributes whose existence the present function checks before it uses them."""
        self.foreign = {
            name
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Import | ast.ImportFrom) and self._is_foreign(node)
            for name in bound_names(node)
        }
        """Names imported from packages that are neither ours nor checked."""

    def _is_foreign(self, node: ast.Import | ast.ImportFrom) -> bool:
        names = [imported_module(self.module, node)] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        return all(self.tree.module(name.partition(".")[0]) is UNKNOWN for name in names)

    def read(self) -> None:
        scope = Scope(self.module)
        for node in self.module.tree.body:
            self._visit(node, scope)

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.ClassDef):
            self._visit_class(node, scope)
        elif isinstance(node, FunctionNode | ast.Lambda):
            self._visit_function(node, scope)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            inner = scope.inner()
            for generator in node.generators:
                self._visit(generator.iter, inner)
                self.inference.learn(inner, generator)
            for child in ast.iter_child_nodes(node):
                self._visit_comprehension_part(child, inner)
        else:
            self._visit_other(node, scope)

    def _visit_comprehension_part(self, child: ast.AST, scope: Scope) -> None:
        if not isinstance(child, ast.comprehension):
            self._visit(child, scope)
            return
        for condition in child.ifs:
            self._visit(condition, scope)

    def _visit_other(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._check_import(node)
        if isinstance(node, ast.For | ast.AsyncFor):
            self._visit(node.iter, scope)
            self.inference.learn(scope, node)
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Assign):
            children = [node.value, *node.targets]
        for child in children:
            self._visit(child, scope)
        if isinstance(node, ast.Attribute):
            self._check_attribute(node, scope)
        elif isinstance(node, ast.Call):
            self._check_call(node, scope)
        if not isinstance(node, ast.For | ast.AsyncFor):
            self.inference.learn(scope, node)

    def _visit_class(self, node: ast.ClassDef, scope: Scope) -> None:
        for child in (*node.bases, *node.keywords, *node.decorator_list):
            self._visit(child, scope)
        found = self.tree.name_in(self.module, node.name)
        cls = found if isinstance(found, Class) and found.node is node else Class(node.name, self.module, node)
        inner = Scope(self.module, cls, dict(scope.names))
        for child in node.body:
            self._visit(child, inner)
        self.checks += self._class_checks(cls)

    def _visit_function(self, node: FunctionNode | ast.Lambda, scope: Scope) -> None:
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        defaults = [each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None]
        for child in (*decorators, *defaults):
            self._visit(child, scope)
        inner = self.inference.function_scope(scope, node)
        outer, self.optional = self.optional, self.optional | optional_attributes(node)
        body: Sequence[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else node.body
        for statement in body:
            self._visit(statement, inner)
        self.optional = outer

    # Checks

    def _add(self, library: str, node: ast.AST, use: str, problem: str | None) -> None:
        self.checks.append(Check(library, self.file, getattr(node, "lineno", 0), use, problem))

    def _library(self, module: str) -> str | None:
        top = module.partition(".")[0]
        return top if top in self.libraries else None

    def _check_import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if library := self._library(alias.name):
                    problem = None if self.tree.module(alias.name) is not None else "is no module"
                    self._add(library, node, alias.name, problem)
            return
        name = imported_module(self.module, node)
        if not (library := self._library(name)):
            return
        source = self.tree.module(name)
        for alias in node.names:
            problem = None
            if source is None:
                problem = f"cannot be imported: there is no module {name}"
            elif isinstance(source, Module) and self.tree.name_in(source, alias.name) is None:
                problem = f"is not there; the module has {similar(source.bindings, alias.name)}"
            self._add(library, node, f"{name}.{alias.name}", problem)

    def _check_attribute(self, node: ast.Attribute, scope: Scope) -> None:
        base = self.inference.infer(scope, node.value)
        found = self.inference.attribute(base, node.attr)
        if found is UNKNOWN:
            if not is_owned(node, scope) and root_name(node) not in self.foreign:
                self.unseen.add((self.file, node.attr))
            return
        if found is None and node.attr in self.optional:
            return
        owner = self._owner(base)
        if found is not None:
            if library := self._library(module_of(found)):
                self._add(library, node, f"{owner}.{node.attr}", None)
            return
        if library := next((each for each in self._libraries_of(base)), None):
            self._add(
                library, node, f"{owner}.{node.attr}", f"is not there; it has {self._alternatives(base, node.attr)}"
            )

    def _check_call(self, node: ast.Call, scope: Scope) -> None:
        callee = self.inference.infer(scope, node.func)
        if not isinstance(callee, Itself) or not (library := self._library(module_of(callee.definition))):
            return
        signature = self.tree.call_signature(callee.definition, bound=callee.bound)
        if signature is None:
            return
        keywords = [each.arg for each in node.keywords if each.arg]
        has_spread = len(keywords) < len(node.keywords) or any(isinstance(each, ast.Starred) for each in node.args)
        positional = [each for each in node.args if not isinstance(each, ast.Starred)]
        problem = signature.problem(len(positional), keywords, complete=not has_spread)
        self._add(library, node, f"{callee.definition}({', '.join(keywords)})", problem)

    def _class_checks(self, cls: Class) -> Iterator[Check]:
        """Check the methods of a class that override a library's: they must take the arguments of the library's."""
        order = self.tree.mro(cls)[1:]
        for name, library, base in inherited_names(self.tree, cls, self.libraries):
            own = self.tree.own_member(cls, name)
            problem = None
            if isinstance(own, Function) and isinstance(base, Function) and name != "__init__":
                problem = override_problem(own, base)
            line = 0 if own is None or isinstance(own, Module) else getattr(own.node, "lineno", 0)
            yield Check(library, self.file, line, f"{first_class(order)}.{name}", problem)

    def _libraries_of(self, base: Type | None) -> Iterator[str]:
        if isinstance(base, Itself) and isinstance(base.definition, Module):
            modules = [base.definition.name]
        else:
            cls = class_of(base)
            order = self.tree.mro(cls) if cls else []
            modules = [each.module.name for each in order if isinstance(each, Class)]
        yield from (library for module in modules if (library := self._library(module)))

    def _owner(self, base: Type | None) -> str:
        if isinstance(base, Itself) and isinstance(base.definition, Module):
            return base.definition.name
        cls = class_of(base)
        order = self.tree.mro(cls) if cls else []
        return str(first_class(order, self.libraries) or cls)

    def _alternatives(self, base: Type | None, name: str) -> str:
        if isinstance(base, Itself) and isinstance(base.definition, Module):
            return similar(base.definition.bindings, name)
        cls = class_of(base)
        order = self.tree.mro(cls) if cls else []
        classes = [each for each in order if isinstance(each, Class) and self._library(each.module.name)]
        return similar([member for each in classes for member in (*each.members, *each.assigned)], name)


def inherited_names(
    tree: SourceTree, cls: Class, libraries: set[str]
) -> Iterator[tuple[str, str, Definition | Unknown]]:
    """Yield the names that a class of ours defines or sets and a library's base class has: name, library, definition.

    A bare annotation defines nothing. Special methods other than `__init__` are left out.
    """
    order = tree.mro(cls)[1:]
    defined = {
        name
        for name, nodes in cls.members.items()
        if not all(isinstance(node, ast.AnnAssign) and node.value is None for node in nodes)
    }
    for name in sorted(defined | set(cls.assigned)):
        if name.startswith("__") and name != "__init__":
            continue
        found = tree.member_of([each for each in order if isinstance(each, Class)], name)
        if found is not None and (library := module_of(found).partition(".")[0]) in libraries:
            yield name, library, found


def override_problem(own: Function, base: Function) -> str | None:
    """Describe why a method cannot take the place of the one that it overrides; None if it can."""
    ours, theirs = own.node.args, base.node.args
    own_names = [each.arg for each in (*ours.posonlyargs, *ours.args)][1:]
    base_names = [each.arg for each in (*theirs.posonlyargs, *theirs.args)][1:]
    if own.has_decorator("property", "cached_property") or base.has_decorator("property", "cached_property"):
        return None
    renamed = [pair for pair in zip(own_names, base_names, strict=False) if pair[0] != pair[1]]
    if renamed:
        return f"has parameter {renamed[0][1]} where the override has {renamed[0][0]}"
    missing = set() if ours.vararg else set(base_names[len(own_names) :])
    missing |= {each.arg for each in theirs.kwonlyargs}
    missing -= {each.arg for each in ours.kwonlyargs}
    if missing and not ours.kwarg:
        return f"has parameter {', '.join(sorted(missing))}, which the override does not take"
    if theirs.kwarg:
        return None
    extra = own_names[len(base_names) : len(own_names) - len(ours.defaults)] if not theirs.vararg else []
    required = {each.arg for each, default in zip(ours.kwonlyargs, ours.kw_defaults, strict=True) if default is None}
    extra += sorted(required - {each.arg for each in theirs.kwonlyargs})
    return f"has no parameter {', '.join(extra)}, which the override requires" if extra else None


def module_of(found: Definition | Unknown) -> str:
    """Return the complete name of the module that a definition is in."""
    if isinstance(found, Module):
        return found.name
    return found.module.name if isinstance(found, Class | Function | Value) else ""


def class_of(of: Type | None) -> Class | None:
    """Return the class of an object, of `super()`, or the class itself."""
    if isinstance(of, Instance | Super):
        return of.cls
    return of.definition if isinstance(of, Itself) and isinstance(of.definition, Class) else None


def first_class(order: Sequence[Class | Unknown], libraries: set[str] | None = None) -> Class | None:
    """Return the first class, of a library if some are given, in the order in which members are looked up."""
    for each in order:
        if isinstance(each, Class) and (libraries is None or each.module.name.partition(".")[0] in libraries):
            return each
    return None


def is_owned(node: ast.Attribute, scope: Scope) -> bool:
    """Return True for an attribute of `self` in a class: its type is known as far as it can be."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and scope.cls is not None


def root_name(node: ast.expr) -> str:
    """Return `a` for `a.b.c`; "" if it does not begin with a name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def optional_attributes(function: ast.AST) -> set[str]:
    """Return the attributes that a function looks up with `hasattr`, or with `getattr` and a default."""
    return {
        str(node.args[1].value)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and (last_name(node.func), len(node.args)) in (("hasattr", 2), ("getattr", 3))
        and isinstance(node.args[1], ast.Constant)
    }


def similar(names: Iterable[str], name: str) -> str:
    """Return the names that are closest to a missing one."""
    return ", ".join(difflib.get_close_matches(name, sorted(set(names)), n=3, cutoff=0.4)) or "nothing like it"
