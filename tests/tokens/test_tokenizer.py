"""Text stays text, control tokens stay control tokens, and decoding in pieces gives what decoding at once gives."""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing

from polar.errors import UsageError
from polar.tokens.tokenizer import Draft, Tokenizer

ids_of_any_vocabulary = st.lists(st.integers(min_value=-1, max_value=152_500), max_size=40)


@pytest.fixture(scope="session")
def alphabet(tokenizer: Tokenizer, loaded: tokenizers.Tokenizer) -> set[int]:
    """Bytes that the vocabulary can spell one by one."""
    single = (tokenizer.token_bytes(id) for id in loaded.get_vocab().values())
    return {token[0] for token in single if len(token) == 1}


def normalised(loaded: tokenizers.Tokenizer, text: str) -> str:
    return text if loaded.normalizer is None else loaded.normalizer.normalize_str(text)


def variant(loaded: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy to be changed."""
    return tokenizers.Tokenizer.from_str(loaded.to_str())


# Encoding


def test_no_spelling_of_an_added_token_becomes_that_token(tokenizer: Tokenizer, added: dict[str, int]) -> None:
    for spelling in added:
        for text in (spelling, f" {spelling}", f"{spelling}\n", f"word{spelling}word", spelling * 2, f"<{spelling}>"):
            ids = tokenizer.encode_plain(text)
            assert not set(ids.tolist()) & set(added.values()), text
            assert tokenizer.decode(ids.tolist()) == text


def test_no_two_neighbouring_spellings_become_a_token(tokenizer: Tokenizer, added: dict[str, int]) -> None:
    for first, second in itertools.product(added, repeat=2):
        assert not set(tokenizer.encode_plain(first + second).tolist()) & set(added.values())


@given(data=st.data())
def test_no_text_around_spellings_makes_one_a_token(tokenizer: Tokenizer, added: dict[str, int], data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(sorted(added)), st.text(max_size=5)))))
    assert not set(tokenizer.encode_plain(text).tolist()) & set(added.values())


@given(text=st.text())
@example("\n\n  def f(x):\r\n\treturn  'ümlaut' # 你好 👩‍👩‍👧 123456\n\n\n")
def test_ordinary_text_encodes_as_the_models_own_tokenizer_does(
    tokenizer: Tokenizer, loaded: tokenizers.Tokenizer, added: dict[str, int], text: str
) -> None:
    assume(not any(spelling in text for spelling in added))
    assert tokenizer.encode_plain(text).tolist() == loaded.encode(text, add_special_tokens=False).ids


@given(text=st.text())
def test_what_was_encoded_decodes_to_itself(
    tokenizer: Tokenizer, loaded: tokenizers.Tokenizer, alphabet: set[int], text: str
) -> None:
    """As far as the vocabulary can spell it: SmolLM2 has no token for some bytes, and its tokenizer drops them."""
    spelled = bytes(byte for byte in normalised(loaded, text).encode() if byte in alphabet)
    assert tokenizer.decode(tokenizer.encode_plain(text).tolist()) == spelled.decode(errors="replace")


def test_ids_are_int32(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_plain("text").dtype == "int32"
    assert tokenizer.encode_plain("").shape == (0,)


def test_nothing_is_put_before_or_after_the_text(tokenizer: Tokenizer, loaded: tokenizers.Tokenizer) -> None:
    """T05: a tokenizer that adds a BOS and an EOS adds none here."""
    adding = variant(loaded)
    ends = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    adding.post_processor = TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=ends)
    assert Tokenizer(adding).encode_plain("text").tolist() == tokenizer.encode_plain("text").tolist()


def test_a_truncation_in_the_tokenizers_file_is_not_applied(loaded: tokenizers.Tokenizer) -> None:
    """T10."""
    truncating = variant(loaded)
    truncating.enable_truncation(max_length=4)
    assert len(Tokenizer(truncating).encode_plain("one two three four five six seven eight")) >= 8


def test_a_control_token_that_the_bpe_model_lists_cannot_be_looked_up_or_merged() -> None:
    """With `ignore_merges`, a word that is in the vocabulary is taken whole; and a merge may produce it."""
    letters = {letter: index for index, letter in enumerate("<end>")}
    model = BPE(vocab={**letters, "<e": 6, "<end>": 7}, merges=[("<", "e")], ignore_merges=True)
    loaded = tokenizers.Tokenizer(model)
    loaded.decoder = tokenizers.decoders.ByteLevel()
    loaded.add_special_tokens(["<end>", "<e"])
    assert loaded.encode("<end>").ids == [7]
    assert Tokenizer(loaded).encode_plain("<end>").tolist() == [letters[letter] for letter in "<end>"]


def test_threads_may_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"text {number} " * 50 for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(tokenizer.encode_plain, texts))
    assert [array.tolist() for array in ids] == [tokenizer.encode_plain(text).tolist() for text in texts]


# Control tokens


def test_only_added_tokens_have_a_control_id(tokenizer: Tokenizer, added: dict[str, int]) -> None:
    assert {spelling: tokenizer.token_id(spelling) for spelling in added} == added
    assert tokenizer.token_id("the") is None


def test_a_scaffold_encodes_as_the_models_own_tokenizer_does(tokenizer: Tokenizer, loaded: tokenizers.Tokenizer) -> None:
    text = "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
    draft = Draft(tokenizer)
    draft.scaffold(text)
    assert draft.ids().tolist() == loaded.encode(text, add_special_tokens=False).ids


def test_neighbouring_text_is_encoded_as_one(tokenizer: Tokenizer) -> None:
    draft = Draft(tokenizer)
    draft.scaffold("\n")
    draft.body("\n")
    assert draft.ids().tolist() == tokenizer.encode_plain("\n\n").tolist()


def test_sealed_text_is_encoded_apart(tokenizer: Tokenizer) -> None:
    draft = Draft(tokenizer)
    draft.scaffold("\n")
    draft.seal()
    draft.body("\n")
    assert draft.ids().tolist() == tokenizer.encode_plain("\n").tolist() * 2


def test_an_empty_draft_has_no_ids(tokenizer: Tokenizer) -> None:
    assert Draft(tokenizer).ids().tolist() == []


# Decoding


@given(ids=ids_of_any_vocabulary)
def test_decoding_equals_the_librarys(tokenizer: Tokenizer, loaded: tokenizers.Tokenizer, ids: Sequence[int]) -> None:
    ids = [id for id in ids if id >= 0]
    assert tokenizer.decode(ids) == loaded.decode(ids, skip_special_tokens=False)


def test_control_tokens_are_spelled_out(tokenizer: Tokenizer, added: dict[str, int]) -> None:
    assert tokenizer.decode(list(added.values())) == "".join(added)


def test_an_id_outside_the_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([-1, 10_000_000]) == ""


@given(ids=ids_of_any_vocabulary, data=st.data())
def test_pieces_joined_equal_the_whole(tokenizer: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)))))
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(ids[start:end]) for start, end in itertools.pairwise([0, *cuts, len(ids)])]
    assert "".join((*pieces, decoder.finish())) == tokenizer.decode(ids)


@given(text=st.text(alphabet="aé你👩\n"))
def test_a_character_is_never_shown_in_halves(tokenizer: Tokenizer, text: str) -> None:
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push([int(id)]) for id in tokenizer.encode_plain(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert decoder.finish() == ""


def test_a_character_that_never_ends_is_shown_as_broken_at_the_end(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.stream_decoder()
    half = tokenizer.encode_plain("\U0001f9f6").tolist()[:-1]
    assert decoder.push(half) == ""
    assert decoder.finish() == "\ufffd"


# What is refused


def test_a_tokenizer_that_is_no_byte_level_bpe_is_refused() -> None:
    with pytest.raises(UsageError, match=r"byte-level BPE.*WordLevel"):
        Tokenizer(tokenizers.Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(UsageError, match="byte-level BPE"):
        Tokenizer(tokenizers.Tokenizer(BPE()))


def test_an_end_of_sequence_token_that_is_none_is_refused(loaded: tokenizers.Tokenizer) -> None:
    with pytest.raises(UsageError, match="'</s>' among the tokenizer's added tokens"):
        Tokenizer(loaded, eos="</s>")
