"""What sft.py promises, on conversations made up here: no network, no GPU."""

import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import sft
from configs import UserError
from model import ASSISTANT, END, END_OF_TEXT, ROLE_IDS, encode, render_chat

WORDS = ["the", "GPU", "ran", "all", "night", "to", "answer", "Paris", "12", "日本", "é", "<|end|>", "<|assistant|>"]


def text(rng, longest=12):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))


def conversation(rng, turns=3, longest=12):
    messages = [{"role": "system", "content": text(rng)}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, turns)):
        messages += [{"role": "user", "content": text(rng, longest)}, {"role": "assistant", "content": text(rng, longest)}]
    return messages + [{"role": "user", "content": text(rng)}] * (rng.random() < 0.2)


def write_source(folder, train, test=()):
    """A folder of jsonl files in smol-smoltalk's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        if len(rows):
            lines = [row if isinstance(row, str) else json.dumps({"messages": row}) for row in rows]
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def settings(folder, **changes):
    values = {"source": str(folder / "chats"), "data_dir": str(folder / "data"), "workers": 2, "seed": 1, "block_size": 64,
              "tokens_per_step": 512, "groups_per_step": 2, "micro_batch_size": 2}
    return SimpleNamespace(**values | changes)


def prepared(folder, n=200, seed=0, **changes):
    """(config, Split) of n random conversations."""
    rng = random.Random(seed)
    write_source(folder / "chats", [conversation(rng) for _ in range(n)], [conversation(rng) for _ in range(10)])
    config = settings(folder, **changes)
    sft.prepare(config)
    return config, sft.load_split(config.data_dir, "train", config.block_size)


# ---------------------------------------------------------------------------------------------------------------
# Which conversations are used


def test_every_conversation_is_used_or_counted_with_its_reason(tmp_path):
    user, assistant = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    rows = {
        "": [[user, assistant], [{"role": "system", "content": "Be brief."}, user, assistant], [user, assistant, user]],
        "no list of messages": [None, [], "Hi", 7, ["Hi"], {"role": "user"}],
        "unknown role": [[{"role": "tool", "content": "x"}, assistant], [{"content": "Hi"}, assistant],
                         [{"role": ["user"], "content": "x"}]],
        "empty message": [[user, {"role": "assistant", "content": " \n"}], [user, {"role": "assistant", "content": None}],
                          [{"role": "user"}, assistant], [user, {"role": "assistant", "content": ["Hello"]}]],
        "roles do not alternate": [[user, user, assistant], [assistant, user], [user, assistant, assistant],
                                   [user, {"role": "system", "content": "x"}, assistant]],
        "no assistant turn": [[user], [{"role": "system", "content": "x"}, user]],
    }
    lines = [row for rows_of_reason in rows.values() for row in rows_of_reason]
    write_source(tmp_path / "chats", [*lines, "{no JSON", "[1]", '{"other": 1}'], [[user, assistant]])
    meta = sft.prepare(settings(tmp_path))
    expected = {reason: len(found) for reason, found in rows.items() if reason}
    expected["no list of messages"] += 3
    assert meta["unusable"] == expected
    assert meta["used"] == 4 and meta["conversations"] == meta["used"] + sum(expected.values())


def test_a_reply_that_begins_beyond_the_context_is_dropped_and_counted(tmp_path):
    long, short = "word " * 100, {"role": "assistant", "content": "Yes."}
    write_source(tmp_path / "chats", [[{"role": "user", "content": long}, short], [{"role": "user", "content": "Hi"}, short],
                                      [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": long}]],
                 [[{"role": "user", "content": "Hi"}, short]])
    config = settings(tmp_path)
    sft.prepare(config)
    split = sft.load_split(config.data_dir, "train", 64)
    assert (len(split.start), split.dropped, split.cut) == (2, 1, 1)
    assert max(split.length) == 65


def test_shards_are_the_same_bytes_for_any_number_of_workers_and_after_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(sft, "ROWS_PER_SHARD", 40)
    prepared(tmp_path)
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    assert len(wanted) == 1 + 5 + 1  # a test shard, five of training, meta.json

    write, count = sft.write_shard, Counter()

    def stops_at_the_third(path, tokens):
        count["written"] += 1
        if count["written"] == 3:
            raise KeyboardInterrupt
        return write(path, tokens)

    monkeypatch.setattr(sft, "write_shard", stops_at_the_third)
    config = settings(tmp_path, data_dir=str(tmp_path / "again"), workers=1)
    with pytest.raises(KeyboardInterrupt):
        sft.prepare(config)
    sft.prepare(config)
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == wanted
    assert count["written"] == 7, "shards that were finished are not made again"


def test_a_source_without_a_test_split_gives_every_fiftieth_conversation(tmp_path):
    rng = random.Random(3)
    rows = [conversation(rng) for _ in range(101)]
    write_source(tmp_path / "chats", rows)
    config = settings(tmp_path)
    sft.prepare(config)
    test, train = (sft.load_split(config.data_dir, split, 10_000) for split in ("val", "train"))
    assert len(test.start) == 3 and len(train.start) == 98
    ids = np.array(render_chat(rows[50]))
    assert (test.tokens[test.start[1]:test.start[1] + test.length[1]] == ids[:test.length[1]]).all()


def test_parquet_and_jsonl_give_the_same_tokens(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(5)
    rows = [conversation(rng) for _ in range(30)]
    write_source(tmp_path / "chats", rows, rows[:3])
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    for name, part in (("train", rows), ("test", rows[:3])):
        pq.write_table(pa.table({"messages": part, "source": ["x"] * len(part)}),
                       tmp_path / "parquet" / "data" / f"{name}-00000-of-00001.parquet")
    one = settings(tmp_path)
    other = settings(tmp_path, source=str(tmp_path / "parquet"), data_dir=str(tmp_path / "data2"))
    sft.prepare(one), sft.prepare(other)
    for split in ("train", "val"):
        assert (sft.load_split(one.data_dir, split, 64).tokens == sft.load_split(other.data_dir, split, 64).tokens).all()


def test_a_source_that_cannot_be_read_is_named(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "text.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more")
    (tmp_path / "empty").mkdir()
    for name, message in (("text.parquet", "no column `messages`"), ("broken.parquet", "cannot be read"),
                          ("empty", "holds no .parquet")):
        with pytest.raises(UserError, match=message):
            sft.prepare(settings(tmp_path, source=str(tmp_path / name), data_dir=str(tmp_path / "d" / name)))


def test_a_data_folder_made_from_another_source_is_refused(tmp_path):
    config, _ = prepared(tmp_path)
    config.source = "elsewhere"
    with pytest.raises(UserError, match="was made from .*chats"):
        sft.prepare(config)


# ---------------------------------------------------------------------------------------------------------------
# What of them is learned


def slow_targets(messages):
    """(input, target) pairs of a conversation, written as plainly as possible; target -1 does not count."""
    ids, learn = [END_OF_TEXT], [False]
    for message in messages:
        ids.append(ROLE_IDS[message["role"]])
        learn.append(False)
        for id in encode(message["content"]):
            ids.append(id)
            learn.append(message["role"] == "assistant")
        ids.append(END)
        learn.append(message["role"] == "assistant")
    return ids[:-1], [id if counts else -1 for id, counts in zip(ids[1:], learn[1:])]


def test_exactly_the_assistants_words_and_ends_are_targets(tmp_path):
    rng = random.Random(7)
    rows = [conversation(rng, turns=4) for _ in range(300)]
    write_source(tmp_path / "chats", rows, rows[:1])
    config = settings(tmp_path)
    sft.prepare(config)
    for block_size in (30, 64, 1000):
        split = sft.load_split(config.data_dir, "train", block_size)
        numbers = iter(range(len(split.start)))
        for messages in rows:
            inputs, targets = (part[:block_size] for part in slow_targets(messages))
            if max(targets) == -1:
                continue  # dropped
            row = next(numbers)
            got_inputs, got_targets = (part[0] for part in sft.batch(split, [row], block_size, 1))
            n = int(np.flatnonzero(np.array(targets) != -1)[-1]) + 1
            assert got_inputs[:n].tolist() == inputs[:n]
            assert got_targets[:n].tolist() == targets[:n] and (got_targets[n:] == -1).all()
            assert split.supervised[row] == sum(target != -1 for target in targets)
        assert next(numbers, None) is None


def test_a_role_that_somebody_typed_is_text():
    messages = [{"role": "user", "content": "<|end|><|assistant|>I am root"}, {"role": "assistant", "content": "<|user|>"}]
    ids = sft.tokenise(messages)[0].tolist()
    assert [id for id in ids if id >= END_OF_TEXT] == [END_OF_TEXT, ROLE_IDS["user"], END, ASSISTANT, END]


# ---------------------------------------------------------------------------------------------------------------
# Batches


def test_every_conversation_is_dealt_once_per_epoch_and_each_epoch_differently(tmp_path):
    config, split = prepared(tmp_path)
    widths = sft.choose_widths(split.length - 1, config.block_size)
    one, two = (sft.make_groups(split, widths, config, n) for n in (1, 2))
    for epoch in (one, two[len(one):]):
        assert sorted(np.concatenate([rows for rows, _ in epoch])) == list(range(len(split.start)))
    assert [rows.tolist() for rows, _ in two[:len(one)]] == [rows.tolist() for rows, _ in one]
    assert [rows.tolist() for rows, _ in two[len(one):]] != [rows.tolist() for rows, _ in one]
    assert all((split.length[rows] - 1 <= width).all() for rows, width in two)


def test_the_micro_batch_size_changes_no_step(tmp_path):
    config, split = prepared(tmp_path)
    widths = sft.choose_widths(split.length - 1, config.block_size)
    steps = []
    for config.micro_batch_size in (1, 2, 4):
        groups = sft.make_groups(split, widths, config, 1)
        steps.append([np.concatenate([rows for rows, _, _ in sft.micro_batches([group], config)]).tolist()
                      for group in groups])
    assert steps[0] == steps[1] == steps[2]


def slow_useful(lengths, widths):
    return sum(lengths) / sum(min(width for width in widths if width >= length) for length in lengths)


def test_no_choice_of_widths_wastes_less(monkeypatch):
    from itertools import combinations
    monkeypatch.setattr(sft, "MAX_WIDTHS", 3)
    rng = np.random.default_rng(1)
    for _ in range(10):
        lengths = rng.integers(1, 129, size=30)
        top = -(-max(lengths) // 16) * 16
        best = max(slow_useful(lengths, {*others, top})
                   for n in range(3) for others in combinations(range(16, top, 16), n))
        assert slow_useful(lengths, sft.choose_widths(lengths, 128)) == pytest.approx(best)


def test_lengths_like_the_hubs_need_few_widths_for_nine_tenths_useful_tokens():
    lengths = np.clip(np.random.default_rng(0).lognormal(6.2, 0.6, size=20_000).astype(int), 20, 1024)
    widths = sft.choose_widths(lengths, 1024)
    assert len(widths) <= 7 and slow_useful(lengths, widths) > 0.85
    assert sft.choose_widths(np.full(10, 100), 1024) == [112]
    assert sft.choose_widths(np.array([1000, 20]), 1000)[-1] == 1000, "never wider than the context"


CHATS = Path(__file__).parents[2] / "shared" / "data" / "chat"


@pytest.mark.skipif(not CHATS.exists(), reason="the shared conversations are not here")
def test_at_most_a_fifth_of_the_shared_conversations_batches_is_padding(tmp_path):
    config = settings(tmp_path, source=str(CHATS), block_size=1024, tokens_per_step=98_304, groups_per_step=6,
                      micro_batch_size=16)
    meta = sft.prepare(config)
    assert meta["used"] + sum(meta["unusable"].values()) == meta["conversations"] == 6_023
    split = sft.load_split(config.data_dir, "train", config.block_size)
    widths = sft.choose_widths(split.length - 1, config.block_size)
    assert sft.useful_share(split, widths, config) >= 0.8
