"""The command line, called in this process; Ctrl-C in one of its own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest
from tiny_checkpoint import add_tokenizer, copy_oracle, make_unquantized

import fp4jax
from fp4jax.checkpoints.tensors import TensorFiles
from fp4jax.cli import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, oracles):
    folder = copy_oracle(oracles, "llama-modelopt", tmp_path_factory.mktemp("cli") / "tiny")
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint):
    return fp4jax.load(checkpoint, progress=False)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch, tmp_path):
    """This process must not keep compiled programs; those of others go to a folder of the test."""
    monkeypatch.setattr("fp4jax.cli.options.keep_compiled_programs", lambda: None)
    monkeypatch.setenv("FP4JAX_CACHE", str(tmp_path / "cache"))


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_generate_streams_what_the_library_gives(capsys, checkpoint, engine):
    arguments = ("generate", "--model", checkpoint, "--prompt", "Hi", "--max-tokens", 8)
    status, out, err = run(capsys, *arguments)
    messages = [{"role": "user", "content": "Hi"}]
    assert (status, out) == (0, fp4jax.generate(*engine, messages, max_tokens=8) + "\n")
    assert "Prompt: " in err and "Generation: " in err and "Peak memory: " in err

    status, out, err = run(capsys, *arguments, "--ignore-chat-template", "--quiet")
    assert (status, err) == (0, "")
    assert out == fp4jax.generate(*engine, "Hi", max_tokens=8) + "\n"


def test_bench_with_random_weights(capsys, oracles):
    config = oracles / "llama-modelopt" / "config.json"
    sizes = ("-p", 4, "-g", 3, "-n", 1, "--json", "--quiet")
    status, out, _ = run(capsys, "bench", "--random-weights", config, *sizes)
    assert status == 0 and json.loads(out)["generation_tps"] > 0
    status, _, err = run(capsys, "bench", "--random-weights", config, "--model", config.parent)
    assert status == 2 and "one of them" in err


def test_generate_passes_every_sampling_flag_on(capsys, checkpoint, engine):
    flags = ("--temp", 0.9, "--top-p", 0.9, "--top-k", 50, "--min-p", 0.01, "--seed", 3)
    flags += ("--repetition-penalty", 1.2, "--presence-penalty", 0.5, "--frequency-penalty", 0.1)
    flags += ("--logit-bias", '{"65": 2.5}', "--stop", "zq", "--system-prompt", "Be brief.")
    arguments = ("generate", "--model", checkpoint, "--prompt", "Hi", "--max-tokens", 8, "-q")
    status, out, _ = run(capsys, *arguments, *flags)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    wanted = fp4jax.generate(
        *engine, messages, max_tokens=8, temp=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=3,
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1,
        logit_bias={65: 2.5}, stop="zq",
    )  # fmt: skip
    assert (status, out) == (0, wanted + "\n")


def test_generate_reads_a_prompt_from_standard_input(capsys, checkpoint, engine, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi"))
    arguments = ("generate", "--model", checkpoint, "--prompt", "-", "-m", 8, "-q")
    status, out, _ = run(capsys, *arguments, "--ignore-chat-template")
    assert (status, out) == (0, fp4jax.generate(*engine, "Hi", max_tokens=8) + "\n")


def test_chat_keeps_the_conversation_until_reset(capsys, checkpoint, engine, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/help\n/reset\none\n/exit\nlost\n"))
    status, out, err = run(capsys, "chat", "--model", checkpoint, "--max-tokens", 6)
    said, messages = [], []
    for line in ("one", "two"):
        messages.append({"role": "user", "content": line})
        said.append(fp4jax.generate(*engine, messages, max_tokens=6))
        messages.append({"role": "assistant", "content": said[-1]})
    assert status == 0
    assert out == "\n".join([*said, said[0]]) + "\n"
    assert err.count("/reset starts over") == 2 and err.count("Generation: ") == 3


def test_chat_goes_on_after_a_conversation_that_is_too_long(capsys, checkpoint, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 3000 + "\n/exit\n"))
    status, out, err = run(capsys, "chat", "--model", checkpoint, "-q")
    assert (status, out) == (0, "")
    assert "context" in err and "/reset" in err


def test_chat_needs_a_chat_template(capsys, tmp_path, oracles):
    folder = copy_oracle(oracles, "llama-modelopt", tmp_path / "plain")
    add_tokenizer(folder, chat=False)
    status, _, err = run(capsys, "chat", "--model", folder)
    assert status == 1 and "chat_template" in err


def test_inspect_lists_every_tensor_and_its_kernel(capsys, checkpoint, oracles):
    status, out, _ = run(capsys, "inspect", "--model", checkpoint)
    assert status == 0
    assert "layers_0-1/mlp/down_proj" in out and "NVFP4" in out and "skipped" in out
    status, out, _ = run(capsys, "inspect", "--model", checkpoint, "--json", "--all")
    found = json.loads(out)
    files = TensorFiles.open(checkpoint)
    skipped = {name for name, _ in found["skipped"]}
    used = sum(files.info(name).nbytes for name in files.names() if name not in skipped)
    assert sum(node["nbytes"] for node in found["nodes"]) == used
    kernels = {node["path"]: node["kernel"] for node in found["nodes"]}
    assert kernels["layers_1/self_attn/qkv_proj/weight"] == "xla"
    assert kernels["norm/weight"] == "-"
    status, out, _ = run(capsys, "inspect", "--model", oracles / "qwen3moe-ct", "--json")
    nodes = {node["path"]: node for node in json.loads(out)["nodes"]}
    experts = nodes["layers_0-1/mlp/gate_up_proj/weight"]
    assert (experts["count"], experts["kernel"]) == (2, "grouped xla")


def test_bench_prints_rates_and_the_floor(capsys, checkpoint):
    arguments = ("bench", "--model", checkpoint, "-p", 8, "-g", 4, "-b", 2, "-n", 1)
    status, out, _ = run(capsys, *arguments, "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["prompt_tokens"], found["generation_tokens"], found["batch_size"]) == (8, 4, 2)
    assert found["generation_tps"] > 0 and found["floor_share"] > 0
    status, out, _ = run(capsys, *arguments)
    assert status == 0 and "generation (4 × 2)" in out and "bandwidth floor" in out


def test_prompt_lookup_changes_no_text(capsys, checkpoint, engine, monkeypatch):
    draft = ("--draft-model", "prompt-lookup")
    arguments = ("generate", "--model", checkpoint, "--prompt", "Hi", "--max-tokens", 24)
    status, out, err = run(capsys, *arguments, *draft)
    messages = [{"role": "user", "content": "Hi"}]
    wanted = fp4jax.generate(*engine, messages, max_tokens=24)
    assert (status, out) == (0, wanted + "\n") and "tokens/step" in err
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    chat = ("chat", "--model", checkpoint, "-m", 24, *draft, "--num-draft-tokens", 3)
    status, out, err = run(capsys, *chat)
    assert (status, out) == (0, wanted + "\n") and "tokens/step" in err


def test_bench_compares_decoding_with_a_drafter_and_without(capsys, checkpoint):
    arguments = ("bench", "--model", checkpoint, "-p", 8, "-g", 4, "-n", 1)
    arguments += ("--draft-model", "prompt-lookup", "--num-draft-tokens", 2)
    status, out, _ = run(capsys, *arguments, "--json")
    found = json.loads(out)
    assert status == 0
    histogram = found["acceptance"]["histogram"]
    assert len(histogram) == 3 and sum((i + 1) * n for i, n in enumerate(histogram)) == 3
    assert found["speedup"] == found["drafted_tps"] / found["generation_tps"]
    status, out, _ = run(capsys, *arguments)
    assert status == 0 and "generation with the drafter" in out and "tokens/step" in out


def test_perplexity_of_a_file(capsys, checkpoint, engine, tmp_path):
    from fp4jax.evaluation import perplexity

    text = tmp_path / "text.txt"
    text.write_text("The ferry left the mainland at seven every morning.")
    arguments = ("perplexity", text, "--model", checkpoint, "--sequence-length", 32)
    status, out, _ = run(capsys, *arguments)
    model, tokenizer = engine
    wanted = perplexity(model, tokenizer.encode(text.read_text()), window=32)
    assert status == 0
    assert out.startswith(f"perplexity {wanted.value:.4f} over {wanted.tokens} tokens")


def test_quantize_writes_a_checkpoint_that_loads(capsys, tmp_path, oracles):
    source = make_unquantized(oracles, tmp_path / "source")
    target = tmp_path / "target"
    status, _, err = run(capsys, "quantize", "--model", source, "--output", target)
    assert status == 0 and "MB of weights" in err
    model, tokenizer = fp4jax.load(target, progress=False)
    assert "NVFP4" in run(capsys, "inspect", "--model", target)[1]
    assert fp4jax.generate(model, tokenizer, "Hi", max_tokens=4) is not None
    status, _, err = run(capsys, "quantize", "--model", source, "--output", target)
    assert status == 1 and str(target) in err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("generate", "--model", "no/such/folder"), 1, "no/such/folder"),
        (("generate", "--top-p", "2"), 1, "top_p"),
        (("generate", "--logit-bias", "{"), 1, "--logit-bias"),
        (("generate", "--logit-bias", "[1]"), 1, "--logit-bias"),
        (("generate", "--draft-model", "no/such/draft"), 1, "no/such/draft"),
        (("chat", "--draft-model", "no/such/draft"), 1, "no/such/draft"),
        (("bench", "--num-draft-tokens", "4"), 2, "--draft-model"),
        (("generate", "--nonsense"), 2, "--nonsense"),
        (("generate", "--max-tokens", "many"), 2, "--max-tokens"),
        (("perplexity", "no_such_file.txt"), 2, "no_such_file.txt"),
        (("conjure",), 2, "conjure"),
        ((), 2, "Missing command"),
    ],
)
def test_errors_are_one_line_and_a_status(capsys, arguments, status, message):
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (status, "")
    assert message in err and "Traceback" not in err


def test_help_and_version(capsys):
    assert run(capsys, "--version") == (0, f"fp4jax {fp4jax.__version__}\n", "")
    status, out, _ = run(capsys, "generate", "--help")
    assert status == 0 and "--system-prompt" in out


def test_a_checkpoint_warning_is_told_and_not_fatal(capsys, checkpoint, oracles, tmp_path):
    folder = copy_oracle(oracles, "llama-modelopt", tmp_path / "contradictory")
    add_tokenizer(folder)
    path = folder / "hf_quant_config.json"
    stated = json.loads(path.read_text())
    stated["quantization"]["exclude_modules"].append("model.layers.0.mlp*")
    path.write_text(json.dumps(stated))
    status, _, err = run(capsys, "generate", "--model", folder, "-m", 1, "-q")
    assert status == 0 and "fp4jax: warning: " in err and "stored as NVFP4" in err


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_control_c_ends_cleanly(checkpoint):
    arguments = ["generate", "--model", str(checkpoint), "-m", "450", "--ignore-chat-template"]
    child = subprocess.Popen(
        [sys.executable, "-m", "fp4jax", *arguments, "--logit-bias", '{"257": -1000}'],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert child.stdout.read(1)  # the answer has begun
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert b"interrupted" in err and b"Traceback" not in err


def test_compiled_programs_are_kept_without_weights(checkpoint, tmp_path, oracles):
    """Another engine of the same sizes starts from the same programs and gives its own text."""
    other = make_unquantized(oracles, tmp_path / "other")
    quantized = tmp_path / "quantized"
    assert main(["quantize", "--model", str(other), "--output", str(quantized), "-q"]) == 0
    cache, texts, programs = tmp_path / "cache" / "compiled", [], []
    for folder in (checkpoint, quantized):
        command = ["generate", "--model", str(folder), "-m", "6", "-q"]
        done = subprocess.run(
            [sys.executable, "-m", "fp4jax", *command],
            capture_output=True,
            env={**os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
        programs.append({path.name for path in cache.iterdir() if "decode" in path.name})
    assert programs[0] and programs[0] == programs[1]
    assert texts[0] != texts[1]
