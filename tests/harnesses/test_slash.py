"""Instructions as prompts of slash commands."""

import re
import tomllib

import pytest

from polar.harnesses import slash

TEXTS = [
    "plain",
    "/help @file",
    "!{ls} @{a.txt} {{args}}",
    "!!{x} @@{y} {{{args}}}",
    "@!{z} !{{args}} @{{args}}",
    '"\\\x7f\u2028\r\n',
]


def submitted(template: str) -> str:
    """What the programs make of a template without arguments: shell insertions by their commands, here only the empty one."""
    assert "@{" not in template, "would insert a file"
    assert "{{args}}" not in template, "would insert arguments"
    assert set(re.findall(r"!\{(.*?)\}", template)) <= {""}, "would run a command"
    return template.replace("!{}", "")


@pytest.mark.parametrize("text", TEXTS)
def test_no_sign_in_an_instruction_works_and_none_is_lost(text: str) -> None:
    assert submitted(slash.template(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_toml_command_holds_the_instruction_as_it_is(text: str) -> None:
    assert submitted(tomllib.loads(slash.toml_command(text))["prompt"]) == text


def test_a_markdown_command_is_not_offered_to_the_model() -> None:
    assert slash.markdown_command("go") == "---\ndisable-model-invocation: true\n---\ngo\n"
