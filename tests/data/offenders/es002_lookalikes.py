"""Look-alikes of ES002: all of this passes."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import weakref


@dataclasses.dataclass(frozen=True)
class SamplingValues:
    temperature: float = 0.0

    def __hash__(self) -> int:
        return hash((self.temperature, "sampling"))


def own_id(request, id, items):
    return id(request), request.id, items[0].id(), {"id": 3}


def content(weight, text: str, params: tuple[int, ...]):
    values = SamplingValues()
    return (
        hash(text),
        hash(tuple(weight.shape)),
        getattr(weight, "shape", ()),
        hash(params),
        hash(values),
        hash((weight.shape, weight.dtype)),
        hash(weight.tobytes()),
        hashlib.sha256(weight.tobytes()).hexdigest(),
    )


def is_freed(make):
    engine = make()
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    return alive() is None


def pointer_names(record):
    return record.data, record.pointer, record.ctypes
