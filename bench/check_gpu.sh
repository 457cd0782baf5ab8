#!/bin/sh
# Runs every test marked `gpu`, on a machine with an NVIDIA GPU. Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
python3 - <<'EOF'
import jax

if not any(device.platform == "gpu" for device in jax.devices()):
    raise SystemExit(f"no GPU: JAX {jax.__version__} sees {jax.devices()}")
print("JAX", jax.__version__, "on", jax.devices()[0].device_kind)
EOF
# One process: each would take most of the memory of the GPU for itself.
exec python3 -m pytest -m gpu -n 0 tests "$@"
