"""Turns a model that continues text into one that answers: supervised fine-tuning (SFT) on conversations.

    python sft.py                        out/train/model learns from smol-smoltalk and becomes out/sft/model
    python sft.py configs/tiny           the tiny world, after python train.py configs/tiny: a minute or two on a CPU
    python sft.py --source=my/chats      parquet or jsonl files of your own (also name a new --data_dir and --out_dir)
    python sft.py --show                 some conversations, with what is learned of them in colour
    python sft.py --plan                 the steps and hours that it will take, measured here

Reads   a model folder, and conversations {"messages": [{"role", "content"}, ...]}, which it tokenises once into data_dir.
Writes  out_dir/: the same as train.py, and answers.md: what the model says to the same questions before, on the way and
        after. The model to talk to is out_dir/model: python chat.py.

What is learned is the assistant's part only: the words of its turns and the <|end|> that closes each, so that it learns to
answer and to stop. Every conversation stands alone at the start of a row, as it will in the chat.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

import curves
import train
from configs import FOLDER, UserError, load, run, save, write_text
from model import (
    ASSISTANT,
    END,
    END_OF_TEXT,
    ROLE_IDS,
    VOCAB_SIZE,
    decode,
    generate,
    keep_freed_memory,
    load_model,
    pick_device,
    pick_dtype,
    question_prompt,
    render_chat,
    save_model,
    supervised,
)
from prepare_fineweb import map_in_order, read_meta, read_shard, shards, write_shard


@dataclasses.dataclass
class Config:
    """The types; the values and the reasons for them are in configs/sft.toml."""

    data_dir: str
    source: str
    workers: int
    show: bool
    out_dir: str
    init_from: str
    block_size: int
    dropout: float
    tokens_per_step: int
    groups_per_step: int
    micro_batch_size: int
    epochs: int
    max_steps: int
    optimizer: Literal["adamw", "muon"]
    lr: float
    muon_lr: float
    schedule: Literal["linear", "cosine"]
    warmup_steps: int
    decay_fraction: float
    min_lr_fraction: float
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
USEFUL = 0.90            # no more widths than it takes for this share of the rows to be text rather than padding


# ----------------------------------------------------------------------------------------------------------------------
# Conversations -> shards


def unusable(messages):
    """Why a conversation cannot be learned from, as a short reason to count; "" if it can. Never raises."""
    if not isinstance(messages, list) or not messages or not all(isinstance(turn, dict) for turn in messages):
        return "no list of messages"
    if any(turn.get("role") not in list(ROLE_IDS) for turn in messages):  # a list: a role may be unhashable
        return "unknown role"
    if any(not isinstance(turn.get("content"), str) or not turn["content"].strip() for turn in messages):
        return "empty message"
    roles = [turn["role"] for turn in messages]
    if "assistant" not in roles:
        return "no assistant turn"
    turns = roles[1:] if roles[0] == "system" else roles
    if any(role != ("user", "assistant")[i % 2] for i, role in enumerate(turns)):
        return "roles do not alternate"
    return ""


def tokenise(messages):
    """(ids, "") of a usable conversation, (None, reason) of another."""
    reason = unusable(messages)
    return (None, reason) if reason else (np.array(render_chat(messages), dtype=np.uint16), "")


def open_source(source):
    """The parts of a source: [(split, rows, fetch)], where fetch(rows) gives the `messages` of these row numbers.

    split is "val" (the test split) or "train". Nothing is read until fetch is called. `source` is "tiny", a local
    .parquet or .jsonl file or a folder of them (files with "test" in their path are the test split), or a hub name.
    """
    if source == "tiny":
        from configs.tiny import world
        rows = {"val": world.conversations("test"), "train": world.conversations("train")}
        return [(split, range(len(all_rows)), lambda rows, all_rows=all_rows: [all_rows[i]["messages"] for i in rows])
                for split, all_rows in rows.items()]
    if Path(source).exists():
        folder = Path(source)
        files = sorted(p for p in ([folder] if folder.is_file() else folder.rglob("*"))
                       if p.suffix in (".parquet", ".jsonl"))
        if not files:
            raise UserError(f"source = {source} holds no .parquet or .jsonl file with conversations")
        named = {p: "val" if "test" in str(p.relative_to(folder.parent)).lower() else "train" for p in files}
        tables = [(named[p], *(open_parquet if p.suffix == ".parquet" else open_jsonl)(p)) for p in files]
    else:
        tables = open_hub(source)
    if {split for split, _, _ in tables} == {"train", "val"}:
        return [(split, range(n), fetch) for split, n, fetch in tables]
    held_out = [("val", range(0, n, TEST_EVERY), fetch) for _, n, fetch in tables]
    return held_out + [("train", [i for i in range(n) if i % TEST_EVERY], fetch) for _, n, fetch in tables]


def open_parquet(path):
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        if "messages" not in file.schema_arrow.names:
            raise UserError(f"{path} has no column `messages` (it has {', '.join(file.schema_arrow.names)})")
        column = file.read(columns=["messages"]).column("messages")
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"{path} cannot be read as parquet: {error}") from None
    return len(column), lambda rows: column.take(np.array(rows)).to_pylist()


def open_jsonl(path):
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None

    def fetch(rows):
        for row in rows:
            try:
                conversation = json.loads(lines[row])
            except ValueError:  # also what is no UTF-8
                conversation = None
            yield conversation.get("messages") if isinstance(conversation, dict) else None
    return len(lines), fetch


def open_hub(name):
    os.environ.setdefault("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")
    import datasets

    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # whatever the network, the hub, the data set or the disk raises
        raise UserError(f"source = {name} is no file or folder here, and cannot be loaded from the hub: "
                        f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
    tables = []
    for split, table in splits.items():
        if "messages" not in table.column_names:
            raise UserError(f"{name} has no column `messages` (it has {', '.join(table.column_names)})")
        tables.append(("val" if split.startswith(("test", "val")) else "train", len(table),
                       lambda rows, table=table: table[list(rows)]["messages"]))
    return tables


def prepare(config):
    """Tokenises the conversations of config.source into shards in config.data_dir, unless that is done; returns meta.json.

    The conversations stay in the source's order, so the same source gives the same bytes whatever the workers, and a
    preparation that was stopped goes on with the next shard. What cannot be used is counted by reason.
    """
    data_dir = Path(config.data_dir)
    meta = read_meta(data_dir) if (data_dir / "meta.json").exists() else {
        "source": config.source, "tokenizer": "gpt2", "complete": False, "shards": {}}
    if meta.get("source") != config.source:
        raise UserError(f"data_dir = {data_dir} was made from {meta.get('source')!r}, not from source = {config.source!r}: "
                        "name that source, or another data_dir")
    if meta["complete"]:
        return meta
    data_dir.mkdir(parents=True, exist_ok=True)
    prefix = re.sub(r"\W+", "_", Path(config.source).stem.lower())
    pieces = [(split, rows[i:i + ROWS_PER_SHARD], fetch) for split, rows, fetch in open_source(config.source)
              for i in range(0, len(rows), ROWS_PER_SHARD)]
    pieces.sort(key=lambda piece: piece[0] == "train")  # as everywhere, the test split has the first numbers
    for number, (split, rows, fetch) in enumerate(pieces):
        path = data_dir / f"{prefix}_{split}_{number:06d}.bin"
        if path.name not in meta["shards"] or not path.exists():
            meta["shards"][path.name] = write_conversations(path, rows, fetch, config.workers or os.cpu_count())
            write_text(data_dir / "meta.json", json.dumps(meta, indent=1))
            train.say(f"{path}  {meta['shards'][path.name]['tokens']:,} tokens ({number + 1} of {len(pieces)})")
    parts = meta["shards"].values()
    meta |= {key: sum(part[key] for part in parts) for key in ("conversations", "used", "tokens")}
    meta |= {"unusable": sum((Counter(part["unusable"]) for part in parts), Counter()), "complete": True}
    write_text(data_dir / "meta.json", json.dumps(meta, indent=1))
    return meta


def write_conversations(path, rows, fetch, workers):
    """Writes the usable ones of some conversations as a shard; returns what meta.json says about it."""
    # a hundred at a time: a thread's task should be long beside handing it over
    parts = (list(fetch(rows[i:i + 100])) for i in range(0, len(rows), 100))
    done = [pair for part in map_in_order(lambda part: [tokenise(messages) for messages in part], parts, workers)
            for pair in part]
    ids = [ids for ids, reason in done if not reason]
    n_tokens = write_shard(path, ids)
    return {"conversations": len(done), "used": len(ids), "tokens": n_tokens,
            "unusable": Counter(reason for _, reason in done if reason)}


# ----------------------------------------------------------------------------------------------------------------------
# Shards -> batches


class Split(NamedTuple):
    """The conversations of a split that have something to learn, cut to the context; all arrays but `tokens` (n,)."""
    tokens: np.ndarray      # uint16, one conversation after the other
    start: np.ndarray       # where each begins in `tokens`
    length: np.ndarray      # how many ids of it are used, from <|endoftext|> to the last one that is supervised
    supervised: np.ndarray  # how many of those are supervised
    cut: int                # conversations that go on beyond the context
    dropped: int            # conversations whose first reply begins beyond it


def load_split(data_dir, split, block_size):
    """The Split of `data_dir` ("val" is the test split) for a model of block_size: at most block_size + 1 ids of each."""
    parts, offset, cut, dropped = [], 0, 0, 0
    for path in shards(data_dir, split):
        tokens = np.array(read_shard(path))
        start = np.flatnonzero(tokens == END_OF_TEXT)
        end = np.append(start[1:], len(tokens))
        stop = np.minimum(end, start + block_size + 1)  # one more than fits: the last id is a target only
        learn = np.flatnonzero(supervised(tokens))
        first, beyond = np.searchsorted(learn, start), np.searchsorted(learn, stop)
        keep = beyond > first
        cut += int((stop < end)[keep].sum())
        dropped += int((~keep).sum())
        # what follows the last supervised id is neither a target nor seen by one
        length = np.append(learn, 0)[beyond - 1] + 1 - start
        parts.append((tokens, (start + offset)[keep], length[keep], (beyond - first)[keep]))
        offset += len(tokens)
    return Split(*(np.concatenate(arrays) for arrays in zip(*parts)), cut, dropped)


def choose_widths(lengths, block_size):
    """The widths that rows are padded to, ascending: the few that waste the least on these `lengths` (inputs per row).

    Exact, by dynamic programming over multiples of WIDTH_STEP: the best k + 1 widths that end at j are the best k that
    end at some i < j, and j for the rows in between. The fewest that reach the share USEFUL, at most MAX_WIDTHS.
    """
    count = np.bincount(-(-lengths // WIDTH_STEP))
    n_up_to, last = np.cumsum(count), len(count) - 1
    table = {0: (0, ())}  # last width: (padded size, widths), for one more width in each round
    for _ in range(MAX_WIDTHS):
        table = {j: min((size + (n_up_to[j] - n_up_to[i]) * j, widths + (j,)) for i, (size, widths) in table.items() if i < j)
                 for j in map(int, np.flatnonzero(count)) if j > min(table)}
        size, widths = table[last]
        if lengths.sum() >= USEFUL * size * WIDTH_STEP or min(table) == last:
            break
    return [min(width * WIDTH_STEP, block_size) for width in widths]


def make_groups(split, widths, config, n_epochs):
    """The order of training: a list of (row numbers, width), every conversation once per epoch.

    A group is the unit of the order, about tokens_per_step / groups_per_step padded tokens of one width. Each epoch
    deals the conversations anew, in default_rng((seed, epoch)).permutation; a step takes the next groups_per_step of
    them. All of it is a function of data and settings, so a resumed run needs no loader state, and the micro-batch
    size only says in how many bites a group is taken.
    """
    block_size, rows_per_group = config.block_size, group_rows(config)
    width_of = np.searchsorted(widths, split.length - 1)  # the narrowest that holds the row
    groups = []
    for epoch in range(n_epochs):
        rng = np.random.default_rng((config.seed, epoch))
        order = rng.permutation(len(split.length))
        waiting, dealt = order[:0], []
        for i, width in enumerate(widths):
            rows = np.concatenate([waiting, order[width_of[order] == i]])
            height = rows_per_group * (block_size // width)
            full = len(rows) // height * height
            dealt += [(part, width) for part in rows[:full].reshape(-1, height)]
            waiting = rows[full:]  # too few for a group: they move up to the next width
        dealt += [(waiting, widths[-1])] * (len(waiting) > 0)
        groups += [dealt[i] for i in rng.permutation(len(dealt))]
    return groups


def group_rows(config):
    """How many rows of block_size tokens a group is worth."""
    return config.tokens_per_step // (config.groups_per_step * config.block_size)


def micro_batches(groups, config):
    """[(row numbers, width, height)] of some groups: at most micro_batch_size x block_size tokens each, padding included."""
    batches = []
    for rows, width in groups:
        height = config.micro_batch_size * (config.block_size // width)
        batches += [(rows[i:i + height], width, height) for i in range(0, len(rows), height)]
    return batches


def batch(split, rows, width, height):
    """Inputs and targets of some conversations, each alone in a row of its own and at position 0, padded at its end.

    Returns two int64 arrays (height, width); a target that does not count is -1. Padding comes after everything that a
    target can see, so it needs no mask of its own; rows beyond len(rows) are padding all over.
    """
    ids = np.full((height, width + 1), END_OF_TEXT)
    for i, row in enumerate(rows):
        start, length = split.start[row], split.length[row]
        ids[i, :length] = split.tokens[start:start + length]
    return ids[:, :-1], np.where(supervised(ids), ids, -1)[:, 1:]


def useful_share(split, widths, config):
    """The share of an epoch's batches that is conversation, not padding."""
    batches = micro_batches(make_groups(split, widths, config, 1), config)
    return (split.length - 1).sum() / sum(width * height for _, width, height in batches)


def check_batch(config):
    """Raises UserError, with the nearest value that works, if a step is not a whole number of groups and micro-batches."""
    for name in ("tokens_per_step", "groups_per_step", "micro_batch_size", "block_size", "log_every"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} = {getattr(config, name)} must be at least 1")
    if config.max_steps < 0 or config.epochs < 1 and not config.max_steps:
        raise UserError(f"epochs = {config.epochs} and max_steps = {config.max_steps} must say how long to train: "
                        "epochs = 2, or a number of steps")
    unit = config.groups_per_step * config.micro_batch_size * config.block_size
    if config.tokens_per_step % unit:
        raise UserError(f"tokens_per_step ({config.tokens_per_step:,}) must be a multiple of groups_per_step x "
                        f"micro_batch_size x block_size ({config.groups_per_step} x {config.micro_batch_size} x "
                        f"{config.block_size:,} = {unit:,}); the nearest is tokens_per_step = "
                        f"{max(1, round(config.tokens_per_step / unit)) * unit}")


def fingerprint(data_dir, split):
    """A text that changes with the conversations: the order of training depends on them."""
    meta = (Path(data_dir) / "meta.json").read_bytes()
    return hashlib.sha256(meta + split.start.tobytes() + split.length.tobytes()).hexdigest()


def show(config, n=5):
    """Prints some conversations of the training split, each token that is learned in colour."""
    split = load_split(config.data_dir, "train", config.block_size or 1024)
    in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    before, after = ("\033[32m", "\033[0m") if in_colour else ("[[", "]]")
    for row in np.linspace(0, len(split.start) - 1, min(n, len(split.start))).astype(int):
        ids = split.tokens[split.start[row]:split.start[row] + split.length[row]]
        learn = supervised(ids)
        edges = [0, *(np.flatnonzero(np.diff(learn)) + 1), len(ids)]
        parts = [f"{before}{decode(ids[i:j])}{after}" if learn[i] else decode(ids[i:j]) for i, j in zip(edges, edges[1:])]
        print("".join(parts).replace("<|user|>", "\n<|user|>").replace("<|assistant|>", "\n<|assistant|>"), end="\n\n")
    print(f"Learned: {split.supervised.sum():,} of {split.length.sum():,} tokens "
          f"({split.supervised.sum() / split.length.sum():.0%}), {'in colour' if in_colour else 'in [[ ]]'}.")


# ----------------------------------------------------------------------------------------------------------------------
# How well does it chat?


@torch.no_grad()
def test_loss(model, test, config, device, dtype):
    """Mean loss in nats per supervised token over the first eval_rows conversations of the test split (0: all)."""
    n = min(config.eval_rows or len(test.start), len(test.start))
    widths = choose_widths(test.length[:n] - 1, config.block_size)
    width_of = np.searchsorted(widths, test.length[:n] - 1)
    groups = [(np.flatnonzero(width_of == i), width) for i, width in enumerate(widths)]
    total = torch.zeros((), device=device)
    model.eval()
    for rows, width, height in micro_batches(groups, config):
        tokens, targets = batch(test, rows, width, height)
        with train.autocast(device, dtype):
            # forward, not model(): the test split's widths are others, and need no graphs of their own
            total += model.forward(torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device))
    return total.item() / int(test.supervised[:n].sum())


def reply_quality(model, test, config):
    """Greedy replies to the first messages of some test conversations: do they end by themselves, do they repeat?

    Returns {"ended": share of the replies that wrote their <|end|> within sample_tokens, "repetition": share of their
    trigrams that had been in the same reply before, "replies": how many}.
    """
    ended = n_trigrams = n_distinct = n = 0
    model.eval()
    for start, length in zip(test.start[:config.sample_rows], test.length):
        ids = test.tokens[start:start + length].tolist()
        ids = ids[:ids.index(ASSISTANT) + 1]
        reply = list(generate(model, ids, config.sample_tokens, temperature=0, stop=(END, END_OF_TEXT)))
        trigrams = list(zip(reply, reply[1:], reply[2:]))
        ended, n = ended + (reply[-1] == END), n + 1
        n_trigrams, n_distinct = n_trigrams + len(trigrams), n_distinct + len(set(trigrams))
    return {"ended": ended / n, "repetition": 1 - n_distinct / max(n_trigrams, 1), "replies": n}


def ask(model, questions, max_new_tokens):
    """The model's likeliest answers: [(question, answer)]; one that did not end by itself ends in " ...".

    A question that begins with "and then:" goes on in the conversation of the one above. A base model, which has never
    seen a role, is asked as `Question: ... Answer:`.
    """
    answers, messages = [], []
    model.eval()
    for question in questions:
        follows, text = question.startswith("and then:"), question.removeprefix("and then:").strip()
        messages = (messages if follows else []) + [{"role": "user", "content": text}]
        ids = render_chat(messages, reply=True) if model.info["kind"] == "chat" else question_prompt(messages)
        reply = list(generate(model, ids, max_new_tokens, temperature=0, stop=(END, END_OF_TEXT)))
        has_ended = reply[-1] in (END, END_OF_TEXT)
        text = decode(reply[:len(reply) - has_ended]).strip()
        answers.append((question, text + " ..." * (not has_ended)))
        # a base model goes on to ask itself; the next question follows its answer
        messages.append({"role": "assistant", "content": text.split("\nQuestion:")[0].strip()})
    return answers


def write_answers(model, config, step):
    """Asks the questions of configs/questions.txt, adds the answers to the log, and rewrites answers.md from it."""
    questions = (FOLDER / "questions.txt").read_text(encoding="utf-8").splitlines()
    for question, answer in ask(model, questions, config.sample_tokens):
        train.append_log(config.out_dir, {"step": step, "kind": model.info["kind"], "prompt": question, "sample": answer})
    write_text(Path(config.out_dir) / "answers.md", answers_table(curves.read_log(config.out_dir)))


def answers_table(log):
    """The answers in a log as Markdown: a row for each question, a column for each time that they were asked."""
    answers = {}  # {column: {question: answer}}
    for row in log:
        if "sample" in row:
            column = "base model" if row["kind"] == "base" else f"chat, step {row['step']:,}"
            answers.setdefault(column, {})[row["prompt"]] = row["sample"]

    def line(cells):
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |\n"

    questions = list(dict.fromkeys(question for column in answers.values() for question in column))
    text = "# The same questions, before and after\n\nAlways the likeliest word; ... where an answer did not end by itself.\n\n"
    text += line(["", *answers]) + "|" + "---|" * (len(answers) + 1) + "\n"
    return text + "".join(line([question, *(column.get(question, "") for column in answers.values())])
                          for question in questions)


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
    if due(config.hellaswag_every):
        with fence("HellaSwag", step):
            score = train.score_hellaswag(model, config, step, step * config.tokens_per_step)
            parts.append(f"HellaSwag {score:.1%}")
    if due(config.sample_every):
        with fence("replies", step):
            found = reply_quality(model, test, config)
            train.append_log(config.out_dir, {"step": step, **found})
            parts.append(f"{found['ended']:.0%} of {found['replies']} replies end by themselves, "
                         f"{found['repetition']:.0%} of them is repetition")
    if (step in (0, config.save_every) or last) and config.sample_every and not fence.stop.signal:
        with fence("answers", step):
            write_answers(model, config, step)
    if parts:
        train.say(" | ".join([f"step {step:6d}", *parts]))
        with fence("curves", step):
            curves.draw([config.out_dir], Path(config.out_dir) / "curves.png")


# ----------------------------------------------------------------------------------------------------------------------
# The run


def start_model(config, device):
    """The model of config.init_from, fp32 on `device`, in train mode, with config.dropout."""
    model = load_model(config.init_from, device)
    if model.config.vocab_size != VOCAB_SIZE:
        raise UserError(f"init_from = {config.init_from} has {model.config.vocab_size:,} tokens and none for the roles of a "
                        f"conversation; it needs GPT-2's, padded to {VOCAB_SIZE:,}")
    if config.block_size > model.config.block_size:
        raise UserError(f"block_size = {config.block_size} is more than the model of init_from = {config.init_from} can see "
                        f"({model.config.block_size}); 0 takes the model's")
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = config.dropout
    model.config.dropout, model.loss_chunk_rows = config.dropout, config.loss_chunk_rows
    return model.train()


def fresh_chat_rows(model, seed):
    """Gives the chat tokens new vectors: the mean of all tokens' in use, each with a small deviation of its own.

    Pretraining never shows the rows from 50257 on as targets, and the softmax pushes all of them alike, to one vector that
    means "never". From there SFT would first have to unlearn, and the model could not tell one role from another. The
    mean's logit is below the log of the mean probability, so a new token neither wins nor is impossible at the start
    (Hewitt 2021, "Initializing new word embeddings for pretrained language models"); 0.02 is GPT-2's own initial std.
    """
    wte = model.transformer["wte"].weight
    ids = sorted([*ROLE_IDS.values(), END])
    noise = 0.02 * torch.randn(len(ids), wte.size(1), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        wte[ids] = wte[:END_OF_TEXT + 1].mean(dim=0) + noise.to(wte)


def plan_steps(config, data, widths):
    """(config with the number of steps in max_steps, the groups of all of them); epochs and max_steps both limit it."""
    per_epoch, k = len(make_groups(data, widths, config, 1)), config.groups_per_step
    limits = [-(-config.epochs * per_epoch // k)] * (config.epochs > 0) + [config.max_steps] * (config.max_steps > 0)
    config = dataclasses.replace(config, max_steps=min(limits))
    groups = make_groups(data, widths, config, -(-config.max_steps * k // per_epoch))
    return config, groups[:config.max_steps * k]


def describe(config, model, data, widths, groups):
    """Says what there is to learn from, and what is left out and why."""
    meta = read_meta(config.data_dir)
    unusable = ", ".join(f"{n:,} {reason}" for reason, n in meta["unusable"].items()) or "all usable"
    train.say(f"model     {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M weights from {config.init_from} "
              f"({model.info['kind']}, step {model.info['step']:,})")
    train.say(f"data      {meta['conversations']:,} conversations in {config.data_dir}: {unusable}; {len(data.start):,} to train "
              f"on, {data.cut:,} of them cut to {config.block_size:,} tokens; {data.dropped:,} dropped, no reply begins within "
              "that")
    train.say(f"rows      of {', '.join(map(str, widths))} tokens, {useful_share(data, widths, config):.1%} useful, the rest is "
              f"padding; {data.supervised.sum() / (data.length - 1).sum():.1%} of the useful ones are supervised")
    train.say(f"steps     {config.max_steps:,} of {config.tokens_per_step:,} tokens, "
              f"{sum(len(rows) for rows, _ in groups) / len(data.start):.2f} epochs; {config.optimizer}, peak lr {config.lr:g}")


def make_plan(config, model, data, groups, device, dtype):
    """Prints how long the run will take, measured here on two steps that are not compiled."""
    times_s, k = [], config.groups_per_step
    for step in (0, 0, 1):
        start_s = time.perf_counter()
        for rows, width, height in micro_batches(groups[step * k:(step + 1) * k], config):
            with train.autocast(device, dtype):
                loss = model.forward(*to_device(batch(data, rows, width, height), device))
            loss.backward()
            loss.item()  # waits for the device
        times_s.append(time.perf_counter() - start_s)
    memory_gb = train.memory_gb(device)
    train.say(f"time      {min(times_s):.2f} s a step, {config.max_steps * min(times_s) / 3600:.2f} hours of steps"
              + (f"; {memory_gb:.1f} GB at most, without the optimizer" if memory_gb else ""))


def to_device(arrays, device):
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cuda":  # copied while the GPU works on the one before
        return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    return [tensor.to(device) for tensor in tensors]


def keep(config, model, optimizers, scaler, step, data_print, trained_s, fence):
    """Saves everything at `step`; False, with a warning, if the disk does not let it."""
    if not all(bool(p.isfinite().all()) for p in model.parameters()):
        raise UserError(f"the weights at step {step} are not finite; the checkpoint before is kept. Go on from it with a "
                        "lower --lr")
    try:
        train.save_checkpoint(config.out_dir, {
            "step": step, "settings": dataclasses.asdict(config), "data": data_print, "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers], "scaler": scaler.state_dict(),
            "trained_s": trained_s})
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        fence.warn(step, f"no checkpoint could be written ({' '.join(str(error).split())[:120]}): make space; the one before "
                         f"is kept, training goes on and tries again in {train.RETRY_SAVE_STEPS} steps")
        return False
    with fence("writing the model folder", step):
        save_model(model, Path(config.out_dir) / "model", kind="chat", step=step)
    return True


def begin(config, model, step, device, dtype, compiled, world, fence):
    """The log's start line; at step 0 also the base model's answers, and then it becomes a chat model."""
    with fence("log"):
        save(config, Path(config.out_dir) / "config.toml")
        train.cut_log(config.out_dir, step)
        train.append_log(config.out_dir, {
            "event": "start", "step": step, "settings": dataclasses.asdict(config), "torch": torch.__version__,
            "python": sys.version.split()[0], "device": device.type, "dtype": str(dtype).removeprefix("torch."),
            "compile": compiled, "weights": sum(p.numel() for p in model.parameters()), "world": world})
    if step == 0 and model.info["kind"] == "base" and config.sample_every:
        with fence("answers", step):
            write_answers(model, config, step)


def tune(config, model, data, test, groups, device, dtype, rank, world):
    """The run from where out_dir stands to max_steps. Returns the exit code: 0, or 128 + the signal that ended it."""
    out_dir, master = Path(config.out_dir), rank == 0
    lock = train.lock_folder(out_dir) if master else None  # noqa: F841 - held until the process ends
    optimizers = train.make_optimizers(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    data_print, state, step, trained_s = fingerprint(config.data_dir, data), train.load_checkpoint(out_dir), 0, 0.0
    if state:
        step = train.resume(state, model, optimizers, scaler, config, data_print, train.FIXED | {"groups_per_step"})
        trained_s = state["trained_s"]
        del state  # as large as the model and its optimizer
    if step >= config.max_steps:
        train.say(f"{out_dir} is finished: {step:,} steps. Talk to it: python chat.py --model={out_dir}/model; train on with "
                  "larger --epochs and --max_steps; start over in another --out_dir")
        return 0
    stop = train.StopSignals()
    fence = train.Fence(out_dir, model, stop)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # a process may have no conversation of a step, and adds zeros to the others'

    def compile_all():  # each width is a graph of its own: one for all, with a flexible width, would be slower
        torch._dynamo.config.automatic_dynamic_shapes = False
        for width, height in sorted({(width, height) for _, width, height in micro_batches(groups, config)}):
            with train.autocast(device, dtype):
                model(*to_device(batch(data, [], width, height), device)).backward()
        model.zero_grad(set_to_none=False)

    compiled = train.start_compile(model, config, device, compile_all)
    train.say(f"device    {device.type}, {str(dtype).removeprefix('torch.')}; compile {compiled}")
    if master:
        begin(config, model, step, device, dtype, compiled, world, fence)
    if step == 0 and model.info["kind"] == "base":
        fresh_chat_rows(model, config.seed)
    model.info["kind"] = "chat"
    watch, power, in_a_row = train.Watch(out_dir, device), train.PowerMeter(device), 0
    saved_step, next_save, stopping = step, step + config.save_every, False
    while True:
        # ---- looking and saving: nothing here changes the training -----------------------------------------------
        stopping = stopping or (stop.signal and world == 1)
        last = step == config.max_steps
        if master and step != saved_step and (stopping or last or step >= next_save):
            saved = keep(config, model, optimizers, scaler, step, data_print, trained_s, fence)
            saved_step, next_save = (step, step + config.save_every) if saved else (saved_step, step + train.RETRY_SAVE_STEPS)
        if master and not stopping:
            look(model, step, config, test, device, dtype, fence)
        if stopping or last:
            break

        # ---- the step --------------------------------------------------------------------------------------------
        step_start_s = time.perf_counter()
        torch.manual_seed((config.seed * 2**24 + step) * 2**8 + rank)  # dropout, too, is a function of the step
        parts = micro_batches(groups[step * config.groups_per_step:(step + 1) * config.groups_per_step], config)
        # The mean is over the supervised tokens of the whole step, counted before it. A mean of each micro-batch's mean
        # would let a token of a short answer weigh more than one of a long answer.
        n_supervised = int(sum(data.supervised[rows].sum() for rows, _, _ in parts))
        loss = torch.zeros((), device=device)
        with train.autocast(device, dtype):
            for rows, width, height in parts[rank::world]:
                tokens, targets = to_device(batch(data, rows, width, height), device)
                micro_loss = model(tokens, targets) / n_supervised
                scaler.scale(micro_loss).backward()
                loss += micro_loss.detach()  # no .item(): the CPU would wait for the GPU
        wants_stop = torch.tensor(float(bool(stop.signal)), device=device)
        if world > 1:
            train.add_up([p.grad for p in model.parameters()] + [loss, wants_stop])
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        train.set_lr(optimizers, train.lr_factor(step, config))
        loss, grad_norm, stopping = loss.item(), grad_norm.item(), wants_stop.item() > 0  # the step's one wait
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
        model.zero_grad(set_to_none=False)
        step += 1

        # ---- everything from here on is only for people ----------------------------------------------------------
        step_s = time.perf_counter() - step_start_s
        trained_s += step_s
        in_a_row = 0 if finite else in_a_row + 1
        if master:
            train.report(step, loss, grad_norm, config.tokens_per_step / step_s, config, optimizers, watch, power, fence)
            if not finite:
                fence.warn(step, f"loss {loss} or gradient norm {grad_norm} is not finite: step skipped, weights unchanged")
        if in_a_row == train.BAD_STEPS_IN_A_ROW * (4 if scaler.is_enabled() else 1):  # a scaler finds its scale by failing
            if master:
                keep(config, model, optimizers, scaler, step - in_a_row, data_print, trained_s, fence)  # nothing changed since
            raise UserError(f"{in_a_row} steps in a row had a loss or gradient that is not finite. The checkpoint is from step "
                            f"{step - in_a_row}, before them: go on with a lower --lr or a longer --warmup_steps")
    return train.last_words(config, step, trained_s, stop) if master else 0


def main():
    keep_freed_memory()
    if sys.platform == "linux":  # less fragmentation; Windows' PyTorch warns that it cannot
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.set_float32_matmul_precision("high")
    config = load(Config, "sft")
    if config.show:
        prepare(config)
        return show(config)
    rank, world = train.join_processes()
    device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}" if world > 1 and torch.cuda.is_available() else config.device)
    model = start_model(config, device)
    config = dataclasses.replace(config, block_size=config.block_size or model.config.block_size)
    check_batch(config)
    train.refuse_a_crawl(config, device, sum(p.numel() for p in model.parameters()))
    if rank == 0:
        prepare(config)
    if world > 1:
        torch.distributed.barrier()
    data, test = (load_split(config.data_dir, split, config.block_size) for split in ("train", "val"))
    widths = choose_widths(data.length - 1, config.block_size)
    config, groups = plan_steps(config, data, widths)
    if rank == 0:
        describe(config, model, data, widths, groups)
    dtype, _ = pick_dtype(device, training=True, name=config.dtype)
    if config.plan:
        return make_plan(config, model, data, groups, device, dtype)
    try:
        with train.attention_order(config.attention):
            code = tune(config, model, data, test, groups, device, dtype, rank, world)
    except (RuntimeError, MemoryError) as error:
        if not train.is_out_of_memory(error):
            raise
        raise UserError(train.out_of_memory_advice(config, config.micro_batch_size, device)) from None
    if world > 1:
        torch.distributed.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    run(main)
