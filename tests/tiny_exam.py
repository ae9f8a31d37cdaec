"""Asks the tiny world's model every held-out question through the real chat, and marks the answers.

    python train.py configs/tiny && python sft.py configs/tiny && python tests/tiny_exam.py

Prints the marks for each kind of question and exits with 1 if they are below what the project promises. About
a minute.
"""

import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import chat
from configs import load, run
from configs.tiny import world

PROMISED = {"facts": 0.90, "follow-ups": 0.80, "sums": 0.50, "ended": 0.99}


def examine(talk, conversation):
    """(right, ended) of one held-out conversation: its user turns are put one by one, the last answer is
    marked."""
    talk.messages = []
    turns = [message["content"] for message in conversation["messages"]]
    for question in turns[0::2]:
        answer = "".join(talk.reply(question))
    return answer.strip() == turns[-1], talk.stats["ended"]


def main(model="out/tiny_sft/model", base="out/tiny/model"):
    config = load(chat.Config, "chat", ["configs/tiny", f"--model={model}"])
    talk = chat.Chat(chat.open_model(model, config)[0], config)
    marks = defaultdict(list)
    for conversation in world.conversations("test"):
        right, ended = examine(talk, conversation)
        kind = {"sum": "sums", "follow_up": "follow-ups"}.get(conversation["source"], "facts")
        marks[kind].append(right)
        marks["ended"].append(ended)
        if kind == "facts":
            marks["  " + conversation["source"]].append(right)
    talk = chat.Chat(chat.open_model(base, config)[0], config)
    base_ended = [examine(talk, conversation)[1] for conversation in world.conversations("test")[::20]]

    for kind, results in sorted(marks.items()):
        wanted = f"  (promised: {PROMISED[kind]:.0%})" if kind in PROMISED else ""
        print(f"{kind:14} {sum(results):4d} of {len(results):4d}  {sum(results) / len(results):7.1%}{wanted}")
    print(f"the base model ended {sum(base_ended)} of {len(base_ended)} replies by itself")
    failed = [kind for kind, wanted in PROMISED.items() if sum(marks[kind]) < wanted * len(marks[kind])]
    if failed or sum(base_ended) > len(base_ended) / 2:
        sys.exit(f"below what is promised: {', '.join(failed) or 'the base model stops by itself'}")


if __name__ == "__main__":
    run(lambda: main(*sys.argv[1:]))
