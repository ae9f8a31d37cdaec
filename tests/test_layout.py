"""The shape of the repository: who imports whom, what an import may do, and what every file must keep to."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["configs", "model", "prepare_fineweb", "hellaswag", "curves", "train", "sft"]  # of reading
MAY_IMPORT = {name: ORDER[:i] for i, name in enumerate(ORDER)}
MAY_IMPORT |= {"chat": ["configs", "model"], "curves": ["configs"], "sft": [*MAY_IMPORT["sft"], "chat"]}
SCRIPTS = ["prepare_fineweb", "hellaswag", "curves", "train", "sft", "chat"]
HEAVY = {"datasets", "huggingface_hub", "matplotlib", "transformers", "pyarrow"}
SOURCES = sorted([*ROOT.glob("*.py"), *ROOT.glob("configs/**/*.py"), *ROOT.glob("tests/*.py")])


def source(script):
    path = ROOT / f"{script}.py"
    return path if path.exists() else ROOT / script / "__init__.py"


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module.split(".")[0]


def python(*words, **env):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
    return subprocess.run([sys.executable, *words], capture_output=True, env=env, cwd=ROOT,
                          timeout=300, check=False)


@pytest.mark.parametrize("script", sorted(MAY_IMPORT))
def test_a_file_imports_only_from_files_before_it(script):
    ours = {*ORDER, "chat"}
    assert set(imports(ast.parse(source(script).read_text(encoding="utf-8")))) & ours <= {*MAY_IMPORT[script]}


LOOK = """
import runpy, socket, sys
def no_network(*_): raise OSError("an import opened a socket")
socket.socket.connect = no_network
for name in ("socket.connect", "socket.getaddrinfo"):
    sys.addaudithook(lambda event, args, name=name: no_network() if event == name else None)
runpy.run_path(sys.argv[1], run_name="__mp_main__")
found = sorted(set(sys.argv[2].split(",")) & set(sys.modules))
assert not found, found
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_importing_a_script_as_a_worker_does_prints_nothing_and_loads_nothing_heavy(script):
    done = python("-c", LOOK, str(source(script)), ",".join(HEAVY), PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_works_on_a_windows_console_and_every_text_file_names_its_encoding(script):
    done = python("-X", "warn_default_encoding", f"{script}.py", "--help", PYTHONIOENCODING="cp1252")
    assert done.returncode == 0 and len(done.stdout) > 200 and script.encode() in done.stdout
    warnings = done.stderr.decode("cp1252").splitlines()  # torch has some of its own
    ours = [line for line in warnings if line.startswith(str(ROOT)) and "site-packages" not in line]
    assert not [line for line in ours if "EncodingWarning" in line]


def opens_text(call):
    """Whether a call reads or writes a text file: open() that is not binary, .read_text(), .write_text()."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    words = [*call.args, *(word.value for word in call.keywords)]
    modes = {word.value for word in words if isinstance(word, ast.Constant)}
    binary = bool({"rb", "wb", "ab", "xb", "r+b", "a+b", "w+b"} & modes)
    by_path = name in ("read_text", "write_text") and owner and owner != "configs"
    return by_path or name == "open" and owner in ("", "path", "Path") and not binary


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_open_of_a_text_file_names_its_encoding(path):
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and opens_text(call):
            assert {"encoding", None} & {word.arg for word in call.keywords}, f"{path.name}:{call.lineno}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_starts_only_when_it_is_the_main_one(script):
    text = source(script).read_text(encoding="utf-8")
    assert re.search(r'\nif __name__ == "__main__":\n    (configs\.)?run\(main\)\n$', text)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_says_what_it_is(path):
    assert len(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))) > 30


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_keeps_to_110_columns(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not [n for n, line in enumerate(lines, 1) if len(line) > 110]


def test_nothing_names_the_place_where_it_was_written():
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    places = re.compile("/(work|root)/|/tmp/" + "[a-z]|127.0.0.1:[1-9]\\d")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".csv", "") and path.is_file():
            found = places.search(path.read_text(encoding="utf-8", errors="replace"))
            assert not found, f"{name}: {found[0]}"
