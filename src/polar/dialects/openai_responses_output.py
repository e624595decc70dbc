"""Replies as OpenAI's Responses API has them: an object with one output item each for reasoning, message and every call."""

from polar.chat import ChatRequest, Choice, Reply, Tool, ToolCall
from polar.dialects.openai_common import token_bytes
from polar.dialects.openai_responses_tools import RAW_CALL, wire_call
from polar.ids import item_id, response_id, signature

Item = dict[str, object]
OUTCOMES = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}
"""Status of a response and of its message, by finish reason."""


def whole_response(request: ChatRequest, reply: Reply) -> Item:
    """The response object of a reply."""
    choice, outcome = reply.choices[0], OUTCOMES[reply.finish_reason]
    output: list[Item] = []
    if choice.message.reasoning:
        output.append(reasoning_item(reply.call_id, choice.message.reasoning))
    if choice.message.text or says_nothing(choice):
        output.append(message_item(reply.call_id, outcome, [text_part(request, choice)]))
    output += [call_item(request.tools, reply.call_id, index, call) for index, call in enumerate(choice.message.tool_calls)]
    return {
        **response(request, reply.call_id, reply.created, outcome),
        "incomplete_details": {"reason": "max_output_tokens"} if outcome == "incomplete" else None,
        "output": output,
        "usage": _usage(reply),
    }


def response(request: ChatRequest, call_id: str, created: int, outcome: str) -> Item:
    """A response object as far as it is known before the reply. Tools are not repeated: some harnesses send 20,000 tokens."""
    named = request.tool_choice not in ("auto", "none", "required")
    return {
        "id": response_id(call_id),
        "object": "response",
        "created_at": created,
        "status": outcome,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.sampling.max_tokens,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": response_id(request.previous) if request.previous else None,
        "temperature": request.sampling.temperature,
        "tool_choice": {"type": "function", "name": request.tool_choice} if named else request.tool_choice,
        "tools": [],
        "top_p": request.sampling.top_p,
        "usage": None,
    }


def says_nothing(choice: Choice) -> bool:
    """Whether a reply has no other item: then it has an empty message, so that a history can hold the turn."""
    return not (choice.message.text or choice.message.reasoning or choice.message.tool_calls)


def reasoning_item(call_id: str, text: str = "") -> Item:
    """The reasoning; opened without a text."""
    return {
        "id": item_id("rs", call_id, 0, 0),
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}] if text else [],
        "encrypted_content": signature(call_id, 0),
    }


def message_item(call_id: str, outcome: str, content: list[Item]) -> Item:
    return {
        "id": item_id("msg", call_id, 0, 0),
        "type": "message",
        "status": outcome,
        "role": "assistant",
        "content": content,
    }


def text_part(request: ChatRequest, choice: Choice) -> Item:
    """The message's only part, with the log-probability of each sampled token where the request wants them."""
    logprobs = [
        {"token": each.token, "logprob": each.logprob, "bytes": token_bytes(each), "top_logprobs": []}
        for each in (choice.logprobs if request.logprobs else ())
    ]
    return {"type": "output_text", "text": choice.message.text, "annotations": [], "logprobs": logprobs}


def call_item(tools: tuple[Tool, ...], call_id: str, index: int, call: ToolCall) -> Item:
    """A tool call by the name and in the shape that the harness gave its tool; broken arguments as the policy wrote them."""
    wire = wire_call(call, tools)
    prefix = RAW_CALL if wire.raw else "ctc" if wire.custom else "fc"
    item: Item = {
        "id": item_id(prefix, call_id, 0, index),
        "type": "custom_tool_call" if wire.custom else "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": wire.name,
        "input" if wire.custom else "arguments": wire.input,
    }
    return item | ({"namespace": wire.namespace} if wire.namespace else {})


def _usage(reply: Reply) -> Item:
    prompt, completion = reply.usage.prompt_tokens, reply.usage.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
