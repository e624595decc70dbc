"""One loaded tokenizer, with text and control tokens kept apart.

Text is encoded by a twin without added tokens, so that no spelling in a message, a tool result or a schema ever becomes
a control token (T12), and never with a BOS or EOS of the tokenizer's own (T05). Control tokens come from the spelling of a
template (`Draft.scaffold`), which is ours. Decoding goes by the bytes of each token, so that it can be done in pieces.
"""

import codecs
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from polar.errors import UsageError
from polar.specs import Int32Array

_SHORT = 40  # characters of a text whose ids are remembered


class Tokenizer:
    """A byte-level BPE tokenizer, loaded by the caller. Immutable, so threads may share it.

    Attributes:
        eos_id: the tokenizer's own end-of-sequence token, None where it names none.
    """

    def __init__(self, loaded: tokenizers.Tokenizer, eos: str | None = None) -> None:
        """Take a loaded tokenizer and the spelling of its end-of-sequence token.

        Raises:
            UsageError: not a byte-level BPE, or `eos` is not one of its added tokens.
        """
        self._added = {token.content: id for id, token in loaded.get_added_tokens_decoder().items()}
        self._spellings = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) or r"(?!)")
        self._plain = _without_added_tokens(loaded)
        self._bytes = _bytes_of_tokens(loaded, self._added)
        # A template's own lines come again in every prompt.
        self._encode_short = functools.lru_cache(1024)(self._encode)
        self.eos_id = None if eos is None else self.token_id(eos)
        if eos is not None and self.eos_id is None:
            raise UsageError(f"expected the end-of-sequence token {eos!r} among the tokenizer's added tokens; it is not there")

    def token_id(self, spelling: str) -> int | None:
        """Id of the added token with this spelling; None where the vocabulary has none."""
        return self._added.get(spelling)

    def encode_plain(self, text: str) -> Int32Array:
        """Ids of `text` as ordinary text: none is an added token, and nothing is put before or after it; int32[n].

        Equals the tokenizer's own encoding for text that spells no added token. Its normaliser applies (Qwen's is NFC),
        and bytes for which its vocabulary has no token are dropped, as the tokenizer itself does (SmolLM2 lacks six
        control characters).
        """
        return self._encode_short(text) if len(text) <= _SHORT else self._encode(text)

    def _encode(self, text: str) -> Int32Array:
        return np.array(self._plain.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    @property
    def spellings(self) -> Iterable[str]:
        """Of all added tokens, special or not."""
        return self._added.keys()

    def split_scaffold(self, text: str, broken_by: str = "") -> Iterable[str | int]:
        """Cut a template's text at its control tokens: text and ids in turn. Never for text from outside.

        Args:
            broken_by: a spelling that this follows is text (a `Guard` breaks those of one letter so).
        """
        end = 0
        for match in self._spellings.finditer(text):
            if broken_by and text.startswith(broken_by, match.end()):
                continue
            yield text[end : match.start()]
            yield self._added[match[0]]
            end = match.end()
        yield text[end:]

    def token_bytes(self, id: int) -> bytes:
        """UTF-8 bytes of one token; empty for an id outside the vocabulary (models pad their output layer)."""
        return self._bytes.get(id, b"")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens spelled out; U+FFFD stands for bytes that are not UTF-8."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def stream_decoder(self) -> "StreamDecoder":
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes ids as they come. The pieces, joined, equal `Tokenizer.decode` of all ids at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that is now complete; a character whose last bytes are still to come is held back."""
        return self._utf8.decode(b"".join(map(self._token_bytes, ids)))

    def finish(self) -> str:
        """What was held back: U+FFFD for a character that never got its last bytes, else nothing."""
        return self._utf8.decode(b"", final=True)


class Draft:
    """A prompt in the making: a template's scaffold and bodies from outside. Neighbouring text is encoded as one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._arrays: list[Int32Array] = []

    def body(self, text: str) -> None:
        """Text from outside; nothing in it becomes a control token."""
        self._text.append(text)

    def scaffold(self, text: str) -> None:
        """The template's own text; control tokens that it spells become their ids, where the vocabulary has them."""
        for part in self._tokenizer.split_scaffold(text):
            if isinstance(part, str):
                self.body(part)
            else:
                self.control(part)

    def control(self, id: int) -> None:
        """A control token."""
        self.seal()
        self._arrays.append(np.array([id], dtype=np.int32))

    def seal(self) -> None:
        """End a run of text: what follows is encoded on its own."""
        if text := "".join(self._text):
            self._arrays.append(self._tokenizer.encode_plain(text))
        self._text.clear()

    def ids(self) -> Int32Array:
        """All that was written; int32[n]."""
        self.seal()
        return np.concatenate(self._arrays) if self._arrays else np.empty(0, dtype=np.int32)


def _without_added_tokens(loaded: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A twin that can produce no added token: neither by spelling nor, where its BPE model lists them too, by merging."""
    described: dict[str, Any] = msgspec.json.decode(loaded.to_str())
    model = described["model"]
    if model["type"] != "BPE" or not _is_byte_level(described["decoder"]):
        raise UsageError(f"expected a byte-level BPE tokenizer; this one is {model['type']}, decoded by {described['decoder']}")
    spellings = {token["content"] for token in described["added_tokens"]}
    if not spellings.isdisjoint(model["vocab"]):
        model["vocab"] = {spelling: id for spelling, id in model["vocab"].items() if spelling not in spellings}
        model["merges"] = [pair for pair in model["merges"] if spellings.isdisjoint({*pair, "".join(pair)})]
    # A truncation left in the file would trim prompts silently (T10).
    described.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    return tokenizers.Tokenizer.from_str(msgspec.json.encode(described).decode())


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return decoder["type"] == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))


def _bytes_of_tokens(loaded: tokenizers.Tokenizer, added: dict[str, int]) -> dict[int, bytes]:
    """Id → bytes. Byte-level vocabularies spell byte b as itself where it is printable, else as the next of U+0100 onwards."""
    printable = {ord(letter) for letter in ByteLevel.alphabet() if ord(letter) < 0x100}
    others = (byte for byte in range(0x100) if byte not in printable)
    letters = {0x100 + index: chr(byte) for index, byte in enumerate(others)}
    table = {
        id: spelling.translate(letters).encode("latin-1")
        for spelling, id in loaded.get_vocab(with_added_tokens=False).items()
        if spelling not in added
    }
    return table | {id: spelling.encode() for spelling, id in added.items()}
