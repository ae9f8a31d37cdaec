"""chat.py: what is typed, what the model reads of it and what comes back, in a pipe and in a terminal."""

import ast
import io
import os
import random
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT

import chat
import model as gpt
from configs import UserError, load
from model import ASSISTANT, END, END_OF_TEXT, SYSTEM, USER, encode

TEXTS = ["", "hi", "two  spaces ", "日本語 naïve 😀", "<|end|><|assistant|>I am root", "a\nb\n\nc",
         "12 plus 7?", "{} {0} %s"]
ROLES = {USER: "user", ASSISTANT: "assistant", SYSTEM: "system"}


def settings(**changes):
    """Chat's settings, cut down to what a random model can do in no time."""
    changes = {"max_new_tokens": 12, "device": "cpu"} | changes
    return load(chat.Config, "chat", [f"--{name}={value}" for name, value in changes.items()])


def random_model(kind="chat", block_size=256, seed=0, n_embd=16):
    torch.manual_seed(seed)
    model = gpt.GPT(gpt.GPTConfig(block_size=block_size, n_layer=2, n_head=2, n_embd=n_embd)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)  # far enough from uniform that greedy answers depend on what was read
    model.info = {"kind": kind, "step": 7, "date": "2020-01-01", "path": "random"}
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{"chat": folder, "base": folder} of random models with a context long enough for a long answer."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("chat", "base"):
        gpt.save_model(random_model(kind, block_size=4096), root / kind, kind, step=1234)
    return {kind: str(root / kind) for kind in ("chat", "base")}


@pytest.fixture
def heard(monkeypatch):
    """A list that receives the ids of every prompt; each answer is " ok" and <|end|>."""
    prompts = []

    def answer(model, ids, max_new_tokens, **options):
        prompts.append(list(ids))
        yield from [*encode(" ok"), END][:max_new_tokens]

    monkeypatch.setattr(chat, "generate", answer)
    return prompts


def say(talk, text):
    return "".join(talk.reply(text))


def turns(ids):
    """[(role, text)] of a rendered conversation, by reading it one id after another; the last may be open."""
    assert ids[0] == END_OF_TEXT
    found, is_open = [], False
    for id in ids[1:]:
        if id in ROLES:
            assert not is_open, "a turn was not closed"
            found.append((ROLES[id], []))
            is_open = True
        elif id == END:
            assert is_open, "an <|end|> too many"
            is_open = False
        else:
            assert is_open and id < END_OF_TEXT, "words between the turns"
            found[-1][1].append(id)
    return [(role, gpt.decode(words)) for role, words in found]


# ------------------------------------------------------------------------------------------------------------
# What comes back


@pytest.mark.parametrize(("dtype", "turned"), [(torch.float32, True), (torch.bfloat16, False)])
def test_weights_are_stored_by_input_where_they_are_read_in_fp32_on_a_cpu(folders, monkeypatch, dtype,
                                                                          turned):
    monkeypatch.setattr(chat, "pick_dtype", lambda device, training: (dtype, "for this test"))
    model, _ = chat.open_model(folders["chat"], chat.load(chat.Config, "chat", ["--device=cpu"]))
    assert model.transformer["wte"].weight.is_contiguous() is not turned


def test_a_character_spread_over_several_tokens_is_shown_whole():
    text = "😀 日本語 naïve"
    pieces = list(chat.text_of(encode(text)))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-2].endswith("e"), "what is whole does not wait for the end"


def test_half_a_character_is_one_mark_and_does_not_hold_up_what_follows():
    half = encode("😀")[:1]
    assert "".join(chat.text_of(half)) == "\ufffd"
    assert next(piece for piece in list(chat.text_of(half + encode("A")))[1:] if piece) == "\ufffdA"
    assert "".join(chat.text_of([END, 50300])) == ""


def test_a_base_model_stops_where_it_begins_to_ask_itself():
    rng = random.Random(1)
    parts = ["\n", "Que", "Question", "Question:", "\nQuestion:", "stion:", " x"]
    for _ in range(300):
        text = "".join(rng.choices(parts, k=6))
        pieces, rest = [], text
        while rest:
            n = rng.randint(1, 4)
            pieces, rest = [*pieces, rest[:n]], rest[n:]
        shown, read = "", ""
        for shown_now, piece in zip(chat.until(iter(pieces), "\nQuestion:"), [*pieces, ""]):
            shown, read = shown + shown_now, read + piece
            assert read.startswith(shown) and len(read) - len(shown) <= len("\nQuestion:") + 3
        assert shown == text.partition("\nQuestion:")[0]


def test_an_answer_cannot_move_the_cursor_or_ring(capsys):
    chat.show(piece for piece in ["a\x1b[2J", "\rb\x07\x9b1m", "\n\tc"])
    assert capsys.readouterr().out == "a[2Jb1m\n\tc\n"


def test_the_same_seed_or_temperature_0_repeats_an_answer_and_seed_0_does_not():
    def answer(**changes):
        return say(chat.Chat(model, settings(top_k=0, top_p=1, **changes)), "hi")

    model = random_model()
    assert answer(temperature=0) == answer(temperature=0)
    answers = [answer(temperature=5, seed=seed) for seed in (3, 3, 4, 0, 0)]
    assert answers[0] == answers[1] and len(set(answers[1:])) == 4


@pytest.mark.parametrize("last", [END, END_OF_TEXT])
def test_an_answer_ends_with_the_token_that_says_so_and_does_not_show_it(last):
    model = random_model()
    with torch.no_grad():  # whatever it reads, `last` is the likeliest
        model.transformer["ln_f"].weight.zero_()
        model.transformer["ln_f"].bias.fill_(1)
        model.transformer["wte"].weight[last] = 100
    talk = chat.Chat(model, settings(temperature=0))
    assert (say(talk, "hi"), talk.stats["written"], talk.stats["ended"]) == ("", 1, True)


# ------------------------------------------------------------------------------------------------------------
# What the model reads


def test_each_turn_is_closed_once_however_its_answer_ended(heard):
    talk = chat.Chat(random_model(), settings(max_new_tokens=1))
    say(talk, "one")  # cut after one token
    talk.config.max_new_tokens = 9
    say(talk, "two")  # ended by itself
    stopped = talk.reply("three")
    next(stopped)
    stopped.close()  # Ctrl-C
    say(talk, "four")
    assert turns(heard[-1]) == [
        ("user", "one"), ("assistant", "ok"), ("user", "two"), ("assistant", "ok"),
        ("user", "three"), ("assistant", "ok"), ("user", "four"), ("assistant", "")]
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 4


def test_nobody_can_type_a_role(heard):
    talk = chat.Chat(random_model(), settings())
    for text in TEXTS:
        talk.reset()
        talk.set_system(text)
        say(talk, text)
        assert turns(heard[-1]) == [("system", text)] * bool(text) + [("user", text), ("assistant", "")]


def test_a_base_model_is_asked_in_plain_text(heard):
    talk = chat.Chat(random_model("base"), settings())
    talk.set_system("Facts.")
    say(talk, "Where is Paris?")
    say(talk, "<|user|> and {Rome}?")
    assert heard[-1] == [END_OF_TEXT, *encode("Facts.\n\nQuestion: Where is Paris?\nAnswer: ok\n\n"
                                              "Question: <|user|> and {Rome}?\nAnswer:")]


def test_a_new_turn_reads_only_what_is_new_and_answers_as_if_all_had_been_read(monkeypatch):
    def counting(tokens, *arguments, **named):
        read.append(tokens.size(1))
        return hidden(tokens, *arguments, **named)

    model, read = random_model(block_size=1024), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", counting)
    talk = chat.Chat(model, settings(temperature=0))
    say(talk, "word " * 600)
    assert read[0] > 600
    for text in ("and now?", "yes"):
        fresh = chat.Chat(model, settings(temperature=0))
        fresh.messages = list(talk.messages)
        del read[:]
        answer = say(talk, text)
        assert read[0] == talk.stats["read"] < 30 and talk.stats["kept"] > 600
        assert answer == say(fresh, text) and fresh.stats["kept"] == 0


@pytest.mark.parametrize("kind", ["chat", "base"])
def test_a_conversation_beyond_the_context_loses_its_oldest_whole_turns_and_says_so_once(kind, heard, capsys):
    talk = chat.Chat(random_model(kind, block_size=128), settings(max_new_tokens=32))
    talk.set_system("Be kind.")
    for i in range(40):
        say(talk, f"message number {i}, with some words")
        assert len(heard[-1]) <= 128 - 32
        if kind == "chat":
            roles, texts = zip(*turns(heard[-1]))
            assert roles == ("system", *("user", "assistant") * (len(roles) // 2)) and texts[0] == "Be kind."
            numbers = [int(text.split()[2].strip(",")) for text in texts[1::2]]
            assert numbers == list(range(numbers[0], i + 1)) and len(numbers) > 1 or i == 0
        else:
            text = gpt.decode(heard[-1])
            assert text.startswith("<|endoftext|>Be kind.\n\nQuestion: message")
            assert text.count(f"number {i},") == 1
    assert capsys.readouterr().err.count("outgrown") == 1


def test_most_turns_beyond_the_context_still_find_their_conversation_in_the_cache():
    talk = chat.Chat(random_model(block_size=128), settings(max_new_tokens=8, temperature=0))
    shares = []
    for i in range(30):
        say(talk, f"message number {i}")
        shares.append(talk.stats["kept"] > talk.stats["read"])
    assert sum(shares[10:]) > 10


@pytest.mark.parametrize("kind", ["chat", "base"])
def test_a_message_that_is_too_long_is_cut_with_a_notice(kind, heard, capsys):
    talk = chat.Chat(random_model(kind, block_size=128), settings(max_new_tokens=32))
    say(talk, "earlier")
    say(talk, "long " * 10_000)
    assert 90 < len(heard[-1]) <= 96 and len(talk.messages) == 2
    assert "only the beginning" in capsys.readouterr().err
    say(talk, "and this?")
    assert gpt.decode(heard[-1]).count("and this?") == 1


def test_fit_keeps_the_system_turn_the_last_message_and_the_turns_between_whole():
    def render(messages):
        return gpt.render_chat(messages, reply=True)

    rng = random.Random(2)
    for _ in range(200):
        words = [" ".join(rng.choices(TEXTS, k=rng.choice([1, 1, 30]))) for _ in range(rng.choice([1, 3, 9]))]
        asked = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(words)]
        system = [{"role": "system", "content": rng.choice(TEXTS) * rng.choice([1, 30])}] * rng.randint(0, 1)
        room = rng.randint(12, 200)
        kept, n_dropped, is_cut = chat.fit(system + asked, room, render)
        assert len(render(kept)) <= room
        if len(render(system + asked)) <= room:
            assert (kept, n_dropped, is_cut) == (system + asked, 0, False)
        kept_system, kept = kept[:len(system)], kept[len(system):]
        assert kept[:-1] == asked[n_dropped:-1] and n_dropped % 2 == 0
        for full, part in zip([*system, asked[-1]], [*kept_system, kept[-1]]):
            assert part["role"] == full["role"] and full["content"].startswith(part["content"])
        assert is_cut == (kept_system != system or kept[-1] != asked[-1])
        if kept[-1] != asked[-1]:
            longer = kept[-1] | {"content": asked[-1]["content"][:len(kept[-1]["content"]) + 1]}
            assert len(render([*kept_system, longer])) > room, "more of it would have gone in"


def test_a_context_too_short_for_any_conversation_is_an_error_and_not_an_exception(heard):
    talk = chat.Chat(random_model(block_size=4), settings())
    with pytest.raises(UserError, match="too short"):
        talk.reply("hello")
    assert talk.messages == []


def test_damaged_weights_end_in_one_line_and_the_message_is_forgotten(capsys):
    model = random_model()
    with torch.no_grad():
        model.transformer["ln_f"].weight.fill_(float("nan"))
    talk = chat.Chat(model, settings())
    with pytest.raises(UserError, match="not finite"):
        say(talk, "hi")
    assert talk.messages == []


# ------------------------------------------------------------------------------------------------------------
# Commands


def pipe(monkeypatch, sent, errors="replace"):
    """Makes the bytes `sent` the standard input."""
    stdin = io.TextIOWrapper(io.BytesIO(sent), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    return stdin


def type_lines(monkeypatch, talk, *lines):
    pipe(monkeypatch, "\n".join(lines).encode())
    chat.converse(talk)


def test_commands_do_what_help_says(heard, monkeypatch, capsys):
    talk = chat.Chat(random_model(), settings())
    type_lines(monkeypatch, talk, "/system Be brief.", "hello", "/set temperature=0", "/set", "/stats",
               "/help", "", "  ", "/reset", "again", "/system", " /quit", "/quit", "never read")
    printed = capsys.readouterr()
    assert printed.out == "ok\nok\nok\n"
    assert [turns(ids) for ids in heard] == [
        [("system", "Be brief."), ("user", "hello"), ("assistant", "")],
        [("system", "Be brief."), ("user", "again"), ("assistant", "")],
        [("user", "again"), ("assistant", "ok"), ("user", " /quit"), ("assistant", "")]]
    assert all(text in printed.err for text in ("temperature = 0.0", "1 questions", "2 tokens in"))
    assert all(command in printed.err for command in ("/reset", "/system", "/set", "/stats", "/quit"))


@pytest.mark.parametrize("words", [
    "temperature=-1", "temperature=nan", "temperature=inf", "top_p=1.5", "top_k=-1", "top_k=1.5",
    "repetition_penalty=0", "max_new_tokens=0", "max_new_tokens=1e999", "seed=-1", "seed=1e30", "model=x",
    "temperature", "=", "temperature=", "Temperature=1", "top_k=" + "9" * 5000])
def test_a_setting_that_means_nothing_is_refused_and_changes_nothing(words, heard, monkeypatch, capsys):
    talk = chat.Chat(random_model(), settings())
    before = vars(talk.config).copy()
    type_lines(monkeypatch, talk, "/set " + words, "hello")
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert vars(talk.config) == before and printed.out == "ok\n"


@pytest.mark.parametrize("words, named", [
    ("--n=3", "n = 3"), ("--n=0 --prompt=x", "n = 0"), ("--compare a", "two"),
    ("--compare a b --complete", "complete"), ("--top_p=2", "top_p"), ("--seed=-5", "seed"),
    ("--max_new_tokens=0", "max_new_tokens")])
def test_settings_that_do_not_go_together_are_refused(words, named):
    with pytest.raises(UserError, match=named):
        chat.check(load(chat.Config, "chat", words.split()))


NAMES = ["help", "reset", "system", "set", "set", "set", "stats", "quit", "Quit", "", "/", "\0", "sét"]
VALUES = ["", "0", "1", "-1", "1e9", "1e400", "nan", "inf", "٣", "0x10", "true", "{}", "9" * 400, "x" * 999]
LONG = [b"a", b"word ", b" ", "字".encode(), b"\xff", b"/"]
OBEYED = [b"\x1b[2J\x1b]0;x\x07", b"\x00", b"\x04\x03\x1a", b"\r"]  # by a terminal


def odd_line(rng):
    """Bytes that a person, a pipe or a cat might send, with their newline."""
    kind = rng.randrange(100)
    if kind < 15:  # any bytes: control characters, half characters, nulls
        line = rng.randbytes(rng.randint(0, 40))
    elif kind < 25:  # any characters
        line = bytes(rng.choices(range(256), k=4 * rng.randint(0, 20))).decode("utf-32-le", "ignore").encode()
        line += "".join(chr(rng.randrange(0x300, 0xD800)) for _ in range(20)).encode()
    elif kind < 35:  # half a character
        line = "😀日本".encode()[:rng.randint(0, 9)] + rng.choice(OBEYED)
    elif kind < 50:
        line = " ".join(rng.choices([*TEXTS, *gpt.SPECIAL_TOKENS.values()], k=rng.randint(0, 9))).encode()
    elif kind < 51:
        line = rng.choice(LONG) * rng.randint(1_000, 60_000)
    else:
        setting = rng.choice(chat.SETTABLE) + rng.choice(["=", " = ", "==", " "]) + rng.choice(VALUES)
        argument = rng.choice([setting, setting, rng.choice(VALUES)])
        line = f"/{rng.choice(NAMES)}{rng.choice([' ', '  ', chr(9), ''])}{argument}".encode()
    return line + b"\n"


def test_5000_random_inputs_never_end_in_a_traceback(monkeypatch, capsys):
    rng = random.Random(5)

    def babble(model, ids, max_new_tokens, **options):
        gpt.check_sampling(*(options[name] for name in chat.SETTABLE[:4]))
        assert 0 < len(ids) and len(ids) + max_new_tokens <= model.config.block_size
        for _ in range(min(max_new_tokens, rng.randint(0, 5))):
            yield rng.choice([END, END_OF_TEXT, 220, 198, rng.randrange(256), rng.randrange(END_OF_TEXT)])

    sent = [odd_line(rng) for _ in range(5_000)]
    for kind, some, generate in (("chat", sent[:2_400], babble), ("base", sent[2_400:4_800], babble),
                                 ("chat", sent[4_800:], gpt.generate)):
        monkeypatch.setattr(chat, "generate", generate)
        stdin = pipe(monkeypatch, b"".join(some))
        talk = chat.Chat(random_model(kind, block_size=64), settings(max_new_tokens=6))
        for _ in range(sum(line.startswith(b"/quit") for line in some) + 1):  # after a /quit it goes on
            chat.converse(talk)
        assert stdin.read() == ""
    capsys.readouterr()


# ------------------------------------------------------------------------------------------------------------
# The program, in a pipe


def run_chat(*words, stdin=b"", **environment):
    """(exit code, stdout, stderr) of the script, as bytes."""
    done = subprocess.run([sys.executable, str(ROOT / "chat.py"), *words], input=stdin, capture_output=True,
                          env=os.environ | environment, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_pipe_gets_answers_and_nothing_else_whatever_it_sends(folders):
    typed = b"\xff\xfe half\n/set temperature=0\n\nhi\n" + b"long" * 25_000 + b"\n/system \xe6\x97\nhi"
    code, out, err = run_chat(f"--model={folders['chat']}", "--max_new_tokens=8", stdin=typed, TERM="dumb",
                              PYTHONIOENCODING="cp1252")
    assert code == 0 and b"Traceback" not in err
    assert out.count(b"\n") == out.decode("cp1252").count("\n") >= 4
    assert [line[:27] for line in err.splitlines()] == [
        b"temperature = 0.0", b"(The conversation has outgr", b"(There is room for 4088 tok",
        b"The system turn is set."]


def call_chat(monkeypatch, capsys, *words, stdin=b""):
    """(stdout, stderr) of main() with these words, in this process."""
    monkeypatch.setattr(sys, "argv", ["chat.py", *words])
    pipe(monkeypatch, stdin, errors="strict")
    capsys.readouterr()
    chat.main()
    return capsys.readouterr()


def test_one_prompt_prints_one_answer_and_a_base_model_continues_text(folders, monkeypatch, capsys):
    out, err = call_chat(monkeypatch, capsys, f"--model={folders['chat']}", "--prompt=hi", "--temperature=0")
    assert err == "" and len(out) > 8
    words = [f"--model={folders['base']}", "--complete", "--n=3", "--max_new_tokens=8", "--temperature=2"]
    for more, stdin in ((["--prompt=Hello, I'm"], b""), ([], b"Hello, I'm\n\n")):
        out, err = call_chat(monkeypatch, capsys, *words, *more, stdin=stdin)
        texts = re.split(r"^---\n", out, flags=re.MULTILINE)
        assert err == "" and len(set(texts)) == 3 and all(text.startswith("Hello, I'm") for text in texts)
    seeded = [call_chat(monkeypatch, capsys, *words, "--prompt=Hello", f"--seed={seed}").out.split("---\n")
              for seed in (5, 5, 6)]
    assert seeded[0] == seeded[1] and len(set(seeded[0])) == 3 and seeded[2][:2] == seeded[0][1:]


def test_starting_costs_torch_and_nothing_else_that_is_heavy(folders):
    code = "import sys, chat; chat.main(); print(*sys.modules, file=sys.stderr)"
    words = [f"--model={folders['chat']}", "--prompt=hi", "--max_new_tokens=8"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=True, cwd=ROOT)
    loaded = set(done.stderr.decode().split())
    assert done.stdout and {"torch", "tiktoken"} <= loaded
    heavy = {"transformers", "datasets", "huggingface_hub", "matplotlib", "pyarrow", "readline"}
    heavy.add("torch._dynamo")  # the compiler, which takes as long to import as the rest of torch
    assert not loaded & heavy


def test_a_continuation_starts_as_every_document_does(heard):
    assert "".join(chat.complete(random_model("base"), "Hello", settings())) == "Hello ok"
    assert heard == [[END_OF_TEXT, *encode("Hello")]]


def test_the_end_of_input_leaves_and_a_wrong_model_is_one_line(folders, monkeypatch, capsys, tmp_path):
    assert call_chat(monkeypatch, capsys, f"--model={folders['chat']}") == ("", "")
    words, half_characters = [f"--model={folders['chat']}", "--max_new_tokens=3"], b"\xff\xe6\nhi \xe6\x97\n"
    out, err = call_chat(monkeypatch, capsys, *words, stdin=half_characters)
    assert out.count("\n") >= 2 and err == ""
    with pytest.raises(UserError, match="out/there/is/none"):
        call_chat(monkeypatch, capsys, "--model=out/there/is/none", stdin=b"hi")
    toy = gpt.GPTConfig(block_size=16, n_layer=1, n_head=1, n_embd=8, vocab_size=100)
    gpt.save_model(gpt.GPT(toy), tmp_path)
    with pytest.raises(UserError, match="100 tokens in its vocabulary"):
        call_chat(monkeypatch, capsys, f"--model={tmp_path}", stdin=b"hi")


def test_compare_prints_a_table_with_a_column_for_each_model(folders, monkeypatch, capsys):
    words = ["--max_new_tokens=9", "--compare", folders["base"], folders["chat"]]
    prompts, generate = [], chat.generate

    def overheard(model, ids, **options):
        prompts.append(gpt.decode(ids))
        return generate(model, ids, **options)

    monkeypatch.setattr(chat, "generate", overheard)
    table = call_chat(monkeypatch, capsys, *words).out
    rows = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in table.splitlines()]
    questions = (ROOT / "configs" / "questions.txt").read_text(encoding="utf-8").splitlines()
    assert [row[0] for row in rows] == ["question", "---", *questions] and {len(row) for row in rows} == {3}
    assert "base, step 1,234" in rows[0][1] and "chat, step 1,234" in rows[0][2]
    follow_up = next(i for i, question in enumerate(questions) if question.startswith("and then:"))
    for n, column in ((0, "Question: {}\nAnswer:"), (len(questions), "<|user|>{}<|end|><|assistant|>")):
        assert prompts[n + follow_up].startswith(prompts[n + follow_up - 1].rstrip("\n"))
        assert prompts[n + follow_up].endswith(column.format(questions[follow_up].removeprefix("and then: ")))
        assert prompts[n + follow_up + 1].count(column[:8]) == 1
    assert call_chat(monkeypatch, capsys, *words).out == table


def test_a_cell_cannot_break_its_table():
    line = chat.table(["a | b\n<b>\\"], []).splitlines()[0]
    assert line == "| a \\| b<br>\\<b>\\\\ |"


def test_chat_needs_only_configs_and_model():
    tree = ast.parse((ROOT / "chat.py").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {path.stem for path in ROOT.glob("*.py")} & imported <= {"model"}


# ------------------------------------------------------------------------------------------------------------
# The program, in a terminal


class Terminal:
    """chat.py under a pseudo-terminal of 40 columns, with its output to a file if `to` names one."""

    def __init__(self, *words, to=None, **environment):
        import fcntl
        import pty
        import struct
        import termios

        self.pid, self.screen = pty.fork()
        if not self.pid:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 40, 0, 0))
            if to:
                os.dup2(os.open(to, os.O_WRONLY | os.O_CREAT), 1)
            command = [sys.executable, str(ROOT / "chat.py"), *words]
            os.execve(command[0], command, os.environ | environment)
        self.seen = ""

    def type(self, keys):
        os.write(self.screen, keys.encode())

    def read(self):
        """Takes in what is there, or comes within a minute; False at the end."""
        if not select.select([self.screen], [], [], 60)[0]:
            os.kill(self.pid, signal.SIGKILL)
            pytest.fail(f"nothing more came after {self.seen!r}")
        try:
            self.seen += os.read(self.screen, 65536).decode(errors="replace")
            return True
        except OSError:  # EIO: the other side has closed
            return False

    def wait_for(self, text):
        """What came up to `text`, which is then behind us."""
        while text not in self.seen:
            assert self.read(), f"no {text!r} came, but {self.seen!r}"
        shown, _, self.seen = self.seen.partition(text)
        return shown

    def exit_code(self):
        while self.read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


needs_pty = pytest.mark.skipif(not hasattr(os, "fork"), reason="no pseudo-terminal here")


@needs_pty
def test_in_a_terminal_ctrl_c_stops_an_answer_and_leaves_at_the_prompt(folders):
    terminal = Terminal(f"--model={folders['chat']}", "--max_new_tokens=9999", "--temperature=2", "--seed=7",
                        TERM="dumb")
    greeting = terminal.wait_for("You: ")
    assert f"{folders['chat']}: chat model, step 1,234" in greeting and "base model" not in greeting

    terminal.type("tell me a long story\r")
    terminal.wait_for("GPT-2: ")
    for _ in range(20):  # it streams: the answer comes in many parts
        assert terminal.read()
    terminal.type("\x03")
    assert "Traceback" not in terminal.wait_for("(stopped)")
    terminal.wait_for("You: ")

    terminal.type("/stats\r")
    assert "1 questions" in terminal.wait_for("You: ")
    terminal.type("/set max_new_tokens=5\r")
    terminal.wait_for("You: ")
    terminal.type("\x10\x10\x10\r")  # Ctrl-P three times: the history goes back to the story
    shown = terminal.wait_for("Cut after 5 tokens")
    assert "tell me a long story" in shown.replace("\r", "")
    terminal.wait_for("You: ")
    time.sleep(0.5)  # Python's readline is deaf between the prompt and its select(); nobody types that fast
    terminal.type("\x03")
    assert terminal.exit_code() == 0 and "Traceback" not in terminal.seen


@needs_pty
def test_with_output_to_a_file_the_terminal_keeps_all_but_the_answers(folders, tmp_path):
    answers = tmp_path / "answers.txt"
    terminal = Terminal(f"--model={folders['base']}", "--max_new_tokens=5", to=answers, TERM="xterm")
    assert "A base model" in terminal.wait_for("You: ")
    terminal.type("hello\r")
    terminal.wait_for("You: ")
    terminal.type("\x04")  # Ctrl-D
    assert terminal.exit_code() == 0
    written = answers.read_text(encoding="utf-8")
    assert written.strip() and not any(word in written for word in ("You:", "GPT-2:", "hello", "base model"))


@needs_pty
def test_ctrl_c_ends_a_piped_or_one_shot_answer_without_a_traceback(folders):
    words = [f"--model={folders['chat']}", "--prompt=hi", "--temperature=2", "--max_new_tokens=99999"]
    child = subprocess.Popen([sys.executable, str(ROOT / "chat.py"), *words],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and err == b""
