"""FineWeb-Edu, or text of your own, to shards of tokens.

Reads   a hub dataset of parquet files (downloaded while the files before are tokenised), or with --source a file or
        folder of .parquet (column `text`), .jsonl (key `text`) and .txt.
Writes  out_dir: <name>_val_000000.bin, <name>_train_000001.bin, ... of 100M tokens each, and meta.json; downloads go
        to out_dir/parquet. Stop it at any moment: the same command goes on, and the shards end up with the same bytes.

    python prepare_fineweb.py                                        28.5 GB to download, then 20 GB of shards
    python prepare_fineweb.py --max_tokens=1e9                       a tenth of it
    python prepare_fineweb.py --source=my_books --out_dir=data/books
    python prepare_fineweb.py --show                                 what a shard looks like, token by token
    python prepare_fineweb.py --verify                               every byte of every shard once more

Time: about 4M tokens per second and core, or what the line carries (28.5 GB at 100 MB/s take 5 minutes).
"""

import contextlib
import errno
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from configs import UserError, load, run, write_text

SHARD_TOKENS = 100_000_000
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024  # llm.c's and modded-nanogpt's format
LOCAL_VAL_SHARE = 1 / 64  # of a local source's text; by bytes, so that text of more tokens per byte stays below 2 %, too
CHUNK_BYTES = 1 << 20  # of text that a thread encodes at a time
SLICE = 100_000  # characters; longer documents are encoded in slices of it
TXT_DOCUMENT = 1 << 16  # characters; longer .txt files are cut into documents of at most this length
FILES_AHEAD = 2  # downloaded files that may wait for the tokeniser
ATTEMPTS, BACKOFF_S, STALL_S = 6, 1.0, 120.0  # of one file's download; a server that is silent for STALL_S counts as gone
VOCAB_SIZE = 50304  # model.VOCAB_SIZE, without importing torch
TOKENS_PER_PARQUET_BYTE = 0.35  # FineWeb-Edu: 9.95B tokens from 28.5 GB; only to foresee space and time


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


# ----------------------------------------------------------------------------------------------------------------------
# Shards on disk


def write_shard(path, tokens):
    """Writes `tokens`, an array or an iterable of arrays of ids below 65,536, to `path` and returns how many they were.

    llm.c's format: 256 little-endian int32 (magic, version, count, zeros), then uint16 ids. The file appears complete or
    not at all.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with open(temporary, "wb") as file:
            file.write(bytes(HEADER_BYTES))
            for part in [tokens] if isinstance(tokens, np.ndarray) else tokens:
                assert part.size == 0 or 0 <= part.min() and part.max() < 1 << 16, "a token id does not fit into uint16"
                file.write(part.astype("<u2", copy=False).tobytes())
                count += part.size
            file.seek(0)
            file.write(np.array([MAGIC, VERSION, count], dtype="<i4").tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def read_shard(path):
    """The tokens of a shard as a read-only uint16 memmap. Raises UserError, with the file's name, if it is not a whole one."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    magic, version, count = np.frombuffer(header[:12].ljust(12, b"\0"), dtype="<i4").tolist()
    if len(header) < HEADER_BYTES or (magic, version) != (MAGIC, VERSION) or count < 0:
        raise UserError(f"{path} is not a token shard (it must begin with {MAGIC}, {VERSION}, and begins with {magic}, "
                        f"{version}); delete it and run prepare_fineweb.py again")
    if size != HEADER_BYTES + 2 * count:
        raise UserError(f"{path} should hold {count:,} tokens in {HEADER_BYTES + 2 * count:,} bytes and has {size:,} "
                        f"bytes; delete it and run prepare_fineweb.py again")
    if count == 0:
        return np.zeros(0, dtype="<u2")  # an empty file region cannot be mapped
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


def shards(data_dir, split):
    """The paths of the shards of `split`, "val" or "train", in order. Raises UserError if there are none yet."""
    command = f"`python prepare_fineweb.py --out_dir={data_dir}`"
    if (Path(data_dir) / "meta.json").exists() and not read_meta(data_dir).get("complete", True):
        raise UserError(f"{data_dir} is not complete yet; the command that began it goes on where it stopped: {command}")
    found = sorted(path for path in Path(data_dir).glob("*.bin") if re.search(rf"_{split}_\d+\.bin$", path.name))
    if not found:
        raise UserError(f"there are no {split} shards in {data_dir}; {command} makes them "
                        f"(data/tiny: `python prepare_fineweb.py configs/tiny`)")
    return found


def read_meta(data_dir):
    """The contents of data_dir/meta.json. Raises UserError if it is missing or damaged."""
    path = Path(data_dir) / "meta.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete {data_dir} and prepare it again") from None


# ----------------------------------------------------------------------------------------------------------------------
# Documents from files: each reader yields (text, share of the file read so far). What should be a text may be anything.


def read_parquet(path, skip):
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:  # a row group may be larger than memory
        check_column(file, path)
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        ends = np.cumsum([group.num_rows for group in groups], dtype=int)
        wanted = [i for i in range(len(groups)) if ends[i] > skip]
        row = ends[wanted[0]] - groups[wanted[0]].num_rows if wanted else 0
        n_rows, n_bytes = file.metadata.num_rows, sum(group.total_byte_size for group in groups)
        batch_rows = min(max((n_rows << 20) // max(n_bytes, 1), 1), 1024)  # about 1 MB, be it words or books
        for batch in file.iter_batches(batch_rows, row_groups=wanted, columns=["text"], use_threads=False):
            column = batch.column(0)
            try:
                texts = column.to_pylist()
            except UnicodeDecodeError:  # the lone surrogates that this makes of stray bytes are what encode_chunk() skips
                texts = [text and text.decode("utf-8", errors="surrogateescape")
                         for text in column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()]
            for text in texts:
                row += 1
                if row > skip:
                    yield text, row / n_rows


def check_column(file, path):
    import pyarrow as pa

    schema = file.schema_arrow
    if "text" not in schema.names:  # pyarrow would give rows without columns, and no error
        raise UserError(f"{path} has no column `text`, only {', '.join(schema.names)}; rename the one with the documents")
    kind = schema.field("text").type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(f"the column `text` of {path} holds {kind}, not strings")


def read_jsonl(path, skip):
    size = max(path.stat().st_size, 1)
    done = number = 0
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for line in file:
            done += len(line)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                text = row.get("text") if isinstance(row, dict) else row
            except (ValueError, RecursionError) as error:
                row = text = error
            if number == 0 and isinstance(row, dict) and "text" not in row:
                raise UserError(f"{path} has no `text` in its first line, only {', '.join(row)}; "
                                f"rename the key with the documents")
            number += 1
            if number > skip:
                yield text, min(done / size, 1.0)


def read_txt(path, skip):
    """A .txt file is one document, or, if it is longer than TXT_DOCUMENT, as many as it takes, cut at blank lines."""
    size = max(path.stat().st_size, 1)
    done = number = 0
    rest = ""
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        while rest or done == 0:
            rest += file.read(TXT_DOCUMENT + 1 - len(rest))
            end = len(rest)
            if end > TXT_DOCUMENT:
                places = (rest.rfind(mark, TXT_DOCUMENT // 2, TXT_DOCUMENT) + len(mark) for mark in ("\n\n", "\n", " "))
                end = next((place for place in places if place >= TXT_DOCUMENT // 2), TXT_DOCUMENT)
            done += max(end, 1)
            number += 1
            if number > skip:
                yield rest[:end], min(done / size, 1.0)
            rest = rest[end:]


def read_tiny(path, skip):
    from configs.tiny import world

    documents = world.documents()
    for number, text in enumerate(documents[skip:], skip + 1):
        yield text, number / len(documents)


READERS = {".parquet": read_parquet, ".jsonl": read_jsonl, ".txt": read_txt}
TINY = Path("tiny.world")  # stands for the file of the source "tiny"


def read_documents(path, skip):
    """What is in a file from its document number `skip` on. Raises UserError, with its name, if it cannot be read."""
    with readable(path):
        yield from (read_tiny if path == TINY else READERS[path.suffix.lower()])(path, skip)


@contextlib.contextmanager
def readable(path):
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}); replace it or take it away") from None


def text_bytes(path):
    """How many bytes of text a local file holds."""
    if path.suffix.lower() != ".parquet":
        return sum(n_bytes(text) for text, _ in read_documents(path, 0))
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with readable(path), pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        check_column(file, path)
        batches = file.iter_batches(1024, columns=["text"], use_threads=False)
        return sum(pc.sum(pc.binary_length(batch.column(0))).as_py() or 0 for batch in batches)


def n_bytes(text):
    return len(text.encode("utf-8", errors="surrogatepass")) if isinstance(text, str) else 0


# ----------------------------------------------------------------------------------------------------------------------
# Texts to tokens, on all cores


@dataclass
class Chunk:
    """Some documents of one file, in order. Filled in by encode_chunk(): the tokens of all of them in one array; where
    each ends, in tokens and in bytes of text, with a 0 before; and what became of it ("encoded", or why it was skipped)."""

    file: int
    first: int
    texts: list
    share: float
    last: bool
    tokens: np.ndarray = None
    token_ends: np.ndarray = None
    byte_ends: np.ndarray = None
    outcomes: list = field(default_factory=list)


def read_chunks(paths, file, document):
    """Chunks of about CHUNK_BYTES, from `document` of the first of `paths` on, whose number is `file`."""
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
    """Encodes the texts of a chunk, each after an <|endoftext|>. One that cannot be encoded is skipped, with the reason."""
    from model import END_OF_TEXT

    parts, lengths, sizes = [np.zeros(0, dtype=np.uint16)], [0], [0]
    start = np.array([END_OF_TEXT], dtype=np.uint16)
    for text in chunk.texts:
        ids, outcome = encode_document(text)
        chunk.outcomes.append(outcome)
        parts += [start, *ids] if ids else []
        lengths.append(1 + sum(map(len, ids)) if ids else 0)
        sizes.append(n_bytes(text))
    chunk.tokens = np.concatenate(parts, dtype=np.uint16, casting="unsafe")  # GPT-2's ids are below 50,257
    chunk.token_ends, chunk.byte_ends = np.cumsum(lengths), np.cumsum(sizes)
    chunk.texts = []
    return chunk


def encode_document(text):
    """([uint32 array, ...], "encoded") or ([], the reason why not)."""
    from model import tokenizer

    if not isinstance(text, str):
        return [], "null" if text is None else "broken JSON" if isinstance(text, Exception) else "not a text"
    if not text.strip():
        return [], "empty"
    encoding = tokenizer()
    try:
        # releases the GIL, as encode_ordinary() does, and makes no list; nothing in the text becomes a special token
        return [encoding.encode_to_numpy(part, disallowed_special=()) for part in slices(text)], "encoded"
    except UnicodeEncodeError:
        return [], "not Unicode"
    except ValueError:  # the splitter's regular expression gave up
        return [], "too hard for the tokenizer"


def slices(text):
    """A long text in slices that encode to the same tokens as the whole.

    GPT-2's splitter always cuts before a space or newline that something visible follows, so we may, too. Without this,
    a million spaces exhaust its regular expression and a 50 MB document the memory. Where there is no such place, the cut
    is made all the same: that costs a token or two.
    """
    start = 0
    while len(text) - start > SLICE:
        place = re.compile(r"[ \n](?=\S)").search(text, start + SLICE - 1000, start + SLICE)
        end = place.start() if place else start + SLICE
        yield text[start:end]
        start = end
    yield text[start:]


def map_in_order(function, items, workers, ahead=None):
    """map(function, items) by `workers` threads: the results come in the order of the items, however many threads there are.

    ahead  how many results may wait (4 per thread): a slow reader of the results stops the threads, so memory is bounded
    """
    ahead = 4 * workers if ahead is None else ahead
    waiting = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class TokenStream:
    """Encoded chunks as one stream of tokens that can be cut anywhere, and that knows how to be taken up there again."""

    def __init__(self, chunks, offset, counts, watch):
        self.chunks, self.at, self.counts, self.watch = chunks, offset, Counter(counts), watch
        self.chunk = None

    def more(self):
        """Whether there are tokens left."""
        while self.chunk is None or self.at >= len(self.chunk.tokens):
            following = next(self.chunks, None)
            if following is None:
                return False
            if self.chunk is not None:
                self.counts.update(self.chunk.outcomes)
                self.at = 0
            self.chunk = following
        return True

    def take(self, limit, byte_limit=math.inf):
        """Yields the next `limit` tokens, or those of the next `byte_limit` bytes of text, or all that there are."""
        while limit > 0 and self.more():
            tokens = self.chunk.tokens
            end = min(self.at + limit, int(np.interp(byte_limit, self.chunk.byte_ends, self.chunk.token_ends)))
            yield tokens[self.at:end]
            self.watch(self.chunk, end - self.at)
            limit -= end - self.at
            self.at = end
            if end < len(tokens):
                return
            byte_limit -= self.chunk.byte_ends[-1]

    def drop_rest_of_document(self):
        """Passes over what is left of a document that was cut; returns how many tokens that was."""
        document = self.document()
        rest = 0
        if document < len(self.chunk.outcomes) and self.at > self.chunk.token_ends[document]:
            rest = int(self.chunk.token_ends[document + 1]) - self.at
        self.at += rest
        return rest

    def document(self):
        return int(np.searchsorted(self.chunk.token_ends[1:], self.at, side="right"))

    def position(self):
        """(where the next token is: file, document and offset in it; how many documents before it came to which end)."""
        chunk, document = self.chunk, self.document()
        counts = dict(sorted((self.counts + Counter(chunk.outcomes[:document])).items()))
        if document == len(chunk.outcomes) and chunk.last:
            return [chunk.file + 1, 0, 0], counts
        return [chunk.file, chunk.first + document, self.at - int(chunk.token_ends[document])], counts


# ----------------------------------------------------------------------------------------------------------------------
# The hub. Listing and downloading run in a process of their own: hf_transfer holds the GIL, so here it would stop the
# tokenising; a process can be killed when its server falls silent; and the variables that huggingface_hub reads at its
# import can be set before it.


class DownloadError(Exception):
    """A download that went wrong and may be tried again; `status` is HTTP's and `errno` the system's, or 0."""

    def __init__(self, text, status=0, errno=0):
        super().__init__(text)
        self.status, self.errno = status, errno


def list_parquet(report, dataset, subset):
    """(revision, [{"name", "size", "sha256" or None}, ...]) of the parquet files of a hub dataset, in order.

    subset  a folder of it, or the beginning of the files' names; "" means all
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    folder = subset.rpartition("/")[0]
    found = [entry for entry in HfApi().list_repo_tree(dataset, folder or None, recursive=True, repo_type="dataset")
             if entry.path.endswith(".parquet")]
    chosen = ([entry for entry in found if entry.path.startswith(f"{subset}/")]
              or [entry for entry in found if entry.path.startswith(subset)])
    if not chosen:
        folders = ", ".join(sorted({entry.path.rpartition("/")[0] for entry in found})[:20])
        raise UserError(f"{dataset} has no parquet files under subset = {subset!r}; it has some in: {folders or 'none'}")
    files = [{"name": entry.path, "size": entry.size, "sha256": entry.lfs.sha256 if entry.lfs else None}
             for entry in sorted(chosen, key=lambda entry: entry.path)]
    # what is listed may change before we come back; the files of one commit cannot
    head = get_hf_file_metadata(hf_hub_url(dataset, files[0]["name"], repo_type="dataset"), retry_on_errors=True)
    return head.commit_hash or "main", files


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
        path = Path(hf_hub_download(dataset, file["name"], repo_type="dataset", revision=revision, local_dir=folder,
                                    tqdm_class=reporting_bar(report)))
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
            self.counts = "downloading bytes" not in str(kwargs.get("desc"))  # Xet's second bar for the same bytes

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
    return "" if file["sha256"] in (None, digest.hexdigest()) else "its SHA-256 is not the one that the hub gives"


def child_main(connection, function, args, environment):
    """What the child process runs: `function(report, *args)`, whose reports, and result or error, go into the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ.update(environment)
    try:
        connection.send(("done", function(lambda *message: connection.send(message), *args)))
    except UserError as error:
        connection.send(("user error", str(error)))
    except Exception as error:  # noqa: BLE001 - httpx, hf_transfer and Xet have no common one
        chain = [error]
        while following := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(following)
        # hf_transfer has the numbers in its text only: "... (404 Not Found) ...", "... (os error 28)"
        text = " ".join(" ".join(map(str, chain)).split())
        status = [each.response.status_code for each in chain if getattr(each, "response", None) is not None]
        number = [each.errno for each in chain if getattr(each, "errno", None)]
        status += [int(digits) for digits in re.findall(r"\((\d{3}) [A-Z]", text)]
        number += [int(digits) for digits in re.findall(r"os error (\d+)", text)]
        reason = f"HTTP {status[0]}" if status else text[:150] or type(error).__name__
        connection.send(("error", reason, *(status or [0])[:1], *(number or [0])[:1]))


def in_child(function, args, environment, watch, stop):
    """function(report, *args) in a process of its own; `watch` gets its reports. Raises UserError or DownloadError."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child_main, args=(theirs, function, args, environment), daemon=True)
    process.start()
    theirs.close()
    heard_s = time.monotonic()
    try:
        while True:
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
            elif stop.is_set():
                raise DownloadError("stopped")
            elif time.monotonic() - heard_s > STALL_S:
                raise DownloadError(f"nothing came for {STALL_S:.0f} seconds")
    except EOFError:
        raise DownloadError("the downloading process died; is the memory full?") from None
    finally:
        process.kill()
        process.join()


class Hub:
    """A hub dataset as a source: its files in order, and fetch(), which gives the local path of one of them."""

    def __init__(self, config, meta, progress):
        self.dataset, self.progress, self.stop, self.way = config.dataset, progress, threading.Event(), ""
        self.about = {"source": config.dataset, "subset": config.subset}
        self.name = re.sub(r"\W+", "_", config.dataset.split("/")[-1].split("-")[0].lower())
        self.folder = Path(config.out_dir).resolve() / "parquet"
        # Read at the import of huggingface_hub. Xet's cache would go to the home folder, maybe on another drive.
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
                raise UserError(explain(config.dataset, error)) from None

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
        if not path.exists() or damage(path, file):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self.fetch_anew(file, path)
            except BaseException:
                self.stop.set()  # the next file would fail, too
                raise
        else:
            self.progress.here += file["size"]
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
            # first as fast as can be, then without Xet, then without hf_transfer, which cannot wait as a server asks
            slower = {"HF_HUB_DISABLE_XET": "1"} if attempt >= 2 else {}
            plain = attempt >= 3 or problem is not None and problem.status == 429
            try:
                os.replace(self.ask(download, self.dataset, self.revision, file, incoming, plain, **slower), path)
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
        raise UserError(explain(f"{self.dataset}/{file['name']}", problem))

    def val_bytes(self):
        return math.inf  # --val_tokens alone says how much, or reference losses would not compare


HINTS = {  # statuses that no repetition changes
    401: "log in with `hf auth login`, and check --dataset",
    403: "accept its terms on its page, and log in with `hf auth login`",
    404: "check --dataset and --subset; a private one needs `hf auth login`, and a mirror (HF_ENDPOINT) may lack it",
    410: "it has been removed; choose another --dataset",
    451: "it is blocked for legal reasons where you are; choose another --dataset, or a mirror (HF_ENDPOINT)",
}
FULL_DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def explain(name, error):
    hint = HINTS.get(error.status, "check the network, and HF_ENDPOINT if it is set. The same command goes on where it "
                                   "stopped; HF_HUB_DISABLE_XET=1 helps against stalling")
    return f"{name} cannot be downloaded ({error}): {hint}"


# ----------------------------------------------------------------------------------------------------------------------
# Files of your own


class Local:
    """A file or folder, or the tiny world, as a source."""

    def __init__(self, config, meta, progress):
        root = Path(config.source)
        self.revision, self.stop, self.about = None, threading.Event(), {"source": config.source}
        self.name = re.sub(r"\W+", "_", root.resolve().stem.lower()).strip("_") or "text"
        self.paths = {TINY.name: TINY} if config.source == "tiny" else local_files(root, progress)
        now = [{"name": name, "size": 0 if path == TINY else path.stat().st_size, "sha256": None}
               for name, path in self.paths.items()]
        self.files = meta["files"] if meta else now
        if [(file["name"], file["size"]) for file in self.files] != [(file["name"], file["size"]) for file in now]:
            raise UserError(f"the files of {config.source} have changed since {config.out_dir} was begun: delete "
                            f"{config.out_dir}, or choose another --out_dir")

    def fetch(self, file):
        """The path of `file`, after its hash has been taken or compared."""
        path = self.paths[file["name"]]
        if path != TINY:
            digest = sha256_of(path)
            if digest != (file["sha256"] or digest):
                raise UserError(f"{path} has changed since the preparation was begun; delete its shards to start again")
            file["sha256"] = digest
        return path

    def val_bytes(self):
        return LOCAL_VAL_SHARE * sum(map(text_bytes, self.paths.values()))


def local_files(root, progress):
    """{name: path} of what can be read under `root`, in the order of the names."""
    if root.is_file():
        found = {root.name: root}
    elif root.is_dir():
        found = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()
                 and not any(part.startswith(".") for part in path.relative_to(root).parts)}
    else:
        raise UserError(f"source = {str(root)!r}: there is no such file or folder")
    readable = {name: path for name, path in sorted(found.items()) if path.suffix.lower() in READERS}
    if not readable:
        raise UserError(f"source = {str(root)!r} holds no .parquet, .jsonl or .txt file")
    if len(readable) < len(found):
        progress.say(f"ignored   {len(found) - len(readable)} files that are not .parquet, .jsonl or .txt")
    return readable


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# The preparation


class Progress:
    """A line that shows how far the tokenising and the download are, and the time left."""

    def __init__(self):
        self.share = self.share_before = 0.0
        self.tokens = 0
        self.arrived = self.arriving = self.here = 0  # bytes: of whole files, of the one that is coming, there before
        self.start_s = time.monotonic()
        self.lock, self.done, self.live = threading.Lock(), threading.Event(), sys.stdout.isatty()

    def say(self, line):
        with self.lock:
            print(f"\r{line:<109}" if self.live else line, flush=True)

    def draw(self, total, downloads):
        """Until `done` is set: the line, once a second on a terminal, once a minute in a file."""
        while not self.done.wait(1 if self.live else 60):
            passed_s = time.monotonic() - self.start_s
            gone = self.share - self.share_before
            left = f"{duration(passed_s * (1 - self.share) / gone)} left" if gone > 0 else "..."
            line = (f"[{'#' * int(20 * self.share):<20}]{self.share:4.0%}  {self.tokens / 1e6:,.0f}M tokens, "
                    f"{self.tokens / passed_s / 1e6:.1f}M/s | ")
            if downloads:
                here = self.arrived + self.arriving
                line += f"{here / 1e9:.1f} of {total / 1e9:.1f} GB here, {(here - self.here) / passed_s / 1e6:.0f} MB/s | "
            with self.lock:
                print(f"\r{line + left:<109}"[:110] if self.live else line + left,
                      end="" if self.live else "\n", flush=True)


def duration(s):
    return f"{s:.0f} s" if s < 90 else f"{s / 60:.0f} min" if s < 5400 else f"{s / 3600:.1f} h"


def prepare(config):
    """Prepares the shards that `config` asks for, going on where an earlier run with the same settings stopped.

    Raises UserError for whatever the settings, the files, the network or the disk are to blame for.
    """
    for name, zero in (("workers", "all cores"), ("max_tokens", "all there is"), ("val_tokens", "no validation")):
        if getattr(config, name) < 0:
            raise UserError(f"{name} = {getattr(config, name):,} cannot be negative; 0 means {zero}")
    out_dir, progress = Path(config.out_dir), Progress()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        meta = earlier(out_dir, config)
        if not meta or not is_enough(meta, config):
            source = (Local if config.source else Hub)(config, meta, progress)
            meta = meta or {**source.about, "revision": source.revision, "tokenizer": "gpt2",
                            "val_tokens": config.val_tokens, "files": source.files, "left_out": 0, "shards": []}
            meta |= {"complete": False, "exhausted": False}
            announce(source, meta, config, out_dir)
            save_meta(out_dir, meta)
            fill_shards(out_dir, meta, source, config, progress)
        finish(out_dir, meta, config, progress)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise UserError(f"no room left for {error.filename or out_dir} ({error.strerror}): make some, and the same "
                        f"command goes on from the last whole shard") from None
    finally:
        progress.done.set()


def earlier(out_dir, config):
    """meta.json of an earlier run with the same settings, cut back to what is whole on disk; None if there is none."""
    if not (out_dir / "meta.json").exists():
        if any(out_dir.glob("*.bin")):
            raise UserError(f"{out_dir} holds shards of unknown origin (no meta.json); choose another --out_dir")
        return None
    meta = read_meta(out_dir)
    wanted = {"source": config.source or config.dataset, "val_tokens": config.val_tokens}
    wanted |= {} if config.source else {"subset": config.subset}
    for name, value in wanted.items():
        if meta.get(name) != value:
            raise UserError(f"{out_dir} was prepared with {name} = {meta.get(name)!r}, not {value!r}: choose another "
                            f"--out_dir, or delete {out_dir} to start again")
    for leftover in out_dir.glob("*.tmp"):
        leftover.unlink(missing_ok=True)
    for number, shard in enumerate(meta["shards"]):
        path = out_dir / shard["name"]
        if not path.exists() or path.stat().st_size != HEADER_BYTES + 2 * shard["tokens"]:
            print(f"again     {path} and those after it: it is missing or not whole")
            meta["shards"], meta["exhausted"] = meta["shards"][:number], False
            break
    return meta


def train_tokens(meta):
    return sum(shard["tokens"] for shard in meta["shards"] if "_train_" in shard["name"])


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
        at_once = total if config.keep_parquet else (FILES_AHEAD + 2) * max(file["size"] for file in source.files)
        here = sum(path.stat().st_size for path in source.folder.rglob("*.parquet"))
        need += max(min(tokens / TOKENS_PER_PARQUET_BYTE, at_once) - here, 0)
    free = shutil.disk_usage(out_dir).free
    print(f"source    {meta['source']}: {len(source.files)} files, {total / 1e9:,.2f} GB"
          + (f", revision {source.revision[:8]}" if source.revision else ""))
    print(f"to        {out_dir}: about {max(need, 0) / 1e9:.2f} GB to come, {free / 1e9:,.1f} GB free", flush=True)
    if need > free:
        raise UserError(f"{out_dir.resolve()} needs about {need / 1e9:.1f} GB and has {free / 1e9:.1f} GB free: choose "
                        f"--out_dir on another drive, a smaller --max_tokens, or --keep_parquet=false")


def fill_shards(out_dir, meta, source, config, progress):
    """Writes the shards that are still missing, each followed by meta.json, which says where the next one begins."""
    if meta["shards"] and "_train_" in meta["shards"][-1]["name"] and meta["shards"][-1]["tokens"] < SHARD_TOKENS:
        meta["shards"].pop()  # a --max_tokens ended it early; now it is made whole
    (file, document, offset), outcomes = meta["shards"][-1]["next"] if meta["shards"] else ([0, 0, 0], {})
    ends = np.cumsum([0, *(each["size"] for each in source.files)])
    workers = config.workers or os.cpu_count() or 1
    print(f"workers   {workers} threads", flush=True)

    def watch(chunk, n_tokens):
        progress.tokens += n_tokens
        read = ends[chunk.file] + chunk.share * (ends[chunk.file + 1] - ends[chunk.file])
        progress.share = max(float(read / max(ends[-1], 1)), train_tokens(meta) / (config.max_tokens or math.inf))
        progress.share_before = progress.share_before or progress.share

    def paths():
        enough = (config.max_tokens + config.val_tokens) / TOKENS_PER_PARQUET_BYTE if config.max_tokens else math.inf
        sure = max(int(np.searchsorted(ends, enough)), file)  # files that will be needed; others come when they are
        yield from map_in_order(source.fetch, source.files[file:sure], 1, FILES_AHEAD)
        yield from map_in_order(source.fetch, source.files[sure:], 1, 0)

    threading.Thread(target=progress.draw, args=(int(ends[-1]), isinstance(source, Hub)), daemon=True).start()
    with contextlib.ExitStack() as stack:
        fetched = stack.enter_context(contextlib.closing(paths()))
        chunks = stack.enter_context(contextlib.closing(
            map_in_order(encode_chunk, read_chunks(fetched, file, document), workers)))
        stack.callback(source.stop.set)
        stream = TokenStream(chunks, offset, outcomes, watch)
        if not meta["shards"] and config.val_tokens:
            add_shard(out_dir, meta, source, stream, "val", stream.take(config.val_tokens, source.val_bytes()))
        while not is_enough(meta, config):
            if stream.more():
                room = min(SHARD_TOKENS, (config.max_tokens or math.inf) - train_tokens(meta))
                add_shard(out_dir, meta, source, stream, "train", stream.take(room))
            else:
                meta["exhausted"] = True
            if isinstance(source, Hub) and not config.keep_parquet:
                for used in source.files[:meta["shards"][-1]["next"][0][0]]:
                    (source.folder / used["name"]).unlink(missing_ok=True)


def add_shard(out_dir, meta, source, stream, split, tokens):
    number = 0 if split == "val" else 1 + sum("_train_" in shard["name"] for shard in meta["shards"])
    path = out_dir / f"{source.name}_{split}_{number:06d}.bin"
    count = write_shard(path, tokens)
    if split == "val":  # what is left of its last document is not for training
        meta["left_out"] = stream.drop_rest_of_document()
    meta["shards"].append({"name": path.name, "tokens": count, "sha256": sha256_of(path), "next": stream.position()})
    save_meta(out_dir, meta)


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
        raise UserError(f"nothing is left to train on: of {meta['documents']:,} documents (skipped: {skipped}) validation "
                        f"took {val:,} tokens; choose a smaller --val_tokens or a larger source")
    meta["complete"] = True
    save_meta(out_dir, meta)
    progress.say(f"complete  {out_dir}: {train:,} tokens for training in "
                 f"{sum('_train_' in shard['name'] for shard in meta['shards'])} shards, {val:,} for validation")
    progress.say(f"          of {meta['documents']:,} documents; skipped: {skipped}; left out: {meta['left_out']:,} tokens "
                 f"of the document that validation cuts; {duration(time.monotonic() - progress.start_s)}")
    if config.max_tokens and train > config.max_tokens:
        progress.say(f"note      that is more than max_tokens = {config.max_tokens:,}; delete {out_dir} to have fewer")


# ----------------------------------------------------------------------------------------------------------------------
# Looking at shards


def verify(config):
    """Reads every byte of every shard of out_dir. Raises UserError that names the bad ones."""
    folder = Path(config.out_dir)
    meta = read_meta(folder) if (folder / "meta.json").exists() else {"shards": []}
    known = {shard["name"]: shard for shard in meta["shards"]}
    names = sorted(set(known) | {path.name for path in folder.glob("*.bin")})
    bad = 0
    for name in names:
        problem = shard_problem(folder / name, known.get(name))
        bad += bool(problem)
        print(f"{problem or 'good':<60} {name}", flush=True)
    if bad or not names:
        raise UserError(f"{bad} of {len(names)} shards in {folder} are bad; delete them, and run the same command that "
                        f"made them without --verify" if names else f"there are no shards in {folder}")


def shard_problem(path, known):
    try:
        tokens = read_shard(path)
    except UserError as error:
        return str(error)
    for start in range(0, len(tokens), 1 << 24):
        if (largest := tokens[start:start + (1 << 24)].max()) >= VOCAB_SIZE:
            return f"holds id {largest}, which the vocabulary does not have"
    if not known:
        return ""
    return "" if sha256_of(path) == known["sha256"] else "its SHA-256 is not the one in meta.json"


def show(config, n_documents=3, n_tokens=200):
    """Prints the first documents of a shard, its tokens parted by |."""
    from model import END_OF_TEXT, token_bytes

    path = Path(config.source) if config.source.endswith(".bin") else shards(config.out_dir, "val")[0]
    tokens = read_shard(path)
    starts = np.flatnonzero(tokens[:1 << 24] == END_OF_TEXT)
    print(f"{path}: {len(tokens):,} tokens; the first {min(n_documents, len(starts))} documents in it:")
    for start, end in list(zip(starts, [*starts[1:], len(tokens)], strict=True))[:n_documents]:
        print(f"\n---- token {start:,} to {end - 1:,}")
        pieces = ["<|endoftext|>", *(shown(token_bytes(int(id))) for id in tokens[start + 1:min(end, start + n_tokens)])]
        print("|".join(pieces) + (f"| ... and {end - start - n_tokens:,} more" if end - start > n_tokens else ""))


def shown(token):
    """A token as one line shows it: half a character as its bytes, a newline as \\n."""
    return token.decode("utf-8", errors="backslashreplace").replace("\n", "\\n").replace("\r", "\\r")


def main():
    config = load(Config, "prepare_fineweb")
    if config.show:
        show(config)
    elif config.verify:
        verify(config)
    else:
        prepare(config)


if __name__ == "__main__":
    run(main)
