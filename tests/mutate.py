"""Plants twenty faults, one at a time, and looks whether the tests of the file that has it find it.

    python tests/mutate.py                all twenty; about 20 minutes on two quiet cores
    python tests/mutate.py shift tying    two of them

Run by hand, when tests were changed much. The faults go into a copy of the repository, as it is on the disk.
Each is a slip of the hand in one line; the program still runs, and most still train. Exits with 1 if fewer
than 18 of the 20 are found, and with a line that names the fault if one no longer fits its file.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENOUGH = 0.9  # of the faults

FAULTS = {  # name: (file, a text that is in it once, the text with the fault, what that does)
    "causal": ("model.py", "is_causal=mask is None and T > 1,", "is_causal=False,",
               "attention looks ahead, at the answer"),
    "cache": ("model.py", ".tril(k.size(2) - T)", ".tril(k.size(2) - T + 1)",
              "a token that follows a cache sees the one after it"),
    "tying": ("model.py", 'weight = self.transformer["wte"].weight\n',
              'weight = self.transformer["wte"].weight.detach()\n',
              "the head no longer trains the embedding that it shares"),
    "scale": ("model.py", "std=0.02 / math.sqrt(2 * self.config.n_layer)", "std=0.02",
              "the residual stream grows with the depth"),
    "end": ("model.py", "& ((ids < END_OF_TEXT) | (ids == END))", "& (ids < END_OF_TEXT)",
            "<|end|> is not supervised: no reply ends by itself"),
    "padding": ("model.py", "((ids == END) & (kind", "((ids >= END) & (kind",
                "a chat may sample the rows that only fill the matrix"),
    "in_place": ("model.py", 'replacing(folder / "model.safetensors")',
                 'open(folder / "model.safetensors", "wb")',
                 "a crash in a save leaves half of the weights"),
    "bytes": ("prepare_fineweb.py", 'part.astype("<u2", copy=False)', 'part.astype(">u2", copy=False)',
              "the ids in a shard have their bytes swapped"),
    "split": ("prepare_fineweb.py", "= stream.drop_rest_of_document()", "= 0",
              "the rest of validation's last document is trained on"),
    "norm": ("hellaswag.py", '(n_chars if style == "harness" else n_tokens)', "n_chars",
             "an ending's loss is divided by characters, not tokens"),
    "reference": ("curves.py", "column[tokens == t].mean()", "column[tokens == t].min()",
                  "a run is held against the better one of two, not their mean"),
    "shift": ("train.py", "yield block[:, :-1], block[:, 1:]", "yield block[:, :-1], block[:, :-1]",
              "the target is the token itself, not the next"),
    "epoch": ("train.py", "np.random.default_rng((seed, epoch))", "np.random.default_rng(seed)",
              "every epoch has the same order"),
    "decay": ("train.py", '"params": vectors, "weight_decay": 0.0',
              '"params": vectors, "weight_decay": config.weight_decay',
              "gains and biases are pulled towards zero"),
    "nesterov": ("train.py", 'p.grad.lerp(state["momentum"], group["momentum"])',
                 'state["momentum"].clone()',
                 "Muon's momentum does not look ahead"),
    "resume": ("train.py", 'load_state_dict({"state": saved["state"],', 'load_state_dict({"state": {},',
               "a resumed run has forgotten its momentum"),
    "accumulate": ("train.py", "model(tokens, targets) / config.tokens_per_step",
                   "model(tokens, targets) / tokens.numel()",
                   "micro-batches count as whole batches"),
    "schedule": ("train.py", "lr_factor(step, config))", "lr_factor(step + 1, config))",
                 "each step has the learning rate of the next"),
    "mask": ("sft.py", "np.where(supervised(ids), ids, -1)[:, 1:]", "ids[:, 1:]",
             "the user's words are learned, too, and the padding"),
    "newest": ("chat.py", "turns = turns[2:]", "turns = turns[:-3] + turns[-1:]",
               "a full context forgets the newest turn, not the oldest"),
}


def copy_repository(folder):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def planted(name):
    """(the file's text, the same with the fault). Ends the program if the fault does not fit it."""
    file, old, new, _ = FAULTS[name]
    text = (ROOT / file).read_text(encoding="utf-8")
    if text.count(old) != 1:
        sys.exit(f"{name}: {file} holds {old.strip()!r} {text.count(old)} times, not once; "
                 "write the fault anew")
    compile(text.replace(old, new), file, "exec")  # what cannot run would be found by any test
    return text, text.replace(old, new)


def first_failure(folder, file):
    """(name of the first test of `file` that fails in the copy, or "", and the seconds that it took)."""
    start_s = time.monotonic()
    # a fault can have the size and the second of what was there, and Python would take its old bytecode
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/test_{file}"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8",
                          errors="replace", check=False)
    failed = re.search(r"^(?:FAILED|ERROR) \S+?::(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or bool(failed) != done.returncode:
        sys.exit(f"pytest could not run tests/test_{file}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1] if failed else "", time.monotonic() - start_s


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(FAULTS))
    names = parser.parse_args().names or list(FAULTS)
    if unknown := set(names) - set(FAULTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    texts, n_found = {name: planted(name) for name in names}, 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        copy_repository(folder)
        for file in dict.fromkeys(FAULTS[name][0] for name in names):
            failed, took_s = first_failure(folder, file)
            if failed:
                sys.exit(f"{failed} fails without any fault, so that nothing can be said about {file}")
            print(f"{file}: no fault, all tests pass, {took_s:.0f} s", flush=True)
            for name in (name for name in names if FAULTS[name][0] == file):
                before, after = texts[name]
                (folder / file).write_text(after, encoding="utf-8")
                failed, took_s = first_failure(folder, file)
                (folder / file).write_text(before, encoding="utf-8")
                n_found += bool(failed)
                print(f"  {name:<11}{'found' if failed else 'SURVIVED':<9}{took_s:>5.0f} s  "
                      f"{FAULTS[name][3]}" + f"\n{'':29}{failed}" * bool(failed), flush=True)
    print(f"{n_found} of {len(names)} found")
    sys.exit(n_found < ENOUGH * len(names))


if __name__ == "__main__":
    main()
