"""Task files: what they may say, and how what they may not say is refused."""

import os
import time
from pathlib import Path

import pytest

from polar.errors import UsageError
from polar.specs import HarnessSpec, SamplingSpec
from polar.tasks.files import Overrides, load


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def refusal(*sources: str, overrides: Overrides | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load(sources, overrides or Overrides())
    return str(caught.value)


class TestWhatAFileMaySay:
    def test_a_list_of_tasks(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "a.yaml", "- {id: one, instruction: Say hello.}\n- {id: two, instruction: Say bye., samples: 3}\n"
        )
        tasks = load([path])
        assert [(task.id, task.instruction, task.samples) for task in tasks] == [("one", "Say hello.", 1), ("two", "Say bye.", 3)]

    def test_defaults_lie_under_each_task_key_by_key(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "a.yml",
            """
defaults:
  samples: 4
  sampling: {temperature: 0.5, max_tokens: 48}
  workspace: {README: hi}
tasks:
  - {id: one, instruction: x}
  - {id: two, instruction: x, samples: 2, sampling: {max_tokens: 7}, workspace: {b: B}}
""",
        )
        one, two = load([path])
        assert (one.samples, one.sampling, one.workspace) == (4, SamplingSpec(0.5, max_tokens=48), {"README": "hi"})
        assert (two.samples, two.sampling, two.workspace) == (2, SamplingSpec(0.5, max_tokens=7), {"README": "hi", "b": "B"})

    def test_jsonl_with_empty_lines_and_line_separators_in_text(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", '{"id": "a", "instruction": "x\u2028y"}\r\n\n{"id": "b", "instruction": "z"}\n')
        assert [(task.id, task.instruction) for task in load([path])] == [("a", "x\u2028y"), ("b", "z")]

    def test_a_byte_order_mark_is_no_text(self, tmp_path: Path) -> None:
        assert load([write(tmp_path / "a.yaml", b"\xef\xbb\xbf- {id: a, instruction: x}")])[0].id == "a"

    def test_a_directory_gives_its_task_files_by_name_and_nothing_below(self, tmp_path: Path) -> None:
        write(tmp_path / "b.yaml", "[{id: b, instruction: x}]")
        write(tmp_path / "a.jsonl", '{"id": "a", "instruction": "x"}')
        write(tmp_path / "notes.txt", "not a task")
        (tmp_path / "workspace").mkdir()
        write(tmp_path / "workspace" / "config.yaml", "debug: true")
        assert [task.id for task in load([str(tmp_path)])] == ["a", "b"]

    def test_several_sources_keep_their_order(self, tmp_path: Path) -> None:
        first, second = (write(tmp_path / f"{name}.yaml", f"[{{id: {name}, instruction: x}}]") for name in "ba")
        assert [task.id for task in load([first, second])] == ["b", "a"]

    def test_a_workspace_path_starts_from_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "repo").mkdir()
        path = write(tmp_path / "a.yaml", "[{id: a, instruction: x, workspace: repo}]")
        monkeypatch.chdir("/")
        assert load([path])[0].workspace == str(tmp_path.resolve() / "repo")

    def test_aliases_and_merge_keys_of_a_sensible_size(self, tmp_path: Path) -> None:
        shared = "- &base {id: a, instruction: x, samples: 2}\n" + "".join(f"- {{<<: *base, id: t{n}}}\n" for n in range(500))
        tasks = load([write(tmp_path / "a.yaml", shared)])
        assert len(tasks) == 501
        assert {task.samples for task in tasks} == {2}

    def test_the_demo(self) -> None:
        tasks = load(["demo"])
        assert len(tasks) == 8
        assert {(task.harness.name, task.evaluator.kind, task.samples) for task in tasks} == {("pi", "command", 4)}
        assert all("$POLAR_ANSWER" in task.evaluator.command for task in tasks)


class TestOverrides:
    def test_samples(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.yaml", "[{id: a, instruction: x, samples: 2}]")
        assert load([path], Overrides(samples=9))[0].samples == 9
        assert refusal(path, overrides=Overrides(samples=0)) == "task 'a': samples: expected 1 to 100000, got 0"

    def test_another_harness_takes_the_options_with_it(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.yaml", "[{id: a, instruction: x, harness: {name: shell, options: {command: ls}}}]")
        assert load([path], Overrides(harness="pi"))[0].harness == HarnessSpec("pi")
        assert load([path], Overrides(harness="shell"))[0].harness == HarnessSpec("shell", {"command": "ls"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": the file is empty; expected a list of tasks"),
        ("# only a comment\n", ": the file is empty; expected a list of tasks"),
        ("[]", ":1: the list of tasks is empty"),
        ("tasks: []", ":1: the list of tasks is empty"),
        ("just words", ":1: expected a list of tasks, got text"),
        (
            "id: a\ninstruction: x",
            ":1: expected a list of tasks, or a mapping with `tasks` and `defaults`; got a mapping with id, instruction",
        ),
        ("defaults: [1]\ntasks: [{id: a}]", ":1: defaults: expected a mapping, got a list"),
        ("tasks:\n  id: a", ":2: expected a list of tasks, got a mapping"),
        ("- {id: a, instruction: x}\n- hello", ":2: expected a task as a mapping, got text"),
        ("- id: a\n  instruction: [x", ":3: this is not YAML: did not find expected ',' or ']'"),
        ("- id: a\n  instruction: *nobody", ":2: this is not YAML: found undefined alias"),
        ("- id: a\n---\n- id: b", ":2: this is not YAML: but found another document"),
        (
            "- {id: a, instruction: !!python/object:os.system x}",
            ":1: this is not YAML: could not determine a constructor for the tag",
        ),
        ("- {id: a, instruction: 2020-19-45}", ": this is not YAML: month must be in 1..12"),
        ("- {id: a, instruction: x}\n- {id: a, instruction: y}", ":2: id: 'a' is already at "),
        ("- {id: a, instruction: x, id: b}", ":1: the key 'id' appears twice"),
        ("- instruction: x", ":1: id: this field is required"),
        ("- id: a", ":1: task 'a': instruction: this field is required"),
        (
            "- {id: a b, instruction: x}",
            ":1: id: expected up to 128 letters, digits, '.', '_' and '-', not a sign first; got 'a b'",
        ),
        ("- id: ..\n  instruction: x", ":1: id: expected up to 128 letters"),
        ("- instruction: x\n  id: 7", ":2: id: expected text, got a number: 7 (put it in quotes)"),
        ("- id: a\n  instruction: yes", ":2: task 'a': instruction: expected text, got true or false: True (put it in quotes)"),
        (
            "- {id: a, instruction: 2020-01-02}",
            ":1: task 'a': instruction: expected text, got a date: 2020-01-02 (put it in quotes)",
        ),
        ("- id: a\n  instruction:", ":2: task 'a': instruction: expected text, got nothing"),
        ("- id: a\n  instruction: ' '", ":2: task 'a': instruction: expected what the agent is told; it is empty"),
        ('- id: a\n  instruction: "a\\0b"', ":2: task 'a': instruction: expected text without NUL characters"),
        ("- id: a\n  instrction: x", ":2: task 'a': instrction: there is no such field; did you mean 'instruction'?"),
        (f"- id: a\n  instruction: x\n  samples: {'9' * 5000}", ": this is not YAML: Exceeds the limit"),
        (
            "defaults:\n  samples: many\ntasks: [{id: a, instruction: x}]",
            ":2: task 'a': samples: expected a whole number, got text",
        ),
    ],
)
def test_a_yaml_file_that_cannot_be_used_is_refused_by_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "tasks.yaml", text)
    assert refusal(path).startswith(path + message)


@pytest.mark.parametrize(
    ("fields", "line", "message"),
    [
        ("  evaluator:\n    comand: ls", 4, "evaluator.comand: there is no such field; did you mean 'command'?"),
        ("  timeouts: {zzz: 1}", 3, "timeouts.zzz: there is no such field; expected one of prepare, run, score"),
        ("  1: y", 3, "1: there is no such field; expected one of id, instruction, workspace"),
        ("  samples: three", 3, "samples: expected a whole number, got text: 'three'"),
        ("  samples: 1.5", 3, "samples: expected a whole number, got a number: 1.5"),
        ("  samples: 0", 3, "samples: expected 1 to 100000, got 0"),
        (f"  samples: {10**400}", 3, "samples: expected 1 to 100000, got a number far outside"),
        ("  sampling: {temperature: .nan}", 3, "sampling.temperature: expected 0 to 100, got nan"),
        ("  sampling: {top_p: 0}", 3, "sampling.top_p: expected more than 0 and at most 1, got 0.0"),
        ("  sampling: {top_k: -1}", 3, "sampling.top_k: expected 0 to 2147483647, got -1"),
        ("  sampling: {max_tokens: 0}", 3, "sampling.max_tokens: expected 1 to 2147483647, got 0"),
        ("  timeouts: {run: .inf}", 3, "timeouts.run: expected seconds, more than 0 and at most 2592000; got inf"),
        (f"  timeouts: {{run: {10**400}}}", 3, "timeouts.run: number out of range"),
        ("  harness: pi", 3, "harness: expected a mapping, got text: 'pi'"),
        ("  workspace:\n    ok: y\n    b: 5", 5, "workspace.b: expected text, got a number: 5 (put it in quotes)"),
        ("  workspace: {5: b}", 3, "workspace.5: expected text, got a number: 5 (put it in quotes)"),
        ("  workspace: [b]", 3, "workspace: expected a path or a mapping, got a list"),
        ("  workspace: nowhere", 3, "workspace: expected a directory, got 'nowhere', which is "),
        ("  workspace: ''", 3, "workspace: expected a directory, got ''"),
        ("  workspace: {../b: y}", 3, "workspace.../b: expected the path of a file within the workspace"),
        ("  evaluator: {files: {/etc/b: y}}", 3, "evaluator.files./etc/b: expected the path of a file within"),
    ],
)
def test_a_field_that_cannot_be_used_is_refused_by_name(tmp_path: Path, fields: str, line: int, message: str) -> None:
    path = write(tmp_path / "tasks.yaml", f"- id: a\n  instruction: x\n{fields}")
    assert refusal(path).startswith(f"{path}:{line}: task 'a': {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": the file is empty; expected a task as a JSON object on each line"),
        ("\n \n", ": the file is empty"),
        ('{"id": "a", "instruction": "x"}\n{"id": ', ":2: this is not JSON: Expecting value at column 8"),
        ("[1]", ":1: expected a task as a JSON object, got a list"),
        ('{"id": "a", "id": "b"}', ":1: this is not JSON: the key 'id' appears twice"),
        ('{"id": "a", "instruction": "x", "timeouts": {"run": NaN}}', ":1: this is not JSON: NaN is not JSON"),
        (
            '{"id": "a", "instruction": "x", "samples": 1e999}',
            ":1: task 'a': samples: expected a whole number, got a number: inf",
        ),
        ('{"id": "a", "instruction": "x", "samples": ' + "9" * 5000 + "}", ":1: this is not JSON: Exceeds the limit"),
        ('{"id": "a", "instruction": "\\ud800"}', ":1: task 'a': instruction: expected text that UTF-8 can hold"),
        ("[" * 100_000, ":1: nested too deeply"),
        (
            '\n{"id": "a", "instruction": "x", "sample": 3}',
            ":2: task 'a': sample: there is no such field; did you mean 'samples'?",
        ),
    ],
)
def test_a_jsonl_file_that_cannot_be_used_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "tasks.jsonl", text)
    assert refusal(path).startswith(path + message)


class TestSources:
    def test_bytes_that_are_no_utf8(self, tmp_path: Path) -> None:
        for name in ("a.yaml", "a.jsonl"):
            path = write(tmp_path / name, b"# one\n# \xff\n")
            assert refusal(path) == f"{path}:2: this is not UTF-8: byte 0xff at offset 8"

    def test_control_characters(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.yaml", "- id: a\x07")
        assert refusal(path).startswith(f"{path}")

    def test_a_missing_file_with_a_near_one(self, tmp_path: Path) -> None:
        write(tmp_path / "tasks.yaml", "[]")
        wanted = str(tmp_path / "task.yaml")
        assert refusal(wanted).startswith(f"{wanted}: there is no such file; did you mean 'tasks.yaml'?; expected a YAML file")

    def test_a_misspelt_demo(self) -> None:
        assert "did you mean 'demo'?" in refusal("dmo")

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        path = write(tmp_path / "tasks.toml", "")
        assert refusal(path).startswith(f"{path}: the name ends in none of .yaml, .yml, .jsonl")

    def test_a_pipe_is_no_file(self, tmp_path: Path) -> None:
        path = tmp_path / "pipe.yaml"
        os.mkfifo(path)
        assert refusal(str(path)).startswith(f"{path}: this is no ordinary file")

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        assert refusal(str(tmp_path)).startswith(f"{tmp_path}: this directory holds no task files")

    def test_no_source(self) -> None:
        assert refusal().startswith("no tasks: expected a YAML file")

    def test_a_name_that_no_system_takes(self) -> None:
        assert "cannot be read" in refusal("x" * 5000 + ".yaml")

    def test_the_same_id_in_two_files(self, tmp_path: Path) -> None:
        first = write(tmp_path / "a.yaml", "[{id: a, instruction: x}]")
        second = write(tmp_path / "b.jsonl", '{"id": "a", "instruction": "x"}')
        assert refusal(first, second) == f"{second}:1: id: 'a' is already at {first}:1; ids are unique in a run"


class TestBombs:
    """What unfolds without bound is refused in the time that it takes to read it."""

    def test_aliases_of_aliases(self, tmp_path: Path) -> None:
        levels = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
        levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
        path = write(tmp_path / "a.yaml", "- id: a\n  instruction: x\n  metadata:\n    " + "\n    ".join(levels))
        assert "its aliases unfold to" in self.quick_refusal(path)

    def test_merges_of_merges(self, tmp_path: Path) -> None:
        levels = ["- &m0 {a: b, c: d}"]
        levels += [f"- &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, 30)]
        assert "its aliases unfold to" in self.quick_refusal(write(tmp_path / "a.yaml", "\n".join(levels)))

    def test_one_long_text_many_times(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.yaml", f"- &long {'x' * 100_000}\n" + "- *long\n" * 1_000)
        assert "its aliases unfold to" in self.quick_refusal(path)

    def test_a_value_within_itself(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.yaml", "- &me {id: a, instruction: x, metadata: {a: *me}}")
        assert "contains itself" in self.quick_refusal(path)

    @pytest.mark.parametrize("levels", [100, 100_000])
    def test_brackets(self, tmp_path: Path, levels: int) -> None:
        message = self.quick_refusal(write(tmp_path / "a.yaml", "[" * levels + "]" * levels))
        assert "nested too deeply" in message or "exceeded maximum nesting depth" in message

    def test_a_chain_of_aliases(self, tmp_path: Path) -> None:
        chain = "- &a0 [x]\n" + "".join(f"- &a{n} [*a{n - 1}]\n" for n in range(1, 5_000))
        assert "nested too deeply" in self.quick_refusal(write(tmp_path / "a.yaml", chain))

    @staticmethod
    def quick_refusal(path: str) -> str:
        begin = time.perf_counter()
        message = refusal(path)
        assert time.perf_counter() - begin < 5
        return message
