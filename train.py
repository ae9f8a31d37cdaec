"""Trains GPT-2 from nothing (or from a model folder) on token shards, and resumes by itself.

    python train.py                      the real thing: FineWeb-Edu in data/fineweb_edu, on one GPU
    python train.py configs/tiny         the whole story in minutes on a laptop's CPU, with nothing to download
    python train.py configs/story        the run that this project repeats, setting by setting
    python train.py --plan --hours=20    what it will need, measured here, and the steps that fit; trains nothing
    torchrun --nproc_per_node=2 train.py several GPUs: the same batches, the same result

Reads   data_dir/*.bin (prepare_fineweb.py makes them), and its own out_dir to go on where it stopped.
Writes  out_dir/: ckpt.pt and ckpt_prev.pt to resume from, model/ (a Hugging Face folder), log.jsonl, samples.md,
        curves.png, config.toml.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

import hellaswag
import numpy as np
import prepare_fineweb
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import curves
from configs import UserError, load, run, save, write_text
from model import (
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
BAD_STEPS_IN_A_ROW = 5  # this many without a finite gradient, and the run is ill rather than unlucky
RETRY_SAVE_STEPS = 20  # after a save that failed
BIGGEST_ON_CPU = 50e6  # weights; 124M on a CPU takes months, so it must be asked for by name


# ----------------------------------------------------------------------------------------------------------------------
# Data: batches are a function of the step number


class Rows:
    """The rows of a split: row i of a shard is tokens[i*T : i*T + T + 1], numbered across all shards.

    Neighbours share one token, the last target of one and the first input of the next, so every token but the first of a
    shard is a target once per epoch. An incomplete last row is dropped; `dropped_tokens` counts them.
    """

    def __init__(self, data_dir, split, block_size):
        self.block_size = block_size
        self.paths = prepare_fineweb.shards(data_dir, split)
        self.tokens = [prepare_fineweb.read_shard(path) for path in self.paths]
        counts = [max(0, (len(tokens) - 1) // block_size) for tokens in self.tokens]
        self.first = np.cumsum([0, *counts])  # the number of each shard's first row
        self.dropped_tokens = sum(len(tokens) - 1 - n * block_size for tokens, n in zip(self.tokens, counts))
        if not len(self):
            raise UserError(f"{data_dir}: its {split} shards are shorter than one row of block_size = {block_size} tokens")

    def __len__(self):
        return int(self.first[-1])

    def read(self, rows):
        """(len(rows), T + 1) ids as int64; UserError naming the shard if one is out of range."""
        out = np.empty((len(rows), self.block_size + 1), dtype=np.int64)  # torch's embedding takes no uint16
        for i, row in enumerate(rows):
            shard = int(np.searchsorted(self.first, row, side="right")) - 1
            start = int(row - self.first[shard]) * self.block_size
            out[i] = self.tokens[shard][start:start + self.block_size + 1]
            if out[i].max() >= VOCAB_SIZE:
                raise UserError(f"{self.paths[shard]} holds the id {out[i].max()}, but GPT-2's vocabulary ends before "
                                f"{VOCAB_SIZE}: it was made with another tokenizer, or is damaged")
        return out

    def fingerprint(self):
        """A text that changes with the rows: a checkpoint belongs to it, because the order of the rows depends on it."""
        meta = self.paths[0].parent / "meta.json"
        sizes = [(path.name, len(tokens)) for path, tokens in zip(self.paths, self.tokens)]
        return hashlib.sha256(json.dumps(sizes).encode() + (meta.read_bytes() if meta.exists() else b"")).hexdigest()


@functools.lru_cache(maxsize=2)
def permutation(seed, epoch, n_rows):
    return np.random.default_rng((seed, epoch)).permutation(n_rows)


def rows_of_step(step, n_rows, rows_per_step, seed):
    """The numbers of the rows of one step: a shuffle of all rows per epoch, and a step may span two epochs."""
    places = np.arange(step * rows_per_step, (step + 1) * rows_per_step)
    return np.concatenate([permutation(seed, int(epoch), n_rows)[places[places // n_rows == epoch] % n_rows]
                           for epoch in np.unique(places // n_rows)])


def micro_batches(rows, numbers, micro_batch_size, device):
    """Yields (tokens, targets), each (micro_batch_size, T): the targets are the tokens one place later."""
    for start in range(0, len(numbers), micro_batch_size):
        block = torch.from_numpy(rows.read(numbers[start:start + micro_batch_size]))
        if device.type == "cuda":
            block = block.pin_memory().to(device, non_blocking=True)  # copied while the GPU works on the one before
        block = block.to(device)
        yield block[:, :-1], block[:, 1:]


def check_batch(config, world=1):
    """(rows per step of one process, its micro-batch size); UserError with the nearest value that divides."""
    for name in ("tokens_per_step", "micro_batch_size", "block_size", "max_steps", "log_every"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} = {getattr(config, name)} must be at least 1")
    unit = config.micro_batch_size * config.block_size
    if config.tokens_per_step % unit:
        raise UserError(f"tokens_per_step ({config.tokens_per_step:,}) must be a multiple of micro_batch_size x "
                        f"block_size ({config.micro_batch_size} x {config.block_size:,} = {unit:,}); the nearest is "
                        f"tokens_per_step = {max(1, round(config.tokens_per_step / unit)) * unit}")
    rows = config.tokens_per_step // config.block_size
    if rows % world:
        raise UserError(f"{world} processes cannot share the {rows} rows of a step equally; use a number that divides it")
    share = rows // world
    return share, max(n for n in range(1, min(share, config.micro_batch_size) + 1) if share % n == 0)


# ----------------------------------------------------------------------------------------------------------------------
# Learning rate and optimizers


def lr_factor(step, config):
    """The learning rate of step 0, 1, ... as a share of its peak: a function of the step, without state.

    Warm-up is linear. "linear" then stays at 1 and falls to min_lr_fraction over the last decay_fraction of the steps;
    with decay_fraction = 0 it stays constant, and a later run with a larger max_steps goes on or cools down.
    "cosine" falls all the way from the end of the warm-up, as GPT-3's did.
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

    AdamW decays the matrices only: a gain or bias pulled towards zero would be a different network. With Muon the hidden
    matrices are its, and the embeddings, which are looked up and not multiplied, stay with AdamW, undecayed.
    """
    named = list(model.named_parameters())
    hidden = [p for name, p in named if p.ndim == 2 and ".h." in name]
    embeddings = [p for name, p in named if p.ndim == 2 and ".h." not in name]
    vectors = [p for _, p in named if p.ndim < 2]
    fused = model.device.type in ("cuda", "cpu", "mps")
    if config.optimizer == "muon":
        muon = Muon(hidden, lr=config.muon_lr, weight_decay=config.weight_decay, n_embd=model.config.n_embd)
        groups = [{"params": embeddings + vectors, "weight_decay": 0.0}]
        optimizers = [muon, torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=fused)]
    else:
        groups = [{"params": hidden + embeddings, "weight_decay": config.weight_decay},
                  {"params": vectors, "weight_decay": 0.0}]
        optimizers = [torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=fused)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_lr(optimizers, factor):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


class Muon(torch.optim.Optimizer):
    """Momentum whose every update is made orthogonal (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    A gradient matrix has a few strong directions and many weak ones; this steps equally far in all of them. The step is
    scaled by 0.2 sqrt(max(rows, columns)), which makes its size AdamW's (arXiv 2502.16982), so learning rates carry over.
    torch.optim.Muon computes the same for one matrix; here attention's fused query, key and value count as the three
    matrices that they are, and matrices of one shape go through together.
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
                size = self.n_embd if p.size(0) == 3 * self.n_embd and p.size(1) == self.n_embd else p.size(0)
                for part, part_update in zip(p.split(size), update.split(size)):
                    shapes.setdefault(part.shape, []).append((part, part_update))
            for (n_rows, n_columns), pairs in shapes.items():
                step = group["lr"] * 0.2 * max(n_rows, n_columns) ** 0.5
                updates = orthogonalize(torch.stack([update for _, update in pairs]))
                for (part, _), update in zip(pairs, updates):
                    part.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=step)


def orthogonalize(matrices, steps=5):
    """The nearest matrices (n, rows, columns) with all singular values near 1: Newton-Schulz in bf16, with the constants
    of the Muon post, which push small singular values up fast and leave them anywhere in about 0.7 to 1.2."""
    x = matrices.bfloat16()
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).to(matrices.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The run's folder: lock, log, checkpoint


def say(text):
    """print() that survives a closed terminal: losing the screen must not lose the run."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, flush=True)


def lock_folder(out_dir):
    """Takes the folder for this process until it ends, however it ends. Returns the open file that holds the lock."""
    try:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        file = open(Path(out_dir) / ".lock", "a+b")  # noqa: SIM115 - open for as long as the run
        for leftover in Path(out_dir).glob("*.tmp"):
            leftover.unlink()
    except OSError as error:
        raise UserError(f"out_dir = {out_dir} cannot be written: {error.strerror}; choose another with --out_dir=") from None
    try:
        if os.name == "nt":
            import msvcrt
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"out_dir = {out_dir} is in use by another run; wait for it, or choose another --out_dir=") from None
    return file


def append_log(out_dir, row):
    """Adds one line to log.jsonl. JSON has no NaN, so what is not finite is written as null."""
    row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    with open(Path(out_dir) / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def cut_log(out_dir, step):
    """Takes out of log.jsonl what a resumed run will do again: steps after `step`, evaluations from it on."""
    path = Path(out_dir) / "log.jsonl"
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a line that a crash cut short
        if row.get("event") == "start" or row.get("step", 0) < step or (row.get("step") == step and "loss" in row):
            kept.append(line + "\n")
    write_text(path, "".join(kept))


def save_checkpoint(out_dir, state):
    """Writes ckpt.pt, keeping the one before as ckpt_prev.pt; a crash at any moment leaves at least one whole."""
    path = Path(out_dir) / "ckpt.pt"
    temporary = path.with_name("ckpt.pt.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.replace(path, path.with_name("ckpt_prev.pt"))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # half a file would only fill the disk further
        raise


def load_checkpoint(out_dir):
    """The newest checkpoint that can be read, on the CPU, or None where there is none; says so if it is the previous one.

    Raises UserError if there are checkpoints but none is readable: starting over would overwrite them.
    """
    paths = [path for path in (Path(out_dir) / "ckpt.pt", Path(out_dir) / "ckpt_prev.pt") if path.exists()]
    for path in paths:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # zip, pickle, end of file, disk: whatever the damage makes torch raise
            say(f"warning: {path} is damaged ({type(error).__name__}: {str(error).splitlines()[0][:80]})"
                + (f"; going on from {paths[1]}" if path != paths[-1] else ""))
    if paths:
        raise UserError(f"no checkpoint in {out_dir} can be read; move them away to start over, or choose another --out_dir=")
    return None


def resume(state, model, optimizers, scaler, config, fingerprint, fixed=FIXED):
    """Puts a checkpoint into model, optimizers and scaler, and returns its step.

    Lists the settings that changed since. Raises UserError if one of those in `fixed` did, or if the data did.
    """
    old, new = state["settings"], dataclasses.asdict(config)
    changed = [f"{name}: {old[name]!r} -> {new[name]!r}" for name in new if name in old and old[name] != new[name]
               and name not in ("plan", "hours")]
    refused = [line for line in changed if line.split(":")[0] in fixed]
    if refused:
        raise UserError(f"{config.out_dir} holds a run with other settings, which a checkpoint cannot change: "
                        f"{'; '.join(refused)}. Go on with the old values, or start over in another --out_dir=")
    if state["data"] != fingerprint:
        raise UserError(f"{config.data_dir} is not the data that {config.out_dir} was trained on (its shards or meta.json "
                        "changed), and the order of the rows depends on it; put it back, or choose another --out_dir=")
    if changed:
        say("changed since the checkpoint, and applied: " + "; ".join(changed))
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        # only what it has gathered: rates and decay come from the settings
        optimizer.load_state_dict({"state": saved["state"], "param_groups": optimizer.state_dict()["param_groups"]})
    if state.get("scaler"):
        scaler.load_state_dict(state["scaler"])
    return state["step"]


# ----------------------------------------------------------------------------------------------------------------------
# What may go wrong beside the training, and what may stop it


class StopSignals:
    """Ctrl-C, SIGTERM and a closed console ask the run to finish its step and save; a second one leaves at once.

    `signal` is the number of the one that came, or 0. `hurry` is set when the system will soon kill us.
    """

    def __init__(self):
        self.signal, self.hurry, self.raises = 0, False, False
        for name in ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.handle)

    def handle(self, number, frame):
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        self.hurry = number in (getattr(signal, "SIGHUP", 0), getattr(signal, "SIGBREAK", 0))
        say("\nstopping: the step is finished and saved first (once more leaves at once)")
        if self.raises:  # in an evaluation, which can be broken off
            raise KeyboardInterrupt


class Fence:
    """`with fence("samples"):` whatever goes wrong inside is reported once, and training goes on in train mode.

    Nothing inside can change the training: its random numbers are a function of the step, like its batches.
    """

    def __init__(self, out_dir, model, stop):
        self.out_dir, self.model, self.stop, self.reported = out_dir, model, stop, set()

    @contextlib.contextmanager
    def __call__(self, what, step=0):
        try:
            self.stop.raises = True
            yield
        except KeyboardInterrupt:
            pass  # the stop is remembered in self.stop
        except (Exception, SystemExit) as error:
            self.stop.raises = False
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
    """The GPU's power draw in watts, from the nvidia-smi that the driver brings, read every 10 s in a thread."""

    def __init__(self, device):
        self.watts = None
        if device.type == "cuda" and shutil.which("nvidia-smi"):
            threading.Thread(target=self.read, args=(device.index or 0,), daemon=True).start()

    def read(self, index):
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            while True:
                out = subprocess.run(["nvidia-smi", f"--id={index}", "--query-gpu=power.draw",
                                      "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10, check=True)
                self.watts = float(out.stdout)
                time.sleep(10)
        self.watts = None  # it stopped answering: claim nothing from here on


# ----------------------------------------------------------------------------------------------------------------------
# Device, compiler, several processes


def autocast(device, dtype):
    """Matrix products in `dtype`, weights and sums in fp32."""
    return torch.autocast(device.type, dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()


def attention_order(name):
    """A context that sets which attention kernels are tried, in which order. PyTorch's own order puts cuDNN's last, after
    two slow ones; its Windows wheels have no FlashAttention, so there cuDNN's is the fast one."""
    every = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    one = dict(zip(("flash", "cudnn", "efficient", "math"), every))
    return sdpa_kernel(every if name == "auto" else [one[name]], set_priority=True)


def attention_used(device, dtype, config):
    """The name of the kernel that training's attention will run, asked of PyTorch, not guessed."""
    if device.type != "cuda":
        return "flash (CPU)" if device.type == "cpu" else "PyTorch's for " + device.type
    q = torch.empty(1, config.n_head, config.block_size, config.n_embd // config.n_head, device=device, dtype=dtype)
    params = torch.backends.cuda.SDPAParams(q, q, q, None, config.dropout, True, False)
    for name, usable in (("flash", torch.backends.cuda.can_use_flash_attention),
                         ("cudnn", torch.backends.cuda.can_use_cudnn_attention),
                         ("efficient", torch.backends.cuda.can_use_efficient_attention)):
        if config.attention in ("auto", name) and usable(params):
            return name
    return "math (slow)"


def start_compile(model, config, device, one_step):
    """Compiles the model in place if the setting and the machine allow it, and says what happened.

    one_step  runs a forward and backward pass, because compiling is lazy: what is missing shows only then

    model.forward(x) stays the eager call, for HellaSwag's many shapes. Raises UserError if compile = true cannot be.
    """
    if config.compile is False or (config.compile == "auto" and device.type != "cuda"):
        return "off"
    try:
        model.compile()
        start_s = time.perf_counter()
        one_step()
        return f"on ({time.perf_counter() - start_s:.0f} s)"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        model._compiled_call_impl = None  # back to eager: there is no public way to undo compile()
        torch._dynamo.reset()
        fix = "pip install 'triton-windows<3.8'" if os.name == "nt" else "install a C compiler (gcc) and PyTorch's triton"
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        if config.compile is True:
            raise UserError(f"compile = true, but the model cannot be compiled: {reason}; {fix}, or --compile=false") from None
        return f"off, which costs about half the speed on a GPU: {reason}; {fix}"


def join_processes():
    """(rank, world size) of this process. Under torchrun the processes find each other; alone nothing is initialised."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        import datetime

        import torch.distributed as dist
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # long enough for rank 0 to evaluate while the others wait for it
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=datetime.timedelta(hours=1))
        return dist.get_rank(), world
    return 0, 1


def add_up(tensors):
    """Sums each tensor over all processes, in place; the only place where they talk."""
    import torch.distributed as dist
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def is_out_of_memory(error):
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def out_of_memory_advice(config, micro, device):
    """One line: what was used, and the one change that helps without changing the result."""
    peak = ""
    if device.type == "cuda":
        peak = (f", peak {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB of "
                f"{torch.cuda.get_device_properties(device).total_memory / 1e9:.1f}")
    where = f"out of memory with micro_batch_size = {micro}{peak}"
    if micro > 1:
        smaller = max(n for n in range(1, micro // 2 + 1) if micro % n == 0)
        return (f"{where}; --micro_batch_size={smaller} needs about {smaller / micro:.0%} of the activations, and as "
                "tokens_per_step stays, so does the result")
    if not config.loss_chunk_rows:
        return f"{where}; --loss_chunk_rows=512 keeps the logits small without changing the result"
    return f"{where}; the model does not fit: lower block_size or n_layer, or close other programs on the GPU"


def memory_gb(device):
    """Peak memory so far in GB: the GPU's where there is one, else the process's; None where it cannot be read."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)


def keep_awake():
    """Asks Windows not to sleep while this process lives; elsewhere returns a hint how to."""
    if os.name == "nt":
        import ctypes
        ctypes.windll.kernel32.SetThreadExecutionState(0x80000001)  # ES_CONTINUOUS | ES_SYSTEM_REQUIRED
    elif sys.platform == "darwin":
        return "to keep the machine awake: caffeinate -i python train.py ..."
    return ""


# ----------------------------------------------------------------------------------------------------------------------
# Looking at the model while it trains


@torch.no_grad()
def validation_loss(model, rows, config, micro, device, dtype):
    """Mean loss in nats per token over the first eval_tokens of the validation rows: the same ones every time."""
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
    model.train()
    return total.item() / (n * config.block_size)


def write_samples(model, config, step):
    """Continues each prompt, adds them to the log, and rewrites samples.md from it: a prompt's samples over time."""
    model.eval()
    for prompt in config.prompts:
        ids = generate(model, encode(prompt), config.sample_tokens, temperature=config.sample_temperature, top_k=50,
                       seed=config.seed)
        append_log(config.out_dir, {"step": step, "prompt": prompt, "sample": decode(ids)})
    samples = [row for row in curves.read_log(config.out_dir) if "sample" in row]
    text = "# What the model writes, as it learns\n"
    for prompt in config.prompts:
        text += f"\n## {prompt}\n"
        for row in samples:
            if row["prompt"] == prompt:
                quoted = (prompt + row["sample"]).strip().replace("\n", "\n> ")
                text += f"\n**step {row['step']:,}**\n\n> {quoted}\n"
    write_text(Path(config.out_dir) / "samples.md", text)


def score_hellaswag(model, config, step, tokens_seen):
    """HellaSwag accuracy, logged; the raw module, because its shapes are many."""
    items, _ = hellaswag.load_items(config.hellaswag_source)
    model.eval()
    score = hellaswag.evaluate(model, items, n=config.hellaswag_n)
    append_log(config.out_dir, {"step": step, "tokens": tokens_seen, "hellaswag": score["acc"],
                                "hellaswag_norm": score["acc_norm"], "n": score["n"]})
    return score["acc_norm"]


def look(model, step, config, rows, micro, device, dtype, fence):
    """Everything that looks at the model at `step` and cannot stop or change the training."""
    last, tokens_seen = step == config.max_steps, step * config.tokens_per_step
    due = {name: last or (every > 0 and step % every == 0) for name, every in (
        ("val", config.eval_every), ("hellaswag", config.hellaswag_every), ("sample", config.sample_every))}
    val_loss = score = None
    if due["val"] and config.eval_every and not fence.stop.signal:
        with fence("validation", step):
            val_loss = validation_loss(model, rows, config, micro, device, dtype)
            append_log(config.out_dir, {"step": step, "tokens": tokens_seen, "val_loss": val_loss})
    if due["hellaswag"] and config.hellaswag_every and not fence.stop.signal:
        with fence("HellaSwag", step):
            score = score_hellaswag(model, config, step, tokens_seen)
    if due["sample"] and config.sample_every and not fence.stop.signal:
        with fence("samples", step):
            write_samples(model, config, step)
    if val_loss is not None or score is not None:
        parts = [f"step {step:6d}"]
        parts += [f"val loss {val_loss:.4f}"] if val_loss is not None else []
        parts += [f"HellaSwag {score:.1%}"] if score is not None else []
        with fence("curves", step):
            parts += [text for text in [curves.on_track(tokens_seen, val_loss, score)] if text]
        say(" | ".join(parts))
        with fence("curves", step):
            curves.draw([config.out_dir], Path(config.out_dir) / "curves.png")


# ----------------------------------------------------------------------------------------------------------------------
# Before the run


def start_model(config, device):
    """The network to train, fp32 on `device`: random by config.seed, or the weights of config.init_from."""
    torch.manual_seed(config.seed)
    sizes = GPTConfig(config.block_size, config.n_layer, config.n_head, config.n_embd, config.dropout)
    if config.init_from:
        model = load_model(config.init_from, device)
        differ = [f"{name} = {getattr(model.config, name)}" for name in ("n_layer", "n_head", "n_embd")
                  if getattr(model.config, name) != getattr(sizes, name)]
        if differ or model.config.block_size < config.block_size:
            raise UserError(f"init_from = {config.init_from} has {', '.join(differ)} and block_size up to "
                            f"{model.config.block_size}; give the same with --key=value")
        model.config.dropout = config.dropout
        for module in model.modules():
            if hasattr(module, "dropout"):
                module.dropout = config.dropout
    else:
        model = GPT(sizes).to(device)
    model.loss_chunk_rows = config.loss_chunk_rows
    return model.train()


def refuse_a_crawl(config, device, n_weights):
    """Raises UserError when a full-size model would be trained on a CPU without having been asked for."""
    if device.type == "cpu" and config.device == "auto" and n_weights > BIGGEST_ON_CPU and not config.plan:
        raise UserError(f"there is no GPU to train {n_weights / 1e6:.0f}M weights on, and a CPU would take months: "
                        f"{why_no_cuda()}. `python train.py configs/tiny` trains a small model here in minutes; "
                        "--device=cpu insists")


def open_data(config):
    """(training rows, validation rows); a missing tiny world is made first, anything else is asked for in one line."""
    if config.source and not any(Path(config.data_dir).glob("*_train_*.bin")):
        prepare_fineweb.prepare(load(prepare_fineweb.Config, "prepare_fineweb", [
            f"--source={config.source}", f"--out_dir={config.data_dir}"]))
    return (Rows(config.data_dir, "train", config.block_size), Rows(config.data_dir, "val", config.block_size))


def make_plan(model, config, rows, micro, device, dtype):
    """Prints what the run needs: steps, hours and memory by part, measured here on one micro-batch, not guessed."""
    accumulation = config.tokens_per_step // config.block_size // micro
    kept = {"logits": {}, "activations": {}}

    def remember(tensor):  # what the forward pass keeps for the backward pass, each block of memory once
        if tensor.data_ptr() not in weights:
            part = "logits" if tensor.numel() and tensor.size(-1) == model.config.vocab_size else "activations"
            kept[part][tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    weights = {p.data_ptr() for p in model.parameters()}
    numbers = rows_of_step(0, len(rows), accumulation * micro, config.seed)
    times_s = []
    for attempt in range(3):
        start_s = time.perf_counter()
        tokens, targets = next(micro_batches(rows, numbers, micro, device))
        hooks = torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor)
        with hooks if attempt == 0 else contextlib.nullcontext(), autocast(device, dtype):
            loss = model.forward(tokens, targets)
        loss.backward()
        loss.item()  # waits for the device
        times_s.append(time.perf_counter() - start_s)
    step_s = min(times_s) * accumulation
    n_weights = sum(p.numel() for p in model.parameters())
    per_weight = 4 * (1 if config.optimizer == "muon" else 2)
    total = config.max_steps * config.tokens_per_step
    gb = {"weights": 4 * n_weights / 1e9, "gradients": 4 * n_weights / 1e9, "optimizer": per_weight * n_weights / 1e9,
          "activations": sum(kept["activations"].values()) / 1e9, "logits": sum(kept["logits"].values()) / 1e9}
    say(f"tokens    {total:,} = {config.max_steps:,} steps of {config.tokens_per_step:,} "
        f"({total / (len(rows) * config.block_size):.2f} times through the data)")
    say("memory    " + ", ".join(f"{name} {size:.2f}" for name, size in gb.items())
        + f"; together {sum(gb.values()):.2f} GB with micro_batch_size = {micro}, not compiled")
    say(f"time      {step_s:.2f} s a step ({config.tokens_per_step / step_s:,.0f} tokens/s, measured on one micro-batch, "
        f"not compiled), {config.max_steps * step_s / 3600:.1f} hours")
    say(f"disk      {(3 * (4 + per_weight) + 8) * n_weights / 1e9:.1f} GB in {config.out_dir}, "
        f"{shutil.disk_usage(Path(config.out_dir).resolve().anchor).free / 1e9:.0f} GB free")
    if config.hours:
        fits = int(config.hours * 3600 / step_s)
        say(f"hours     --max_steps={fits} fits {config.hours:g} hours ({fits * config.tokens_per_step:,} tokens)")


# ----------------------------------------------------------------------------------------------------------------------
# The run


class Watch:
    """Notices what a person looking at the numbers would: a loss that jumps, a speed that halves, a GPU that spills."""

    def __init__(self, out_dir, device):
        self.losses = []
        with contextlib.suppress(OSError, UserError):
            self.losses = [row["loss"] for row in curves.read_log(out_dir) if isinstance(row.get("loss"), float)][-50:]
        self.rates, self.device, self.told = [], device, set()

    def remarks(self, loss, tok_per_s):
        """The warnings that this step gives rise to; about speed and memory once in a run."""
        out = []
        if len(self.losses) >= 20 and loss > statistics.median(self.losses) + 1:
            out.append(f"loss {loss:.2f} jumped above {statistics.median(self.losses):.2f}, the median of the last "
                       f"{len(self.losses)} steps; it usually comes back by itself, else the learning rate is too high")
        self.losses = [*self.losses, loss][-50:]
        if len(self.rates) >= 20 and tok_per_s < statistics.median(self.rates) / 2 and "speed" not in self.told:
            self.told.add("speed")
            out.append(f"{tok_per_s:,.0f} tokens/s is less than half of what it was: another program on the GPU, a laptop on "
                       "battery, or (Windows) GPU memory spilling into the system's")
        self.rates = [*self.rates, tok_per_s][-50:]
        if self.device.type == "cuda" and len(self.rates) == 3:
            used = torch.cuda.max_memory_reserved(self.device) / torch.cuda.get_device_properties(self.device).total_memory
            if used > 0.92:
                out.append(f"{used:.0%} of the GPU's memory is in use; on Windows the driver then uses the system's, ten times "
                           "slower, instead of failing. A smaller --micro_batch_size is safe and changes no result")
        return out

    def time_left(self, steps, tokens_per_step):
        seconds = steps * tokens_per_step / statistics.median(self.rates)
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def describe_start(config, step, rows, device, dtype, why, compiled, n_weights, world):
    """The log's start line, and the same for the reader."""
    total = config.max_steps * config.tokens_per_step
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    precision = str(dtype).removeprefix("torch.")
    attention = attention_used(device, dtype, config)
    say(f"model     {n_weights / 1e6:.1f}M weights, {config.n_layer} layers, {config.n_embd} wide, block_size "
        f"{config.block_size}" + (f", from {config.init_from}" if config.init_from else ""))
    say(f"data      {len(rows):,} rows in {config.data_dir} ({rows.dropped_tokens:,} tokens left over), "
        f"{total / (len(rows) * config.block_size):.2f} times through")
    say(f"device    {device.type}, {name}, {precision} ({why}); attention {attention}; compile {compiled}"
        + (f"; {world} processes" if world > 1 else ""))
    say(f"steps     {step:,} of {config.max_steps:,}, {config.tokens_per_step:,} tokens each, {total:,} in all; "
        f"{config.optimizer}, {config.schedule} schedule")
    commit = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True,
                                text=True, timeout=5, check=True).stdout.strip()
    return {"event": "start", "step": step, "settings": dataclasses.asdict(config), "commit": commit,
            "torch": torch.__version__, "python": sys.version.split()[0], "device": f"{device.type} ({name})",
            "dtype": precision, "attention": attention, "compile": compiled, "weights": n_weights, "world": world}


def train(config, model, rows, val_rows, device, dtype, why, rank, world):
    """The run from where out_dir stands to max_steps. Returns the exit code: 0, or 128 + the signal that ended it."""
    out_dir, master = Path(config.out_dir), rank == 0
    lock = lock_folder(out_dir) if master else None  # noqa: F841 - held until the process ends
    share, micro = check_batch(config, world)
    optimizers = make_optimizers(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    fingerprint, state, step, trained_s = rows.fingerprint(), load_checkpoint(out_dir), 0, 0.0
    if state:
        step, trained_s = resume(state, model, optimizers, scaler, config, fingerprint), state.get("trained_s", 0.0)
        del state  # as large as the model and its optimizer
    if step >= config.max_steps:
        say(f"{out_dir} is finished: {step:,} steps. Talk to it with hellaswag.py, sft.py or chat.py; train on with a "
            "larger --max_steps; start over in another --out_dir")
        return 0
    stop = StopSignals()
    fence = Fence(out_dir, model, stop)

    def one_step():  # for the compiler: a whole pass of the real shape
        tokens, targets = next(micro_batches(rows, np.arange(micro), micro, device))
        with autocast(device, dtype):
            model(tokens, targets).backward()
        model.zero_grad(set_to_none=True)

    def keep(step):
        """Saves everything at `step`; False, with a warning, if the disk does not let it."""
        if not all(bool(p.isfinite().all()) for p in model.parameters()):
            raise UserError(f"the weights at step {step} are not finite; the checkpoint before is kept. Go on from it with a "
                            "lower --lr")
        try:
            save_checkpoint(out_dir, {
                "step": step, "settings": dataclasses.asdict(config), "data": fingerprint, "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers], "scaler": scaler.state_dict(),
                "trained_s": trained_s})
        except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
            fence.warn(step, f"no checkpoint could be written ({' '.join(str(error).split())[:120]}): make space; the one "
                             f"before is kept, training goes on and tries again in {RETRY_SAVE_STEPS} steps")
            return False
        with fence("writing the model folder", step):
            save_model(model, out_dir / "model", step=step)
        return True

    compiled = start_compile(model, config, device, one_step)
    if master:
        with fence("log"):
            save(config, out_dir / "config.toml")
            cut_log(out_dir, step)
            append_log(out_dir, describe_start(config, step, rows, device, dtype, why, compiled,
                                               sum(p.numel() for p in model.parameters()), world))
    watch, power, in_a_row = Watch(out_dir, device), PowerMeter(device), 0
    first_step = saved_step = step
    next_save, stopping = step + config.save_every, False
    while True:
        # ---- looking and saving: nothing here changes the training -----------------------------------------------
        stopping = stopping or (stop.signal and world == 1)
        last = step == config.max_steps
        if master and step != saved_step and (stopping or last or step >= next_save):
            saved = keep(step)
            saved_step, next_save = (step, step + config.save_every) if saved else (saved_step, step + RETRY_SAVE_STEPS)
        if stopping or last:
            break
        if master:
            look(model, step, config, val_rows, micro, device, dtype, fence)

        # ---- the step --------------------------------------------------------------------------------------------
        step_start_s = time.perf_counter()
        torch.manual_seed((config.seed * 2**24 + step) * 2**8 + rank)  # dropout, too, is a function of the step
        numbers = rows_of_step(step, len(rows), share * world, config.seed)[rank * share:(rank + 1) * share]
        loss = torch.zeros((), device=device)
        # Gradient accumulation: half a million tokens do not fit the card, but gradients add up. Each micro-batch gives
        # the gradient of its part of the mean, and the sum is that of the whole step.
        with autocast(device, dtype):
            for tokens, targets in micro_batches(rows, numbers, micro, device):
                micro_loss = model(tokens, targets) / config.tokens_per_step
                scaler.scale(micro_loss).backward()
                loss += micro_loss.detach()  # no .item(): the CPU would wait for the GPU
                if stop.hurry and world == 1:
                    break
        if stop.hurry and world == 1:  # the system is about to end us: give up this step, save the last whole one
            model.zero_grad(set_to_none=True)
            continue
        wants_stop = torch.tensor(float(bool(stop.signal)), device=device)
        if world > 1:
            add_up([p.grad for p in model.parameters()] + [loss, wants_stop])
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        set_lr(optimizers, lr_factor(step, config))
        loss, grad_norm, stopping = loss.item(), grad_norm.item(), wants_stop.item() > 0  # the step's one wait
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
        model.zero_grad(set_to_none=True)
        step += 1

        # ---- everything from here on is only for people ----------------------------------------------------------
        step_s = time.perf_counter() - step_start_s
        trained_s += step_s
        if master:
            report(step, loss, grad_norm, config.tokens_per_step / step_s, config, optimizers, watch, power, fence)
            if not finite:
                fence.warn(step, f"loss {loss} or gradient norm {grad_norm} is not finite: step skipped, weights unchanged")
        in_a_row = 0 if finite else in_a_row + 1
        if in_a_row == BAD_STEPS_IN_A_ROW * (4 if scaler.is_enabled() else 1):  # a scaler finds its scale by failing
            if master:
                keep(step - in_a_row)  # nothing has changed since
            raise UserError(f"{in_a_row} steps in a row had a loss or gradient that is not finite. The checkpoint is from step "
                            f"{step - in_a_row}, before them: go on with a lower --lr or a longer --warmup_steps")
        if step == first_step + 3:
            gc.collect()
            gc.freeze()  # what lives now lives to the end: later collections need not look at it

    if last and master:
        look(model, step, config, val_rows, micro, device, dtype, fence)
    return last_words(config, step, trained_s, stop) if master else 0


def report(step, loss, grad_norm, tok_per_s, config, optimizers, watch, power, fence):
    """One aligned line on the screen and one in the log, after what is worth a warning."""
    row = {"step": step, "tokens": step * config.tokens_per_step, "loss": loss, "lr": optimizers[-1].param_groups[0]["lr"],
           "grad_norm": grad_norm, "tok_per_s": round(tok_per_s), "mem_gb": memory_gb(watch.device)}
    if power.watts is not None:
        row["power_w"] = power.watts
    for text in watch.remarks(loss, tok_per_s):
        fence.warn(step, text)
    if step % config.log_every and step != config.max_steps:
        return
    with fence("log", step):
        append_log(config.out_dir, row)
    memory = f"{row['mem_gb']:5.1f} GB | " if row["mem_gb"] is not None else ""
    say(f"step {step:6d}/{config.max_steps} | loss {loss:7.4f} | lr {row['lr']:.2e} | norm {grad_norm:7.3f} | "
        f"{tok_per_s:9,.0f} tok/s | {memory}{watch.time_left(config.max_steps - step, config.tokens_per_step)} left")


def last_words(config, step, trained_s, stop):
    """How to go on, or what came out. Returns the exit code."""
    if step < config.max_steps:
        say(f"stopped at step {step:,}, saved in {config.out_dir}; the same command goes on: python "
            f"{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}")
        return 128 + (stop.signal or signal.SIGTERM)
    with contextlib.suppress(Exception):
        say(curves.summary(curves.read_log(config.out_dir)))
    say(f"done: {step:,} steps in {trained_s / 3600:.2f} h of training; the model is in {config.out_dir}/model")
    return 0


def main():
    keep_freed_memory()
    if sys.platform == "linux":  # less fragmentation; Windows' PyTorch warns that it cannot
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.set_float32_matmul_precision("high")
    config = load(Config, "train")
    rank, world = join_processes()
    device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}" if world > 1 and torch.cuda.is_available() else config.device)
    micro = check_batch(config, world)[1]
    model = start_model(config, device)
    n_weights = sum(p.numel() for p in model.parameters())
    refuse_a_crawl(config, device, n_weights)
    dtype, why = pick_dtype(device, training=True, name=config.dtype)
    rows, val_rows = open_data(config)
    if config.plan:
        return make_plan(model, config, rows, micro, device, dtype)
    try:
        with attention_order(config.attention):
            code = train(config, model, rows, val_rows, device, dtype, why, rank, world)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(out_of_memory_advice(config, micro, device)) from None
    if world > 1:
        torch.distributed.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    run(main)
