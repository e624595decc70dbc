"""Files between this machine and a sandbox. An agent has had its hands on one side: no link of it is ever followed out."""

import errno
import os
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from polar.errors import SandboxError, UsageError

_COPY_CHUNK = 16 * 1024 * 1024


def write_files(root: Path, files: Mapping[str, str]) -> None:
    """Write text files below `root`. Links are followed only as long as they stay in `root`.

    Raises:
        UsageError: a path is absolute or contains `..`.
        SandboxError: a link leads out of `root`, something stands in the way, or the disk is full.
    """
    real_root = root.resolve()
    for name, text in files.items():
        path = real_root / relative_path(name)
        parent = path.parent.resolve()
        if not parent.is_relative_to(real_root):
            raise SandboxError(f"{name!r} leads out of its directory through a symbolic link")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            target = parent / path.name
            target.unlink(missing_ok=True)  # a link is replaced, never written through
            target.write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            raise SandboxError(f"{name!r} cannot be written: {error.strerror}") from error


def relative_path(name: str) -> PurePosixPath:
    """`name` as a path that stays below whatever it is joined to (links aside).

    Raises:
        UsageError: it is absolute, empty or contains `..`.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise UsageError(f"{name!r} is no path below a directory: use a relative one without `..`, such as `src/main.py`")
    return path


def copy_tree(source: Path, target: Path) -> None:
    """Copy what is in `source` into `target` (made if missing).

    Symbolic links are copied as links; hard links among the copied files stay hard links; holes stay holes; sockets, pipes
    and devices are left out, and so is what lies too deep to be named. Permissions (without set-id bits) and modification
    times are kept.

    Raises:
        UsageError: `source` is no directory.
        SandboxError: a file cannot be read or written.
    """
    if not source.is_dir():
        raise UsageError(f"{source} is no directory that could be copied")
    copied: dict[tuple[int, int], Path] = {}
    pending = [(source, target)]
    try:
        while pending:
            here, there = pending.pop()
            there.mkdir(parents=True, exist_ok=True)
            for entry in _entries(here):
                if entry.is_dir(follow_symlinks=False):
                    pending.append((Path(entry.path), there / entry.name))
                else:
                    _copy_entry(entry, there / entry.name, copied)
            if here != source:
                there.chmod(stat.S_IMODE(here.lstat().st_mode) & 0o777 | stat.S_IRWXU)
    except OSError as error:
        raise SandboxError(f"{source} cannot be copied: {error}") from error


def take_tree(source: Path, target: Path) -> None:
    """`copy_tree` from a directory of a sandbox: an agent may have forbidden even its owner to read there.

    A directory that the agent removed, or replaced by a link, is an empty one.
    """
    if source.is_symlink() or not source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        return
    try:
        copy_tree(source, target)
    except SandboxError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        _tool("chmod", "-R", "u+rwX", "--", str(source))
        copy_tree(source, target)


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    """What is in `directory`, without what is too deep to be named from outside."""
    limit = os.pathconf("/", "PC_PATH_MAX") - 256
    with os.scandir(directory) as entries:
        return [entry for entry in entries if len(os.fsencode(entry.path)) < limit]


def _copy_entry(entry: os.DirEntry[str], target: Path, copied: dict[tuple[int, int], Path]) -> None:
    info = entry.stat(follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode):
        target.unlink(missing_ok=True)
        target.symlink_to(os.readlink(entry.path))
    elif stat.S_ISREG(info.st_mode):
        target.unlink(missing_ok=True)
        if first := copied.get((info.st_dev, info.st_ino)):
            os.link(first, target)
            return
        _copy_file(entry.path, target, info)
        if info.st_nlink > 1:
            copied[info.st_dev, info.st_ino] = target


def _copy_file(source: str, target: Path, info: os.stat_result) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(source, flags), "rb") as reader, target.open("xb") as writer:
        for start, end in _extents(reader.fileno(), info.st_size):
            reader.seek(start)
            writer.seek(start)
            while start < end and (data := reader.read(min(_COPY_CHUNK, end - start))):
                writer.write(data)
                start += len(data)
        writer.truncate(info.st_size)
    target.chmod(stat.S_IMODE(info.st_mode) & 0o777)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def _extents(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Where a file holds data: a sparse file of a terabyte is made in no time, and must not become a real one."""
    extents: list[tuple[int, int]] = []
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            return [(0, size)]  # the file system does not tell
        extents.append((start, end))
    return extents


def remove_tree(root: Path) -> None:
    """Remove `root` and all below it, read-only directories and very deep ones included.

    Raises:
        SandboxError: something remains.
    """
    for prepare in ([], ["chmod", "-R", "u+rwX", "--", str(root)]):
        if prepare:
            _tool(*prepare)
        said = _tool("rm", "-rf", "--", str(root))
        if not root.exists():
            return
    raise SandboxError(f"{root} cannot be removed: {said}")


def _tool(*argv: str) -> str:
    """Run a tool of the system, which knows trees that Python's recursion and path lengths do not; its last line of complaint."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    return done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
