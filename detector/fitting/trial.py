"""A trial: a run in miniature with one micro-batch and one way of keeping activations, and the memory that it takes.

Each trial is a process of its own, `python -m detector.fitting.trial`, on every kind of device: nothing is left over
from earlier trials, one that wants too much can be ended, and it belongs to no process group, whatever the one that
starts it belongs to. It ends when the process that started it does, however that ends.
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
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from detector.errors import ConfigError
from detector.fitting.capacity import free_memory, resident
from detector.fitting.rehearsal import Job, rehearse
from detector.memory import OutOfMemoryError, attempt

OVER = 1.5  # times the memory: a trial that takes more is ended
PAUSE = 0.05  # seconds between two looks at a trial
# What a launcher tells the processes of a run about one another; a trial is none of them.
GROUP = re.compile(r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|TORCHELASTIC_\w+|MASTER_(ADDR|PORT)")


class Measured(NamedTuple):
    """What a trial took; peak None: it was ended, or the device refused."""

    peak: int | None  # bytes
    rate: float | None  # images a second


def measure(job: Job, device: torch.device, limit: int) -> Measured:
    """Run a trial on the device, where it may take `limit` bytes. ConfigError where it fails for another reason."""
    most = OVER * limit if device.type == "cpu" else float("inf")
    status, said = in_child(("measured", job, str(device), limit), most)
    if status == 0:
        return Measured(**json.loads(said))
    if status < 0:  # ended by us, or by a system without memory
        return Measured(None, None)
    raise ConfigError(f"a trial with batch={job.settings.batch} failed, and not for want of memory: {said}")


def free_on(device: torch.device) -> int:
    """`free_memory` as a trial finds it; this process asks no GPU, and so takes none of its memory for a context."""
    if device.type != "cuda":
        return free_memory(device)
    status, said = in_child(("free", str(device)), float("inf"))
    if status:
        raise ConfigError(f"device={device}: cannot be asked for its memory: {said}")
    return json.loads(said)


def in_child(question: tuple[Any, ...], most: float) -> tuple[int, str]:
    """The exit status of a new process that is asked something, and the last line that it said.

    It is ended, with a negative status, when it has taken `most` bytes of the host's memory, or when we are stopped.
    """
    alone = {key: value for key, value in os.environ.items() if not GROUP.fullmatch(key)}
    command = [sys.executable, "-m", "detector.fitting.trial"]
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "question")
        asked.write_bytes(pickle.dumps(question))
        text = {"mode": "w+", "encoding": "utf-8", "errors": "replace"}
        with Path(folder, "out").open(**text) as out, Path(folder, "err").open(**text) as err:
            process = subprocess.Popen([*command, str(asked)], stdin=subprocess.PIPE, stdout=out, stderr=err, env=alone)
            try:
                watch(process, most)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
                process.stdin.close()
            return process.returncode, last_line(out if process.returncode == 0 else err)


def watch(process: subprocess.Popen[bytes], most: float) -> None:
    """Wait for a process, which is killed when it has taken `most` bytes."""
    while process.poll() is None:
        if most < float("inf") and resident("VmHWM", process.pid) > most:
            process.kill()
        time.sleep(PAUSE)


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
    if chosen.type != "cuda":
        rate = rate_of(job, chosen)
        return Measured(resident("VmHWM") + job.kept if rate else None, rate)._asdict()
    total, before = torch.cuda.mem_get_info(chosen)[1], beside(chosen)
    torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), chosen)
    rate = rate_of(job, chosen)
    kernels = max(beside(chosen) - before, 0)  # loaded when first used
    return Measured(torch.cuda.max_memory_reserved(chosen) + kernels if rate else None, rate)._asdict()


def rate_of(job: Job, device: torch.device) -> float | None:
    """Images a second of a trial; None where the device refused memory."""
    try:
        return attempt(lambda: rehearse(job, device))
    except OutOfMemoryError:  # in a step, which is undone; what there was is free again
        return None


def beside(device: torch.device) -> int:
    """Bytes in use on the GPU outside this process's allocator."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


if __name__ == "__main__":
    main(sys.argv[1])
