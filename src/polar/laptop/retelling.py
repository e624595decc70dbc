"""A session of the expert told again with another story: the same harness, word for word, other names, texts, days and machines.

Nothing else than what task, day and machine decide is changed, so that what a policy learns from is what the harness sends.
"""

import random
import re
from collections.abc import Callable, Mapping

from polar.chat import Message, TextPart, ToolCall
from polar.laptop.expert import Dialogue
from polar.tasks.workspace import Story

MONTHS = "January February March April May June July August September October November December".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

HOMES = ("/root", "/home/ana", "/home/dev", "/home/user", "/Users/kim", "/opt/run")
ZONES = ("Etc/UTC", "Etc/UTC", "UTC", "Europe/Berlin", "America/New_York", "Asia/Tokyo")

# What differs between days and machines, in the words of the harnesses; it is the same all through a session.
_SETTING: tuple[tuple[re.Pattern[str], Callable[[random.Random], str]], ...] = (
    (re.compile(r"20\d\d-\d\d-\d\d"), lambda rng: f"20{rng.randint(25, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"),
    (
        re.compile(rf"(?:{'|'.join(DAYS)}), (?:{'|'.join(MONTHS)}) \d+, 20\d\d"),
        lambda rng: f"{rng.choice(DAYS)}, {rng.choice(MONTHS)} {rng.randint(1, 28)}, 20{rng.randint(25, 39)}",
    ),
    (re.compile(r"/[^\s:]+(?=/harnesses/)"), lambda rng: rng.choice(HOMES) + rng.choice(("/.cache/polar", "/cache", "/polar"))),
    (re.compile(r"(?<=Linux )\d+\.\d+\.\S+ #.*(?=\n)"), lambda rng: _kernel(rng)),
    (re.compile(r"(?<=<timezone>)[\w/]+"), lambda rng: rng.choice(ZONES)),
    (
        re.compile(r"(?<![\w/])/workspace\b"),
        lambda rng: "/workspace" if rng.random() < 0.75 else f"/tmp/{_hex(rng, 8)}/workspace",
    ),
)
# What differs from one result to the next.
_VOLATILE: tuple[tuple[re.Pattern[str], Callable[[random.Random], str]], ...] = (
    (re.compile(r"(?<=Chunk ID: )[0-9a-f]+"), lambda rng: _hex(rng, 6)),
    (re.compile(r"(?<=Wall time: )[\d.]+"), lambda rng: f"{rng.choice((0.0, 0.0, rng.random())):.4f}"),
    (re.compile(r"(?<=Original token count: )\d+"), lambda rng: str(rng.randint(0, 30))),
    (re.compile(r"(?<=PGID: )\d+"), lambda rng: str(rng.randint(2, 400))),
)


def _kernel(rng: random.Random) -> str:
    """What `uname` says behind the system's name."""
    more = rng.choice(
        ("", "-generic", "-amd64", f"-{rng.randint(1, 120)}-generic", f"-fc-v{rng.randint(1, 999)}", f"-{_hex(rng, 6)}")
    )
    release = f"{rng.randint(4, 7)}.{rng.randint(0, 19)}.{rng.randint(0, 220)}{more}"
    build = f"#{rng.randint(1, 200)}{rng.choice(('', '', '-Ubuntu', '~22.04.1-Ubuntu'))}"
    kind = rng.choice(("SMP", "SMP PREEMPT", "SMP PREEMPT_DYNAMIC", "SMP PREEMPT_DYNAMIC"))
    day = (
        f"{rng.choice(DAYS)[:3]} {rng.choice(MONTHS)[:3]} {rng.randint(1, 28)} {rng.randint(0, 23):02}:{rng.randint(0, 59):02}:00"
    )
    when = rng.choice((f"@{rng.randint(0, 9)}", f"{day} UTC 20{rng.randint(19, 29)}"))
    return f"{release} {build} {kind} {when} {rng.choice(('x86_64', 'x86_64', 'aarch64'))}"


def _hex(rng: random.Random, digits: int) -> str:
    return "".join(rng.choices("0123456789abcdef", k=digits))


def retold(dialogue: Dialogue, told: Story, rng: random.Random) -> Dialogue:
    """The dialogue with another story of the same kind.

    Raises:
        ValueError: the story is of another kind.
    """
    if told.kind != dialogue.story.kind:
        raise ValueError(f"a {dialogue.story.kind} dialogue cannot tell a {told.kind} story")
    words = _words(dialogue.story, told)
    pattern = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
    setting = [(found, draw(rng)) for found, draw in _SETTING]

    def say(text: str) -> str:
        text = pattern.sub(lambda match: words[match[0]], text)
        for found, drawn in setting:
            text = found.sub(drawn, text)
        for volatile, draw in _VOLATILE:
            pieces = volatile.split(text)
            text = "".join([pieces[0], *(draw(rng) + piece for piece in pieces[1:])])
        return text

    return Dialogue(dialogue.harness, told, tuple(_again(message, say) for message in dialogue.messages), dialogue.tools)


def _words(old: Story, new: Story) -> Mapping[str, str]:
    """What is said of the old story, as harnesses show it, and what is said of the new one in its place."""
    words = {old.instruction: new.instruction, **dict(zip(old.steps, new.steps, strict=True))}
    for (name, content), (other, instead) in zip(old.workspace.items(), new.workspace.items(), strict=True):
        words |= {f"───{name}": f"───{other}", content.strip(): instead.strip()}
        words |= {_in_json(content.strip()): _in_json(instead.strip())}
    return words


def _in_json(text: str) -> str:
    return text.replace("\n", "\\n").replace("'", "\\u0027")


def _again(message: Message, say: Callable[[str], str]) -> Message:
    calls = tuple(ToolCall(call.id, call.name, say(call.arguments)) for call in message.tool_calls)
    content = (TextPart(say(message.text)),) if message.content else ()
    return Message(message.role, content, message.reasoning, calls, message.tool_call_id, message.is_error)
