"""What a harness does to a history that means nothing is undone by name (T13)."""

from polar.chat import ChatRequest, Message, TextPart
from polar.tokens.normalisers import normalise


def message(role: str, *texts: str, reasoning: str = "") -> Message:
    return Message(role, tuple(TextPart(text) for text in texts), reasoning)  # type: ignore[arg-type]


def request(*messages: Message) -> ChatRequest:
    return ChatRequest("policy", messages)


def test_the_billing_header_of_claude_code_goes_and_the_rest_stays() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.332.abc; cc_entrypoint=sdk-cli;"
    one = request(message("system", header, "You are Claude Code.", "Tools."), message("user", "Hi"))
    read = normalise(one, ["claude_code_attribution"])
    assert read.messages == (message("system", "You are Claude Code.", "Tools."), message("user", "Hi"))
    assert read.normalised == ("claude_code_attribution",)


def test_a_system_message_that_was_only_the_header_is_gone() -> None:
    read = normalise(
        request(message("system", "x-anthropic-billing-header: a"), message("user", "Hi")), ["claude_code_attribution"]
    )
    assert read.messages == (message("user", "Hi"),)


def test_the_header_elsewhere_is_text() -> None:
    one = request(message("user", "x-anthropic-billing-header: a"), message("system", "x-anthropic-billing-header: b"))
    assert normalise(one, ["claude_code_attribution"]) == one


def test_thinking_in_the_text_is_reasoning() -> None:
    read = normalise(request(message("assistant", "<think>\nhm\n</think>\n\nYes <think>no</think>")), ["think_in_text"])
    assert read.messages == (message("assistant", "Yes <think>no</think>", reasoning="hm"),)
    assert read.normalised == ("think_in_text",)


def test_what_others_say_of_thinking_is_text() -> None:
    one = request(message("user", "<think>hm</think>x"), message("assistant", "x <think>hm</think>"))
    assert normalise(one, ["think_in_text"]) == one


def test_a_normaliser_that_changes_nothing_did_not_fire() -> None:
    one = request(message("system", "Be brief."), message("assistant", "Yes."))
    assert normalise(one, ["claude_code_attribution", "think_in_text", "trim_text"]) is not one
    assert normalise(one, ["claude_code_attribution", "think_in_text", "trim_text"]).normalised == ()
