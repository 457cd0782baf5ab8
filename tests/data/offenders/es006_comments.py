"""ES006 offenders, and ES001 findings that a malformed comment does not hide."""

_NO_REASON = {}  # fp4jax: allow ES001  # expect: ES001 ES006
_EMPTY_REASON = {}  # fp4jax: allow ES001 ()  # expect: ES001 ES006
_NO_RULE = {}  # fp4jax: allow (because)  # expect: ES001 ES006
_UNKNOWN = {}  # fp4jax: allow ES999 (because)  # expect: ES001 ES006
_WRONG_RULE = {}  # fp4jax: allow ES002 (because)  # expect: ES001 ES006
UNUSED = ()  # fp4jax: allow ES001 (because)  # expect: ES006
# fp4jax: permit ES001 (because)  # expect: ES006
