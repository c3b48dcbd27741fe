"""Processes of a distributed run, forked from a parent that has imported all they need: importing torch takes seconds.

    done = ranks.run(2, "rank_worker.py", "out.pt")      # a script of this folder, once a rank
    done = ranks.run(2, "detector", "train", ...)        # the command line, as under torchrun

The parent never runs an operation of torch and starts no thread, so a fork of it is as good as a new process. It is
started when it is first needed, and reads requests from its standard input, one JSON line each. Where a rank fails the
others must end by themselves: nobody ends them, as torchrun would, but for `PATIENCE`.
"""

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).parent
PATIENCE = 90  # seconds after which a rank hangs
parents: list[subprocess.Popen] = []


def run(processes, script, *arguments, environment=None):
    """Run a script on that many ranks; a CompletedProcess with the worst status and what all of them printed."""
    if not parents:
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        parents.append(subprocess.Popen([sys.executable, __file__], text=True, env=surroundings, **pipes))
        atexit.register(parents[0].stdin.close)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"processes": processes, "script": script, "arguments": [str(one) for one in arguments],
                   "out": str(out), "err": str(err), "environment": environment or {}}  # fmt: skip
        parents[0].stdin.write(json.dumps(request) + "\n")
        parents[0].stdin.flush()
        statuses = json.loads(parents[0].stdout.readline())
        worst = next((status for status in statuses if status), 0)
        said = (file.read_text(encoding="utf-8", errors="replace") for file in (out, err))
        return subprocess.CompletedProcess([script, *request["arguments"]], worst, *said)


# --- in the parent


def serve():
    import test_step  # noqa: F401 - and all that it imports, for the children

    import detector.commands.train  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = [fork(request, rank, port) for rank in range(request["processes"])]
        print(json.dumps(wait_for(children)), flush=True)


def fork(request, rank, port):
    child = os.fork()
    if child == 0:
        be_rank(request, rank, port)
    return child


def wait_for(children):
    """The ranks' statuses; less than 0 is a signal, and one that hangs is ended by SIGKILL."""
    began, statuses = time.monotonic(), {}
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    statuses[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() - began > PATIENCE:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [statuses[child] for child in children]


def be_rank(request, rank, port):
    """What a fork does; it never returns."""
    status = 1
    size = str(request["processes"])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), **request["environment"],
    )  # fmt: skip
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        status = work(request["script"], request["arguments"])
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def work(script, arguments):
    sys.argv = [script, *arguments]
    if script == "detector":
        from detector.cli import main

        return main(arguments)
    runpy.run_path(str(TESTS / script), run_name="__main__")
    return 0


if __name__ == "__main__":
    serve()
