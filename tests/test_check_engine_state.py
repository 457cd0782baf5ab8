"""The engine-state checker: each rule red on planted offenders, green on their look-alikes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml

from fp4jax.check_engine_state import RULES, CheckConfig, Finding, check_paths
from fp4jax.check_engine_state.__main__ import main
from fp4jax.errors import Fp4JaxError

REPO = Path(__file__).resolve().parent.parent
OFFENDERS = REPO / "tests" / "data" / "offenders"
CHECKED = ("fp4jax", "models", "examples", "bench", "tests")
RULE_SETS = ("es001", "es002", "es003", "es004", "es005", "es006")


def expected(path: Path) -> list[tuple[str, int, str]]:
    """(file, line, rule) of each ``# expect: ES001 ES002`` mark at and under a path."""
    marks = []
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            marked = re.search(r"# expect:((?: ES\d{3})+)$", line)
            for rule in marked[1].split() if marked else ():
                marks.append((file.as_posix(), number, rule))
    return sorted(marks)


def found(findings: list[Finding]) -> list[tuple[str, int, str]]:
    return sorted((finding.path, finding.line, finding.rule) for finding in findings)


def offender_paths(rule_set: str, suffix: str) -> list[Path]:
    return sorted(p for p in OFFENDERS.glob(f"{rule_set}_*") if suffix == ("lookalike" in p.name))


def check_text(tmp_path: Path, text: str, name: str = "sample.py") -> list[Finding]:
    file = tmp_path / name
    file.write_text(textwrap.dedent(text))
    return check_paths([file])


@pytest.mark.parametrize("rule_set", RULE_SETS)
def test_offenders_are_refused_at_exactly_the_marked_lines(rule_set):
    for path in offender_paths(rule_set, False):
        marks = expected(path)
        assert any(rule == rule_set.upper() for _, _, rule in marks)
        assert found(check_paths([path])) == marks


@pytest.mark.parametrize("rule_set", RULE_SETS)
def test_lookalikes_pass(rule_set):
    paths = offender_paths(rule_set, True)
    assert paths
    for path in paths:
        assert [str(finding) for finding in check_paths([path])] == []


def test_every_rule_has_offenders_and_lookalikes():
    assert {rule.id for rule in RULES} == {"ES000", *(name.upper() for name in RULE_SETS)}


def test_messages_say_what_is_wrong_and_what_to_do(tmp_path):
    for rule_set in RULE_SETS:
        for finding in check_paths(offender_paths(rule_set, False)):
            rule = next(rule for rule in RULES if rule.id == finding.rule)
            problem, _, remedy = finding.message.partition(". Instead: ")
            assert problem and remedy == rule.instead
    (finding,) = check_text(tmp_path, "_CACHE = {}\ndef f(w):\n    _CACHE[w] = 1\n")
    assert str(finding).startswith(f"{tmp_path.as_posix()}/sample.py:1:1: ES001 ")
    assert "`_CACHE` is a mutable dict that is written to at line 3" in finding.message


def test_column_counts_from_one(tmp_path):
    (finding,) = check_text(tmp_path, "def f(w):\n    return 1, id(w)\n")
    assert (finding.line, finding.column) == (2, 15)


# Rules that look across files.


def write_package(tmp_path: Path, name: str, files: dict[str, str]) -> Path:
    package = tmp_path / name
    package.mkdir(parents=True)
    for file, text in {"__init__.py": "", **files}.items():
        (package / file).write_text(textwrap.dedent(text))
    return package


def test_a_table_that_another_file_writes_to_is_refused(tmp_path):
    package = write_package(
        tmp_path,
        "engine",
        {
            "tables.py": "TABLE = {'a': 1}\nREAD = {'a': 1}\nSIZE = TABLE['a']\n",
            "reader.py": "from engine.tables import READ\ndef read(k):\n    return READ[k]\n",
            "writer.py": "from . import tables as t\ndef f(k, v):\n    t.TABLE[k] = v\n",
        },
    )
    (finding,) = check_paths([package])
    assert finding.path.endswith("engine/tables.py") and finding.line == 1
    assert "is written to at" in finding.message and "writer.py:3" in finding.message
    assert check_paths([package / "tables.py"]) == []  # nothing in sight writes to it


def test_an_instance_of_an_imported_mutable_class_is_refused(tmp_path):
    package = write_package(
        tmp_path,
        "engine",
        {
            "pool.py": "class Pool:\n    def put(self, k, v):\n        self.items[k] = v\n",
            "user.py": "from engine.pool import Pool\n\npool = Pool()\n",
        },
    )
    (finding,) = check_paths([package])
    assert (finding.line, finding.rule) == (3, "ES001")
    assert "method `put` changes it (line 3)" in finding.message


def test_an_array_that_another_file_compiles_over_is_refused(tmp_path):
    package = write_package(
        tmp_path,
        "engine",
        {
            "tables.py": "import numpy as np\n\nTABLE = np.arange(16)\nHOST = np.arange(16)\n",
            "step.py": """\
                import jax
                from engine.tables import HOST, TABLE
                @jax.jit
                def step(x):
                    return TABLE[x]
                def host(x):
                    return HOST[x]
                """,
        },
    )
    (finding,) = check_paths([package])
    assert (finding.line, finding.rule) == (3, "ES004")
    assert "step.py:5" in finding.message


def test_device_arrays_made_by_importing_a_package_are_refused(tmp_path):
    text = "import jax.numpy as jnp\n\nONES = jnp.ones(3)\n"
    package = write_package(tmp_path, "engine", {"tables.py": text})
    assert [(f.line, f.rule) for f in check_paths([package])] == [(3, "ES004")]
    script = tmp_path / "script.py"
    script.write_text(text)
    assert check_paths([script]) == []


def test_names_are_compared_across_all_packages_but_not_tests_or_scripts(tmp_path):
    first = write_package(tmp_path, "first", {"a.py": "def repack():\n    pass\n"})
    second = write_package(tmp_path, "second", {"b.py": "class repack:\n    pass\n"})
    tests = write_package(tmp_path, "tests", {"helper.py": "def repack():\n    pass\n"})
    (tmp_path / "script.py").write_text("def repack():\n    pass\n")
    (finding,) = check_paths([first, second, tests, tmp_path / "script.py"])
    assert finding.path.endswith("second/b.py") and "first/a.py:1" in finding.message
    assert check_paths([second]) == []


def test_protocol_names_are_allowed_by_configuration_with_a_reason(tmp_path):
    definition = "def unsupported_reason(spec):\n    pass\n"
    package = write_package(tmp_path, "ops", {"xla.py": definition, "triton.py": definition})
    assert [f.rule for f in check_paths([package])] == ["ES005"]
    table = "[tool.fp4jax.check_engine_state.protocol]\nunsupported_reason = "
    (tmp_path / "pyproject.toml").write_text(table + '"what each backend answers"')
    assert check_paths([package]) == []
    (tmp_path / "pyproject.toml").write_text(table + '""')
    with pytest.raises(Fp4JaxError, match="needs a reason"):
        check_paths([package])


# The repository, and the hazard planted in it.


def test_this_repository_is_clean():
    paths = [REPO / name for name in CHECKED if (REPO / name).is_dir()]
    assert [str(finding) for finding in check_paths(paths)] == []


def test_the_address_keyed_repack_cache_is_refused(tmp_path):
    original = (REPO / "fp4jax" / "marlin.py").read_text()
    clean = tmp_path / "marlin.py"
    clean.write_text(original)
    assert check_paths([clean]) == []
    call = "    return _repack(weights)\n\n\n@jax.jit\ndef _unpack"
    assert original.count(call) == 1
    planted = original.replace(
        call,
        "    key = tuple(id(w.packed) for w in weights)\n"
        "    if key not in _REPACKED:\n"
        "        _REPACKED[key] = _repack(weights)\n"
        "    return _REPACKED[key]\n\n\n_REPACKED = {}\n\n\n@jax.jit\ndef _unpack",
    )
    clean.write_text(planted)
    lines = planted.splitlines()
    refused = {(lines[f.line - 1].strip(), f.rule) for f in check_paths([clean])}
    assert refused == {
        ("_REPACKED = {}", "ES001"),
        ("key = tuple(id(w.packed) for w in weights)", "ES002"),
    }


@pytest.mark.parametrize(
    ("plant", "rule"),
    [
        ("@functools.lru_cache\ndef repack(weight", "ES003"),
        ("_LAST: list = []\n\n\ndef repack(weight", "ES001"),
        ("_TABLE = jnp.arange(16)\n\n\ndef repack(weight", "ES004"),
        ("def unpack(weight):\n    return weight\n\n\ndef repack(weight", "ES005"),
    ],
)
def test_other_rules_are_red_on_the_same_file(tmp_path, plant, rule):
    package = write_package(tmp_path, "engine", {})
    text = (REPO / "fp4jax" / "marlin.py").read_text()
    assert text.count("\ndef repack(weight") == 1
    file = package / "marlin.py"
    file.write_text(text.replace("def repack(weight", plant))
    assert {finding.rule for finding in check_paths([package])} == {rule}


# The walk, the configuration, the command line.


def test_walk_skips_what_is_not_source(tmp_path):
    offender = "_CACHE = {}\n"
    for folder in ("src", "build", "dist", ".hidden", "node_modules", "env", "vendor", "src/deep"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(offender)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "src" / "notes.txt").write_text(offender)

    def paths(**options):
        return [Path(f.path).relative_to(tmp_path).as_posix() for f in check_paths(**options)]

    assert paths(paths=[tmp_path]) == ["src/a.py", "src/deep/a.py", "vendor/a.py"]
    assert paths(paths=[tmp_path], exclude=["vendor", "src/deep"]) == ["src/a.py"]
    assert paths(paths=[tmp_path], exclude=["src/*.py", "vendor/"]) == ["src/deep/a.py"]
    table = '[tool.fp4jax.check_engine_state]\nexclude = ["vendor", "src/deep"]\n'
    (tmp_path / "pyproject.toml").write_text(table)
    assert paths(paths=[tmp_path]) == ["src/a.py"]
    # What is named is checked; what is reached twice is reported once.
    named = [tmp_path / "vendor", tmp_path / "vendor" / "a.py", tmp_path / "build" / "a.py"]
    assert paths(paths=named) == ["build/a.py", "vendor/a.py"]


def test_select_and_ignore():
    path = OFFENDERS / "es001_mutable_state.py"
    assert {f.rule for f in check_paths([path])} == {"ES001", "ES002"}
    assert {f.rule for f in check_paths([path], select=["ES002"])} == {"ES002"}
    assert {f.rule for f in check_paths([path], ignore=["ES002"])} == {"ES001"}
    with pytest.raises(Fp4JaxError, match="there is no rule ES123"):
        check_paths([path], select=["ES123"])


def test_an_allow_comment_is_not_unused_when_its_rule_does_not_run():
    path = OFFENDERS / "es006_lookalikes.py"
    assert check_paths([path], select=["ES002", "ES006"]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool", "cannot be read as TOML"),
        ("[tool.fp4jax.check_engine_state]\nexcludes = []", "has no field excludes"),
        ("[tool.fp4jax.check_engine_state]\nexclude = 'a'", "exclude must be a list of strings"),
        ("[tool.fp4jax]\ncheck_engine_state = 3", "is not a table"),
    ],
)
def test_malformed_configuration(tmp_path, text, message):
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "a.py").touch()
    with pytest.raises(Fp4JaxError, match=re.escape(message)):
        check_paths([tmp_path])
    assert check_paths([tmp_path], config=CheckConfig(tmp_path)) == []


def test_unreadable_files_are_findings(tmp_path):
    (tmp_path / "syntax.py").write_text("x = 1\ndef broken(:\n    pass\n")
    (tmp_path / "nul.py").write_bytes(b"x = 1\0\n")
    (tmp_path / "encoding.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "deep.py").write_text("x = " + "-" * 5000 + "1\n")
    (tmp_path / "fine.py").write_text("_CACHE = {}\n")
    findings = check_paths([tmp_path])
    assert [Path(f.path).name for f in findings if f.rule == "ES000"] == [
        "deep.py", "encoding.py", "nul.py", "syntax.py",
    ]  # fmt: skip
    assert [Path(f.path).name for f in findings if f.rule == "ES001"] == ["fine.py"]
    syntax = next(f for f in findings if f.path.endswith("syntax.py"))
    assert syntax.line == 2 and "syntax error" in syntax.message


def test_targets_are_not_executed(tmp_path):
    text = "import os\nos.mkdir(os.path.join(os.path.dirname(__file__), 'ran'))\n_CACHE = {}\n"
    assert [f.rule for f in check_text(tmp_path, text)] == ["ES001"]
    assert not (tmp_path / "ran").exists()


def test_exit_status_and_formats(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("clean.py").write_text("X = ()\n")
    Path("bad.py").write_text("_CACHE = {}\n\n\ndef f(w):\n    return id(w)\n")
    assert main(["clean.py"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["."]) == 1
    assert [line.split(" ")[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["bad.py:1:1:", "ES001"],
        ["bad.py:5:12:", "ES002"],
    ]
    assert main(["--select", "es002", "--format", "json", "bad.py"]) == 1
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["path"], entry["line"], entry["rule"]) == ("bad.py", 5, "ES002")
    assert main(["--format", "json", "clean.py"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["--format", "github", "--ignore", "ES002", "bad.py"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("::error file=bad.py,line=1,col=1,title=ES001::module-level `_CACHE`")
    assert main(["--exclude", "bad.py", "."]) == 0
    assert main(["absent.py"]) == 2
    assert "absent.py: no such file or folder" in capsys.readouterr().err
    assert main(["--select", "ES9", "bad.py"]) == 2
    with pytest.raises(SystemExit) as usage:
        main([])
    assert usage.value.code == 2


def test_the_checker_imports_no_array_library():
    code = (
        "import sys, fp4jax; before = set(sys.modules)\n"
        "import fp4jax.check_engine_state.__main__ as m; m.check_paths([m.__file__])\n"
        "heavy = {'jax', 'jaxlib', 'numpy', 'flax'} & (set(sys.modules) - before)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Pre-commit.


def hooks() -> list[dict]:
    loaded = yaml.safe_load((REPO / ".pre-commit-hooks.yaml").read_text())
    assert isinstance(loaded, list)
    return loaded


def test_hook_definitions_have_the_fields_that_pre_commit_needs():
    assert [hook["id"] for hook in hooks()] == [
        "fp4jax-check-engine-state", "fp4jax-check-engine-state-system",
    ]  # fmt: skip
    for hook in hooks():
        assert {"id", "name", "description", "entry", "language", "types"} <= set(hook)
        # One name defined twice shows only when all files are seen together.
        assert hook["pass_filenames"] is False


def test_this_repository_runs_the_checker_before_commits():
    config = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())
    local = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    assert {"ruff", "mypy", "check-engine-state"} <= set(local)
    entry = local["check-engine-state"]["entry"].split()
    assert entry[:3] == ["python", "-m", "fp4jax.check_engine_state"]
    assert tuple(entry[3:]) == CHECKED
    table = tomllib.loads((REPO / "pyproject.toml").read_text())
    assert table["tool"]["fp4jax"]["check_engine_state"]["exclude"] == ["tests/data/offenders"]


@pytest.mark.parametrize("at", [0, 1])
def test_the_hook_refuses_a_commit(tmp_path, at):
    hook = hooks()[at]
    command = " ".join([hook["entry"], *hook["args"]])
    environment = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", *identity, *args], cwd=tmp_path, env=environment, text=True, capture_output=True
        )

    assert git("init", "-q").returncode == 0
    script = tmp_path / ".git" / "hooks" / "pre-commit"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/sh\nexec {command}\n")
    script.chmod(0o755)
    (tmp_path / "engine.py").write_text("_CACHE = {}\n")
    git("add", "engine.py")
    refused = git("commit", "-m", "offender")
    assert refused.returncode == 1
    assert "engine.py:1:1: ES001" in refused.stdout + refused.stderr
    (tmp_path / "engine.py").write_text("TABLE = ()\n")
    git("add", "engine.py")
    assert git("commit", "-m", "clean").returncode == 0
