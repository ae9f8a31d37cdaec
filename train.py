"""Trains GPT-2 from nothing (or from a model folder) on token shards, and resumes by itself.

    python train.py                      the real thing: FineWeb-Edu in data/fineweb_edu, on one GPU
    python train.py configs/tiny         the whole story in minutes on a laptop's CPU, nothing to download
    python train.py configs/story        the run that this project repeats, setting by setting
    python train.py --plan --hours=20    what it will need, measured here, and the steps that fit; no training
    torchrun --nproc_per_node=2 train.py several GPUs: the same batches, the same result

Reads   data_dir/*.bin (prepare_fineweb.py makes them), and its own out_dir to go on where it stopped.
Writes  out_dir/: ckpt.pt and ckpt_prev.pt to resume from, model/ (a Hugging Face folder), log.jsonl,
        samples.md, curves.png, config.toml.
Takes   a day for the real thing (21 hours on the RTX 4090 of configs/story), three minutes for configs/tiny.
"""

import contextlib
import dataclasses
import datetime
import functools
import gc
import hashlib
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Literal

# first, as it explains a package that is missing
from configs import UserError, load, put_in_place, replacing, run, save, write_text

# isort: split
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import curves
import hellaswag
import prepare_fineweb
from model import (
    EMULATES_BF16,
    END_OF_TEXT,
    GPT,
    VOCAB_SIZE,
    GPTConfig,
    decode,
    encode,
    generate,
    keep_freed_memory,
    load_model,
    pick_device,
    pick_dtype,
    save_model,
    tokenizer,
    why_no_cuda,
)


@dataclasses.dataclass
class Config:
    """The types; the values and the reasons for them are in configs/train.toml."""

    data_dir: str
    source: str
    out_dir: str
    init_from: str
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    tokens_per_step: int
    micro_batch_size: int
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
    eval_tokens: int
    save_every: int
    sample_every: int
    sample_tokens: int
    sample_temperature: float
    prompts: list[str]
    hellaswag_every: int
    hellaswag_n: int
    hellaswag_source: str
    plan: bool
    hours: float


# What a checkpoint may not be resumed with: these decide what the weights are and which rows come next.
FIXED = {"init_from", "block_size", "n_layer", "n_head", "n_embd", "tokens_per_step", "optimizer", "seed"}
# beyond these it can only be a slip, and would end as some library's "out of memory"
HIGHEST = {"dropout": 1, "decay_fraction": 1, "min_lr_fraction": 1, "seed": 2**62, "max_steps": 10**8,
           "tokens_per_step": 2**31, "micro_batch_size": 2**20, "block_size": 2**20, "loss_chunk_rows": 2**31,
           "n_layer": 10**4, "n_head": 10**4, "n_embd": 10**6}
BAD_STEPS_IN_A_ROW = 5  # this many without a finite gradient, and the run is ill rather than unlucky
RETRY_SAVE_STEPS = 20  # after a save that failed
BIGGEST_ON_CPU = 50e6  # weights; 124M on a CPU takes months, so it must be asked for by name


# ------------------------------------------------------------------------------------------------------------
# Data: batches are a function of the step number


class Rows:
    """The rows of a split: row i of a shard is tokens[i*T : i*T + T + 1], numbered across all shards.

    Neighbours share one token, the last target of one and the first input of the next, so every token but
    the first of a shard is a target once per epoch. `dropped_tokens` counts those past the last row.
    """

    def __init__(self, data_dir, split, block_size):
        self.block_size = block_size
        self.paths = prepare_fineweb.shards(data_dir, split)
        self.tokens = [prepare_fineweb.read_shard(path) for path in self.paths]
        counts = [max(0, (len(tokens) - 1) // block_size) for tokens in self.tokens]
        self.first = np.cumsum([0, *counts])  # the number of each shard's first row
        self.dropped_tokens = sum(max(0, len(tokens) - 1) for tokens in self.tokens) - len(self) * block_size
        if not len(self):
            raise UserError(f"{data_dir}: its {split} shards are shorter than one row of block_size = "
                            f"{block_size} tokens" + "; --eval_every=0 does without" * (split == "val"))

    def __len__(self):
        return int(self.first[-1])

    def read(self, rows):
        """(len(rows), T + 1) ids as int64; UserError naming the shard if one is out of range."""
        out = np.empty((len(rows), self.block_size + 1), dtype=np.int64)  # torch's embedding takes no uint16
        for i, row in enumerate(rows):
            shard = int(np.searchsorted(self.first, row, side="right")) - 1
            start = int(row - self.first[shard]) * self.block_size
            out[i] = self.tokens[shard][start:start + self.block_size + 1]
            check_ids(self.paths[shard], out[i])
        return out

    def fingerprint(self):
        """A text that changes with the rows, and with it their order: a checkpoint belongs to it."""
        meta = self.paths[0].parent / "meta.json"
        sizes = json.dumps([(path.name, len(tokens)) for path, tokens in zip(self.paths, self.tokens)])
        return hashlib.sha256(sizes.encode() + (meta.read_bytes() if meta.exists() else b"")).hexdigest()


def check_ids(path, tokens):
    """Raises UserError if there are ids in a shard that the model has no row for: a GPU would just stop."""
    if len(tokens) and tokens.max() >= VOCAB_SIZE:
        raise UserError(f"{path} holds the id {tokens.max()}, but GPT-2's vocabulary ends before "
                        f"{VOCAB_SIZE}: it was made with another tokenizer, or is damaged")


def open_data(config, rank=0, world=1):
    """(training rows, validation rows); a missing tiny world is made first, anything else is asked for."""
    if config.source and rank == 0:
        has_meta = (Path(config.data_dir) / "meta.json").exists()
        meta = prepare_fineweb.read_meta(config.data_dir) if has_meta else {}
        if meta.get("kind") == "conversations":
            raise UserError(f"data_dir = {config.data_dir} holds the conversations of sft.py, which train.py "
                            "does not prepare; choose another --data_dir")
        if not meta.get("complete") or not all(
                prepare_fineweb.is_whole(config.data_dir, shard) for shard in meta.get("shards", [])):
            prepare_fineweb.prepare(load(prepare_fineweb.Config, "prepare_fineweb", [
                f"--source={config.source}", f"--out_dir={config.data_dir}"]))
        elif not prepare_fineweb.is_same_source(meta["source"], config.source):
            raise UserError(f"data_dir = {config.data_dir} was made from {meta['source']!r}, not from "
                            f"source = {config.source!r}: --source= (empty) trains on it as it is, and "
                            "another --data_dir is prepared anew")
        elif config.source == "tiny" and not prepare_fineweb.is_todays_world(meta):  # no reason not to go on
            say(f"world     configs/tiny/world.py has changed since {config.data_dir} was made of it; delete "
                f"{config.data_dir} to train on what it says now")
    wait_for_all(world)  # the others wait for the data
    rows = Rows(config.data_dir, "train", config.block_size)
    return rows, Rows(config.data_dir, "val", config.block_size) if config.eval_every else None


@functools.lru_cache(maxsize=2)
def permutation(seed, epoch, n_rows):
    return np.random.default_rng((seed, epoch)).permutation(n_rows)


def rows_of_step(step, n_rows, rows_per_step, seed):
    """The numbers of the rows of one step: all rows shuffled per epoch, and a step may span two epochs."""
    places = np.arange(step * rows_per_step, (step + 1) * rows_per_step)
    return np.concatenate([permutation(seed, int(epoch), n_rows)[places[places // n_rows == epoch] % n_rows]
                           for epoch in np.unique(places // n_rows)])


def micro_batches(rows, numbers, micro_batch_size, device):
    """Yields (tokens, targets), each (micro_batch_size, T): the targets are the tokens one place later."""
    for start in range(0, len(numbers), micro_batch_size):
        block = torch.from_numpy(rows.read(numbers[start:start + micro_batch_size]))
        if device.type == "cuda":
            block = block.pin_memory()  # so that it is copied while the GPU works on the one before
        block = block.to(device, non_blocking=True)
        yield block[:, :-1], block[:, 1:]


def check_bounds(config, at_least_1):
    """Raises UserError for a number that is negative, or 0 although in `at_least_1`, or above HIGHEST."""
    for name, value in dataclasses.asdict(config).items():
        low, high = int(name in at_least_1), HIGHEST.get(name, math.inf)
        if isinstance(value, (int, float)) and not low <= value <= high:
            most = f" and at most {high}" if name in HIGHEST else ""
            raise UserError(f"{name} = {value} must be at least {low}{most}")


def check_folders(config):
    """Raises UserError if the run would share its folder with the data."""
    if config.out_dir and Path(config.out_dir).resolve() == Path(config.data_dir).resolve():
        raise UserError(f"out_dir = {config.out_dir} is data_dir, too; a run needs a folder of its own")


def check_batch(config, world=1):
    """(rows per step of one process, rows per micro-batch); UserError for what cannot be, with what can."""
    check_folders(config)
    check_bounds(config, {"tokens_per_step", "micro_batch_size", "block_size", "n_layer", "n_head", "n_embd",
                          "max_steps", "log_every"})
    if config.hours and not config.plan:
        raise UserError(f"hours = {config.hours:g} goes with --plan, which prints the max_steps that fit")
    unit = config.micro_batch_size * config.block_size
    if config.tokens_per_step % unit:
        raise UserError(f"tokens_per_step ({config.tokens_per_step:,}) must be a multiple of "
                        f"micro_batch_size x block_size ({config.micro_batch_size} x {config.block_size:,} = "
                        f"{unit:,}); the nearest is "
                        f"tokens_per_step = {max(1, round(config.tokens_per_step / unit)) * unit}")
    rows = config.tokens_per_step // config.block_size
    if rows % world:
        raise UserError(f"{world} processes cannot share the {rows} rows of a step equally; use a number "
                        "that divides it")
    share = rows // world
    return share, max(n for n in range(1, min(share, config.micro_batch_size) + 1) if share % n == 0)


# ------------------------------------------------------------------------------------------------------------
# Learning rate and optimizers


def lr_factor(step, config):
    """The learning rate of step 0, 1, ... as a share of its peak: a function of the step, without state.

    Warm-up is linear. "linear" then stays at 1 and falls to min_lr_fraction over the last decay_fraction of
    the steps (0: it stays constant). "cosine" falls all the way from the end of the warm-up, as GPT-3's did.
    As nothing is remembered, a checkpoint of a constant run can be extended (a larger max_steps) or cooled
    down (max_steps and decay_fraction such that the decay begins there).
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps  # never 0: the first step would be wasted
    if config.schedule == "cosine":
        done = min(1.0, (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps))
        shape = 0.5 * (1 + math.cos(math.pi * done))
    else:
        decay_steps = config.decay_fraction * config.max_steps
        shape = min(1.0, max(0.0, config.max_steps - step) / decay_steps) if decay_steps > 0 else 1.0
    return config.min_lr_fraction + (1 - config.min_lr_fraction) * shape


def make_optimizers(model, config):
    """[AdamW] or [Muon, AdamW], with the peak rate of each group under "peak_lr".

    AdamW decays the matrices only: a gain or bias pulled towards zero would be a different network. Muon has
    the hidden matrices; the embeddings, looked up and not multiplied, stay with AdamW, undecayed.
    """
    hidden, embeddings, vectors = [], [], []
    for name, p in model.named_parameters():
        (vectors if p.ndim < 2 else hidden if is_hidden(name, p) else embeddings).append(p)
    adamw = functools.partial(torch.optim.AdamW, lr=config.lr, betas=(0.9, 0.95), fused=True)
    if config.optimizer == "muon":
        optimizers = [Muon(hidden, config.muon_lr, config.weight_decay, model.config.n_embd),
                      adamw(embeddings + vectors, weight_decay=0.0)]
    else:
        optimizers = [adamw([{"params": hidden + embeddings, "weight_decay": config.weight_decay},
                             {"params": vectors, "weight_decay": 0.0}])]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


def is_hidden(name, p):
    return p.ndim == 2 and ".h." in name


def set_lr(optimizers, factor):
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["peak_lr"] * factor


class Muon(torch.optim.Optimizer):
    """Momentum whose every update is made orthogonal (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    A gradient matrix has a few strong directions and many weak ones; this steps equally far in all of them,
    times 0.2 sqrt(max(rows, columns)), which makes a step AdamW's size (arXiv 2502.16982), so learning rates
    carry over. torch.optim.Muon computes the same for one matrix; here attention's fused query, key and value
    count as the three matrices that they are, and matrices of one shape go through together.
    """

    def __init__(self, params, lr, weight_decay, n_embd, momentum=0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.n_embd = n_embd

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}  # (rows, columns) -> [(part of a weight, its update), ...]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(state["momentum"], group["momentum"])  # Nesterov: look one step ahead
                size = self.n_embd if p.shape == (3 * self.n_embd, self.n_embd) else len(p)
                for part, part_update in zip(p.split(size), update.split(size)):
                    shapes.setdefault(part.shape, []).append((part, part_update))
            for shape, pairs in shapes.items():
                updates = orthogonalize(torch.stack([update for _, update in pairs]))
                for (part, _), update in zip(pairs, updates):
                    part.mul_(1 - group["lr"] * group["weight_decay"])
                    part.sub_(update, alpha=group["lr"] * 0.2 * max(shape) ** 0.5)


def orthogonalize(matrices, steps=5):
    """The nearest matrices (n, rows, columns) with all singular values near 1: Newton-Schulz in bf16, with
    the Muon post's constants, which push small singular values up fast and leave them in about 0.7 to 1.2.
    In fp32 where a CPU must emulate bf16: a step of configs/tiny takes 0.37 of the time there."""
    x = matrices if matrices.is_cpu and EMULATES_BF16 else matrices.bfloat16()
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).to(matrices.dtype)


# ------------------------------------------------------------------------------------------------------------
# The run's folder: log and checkpoint


def say(text):
    """print() that survives a closed terminal, as the run must. Of several processes one speaks."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # or in another print
        if os.environ.get("RANK", "0") == "0":
            print(text, flush=True)


def append_log(out_dir, row):
    """Adds one line to log.jsonl. JSON has no NaN, so what is not finite is written as null."""
    row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    with open(Path(out_dir) / "log.jsonl", "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def cut_log(out_dir, step):
    """Takes out of log.jsonl what a run resumed at `step` does again: later steps, and this one's look, which
    an extended run does only if it is due: its log is that of a run that was planned so long."""
    path, kept = Path(out_dir) / "log.jsonl", []
    for row in curves.read_log(path) if path.exists() else []:  # without the line that a crash cut short
        at = row["step"] if isinstance(row.get("step"), int) else math.inf  # a foreign line goes
        done = at < step or (at == step and {"loss", "warning"} & set(row))
        if row.get("event") == "start" or (done and "event" not in row):
            kept.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_text(path, "".join(kept))


def save_checkpoint(out_dir, state):
    """Writes ckpt.pt; the one before becomes ckpt_prev.pt; a crash leaves at least one whole."""
    with replacing(Path(out_dir) / "ckpt.pt", keep=Path(out_dir) / "ckpt_prev.pt") as file:
        torch.save(state, file)


def load_checkpoint(out_dir):
    """The newest checkpoint that can be read, on the CPU, or None where there is none; says what is damaged.

    Raises UserError if there are checkpoints but none is readable: starting over would overwrite them.
    """
    paths = [path for path in (Path(out_dir) / "ckpt.pt", Path(out_dir) / "ckpt_prev.pt") if path.exists()]
    for path in paths:
        try:
            with zipfile.ZipFile(path) as file:  # closed, or Windows could not rename it below
                damaged = file.testzip()  # torch does not compare its checksums
            if damaged:
                raise ValueError(f"{damaged} has changed on the disk")
            state = torch.load(path, map_location="cpu", weights_only=True)
            if {"step", "settings", "origins", "model", "optimizers"} <= set(state):
                return state
            problem = "it is no checkpoint of a run"
        except Exception as error:  # zip, pickle, end of file, disk: whatever the damage makes torch raise
            if isinstance(error, PermissionError) or is_out_of_memory(error):  # no fault of the file's
                raise UserError(f"{path} cannot be read now: {str(error) or 'out of memory'}") from None
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        say(f"warning: {path} is damaged ({problem})")
        if path != paths[-1]:
            with contextlib.suppress(OSError):  # the next save must not put it in the place of the good one
                put_in_place(path, path.with_name("ckpt_damaged.pt"))
    if paths:
        raise UserError(f"no checkpoint in {out_dir} can be read; move them away to start over, or "
                        "choose another --out_dir=")
    return None


class Checkpoints:
    """Saves a run when it is due, and takes it up where it stood.

    origins  {setting: fingerprint of what it names}: a checkpoint belongs to them
    kind     of model, for its folder
    fixed    the settings that may not change on resume
    """

    def __init__(self, config, model, optimizers, scaler, origins, fence, kind="base", fixed=FIXED):
        self.config, self.model, self.optimizers, self.scaler = config, model, optimizers, scaler
        self.origins, self.fence, self.kind, self.fixed = origins, fence, kind, fixed
        self.folder = Path(config.out_dir) / "model"
        self.saved_step = 0
        self.next_step = self.after(0)

    def after(self, step):
        return step + (self.config.save_every or math.inf)

    def resume(self):
        """(step, seconds of training so far) after putting the newest checkpoint, if any, into the run.

        Lists the settings that changed since. Raises UserError if one in `fixed` did, or one of `origins`, or
        if there is a model and no checkpoint: a new run would write over it.
        """
        state, config = load_checkpoint(self.config.out_dir), self.config
        if state is None and self.folder.is_dir():
            raise UserError(f"{config.out_dir} holds a model and no checkpoint to go on from, and a new run "
                            "would write over it: choose another --out_dir=, or move it away")
        if state is None:
            return 0, 0.0
        old, new = state["settings"], dataclasses.asdict(config)
        changed = {name: f"{name}: {old[name]!r} -> {new[name]!r}" for name in new
                   if name in old and old[name] != new[name] and name not in ("plan", "hours")}
        refused = "; ".join(changed[name] for name in changed if name in self.fixed)
        if refused:
            raise UserError(f"{config.out_dir} holds a run with other settings, which a checkpoint cannot "
                            f"change: {refused}. Go on with the old values, or start over in another "
                            "--out_dir=")
        for name, fingerprint in self.origins.items():
            if state["origins"].get(name) != fingerprint:
                raise UserError(f"{name} = {getattr(config, name)} is not what {config.out_dir} began with: "
                                "its files have changed, and the checkpoint depends on them; put them back, "
                                "or choose another --out_dir=")
        try:
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"]):
                groups = optimizer.state_dict()["param_groups"]  # rates and decay come from the settings
                optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"the checkpoint in {config.out_dir} is of another network "
                            f"({' '.join(str(error).split())[:150]}): has model.py been changed since? "
                            "Choose another --out_dir=") from None
        if state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        say(f"goes on    at step {state['step']:,} of {config.out_dir}; to start over, delete it or choose "
            "another --out_dir=")
        if changed:
            effect = "but the run is finished" if self.is_finished(state["step"]) else "and applied"
            say(f"changed   since the checkpoint, {effect}: " + "; ".join(changed.values()))
        self.saved_step, self.next_step = state["step"], self.after(state["step"])
        return state["step"], state.get("trained_s", 0.0)

    def is_finished(self, step):
        """Whether the last step was done, saved and looked at; a kill can come between."""
        with contextlib.suppress(UserError):
            return step > self.config.max_steps or (
                step == self.config.max_steps and (self.folder / "model.safetensors").exists()
                and any(row.get("event") == "end" for row in curves.read_log(self.config.out_dir)))
        return False

    def save_if_due(self, step, trained_s, last):
        """Saves every save_every steps and at the `last`; sooner again after a save that failed."""
        if step == self.saved_step or not (last or step >= self.next_step):
            return
        if self.save(step, trained_s):
            self.saved_step, self.next_step = step, self.after(step)
        elif last:
            before = f"step {self.saved_step}" if self.saved_step else "the beginning"
            raise UserError(f"step {step} is not saved: make space; the same command goes on from {before}")
        else:
            self.next_step = min(self.after(step), step + RETRY_SAVE_STEPS)

    def save(self, step, trained_s):
        """Saves checkpoint and model folder at `step`; False, with a warning, if the disk does not let it."""
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise UserError(f"the weights at step {step} are not finite; go on from the checkpoint before, "
                            "with a lower --lr")
        try:
            save_checkpoint(self.config.out_dir, {
                "step": step, "settings": dataclasses.asdict(self.config), "origins": self.origins,
                "model": self.model.state_dict(), "scaler": self.scaler.state_dict(), "trained_s": trained_s,
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]})
        except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
            self.fence.warn(step, f"no checkpoint could be written ({' '.join(str(error).split())[:120]}): "
                                  "make space. What was saved before is kept; the next attempt comes soon")
            return False
        self.write_model(step)
        return True

    def write_model(self, step):
        """Rewrites out_dir/model. A failure is said each time, as sft.py and chat.py would take the old; at
        the last step it is a UserError: that model is what the run was for."""
        try:
            save_model(self.model, self.folder, kind=self.kind, step=step)
        except Exception as error:  # safetensors has its own class; on Windows a chat may hold the file
            problem = f"{self.folder} is not rewritten: {' '.join(str(error).split())[:120]}"
            if step >= self.config.max_steps:
                raise UserError(f"{problem}; the training is saved, and the same command writes it, once it "
                                "can") from None
            self.fence.warn(step, problem)

    def stop_if_ill(self, bad_in_a_row, step, trained_s, master):
        """Raises UserError after too many steps without a finite gradient, and saves the step before them."""
        # a scaler finds its scale by failing
        if bad_in_a_row < BAD_STEPS_IN_A_ROW * (4 if self.scaler.is_enabled() else 1):
            return
        good = step - bad_in_a_row  # nothing has changed since
        is_saved = master and self.save(good, trained_s)
        raise UserError(f"{bad_in_a_row} steps in a row had a loss or gradient that is not finite. "
                        + f"The checkpoint is from step {good}, before them. " * is_saved
                        + "Go on with a lower --lr or a longer --warmup_steps")


# ------------------------------------------------------------------------------------------------------------
# What may go wrong beside the training, and what may stop it


def is_alone():
    """Whether this is the only process of the run; torchrun tells each of its own how many there are."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


class StopSignals:
    """Ctrl-C, SIGTERM and a closed console ask the run to finish its step and save; a second leaves at once.

    `signal` is the number of the one that came, or 0. `hurry` is set when the system will soon kill us.
    `raises` is set while something runs that can be broken off: start-up, an evaluation.
    """

    def __init__(self):
        self.signal, self.hurry, self.raises, self.came_s = 0, False, False, 0.0
        for name in ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.handle)
        if os.name == "nt":
            self.watch_console()

    def handle(self, number, frame=None):
        repeated_s, alone = time.monotonic() - self.came_s, is_alone()
        closed = number == getattr(signal, "SIGHUP", None)  # a closing terminal may send it twice
        self.hurry = alone and (self.hurry or closed)
        # torchrun repeats what was sent to all; and who closes the window after Ctrl-C still wants the save
        if self.signal and not closed and not self.hurry and (alone or repeated_s > 3):
            os._exit(128 + number)
        if self.signal:
            return
        self.signal, self.came_s = number, time.monotonic()
        say("\nstopping at the next safe moment (once more leaves at once)")
        if self.raises:
            raise KeyboardInterrupt

    def watch_console(self):
        """Windows ends a process about 5 s after its console is closed, or when this handler returns."""
        import _thread
        import ctypes

        @ctypes.WINFUNCTYPE(ctypes.c_int, ctypes.c_uint)
        def on_event(event):
            if event not in (2, 5, 6):  # closed, logged off, shut down; Ctrl-C comes as a signal
                return 0
            self.hurry = is_alone()
            _thread.interrupt_main(signal.SIGTERM)
            time.sleep(30)  # the main thread saves meanwhile
            return 1

        self.on_event = on_event  # Windows holds no reference
        ctypes.windll.kernel32.SetConsoleCtrlHandler(on_event, 1)


class Fence:
    """`with fence("samples"):` what goes wrong inside is reported once, and training goes on in train mode.

    Nothing inside can change the training: its random numbers are a function of the step, like its batches.
    A stop breaks off what is inside, unless it is not `breakable`.
    """

    def __init__(self, out_dir, model, stop):
        self.out_dir, self.model, self.stop, self.reported = out_dir, model, stop, set()
        self.pause_ends_s = {}

    def is_paused(self, what):
        """Whether `what` failed so slowly (a host that hangs) that it is too early to try it again."""
        return time.monotonic() < self.pause_ends_s.get(what, 0)

    @contextlib.contextmanager
    def __call__(self, what, step=0, breakable=True):
        start_s = time.monotonic()
        try:
            self.stop.raises = breakable
            yield
            self.stop.raises = False
        except KeyboardInterrupt:
            pass  # the stop is remembered in self.stop
        except (Exception, SystemExit) as error:
            self.stop.raises = False
            failed_after_s = time.monotonic() - start_s
            if failed_after_s > 5:
                self.pause_ends_s[what] = time.monotonic() + 20 * failed_after_s
            if what not in self.reported:
                self.reported.add(what)
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                self.warn(step, f"{what} failed, training goes on without: {reason}")
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        finally:
            self.stop.raises = False
            self.model.train()

    def warn(self, step, text):
        say(f"warning: {text}")
        with contextlib.suppress(OSError):
            append_log(self.out_dir, {"step": step, "warning": text})


class PowerMeter:
    """The GPU's power draw in watts, from the driver's nvidia-smi, read every 10 s in a thread."""

    def __init__(self, device):
        self.watts = None
        if device.type == "cuda" and shutil.which("nvidia-smi"):
            threading.Thread(target=self.read, args=(device,), daemon=True).start()

    def read(self, device):
        with contextlib.suppress(Exception):  # old drivers and virtual GPUs have many ways to say no
            gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # its number may differ from torch's
            command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
            while True:
                done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
                self.watts = float(done.stdout)
                time.sleep(10)
        self.watts = None  # it stopped answering: claim nothing from here on


class Watch:
    """Notices what a person would: a loss that jumps, a speed that halves, a GPU that spills."""

    def __init__(self, out_dir, device):
        self.losses, self.rates, self.device, self.told = [], [], device, set()
        with contextlib.suppress(UserError):
            losses = [row.get("loss") for row in curves.read_log(out_dir)]
            self.losses = [loss for loss in losses if isinstance(loss, float)][-50:]

    def remarks(self, loss, tok_per_s):
        """The warnings that this step gives rise to; about speed and memory once in a run."""
        usual = statistics.median(self.losses) if len(self.losses) >= 20 else math.inf
        self.losses = [*self.losses, loss][-50:] if math.isfinite(loss) else self.losses
        self.rates = [*self.rates, tok_per_s][-60:]
        before, now = statistics.median(self.rates[:-10] or [0]), statistics.median(self.rates[-10:])
        used = memory_share(self.device) if len(self.rates) == 3 else 0.0
        found = {
            "loss": loss > usual + 1 and f"loss {loss:.2f} jumped above {usual:.2f}, the median of the steps "
            "before; it usually comes back by itself, else the learning rate is too high",
            "speed": len(self.rates) >= 20 and now < before / 2 and f"{now:,.0f} tokens/s is less than half "
            "of what it was: another program on the GPU, a laptop on battery, or (Windows) GPU memory "
            "spilling into the system's",
            "memory": used > 0.92 and f"{used:.0%} of the GPU's memory is in use; on Windows the driver then "
            "uses the system's, ten times slower, instead of failing. A smaller --micro_batch_size is safe "
            "and changes no result"}
        new = [name for name, text in found.items() if text and name not in self.told]
        self.told |= {*new} - {"loss"}
        return [found[name] for name in new]

    def time_left(self, steps, tokens_per_step):
        s = steps * tokens_per_step / statistics.median(self.rates)
        return f"{s // 3600:.0f} h {s % 3600 // 60:02.0f} min" if s >= 60 else f"{s:.0f} s"


# ------------------------------------------------------------------------------------------------------------
# Device, compiler, several processes


def start_process(config):
    """(device, rank, world size); torchrun's processes find each other, one alone initialises nothing."""
    keep_freed_memory()
    if sys.platform == "linux":  # less fragmentation; Windows' PyTorch warns that it cannot
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.set_float32_matmul_precision("high")
    device, world = pick_device(config.device), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return device, 0, 1
    if device.type == "cuda":
        device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    hour = datetime.timedelta(hours=1)  # the others wait while rank 0 evaluates
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=hour)
    return device, torch.distributed.get_rank(), world


def add_up(tensors):
    """Sums each tensor over all processes, in place; in training the only place where they talk."""
    with if_another_ends():
        for work in [torch.distributed.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


def wait_for_all(world):
    """Returns when every process has come here."""
    if world > 1:
        with if_another_ends():
            torch.distributed.barrier()


@contextlib.contextmanager
def if_another_ends():
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"another of the processes has ended, and says why "
                        f"({str(error).splitlines()[0][:100]})") from None


def agree_on_step(step, device, world):
    """Raises UserError if the processes found different checkpoints. It is also where they wait."""
    total = torch.tensor(float(step), device=device)
    add_up([total])
    if total.item() != step * world:
        raise UserError("the processes see different checkpoints: out_dir must be on a disk that all of "
                        "them share")


def autocast(device, dtype):
    """Matrix products in `dtype`, weights and sums in fp32."""
    return torch.autocast(device.type, dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()


KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
           "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


def attention_order(name):
    """A context that sets which attention kernels are tried, in which order. PyTorch's own order puts cuDNN's
    last, after two slow ones; its Windows wheels have no FlashAttention, so there cuDNN's is the fast one."""
    order = list(KERNELS.values()) if name == "auto" else [KERNELS[name], SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def attention_used(device, dtype, config, sizes):
    """The kernel that attention will run in training, asked of PyTorch; UserError if another one was set."""
    usable = ["flash"] if device.type == "cpu" else []
    if device.type == "cuda":
        ask, head = torch.backends.cuda, sizes.n_embd // sizes.n_head
        q = torch.empty(1, sizes.n_head, config.block_size, head, device=device, dtype=dtype)
        params = ask.SDPAParams(q, q, q, None, config.dropout, True, False)
        usable = [name for name in ("flash", "cudnn", "efficient")
                  if getattr(ask, f"can_use_{name}_attention")(params)]
    if config.attention not in ("auto", "math", *usable):
        raise UserError(f"attention = {config.attention} cannot be used on this {device.type} in {dtype}; "
                        f"auto takes the fastest of {', '.join([*usable, 'math'])}")
    return config.attention if config.attention != "auto" else [*usable, "math"][0]


def start_compile(model, config, device, one_step):
    """Compiles the model in place if the setting and the machine allow it; returns what happened, for people.

    one_step  runs a forward and backward pass, because compiling is lazy: what is missing shows only then

    model.forward(x) stays the eager call, for HellaSwag's many shapes. UserError if compile = true cannot be.
    """
    if config.compile is False or (config.compile == "auto" and device.type != "cuda"):
        return "off"
    start_s = time.perf_counter()
    try:
        model.compile()
        one_step()
        return f"on ({time.perf_counter() - start_s:.0f} s)"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        model._compiled_call_impl = None  # back to eager: there is no public way to undo compile()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        fix = "pip install 'triton-windows<3.8'" if os.name == "nt" else (
            "install a C compiler (gcc) and PyTorch's triton")
        if config.compile is True:
            raise UserError(f"compile = true, but the model cannot be compiled: {reason}; {fix}, or "
                            "--compile=false") from None
        return f"off, which costs about half the speed on a GPU: {reason}; {fix}"


def is_out_of_memory(error):
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        text in str(error) for text in ("out of memory", "can't allocate memory", "not enough memory",
                                        "ALLOC_FAILED"))


def out_of_memory_advice(config, micro, device):
    """One line: what was used, and the one change that helps without changing the result."""
    where = f"out of memory with micro_batch_size = {micro}"
    if device.type == "cuda":
        total_gb = torch.cuda.get_device_properties(device).total_memory / 1e9
        where += f", peak {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB of {total_gb:.1f}"
    if micro > 1:
        smaller = max(n for n in range(1, micro // 2 + 1) if micro % n == 0)
        return (f"{where}; --micro_batch_size={smaller} needs less, and as tokens_per_step stays, "
                "so does the result")
    if not config.loss_chunk_rows:
        return f"{where}; --loss_chunk_rows=512 keeps the logits small without changing the result"
    return f"{where}; the model does not fit: lower block_size or n_layer, or close other programs on the GPU"


def memory_gb(device):
    """Peak memory so far in GB: the GPU's, or without one the process's; None where it cannot be read."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)


def memory_share(device):
    """How much of the GPU's memory is taken; 0.0 without a GPU."""
    if device.type != "cuda":
        return 0.0
    return torch.cuda.max_memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory


def keep_awake():
    """Keeps Windows from sleeping while this process lives; elsewhere returns how to."""
    if os.name == "nt":
        import ctypes
        ctypes.windll.kernel32.SetThreadExecutionState(0x80000001)  # ES_CONTINUOUS | ES_SYSTEM_REQUIRED
        return "Windows does not sleep while this runs"
    program = "caffeinate -i" if sys.platform == "darwin" else "systemd-inhibit --what=sleep"
    return f"a machine that falls asleep stops training; {program} python train.py ... prevents it"


# ------------------------------------------------------------------------------------------------------------
# Looking at the model while it trains


@torch.no_grad()
def validation_loss(model, rows, config, micro, device, dtype):
    """Mean loss in nats per token over the first eval_tokens of the validation rows, the same every time."""
    n = min(len(rows), max(1, config.eval_tokens // config.block_size))
    total = torch.zeros((), device=device)
    model.eval()
    for tokens, targets in micro_batches(rows, np.arange(n), micro, device):
        short = micro - len(tokens)
        if short:  # filled up with targets that do not count: one shape, one compiled graph
            tokens = torch.cat([tokens, tokens[:1].expand(short, -1)])
            targets = torch.cat([targets, torch.full_like(targets[:1], -1).expand(short, -1)])
        with autocast(device, dtype):
            total += model(tokens, targets)
    return total.item() / (n * config.block_size)


def write_samples(model, config, step):
    """Continues each prompt, adds them to the log, and rewrites samples.md from it, prompt by prompt."""
    model.eval()
    for prompt in config.prompts:
        ids = generate(model, [END_OF_TEXT, *encode(prompt)], config.sample_tokens, top_k=50,
                       temperature=config.sample_temperature, seed=config.seed)
        append_log(config.out_dir, {"step": step, "prompt": prompt, "sample": decode(ids)})
    text, log = "# What the model writes, as it learns\n", curves.read_log(config.out_dir)
    for prompt in config.prompts:
        text += f"\n## {prompt}\n"
        for row in log:
            if row.get("prompt") == prompt:
                quoted = (prompt + row["sample"]).strip().replace("\n", "\n> ")
                text += f"\n**step {row['step']:,}**\n\n> {quoted}\n"
    write_text(Path(config.out_dir) / "samples.md", text)


def score_hellaswag(model, config, step, tokens_seen):
    """HellaSwag's normalised accuracy, logged; it never holds more tokens than a step's micro-batch."""
    items, _ = hellaswag.load_items(config.hellaswag_source)
    max_tokens = config.micro_batch_size * config.block_size
    score = hellaswag.evaluate(model, items, n=config.hellaswag_n, max_tokens=max_tokens)
    append_log(config.out_dir, {"step": step, "tokens": tokens_seen, "hellaswag": score["acc"],
                                "hellaswag_norm": score["acc_norm"], "n": score["n"]})
    return score["acc_norm"]


def look(model, step, config, rows, micro, device, dtype, fence):
    """Everything that looks at the model at `step` and cannot stop or change the training."""
    last, tokens_seen = step == config.max_steps, step * config.tokens_per_step
    val_loss = score = None

    def due(every):
        return every > 0 and (last or step % every == 0) and not fence.stop.signal

    if step == 0 and not config.init_from:  # it knows nothing: loss ln V, score chance, text noise
        if config.hellaswag_every:
            with fence("HellaSwag", step):
                hellaswag.load_items(config.hellaswag_source)  # what is missing is better known now
        return
    if due(config.eval_every):
        with fence("validation", step):
            val_loss = validation_loss(model, rows, config, micro, device, dtype)
            append_log(config.out_dir, {"step": step, "tokens": tokens_seen, "val_loss": val_loss})
    if due(config.hellaswag_every) and not fence.is_paused("HellaSwag"):
        with fence("HellaSwag", step):
            score = score_hellaswag(model, config, step, tokens_seen)
    if due(config.sample_every):
        with fence("samples", step):
            write_samples(model, config, step)
    if val_loss is None and score is None:
        return
    with fence("curves", step):
        parts = [f"val loss {val_loss:.4f}"] if val_loss is not None else []
        parts += [f"HellaSwag {score:.1%}"] if score is not None else []
        if curves.comparable(curves.read_log(config.out_dir)):
            parts += [curves.on_track(tokens_seen, val_loss, score)]
        say(" | ".join([f"step {step:6d}", *filter(None, parts)]))
        if step:  # a picture of one point would only delay the first step
            curves.draw([config.out_dir], Path(config.out_dir) / "curves.png")


def report(step, loss, grad_norm, step_s, config, optimizers, watch, power, fence):
    """One aligned line on the screen and one in the log, after what is worth a warning."""
    tok_per_s = config.tokens_per_step / step_s
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        fence.warn(step, f"loss {loss} or gradient norm {grad_norm} is not finite: step skipped, weights "
                         "unchanged")
    with fence("watching", step, breakable=False):
        for text in watch.remarks(loss, tok_per_s):
            fence.warn(step, text)
    if step % config.log_every and step != config.max_steps:
        return
    with fence("log", step, breakable=False):
        lr, mem_gb = optimizers[-1].param_groups[0]["lr"], memory_gb(watch.device)
        say(f"step {step:6d}/{config.max_steps} | loss {loss:7.4f} | lr {lr:.2e} | norm {grad_norm:7.3f} | "
            f"{tok_per_s:9,.0f} tok/s | " + (f"{mem_gb:5.1f} GB | " if mem_gb is not None else "")
            + f"{watch.time_left(config.max_steps - step, config.tokens_per_step)} left")
        append_log(config.out_dir, {
            "step": step, "tokens": step * config.tokens_per_step, "loss": loss, "lr": lr,
            "grad_norm": grad_norm, "tok_per_s": round(tok_per_s), "mem_gb": mem_gb,
            **({"power_w": power.watts} if power.watts is not None else {})})


# ------------------------------------------------------------------------------------------------------------
# Before the run, and after it


def start_model(config, device):
    """The network to train, fp32 on `device`: random by config.seed, or the weights of config.init_from."""
    torch.manual_seed(config.seed)
    sizes = GPTConfig(config.block_size, config.n_layer, config.n_head, config.n_embd, config.dropout)
    model = load_model(config.init_from, device) if config.init_from else GPT(sizes).to(device)
    differ = [f"{name} = {getattr(model.config, name)}"
              for name in ("n_layer", "n_head", "n_embd", "vocab_size")
              if getattr(model.config, name) != getattr(sizes, name)]
    if differ or model.config.block_size < config.block_size:
        raise UserError(f"init_from = {config.init_from} has {', '.join([*differ, ''])}block_size up to "
                        f"{model.config.block_size}; give the same with --key=value")
    model.set_dropout(config.dropout)
    model.loss_chunk_rows = config.loss_chunk_rows
    return model.train()


def refuse_a_crawl(config, device, n_weights):
    """Raises UserError when a full-size model would be trained on a CPU without having been asked for."""
    if device.type == "cpu" and config.device == "auto" and n_weights > BIGGEST_ON_CPU and not config.plan:
        raise UserError(f"there is no GPU to train {n_weights / 1e6:.0f}M weights on, and a CPU would take "
                        f"months: {why_no_cuda()}. `python train.py configs/tiny` trains a small model here "
                        "in minutes; --device=cpu insists")


def disk_line(config, model):
    """What the run will write: two checkpoints and one being written, and the model folder with its own."""
    out_dir = Path(config.out_dir).resolve()
    free = shutil.disk_usage(next(path for path in [out_dir, *out_dir.parents] if path.exists())).free / 1e9
    # a checkpoint holds each weight with its moments: AdamW has two of them, Muon one
    checkpoint = sum(p.numel() * (2 if config.optimizer == "muon" and is_hidden(name, p) else 3)
                     for name, p in model.named_parameters())
    here = [out_dir / name for name in ("ckpt.pt", "ckpt_prev.pt", "model/model.safetensors")]
    need = 4 * (3 * checkpoint + 2 * sum(p.numel() for p in model.parameters())) / 1e9
    need = max(0, need - sum(path.stat().st_size for path in here if path.exists()) / 1e9)
    lack = "; TOO LITTLE: make space before the first save, or choose another --out_dir="
    return f"{need:.1f} GB more needed in {config.out_dir}, {free:.1f} GB free" + lack * (free < need)


def make_plan(model, config, rows, device, dtype):
    """Prints what the run needs: steps, hours and memory by part, measured here and not guessed."""
    n_weights = sum(p.numel() for p in model.parameters())
    at_once = check_batch(config)[1]
    micro = at_once if device.type == "cuda" or n_weights < BIGGEST_ON_CPU else 1  # a CPU takes its time
    numbers, kept = rows_of_step(0, len(rows), micro, config.seed), {}
    optimizers = make_optimizers(model, config)

    def remember(tensor):  # what the forward pass keeps for the backward pass, each block of memory once
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def pass_s():
        start_s = time.perf_counter()
        tokens, targets = next(micro_batches(rows, numbers, micro, device))
        with autocast(device, dtype):
            loss = model(tokens, targets)
        loss.backward()
        loss.item()  # waits for the device
        return time.perf_counter() - start_s

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        pass_s()
    weights = {p.data_ptr() for p in model.parameters()}
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "wpe" not in name]
    fixed = {shape for p in matrices for shape in (p.shape, p.T.shape)}  # of copies: they are not per row
    gb = {"weights": 4 * n_weights, "gradients": 4 * n_weights, "optimizer": 0, "activations": 0, "logits": 0}
    for pointer, tensor in kept.items():
        if pointer not in weights:
            part = "logits" if tensor.dim() and tensor.size(-1) == VOCAB_SIZE else "activations"
            gb[part] += tensor.untyped_storage().nbytes() * (1 if tensor.shape in fixed else at_once // micro)
    kept.clear()
    compiled = start_compile(model, config, device, pass_s)
    micro_s = min(pass_s() for _ in range(2))
    for _ in range(2):  # the first makes the moments
        start_s = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        next(model.parameters()).sum().item()  # waits for the device
        optimizer_s = time.perf_counter() - start_s
    step_s = micro_s * config.tokens_per_step / config.block_size / micro + optimizer_s
    gb["optimizer"] = sum(tensor.nbytes for optimizer in optimizers for state in optimizer.state.values()
                          for tensor in state.values() if torch.is_tensor(tensor))
    total = config.max_steps * config.tokens_per_step
    say(f"tokens    {total:,} = {config.max_steps:,} steps of {config.tokens_per_step:,} "
        f"({total / (len(rows) * config.block_size):.2f} times through the data)")
    say("memory    " + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in gb.items())
        + f"; together {sum(gb.values()) / 1e9:.2f} GB for {at_once} rows at once, not compiled")
    say(f"time      {step_s:.2f} s a step, {config.tokens_per_step / step_s:,.0f} tokens/s (measured on "
        f"{micro} rows and one step of the optimizer; compile {compiled}), "
        f"{config.max_steps * step_s / 3600:.1f} hours without evaluations")
    say(f"disk      {disk_line(config, model)}")
    if config.hours:
        fits = int(config.hours * 3600 / step_s)
        say(f"hours     --max_steps={fits} fits --hours={config.hours:g} "
            f"({fits * config.tokens_per_step:,} tokens)" if fits else
            f"hours     --hours={config.hours:g} is less than a step takes")


def describe_start(config, model, step, rows, device, dtype, why, attention, compiled, world):
    """Says what will run on what, and returns the same as the log's start line."""
    total, n_weights = config.max_steps * config.tokens_per_step, sum(p.numel() for p in model.parameters())
    threads = f"{torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    precision = str(dtype).removeprefix("torch.")
    tokenizer()  # found missing now rather than at the first save
    say(f"model     {n_weights / 1e6:.1f}M weights, {config.n_layer} layers, {config.n_embd} wide, "
        f"block_size {config.block_size}" + (f", from {config.init_from}" if config.init_from else ""))
    say(f"data      {len(rows):,} rows in {config.data_dir} ({rows.dropped_tokens:,} tokens left over), "
        f"{total / (len(rows) * config.block_size):.2f} times through")
    say(f"device    {device.type}, {name}, {precision} ({why}); PyTorch {torch.__version__}, "
        f"CUDA {torch.version.cuda}; attention {attention}; compile {compiled}"
        + (f"; {world} processes" if world > 1 else ""))
    say(f"disk      {disk_line(config, model)}")
    with contextlib.suppress(Exception):
        say(f"awake     {keep_awake()}")
    say(f"steps     {step:,} of {config.max_steps:,}, {config.tokens_per_step:,} tokens each, {total:,} in "
        f"all; {config.optimizer}, {config.schedule} schedule")
    say_if_too_short(config)
    commit = source = ""
    with contextlib.suppress(UserError):  # llm.c's shards have no meta.json
        source = prepare_fineweb.read_meta(config.data_dir).get("source", "")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, text=True,
                                capture_output=True, timeout=5, check=True).stdout.strip()
    return {"event": "start", "step": step, "settings": dataclasses.asdict(config),
            "data_source": source, "commit": commit, "torch": torch.__version__,
            "python": sys.version.split()[0], "device": f"{device.type} ({name})", "dtype": precision,
            "attention": attention, "compile": compiled, "weights": n_weights, "world": world}


def say_if_too_short(config):
    if config.warmup_steps >= config.max_steps:
        say(f"warning: warmup_steps = {config.warmup_steps} is all of the run ({config.max_steps} steps): "
            f"the learning rate stays below lr; --warmup_steps={config.max_steps // 10} leaves it time")


def last_words(config, step, trained_s, stop):
    """How to go on, or what came out. Returns the exit code."""
    if step == 0:
        say("stopped before the first step; nothing was changed")
        return 128 + (stop.signal or signal.SIGTERM)
    if step < config.max_steps or stop.signal:
        quoted = subprocess.list2cmdline if os.name == "nt" else shlex.join
        program = "python" if is_alone() else "torchrun ..."
        say(f"stopped at step {step:,}, saved in {config.out_dir}; the same command goes on: {program} "
            f"{quoted([Path(sys.argv[0]).name, *sys.argv[1:]])}")
        return 128 + (stop.signal or signal.SIGTERM)
    with contextlib.suppress(Exception):
        append_log(config.out_dir, {"event": "end", "step": step})
        say(curves.summary(curves.read_log(config.out_dir)))
    say(f"done: {step:,} steps in {trained_s / 3600:.2f} h of training; the model is in "
        f"{config.out_dir}/model")
    return 0


# ------------------------------------------------------------------------------------------------------------
# The run


def train(config, model, rows, val_rows, device, dtype, why, rank, world, stop):
    """The run from where out_dir stands to max_steps. Returns 0, or 128 + the signal that ended it."""
    share, micro = check_batch(config, world)
    master, fence, optimizers = rank == 0, Fence(config.out_dir, model, stop), make_optimizers(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)  # else fp16 gradients become 0
    origins = {"data_dir": rows.fingerprint()}
    checkpoints = Checkpoints(config, model, optimizers, scaler, origins, fence)
    step, trained_s = checkpoints.resume()
    if world > 1:
        agree_on_step(step, device, world)
    if checkpoints.is_finished(step):
        say(f"{config.out_dir} is finished: {step:,} steps. Talk to it with chat.py, tune it with sft.py, "
            "train on with a larger --max_steps")
        return 0

    def one_step():  # for the compiler: a whole pass of the real shape
        tokens, targets = next(micro_batches(rows, np.arange(micro) % len(rows), micro, device))
        with autocast(device, dtype):
            model(tokens, targets).backward()
        model.zero_grad(set_to_none=True)

    attention = attention_used(device, dtype, config, config)
    compiled = start_compile(model, config, device, one_step)
    start = describe_start(config, model, step, rows, device, dtype, why, attention, compiled, world)
    if master:
        with fence("log", breakable=False):
            save(config, Path(config.out_dir) / "config.toml")
            cut_log(config.out_dir, step)
            append_log(config.out_dir, start)
    watch, power, bad_in_a_row = Watch(config.out_dir, device), PowerMeter(device), 0
    if master and step == config.max_steps:  # killed after the last save, and maybe before the model folder's
        checkpoints.write_model(step)
    first_step, stopping, stop.raises = step, False, False
    while True:
        # ---- saving and looking: nothing here changes the training -----------------------------------------
        stopping, last = stopping or bool(stop.signal and world == 1), step == config.max_steps
        if master:
            checkpoints.save_if_due(step, trained_s, stopping or last)
        if master and not stopping:
            with contextlib.suppress(KeyboardInterrupt):  # a stop breaks it off; going on does it again
                look(model, step, config, val_rows, micro, device, dtype, fence)
        if stop.signal and world == 1 and not stopping:
            continue
        if stopping or last:
            break

        # ---- the step --------------------------------------------------------------------------------------
        step_start_s = time.perf_counter()
        torch.manual_seed(((config.seed * 2**24 + step) * 2**8 + rank) % 2**63)  # dropout is by the step, too
        numbers = rows_of_step(step, len(rows), share * world, config.seed)[rank * share:(rank + 1) * share]
        loss = torch.zeros((), device=device)
        # Gradient accumulation: half a million tokens do not fit the card, but gradients add up. Each
        # micro-batch gives the gradient of its part of the mean, and the sum is that of the whole step.
        with autocast(device, dtype):
            for tokens, targets in micro_batches(rows, numbers, micro, device):
                micro_loss = model(tokens, targets) / config.tokens_per_step
                scaler.scale(micro_loss).backward()
                loss += micro_loss.detach()  # no .item(): the CPU would wait for the GPU
                if stop.hurry:
                    break
        if stop.hurry:  # the system is about to end us: give up this step, save the last whole one
            model.zero_grad(set_to_none=True)
            continue
        wants_stop = torch.tensor(float(bool(stop.signal)), device=device)
        if world > 1:
            add_up([p.grad for p in model.parameters()] + [loss, wants_stop])
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        set_lr(optimizers, lr_factor(step, config))
        loss, grad_norm, stopping = loss.item(), grad_norm.item(), wants_stop.item() > 0  # the only wait
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
        model.zero_grad(set_to_none=True)
        step += 1

        # ---- everything from here on is only for people ----------------------------------------------------
        step_s = time.perf_counter() - step_start_s
        trained_s, bad_in_a_row = trained_s + step_s, 0 if finite else bad_in_a_row + 1
        if master:
            report(step, loss, grad_norm, step_s, config, optimizers, watch, power, fence)
        checkpoints.stop_if_ill(bad_in_a_row, step, trained_s, master)
        if step == first_step + 3:
            gc.collect()
            gc.freeze()  # what lives now lives to the end: later collections need not look at it
    return last_words(config, step, trained_s, stop) if master else 0


def run_training(config, stop):
    """Everything from the settings to the exit code."""
    device, rank, world = start_process(config)
    check_batch(config, world)
    dtype, why = pick_dtype(device, training=True, name=config.dtype)
    try:
        model = start_model(config, device)
        refuse_a_crawl(config, device, sum(p.numel() for p in model.parameters()))
        is_owner = rank == 0 and not config.plan
        lock = prepare_fineweb.lock_folder(config.out_dir) if is_owner else None  # noqa: F841 - to the end
        rows, val_rows = open_data(config, rank, world)
        with attention_order(config.attention):
            if config.plan:
                return make_plan(model, config, rows, device, dtype) or 0
            return train(config, model, rows, val_rows, device, dtype, why, rank, world, stop)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(out_of_memory_advice(config, check_batch(config, world)[1], device)) from None


def main():
    config, stop = load(Config, "train"), StopSignals()
    stop.raises = True
    try:
        code = run_training(config, stop)
    except KeyboardInterrupt:
        say("stopped before the first step; nothing was changed")
        code = 128 + (stop.signal or signal.SIGINT)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    run(main)
