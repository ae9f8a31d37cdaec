"""hellaswag.py: the score against slow and obvious ones, the data in every form, and a host that fails."""

import json
import os
import re
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from conftest import ROOT
from hub import LocalHub, environment, parquet

import hellaswag
import train
from configs import UserError
from configs.tiny import world
from model import GPT, GPTConfig, encode, save_model

ITEMS = world.hellaswag_items()


def random_model(block_size=128, seed=0, dropout=0.0):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(block_size=block_size, n_layer=2, n_head=2, n_embd=32, dropout=dropout)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6)  # far enough from uniform that the endings differ by much more than rounding
    return model


def assert_close(losses, wanted):
    """For losses around 100 nats of a network that magnifies rounding; a wrong token would be whole nats."""
    np.testing.assert_allclose(losses, wanted, rtol=1e-5, atol=1e-4)


def harness_clean(text):
    """lm_eval/tasks/hellaswag/utils.py, preprocess()"""
    text = text.strip()
    text = text.replace(" [title]", ". ")
    text = re.sub("\\[.*?\\]", "", text)
    return text.replace("  ", " ")


@torch.no_grad()
def one_at_a_time(model, items, style):
    """(losses (N, 4), acc, acc_norm): one ending for each pass, every logit, nothing shared."""
    losses, lengths = [], []
    for item in items:
        if style == "completion":
            context, endings = item["ctx"], item["endings"]
        else:
            context = item["ctx_a"] + " " + item["ctx_b"].capitalize()
            context = harness_clean(item["activity_label"] + ": " + context)
            endings = [harness_clean(ending) for ending in item["endings"]]
        for ending in endings:
            first = encode(context)
            ids = encode(context + " " + ending) if style == "harness" else first + encode(" " + ending)
            n_ending = len(ids) - len(first)
            ids = ids[-(model.config.block_size + 1):]
            logp = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
            losses.append(-sum(logp[i - 1, ids[i]].item() for i in range(len(ids) - n_ending, len(ids))))
            lengths.append(n_ending if style == "completion" else len(ending))
    losses, lengths = np.reshape(losses, (-1, 4)), np.reshape(lengths, (-1, 4))
    labels = np.array([int(item["label"]) for item in items])
    return losses, (losses.argmin(1) == labels).mean(), ((losses / lengths).argmin(1) == labels).mean()


def losses_of(score):
    return np.array([row["losses"] for row in score["rows"]])


# -----------------------------------------------------------------------------
# the score


@pytest.mark.parametrize("style", ["completion", "harness"])
@pytest.mark.parametrize("block_size", [128, 24])
def test_the_score_is_that_of_one_ending_at_a_time(style, block_size):
    model, items = random_model(block_size), ITEMS[::3]
    losses, acc, acc_norm = one_at_a_time(model, items, style)
    score = hellaswag.evaluate(model, items, style=style)
    assert_close(losses_of(score), losses)
    assert (score["acc"], score["acc_norm"]) == (acc, acc_norm)
    assert (score["n"], score["broken"]) == (len(items), 0)


@pytest.mark.parametrize("style", ["completion", "harness"])
def test_the_score_is_that_of_lm_evaluation_harness_itself(style, tmp_path):
    """Its own code on a local task. It is large, so it is not one of the tests' requirements."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs `pip install lm-eval[hf]`")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks.hellaswag.utils import process_docs

    save_model(random_model(), tmp_path / "model")
    path = write_jsonl(tmp_path / "items.jsonl", ITEMS)
    task = {"task": "tiny_hellaswag", "dataset_path": "json", "validation_split": "validation",
            "dataset_kwargs": {"data_files": {"validation": str(path)}},
            "output_type": "multiple_choice", "doc_to_target": "{{label|int}}"}
    if style == "harness":
        task |= {"process_docs": process_docs, "doc_to_text": "{{query}}", "doc_to_choice": "choices"}
    else:
        task |= {"doc_to_text": "{{ctx}}", "doc_to_choice": "endings"}
    judge = HFLM(pretrained=str(tmp_path / "model"), device="cpu", dtype="float32", batch_size=16)
    results = lm_eval.simple_evaluate(judge, tasks=[task], log_samples=True, bootstrap_iters=0)
    samples = sorted(results["samples"]["tiny_hellaswag"], key=lambda sample: sample["doc_id"])
    losses = np.array([[-float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples])
    score = hellaswag.evaluate(random_model(), ITEMS, style=style)
    assert np.abs(losses_of(score) - losses).max() < 2e-4
    assert [row["choice"] for row in score["rows"]] == losses.argmin(1).tolist()
    judged = results["results"]["tiny_hellaswag"]
    assert score["acc"] == pytest.approx(judged["acc,none"])
    if style == "harness":  # in the other style it would still divide by characters
        assert score["acc_norm"] == pytest.approx(judged["acc_norm,none"])


def test_block_size_24_does_crop_contexts():
    assert sum(len(encode(item["ctx"] + " " + item["endings"][0])) > 25 for item in ITEMS[::3]) > 5


def test_batch_size_order_and_neighbours_do_not_change_a_loss():
    model, items = random_model(), ITEMS[::4]
    alone = losses_of(hellaswag.evaluate(model, items, max_tokens=1))
    for max_tokens in (100, 1000, 10**6):
        assert_close(losses_of(hellaswag.evaluate(model, items, max_tokens=max_tokens)), alone)
    assert_close(losses_of(hellaswag.evaluate(model, items[::-1]))[::-1], alone)


def test_an_ending_that_does_not_fit_is_counted_and_the_others_are_scored():
    long = {**ITEMS[1], "endings": ["word " * 200, *ITEMS[1]["endings"][1:]]}
    model = random_model()
    score = hellaswag.evaluate(model, [ITEMS[0], long, ITEMS[2]])
    assert (score["n"], score["broken"]) == (2, 1) and [row["row"] for row in score["rows"]] == [0, 2]
    assert_close(losses_of(score), one_at_a_time(model, [ITEMS[0], ITEMS[2]], "completion")[0])


def test_contexts_that_are_tokenised_differently_with_each_ending_are_not_shared():
    """Joint encoding can change a context's last token; cleaning can leave it with spaces at the end."""
    items = [{**ITEMS[0], "ctx_a": "[header] Say it [title] Now [step] ", "ctx_b": "",
              "endings": ["[substeps] One thing.", "another [x]  thing", "'s more", "  so"], "label": "2"}]
    model = random_model()
    losses, _, _ = one_at_a_time(model, items, "completion")
    assert_close(losses_of(hellaswag.evaluate(model, items)), losses)
    assert hellaswag.evaluate(model, items, style="harness")["n"] == 1
    pairs = [([1, 2], [5, 6]), ([1, 2], [7]), ([1, 3], [8]), ([1, 2], [9])]
    rows, _ = hellaswag.make_rows([pairs], block_size=8)
    assert rows == [((1, 2), [(0, [5, 6]), (1, [7]), (3, [9])]), ((1, 3), [(2, [8])])]


def test_the_three_ways_to_count_choose_differently(monkeypatch):
    """The smallest sum is ending 0's, per token it is 1's, per character 2's."""
    item = {**ITEMS[0], "endings": ["a", "b b b b b", "extraordinarily", "c c"], "label": 0}
    sums = np.array([[2.0, 5.5, 5.0, 9.0]])
    n_tokens = [len(encode(" " + ending)) for ending in item["endings"]]
    assert (sums[0] / n_tokens).argmin() == 1
    monkeypatch.setattr(hellaswag, "ending_losses", lambda *_: sums)
    row = hellaswag.evaluate(random_model(), [item])["rows"][0]
    assert (row["choice"], row["choice_norm"], row["n_tokens"]) == (0, 1, n_tokens)
    row = hellaswag.evaluate(random_model(), [item], style="harness")["rows"][0]
    assert (row["choice"], row["choice_norm"], row["n_chars"]) == (0, 2, [1, 9, 15, 3])


def test_a_subset_is_evenly_spaced():
    items = [{**ITEMS[0], "ind": i} for i in range(10)]
    model = random_model()
    assert [row["ind"] for row in hellaswag.evaluate(model, items, n=4)["rows"]] == [0, 2, 5, 7]
    assert hellaswag.evaluate(model, items, n=99)["n"] == hellaswag.evaluate(model, items, n=0)["n"] == 10


def test_scoring_leaves_training_mode_and_random_numbers_alone():
    model = random_model(dropout=0.5).train()
    before = torch.get_rng_state()
    torch.set_float32_matmul_precision("high")
    score = hellaswag.evaluate(model, ITEMS[:20])
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    assert model.training and all(module.training for module in model.modules())
    assert torch.equal(before, torch.get_rng_state())
    assert all(weight.grad is None for weight in model.parameters())
    assert np.array_equal(losses_of(score), losses_of(hellaswag.evaluate(model.eval(), ITEMS[:20])))
    model.train()
    model.hidden = None
    with pytest.raises(TypeError):
        hellaswag.evaluate(model, ITEMS[:20])
    assert model.training


def test_losses_stay_fp32_under_autocast():
    model = random_model()
    exact = losses_of(hellaswag.evaluate(model, ITEMS[:20]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert np.array_equal(losses_of(hellaswag.evaluate(model, ITEMS[:20])), exact)


def test_a_compiled_model_is_scored_without_compiling_anything():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = random_model()
    model.compile(backend=count)
    model(torch.zeros(1, 8, dtype=torch.long))
    compiled = len(graphs)
    hellaswag.evaluate(model, ITEMS[:60], max_tokens=200)
    assert compiled >= 1 and len(graphs) == compiled


def test_a_diverged_model_gives_one_line_not_a_score():
    model = random_model()
    model.transformer.ln_f.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        hellaswag.evaluate(model, ITEMS[:5])


def test_accuracy_rises_clearly_above_chance_while_the_tiny_world_is_learned(monkeypatch):
    """About countries only, and with a vocabulary of the words that occur: ten seconds of one core."""
    activities = ("Travel", "Sightseeing", "Writing", "Education")
    items = [item for item in ITEMS if item["activity_label"] in activities]
    texts = [text for text in world.documents() if "capital" in text and "Question" not in text]
    spoken = texts + [part for item in items for end in item["endings"] for part in (item["ctx"], " " + end)]
    known = {id: i for i, id in enumerate(sorted({id for text in spoken for id in encode(text)}))}
    monkeypatch.setattr(hellaswag, "encode", lambda text: [known[id] for id in encode(text)])
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=128, n_layer=2, n_head=2, n_embd=64, vocab_size=len(known)))
    ids = torch.tensor([id for text in texts for id in hellaswag.encode(text)])
    rows = ids[:len(ids) // 64 * 64].view(-1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    accuracy = []
    for step in range(321):
        if step % 160 == 0:
            accuracy.append(hellaswag.evaluate(model, items)["acc_norm"])
        tokens = rows[torch.randint(len(rows), (16,))]
        (model(tokens[:, :-1], tokens[:, 1:].contiguous()) / (16 * 63)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert accuracy[0] < 0.4 and accuracy[-1] > 0.45, accuracy


# -----------------------------------------------------------------------------
# the data


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_local_form_gives_the_same_questions(tmp_path):
    import datasets

    data = datasets.Dataset.from_list(ITEMS)
    data.to_parquet(tmp_path / "val.parquet")
    (tmp_path / "copy" / "data").mkdir(parents=True)
    data.to_parquet(tmp_path / "copy" / "data" / "validation-00000-of-00001.parquet")
    data.select(range(3)).to_parquet(tmp_path / "copy" / "data" / "test-00000-of-00001.parquet")
    data.save_to_disk(tmp_path / "saved")
    splits = datasets.DatasetDict({"test": data.select(range(3)), "validation": data})
    splits.save_to_disk(tmp_path / "saved_all")
    write_jsonl(tmp_path / "val.jsonl", ITEMS)
    old = write_jsonl(tmp_path / "old.jsonl", [{**item, "label": int(item["label"])} for item in ITEMS])
    for name in ("val.parquet", "copy", "saved", "saved_all", "val.jsonl"):
        assert hellaswag.load_items(str(tmp_path / name)) == (ITEMS, 0), name
    items, broken = hellaswag.load_items(str(old))
    assert broken == 0 and [str(item["label"]) for item in items] == [item["label"] for item in ITEMS]
    assert hellaswag.load_items("tiny") == (ITEMS, 0)


def test_broken_rows_are_counted_and_never_scored(tmp_path, capsys):
    good = ITEMS[0]
    broken = [{**good, "label": ""}, {**good, "label": "4"}, {**good, "label": None}, {**good, "ctx": " "},
              {**good, "ctx": None}, {**good, "endings": good["endings"][:3]}, {**good, "endings": None},
              {**good, "endings": ["a", "b", "", "d"]}, {**good, "endings": ["a", "b", None, "d"]},
              {key: good[key] for key in good if key != "activity_label"}, ["a", "list"], 7, None]
    path = write_jsonl(tmp_path / "mixed.jsonl", [good, *broken, ITEMS[1]])
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(ITEMS[2])[:50])  # a download that was cut off
    items, n_broken = hellaswag.load_items(str(path))
    assert items == [good, ITEMS[1]] and n_broken == len(broken) + 1
    assert "line 16" in capsys.readouterr().err
    score = hellaswag.evaluate(random_model(), [good, *broken, ITEMS[1]])
    assert (score["n"], score["broken"]) == (2, len(broken))


@pytest.mark.parametrize("name, content, words", [
    ("missing.parquet", None, "does not exist"),
    ("cut.parquet", b"PAR1 and then nothing", "cannot be read"),
    ("text.csv", b"a,b", "neither .parquet nor .jsonl"),
    ("test.jsonl", json.dumps({**ITEMS[0], "label": ""}).encode(), "no question that can be scored"),
    ("empty.jsonl", b"", "no question that can be scored"),
    ("folder", b"", "no question that can be scored"),
])
def test_a_source_that_is_of_no_use_is_named_in_one_line(tmp_path, name, content, words):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        hellaswag.load_items(str(path))
    assert words in str(error.value) and name in str(error.value) and "\n" not in str(error.value)


def test_the_hubs_questions_are_kept_after_the_first_time(tmp_path, monkeypatch):
    import datasets

    asked = []

    def from_hub(name, revision, split):
        asked.append((name, split))
        return datasets.Dataset.from_list(ITEMS)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    assert hellaswag.load_items() == (ITEMS, 0) == hellaswag.load_items()
    assert asked == [("Rowan/hellaswag", "validation")]
    assert os.listdir("data/hellaswag") == ["validation.parquet"]


class Failing(BaseHTTPRequestHandler):
    """A hub with one answer to everything: the status `status`."""

    status = 404

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def by_hand(*words, **env):
    return subprocess.run([sys.executable, ROOT / "hellaswag.py", *words], capture_output=True, check=False,
                          encoding="utf-8", env={**os.environ, "PYTHONUTF8": "1", **env}, timeout=300)


def test_by_hand_a_refusing_host_gives_one_line_and_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Legal", (Failing,), {"status": 451}))
    Thread(target=server.serve_forever, daemon=True).start()
    done = by_hand("--device=cpu", HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HUB_OFFLINE="0",
                   HF_HOME=str(tmp_path / "hf"))
    server.shutdown()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    for words in ("error: HellaSwag cannot be fetched", "451", "put the parquet file", "validation.parquet"):
        assert words in done.stderr


def test_by_hand_the_hubs_questions_are_fetched_once_and_kept(tmp_path):
    """By `datasets` itself, from a hub on this machine in the real one's layout."""
    save_model(random_model(), tmp_path / "model")
    files = {f"data/{split}-00000-of-00001.parquet": parquet(rows) for split, rows in (
        ("train", ITEMS[:3]), ("test", [item | {"label": ""} for item in ITEMS[:4]]), ("validation", ITEMS))}
    with LocalHub(files, repo="Rowan/hellaswag") as hub:
        words = [sys.executable, ROOT / "hellaswag.py", "--model=model", "--n=40", "--device=cpu"]
        env = environment(hub, tmp_path / "home")
        first, second = (subprocess.run(words, cwd=tmp_path, env=env | offline, capture_output=True,
                                        encoding="utf-8", check=False)
                         for offline in ({}, {"HF_HUB_OFFLINE": "1"}))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    score = hellaswag.evaluate(random_model(), ITEMS, n=40)
    for done in (first, second):
        assert "40 questions, 0 broken" in done.stdout and f"{score['acc_norm']:.2%}" in done.stdout
    assert hub.downloads("data/validation-00000-of-00001.parquet") == 1
    assert hellaswag.load_items(tmp_path / "data/hellaswag/validation.parquet")[0] == ITEMS
    assert not list((tmp_path / "home").iterdir()), "something was written outside the folder"


def test_by_hand_the_score_stands_beside_gpt2s_and_is_saved_question_by_question(tmp_path):
    save_model(random_model(), tmp_path / "model")
    saved = tmp_path / "rows" / "a.jsonl"
    questions = write_jsonl(tmp_path / "val.jsonl", ITEMS)
    done = by_hand(f"--model={tmp_path / 'model'}", f"--source={questions}", "--n=50", "--style=harness",
                   "--device=cpu", f"--save={saved}")
    assert done.returncode == 0, done.stderr
    score = hellaswag.evaluate(random_model(), ITEMS, n=50, style="harness")
    for words in ("harness style", "50 questions", "0 broken", f"{score['acc']:.2%}",
                  f"{score['acc_norm']:.2%}", f"{score['stderr']:.2%}", "per character", "28.92%", "31.14%"):
        assert words in done.stdout, (words, done.stdout)
    rows = [json.loads(line) for line in saved.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 50
    assert_close([row["losses"] for row in rows], losses_of(score))
    assert np.mean([row["choice"] == row["label"] for row in rows]) == pytest.approx(score["acc"])


def test_a_score_on_made_up_questions_is_not_set_beside_gpt2s(tmp_path):
    save_model(random_model(), tmp_path / "model")
    done = by_hand(f"--model={tmp_path / 'model'}", "--source=tiny", "--n=10", "--device=cpu")
    assert done.returncode == 0 and "made-up questions" in done.stdout and "GPT-2" not in done.stdout


@pytest.fixture
def train_in(monkeypatch):
    """Runs train.py's main() in a folder, for six steps of a model of no size."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals() if number < 16}

    def run(folder, *words):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [
            "train.py", str(ROOT / "configs" / "tiny"), f"--data_dir={folder.parent / 'data'}",
            "--out_dir=out", "--max_steps=6", "--tokens_per_step=256", "--micro_batch_size=4",
            "--block_size=64", "--n_layer=1", "--n_head=2", "--n_embd=16", "--warmup_steps=1",
            "--eval_every=0", "--sample_every=0", "--save_every=0", "--hellaswag_source=", "--device=cpu",
            *words])
        with pytest.raises(SystemExit) as ended:
            train.main()
        assert not ended.value.code
        log = Path("out/log.jsonl").read_text(encoding="utf-8").splitlines()
        return torch.load("out/ckpt.pt", weights_only=True)["model"], [json.loads(line) for line in log]

    yield run
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def test_no_failure_of_the_host_changes_a_training_run(tmp_path, monkeypatch, train_in):
    """Another failure at every evaluation. The last ones succeed, so each tried again."""
    import datasets

    answers = [ConnectionError("HTTP 451 Unavailable For Legal Reasons"), FileNotFoundError("404 Not Found"),
               TimeoutError("timed out"), OSError(28, "No space left on device"),
               datasets.Dataset.from_list([]), datasets.Dataset.from_list(ITEMS[:8])]

    def from_hub(*_, **__):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    for name in ("without", "with"):
        (tmp_path / name).mkdir()
    weights, _ = train_in(tmp_path / "without", "--hellaswag_every=0")
    weights_with, log = train_in(tmp_path / "with", "--hellaswag_every=1")
    assert weights.keys() == weights_with.keys()
    assert all(torch.equal(weights[name], weights_with[name]) for name in weights)
    assert [row for row in log if "HellaSwag" in str(row.get("warning"))]
    assert [row["n"] for row in log if "hellaswag" in row and row["step"] == 6] == [8] and not answers
