"""A parent that has imported all that a training needs, and forks a child for each: importing torch takes seconds.

The parent never runs an operation of torch and starts no thread, so a fork of it is as good as a new process. It reads
requests from its standard input and answers each when the child has ended, one JSON line for one:

    {"arguments": ["train", ...], "point": null, "number": 1, "seconds": null, "log": "path"}
    {"pid": 4711, "status": -9, "began": 1700000000.0, "ended": 1700000001.0}

`point` and `number` arm a point in the child, `seconds` kills it from outside so long after its start; `status` is the
exit status, or less than 0 the signal that ended it; `began` and `ended` are seconds since 1970.
"""

import json
import os
import signal
import sys
import time
import traceback
from typing import Any

import torchvision.ops  # which the first validation imports

import detector.commands.train
from detector.cli import main
from faults.points import arm

PATIENCE = 120  # seconds after which a child is stuck


def be_child(request: dict[str, Any]) -> None:
    """What a fork does; it never returns."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if request["point"]:
            arm(request["point"], request["number"])
        status = main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for(child: int, began: float, seconds: float | None) -> int:
    """The child's status; it is killed `seconds` after `began`, and where it is stuck."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.time() - began > (PATIENCE if seconds is None else seconds):
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        began = time.time()
        child = os.fork()
        if child == 0:
            be_child(request)
        status = wait_for(child, began, request["seconds"])
        print(json.dumps({"pid": child, "status": status, "began": began, "ended": time.time()}), flush=True)


if __name__ == "__main__":
    assert detector.commands.train, torchvision.ops  # imported for the children
    serve()
