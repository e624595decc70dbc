"""Workspace tasks: as many as wanted, decided by a test, and none of one split in the other."""

import subprocess
from pathlib import Path

import pytest

from polar.errors import UsageError
from polar.tasks.checks import check
from polar.tasks.files import Overrides, load
from polar.tasks.workspace import HELD_OUT_OF, Story, stories, workspace_tasks


def do(task_folder: Path, story: Story) -> None:
    for name, text in story.workspace.items():
        (task_folder / name).write_text(text)
    for step in story.steps:
        subprocess.run(["/bin/sh", "-c", step], cwd=task_folder, check=True, capture_output=True)


def passes(folder: Path, command: str, files: dict[str, str]) -> bool:
    for name, text in files.items():
        (folder / name).write_text(text)
    return subprocess.run(["/bin/sh", "-c", command], cwd=folder, check=False, capture_output=True).returncode == 0


def test_what_the_expert_does_passes_and_nothing_else(tmp_path: Path) -> None:
    pairs = zip(stories("train", 9), workspace_tasks("workspace:train:9"), strict=True)
    for number, (story, task) in enumerate(pairs):
        check(task)
        assert (story.instruction, story.workspace) == (task.instruction, task.workspace)
        for name, steps in (("done", story.steps), ("undone", ())):
            folder = tmp_path / f"{number}-{name}"
            folder.mkdir()
            do(folder, Story(story.kind, story.said, story.instruction, story.workspace, steps))
            assert passes(folder, task.evaluator.command, task.evaluator.files) is (name == "done")


def test_splits_share_no_text() -> None:
    train, held_out = ({story.wanted for story in stories(split, 3000)} for split in ("train", "held_out"))
    assert not train & held_out
    assert len(train) > 1800, "texts hardly ever come twice"


def test_the_same_name_gives_the_same_tasks_and_another_seed_others() -> None:
    assert workspace_tasks("workspace:held_out:20") == workspace_tasks("workspace:held_out:20:0")
    assert workspace_tasks("workspace:held_out:20")[:10] == workspace_tasks("workspace:held_out:10")
    assert workspace_tasks("workspace:held_out:20:1") != workspace_tasks("workspace:held_out:20")
    assert HELD_OUT_OF > 1


def test_they_are_a_source_of_tasks_like_a_file() -> None:
    tasks = load(["workspace:train:3", "demo"], Overrides("codex", 2))
    assert [task.harness.name for task in tasks] == ["codex"] * len(tasks)
    assert {task.samples for task in tasks} == {2}
    assert len(tasks) > 3


@pytest.mark.parametrize(
    "source", ["workspace:", "workspace:test:3", "workspace:train", "workspace:train:-1", "workspace:train:x"]
)
def test_another_spelling_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match="expected workspace:train:NUMBER or workspace:held_out:NUMBER"):
        load([source])
