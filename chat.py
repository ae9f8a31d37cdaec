"""Talk in the terminal to any GPT-2 folder: ours after sft.py, a base model, or OpenAI's.

Reads   a model folder: config.json and model.safetensors
Writes  answers to stdout and all else to stderr, so that a pipe or a file receives only answers

        python chat.py                                             a conversation; /help lists its commands
        python chat.py --prompt="What is the capital of France?"   one answer
        python chat.py --complete --prompt="Hello, I'm a language model," --n=5
        python chat.py --compare out/train/model out/sft/model     before and after, as a Markdown table

Time    seconds to start, most of them `import torch`; then each turn reads only what is new in it
"""

import bisect
import codecs
import contextlib
import dataclasses
import os
import re
import signal
import sys
import time
from dataclasses import dataclass

# first, as it explains a package that is missing
from configs import FOLDER, UserError, load, parse, run

# isort: split
import torch

from model import (
    END,
    END_OF_TEXT,
    SYSTEM,
    KVCache,
    check_sampling,
    decode,
    encode,
    generate,
    load_model,
    pick_device,
    pick_dtype,
    question_prompt,
    render_chat,
    store_by_input,
    token_bytes,
)


@dataclass
class Config:
    model: str
    device: str
    prompt: str
    complete: bool
    compare: list[str]
    n: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int
    max_new_tokens: int


SETTABLE = ("temperature", "top_k", "top_p", "repetition_penalty", "seed", "max_new_tokens")
HELP = """\
/reset             forget the conversation (a system turn stays)
/system text       tell the model how to behave; /system alone takes that back
/set name=value    change how it answers; /set alone shows the values
/stats             the size of the conversation and the speed of the last answer
/quit              leave, as Ctrl-D does
Ctrl-C stops an answer; at the prompt it leaves. A line with a space before its / goes to the model."""

# ------------------------------------------------------------------------------------------------------------
# The conversation


class Chat:
    """A conversation with one model.

    messages  its turns, [{"role", "content"}, ...]; a stopped or cut answer is a turn like any other
    cache     the keys and values of what the model has read, to which the next turn adds
    stats     of the last answer: tokens kept from before, read and written, seconds, ended by itself or not
    """

    def __init__(self, model, config):
        self.model, self.config = model, config
        self.is_base = model.info["kind"] != "chat"
        self.cache = KVCache(model)
        self.messages, self.stats, self.has_warned = [], {}, False

    def reset(self):
        """Forgets every turn but the system's."""
        self.messages, self.has_warned = [m for m in self.messages if m["role"] == "system"], False
        self.cache.length, self.cache.tokens = 0, []

    def set_system(self, text):
        """Opens the conversation with a system turn, in place of any that it has; "" takes it away."""
        turns = [m for m in self.messages if m["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *turns] if text else turns

    def render(self, messages):
        """The ids after which the model answers, in the form that its kind has learned."""
        return question_prompt(messages) if self.is_base else render_chat(messages, reply=True)

    def reply(self, text, nth=0):
        """Takes in a message; returns the answer as a generator of text, one piece for each token.

        nth  0 for the first of several answers to the same message: each draws with its own seed

        What was said until the generator is closed stays in the conversation. Raises UserError, at once or
        from the generator, for settings or weights that give no answer; the message is then forgotten.
        """
        options, block_size = sampling(self.config, nth), self.model.config.block_size
        room = block_size - min(self.config.max_new_tokens, block_size // 2)
        asked = [*self.messages, {"role": "user", "content": text}]
        messages, n_dropped, is_cut = fit(asked, room, self.render)
        ids = self.render(messages)
        if len(ids) >= block_size:
            raise UserError(f"this model's context of {block_size} tokens is too short for a conversation")
        if n_dropped and not self.has_warned:
            tell("(The conversation has outgrown the model's context: its oldest turns are forgotten.)")
            self.has_warned = True
        if is_cut:
            tell(f"(There is room for {room} tokens: only the beginning of what is longer was read.)")
        options["max_new_tokens"] = min(self.config.max_new_tokens, block_size - len(ids))
        return self.answer(messages, ids, options)

    def answer(self, messages, ids, options):
        tokens = generate(self.model, ids, stop=(END, END_OF_TEXT), cache=self.cache, **options)
        pieces, text = text_of(self.measured(tokens, ids)), ""
        if self.is_base:
            pieces = until(pieces, "\nQuestion:")  # it would go on to ask itself
        with contextlib.suppress(GeneratorExit):
            for piece in pieces:
                piece = piece if text else piece.lstrip()
                text += piece
                yield piece
        self.messages = [*messages, {"role": "assistant", "content": text}]

    def measured(self, tokens, ids):
        """Passes on the ids of an answer and keeps `stats` of them."""
        start_s = time.perf_counter()
        n_kept = len(os.path.commonprefix([self.cache.tokens, ids]))  # of lists as well as of paths
        self.stats = {"kept": n_kept, "read": len(ids) - n_kept, "written": 0, "ended": False}
        for id in tokens:
            self.stats["all_s"] = time.perf_counter() - start_s
            self.stats.setdefault("first_s", self.stats["all_s"])
            self.stats["written"] += 1
            self.stats["ended"] = id in (END, END_OF_TEXT)
            yield id


def fit(messages, room, render):
    """(messages, number dropped, is cut): the part of a conversation that renders to at most `room` tokens.

    The oldest questions go, each with its answer; the system turn and the last message stay. A last message
    that does not fit alone is cut, as is a system turn that would leave it less than half of the room.
    """
    if len(render(messages)) <= room:
        return messages, 0, False
    system, turns = messages[:1], messages[1:]
    if system[0]["role"] != "system":
        system, turns = [], messages
    system = [shorten(message, room // 2, lambda m: render([m])) for message in system]
    # Down to three quarters, not just below the limit: what is left moves to new positions and is read again,
    # which should not happen at every turn from here on.
    while len(turns) > 1 and len(render(system + turns)) > room * 3 // 4:
        turns = turns[2:]
    kept = [*system, *turns[:-1], shorten(turns[-1], room, lambda m: render([*system, *turns[:-1], m]))]
    is_cut = kept[-1] != messages[-1] or kept[:len(system)] != messages[:len(system)]
    return kept, len(messages) - len(kept), is_cut


def shorten(message, room, render):
    """`message` with the longest beginning of its text that renders to at most `room` tokens."""
    if len(render(message)) <= room:
        return message
    text = decode(encode(message["content"])[:room]).rstrip("\ufffd")  # more than this cannot fit
    sizes = range(len(text))
    end = bisect.bisect_right(sizes, room, key=lambda n: len(render(message | {"content": text[:n]})))
    return message | {"content": text[:max(end - 1, 0)]}


def sampling(config, nth=0):
    """generate()'s arguments from the settings. Raises UserError for a value that means nothing."""
    check_sampling(config.temperature, config.top_k, config.top_p, config.repetition_penalty)
    if config.max_new_tokens < 1:
        raise UserError(f"max_new_tokens = {config.max_new_tokens} must be 1 or more, e.g. 256")
    if not 0 <= config.seed < 2**62:
        raise UserError(f"seed = {config.seed} must be 0 (new each time) or a number below 2**62, e.g. 7")
    options = {name: getattr(config, name) for name in SETTABLE}
    return options | {"seed": config.seed + nth if config.seed else None}


# ------------------------------------------------------------------------------------------------------------
# Text from tokens


def text_of(ids):
    """Yields the text of each id as soon as it is whole: a character may be spread over several tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for id in ids:
        yield decoder.decode(token_bytes(id))
    yield decoder.decode(b"", final=True)


def until(pieces, stop):
    """Yields `pieces` up to the text `stop`; what may turn out to be its beginning is held back."""
    held = ""
    for piece in pieces:
        text, found, _ = (held + piece).partition(stop)
        if found:
            yield text
            return
        n_held = next(n for n in range(len(stop), -1, -1) if text.endswith(stop[:n]))
        text, held = text[:len(text) - n_held], text[len(text) - n_held:]
        yield text
    yield held


def complete(model, text, config, nth=0):
    """Yields `text` and then what the model continues it with, piece by piece."""
    ids = [END_OF_TEXT, *encode(text)]  # every document that it has read began like this
    yield text
    yield from text_of(generate(model, ids, stop=(END, END_OF_TEXT), **sampling(config, nth)))


# ------------------------------------------------------------------------------------------------------------
# The terminal

# A model can write any byte. Those that move the cursor, ring or change colours stay out of the terminal.
HIDDEN = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def tell(text, end="\n"):
    """For the person, not for the pipe."""
    print(text.translate(HIDDEN), end=end, file=sys.stderr, flush=True)


def show(pieces, interactive=False):
    """Prints text as it comes. In a conversation Ctrl-C ends the text and not the program; True if it did."""
    pressed = []
    if interactive:
        # A flag, and no KeyboardInterrupt: the token in the making is finished and the cache stays whole.
        # Afterwards the key does nothing until the prompt: a late one should not cost the conversation.
        signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        for piece in pieces:
            print(piece.translate(HIDDEN), end="", flush=True)
            if pressed:
                break
    finally:
        pieces.close()
        if interactive:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(flush=True)
    return bool(pressed)


def read_line(prompt, interactive):
    """One line without its newline; None when the input ends or, in a conversation, at Ctrl-C."""
    if not interactive:
        with contextlib.suppress(EOFError):
            return input()
        return None
    if not sys.stdout.isatty():
        tell(prompt, end="")  # input() would write it into the file with the answers
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return input(prompt if sys.stdout.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        tell("")  # the shell's prompt gets a line of its own
        return None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # see show()


def converse(chat, interactive=False):
    """Answers line after line until the input ends. A line that starts with / is a command."""
    while (line := read_line("You: ", interactive)) is not None:
        try:
            if line.startswith("/"):
                if obey(chat, line) == "quit":
                    return
            elif line.strip():
                respond(chat, line, interactive)
        except UserError as error:
            tell(f"error: {error}")


def respond(chat, line, interactive):
    pieces = chat.reply(line)
    if interactive:
        tell("GPT-2: ", end="")
    is_stopped = show(pieces, interactive)
    if interactive and is_stopped:
        tell("(stopped)")
    elif interactive and not chat.stats["ended"] and not chat.is_base:
        tell(f"(Cut after {chat.stats['written']} tokens: max_new_tokens or the context allows no more.)")


def obey(chat, line):
    """Carries out a command; returns "quit" for /quit. Raises UserError for what it does not understand."""
    name, argument = (*line[1:].split(maxsplit=1), "", "")[:2]
    match name:
        case "quit":
            return "quit"
        case "help":
            tell(HELP)
        case "reset":
            chat.reset()
            tell("A new conversation.")
        case "system":
            chat.set_system(argument.strip())
            tell("The system turn is set." if argument.strip() else "There is no system turn now.")
        case "set":
            shown = [change(chat.config, argument)] if argument else SETTABLE
            tell("\n".join(f"{name} = {getattr(chat.config, name)}" for name in shown))
        case "stats":
            tell(report(chat))
        case _:
            raise UserError(f"there is no command /{name}; /help lists them")


def change(config, assignment):
    """Carries out /set name=value and returns the name; UserError, and no change, for what means nothing."""
    name, _, value = (part.strip() for part in assignment.partition("="))
    if name not in SETTABLE:
        raise UserError(f"/set changes {', '.join(SETTABLE)}, as in /set temperature=0; not {name!r}")
    changed = dataclasses.replace(config, **{name: parse(Config, name, value, where=None)})
    sampling(changed)
    setattr(config, name, getattr(changed, name))
    return name


def report(chat):
    """The lines of /stats."""
    n_questions, s = sum(m["role"] == "user" for m in chat.messages), chat.stats
    block_size = chat.model.config.block_size
    text = f"{n_questions} questions; {len(chat.cache.tokens):,} of {block_size:,} tokens of context in use"
    if not s.get("written"):
        return text
    text += (f"\nlast answer: {s['kept']} tokens kept from before, {s['read']} read, first word after "
             f"{s['first_s']:.2f} s, {s['written']} tokens in {s['all_s']:.2f} s")
    if s["written"] > 1:
        text += f", {(s['written'] - 1) / (s['all_s'] - s['first_s']):.1f} a second"
    return text


# ------------------------------------------------------------------------------------------------------------
# Before and after


def compare(config):
    """Prints a Markdown table: a row for each question, a column for each model's answer."""
    asked = [config.prompt] if config.prompt else read_questions()
    config.seed = config.seed or 1  # so that all draw with the same luck, and the table can be had again
    header, columns = ["question"], [asked]
    for name in config.compare:
        model, about = open_model(name, config)
        tell(about)
        header.append(f"{name} ({model.info['kind']}, step {model.info['step']:,})")
        columns.append(answers(Chat(model, config), asked))
    print(table(header, zip(*columns)), end="")


def read_questions():
    """The lines of configs/questions.txt, which anyone may edit, in any editor."""
    return (FOLDER / "questions.txt").read_text(encoding="utf-8-sig", errors="replace").splitlines()


def answers(chat, questions):
    """What the model says to each; "and then:" goes on in the conversation of the question above."""
    texts = []
    for question in questions:
        if not question.startswith("and then:"):
            chat.reset()
        text = "".join(chat.reply(question.removeprefix("and then:").strip())).strip()
        texts.append(text if chat.stats["ended"] else text + " ...")
    return texts


def table(header, rows):
    """Texts as a Markdown table."""
    def cell(text):
        return re.sub(r"[\\|<]", r"\\\g<0>", text.translate(HIDDEN)).replace("\n", "<br>")

    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


# ------------------------------------------------------------------------------------------------------------


def open_model(name, config):
    """(model, a line about it) for a folder; UserError if there is no GPT-2 in it."""
    device = pick_device(config.device)
    dtype, why = pick_dtype(device, training=False)
    model = load_model(name, device, dtype)
    if device.type == "cpu" and dtype == torch.float32:
        store_by_input(model)
    if model.config.vocab_size <= SYSTEM:
        raise UserError(f"{name} has {model.config.vocab_size} tokens in its vocabulary; GPT-2's has 50,257")
    info, n_million = model.info, sum(p.numel() for p in model.parameters()) / 1e6
    step = f", step {info['step']:,}" if info["step"] else ""
    return model, (f"{info['path']}: {info['kind']} model{step}, {info['date']}, {n_million:.1f}M weights; "
                   f"{device.type}, {str(dtype).removeprefix('torch.')} ({why})")


def check(config):
    """Raises UserError for settings that mean nothing or do not go together."""
    sampling(config)
    if config.n < 1:
        raise UserError(f"n = {config.n} must be 1 or more")
    if config.n > 1 and not config.prompt and not config.complete:
        raise UserError(f"n = {config.n} needs --prompt=... or --complete: a chat has one answer a turn")
    if len(config.compare) == 1:
        raise UserError(f"--compare needs two models, as in --compare out/train/model {config.compare[0]}")
    if config.compare and (config.complete or config.n > 1):
        raise UserError("--compare asks each question once; it does not go with --complete or --n")
    if not config.prompt and not config.compare and sys.stdin is None:
        raise UserError("there is no standard input to read from; --prompt=... answers one message")


def main():
    config = load(Config, "chat")
    check(config)
    if config.compare:
        return compare(config)
    model, about = open_model(config.model, config)

    def give(text, interactive=False):
        for nth in range(config.n):
            print("---\n" if nth else "", end="")
            chat = Chat(model, config)
            pieces = complete(model, text, config, nth) if config.complete else chat.reply(text, nth)
            if show(pieces, interactive):
                break

    if config.prompt:
        return give(config.prompt)
    interactive = sys.stdin.isatty()
    sys.stdin.reconfigure(errors="replace")  # half a character in the input is not worth stopping for
    if not interactive and not os.environ.get("PYTHONIOENCODING"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # on Windows, too
    if interactive:
        tell(about)
        if model.info["kind"] != "chat" and not config.complete:
            tell("A base model: it continues text and was never taught to answer, so it is asked as "
                 "`Question: ... Answer:`.")
        tell("Ctrl-C stops the model; Ctrl-D (on Windows Ctrl-Z and Enter) leaves"
             + ("." if config.complete else "; /help lists the commands."))
        with contextlib.suppress(ImportError):  # gives input() its keys and history; Windows has its own
            import readline  # noqa: F401
    if not config.complete:
        return converse(Chat(model, config), interactive)
    while (line := read_line("Text: ", interactive)) is not None:
        if line.strip():
            give(line, interactive)


if __name__ == "__main__":
    run(main)
