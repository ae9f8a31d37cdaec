"""train.py: what a run may meet, and that its result stays the same.

Most runs happen in this process, on one layer of 32 with rows of 16 tokens. Where a process must die, a
server that has imported everything forks one: `python tests/test_train.py` is that server.
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import pytest
import torch

import configs
import curves
import model as gpt
import prepare_fineweb
import train
from configs import UserError

T = 16
SMALL = f"""
block_size = {T}
n_layer = 1
n_head = 2
n_embd = 32
tokens_per_step = {4 * T}
micro_batch_size = 2
max_steps = 6
lr = 3e-3
muon_lr = 3e-3
warmup_steps = 2
device = "cpu"
loss_chunk_rows = 32
eval_every = 3
eval_tokens = {3 * T}
save_every = 2
sample_every = 4
sample_tokens = 3
prompts = ["The capital of France is"]
hellaswag_every = 4
hellaswag_n = 4
hellaswag_source = "tiny"
"""
TIMES = ("tok_per_s", "mem_gb", "power_w")


def cheap_picture(out_dirs, path):
    Path(path).write_bytes(b"picture")


# ------------------------------------------------------------------------------------------------------------
# Runs in this process


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


def make_data(folder):
    """Two training shards and one of validation, of random words; 76 rows and a half."""
    rng = np.random.default_rng(0)
    for name, n in (("x_val_000000", 8 * T + 1), ("x_train_000001", 45 * T + 9),
                    ("x_train_000002", 31 * T + 1)):
        prepare_fineweb.write_shard(folder / f"{name}.bin", (rng.random(n) ** 4 * 3000).astype(np.uint16))
    (folder / "meta.json").write_text('{"source": "made up"}', encoding="utf-8")
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Pictures that cost nothing, and afterwards the signal handlers of before."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(curves, "draw", cheap_picture)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    gc.unfreeze()


def words(data, out, **settings):
    """The command line of a small run."""
    overlay = Path(data) / "small.toml"
    if not overlay.exists():
        overlay.write_text(SMALL, encoding="utf-8")
    return [str(overlay), f"--data_dir={data}", f"--out_dir={out}",
            *(f"--{name}={value}" for name, value in settings.items())]


def settings(data, out, **changes):
    return configs.load(train.Config, "train", words(data, out, **changes))


def run(data, out, **changes):
    """Runs train.py's main() and returns its exit code, or the text of the error that a user would see."""
    argv, sys.argv = sys.argv, ["train.py", *words(data, out, **changes)]
    try:
        train.main()
    except SystemExit as end:
        return end.code
    except UserError as error:
        return str(error)
    finally:
        sys.argv = argv
    return 0


def state(out, name="ckpt.pt"):
    return torch.load(Path(out) / name, map_location="cpu", weights_only=True)


def history(out):
    """What a run's log must say however often it was restarted: all but times and restarts."""
    return [{k: v for k, v in row.items() if k not in TIMES}
            for row in curves.read_log(out) if "event" not in row]


def warnings_of(out):
    return [row["warning"] for row in curves.read_log(out) if "warning" in row]


def equal(a, b):
    """Whether two checkpoints hold the same bits where it matters."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def same_run(out_a, out_b):
    a, b = state(out_a), state(out_b)
    return (all(equal(a[key], b[key]) for key in ("step", "model", "optimizers", "scaler"))
            and history(out_a) == history(out_b))


@pytest.fixture(scope="session")
def unbroken(data, tmp_path_factory):
    """out_dir of a run of the small settings that nothing disturbed."""
    folder, draw = tmp_path_factory.mktemp("unbroken"), curves.draw
    curves.draw = cheap_picture
    assert run(data, folder) == 0
    curves.draw = draw
    return folder


# ------------------------------------------------------------------------------------------------------------
# Runs in a process that dies


class Server:
    """Forks processes that have imported everything; none of them has computed anything before."""

    def __init__(self):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=environment)

    def ask(self, **question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, argv, log, hook="", **options):
        return self.ask(do="start", argv=argv, log=str(log), hook=hook, options=options)

    def wait(self, pid):
        """Its exit code; minus the signal that killed it."""
        return self.ask(do="wait", pid=pid)

    def run(self, argv, log, hook="", **options):
        return self.wait(self.start(argv, log, hook, **options))


@pytest.fixture(scope="session")
def server():
    server = Server()
    yield server
    server.process.stdin.close()
    server.process.wait()


def serve():
    """Reads questions, forks, answers."""
    modules = sorted(sys.modules)
    importlib.import_module("torch._dynamo")  # the first optimizer would import it, in every child anew
    gpt.tokenizer()
    for line in sys.stdin:
        question = json.loads(line)
        if question["do"] == "modules":
            answer = modules
        elif question["do"] == "wait":
            status = os.waitpid(question["pid"], 0)[1]
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if not answer:
                child(question)
        print(json.dumps(answer), flush=True)


def child(question):
    with open(question["log"], "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["train.py", *question["argv"]]
    curves.draw = cheap_picture
    code = 1
    try:
        if question["hook"]:
            globals()[question["hook"]](**question["options"])
        configs.run(train.main)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_at(moment, count=""):
    """Hook: SIGKILL at the n-th moment of those that matter; `count` is a file for their number."""
    seen = 0

    def tick():
        nonlocal seen
        seen += 1
        if count:
            Path(count).write_text(str(seen), encoding="utf-8")
        if seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def ticking(owner, name, after=False):
        function = getattr(owner, name)

        def wrapped(*args, **kwargs):
            tick()
            result = function(*args, **kwargs)
            if after:
                tick()
            return result
        setattr(owner, name, wrapped)

    for owner, name in ((os, "replace"), (train, "append_log"), (torch.Tensor, "backward"),
                        (train.GPT, "zero_grad")):
        ticking(owner, name, after=True)
    for owner, name in ((os, "fsync"), (train, "validation_loss"), (train, "generate"),
                        (torch.optim.AdamW, "step"), (train, "orthogonalize"), (train, "score_hellaswag"),
                        (train.Checkpoints, "resume")):
        ticking(owner, name)
    save = torch.save

    def save_in_halves(state, file):
        start = file.tell()
        save(state, file)
        whole = file.tell()
        file.seek(start)
        kept = Path(file.name).read_bytes()
        file.truncate((start + whole) // 2)
        file.flush()
        tick()  # half of it is on the disk
        file.seek(start)
        file.write(kept)
    torch.save = save_in_halves


@pytest.mark.parametrize(("optimizer", "dropout", "kills"), [("adamw", 0.0, 2), ("muon", 0.2, 3)])
def test_a_run_killed_at_any_moment_repeats_the_unbroken_one_bit_for_bit(data, tmp_path, server, optimizer,
                                                                         dropout, kills):
    changes = {"optimizer": optimizer, "dropout": dropout, "max_steps": 10}
    whole, killed, count = tmp_path / "whole", tmp_path / "killed", tmp_path / "count"
    assert server.run(words(data, whole, **changes), tmp_path / "log", "die_at",
                      moment=-1, count=str(count)) == 0
    moments, rng = int(count.read_text(encoding="utf-8")), random.Random(dropout)
    for _ in range(kills):
        moment = rng.randrange(1, moments // 2)
        assert server.run(words(data, killed, **changes), tmp_path / "log", "die_at",
                          moment=moment) == -signal.SIGKILL
    assert server.run(words(data, killed, **changes), tmp_path / "log") == 0
    assert same_run(whole, killed)
    assert sum(row.get("event") == "start" for row in curves.read_log(killed)) > 1


def test_a_kill_in_the_last_look_does_not_cost_the_last_evaluation(data, out, unbroken, monkeypatch):
    def killed(*args):
        raise SystemError  # not an Exception that a fence would see
    monkeypatch.setattr(train, "last_words", killed)
    with pytest.raises(SystemError):
        run(data, out)
    lines = (out / "log.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (out / "log.jsonl").write_text("".join(lines[:-2]), encoding="utf-8")
    monkeypatch.undo()
    monkeypatch.setattr(curves, "draw", cheap_picture)
    shutil.rmtree(out / "model")  # the kill may have come before it, too
    assert run(data, out) == 0
    assert same_run(out, unbroken)
    assert gpt.load_model(out / "model").info["step"] == 6


# ------------------------------------------------------------------------------------------------------------
# The step is what it says


def make_model(data, **changes):
    config = settings(data, data / "none", **changes)
    return config, train.start_model(config, torch.device("cpu"))


def test_gradient_accumulation_adds_up_to_the_gradient_of_the_whole_batch(data):
    gradients = []
    for micro in (1, 2, 4):
        config, model = make_model(data)
        rows = train.Rows(data, "train", T)
        for tokens, targets in train.micro_batches(rows, np.arange(4), micro, model.device):
            assert tokens.shape == (micro, T) and torch.equal(tokens[:, 1:], targets[:, :-1])
            (model(tokens, targets) / config.tokens_per_step).backward()
        gradients.append([p.grad for p in model.parameters()])
    for parts in gradients[:2]:
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(parts, gradients[2]))


def test_gradient_accumulation_logs_the_mean_over_the_whole_step(data, tmp_path):
    """... and a changed micro-batch changes nothing but rounding, in validation too."""
    logs = []
    for micro in (1, 2, 4):
        assert run(data, tmp_path / str(micro), micro_batch_size=micro, max_steps=10, save_every=0) == 0
        logs.append(history(tmp_path / str(micro)))
    for key in ("loss", "val_loss"):
        values = np.array([[row[key] for row in log if key in row] for log in logs])
        assert values.shape[1] >= 4
        assert np.allclose(values, values[0], rtol=1e-5)


def test_an_untrained_model_loses_ln_v(unbroken):
    assert abs(history(unbroken)[0]["loss"] - math.log(gpt.VOCAB_SIZE)) < 0.2
    assert abs(next(row["loss"] for row in history(unbroken) if "loss" in row)
               - math.log(gpt.VOCAB_SIZE)) < 0.2


def test_each_target_is_seen_once_per_epoch(tmp_path):
    shards = [np.arange(0, 10 * T + 9), np.arange(1000, 1000 + 7 * T + 1), np.arange(5000, 5003)]
    for i, tokens in enumerate(shards):
        prepare_fineweb.write_shard(tmp_path / f"x_train_{i:06d}.bin", tokens.astype(np.uint16))
    rows = train.Rows(tmp_path, "train", T)
    assert len(rows) == 17
    assert rows.dropped_tokens == 8 + 0 + 2
    epochs = [[], [], []]
    for step in range(17):  # 3 rows a step: 17 steps are three epochs, and steps 5 and 11 span two
        for place, number in zip(range(3 * step, 3 * step + 3), train.rows_of_step(step, 17, 3, seed=1)):
            epochs[place // 17].append(number)
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    targets = rows.read(epochs[0])[:, 1:].ravel()
    assert sorted(targets) == [*range(1, 10 * T + 1), *range(1001, 1001 + 7 * T)]


def test_the_rows_of_a_step_do_not_depend_on_how_many_share_them():
    alone = train.rows_of_step(5, 76, 4, seed=3)
    assert np.array_equal(alone, np.concatenate([
        train.rows_of_step(5, 76, 4, seed=3)[rank * 2:rank * 2 + 2] for rank in (0, 1)]))
    assert not np.array_equal(alone, train.rows_of_step(5, 76, 4, seed=4))


def test_a_shard_of_another_tokenizer_is_refused_by_name(tmp_path):
    prepare_fineweb.write_shard(tmp_path / "x_train_000001.bin",
                                np.full(2 * T, gpt.VOCAB_SIZE, dtype=np.uint16))
    with pytest.raises(UserError, match="x_train_000001"):
        train.Rows(tmp_path, "train", T).read([0])


@pytest.mark.parametrize(("changes", "text"), [
    ({"tokens_per_step": 100}, "nearest is tokens_per_step = 96"),
    ({"tokens_per_step": 8}, "nearest is tokens_per_step = 32"),
    ({"micro_batch_size": 0}, "micro_batch_size = 0"), ({"max_steps": 0}, "max_steps = 0"),
    ({"seed": -1}, "seed = -1"), ({"dropout": 1.5}, "dropout = 1.5"),
    ({"decay_fraction": 2}, "decay_fraction"), ({"n_layer": 0}, "n_layer"), ({"n_head": 3}, "n_head"),
    ({"device": "tpu"}, "device"), ({"dtype": "fp16"}, "fp16"), ({"attention": "cudnn"}, "attention"),
    ({"init_from": "nothing/here"}, "nothing/here"), ({"data_dir": "nothing/here"}, "prepare_fineweb.py"),
    ({"source": "nothing/here", "data_dir": "nothing/there"}, "nothing/here")])
def test_a_setting_that_cannot_be_gets_one_clear_line(data, out, changes, text):
    error = run(data, out, **changes)
    assert isinstance(error, str)
    assert text in error
    assert "\n" not in error


def test_the_real_size_is_not_trained_on_a_cpu_by_accident(data, out, monkeypatch):
    monkeypatch.setattr(train, "BIGGEST_ON_CPU", 1e5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = run(data, out, device="auto")
    assert "configs/tiny" in error
    assert "--device=cpu" in error
    assert run(data, out, device="cpu", max_steps=1) == 0


# ------------------------------------------------------------------------------------------------------------
# Schedule and optimizers


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("decay_fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_learning_rate_rises_never_from_zero_and_ends_at_its_floor(data, schedule, decay_fraction, floor):
    for max_steps in (1, 10):
        for warmup in (0, 1, 10, 15):
            config = settings(data, "x", schedule=schedule, decay_fraction=decay_fraction,
                              min_lr_fraction=floor, max_steps=max_steps, warmup_steps=warmup)
            rates = [train.lr_factor(step, config) for step in range(max_steps + 20)]
            assert all(0 <= rate <= 1 and math.isfinite(rate) for rate in rates)
            assert rates[0] > 0
            assert rates[:warmup] == sorted(rates[:warmup])
            assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
            constant = schedule == "linear" and decay_fraction == 0
            assert rates[-1] == pytest.approx(1 if constant else floor)
    assert warmup == 15 and rates[9] == pytest.approx(10 / 15)


def test_linear_decay_covers_the_last_part_of_the_run(data):
    config = settings(data, "x", max_steps=100, warmup_steps=10, decay_fraction=0.4)
    assert [train.lr_factor(step, config) for step in (0, 9, 10, 60, 80, 99)] == pytest.approx(
        [0.1, 1, 1, 1, 0.5, 0.025])
    cosine = settings(data, "x", max_steps=110, warmup_steps=10, schedule="cosine", min_lr_fraction=0.1)
    assert [train.lr_factor(step, cosine) for step in (10, 60, 110)] == pytest.approx([1, 0.55, 0.1])


def seen_at_each_step(monkeypatch, what):
    """A list that a run fills: what(optimizer) as each of its steps begins."""
    seen, adamw_step = [], torch.optim.AdamW.step

    def step(self):
        seen.append(what(self))
        adamw_step(self)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return seen


def test_each_step_is_taken_at_the_rate_that_the_schedule_gives_it(data, out, monkeypatch):
    config, rates = settings(data, out), seen_at_each_step(
        monkeypatch, lambda optimizer: optimizer.param_groups[0]["lr"])
    assert run(data, out) == 0
    assert rates == pytest.approx([config.lr * train.lr_factor(i, config) for i in range(config.max_steps)])
    assert rates == [row["lr"] for row in history(out) if "lr" in row]


def test_a_gradient_longer_than_grad_clip_is_shortened_to_it(data, out, monkeypatch):
    norms = seen_at_each_step(monkeypatch, lambda optimizer: torch.nn.utils.get_total_norm(
        p.grad for group in optimizer.param_groups for p in group["params"]).item())
    assert run(data, out, grad_clip=0.1) == 0
    assert min(row["grad_norm"] for row in history(out) if "grad_norm" in row) > 0.2
    assert norms == pytest.approx([0.1] * 6, rel=1e-3)


def test_each_step_draws_a_dropout_of_its_own(data, out, monkeypatch):
    seeds = seen_at_each_step(monkeypatch, lambda optimizer: torch.initial_seed())
    assert run(data, out, dropout=0.1) == 0
    assert len(set(seeds)) == 6


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_decay_touches_only_what_it_should(data, optimizer):
    config, model = make_model(data, optimizer=optimizer, weight_decay=0.1)
    optimizers = train.make_optimizers(model, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data += 1
        p.grad = torch.zeros_like(p)
    for each in optimizers:
        each.step()
    decayed = {name for name, p in model.named_parameters()
               if not torch.allclose(p, before[name] + 1, atol=1e-7)}
    hidden = {f"transformer.h.0.{name}.weight"
              for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert decayed == hidden | ({"transformer.wte.weight", "transformer.wpe.weight"}
                                if optimizer == "adamw" else set())
    owned = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    assert len(owned) == len({id(p) for p in owned}) == len(before)


@pytest.mark.parametrize("shape", [(32, 32), (128, 32), (32, 128), (48, 17)])
def test_muons_step_is_torchs_on_a_single_matrix(shape, monkeypatch):
    monkeypatch.setattr(train, "EMULATES_BF16", False)  # torch's is in bf16 everywhere
    torch.manual_seed(0)
    weight = torch.randn(shape)
    ours, theirs = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    muon = train.Muon([ours], lr=0.02, weight_decay=0.1, n_embd=1)
    torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95,
                              adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        before = theirs.detach().clone()
        muon.step()
        torchs.step()
        assert torch.allclose(ours, theirs, atol=0.01 * (theirs - before).abs().max().item())


def test_query_key_and_value_are_three_matrices_to_muon():
    torch.manual_seed(0)
    fused = torch.nn.Parameter(torch.randn(96, 32))
    parts = [torch.nn.Parameter(part.clone()) for part in fused.detach().split(32)]
    together, apart = (train.Muon(params, lr=0.02, weight_decay=0.1, n_embd=32)
                       for params in ([fused], parts))
    fused.grad = torch.randn(96, 32) * torch.tensor([1.0, 10, 100]).repeat_interleave(32)[:, None]
    for part, grad in zip(parts, fused.grad.split(32)):
        part.grad = grad.clone()
    together.step()
    apart.step()
    assert torch.allclose(fused, torch.cat(parts), atol=1e-4)


@pytest.mark.parametrize("emulated", [False, True])
def test_an_orthogonal_update_steps_equally_far_in_all_directions(emulated, monkeypatch):
    monkeypatch.setattr(train, "EMULATES_BF16", emulated)
    torch.manual_seed(0)
    matrices = torch.randn(3, 24, 64) * torch.logspace(-2, 1, 64)
    values = torch.linalg.svdvals(train.orthogonalize(matrices))
    assert values.min() > 0.5 and values.max() < 1.4


# ------------------------------------------------------------------------------------------------------------
# Nothing optional stops a run, or changes it


def raises(error):
    def broken(*args, **kwargs):
        raise type(error)(*error.args)
    return broken


def returns(value):
    return lambda *args, **kwargs: value


def disturbs(model, *args, **kwargs):
    model.eval()
    torch.manual_seed(99)
    torch.rand(5)
    raise RuntimeError("in the middle of it")


FAULTS = [
    ("HellaSwag's data are gone", train.hellaswag, "load_items", raises(UserError("HTTP 404"))),
    ("HellaSwag's host is silent", train.hellaswag, "load_items", raises(TimeoutError("timed out"))),
    ("HellaSwag returns nothing", train.hellaswag, "evaluate", returns(None)),
    ("HellaSwag returns nonsense", train.hellaswag, "evaluate",
     returns({"acc": "x", "acc_norm": "y", "n": object()})),
    ("HellaSwag's score is text", train.hellaswag, "evaluate",
     returns({"acc": "x", "acc_norm": "y", "n": 3})),
    ("HellaSwag leaves", train.hellaswag, "evaluate", raises(SystemExit(3))),
    ("HellaSwag disturbs", train.hellaswag, "evaluate", disturbs),
    ("samples disturb", train, "generate", disturbs),
    ("samples are nonsense", train, "generate", returns(["x", None])),
    ("validation runs out of memory", train, "validation_loss",
     raises(torch.OutOfMemoryError("CUDA out of memory"))),
    ("validation is no number", train, "validation_loss", returns(math.nan)),
    ("the picture fails", curves, "draw", raises(ImportError("no matplotlib"))),
    ("on-track is nonsense", curves, "comparable", returns(True)),
    ("on-track fails", curves, "comparable", raises(KeyError("x"))),
    ("the log cannot be written", train, "append_log", raises(OSError(28, "No space left on device"))),
    ("the log cannot be read", curves, "read_log", raises(UserError("cannot read"))),
    ("the summary fails", curves, "summary", raises(ZeroDivisionError())),
    ("the memory cannot be read", train, "memory_gb", raises(OSError("no such thing"))),
    ("the watch fails", train.Watch, "remarks", raises(ZeroDivisionError())),
    ("git is missing", subprocess, "run", raises(FileNotFoundError("git"))),
    ("the machine cannot be kept awake", train, "keep_awake", raises(AttributeError("windll"))),
]


@pytest.mark.parametrize(("owner", "name", "fault"), [fault[1:] for fault in FAULTS],
                         ids=[fault[0] for fault in FAULTS])
def test_nothing_optional_stops_a_run_or_changes_it(data, out, monkeypatch, capsys, owner, name, fault):
    changes = {"dropout": 0.2, "max_steps": 4, "eval_every": 2, "sample_every": 2,
               "hellaswag_every": 2, "save_every": 0}
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, fault)
        assert run(data, out, **changes) == 0
    said, reference = capsys.readouterr().out, data / "of_the_faults"
    if not (reference / "ckpt.pt").exists():
        assert run(data, reference, **changes) == 0
    assert equal(state(out)["model"], state(reference)["model"])
    told = [line.split(" failed, ")[0] for line in said.splitlines()
            if " failed, training goes on without" in line]
    assert len(told) == len(set(told))


def test_a_model_that_cannot_be_written_is_warned_of_and_at_the_end_an_error_that_can_be_mended(
        data, out, unbroken, monkeypatch, capsys):
    with monkeypatch.context() as broken:
        broken.setattr(train, "save_model", raises(OSError(28, "No space left on device")))
        assert "the same command writes it" in run(data, out)
    assert "is not rewritten" in capsys.readouterr().out and not (out / "model").exists()
    assert run(data, out) == 0
    assert equal(state(out)["model"], state(unbroken)["model"])
    wanted = gpt.load_model(unbroken / "model").state_dict()
    assert equal(gpt.load_model(out / "model").state_dict(), wanted)
    assert "is finished" not in capsys.readouterr().out
    shutil.rmtree(out / "model")  # deleted after the run: made again
    assert run(data, out) == 0 and (out / "model/model.safetensors").exists()


def test_a_model_without_its_checkpoint_is_not_written_over(data, out, unbroken):
    shutil.copytree(unbroken, out, dirs_exist_ok=True)
    for path in out.glob("ckpt*"):
        path.unlink()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    assert "holds a model and no checkpoint" in run(data, out)
    assert {path: path.read_bytes() for path in before} == before


def test_a_part_that_fails_slowly_is_left_alone_for_twenty_times_as_long(data, out, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    model = types.SimpleNamespace(train=lambda: None)
    fence = train.Fence(out, model, types.SimpleNamespace(raises=False))
    out.mkdir(exist_ok=True)
    for seconds, paused in ((1, False), (60, True)):
        with fence("HellaSwag"):
            now[0] += seconds
            raise TimeoutError
        assert fence.is_paused("HellaSwag") == paused
    now[0] += 20 * 60 - 1
    assert fence.is_paused("HellaSwag")
    now[0] += 2
    assert not fence.is_paused("HellaSwag") and not fence.is_paused("samples")


def test_a_fault_is_told_once_on_the_screen_and_in_the_log(data, out, monkeypatch, capsys):
    monkeypatch.setattr(train.hellaswag, "load_items", raises(UserError("HTTP 451")))
    assert run(data, out, hellaswag_every=1) == 0
    assert capsys.readouterr().out.count("HTTP 451") == 1
    assert [text for text in warnings_of(out) if "HTTP 451" in text] == [
        "HellaSwag failed, training goes on without: UserError: HTTP 451"]


@pytest.mark.parametrize("off", ["eval_every", "sample_every", "hellaswag_every"])
def test_looking_at_a_model_does_not_change_it(data, out, unbroken, off):
    assert run(data, out, **{off: 0}) == 0
    assert equal(state(out)["model"], state(unbroken)["model"])


def test_the_power_meter_claims_nothing_without_readings(monkeypatch):
    assert train.PowerMeter(torch.device("cpu")).watts is None
    meter = train.PowerMeter(torch.device("cpu"))
    answers = iter([types.SimpleNamespace(stdout="212.50\n"), types.SimpleNamespace(stdout="[N/A]\n")])
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: next(answers))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="0"))
    monkeypatch.setattr(train.time, "sleep", lambda seconds: seen.append(meter.watts))
    seen = []
    meter.read(torch.device("cuda"))
    assert seen == [212.5]
    assert meter.watts is None


# ------------------------------------------------------------------------------------------------------------
# Sick runs


def lose(monkeypatch, at, value=math.nan):
    """The loss is `value` in the steps of `at`."""
    forward, calls = gpt.GPT.forward, 0

    def sick(model, tokens, targets=None):
        nonlocal calls
        loss = forward(model, tokens, targets)
        if not model.training:
            return loss
        calls += 1
        return loss * value if (calls + 1) // 2 in at else loss  # two micro-batches a step
    monkeypatch.setattr(gpt.GPT, "forward", sick)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_without_a_finite_loss_changes_nothing(data, tmp_path, monkeypatch, value):
    assert run(data, tmp_path / "two", max_steps=2, decay_fraction=0) == 0
    lose(monkeypatch, at={3}, value=value)
    assert run(data, tmp_path / "three", max_steps=3, decay_fraction=0) == 0
    two, three = state(tmp_path / "two"), state(tmp_path / "three")
    assert equal(two["model"], three["model"])
    assert equal([each["state"] for each in two["optimizers"]],
                 [each["state"] for each in three["optimizers"]])
    assert next(row for row in history(tmp_path / "three")
                if row["step"] == 3 and "loss" in row)["loss"] is None
    assert "step skipped" in warnings_of(tmp_path / "three")[0]


def test_a_run_that_stays_sick_stops_with_a_good_checkpoint(data, out, monkeypatch, unbroken):
    lose(monkeypatch, at=range(5, 100))
    error = run(data, out, max_steps=20, save_every=3)
    assert "--lr" in error
    assert "step 4" in error
    assert state(out)["step"] == 4
    assert all(p.isfinite().all() for p in state(out)["model"].values())


def test_weights_that_are_not_finite_are_never_saved(data, out, monkeypatch):
    assert run(data, out, max_steps=2) == 0
    monkeypatch.setattr(torch.optim.AdamW, "step",
                        lambda self: self.param_groups[0]["params"][0].data.fill_(math.nan))
    assert "not finite" in run(data, out, max_steps=4)
    assert state(out)["step"] == 2


def test_a_jump_of_the_loss_is_told(data, out):
    watch = train.Watch(out, torch.device("cpu"))
    assert not [text for loss in [*np.linspace(11, 4, 60), *[4.0] * 30]
                for text in watch.remarks(float(loss), 1000)]
    assert "jumped" in watch.remarks(5.1, 1000)[0]
    assert watch.remarks(math.nan, 1000) == []
    assert watch.remarks(3.0, 1000) == []


def test_half_the_speed_is_told_once_and_a_single_slow_step_is_not(out, monkeypatch):
    watch = train.Watch(out, torch.device("cpu"))
    told = [text for rate in [1000] * 30 + [100] + [1000] * 10 for text in watch.remarks(3.0, rate)]
    assert not told
    told = [text for _ in range(40) for text in watch.remarks(3.0, 400)]
    assert len(told) == 1 and "less than half" in told[0]


def test_memory_that_is_nearly_full_is_told(out, monkeypatch):
    monkeypatch.setattr(train, "memory_share", lambda device: 0.95)
    watch = train.Watch(out, torch.device("cpu"))
    told = [text for _ in range(5) for text in watch.remarks(3.0, 1000)]
    assert len(told) == 1 and "95%" in told[0]


def test_out_of_memory_in_a_step_says_what_to_type(data, out, monkeypatch):
    assert run(data, out, max_steps=2) == 0
    monkeypatch.setattr(gpt.GPT, "forward",
                        raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")))
    assert "--micro_batch_size=1" in run(data, out)
    assert "--loss_chunk_rows=512" in run(data, out, micro_batch_size=1, loss_chunk_rows=0)
    assert "block_size" in run(data, out, micro_batch_size=1)
    assert state(out)["step"] == 2
    monkeypatch.setattr(gpt.GPT, "forward", raises(RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="shapes"):  # a bug stays a traceback
        run(data, out)


# ------------------------------------------------------------------------------------------------------------
# Saving


def test_a_full_disk_at_a_save_warns_and_is_tried_again(data, out, unbroken, monkeypatch):
    save, calls = torch.save, 0

    def full(state, file):
        nonlocal calls
        calls += 1
        if calls == 2:
            file.write(b"half")
            raise RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 1 vs 0")
        save(state, file)
    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(train, "RETRY_SAVE_STEPS", 1)
    assert run(data, out) == 0
    assert calls == 4  # steps 2, (4), 5, 6
    assert "make space" in warnings_of(out)[0]
    assert equal(state(out)["model"], state(unbroken)["model"])
    assert not list(out.glob("*.unfinished"))


def small_disk(size):
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_disk_that_stays_full_leaves_the_old_checkpoint_and_says_so_at_the_end(data, out, tmp_path, server):
    log = tmp_path / "said"
    assert server.run(words(data, out, max_steps=2, decay_fraction=0), log) == 0
    old = (out / "ckpt.pt").read_bytes()
    assert server.run(words(data, out, max_steps=4, decay_fraction=0), log, "small_disk",
                      size=10_000_000) == 1
    assert "step 4 is not saved" in log.read_text(encoding="utf-8")
    assert "Traceback" not in log.read_text(encoding="utf-8")
    assert (out / "ckpt.pt").read_bytes() == old
    assert not list(out.glob("*.unfinished"))
    assert run(data, out, max_steps=4, decay_fraction=0) == 0


def test_an_out_dir_that_cannot_be_written_is_told_before_training(data, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    error = run(data, tmp_path / "file" / "out")
    assert "cannot be written" in error
    assert "--out_dir" in error


def test_data_without_a_validation_split_trains_without_evaluations(data, out, tmp_path):
    shutil.copytree(data, tmp_path / "data", ignore=lambda folder, names: [n for n in names if "_val_" in n])
    assert "there are no val shards" in run(tmp_path / "data", out)
    assert run(tmp_path / "data", out, eval_every=0, max_steps=2) == 0


@pytest.mark.parametrize("setting", ["save_every=-1", "eval_tokens=-5", "hellaswag_n=-1",
                                     "loss_chunk_rows=-1", "sample_temperature=-0.1", "hours=-1",
                                     "min_lr_fraction=1.5", "log_every=0"])
def test_a_number_that_means_nothing_is_refused_by_name(data, out, setting):
    name, value = setting.split("=")
    assert run(data, out, **{name: value}).startswith(f"{name} = {value}")


def test_two_runs_do_not_share_a_folder(data, out):
    lock = prepare_fineweb.lock_folder(out)
    (out / "ckpt.pt.unfinished").write_text("the other run is writing this", encoding="utf-8")
    assert "in use" in run(data, out)
    assert (out / "ckpt.pt.unfinished").exists()
    lock.close()
    assert run(data, out, max_steps=1) == 0
    assert not (out / "ckpt.pt.unfinished").exists()


def test_everything_in_a_checkpoint_loads_without_trusting_it(unbroken):
    files = sorted(unbroken.rglob("*.pt"))
    assert [path.name for path in files] == ["ckpt.pt", "ckpt_prev.pt"]
    assert [state(unbroken, path.name)["step"] for path in files] == [6, 4]
    assert {path.name for path in unbroken.iterdir()} == {
        ".lock", "ckpt.pt", "ckpt_prev.pt", "config.toml", "curves.png", "log.jsonl", "model", "samples.md"}
    assert not any("_orig_mod" in name or "module." in name for name in state(unbroken)["model"])


@pytest.mark.parametrize("damage", [
    lambda whole: whole[:len(whole) // 2], lambda whole: b"", lambda whole: b"x" * 1000,
    lambda whole: whole[:9999] + bytes([whole[9999] ^ 1]) + whole[10000:]],
    ids=["half", "nothing", "something else", "a bit"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(data, tmp_path, unbroken, capsys, damage):
    out = copy_run(unbroken, tmp_path / "copy")
    (out / "ckpt.pt").write_bytes(damage((out / "ckpt.pt").read_bytes()))
    assert run(data, out) == 0
    said = capsys.readouterr().out
    assert "is damaged" in said
    assert "step 4" in said
    assert same_run(out, unbroken)
    assert state(out, "ckpt_prev.pt")["step"] == 4  # the damaged one did not take its place


@pytest.mark.parametrize("error", [
    MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),  # Windows
    PermissionError(13, "used by another program")])
def test_a_checkpoint_that_cannot_be_read_now_is_not_taken_for_damaged(data, tmp_path, unbroken, monkeypatch,
                                                                      error):
    out = copy_run(unbroken, tmp_path / "copy")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(torch, "load", raises(error))
    assert "cannot be read now" in run(data, out)
    assert {name: (out / name).read_bytes() for name in before} == before


def copy_run(source, target):
    target.mkdir()
    for name in ("ckpt.pt", "ckpt_prev.pt", "log.jsonl"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def test_a_checkpoint_of_another_network_is_one_line(data, tmp_path, unbroken):
    out = copy_run(unbroken, tmp_path / "copy")
    whole = state(out)
    whole["model"]["transformer.ln_final.weight"] = whole["model"].pop("transformer.ln_f.weight")
    torch.save(whole, out / "ckpt.pt")
    assert "of another network" in run(data, out, max_steps=9)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(data, tmp_path, unbroken):
    out = copy_run(unbroken, tmp_path / "copy")
    torch.save({"step": 3}, out / "ckpt.pt")
    (out / "ckpt_prev.pt").write_bytes(b"")
    assert "move them away" in run(data, out)
    assert (out / "log.jsonl").read_bytes() == (unbroken / "log.jsonl").read_bytes()


def test_a_checkpoint_from_a_gpu_resumes_on_a_cpu(data, tmp_path, unbroken, monkeypatch):
    out = copy_run(unbroken, tmp_path / "copy")
    whole = state(out)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(whole, out / "ckpt.pt")
    monkeypatch.undo()
    monkeypatch.setattr(curves, "draw", cheap_picture)
    assert run(data, out, max_steps=9) == 0
    assert state(out)["step"] == 9


def test_an_old_checkpoint_without_the_newer_entries_still_resumes(data, tmp_path, unbroken):
    out = copy_run(unbroken, tmp_path / "copy")
    torch.save({key: value for key, value in state(out).items() if key not in ("scaler", "trained_s")},
               out / "ckpt.pt")
    assert run(data, out, max_steps=9) == 0


# ------------------------------------------------------------------------------------------------------------
# Going on


def test_a_finished_run_says_so_and_touches_nothing(data, tmp_path, unbroken, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in unbroken.iterdir()}
    assert run(data, unbroken, log_every=3) == 0
    said = capsys.readouterr().out
    assert "is finished" in said and "the run is finished: log_every: " in said and "applied" not in said
    assert {path.name: path.stat().st_mtime_ns for path in unbroken.iterdir()} == before


def test_a_finished_constant_phase_can_be_extended(data, tmp_path):
    constant = {"decay_fraction": 0, "eval_every": 2, "sample_every": 2, "hellaswag_every": 2}
    assert run(data, tmp_path / "at_once", max_steps=6, **constant) == 0
    assert run(data, tmp_path / "extended", max_steps=3, **constant) == 0
    assert run(data, tmp_path / "extended", max_steps=6, **constant) == 0
    assert same_run(tmp_path / "at_once", tmp_path / "extended")


def test_changed_settings_are_listed_and_applied_if_they_can_be(data, tmp_path, unbroken, capsys):
    out = copy_run(unbroken, tmp_path / "copy")
    assert run(data, out, max_steps=9, micro_batch_size=4, lr=0.123, weight_decay=0.5, log_every=3) == 0
    said = capsys.readouterr().out
    assert all(text in said
               for text in ("micro_batch_size: 2 -> 4", "lr: 0.003 -> 0.123", "max_steps: 6 -> 9"))
    group = state(out)["optimizers"][0]["param_groups"][0]
    assert (group["peak_lr"], group["weight_decay"]) == (0.123, 0.5)


@pytest.mark.parametrize(("name", "value"), [("n_embd", 64), ("n_head", 4), ("tokens_per_step", 2 * T),
                                             ("seed", 3), ("optimizer", "muon"), ("block_size", 8)])
def test_what_a_checkpoint_cannot_change_is_refused(data, tmp_path, unbroken, name, value):
    out = copy_run(unbroken, tmp_path / "copy")
    error = run(data, out, max_steps=9, **{name: value})
    assert f"{name}: " in error
    assert "another --out_dir=" in error
    assert (out / "ckpt.pt").read_bytes() == (unbroken / "ckpt.pt").read_bytes()


@pytest.mark.parametrize("change", ["meta", "rows"])
def test_data_that_changed_since_the_checkpoint_are_refused(data, tmp_path, unbroken, change):
    out, other = copy_run(unbroken, tmp_path / "copy"), tmp_path / "data"
    other.mkdir()
    for path in data.iterdir():
        if path.suffix in (".bin", ".json"):
            (other / path.name).write_bytes(path.read_bytes())
    (other / "small.toml").write_text(SMALL, encoding="utf-8")
    if change == "meta":
        (other / "meta.json").write_text('{"source": "another"}', encoding="utf-8")
    else:
        prepare_fineweb.write_shard(other / "x_train_000003.bin", np.zeros(2 * T, dtype=np.uint16))
    assert "is not what" in run(other, out, max_steps=9)


def test_a_saved_config_repeats_the_run(data, tmp_path, unbroken):
    config = configs.load(train.Config, "train", [str(unbroken / "config.toml")])
    assert config == settings(data, unbroken)


def test_a_model_folder_is_trained_on_with_dropout(data, tmp_path, unbroken, capsys):
    error = run(data, tmp_path / "out", init_from=unbroken / "model", n_layer=2, n_embd=64)
    assert "n_layer = 1" in error and "n_embd = 32" in error
    assert run(data, tmp_path / "out", init_from=unbroken / "model", dropout=0.1, max_steps=2) == 0
    first = history(tmp_path / "out")[0]["val_loss"]
    assert first == pytest.approx(
        [row["val_loss"] for row in history(unbroken) if "val_loss" in row][-1], rel=1e-5)


# ------------------------------------------------------------------------------------------------------------
# Signals


def sends(number, function):
    """`function`, during which a signal arrives the first time that it runs."""
    sent = []

    def wrapped(*args, **kwargs):
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)
    return wrapped


PHASES = [
    ("start-up", train, "start_model", "SIGINT"), ("data", train, "open_data", "SIGTERM"),
    ("resume", train, "load_checkpoint", "SIGHUP"), ("step", train, "rows_of_step", "SIGINT"),
    ("step, in a hurry", train, "rows_of_step", "SIGHUP"),
    ("clip", torch.nn.utils, "clip_grad_norm_", "SIGTERM"), ("report", train, "memory_gb", "SIGINT"),
    ("validation", train, "validation_loss", "SIGTERM"), ("HellaSwag", train.hellaswag, "evaluate", "SIGINT"),
    ("samples", train, "write_samples", "SIGHUP"), ("save", torch, "save", "SIGTERM"),
    ("rename", os, "replace", "SIGINT"), ("model folder", train, "save_model", "SIGTERM"),
    ("picture", curves, "draw", "SIGINT"), ("the end", train, "last_words", "SIGTERM")]


@pytest.mark.parametrize(("owner", "name", "number"), [phase[1:] for phase in PHASES],
                         ids=[phase[0] for phase in PHASES])
def test_a_signal_in_any_phase_saves_and_the_same_command_goes_on(data, out, unbroken, monkeypatch, capsys,
                                                                  owner, name, number):
    number = getattr(signal, number)
    with monkeypatch.context() as during:
        during.setattr(owner, name, sends(number, getattr(owner, name)))
        assert run(data, out) == 128 + number
    said = capsys.readouterr().out
    assert "goes on: python train.py" in said or "before the first step" in said
    assert run(data, out) == 0
    assert same_run(out, unbroken)


def interrupt_twice(at):
    """Hook: two Ctrl-C in the middle of a step."""
    step = train.rows_of_step

    def twice(number, *args):
        if number == at:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return step(number, *args)
    train.rows_of_step = twice


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGHUP, signal.SIGHUP),
                                     (signal.SIGHUP, signal.SIGTERM)])
def test_a_closing_terminal_may_send_its_signals_twice(monkeypatch, numbers):
    """bash does, and a shutdown adds its own; none may leave before the save."""
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("left at once"))
    stop = object.__new__(train.StopSignals)
    stop.signal, stop.hurry, stop.raises, stop.came_s = 0, False, False, 0.0
    for number in numbers:
        stop.handle(number)
    assert (stop.signal, stop.hurry) == (numbers[0], True)


def test_a_second_ctrl_c_leaves_at_once(data, out, tmp_path, server):
    assert server.run(words(data, out), tmp_path / "said", "interrupt_twice", at=3) == 130
    assert state(out)["step"] == 2
    assert "goes on" not in (tmp_path / "said").read_text(encoding="utf-8")


def test_a_console_that_windows_closes_is_answered_by_a_save(data, out, unbroken, monkeypatch):
    import ctypes
    import threading
    handlers = []
    windll = types.SimpleNamespace(kernel32=types.SimpleNamespace(
        SetConsoleCtrlHandler=lambda handler, add: handlers.append(handler)))
    monkeypatch.setattr(ctypes, "windll", windll, raising=False)
    monkeypatch.setattr(ctypes, "WINFUNCTYPE", lambda *types: lambda function: function, raising=False)
    stop = train.StopSignals()
    stop.watch_console()
    assert handlers[0](0) == 0  # Ctrl-C comes as a signal
    assert not stop.signal
    # Windows waits in there while the main thread saves
    monkeypatch.setattr(train.time, "sleep", lambda seconds: None)
    thread = threading.Thread(target=handlers[0], args=(2,))
    thread.start()
    thread.join()
    assert stop.hurry
    assert stop.signal == signal.SIGTERM
    monkeypatch.setenv("WORLD_SIZE", "2")  # the others wait for this step
    handlers[0](2)
    assert not stop.hurry


def test_windows_is_kept_awake_and_others_are_told_how(monkeypatch):
    import ctypes
    calls = []
    monkeypatch.setattr(ctypes, "windll", types.SimpleNamespace(kernel32=types.SimpleNamespace(
        SetThreadExecutionState=calls.append)), raising=False)
    assert "prevents it" in train.keep_awake()
    assert not calls
    monkeypatch.setattr(train.os, "name", "nt")
    train.keep_awake()
    assert calls == [0x80000001]


# ------------------------------------------------------------------------------------------------------------
# Several processes


def as_rank(rank, world, port, kill_at=0):
    """Hook: one process of several, as torchrun would start it; kill_at is a step in which it gets a
    SIGTERM."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    if kill_at:
        interrupt_once(kill_at)


def interrupt_once(at):
    step = train.rows_of_step

    def once(number, *args):
        if number == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(number, *args)
    train.rows_of_step = once


def run_ranks(server, data, out, log, world=2, kill=None, **changes):
    """The exit codes of `world` processes; kill is (rank, step)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = [server.start(words(data, out, **changes), f"{log}{rank}", "as_rank", rank=rank, world=world,
                         port=port, kill_at=kill[1] if kill and kill[0] == rank else 0)
            for rank in range(world)]
    return [server.wait(pid) for pid in pids]


def test_two_processes_train_as_one(data, tmp_path, server):
    changes = {"max_steps": 20, "eval_every": 0, "hellaswag_every": 0, "sample_every": 0, "save_every": 0}
    assert run(data, tmp_path / "one", **changes) == 0
    assert run_ranks(server, data, tmp_path / "two", tmp_path / "log", **changes) == [0, 0]
    losses = [[row["loss"] for row in history(tmp_path / name)] for name in ("one", "two")]
    assert len(losses[0]) == 20
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (tmp_path / "log1").read_text(encoding="utf-8") == ""  # one of them speaks


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_both_and_one_alone_goes_on(data, out, tmp_path, server,
                                                                  unbroken, rank):
    assert run_ranks(server, data, out, tmp_path / "log", kill=(rank, 3)) in (
        [143, 0], [143, 143], [143, 143])
    assert state(out)["step"] == 4
    assert run(data, out) == 0
    assert [row["loss"] for row in history(out) if "loss" in row] == pytest.approx(
        [row["loss"] for row in history(unbroken) if "loss" in row], rel=1e-5)


def test_a_number_of_processes_that_does_not_divide_the_rows_is_refused(data):
    with pytest.raises(UserError, match="3 processes cannot share the 4 rows"):
        train.check_batch(settings(data, "x"), 3)
    assert train.check_batch(settings(data, "x", micro_batch_size=4), 2) == (2, 2)
    assert train.check_batch(settings(data, "x", tokens_per_step=6 * T, micro_batch_size=2), 2) == (3, 1)


def test_one_process_alone_never_initialises_torch_distributed(unbroken):
    assert not torch.distributed.is_initialized()


# ------------------------------------------------------------------------------------------------------------
# Compiler, precision, attention


def count_graphs(monkeypatch):
    import torch._dynamo
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    monkeypatch.setattr(gpt.GPT, "compile", lambda model: torch.nn.Module.compile(model, backend=backend))
    return graphs


def test_a_whole_run_compiles_at_most_three_graphs(data, out, monkeypatch, unbroken):
    graphs = count_graphs(monkeypatch)
    assert run(data, out, compile="true", dropout=0.1, micro_batch_size=2, eval_tokens=5 * T) == 0
    assert 1 <= len(graphs) <= 3
    assert not warnings_of(out)
    assert not any("_orig_mod" in name for name in state(out)["model"])
    start = next(row for row in curves.read_log(out) if row.get("event") == "start")
    assert start["compile"].startswith("on")


def test_without_a_compiler_auto_trains_eagerly_and_true_is_one_line(data, out, monkeypatch):
    def no_compiler(graph, inputs):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\n"
                           "and much more")
    monkeypatch.setattr(gpt.GPT, "compile", lambda model: torch.nn.Module.compile(model, backend=no_compiler))
    config, model = make_model(data, compile="auto")
    tokens = torch.zeros(2, T, dtype=torch.long)
    said = train.start_compile(model, config, types.SimpleNamespace(type="cuda"),
                               lambda: model(tokens, tokens).backward())
    assert said.startswith("off") and "C compiler" in said and "\n" not in said
    model(tokens, tokens).backward()
    error = run(data, out, compile="true")
    assert "compile = true" in error and "--compile=false" in error and "\n" not in error
    torch._dynamo.reset()


@pytest.mark.parametrize(("device", "bf16", "name", "dtype"), [
    ("cuda", True, "auto", torch.bfloat16), ("cuda", False, "auto", torch.float16),
    ("cuda", True, "fp16", torch.float16), ("cuda", True, "fp32", torch.float32),
    ("cpu", True, "auto", torch.float32), ("cpu", False, "bf16", torch.bfloat16),
    ("mps", False, "auto", torch.float32)])
def test_the_precision_is_what_the_hardware_really_has(monkeypatch, device, bf16, name, dtype):
    # an old card emulates bf16, and says that it is supported unless it is asked not to count that
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: including_emulation or bf16)
    assert gpt.pick_dtype(torch.device(device), training=True, name=name)[0] == dtype


def test_bf16_trains_on_a_cpu(data, out, unbroken):
    assert run(data, out, dtype="bf16", max_steps=4) == 0
    losses = [[row["loss"] for row in history(folder) if "loss" in row][:2] for folder in (out, unbroken)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert losses[0] != losses[1]
    assert state(out)["model"]["transformer.wte.weight"].dtype == torch.float32


class FakeScaler:
    calls = []  # noqa: RUF012 - of all of them

    def __init__(self, device, enabled):
        assert enabled == (train.pick_dtype is fp16)

    def scale(self, loss):
        self.calls.append("scale")
        return loss * 1024

    def unscale_(self, optimizer):
        self.calls.append("unscale")
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad /= 1024

    def step(self, optimizer):
        self.calls.append("step")
        optimizer.step()

    def update(self):
        self.calls.append("update")

    def is_enabled(self):
        return True

    def state_dict(self):
        return {"scale": 1024.0}


def fp16(device, training, name):
    return torch.float16, "for the test"


def test_fp16_gradients_are_unscaled_before_they_are_clipped(data, out, unbroken, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_",
                        lambda *args: FakeScaler.calls.append("clip") or clip(*args))
    monkeypatch.setattr(torch.amp, "GradScaler", FakeScaler)
    monkeypatch.setattr(train, "pick_dtype", fp16)
    monkeypatch.setattr(train, "autocast", lambda device, dtype: contextlib.nullcontext())
    FakeScaler.calls.clear()
    assert run(data, out, max_steps=1) == 0
    assert FakeScaler.calls == ["scale", "scale", "unscale", "clip", "step", "update"]
    assert state(out)["scaler"] == {"scale": 1024.0}
    norms = [next(row["grad_norm"] for row in history(folder) if "grad_norm" in row)
             for folder in (out, unbroken)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_cudnn_attention_comes_before_the_slow_ones(data, monkeypatch):
    from torch.nn.attention import _cur_sdpa_kernel_backends as order
    with train.attention_order("auto"):
        names = [backend.name for backend in order(with_priority=True)]
    assert names == ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
    with train.attention_order("efficient"):
        assert [backend.name for backend in order(with_priority=True)] == ["EFFICIENT_ATTENTION", "MATH"]
    config = settings(data, "x")
    assert train.attention_used(torch.device("cpu"), torch.float32, config, config) == "flash"
    assert train.attention_used(torch.device("mps"), torch.float32, config, config) == "math"


# ------------------------------------------------------------------------------------------------------------
# Before and after a run


def test_plan_prints_what_a_run_needs_and_trains_nothing(data, out, capsys):
    assert run(data, out, plan="true", hours=2, max_steps=1000) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines()}
    assert list(lines) == ["tokens", "memory", "time", "disk", "hours"]
    assert "64,000 = 1,000 steps of 64" in lines["tokens"]
    for part in ("weights 0.01", "gradients 0.01", "optimizer 0.01", "activations", "logits"):
        assert part in lines["memory"]
    step_s = float(lines["time"].split()[1])
    fits = int(lines["hours"].split("--max_steps=")[1].split()[0])
    assert step_s == pytest.approx(7200 / fits, rel=0.2, abs=0.01)
    assert not out.exists()


def test_plan_counts_the_logits_that_a_run_would_hold(data, out, capsys):
    def logits_gb(**changes):
        assert run(data, out, plan="true", **changes) == 0
        return float(capsys.readouterr().out.split("logits ")[1].split(";")[0])
    whole = 2 * T * gpt.VOCAB_SIZE * 4 / 1e9
    assert logits_gb(loss_chunk_rows=0) >= round(whole, 2)
    assert logits_gb(loss_chunk_rows=16) < whole / 2


def test_the_start_says_what_runs_on_what(data, out, capsys):
    assert run(data, out, max_steps=1) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for name, text in (("model", "1.6M weights"), ("data", "76 rows"), ("device", "float32"),
                       ("disk", "free"), ("awake", "train.py"), ("steps", "0 of 1, 64 tokens each")):
        assert text in lines[name]
    start = curves.read_log(out)[0]
    assert start["settings"]["lr"] == 3e-3
    assert {"commit", "torch", "python", "device", "dtype", "attention", "compile"} <= set(start)


def test_a_run_ends_with_a_summary_and_what_it_wrote(data, out, capsys):
    assert run(data, out) == 0
    said = capsys.readouterr().out
    assert "6 steps" in said and "0 restarts" in said and f"{out}/model" in said
    assert "kWh" not in said  # no power was measured
    samples = (out / "samples.md").read_text(encoding="utf-8")
    assert samples.count("## The capital of France is") == 1
    assert [line for line in samples.splitlines() if line.startswith("**")] == ["**step 4**", "**step 6**"]
    assert gpt.load_model(out / "model").info["step"] == 6


def test_too_little_space_is_told_at_the_start(data, out, monkeypatch):
    config = settings(data, out)
    monkeypatch.setattr(train.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5e8))
    small, big = (gpt.GPT(gpt.GPTConfig(8, 1, 1, n_embd)) for n_embd in (8, 512))
    assert "TOO LITTLE" not in train.disk_line(config, small)
    assert "TOO LITTLE" in train.disk_line(config, big)  # 29M weights, 11 times over


def test_importing_train_brings_nothing_that_is_not_needed(server):
    modules = set(server.ask(do="modules"))
    assert not modules & {"matplotlib", "datasets", "transformers", "pyarrow",
                          "huggingface_hub", "torch._inductor"}


def test_the_tiny_world_is_made_when_it_is_missing_and_its_change_is_told(tmp_path, monkeypatch, capsys):
    made = []

    def prepare(config):
        made.append(config)
        for split, number in (("val", 0), ("train", 1)):
            tokens = np.zeros(3 * T, dtype=np.uint16)
            prepare_fineweb.write_shard(tmp_path / f"tiny_{split}_{number:06d}.bin", tokens)
        meta = {"source": "tiny", "complete": True}
        (tmp_path / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    monkeypatch.setattr(prepare_fineweb, "prepare", prepare)
    config = dataclasses.replace(settings(tmp_path, "x"), source="tiny")
    assert len(train.open_data(config)[0]) == 2
    assert len(train.open_data(config)[0]) == 2
    assert [(each.source, each.out_dir) for each in made] == [("tiny", str(tmp_path))]
    assert capsys.readouterr().out.count("world.py has changed since") == 1  # such a meta.json names no world
    with pytest.raises(UserError, match="was made from 'tiny', not from source = 'my_texts'"):
        train.open_data(dataclasses.replace(config, source="my_texts"))
    meta = {"kind": "conversations", "source": "tiny", "shards": {"a_train_000001.bin": {}}}
    (tmp_path / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(UserError, match="holds the conversations of sft.py"):
        train.open_data(config)


if __name__ == "__main__":
    serve()
