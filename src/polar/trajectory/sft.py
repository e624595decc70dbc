"""Traces as chats for supervised fine-tuning, in the shape that OpenAI's fine-tuning and most trainers read."""

from collections.abc import Iterator

from polar.specs import Trace
from polar.trajectory.export import Exported, message_json, tool_json


def chats(exported: Exported, *, longest: bool = False) -> Iterator[dict[str, object]]:
    """One chat for each trace of a session, or with `longest` only that of its longest trace.

    `messages` and `tools` are those of OpenAI Chat. An assistant message has `weight` 1 if its trace trains it, else 0. Beside
    them stand `session_id`, `task_id`, `sample`, `trace`, `reward`, and `trace_weight`: the trace's share of its session.
    """
    result, traces = exported.result, exported.trajectory.traces
    numbered = list(enumerate(traces))
    for index, trace in sorted(numbered, key=lambda one: -_length(one[1]))[:1] if longest else numbered:
        chat: dict[str, object] = {"messages": _messages(trace)}
        if trace.tools:
            chat["tools"] = [tool_json(tool) for tool in trace.tools]
        yield chat | {
            "session_id": result.session_id,
            "task_id": result.task_id,
            "sample": result.sample,
            "trace": index,
            "reward": trace.reward,
            "trace_weight": trace.weight,
        }


def _length(trace: Trace) -> int:
    return len(trace.prompt_ids) + len(trace.response_ids)


def _messages(trace: Trace) -> list[dict[str, object]]:
    trained = {len(trace.prompt_messages) + place for place in trace.answers}
    messages = [message_json(message) for message in (*trace.prompt_messages, *trace.response_messages)]
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            message["weight"] = int(place in trained)
    return messages
