"""Copies of trees that an agent made."""

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from polar.errors import SandboxError, UsageError
from polar.sandboxes.trees import copy_tree, remove_tree, take_tree, write_files


def test_a_huge_hole_is_copied_as_a_hole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.write(b"head")
        file.seek(2**38)
        file.write(b"tail")
        file.truncate(2**39)
    copy_tree(source, tmp_path / "target")
    copy = tmp_path / "target" / "sparse"
    assert copy.stat().st_size == 2**39
    assert copy.stat().st_blocks * 512 < 1_000_000
    with copy.open("rb") as file:
        assert file.read(4) == b"head"
        file.seek(2**38)
        assert file.read(4) == b"tail"


def test_contents_modes_and_times_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a").chmod(0o750)
    big = os.urandom(20_000_000)
    (source / "a" / "b" / "big").write_bytes(big)
    (source / "a" / "empty").touch(0o600)
    (source / "setuid").touch()
    (source / "setuid").chmod(0o4755)
    os.utime(source / "a" / "empty", (1_000_000, 2_000_000))
    copy_tree(source, tmp_path / "target")
    target = tmp_path / "target"
    assert (target / "a" / "b" / "big").read_bytes() == big
    assert (target / "a").stat().st_mode & 0o7777 == 0o750
    assert (target / "setuid").stat().st_mode & 0o7777 == 0o755
    assert (target / "a" / "empty").stat().st_mtime == 2_000_000


def test_hard_links_do_not_multiply(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "one").write_text("x")
    os.link(source / "one", source / "two")
    copy_tree(source, tmp_path / "target")
    assert (tmp_path / "target" / "one").stat().st_ino == (tmp_path / "target" / "two").stat().st_ino


def test_a_copy_never_writes_through_a_link_of_the_target(tmp_path: Path) -> None:
    source, target, outside = tmp_path / "source", tmp_path / "target", tmp_path / "outside"
    for directory in (source, target, outside):
        directory.mkdir()
    (source / "f").write_text("new")
    (outside / "f").write_text("old")
    (target / "f").symlink_to(outside / "f")
    copy_tree(source, target)
    assert (outside / "f").read_text() == "old"
    assert (target / "f").read_text() == "new"


def test_what_is_missing_is_an_error_for_the_user_and_empty_for_an_agent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no directory"):
        copy_tree(tmp_path / "missing", tmp_path / "target")
    take_tree(tmp_path / "missing", tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []


def test_something_in_the_way_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(SandboxError, match="'a/b' cannot be written"):
        write_files(tmp_path, {"a/b": "x"})


def test_what_an_ordinary_user_locked_is_taken_and_removed(tmp_path: Path) -> None:
    if os.getuid() == 0 and subprocess.run(["setpriv", "--version"], check=False, capture_output=True).returncode != 0:
        pytest.skip("root needs setpriv (util-linux) to become an ordinary user")
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    program = """
import sys
from pathlib import Path
from polar.sandboxes.trees import take_tree, remove_tree
root = Path(sys.argv[1])
(root / "own" / "locked").mkdir(parents=True)
(root / "own" / "locked" / "f").write_text("x")
(root / "own" / "locked").chmod(0)
(root / "own").chmod(0o500)
take_tree(root / "own", root / "copy")
assert (root / "copy" / "locked" / "f").read_text() == "x"
remove_tree(root / "own")
assert not (root / "own").exists()
"""
    prefix = ["setpriv", "--reuid", "65534", "--clear-groups", "--bounding-set=-all"] if os.getuid() == 0 else []
    source = Path(__file__).parents[2] / "src"
    library = Path(msgspec.__file__).parents[1]
    argv = [*prefix, "/usr/bin/python3", "-c", program, str(tmp_path)]
    path = {"PYTHONPATH": f"{source}:{library}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=path)
    assert done.returncode == 0, done.stderr


def test_removing_twice_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    remove_tree(tmp_path / "x")
    remove_tree(tmp_path / "x")
