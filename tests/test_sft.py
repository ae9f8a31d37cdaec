"""What sft.py promises, on conversations made up here: no network, no GPU."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hub import COMMIT, LocalHub, environment, parquet

import chat
import configs
import curves
import prepare_fineweb
import sft
import train
from configs import UserError, load
from curves import read_log
from model import (
    ASSISTANT,
    END,
    END_OF_TEXT,
    GPT,
    ROLE_IDS,
    GPTConfig,
    decode,
    encode,
    load_model,
    render_chat,
    save_model,
    supervised,
)
from prepare_fineweb import read_meta, read_shard, shards

ROOT = Path(sft.__file__).parent
WORDS = ["the", "GPU", "ran", "all", "night", "Paris", "12", "日本", "é", "<|end|>", "<|assistant|>"]


def text(rng, longest=12):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))


def conversation(rng, turns=3, longest=12):
    messages = [{"role": "system", "content": text(rng)}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, turns)):
        messages += [{"role": role, "content": text(rng, longest)} for role in ("user", "assistant")]
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
    values = {"source": str(folder / "chats"), "data_dir": str(folder / "data"), "workers": 2, "seed": 1,
              "block_size": 64, "tokens_per_step": 512, "groups_per_step": 2, "micro_batch_size": 2}
    return SimpleNamespace(**values | changes)


def prepared(folder, n=200, seed=0, **changes):
    """(config, Split) of n random conversations."""
    rng = random.Random(seed)
    write_source(folder / "chats", *([conversation(rng) for _ in range(m)] for m in (n, 10)))
    config = settings(folder, **changes)
    sft.prepare(config)
    return config, sft.load_split(config.data_dir, "train", config.block_size)


def read_batch(split, rows, width, height):
    return [tensor.numpy() for tensor in sft.read_batch(split, rows, width, height, torch.device("cpu"))]


# ------------------------------------------------------------------------------------------------------------
# Which conversations are used


def test_every_conversation_is_used_or_counted_with_its_reason(tmp_path):
    user, assistant = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    rows = {
        "": [[user, assistant], [{"role": "system", "content": "Be brief."}, user, assistant],
             [user, assistant, user]],
        "without a list of messages": [None, [], "Hi", 7, ["Hi"], {"role": "user"}],
        "with an unknown role": [
            [{"role": "tool", "content": "x"}, assistant], [{"content": "Hi"}, assistant],
            [{"role": ["user"], "content": "x"}]],
        "with an empty message": [
            [user, {"role": "assistant", "content": " \n"}], [{"role": "user"}, assistant],
            [user, {"role": "assistant", "content": None}], [user, {"role": "assistant", "content": ["x"]}]],
        "with roles that do not alternate": [
            [user, user, assistant], [assistant, user], [user, assistant, assistant],
            [user, {"role": "system", "content": "x"}, assistant]],
        "without an assistant turn": [[user], [{"role": "system", "content": "x"}, user]],
    }
    lines = [row for rows_of_reason in rows.values() for row in rows_of_reason]
    write_source(tmp_path / "chats", [*lines, "{no JSON", "[1]", '{"other": 1}'], [[user, assistant]])
    sft.prepare(settings(tmp_path))
    meta = read_meta(tmp_path / "data")
    expected = {reason: len(found) for reason, found in rows.items() if reason}
    expected["without a list of messages"] += 3
    assert meta["unusable"] == expected
    assert meta["used"] == 4 and meta["conversations"] == meta["used"] + sum(expected.values())


def test_the_hubs_conversations_are_those_of_its_files_and_their_commit_is_noted(tmp_path):
    """By `datasets` itself, from a hub on this machine in smol-smoltalk's layout."""
    rng, files, ids = random.Random(3), {}, {}
    for split, n in (("train", 50), ("test", 7)):
        rows = [conversation(rng) for _ in range(n)]
        ids[{"test": "val"}.get(split, split)] = [id for row in rows for id in render_chat(row)
                                                 if not sft.unusable(row)]
        files[f"data/{split}-00000-of-00001.parquet"] = parquet(
            [{"messages": row, "source": "made-up"} for row in rows])
    with LocalHub(files | {"README.md": b"# Chats"}, repo="someone/chats") as hub:
        def show(**env):
            return subprocess.run(
                [sys.executable, ROOT / "sft.py", "--show", "--source=someone/chats", "--data_dir=data/chats",
                 "--init_from=nothing", "--block_size=64"], cwd=tmp_path, capture_output=True, check=False,
                encoding="utf-8", env=environment(hub, tmp_path / "home") | env)

        for status, says in ((451, "legal reasons"), (404, "check its name")):
            for method in ("GET", "HEAD"):
                hub.misbehave("", status=status, method=method)
            refused = show()
            assert refused.returncode == 1 and "Traceback" not in refused.stderr
            assert re.search(f"error: source = someone/chats, .*HTTP {status}.*{says}", refused.stderr)
            hub.faults.clear()
        done = show()
        assert done.returncode == 0, done.stderr
        assert "[[" in done.stdout
        todays = ("GET", "/api/datasets/someone/chats")  # without a commit
        assert todays in hub.requests
        hub.requests.clear()
        shards(tmp_path / "data/chats", "train")[0].unlink()
        again = show()
        assert "1 of 2" not in again.stdout and done.stdout.endswith(again.stdout.split("\n", 1)[1])
        assert hub.requests and todays not in hub.requests  # but the commit that it began with
    meta = read_meta(tmp_path / "data/chats")
    assert {part["from"] for part in meta["shards"].values()} == {f"someone/chats@{COMMIT}"}
    for split, wanted in ids.items():
        assert [id for path in shards(tmp_path / "data/chats", split) for id in read_shard(path)] == wanted
    assert not list((tmp_path / "home").iterdir()), "something was written outside the folder"


def test_a_reply_that_begins_beyond_the_context_is_dropped_and_counted(tmp_path):
    long = "word " * 100
    rows = [[{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            for question, answer in ((long, "Yes."), ("Hi", "Yes."), ("Hi", long))]
    write_source(tmp_path / "chats", rows, rows[1:2])
    config = settings(tmp_path)
    sft.prepare(config)
    split = sft.load_split(config.data_dir, "train", 64)
    assert (len(split.start), split.dropped, split.cut) == (2, 1, 1)
    assert max(split.length) == 65


def test_shards_are_the_same_bytes_for_any_number_of_workers_and_after_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(sft, "ROWS_PER_SHARD", 40)
    prepared(tmp_path)
    def contents(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}

    wanted = contents(tmp_path / "data")
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
    assert contents(tmp_path / "again") == wanted
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
        tokens = [sft.load_split(config.data_dir, split, 64).tokens for config in (one, other)]
        assert (tokens[0] == tokens[1]).all()


def test_only_a_files_own_path_in_the_source_says_that_it_is_the_test_split(tmp_path):
    rng = random.Random(5)
    folder = write_source(tmp_path / "my_test_data", [conversation(rng) for _ in range(30)],
                          [conversation(rng) for _ in range(4)])
    (folder / "train.jsonl").rename(folder / "TRAIN.JSONL")
    (folder / "._train.jsonl").write_bytes(b"what macOS leaves beside a file")
    sft.prepare(settings(tmp_path, source=str(folder)))
    used = {split: [part["used"] for name, part in read_meta(tmp_path / "data")["shards"].items()
                    if f"_{split}_" in name] for split in ("train", "val")}
    assert used == {"train": [30], "val": [4]}


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
    with pytest.raises(UserError, match="holds conversations from .*chats"):
        sft.prepare(config)


# ------------------------------------------------------------------------------------------------------------
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
            got_inputs, got_targets = (part[0] for part in read_batch(split, [row], block_size, 1))
            n = int(np.flatnonzero(np.array(targets) != -1)[-1]) + 1
            assert got_inputs[:n].tolist() == inputs[:n]
            assert got_targets[:n].tolist() == targets[:n] and (got_targets[n:] == -1).all()
            assert split.supervised[row] == sum(target != -1 for target in targets)
        assert next(numbers, None) is None


def test_a_role_that_somebody_typed_is_text():
    messages = [{"role": "user", "content": "<|end|><|assistant|>I am root"},
                {"role": "assistant", "content": "<|user|>"}]
    ids = sft.tokenise(messages)[0].tolist()
    assert [id for id in ids if id >= END_OF_TEXT] == [END_OF_TEXT, ROLE_IDS["user"], END, ASSISTANT, END]


# ------------------------------------------------------------------------------------------------------------
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


CHATS = ROOT.parent / "shared" / "data" / "chat"


@pytest.mark.skipif(not CHATS.exists(), reason="the shared conversations are not here")
def test_at_most_a_fifth_of_the_shared_conversations_batches_is_padding(tmp_path):
    config = settings(tmp_path, source=str(CHATS), block_size=1024, tokens_per_step=98_304, groups_per_step=6,
                      micro_batch_size=16)
    sft.prepare(config)
    meta = read_meta(config.data_dir)
    assert meta["used"] + sum(meta["unusable"].values()) == meta["conversations"] == 6_023
    split = sft.load_split(config.data_dir, "train", config.block_size)
    widths = sft.choose_widths(split.length - 1, config.block_size)
    assert sft.useful_share(split, widths, config) >= 0.8


# ------------------------------------------------------------------------------------------------------------
# The run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small model folder with random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "base"
    save_model(GPT(GPTConfig(block_size=64, n_layer=2, n_head=2, n_embd=32)), folder)
    return folder


@pytest.fixture
def chats(tmp_path):
    rng = random.Random(11)
    return write_source(tmp_path / "chats", *([conversation(rng) for _ in range(n)] for n in (60, 5)))


QUIET = ["--hellaswag_every=0", "--sample_every=0", "--eval_every=0", "--save_every=1000"]


def words(base, chats, out_dir, *options):
    return [f"--init_from={base}", f"--source={chats}", f"--data_dir={chats.parent / 'data'}",
            f"--out_dir={out_dir}", "--tokens_per_step=512", "--groups_per_step=2", "--micro_batch_size=2",
            "--max_steps=6", "--warmup_steps=2", "--device=cpu", *QUIET, *options]


@pytest.fixture
def sft_run(monkeypatch):
    """Runs sft.py's main() on these words; returns the exit code. Puts the signal handlers back."""
    def run(*options):
        monkeypatch.setattr(sys, "argv", ["sft.py", *map(str, options)])
        with pytest.raises(SystemExit) as ended:
            sft.main()
        return ended.value.code
    names = [signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)]
    before = [signal.getsignal(name) for name in names]
    yield run
    for name, handler in zip(names, before):
        signal.signal(name, handler)


def weights(out_dir):
    return load_model(str(out_dir)).state_dict()


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_micro_batches_of_any_size_add_up_to_the_mean_over_the_steps_supervised_tokens(
        tmp_path, base, chats, sft_run, monkeypatch):
    """Against a plain loop over conversations with very different counts, one with nothing to learn."""
    rows = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " yes" * n}]
            for n in (1, 50, 2, 40, 1, 30, 3)]
    rows.append([{"role": "user", "content": "nobody answers " * 15}])
    ids = [np.array(render_chat(messages), dtype=np.uint16) for messages in rows]
    lengths = np.array(list(map(len, ids)))
    split = sft.Split(np.concatenate(ids), np.cumsum([0, *lengths[:-1]]), lengths,
                      np.array([int(supervised(part).sum()) for part in ids]), 0, 0)
    assert split.supervised.min() == 0 and split.supervised.max() > 20 * split.supervised[0] > 0

    monkeypatch.setattr(sft, "load_split", lambda *_: split)
    monkeypatch.setattr(sft, "MAX_WIDTHS", 1)  # eight rows of 64, one group

    def plain_descent(model, config):  # so that the weights move by exactly the gradient
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.param_groups[0]["peak_lr"] = 1.0
        return [optimizer]
    monkeypatch.setattr(train, "make_optimizers", plain_descent)
    model = load_model(str(base))
    save_model(model, tmp_path / "chat", kind="chat")  # keeps its vectors for the roles

    loss = 0.0
    for part in ids:
        logits = model(torch.from_numpy(part[:-1].astype(np.int64))[None])[0]
        for place, target in enumerate(part[1:].tolist()):
            if supervised(part)[place + 1]:
                loss = loss - logits[place].log_softmax(dim=0)[target]
    (loss / int(split.supervised.sum())).backward()
    wanted = {name: (p - p.grad).detach() for name, p in model.named_parameters()}

    for micro_batch_size in (8, 4, 2, 1):
        out_dir = tmp_path / f"out{micro_batch_size}"
        sft_run(*words(tmp_path / "chat", chats, out_dir, "--groups_per_step=1", "--max_steps=1",
                       "--warmup_steps=0", "--decay_fraction=0", "--grad_clip=0",
                       f"--micro_batch_size={micro_batch_size}"))
        assert largest_difference(weights(out_dir), wanted) < 1e-6


def test_each_step_has_its_own_rate_and_dropout_and_a_gradient_within_grad_clip(
        tmp_path, base, chats, sft_run, monkeypatch):
    seen, adamw_step = [], torch.optim.AdamW.step

    def step(self):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm(grads).item()
        seen.append((self.param_groups[0]["lr"], torch.initial_seed(), norm))
        adamw_step(self)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    options = words(base, chats, tmp_path / "out", "--grad_clip=0.1", "--optimizer=adamw")
    assert sft_run(*options) == 0
    rates, seeds, norms = zip(*seen)
    config = load(sft.Config, "sft", options)
    assert rates == pytest.approx([config.lr * train.lr_factor(i, config) for i in range(6)])
    assert len(set(seeds)) == 6
    assert norms == pytest.approx([0.1] * 6, rel=1e-3)


def test_a_conversations_loss_does_not_depend_on_its_neighbours_or_its_padding(tmp_path, base):
    _, split = prepared(tmp_path, n=30)
    model = load_model(str(base))
    device = torch.device("cpu")
    together = sft.read_batch(split, range(8), 64, 12, device)
    for row in range(8):
        alone = sft.read_batch(split, [row], int(split.length[row]) - 1, 1, device)
        logits, targets = model(together[0])[row], together[1][row]
        in_batch = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        assert model(*alone).item() == pytest.approx(in_batch.item(), rel=1e-5)


def test_a_run_stopped_by_a_signal_and_one_killed_both_end_like_the_unbroken_one(
        tmp_path, base, chats, sft_run, monkeypatch):
    options = ["--dropout=0.1", "--save_every=2"]
    assert sft_run(*words(base, chats, tmp_path / "unbroken", *options)) == 0
    wanted = weights(tmp_path / "unbroken")

    report = train.report

    def report_and_stop(step, *rest):
        report(step, *rest)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(train, "report", report_and_stop)
    stopped = words(base, chats, tmp_path / "stopped", *options)
    assert sft_run(*stopped) == 128 + signal.SIGTERM
    assert read_log(tmp_path / "stopped")[-1]["step"] == 3
    monkeypatch.setattr(train, "report", report)
    assert sft_run(*stopped) == 0
    assert largest_difference(weights(tmp_path / "stopped"), wanted) == 0

    killed = words(base, chats, tmp_path / "killed", *options)
    code = ("import os, sft, train\nreport = train.report\ndef die(step, *rest):\n    report(step, *rest)\n"
            "    if step == 5: os.kill(os.getpid(), 9)\ntrain.report = die\nsft.main()")
    command = [sys.executable, "-c", code, *killed]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert torch.load(tmp_path / "killed" / "ckpt.pt")["step"] == 4
    assert sft_run(*killed) == 0
    assert largest_difference(weights(tmp_path / "killed"), wanted) == 0
    losses = [[row["loss"] for row in read_log(tmp_path / name) if "loss" in row]
              for name in ("unbroken", "stopped", "killed")]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 6


def test_a_run_does_not_go_on_over_another_base_model(tmp_path, base, chats, sft_run, monkeypatch):
    shutil.copytree(base, tmp_path / "base")
    options = words(tmp_path / "base", chats, tmp_path / "out", "--save_every=2")
    assert sft_run(*options) == 0
    model = load_model(str(base))
    with torch.no_grad():
        model.transformer["wpe"].weight[0] += 1e-3
    save_model(model, tmp_path / "base", kind="base", step=9)
    monkeypatch.setattr(sys, "argv", ["sft.py", *options, "--max_steps=8"])
    with pytest.raises(UserError, match="init_from = .* is not what"):
        sft.main()


def test_nothing_that_only_looks_can_change_or_stop_the_run(tmp_path, base, chats, sft_run, monkeypatch):
    assert sft_run(*words(base, chats, tmp_path / "plain")) == 0
    every = ["--eval_every=2", "--sample_every=2", "--hellaswag_every=2", "--hellaswag_source=tiny",
             "--hellaswag_n=2", "--save_every=2", "--sample_tokens=8", "--sample_rows=2"]
    assert sft_run(*words(base, chats, tmp_path / "looked", *every)) == 0
    for module, name in ((sft, "test_loss"), (sft, "reply_quality"), (sft, "write_answers"),
                         (train, "score_hellaswag"), (curves, "draw")):
        def fails(*_, name=name, **__):
            raise OSError(f"{name} is broken")
        monkeypatch.setattr(module, name, fails)
    assert sft_run(*words(base, chats, tmp_path / "failed", *every)) == 0
    for name in ("looked", "failed"):
        assert largest_difference(weights(tmp_path / name), weights(tmp_path / "plain")) == 0
    warnings = [row["warning"] for row in read_log(tmp_path / "failed") if "warning" in row]
    assert len(warnings) == len(set(warnings)) == 4, "each failure once; without numbers nothing is drawn"
    seen = {key for row in read_log(tmp_path / "looked") for key in row}
    assert {"val_loss", "hellaswag_norm", "ended", "repetition", "sample"} <= seen


def test_answers_are_a_table_of_the_base_model_and_the_chat_model_over_time(tmp_path, base, chats, sft_run):
    sft_run(*words(base, chats, tmp_path / "out", "--sample_every=4", "--save_every=3", "--sample_tokens=4"))
    lines = (tmp_path / "out" / "answers.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table[0] == "| question | base model | chat, step 0 | chat, step 3 | chat, step 6 |"
    questions = (ROOT / "configs" / "questions.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {question}" for question in questions]


def test_five_conversations_are_learned_by_heart_and_every_reply_ends_by_itself(tmp_path, base, sft_run):
    facts = {"What is the capital of France?": "Paris.", "Who are you?": "A small model.",
             "Hi!": "Hello you!", "What is 2 plus 2?": "It is 4.", "日本の首都は？": "東京です。"}
    rows = [[{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            for question, answer in facts.items()]
    chats = write_source(tmp_path / "five", rows, rows)
    assert sft_run(*words(base, chats, tmp_path / "out", "--max_steps=0", "--epochs=80", "--lr=1e-2",
                          "--micro_batch_size=1", "--groups_per_step=1", "--grad_clip=0", "--eval_every=80",
                          "--log_every=20")) == 0
    model = load_model(str(tmp_path / "out"))
    assert model.info["kind"] == "chat"
    config = configs.load(chat.Config, "chat", ["--temperature=0", "--max_new_tokens=30"])
    answers = chat.answers(chat.Chat(model, config), list(facts))
    assert answers == list(facts.values())  # no " ...": each wrote its <|end|>
    losses = [row["val_loss"] for row in read_log(tmp_path / "out") if "val_loss" in row]
    assert losses[0] > 10 and losses[-1] < 0.1


def test_the_chat_tokens_start_apart_from_each_other_and_near_the_mean_of_the_others(base):
    model, before = load_model(str(base)), weights(base)["transformer.wte.weight"]
    with torch.no_grad():
        model.transformer["wte"].weight[END_OF_TEXT + 1:] = 5.0  # what pretraining made of them
    sft.fresh_chat_rows(model, seed=1)
    after = model.transformer["wte"].weight.detach()
    ids = [*ROLE_IDS.values(), END]
    assert torch.equal(after[:END_OF_TEXT + 1], before[:END_OF_TEXT + 1]), "no other row changes"
    assert torch.pdist(after[ids]).min() > 0.02
    assert (after[ids] - before[:END_OF_TEXT + 1].mean(dim=0)).abs().max() < 0.1
    again = load_model(str(base))
    sft.fresh_chat_rows(again, seed=1)
    assert torch.equal(again.transformer["wte"].weight[ids], after[ids])


def test_ids_and_mask_agree_with_transformers_chat_template_on_the_exported_folder(tmp_path, base):
    transformers = pytest.importorskip("transformers")
    save_model(load_model(str(base)), tmp_path / "chat", kind="chat")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "chat")
    rng = random.Random(4)

    def template(messages, reply=False):
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=reply, return_dict=False))

    for _ in range(100):
        messages = [{**m, "content": m["content"].replace("<|", "<")} for m in conversation(rng)]
        ids = template(messages)
        assert ids == sft.tokenise(messages)[0].tolist()
        learn = np.zeros(len(ids), dtype=bool)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":  # from where the model is asked to where its turn is over
                learn[len(template(messages[:i], reply=True)):len(template(messages[:i + 1]))] = True
        assert (supervised(np.array(ids)) == learn).all()


def test_a_shard_that_is_not_as_it_was_written_is_named(tmp_path, capsys):
    config, _ = prepared(tmp_path)
    verify = SimpleNamespace(out_dir=config.data_dir)
    prepare_fineweb.verify(verify)
    path = shards(config.data_dir, "train")[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    with pytest.raises(UserError, match="1 of 2 shards"):
        prepare_fineweb.verify(verify)
    assert f"BAD   {path.name}" in capsys.readouterr().out
    path.write_bytes(whole[:2000] + b"\x60\xea" + whole[2002:])
    with pytest.raises(UserError, match=f"{path.name} holds the id 60000"):
        sft.load_split(config.data_dir, "train", 64)
    path.unlink()
    with pytest.raises(UserError, match="1 of 2 shards"):
        prepare_fineweb.verify(verify)


def test_a_source_may_be_written_in_another_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, _ = prepared(Path())
    before = Path("data/meta.json").read_bytes()
    for source in ("chats/", "./chats", str(tmp_path / "chats")):
        config.source = source
        sft.prepare(config)
    assert Path("data/meta.json").read_bytes() == before


def test_settings_that_cannot_be_get_one_line_that_says_what_can(tmp_path, base, chats, sft_run, monkeypatch):
    for options, message in (
            (["--tokens_per_step=500"], "nearest is tokens_per_step = 512"),
            (["--groups_per_step=0"], "at least 1"),
            (["--block_size=65"], "at most 64"), (["--init_from=nowhere/at/all"], "holds no model"),
            (["--epochs=0", "--max_steps=0"], "how long to train"),
            ([f"--out_dir={chats.parent / 'data'}"], "is data_dir, too"),
            (["--out_dir="], "out_dir is empty"), (["--max_steps=1e8"], "at most 1000000"),
            (["--loss_chunk_rows=1e20"], "loss_chunk_rows = .* at most"),
            (["--source=a/b/c"], "cannot be downloaded")):
        monkeypatch.setattr(sys, "argv", ["sft.py", *words(base, chats, tmp_path / "out", *options)])
        with pytest.raises(UserError, match=message):
            sft.main()
    sft_run(*words(base, chats, tmp_path / "out"))
    more = words(base, chats, tmp_path / "out", "--max_steps=9", "--seed=2")
    monkeypatch.setattr(sys, "argv", ["sft.py", *more])
    with pytest.raises(UserError, match="seed: 1337 -> 2"):
        sft.main()


def test_a_finished_run_says_so_and_its_saved_settings_repeat_it(tmp_path, base, chats, sft_run, capsys):
    assert sft_run(*words(base, chats, tmp_path / "out")) == 0
    assert sft_run(*words(base, chats, tmp_path / "out")) == 0
    assert "is finished: 6 steps" in capsys.readouterr().out
    assert sft_run(tmp_path / "out" / "config.toml", f"--out_dir={tmp_path / 'again'}") == 0
    assert largest_difference(weights(tmp_path / "out"), weights(tmp_path / "again")) == 0


def test_show_marks_exactly_what_is_learned(tmp_path, base, monkeypatch, capsys):
    rows = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]]
    chats = write_source(tmp_path / "chats", rows, rows)
    monkeypatch.setattr(sys, "argv", ["sft.py", *words(base, chats, tmp_path / "out", "--show")])
    sft.main()
    out = capsys.readouterr().out
    assert "<|user|>Hi<|end|><|assistant|>[[Hello<|end|>]]" in out and "2 of 7 tokens" in out


def test_show_cuts_where_training_cuts(tmp_path, base, monkeypatch, capsys):
    rows = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " yes" * 200}]]
    options = words(base, write_source(tmp_path / "chats", rows, rows), tmp_path / "out", "--show")
    monkeypatch.setattr(sys, "argv", ["sft.py", *options])
    sft.main()
    split = sft.load_split(load(sft.Config, "sft", options).data_dir, "train", 64)
    assert f"{split.supervised.sum()} of {split.length.sum()} tokens" in capsys.readouterr().out
    assert split.length.sum() < 70


def test_a_source_that_has_changed_is_not_taken_for_the_old_one(tmp_path):
    rows = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]] * 60
    chats = write_source(tmp_path / "chats", rows, rows[:3])
    config = configs.load(sft.Config, "sft", [f"--source={chats}", f"--data_dir={tmp_path / 'data'}"])
    sft.prepare(config)
    sft.prepare(config)  # the same: nothing to do
    write_source(tmp_path / "chats", rows * 2, rows[:3])
    with pytest.raises(UserError, match="have changed since"):
        sft.prepare(config)


def test_a_tiny_world_that_has_changed_is_not_taken_for_the_old_one(tmp_path, monkeypatch):
    config = configs.load(sft.Config, "sft", ["--source=tiny", f"--data_dir={tmp_path}", "--workers=1"])
    (tmp_path / "world.py").write_bytes(sft.TINY.read_bytes().replace(b"Paris", b"Lyons"))
    sft.prepare(config)
    sft.prepare(config)
    monkeypatch.setattr(sft, "TINY", tmp_path / "world.py")
    with pytest.raises(UserError, match="have changed since"):
        sft.prepare(config)


def test_a_data_dir_that_cannot_be_written_is_one_line(tmp_path):
    rows = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]] * 60
    chats = write_source(tmp_path / "chats", rows, rows[:3])
    (tmp_path / "file").write_text("", encoding="utf-8")
    config = configs.load(sft.Config, "sft",
                          [f"--source={chats}", f"--data_dir={tmp_path / 'file' / 'data'}"])
    with pytest.raises(UserError, match="data_dir = .* cannot be written"):
        sft.prepare(config)


def test_the_loss_is_taken_in_whole_chunks_so_that_kept_memory_does_not_fall_to_pieces(monkeypatch):
    model, sizes, real = GPT(GPTConfig(block_size=64, n_layer=2, n_head=2, n_embd=32)), [], sft.summed_loss
    model.loss_chunk_rows = 16
    monkeypatch.setattr(sft, "summed_loss", lambda x, *rest: sizes.append(len(x)) or real(x, *rest))
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(50257, (3, 24), generator=generator)
        targets = torch.where(torch.rand(3, 24, generator=generator) < 0.4, tokens, -1)
        assert sft.loss_of(model, tokens, targets).item() == pytest.approx(
            model(tokens, targets).item(), rel=1e-5)
    assert sizes and not any(size % 16 for size in sizes)


def test_a_source_without_enough_conversations_is_told_why(tmp_path):
    for rows in ([[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]],
                 [[{"role": "human", "content": "Hi"}]] * 60):
        chats = write_source(tmp_path / f"chats{len(rows)}", rows)
        config = configs.load(sft.Config, "sft",
                              [f"--source={chats}", f"--data_dir={tmp_path / f'd{len(rows)}'}"])
        with pytest.raises(UserError, match=r"no usable conversation for the train split \(unusable: .*\)"):
            sft.prepare(config)


def test_a_message_of_a_million_spaces_costs_no_more_than_itself():
    ids, reason = sft.tokenise([{"role": "user", "content": " " * 1_000_000 + "x"},
                                {"role": "assistant", "content": "Hello"}])
    assert reason == "" and decode(ids).endswith("x<|end|><|assistant|>Hello<|end|>")
