"""A small agent for the tests of the pipeline: the standard library alone, so that any Python runs it.

It asks the model until it gets a reply without tool calls, runs each `bash` call, and prints the last text. `AGENT_MODE`
makes it misbehave.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {}}}}}]


def ask(messages: list[dict[str, object]]) -> dict[str, object]:
    body = json.dumps({"model": os.environ["POLAR_MODEL"], "messages": messages, "tools": TOOLS}).encode()
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    )
    with urllib.request.urlopen(request) as reply:
        message: dict[str, object] = json.load(reply)["choices"][0]["message"]
        return message


def work() -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
    while True:
        message = ask(messages)
        messages.append(message)
        calls = message.get("tool_calls") or []
        assert isinstance(calls, list)
        for call in calls:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
        if not calls or mode == "once":
            sys.stdout.write(str(message.get("content")))
            return


mode = os.environ.get("AGENT_MODE", "")
if mode == "refused":
    work()
    ask([{"role": "user", "content": [{"type": "image_url"}]}])
if mode == "leak":
    work()
    sys.stderr.write(f"cannot reach {os.environ['POLAR_BASE_URL']}\n")
    os.kill(os.getpid(), 9)
if mode == "silent":
    sys.stderr.write("I have nothing to say\n")
    sys.exit(3)
work()
if mode == "crash":
    sys.stderr.write("out of cheese\n")
    os.kill(os.getpid(), 11)
if mode == "sleep":
    time.sleep(600)
if mode == "side":
    TOOLS.clear()
    ask([{"role": "user", "content": "A title, please."}])
if mode == "fail":
    sys.exit(7)
if mode == "curious":
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(os.environ["POLAR_BASE_URL"] + "/v1/weather")
