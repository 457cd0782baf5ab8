"""``python -m fp4jax`` is the ``fp4jax`` command."""

import sys

from fp4jax.cli import main

sys.exit(main())
