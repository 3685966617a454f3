"""The documents that all traces are made of: our own words, so that no trace depends on files of the machine."""

from hf_recurrent import ByteTokenizer, Corpus

PASSAGES = (
    "Rain.",
    "A river carries what falls into it: leaves, sand, the colour of the clay upstream.",
    "The mill stood still for eleven years. Then somebody oiled the wheel, and it turned as if it had only slept; "
    "flour came out of the chute before noon, grey at first and then white.",
    "one two three four five six seven eight nine ten, one two three four five six seven eight nine ten",
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
    "Étienne mangeait une pêche près du canal, où l'eau était très calme.",
    "no\nno\nno\nyes\nno\n",
    "What is remembered is short. What is forgotten is long, and nobody has ever measured how long, because the one "
    "who measures would have to remember the beginning of it, and the end, and which of the two came first.",
    "x = 3; y = x * x; assert y == 9",
    "the cat sat on the mat and the rat sat on the cat and the bat sat on the rat",
    "Monday bread, Tuesday soup, Wednesday fish, Thursday bread, Friday soup, Saturday fish, Sunday nothing at all.",
    "0123456789" * 9,
    "A clock that is wrong by one second a day is right again after one hundred and eighteen years.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "for name in names:\n    print(name, len(name), name.upper())\nprint()\n",
    "ab" * 37 + "c",
    "They counted the steps down to the harbour: forty-one in summer, thirty-six when the tide was in. The missing "
    "five were there all the same, green and slippery, waiting.",
    "?",
    "It snowed. It had snowed before. It would snow again, said the man at the window, who sold shovels.",
    "aaaaaaaaaaaaaaaaaaaaaaaabaaaaaaaaaaaaaaaaaaaaaaaabaaaaaaaaaaaaaaaaaaaaaaaab",
    "Copper, tin, zinc, iron, lead: five jars on a shelf, five labels in the same hand, one of them false.",
    "if it rains:\n    stay()\nelif it snows:\n    shovel()\nelse:\n    go()\n",
    "To be carried, a thing has to be small; to be kept, it has to be carried; so what is kept is small. The boat "
    "that brought the piano was large, but the boat was not kept, and the piano stayed on the quay until it was "
    "firewood.",
    "日本の川は短くて速い。",
    "Nothing follows this.",
)
# An episode of bytes that are no text, and longer than several blocks.
NUMBERS = bytes((place * place * 7 + place * 3) % 199 + 1 for place in range(431))
BINARY = (b"\x00\x01\x00\xff" * 19, bytes(range(256)), b"\x00" * 40 + b"end", bytes(range(255, 0, -3)))


def text_corpora() -> tuple[Corpus, Corpus]:
    """Training and held-out episodes, of 1 to 431 bytes."""
    documents = [*(passage.encode() for passage in PASSAGES), NUMBERS]
    return Corpus.from_documents(documents, ByteTokenizer(), name="fixed text").split(0.2)


def binary_corpora() -> tuple[Corpus, Corpus]:
    """Episodes in which byte 0 is data."""
    corpus = Corpus.from_documents(BINARY, ByteTokenizer(eos_token=None), name="fixed bytes", binary=True)
    return corpus, corpus
