"""A parsed file: who encloses whom, what each name is bound to, and what it is called elsewhere.

Nothing of a checked file is imported or executed.
"""

from __future__ import annotations

import ast
import dataclasses
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Hits = Iterator[tuple[ast.AST, str]]
"""Refused nodes, each with what is wrong."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def words(text: str) -> frozenset[str]:
    """The set of the words of a text."""
    return frozenset(text.split())


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """One place that gives a name its meaning.

    ``kind`` is "import" (``target`` is the dotted origin), "def", "class", "argument", "assign"
    (``value`` where it is known) or "augmented".
    """

    kind: str
    node: ast.AST
    value: ast.expr | None = None
    target: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """One parsed file and the tables that the rules read.

    Attributes:
      path: as given or reached, for messages.
      module: dotted name within its package, or the stem of a file outside any package.
      is_package_file: shipped code: inside a package and not a test.
      tree: the module.
      parents: enclosing node of every node.
      scopes: the scope in which each node is evaluated.
      bindings: names bound in each scope.
      globals_: names that a function declared ``global``.
    """

    path: str
    module: str
    is_package_file: bool
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    parents: Mapping[ast.AST, ast.AST]
    scopes: Mapping[ast.AST, ast.AST]
    bindings: Mapping[ast.AST, Mapping[str, list[Binding]]]
    globals_: Mapping[ast.AST, frozenset[str]]

    def home(self, name: ast.Name) -> ast.AST | None:
        """The scope that binds a name as seen from where it stands; None for a builtin."""
        scope, first = self.scopes[name], True
        while True:
            if name.id in self.globals_.get(scope, ()):
                return self.tree if name.id in self.bindings[self.tree] else None
            visible = first or not isinstance(scope, ast.ClassDef)
            if visible and name.id in self.bindings.get(scope, {}):
                return scope
            if scope is self.tree:
                return None
            scope, first = self.scopes[scope], False

    def looked_through(self, expr: ast.expr) -> ast.expr:
        """The call that a name is bound to once (``memo = lru_cache(8)``), else ``expr``."""
        if isinstance(expr, ast.Name):
            found = self.bound_to(expr)
            if len(found) == 1 and isinstance(found[0].value, ast.Call):
                return found[0].value
        return expr

    def bound_to(self, name: ast.Name) -> tuple[Binding, ...]:
        """Every binding of the name in its home scope; empty for a builtin."""
        home = self.home(name)
        return () if home is None else tuple(self.bindings[home][name.id])

    def qualify(self, expr: ast.AST, depth: int = 0) -> str | None:
        """Dotted origin of a name or attribute: ``jnp.ones`` is "jax.numpy.ones".

        Builtins are "builtins.x", names of this file "<module>.x"; local variables have none.
        """
        if isinstance(expr, ast.Attribute):
            base = self.qualify(expr.value, depth)
            return None if base is None else f"{base}.{expr.attr}"
        if isinstance(expr, ast.Subscript):  # dict[str, int](...)
            return self.qualify(expr.value, depth)
        if not isinstance(expr, ast.Name):
            return None
        home = self.home(expr)
        if home is None:
            return f"builtins.{expr.id}"
        found = self.bindings[home][expr.id]
        for binding in found:
            if binding.kind == "import":
                return binding.target
        only = found[0].value if len(found) == 1 else None
        if isinstance(only, ast.Name | ast.Attribute) and depth < 4:
            alias = self.qualify(only, depth + 1)
            if alias is not None:
                return alias
        return f"{self.module}.{expr.id}" if home is self.tree else None

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Enclosing nodes, innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def enclosing_functions(self, node: ast.AST) -> Iterator[Function]:
        """Functions whose body evaluates the node, innermost first."""
        scope = self.scopes[node]
        while scope is not self.tree:
            if isinstance(scope, FUNCTIONS):
                yield scope
            scope = self.scopes[scope]

    def runs_at_import(self, node: ast.AST) -> bool:
        """Whether the node is evaluated by importing the file."""
        return next(self.enclosing_functions(node), None) is None

    def in_main_block(self, node: ast.AST) -> bool:
        """Whether the node stands under ``if __name__ == "__main__"``."""
        return any(
            isinstance(up, ast.If) and "__name__" in ast.unparse(up.test)
            for up in self.ancestors(node)
        )


def parse_source(path: Path, shown: str) -> Source:
    """Parses one file.

    Raises:
      OSError, SyntaxError, ValueError: the file cannot be read, decoded or parsed.
    """
    with tokenize.open(path) as file:
        text = file.read()
    tree = ast.parse(text, shown)
    tables = _Tables(tree, *_module_name(path))
    tables.visit(tree, tree)
    return Source(
        path=shown,
        module=tables.module,
        is_package_file=_is_package_file(path),
        text=text,
        tree=tree,
        nodes=tuple(tables.nodes),
        parents=tables.parents,
        scopes=tables.scopes,
        bindings=tables.bindings,
        globals_={scope: frozenset(names) for scope, names in tables.globals_.items()},
    )


def _packages(path: Path) -> list[str]:
    """Names of the packages that hold a file, outermost first."""
    names, folder = [], path.resolve().parent
    while (folder / "__init__.py").is_file():
        names.append(folder.name)
        folder = folder.parent
    return names[::-1]


def _module_name(path: Path) -> tuple[str, list[str]]:
    packages = _packages(path)
    parts = [*packages] if path.stem == "__init__" and packages else [*packages, path.stem]
    return ".".join(parts), packages


def _is_package_file(path: Path) -> bool:
    packages = _packages(path)
    is_test = path.name.startswith("test_") or path.stem.endswith("_test")
    in_tests = not {"tests", "test"}.isdisjoint(packages)
    return bool(packages) and not is_test and not in_tests and path.name != "conftest.py"


class _Tables:
    """One recursive pass that fills the tables of a :class:`Source`."""

    def __init__(self, tree: ast.Module, module: str, packages: list[str]) -> None:
        self.module, self.packages = module, packages
        self.nodes: list[ast.AST] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, ast.AST] = {tree: tree}
        self.bindings: dict[ast.AST, dict[str, list[Binding]]] = {tree: {}}
        self.globals_: dict[ast.AST, set[str]] = {}
        self.tree = tree

    def bind(self, scope: ast.AST, name: str, binding: Binding) -> None:
        if name in self.globals_.get(scope, ()):
            scope = self.tree
        self.bindings.setdefault(scope, {}).setdefault(name, []).append(binding)

    def visit(self, node: ast.AST, scope: ast.AST) -> None:
        self.nodes.append(node)
        self.scopes[node] = scope
        inner = scope
        outer: set[ast.AST] = set()  # children evaluated in the enclosing scope
        if isinstance(node, FUNCTIONS):
            inner = node
            outer = self._function(node, scope)
        elif isinstance(node, ast.ClassDef):
            inner = node
            self.bind(scope, node.name, Binding("class", node))
            self.bindings.setdefault(node, {})
            outer = {*node.decorator_list, *node.bases, *node.keywords}
        elif isinstance(node, COMPREHENSIONS):
            inner = node
        elif isinstance(node, ast.comprehension):
            self._target(node.target, None, scope, node)
        else:
            self._statement(node, scope)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr_context | ast.operator | ast.unaryop | ast.cmpop):
                continue  # one shared object each: no place of their own
            self.parents[child] = node
            self.visit(child, scope if child in outer else inner)

    def _function(self, node: Function, scope: ast.AST) -> set[ast.AST]:
        self.bindings.setdefault(node, {})
        outer: set[ast.AST] = set()
        if not isinstance(node, ast.Lambda):
            self.bind(scope, node.name, Binding("def", node))
            outer.update(node.decorator_list)
            if node.returns is not None:
                outer.add(node.returns)
        spec = node.args
        every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
        every += [arg for arg in (spec.vararg, spec.kwarg) if arg is not None]
        for arg in every:
            self.bind(node, arg.arg, Binding("argument", arg))
        # The arguments node goes with the outer scope: its defaults and annotations run there.
        outer.add(spec)
        return outer

    def _statement(self, node: ast.AST, scope: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                origin = alias.name if alias.asname else name
                self.bind(scope, name, Binding("import", node, target=origin))
        elif isinstance(node, ast.ImportFrom):
            base = self._origin(node)
            for alias in node.names:
                name = alias.asname or alias.name
                self.bind(scope, name, Binding("import", node, target=f"{base}.{alias.name}"))
        elif isinstance(node, ast.Global):
            self.globals_.setdefault(scope, set()).update(node.names)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._target(target, node.value, scope, node)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._target(node.target, node.value, scope, node)
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name):
                self.bind(scope, node.target.id, Binding("augmented", node, node.value))
        elif isinstance(node, ast.NamedExpr):
            while isinstance(scope, COMPREHENSIONS):
                scope = self.scopes[scope]
            self._target(node.target, node.value, scope, node)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._target(node.target, None, scope, node)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._target(node.optional_vars, None, scope, node.context_expr)
        elif (isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar)) and node.name:
            self.bind(scope, node.name, Binding("assign", node))

    def _target(
        self, target: ast.expr, value: ast.expr | None, scope: ast.AST, node: ast.AST
    ) -> None:
        if isinstance(target, ast.Name):
            self.bind(scope, target.id, Binding("assign", node, value))
        elif isinstance(target, ast.Starred):
            self._target(target.value, None, scope, node)
        elif isinstance(target, ast.Tuple | ast.List):
            values: list[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(values):
                values = [*value.elts]
            for part, part_value in zip(target.elts, values, strict=True):
                self._target(part, part_value, scope, node)

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = self.packages[: len(self.packages) - node.level + 1]
        return ".".join([*here, *([node.module] if node.module else [])])
