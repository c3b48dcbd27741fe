"""A trial: a run in miniature with one micro-batch and one way of keeping activations, and the memory that it takes.

Each trial is a process of its own, `python -m detector.fitting.trial`, on every kind of device: nothing is left over
from earlier trials, one that wants too much can be ended, and it belongs to no process group, whatever the one that
starts it belongs to. It ends when the process that started it does, however that ends. A trial in stages is as many
processes, in a group of their own.
"""

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from detector import distributed
from detector.errors import ConfigError
from detector.fitting.capacity import free_memory, resident
from detector.fitting.rehearsal import Job, rehearse
from detector.memory import OutOfMemoryError, attempt

OVER = 1.5  # times the memory: a trial that takes more is ended
PAUSE = 0.05  # seconds between two looks at a trial
LINGER = 30.0  # seconds that processes of a trial may go on after the first of them has ended
# What a launcher tells the processes of a run about one another; a trial is none of them.
GROUP = re.compile(r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|TORCHELASTIC_\w+|MASTER_(ADDR|PORT)")


class Measured(NamedTuple):
    """What a trial took; peak None: it was ended, or the device refused."""

    peak: int | None  # bytes
    rate: float | None  # images a second


def measure(job: Job, devices: Sequence[torch.device], limit: int) -> Measured:
    """Run a trial, where it may take `limit` bytes of the device; on several each is a stage, and one is as all are.

    ConfigError where it fails for another reason.
    """
    most = OVER * limit if devices[0].type == "cpu" else float("inf")
    questions = [("measured", with_device(job, device), str(device), limit) for device in devices]
    answers = in_children(questions, most)
    if any(status < 0 for status, _ in answers):  # ended by us, or by a system without memory
        return Measured(None, None)
    if failed := [said for status, said in answers if status]:
        raise ConfigError(f"a trial with batch={job.settings.batch} failed, and not for want of memory: {failed[0]}")
    found = [Measured(**json.loads(said)) for _, said in answers]
    if any(one.rate is None for one in found):
        return Measured(None, None)
    return Measured(max(one.peak for one in found), found[0].rate / len(devices))


def with_device(job: Job, device: torch.device) -> Job:
    return job.with_cut(job.settings.model_copy(update={"device": str(device)}), job.accumulate)


def free_on(device: torch.device) -> int:
    """`free_memory` as a trial finds it; this process asks no GPU, and so takes none of its memory for a context."""
    if device.type != "cuda":
        return free_memory(device)
    ((status, said),) = in_children([("free", str(device))], float("inf"))
    if status:
        raise ConfigError(f"device={device}: cannot be asked for its memory: {said}")
    return json.loads(said)


def in_children(questions: Sequence[tuple[Any, ...]], most: float) -> list[tuple[int, str]]:
    """The exit status of a new process for each question, and the last line that it said. Several are one group.

    All are ended, with a negative status, when one has taken `most` bytes of the host's memory or leaves the others
    behind, or when we are stopped.
    """
    alone = {key: value for key, value in os.environ.items() if not GROUP.fullmatch(key)}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if len(questions) > 1 else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = []
        for rank, question in enumerate(questions):
            asked = folder / f"question{rank}"
            asked.write_bytes(pickle.dumps(question))
            text = {"mode": "w+", "encoding": "utf-8", "errors": "replace"}
            out, err = (stack.enter_context((folder / f"{name}{rank}").open(**text)) for name in ("out", "err"))
            command = [sys.executable, "-m", "detector.fitting.trial", str(asked)]
            streams = {"stdin": subprocess.PIPE, "stdout": out, "stderr": err}
            around = {**alone, **(in_group(rank, len(questions), store.port) if store else {})}
            processes.append((subprocess.Popen(command, **streams, env=around), out, err))
            stack.callback(end, processes[-1][0])
        watch([process for process, _, _ in processes], most)
        for process, _, _ in processes:
            end(process)
        return [(one.returncode, last_line(out if one.returncode == 0 else err)) for one, out, err in processes]


def in_group(rank: int, size: int, port: int) -> dict[str, str]:
    """What a process of a group must know of it, as torchrun would tell it."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // size, 1))),
    }


def watch(processes: Sequence[subprocess.Popen[bytes]], most: float) -> None:
    """Wait for processes, until one has taken `most` bytes, has failed, or ended LINGER seconds before another."""
    alone = float("inf")  # when one may go on no longer than the others
    while any(process.poll() is None for process in processes) and time.monotonic() < alone:
        for process in processes:
            if process.poll() is None and most < float("inf") and resident("VmHWM", process.pid) > most:
                process.kill()
                alone = 0.0
            if process.poll() is not None:
                alone = min(alone, time.monotonic() + LINGER)
        time.sleep(PAUSE)


def end(process: subprocess.Popen[bytes]) -> None:
    """Have a process ended, if it is not."""
    if process.poll() is None:
        process.kill()
    process.wait()
    process.stdin.close()


def last_line(file: IO[str]) -> str:
    file.seek(0)
    return ["no word", *file.read().strip().splitlines()][-1]


# --- in the process of a trial


def main(path: str) -> None:
    """Answer the question in a file; the answer is the last line that is printed, as JSON."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    name, *arguments = pickle.loads(Path(path).read_bytes())
    print(json.dumps({"measured": measured, "free": free}[name](*arguments)))


def end_with_parent() -> None:
    """End this process when the one that started it is gone: then the pipe between them closes."""
    os.read(0, 1)  # nothing is ever written; not through sys.stdin, whose lock an ordinary end would wait for
    os._exit(1)


def free(device: str) -> int:
    return free_memory(torch.device(device))


def measured(job: Job, device: str, limit: int) -> dict[str, float | None]:
    """What a trial takes: of a GPU what its allocator reserved and its kernels take, else the process's peak."""
    chosen = torch.device(device)
    with distributed.process_group(chosen):
        return alone_or_joined(job, chosen, limit)._asdict()


def alone_or_joined(job: Job, chosen: torch.device, limit: int) -> Measured:
    if chosen.type != "cuda":
        rate = rate_of(job, chosen)
        return Measured(resident("VmHWM") + job.kept if rate else None, rate)
    total, before = torch.cuda.mem_get_info(chosen)[1], beside(chosen)
    torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), chosen)
    rate = rate_of(job, chosen)
    kernels = max(beside(chosen) - before, 0)  # loaded when first used
    return Measured(torch.cuda.max_memory_reserved(chosen) + kernels if rate else None, rate)


def rate_of(job: Job, device: torch.device) -> float | None:
    """Images a second of a trial; None where the device refused memory.

    In stages of one image a micro-batch, fewer are under way at once where it refuses, as in a run.
    """
    stages = distributed.world_size()
    for depth in range(stages, 0 if job.settings.batch == 1 else stages - 1, -1):
        with suppress(OutOfMemoryError):  # in a step, which is undone; what there was is free again
            return attempt(partial(rehearse, job, device, depth))
    return None


def beside(device: torch.device) -> int:
    """Bytes in use on the GPU outside this process's allocator."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


if __name__ == "__main__":
    main(sys.argv[1])
