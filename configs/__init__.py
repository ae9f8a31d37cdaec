"""Settings: TOML files and `--key=value`, into the flat dataclass that each script declares.

    python train.py [overlay ...] [--key=value ...]

`configs/train.toml` is read first and is complete: every setting, with the reason for its value. An overlay
is a .toml file, or a folder, which means the file with the script's name in it (`configs/tiny/train.toml`).
Later wins. The dataclass holds only types, so no value is written twice, and a config file never runs code.

Also here, because every script needs it: errors in one line, files that appear whole or not at all, the hub.
"""

import contextlib
import dataclasses
import difflib
import errno
import json
import math
import os
import re
import sys
import time
import tomllib
import typing
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PACKAGES = {"torch", "numpy", "tiktoken", "datasets", "huggingface_hub", "pyarrow", "tqdm", "safetensors",
            "matplotlib"}
UNFINISHED = ".unfinished"  # how a file is called that is being written; nobody else's files are called that
# What other programs call a setting, without underscores, where the letters do not lead from theirs to ours.
OTHER_NAMES = {"learningrate": "lr", "contextlength": "block_size", "seqlen": "block_size",
               "dmodel": "n_embd", "hiddensize": "n_embd", "gradientaccumulationsteps": "tokens_per_step"}


class UserError(Exception):
    """What a user or a file can cause: shown as one line that says what to do, without a traceback."""


def load(Config, script, argv=None):
    """The settings of `script` ("train", "chat", ...) as an instance of the dataclass `Config`.

    argv  the words after the script's name; None takes them from the command line

    Prints the commented base file and exits for --help. Raises UserError for an unknown name (with the
    nearest), a value of the wrong type, and a file that is missing or is not TOML.
    """
    overlays, options = split_command_line(Config, sys.argv[1:] if argv is None else argv)
    base = FOLDER / f"{script}.toml"
    if "help" in options:
        print(f"usage: python {script}.py [overlay.toml or folder ...] [--key=value ...]\n")
        print(base.read_text(encoding="utf-8"), end="")
        sys.exit(0)

    values = {}
    for path in [base, *(find_overlay(name, script) for name in overlays)]:
        for name, value in read_toml(path).items():
            values[name] = parse(Config, name, value, where=path)
    for name, value in options.items():
        values[name] = parse(Config, name, value, where=None)
    missing = [field.name for field in dataclasses.fields(Config) if field.name not in values]
    assert not missing, f"{base} must give every setting a value; it lacks {missing}"
    return Config(**values)


def save(config, path):
    """Writes the resolved settings to `path` as TOML; `python train.py <path>` repeats the run."""
    lines = []
    for name, value in dataclasses.asdict(config).items():
        # TOML's basic strings, numbers, booleans and arrays are JSON's, but for DEL, which TOML wants escaped
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}\n".replace("\x7f", "\\u007f"))
    write_text(path, "".join(lines))


def write_text(path, text):
    """Writes a text file so that a crash leaves the old file or the new one, never half of one."""
    # the same bytes on Windows; and a folder's name need not be Unicode on Linux
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="surrogateescape"))


@contextlib.contextmanager
def replacing(path, keep=None):
    """A binary file to write to, which takes the place of `path` at the end: whole, or not at all.

    keep  a path for what stood there before
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")  # two processes may be at it
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep and path.exists():
            put_in_place(path, keep)
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # half a file would only fill the disk


def put_in_place(temporary, path):
    """os.replace(), with some patience: on Windows it fails while a virus scanner looks at either file."""
    for wait_s in (0.1, 0.3, 1.0, None):
        try:
            return os.replace(temporary, path)
        except PermissionError:
            if wait_s is None:
                raise
            time.sleep(wait_s)


def explain_at_exit(kind, error, trace):
    """sys.excepthook: a forgotten environment, or Ctrl-C during the imports, is no bug and has no trace."""
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] in PACKAGES:
        print(f"error: this Python ({sys.executable}) has no package {error.name}: activate the environment "
              "that has it (README, Two commands), or pip install -r requirements.txt", file=sys.stderr)
    elif not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = explain_at_exit  # from here on, so that the imports after this one are covered


def run(main):
    """Calls a script's main(): what a user can cause ends in one line and code 1, a bug in a traceback."""
    for name in ("stdout", "stderr"):  # closed, or a Windows program without a console
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # not every console can print every character
            if os.name == "nt" and not stream.isatty() and not os.environ.get("PYTHONIOENCODING"):
                stream.reconfigure(encoding="utf-8", errors="replace")  # a file can
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        # `| head` has seen enough; Windows calls that an invalid argument, as it does a bad file name
        closed_pipe = isinstance(error, BrokenPipeError) or error.errno == errno.EINVAL and os.name == "nt"
        if not closed_pipe or error.filename is not None or getattr(error, "winerror", None):
            print(f"error: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what it still holds can go nowhere
        sys.exit(1)


# ------------------------------------------------------------------------------------------------------------
# The words of a command line and the values of a file


def split_command_line(Config, words):
    """([overlay, ...], {name: value as text, list or True}) from the words of a command line."""
    overlays, options = [], {}
    words = list(words)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            options["help"] = True
        elif not word.startswith("-"):
            overlays.append(word)
        else:
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            if equals:
                options[name] = value
                continue
            kind = type_of(Config, name, where=None)
            if kind == list[str]:
                options[name] = []
                while words and not words[0].startswith("--"):
                    options[name].append(words.pop(0))
            elif kind is bool and not (words and words[0].lower() in ("true", "false")):
                options[name] = True
            elif words:
                options[name] = words.pop(0)
            else:
                raise UserError(f"--{name} needs a value: --{name}=...")
    return overlays, options


def find_overlay(name, script):
    """The TOML file that an overlay on the command line means, looked for here and beside the scripts."""
    for path in (Path(name), FOLDER.parent / name):
        if path.is_dir() and (path / f"{script}.toml").is_file():
            return path / f"{script}.toml"
        if path.is_file() and path.suffix == ".toml":
            return path
    path = Path(name)
    if path.is_dir():
        found = ", ".join(sorted(p.name for p in path.glob("*.toml"))) or "no .toml file"
        raise UserError(f"{name} has no {script}.toml (it holds {found}); a setting is written --key=value")
    overlays = ", ".join(sorted(f"configs/{p.parent.name}" for p in FOLDER.glob(f"*/{script}.toml")))
    raise UserError(f"{name} is neither a .toml file nor a folder with {script}.toml (there are "
                    f"{overlays or 'none'}); a setting is written --key=value")


def read_toml(path):
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Notepad may write a byte order mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def type_of(Config, name, where):
    kinds = typing.get_type_hints(Config)
    if name not in kinds:
        known = OTHER_NAMES.get(name.replace("_", "").lower())
        nearest = [known] if known in kinds else difflib.get_close_matches(name, kinds, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else "--help lists them all"
        raise UserError(f"{f'{where}: ' if where else ''}there is no setting {name}; {hint}")
    return kinds[name]


def parse(Config, name, value, where):
    """`value`, from TOML or as the text of a command line, as the type that Config declares for `name`."""
    kind = type_of(Config, name, where)
    text = str(value).strip()
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    try:
        if kind == list[str]:
            if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
                value = tomllib.loads(f"list = {value}")["list"]  # as it would stand in a file
            if isinstance(value, str):  # one text, commas and all; several stand apart: --prompts "a, b" "c"
                value = [value] if value else []
            return [str(item) for item in value]
        if choices:
            return {str(choice).lower(): choice for choice in choices}[text.lower()]
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind is str:
            if isinstance(value, (bool, list, dict)) or "\0" in str(value):
                raise ValueError(value)
            # bash expands no ~ after --out_dir=
            return os.path.expanduser(value) if text.startswith("~/") and name != "prompt" else str(value)
        number = float(text)  # of True or a list it is a ValueError, too: `text` is "True"
        if not math.isfinite(number) or kind is int and number != int(number):
            raise ValueError
        # int(text) first: a seed above 2**53 has no exact float
        return number if kind is float else int(text) if text.lstrip("+-").isdigit() else int(number)
    except (KeyError, ValueError, OverflowError, TypeError):
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        wanted = " or ".join(str(choice).lower() for choice in choices) or names.get(kind, "a list")
        raise UserError(f"{f'{where}: ' if where else ''}{name} = {value!r} must be {wanted}") from None


# ------------------------------------------------------------------------------------------------------------
# The hub: what its libraries are told, and what they say


def keep_hub_files_here(folder="data/hub"):
    """Has huggingface_hub and datasets keep what they fetch in `folder`.

    By themselves they fill the home folder, which may lie on a small drive, and where nobody looks when the
    project is deleted. Where HF_HOME or XDG_CACHE_HOME is set, the user has chosen a place, and it stays. To
    be called before they are imported, which is when they look.
    """
    if not (os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME")):
        os.environ.pop("HF_HOME", None)  # an empty one would mean the current folder
        for part in ("hub", "datasets", "xet"):
            name = f"HF_{part.upper()}_CACHE"
            os.environ[name] = os.environ.get(name) or str(Path(folder).resolve() / part)
    os.environ.setdefault("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")  # Windows allows none, and nothing is lost


def load_from_hub(name, revision=None, split=None):
    """datasets.load_dataset(). What the host has to say comes first and soon, as datasets would wrap it."""
    keep_hub_files_here()
    import datasets
    import huggingface_hub

    if not huggingface_hub.constants.HF_HUB_OFFLINE:  # a hanging host would cost minutes
        huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=10)
    return datasets.load_dataset(name, revision=revision, split=split)


HINTS = {  # statuses that no repetition changes
    401: "check its name, and log in with `hf auth login` if it is private",
    403: "accept its terms on its page, and log in with `hf auth login`",
    404: "check its name; a private one needs `hf auth login`, and a mirror may lack it",
    410: "it has been removed; choose another",
    451: "it is blocked for legal reasons where you are; choose another, or a mirror (HF_ENDPOINT)",
}


def explain(name, text, status):
    """What to say of a download that failed as reason_of() tells it; `name` with its setting."""
    hint = HINTS.get(status, "check its name, the network, and HF_ENDPOINT if it is set; against stalling "
                             "HF_HUB_DISABLE_XET=1 helps. The same command goes on where it stopped")
    return f"{name} cannot be downloaded ({text}): {hint}"


def reason_of(error):
    """(text, HTTP status or 0, errno or 0) of a failed download, on one line.

    Libraries wrap what happened in errors of their own, and the outermost may only say that something did.
    """
    chain = [error]
    while (following := chain[-1].__cause__ or chain[-1].__context__) and following not in chain:
        chain.append(following)
    texts = dict.fromkeys(" ".join(str(each).split()) for each in reversed(chain))  # the cause comes first
    text = "; ".join(filter(None, texts))
    statuses = [each.response.status_code for each in chain if getattr(each, "response", None) is not None]
    numbers = [each.errno for each in chain if getattr(each, "errno", None)]
    # hf_transfer has the numbers in its text only: "... (404 Not Found) ...", "... (os error 28)"
    statuses += [int(digits) for digits in re.findall(r"\((\d{3}) [A-Z]", text)]
    numbers += [int(digits) for digits in re.findall(r"os error (\d+)", text)]
    short = f"HTTP {statuses[0]}" if statuses else text[:200] or type(error).__name__
    return short, [*statuses, 0][0], [*numbers, 0][0]
