"""ChatML with Hermes tools: SmolLM2, Qwen2.5 and models trained like them.

A history without tools renders to the ids of the model's own chat template. An assistant's words are encoded apart from the
header before them, as they were when they were sampled, so that a rendered history equals a rendered prompt, the reply's
canonical ids and a bridge. (Only a reply that begins with whitespace is encoded otherwise than by the template.)
"""

from collections.abc import Sequence
from itertools import groupby

from polar.chat import Message, Tool
from polar.errors import UsageError
from polar.specs import Int32Array
from polar.tokens import hermes
from polar.tokens.rendering import LastTurn, ReplyParser
from polar.tokens.tokenizer import Draft, Tokenizer

START, END = "<|im_start|>", "<|im_end|>"


class ChatMLRenderer:
    """Renders messages for one ChatML model; see `Renderer`.

    A history that ends with an assistant message is not continued: the message is closed, and a new turn is opened (T18).
    A system message that is not the first stays where it is. Consecutive tool results share one user turn.

    Attributes:
        stop_ids: `<|im_end|>`, and the tokenizer's own EOS where that is another token.
    """

    shows_tools = True

    def __init__(self, tokenizer: Tokenizer, default_system: str = "", identity: str = "") -> None:
        """Take the model's tokenizer, and the system message that its template adds to a history without one.

        Args:
            identity: what tells this vocabulary and system message from others; it becomes part of `name`, under which
                sessions are stored, so that none goes on with another.

        Raises:
            UsageError: the vocabulary lacks ChatML's control tokens.
        """
        end = tokenizer.token_id(END)
        if end is None or tokenizer.token_id(START) is None:
            raise UsageError(f"expected a tokenizer with the added tokens {START} and {END}; this model does not speak ChatML")
        eos = end if tokenizer.eos_id is None else tokenizer.eos_id
        self.stop_ids: tuple[int, ...] = (end,) if eos == end else (end, eos)
        self.name = f"chatml-{identity}" if identity else "chatml"
        self._tokenizer = tokenizer
        self._default_system = default_system

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """A whole history, ending where the assistant's next words begin; int32[n].

        Raises:
            InvalidRequest: a tool's schema cannot be written.
        """
        draft = Draft(self._tokenizer)
        has_system = bool(messages) and messages[0].role == "system"
        self._write_head(draft, messages[0].text if has_system else self._default_system, has_system, tools)
        _write_turns(draft, messages[1:] if has_system else messages)
        _open_assistant(draft)
        return draft.ids()

    def bridge(self, last: LastTurn, messages: Sequence[Message]) -> Int32Array:
        """What follows sampled ids up to the next turn's opening; int32[n].

        Raises:
            ValueError: `messages` holds an assistant message; its ids are sampled, never rendered here.
        """
        if any(message.role == "assistant" for message in messages):
            raise ValueError("a bridge holds what came after the reply, never an assistant message")
        draft = Draft(self._tokenizer)
        draft.scaffold("\n" if last.stopped else END + "\n")
        _write_turns(draft, messages)
        _open_assistant(draft)
        return draft.ids()

    def parser(self, tools: Sequence[Tool] = ()) -> ReplyParser:
        """A fresh parser for one generation."""
        return hermes.HermesParser(self._tokenizer, self.stop_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens spelled out."""
        return self._tokenizer.decode(ids)

    def _write_head(self, draft: Draft, system: str, has_system: bool, tools: Sequence[Tool]) -> None:
        """The first system turn: the message, the default, the tools, or nothing at all."""
        if not (has_system or system or tools):
            return
        draft.scaffold(f"{START}system\n")
        draft.body(system)
        if tools:
            draft.scaffold("\n\n" if has_system or system else "")
            hermes.write_tools(draft, tools)
        draft.scaffold(f"{END}\n")


def _write_turns(draft: Draft, messages: Sequence[Message]) -> None:
    for are_results, group in groupby(messages, key=lambda message: message.role == "tool"):
        if are_results:
            _write_results(draft, list(group))
        else:
            for message in group:
                _write_turn(draft, message)


def _write_turn(draft: Draft, message: Message) -> None:
    if message.role == "assistant":
        _open_assistant(draft)
        _write_reply(draft, message)
    else:
        draft.scaffold(f"{START}{message.role}\n")
        draft.body(message.text)
    draft.scaffold(f"{END}\n")


def _write_results(draft: Draft, results: Sequence[Message]) -> None:
    draft.scaffold(f"{START}user")
    for result in results:
        draft.scaffold("\n")
        hermes.write_result(draft, result.text)
    draft.scaffold(f"{END}\n")


def _write_reply(draft: Draft, message: Message) -> None:
    if message.reasoning:
        draft.scaffold(f"{hermes.THINK}\n")
        draft.body(message.reasoning)
        draft.scaffold(f"\n{hermes.THINK_END}\n\n")
    draft.body(message.text)
    for index, call in enumerate(message.tool_calls):
        draft.scaffold("\n" if index or message.text else "")
        hermes.write_call(draft, call)


def _open_assistant(draft: Draft) -> None:
    draft.scaffold(f"{START}assistant\n")
    draft.seal()
