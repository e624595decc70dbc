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
    copied: dict[tuple[int, int], str] = {}
    pending = [(str(source), str(target))]
    try:
        target.mkdir(parents=True, exist_ok=True)
        while pending:
            here, there = pending.pop()
            for entry, copy in _entries(here, there):
                if not entry.is_dir(follow_symlinks=False):
                    _copy_entry(entry, copy, copied)
                    continue
                if os.path.islink(copy) or not os.path.isdir(copy):
                    os.mkdir(copy)
                os.chmod(copy, entry.stat(follow_symlinks=False).st_mode & 0o777 | stat.S_IRWXU)
                pending.append((entry.path, copy))
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


def _entries(here: str, there: str) -> list[tuple[os.DirEntry[str], str]]:
    """What is in `here`, each with its path in `there`, without what is too deep to be named."""
    limit = os.pathconf("/", "PC_PATH_MAX")
    with os.scandir(here) as entries:
        paths = [(entry, f"{there}/{entry.name}") for entry in entries]
    return [(entry, copy) for entry, copy in paths if max(len(os.fsencode(entry.path)), len(os.fsencode(copy))) < limit]


def _copy_entry(entry: os.DirEntry[str], target: str, copied: dict[tuple[int, int], str]) -> None:
    info = entry.stat(follow_symlinks=False)
    if not (stat.S_ISLNK(info.st_mode) or stat.S_ISREG(info.st_mode)):
        return
    if os.path.lexists(target):
        os.unlink(target)
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(entry.path), target)
    elif first := copied.get((info.st_dev, info.st_ino)):
        os.link(first, target)
    else:
        _copy_file(entry.path, target, info)
        if info.st_nlink > 1:
            copied[info.st_dev, info.st_ino] = target


def _copy_file(source: str, target: str, info: os.stat_result) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(source, flags), "rb") as reader, open(target, "xb") as writer:
        for start, end in _extents(reader.fileno(), info.st_size):
            reader.seek(start)
            writer.seek(start)
            while start < end and (data := reader.read(min(_COPY_CHUNK, end - start))):
                writer.write(data)
                start += len(data)
        writer.truncate(info.st_size)
    os.chmod(target, stat.S_IMODE(info.st_mode) & 0o777)
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
