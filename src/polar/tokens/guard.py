"""Keeps text from outside from becoming control tokens in a rendering that others write (T12).

Renderers of other projects and chat templates put text and scaffold together as one string, which is then cut at the
spellings of added tokens. So every spelling that text brings along is broken before, by a sentinel after its first
character, and the sentinel is taken out again after the cut. It is chosen anew for each call, from letters that occur in no
text of the call: nobody can bring it along. Text is also broken where it could make up a spelling together with the
scaffold around it: a parameter named `x<think` is written `<parameter=x<think>` by some. Other text stays as it is, for some
renderers look names up (`$ref`) or sort by them; what is broken keeps its place, as the sentinel begins with a low letter.
"""

import re
import secrets
from collections.abc import Iterable, Iterator

from polar.specs import Int32Array
from polar.tokens.tokenizer import Draft, Tokenizer

_FIRST, _LETTERS, _SIZE = "!", "bcdfghjklmnprstvwxz", 14  # the first letter comes once, so that two never overlap

# Names and values by which renderers read a schema: they stay whole.
SCHEMA_WORDS = frozenset(
    "type function name description parameters properties required items enum const default title format pattern anyOf oneOf "
    "allOf not additionalProperties minimum maximum minItems maxItems minLength maxLength nullable return strict $defs $ref "
    "string number integer boolean object array null".split()
)


class Spellings:
    """The spellings that text must not keep: those of the added tokens, and what else a renderer reads as its own."""

    def __init__(self, spellings: Iterable[str]) -> None:
        known = sorted({spelling for spelling in spellings if spelling})
        self._by_start: dict[str, tuple[str, ...]] = {}
        for spelling in known:
            self._by_start[spelling[:2]] = (*self._by_start.get(spelling[:2], ()), spelling)
        firsts = "".join(sorted({re.escape(spelling[0]) for spelling in known}))
        self._firsts = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self._beginnings = {spelling[:size] for spelling in known for size in range(1, len(spelling))}
        self._ends = {spelling[at:] for spelling in known for at in range(1, len(spelling) - 1)}
        self._all = "\0".join(known)
        self._longest = max(map(len, known), default=0)
        self.harmless = frozenset(word for word in SCHEMA_WORDS if not any(spelling in word for spelling in known))

    def find(self, text: str) -> Iterator[int]:
        """Letters of `text` after which it is broken: where a spelling begins, or where it shares one with the scaffold."""
        for match in self._firsts.finditer(text):
            at = match.start()
            spelled = self._by_start.get(text[at : at + 2], ()) + self._by_start.get(text[at], ())
            if text.startswith(spelled, at):
                yield at
        for start in {0, len(text) - len(text.lstrip())}:
            yield from (end - 2 for end in range(start + 2, start + self._longest) if text[start:end] in self._ends)
        for end in {len(text), len(text.rstrip())}:
            yield from (at for at in range(max(0, end - self._longest + 1), end) if text[at:end] in self._beginnings)
        if (words := text.strip()) and len(words) < self._longest and (words in self._all or text in self._all):
            yield len(text.rstrip()) - 1


class Guard:
    """Breaks and mends the texts of one call."""

    def __init__(self, spellings: Spellings, texts: Iterable[str]) -> None:
        """Choose a sentinel that occurs in none of the call's texts."""
        known = tuple(texts)
        self._spellings = spellings
        self.sentinel = _sentinel()
        while any(self.sentinel in text for text in known):
            self.sentinel = _sentinel()

    def text(self, text: str) -> str:
        """`text` with every spelling broken, those too that it could make up with what stands beside it."""
        pieces, start = [], 0
        for at in sorted(set(self._spellings.find(text))):
            pieces += [text[start : at + 1], self.sentinel]
            start = at + 1
        return "".join((*pieces, text[start:]))

    def value(self, value: object) -> object:
        """Every string of `value` guarded, keys too; the words of a JSON schema stay whole, in places of theirs."""
        if isinstance(value, str):
            return value if value in self._spellings.harmless else self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        return value

    def encode(self, tokenizer: Tokenizer, text: str) -> Int32Array:
        """Ids of scaffold that holds guarded texts: control tokens where the scaffold spells them, the texts as they were."""
        draft = Draft(tokenizer)
        for part in tokenizer.split_scaffold(text, self.sentinel):
            if isinstance(part, str):
                draft.body(part.replace(self.sentinel, ""))
            else:
                draft.control(part)
        return draft.ids()


def _sentinel() -> str:
    return _FIRST + "".join(secrets.choice(_LETTERS) for _ in range(_SIZE))
