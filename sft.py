"""Turns a model that continues text into one that answers: supervised fine-tuning (SFT) on conversations.

    python sft.py                      out/train/model learns from smol-smoltalk and becomes out/sft/model
    python sft.py configs/tiny         the tiny world, after python train.py configs/tiny: minutes on a CPU
    python sft.py --source=my/chats    your own parquet or jsonl files (name a new data_dir and out_dir, too)
    python sft.py --show               some conversations, with what is learned of them in colour
    python sft.py --plan               the steps and hours that it will take, measured here

Reads   a model folder, and conversations {"messages": [{"role", "content"}, ...]}, tokenised once.
Writes  out_dir/: the same as train.py, but for samples.md: here it is answers.md, what the model says to the
        same questions before, on the way and after. The model to talk to is out_dir/model: python chat.py.

What is learned is the assistant's part only: the words of its turns and the <|end|> that closes each of them,
so it learns to answer and to stop. Every conversation stands alone at the start of a row, as it will in chat.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

# first, as it explains a package that is missing
from configs import UserError, explain, load, load_from_hub, reason_of, run, save, write_text

# isort: split
import numpy as np
import torch
from torch.nn import functional as F

import chat
import curves
import train
from model import (
    ASSISTANT,
    END,
    END_OF_TEXT,
    ROLE_IDS,
    VOCAB_SIZE,
    decode,
    find_model,
    generate,
    load_model,
    pick_dtype,
    read_model,
    render_chat,
    summed_loss,
    supervised,
)
from prepare_fineweb import (
    FULL_DISK,
    TINY,
    disk_errors,
    is_same_source,
    local_files,
    lock_folder,
    map_in_order,
    read_meta,
    read_shard,
    sha256_of,
    shards,
    split_of,
    write_shard,
)


@dataclasses.dataclass
class Config:
    """The types; the values and the reasons for them are in configs/sft.toml."""

    init_from: str
    out_dir: str
    data_dir: str
    source: str
    workers: int
    show: bool
    block_size: int
    tokens_per_step: int
    groups_per_step: int
    micro_batch_size: int
    epochs: int
    max_steps: int
    dropout: float
    optimizer: Literal["adamw", "muon"]
    lr: float
    muon_lr: float
    schedule: Literal["linear", "cosine"]
    decay_fraction: float
    min_lr_fraction: float
    warmup_steps: int
    weight_decay: float
    grad_clip: float
    seed: int
    device: str
    dtype: Literal["auto", "bf16", "fp16", "fp32"]
    compile: Literal["auto", True, False]
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"]
    loss_chunk_rows: int
    log_every: int
    eval_every: int
    eval_rows: int
    save_every: int
    sample_every: int
    sample_rows: int
    sample_tokens: int
    hellaswag_every: int
    hellaswag_n: int
    hellaswag_source: str
    plan: bool


ROWS_PER_SHARD = 20_000  # about 12M tokens of smol-smoltalk; what a stopped preparation does again at most
TEST_EVERY = 50          # a source without a test split gives every 50th conversation to it
MAX_WIDTHS = 7           # each width compiles to a graph of its own, and torch stops compiling after 8
WIDTH_STEP = 16          # widths are multiples of this: matrix units dislike odd sizes
USEFUL = 0.90            # no more widths than it takes for this share of the rows to be text, not padding
# what a checkpoint may not be resumed with: these decide which rows come next
FIXED = train.FIXED | {"groups_per_step"}


# ------------------------------------------------------------------------------------------------------------
# Conversations -> shards


def unusable(messages):
    """Why a conversation cannot be learned from, as a short reason to count; "" if it can. Never raises."""
    if not isinstance(messages, list) or not messages or not all(isinstance(turn, dict) for turn in messages):
        return "without a list of messages"
    roles = [turn.get("role") for turn in messages]
    if not all(isinstance(role, str) and role in ROLE_IDS for role in roles):
        return "with an unknown role"
    if not all(isinstance(turn.get("content"), str) and turn["content"].strip() for turn in messages):
        return "with an empty message"
    if "assistant" not in roles:
        return "without an assistant turn"
    turns = roles[1:] if roles[0] == "system" else roles
    if turns != [("user", "assistant")[i % 2] for i in range(len(turns))]:
        return "with roles that do not alternate"
    return ""


def tokenise(messages):
    """(ids, "") of a usable conversation, (None, reason) of another."""
    reason = unusable(messages)
    return (None, reason) if reason else (np.array(render_chat(messages), dtype=np.uint16), "")


def open_source(source, revision=None):
    """The parts of a source: [(split, origin, rows, fetch)]; fetch(rows) yields the `messages` of these rows.

    split     "val", the test split, or "train"
    origin    what meta.json says about where they come from
    source    "tiny", a .parquet or .jsonl file or a folder of them ("test" in a path means the test split),
              or a name on the hub, with
    revision  the commit, or None for today's

    Conversations are read when fetch is called. Without a test split every 50th conversation goes there.
    """
    if source == "tiny":
        tables = [("val", "world.py", *open_world("test")), ("train", "world.py", *open_world("train"))]
    elif Path(source).exists():
        is_test = re.compile(r"(?<![a-z])test", re.IGNORECASE)
        tables = [("val" if is_test.search(name) else "train", path.name, *OPENERS[path.suffix.lower()](path))
                  for name, path in local_files(Path(source), OPENERS).items()]
    else:
        tables = open_hub(source, revision)
    if {split for split, *_ in tables} == {"train", "val"}:
        return [(split, origin, range(n), fetch) for split, origin, n, fetch in tables]
    return [part for _, origin, n, fetch in tables for part in (
        ("val", origin, range(0, n, TEST_EVERY), fetch),
        ("train", origin, [i for i in range(n) if i % TEST_EVERY], fetch))]


def open_world(split):
    from configs.tiny import world

    conversations = world.conversations(split)
    return len(conversations), lambda rows: (conversations[row]["messages"] for row in rows)


def open_parquet(path):
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"{path} cannot be read as parquet: {error}") from None
    return column_of(table, path)


def open_hub(name, revision):
    try:
        splits = load_from_hub(name, revision)
    except Exception as error:  # whatever the network, the hub, the data set or the disk raises
        text, status, number = reason_of(error)
        if number in FULL_DISK:
            raise OSError(number, os.strerror(number), os.environ.get("HF_HOME") or "data/hub") from None
        raise UserError(explain(f"source = {name}, which is no file or folder here,", text, status)) from None
    # datasets calls the folder of its copy after the hub's commit
    commits = {Path(file["filename"]).parent.name for table in splits.values() for file in table.cache_files}
    origin = "@".join([name, *commits])
    return [("val" if split.startswith(("test", "val")) else "train", origin, *column_of(table.data, name))
            for split, table in splits.items()]


def column_of(table, name):
    """(number of rows, fetch) of the column `messages` of an Arrow table."""
    if "messages" not in table.column_names:
        raise UserError(f"{name} has no column `messages`, only {', '.join(table.column_names)}")
    column = table.column("messages")

    def fetch(rows):
        for row in rows:
            try:
                yield column[row].as_py()
            except (ValueError, OverflowError):  # bytes that are no text; a date that Python does not have
                yield None
    return len(column), fetch


def open_jsonl(path):
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None

    def fetch(rows):
        for row in rows:
            try:
                conversation = json.loads(lines[row])
            except (ValueError, RecursionError):
                conversation = None
            yield conversation.get("messages") if isinstance(conversation, dict) else None
    return len(lines), fetch


OPENERS = {".parquet": open_parquet, ".jsonl": open_jsonl}


def prepare(config):
    """Tokenises the conversations of config.source into shards in config.data_dir, unless that has been done.

    They stay in the source's order, so the same source gives the same bytes whatever the workers, and a
    preparation that was stopped goes on with the next shard. What cannot be used is counted by reason.
    """
    data_dir, source = Path(config.data_dir), Path(config.source)
    files = {}
    if config.source == "tiny":
        files = {TINY.name: sha256_of(TINY)}
    elif source.exists():
        files = {name: path.stat().st_size for name, path in local_files(source, OPENERS).items()}
    meta = {"kind": "conversations", "source": config.source, "tokenizer": "gpt2", "complete": False,
            "files": files, "shards": {}}
    if (data_dir / "meta.json").exists():
        there = read_meta(data_dir)
        if there.get("kind") != meta["kind"] or not is_same_source(there.get("source"), config.source):
            raise UserError(f"data_dir = {data_dir} holds {there.get('kind', 'documents')} from "
                            f"{there.get('source')!r}, not conversations from source = {config.source!r}: "
                            "name that source, or another data_dir")
        if meta["files"] and meta["files"] != there.get("files"):
            raise UserError(f"the files of source = {config.source} have changed since {data_dir} was made "
                            f"of them: delete {data_dir}, or choose another --data_dir=")
        meta |= there
    if meta["complete"] and all((data_dir / name).exists() for name in meta["shards"]):
        return
    with lock_folder(data_dir, "data_dir"), disk_errors(data_dir):
        write_shards(config, data_dir, meta)


def write_shards(config, data_dir, meta):
    """Writes the shards that are missing, and meta.json after each."""
    prefix = re.sub(r"\W+", "_", Path(config.source).stem.lower())
    begun_with = [part["from"].partition("@")[2] for part in meta["shards"].values()]  # a hub's commit
    pieces = [(split, origin, rows[i:i + ROWS_PER_SHARD], fetch)
              for split, origin, rows, fetch in open_source(config.source, *begun_with[:1])
              for i in range(0, len(rows), ROWS_PER_SHARD)]
    pieces.sort(key=lambda piece: piece[0] == "train")  # as everywhere, the test split has the first numbers
    for number, (split, origin, rows, fetch) in enumerate(pieces):
        path = data_dir / f"{prefix}_{split}_{number:06d}.bin"
        if path.name not in meta["shards"] or not path.exists():
            found = write_conversations(path, rows, fetch, config.workers or os.cpu_count())
            meta["shards"][path.name] = {"from": origin, **found}
            write_text(data_dir / "meta.json", json.dumps(meta, indent=1))
            train.say(f"{path}  {found['tokens']:,} tokens ({number + 1} of {len(pieces)})")
    parts = meta["shards"].values()
    unusable = sum((Counter(part["unusable"]) for part in parts), Counter())
    for split in ("train", "val"):
        if not any(part["used"] for name, part in meta["shards"].items() if split_of(name) == split):
            reasons = ", ".join(f"{n} {reason}" for reason, n in unusable.items())
            raise UserError(f"source = {config.source} has no usable conversation for the {split} split "
                            f"(unusable: {reasons or 'none'}). Without a test split of its own, every "
                            f"{TEST_EVERY}th goes there, so it takes a few; then delete {data_dir}")
    meta |= {key: sum(part[key] for part in parts) for key in ("conversations", "used", "tokens")}
    meta["unusable"] = unusable
    write_text(data_dir / "meta.json", json.dumps(meta | {"complete": True}, indent=1))


def write_conversations(path, rows, fetch, workers):
    """Writes the usable ones of some conversations as a shard; returns what meta.json says about it."""
    # a hundred at a time: a thread's task should be long beside handing it over
    batches = (list(fetch(rows[i:i + 100])) for i in range(0, len(rows), 100))
    done = list(itertools.chain(*map_in_order(lambda batch: list(map(tokenise, batch)), batches, workers)))
    ids = [ids for ids, reason in done if not reason]
    return {"conversations": len(done), "used": len(ids), "tokens": write_shard(path, ids),
            "sha256": sha256_of(path), "unusable": Counter(reason for _, reason in done if reason)}


# ------------------------------------------------------------------------------------------------------------
# Shards -> batches


class Split(NamedTuple):
    """The conversations of a split that have something to learn, n of them, cut to the context."""

    tokens: np.ndarray      # uint16, one conversation after the other
    start: np.ndarray       # (n,) where each begins in `tokens`
    length: np.ndarray      # (n,) how many ids of it are used: from <|endoftext|> to the last supervised one
    supervised: np.ndarray  # (n,) how many of those are supervised
    cut: int                # conversations that go on beyond the context
    dropped: int            # conversations whose first reply begins beyond it


def load_split(data_dir, split, block_size):
    """The Split "train" or "val" of data_dir, for a model that sees block_size tokens."""
    parts, offset, cut, dropped = [], 0, 0, 0
    for path in shards(data_dir, split):
        tokens = np.array(read_shard(path))
        train.check_ids(path, tokens)
        start = np.flatnonzero(tokens == END_OF_TEXT)
        end = np.append(start[1:], len(tokens))
        stop = np.minimum(end, start + block_size + 1)  # one more than fits: the last id is a target only
        learn = np.flatnonzero(supervised(tokens))
        first, beyond = np.searchsorted(learn, start), np.searchsorted(learn, stop)
        keep = beyond > first
        cut, dropped = cut + int((stop < end)[keep].sum()), dropped + int((~keep).sum())
        # what follows the last supervised id is no target, and no target sees it
        length = np.append(learn, 0)[beyond - 1] + 1 - start
        parts.append((tokens, (start + offset)[keep], length[keep], (beyond - first)[keep]))
        offset += len(tokens)
    arrays = [np.concatenate(column) for column in zip(*parts)]
    if not len(arrays[1]):
        raise UserError(f"{data_dir} has no conversation in its {split} split with a reply within block_size "
                        f"= {block_size} tokens; its meta.json says what was unusable, and why")
    return Split(*arrays, cut, dropped)


def choose_widths(lengths, block_size):
    """The widths that rows are padded to, ascending: those that waste the least on `lengths`, inputs per row.

    Exact, by dynamic programming over multiples of WIDTH_STEP: the best k + 1 widths that end at j are the
    best k that end at some i < j, and j for the rows between. The fewest that reach USEFUL, or MAX_WIDTHS.
    """
    count = np.bincount(-(-lengths // WIDTH_STEP))
    n_up_to, last = np.cumsum(count), len(count) - 1
    table = {0: (0, ())}  # last width: (padded size, widths), with one more width in each round
    for _ in range(MAX_WIDTHS):
        table = {j: min((size + (n_up_to[j] - n_up_to[i]) * j, (*widths, j))
                        for i, (size, widths) in table.items() if i < j)
                 for j in map(int, np.flatnonzero(count)) if j > min(table)}
        size, widths = table[last]
        if lengths.sum() >= USEFUL * size * WIDTH_STEP or min(table) == last:
            break
    return [min(width * WIDTH_STEP, block_size) for width in widths]


def make_groups(split, widths, config, n_epochs):
    """The order of training: a list of (row numbers, width), each conversation once per epoch.

    A group is 1/groups_per_step of a step, in rows of one width. Each epoch deals the conversations anew,
    from default_rng((seed, epoch)). All of it is a function of data and settings, so a resumed run needs no
    state of it, and micro_batch_size only says in how many bites a group is taken.
    """
    block_rows = config.tokens_per_step // (config.groups_per_step * config.block_size)
    width_of = np.searchsorted(widths, split.length - 1)  # the narrowest that holds the row
    groups = []
    for epoch in range(n_epochs):
        rng = np.random.default_rng((config.seed, epoch))
        order = rng.permutation(len(split.length))
        waiting, dealt = order[:0], []
        for i, width in enumerate(widths):
            rows = np.concatenate([waiting, order[width_of[order] == i]])
            height = block_rows * (config.block_size // width)
            n_full = len(rows) // height * height
            dealt += [(group, width) for group in rows[:n_full].reshape(-1, height)]
            waiting = rows[n_full:]  # too few for a group: they move up to the next width
        dealt += [(waiting, widths[-1])] * (len(waiting) > 0)
        groups += [dealt[i] for i in rng.permutation(len(dealt))]
    return groups


def micro_batches(groups, config):
    """[(row numbers, width, height)]: at most micro_batch_size x block_size tokens each, padding included."""
    return [(rows[i:i + height], width, height) for rows, width in groups
            for height in [config.micro_batch_size * (config.block_size // width)]
            for i in range(0, len(rows), height)]


def read_batch(split, rows, width, height, device):
    """Inputs and targets of some conversations, each alone in a row, from position 0, padded at its end.

    Returns int64 tensors (height, width); a target that does not count is -1. Padding comes after all that a
    target can see, so it needs no mask of its own; rows beyond len(rows) are nothing but padding.
    """
    ids = np.full((height, width + 1), END_OF_TEXT)
    for i, row in enumerate(rows):
        start, length = split.start[row], split.length[row]
        ids[i, :length] = split.tokens[start:start + length]
    pair = [torch.from_numpy(ids[:, :-1]), torch.from_numpy(np.where(supervised(ids), ids, -1)[:, 1:])]
    if device.type == "cuda":
        pair = [tensor.pin_memory() for tensor in pair]  # copied while the GPU works on the one before
    return [tensor.to(device, non_blocking=True) for tensor in pair]


def loss_of(model, tokens, targets):
    """model(tokens, targets), the summed loss.

    In eager mode on a CPU the head is left out where there is no target, at more than half of the positions:
    it is most of a small model's work. A compiled model needs fixed shapes, and a GPU no wait for a count.
    """
    if tokens.device.type != "cpu" or model._compiled_call_impl:
        return model(tokens, targets)
    counts, chunk_rows = targets >= 0, model.loss_chunk_rows
    x, targets = model.hidden(tokens)[counts], targets[counts]
    if chunk_rows:
        # filled up to whole chunks: logits of ever new sizes would leave holes in the memory that is kept
        n_missing = -len(x) % chunk_rows
        x, targets = F.pad(x, (0, 0, 0, n_missing)), F.pad(targets, (0, n_missing), value=-1)
    return summed_loss(x, model.transformer["wte"].weight, targets, chunk_rows)


def useful_share(split, widths, config):
    """The share of an epoch's batches that is conversation, not padding."""
    batches = micro_batches(make_groups(split, widths, config, 1), config)
    return (split.length - 1).sum() / sum(width * height for _, width, height in batches)


def plan_steps(config, split, widths):
    """(config with the number of steps as max_steps, their groups); epochs and max_steps both limit it."""
    per_epoch, k = len(make_groups(split, widths, config, 1)), config.groups_per_step
    limits = (-(-config.epochs * per_epoch // k), config.max_steps)
    config = dataclasses.replace(config, max_steps=min(limit for limit in limits if limit))
    groups = make_groups(split, widths, config, -(-config.max_steps * k // per_epoch))
    return config, groups[:config.max_steps * k]


def check_settings(config):
    """Raises UserError for a setting that cannot be, with a value that can."""
    train.check_bounds(config, {"tokens_per_step", "groups_per_step", "micro_batch_size", "block_size",
                                "log_every", "sample_rows", "sample_tokens"})
    train.check_folders(config)
    if config.max_steps > 10**6:  # all of their rows are dealt beforehand
        raise UserError(f"max_steps = {config.max_steps} must be at most 1000000")
    if not config.epochs and not config.max_steps:
        raise UserError("epochs = 0 and max_steps = 0 do not say how long to train; epochs = 2 does")
    unit = config.groups_per_step * config.micro_batch_size * config.block_size
    if config.tokens_per_step % unit:
        nearest = max(1, round(config.tokens_per_step / unit)) * unit
        raise UserError(
            f"tokens_per_step ({config.tokens_per_step:,}) must be a multiple of groups_per_step x "
            f"micro_batch_size x block_size ({config.groups_per_step} x {config.micro_batch_size} x "
            f"{config.block_size:,} = {unit:,}); the nearest is tokens_per_step = {nearest}")


def origins(config, model, data):
    """{setting: fingerprint} of what a run depends on: the data, which gives the rows their order, and the
    weights that it began with."""
    meta = np.fromfile(Path(config.data_dir) / "meta.json", dtype=np.uint8)
    arrays_of = {"data_dir": [meta, data.start, data.length],
                 "init_from": [p.detach().cpu().numpy() for p in model.parameters()]}
    digests = {name: hashlib.sha256() for name in arrays_of}
    for name, arrays in arrays_of.items():
        for array in arrays:
            digests[name].update(np.ascontiguousarray(array))
    return {name: digest.hexdigest() for name, digest in digests.items()}


def show(config, n=5):
    """Prints some conversations of the training split, with what is learned of them in colour."""
    block_size = config.block_size or 1024
    if not config.block_size and Path(config.init_from).exists():  # what training would take
        block_size = read_model(find_model(config.init_from))[0].block_size
    split = load_split(config.data_dir, "train", block_size)
    in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    before, after = ("\033[32m", "\033[0m") if in_colour else ("[[", "]]")
    for row in np.unique(np.linspace(0, len(split.start) - 1, n).astype(int)):
        ids = split.tokens[split.start[row]:split.start[row] + split.length[row]]
        for learned, run_of_ids in itertools.groupby(zip(ids, supervised(ids)), key=lambda pair: pair[1]):
            text = decode(id for id, _ in run_of_ids)
            print(f"{before}{text}{after}" if learned else text.replace("<|user|>", "\n<|user|>"), end="")
        print("\n")
    print(f"Learned ({'in colour' if in_colour else 'in [[ ]]'}): {split.supervised.sum():,} of "
          f"{split.length.sum():,} tokens in {len(split.start):,} conversations.")


# ------------------------------------------------------------------------------------------------------------
# How well does it chat?


@torch.no_grad()
def test_loss(model, test, config, device, dtype):
    """Mean loss in nats per supervised token of the test split's first eval_rows conversations (0: all)."""
    n = min(config.eval_rows or len(test.start), len(test.start))
    widths = choose_widths(test.length[:n] - 1, config.block_size)
    width_of = np.searchsorted(widths, test.length[:n] - 1)
    groups = [(np.flatnonzero(width_of == i), width) for i, width in enumerate(widths)]
    total = torch.zeros((), device=device)
    model.eval()
    for batch in micro_batches(groups, config):
        with train.autocast(device, dtype):
            # forward, not model(): these widths are not those of training, and need no graphs of their own
            total += model.forward(*read_batch(test, *batch, device))
    return total.item() / int(test.supervised[:n].sum())


def reply_quality(model, test, config):
    """Greedy replies to the first messages of some test conversations: do they end, do they repeat words?

    Returns {"ended": share of the replies that wrote their <|end|> within sample_tokens, "repetition": share
    of their trigrams that had been in the same reply before, "replies": how many}.
    """
    replies = []
    model.eval()
    for start, length in zip(test.start[:config.sample_rows], test.length):
        ids = test.tokens[start:start + length].tolist()
        prompt = ids[:ids.index(ASSISTANT) + 1]
        replies.append(list(generate(model, prompt, config.sample_tokens, temperature=0,
                                     stop=(END, END_OF_TEXT))))
    trigrams = [list(zip(reply, reply[1:], reply[2:])) for reply in replies]
    n_trigrams, n_distinct = sum(map(len, trigrams)), sum(len(set(found)) for found in trigrams)
    return {"ended": sum(reply[-1] == END for reply in replies) / len(replies),
            "repetition": 1 - n_distinct / max(n_trigrams, 1), "replies": len(replies)}


def write_answers(model, config, step):
    """Asks configs/questions.txt, adds the likeliest answers to the log, and rewrites answers.md from it."""
    questions = chat.read_questions()
    settings = load(chat.Config, "chat", ["--temperature=0", "--repetition_penalty=1",
                                          f"--max_new_tokens={config.sample_tokens}"])
    model.eval()
    for question, answer in zip(questions, chat.answers(chat.Chat(model, settings), questions)):
        row = {"step": step, "kind": model.info["kind"], "prompt": question, "sample": answer}
        train.append_log(config.out_dir, row)
    write_text(Path(config.out_dir) / "answers.md", answers_table(curves.read_log(config.out_dir)))


def answers_table(log):
    """The answers in a log as Markdown: a row for each question, a column for each time they were asked."""
    answers = {}  # {column: {question: answer}}
    for row in log:
        if "sample" in row:
            column = "base model" if row["kind"] == "base" else f"chat, step {row['step']:,}"
            answers.setdefault(column, {})[row["prompt"]] = row["sample"]
    rows = [[question, *(column.get(question, "") for column in answers.values())]
            for question in dict.fromkeys(itertools.chain(*answers.values()))]
    return ("# The same questions, before and after\n\nAlways the likeliest token; ... where an answer did "
            "not end by itself.\n\n" + chat.table(["question", *answers], rows))


def look(model, step, config, test, device, dtype, fence):
    """Everything that looks at the model at `step` and cannot stop or change the training."""
    last, parts = step == config.max_steps, []

    def due(every):
        return every > 0 and (last or step % every == 0) and not fence.stop.signal

    if due(config.eval_every):
        with fence("test loss", step):
            loss = test_loss(model, test, config, device, dtype)
            train.append_log(config.out_dir, {"step": step, "val_loss": loss})
            parts.append(f"test loss {loss:.4f} per supervised token")
    if due(config.hellaswag_every) and not fence.is_paused("HellaSwag"):
        with fence("HellaSwag", step):
            score = train.score_hellaswag(model, config, step, step * config.tokens_per_step)
            parts.append(f"HellaSwag {score:.1%}")
    if due(config.sample_every):
        with fence("replies", step):
            found = reply_quality(model, test, config)
            train.append_log(config.out_dir, {"step": step, **found})
            parts.append(f"{found['ended']:.0%} of {found['replies']} replies end by themselves, "
                         f"{found['repetition']:.0%} repetition")
    # a column of a table each time: as it begins, on the way, and what came of it
    if config.sample_every and (last or step in (0, config.save_every)) and not fence.stop.signal:
        with fence("answers", step):
            write_answers(model, config, step)
    if parts:
        train.say(" | ".join([f"step {step:6d}", *parts]))
        with fence("curves", step):
            curves.draw([config.out_dir], Path(config.out_dir) / "curves.png")


# ------------------------------------------------------------------------------------------------------------
# The run


def start_model(config, device):
    """The model of config.init_from, fp32 on `device`, in train mode, with config.dropout."""
    model = load_model(config.init_from, device)
    if model.config.vocab_size != VOCAB_SIZE:
        raise UserError(f"init_from = {config.init_from} has {model.config.vocab_size:,} tokens, none for "
                        f"the roles of a conversation; it needs GPT-2's vocabulary, padded to {VOCAB_SIZE:,}")
    if not 0 <= config.block_size <= model.config.block_size:
        raise UserError(f"block_size = {config.block_size} must be at most {model.config.block_size}: that "
                        f"is what the model of init_from = {config.init_from} can see; 0 takes that")
    model.set_dropout(config.dropout)
    model.loss_chunk_rows = config.loss_chunk_rows
    return model.train()


def fresh_chat_rows(model, seed):
    """Gives the chat tokens new vectors: the mean of all tokens in use, each with a deviation of its own.

    No text has the ids from 50257 on, and the softmax pushes their rows alike, to one vector that means
    "never". From there SFT would first have to unlearn, and the model could not tell one role from another.
    The mean's logit is the mean logit, so that a new token neither wins nor is impossible (Hewitt 2021,
    "Initializing New Word Embeddings for Pretrained Language Models"). 0.02 is the spread of a fresh GPT-2.
    """
    wte = model.transformer["wte"].weight
    ids = sorted([*ROLE_IDS.values(), END])
    noise = 0.02 * torch.randn(len(ids), wte.size(1), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        wte[ids] = wte[:END_OF_TEXT + 1].mean(dim=0) + noise.to(wte)


def describe(config, model, data, widths, groups):
    """Says what there is to learn from, and what is left out and why."""
    meta, n_weights = read_meta(config.data_dir), sum(p.numel() for p in model.parameters())
    left_out = [f"{n:,} {reason}" for reason, n in meta["unusable"].items()] or ["none unusable"]
    share = data.supervised.sum() / (data.length - 1).sum()
    epochs = sum(len(rows) for rows, _ in groups) / len(data.start)
    useful = useful_share(data, widths, config)
    train.say(f"model     {n_weights / 1e6:.1f}M weights from {config.init_from} ({model.info['kind']}, step "
              f"{model.info['step']:,})")
    train.say(f"data      {config.data_dir}: {meta['conversations']:,} conversations, " + ", ".join(left_out))
    train.say(f"          {len(data.start):,} to train on, {data.cut:,} of them cut to {config.block_size:,} "
              f"tokens; {data.dropped:,} left out whose first reply begins beyond that")
    train.say(f"rows      of {', '.join(map(str, widths))} tokens; {useful:.1%} useful, the rest is padding; "
              f"{share:.1%} of the useful ones are supervised")
    train.say(f"steps     {config.max_steps:,} of {config.tokens_per_step:,} tokens, {epochs:.2f} epochs; "
              f"{config.optimizer}, lr {config.lr:g}")
    train.say(f"disk      {train.disk_line(config, model)}")
    train.say_if_too_short(config)


def make_plan(config, model, data, groups, device, dtype):
    """Prints how long the run will take, measured here on its first two steps, not compiled."""
    times_s, k = [], config.groups_per_step
    for step in (0, 0, min(1, config.max_steps - 1)):
        start_s = time.perf_counter()
        for batch in micro_batches(groups[step * k:(step + 1) * k], config):
            with train.autocast(device, dtype):
                loss = loss_of(model, *read_batch(data, *batch, device))
            loss.backward()
            loss.item()  # waits for the device
        times_s.append(time.perf_counter() - start_s)
    step_s = min(times_s)
    train.say(f"time      {step_s:.2f} s a step, not compiled; {config.max_steps * step_s / 3600:.2f} hours")


def begin(config, model, step, device, dtype, compiled, world, fence):
    """The log's start line, and at step 0 the answers of the base model, before it becomes a chat model."""
    with fence("log", breakable=False):
        save(config, Path(config.out_dir) / "config.toml")
        train.cut_log(config.out_dir, step)
        train.append_log(config.out_dir, {
            "event": "start", "step": step, "settings": dataclasses.asdict(config), "device": str(device),
            "dtype": str(dtype).removeprefix("torch."), "compile": compiled, "world": world,
            "torch": torch.__version__, "python": sys.version.split()[0]})
    if step == 0 and model.info["kind"] == "base" and config.sample_every:
        with fence("answers", step):
            write_answers(model, config, step)


def tune(config, model, data, test, groups, device, dtype, rank, world, stop):
    """The run from where out_dir stands to max_steps. Returns the exit code: 0, or 128 + the signal."""
    master, fence = rank == 0, train.Fence(config.out_dir, model, stop)
    optimizers = train.make_optimizers(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    checkpoints = train.Checkpoints(config, model, optimizers, scaler, origins(config, model, data), fence,
                                    "chat", FIXED)
    step, trained_s = checkpoints.resume()
    if world > 1:
        train.agree_on_step(step, device, world)
    if checkpoints.is_finished(step):
        train.say(f"{config.out_dir} is finished: {step:,} steps. Talk to it: python chat.py "
                  f"--model={config.out_dir}/model; train on with larger --epochs and --max_steps")
        return 0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # a process may have no rows of a step, and adds zeros to the others'

    def compile_all():  # a graph for each width: one for all, with a flexible width, would be slower
        torch._dynamo.config.automatic_dynamic_shapes = False
        for width, height in sorted({(width, height) for _, width, height in micro_batches(groups, config)}):
            with train.autocast(device, dtype):
                model(*read_batch(data, [], width, height, device)).backward()
        model.zero_grad(set_to_none=False)

    attention = train.attention_used(device, dtype, config, model.config)
    compiled = train.start_compile(model, config, device, compile_all)
    if master:
        train.say(f"device    {device}, {str(dtype).removeprefix('torch.')}; attention {attention}; "
                  f"compile {compiled}")
        with contextlib.suppress(Exception):
            train.say(f"awake     {train.keep_awake()}")
        begin(config, model, step, device, dtype, compiled, world, fence)
    if step == 0 and model.info["kind"] == "base":
        fresh_chat_rows(model, config.seed)
    model.info["kind"] = "chat"
    watch, power, bad_in_a_row = train.Watch(config.out_dir, device), train.PowerMeter(device), 0
    if master and step == config.max_steps:  # killed after the last save, and maybe before the model folder's
        checkpoints.write_model(step)
    stopping, stop.raises = False, False
    while True:
        # ---- saving and looking: nothing here changes the training -----------------------------------------
        stopping, last = stopping or bool(stop.signal and world == 1), step == config.max_steps
        if master:
            checkpoints.save_if_due(step, trained_s, stopping or last)
        if master and not stopping:
            with contextlib.suppress(KeyboardInterrupt):  # a stop breaks it off; going on does it again
                look(model, step, config, test, device, dtype, fence)
        if stop.signal and world == 1 and not stopping:
            continue
        if stopping or last:
            break

        # ---- the step --------------------------------------------------------------------------------------
        step_start_s = time.perf_counter()
        # dropout, too, is a function of the step
        torch.manual_seed(((config.seed * 2**24 + step) * 2**8 + rank) % 2**63)
        k = config.groups_per_step
        batches = micro_batches(groups[step * k:(step + 1) * k], config)
        # The mean is over the supervised tokens of the whole step. With a mean of each micro-batch's mean, a
        # token of a short answer would weigh more than one of a long answer.
        n_supervised = int(sum(data.supervised[rows].sum() for rows, _, _ in batches))
        loss = torch.zeros((), device=device)
        with train.autocast(device, dtype):
            for batch in batches[rank::world]:
                micro_loss = loss_of(model, *read_batch(data, *batch, device)) / n_supervised
                scaler.scale(micro_loss).backward()
                loss += micro_loss.detach()  # no .item(): the CPU would wait for the GPU
                if stop.hurry:
                    break
        if stop.hurry:  # about to be ended: this step is given up, the last one saved
            model.zero_grad(set_to_none=False)
            continue
        wants_stop = torch.tensor(float(bool(stop.signal)), device=device)
        if world > 1:
            train.add_up([p.grad for p in model.parameters()] + [loss, wants_stop])
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        train.set_lr(optimizers, train.lr_factor(step, config))
        loss, grad_norm, stopping = loss.item(), grad_norm.item(), wants_stop.item() > 0  # the one wait
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
        model.zero_grad(set_to_none=False)
        step += 1

        # ---- everything from here on is only for people ----------------------------------------------------
        step_s = time.perf_counter() - step_start_s
        trained_s, bad_in_a_row = trained_s + step_s, 0 if finite else bad_in_a_row + 1
        if master:
            train.report(step, loss, grad_norm, step_s, config, optimizers, watch, power, fence)
        checkpoints.stop_if_ill(bad_in_a_row, step, trained_s, master)
    return train.last_words(config, step, trained_s, stop) if master else 0


def run_tuning(config, stop):
    """Everything from the settings to the exit code."""
    device, rank, world = train.start_process(config)
    dtype, _ = pick_dtype(device, training=True, name=config.dtype)
    try:
        model = start_model(config, device)
        config = dataclasses.replace(config, block_size=config.block_size or model.config.block_size)
        check_settings(config)
        train.refuse_a_crawl(config, device, sum(p.numel() for p in model.parameters()))
        lock = lock_folder(config.out_dir) if rank == 0 and not config.plan else None  # noqa: F841 - kept
        if rank == 0:
            prepare(config)
        train.wait_for_all(world)  # for the data
        data, test = (load_split(config.data_dir, split, config.block_size) for split in ("train", "val"))
        widths = choose_widths(data.length - 1, config.block_size)
        config, groups = plan_steps(config, data, widths)
        if rank == 0:
            describe(config, model, data, widths, groups)
        with train.attention_order(config.attention):
            if config.plan:
                return make_plan(config, model, data, groups, device, dtype) or 0
            return tune(config, model, data, test, groups, device, dtype, rank, world, stop)
    except (RuntimeError, MemoryError) as error:
        if not train.is_out_of_memory(error):
            raise
        raise UserError(train.out_of_memory_advice(config, config.micro_batch_size, device)) from None


def main():
    config = load(Config, "sft")
    if config.show:
        train.check_bounds(config, set())
        prepare(config)
        return show(config)
    stop = train.StopSignals()
    stop.raises = True
    try:
        code = run_tuning(config, stop)
    except KeyboardInterrupt:
        train.say("stopped before the first step; what is prepared is kept, and the same command goes on")
        code = 128 + (stop.signal or signal.SIGINT)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    run(main)
