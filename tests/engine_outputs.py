"""Everything an engine computes, for bit-for-bit comparison; also run as a process of its own.

``python engine_outputs.py CHECKPOINT RESULT.npz``
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

import fp4jax
from fp4jax.layers.weights import grouped_matmul, matmul
from fp4jax.model import Model
from fp4jax.quantized import is_quantized

PROMPTS = ((5, 9, 200, 31, 7), (17, 3))
NEW_TOKENS = 8


def engine_outputs(model: Model) -> dict[str, np.ndarray]:
    """Each consumer alone, the logits, and greedy and sampled generations."""
    found = {f"consumer {name}": value for name, value in consumers(model).items()}
    found["logits"] = np.asarray(model(np.asarray([PROMPTS[0]])))
    found |= generation_outputs(model)
    return found


def generation_outputs(model: Model) -> dict[str, np.ndarray]:
    """Tokens and their log-probabilities."""
    found = {}
    for name, temp in (("greedy", 0.0), ("sampled", 0.8)):
        result = fp4jax.batch_generate(
            model, None, list(PROMPTS), max_tokens=NEW_TOKENS, ignore_eos=True, temp=temp, seed=11
        )
        found[f"{name} tokens"] = np.asarray(result.tokens)
        found[f"{name} logprobs"] = np.asarray(result.logprobs)
    return found


def consumers(model: Model) -> dict[str, np.ndarray]:
    """Each kind of quantized weight, those of the first layer that has it, through its op."""
    found: dict[str, np.ndarray] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(model.params, is_leaf=is_quantized):
        keys = [key.key for key in path if not str(key.key).startswith("layers_")]
        name = "/".join(keys[:-1])
        if not is_quantized(node) or name in found:
            continue
        x = jnp.cos(jnp.arange(6 * node.k, dtype=jnp.float32)).reshape(6, node.k)
        if node.stack:
            sizes = jnp.zeros(node.stack[0], jnp.int32).at[jnp.asarray([0, 2, 5])].set(2)
            found[name] = np.asarray(grouped_matmul(x, node, sizes))
        else:
            found[name] = np.asarray(matmul(x, node))
    return found


if __name__ == "__main__":
    np.savez(sys.argv[2], **engine_outputs(fp4jax.load_model(sys.argv[1], dtype="float32")))
