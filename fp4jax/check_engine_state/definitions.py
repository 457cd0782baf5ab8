"""ES005: one definition for each public name of the shipped code."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence

from fp4jax.check_engine_state.project import Project
from fp4jax.check_engine_state.source import Binding, Source, words

_EXEMPT_NAMES = frozenset(("main", "logger", "log"))
_LOCAL_BY_NATURE = words(
    "logging.getLogger typing.TypeVar typing.ParamSpec typing.TypeVarTuple "
    "typing_extensions.TypeVar typing_extensions.ParamSpec typing_extensions.TypeVarTuple"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """One place that defines a public name."""

    name: str
    source: Source
    node: ast.AST

    @property
    def place(self) -> str:
        return f"{self.source.path}:{getattr(self.node, 'lineno', 1)}"


def public_definitions(source: Source) -> Iterator[Definition]:
    """The public functions, classes and constants of a package file.

    Left out: imports, re-exports (``name = other.name``), loggers and type variables, what only
    the type checker sees, overloads, and the fallback of an import that failed. A name that is
    defined in several branches counts once; so does one that is wrapped after its definition.
    """
    for name, bindings in source.bindings[source.tree].items():
        if name.startswith("_") or name in _EXEMPT_NAMES or not source.is_package_file:
            continue
        real = [b for b in bindings if _defines(source, name, b)]
        if real:
            yield Definition(name, source, real[0].node)


def duplicate_definitions(
    project: Project, allowed: Sequence[Definition]
) -> Iterator[tuple[Source, ast.AST, str]]:
    """Every definition of a name after its first, and names that hide an import or a definition.

    ``allowed`` definitions (by comment or configuration) take no part.
    """
    skip = {(d.source.path, d.name) for d in allowed}
    first: dict[str, Definition] = {}
    for source in project.sources:
        for definition in public_definitions(source):
            if (source.path, definition.name) in skip:
                continue
            earlier = first.setdefault(definition.name, definition)
            if earlier is not definition:
                message = f"public name `{definition.name}` is also defined at {earlier.place}"
                yield source, definition.node, message
            else:
                yield from _hides(source, definition)


def _hides(source: Source, definition: Definition) -> Iterator[tuple[Source, ast.AST, str]]:
    name = definition.name
    bindings = source.bindings[source.tree][name]
    direct = [b for b in bindings if source.parents.get(b.node) is source.tree]
    imported = next((b for b in direct if b.kind == "import"), None)
    if imported is not None and any(b.node is definition.node for b in direct):
        line = getattr(imported.node, "lineno", 1)
        message = f"public name `{name}` hides the import of `{imported.target}` at line {line}"
        yield source, definition.node, message
        return
    whole = [b for b in direct if b.kind in ("def", "class") and _defines(source, name, b)]
    for again in whole[1:]:
        message = f"public name `{name}` is also defined at {source.path}:{whole[0].node.lineno}"  # type: ignore[attr-defined]
        yield source, again.node, message


def _defines(source: Source, name: str, binding: Binding) -> bool:
    node, value = binding.node, binding.value
    if binding.kind not in ("def", "class", "assign") or not source.runs_at_import(node):
        return False
    if binding.kind == "assign" and not isinstance(node, ast.Assign | ast.AnnAssign):
        return False  # loop variables, `with … as`, `except … as`
    if binding.kind == "assign" and source.in_main_block(node):
        return False
    if isinstance(value, ast.Name) and value.id == name:
        return False
    if isinstance(value, ast.Attribute) and value.attr == name:
        return False
    if isinstance(value, ast.Call) and source.qualify(value.func) in _LOCAL_BY_NATURE:
        return False
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        (source.qualify(d) or "").endswith(".overload") for d in node.decorator_list
    ):
        return False
    return not (_for_type_checker(source, node) or _is_fallback(source, name, node))


def _for_type_checker(source: Source, node: ast.AST) -> bool:
    return any(
        isinstance(up, ast.If) and "TYPE_CHECKING" in ast.unparse(up.test)
        for up in source.ancestors(node)
    )


def _is_fallback(source: Source, name: str, node: ast.AST) -> bool:
    """Whether the node stands in an ``except`` whose ``try`` imports the name."""
    for up in source.ancestors(node):
        if isinstance(up, ast.ExceptHandler):
            body = source.parents[up]
            for inner in ast.walk(body):
                if isinstance(inner, ast.Import | ast.ImportFrom) and any(
                    (alias.asname or alias.name) == name for alias in inner.names
                ):
                    return True
    return False
