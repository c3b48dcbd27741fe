"""Memory of the host: how much a process may still take, how much it holds, and how to go on when it runs out."""

import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

import torch

Result = TypeVar("Result")
ROOT = Path("/")

# What a control group says of its limits, of what it takes, and how much of that the kernel can drop at once.
Names = tuple[tuple[str, ...], str, str]
NAMES: dict[int, Names] = {  # by version
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}

# What the allocators say that have no error class of their own: PyTorch's on the CPU, oneDNN, CUDA's libraries, and
# ONNX Runtime's.
SAID = (
    "DefaultCPUAllocator: can't allocate memory",
    "std::bad_alloc",
    "could not create a memory",
    "could not create a primitive",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
    "Failed to allocate memory for requested buffer",
    "Available memory of",  # "... is smaller than requested bytes of": its arena for a GPU
)


class OutOfMemoryError(Exception):
    """Memory ran out, on this rank or on another, in work that all do; what they did of it is undone."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, OutOfMemoryError)):
        return True
    # ONNX Runtime's errors are no RuntimeErrors.
    return isinstance(error, Exception) and any(one in str(error) for one in SAID)


def attempt(action: Callable[[], Result]) -> Result | None:
    """The action's result; None where memory ran out. By then the action's frames are gone, and what they held is free.

    The action must not return None itself.
    """
    early = torch.zeros((), requires_grad=True) * 1
    try:
        return action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # What a failed backward pass on a CPU had still to do, with all activations, waits in this thread's queue for
    # another pass. One over a graph older than all of it throws it away first: the queue runs what is newest first.
    if early.requires_grad:  # else gradients are off, and there was no backward pass
        early.backward()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def available_memory(root: Path = ROOT) -> int:
    """Bytes that this process can still take: the least of what the host has free and of what each limit leaves.

    Limits are those of the control groups (v1 and v2) that the process is in, from its own up to the outermost that can
    be seen, which is how containers, Slurm and systemd set them, and those of `ulimit -v` and `-d`. 0 where the system
    does not say. `root` is where /proc and /sys are looked for.
    """
    left = [*_free_of_host(root), *_left_by_groups(root), *_left_by_ulimits(root)]
    return max(0, min(left, default=0))


def resident_memory(field: str = "VmRSS", process: int | str = "self") -> int | None:
    """Bytes of a process in memory: now (VmRSS), or at most so far (VmHWM); 0 for one that has ended.

    None where there is no /proc. The peak is not getrusage's ru_maxrss, which a process inherits from the one that
    started it.
    """
    status = _status(ROOT / "proc" / str(process))
    if status is None:
        return None if _status(ROOT / "proc" / "self") is None else 0
    return status.get(field, 0)


def _status(process: Path) -> dict[str, int] | None:
    """The sizes in a process's status, in bytes; None where there is none to read."""
    return _sizes(process / "status", r"^(\w+):\s+(\d+) kB$")


def _sizes(file: Path, line: str) -> dict[str, int] | None:
    """The sizes in kB that the lines of a file name, in bytes; None where the file cannot be read."""
    text = _text(file)
    return None if text is None else {name: int(size) * 1024 for name, size in re.findall(line, text, re.MULTILINE)}


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _free_of_host(root: Path) -> Iterator[int]:
    """What the host could give without swapping; half of what it has, where it does not say more than that."""
    sizes = _sizes(root / "proc" / "meminfo", r"^(\w+):\s+(\d+) kB$") or {}
    if "MemAvailable" in sizes:
        yield sizes["MemAvailable"]
        return
    try:
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):
        return


def _left_by_ulimits(root: Path) -> Iterator[int]:
    """What is left of this process's address space and of its data."""
    limits, status = _text(root / "proc" / "self" / "limits") or "", _status(root / "proc" / "self") or {}
    for name, taken in (("Max address space", "VmSize"), ("Max data size", "VmData")):
        if found := re.search(rf"^{name}\s+(\d+)\s", limits, re.MULTILINE):
            yield int(found[1]) - status.get(taken, 0)


def _left_by_groups(root: Path) -> Iterator[int]:
    """What each limit of each control group of this process leaves."""
    for folder, (limits, taken, droppable) in _groups(root):
        used = _number(folder / taken)
        if used is None:
            continue
        dropped = re.search(rf"^{droppable} (\d+)$", _text(folder / "memory.stat") or "", re.MULTILINE)
        used -= min(int(dropped[1]), used) if dropped else 0
        yield from (limit - used for name in limits if (limit := _number(folder / name)) is not None)


def _number(file: Path) -> int | None:
    """The number in a file; None where there is none, as in 'max'."""
    text = (_text(file) or "").strip()
    return int(text) if text.isdigit() else None


def _groups(root: Path) -> Iterator[tuple[Path, Names]]:
    """The folders of the control groups that may limit this process's memory, and the names of the files in them.

    A group that no mount shows, as from within another namespace ('/../other'), cannot be asked: then what is mounted,
    which in a container is the container's own group, is the best that is known.
    """
    mounts = _group_mounts(root)
    for version, group in _group_paths(root).items():
        shown = [
            (folder, group.relative_to(top))
            for folder, top in mounts[version]
            if group.is_relative_to(top) and ".." not in group.parts
        ]
        for folder, inside in shown or [(folder, PurePosixPath()) for folder, _ in mounts[version]]:
            yield from ((folder / level, NAMES[version]) for level in (inside, *inside.parents))


def _group_mounts(root: Path) -> dict[int, list[tuple[Path, str]]]:
    """Where the control groups that account for memory are mounted, by version, and from which group on."""
    mounts: dict[int, list[tuple[Path, str]]] = {1: [], 2: []}
    for line in (_text(root / "proc" / "self" / "mountinfo") or "").splitlines():
        fields, _, system = line.partition(" - ")
        kind, _, options = system.split(maxsplit=2)
        top, folder = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), one) for one in fields.split()[3:5])
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            mounts[2 if kind == "cgroup2" else 1].append((root / folder.lstrip("/"), top))
    return mounts


def _group_paths(root: Path) -> dict[int, PurePosixPath]:
    """The control group that accounts for this process's memory, in version 1, in version 2, or in both."""
    paths = {}
    for line in (_text(root / "proc" / "self" / "cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers or "memory" in controllers.split(","):
            paths[1 if controllers else 2] = PurePosixPath(path)
    return paths
