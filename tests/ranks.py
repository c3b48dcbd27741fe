"""Processes that are forked from a parent that has imported all they need: importing torch takes seconds.

    done = ranks.run(2, "rank_worker.py", "out.pt")      # a script of this folder, once a rank
    done = ranks.run(2, "detector", "train", ...)        # the command line, as under torchrun
    process = ranks.start("detector", "train", ...)      # one process, in a session of its own, to send signals to

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


def ask(**request):
    """The parent's answer."""
    if not parents:
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        parents.append(subprocess.Popen([sys.executable, __file__], text=True, env=surroundings, **pipes))
        atexit.register(parents[0].stdin.close)
    parents[0].stdin.write(json.dumps(request) + "\n")
    parents[0].stdin.flush()
    return json.loads(parents[0].stdout.readline())


def run(processes, script, *arguments):
    """Run a script on that many ranks; a CompletedProcess with the worst status and what all of them printed."""
    with Printed() as printed:
        statuses = ask(do="run", processes=processes, script=script, arguments=[*map(str, arguments)], **printed.files)
        worst = next((status for status in statuses if status), 0)
        return subprocess.CompletedProcess([script, *arguments], worst, *printed.texts())


class Printed:
    """Files for what processes print."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.files = {name: str(Path(self.folder.name, name)) for name in ("out", "err")}
        return self

    def __exit__(self, *error):
        self.folder.cleanup()

    def texts(self):
        return (Path(file).read_text(encoding="utf-8", errors="replace") for file in self.files.values())


class start:  # noqa: N801 - stands in for subprocess.Popen, and starts something
    """A process of its own, with what subprocess.Popen has."""

    def __init__(self, script, *arguments):
        self.printed, self.returncode = Printed().__enter__(), None
        self.pid = ask(do="start", script=script, arguments=[*map(str, arguments)], **self.printed.files)

    def poll(self):
        if self.returncode is None:
            self.returncode = ask(do="poll", pid=self.pid)
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=PATIENCE):
        """What it printed, once it has ended; AssertionError, and it is killed, where it does not end in time."""
        deadline = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.poll() is None:
            self.kill()
            raise AssertionError("the process did not end")
        said = tuple(self.printed.texts())
        self.printed.folder.cleanup()
        return said


# --- in the parent


def serve():
    import test_step  # noqa: F401 - and all that it imports, for the children
    import torch._dynamo  # noqa: F401 - which the first optimizer imports

    import detector.commands.train  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "poll":
            done, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        elif request["do"] == "start":
            answer = fork(request, {})
        else:
            answer = wait_for([fork(request, one) for one in surroundings(request["processes"])])
        print(json.dumps(answer), flush=True)


def surroundings(processes):
    """What torchrun tells each rank by its environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    size = str(processes)
    for rank in map(str, range(processes)):
        yield {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip


def fork(request, environment):
    child = os.fork()
    if child == 0:
        be_child(request, environment)
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


def be_child(request, environment):
    """What a fork does; it never returns."""
    status = 1
    os.environ.update(environment)
    try:
        if not environment:
            os.setsid()
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
