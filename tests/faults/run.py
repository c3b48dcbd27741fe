"""One run, in as many processes as it takes: started, killed, resumed and killed again, until it ends."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import compare
from faults.compare import BrokenPromiseError

KILLED = -9
LOCKED = "is training in this folder"
TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Kill:
    """How a process is to be killed: at a named point the number-th time it comes there, or after `seconds`."""

    point: str | None = None
    number: int = 1
    seconds: float | None = None
    plain: bool = False  # through `python -m`, not forked

    def __str__(self) -> str:
        return f"{self.point}, call {self.number}" if self.point else f"after {self.seconds:.2f} s"


NEVER = Kill()


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it was doing; times in seconds since 1970."""

    status: int  # less than 0: the signal that ended it
    began: float
    ended: float
    said: str  # all it printed

    @property
    def killed(self) -> bool:
        return self.status == KILLED


class Nursery:
    """The parent process of the children; a context."""

    def __enter__(self) -> "Nursery":
        command = [sys.executable, "-m", "faults.nursery"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=environment(), **pipes)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def run(self, arguments: Sequence[str], kill: Kill, log: Path) -> Ended:
        """Run `detector ARGUMENTS` in a process of its own, which prints into `log`, to its end."""
        start = log.stat().st_size if log.exists() else 0
        if kill.plain:
            answer = run_plainly(arguments, kill, log)
        else:
            request = {"point": kill.point, "number": kill.number, "seconds": kill.seconds, "log": str(log)}
            self.process.stdin.write(json.dumps({"arguments": list(arguments), **request}) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        said = log.read_bytes()[start:].decode(errors="replace")
        return Ended(answer["status"], answer["began"], answer["ended"], said)


def environment() -> dict[str, str]:
    """This process's, in which a child finds the package and the harness that are in use here."""
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def run_plainly(arguments: Sequence[str], kill: Kill, log: Path) -> dict[str, Any]:
    """The same through `python -m detector`, or `faults.child` for a named point."""
    module = ["faults.child", kill.point, str(kill.number)] if kill.point else ["detector"]
    began = time.time()
    with open(log, "ab") as file:
        command = [sys.executable, "-m", *module, *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment())
        try:
            process.wait(kill.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    return {"status": process.wait(), "began": began, "ended": time.time()}


@dataclass
class Run:
    """A run's folder and what has happened to it."""

    nursery: Nursery
    folder: Path
    settings: Sequence[str]  # key=value, for its start
    expected: compare.Outcome  # of the run that was not killed
    kills: int = 0
    lost: int = 0  # bytes of files that had been finished
    repeated: list[float] = field(default_factory=list)  # seconds of work that each kill cost
    waited: list[float] = field(default_factory=list)  # seconds until the lock of a dead process was free
    finished: bool = False

    @property
    def last(self) -> Path:
        return self.folder / "weights" / "last.pt"

    def position(self) -> tuple[int, int]:
        """(epochs, images of the next one) that last.pt holds."""
        return compare.position_of(self.last)

    def go_on(self, kill: Kill) -> Ended:
        """Start or resume the run, with `kill` on its way.

        Raises BrokenPromiseError where it ends neither well nor by the kill, or where last.pt holds less than before.
        """
        before, position = compare.sizes_of(self.folder), self.position()
        ended = self._started(kill)
        self.lost += compare.bytes_lost(self.folder, before, self.expected)
        if self.position() < position:
            raise BrokenPromiseError(f"last.pt went back from {position} to {self.position()}")
        if ended.killed:
            self.kills += 1
            saved = self.last.stat().st_mtime if self.last.exists() else 0.0
            self.repeated.append(ended.ended - max(saved, ended.began))
        elif ended.status == 0:
            self.finished = True
        else:
            raise BrokenPromiseError(f"exit status {ended.status}: {ended.said[-2000:]}")
        return ended

    def end(self) -> None:
        """Go on to the end, and compare. Raises BrokenPromiseError where the run is not what it would have been."""
        if not self.finished and self.go_on(NEVER).killed:
            raise BrokenPromiseError("the last process was to end by itself, and was killed: stuck, or out of memory")
        compare.assert_same(self.expected, compare.outcome_of(self.folder))

    def _started(self, kill: Kill) -> Ended:
        """The process, started again while its dead predecessor's lock is still held; this wait is noted."""
        log, first = self.folder.parent / f"{self.folder.name}.log", time.monotonic()
        refused = False
        while True:
            start = time.monotonic() - first
            ended = self.nursery.run(self._arguments(), kill, log)
            if ended.status != 2 or LOCKED not in ended.said:
                self.waited += [start] if refused else []
                return ended
            refused = True
            if start > 20:
                raise BrokenPromiseError(f"locked for 20 s after its process was killed: {ended.said[-500:]}")
            time.sleep(0.4)  # each try costs the start of a process

    def _arguments(self) -> list[str]:
        """A resume; before there is a checkpoint, the start that the program's error message asks for."""
        if self.last.exists():
            return ["train", f"resume={self.folder}"]
        again = ["exist_ok=true"] if self.folder.exists() else []
        return ["train", *self.settings, f"project={self.folder.parent}", f"name={self.folder.name}", *again]
