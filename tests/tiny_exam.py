"""Asks the tiny world's model every held-out question through the real chat, and marks the answers.

    python train.py configs/tiny && python sft.py configs/tiny && python tests/tiny_exam.py

Prints the marks for each kind of question and exits with 1 if they are below what the project promises. About
a minute.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import chat
from configs import load, run
from configs.tiny import world

PROMISED = {"facts": 0.90, "follow-ups": 0.80, "sums": 0.60, "later": 0.60, "ended": 0.99}
LATER = 6  # questions that stand before one that is asked later


def examine(talk, conversation, before=()):
    """(right, ended) of one held-out conversation: its user turns are put one by one, after the questions
    `before`, and the last answer is marked."""
    talk.messages = []
    turns = [message["content"] for message in conversation["messages"]]
    for question in [*before, *turns[0::2]]:
        answer = "".join(talk.reply(question))
    return answer.strip() == turns[-1], talk.stats["ended"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="out/tiny_sft/model")
    parser.add_argument("base", nargs="?", default="out/tiny/model")
    words = parser.parse_args()
    config = load(chat.Config, "chat", ["configs/tiny", f"--model={words.model}"])
    talk = chat.Chat(chat.open_model(words.model, config)[0], config)
    questions = world.conversations("test")
    marks = defaultdict(list)
    for conversation in questions:
        right, ended = examine(talk, conversation)
        kind = {"sum": "sums", "follow_up": "follow-ups"}.get(conversation["source"], "facts")
        marks[kind].append(right)
        marks["ended"].append(ended)
        if kind == "facts":
            marks["  " + conversation["source"]].append(right)
    for number in range(0, len(questions), 7):  # some of every kind
        # others from far away in the list, which is sorted by kind
        before = [questions[number - 41 * i]["messages"][0]["content"] for i in range(1, LATER + 1)]
        marks["later"].append(examine(talk, questions[number], before)[0])
    talk = chat.Chat(chat.open_model(words.base, config)[0], config)
    base_ended = [examine(talk, conversation)[1] for conversation in questions[::20]]

    for kind, results in sorted(marks.items()):
        wanted = f"  (promised: {PROMISED[kind]:.0%})" if kind in PROMISED else ""
        print(f"{kind:14} {sum(results):4d} of {len(results):4d}  {sum(results) / len(results):7.1%}{wanted}")
    print(f"the base model ended {sum(base_ended)} of {len(base_ended)} replies by itself")
    failed = [kind for kind, wanted in PROMISED.items() if sum(marks[kind]) < wanted * len(marks[kind])]
    if failed or sum(base_ended) > len(base_ended) / 2:
        sys.exit(f"below what is promised: {', '.join(failed) or 'the base model stops by itself'}")


if __name__ == "__main__":
    run(main)
