"""Which files to check: the walk over folders, and the table in ``pyproject.toml``."""

from __future__ import annotations

import dataclasses
import fnmatch
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from fp4jax.errors import Fp4JaxError

_SKIPPED_FOLDERS = frozenset(
    ("build", "dist", "node_modules", "site-packages", "venv", "__pycache__", "__pypackages__")
)
_TABLE = "tool.fp4jax.check_engine_state"


@dataclasses.dataclass(frozen=True)
class CheckConfig:
    """The table ``[tool.fp4jax.check_engine_state]``.

    Attributes:
      root: folder that ``exclude`` is relative to.
      exclude: patterns of files and folders that a walk leaves out: a name at any depth
        ("vendor"), or a path from the root ("tests/data/offenders").
      protocol: public names that several modules define on purpose, each with its reason (say,
        what every backend of an op answers to its dispatch).
      select: rules to run; all if empty.
      ignore: rules not to run.
    """

    root: Path
    exclude: tuple[str, ...] = ()
    protocol: Mapping[str, str] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


def read_check_config(start: Path) -> CheckConfig:
    """The configuration in the nearest ``pyproject.toml`` at or above a path.

    Raises:
      Fp4JaxError: the file is not TOML, or a field of the table is unknown or of a wrong type.
    """
    start = start.resolve()
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            return _parse(file)
    return CheckConfig(start if start.is_dir() else start.parent)


def _parse(file: Path) -> CheckConfig:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Fp4JaxError(f"{file}: cannot be read as TOML: {error}") from error
    for key in _TABLE.split("."):
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise Fp4JaxError(f"{file}: [{_TABLE}] is not a table")
    fields = {field.name for field in dataclasses.fields(CheckConfig)} - {"root"}
    unknown = sorted(set(table) - fields)
    if unknown:
        raise Fp4JaxError(
            f"{file}: [{_TABLE}] has no field {', '.join(unknown)}; "
            f"it has {', '.join(sorted(fields))}"
        )
    protocol = table.pop("protocol", {})
    if not isinstance(protocol, dict) or not all(
        isinstance(reason, str) and reason.strip() for reason in protocol.values()
    ):
        raise Fp4JaxError(f'{file}: [{_TABLE}] protocol needs a reason a name: name = "reason"')
    for key, value in table.items():
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise Fp4JaxError(f"{file}: [{_TABLE}] {key} must be a list of strings")
    lists = {key: tuple(value) for key, value in table.items()}
    return CheckConfig(file.parent, protocol=MappingProxyType(protocol), **lists)


def python_files(
    paths: Sequence[Path], exclude: Sequence[str], root: Path
) -> Iterator[tuple[Path, str]]:
    """Python files at and under the paths, each once, with the name to show.

    A path that is named is checked whatever ``exclude`` says; hidden folders, virtual
    environments and build folders are not walked.

    Raises:
      Fp4JaxError: a path does not exist.
    """
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise Fp4JaxError(f"{path}: no such file or folder")
        for file in [path] if path.is_file() else _walk(path, exclude, root.resolve()):
            real = file.resolve()
            if real not in seen:
                seen.add(real)
                yield file, file.as_posix()


def _walk(folder: Path, exclude: Sequence[str], root: Path) -> Iterator[Path]:
    for child in sorted(folder.iterdir()):
        if child.name.startswith(".") or _excluded(child, exclude, root):
            continue
        if child.is_dir():
            environment = (child / "pyvenv.cfg").exists() or child.name.endswith(".egg-info")
            if child.name not in _SKIPPED_FOLDERS and not environment and not child.is_symlink():
                yield from _walk(child, exclude, root)
        elif child.suffix == ".py":
            yield child


def _excluded(path: Path, exclude: Sequence[str], root: Path) -> bool:
    real = path.absolute()
    relative = real.relative_to(root).as_posix() if real.is_relative_to(root) else real.as_posix()
    for pattern in exclude:
        pattern = pattern.removeprefix("./").rstrip("/")
        names = relative.split("/") if "/" in pattern else [path.name]
        parts = pattern.split("/")
        if len(names) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts)):
            return True
    return False
