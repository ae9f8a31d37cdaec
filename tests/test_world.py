"""configs/tiny/world.py: its facts, what is held out, and that each question has one right answer."""

import ast
import collections
import hashlib
import json
import os
import re
import subprocess
import sys

from conftest import ROOT

from configs.tiny import world
from model import encode, render_chat, supervised

TRAIN, TEST = world.conversations("train"), world.conversations("test")


def questions(rows):
    return {turn["content"] for row in rows for turn in row["messages"] if turn["role"] == "user"}


def words(texts):
    return {word for text in texts for word in re.findall(r"\w+", text)}


def test_the_world_is_as_large_as_announced():
    assert len(world.COUNTRIES) >= 20 and all(len(set(fact.values())) == 5 for fact in world.COUNTRIES)
    assert len(world.ANIMALS) >= 8 and len(world.PEOPLE) >= 8 and len(world.FRENCH) >= 15
    assert {(fact["a"], fact["b"]) for fact in world.SUMS} == {(a, b) for a in range(10) for b in range(10)}
    assert all(fact["total"] == fact["a"] + fact["b"] for fact in world.SUMS)
    assert len({fact["city"] for fact in world.COUNTRIES}) == len(world.COUNTRIES)


def test_every_process_makes_the_same_world():
    code = ("import hashlib, json; from configs.tiny import world as w; print(hashlib.sha256(json.dumps("
            "[w.documents(), w.conversations('train'), w.conversations('test'), w.hellaswag_items()]"
            ").encode()).hexdigest())")
    made = [subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
                           capture_output=True, text=True, check=True).stdout.strip() for seed in ("1", "2")]
    here = [world.documents(), TRAIN, TEST, world.hellaswag_items()]
    assert made == [hashlib.sha256(json.dumps(here).encode()).hexdigest()] * 2


def test_it_needs_the_standard_library_only():
    tree = ast.parse((ROOT / "configs" / "tiny" / "world.py").read_text(encoding="utf-8"))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert all(name.split(".")[0] in sys.stdlib_module_names for name in imported)


def test_each_kind_keeps_three_whole_wordings_out_of_training():
    asked = {wording for kind in [*world.KINDS.values(), *world.FOLLOW_UPS] for wording in kind.asked}
    for kind in [*world.KINDS.values(), *world.FOLLOW_UPS]:
        assert len(set(kind.held_out)) == 3 and not asked & set(kind.held_out)


def test_no_test_question_is_in_training_or_in_the_documents():
    asked = {row["messages"][-2]["content"] for row in TEST}
    assert len(TEST) >= 300 and len(asked) >= 300
    assert not asked & questions(TRAIN)
    texts = "\n".join(world.documents())
    assert not [question for question in asked if f"Question: {question}" in texts]


def test_a_test_question_is_made_of_words_from_training():
    assert not words(row["messages"][-2]["content"] for row in TEST) - words(questions(TRAIN))


def test_every_fact_that_is_tested_is_taught():
    taught = {turn["content"] for row in TRAIN for turn in row["messages"] if turn["role"] == "assistant"}
    assert not {row["messages"][-1]["content"] for row in TEST} - taught


def test_a_question_has_one_right_answer():
    answers = collections.defaultdict(set)
    for kind in world.KINDS.values():
        for wording in kind.asked + kind.held_out:
            for fact in kind.facts:
                answers[wording.format(**fact)].add(kind.answer.format(**fact))
    for row in TRAIN + TEST:  # in the words around them, too
        turns = [turn for turn in row["messages"] if turn["role"] != "system"]
        answers[turns[0]["content"]].add(turns[1]["content"])
    assert not [question for question, right in answers.items() if len(right) > 1]


def test_a_follow_up_cannot_be_answered_without_the_turn_before():
    assert sum(row["source"] == "follow_up" for row in TEST) >= 100
    for pair in world.FOLLOW_UPS:
        facts = world.KINDS[pair.first].facts
        for wording in pair.asked + pair.held_out:
            right = collections.defaultdict(set)
            for fact in facts:
                right[wording.format(**fact)].add(world.KINDS[pair.second].answer.format(**fact))
            assert all(len(answers) >= 3 for answers in right.values())


def test_conversations_are_well_formed_and_short():
    for row in TRAIN + TEST:
        roles = [turn["role"] for turn in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) and turns
        assert all(turn["content"].strip() == turn["content"] != "" for turn in row["messages"])
    lengths = [len(render_chat(row["messages"])) for row in TRAIN + TEST]
    assert max(lengths) <= 256
    assert all(supervised(render_chat(row["messages"])).any() for row in TEST)
    assert any(row["messages"][0]["role"] == "system" for row in TRAIN)


def test_the_documents_are_an_epoch_or_two_of_a_short_run():
    texts = world.documents()
    assert 300_000 < sum(len(encode(text)) + 1 for text in texts) < 600_000
    assert len(set(texts)) == len(texts)
    assert not re.search(r"[{}]", "".join(texts)), "a template was not filled in"
    assert sum("Question:" in text and "Answer:" in text for text in texts) >= 300


def test_the_items_have_hellaswags_columns_and_give_nothing_away_by_place_or_length():
    items = world.hellaswag_items()
    columns = {"ind", "activity_label", "ctx_a", "ctx_b", "ctx", "endings", "source_id",
               "split", "split_type", "label"}
    assert len(items) >= 200 and all(set(item) == columns for item in items)
    assert all(len(set(item["endings"])) == 4 for item in items)
    assert all(item["ctx"] == f"{item['ctx_a']} {item['ctx_b']}".strip() for item in items)
    places = collections.Counter(item["label"] for item in items)
    assert set(places) == set("0123") and max(places.values()) < 0.32 * len(items)
    for pick in (min, max):
        picked = [item["endings"].index(pick(item["endings"], key=len)) for item in items]
        hits = sum(place == int(item["label"]) for place, item in zip(picked, items))
        assert hits < 0.35 * len(items)
