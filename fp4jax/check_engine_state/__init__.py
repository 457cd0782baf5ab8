"""Refuses state that could hand one engine's weights to another.

Two halves. The source checker reads Python files and imports nothing of them::

    python -m fp4jax.check_engine_state src tests     # or check_paths([...]) -> list[Finding]

The trace checker asks a function of yours whether it captures arrays::

    check_captured(step, params, tokens)              # raises, naming each array and its place

Rules (ES001 to ES006) are in :data:`RULES`. What counts as a mutable module-level container:
every dict, list, set, collections type, counter or iterator that is bound at module or class
level. Tuples, frozensets and ``MappingProxyType({...})`` of immutable values always pass, and so
do ``__all__`` and its like. A literal, non-empty table at module level passes only while every use
of it in the checked files is plainly a read (see ``why_not_a_constant``); an empty container, a
comprehension or a call never does, because nothing but a later write gives it a purpose that an
immutable form would not serve.

A deliberate exception says why, on the line or just above it: ``# fp4jax: allow ES002 (reason)``;
``allow-file`` covers a file. A comment that allows nothing is refused in its turn.
"""

from fp4jax.check_engine_state.captured_consts import (
    CapturedArray,
    captured_arrays,
    check_captured,
)
from fp4jax.check_engine_state.checking import check_paths
from fp4jax.check_engine_state.files import CheckConfig
from fp4jax.check_engine_state.findings import RULES, Finding, Rule

__all__ = [
    "RULES",
    "CapturedArray",
    "CheckConfig",
    "Finding",
    "Rule",
    "captured_arrays",
    "check_captured",
    "check_paths",
]
