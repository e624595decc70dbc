"""Slash commands of our own, by which Gemini CLI and its descendants take an instruction as it is.

On standard input they read a first `/` as a command and an `@path` as a file to be put in, and no spelling escapes both. The
prompt of a command in their configuration is submitted without that; it has only three signs of its own, which are broken here.
"""

import msgspec

NAME = "polar-instruction"
LINE = f"/{NAME}"
_NOTHING = "!{}"  # a shell insertion without a command: it leaves nothing behind
_SIGNS = {
    "!{": f"!{_NOTHING}{{",  # inserts the output of a shell command
    "@{": f"@{_NOTHING}{{",  # inserts a file
    "{{args}}": f"{{{_NOTHING}{{args}}}}",  # inserts what follows the command's name
}


def template(instruction: str) -> str:
    """The prompt of a command that submits exactly `instruction`."""
    for sign, broken in _SIGNS.items():
        instruction = instruction.replace(sign, broken)
    return instruction


def toml_command(instruction: str) -> str:
    """A command file in TOML: JSON's strings are TOML's, but for DEL."""
    return f"prompt = {msgspec.json.encode(template(instruction)).decode()}\n".replace("\x7f", r"\u007f")


def markdown_command(instruction: str) -> str:
    """A command file in Markdown, which the model is not told of; whitespace around the instruction is lost."""
    return f"---\ndisable-model-invocation: true\n---\n{template(instruction)}\n"
