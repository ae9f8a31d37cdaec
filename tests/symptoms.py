"""Breaks training on purpose, one thing at a time, and prints what the curve and the samples look like then.

    python tests/symptoms.py                       all of BREAKS; about half an hour on one core
    python tests/symptoms.py no_mask sft_no_end    only these, beside the healthy runs
    python tests/symptoms.py no_mask --steps=370   as long as configs/tiny trains: only then is the leak found

Each break is a patch in memory or a setting, in a process of its own; all else is train.py and sft.py with
configs/tiny. Prints one Markdown row per run. Losses but the first are means of ten steps. Where a break
touches the targets or the mask, the validation loss is broken, too: it uses the same code.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch.nn import functional as F

import curves
import model
import sft
import train
from configs import run

PROMPT, QUESTION = "The capital of France is", "What is the capital of France?"


# ---- the breaks: each patches one thing, and may return settings -------------------------------------------


def unshifted():
    real = train.micro_batches
    train.micro_batches = lambda *args: ((tokens, tokens) for tokens, _ in real(*args))


def no_mask():
    real = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda *args, **words: real(*args, **{**words, "is_causal": False})


def lr_x30():
    real = train.lr_factor
    train.lr_factor = lambda step, config: 30 * real(step, config)


class Untied(model.GPT):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = torch.nn.Embedding(config.vocab_size, config.n_embd)
        self.init_weights(self.lm_head)

    def head(self, x):
        return F.linear(x, self.lm_head.weight)

    def forward(self, tokens, targets=None):
        x = self.hidden(tokens)
        if targets is None:
            return self.head(x)
        rows = self.loss_chunk_rows
        return model.summed_loss(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), rows)


def untied():
    train.GPT = Untied


def shard_order():
    train.permutation = lambda seed, epoch, n_rows: np.arange(n_rows)


def sorted_rows():
    real_open, real = train.open_data, train.permutation
    capital = model.encode(" capital")[0]

    def open_data(config, *args):
        rows, val_rows = real_open(config, *args)
        n_used = config.max_steps * config.tokens_per_step // config.block_size
        order = real(config.seed, 0, len(rows))[:n_used]
        counts = [(rows.read([row]) == capital).sum() for row in order]
        order = order[np.argsort(counts, kind="stable")[::-1]]
        train.permutation = lambda seed, epoch, n_rows: order
        return rows, val_rows

    train.open_data = open_data


def no_zero_grad():
    model.GPT.zero_grad = lambda self, set_to_none=True: None


def sft_no_mask():
    sft.supervised = lambda ids: np.asarray(ids) != model.END_OF_TEXT  # which is also the padding


def sft_no_end():
    sft.supervised = lambda ids: model.supervised(ids) & (np.asarray(ids) != model.END)


BREAKS = {  # name: (what is broken, how)
    "healthy": ("nothing", None),
    "unshifted": ("the targets are the inputs, not the tokens one place later", unshifted),
    "no_mask": ("attention sees the tokens to come", no_mask),
    "lr_x30": ("both learning rates times 30", lr_x30),
    "no_zero_grad": ("gradients pile up from step to step", no_zero_grad),
    "untied": ("the head has weights of its own", untied),
    "no_warmup": ("the first step has the full learning rate", lambda: ["--warmup_steps=0"]),
    "shard_order": ("rows in the order of the shard", shard_order),
    "sorted_rows": ("the same rows, those with the most capitals first", sorted_rows),
    "sft": ("nothing; from the healthy run's model", None),
    "sft_no_mask": ("the loss counts the user's words, too", sft_no_mask),
    "sft_no_end": ("the loss leaves out the token that ends a reply", sft_no_end),
}


# ---- a run, and its row ------------------------------------------------------------------------------------


def run_broken(name, folder, steps):
    """In a process of its own: the script's main() with the break; what it prints goes to folder/name.txt."""
    out = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    how = BREAKS[name][1]
    words = [f"--{key}={steps}" for key in ("max_steps", "eval_every", "sample_every")]
    words += [f"--out_dir={folder / name}", "--save_every=0", "--hellaswag_every=0", *(how and how() or [])]
    if name.startswith("sft"):
        words += [f"--data_dir={folder / 'data' / 'chat'}", f"--init_from={folder / 'healthy'}"]
    else:
        words += [f"--data_dir={folder / 'data'}"]
    sys.argv = ["symptoms.py", "configs/tiny", *words]
    run(sft.main if name.startswith("sft") else train.main)


def row_of(name, log):
    """The cells of a run's row, from its log."""
    steps = [row for row in log if "grad_norm" in row]
    losses, norms = (np.array([row[key] for row in steps], dtype=float) for key in ("loss", "grad_norm"))
    tens = np.convolve(losses, np.ones(10) / 10, mode="valid")
    vals = [row["val_loss"] for row in log if row.get("val_loss") is not None]
    said = [repr(row["sample"])[1:-1].replace("|", "\\|") for row in log
            if row.get("prompt") in (PROMPT, QUESTION) and row["step"] == len(steps)]
    said += [f"({row['ended']:.0%} of {row['replies']} replies end)" for row in log if "ended" in row][-1:]
    return [name, BREAKS[name][0], f"{losses[0]:.2f}", f"{tens[max(0, len(losses) // 10 - 10)]:.2f}",
            f"{tens[-1]:.2f}", f"{np.nanmin(tens):.2f}", f"{vals[-1]:.2f}",
            f"{norms[0]:.2f}, {np.nanmedian(norms):.2f}, {np.nanmax(norms):.2f}", " ".join(said)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BREAKS)}; without: all")
    parser.add_argument("--steps", type=int, default=200, help="of training; SFT takes two thirds of them")
    parser.add_argument("--keep", metavar="FOLDER", help="where the runs stay, for curves.py and chat.py")
    words = parser.parse_args()
    if unknown := set(words.names) - set(BREAKS):
        parser.error(f"no such break: {', '.join(unknown)}; there are {', '.join(BREAKS)}")
    if words.steps < 15:
        parser.error("--steps must be at least 15: losses are means of ten")
    wanted = {"healthy", *(words.names or BREAKS)}
    wanted |= {"sft"} if any(name.startswith("sft") for name in wanted) else set()
    print("| run | what is broken | loss, step 1 | at 10 % | at the end | best | validation "
          f"| gradient norm: first, median, largest | after the last step: {PROMPT} / {QUESTION} |")
    print("|---" * 9 + "|", flush=True)
    start_s, context = time.monotonic(), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(words.keep or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for name in (name for name in BREAKS if name in wanted):
            steps = words.steps * 2 // 3 if name.startswith("sft") else words.steps
            child = context.Process(target=run_broken, args=(name, folder, steps))
            child.start()
            child.join()
            printed = (folder / f"{name}.txt").read_text(encoding="utf-8")
            if not (folder / name / "log.jsonl").exists():
                sys.exit(f"{name} did not start:\n{printed}")
            cells = row_of(name, curves.read_log(folder / name))
            if child.exitcode:
                cells[-1] += printed.splitlines()[-1]
            print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\n{len(wanted)} runs, {words.steps} steps of training each or {words.steps * 2 // 3} of SFT, "
          f"{(time.monotonic() - start_s) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
