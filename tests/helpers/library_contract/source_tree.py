"""Names, classes and signatures of packages, read from their Python files; nothing is imported.

A name that cannot be followed (a compiled module, a base class of another package, a class with `__getattr__`) is
`UNKNOWN`, which differs from None: there is no such name.
"""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeGuard

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Unknown(Enum):
    """Mark of something that exists or may exist, and cannot be read."""

    UNKNOWN = "unknown"


UNKNOWN = Unknown.UNKNOWN

TRANSPARENT_BASES = {"object", "ABC", "Generic", "Protocol"}
"""Base classes from elsewhere that add nothing which our source uses."""

RECORD_DECORATORS = {"dataclass", "config", "define", "strict"}
RECORD_BASES = {"BaseModel", "NamedTuple", "Struct"}
"""Decorators and base classes which make a constructor out of annotated fields."""


@dataclass(frozen=True, eq=False)
class Module:
    """Python file of a package."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """Package that relative imports start from."""
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]

    @functools.cached_property
    def bindings(self) -> Mapping[str, list[ast.AST]]:
        """Name -> statements that bind it, in order; "*" has the star imports."""
        return collect_bindings(self.tree.body)

    @functools.cached_property
    def exported(self) -> set[str] | None:
        """`__all__`, if it is a literal."""
        for node in self.bindings.get("__all__", ()):
            if isinstance(node, ast.Assign):
                try:
                    return set(ast.literal_eval(node.value))
                except ValueError:
                    return None
        return None

    @property
    def is_complete(self) -> bool:
        """False for a compiled module, whose stub need not name everything, and for protobuf's, made at run time."""
        return self.path.suffix != ".pyi" and not self.path.stem.endswith("_pb2")


@dataclass(frozen=True, eq=False)
class Class:
    """Class of a module."""

    name: str
    module: Module
    node: ast.ClassDef

    def __str__(self) -> str:
        return f"{self.module.name}.{self.name}"

    @functools.cached_property
    def members(self) -> Mapping[str, list[ast.AST]]:
        """Name -> statements in the class's body that bind it. A bare annotation counts, as a field does."""
        return collect_bindings(self.node.body)

    @functools.cached_property
    def assigned(self) -> Mapping[str, tuple[ast.AST, FunctionNode]]:
        """Attribute that a method sets on itself -> statement, method."""
        found: dict[str, tuple[ast.AST, FunctionNode]] = {}
        for method in self.methods:
            arguments = [*method.args.posonlyargs, *method.args.args]
            if not arguments:
                continue
            own = arguments[0].arg
            for node in ast.walk(method):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets:
                    if is_attribute_of(target, own):
                        found.setdefault(target.attr, (node, method))
            for node in ast.walk(method):
                if is_attribute_of(node, own) and isinstance(node.ctx, ast.Store):
                    found.setdefault(node.attr, (node, method))
        return found

    @functools.cached_property
    def methods(self) -> list[FunctionNode]:
        return [node for nodes in self.members.values() for node in nodes if isinstance(node, FunctionNode)]

    @functools.cached_property
    def slots(self) -> set[str]:
        for node in self.members.get("__slots__", ()):
            if isinstance(node, ast.Assign):
                literals = (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
                return {each for each in literals if isinstance(each, str)}
        return set()

    @property
    def is_record(self) -> bool:
        """True if the constructor takes the annotated fields."""
        decorators = {last_name(node.func if isinstance(node, ast.Call) else node) for node in self.node.decorator_list}
        bases = {last_name(base) for base in self.node.bases}
        return bool(decorators & RECORD_DECORATORS or bases & RECORD_BASES)

    @property
    def fields(self) -> list[ast.AnnAssign]:
        """Fields of a record that its constructor takes."""
        return [
            node
            for nodes in self.members.values()
            for node in nodes
            if isinstance(node, ast.AnnAssign)
            and "ClassVar" not in ast.unparse(node.annotation)
            and "init=False" not in ast.unparse(node.value or node.annotation)
        ]


@dataclass(frozen=True, eq=False)
class Function:
    """Function of a module, or method of a class."""

    name: str
    module: Module
    node: FunctionNode
    owner: Class | None = None

    def __str__(self) -> str:
        return f"{self.owner or self.module.name}.{self.name}"

    def has_decorator(self, *names: str) -> bool:
        return any(
            last_name(node.func if isinstance(node, ast.Call) else node) in names for node in self.node.decorator_list
        )


@dataclass(frozen=True, eq=False)
class Value:
    """Anything else that has a name: a variable of a module, an attribute or a field."""

    name: str
    module: Module
    node: ast.AST
    owner: Class | None = None
    method: FunctionNode | None = None
    """Method that sets the attribute."""


Definition = Module | Class | Function | Value


@dataclass(frozen=True)
class Signature:
    """Parameters of a call, without `self`."""

    positional: tuple[str, ...] = ()
    keyword: frozenset[str] = frozenset()
    """All names that can be passed by keyword."""
    required: frozenset[str] = frozenset()
    takes_more: bool = False
    """True with `*args`."""
    is_open: bool = False
    """True if `**kwargs` go somewhere that cannot be read, so that any keyword may be right."""

    def problem(self, positional: int, keywords: Sequence[str], *, complete: bool = True) -> str | None:
        """Describe what is wrong with a call, or return None.

        Args:
            positional: number of positional arguments.
            keywords: names of keyword arguments.
            complete: False if the call also passes `*args` or `**kwargs`.
        """
        unknown = [] if self.is_open else [name for name in keywords if name not in self.keyword]
        if unknown:
            return f"has no parameter {', '.join(unknown)}; it takes {', '.join(sorted(self.keyword)) or 'none'}"
        if positional > len(self.positional) and not self.takes_more:
            return f"takes {len(self.positional)} positional arguments ({', '.join(self.positional)}), not {positional}"
        missing = self.required - set(keywords) - set(self.positional[:positional])
        if complete and missing:
            return f"also requires {', '.join(sorted(missing))}"
        return None


class SourceTree:
    """Packages below several folders."""

    def __init__(self, folders: Sequence[Path], packages: Mapping[str, Path] | None = None) -> None:
        """
        Args:
            folders: the first one that has a package gives it.
            packages: package -> the folder that gives it.
        """
        self.folders = folders
        self.packages = packages or {}
        self._modules: dict[str, Module | Unknown | None] = {}
        self._definitions: dict[tuple[int, str], Definition] = {}
        self._searching: set[tuple[str, str]] = set()

    # Modules and their names

    def module(self, name: str) -> Module | Unknown | None:
        """Return a module; UNKNOWN for a compiled one and for a package that is not there; None if there is none."""
        if name not in self._modules:
            self._modules[name] = self._find_module(name)
        return self._modules[name]

    def _find_module(self, name: str) -> Module | Unknown | None:
        file = self._file(name)
        if file is not None:
            return Module(name, file, parse(file))
        path = self._path(name)
        if path is None:
            return UNKNOWN
        if any(path.parent.glob(f"{path.name}.*so")):
            return UNKNOWN
        if path.is_dir() and any(path.glob("*.py")):  # a package without __init__.py
            return Module(name, path / "__init__.py", ast.Module([], []))
        return None

    def _path(self, name: str) -> Path | None:
        """Return the path of a module without its suffix, in the folder that has its package; None if none has it."""
        top, *rest = name.split(".")
        folders = [self.packages[top]] if top in self.packages else self.folders
        folder = next((each for each in folders if (each / top).is_dir() or (each / f"{top}.py").is_file()), None)
        return folder.joinpath(top, *rest) if folder else None

    def _file(self, name: str) -> Path | None:
        path = self._path(name)
        if path is None:
            return None
        files = (path / "__init__.py", path.with_name(f"{path.name}.py"), path.with_name(f"{path.name}.pyi"))
        return next((file for file in files if file.is_file()), None)

    def name_in(self, module: Module, name: str) -> Definition | Unknown | None:
        """Return the definition of a name of a module; for an imported name, that of the name it was imported from."""
        key = module.name, name
        if key in self._searching:
            return None
        self._searching.add(key)
        try:
            return self._name_in(module, name)
        finally:
            self._searching.discard(key)

    def _name_in(self, module: Module, name: str) -> Definition | Unknown | None:
        values: list[Definition | Unknown] = []
        for node in reversed(module.bindings.get(name, [])):
            found = self._bound(module, node, name)
            if found is not None and not isinstance(found, Value):
                return found
            if found is not None:
                values.append(found)
        if values:
            return values[0]
        if (submodule := self.module(f"{module.name}.{name}")) is not None and module.package == module.name:
            return submodule
        for node in module.bindings.get("*", ()):
            assert isinstance(node, ast.ImportFrom)
            source_name = imported_module(module, node)
            if not self._may_export(source_name, name):
                continue
            source = self.module(source_name)
            if isinstance(source, Module) and self._exports(source, name):
                found = self.name_in(source, name)
                if found is not None:
                    return found
        return None if module.is_complete else UNKNOWN

    def _may_export(self, module: str, name: str) -> bool:
        """Return False if the text of a module excludes that it exports a name; saves parsing hundreds of models."""
        file = self._file(module)
        text = file.read_text(encoding="utf-8") if file else ""
        return name in text or "import *" in text

    @staticmethod
    def _exports(module: Module, name: str) -> bool:
        return name in module.exported if module.exported is not None else not name.startswith("_")

    def _bound(self, module: Module, node: ast.AST, name: str) -> Definition | Unknown | None:
        """Return the definition that a statement binds to a name."""
        if isinstance(node, ast.Import):
            alias = next(each for each in node.names if (each.asname or each.name.partition(".")[0]) == name)
            return self.module(alias.name if alias.asname else name)
        if isinstance(node, ast.ImportFrom):
            alias = next(each for each in node.names if (each.asname or each.name) == name)
            source = self.module(imported_module(module, node))
            return self.name_in(source, alias.name) if isinstance(source, Module) else source
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            found = self.dotted(module, node.value)
            if found is not None and found is not UNKNOWN:
                return found
        return self._define(module, node, name)

    def _define(self, module: Module, node: ast.AST, name: str, owner: Class | None = None) -> Definition:
        key = id(node), name
        if key not in self._definitions:
            if isinstance(node, ast.ClassDef):
                self._definitions[key] = Class(f"{owner.name}.{name}" if owner else name, module, node)
            elif isinstance(node, FunctionNode):
                self._definitions[key] = Function(name, module, node, owner)
            else:
                self._definitions[key] = Value(name, module, node, owner)
        return self._definitions[key]

    def dotted(self, module: Module, node: ast.expr) -> Definition | Unknown | None:
        """Return the definition of `a` or `a.b.c` in a module."""
        if isinstance(node, ast.Name):
            return self.name_in(module, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(module, node.value)
            if isinstance(base, Module):
                return self.name_in(base, node.attr)
            if isinstance(base, Class):
                return self.member(base, node.attr)
        return UNKNOWN

    def find(self, path: str) -> Definition | Unknown | None:
        """Return the definition at `package.module:Class.member` or `package.module`."""
        name, _, rest = path.partition(":")
        found: Definition | Unknown | None = self.module(name)
        for part in rest.split(".") if rest else ():
            if isinstance(found, Module):
                found = self.name_in(found, part)
            elif isinstance(found, Class):
                found = self.member(found, part)
            else:
                break
        return found

    # Classes

    def bases(self, cls: Class) -> list[Class | Unknown]:
        """Return the base classes; those that add nothing are left out."""
        found: list[Class | Unknown] = []
        for node in cls.node.bases:
            base = node.value if isinstance(node, ast.Subscript) else node
            if last_name(base) in TRANSPARENT_BASES:
                continue
            definition = self.dotted(cls.module, base)
            found.append(definition if isinstance(definition, Class) and definition is not cls else UNKNOWN)
        return found

    def mro(self, cls: Class) -> list[Class | Unknown]:
        """Return a class and its bases in the order in which members are looked up."""
        order: list[Class | Unknown] = [cls]
        for base in self.bases(cls):
            order += [UNKNOWN] if base is UNKNOWN else self.mro(base)
        return [each for place, each in enumerate(order) if each not in order[place + 1 :]]

    def member(self, cls: Class, name: str) -> Definition | Unknown | None:
        """Return a member of a class or of its bases. None only if all bases could be read."""
        return self.member_of(self.mro(cls), name)

    def member_of(self, order: Sequence[Class | Unknown], name: str) -> Definition | Unknown | None:
        """Return the first member with this name in a list of classes."""
        is_open = False
        for each in order:
            if each is UNKNOWN:
                is_open = True
                continue
            assert isinstance(each, Class)
            found = self.own_member(each, name)
            if found is not None:
                return found
            is_open = is_open or "__getattr__" in each.members
        return UNKNOWN if is_open else None

    def own_member(self, cls: Class, name: str) -> Definition | None:
        """Return a member that the class itself has."""
        if nodes := cls.members.get(name):
            getter = next((node for node in nodes if isinstance(node, FunctionNode)), nodes[-1])
            overloads = isinstance(getter, FunctionNode) and "overload" in map(last_name, getter.decorator_list)
            return self._define(cls.module, nodes[-1] if overloads else getter, name, cls)
        if name in cls.assigned:
            node, method = cls.assigned[name]
            return Value(name, cls.module, node, cls, method)
        return Value(name, cls.module, cls.node, cls) if name in cls.slots else None

    # Signatures

    def signature(self, function: Function, *, bound: bool) -> Signature:
        """Return the parameters of a function.

        Args:
            bound: leave out the first one, which the object or the class fills.
        """
        node = function.node.args
        positional = [each.arg for each in (*node.posonlyargs, *node.args)]
        with_default = positional[len(positional) - len(node.defaults) :]
        if bound and not function.has_decorator("staticmethod"):
            positional = positional[1:]
        keyword_only = [each.arg for each in node.kwonlyargs]
        required = {name for name in positional if name not in with_default}
        required |= {name for name, default in zip(keyword_only, node.kw_defaults, strict=True) if default is None}
        forwarded = self._forwarded(function) if node.kwarg else frozenset()
        names = {*positional, *keyword_only} - {each.arg for each in node.posonlyargs}
        return Signature(
            tuple(positional),
            frozenset(names | (forwarded or set())),
            frozenset(required),
            takes_more=node.vararg is not None,
            is_open=forwarded is None,
        )

    def constructor(self, cls: Class) -> Signature | None:
        """Return the parameters of a class's constructor; None if they cannot be read."""
        order = self.mro(cls)
        for each in order:
            if each is UNKNOWN:
                return None
            assert isinstance(each, Class)
            for name in ("__init__", "__new__"):
                found = self.own_member(each, name)
                if isinstance(found, Function):
                    return self.signature(found, bound=True)
            if each.is_record:
                return self._record_signature([one for one in order if isinstance(one, Class)])
        return Signature()

    @staticmethod
    def _record_signature(order: Sequence[Class]) -> Signature:
        fields: dict[str, bool] = {}
        for cls in reversed(order):
            for node in cls.fields if cls.is_record else ():
                fields[node.target.id] = node.value is None  # type: ignore[union-attr]
        return Signature(
            tuple(fields), frozenset(fields), frozenset(name for name, is_required in fields.items() if is_required)
        )

    def call_signature(self, callee: Definition, *, bound: bool = False) -> Signature | None:
        """Return the parameters that a function or a class takes; None if they cannot be read."""
        if isinstance(callee, Class):
            return self.constructor(callee)
        return self.signature(callee, bound=bound) if isinstance(callee, Function) else None

    def _forwarded(self, function: Function) -> frozenset[str] | None:
        """Return the keywords that a function's `**kwargs` can hold; None if they go where they cannot be read.

        They are the parameters of each function that gets them as `**kwargs`, and the keys that are read from them.
        """
        assert function.node.args.kwarg is not None
        kwargs = function.node.args.kwarg.arg
        if (str(function), kwargs) in self._searching:
            return frozenset()
        self._searching.add((str(function), kwargs))
        try:
            names: set[str] = set()
            understood = 0
            for node in ast.walk(function.node):
                keys = key_read(node, kwargs)
                names |= keys
                understood += len(keys)
                if isinstance(node, ast.Call) and any(is_spread(each, kwargs) for each in node.keywords):
                    signature = self._callee_signature(function, node.func)
                    if signature is None or signature.is_open:
                        return None
                    names |= signature.keyword
                    understood += 1
            uses = sum(isinstance(node, ast.Name) and node.id == kwargs for node in ast.walk(function.node))
            return frozenset(names) if uses and uses == understood else None
        finally:
            self._searching.discard((str(function), kwargs))

    def _callee_signature(self, function: Function, callee: ast.expr) -> Signature | None:
        owner = function.owner
        if isinstance(callee, ast.Attribute) and owner:
            base = callee.value
            if isinstance(base, ast.Call) and last_name(base.func) == "super":
                found = self.member_of(self.mro(owner)[1:], callee.attr)
                return self.signature(found, bound=True) if isinstance(found, Function) else None
            if isinstance(base, ast.Name) and base.id in ("self", "cls"):
                found = self.member(owner, callee.attr)
                return self.signature(found, bound=True) if isinstance(found, Function) else None
        if isinstance(callee, ast.Name) and callee.id == "cls" and owner:
            return self.constructor(owner)
        definition = self.dotted(function.module, callee)
        if definition is None or definition is UNKNOWN:
            definition = self._imported_inside(function, callee)
        if definition is None or definition is UNKNOWN:
            return None
        return self.call_signature(definition)

    def _imported_inside(self, function: Function, callee: ast.expr) -> Definition | Unknown | None:
        """Return the definition of a name that the function itself imports."""
        local = collect_bindings([node for node in ast.walk(function.node) if isinstance(node, ast.ImportFrom)])
        nodes = local.get(callee.id, []) if isinstance(callee, ast.Name) else []
        return self._bound(function.module, nodes[-1], callee.id) if nodes else None  # type: ignore[attr-defined]


@functools.cache
def parse(file: Path) -> ast.Module:
    """Parse a file. Cached, since several releases are checked against the same files of ours."""
    return ast.parse(file.read_text(encoding="utf-8"))


def imported_module(module: Module, node: ast.ImportFrom) -> str:
    """Return the complete name of the module that a statement imports from."""
    if not node.level:
        return node.module or ""
    package = module.package.split(".")
    start = package[: len(package) - node.level + 1]
    return ".".join([*start, node.module] if node.module else start)


def collect_bindings(body: Sequence[ast.stmt]) -> Mapping[str, list[ast.AST]]:
    """Return the names that statements bind, also those below `if`, `try` and `with`."""
    found: dict[str, list[ast.AST]] = defaultdict(list)
    for node in statements(body):
        for name in bound_names(node):
            found[name].append(node)
    return found


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in order, those inside of compound ones too; not those of functions and classes."""
    for node in body:
        yield node
        if isinstance(node, ast.ClassDef | FunctionNode):
            continue
        for name in ("body", "handlers", "orelse", "finalbody"):
            for inner in getattr(node, name, ()):
                yield from statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def bound_names(node: ast.stmt) -> list[str]:
    """Return the names that one statement binds."""
    if isinstance(node, ast.ClassDef | FunctionNode):
        return [node.name]
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [each.id for target in targets for each in ast.walk(target) if is_stored(each)]
    return []


def is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    """Return True for a variable that is assigned to."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def key_read(node: ast.AST, mapping: str) -> set[str]:
    """Return the key if a node reads one from a mapping: `m["key"]`, `m.get("key")`, `m.pop("key")`, `"key" in m`."""
    key: ast.expr | None = None
    if isinstance(node, ast.Subscript) and last_name(node.value) == mapping:
        key = node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and last_name(node.func.value) == mapping:
        key = node.args[0] if node.args and node.func.attr in ("get", "pop", "setdefault") else None
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        key = node.left if last_name(node.comparators[0]) == mapping else None
    return {key.value} if isinstance(key, ast.Constant) and isinstance(key.value, str) else set()


def is_spread(node: ast.keyword, mapping: str) -> bool:
    """Return True for `**mapping` in a call."""
    return node.arg is None and last_name(node.value) == mapping


def is_attribute_of(node: object, name: str) -> TypeGuard[ast.Attribute]:
    """Return True for the expression `name.attribute`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name


def last_name(node: ast.AST) -> str:
    """Return `c` for `a.b.c`, and `a` for `a`; "" for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
