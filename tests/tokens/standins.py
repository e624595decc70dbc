"""A vocabulary in which every family of `renderers` finds its control tokens: SmolLM2's with theirs added.

The families' own vocabularies cannot be had here, but for Qwen3's. Their renderers ask for control tokens by name, so on this
one they all run; only the ids of ordinary text are not those of their models.
"""

from collections.abc import Sequence

import tokenizers

from polar.engines.families import FAMILIES, maker
from polar.tokens.families import FamilyRenderer
from polar.tokens.tokenizer import Tokenizer


class _Asked:
    """A tokenizer that has every control token it is asked for, and remembers it."""

    name_or_path = ""
    unk_token_id = None
    eos_token_id = None

    def __init__(self) -> None:
        self.spellings: dict[str, int] = {}

    def encode(self, text: str, **_: object) -> list[int]:
        return [self.convert_tokens_to_ids(text)]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return ""

    def convert_tokens_to_ids(self, spelling: str) -> int:
        return self.spellings.setdefault(spelling, len(self.spellings))


def tokenizer(loaded: tokenizers.Tokenizer) -> Tokenizer:
    asked = _Asked()
    for family in FAMILIES:
        maker(family.name)(asked)  # type: ignore[arg-type]  # all that a constructor uses
    grown = tokenizers.Tokenizer.from_str(loaded.to_str())
    grown.add_tokens([tokenizers.AddedToken(spelling, normalized=False) for spelling in asked.spellings])
    return Tokenizer(grown)


def renderer(name: str, tokenizer: Tokenizer) -> FamilyRenderer:
    family = next(family for family in FAMILIES if family.name == name)
    return FamilyRenderer(tokenizer, family, maker(name))
