"""A cached beginning changes what is computed, and nothing else; what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import MappingProxyType

import generation_toy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from drafters import Tapped
from generation_toy import make_toy
from jaxtyping import TypeCheckError, jaxtyped

import fp4jax
from fp4jax.errors import ConfigError, EngineMismatchError, GenerationError, PromptCacheError
from fp4jax.generation import (
    Draft,
    PromptLookup,
    SamplingParams,
    batch_generate,
    generate,
    generate_tokens,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    stream_generate,
)
from fp4jax.generation.cached_prompt import fill_rows
from fp4jax.model import engine_id

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "models"))

from dflash_cases import config_of, write_drafter  # noqa: E402

TARGETS = ("llama-modelopt", "qwen3moe-ct", "qwen3_5-ct", "nemotronh-mixed")
BEGINNING = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6)
HOT = MappingProxyType({"temp": 1.0, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 7})


@pytest.fixture(scope="module", params=TARGETS)
def model(request):
    folder = TESTS / "oracles" / request.param
    return fp4jax.load_model(folder, dtype="float32", progress=False)


@pytest.fixture(scope="module")
def cached(toy):
    return make_prompt_cache(toy, None, BEGINNING)


def test_every_architecture_gives_the_same_tokens(model, tmp_path):
    """Rows of any length, greedy and drawn; two of them end where the cache does."""
    rng = np.random.default_rng(0)
    vocab = model.config.vocab_size
    rows = [[*BEGINNING, *rng.integers(0, vocab, n).tolist()] for n in (5, 0, 19, 0)]
    options = {"max_tokens": 12, "ignore_eos": True}
    sampling = [SamplingParams(**options), SamplingParams(**options)]
    sampling += [SamplingParams(**options, **HOT)] * 2
    plain = batch_generate(model, None, rows, sampling=sampling, prefill_chunk=16)

    made = make_prompt_cache(model, None, BEGINNING, prefill_chunk=8)
    assert made.engine_id == model.engine_id and made.tokens == BEGINNING
    save_prompt_cache(tmp_path / "cache", made)
    for cache in (made, load_prompt_cache(tmp_path / "cache", model)):
        found = batch_generate(
            model, None, rows, sampling=sampling, prefill_chunk=16, prompt_cache=cache
        )
        assert found.tokens == plain.tokens
        np.testing.assert_allclose(found.logprobs, plain.logprobs, atol=2e-4)
        assert found.stats.prompt_tokens == plain.stats.prompt_tokens
        assert found.stats.cached_tokens == 4 * len(BEGINNING)
    assert plain.stats.cached_tokens == 0

    # Every kind of leaf counts: without its values the answer is another one.
    kinds = {name.rsplit(".", 1)[-1] for name in made.cache} - {"position"}
    for kind in kinds:
        emptied = {
            name: jnp.zeros_like(leaf) if name.endswith(kind) else leaf
            for name, leaf in made.cache.items()
        }
        wrong = batch_generate(
            model, None, rows, sampling=sampling, prefill_chunk=16,
            prompt_cache=dataclasses.replace(made, cache=emptied),
        )  # fmt: skip
        assert not np.allclose(wrong.logprobs, plain.logprobs, atol=1e-2)


@pytest.mark.parametrize("name", ["toy", "nemotronh-mixed"])
def test_prompt_lookup_knows_the_cached_tokens(name, toy):
    folder = TESTS / "oracles" / name
    model = toy
    if name != "toy":
        model = fp4jax.load_model(folder, dtype="float32", progress=False)
    lookup, rows = PromptLookup(ngram=2, block_size=4), [[*BEGINNING, 5, 3], list(BEGINNING)]
    options = {"max_tokens": 12, "ignore_eos": True, "draft": lookup}
    plain = batch_generate(model, None, rows, **options)
    cache = make_prompt_cache(model, None, BEGINNING, draft=lookup)
    assert cache.draft == {}
    found = batch_generate(model, None, rows, prompt_cache=cache, **options)
    assert found.tokens == plain.tokens and found.from_draft == plain.from_draft
    assert found.stats.acceptance == plain.stats.acceptance


@pytest.mark.parametrize("rest", [(), (7, 8, 9), tuple(range(30))])
@pytest.mark.parametrize("hot", [{}, HOT])
def test_every_call_takes_one(toy, tokenizer, cached, rest, hot):
    ids, options = [*BEGINNING, *rest], {"max_tokens": 20, "logprobs": 2, **hot}
    plain = generate_tokens(toy, ids, **options)
    for _ in range(2):  # what is donated is never the cache itself
        found = generate_tokens(toy, ids, prompt_cache=cached, **options)
        assert found.tokens == plain.tokens
        np.testing.assert_allclose(found.logprobs, plain.logprobs, atol=2e-5)
    steps = list(stream_generate(toy, tokenizer, ids, prompt_cache=cached, **options))
    assert tuple(step.token for step in steps) == plain.tokens
    assert {(s.prompt_tokens, s.cached_tokens) for s in steps} == {(len(ids), len(BEGINNING))}
    text = generate(toy, tokenizer, ids, prompt_cache=cached, **options)
    assert text == "".join(step.text for step in steps) == generate(toy, tokenizer, ids, **options)
    (batch,) = batch_generate(toy, None, [ids], prompt_cache=cached, **options).tokens
    assert batch == plain.tokens


def test_only_the_rest_is_fed(toy, cached):
    def fed(prompts, **options):
        events = []
        stats = batch_generate(
            toy, None, prompts, max_tokens=3, prefill_chunk=16,
            progress=lambda *event: events.append(event), **options,
        ).stats  # fmt: skip
        return [event[1:] for event in events if event[0] == "prefill"], stats

    rows = [[*BEGINNING, 1, 2], [*BEGINNING, *range(20)]]
    events, stats = fed(rows, prompt_cache=cached)
    assert events == [(18, 22), (22, 22)]
    assert (stats.prompt_tokens, stats.cached_tokens) == (2 * 21 + 22, 2 * 21)
    events, stats = fed([BEGINNING, BEGINNING], prompt_cache=cached)
    assert events == [] and stats.prompt_tps == 0


def test_a_cache_goes_on_from_another(toy, cached):
    longer = (*BEGINNING, 11, 12, 13)
    grown = make_prompt_cache(toy, None, longer, prompt_cache=cached)
    fresh = make_prompt_cache(toy, None, longer)
    assert grown.tokens == longer
    np.testing.assert_allclose(grown.hidden, fresh.hidden, atol=1e-5)
    tokens = generate_tokens(toy, [*longer, 4], max_tokens=9).tokens
    for cache in (grown, make_prompt_cache(toy, None, longer, prompt_cache=fresh)):
        assert generate_tokens(toy, [*longer, 4], max_tokens=9, prompt_cache=cache).tokens == tokens


def test_new_lengths_within_a_bucket_compile_nothing(toy, monkeypatch):
    toy = dataclasses.replace(toy, max_context=70)  # nobody else has compiled for it
    events = []
    monkeypatch.setattr(generation_toy, "tracing", lambda: events.append(1))

    def traces(count: int, *rests: int) -> list[int]:
        cache, found = make_prompt_cache(toy, None, [1] * count), []
        for rest in rests:
            events.clear()
            generate_tokens(toy, [1] * (count + rest), max_tokens=5, prompt_cache=cache)
            found.append(len(events))
        return found

    # Prefill of 16 tokens and decode, in a cache of the whole context.
    assert traces(50, 8, 12, 4) == [2, 0, 0]
    assert traces(53, 5, 9) == traces(49, 14, 10) == [0, 0]
    # Past the context there are buckets too.
    assert traces(60, 3, 1)[1] == 0
    assert traces(59, 3, 5) == traces(57, 4, 8) == [0, 0]


def test_a_prompt_that_begins_otherwise_is_refused(toy, tokenizer, cached):
    wrong = [*BEGINNING[:4], 60, *BEGINNING[5:], 1]
    with pytest.raises(GenerationError, match=r"the prompt does not.*position 4 it has token 60"):
        generate_tokens(toy, wrong, prompt_cache=cached)
    with pytest.raises(GenerationError, match=r"prompt 1 does not begin.*at position 20 it ends"):
        batch_generate(toy, None, [BEGINNING, BEGINNING[:-1]], prompt_cache=cached)
    with pytest.raises(GenerationError, match="position 4"):
        stream_generate(toy, tokenizer, wrong, prompt_cache=cached)  # before the first step
    for other in ("cache.safetensors", cached.cache):
        with pytest.raises(GenerationError, match="is no prompt cache: give what"):
            generate_tokens(toy, BEGINNING, prompt_cache=other)


@dataclasses.dataclass(frozen=True)
class OtherConfig(generation_toy.ToyConfig):
    theta: float = 1e4


def test_another_engine_or_layout_is_refused(toy, cached):
    def refused(error, match, **changes):
        with pytest.raises(error, match=match):
            changed = dataclasses.replace(toy, **changes)
            generate_tokens(changed, [*BEGINNING, 1], prompt_cache=cached)

    other = make_toy(seed=1).params
    ids = f"made by engine {engine_id(toy.params)}.*{engine_id(other)}; make it anew"
    refused(EngineMismatchError, ids, params=other)
    refused(PromptCacheError, "dtype = float32, but this model has bfloat16", dtype=jnp.bfloat16)
    refused(PromptCacheError, "config.theta = nothing, but .* 10000.0", config=OtherConfig())

    class Another(generation_toy.ToyModule):
        pass

    refused(PromptCacheError, "architecture = ToyModule, but .* Another", module=Another())

    # Sizes that neither weights nor config tell: the leaf is named where it is placed.
    class Halved(generation_toy.ToyModule):
        def init_cache(self, batch, capacity, dtype):
            return super().init_cache(batch, capacity, jnp.bfloat16)

    Halved.__name__ = "ToyModule"
    refused(PromptCacheError, "float32.* for keys, where .* bfloat16", module=Halved())
    copy = jax.tree.map(jnp.copy, toy.params)  # the same engine elsewhere, with a longer context
    longer = dataclasses.replace(toy, params=copy, max_context=200)
    tokens = generate_tokens(longer, [*BEGINNING, 1], max_tokens=120).tokens
    found = generate_tokens(longer, [*BEGINNING, 1], max_tokens=120, prompt_cache=cached)
    assert found.tokens == tokens and len(tokens) == 120


def test_the_signature_of_the_placing_holds(toy, cached):
    fill = jaxtyped(fill_rows, typechecker=beartype)
    empty = toy.module.init_cache(3, 40, jnp.float32)
    filled = fill(cached.cache, cached.axes, empty)
    assert filled.position.tolist() == [21] * 3 and filled.keys.shape == empty.keys.shape
    np.testing.assert_array_equal(filled.keys[2, :21], cached.cache["keys"][0, :21])
    assert not filled.keys[:, 32:].any()
    with pytest.raises(TypeCheckError):
        fill({name: jnp.concatenate([x, x]) for name, x in cached.cache.items()}, (), empty)


def test_what_cannot_be_cached(toy, tokenizer):
    with pytest.raises(GenerationError, match="needs a tokenizer"):
        make_prompt_cache(toy, None, "abc")
    with pytest.raises(GenerationError, match="too short for a prompt cache"):
        make_prompt_cache(toy, dataclasses.replace(Texts(), inner=tokenizer), "abc")
    with pytest.raises(GenerationError, match="no room in the model's context of 96"):
        make_prompt_cache(toy, None, [1] * 96)
    with pytest.raises(GenerationError, match="content of the last message must be text"):
        make_prompt_cache(toy, tokenizer, [{"role": "user", "content": [{"text": "a"}]}])


@dataclasses.dataclass(frozen=True)
class Texts:
    """Any text is tokens of the toy, by its length and its characters."""

    inner: object = None
    eos_token_ids: tuple[int, ...] = ()

    def encode(self, text):
        return [(ord(c) + len(text)) % generation_toy.VOCAB for c in text]


def test_a_drafter_that_reads_activations_needs_its_own_part(toy, cached, tmp_path):
    matrix = np.random.default_rng(5).normal(size=(24, 24)).astype(np.float32)
    draft, ids = Draft(Tapped(4), jnp.asarray(matrix)), [*BEGINNING, 1, 2]
    options = {"max_tokens": 15, "draft": draft}
    with pytest.raises(ConfigError, match=r"Tapped .* holds none; make it anew with draft="):
        generate_tokens(toy, ids, prompt_cache=cached, **options)
    plain = generate_tokens(toy, ids, **options)
    made = make_prompt_cache(toy, None, BEGINNING, draft=draft)
    save_prompt_cache(tmp_path / "cache", made)
    for cache in (made, load_prompt_cache(tmp_path / "cache", toy)):
        found = generate_tokens(toy, ids, prompt_cache=cache, **options)
        assert (found.tokens, found.from_draft) == (plain.tokens, plain.from_draft)
        assert found.stats.acceptance == plain.stats.acceptance
        assert generate_tokens(toy, ids, max_tokens=15, prompt_cache=cache).tokens == plain.tokens
    other = Draft(Tapped(4), draft.params + 1)
    with pytest.raises(ConfigError, match="holds those of Tapped"):
        generate_tokens(toy, ids, prompt_cache=made, draft=other)


def test_a_dflash_drafter(tmp_path):
    hf = {**config_of("full"), "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    hf = {name: value for name, value in hf.items() if name != "dflash_config"}
    (tmp_path / "config.json").write_text(json.dumps({**hf, "num_hidden_layers": 6}))
    target = fp4jax.random_model(tmp_path / "config.json", dtype="float32", progress=False)
    folder = write_drafter(tmp_path / "draft", "full")
    draft = fp4jax.load_draft(folder, dtype="float32", progress=False)
    options = {"max_tokens": 16, "ignore_eos": True, "draft": draft}
    rows = [[*BEGINNING, 1, 2], list(BEGINNING)]
    plain = batch_generate(target, None, rows, **options)
    save_prompt_cache(tmp_path / "c", make_prompt_cache(target, None, BEGINNING, draft=draft))
    cache = load_prompt_cache(tmp_path / "c", target)
    found = batch_generate(target, None, rows, prompt_cache=cache, **options)
    assert (found.tokens, found.from_draft) == (plain.tokens, plain.from_draft)
    lost = dataclasses.replace(cache, draft=jax.tree.map(jnp.zeros_like, cache.draft))
    wrong = batch_generate(target, None, rows, prompt_cache=lost, **options)
    assert wrong.tokens == plain.tokens  # whatever a drafter proposes
