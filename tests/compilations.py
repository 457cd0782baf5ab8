"""How often XLA compiles."""

from __future__ import annotations

import jax


class Compilations:
    """Counts what XLA compiles while it is open."""

    def __enter__(self):
        self.count = 0
        self._open = True
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def _on_event(self, name, seconds, **_):
        if self._open and name.endswith("backend_compile_duration"):
            self.count += 1

    def __exit__(self, *_):
        self._open = False
        jax.monitoring.unregister_event_duration_listener(self._on_event)
