"""A reason for a whole file: all of this passes."""
# fp4jax: allow-file ES001, ES002 (a test of the hazard itself)

_CACHE = {}


def repack(weight):
    return _CACHE.setdefault(id(weight), weight)
