"""Every command of the README: those that need neither a GPU nor the hub are run, with their steps cut to a
few, in the order in which they stand; the others must name scripts and settings that exist."""

import importlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import configs

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FEW = {"train": ["--max_steps=2", "--eval_tokens=1024", "--sample_tokens=2", "--hellaswag_n=4",
                 "--warmup_steps=1"],
       "sft": ["--max_steps=2", "--eval_rows=8", "--sample_rows=2", "--sample_tokens=2", "--hellaswag_n=4"],
       "hellaswag": ["--n=4"], "chat": ["--max_new_tokens=4"]}


def commands():
    """The README's calls of our scripts, as lists of words; of a loop, its first round."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`(python [^`]+)`",
                       re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL))
    found = []
    for line in ("\n".join(blocks).replace("\\\n", " ").splitlines()
                 + [" ".join(span.split()) for span in spans]):
        if not re.match(r"python|torchrun|for ", line):  # what a program printed
            continue
        loop = re.match(r"for (\w+) in ([^\s;]+)", line)
        if loop:
            line = re.sub(rf"\${loop[1]}\b|\${{{loop[1]}}}", loop[2], line)
        for call in re.findall(r"(?:python3?|torchrun [^&;#|]*?) "
                               r"((?:tests/)?\w+\.py(?:[^&;#|\"]|\"[^\"]*\")*)", line):
            words = shlex.split(call)
            if words not in found:
                found.append(words)
    return found


def is_local(words):
    """Whether a command needs nothing but this repository and the packages."""
    small = ("configs/tiny", "configs/books", "out/tiny", "out/books", "data/tiny", "data/books", "my_")
    return not words[0].startswith("tests/") and any(name in word for word in words[1:] for name in small)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_of_the_readme_names_a_script_and_settings_that_exist(words):
    assert (ROOT / words[0]).is_file()
    script = words[0].removesuffix(".py")
    if script in FEW or script == "prepare_fineweb":
        module = importlib.import_module(script)
        configs.load(module.Config, script, [word for word in words[1:] if word != "..."])


# Runs each line of words in turn, in one process: importing torch again and again would be most of the time.
DRIVER = """
import configs, importlib, json, sys
for words in json.loads(sys.argv.pop()):
    sys.argv = words
    print("$", *words, flush=True)
    module = importlib.import_module(words[0].removesuffix(".py"))
    try:
        configs.run(module.main)
    except SystemExit as end:
        if end.code:
            sys.exit(f"{' '.join(words)}: exit code {end.code}")
"""


def test_the_commands_that_need_no_gpu_and_no_hub_run_one_after_the_other(tmp_path):
    home = tmp_path / "GPT-2 à la maison"  # as many a home folder: with a space and an accent
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT,
                           check=False).stdout.split("\n")
    for name in filter(None, files):
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, home / name)
    if not home.exists():
        pytest.skip("not a git checkout")
    rng = random.Random(0)
    words = ["the", "house", "by", "sea", "was", "old", ",", "nobody", "lived", "there", "since",
             "winter", "."]
    (home / "my_books").mkdir()
    for i in range(3):
        (home / "my_books" / f"{i}.txt").write_text(" ".join(rng.choices(words, k=60_000)), encoding="utf-8")
    (home / "my_chats").mkdir()
    rows = [{"messages": [{"role": "user", "content": " ".join(rng.choices(words, k=9))},
                          {"role": "assistant", "content": " ".join(rng.choices(words, k=9))}]}
            for _ in range(300)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (home / "my_chats" / "train.jsonl").write_text(lines, encoding="utf-8")
    local = [words + FEW.get(words[0].removesuffix(".py"), []) for words in commands() if is_local(words)]
    local = [words + ["--tokens_per_step=2048"] * (words[:2] == ["train.py", "configs/books"])
             for words in local]
    assert {"prepare_fineweb.py", "train.py", "sft.py", "chat.py"} <= {words[0] for words in local}
    done = subprocess.run([sys.executable, "-c", DRIVER, json.dumps(local)], cwd=home, capture_output=True,
                          text=True, encoding="utf-8", input="", timeout=600, check=False,
                          env={**os.environ, "PYTHONPATH": str(home), "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
