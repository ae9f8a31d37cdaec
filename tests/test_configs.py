"""configs/__init__.py: every form of a command line, every mistake in it, and settings that repeat a run."""

import dataclasses
import importlib
import os
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

import configs
from configs import UserError, load, save

ROOT = Path(configs.__file__).parent.parent
BASES = sorted(path.stem for path in configs.FOLDER.glob("*.toml"))
OVERLAYS = sorted(path.relative_to(ROOT).as_posix() for path in configs.FOLDER.glob("*/*.toml"))


@dataclasses.dataclass
class Config:
    out_dir: str
    max_steps: int
    lr: float
    compile: bool
    models: list[str]
    optimizer: Literal["adamw", "muon"]
    mode: Literal["auto", True, False]


BASE = """# what it is for
out_dir = "out/a"   # where
max_steps = 10
lr = 1e-3
compile = false
models = ["a", "b"]
optimizer = "adamw"
mode = "auto"
"""


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    """A script "job" with its base in configs/, started beside an empty folder."""
    (tmp_path / "repo" / "configs" / "tiny").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "repo" / "configs" / "job.toml").write_text(BASE, encoding="utf-8")
    monkeypatch.setattr(configs, "FOLDER", tmp_path / "repo" / "configs")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def job(*words):
    return load(Config, "job", list(words))


def refused(*words):
    with pytest.raises(UserError) as error:
        job(*words)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("words", "name", "value"), [
    ([], "max_steps", 10), (["--max_steps=20"], "max_steps", 20), (["--max_steps", "20"], "max_steps", 20),
    (["--max-steps=20"], "max_steps", 20), (["-max_steps=20"], "max_steps", 20),
    (["--max_steps=10e9"], "max_steps", 10**10),
    (["--max_steps=-1"], "max_steps", -1), (["--max_steps", "-1"], "max_steps", -1),
    (["--max_steps=1_000"], "max_steps", 1000),
    (["--max_steps=9007199254740993"], "max_steps", 2**53 + 1),
    (["--max_steps=1", "--max_steps=2"], "max_steps", 2),
    (["--lr=1"], "lr", 1.0), (["--lr", "3e-4"], "lr", 3e-4), (["--lr=.5"], "lr", 0.5),
    (["--compile"], "compile", True), (["--compile=true"], "compile", True),
    (["--compile=True"], "compile", True),
    (["--compile", "--lr=1"], "compile", True), (["--compile", "false"], "compile", False),
    (["--compile=False"], "compile", False),
    (["--out_dir="], "out_dir", ""), (["--out_dir", ""], "out_dir", ""),
    (["--out_dir=a=b, c"], "out_dir", "a=b, c"),
    (["--out_dir=--x"], "out_dir", "--x"), (["--out_dir=007"], "out_dir", "007"),
    (["--out_dir=true"], "out_dir", "true"),
    (["--out_dir=C:\\new\\table"], "out_dir", "C:\\new\\table"),
    (["--out_dir=Ünï 🙂"], "out_dir", "Ünï 🙂"),
    (["--models=x, y"], "models", ["x, y"]), (["--models", "x", "y z", "--lr=1"], "models", ["x", "y z"]),
    (['--models=["x, y", "z"]'], "models", ["x, y", "z"]), (["--models=[draft"], "models", ["[draft"]),
    (["--models", "x,y"], "models", ["x,y"]), (["--models="], "models", []), (["--models"], "models", []),
    (["--optimizer=muon"], "optimizer", "muon"), (["--optimizer", "Muon"], "optimizer", "muon"),
    (["--mode=auto"], "mode", "auto"), (["--mode=true"], "mode", True), (["--mode", "False"], "mode", False),
])
def test_a_command_line_does_what_was_meant(words, name, value):
    got = getattr(job(*words), name)
    assert got == value and type(got) is type(value)


def test_a_bool_leaves_the_overlay_that_follows_it_alone(script):
    (script / "here" / "mine.toml").write_text("lr = 5", encoding="utf-8")
    config = job("--compile", "mine.toml")
    assert config.compile and config.lr == 5.0


@pytest.mark.parametrize(("words", "says"), [
    (["--max_step=1"], "did you mean max_steps?"), (["--outdir=x"], "did you mean out_dir?"),
    (["--lrr", "1"], "did you mean lr?"), (["--learning_rate=1"], "lr?"), (["--learningrate", "1"], "lr?"),
    (["--zzzzzz=1"], "--help"), (["--"], "--help"), (["--=3"], "--help"), (["---"], "--help"),
    (["--max_steps=ten"], "max_steps = 'ten' must be a whole number"), (["--max_steps=1.5"], "whole number"),
    (["--max_steps="], "whole number"), (["--max_steps=inf"], "whole number"),
    (["--max_steps=nan"], "whole number"),
    (["--max_steps=true"], "whole number"), (["--max_steps"], "--max_steps=..."), (["--lr"], "--lr=..."),
    (["--lr=fast"], "must be a number"), (["--lr=nan"], "must be a number"),
    (["--lr=1e999"], "must be a number"),
    (["--compile=yes"], "true or false"), (["--compile=1"], "true or false"),
    (["--optimizer=sgd"], "adamw or muon"), (["--mode=maybe"], "auto or true or false"),
    (["lr=1"], "--key=value"), (["nowhere"], "nowhere"), (["nowhere.toml"], "nowhere.toml"),
    ([""], "--key=value"),
    (["../repo/configs/job.txt"], "job.txt"), (["."], "job.toml"), (["../repo/configs/tiny"], "job.toml"),
])
def test_a_mistake_is_one_line_that_says_what_works(words, says):
    assert says in refused(*words)


def test_overlays_are_a_file_or_a_folder_and_the_later_wins(script):
    tiny = script / "repo" / "configs" / "tiny" / "job.toml"
    tiny.write_text("lr = 1\nmax_steps = 1", encoding="utf-8")
    (script / "here" / "mine.toml").write_text("lr = 2", encoding="utf-8")
    assert job("configs/tiny").lr == job(str(tiny.parent)).lr == job("configs/tiny/job.toml").lr == 1.0
    assert job("configs/tiny", "mine.toml").lr == 2.0 and job("mine.toml", "configs/tiny").lr == 1.0
    both = job("configs/tiny", "--lr=3", "mine.toml")  # what is set by name wins, wherever it stands
    assert both.lr == 3.0 and both.max_steps == 1 and both.out_dir == "out/a"
    assert "configs/tiny" in refused("configs/tinny")


@pytest.mark.parametrize(("text", "says"), [
    ("max_step = 1", "did you mean max_steps?"), ("max_steps = 'x'", "whole number"),
    ("max_steps = 1.5", "whole number"),
    ("max_steps = true", "whole number"), ("max_steps = [1]", "whole number"),
    ("compile = 1", "true or false"),
    ("out_dir = true", "must be text"), ("out_dir = ['a']", "must be text"), ("models = 3", "list"),
    ('out_dir = "a\\u0000b"', "must be text"), ("lr = nan", "a number"),
    ("lr = ", "not TOML"), ("[table]\nlr = 1", "table"), ("import os", "not TOML"),
    ("lr = __import__('os').remove('x')", "not TOML"), ("optimizer = 'SGD'", "adamw or muon"),
])
def test_a_mistake_in_a_file_names_the_file(text, says, script):
    (script / "here" / "mine.toml").write_text(text, encoding="utf-8")
    message = refused("mine.toml")
    assert says in message and "mine.toml" in message


def test_files_from_windows_are_read(script):
    text = 'out_dir = "Ünï"\r\nmodels = [\r\n  "a",\r\n]\r\n'
    (script / "here" / "mine.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert job("mine.toml").out_dir == "Ünï" and job("mine.toml").models == ["a"]
    (script / "here" / "mine.toml").write_bytes(text.encode("cp1252"))
    assert "not TOML" in refused("mine.toml")
    (script / "here" / "mine.toml").write_bytes(text.encode("utf-16"))
    assert "not TOML" in refused("mine.toml")


def test_the_settings_of_a_run_repeat_it(script):
    rng = random.Random(0)
    letters = "ab \"'\\/#=[]{}\n\r\t\x1b\x7f\x85\u2028éü日🙂\ufeff%$"
    for n in range(300):
        word = lambda: "".join(rng.choices(letters, k=rng.randrange(9)))
        config = Config(word(), rng.choice([0, -5, 10**12, 2**53 + 1]),
                        rng.choice([0.1, 1e-30, 3.0, 1e22, -0.0, 1 / 3]), n % 2 == 0,
                        [word() for _ in range(n % 4)], "muon", rng.choice(["auto", True, False]))
        save(config, "run.toml")
        assert job("run.toml") == config
    assert [path.name for path in Path().iterdir()] == ["run.toml"]


def test_help_prints_the_commented_base(script, capsys):
    for words in (["--help"], ["-h"], ["--lr=1", "--help"]):
        with pytest.raises(SystemExit) as end:
            job(*words)
        out = capsys.readouterr().out
        assert end.value.code == 0 and "job.py" in out and out.endswith(BASE)


def test_write_text_leaves_the_old_file_or_the_new_one(script, monkeypatch):
    configs.write_text("a.txt", "old 🙂")
    monkeypatch.setattr(configs.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError):
        configs.write_text("a.txt", "new")
    assert Path("a.txt").read_text(encoding="utf-8") == "old 🙂"


def test_a_file_that_a_virus_scanner_holds_for_a_moment_is_replaced_all_the_same(script, monkeypatch):
    replace, refusals = os.replace, iter([PermissionError(13, "in use")] * 2)

    def held(*paths):
        for error in refusals:
            raise error
        replace(*paths)

    monkeypatch.setattr(configs.os, "replace", held)
    monkeypatch.setattr(configs.time, "sleep", lambda s: None)
    configs.write_text("a.txt", "new")
    assert Path("a.txt").read_text(encoding="utf-8") == "new"
    refusals = iter([PermissionError(13, "in use")] * 9)
    with pytest.raises(PermissionError):
        configs.write_text("a.txt", "newer")


def ended(code, **options):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from configs import *\n" + code
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, **options)
    return done.returncode, done.stdout, done.stderr


def test_run_turns_what_a_user_can_cause_into_one_line():
    assert ended("def main(): raise UserError('no such')\nrun(main)") == (1, "", "error: no such\n")
    assert ended("def main(): raise KeyboardInterrupt\nrun(main)") == (130, "", "")
    code, _, err = ended("def main(): 1 / 0\nrun(main)")
    assert code == 1 and "Traceback" in err and "ZeroDivisionError" in err


def test_run_survives_a_console_that_cannot_print_and_a_reader_that_has_left():
    code = "def main(): print('日本 🙂')\nrun(main)"
    assert ended(code, env={"PYTHONIOENCODING": "ascii", "SYSTEMROOT": "C:\\Windows"})[:2] == (0, "?? ?\n")
    loud = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from configs import *\n" \
           "def main():\n    for _ in range(10**5): print('x' * 100)\nrun(main)"
    process = subprocess.Popen([sys.executable, "-c", loud], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 1


@pytest.mark.parametrize("target", ["/dev/full", None])
def test_an_output_that_takes_nothing_is_no_traceback(target):
    if target and not Path(target).exists():
        pytest.skip("no /dev/full here")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from configs import *\n" \
           "def main(): print('hi')\nrun(main)"
    command = ([sys.executable, "-c", code] if target else
               ["sh", "-c", f'exec "{sys.executable}" -c "$0" >&-', code])
    with open(target or os.devnull, "w", encoding="utf-8") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr and done.returncode == bool(target)


SCRIPTS = ["prepare_fineweb", "train", "hellaswag", "sft", "chat", "curves"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_package_that_is_missing_is_one_line(name):
    # -I -S: without the environment's packages, as when it was not activated
    code = f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['x', 'a']; " \
           f"runpy.run_path({str(ROOT / name)!r} + '.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, encoding="utf-8",
                          check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "has no package" in done.stderr and "requirements.txt" in done.stderr


def test_ctrl_c_during_the_imports_is_quiet_and_a_bug_is_not(capsys):
    for error, says in ((KeyboardInterrupt(), ""), (ValueError("a bug"), "a bug"),
                        (ModuleNotFoundError("no", name="our_typo"), "ModuleNotFoundError")):
        configs.explain_at_exit(type(error), error, None)
        text = capsys.readouterr().err
        assert says in text and bool(text) == bool(says)


# ------------------------------------------------------------------------------------------------------------
# What the hub's libraries are told, and what they say


def wrapped(inner, outer):
    try:
        try:
            raise inner
        except type(inner) as error:
            raise outer from error
    except type(outer) as error:
        return error


def test_the_reason_of_a_failed_download_is_the_innermost_however_it_is_wrapped():
    refused = OSError(28, "No space left on device")
    blocked = ConnectionError("went wrong")
    blocked.response = SimpleNamespace(status_code=451)
    for error, reason in (
            (wrapped(blocked, FileNotFoundError("is not cached")), ("HTTP 451", 451, 0)),
            (wrapped(refused, ValueError("could\nnot")), (f"{refused}; could not", 0, 28)),
            (Exception("failed: (404 Not Found) for url"), ("HTTP 404", 404, 0)),
            (Exception("io: (os error 28)"), ("io: (os error 28)", 0, 28)), (KeyError(), ("KeyError", 0, 0))):
        assert configs.reason_of(error) == reason
    again = ValueError("b")
    again.__cause__ = wrapped(again, KeyError("a"))  # a circle
    assert "b" in configs.reason_of(again)[0]


def test_what_the_hub_sends_stays_beside_the_program_if_the_user_has_not_said_where(monkeypatch, script):
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_XET_CACHE", "HF_HUB_DISABLE_SYMLINKS_WARNING"):
        monkeypatch.setenv(name, "")  # so that it is restored
    monkeypatch.setenv("HF_HOME", "/theirs")
    configs.keep_hub_files_here()
    assert not os.environ["HF_HUB_CACHE"]
    monkeypatch.setenv("HF_HOME", "")
    monkeypatch.setenv("HF_DATASETS_CACHE", "/theirs")
    configs.keep_hub_files_here()
    assert "HF_HOME" not in os.environ and os.environ["HF_DATASETS_CACHE"] == "/theirs"
    assert Path(os.environ["HF_HUB_CACHE"]) == script / "here" / "data" / "hub" / "hub"


# ------------------------------------------------------------------------------------------------------------
# The files that are there


@pytest.fixture
def real(monkeypatch):
    monkeypatch.setattr(configs, "FOLDER", ROOT / "configs")
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("script_name", BASES)
def test_every_base_gives_exactly_the_fields_of_its_script(script_name, real):
    Script = importlib.import_module(script_name).Config
    text = (configs.FOLDER / f"{script_name}.toml").read_text(encoding="utf-8")
    assert sorted(tomllib.loads(text)) == sorted(field.name for field in dataclasses.fields(Script))
    assert all(field.default is dataclasses.MISSING for field in dataclasses.fields(Script))
    config = load(Script, script_name, [])
    for field in dataclasses.fields(Script):
        value = getattr(config, field.name)
        assert not isinstance(field.type, type) or type(value) is field.type, field.name


@pytest.mark.parametrize("path", OVERLAYS)
def test_every_overlay_loads_and_changes_something(path, real):
    script_name = Path(path).stem
    Script = importlib.import_module(script_name).Config
    base, as_file = load(Script, script_name, []), load(Script, script_name, [path])
    assert as_file == load(Script, script_name, [str(Path(path).parent)]) != base
