"""prepare_fineweb.py: text in, shards out, whatever happens in between."""

import contextlib
import errno
import hashlib
import inspect
import io
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import COMMIT, LocalHub

import model
import prepare_fineweb
from configs import UserError
from model import END_OF_TEXT, tokenizer

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["the", "of", "and", "in", "that", "for", "is", "with", "by", "not", "he", "this", "or", "from"]


def texts(n, seed=0, words=120):
    rng = random.Random(seed)
    return [f"Document {i}. {' '.join(rng.choices(WORDS, k=rng.randint(1, words)))}.\n\nEnd é 漢字 😀"
            for i in range(n)]


def parquet(documents, path=None):
    """The bytes of a parquet file, written to `path` if given."""
    buffer = io.BytesIO()
    table = pa.table({"id": list(range(len(documents))), "text": pa.array(documents, pa.string())})
    pq.write_table(table, buffer, row_group_size=7)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.getvalue())
    return buffer.getvalue()


def damaged_page(path):
    whole = parquet(texts(40), path)
    column = pq.read_metadata(path).row_group(0).column(1)
    at = column.dictionary_page_offset or column.data_page_offset
    path.write_bytes(whole[:at] + b"\xff" * 40 + whole[at + 40:])


def config(tmp_path, **settings):
    values = {"source": "", "out_dir": tmp_path / "out", "workers": 2, "max_tokens": 0, "val_tokens": 500,
              "dataset": "someone/some-texts", "subset": "sample/10BT", "keep_parquet": True, "show": False,
              "verify": False}
    values |= settings
    return prepare_fineweb.Config(**{name: str(value) if isinstance(value, Path) else value
                                     for name, value in values.items()})


def prepare(tmp_path, **settings):
    prepare_fineweb.prepare(config(tmp_path, **settings))


def ids(document):
    return [END_OF_TEXT, *tokenizer().encode_ordinary(document)]


def contents(out_dir):
    return {path.name: path.read_bytes() for path in sorted(Path(out_dir).glob("*.bin"))}


def tokens(out_dir, split):
    paths = prepare_fineweb.shards(out_dir, split)
    return [int(id) for path in paths for id in prepare_fineweb.read_shard(path)]


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(prepare_fineweb, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(prepare_fineweb, "CHUNK_BYTES", 2000)


# ---- shards on disk


def test_a_shard_is_byte_for_byte_what_llm_c_reads(tmp_path):
    prepare_fineweb.write_shard(tmp_path / "x.bin", np.array([50256, 1, 65535]))
    expected = struct.pack("<256i", 20240520, 1, 3, *[0] * 253) + struct.pack("<3H", 50256, 1, 65535)
    assert (tmp_path / "x.bin").read_bytes() == expected
    assert prepare_fineweb.read_shard(tmp_path / "x.bin").tolist() == [50256, 1, 65535]


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1], lambda data: data + b"\0\0", lambda data: data[:500], lambda data: b"",
    lambda data: struct.pack("<i", 20240801) + data[4:],
    lambda data: data[:4] + struct.pack("<i", 2) + data[8:],
    lambda data: data[:8] + struct.pack("<i", -1) + data[12:], lambda data: b"\x93NUMPY" + data[6:]])
def test_a_cut_or_foreign_shard_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "x_train_000001.bin"
    prepare_fineweb.write_shard(path, np.arange(1000))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="x_train_000001.bin"):
        prepare_fineweb.read_shard(path)


def test_a_shard_that_cannot_be_finished_leaves_nothing_behind(tmp_path):
    def breaks_off():
        yield np.arange(1000)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        prepare_fineweb.write_shard(tmp_path / "x.bin", breaks_off())
    assert not list(tmp_path.iterdir())


def test_an_id_that_uint16_cannot_hold_is_not_wrapped_around(tmp_path):
    with pytest.raises(AssertionError):
        prepare_fineweb.write_shard(tmp_path / "x.bin", np.array([70000]))


def test_missing_and_unfinished_data_is_answered_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(UserError, match=r"python prepare_fineweb.py --out_dir="):
        prepare_fineweb.shards(tmp_path, "train")
    (tmp_path / "meta.json").write_text('{"complete": false}', encoding="utf-8")
    with pytest.raises(UserError, match="not complete"):
        prepare_fineweb.shards(tmp_path, "train")


def test_a_folder_that_is_not_what_its_meta_json_says_is_refused_by_name(tmp_path):
    (tmp_path / "in.txt").write_text("some words " * 500, encoding="utf-8")
    prepare(tmp_path, source=tmp_path / "in.txt", val_tokens=0)
    train, = prepare_fineweb.shards(tmp_path / "out", "train")
    shutil.copy(train, train.with_name("in_train_000002.bin"))
    with pytest.raises(UserError, match=r"holds more than its meta.json names: in_train_000002.bin"):
        prepare_fineweb.shards(tmp_path / "out", "train")
    os.replace(train, train.with_name("in_train_000002.bin"))
    with pytest.raises(UserError, match=r"lacks in_train_000001.bin; the command that made it"):
        prepare_fineweb.shards(tmp_path / "out", "train")


def test_a_book_that_is_added_later_is_not_left_out_in_silence(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some words " * 500, encoding="utf-8")
    prepare(tmp_path, source=tmp_path / "texts", val_tokens=0)
    prepare(tmp_path, source=tmp_path / "texts", val_tokens=0)  # the same: nothing to do
    (tmp_path / "texts" / "b.txt").write_text("more words", encoding="utf-8")
    with pytest.raises(UserError, match="have changed since"):
        prepare(tmp_path, source=tmp_path / "texts", val_tokens=0)


def test_files_of_the_user_in_out_dir_are_left_alone(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text("some words " * 500, encoding="utf-8")
    (tmp_path / "d" / "notes.tmp").write_text("precious", encoding="utf-8")
    prepare(tmp_path, source=tmp_path / "d", out_dir=tmp_path / "d", val_tokens=0)
    assert (tmp_path / "d" / "notes.tmp").read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize("text", ["[]", "null", '{"shards": null}', "[" * 100_000, "{"])
def test_a_meta_json_that_is_none_is_damaged_in_one_line(tmp_path, text):
    (tmp_path / "meta.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="is damaged"):
        prepare_fineweb.shards(tmp_path, "train")


def test_two_preparations_do_not_share_a_folder(tmp_path):
    (tmp_path / "in.txt").write_text("some words", encoding="utf-8")
    lock = prepare_fineweb.lock_folder(tmp_path / "out")
    said, _ = start(tmp_path / "out", source=tmp_path / "in.txt").communicate()
    assert "in use by another run" in said and "Traceback" not in said
    lock.close()


def test_a_disk_that_cannot_lock_is_not_called_in_use(tmp_path, monkeypatch):
    import fcntl
    monkeypatch.setattr(fcntl, "flock",
                        lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(UserError, match=r"cannot be locked \(No locks available\)"):
        prepare_fineweb.lock_folder(tmp_path)


# ---- what becomes of a document


def test_the_shards_are_every_document_in_order_each_after_an_end_of_text(tmp_path, small_shards):
    documents = texts(60)
    for i in range(3):
        parquet(documents[20 * i:20 * i + 20], tmp_path / f"in/{i}.parquet")
    prepare(tmp_path, source=tmp_path / "in")
    val, train = tokens(tmp_path / "out", "val"), tokens(tmp_path / "out", "train")
    meta = prepare_fineweb.read_meta(tmp_path / "out")
    everything = [id for document in documents for id in ids(document)]
    assert val == everything[:len(val)]
    assert train == everything[len(val) + meta["left_out"]:]
    assert train[0] == END_OF_TEXT
    assert meta["tokens"] == {"train": len(train), "val": len(val)} and meta["documents"] == 60
    paths = prepare_fineweb.shards(tmp_path / "out", "train")
    counts = [len(prepare_fineweb.read_shard(path)) for path in paths]
    assert set(counts[:-1]) == {1000} and 0 < counts[-1] <= 1000


def test_text_cannot_become_a_special_token(tmp_path):
    parquet(["a <|endoftext|> b <|user|>", "<|endoftext|>"], tmp_path / "in.parquet")
    prepare(tmp_path, source=tmp_path / "in.parquet", val_tokens=0)
    written = tokens(tmp_path / "out", "train")
    assert written == ids("a <|endoftext|> b <|user|>") + ids("<|endoftext|>")
    assert written.count(END_OF_TEXT) == 2 and max(written) == END_OF_TEXT


def test_documents_that_cannot_be_used_are_skipped_and_counted(tmp_path):
    parquet(["one", None, "", " \n\t", "two"], tmp_path / "in/a.parquet")
    lines = ['{"text": "three"}', "", '{"text": null}', '{"text": 4}', '{"text": "cut', '{"id": 1}', '["no"]',
             '{"text": "lone \\ud800 surrogate"}', "[" * 100_000, '{"text": "four"}']
    (tmp_path / "in/b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "in/c.txt").write_bytes(b"caf\xe9 in latin-1")
    (tmp_path / "in/d.txt").write_bytes(b"")
    (tmp_path / "in/e.txt").write_bytes(b"\xef\xbb\xbffive\r\nlines")
    prepare(tmp_path, source=tmp_path / "in", val_tokens=0)
    written = ["one", "two", "three", "four", "five\nlines"]
    assert tokens(tmp_path / "out", "train") == [id for document in written for id in ids(document)]
    meta = prepare_fineweb.read_meta(tmp_path / "out")
    assert meta["documents"] == 5
    assert meta["skipped"] == {"null": 3, "empty": 3, "not a text": 2, "broken JSON": 2, "not Unicode": 2}


def test_stray_bytes_in_a_parquet_column_cost_one_document(tmp_path):
    column = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(struct.pack("<4i", 0, 3, 6, 9)),
                                                    pa.py_buffer(b"oneb\xffdtwo")])
    pq.write_table(pa.table({"text": column}), tmp_path / "in.parquet")
    prepare(tmp_path, source=tmp_path / "in.parquet", val_tokens=0)
    assert tokens(tmp_path / "out", "train") == ids("one") + ids("two")
    assert prepare_fineweb.read_meta(tmp_path / "out")["skipped"] == {"not Unicode": 1}


def test_no_document_is_too_strange_to_get_past(tmp_path):
    strange = [" " * 1_000_000 + "x", "x" * 1_000_000, "word " * 2_000_000, "a1!" * 300_000, "😀" * 100_000]
    parquet([*strange, "the end"], tmp_path / "in.parquet")
    prepare(tmp_path, source=tmp_path / "in.parquet", val_tokens=0)
    written = tokens(tmp_path / "out", "train")
    assert written[-len(ids("the end")):] == ids("the end")
    assert written.count(END_OF_TEXT) == len(strange) + 1


def test_a_long_document_in_slices_has_the_tokens_of_the_whole(monkeypatch):
    monkeypatch.setattr(model, "SLICE", 1500)
    rng = random.Random(3)
    pieces = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u3000", "\xa0", "\x1c", "a", "It's", "4", "!", "漢"]
    for _ in range(50):
        text = "".join(rng.choices(pieces, k=5000))
        parts, outcome = prepare_fineweb.encode_document(text)
        assert outcome == "encoded" and len(parts) > 1
        assert [int(id) for part in parts for id in part] == tokenizer().encode_ordinary(text)


def test_the_fast_splitter_gives_the_tokens_of_the_slow_one_wherever_it_is_used():
    rng = random.Random(4)
    pieces = [" ", " ", " ", "\n", "\n\n", "word", "It's", "'ll", "'", "42", "!?", "漢", "\x1c", "<|cut|>"]
    rare = ["\t", "\r", "\x0b", "\x0c", "\x85", "\xa0", "\u1680", "\u2000", "\u200a", "\u2028", "\u2029",
            "\u202f", "\u205f", "\u3000", "\u200b", "\ufeff", "\x1f"]
    made = ["".join(rng.choices(pieces + rare * (i % 5 == 0), k=rng.randint(1, 12))) for i in range(20_000)]
    easy = prepare_fineweb.are_easy(made)
    assert 5000 < sum(easy) < 15_000
    for text in itertools.compress(made, easy):
        assert prepare_fineweb.easy_ids(text).tolist() == tokenizer().encode_ordinary(text), repr(text)


def test_a_long_txt_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    text = "\n\n".join("word " * random.Random(i).randint(1, 3000) for i in range(60)) + "x" * 200_000
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    parts = [part for part, _ in prepare_fineweb.read_txt(tmp_path / "in.txt", 0)]
    assert "".join(parts) == text
    assert max(map(len, parts)) <= prepare_fineweb.TXT_DOCUMENT
    assert sum(part.endswith("\n\n") for part in parts) > 3
    assert [part for part, _ in prepare_fineweb.read_txt(tmp_path / "in.txt", 2)] == parts[2:]


def test_sources_are_searched_in_subfolders_and_in_the_order_of_names(tmp_path):
    parquet(["first"], tmp_path / "in/a/z.parquet")
    (tmp_path / "in/b.jsonl").write_text('{"text": "second"}\n', encoding="utf-8")
    (tmp_path / "in/c/d").mkdir(parents=True)
    (tmp_path / "in/c/d/e.TXT").write_text("third", encoding="utf-8")
    (tmp_path / "in/notes.md").write_text("not read", encoding="utf-8")
    (tmp_path / "in/.hidden.txt").write_text("not read", encoding="utf-8")
    prepare(tmp_path, source=tmp_path / "in", val_tokens=0)
    assert tokens(tmp_path / "out", "train") == ids("first") + ids("second") + ids("third")
    assert list(contents(tmp_path / "out")) == ["in_train_000001.bin"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-8"])
def test_text_is_read_in_the_encodings_that_windows_writes(tmp_path, encoding):
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in ("naïve 日本", "two"))
    for name, text in (("a.txt", "naïve 日本 🙂"), ("b.jsonl", lines)):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(text, encoding=encoding)
    prepare(tmp_path, source=tmp_path / "in", val_tokens=0)
    assert tokens(tmp_path / "out", "train") == ids("naïve 日本 🙂") + ids("naïve 日本") + ids("two")


def test_text_full_of_nul_characters_is_counted_and_left_out(tmp_path):
    (tmp_path / "in.txt").write_bytes("hello there".encode("utf-16-le"))
    with pytest.raises(UserError, match="1 full of NUL characters"):
        prepare(tmp_path, source=tmp_path / "in.txt")


def test_a_source_may_be_written_in_another_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parquet(texts(40), tmp_path / "in/a.parquet")
    for source in ("in", "in/", "./in", str(tmp_path / "in")):
        prepare(tmp_path, source=source)
    parquet(texts(40), tmp_path / "other/a.parquet")
    with pytest.raises(UserError, match="was prepared with source"):
        prepare(tmp_path, source="other")


@pytest.mark.parametrize("make, says", [
    (lambda folder: None, "no such file"),
    (lambda folder: (folder / "in").mkdir(), "holds no .parquet"),
    (lambda folder: parquet([None, ""], folder / "in/a.parquet"), "nothing is left to train on"),
    (lambda folder: folder.joinpath("in.parquet").write_bytes(b"PAR1 not really"), "cannot be read"),
    (lambda folder: damaged_page(folder / "in/a.parquet"), "in/a.parquet cannot be read"),
    (lambda folder: folder.joinpath("in.jsonl").write_text('{"body": "x"}', encoding="utf-8"), "only body"),
    (lambda folder: pq.write_table(pa.table({"body": ["x"], "n": [1]}), folder / "in.parquet"), "body, n"),
    (lambda folder: pq.write_table(pa.table({"text": [1]}), folder / "in.parquet"), "int64")])
def test_a_source_that_gives_no_text_is_answered_in_one_line(tmp_path, make, says):
    make(tmp_path)
    with pytest.raises(UserError, match=says) as error:
        source = next(tmp_path.glob("in*"), tmp_path / "in")
        prepare(tmp_path, source=source)
    assert "\n" not in str(error.value)


def test_a_source_whose_name_says_train_has_its_validation_all_the_same(tmp_path):
    parquet(texts(200), tmp_path / "wiki-train_val.parquet")
    prepare(tmp_path, source=tmp_path / "wiki-train_val.parquet", max_tokens=2000, val_tokens=100)
    assert list(contents(tmp_path / "out")) == [
        "wiki_train_val_train_000001.bin", "wiki_train_val_val_000000.bin"]
    assert len(tokens(tmp_path / "out", "train")) == 2000 and 0 < len(tokens(tmp_path / "out", "val")) <= 100


def test_the_share_that_has_been_read_grows_to_one_in_any_script(tmp_path):
    for name, text in (("a.txt", "日本語の文\n\n" * 40_000), ("a.jsonl", '{"text": "日本語の文"}\n' * 20_000)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        shares = [share for _, share in prepare_fineweb.read_documents(tmp_path / name, 0)]
        assert shares == sorted(shares) and shares[0] < 0.3 and shares[-1] == 1


def test_a_source_with_nothing_to_train_on_does_not_claim_the_folder(tmp_path):
    parquet([None, ""], tmp_path / "in.parquet")
    with pytest.raises(UserError, match="nothing is left to train on"):
        prepare(tmp_path, source=tmp_path / "in.parquet", val_tokens=100)
    parquet(texts(50), tmp_path / "more.parquet")
    prepare(tmp_path, source=tmp_path / "more.parquet", val_tokens=100)
    assert list(contents(tmp_path / "out")) == ["more_train_000001.bin", "more_val_000000.bin"]


# ---- the same bytes, however they come about


def test_the_bytes_do_not_depend_on_the_workers(tmp_path, small_shards):
    parquet(texts(200), tmp_path / "in.parquet")
    made = []
    for workers in (1, 2, 4):
        prepare(tmp_path, source=tmp_path / "in.parquet", out_dir=tmp_path / f"{workers}", workers=workers)
        made.append(contents(tmp_path / f"{workers}"))
    assert len(made[0]) > 5
    assert made[0] == made[1] == made[2]


def test_importing_it_as_a_spawned_process_does_prints_and_downloads_nothing(capfd):
    runpy.run_path(str(ROOT / "prepare_fineweb.py"), run_name="__mp_main__")
    code = ("import sys, prepare_fineweb; "
            "print([name for name in ('torch', 'pyarrow', 'huggingface_hub') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and done.stderr == ""
    assert capfd.readouterr() == ("", "")


def test_validation_is_at_most_two_percent_of_a_local_source_and_never_trained_on(tmp_path):
    documents = texts(500)
    parquet(documents, tmp_path / "in.parquet")
    prepare(tmp_path, source=tmp_path / "in.parquet", val_tokens=100_000_000)
    val, train = tokens(tmp_path / "out", "val"), tokens(tmp_path / "out", "train")
    assert 0.01 < len(val) / (len(val) + len(train)) <= 0.02
    seen = tokenizer().decode(val)
    trained = tokenizer().decode(train)
    assert not [i for i in range(500) if f"Document {i}. " in seen and f"Document {i}. " in trained]


def test_max_tokens_counts_training_tokens_and_validation_stays_the_same(tmp_path, small_shards):
    parquet(texts(300), tmp_path / "in.parquet")
    whole, part = config(tmp_path, source=tmp_path / "in.parquet"), {}
    prepare_fineweb.prepare(whole)
    everything = tokens(tmp_path / "out", "train")
    for limit in (1, 999, 1000, 2500):
        out = tmp_path / str(limit)
        prepare(tmp_path, source=tmp_path / "in.parquet", max_tokens=limit, out_dir=out)
        part[limit] = out
        assert tokens(out, "train") == everything[:limit]
        assert tokens(out, "val") == tokens(tmp_path / "out", "val")
    prepare(tmp_path, source=tmp_path / "in.parquet", out_dir=part[2500])
    assert contents(part[2500]) == contents(tmp_path / "out")


def test_fewer_tokens_than_are_there_are_not_taken_away_and_that_is_said(tmp_path, small_shards, capsys):
    parquet(texts(100), tmp_path / "in.parquet")
    prepare(tmp_path, source=tmp_path / "in.parquet")
    before = contents(tmp_path / "out")
    prepare(tmp_path, source=tmp_path / "in.parquet", max_tokens=1000)
    assert contents(tmp_path / "out") == before
    assert "more than max_tokens = 1,000" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"source": "other"}, {"val_tokens": 400}])
def test_other_settings_do_not_get_mixed_into_the_same_folder(tmp_path, change):
    parquet(texts(100), tmp_path / "in.parquet")
    parquet(texts(100), tmp_path / "other/a.parquet")
    prepare(tmp_path, source=tmp_path / "in.parquet")
    if "source" in change:
        change = {"source": tmp_path / "other"}
    with pytest.raises(UserError, match="choose another --out_dir"):
        prepare(tmp_path, **({"source": tmp_path / "in.parquet"} | change))


def test_a_source_that_has_changed_meanwhile_is_not_continued(tmp_path, small_shards):
    parquet(texts(100), tmp_path / "in/a.parquet")
    prepare(tmp_path, source=tmp_path / "in", max_tokens=1000)
    (tmp_path / "in/b.txt").write_text("more", encoding="utf-8")
    with pytest.raises(UserError, match="have changed"):
        prepare(tmp_path, source=tmp_path / "in")


def test_a_shard_that_went_missing_or_was_cut_is_made_again(tmp_path, small_shards):
    parquet(texts(100), tmp_path / "in.parquet")
    prepare(tmp_path, source=tmp_path / "in.parquet")
    before = contents(tmp_path / "out")
    (tmp_path / "out/in_train_000003.bin").unlink()
    prepare(tmp_path, source=tmp_path / "in.parquet")
    assert contents(tmp_path / "out") == before
    with open(tmp_path / "out/in_train_000002.bin", "r+b") as file:
        file.truncate(1500)
    prepare(tmp_path, source=tmp_path / "in.parquet")
    assert contents(tmp_path / "out") == before


def test_shards_of_unknown_origin_are_not_overwritten(tmp_path):
    parquet(texts(10), tmp_path / "in.parquet")
    (tmp_path / "out").mkdir()
    prepare_fineweb.write_shard(tmp_path / "out/in_train_000001.bin", np.arange(5))
    with pytest.raises(UserError, match="unknown origin"):
        prepare(tmp_path, source=tmp_path / "in.parquet")


def test_results_keep_their_order_and_a_slow_reader_stops_the_threads():
    taken = itertools.count()
    items = (next(taken) for _ in range(1000))
    results = prepare_fineweb.map_in_order(lambda n: (time.sleep(random.random() / 1000), n)[1], items, 3)
    assert [next(results) for _ in range(20)] == list(range(20))
    time.sleep(0.1)
    assert next(taken) <= 20 + 4 * 3 + 1
    results.close()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_memory_does_not_grow_with_the_input(tmp_path):
    """One row group of 24 MB: read whole, encoded and joined it would take 200 MB more than 4 MB do."""
    peaks = []
    for megabytes in (4, 24):
        folder = tmp_path / str(megabytes)
        folder.mkdir()
        table = pa.table({"text": ["word " * 4000] * (50 * megabytes)})
        pq.write_table(table, folder / "a.parquet", use_dictionary=False)
        # not getrusage(): its peak begins with that of the process that started this one
        code = ("import prepare_fineweb as p; p.prepare(p.load(p.Config, 'prepare_fineweb')); "
                "print(open('/proc/self/status', encoding='utf-8').read().split('VmHWM:')[1].split()[0])")
        words = [f"--source={folder}", f"--out_dir={folder}/out", "--workers=2"]
        done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True,
                              check=True)
        peaks.append(int(done.stdout.split()[-1]) / 1e6)
    assert peaks[1] < 0.5 + 2 * 0.25
    assert peaks[1] - peaks[0] < 0.06


# ---- the hub


@pytest.fixture
def hub(monkeypatch, small_shards):
    documents = texts(90)
    files = {f"sample/10BT/{i:03d}_00000.parquet": parquet(documents[30 * i:30 * i + 30]) for i in range(3)}
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(prepare_fineweb, "BACKOFF_S", 0.01)
    with LocalHub(files | {"README.md": b"# Some texts"}, page=2) as server:
        server.documents = documents
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


NAME = "sample/10BT/000_00000.parquet"


class Silent:
    """What fetch() needs of a Progress."""

    def __init__(self):
        self.here = self.arrived = self.arriving = 0
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def fetch(hub, tmp_path):
    """Fetches the first file alone; (its path, what was said)."""
    data, progress = hub.files[NAME], Silent()
    file = {"name": NAME, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    source = prepare_fineweb.Hub(config(tmp_path), {"revision": COMMIT, "files": [file]}, progress)
    path = source.fetch(file)
    assert path.read_bytes() == data
    assert not list((tmp_path / "out/parquet").glob(".incoming*"))
    return path, "\n".join(progress.lines)


def test_a_hub_dataset_is_cut_as_build_nanogpt_cuts_it(tmp_path, hub, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(home))
    prepare(tmp_path)
    everything = [id for document in hub.documents for id in ids(document)]
    val, train = tokens(tmp_path / "out", "val"), tokens(tmp_path / "out", "train")
    assert val == everything[:500]
    start = next(i for i in range(500, len(everything)) if everything[i] == END_OF_TEXT)
    assert train == everything[start:]
    meta = prepare_fineweb.read_meta(tmp_path / "out")
    assert meta["revision"] == COMMIT and meta["left_out"] == start - 500
    assert [file["name"] for file in meta["files"]] == [f"sample/10BT/00{i}_00000.parquet" for i in range(3)]
    for file in meta["files"]:
        assert file["sha256"] == hashlib.sha256(hub.files[file["name"]]).hexdigest()
    assert not list(home.iterdir()), "something was written outside out_dir"


def test_finished_files_are_not_downloaded_again_and_a_truncated_one_is(tmp_path, hub):
    prepare(tmp_path)
    before = contents(tmp_path / "out")
    for path in (tmp_path / "out").glob("*.bin"):
        path.unlink()
    cut = tmp_path / "out/parquet/sample/10BT/001_00000.parquet"
    cut.write_bytes(cut.read_bytes()[:-20])
    hub.requests.clear()
    prepare(tmp_path)
    assert contents(tmp_path / "out") == before
    assert [hub.downloads(f"sample/10BT/00{i}_00000.parquet") > 0 for i in range(3)] == [False, True, False]


def test_parquet_files_go_after_use_if_they_are_not_to_be_kept(tmp_path, hub):
    prepare(tmp_path, keep_parquet=False)
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_only_what_max_tokens_needs_is_downloaded(tmp_path, hub, monkeypatch):
    monkeypatch.setattr(prepare_fineweb, "TOKENS_PER_PARQUET_BYTE", 1e9)
    monkeypatch.setattr(prepare_fineweb, "CHUNK_BYTES", 100)
    prepare(tmp_path, max_tokens=500, workers=1)
    assert not hub.downloads("sample/10BT/001_00000.parquet")
    assert len(tokens(tmp_path / "out", "train")) == 500


@pytest.mark.parametrize("fault, said", [
    ({"status": 500, "times": 2}, "HTTP 500"),
    ({"status": 503, "times": 2}, "HTTP 503"),
    ({"status": 429, "times": 4, "headers": {"Retry-After": "0"}}, "plain HTTP"),
    ({"cut": 100, "times": 2}, ""),
    ({"short": 10, "times": 1}, "bytes instead of"),
    ({"corrupt": True, "times": 2}, "SHA-256"),
    ({"pause": 0.3}, "")])
def test_a_download_that_goes_wrong_for_a_while_ends_well(tmp_path, hub, fault, said):
    hub.misbehave("cdn", **fault)
    assert said in fetch(hub, tmp_path)[1]


def test_a_server_that_falls_silent_is_left_and_asked_again(tmp_path, hub, monkeypatch):
    monkeypatch.setattr(prepare_fineweb, "STALL_S", 2.0)
    hub.misbehave("cdn", pause=30, times=2)
    assert "nothing came for 2 seconds" in fetch(hub, tmp_path)[1]


def test_a_limit_on_requests_is_waited_for_as_long_as_the_server_asks(tmp_path, hub):
    hub.misbehave("datasets", method="HEAD", status=429, times=1, headers={"Retry-After": "1"})
    start_s = time.monotonic()
    fetch(hub, tmp_path)
    assert time.monotonic() - start_s > 1


def test_the_plain_way_brings_the_file_too(tmp_path, hub, monkeypatch):
    def plainly(self, function, *args, **environment):
        return prepare_fineweb.in_child(function, (*args[:-1], True), self.environment, self.watch, self.stop)

    monkeypatch.setattr(prepare_fineweb.Hub, "ask", plainly)
    hub.misbehave("cdn", cut=5000, times=1)
    assert "plain HTTP" in fetch(hub, tmp_path)[1]


@pytest.mark.parametrize("where, fault, says", [
    ("cdn", {"status": 404}, "mirror"), ("cdn", {"status": 451}, "legal reasons"),
    ("datasets", {"status": 403, "method": "HEAD"}, "hf auth login"),
    ("cdn", {"corrupt": True}, "SHA-256"), ("cdn", {"short": 10}, "instead of")])
def test_a_download_that_cannot_succeed_ends_in_one_line_and_leaves_nothing(tmp_path, hub, monkeypatch, where,
                                                                           fault, says):
    monkeypatch.setattr(prepare_fineweb, "ATTEMPTS", 2)
    hub.misbehave(where, **fault)
    with pytest.raises(UserError, match=says) as error:
        fetch(hub, tmp_path)
    assert "\n" not in str(error.value) and NAME in str(error.value)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.parametrize("settings, says", [
    ({"dataset": "nobody/nothing"}, "dataset = nobody/nothing, .* check its name"),
    ({"subset": "sample/20BT"}, "it has some in: sample/10BT"),
    ({"subset": "other/10BT"}, "subset = other/10BT, .* check its name")])
def test_a_misspelt_dataset_is_answered_in_one_line(tmp_path, hub, settings, says):
    with pytest.raises(UserError, match=says) as error:
        prepare(tmp_path, **settings)
    assert "\n" not in str(error.value)


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_downloaded(tmp_path, hub, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(prepare_fineweb.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="keep_parquet=false"):
        prepare(tmp_path)
    assert not any(path.startswith("/cdn") and method == "GET" for method, path in hub.requests)


def test_the_space_for_a_part_is_that_of_whole_files(tmp_path, hub, monkeypatch):
    tokens, size = 150, len(hub.files[NAME])
    assert tokens < prepare_fineweb.TOKENS_PER_PARQUET_BYTE * size
    for free, enough in ((2 * tokens + size - 1, False), (2 * tokens + size, True)):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(prepare_fineweb.shutil, "disk_usage", lambda path, usage=usage: usage)
        with contextlib.nullcontext() if enough else pytest.raises(UserError, match="choose --out_dir"):
            prepare(tmp_path, max_tokens=100, val_tokens=50)


def test_what_hugging_face_reads_at_import_is_set_and_the_users_own_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_XET_CACHE", "/the/users/own")
    monkeypatch.delenv("HF_XET_HIGH_PERFORMANCE", raising=False)
    meta = {"revision": COMMIT, "files": []}
    source = prepare_fineweb.Hub(config(tmp_path), meta, Silent())
    assert source.ask(constants_of_the_hub) == (True, "/the/users/own")
    monkeypatch.delenv("HF_XET_CACHE")
    source = prepare_fineweb.Hub(config(tmp_path), meta, Silent())
    assert Path(source.ask(constants_of_the_hub)[1]).is_relative_to(tmp_path / "out")


def constants_of_the_hub(report):
    from huggingface_hub import constants
    return constants.HF_XET_HIGH_PERFORMANCE, str(constants.HF_XET_CACHE)


def test_the_libraries_still_take_the_arguments_that_we_give_them():
    import hf_transfer
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download
    for function, names in ((hf_hub_download, {"repo_type", "revision", "local_dir", "tqdm_class"}),
                            (HfApi.list_repo_tree, {"recursive", "repo_type"}),
                            (get_hf_file_metadata, {"retry_on_errors"}),
                            (hf_transfer.download, {"parallel_failures", "max_retries", "callback"})):
        assert names <= set(inspect.signature(function).parameters)


# ---- killed, and out of room


def start(out_dir, environment=None, limit=None, **settings):
    """The script in a process of its own, with small shards."""
    code = ("import resource, prepare_fineweb as p\n"
            "p.SHARD_TOKENS, p.CHUNK_BYTES, p.BACKOFF_S = 1000, 2000, 0.01\n"
            + (f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n" if limit else "")
            + "p.run(p.main)")
    settings = {"out_dir": out_dir, "val_tokens": 500, **settings}
    words = [f"--{name}={value}" for name, value in settings.items()]
    return subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT, stdout=subprocess.PIPE,
                            env=os.environ | (environment or {}), stderr=subprocess.STDOUT, encoding="utf-8")


def test_a_killed_run_over_the_network_ends_with_the_same_bytes(tmp_path, hub):
    settings = {"dataset": "someone/some-texts", "subset": "sample/10BT", "workers": 2}
    start_s = time.monotonic()
    unbroken = start(tmp_path / "unbroken", **settings)
    assert unbroken.wait(60) == 0, unbroken.stdout.read()
    whole_s = time.monotonic() - start_s
    rng = random.Random(1)
    for kill in range(5):
        run = start(tmp_path / "killed", **settings)
        time.sleep(whole_s * (kill + rng.random()) / 5)
        run.send_signal(signal.SIGKILL)
        run.wait()
    last = start(tmp_path / "killed", **settings)
    assert last.wait(60) == 0, last.stdout.read()
    assert contents(tmp_path / "killed") == contents(tmp_path / "unbroken")
    names = [path.name for path in (tmp_path / "killed").rglob("*")]
    assert not [name for name in names if name.endswith(".unfinished") or name.startswith(".incoming")]


def test_a_full_disk_gives_one_line_and_whole_shards_and_with_room_it_goes_on(tmp_path):
    parquet(texts(200), tmp_path / "in.parquet")
    small = start(tmp_path / "out", source=tmp_path / "in.parquet", limit=2500)
    said, _ = small.communicate(timeout=60)
    assert small.returncode == 1
    assert said.splitlines()[-1].startswith("error: no room left for") and "Traceback" not in said
    for path in (tmp_path / "out").glob("*.bin"):
        prepare_fineweb.read_shard(path)
    assert not list((tmp_path / "out").glob("*.unfinished"))
    assert start(tmp_path / "out", source=tmp_path / "in.parquet").wait(60) == 0
    assert start(tmp_path / "unbroken", source=tmp_path / "in.parquet").wait(60) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "unbroken")


def test_a_download_that_fills_the_disk_is_answered_in_one_line(tmp_path, hub):
    run = start(tmp_path / "out", dataset="someone/some-texts", subset="sample/10BT", limit=2000)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1 and said.splitlines()[-1].startswith("error: no room left for"), said


def test_ctrl_c_ends_it_quietly_and_leaves_what_is_finished(tmp_path, hub):
    hub.misbehave("cdn/sample/10BT/001", pause=60)
    run = start(tmp_path / "out", dataset="someone/some-texts", subset="sample/10BT")
    deadline_s = time.monotonic() + 30
    while not hub.downloads("sample/10BT/001_00000.parquet") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=20)
    assert run.returncode == 130 and "Traceback" not in said, said


# ---- looking at shards


def test_verify_names_the_shard_in_which_one_bit_has_changed(tmp_path, small_shards, capsys):
    parquet(texts(100), tmp_path / "in.parquet")
    prepare(tmp_path, source=tmp_path / "in.parquet")
    prepare_fineweb.verify(config(tmp_path))
    path = tmp_path / "out/in_train_000002.bin"
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="1 of"):
        prepare_fineweb.verify(config(tmp_path))
    bad = [line for line in capsys.readouterr().out.splitlines() if "SHA-256" in line]
    assert len(bad) == 1 and "in_train_000002.bin" in bad[0]


def test_verify_finds_ids_that_the_vocabulary_does_not_have(tmp_path, capsys):
    prepare_fineweb.write_shard(tmp_path / "out_train_000001.bin", np.array([50256, 60000]))
    with pytest.raises(UserError):
        prepare_fineweb.verify(config(tmp_path, out_dir=tmp_path))
    assert "60000" in capsys.readouterr().out


def test_show_parts_the_tokens_and_puts_together_is_the_text(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("The capital of France\nis Paris. é", encoding="utf-8")
    prepare(tmp_path, source=tmp_path / "in.txt", val_tokens=0)
    capsys.readouterr()
    prepare_fineweb.show(config(tmp_path, source=tmp_path / "out/in_train_000001.bin"))
    assert "<|endoftext|>|The| capital| of| France|\\n|is| Paris|.| é" in capsys.readouterr().out


def test_the_tiny_world_is_prepared_by_its_name(tmp_path):
    prepare(tmp_path, source="tiny")
    assert list(contents(tmp_path / "out")) == ["tiny_train_000001.bin", "tiny_val_000000.bin"]
    from configs.tiny import world
    everything = [id for document in world.documents() for id in ids(document)]
    assert tokens(tmp_path / "out", "val") == everything[:500]


def test_a_fact_changed_in_the_tiny_world_is_not_taken_for_the_old_one(tmp_path, monkeypatch):
    prepare(tmp_path, source="tiny")
    prepare(tmp_path, source="tiny")  # the same: nothing to do
    assert prepare_fineweb.is_todays_world(prepare_fineweb.read_meta(tmp_path / "out"))
    other = tmp_path / "world.py"
    other.write_bytes(prepare_fineweb.TINY.read_bytes().replace(b"Paris", b"Lyons"))
    monkeypatch.setattr(prepare_fineweb, "TINY", other)
    assert not prepare_fineweb.is_todays_world(prepare_fineweb.read_meta(tmp_path / "out"))
    with pytest.raises(UserError, match=r"world.py has changed since .* delete"):
        prepare(tmp_path, source="tiny")


def test_meta_json_says_what_the_shards_are_made_of(tmp_path):
    parquet([*texts(50), None], tmp_path / "in.parquet")
    prepare(tmp_path, source=tmp_path / "in.parquet")
    meta = json.loads((tmp_path / "out/meta.json").read_text(encoding="utf-8"))
    data = (tmp_path / "in.parquet").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert meta["files"] == [{"name": "in.parquet", "size": len(data), "sha256": digest}]
    assert meta["documents"] == 50 and meta["skipped"] == {"null": 1} and meta["complete"]
