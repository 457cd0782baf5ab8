"""The files of one check, and what an expression in one of them most likely holds."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Literal

from fp4jax.check_engine_state.source import Function, Source, words

Kind = Literal["array", "module", "plain"]

_ARRAY_TYPES = words(
    "Array ArrayLike ndarray NDArray DeviceArray Tensor PRNGKeyArray PyTree ArrayTree Params "
    "FrozenDict VariableDict MarlinWeight NVFP4Weight FP8Weight QArray"
)
_MODULE_TYPES = frozenset(("Module", "TrainState"))
_SHAPED_TYPES = words(  # jaxtyping's, which count only with a subscript
    "Float Float16 Float32 Float64 BFloat16 Int Int8 Int16 Int32 Int64 Integer UInt UInt4 UInt8 "
    "UInt16 UInt32 UInt64 Bool Complex Inexact Real Num Shaped Key"
)
_ARRAY_NAME = re.compile(
    r"(.*_)?(weights?|params|parameters|variables|arrays?|tensors?|logits|packed|repacked|leaf|"
    r"leaves|pytree|kv_cache|lm_head|state_dict)_?\d*|w\d*|arr"
)
_COUNT_NAME = re.compile(r"_*(n|num|max|min|count|has|is|use|with|keep)_.*")
_MODULE_NAME = re.compile(r"(.*_)?(module|model|engine)_?\d*")
PLAIN_ATTRIBUTES = words(
    "shape dtype ndim size itemsize nbytes weak_type n k layout stack shards sharding name "
    "config module engine_id"
)
PLAIN_CALLS = words(
    "tobytes item tolist hex hexdigest digest int float bool str len repr bytes format"
)
_NUMPY_MAKERS = words(
    "array asarray ascontiguousarray zeros ones full empty zeros_like ones_like full_like "
    "empty_like arange linspace logspace eye identity load frombuffer fromfile stack concatenate "
    "tile repeat tri tril triu outer meshgrid packbits unpackbits"
)
_NOT_ARRAYS = re.compile(
    r"jax\.numpy\.(dtype|finfo|iinfo|issubdtype|isdtype|result_type|promote_types|can_cast|shape|"
    r"ndim|size|broadcast_shapes|vectorize|printoptions|set_printoptions|get_printoptions|"
    r"bool_|b?float\d+\w*|u?int\d+|complex\d+)|jax\.nn\.initializers\..*"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Project:
    """All parsed files of one check.

    Attributes:
      sources: in path order.
      modules: by dotted name; a name that two files share is left out.
      classes: kind of each class by name: "array" (a registered pytree) or "module".
    """

    sources: tuple[Source, ...]
    modules: Mapping[str, Source]
    classes: Mapping[str, Kind]

    @staticmethod
    def of(sources: tuple[Source, ...]) -> Project:
        names = [source.module for source in sources]
        unique = {s.module: s for s in sources if names.count(s.module) == 1}
        return Project(sources, unique, _class_kinds(sources))

    def resolve(self, dotted: str | None) -> tuple[Source, str] | None:
        """The checked file and module-level name behind a dotted name, re-exports followed."""
        for _ in range(8):
            if dotted is None:
                return None
            module, _, name = dotted.rpartition(".")
            source = self.modules.get(module)
            while source is None and module.count("."):
                # `models/llama.py` may be installed as `package.models.llama`.
                module = module.partition(".")[2]
                source = self.modules.get(module) if "." in module else None
            if source is None:
                return None
            bound = source.bindings[source.tree].get(name, [])
            imported = [b.target for b in bound if b.kind == "import"]
            if not imported:
                return (source, name) if bound else None
            dotted = imported[0]
        return None

    def function(self, dotted: str | None) -> tuple[Source, Function] | None:
        """The definition of a function in the checked files."""
        found = self.resolve(dotted)
        if found is None:
            return None
        source, name = found
        for binding in source.bindings[source.tree][name]:
            if isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef):
                return source, binding.node
        return None

    def class_def(self, dotted: str | None) -> tuple[Source, ast.ClassDef] | None:
        """The definition of a class in the checked files."""
        found = self.resolve(dotted)
        if found is None:
            return None
        source, name = found
        for binding in source.bindings[source.tree][name]:
            if isinstance(binding.node, ast.ClassDef):
                return source, binding.node
        return None

    def annotated(self, annotation: ast.expr | None) -> Kind | None:
        """What an annotation says; None where it says nothing ("Any", none at all)."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except SyntaxError:
                return None
        if annotation is None:
            return None
        heads = [annotation.value if isinstance(annotation, ast.Subscript) else annotation]
        if _last(heads[0]) in ("Callable", "type", "Type", "Literal"):
            return "plain"
        shaped = isinstance(annotation, ast.Subscript) and _last(heads[0]) in _SHAPED_TYPES
        if shaped:
            return "array"
        if _last(annotation) in ("Any", "object"):
            return None
        for node in ast.walk(annotation):
            name = _last(node)
            if name in _ARRAY_TYPES or (
                isinstance(node, ast.Subscript) and _last(node.value) in _SHAPED_TYPES
            ):
                return "array"
            if name in _MODULE_TYPES:
                return "module"
            if name is not None and name in self.classes:
                return self.classes[name]
        return "plain"

    def kind(self, source: Source, expr: ast.expr, depth: int = 0) -> Kind | None:
        """What an expression most likely holds: by annotation, by value, then by name."""
        if depth > 6:
            return None
        if isinstance(expr, ast.Constant | ast.JoinedStr | ast.Compare | ast.Lambda):
            return "plain"
        if isinstance(expr, ast.Name):
            return self._name_kind(source, expr, depth)
        if isinstance(expr, ast.Attribute):
            if expr.attr in PLAIN_ATTRIBUTES:
                return "plain"
            return kind_of_name(expr.attr)
        if isinstance(expr, ast.Subscript):
            return self.kind(source, expr.value, depth + 1)
        if isinstance(expr, ast.BinOp):
            sides = [self.kind(source, side, depth + 1) for side in (expr.left, expr.right)]
            return "array" if "array" in sides else None
        if isinstance(expr, ast.Tuple | ast.List | ast.Set):
            kinds = [self.kind(source, part, depth + 1) for part in expr.elts]
            return next((k for k in kinds if k in ("array", "module")), "plain")
        if isinstance(expr, ast.Dict):
            kinds = [self.kind(source, part, depth + 1) for part in expr.values]
            return next((k for k in kinds if k in ("array", "module")), "plain")
        if isinstance(expr, ast.Call):
            return self._call_kind(source, expr, depth)
        return None

    def _name_kind(self, source: Source, name: ast.Name, depth: int) -> Kind | None:
        for binding in source.bound_to(name):
            if isinstance(binding.node, ast.arg):
                said = self.annotated(binding.node.annotation)
            elif binding.kind in ("def", "class", "import"):
                return "plain"
            elif isinstance(binding.node, ast.AnnAssign):
                said = self.annotated(binding.node.annotation)
            elif binding.value is not None:
                said = self.kind(source, binding.value, depth + 1)
            else:
                said = None
            if said is not None:
                return said
        return kind_of_name(name.id)

    def _call_kind(self, source: Source, call: ast.Call, depth: int) -> Kind | None:
        if makes_array(source, call):
            return "array"
        name = _last(call.func)
        if name is None:
            return None
        if name in PLAIN_CALLS:
            return "plain"
        if name in ("tuple", "list", "frozenset", "sorted") and call.args:
            return self.kind(source, call.args[0], depth + 1)
        if name in self.classes:
            return self.classes[name]
        if isinstance(call.func, ast.Attribute) and not name[0].isupper():
            owner = source.qualify(call.func)
            if owner is None or self.resolve(owner) is None:
                on = self.kind(source, call.func.value, depth + 1)
                return "array" if on == "array" else None
        found = self.function(source.qualify(call.func))
        if found is not None and not isinstance(found[1], ast.Lambda):
            return self.annotated(found[1].returns)
        return "plain" if name.lstrip("_")[:1].isupper() else None


def kind_of_name(name: str) -> Kind | None:
    """What a bare name suggests."""
    if _COUNT_NAME.fullmatch(name):
        return None
    if _ARRAY_NAME.fullmatch(name):
        return "array"
    return "module" if _MODULE_NAME.fullmatch(name) else None


def makes_array(source: Source, call: ast.Call) -> bool:
    """Whether a call makes a JAX or numpy array, by the name of the function."""
    return makes_jax_array(source, call) or _makes_numpy_array(source, call)


def makes_jax_array(source: Source, call: ast.Call) -> bool:
    """Whether a call makes a JAX array (a scalar of a dtype, ``jnp.float32(1)``, is not one)."""
    name = source.qualify(call.func) or ""
    if not name.startswith(("jax.numpy.", "jax.random.", "jax.lax.", "jax.nn.", "jax.device_put")):
        return False
    return name.rpartition(".")[2][0].islower() and _NOT_ARRAYS.fullmatch(name) is None


def _makes_numpy_array(source: Source, call: ast.Call) -> bool:
    name = source.qualify(call.func) or ""
    return name.startswith("numpy.") and name.rpartition(".")[2] in _NUMPY_MAKERS


def parameters(function: Function) -> Iterator[ast.arg]:
    """All parameters of a function, ``*args`` and ``**kwargs`` included."""
    spec = function.args
    yield from (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)
    yield from (arg for arg in (spec.vararg, spec.kwarg) if arg is not None)


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Nodes that a call of the function runs: nested functions' bodies are left out."""
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            stack.extend(ast.iter_child_nodes(node))


def _last(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _class_kinds(sources: tuple[Source, ...]) -> Mapping[str, Kind]:
    kinds: dict[str, Kind] = {}
    derived: dict[str, list[str]] = {}
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.Call) and _registers_pytree(_last(node.func)) and node.args:
                first = _last(node.args[0])
                if first is not None:
                    kinds[first] = "array"
            if not isinstance(node, ast.ClassDef):
                continue
            names = [_last(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
            dotted = [
                source.qualify(d.func if isinstance(d, ast.Call) else d) or ""
                for d in node.decorator_list
            ]
            if any(map(_registers_pytree, names)) or any(
                name.startswith(("flax.struct.", "chex.")) for name in dotted
            ):
                kinds[node.name] = "array"
            bases = [_last(b.value if isinstance(b, ast.Subscript) else b) for b in node.bases]
            if "Module" in bases:
                kinds[node.name] = "module"
            for base in bases:
                derived.setdefault(base or "", []).append(node.name)
    waiting = list(kinds)
    while waiting:
        base = waiting.pop()
        for name in derived.get(base, ()):
            if name not in kinds:
                kinds[name] = kinds[base]
                waiting.append(name)
    return kinds


def _registers_pytree(name: str | None) -> bool:
    return name is not None and name.startswith(("register_dataclass", "register_pytree_node"))
