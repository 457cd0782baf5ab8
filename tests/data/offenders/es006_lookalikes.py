"""Allow comments in each place that they may stand: all of this passes."""

_ON_THE_LINE = {}  # fp4jax: allow ES001 (filled by the import hook, read by nobody else)

# fp4jax: allow ES001 (a comment of its own covers the next statement)
# also over another comment and a blank line

_ABOVE = {}

_MULTILINE = {  # fp4jax: allow ES001 (at the opening)
    "a": [1],
}
_CLOSING = {
    "a": [1],
}  # fp4jax: allow ES001 (at the close)

_TWO = {"key": id, "empty": []}  # type: ignore  # fp4jax: allow ES001, ES002 (two rules, after another comment)


# fp4jax: allow ES001 (over a decorator)
@staticmethod
def decorated(
    x,
    seen={},  # noqa: B006
):
    return x, seen


TEXT = "# fp4jax: allow ES001 (in a string is no comment)"
