"""Small tasks in a workspace, made from a seed: as many as wanted, each with a test that decides.

What is to be written is drawn at random, so nothing can be known by heart: it stands in the instruction, or in a file that has
to be looked at first. A text is a training text or a held-out text by what it says, so no task of one split is in the other.
"""

import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from polar.errors import UsageError
from polar.specs import EvaluatorSpec, SamplingSpec, Task, Timeouts

PREFIX = "workspace:"
EXPECTED = "workspace:train:NUMBER or workspace:held_out:NUMBER"
_SOURCE = re.compile(r"workspace:(train|held_out):(\d{1,6})(?::(\d{1,9}))?")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
SYLLABLES = tuple(consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS)
HELD_OUT_OF = 5  # one in so many texts is a held-out one
WANT = ".wanted"


@dataclass(frozen=True)
class Story:
    """A task as it is drawn, and how an expert does it.

    Attributes:
        kind: `write`, `copy` or `pick`.
        said: names and texts by what they are in the story; replacing them makes another task of this kind.
        steps: shell lines, one a turn.
    """

    kind: str
    said: dict[str, str]
    instruction: str
    workspace: dict[str, str]
    steps: tuple[str, ...]

    @property
    def wanted(self) -> str:
        """The file to be written, and what it must hold."""
        return self.said["text"]


def stories(split: str, count: int, seed: int = 0) -> list[Story]:
    """`count` stories of a split, their kinds in turn; the same for the same seed."""
    return [_story(split, random.Random(f"{split}/{seed}/{number}"), number) for number in range(count)]


def story(split: str, rng: random.Random) -> Story:
    """One story, of a kind drawn too."""
    return _story(split, rng, rng.randrange(len(_KINDS)))


def workspace_tasks(source: str) -> list[Task]:
    """The tasks of `workspace:SPLIT:NUMBER`, or with a seed `workspace:SPLIT:NUMBER:SEED`.

    Raises:
        UsageError: it is no such thing.
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise UsageError(f"{source}: expected {EXPECTED}, with a seed behind it if you like")
    split, count, seed = match[1], int(match[2]), int(match[3] or 0)
    return [_task(split, seed, number, each) for number, each in enumerate(stories(split, count, seed))]


def _task(split: str, seed: int, number: int, told: Story) -> Task:
    return Task(
        id=f"{split}-{seed}-{number:05}-{told.kind}",
        instruction=told.instruction,
        workspace=told.workspace,
        evaluator=EvaluatorSpec("command", f"cmp -s {WANT} '{told.said['target']}'", {WANT: told.wanted + "\n"}),
        sampling=SamplingSpec(max_tokens=64),
        timeouts=Timeouts(run=120.0),
        metadata={"kind": told.kind},
    )


def word(rng: random.Random) -> str:
    """Two syllables."""
    return rng.choice(SYLLABLES) + rng.choice(SYLLABLES)


def _text(split: str, rng: random.Random) -> str:
    while True:
        text = " ".join(word(rng) for _ in range(rng.randint(1, 3)))
        if (zlib.crc32(text.encode()) % HELD_OUT_OF == 0) == (split == "held_out"):
            return text


def _story(split: str, rng: random.Random, number: int) -> Story:
    make = _KINDS[number % len(_KINDS)]
    words: list[str] = []
    while len(words) < 5:  # names that differ
        name = word(rng)
        if name not in words:
            words.append(name)
    texts: list[str] = []
    while len(texts) < 3:
        text = _text(split, rng)
        if text not in texts and text not in words:
            texts.append(text)
    return make(words, texts, rng)


def _write(words: list[str], texts: list[str], rng: random.Random) -> Story:
    target, text = words[0], texts[0]
    asked = rng.choice(("Create the file '{}' with the text '{}'.", "Make a file '{}' that says '{}'."))
    return Story("write", {"target": target, "text": text}, asked.format(target, text), {}, (_put(text, target),))


def _copy(words: list[str], texts: list[str], rng: random.Random) -> Story:
    source, target, text = words[0], words[1], texts[0]
    asked = rng.choice(
        (
            "The file '{}' holds a text in quotes. Write that text into the file '{}'.",
            "Look into the file '{}', and write the quoted text into '{}'.",
        )
    )
    said = {"source": source, "target": target, "text": text}
    return Story("copy", said, asked.format(source, target), {source: f"text: '{text}'\n"}, (_look(source), _put(text, target)))


def _pick(words: list[str], texts: list[str], rng: random.Random) -> Story:
    source, target, *labels = words
    chosen = rng.randrange(len(labels))
    asked = rng.choice(
        (
            "The file '{0}' has a text for each of some names. Write the text for '{1}' into the file '{2}'.",
            "In the file '{0}', find the text for '{1}', and write it into '{2}'.",
        )
    )
    lines = "".join(f"'{label}': '{text}'\n" for label, text in zip(labels, texts, strict=True))
    said = {"source": source, "target": target, "label": labels[chosen], "text": texts[chosen]}
    for place in range(len(labels)):
        if place != chosen:
            said |= {f"label_{place}": labels[place], f"text_{place}": texts[place]}
    steps = (_look(source), _put(texts[chosen], target))
    return Story("pick", said, asked.format(source, labels[chosen], target), {source: lines}, steps)


def _look(source: str) -> str:
    return f"cat '{source}'"


def _put(text: str, target: str) -> str:
    return f"echo '{text}' > '{target}'"


_KINDS: tuple[Callable[[list[str], list[str], random.Random], Story], ...] = (_write, _copy, _pick)
