"""What the checker reports: the rules, a finding, and the ways to print one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule: its id, what it refuses, and what to write instead."""

    id: str
    refuses: str
    instead: str


RULES = (
    Rule(
        "ES000",
        "a file that cannot be read or parsed",
        "mend the file, or exclude it",
    ),
    Rule(
        "ES001",
        "mutable state at module or class level, on a function, or behind a closure",
        "make the value a leaf of the parameter tree and pass it as an argument; write a constant "
        "table as a tuple, a frozenset or types.MappingProxyType({...})",
    ),
    Rule(
        "ES002",
        "an address, a hash or a weak reference of an array or module used as its identity",
        "an address is reused once its object is freed: carry the derived value in the parameter "
        "tree, and compare content (a fingerprint leaf, an engine id) where identity is needed",
    ),
    Rule(
        "ES003",
        "memoization of a function that takes or returns arrays or modules",
        "compute the value once at init or load, keep it in the parameter tree and pass it on; "
        "memoize only functions of plain hashable values",
    ),
    Rule(
        "ES004",
        "an array captured by a compiled function instead of passed to it",
        "pass the array as an argument (params first), so that the executable serves every engine "
        "and holds none of them alive",
    ),
    Rule(
        "ES005",
        "a second definition of one public name",
        "import the one definition, give the variant a name of its own, or make it a parameter",
    ),
    Rule(
        "ES006",
        "an allow comment that is malformed or allows nothing",
        "write `# fp4jax: allow ES00x (reason)` on the offending line or just above it, or delete "
        "the comment",
    ),
)
RULE_IDS = tuple(rule.id for rule in RULES)


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """One refused place.

    Attributes:
      path: the file, as reached from the path that was given.
      line: 1-based.
      column: 1-based, in characters.
      rule: "ES001" and so on.
      message: what is wrong and what to do instead.
    """

    path: str
    line: int
    column: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.rule} {self.message}"


def with_remedy(rule_id: str, problem: str) -> str:
    """The problem, then what its rule asks for instead."""
    rule = next(rule for rule in RULES if rule.id == rule_id)
    return f"{problem}. Instead: {rule.instead}"


def format_findings(findings: Sequence[Finding], style: str) -> str:
    """The findings as ``text``, ``json`` (a list of objects) or ``github`` annotations."""
    if style == "json":
        return json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2)
    if style == "github":
        return "\n".join(_annotation(finding) for finding in findings)
    return "\n".join(map(str, findings))


def _annotation(finding: Finding) -> str:
    def escape(text: str, extra: str = "") -> str:
        for char in "%\r\n" + extra:
            text = text.replace(char, f"%{ord(char):02X}")
        return text

    path = escape(finding.path, ":,")
    place = f"file={path},line={finding.line},col={finding.column},title={finding.rule}"
    return f"::error {place}::{escape(finding.message)}"
