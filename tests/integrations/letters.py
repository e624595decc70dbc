"""A harness that asks twice, the second time going on from the first answer; and a reward for letters."""

import sys

from polar.specs import EvaluatorSpec, HarnessSpec, SamplingSpec, Task
from tests.training.bandit import REWARD

ASK = """
import json, os, urllib.request

def ask(said):
    body = json.dumps({"model": os.environ["POLAR_MODEL"], "messages": said}).encode()
    key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

said = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
said += [ask(said), {"role": "user", "content": "go on"}]
ask(said if MERGED else said[-1:])
"""


def letters(id: str, instruction: str, *, merged: bool = True, max_tokens: int = 8, temperature: float = 1.0) -> Task:
    """A task whose sessions have a trace of two turns, or (not `merged`) two traces of one."""
    program = ASK.replace("MERGED", str(merged)).replace('"', '\\"')
    return Task(
        id,
        instruction,
        harness=HarnessSpec("shell", {"command": f'exec {sys.executable} -S -c "{program}"'}),
        evaluator=EvaluatorSpec("command", REWARD, reward="printed"),
        sampling=SamplingSpec(max_tokens=max_tokens, temperature=temperature),
    )
