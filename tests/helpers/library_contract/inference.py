"""Types of expressions, as far as annotations, constructors and assignments give them.

An expression without a known type is None, and nothing is said about it. Where a function tests a variable with
`isinstance` or `hasattr`, the variable has no known type in it.
"""

import ast
from dataclasses import dataclass, field

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
    collect_bindings,
    last_name,
)

MANY = {"list", "List", "Sequence", "Iterable", "Iterator", "Collection", "set", "frozenset", "Generator", "deque"}
MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict"}
MAX_DEPTH = 12
"""Steps from one expression to the next, after which a type counts as unknown."""


@dataclass(frozen=True)
class Itself:
    """A module, class or function itself. A method that was reached through an object is bound."""

    definition: Definition
    bound: bool = False


@dataclass(frozen=True)
class Instance:
    """An object of a class."""

    cls: Class


@dataclass(frozen=True)
class Super:
    """`super()` in a class."""

    cls: Class


@dataclass(frozen=True)
class Many:
    """A collection of elements of one type."""

    element: "Type | None"


@dataclass(frozen=True)
class Table:
    """A mapping to values of one type."""

    value: "Type | None"


@dataclass(frozen=True)
class Row:
    """A tuple."""

    elements: "tuple[Type | None, ...]"


Type = Itself | Instance | Super | Many | Table | Row


@dataclass
class Scope:
    """Names of one function, or of one module outside of functions."""

    module: Module
    cls: Class | None = None
    names: dict[str, Type | None] = field(default_factory=dict)
    tested: frozenset[str] = frozenset()
    """Variables of unknown type whatever is assigned to them, because their kind is tested."""

    def inner(self) -> "Scope":
        """Return the scope of a function inside of this one."""
        return Scope(self.module, self.cls, dict(self.names), self.tested)

    def bind(self, name: str, value: Type | None) -> None:
        """Take note of the type of a variable."""
        self.names[name] = None if name in self.tested else value


class Inference:
    """Types of expressions in the modules of a source tree."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self._depth = 0

    # Scopes

    def function_scope(self, scope: Scope, function: FunctionNode | ast.Lambda) -> Scope:
        """Return the scope of a function: its parameters, and the names that it imports and assigns."""
        inner = scope.inner()
        inner.tested |= tested_names(function)
        arguments = function.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            inner.bind(each.arg, self.annotated(scope.module, each.annotation) if each.annotation else None)
        for extra in (arguments.vararg, arguments.kwarg):
            if extra:
                inner.names[extra.arg] = None
        if isinstance(function, ast.Lambda):
            return inner
        decorators = set(map(last_name, function.decorator_list))
        parameters = [*arguments.posonlyargs, *arguments.args]
        if scope.cls and function in scope.cls.methods and parameters and "staticmethod" not in decorators:
            is_class = "classmethod" in decorators
            inner.names[parameters[0].arg] = Itself(scope.cls) if is_class else Instance(scope.cls)
        for name, nodes in collect_bindings(function.body).items():
            if isinstance(nodes[-1], ast.Import | ast.ImportFrom):
                found = self.tree._bound(scope.module, nodes[-1], name)
                inner.names[name] = reference(found)
        return inner

    def learn(self, scope: Scope, node: ast.AST) -> None:
        """Take note of the names that a statement binds."""
        if isinstance(node, ast.Assign):
            value = self.infer(scope, node.value)
            for target in node.targets:
                self._assign(scope, target, value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            scope.bind(node.target.id, self.annotated(scope.module, node.annotation))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._assign(scope, node.target, self._element(self.infer(scope, node.iter)))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(scope, node.optional_vars, None)
        elif isinstance(node, ast.NamedExpr):
            self._assign(scope, node.target, self.infer(scope, node.value))
        elif isinstance(node, ast.ExceptHandler) and node.name:
            scope.names[node.name] = None

    def _assign(self, scope: Scope, target: ast.expr, value: Type | None) -> None:
        if isinstance(target, ast.Name):
            scope.bind(target.id, value)
        elif isinstance(target, ast.Starred):
            self._assign(scope, target.value, None)
        elif isinstance(target, ast.Tuple | ast.List):
            for place, each in enumerate(target.elts):
                element = value.element if isinstance(value, Many) else None
                if isinstance(value, Row) and place < len(value.elements):
                    element = value.elements[place]
                self._assign(scope, each, element)

    @staticmethod
    def _element(value: Type | None) -> Type | None:
        return value.element if isinstance(value, Many) else None

    # Expressions

    def infer(self, scope: Scope, node: ast.expr) -> Type | None:
        """Return the type of an expression; None if it is not known."""
        if self._depth > MAX_DEPTH:
            return None
        self._depth += 1
        try:
            return self._infer(scope, node)
        finally:
            self._depth -= 1

    def _infer(self, scope: Scope, node: ast.expr) -> Type | None:
        if isinstance(node, ast.Name):
            if node.id in scope.names:
                return scope.names[node.id]
            return reference(self.tree.name_in(scope.module, node.id), self)
        if isinstance(node, ast.Attribute):
            base = self.infer(scope, node.value)
            return self.type_of(self.attribute(base, node.attr), of=base)
        if isinstance(node, ast.Call):
            return self._call(scope, node)
        if isinstance(node, ast.Subscript):
            return self._subscript(self.infer(scope, node.value), node.slice)
        if isinstance(node, ast.IfExp):
            return self.infer(scope, node.body) or self.infer(scope, node.orelse)
        if isinstance(node, ast.BoolOp):
            return self.infer(scope, node.values[0])
        if isinstance(node, ast.NamedExpr):
            return self.infer(scope, node.value)
        if isinstance(node, ast.Tuple):
            return Row(tuple(self.infer(scope, each) for each in node.elts))
        if isinstance(node, ast.List):
            return Many(self.infer(scope, node.elts[0])) if node.elts else None
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            inner = scope.inner()
            for generator in node.generators:
                self.learn(inner, generator)
            return Many(self.infer(inner, node.elt))
        return None

    def _call(self, scope: Scope, node: ast.Call) -> Type | None:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and scope.cls:
            return Super(scope.cls)
        callee = self.infer(scope, node.func)
        if not isinstance(callee, Itself):
            return None
        if isinstance(callee.definition, Class):
            return Instance(callee.definition)
        function = callee.definition
        if not isinstance(function, Function) or not function.node.returns:
            return None
        if function.has_decorator("contextmanager", "asynccontextmanager"):
            return None
        if last_name(function.node.returns) == "Self":
            base = self.infer(scope, node.func.value) if isinstance(node.func, ast.Attribute) else None
            if isinstance(base, Itself) and isinstance(base.definition, Class):
                return Instance(base.definition)
            return base
        return self.annotated(function.module, function.node.returns)

    @staticmethod
    def _subscript(base: Type | None, index: ast.expr) -> Type | None:
        if isinstance(base, Many):
            return base if isinstance(index, ast.Slice) else base.element
        if isinstance(base, Row) and isinstance(index, ast.Constant) and isinstance(index.value, int):
            return base.elements[index.value] if -len(base.elements) <= index.value < len(base.elements) else None
        return base.value if isinstance(base, Table) else None

    def attribute(self, base: Type | None, name: str) -> Definition | Unknown | None:
        """Return an attribute of an object, class or module; None if it certainly has none."""
        if isinstance(base, Instance):
            return self.tree.member(base.cls, name)
        if isinstance(base, Super):
            return self.tree.member_of(self.tree.mro(base.cls)[1:], name)
        if isinstance(base, Itself) and isinstance(base.definition, Module):
            return UNKNOWN if name.startswith("__") else self.tree.name_in(base.definition, name)
        if isinstance(base, Itself) and isinstance(base.definition, Class):
            return UNKNOWN if name.startswith("__") else self.tree.member(base.definition, name)
        return UNKNOWN

    def type_of(self, found: Definition | Unknown | None, *, of: Type | None) -> Type | None:
        """Return the type of an attribute that was found."""
        if isinstance(found, Function):
            if found.has_decorator("property", "cached_property") and isinstance(of, Instance | Super):
                return self.annotated(found.module, found.node.returns) if found.node.returns else None
            through_object = isinstance(of, Instance | Super) or found.has_decorator("classmethod")
            return Itself(found, bound=through_object and found.owner is not None)
        if isinstance(found, Value):
            return self.value_type(found)
        return reference(found)

    def value_type(self, value: Value) -> Type | None:
        """Return the type of a variable, field or attribute, by its annotation or the value that is assigned to it."""
        if self._depth > MAX_DEPTH:
            return None
        node = value.node
        if isinstance(node, ast.AnnAssign):
            return self.annotated(value.module, node.annotation)
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            return None
        if not isinstance(node.targets[0], ast.Name | ast.Attribute):
            return None
        scope = Scope(value.module, value.owner)
        if value.method is not None:
            self._depth += 1  # a method may assign what it reads from itself
            scope = self.function_scope(scope, value.method)
            self._depth -= 1
        return self.infer(scope, node.value)

    # Annotations

    def annotated(self, module: Module, node: ast.expr) -> Type | None:
        """Return the type that an annotation names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            sides = [side for side in (node.left, node.right) if not is_none(side)]
            return self.annotated(module, sides[0]) if len(sides) == 1 else None
        if isinstance(node, ast.Subscript):
            return self._annotated_generic(module, node)
        if isinstance(node, ast.Name | ast.Attribute):
            found = self.tree.dotted(module, node)
            if isinstance(found, Class):
                return Instance(found)
            if isinstance(found, Value) and isinstance(found.node, ast.Assign) and self._depth <= MAX_DEPTH:
                self._depth += 1
                try:  # a name for a type
                    is_type = isinstance(found.node.value, ast.Subscript | ast.BinOp)
                    return self.annotated(found.module, found.node.value) if is_type else None
                finally:
                    self._depth -= 1
        return None

    def _annotated_generic(self, module: Module, node: ast.Subscript) -> Type | None:
        name = last_name(node.value)
        arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in MANY:
            return Many(self.annotated(module, arguments[0]))
        if name in MAPPINGS and len(arguments) == 2:
            return Table(self.annotated(module, arguments[1]))
        if name == "tuple":
            if len(arguments) == 2 and isinstance(arguments[1], ast.Constant):  # tuple[X, ...]
                return Many(self.annotated(module, arguments[0]))
            return Row(tuple(self.annotated(module, each) for each in arguments))
        if name in ("Optional", "Annotated", "Final", "ClassVar"):
            return self.annotated(module, arguments[0])
        if name in ("type", "Type"):
            found = self.annotated(module, arguments[0])
            return Itself(found.cls) if isinstance(found, Instance) else None
        found = self.annotated(module, node.value)
        return found if isinstance(found, Instance) else None


def reference(found: Definition | Unknown | None, inference: Inference | None = None) -> Type | None:
    """Return the type of a name that stands for a definition."""
    if found is None or found is UNKNOWN:
        return None
    if isinstance(found, Value):
        return inference.value_type(found) if inference else None
    return Itself(found)


def is_none(node: ast.expr) -> bool:
    """Return True for the annotation `None`."""
    return isinstance(node, ast.Constant) and node.value is None


def tested_names(function: ast.AST) -> frozenset[str]:
    """Return the variables whose kind a function tests, so that their annotated type is not the whole truth."""
    return frozenset(
        node.args[0].id
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "hasattr", "issubclass")
        and isinstance(node.args[0], ast.Name)
    )
