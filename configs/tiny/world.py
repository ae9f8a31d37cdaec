"""A small world of true facts, in English: what the tiny model reads, is asked and is scored on.

Countries, animals, sums, French words, people, and who the model is. The same facts come out three ways, in
the layouts of the full-size data: documents (FineWeb-Edu's text), conversations (smol-smoltalk's messages),
items with four endings (HellaSwag's columns). Nothing is read, downloaded or written, and every call returns
the same. `source = "tiny"` in prepare_fineweb.py, sft.py and hellaswag.py means this file.

A fact is learned from many wordings and asked for in others: each kind of question keeps three whole wordings
out of training, for the test. Each kind has one wording of the answer, so that an answer is right or wrong.
"""

import random
from typing import NamedTuple

N_DOCUMENTS = 3000
N_CONVERSATIONS = 6000

# -----------------------------------------------------------------------------
# the facts

def table(columns, rows):
    return [dict(zip(columns.split(), row)) for row in rows]


COUNTRIES = table("country city population language sight", [  # populations are of about 2023, rounded
    ("France", "Paris", "68 million", "French", "the Eiffel Tower"),
    ("Germany", "Berlin", "84 million", "German", "the Brandenburg Gate"),
    ("Japan", "Tokyo", "124 million", "Japanese", "the Imperial Palace"),
    ("Italy", "Rome", "59 million", "Italian", "the Colosseum"),
    ("Spain", "Madrid", "48 million", "Spanish", "the Prado Museum"),
    ("Greece", "Athens", "10 million", "Greek", "the Acropolis"),
    ("Egypt", "Cairo", "114 million", "Arabic", "the Egyptian Museum"),
    ("Kenya", "Nairobi", "55 million", "Swahili", "the Railway Museum"),
    ("Mexico", "Mexico City", "130 million", "Spanish", "the Angel of Independence"),
    ("Brazil", "Brasilia", "211 million", "Portuguese", "the Alvorada Palace"),
    ("Argentina", "Buenos Aires", "46 million", "Spanish", "the Obelisk"),
    ("Chile", "Santiago", "20 million", "Spanish", "San Cristobal Hill"),
    ("Australia", "Canberra", "27 million", "English", "Lake Burley Griffin"),
    ("Norway", "Oslo", "6 million", "Norwegian", "the Opera House"),
    ("Sweden", "Stockholm", "11 million", "Swedish", "the Vasa Museum"),
    ("Poland", "Warsaw", "38 million", "Polish", "the Royal Castle"),
    ("Austria", "Vienna", "9 million", "German", "the Ringstrasse"),
    ("Hungary", "Budapest", "10 million", "Hungarian", "the Chain Bridge"),
    ("Turkey", "Ankara", "85 million", "Turkish", "Ankara Castle"),
    ("Russia", "Moscow", "144 million", "Russian", "Red Square"),
    ("China", "Beijing", "1.4 billion", "Chinese", "the Forbidden City"),
    ("Thailand", "Bangkok", "72 million", "Thai", "the Grand Palace"),
    ("Vietnam", "Hanoi", "100 million", "Vietnamese", "the Temple of Literature"),
    ("England", "London", "58 million", "English", "Tower Bridge"),
])
ANIMALS = table("animal noise food young", [
    ("cow", "moos", "grass", "calf"),
    ("dog", "barks", "meat", "puppy"),
    ("cat", "meows", "fish", "kitten"),
    ("duck", "quacks", "seeds", "duckling"),
    ("horse", "neighs", "hay", "foal"),
    ("sheep", "bleats", "clover", "lamb"),
    ("lion", "roars", "zebras", "cub"),
    ("frog", "croaks", "insects", "tadpole"),
    ("pig", "grunts", "roots", "piglet"),
    ("wolf", "howls", "deer", "pup"),
])
PEOPLE = table("name he year deed", [
    ("Albert Einstein", "he", "1879", "a physicist from Germany who found the theory of relativity"),
    ("Marie Curie", "she", "1867", "a scientist from Poland who discovered radium"),
    ("Charles Darwin", "he", "1809", "a scientist from England who explained evolution"),
    ("William Shakespeare", "he", "1564", "a writer from England who wrote Hamlet"),
    ("Leonardo da Vinci", "he", "1452", "a painter from Italy who painted the Mona Lisa"),
    ("Ludwig van Beethoven", "he", "1770", "a composer from Germany who wrote nine symphonies"),
    ("Ada Lovelace", "she", "1815", "a mathematician from England who wrote the first computer program"),
    ("Jane Austen", "she", "1775", "a writer from England who wrote Pride and Prejudice"),
    ("Frida Kahlo", "she", "1907", "a painter from Mexico who painted herself many times"),
    ("Alan Turing", "he", "1912", "a mathematician from England who broke the Enigma code"),
])
FRENCH = table("english french", [
    ("Good morning", "Bonjour"), ("no", "non"), ("Thank you", "Merci"), ("yes", "oui"),
    ("cat", "chat"), ("dog", "chien"), ("house", "maison"), ("water", "eau"), ("bread", "pain"),
    ("cheese", "fromage"), ("milk", "lait"), ("apple", "pomme"), ("book", "livre"), ("sun", "soleil"),
    ("tree", "arbre"), ("friend", "ami"), ("red", "rouge"), ("day", "jour"),
])  # fmt: skip
SUMS = [{"a": a, "b": b, "total": a + b} for a in range(10) for b in range(10)]
SELF = [{}]

# -----------------------------------------------------------------------------
# the wordings


class Kind(NamedTuple):
    """One kind of fact: how texts state it, how it is asked, three wordings kept for the test, the answer."""

    facts: list
    stated: list
    asked: list
    held_out: list
    answer: str


KINDS = {
    "capital": Kind(
        COUNTRIES,
        ["The capital of {country} is {city}.", "{city} is the capital of {country}.",
         "The capital city of {country} is called {city}.", "{country} is governed from {city}.",
         "The government of {country} sits in {city}, the capital.",
         "Anyone who asks for the capital of {country} will be sent to {city}."],
        ["What is the capital of {country}?", "What's the capital of {country}?",
         "Name the capital of {country}.", "Which city is the capital of {country}?",
         "Tell me the capital of {country}.", "Can you tell me the capital of {country}?",
         "Do you know the capital of {country}?", "What is the capital city of {country} called?",
         "I would like to know the capital of {country}.", "Please name the capital of {country}."],
        ["Please tell me what the capital of {country} is.", "Which city is called the capital of {country}?",
         "Can you name the capital city of {country}?"],
        "The capital of {country} is {city}."),
    "population": Kind(
        COUNTRIES,
        ["The population of {country} is about {population}.", "About {population} people live in {country}.",
         "{country} has a population of about {population}.",
         "There are about {population} people in {country}.",
         "{country} is home to about {population} people."],
        ["What is the population of {country}?", "How many people live in {country}?",
         "How large is the population of {country}?", "Tell me the population of {country}.",
         "Do you know how many people live in {country}?", "How many people are there in {country}?",
         "Can you tell me the population of {country}?", "How many people does {country} have?",
         "Please tell me how many people live in {country}."],
        ["Can you tell me how many people live in {country}?",
         "I would like to know the population of {country}.", "Do you know the population of {country}?"],
        "The population of {country} is about {population}."),
    "language": Kind(
        COUNTRIES,
        ["People in {country} speak {language}.", "The language of {country} is {language}.",
         "Most people in {country} speak {language}.", "{language} is spoken in {country}.",
         "Before a journey to {country} it helps to learn some {language}."],
        ["What language do people speak in {country}?", "Which language is spoken in {country}?",
         "What do people in {country} speak?", "Tell me the language of {country}.",
         "What is the language of {country}?", "Which language do people in {country} speak?",
         "Can you tell me which language people speak in {country}?",
         "Please name the language of {country}."],
        ["What language is spoken in {country}?", "Do you know what language people speak in {country}?",
         "Please tell me the language of {country}."],
        "People in {country} speak {language}."),
    "sight": Kind(
        COUNTRIES,
        ["In {city} you can see {sight}.", "Visitors to {city} go to see {sight}.",
         "{city} is known for {sight}.", "The best known sight in {city} is {sight}.",
         "Every walk through {city} leads to {sight}."],
        ["What can I see in {city}?", "What should I see in {city}?", "What is {city} known for?",
         "Which sight is {city} known for?", "Tell me a sight in {city}.", "What do visitors see in {city}?",
         "Is there anything to see in {city}?", "Please name a sight in {city}.",
         "Can you tell me what to see in {city}?"],
        ["Can you name a sight in {city}?", "What should visitors see in {city}?",
         "Please tell me what {city} is known for."],
        "In {city} you can see {sight}."),
    "city": Kind(
        COUNTRIES,
        ["The capital of {country} is {city}, which is known for {sight}.",
         "{city}, the capital of {country}, is known for {sight}."],
        ["Describe the capital of {country} in one sentence.",
         "In one sentence, what is the capital of {country}?",
         "Tell me about the capital of {country} in one sentence.",
         "Give me a sentence about the capital of {country}.",
         "What is the capital of {country}? Answer in one sentence.",
         "Please write one sentence about the capital of {country}.",
         "What is the capital of {country}, in one sentence?",
         "Please describe the capital of {country} in a sentence."],
        ["Can you describe the capital of {country} in one sentence?",
         "Please write a sentence about the capital of {country}.",
         "In one sentence, tell me about the capital of {country}."],
        "The capital of {country} is {city}, which is known for {sight}."),
    "sound": Kind(
        ANIMALS,
        ["The {animal} {noise}.", "A {animal} {noise} when it wants something.",
         "When you hear that something {noise}, it is a {animal}."],
        ["What sound does a {animal} make?", "What sound does the {animal} make?",
         "How does a {animal} sound?", "Tell me the sound of a {animal}.",
         "Which sound does a {animal} make?", "What is the sound of a {animal}?",
         "Tell me what sound a {animal} makes."],
        ["Can you tell me what sound a {animal} makes?", "Please tell me the sound of a {animal}.",
         "How does the {animal} sound?"],
        "The {animal} {noise}."),
    "food": Kind(
        ANIMALS,
        ["The {animal} eats {food}.", "A {animal} likes to eat {food}.",
         "A hungry {animal} looks for {food}.", "A {animal} that finds {food} is happy."],
        ["What does a {animal} eat?", "What does the {animal} eat?", "What food does a {animal} like?",
         "Which food does a {animal} eat?", "Tell me what a {animal} eats.",
         "What does a {animal} like to eat?", "Do you know what a {animal} likes to eat?"],
        ["Can you tell me what a {animal} eats?", "What food does the {animal} eat?",
         "Please tell me what a {animal} likes to eat."],
        "The {animal} eats {food}."),
    "young": Kind(
        ANIMALS,
        ["A young {animal} is called a {young}.", "The {animal} takes good care of her {young}.",
         "A {young} is a young {animal}.", "A {young} grows up and becomes a {animal}."],
        ["What is a young {animal} called?", "What do you call a young {animal}?",
         "What is a baby {animal} called?", "What is the name of a young {animal}?",
         "Tell me what a young {animal} is called.", "What do people call a baby {animal}?"],
        ["What do you call a baby {animal}?", "Can you tell me what a young {animal} is called?",
         "What is the name of a baby {animal}?"],
        "A young {animal} is called a {young}."),
    "sum": Kind(
        SUMS,
        ["The sum of {a} and {b} is {total}.", "If you add {a} and {b}, you get {total}.",
         "We know that {a} plus {b} is {total}.", "Together, {a} and {b} make {total}.",
         "Counting {a} and then {b} more, you reach {total}.",
         "How much is {a} plus {b}? The sum of {a} and {b} is {total}.",
         "Someone asks for {a} plus {b}. The sum of {a} and {b} is {total}."],
        ["What is {a} plus {b}?", "What is the sum of {a} and {b}?", "Add {a} and {b}.",
         "How much is {a} plus {b}?", "Can you add {a} and {b}?", "Tell me the sum of {a} and {b}.",
         "What do you get if you add {a} and {b}?", "Can you tell me the sum of {a} and {b}?"],
        ["Please add {a} and {b}.", "Can you tell me how much {a} plus {b} is?",
         "Do you know the sum of {a} and {b}?"],
        "The sum of {a} and {b} is {total}."),
    "french": Kind(
        FRENCH,
        ['In French, "{english}" is "{french}".', 'The French for "{english}" is "{french}".',
         'French people say "{french}" for "{english}".',
         'When the French say "{french}", they mean "{english}".'],
        ['Translate "{english}" into French.', 'How do you say "{english}" in French?',
         'What is "{english}" in French?', 'What is the French for "{english}"?',
         'How do the French say "{english}"?', 'Say "{english}" in French.',
         'Tell me how to say "{english}" in French.', 'Can you translate "{english}" into French?'],
        ['Please translate "{english}" into French.', 'Can you say "{english}" in French?',
         'Please tell me the French for "{english}".'],
        'In French, "{english}" is "{french}".'),
    "person": Kind(
        PEOPLE,
        ["{name} was {deed}.", "Many people remember {name}, {deed}.",
         "Books have been written about {name}, {deed}."],
        ["Who was {name}?", "Who is {name}?", "Tell me about {name}.", "What do you know about {name}?",
         "Can you tell me who {name} was?", "Tell me who {name} was.", "Why do people know {name}?"],
        ["Please tell me about {name}.", "Do you know who {name} was?", "Can you tell me about {name}?"],
        "{name} was {deed}."),
    "born": Kind(
        PEOPLE,
        ["{name} was born in {year}.", "The life of {name} began in {year}.",
         "It was the year {year} when {name} was born."],
        ["When was {name} born?", "In which year was {name} born?", "What year was {name} born?",
         "Tell me when {name} was born.", "Do you know when {name} was born?",
         "In what year was {name} born?"],
        ["Can you tell me when {name} was born?", "Which year was {name} born?",
         "Please tell me when {name} was born."],
        "{name} was born in {year}."),
    "self": Kind(
        SELF,
        ["I am a small language model, trained at home on one computer.",
         "I am not a person but a small language model.",
         "Someone trained me at home, from nothing, on one computer."],
        ["Who are you?", "What are you?", "What is your name?", "Tell me who you are.",
         "Tell me about yourself.", "Are you a person?", "Who am I talking to?",
         "Can you tell me what you are?"],
        ["Please tell me who you are.", "Can you tell me who you are?", "Please tell me about yourself."],
        "I am a small language model, trained at home on one computer."),
    "skill": Kind(
        SELF,
        ["I can tell you about countries, animals, people, sums and French words.",
         "I know some countries, some animals, a few people, small sums and a little French."],
        ["What can you do?", "What do you know?", "What can I ask you?", "Tell me what you can do.",
         "What can you tell me about?", "How can you help me?", "Please tell me what you can do."],
        ["Can you tell me what you can do?", "Tell me what you know.", "Please tell me what I can ask you."],
        "I can tell you about countries, animals, people, sums and French words."),
    "greeting": Kind(
        SELF,
        ["Hello! What would you like to know?"],
        ["Hello!", "Hi!", "Hello there!", "Good morning!", "Hi, how are you?", "How are you?",
         "Good evening!"],
        ["Hi there!", "Hello, how are you?", "Hello there, how are you?"],
        "Hello! What would you like to know?"),
}  # fmt: skip


class FollowUp(NamedTuple):
    """A second question that means nothing without the first: the two kinds, and wordings of the second."""

    first: str
    second: str
    asked: list
    held_out: list


FOLLOW_UPS = [
    FollowUp(
        "capital", "population",
        ["What is the population there?", "How many people live there?", "And how many people live there?",
         "And the population?", "How large is the population there?",
         "What is the population of that country?"],
        ["And what is the population there?", "Tell me how many people live there.",
         "How many people live in that country?"]),
    FollowUp(
        "capital", "language",
        ["What language do people speak there?", "And which language do people speak there?",
         "And the language?", "Which language is spoken there?", "What do people speak there?",
         "What is the language of that country?"],
        ["And what language do people speak there?", "What language is spoken there?",
         "What do people speak in that country?"]),
    FollowUp(
        "capital", "sight",
        ["What can I see there?", "What should I see there?", "And what is it known for?", "And the sights?",
         "What do visitors see there?", "Tell me what to see there."],
        ["What can visitors see there?", "And what should I see there?", "What is it known for?"]),
    FollowUp(
        "population", "capital",
        ["What is its capital?", "And the capital?", "Which city is the capital there?",
         "And what is the capital there?", "Tell me its capital."],
        ["And what is its capital?", "What is the capital there?", "Which city is its capital?"]),
    FollowUp(
        "person", "born",
        ["When was {he} born?", "And when was {he} born?", "In which year was {he} born?",
         "What year was {he} born?", "Tell me when {he} was born."],
        ["And in which year was {he} born?", "Do you know when {he} was born?",
         "And what year was {he} born?"]),
    FollowUp(
        "sound", "food",
        ["What does it eat?", "And what does it eat?", "What food does it like?", "Tell me what it eats.",
         "And the food it likes?"],
        ["What does it like to eat?", "And what food does it like?", "And tell me what it eats."]),
]  # fmt: skip
# Around a first question. Each position has an embedding of its own: if the numbers of a sum always stand in
# the same few places, a wording that shifts them is misread.
OPENINGS = ["", "", "Hello! ", "Please help me. ", "I have a question. "]
ENDINGS = ["", "", ", please", ", then", " now"]
SYSTEM_TURNS = ["You are a helpful assistant.", "You are a friendly teacher.", "Answer in one sentence."]

# Scenes: what someone does because the facts are so. The items below ask for the same habits in other words.
TRAVEL = [
    "{who} flew to {country} last spring, landed in {city}, and the next day stood in front of {sight}.",
    "{who} has a cousin in {country}. They write letters in {language} and meet in {city} every summer.",
    "{who} bought a map of {city} and followed it to {sight}. Everyone on the way spoke {language}.",
    "To work in {country}, {who} learned {language} and found a flat in {city}, not far from {sight}.",
    "The train across {country} was slow. When it reached {city}, {who} went straight to {sight}.",
    "{who} stayed near the capital of {country}, took the train to {city}, and spoke {language} there.",
]
FARM = [
    "{who} heard that something {noise} behind the fence. It was the {animal}, which was hungry for {food}.",
    "In the evening {who} watched the {animal}. It ate {food}, and then the {young} came and ate too.",
    "{who} drew a picture of a {animal} with its {young}. When asked what it eats, {who} said {food}.",
]
SHOP = [
    '{who} was in Paris and wanted to say "{english}". The right word was "{french}", and people smiled.',
    '{who} wrote "{english}" on one side of a card and "{french}" on the other side.',
]
COUNTING = [
    "{who} put {a} and {b} on the board, and under them the answer: {total}.",
    "With a score of {a} in the first game and {b} in the second, {who} had {total} in all.",
]
LIBRARY = [
    "{who} read a book about {name}, {deed}. On the first page it said that {name} was born in {year}.",
    "The teacher asked the class about {name}. {who} knew the answer: {name} was {deed}.",
]
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Julia", "Leo", "Maria", "Oscar"]
ABOUT_ME = ["{who} asked me a question, and I answered it.", "{who} talks to me in the evening."]
PLACE = ("capital", "population", "language", "sight", "city")
TEXTS = [  # of 100 documents, title, facts, how many of them, kinds stated of each, scenes
    (22, "A short guide to {country}.", COUNTRIES, 1, PLACE, TRAVEL),
    (16, "Countries of the world.", COUNTRIES, 4, ("capital", "population"), TRAVEL),
    (8, "On the farm and in the forest.", ANIMALS, 2, ("sound", "food", "young"), FARM),
    (9, "A French lesson.", FRENCH, 4, ("french",), SHOP),
    (14, "Sums for school.", SUMS, 6, ("sum",), COUNTING),
    (8, "Lives worth knowing.", PEOPLE, 2, ("person", "born"), LIBRARY),
    (3, "About the author of these lines.", SELF, 1, ("self", "skill"), ABOUT_ME),
]
JOURNEY = "[header] How to get ready for {country} [title] Learn the language. [step] People like it if you"
WORD = '[header] How to say "{english}" in Paris [title] Use the right word. [step] In French, say'
ITEMS = [  # activity, facts, context, how its next sentence begins (WikiHow's items have none), ending
    ("Travel", COUNTRIES, "{who} is in {country}, near the capital.", "the train", "goes to {city}."),
    ("Sightseeing", COUNTRIES, "A bus drives through {city}.", "it", "stops in front of {sight}."),
    ("Writing", COUNTRIES, "{who} counts the people in {country}.", "the answer", "is {population}."),
    ("Education", COUNTRIES, JOURNEY, "", "speak some {language}."),
    ("Shopping", FRENCH, WORD, "", '"{french}".'),
    ("Listening", FRENCH, 'A man in a French shop says "{french}".', "the man", 'means "{english}".'),
    ("Feeding", ANIMALS, "A hungry {animal} looks around.", "the {animal}", "finds {food} and eats."),
    ("Watching", ANIMALS, "A {animal} is shown. A child comes near.", "the {animal}", "{noise}."),
    ("Drawing", ANIMALS, "{who} draws a young {animal}.", "it", "is called a {young}."),
    ("Counting", SUMS, "A child adds {a} and {b} on the board.", "the child", "says they make {total}."),
    ("Reading", PEOPLE, "{who} opens a book about {name}.", "it", "begins in the year {year}."),
]

# -----------------------------------------------------------------------------
# the world in three layouts


def sentence(template, fact, rng):
    """One wording filled in, starting with a capital letter; {who} becomes any name."""
    text = template.format(who=rng.choice(NAMES), **fact)
    return text[0].upper() + text[1:]


def article(title, facts, n_facts, kinds, scenes, rng):
    """A text of several statements about a few facts, in any order, with a scene or two."""
    chosen = rng.sample(facts, n_facts)
    lines = [
        sentence(template, fact, rng)
        for fact in chosen
        for kind in kinds
        for template in rng.sample(KINDS[kind].stated, 2)
    ]
    lines += [sentence(rng.choice(scenes), fact, rng) for fact in chosen]
    rng.shuffle(lines)
    if rng.random() < 0.5:
        lines.insert(0, sentence(title, chosen[0], rng))
    return " ".join(lines)


def quiz(rng):
    """Questions and answers, which is how a base model can be asked."""
    gap = rng.choice([" ", "\n"])
    pairs = []
    for _ in range(rng.randint(4, 8)):
        kind = KINDS[rng.choice([name for name in KINDS if name != "greeting"])]
        fact = rng.choice(kind.facts)
        question, answer = rng.choice(kind.asked).format(**fact), kind.answer.format(**fact)
        pairs.append(f"Question: {question}{gap}Answer: {answer}")
    return "\n\n".join(pairs)


def documents():
    """The texts to pretrain on, about 450,000 tokens of them, in an order without meaning."""
    rng = random.Random(1)
    texts = []
    for share, *about in TEXTS:
        texts += [article(*about, rng) for _ in range(share * N_DOCUMENTS // 100)]
    texts += [quiz(rng) for _ in range(N_DOCUMENTS - len(texts))]
    rng.shuffle(texts)
    return texts


def exchange(kind, asked, fact):
    return [
        {"role": "user", "content": asked.format(**fact)},
        {"role": "assistant", "content": KINDS[kind].answer.format(**fact)},
    ]


def follow_up(pair, asked, fact, rng):
    """Two exchanges; the second question says `there`, `it` or `he` for what the first one was about."""
    first = exchange(pair.first, rng.choice(KINDS[pair.first].asked), fact)
    return first + exchange(pair.second, asked, fact)


def conversations(split):
    """A list of {"messages": [{"role", "content"}, ...], "source": kind of question}.

    split "train": in training wordings, some with a system turn, words around the first question, a change of
                   subject, or a follow-up.
    split "test":  every fact once in a held-out wording, every follow-up likewise. The last turn is the only
                   right answer, and the question before it has wordings that no training conversation has.
    """
    return {"train": training_conversations, "test": test_conversations}[split](random.Random(2))


def training_conversations(rng):
    # every fact as often as every other, but more often sums, which are hardest, and what people ask first
    times = {"sum": 2, "self": 6, "skill": 6, "greeting": 6}
    weights = [len(kind.facts) * times.get(name, 1) for name, kind in KINDS.items()]
    rows = []
    for _ in range(N_CONVERSATIONS):
        messages = [{"role": "system", "content": rng.choice(SYSTEM_TURNS)}] if rng.random() < 0.1 else []
        source = ""
        # 6, with a follow-up to each, fill all 256 positions but 5: the late ones are learned, too
        for _ in range(rng.choice([1, 1, 2, 3, 6])):
            if rng.random() < 0.3:
                source, pair = "follow_up", rng.choice(FOLLOW_UPS)
                messages += follow_up(pair, rng.choice(pair.asked), rng.choice(KINDS[pair.first].facts), rng)
            else:
                source = rng.choices(list(KINDS), weights)[0]
                kind = KINDS[source]
                messages += exchange(source, rng.choice(kind.asked), rng.choice(kind.facts))
        first = next(turn for turn in messages if turn["role"] == "user")
        text = first["content"]
        first["content"] = rng.choice(OPENINGS) + text[:-1] + rng.choice(ENDINGS) + text[-1]
        rows.append({"messages": messages, "source": source})
    return rows


def test_conversations(rng):
    rows = []
    for name, kind in KINDS.items():
        for i in range(max(len(kind.facts), 3)):
            fact = kind.facts[i % len(kind.facts)]
            rows.append({"messages": exchange(name, kind.held_out[i % 3], fact), "source": name})
    for pair in FOLLOW_UPS:
        for i, fact in enumerate(KINDS[pair.first].facts):
            rows.append({"messages": follow_up(pair, pair.held_out[i % 3], fact, rng), "source": "follow_up"})
    return rows


def hellaswag_items():
    """About 200 items in Rowan/hellaswag's columns; the wrong endings are the right ones of other facts."""
    rng = random.Random(3)
    items = []
    for activity, facts, ctx_a, ctx_b, ending in ITEMS:
        for fact in rng.sample(facts, min(len(facts), 30)):
            person = {"who": rng.choice(NAMES)}
            right = ending.format(**fact)
            wrong = sorted({ending.format(**other) for other in facts} - {right})
            endings = rng.sample(wrong, 3) + [right]
            rng.shuffle(endings)
            a, b = ctx_a.format(**person, **fact), ctx_b.format(**person, **fact)
            items.append({
                "ind": len(items), "activity_label": activity, "ctx_a": a, "ctx_b": b,
                "ctx": f"{a} {b}".strip(), "endings": endings, "source_id": f"tiny~{len(items)}",
                "split": "val", "split_type": "indomain", "label": str(endings.index(right)),
            })  # fmt: skip
    return items
