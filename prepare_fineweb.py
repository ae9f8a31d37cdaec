"""FineWeb-Edu, or text of your own, to shards of tokens.

Reads   a hub dataset of parquet files, downloaded while the ones before are tokenised; or with --source a
        file or folder of .parquet (column `text`), .jsonl (key `text`) and .txt.
Writes  out_dir: <name>_val_000000.bin, <name>_train_000001.bin, ... of 100M tokens each, and meta.json; what
        it downloads goes to out_dir/parquet. Stop it when you like: the same command goes on where it was.

    python prepare_fineweb.py                                 28.5 GB to download, then 20 GB of shards
    python prepare_fineweb.py --max_tokens=1e9                a tenth of it
    python prepare_fineweb.py --source=texts --out_dir=data/texts
    python prepare_fineweb.py --show                          what a shard looks like, token by token
    python prepare_fineweb.py --verify                        reads every byte of every shard once more

Time: 8.5M tokens a second on two cores (measured on 30M tokens), or what the line carries (28.5 GB at
100 MB/s: 5 minutes).
"""

import contextlib
import errno
import functools
import hashlib
import importlib.util
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

# first, as it explains a package that is missing
from configs import (
    FOLDER,
    HINTS,
    UNFINISHED,
    UserError,
    explain,
    load,
    put_in_place,
    reason_of,
    replacing,
    run,
    write_text,
)

# isort: split
import numpy as np

# `model` is imported where it is needed, as it imports torch: the process that downloads has no use for it.

SHARD_TOKENS = 100_000_000
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024  # llm.c's and modded-nanogpt's format
LOCAL_VAL_SHARE = 1 / 64  # of a local source's bytes, so that even dense text stays below 2 % of the tokens
CHUNK_BYTES = 1 << 20  # of text that a thread encodes at a time
TXT_DOCUMENT = 1 << 16  # characters; a longer .txt is cut into documents of at most this length
FILES_AHEAD = 2  # downloaded files that may wait for the tokeniser
ATTEMPTS, BACKOFF_S, STALL_S = 6, 1.0, 120.0  # of a download; a server silent for STALL_S counts as gone
TOKENS_PER_PARQUET_BYTE = 0.35  # FineWeb-Edu: 9.95B tokens in 28.5 GB; only to foresee space and time


@dataclass
class Config:
    source: str
    out_dir: str
    workers: int
    max_tokens: int
    val_tokens: int
    dataset: str
    subset: str
    keep_parquet: bool
    show: bool
    verify: bool


# ------------------------------------------------------------------------------------------------------------
# Shards on disk


def write_shard(path, tokens):
    """Writes `tokens`, an array of ids below 65,536 or an iterable of such arrays; returns their number.

    llm.c's format: 256 little-endian int32 (magic, version, count, zeros), then uint16 ids. The file appears
    whole or not at all.
    """
    count = 0
    with replacing(path) as file:
        file.write(bytes(HEADER_BYTES))
        for part in [tokens] if isinstance(tokens, np.ndarray) else tokens:
            assert part.size == 0 or 0 <= part.min() and part.max() < 1 << 16, "id beyond uint16"
            file.write(part.astype("<u2", copy=False).tobytes())
            count += part.size
        file.seek(0)
        file.write(np.array([MAGIC, VERSION, count], dtype="<i4").tobytes())
    return count


def read_shard(path):
    """The tokens of a shard, a read-only uint16 memmap. Raises UserError with its name if it is not whole."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    magic, version, count = np.frombuffer(header[:12].ljust(12, b"\0"), dtype="<i4").tolist()
    if len(header) < HEADER_BYTES or (magic, version) != (MAGIC, VERSION) or count < 0:
        raise UserError(f"{path} is not a token shard (it begins with {magic}, {version} instead of {MAGIC}, "
                        f"{VERSION}); delete it, and run the command that made it again")
    if size != HEADER_BYTES + 2 * count:
        raise UserError(f"{path} should hold {count:,} tokens in {HEADER_BYTES + 2 * count:,} bytes and has "
                        f"{size:,} bytes; delete it, and run the command that made it again")
    if count == 0:
        return np.zeros(0, dtype="<u2")  # nothing cannot be mapped
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


def shards(data_dir, split):
    """The paths of the shards of `split`, "val" or "train", in order. Raises UserError without any, and where
    meta.json (which llm.c's folders do not have) names others than are there."""
    command = f"`python prepare_fineweb.py --out_dir={data_dir}`"
    meta = read_meta(data_dir) if (Path(data_dir) / "meta.json").exists() else {}
    if not meta.get("complete", True):
        raise UserError(f"{data_dir} is not complete: the command that began it ({command} and its settings) "
                        "goes on where it stopped")
    named = {shard if isinstance(shard, str) else shard["name"] for shard in meta.get("shards", [])}
    there = {path.name for path in Path(data_dir).glob("*.bin")}
    if named and there != named:
        what = "lacks" if named - there else "holds more than its meta.json names:"
        raise UserError(f"{data_dir} {what} {min(named ^ there)}; the command that made it makes what is "
                        "missing, and what is too much belongs elsewhere")
    found = sorted(path for path in Path(data_dir).glob("*.bin") if split_of(path.name) == split)
    if not found and split == "val" and meta.get("complete"):
        raise UserError(f"{data_dir} was made without a validation split (val_tokens = 0): --eval_every=0 "
                        "trains without; another --out_dir= of prepare_fineweb.py can have one")
    if not found:
        raise UserError(f"there are no {split} shards in {data_dir}; {command} makes them "
                        f"(data/tiny: `python prepare_fineweb.py configs/tiny`)")
    return found


def split_of(name):
    """"val" or "train": what a shard's name ends in, whatever its source is called; "" of other files."""
    found = re.search(r"_(val|train)_\d+\.bin$", name)
    return found[1] if found else ""


def lock_folder(folder, setting="out_dir"):
    """Takes a folder for this process until the file that is returned is closed, or the process has ended."""
    if not str(folder):
        raise UserError(f"{setting} is empty; name a folder with --{setting}=")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = open(Path(folder) / ".lock", "a+b")  # noqa: SIM115 - open for as long as the run
    except OSError as error:
        raise UserError(f"{setting} = {folder} cannot be written: {error.strerror}; choose another "
                        f"with --{setting}=") from None
    try:
        if os.name == "nt":
            import msvcrt
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            raise UserError(f"{setting} = {folder} is in use by another run; wait for it, or choose "
                            f"another --{setting}=") from None
        raise UserError(f"{setting} = {folder} cannot be locked ({error.strerror}), as on some network "
                        f"drives; choose --{setting}= on a disk of this machine") from None
    for pattern in (f"*{UNFINISHED}", f"model/*{UNFINISHED}"):  # of a run that was killed while it wrote
        for leftover in Path(folder).glob(pattern):
            with contextlib.suppress(OSError):
                leftover.unlink()
    return file


def read_meta(data_dir):
    """The contents of data_dir/meta.json. Raises UserError if it is missing or damaged."""
    path = Path(data_dir) / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        found = meta.get("shards", []) if isinstance(meta, dict) else None
        whole = {"name", "tokens", "sha256", "next"}
        if isinstance(found, dict) or isinstance(found, list) and all(
                isinstance(shard, dict) and whole <= set(shard) for shard in found):
            return meta
        problem = "there is no list of shards in it"
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        problem = error
    raise UserError(f"{path} is damaged ({problem}); delete it and the shards, and prepare again")


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------------------
# Documents from files
#
# A reader yields (text, share of the file read so far) from document number `skip` on. What should be a text
# may be anything: encode_document() sorts it out.


def read_parquet(path, skip):
    import pyarrow as pa

    with open_parquet(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        ends = np.cumsum([group.num_rows for group in groups], dtype=int).tolist()
        wanted = [i for i in range(len(groups)) if ends[i] > skip]
        row = ends[wanted[0]] - groups[wanted[0]].num_rows if wanted else 0
        n_rows, size = file.metadata.num_rows, sum(group.total_byte_size for group in groups)
        batch_rows = min(max((n_rows << 20) // max(size, 1), 1), 1024)  # about 1 MB, be it words or books
        for batch in file.iter_batches(batch_rows, row_groups=wanted, columns=["text"], use_threads=False):
            column = batch.column(0).cast(pa.large_string())
            try:
                texts = column.to_pylist()
            except UnicodeDecodeError:  # surrogates in the place of stray bytes, as in the other readers
                texts = [text and text.decode("utf-8", errors="surrogateescape")
                         for text in column.cast(pa.large_binary()).to_pylist()]
            for text in texts:
                row += 1
                if row > skip:
                    yield text, row / n_rows


@contextlib.contextmanager
def open_parquet(path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # without these two settings a whole row group is read at once, and that may be the whole file
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            kinds = {field.name: str(field.type) for field in file.schema_arrow}
            if "text" not in kinds:  # pyarrow would give rows without columns, and no error
                raise UserError(f"{path} has no column `text`, only {', '.join(kinds)}")
            if not re.fullmatch(r"(large_)?string(_view)?|dictionary<values=string,.*", kinds["text"]):
                raise UserError(f"the column `text` of {path} holds {kinds['text']}, not strings")
            yield file
    except (pa.ArrowException, OSError) as error:  # of a damaged page it is an OSError, which names no file
        number = getattr(error, "errno", None) or 0
        raise OSError(number, " ".join(str(error).split())[:200], str(path)) from error


def open_text(path):
    """UTF-8, or the UTF-16 of Windows' PowerShell and Notepad, which begins with a mark."""
    with open(path, "rb") as file:
        is_utf16 = file.read(2) in (b"\xff\xfe", b"\xfe\xff")
    return (open(path, encoding="utf-16", errors="replace") if is_utf16 else
            open(path, encoding="utf-8-sig", errors="surrogateescape"))


def read_jsonl(path, skip):
    size, number = max(path.stat().st_size, 1), 0
    with open_text(path) as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                text = row.get("text") if isinstance(row, dict) else row
            except (ValueError, RecursionError) as error:
                row = text = error
            if number == 0 and isinstance(row, dict) and "text" not in row:
                raise UserError(f"{path} has no `text` in its first line, only {', '.join(row)}")
            number += 1
            if number > skip:
                yield text, file.buffer.tell() / size


def read_txt(path, skip):
    """A .txt is one document; one longer than TXT_DOCUMENT is several, cut at blank lines where it can be."""
    size, number, rest = max(path.stat().st_size, 1), 0, ""
    with open_text(path) as file:
        while rest or number == 0:
            rest += file.read(TXT_DOCUMENT + 1 - len(rest))
            end = len(rest)
            if end > TXT_DOCUMENT:
                half = TXT_DOCUMENT // 2
                cuts = [rest.rfind(mark, half, TXT_DOCUMENT) + len(mark) for mark in ("\n\n", "\n", " ")]
                end = next((cut for cut in cuts if cut >= half), TXT_DOCUMENT)
            number += 1
            if number > skip:
                yield rest[:end], file.buffer.tell() / size
            rest = rest[end:]


def read_tiny(path, skip):
    from configs.tiny import world

    documents = world.documents()
    for number, text in enumerate(documents[skip:], skip + 1):
        yield text, number / len(documents)


READERS = {".parquet": read_parquet, ".jsonl": read_jsonl, ".txt": read_txt}
TINY = FOLDER / "tiny" / "world.py"  # the source "tiny": what it says is made, not read


def read_documents(path, skip):
    """What is in a file from document number `skip` on; OSError or UserError if it cannot be read."""
    return (read_tiny if path == TINY else READERS[path.suffix.lower()])(path, skip)


def text_bytes(path):
    """How many bytes of text are in a file."""
    if path.suffix.lower() != ".parquet":
        return sum(n_bytes(text) for text, _ in read_documents(path, 0))
    import pyarrow as pa
    import pyarrow.compute as pc

    with open_parquet(path) as file:
        batches = file.iter_batches(256, columns=["text"], use_threads=False)
        sizes = (pc.binary_length(batch.column(0).cast(pa.large_string())) for batch in batches)
        return sum(pc.sum(size).as_py() or 0 for size in sizes)


def n_bytes(text):
    return len(text.encode("utf-8", errors="surrogatepass")) if isinstance(text, str) else 0


# ------------------------------------------------------------------------------------------------------------
# Texts to tokens, on all cores


@dataclass
class Chunk:
    """Some documents of one file, in order; encode_chunk() fills in the lower half."""

    file: int  # its number in the source
    first: int  # the number in the file of the first document
    texts: list
    share: float  # of the file, read up to the end of this
    last: bool  # of its file
    tokens: np.ndarray = None  # of all documents, uint16
    token_ends: np.ndarray = None  # [0, where each document ends in `tokens`]
    byte_ends: np.ndarray = None  # the same in bytes of text
    outcomes: list = field(default_factory=list)  # "encoded", or why a document was skipped


def read_chunks(paths, file, document):
    """Chunks of about CHUNK_BYTES, from `document` of the first of `paths` on; its number is `file`."""
    for number, path in enumerate(paths, file):
        first = document if number == file else 0
        texts, size = [], 0
        for text, share in read_documents(path, first):
            texts.append(text)
            size += len(text) if isinstance(text, str) else 1
            if size >= CHUNK_BYTES:
                yield Chunk(number, first, texts, share, last=False)
                first, texts, size = first + len(texts), [], 0
        yield Chunk(number, first, texts, 1.0, last=True)


def encode_chunk(chunk):
    """Encodes the texts of a chunk, each after an <|endoftext|>, and lets go of them."""
    from model import END_OF_TEXT

    parts, lengths, sizes = [np.zeros(0, dtype=np.uint16)], [0], [0]
    for text, easy in zip(chunk.texts, are_easy(chunk.texts), strict=True):
        ids, outcome = encode_document(text, easy)
        chunk.outcomes.append(outcome)
        parts += [np.array([END_OF_TEXT], dtype=np.uint16), *ids] if ids else []
        lengths.append(1 + sum(map(len, ids)) if ids else 0)
        sizes.append(n_bytes(text))
    chunk.tokens = np.concatenate(parts, dtype=np.uint16, casting="unsafe")  # GPT-2's ids are below 50,257
    chunk.token_ends, chunk.byte_ends = np.cumsum(lengths), np.cumsum(sizes)
    chunk.texts = []
    return chunk


def encode_document(text, easy=False):
    """([uint32 array, ...], "encoded"), or ([], why not)."""
    from model import slices, tokenizer

    if not isinstance(text, str):
        return [], "null" if text is None else "broken JSON" if isinstance(text, Exception) else "not a text"
    if not text.strip():
        return [], "empty"
    if text.count("\0") > len(text) // 10:  # UTF-16 without its mark, or no text at all
        return [], "full of NUL characters"
    try:
        if easy:
            return [easy_ids(part) for part in slices(text)], "encoded"
        # encode_ordinary() without the Python list; while it works, other threads can
        return [tokenizer().encode_to_numpy(part, disallowed_special=()) for part in slices(text)], "encoded"
    except UnicodeEncodeError:
        return [], "not Unicode"
    except ValueError:  # the splitter's regular expression gave up
        return [], "too hard for the tokenizer"


# Much of the time goes into one look-ahead of GPT-2's splitter, `\s+(?!\S)`: of several spaces before a word
# the last belongs to the word. Where no two spaces meet it changes nothing, and without it no backtracking is
# needed: 1.4 times the speed. The one common pair, a blank line, is cut in two beforehand, as it would be.
EASY_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
CUT, CUT_ID = "<|cut|>", 50303
NOT_EASY = (r"[\t\r\v\f\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]"
            r"|  | \n|\n |\n\n\n|\n\n$|<\|cut\|>")


def are_easy(texts):
    """Which texts easy_ids() may be used for, a bool for each."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        column = pa.array([text if isinstance(text, str) else None for text in texts], pa.large_string())
    except UnicodeEncodeError:
        return [False] * len(texts)
    return [found is False for found in pc.match_substring_regex(column, NOT_EASY).to_pylist()]


def easy_ids(text):
    """What encode_ordinary() gives for a text of are_easy(), as a uint32 array."""
    ids = easy_tokenizer().encode_to_numpy(text.replace("\n\n", f"\n{CUT}\n"), allowed_special={CUT},
                                           disallowed_special=())
    return ids[ids != CUT_ID]


@functools.lru_cache(maxsize=1)
def easy_tokenizer():
    import tiktoken

    from model import tokenizer

    return tiktoken.Encoding("gpt2_easy", pat_str=EASY_SPLIT, mergeable_ranks=tokenizer()._mergeable_ranks,
                             special_tokens={CUT: CUT_ID})


def map_in_order(function, items, workers, ahead=None):
    """map(function, items) by `workers` threads; the results come in the order of the items.

    ahead  how many results may wait (4 per thread); a slow reader stops the threads, so memory is bounded
    """
    ahead = 4 * workers if ahead is None else ahead
    waiting = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > ahead:
                yield result_of(waiting.popleft())
        while waiting:
            yield result_of(waiting.popleft())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def result_of(future):
    """future.result(), which on Windows would keep Ctrl-C waiting, too."""
    while not wait([future], timeout=0.5).done:
        pass
    return future.result()


class TokenStream:
    """Encoded chunks as one stream of tokens that can be cut anywhere and taken up there again."""

    def __init__(self, chunks, offset, outcomes, watch):
        """
        chunks    encoded, beginning with the document that holds the first token to come
        offset    of that token in it
        outcomes  {outcome: how many documents before had it}
        watch     called with (chunk, tokens taken of it)
        """
        self.chunks, self.at, self.outcomes, self.watch = chunks, offset, Counter(outcomes), watch
        self.chunk = None

    def more(self):
        """Whether there are tokens left."""
        while self.chunk is None or self.at >= len(self.chunk.tokens):
            following = next(self.chunks, None)
            if following is None:
                return False
            if self.chunk is not None:
                self.outcomes.update(self.chunk.outcomes)
                self.at = 0
            self.chunk = following
        return True

    def take(self, limit, byte_limit=math.inf):
        """Yields the next `limit` tokens, or those of the next `byte_limit` bytes, or all that there are."""
        while limit > 0 and self.more():
            chunk, start = self.chunk, self.at
            self.at = min(start + limit, int(np.interp(byte_limit, chunk.byte_ends, chunk.token_ends)))
            yield chunk.tokens[start:self.at]
            self.watch(chunk, self.at - start)
            if self.at < len(chunk.tokens):
                return
            limit -= self.at - start
            byte_limit -= chunk.byte_ends[-1]

    def drop_rest_of_document(self):
        """Passes over what is left of a document that was cut; returns how many tokens that was."""
        document, start = self.document(), self.at
        if self.chunk and start > self.chunk.token_ends[document]:
            self.at = int(self.chunk.token_ends[document + 1])
        return self.at - start

    def document(self):
        """The number in the chunk of the document that holds the next token."""
        return int(np.searchsorted(self.chunk.token_ends[1:], self.at, side="right"))

    def position(self):
        """([file, document, offset] of the next token, {outcome: how many documents before it had it})."""
        chunk, document = self.chunk, self.document()
        outcomes = dict(sorted((self.outcomes + Counter(chunk.outcomes[:document])).items()))
        if document == len(chunk.outcomes) and chunk.last:
            return [chunk.file + 1, 0, 0], outcomes
        return [chunk.file, chunk.first + document, self.at - int(chunk.token_ends[document])], outcomes


# ------------------------------------------------------------------------------------------------------------
# The hub
#
# Listing and downloading run in a process of their own: hf_transfer holds the GIL, so here it would stop the
# tokenising; a process can be killed when its server falls silent; and what huggingface_hub reads from the
# environment at its import can be set before it.


class DownloadError(Exception):
    """A download that may be tried again; `status` is HTTP's and `errno` the system's, or 0."""

    def __init__(self, text, status=0, errno=0):
        super().__init__(text)
        self.status, self.errno = status, errno


def list_parquet(report, dataset, subset):
    """(revision, [{"name", "size", "sha256" or None}, ...]) of the parquet files of a hub dataset, in order.

    subset  a folder of it, or the beginning of the files' names; "" means all
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    folder = subset.rpartition("/")[0] or None
    found = [entry for entry in HfApi().list_repo_tree(dataset, folder, recursive=True, repo_type="dataset")
             if entry.path.endswith(".parquet")]
    chosen = ([entry for entry in found if entry.path.startswith(f"{subset}/")]
              or [entry for entry in found if entry.path.startswith(subset)])
    if not chosen:
        folders = ", ".join(sorted({entry.path.rpartition("/")[0] for entry in found})[:20])
        raise UserError(f"{dataset} has no parquet files under subset = {subset!r}; it has some in: "
                        f"{folders or 'none'}")
    files = [{"name": entry.path, "size": entry.size, "sha256": entry.lfs.sha256 if entry.lfs else None}
             for entry in sorted(chosen, key=lambda entry: entry.path)]
    # what is listed may change before we come back; the files of one commit cannot
    url = hf_hub_url(dataset, files[0]["name"], repo_type="dataset")
    return get_hf_file_metadata(url, retry_on_errors=True).commit_hash or "main", files


def download(report, dataset, revision, file, folder, plain):
    """Downloads `file` into `folder` and returns its path there, once its size and hash are right.

    plain  use neither Xet nor hf_transfer: slower, but goes on after a cut and waits as long as a server asks
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(dataset, file["name"], repo_type="dataset", revision=revision)
    head = get_hf_file_metadata(url, retry_on_errors=True)
    xet = head.xet_file_data and not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet")
    if plain or xet or not importlib.util.find_spec("hf_transfer"):
        report("way", "Xet" if xet else "plain HTTP")
        path = Path(hf_hub_download(dataset, file["name"], repo_type="dataset", revision=revision,
                                    local_dir=folder, tqdm_class=reporting_bar(report)))
    else:
        import hf_transfer

        report("way", "hf_transfer")
        path = folder / Path(file["name"]).name
        # 16 ranges of 4 MB at a time: more than a home line carries, and 64 MB of memory
        hf_transfer.download(url, str(path), 16, 4 << 20, parallel_failures=15, max_retries=3,
                             headers=build_hf_headers(), callback=lambda n: report("bytes", n))
    if problem := damage(path, file, report):
        if shutil.disk_usage(folder).free < file["size"]:  # which hf_transfer does not notice
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        raise DownloadError(f"it arrived damaged: {problem}")
    return path


def reporting_bar(report):
    """A silent tqdm class for huggingface_hub, which has no other way to say how many bytes have come."""
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})
            # Xet has a second bar for the same bytes
            self.counts = "downloading bytes" not in str(kwargs.get("desc"))

        def update(self, n=1):
            report("bytes", n if self.counts else 0)

    Bar.set_lock(threading.RLock())  # tqdm's own is a semaphore, which would outlive a killed process
    return Bar


def damage(path, file, report=lambda *_: None):
    """Why `path` is not the whole and true `file`, or ""."""
    size = path.stat().st_size
    if size != file["size"]:
        return f"{size:,} bytes instead of {file['size']:,}"
    digest = hashlib.sha256()
    with open(path, "rb") as opened:
        while file["sha256"] and (part := opened.read(1 << 24)):
            digest.update(part)
            report("bytes", 0)  # a sign of life
    return "" if file["sha256"] in (None, digest.hexdigest()) else "its SHA-256 is not the hub's"


def child_main(connection, function, args, environment):
    """What the child process runs: function(report, *args); all it has to say goes into the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ.update(environment)
    try:
        connection.send(("done", function(lambda *message: connection.send(message), *args)))
    except UserError as error:
        connection.send(("user error", str(error)))
    except Exception as error:
        connection.send(("error", *reason_of(error)))


def in_child(function, args, environment, watch, stop):
    """function(report, *args) in a process of its own; `watch` gets its reports.

    Raises what went wrong there as UserError or DownloadError; the latter also if `stop` is set or nothing is
    heard for STALL_S.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child_main, args=(theirs, function, args, environment), daemon=True)
    process.start()
    theirs.close()
    heard_s = time.monotonic()
    try:
        while True:
            if stop.is_set():  # before anything is passed on: what failed has been said already
                raise DownloadError("stopped")
            if ours.poll(0.2):
                kind, *values = ours.recv()
                heard_s = time.monotonic()
                if kind == "done":
                    return values[0]
                if kind == "user error":
                    raise UserError(*values)
                if kind == "error":
                    raise DownloadError(*values)
                watch(kind, *values)
            elif time.monotonic() - heard_s > STALL_S:
                raise DownloadError(f"nothing came for {STALL_S:.0f} seconds")
    except (EOFError, BrokenPipeError):  # the second from poll() on Windows
        raise DownloadError("the downloading process died; is the memory full?") from None
    finally:
        process.kill()
        process.join()


class Hub:
    """A hub dataset as a source: its `files` in order, and fetch(), which gives the local path of one."""

    def __init__(self, config, meta, progress):
        self.progress, self.stop, self.way = progress, threading.Event(), ""
        self.dataset, self.keep = config.dataset, config.keep_parquet
        self.about = {"source": config.dataset, "subset": config.subset}
        self.name = re.sub(r"\W+", "_", config.dataset.split("/")[-1].split("-")[0].lower())
        self.folder = Path(config.out_dir).resolve() / "parquet"
        # Read at the import of huggingface_hub. Xet's cache would go to the home folder, maybe another drive.
        defaults = {"HF_XET_HIGH_PERFORMANCE": "1", "HF_XET_CACHE": str(self.folder / ".xet"),
                    "HF_HUB_VERBOSITY": "error", "HF_HUB_DISABLE_TELEMETRY": "1"}
        self.environment = {name: value for name, value in defaults.items() if not os.environ.get(name)}
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".incoming*"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        if meta:  # the same commit as at the first run
            self.revision, self.files = meta["revision"], meta["files"]
        else:
            try:
                self.revision, self.files = self.ask(list_parquet, config.dataset, config.subset)
            except DownloadError as error:  # huggingface_hub has tried it six times
                name = f"dataset = {config.dataset}, subset = {config.subset},"
                raise UserError(explain(name, error, error.status)) from None

    def ask(self, function, *args, **environment):
        return in_child(function, args, self.environment | environment, self.watch, self.stop)

    def watch(self, kind, value):
        if kind == "bytes":
            self.progress.arriving += value
        elif value != self.way:
            self.way = value
            self.progress.say(f"transfer  {value}")

    def fetch(self, file):
        """The path of `file`, whole and true: as an earlier run left it, or downloaded now."""
        path = self.folder / file["name"]
        if path.exists() and not damage(path, file):
            self.progress.here += file["size"]
        else:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self.fetch_anew(file, path)
            except BaseException:
                self.stop.set()  # the next file would fail, too
                raise
        self.progress.arrived += file["size"]
        return path

    def fetch_anew(self, file, path):
        problem = None
        for attempt in range(ATTEMPTS):
            if problem:
                wait_s = BACKOFF_S * 2 ** (attempt - 1)
                self.progress.say(f"retrying  {file['name']} in {wait_s:.0f} s: {problem}")
                if self.stop.wait(wait_s):
                    break
            incoming = self.folder / f".incoming-{os.getpid()}-{attempt}"
            incoming.mkdir(exist_ok=True)
            # as fast as can be, then without Xet, then without hf_transfer, which cannot wait when asked to
            slower = {"HF_HUB_DISABLE_XET": "1"} if attempt >= 2 else {}
            plain = attempt >= 3 or problem is not None and problem.status == 429
            try:
                got = self.ask(download, self.dataset, self.revision, file, incoming, plain, **slower)
                put_in_place(got, path)
                return
            except DownloadError as error:
                problem = error
                if error.errno in FULL_DISK:
                    raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
                if error.status in HINTS or self.stop.is_set():
                    break
            finally:
                self.progress.arriving = 0
                shutil.rmtree(incoming, ignore_errors=True)
        raise UserError(explain(f"{file['name']} of dataset = {self.dataset}", problem, problem.status))

    def val_bytes(self, workers):
        return math.inf  # --val_tokens alone says how much, or reference losses would not compare

    def release(self, number):
        """Removes the files before `number`, unless they are to be kept."""
        for file in [] if self.keep else self.files[:number]:
            (self.folder / file["name"]).unlink(missing_ok=True)


FULL_DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


# ------------------------------------------------------------------------------------------------------------
# Files of your own


class Local:
    """A file or folder, or the tiny world, as a source; see Hub."""

    def __init__(self, config, meta, progress):
        root = Path(config.source)
        self.revision, self.stop, self.about = None, threading.Event(), {"source": config.source}
        self.name = re.sub(r"\W+", "_", root.resolve().stem.lower()).strip("_") or "text"
        is_tiny = config.source == "tiny"
        self.paths = {TINY.name: TINY} if is_tiny else local_files(root, READERS, progress.say)
        now = [{"name": name, "size": path.stat().st_size, "sha256": None}
               for name, path in self.paths.items()]
        self.files = meta["files"] if meta else now
        self.changed = (f"changed since {config.out_dir} was begun: delete {config.out_dir}, or choose "
                        "another --out_dir")
        if [file | {"sha256": None} for file in self.files] != now:
            raise UserError(f"the files of {config.source} have {self.changed}")
        if is_tiny:
            self.fetch(self.files[0])  # a fact in it may be changed by one of the same length

    def fetch(self, file):
        """The path of `file`, after its hash has been taken or compared."""
        path = self.paths[file["name"]]
        digest = sha256_of(path)
        if digest != (file["sha256"] or digest):
            raise UserError(f"{path} has {self.changed}")
        file["sha256"] = digest
        return path

    def val_bytes(self, workers):
        return LOCAL_VAL_SHARE * sum(map_in_order(text_bytes, self.paths.values(), workers))

    def release(self, number):
        """Nothing: these files are not ours to remove."""


def is_todays_world(meta):
    """Whether shards of the source "tiny" hold what configs/tiny/world.py says now."""
    return [file["sha256"] for file in meta.get("files", [])] == [sha256_of(TINY)]


def local_files(root, suffixes, say=lambda line: None):
    """{name: path} of the files under `root` with one of the suffixes, in the order of the names."""
    if root.is_file():
        found = {root.name: root}
    elif root.is_dir():
        found = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()
                 and not any(part.startswith(".") for part in path.relative_to(root).parts)}
    else:
        raise UserError(f"source = {str(root)!r}: there is no such file or folder")
    chosen = {name: path for name, path in sorted(found.items()) if path.suffix.lower() in suffixes}
    wanted = f"{', '.join([*suffixes][:-1])} or {[*suffixes][-1]}"
    if not chosen:
        raise UserError(f"source = {str(root)!r} holds no {wanted} file")
    if len(chosen) < len(found):
        say(f"ignored   {len(found) - len(chosen)} files that are not {wanted}")
    return chosen


# ------------------------------------------------------------------------------------------------------------
# The preparation


class Progress:
    """A line that shows how far the tokenising and the download are, and the time left."""

    def __init__(self):
        self.share = self.share_before = 0.0  # done of all there is to do, now and when this run began
        self.tokens = 0
        self.arrived = self.arriving = self.here = 0  # bytes: of whole files, of the next one, there before
        self.start_s = time.monotonic()
        self.lock, self.done, self.live = threading.Lock(), threading.Event(), sys.stdout.isatty()

    def say(self, line):
        with self.lock:
            print(f"\r{line:<{self.width()}}" if self.live else line, flush=True)

    def width(self):
        """Of the line, one column less than the window's: a full one would wrap, and stay behind."""
        return shutil.get_terminal_size().columns - 1

    def draw(self, total, downloads):
        """Until `done` is set: the line, once a second on a terminal, once a minute in a file."""
        while not self.done.wait(1 if self.live else 60):
            passed_s = time.monotonic() - self.start_s
            gone = self.share - self.share_before
            parts = [f"[{'#' * int(20 * self.share):<20}]{self.share:4.0%}",
                     f"{self.tokens / 1e6:,.0f}M tokens, {self.tokens / passed_s / 1e6:.1f}M/s"]
            if downloads:
                here = self.arrived + self.arriving
                rate = (here - self.here) / passed_s
                parts.append(f"{here / 1e9:.1f} of {total / 1e9:.1f} GB here, {rate / 1e6:.0f} MB/s")
            if gone > 0:
                parts.append(f"{duration(passed_s * (1 - self.share) / gone)} left")
            line, width = "  ".join(parts), self.width()
            with self.lock:
                print(f"\r{line:<{width}.{width}}" if self.live else line, end="" if self.live else "\n",
                      flush=True)


def duration(s):
    return f"{s:.0f} s" if s < 90 else f"{s / 60:.0f} min" if s < 5400 else f"{s / 3600:.1f} h"


def prepare(config):
    """Prepares the shards that `config` asks for, from where an earlier run with the same settings stopped.

    Raises UserError for whatever the settings, the files, the network or the disk are to blame for.
    """
    for name, zero in (("workers", "all cores"), ("max_tokens", "all there is"), ("val_tokens", "none")):
        if getattr(config, name) < 0:
            raise UserError(f"{name} = {getattr(config, name):,} cannot be negative; 0 means {zero}")
    out_dir, progress = Path(config.out_dir), Progress()
    is_local = config.source == "tiny" or config.source != "" and Path(config.source).exists()
    if config.source and not is_local and not out_dir.exists():  # before a folder is made for it
        raise UserError(f"source = {config.source!r}: there is no such file or folder")
    with lock_folder(config.out_dir), disk_errors(out_dir):
        meta = earlier(out_dir, config)
        has_enough = meta and is_enough(meta, config)
        if is_local or not has_enough:  # a Local looks whether its files have changed since
            source = (Local if config.source else Hub)(config, meta, progress)
        if not has_enough:
            meta = meta or source.about | {
                "revision": source.revision, "tokenizer": "gpt2", "val_tokens": config.val_tokens,
                "files": source.files, "left_out": 0, "shards": []}
            meta |= {"complete": False, "exhausted": False}
            announce(source, meta, config, out_dir)
            save_meta(out_dir, meta)
            fill_shards(out_dir, meta, source, config, progress)
        finish(out_dir, meta, config, progress)


@contextlib.contextmanager
def disk_errors(out_dir):
    """Turns what the disk refuses into a UserError."""
    try:
        yield
    except BrokenPipeError:  # `| head` has seen enough, and no disk is to blame
        raise
    except OSError as error:
        place = error.filename or out_dir
        if error.errno in FULL_DISK:
            raise UserError(f"no room left for {place} ({error.strerror}): make some; the same command goes "
                            "on from the last whole shard") from None
        raise UserError(f"{place} cannot be read or written: {error.strerror or error}") from error


def earlier(out_dir, config):
    """meta.json of an earlier run with the same settings, cut back to what is whole on disk; or None."""
    if not (out_dir / "meta.json").exists():
        if any(out_dir.glob("*.bin")):
            raise UserError(f"{out_dir} has shards of unknown origin (no meta.json); choose another out_dir")
        return None
    meta = read_meta(out_dir)
    if lost := {"files", "shards", "exhausted", "left_out"} - set(meta):
        raise UserError(f"{out_dir / 'meta.json'} is damaged (it lacks {min(lost)}); choose another "
                        "--out_dir, or delete it and its shards to start again")
    wanted = {"source": config.source or config.dataset, "val_tokens": config.val_tokens}
    wanted |= {} if config.source else {"subset": config.subset}
    for name, value in wanted.items():
        if meta.get(name) != value and not (name == "source" and is_same_source(meta.get(name), value)):
            raise UserError(f"{out_dir} was prepared with {name} = {meta.get(name)!r}, not {value!r}: choose "
                            "another --out_dir, or delete its meta.json and its shards to start again")
    for number, shard in enumerate(meta["shards"]):
        if not is_whole(out_dir, shard):
            print(f"again     {out_dir / shard['name']} and those after it: it is missing or not whole")
            meta["shards"], meta["exhausted"] = meta["shards"][:number], False
            break
    return meta


def is_same_source(one, other):
    """Whether two spellings of a source mean the same: texts, ./texts and texts/ are one folder."""
    return one == other or (Path(str(one)).exists() and Path(str(one)).resolve() == Path(other).resolve())


def is_whole(out_dir, shard):
    path = Path(out_dir) / shard["name"]
    return path.exists() and path.stat().st_size == HEADER_BYTES + 2 * shard["tokens"]


def train_tokens(meta):
    return sum(shard["tokens"] for shard in meta["shards"] if split_of(shard["name"]) == "train")


def n_train_shards(meta):
    return sum(split_of(shard["name"]) == "train" for shard in meta["shards"])


def is_enough(meta, config):
    return meta["exhausted"] or bool(config.max_tokens) and train_tokens(meta) >= config.max_tokens


def announce(source, meta, config, out_dir):
    """Prints what will be done. Raises UserError if the disk has no room for it."""
    total = sum(file["size"] for file in source.files)
    tokens = TOKENS_PER_PARQUET_BYTE * total
    if config.max_tokens:
        tokens = min(tokens, config.max_tokens + config.val_tokens)
    need = 2 * (tokens - sum(shard["tokens"] for shard in meta["shards"]))
    if isinstance(source, Hub):
        ends = np.cumsum([file["size"] for file in source.files])  # files come whole
        files = int(ends[min(np.searchsorted(ends, tokens / TOKENS_PER_PARQUET_BYTE), len(ends) - 1)])
        at_once = (FILES_AHEAD + 2) * max(file["size"] for file in source.files)
        here = sum(path.stat().st_size for path in source.folder.rglob("*.parquet"))
        need += max((files if source.keep else min(files, at_once)) - here, 0)
    free = shutil.disk_usage(out_dir).free
    print(f"source    {meta['source']}: {len(source.files)} files, {total / 1e9:,.2f} GB"
          + (f", revision {source.revision[:8]}" if source.revision else ""))
    print(f"to        {out_dir}: about {max(need, 0) / 1e9:.2f} GB to come, {free / 1e9:,.1f} GB free")
    if need > free:
        raise UserError(f"{out_dir.resolve()} needs about {need / 1e9:.1f} GB and has {free / 1e9:.1f} free: "
                        "choose --out_dir on another drive, a smaller --max_tokens, or --keep_parquet=false")


def fill_shards(out_dir, meta, source, config, progress):
    """Writes the shards that are missing, after each one meta.json, which says where the next begins."""
    easy_tokenizer()  # once, before the threads want it; and if it cannot be loaded, before the download
    written = meta["shards"]
    if written and split_of(written[-1]["name"]) == "train" and written[-1]["tokens"] < SHARD_TOKENS:
        written.pop()  # a --max_tokens ended it early; now it is made whole
    (file, document, offset), outcomes = written[-1]["next"] if written else ([0, 0, 0], {})
    ends = np.cumsum([0, *(each["size"] for each in source.files)]).tolist()
    wanted = config.max_tokens + config.val_tokens if config.max_tokens else math.inf
    begun = sum(shard["tokens"] for shard in written)
    workers = config.workers or os.cpu_count() or 1
    print(f"workers   {workers} threads", flush=True)

    def watch(chunk, n_tokens):
        progress.tokens += n_tokens
        read = ends[chunk.file] + chunk.share * (ends[chunk.file + 1] - ends[chunk.file])
        progress.share = min(max(read / max(ends[-1], 1), (begun + progress.tokens) / wanted), 1.0)
        progress.share_before = progress.share_before or progress.share

    def paths():
        # the first will be needed and are fetched ahead; whether the others are is only known when they are
        sure = max(int(np.searchsorted(ends, wanted / TOKENS_PER_PARQUET_BYTE)), file)
        yield from map_in_order(source.fetch, source.files[file:sure], 1, FILES_AHEAD)
        yield from map_in_order(source.fetch, source.files[sure:], 1, 0)

    threading.Thread(target=progress.draw, args=(ends[-1], isinstance(source, Hub)), daemon=True).start()
    with contextlib.ExitStack() as stack:
        fetched = stack.enter_context(contextlib.closing(paths()))
        chunks = stack.enter_context(contextlib.closing(
            map_in_order(encode_chunk, read_chunks(fetched, file, document), workers)))
        stack.callback(source.stop.set)
        stack.callback(progress.done.set)
        stream = TokenStream(chunks, offset, outcomes, watch)
        if not written and config.val_tokens:
            add_shard(out_dir, meta, source, stream, "val", config.val_tokens, source.val_bytes(workers))
        while not is_enough(meta, config):
            if stream.more():
                room = (config.max_tokens or math.inf) - train_tokens(meta)
                add_shard(out_dir, meta, source, stream, "train", min(SHARD_TOKENS, room))
            else:
                meta["exhausted"] = True
    source.release(len(source.files))


def add_shard(out_dir, meta, source, stream, split, limit, byte_limit=math.inf):
    number = 0 if split == "val" else 1 + n_train_shards(meta)
    path = out_dir / f"{source.name}_{split}_{number:06d}.bin"
    count = write_shard(path, stream.take(limit, byte_limit))
    if split == "val":  # what is left of its last document is not for training
        meta["left_out"] = stream.drop_rest_of_document()
    shard = {"name": path.name, "tokens": count, "sha256": sha256_of(path), "next": stream.position()}
    meta["shards"].append(shard)
    save_meta(out_dir, meta)
    source.release(shard["next"][0][0])


def save_meta(out_dir, meta):
    outcomes = dict(meta["shards"][-1]["next"][1]) if meta["shards"] else {}
    meta["documents"], meta["skipped"] = outcomes.pop("encoded", 0), outcomes
    meta["tokens"] = {"train": train_tokens(meta)}
    meta["tokens"]["val"] = sum(shard["tokens"] for shard in meta["shards"]) - meta["tokens"]["train"]
    write_text(out_dir / "meta.json", json.dumps(meta, indent=1))


def finish(out_dir, meta, config, progress):
    """Marks the preparation as complete and prints what came of it."""
    train, val = meta["tokens"]["train"], meta["tokens"]["val"]
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in meta["skipped"].items()) or "none"
    if not train:
        for name in ("meta.json", *(shard["name"] for shard in meta["shards"])):  # of no use, and in the way
            (out_dir / name).unlink(missing_ok=True)
        raise UserError(f"nothing is left to train on: {meta['documents']:,} documents (skipped: {skipped}), "
                        f"{val:,} tokens for validation; choose a larger source, or a smaller --val_tokens")
    meta["complete"] = True
    save_meta(out_dir, meta)
    number = n_train_shards(meta)
    progress.say(f"complete  {out_dir}: {train:,} tokens for training in {number:,} shards, {val:,} for val; "
                 f"{duration(time.monotonic() - progress.start_s)}")
    progress.say(f"          {meta['documents']:,} documents; skipped: {skipped}; left out: "
                 f"{meta['left_out']:,} tokens of the document that validation cuts")
    if config.max_tokens and train > config.max_tokens:
        progress.say(f"note      more than max_tokens = {config.max_tokens:,}; delete {out_dir} to have less")


# ------------------------------------------------------------------------------------------------------------
# Looking at shards


def verify(config):
    """Reads every byte of every shard of out_dir. Raises UserError if one is bad."""
    from model import VOCAB_SIZE

    folder = Path(config.out_dir)
    meta = read_meta(folder) if (folder / "meta.json").exists() else {}
    made = meta.get("shards", [])  # sft.py's by name
    known = ({name: part.get("sha256", "") for name, part in made.items()} if isinstance(made, dict) else
             {shard["name"]: shard["sha256"] for shard in made})
    names = sorted(set(known) | {path.name for path in folder.glob("*.bin")})
    if not names:
        raise UserError(f"there are no shards in {folder}")
    bad = 0
    for name in names:
        try:
            tokens = read_shard(folder / name)
            largest = max((tokens[i:i + (1 << 24)].max() for i in range(0, len(tokens), 1 << 24)), default=0)
            problem = f"id {largest} is not in the vocabulary" if largest >= VOCAB_SIZE else ""
            if known.get(name, "") not in ("", sha256_of(folder / name)):
                problem = "its SHA-256 is not the one in meta.json"
        except UserError as error:
            problem = str(error)
        bad += bool(problem)
        print(f"{'BAD ' if problem else 'good'}  {name}  {problem}".rstrip(), flush=True)
    if bad:
        raise UserError(f"{bad} of {len(names)} shards in {folder} are bad; delete those and run the command "
                        "that made them")


def show(config, n_documents=3, n_tokens=200):
    """Prints the first documents of a shard, its tokens parted by |."""
    from model import END_OF_TEXT, token_bytes

    path = Path(config.source) if config.source.endswith(".bin") else shards(config.out_dir, "val")[0]
    tokens = read_shard(path)
    starts = np.flatnonzero(tokens[:1 << 24] == END_OF_TEXT).tolist()
    print(f"{path}: {len(tokens):,} tokens; the first {min(n_documents, len(starts))} documents in it:")
    for start, end in list(zip(starts, [*starts[1:], len(tokens)], strict=True))[:n_documents]:
        print(f"\n---- tokens {start:,} to {end - 1:,}")
        pieces = [token_bytes(id).decode("utf-8", errors="backslashreplace").replace("\n", "\\n")
                  for id in tokens[start + 1:min(end, start + n_tokens)].tolist()]
        more = f"| ... and {end - start - n_tokens:,} more" if end - start > n_tokens else ""
        print("|".join(["<|endoftext|>", *pieces]) + more)


def main():
    config = load(Config, "prepare_fineweb")
    if config.show:
        show(config)
    elif config.verify:
        verify(config)
    else:
        try:
            prepare(config)
        except KeyboardInterrupt:
            print(f"\nstopped; the same command goes on from the last whole shard in {config.out_dir}")
            raise


if __name__ == "__main__":
    run(main)
