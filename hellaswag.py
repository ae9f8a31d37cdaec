"""HellaSwag: how often does a model find the right one of four endings the likeliest?

Reads  a model folder (ours, or "gpt2"), and the 10,042 validation questions of Rowan/hellaswag, kept in
       data/hellaswag/ after the first time
Writes nothing, or with --save= a line per question: two models can be compared question by question

    python hellaswag.py --model=out/train/model [--style=harness]

Time: 3.75 questions a second at 124M on two CPU cores (measured); about ten seconds on a home GPU
(estimated). train.py and sft.py call load_items() and evaluate().
"""

import json
import math
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# first, as it explains a package that is missing
import configs
from configs import UserError, replacing

# isort: split
import numpy as np
import torch
from torch.nn import functional as F

from model import encode, load_model, pick_device

DATASET = "Rowan/hellaswag"
KEPT = Path("data") / "hellaswag" / "validation.parquet"
# acc and acc_norm of OpenAI's 124M, both from the header of build-nanogpt's hellaswag.py
GPT2 = {"completion": (0.2859, 0.2955), "harness": (0.2892, 0.3114)}
NORMALISED = {"completion": "per token", "harness": "per character"}


@dataclass
class Config:
    model: str
    source: str
    style: Literal["completion", "harness"]
    n: int
    device: str
    save: str


# ------------------------------------------------------------------------------------------------------------
# the questions


def load_items(source=""):
    """The questions of `source` as dicts with Rowan/hellaswag's columns, and how many broken were dropped.

    source  "" for the hub's validation split, kept in data/hellaswag/; "tiny" for configs/tiny/world.py; or a
            local parquet or jsonl file, a folder of them, or one that datasets' save_to_disk() made

    Raises UserError when there is nothing to be had, or nothing that can be scored.
    """
    if source == "tiny":
        from configs.tiny import world

        rows = world.hellaswag_items()
    elif source:
        rows = read_rows(Path(source))
    else:
        rows = read_rows(KEPT if KEPT.exists() else download(KEPT))
    items = [row for row in rows if usable(row)]
    if not items:
        raise UserError(
            f"{source or KEPT} has no question that can be scored: none of {len(rows)} rows has ctx, ctx_a, "
            "ctx_b, activity_label, four endings and a label from 0 to 3 (the test split has no labels)"
        )
    return items, len(rows) - len(items)


def usable(row):
    """Whether a row is a whole question. The label is text in the parquet file, a number in the old jsonl."""
    if not isinstance(row, dict) or not isinstance(row.get("endings"), list) or len(row["endings"]) != 4:
        return False
    texts = [row.get(column) for column in ("ctx", "ctx_a", "ctx_b", "activity_label")]  # ctx_b is often ""
    if not all(isinstance(text, str) for text in texts + row["endings"]):
        return False
    labelled = str(row.get("label")) in ("0", "1", "2", "3")
    return labelled and all(text.strip() for text in [row["ctx"], *row["endings"]])


def read_rows(path):
    """The rows of a local parquet or jsonl file, or a folder, as dicts; a line that is not JSON is None."""
    if not path.exists():
        raise UserError(f"HellaSwag's source {path} does not exist; name a parquet or jsonl file or a folder")
    if path.is_dir():
        return read_folder(path)
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        if path.suffix in (".jsonl", ".json"):
            lines = path.read_bytes().splitlines()
            return [parse_line(line, path, i) for i, line in enumerate(lines, 1) if line.strip()]
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(f"{path} cannot be read ({first_line(error)}); delete it, or get it again") from error
    raise UserError(f"{path} is neither .parquet nor .jsonl")


def read_folder(path):
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        import datasets

        try:
            data = datasets.load_from_disk(str(path))
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path} is no folder of `datasets` ({first_line(error)})") from None
        if isinstance(data, datasets.DatasetDict):
            data = data["validation"] if "validation" in data else next(iter(data.values()), [])
        return list(data)
    files = sorted(file for file in path.rglob("*") if file.suffix in (".parquet", ".jsonl"))
    # a copy of the hub's folder has train and test, too
    files = [file for file in files if "val" in file.name] or files
    return [row for file in files for row in read_rows(file)]


def parse_line(line, path, number):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        print(f"{path}, line {number} is not JSON (cut off?); left out", file=sys.stderr)
        return None


def download(path):
    """Fetches the validation split from the hub, keeps it as the parquet file `path`, and returns that."""
    try:
        data = configs.load_from_hub(DATASET, split="validation")
        if not any(usable(row) for row in data.select(range(min(len(data), 10)))):
            raise ValueError(f"what came has no questions: {len(data)} rows")  # keeping it would be for ever
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            data.to_parquet(file)
    except Exception as error:  # an HTTP status, a timeout, no name server, a full disk: a dozen classes
        text, status, _ = configs.reason_of(error)
        again = "a mirror (HF_ENDPOINT) may have it" if status in configs.HINTS else "try again later"
        raise UserError(f"HellaSwag cannot be fetched from the hub ({text}); {again}, or put the parquet "
                        f"file of {DATASET}'s validation split at {path}") from error
    return path


def first_line(error):
    return (str(error).strip().splitlines() or ["no reason given"])[0][:200]


# ------------------------------------------------------------------------------------------------------------
# from a question to tokens


def completion_text(item):
    """build-nanogpt's and llm.c's text: the context as it is, and the four endings."""
    return item["ctx"], item["endings"]


def harness_text(item):
    """lm-evaluation-harness' text: the activity first, no WikiHow brackets (its tasks/hellaswag/utils.py)."""

    def clean(text):
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    context = f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}"
    return clean(context), [clean(ending) for ending in item["endings"]]


def tokenize(item, style):
    """[(context ids, ending ids), ...] of the four endings, and the endings' lengths in characters."""
    context, endings = (harness_text if style == "harness" else completion_text)(item)
    n_chars = [len(ending) for ending in endings]
    if style == "completion":
        ids = encode(context)
        return [(ids, encode(" " + ending)) for ending in endings], n_chars
    # the harness encodes context and ending in one piece, and counts the context's last spaces to the ending
    stem = context.rstrip()
    wholes = [encode(f"{context} {ending}") for ending in endings]
    cut = len(encode(stem))
    return [(whole[:cut], whole[cut:]) for whole in wholes], n_chars


def make_rows(questions, block_size):
    """What to read: [(context ids, [(slot, ending ids), ...]), ...], and the questions that do not fit.

    A slot is 4 x question + ending. Endings with the same context share a row. A context that is too long
    loses its beginning, as in the harness; a question with an ending longer than block_size is left out.
    """
    rows, too_long = [], set()
    for q, pairs in enumerate(questions):
        if not all(context and 0 < len(ending) <= block_size for context, ending in pairs):
            too_long.add(q)
            continue
        shared = {}
        for k, (context, ending) in enumerate(pairs):
            room = block_size + 1 - len(ending)  # one more, because the last token is never read
            shared.setdefault(tuple(context[-room:]), []).append((4 * q + k, ending))
        rows += shared.items()
    return rows, too_long


# ------------------------------------------------------------------------------------------------------------
# the score


def evaluate(model, items, n=0, style="completion", progress=False, max_tokens=0):
    """Scores `model` on `items`; its training mode is as before afterwards, and no random number is drawn.

    n           how many questions, evenly spaced (the file begins with ActivityNet, then WikiHow); 0 is all
    style       "completion" (build-nanogpt, llm.c) or "harness" (lm-evaluation-harness)
    max_tokens  read at once, which bounds the memory; 0 is 16,384 on a GPU, less than a training step there

    Returns a dict: acc and acc_norm, the shares of right choices by the endings' summed losses, and by those
    divided by the endings' lengths (in tokens; the harness' style in characters); stderr, of acc_norm; n, the
    questions scored; broken, those left out; rows, a dict for each question scored. Raises UserError if the
    losses are not finite, or nothing can be scored.
    """
    if 0 < n < len(items):
        items = [items[i * len(items) // n] for i in range(n)]
    whole = [(i, item) for i, item in enumerate(items) if usable(item)]
    encoded = [tokenize(item, style) for _, item in whole]
    rows, too_long = make_rows([pairs for pairs, _ in encoded], model.config.block_size)
    sums = ending_losses(model, rows, 4 * len(whole), max_tokens, progress).reshape(-1, 4)
    if not np.isfinite(sums).all():
        raise UserError("the model's losses on HellaSwag are not finite: its weights diverged or are damaged")
    scored = []
    for q, (i, item) in enumerate(whole):
        pairs, n_chars = encoded[q]
        if q in too_long or 0 in n_chars:
            continue
        n_tokens = [len(ending) for _, ending in pairs]
        norm = sums[q] / (n_chars if style == "harness" else n_tokens)
        scored.append({
            "row": i, "ind": item.get("ind"), "label": int(item["label"]), "losses": sums[q].tolist(),
            "n_tokens": n_tokens, "n_chars": n_chars, "choice": int(sums[q].argmin()),
            "choice_norm": int(norm.argmin())})
    if not scored:
        raise UserError(f"none of {len(items)} HellaSwag questions is whole and fits block_size")
    acc = np.mean([row["choice"] == row["label"] for row in scored])
    acc_norm = np.mean([row["choice_norm"] == row["label"] for row in scored])
    return {"acc": float(acc), "acc_norm": float(acc_norm), "stderr": standard_error(acc_norm, len(scored)),
            "n": len(scored), "broken": len(items) - len(scored), "rows": scored}


def standard_error(share, n):
    return math.sqrt(share * (1 - share) / max(n - 1, 1))


@torch.no_grad()
def ending_losses(model, rows, n_slots, max_tokens=0, progress=False):
    """Each ending's loss in nats, summed over its tokens: a float64 array of n_slots.

    In real fp32, whatever the caller trains in: bf16 logits make ties of close endings. And never compiled,
    because every batch has a shape of its own: model.hidden() is a plain call even if model() is compiled.
    """
    max_tokens = max_tokens or (16384 if model.device.type == "cuda" else 512)
    weight, chunk = model.transformer.wte.weight.float(), max(512, max_tokens // 8)
    losses, slots = [], []
    was_training, precision = model.training, torch.get_float32_matmul_precision()
    model.eval()
    torch.set_float32_matmul_precision("highest")  # training allows TF32
    try:
        with torch.autocast(model.device.type, enabled=False):
            for batch, done in batches(rows, max_tokens):
                tokens, positions, mask, at, targets, slot = (x.to(model.device) for x in lay_out(batch))
                x = model.hidden(tokens, positions=positions, mask=mask).flatten(0, 1)  # (B * T, C)
                # only where an ending is predicted, and in pieces: the logits are the largest tensor here
                for i, id in zip(at.split(chunk), targets.split(chunk)):
                    losses.append(token_losses(F.linear(x[i].float(), weight), id))
                slots.append(slot)
                if progress:
                    print(f"\r{done:7,} of {len(rows):,}", end="", file=sys.stderr, flush=True)
    finally:
        model.train(was_training)
        torch.set_float32_matmul_precision(precision)
        if progress:
            print("\r" + " " * 20, end="\r", file=sys.stderr, flush=True)
    if not slots:
        return np.zeros(n_slots)
    # nothing comes back from the GPU before this, so that it never waits for Python
    return np.bincount(torch.cat(slots).cpu(), weights=torch.cat(losses).cpu(), minlength=n_slots)


def token_losses(logits, ids):
    """-ln of the probability that each row of `logits` (N, V) gives to its id (N,), in place: the logits are
    the largest tensor of all, and cross_entropy would make a copy of them."""
    picked, highest = logits.gather(1, ids[:, None]), logits.amax(1, keepdim=True)
    return (logits.sub_(highest).exp_().sum(1, keepdim=True).log() + highest - picked)[:, 0]


def row_length(row):
    context, endings = row
    return len(context) + sum(len(ending) - 1 for _, ending in endings)


def batches(rows, max_tokens):
    """Yields (rows of about the same length, rows done so far), so that little of a batch is padding."""
    rows = sorted(rows, key=row_length, reverse=True)  # longest first: too much for the memory shows at once
    start = 0
    while start < len(rows):
        stop = start + max(1, max_tokens // row_length(rows[start]))
        yield rows[start:stop], min(stop, len(rows))
        start = stop


def lay_out(batch):
    """A batch of rows as tensors. A row is a context and then its endings, each without its last token.

    So the context is computed once for four endings: each takes the positions that follow the context, and
    sees the context and itself, not the endings before it.

    Returns tokens and positions (B, T), mask (B, 1, T, T), and of each token to predict: where in B * T it is
    predicted, its id, and its ending's slot, (N,) each.
    """
    B, T = len(batch), max(map(row_length, batch))
    tokens, positions = np.zeros((B, T), np.int64), np.zeros((B, T), np.int64)
    part = np.full((B, T), -1)  # 0 for the context, 1 to 4 for the endings, -1 for padding
    at, targets, slots = [], [], []
    for b, (context, endings) in enumerate(batch):
        end = len(context)
        tokens[b, :end], positions[b, :end], part[b, :end] = context, np.arange(end), 0
        for k, (slot, ids) in enumerate(endings, 1):
            start, end = end, end + len(ids) - 1
            tokens[b, start:end], part[b, start:end] = ids[:-1], k
            positions[b, start:end] = len(context) + np.arange(end - start)
            at += [b * T + len(context) - 1, *range(b * T + start, b * T + end)]
            targets += ids
            slots += [slot] * len(ids)
    part = torch.from_numpy(part)
    before = torch.ones(T, T, dtype=torch.bool).tril()
    mask = before & ((part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None]))
    return (torch.from_numpy(tokens), torch.from_numpy(positions), mask[:, None],
            torch.tensor(at), torch.tensor(targets), torch.tensor(slots))


# ------------------------------------------------------------------------------------------------------------


def main():
    config = configs.load(Config, "hellaswag")
    if config.n < 0:
        raise UserError(f"n = {config.n} must be 0 (all) or more")
    start_s = time.perf_counter()
    device = pick_device(config.device)
    items, broken = load_items(config.source)
    model = load_model(config.model, device)
    score = evaluate(model, items, config.n, config.style, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start_s

    print(f"HellaSwag, {config.style} style, {score['n']:,} questions, {broken + score['broken']} broken, "
          f"fp32 on {device}, {seconds:.0f} s")
    name, width, acc, acc_norm = config.model, max(len(config.model), 10), score["acc"], score["acc_norm"]
    print(f"{'':{width}}  {'acc':<16}  acc_norm, {NORMALISED[config.style]}")
    acc_stderr = standard_error(acc, score["n"])
    print(f"{name:{width}}  {acc:.2%} +- {acc_stderr:5.2%}  {acc_norm:.2%} +- {score['stderr']:5.2%}")
    acc, acc_norm = GPT2[config.style]
    print("made-up questions about the tiny world: no score on HellaSwag itself compares"
          if config.source == "tiny" else
          f"{'GPT-2 124M':{width}}  {acc:.2%}            {acc_norm:.2%}            of all 10,042, published")
    if config.save:
        path = Path(config.save)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            configs.write_text(path, "".join(json.dumps(row, default=str) + "\n" for row in score["rows"]))
        except OSError as error:
            raise UserError(f"save = {path} cannot be written: {error.strerror}") from None
        print(f"wrote {path}")


if __name__ == "__main__":
    configs.run(main)
