"""How fast each stage is and what it costs, against baselines that anyone can install.

run     python tests/bench.py                        every part but the slow ones, as one Markdown table
        python tests/bench.py train generate         these parts; --help lists them
        python tests/bench.py prepare --parquet=DIR  on your own parquet files instead of made-up ones
        python tests/bench.py train --dtype=float32 --size=small  only these rows
time    about half an hour on two quiet cores, hours with bf16 on a CPU that has neither it nor AVX-512; on
        CUDA the training parts also give tokens/s, MFU and memory

Each side of a comparison is a process of its own, so its peak memory is its own too. The sides take turns,
one repetition each, so whatever else the machine does meets both; the ratio is that of the medians, with its
range over the turns.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIZES = {"small": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 256},
         "124M": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024}}
BATCH = {"small": (8, 256), "124M": (1, 1024)}
CHUNK_ROWS = {"small": 256, "124M": 1024}  # of the loss, as measures best on a CPU; configs/tiny has 256
LOOKS = ("eval", "hellaswag", "sample", "save")
TOKENS_PER_STEP = 524_288
STORY_TOKENS_PER_S = 120_000  # of an RTX 4090, for shares of a real step that cannot be measured here


# ------------------------------------------------------------------------------------------------------------
# Comparing: processes that take turns


class Side(NamedTuple):
    """One side's medians over the turns: units (tokens, questions, bytes) per second, and peak memory in
    GB."""

    name: str
    rates: list
    memory_gb: float
    extra: dict

    @property
    def rate(self):
        return statistics.median(self.rates)


class Worker:
    """A process that calls `make`, a function of this file, with `options`, and what that returns at each
    request.

    What it returns does one repetition and gives the units done, or (units, {"seconds": of the part that
    counts}).
    """

    def __init__(self, make, options, tree):
        words = [sys.executable, __file__, "--side", json.dumps([make.__name__, options])]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        cwd=ROOT)
        self.tree = TreeMemory(self.process.pid) if tree else None
        self.answers = []
        self.read()  # set up, and warmed up

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args[-1]} failed; its error is above")
        return json.loads(line)

    def once(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.answers.append(self.read())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def worker_main(name, options):
    """The other end of Worker: prints one line of JSON when ready, and one for each line that it reads."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    once = globals()[name](**options)
    once()
    print(json.dumps("ready"), file=answers, flush=True)
    for _ in sys.stdin:
        start_s = time.perf_counter()
        done = once()
        answer = {"seconds": time.perf_counter() - start_s}
        units, extra = done if isinstance(done, tuple) else (done, {})
        print(json.dumps(answer | {"units": units, "peak_gb": peak_gb()} | extra), file=answers, flush=True)


def peak_gb():
    """The peak memory of this process: the GPU's if it used one."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 1e9
    import resource
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * (1 if sys.platform == "darwin" else 1024) / 1e9)


class TreeMemory:
    """The peak memory in GB of a process with all its children, shared pages counted once (Linux),
    sampled."""

    def __init__(self, pid):
        self.peak_gb = 0.0
        threading.Thread(target=self.sample, args=(pid,), daemon=True).start()

    def sample(self, pid):
        while Path(f"/proc/{pid}").exists():
            self.peak_gb = max(self.peak_gb, sum(map(self.proportional_gb, self.family(pid))))
            time.sleep(0.1)

    def family(self, pid):
        yield pid
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                for child in children.read_text(encoding="utf-8").split():
                    yield from self.family(int(child))

    @staticmethod
    def proportional_gb(pid):
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
            return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1e6
        return 0.0


def compare(ours, baseline, *others, runs=5, tree=False):
    """Lets the sides take turns, one repetition each, `runs` times. Returns a Side for each.

    Each side is (label, function, its options); see Worker. tree: count the memory of child processes, too.
    """
    workers = {label: Worker(make, options, tree) for label, make, options in (ours, baseline, *others)}
    for _ in range(runs):
        for worker in workers.values():
            worker.once()
    sides = []
    for label, worker in workers.items():
        worker.close()
        rates, last = [answer["units"] / answer["seconds"] for answer in worker.answers], worker.answers[-1]
        sides.append(Side(label, rates, worker.tree.peak_gb if tree else last["peak_gb"], last))
    return sides


class Row(NamedTuple):
    case: str
    ours: str
    baseline: str
    ratio: str
    wanted: str
    memory: str
    bounded_by: str


def row(case, unit, ours, baseline, wanted="", memory_wanted="", note="", scale=1):
    """A line of the table from two Sides."""
    ratios = [a / b for a, b in zip(ours.rates, baseline.rates)]
    memory = f"{ours.memory_gb:.2f} / {baseline.memory_gb:.2f} GB ({ours.memory_gb / baseline.memory_gb:.2f})"
    memory += f", wanted {memory_wanted}" if memory_wanted else ""
    return Row(case, f"{number(ours.rate * scale)} {unit}",
               f"{number(baseline.rate * scale)} ({baseline.name})",
               f"{ours.rate / baseline.rate:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
               wanted, memory, note)


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def build_gpt(size, device="cpu", dtype=None):
    import torch

    from model import GPT, GPTConfig
    torch.manual_seed(0)
    return GPT(GPTConfig(**SIZES[size])).to(device=device, dtype=dtype or torch.float32)


def build_transformers(size, device="cpu", dtype=None):
    """The same network as transformers builds it: same sizes, no dropout, 50,304 rows."""
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = dict(SIZES[size])
    config = transformers.GPT2Config(vocab_size=50304, n_positions=sizes.pop("block_size"), resid_pdrop=0,
                                     embd_pdrop=0, attn_pdrop=0, bos_token_id=50256, eos_token_id=None,
                                     **sizes)
    return transformers.GPT2LMHeadModel(config).to(device=device, dtype=dtype or torch.float32)


def matrix_shapes(size):
    """(inputs, outputs, how many) of the network's weight matrices, the tied head among them."""
    C, n = SIZES[size]["n_embd"], SIZES[size]["n_layer"]
    return [(C, 3 * C, n), (C, C, n), (C, 4 * C, n), (4 * C, C, n), (C, 50304, 1)]


# ------------------------------------------------------------------------------------------------------------
# Generation and chat


def prompt_ids(n):
    import torch
    return torch.randint(50256, (1, n), generator=torch.Generator().manual_seed(0))


def generate_ours(dtype, prompt=64, new=256):
    import torch

    from model import generate, pick_dtype, store_by_input
    dtype = pick_dtype(torch.device("cpu"), training=False)[0] if dtype == "chat" else getattr(torch, dtype)
    model, ids = build_gpt("124M", dtype=dtype).eval(), prompt_ids(prompt)[0].tolist()
    if dtype == torch.float32:  # as chat.py does
        store_by_input(model)
    extra = {"weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
             "dtype": str(dtype)}
    return lambda: (len(list(generate(model, ids, new, temperature=0))), extra)


def generate_transformers(dtype, prompt=64, new=256):
    import torch
    model, ids = build_transformers("124M", dtype=getattr(torch, dtype)).eval(), prompt_ids(prompt)

    def once():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                             use_cache=True, pad_token_id=0)
        return out.size(1) - prompt
    return once


def generate_without_cache(prompt=64, new=256, every=8):
    """nanoGPT's sample.py: the whole text again for each token, the head for the last position only.

    It is slow, so one of `every` tokens is measured, evenly spread over the lengths.
    """
    import torch
    model, text = build_gpt("124M").eval(), prompt_ids(prompt + new)

    @torch.no_grad()
    def once():
        lengths = range(prompt + every // 2, prompt + new, every)
        for length in lengths:
            model.head(model.hidden(text[:, :length])[:, -1]).argmax()
        return len(lengths)
    return once


def read_memory():
    """Bytes per second that all cores together read from memory: the ceiling of generation."""
    import torch
    block = torch.ones(2**28)
    return lambda: (4 * block.numel(), {"sum": block.sum().item()})


def part_generate(args):
    tokens = {"prompt": 64, "new": args.new_tokens}
    for ours, theirs, wanted in (("float32", "float32", "0.95"), ("bfloat16", "bfloat16", "0.95"),
                                 ("chat", "float32", "1.35")):
        if args.dtype not in (None, theirs):
            continue
        mine, baseline, memory = compare(
            ("ours", generate_ours, {"dtype": ours, **tokens}),
            (f"transformers {theirs}", generate_transformers, {"dtype": theirs, **tokens}),
            ("memory", read_memory, {}), runs=args.runs)
        size, dtype = mine.extra["weight_bytes"], mine.extra["dtype"].removeprefix("torch.")
        note = (f"reads {size / 1e9:.2f} GB of weights a token: {size * mine.rate / 1e9:.1f} GB/s of the "
                f"{memory.rate / 1e9:.1f} GB/s that the memory gives ({size * mine.rate / memory.rate:.0%})")
        case = f"generate, {dtype}{', as chat picks' * (ours == 'chat')}"
        yield row(case, "tokens/s", mine, baseline, wanted, note=note)
    mine, loop = compare(("ours", generate_ours, {"dtype": "float32", **tokens}),
                         ("without a cache", generate_without_cache, tokens), runs=args.runs)
    yield row("generate, float32", "tokens/s", mine, loop, "5")


def second_turn(reread):
    """Time to the first token of the second answer in a conversation of 700 tokens."""
    import torch

    import chat
    import configs
    from model import KVCache, generate, pick_dtype, render_chat
    model = build_gpt("124M", dtype=pick_dtype(torch.device("cpu"), training=False)[0]).eval()
    model.info["kind"] = "chat"
    config = configs.load(chat.Config, "chat", ["--temperature=0"])
    first_turn = [{"role": "user", "content": "word " * 600},
                  {"role": "assistant", "content": "answer " * 80}]
    question, talk = "What did I say before that?", chat.Chat(model, config)
    read = render_chat(first_turn)
    list(generate(model, read, 1, cache=talk.cache))

    def once():
        if reread:
            talk.cache = KVCache(model)
        talk.messages = list(first_turn)
        del talk.cache.tokens[len(read):]
        start_s = time.perf_counter()
        answer = talk.reply(question)
        next(answer)
        seconds = time.perf_counter() - start_s
        answer.close()
        return 1, {"seconds": seconds}
    return once


def part_chat(args):
    ours, baseline = compare(("ours", second_turn, {"reread": False}),
                             ("reading it again", second_turn, {"reread": True}), runs=args.runs)
    yield row("chat, second turn after 700 tokens, to the first word", "/s", ours, baseline, "5",
              note=f"reading what is new: {1000 / ours.rate:.0f} ms against {1000 / baseline.rate:.0f} ms")


# ------------------------------------------------------------------------------------------------------------
# HellaSwag


def hellaswag_items(n):
    """Made-up questions of HellaSwag's lengths: contexts of 14 to 81 tokens (median 55), endings 8 to 55
    (33)."""
    rng = random.Random(0)
    words = ["time", "people", "water", "day", "place", "work", "house", "world", "hand", "room", "side"]

    def text(low, high, middle):
        return " ".join(rng.choice(words) for _ in range(round(rng.triangular(low, high, middle))))
    return [{"ind": i, "activity_label": "Made up", "ctx_a": ctx, "ctx_b": "", "ctx": ctx,
             "endings": [text(8, 55, 33) for _ in range(4)], "source_id": f"made_up~{i}", "split": "val",
             "split_type": "indomain", "label": str(rng.randrange(4))}
            for i, ctx in enumerate(text(14, 81, 62) for _ in range(n))]


def hellaswag_ours(n):
    import hellaswag
    model = build_gpt("124M").eval()
    items = hellaswag_items(n)
    return lambda: hellaswag.evaluate(model, items)["n"]


def hellaswag_usual(n):
    """build-nanogpt's way: the four padded rows of one question a forward pass, logits of every position."""
    import torch
    from torch.nn import functional as F

    from model import encode
    model = build_gpt("124M").eval()
    items = hellaswag_items(n)

    @torch.no_grad()
    def once():
        for item in items:
            context = encode(item["ctx"])
            rows = [context + encode(" " + ending) for ending in item["endings"]]
            width = max(map(len, rows))
            tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in rows])
            mask = torch.tensor([
                [0] * len(context) + [1] * (len(ids) - len(context)) + [0] * (width - len(ids))
                for ids in rows])
            logits = model(tokens)[:, :-1].float()
            losses = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
            ((losses * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)).argmin().item()
        return len(items)
    return once


def part_hellaswag(args):
    n = args.questions
    ours, usual = compare(("ours", hellaswag_ours, {"n": n}),
                          ("one question a pass", hellaswag_usual, {"n": n}), runs=args.runs)
    yield row(f"HellaSwag, 124M, fp32, {n} questions", "questions/s", ours, usual, "2.2", "1.00",
              "the matrix products: a context is read once for its four endings, and only endings have "
              "logits")


# ------------------------------------------------------------------------------------------------------------
# Prepare


def make_parquet(folder, megabytes=120):
    """Parquet files in FineWeb-Edu's layout: pages of the tiny world's documents in random order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from configs.tiny import world
    rng, texts, size = random.Random(0), [], 0
    documents = world.documents()
    while size < megabytes * 1e6:
        texts.append("\n".join(rng.choices(documents, k=rng.randint(5, 120))))
        size += len(texts[-1])
    folder.mkdir(parents=True)
    for i in range(4):
        pq.write_table(pa.table({"text": texts[i::4]}), folder / f"{i:03d}_00000.parquet",
                       row_group_size=1000)


def prepare_ours(parquet, out_dir):
    """prepare(), all of it, in a process that has started, as on the other side."""
    import prepare_fineweb
    from configs import load
    out_dir = Path(out_dir)
    config = load(prepare_fineweb.Config, "prepare_fineweb", [f"--source={parquet}", f"--out_dir={out_dir}"])

    def once():
        shutil.rmtree(out_dir, ignore_errors=True)
        prepare_fineweb.prepare(config)
        return sum(file.stat().st_size // 2 - 512 for file in out_dir.glob("*.bin"))
    return once


def tokenize_document(text):
    """One document, as build-nanogpt's fineweb.py does it."""
    import numpy as np
    encoding = bpe()
    tokens = [encoding._special_tokens["<|endoftext|>"]]
    tokens.extend(encoding.encode_ordinary(text["text"]))
    tokens = np.array(tokens)
    assert (tokens >= 0).all() and (tokens < 2**16).all()
    return tokens.astype(np.uint16)


@functools.lru_cache(maxsize=1)
def bpe():
    from model import tokenizer
    return tokenizer()


def prepare_pool(parquet, out_dir, shard_tokens=10**8):
    """build-nanogpt's way: rows of `datasets`, a pool of half the cores, chunks of 16, the parent fills
    shards.

    Building the dataset's cache is not counted: it belongs to the download there.
    """
    import multiprocessing

    import datasets
    import numpy as np
    datasets.disable_progress_bars()
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    files = sorted(str(path) for path in Path(parquet).rglob("*.parquet"))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=f"{out_dir}/cache")
    bpe()

    def once():
        count, shard, total, n_shards = 0, np.empty(shard_tokens, dtype=np.uint16), 0, 0
        with multiprocessing.Pool(max(1, os.cpu_count() // 2)) as pool:
            for tokens in pool.imap(tokenize_document, rows, chunksize=16):
                total += len(tokens)
                while len(tokens):
                    part = tokens[:shard_tokens - count]
                    shard[count:count + len(part)] = part
                    count, tokens = count + len(part), tokens[len(part):]
                    if count == shard_tokens:
                        np.save(Path(out_dir) / f"shard_{n_shards:06d}", shard)
                        count, n_shards = 0, n_shards + 1
        np.save(Path(out_dir) / f"shard_{n_shards:06d}", shard[:count])
        return total
    return once


def bpe_alone(parquet):
    """The tokenizer on the same texts, already in memory, on all cores: what bounds the preparation."""
    from concurrent.futures import ThreadPoolExecutor

    import pyarrow.parquet as pq
    texts = [text for file in sorted(Path(parquet).rglob("*.parquet"))
             for text in pq.read_table(file, columns=["text"])["text"].to_pylist() if text]
    encoding = bpe()

    def once():
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return sum(pool.map(lambda text: len(encoding.encode_ordinary(text)), texts))
    return once


def prepare_parts(parquet, out_dir):
    """The preparation's parts one after another, in one thread; the seconds of each."""
    import prepare_fineweb
    files = sorted(Path(parquet).rglob("*.parquet"))
    Path(out_dir).mkdir(parents=True, exist_ok=True)

    def once():
        times = [time.perf_counter()]
        chunks = list(prepare_fineweb.read_chunks(files, 0, 0))
        times.append(time.perf_counter())
        for chunk in chunks:
            prepare_fineweb.encode_chunk(chunk)
        times.append(time.perf_counter())
        count = prepare_fineweb.write_shard(Path(out_dir) / "all.bin", (chunk.tokens for chunk in chunks))
        prepare_fineweb.sha256_of(Path(out_dir) / "all.bin")
        times.append(time.perf_counter())
        return count, {"parquet": times[1] - times[0], "tokenizer": times[2] - times[1],
                       "writing": times[3] - times[2]}
    return once


def part_prepare(args):
    with tempfile.TemporaryDirectory() as folder:
        parquet = f"{folder}/parquet"
        if args.parquet:
            # four times over, so that start-up is not what is measured
            for i in range(4):
                shutil.copytree(args.parquet, Path(parquet) / str(i))
        else:
            make_parquet(Path(parquet))
        ours, pool, tokenizer, parts = compare(
            ("ours", prepare_ours, {"parquet": parquet, "out_dir": f"{folder}/ours"}),
            ("build-nanogpt's pool", prepare_pool, {"parquet": parquet, "out_dir": f"{folder}/pool"}),
            ("tokenizer", bpe_alone, {"parquet": parquet}),
            ("parts", prepare_parts, {"parquet": parquet, "out_dir": f"{folder}/parts"}),
            runs=args.runs, tree=True)
    seconds = {name: parts.extra[name] for name in ("tokenizer", "parquet", "writing")}
    shares = ", ".join(f"{name} {each / sum(seconds.values()):.0%}" for name, each in seconds.items())
    yield row("prepare", "tokens/s", ours, pool, "2.4", f"{0.5 + 0.25 * os.cpu_count():.2f} GB at most",
              f"of a thread's time: {shares}; tiktoken's `encode_ordinary` alone does "
              f"{number(tokenizer.rate)} tokens/s on all cores")


# ------------------------------------------------------------------------------------------------------------
# Checkpoint and start-up


def checkpoint_state():
    """What a 124M run saves: the model and AdamW's two moments."""
    import torch
    model = build_gpt("124M")
    moments = {i: [torch.zeros_like(p), torch.zeros_like(p)] for i, p in enumerate(model.parameters())}
    return {"model": model.state_dict(), "optimizers": [moments]}


def checkpoint_ours(folder):
    import train
    state = checkpoint_state()

    def once():
        train.save_checkpoint(folder, state)
        return Path(folder, "ckpt.pt").stat().st_size
    return once


def checkpoint_plain(folder):
    """torch.save and fsync of the same bytes into a new file: overwriting one is cheaper, and loses it.

    The oldest is deleted afterwards, uncounted, as ours does within its time: so either side begins with as
    much memory just freed. Deleting it right before made the writing twice as fast.
    """
    import torch
    state, paths = checkpoint_state(), [Path(folder, f"plain{i}.pt") for i in range(3)]

    def once():
        paths.append(paths.pop(0))
        start_s = time.perf_counter()
        with open(paths[0], "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start_s
        paths[1].unlink(missing_ok=True)
        return paths[0].stat().st_size, {"seconds": seconds}
    return once


def part_checkpoint(args):
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        ours, plain = compare(("ours", checkpoint_ours, {"folder": folder}),
                              ("torch.save + fsync", checkpoint_plain, {"folder": folder}), runs=args.runs)
        size = Path(folder, "ckpt.pt").stat().st_size
    seconds, run_s = size / ours.rate, 500 * TOKENS_PER_STEP / STORY_TOKENS_PER_S
    yield row("checkpoint, 124M and AdamW", "GB/s", ours, plain, "0.5", scale=1e-9,
              note=f"the disk: {size / 1e9:.2f} GB in {seconds:.1f} s = {seconds / run_s:.2%} of 500 steps "
                   f"at {STORY_TOKENS_PER_S:,} tokens/s (wanted: below 1%)")


def start_torch(code):
    return lambda: (subprocess.run([sys.executable, "-c", code], check=True), 1)[1]


def start_chat(folder):
    command = [sys.executable, "chat.py", f"--model={folder}", "--prompt=hi", "--max_new_tokens=1"]
    return lambda: (subprocess.run(command, check=True, stdout=subprocess.DEVNULL), 1)[1]


def start_train(folder):
    """Until the first step is in the log, as configs/tiny has it: with an evaluation before."""
    def once():
        out_dir = Path(folder) / "run"
        shutil.rmtree(out_dir, ignore_errors=True)
        command = [sys.executable, "train.py", "configs/tiny", f"--data_dir={folder}/data",
                   f"--out_dir={out_dir}"]
        start_s = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and '"loss"' not in read_text(out_dir / "log.jsonl"):
                time.sleep(0.01)
            seconds = time.perf_counter() - start_s
            process.kill()
        return 1, {"seconds": seconds}
    return once


def prepare_tiny(out_dir):
    command = [sys.executable, "prepare_fineweb.py", "configs/tiny", f"--out_dir={out_dir}"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def read_text(path):
    return path.read_text(encoding="utf-8") if path.exists() else ""


def part_startup(args):
    with tempfile.TemporaryDirectory() as folder:
        import model
        model.save_model(build_gpt("small"), f"{folder}/model", kind="chat")
        prepare_tiny(f"{folder}/data")
        # the first optimizer of a process imports torch's compiler, which takes as long as torch itself
        optimizer = "import torch; torch.optim.AdamW([torch.zeros(1, requires_grad=True)])"
        for case, which, path, name, code in (
                ("chat.py --prompt=hi, all of it", start_chat, f"{folder}/model", "import torch",
                 "import torch"),
                ("train.py configs/tiny, to the first step", start_train, folder, "torch and an AdamW",
                 optimizer)):
            ours, alone = compare(("ours", which, {"folder": path}), (name, start_torch, {"code": code}),
                                  runs=args.runs)
            note = (f"{1 / ours.rate:.2f} s, of which {name} {1 / alone.rate:.2f} s "
                    f"({ours.rate / alone.rate:.0%})")
            yield row(case, "starts/s", ours, alone, "mostly torch", note=note)._replace(memory="")


# ------------------------------------------------------------------------------------------------------------
# The training step


def train_config(size, batch, *words):
    import configs
    import train
    B, T = batch or BATCH[size]
    words = [*(f"--{name}={value}" for name, value in SIZES[size].items()), f"--block_size={T}",
             "--dropout=0", f"--micro_batch_size={B}", f"--tokens_per_step={B * T}", *words]
    return configs.load(train.Config, "train", words)


def random_batches(batch, device):
    """Endless (tokens, targets), each (B, T)."""
    import torch
    generator = torch.Generator().manual_seed(0)
    while True:
        block = torch.randint(50257, (batch[0], batch[1] + 1), generator=generator).to(device)
        yield block[:, :-1], block[:, 1:]


def pick(device, dtype):
    import torch
    device = torch.device("cuda" if device == "cuda" else "cpu")
    return device, getattr(torch, dtype), torch.cuda.synchronize if device.type == "cuda" else lambda: None


def train_ours(size, dtype, compiled=False, batch=None, device="cpu", words=()):
    """train.py's step: its model, optimizer, precision and memory settings, one micro-batch a step."""
    import torch

    import model as model_py
    import train
    model_py.keep_freed_memory()
    torch.set_float32_matmul_precision("high")
    config, batch = train_config(size, batch, *words), batch or BATCH[size]
    device, dtype, wait = pick(device, dtype)
    model = train.start_model(config, device)
    optimizers, batches = train.make_optimizers(model, config), random_batches(batch, device)
    if compiled:
        model.compile()

    def once():
        tokens, targets = next(batches)
        with train.autocast(device, dtype):
            loss = model(tokens, targets) / config.tokens_per_step
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        loss.item()
        wait()
        return config.tokens_per_step
    return once


def train_transformers(size, dtype, compiled=False, batch=None, device="cpu"):
    """The same step with transformers' network and loss, and the AdamW that its Trainer picks (fused)."""
    import torch
    batch = batch or BATCH[size]
    device, dtype, wait = pick(device, dtype)
    model = build_transformers(size, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = random_batches(batch, device)
    if compiled:
        model.compile()

    def once():
        tokens, _ = next(batches)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(tokens, labels=tokens).loss  # it shifts the labels itself
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        loss.item()
        wait()
        return batch[0] * batch[1]
    return once


def matrix_products(size, dtype, batch=None, device="cpu"):
    """Only the products with weight matrices that a step needs: forward, and two backward. No step can be
    faster that has all of them in this precision."""
    import torch
    batch = batch or BATCH[size]
    device, dtype, wait = pick(device, dtype)
    N = batch[0] * batch[1]
    work = []
    for inputs, outputs, count in matrix_shapes(size):
        x, w, y = (torch.randn(shape, device=device).to(dtype)
                   for shape in ((N, inputs), (inputs, outputs), (N, outputs)))
        out = [torch.empty_like(tensor) for tensor in (y, x, w)]
        work += [(x, w, out[0]), (y, w.T, out[1]), (x.T, y, out[2])] * count

    def once():
        for a, b, out in work:
            torch.mm(a, b, out=out)
        wait()
        return N
    return once


def matmul_peak():
    """The card's own speed: floating-point operations per second of one large bf16 product."""
    import torch
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def once():
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        return 20 * 2 * 8192**3
    return once


def part_train(args, compiled=False):
    for size, dtype, wanted, memory in (
            ("small", "bfloat16", "1.8", "0.60"), ("small", "float32", "1.8", "0.60"),
            ("124M", "bfloat16", "1.10", ""), ("124M", "float32", "1.25", "")):
        if compiled:
            wanted, memory = "1.00", "0.65"
        if args.dtype not in (None, dtype) or args.size not in (None, size):
            continue
        if compiled and dtype == "float32":
            continue
        step = {"size": size, "dtype": dtype}
        # the compiler unrolls the chunks: larger ones make a smaller graph
        words = [f"--loss_chunk_rows={max(512, CHUNK_ROWS[size]) if compiled else CHUNK_ROWS[size]}"]
        sides = [("ours", train_ours, {**step, "compiled": compiled, "words": words}),
                 ("transformers", train_transformers, {**step, "compiled": compiled})]
        if compiled:  # fill the compiler's cache first: the memory of compiling is not what is compared
            for _, make, options in sides:
                Worker(make, options, tree=False).close()
        ours, theirs, products = compare(*sides, ("products", matrix_products, step), runs=args.runs)
        yield row(f"train step{', compiled' * compiled}, {size}, {dtype}, "
                  f"{BATCH[size][0]} x {BATCH[size][1]}",
                  "tokens/s", ours, theirs, wanted, memory,
                  f"the products with weight matrices alone, in {dtype}: "
                  f"{ours.rate / products.rate:.0%} of our time, {theirs.rate / products.rate:.0%} of theirs")
    if args.cuda and not compiled:
        yield from train_on_cuda(args)


def train_on_cuda(args, batch=(16, 1024)):
    """The real micro-batch, compiled on both sides, and ours once more with the loss in chunks."""
    step = {"size": "124M", "dtype": "bfloat16", "batch": batch, "device": "cuda", "compiled": True}
    ours, theirs, chunks, peak = compare(
        ("ours", train_ours, step), ("transformers", train_transformers, step),
        ("chunks", train_ours, {**step, "words": ["--loss_chunk_rows=2048"]}), ("peak", matmul_peak, {}),
        runs=args.runs)
    sizes = SIZES["124M"]
    weights = sum(inputs * outputs * count for inputs, outputs, count in matrix_shapes("124M"))
    flops = 6 * weights + 12 * sizes["n_layer"] * sizes["n_embd"] * batch[1]
    yield row(f"train step, CUDA, 124M, bf16, compiled, {batch[0]} x {batch[1]}", "tokens/s", ours, theirs,
              note=f"MFU {ours.rate * flops / peak.rate:.0%}: (6 x matrix weights + 12 n_layer n_embd T) x "
                   f"tokens/s of the {peak.rate / 1e12:.0f} TFLOP/s that a large bf16 product reaches here; "
                   f"loss in chunks: {number(chunks.rate)} tokens/s, {chunks.memory_gb:.1f} GB")


def part_compiled(args):
    yield from part_train(args, compiled=True)


def optimizer_ours(optimizer):
    import torch

    import train
    model = build_gpt("124M")
    optimizers = train.make_optimizers(model, train_config("124M", None, f"--optimizer={optimizer}"))
    return optimizer_once(model, optimizers, torch)


def optimizer_torch(optimizer):
    """torch.optim's own: AdamW alone, or its Muon on the hidden matrices (q, k, v as one) with AdamW for the
    rest."""
    import torch
    model = build_gpt("124M")
    if optimizer == "adamw":
        return optimizer_once(model, [torch.optim.AdamW(model.parameters(), fused=True)], torch)
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    rest = [p for name, p in model.named_parameters() if p.ndim < 2 or ".h." not in name]
    muon = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw")
    return optimizer_once(model, [muon, torch.optim.AdamW(rest, fused=True)], torch)


def optimizer_once(model, optimizers, torch):
    for p in model.parameters():
        p.grad = torch.randn_like(p)

    def once():
        for optimizer in optimizers:
            optimizer.step()
        return 1
    return once


def part_optimizer(args):
    from model import EMULATES_BF16
    dtype = "float32" if EMULATES_BF16 else "bfloat16"
    for name, share_wanted in (("adamw", ""), ("muon", " (wanted: below 3%)")):
        ours, theirs, step = compare(
            ("ours", optimizer_ours, {"optimizer": name}),
            ("torch.optim", optimizer_torch, {"optimizer": name}),
            ("step", train_ours, {"size": "124M", "dtype": dtype,
                                  "words": [f"--loss_chunk_rows={CHUNK_ROWS['124M']}"]}), runs=args.runs)
        step_s = TOKENS_PER_STEP / step.rate
        yield row(f"optimizer step, {name}, 124M", "steps/s", ours, theirs,
                  note=f"{1 / ours.rate:.2f} s = {1 / ours.rate / step_s:.2%} of the {step_s:,.0f} s that "
                       f"{TOKENS_PER_STEP:,} tokens take here in {dtype}{share_wanted}")


def part_long(args):
    """Many steps of a model so small that everything but the arithmetic shows."""
    with tempfile.TemporaryDirectory() as folder:
        prepare_tiny(f"{folder}/data")
        words = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=64", "--micro_batch_size=8",
                 "--device=cpu", "--tokens_per_step=512", f"--max_steps={args.steps}",
                 *(f"--{name}_every=0" for name in LOOKS)]
        subprocess.run([sys.executable, "train.py", "configs/tiny", f"--data_dir={folder}/data",
                        f"--out_dir={folder}/run", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        log = [json.loads(line) for line in read_text(Path(folder, "run", "log.jsonl")).splitlines()]
    log = [line for line in log if "tok_per_s" in line]
    quarters = [log[i * len(log) // 4:(i + 1) * len(log) // 4] for i in range(4)]
    speeds = [statistics.median(line["tok_per_s"] / 512 for line in quarter) for quarter in quarters]
    first, last = quarters[0][-1]["mem_gb"], log[-1]["mem_gb"]
    yield Row(f"{args.steps:,} steps, 2 layers of 32", f"{number(speeds[3])} steps/s",
              f"{number(speeds[0])} (first quarter)", f"{speeds[3] / speeds[0]:.2f}", "1.00",
              f"{last:.3f} / {first:.3f} GB ({last / first:.2f}), wanted 1.00",
              "steps/s by quarter: " + ", ".join(map(number, speeds)))


# ------------------------------------------------------------------------------------------------------------


PARTS = {"prepare": part_prepare, "train": part_train, "hellaswag": part_hellaswag, "generate": part_generate,
         "chat": part_chat, "checkpoint": part_checkpoint, "startup": part_startup,
         "optimizer": part_optimizer, "long": part_long, "compiled": part_compiled}
SLOW = {"compiled"}


def machine():
    """One line: what this was measured on, and when."""
    import platform

    import torch
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join([f"{name}, {os.cpu_count()} cores", *cards, platform.system(),
                      f"torch {torch.__version__}", f"Python {platform.python_version()}",
                      time.strftime("%Y-%m-%d")])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part",
                        help=f"{', '.join(PARTS)}; all but {', '.join(SLOW)}")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of each side")
    parser.add_argument("--parquet", help="prepare: a folder of parquet files, read four times over")
    parser.add_argument("--disk", help="checkpoint: a folder on the disk to write to")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"],
                        help="train, compiled, generate: only the rows whose baseline has this precision")
    parser.add_argument("--size", choices=SIZES, help="train, compiled: only the rows of this size")
    parser.add_argument("--questions", type=int, default=48, help="hellaswag: how many")
    parser.add_argument("--new_tokens", type=int, default=256, help="generate: how many")
    parser.add_argument("--steps", type=int, default=2000, help="long: how many")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return worker_main(*json.loads(args.side))
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    import torch
    args.cuda = torch.cuda.is_available()
    print(f"{machine()}; medians of {args.runs}, ranges in brackets\n")
    print("| " + " | ".join(Row._fields).replace("_", " ") + " |\n|" + "---|" * len(Row._fields), flush=True)
    for part in args.parts or [part for part in PARTS if part not in SLOW]:
        for line in PARTS[part](args):
            print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()
