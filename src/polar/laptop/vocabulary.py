"""The laptop policy's tokenizer: what harnesses send again and again is one token a line, what is copied is cut into syllables.

A byte-level BPE that takes a whole line for a token where it has it (`ignore_merges`), so that a static prompt of many thousand
characters becomes some hundred tokens of a small vocabulary. What stands in single quotes is cut into syllables, wherever it
stands: names and texts of workspace tasks are the same tokens in the instruction, in a file's text, in a command and in its
JSON, which is what makes copying them easy to learn.
"""

import re
from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec import Struct
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from polar.tasks.workspace import SYLLABLES

CONTROL = (  # those of Qwen3
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
STATIC = 3  # a line that so many texts hold is one that harnesses always send
_INNER = "[a-z](?:[a-z ]{0,38}[a-z])?"
_QUOTED = rf"(?<=')(?:{_INNER})(?=')|(?<=\\u0027)(?:{_INNER})(?=\\u0027)"  # the second as JSON may spell a quote
_SYLLABLE = "[bdfgklmnprstvz][aeiou]"
_SYLLABLES = rf"{_SYLLABLE}(?=(?:{_SYLLABLE}| )*\z)"  # those at the end of a piece: all of a quoted one


class _Model(Struct):
    vocab: dict[str, int]
    merges: list[tuple[str, str]]


class _Trained(Struct):
    model: _Model


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """A tokenizer for `texts`: at most `size` tokens of BPE, then static lines, syllables and the control tokens of Qwen3."""
    pieces = _pieces()
    control = re.compile("|".join(map(re.escape, CONTROL)))
    cut = [[piece for piece, _ in pieces.pre_tokenize_str(control.sub("", text))] for text in texts]
    held = Counter(piece for text in cut for piece in set(text))
    static = sorted(piece for piece, times in held.items() if times >= STATIC)
    learned = _bpe((piece for text in cut for piece in text if held[piece] < STATIC), size)
    tokens = dict.fromkeys([*learned.vocab, *SYLLABLES, *static])
    vocab = {token: place for place, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=learned.merges, ignore_merges=True))
    made.pre_tokenizer = pieces
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    return made


def _pieces() -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QUOTED), "isolated"),
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.Split(Regex(_SYLLABLES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _bpe(pieces: Iterable[str], size: int) -> _Model:
    """Merges for what varies; the pieces are in byte letters already."""
    small = Tokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, max_token_length=16)
    small.train_from_iterator(pieces, trainer)
    found = msgspec.json.decode(small.to_str(), type=_Trained).model
    return _Model(dict(sorted(found.vocab.items(), key=lambda pair: pair[1])), found.merges)
