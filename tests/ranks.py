"""Processes that are forked from a parent that has imported all they need: importing torch takes seconds.

    done = ranks.run(2, "rank_worker.py", "out.pt")      # a script of this folder, once a rank
    done = ranks.run(2, "detector", "train", ...)        # the command line, as under torchrun
    process = ranks.start("detector", "train", ...)      # one process, in a session of its own, to send signals to
    done = ranks.call("-c", "print(1)", mounts=[...])    # one process, waited for

The parent never runs an operation of torch and starts no thread, so a fork of it is as good as a new process. It is
started when it is first needed, and reads requests from its standard input, one JSON line each. Where a rank fails the
others must end by themselves: nobody ends them, as torchrun would, but for `PATIENCE`.
"""

import atexit
import ctypes
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
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


def call(script, *arguments, timeout=PATIENCE, **surroundings):
    """Run one process to its end, as subprocess.run does, but with both streams captured. See `start`."""
    process = start(script, *arguments, **surroundings)
    printed = process.communicate(timeout)
    return subprocess.CompletedProcess([script, *arguments], process.returncode, *printed)


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
    """A process of its own, with what subprocess.Popen has.

    mounts: file systems in memory that it alone sees, each as (mount's options, folder). keep: a folder and where it
    is copied to before those are gone.
    """

    def __init__(self, script, *arguments, mounts=(), keep=()):
        self.printed, self.returncode = Printed().__enter__(), None
        around = {"mounts": [(options, str(folder)) for options, folder in mounts], "keep": [*map(str, keep)]}
        words = [*map(str, arguments)]
        self.pid = ask(do="start", script=str(script), arguments=words, **around, **self.printed.files)

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
        if request.get("mounts"):
            mount(request["mounts"])
        status = work(request["script"], request["arguments"])
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        if request.get("keep"):
            shutil.copytree(*request["keep"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def mount(mounts):
    """Mount them for this process, in namespaces of its own, as `unshare -rm` does."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()

    def succeed(status):
        if status:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    succeed(libc.unshare(0x10000000 | 0x20000))  # CLONE_NEWUSER and CLONE_NEWNS
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", file).write_text(text)
    succeed(libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None))  # MS_REC and MS_PRIVATE
    for options, folder in mounts:
        words = options.split(",")
        flags = 1 if "ro" in words else 0
        data = ",".join(word for word in words if word != "ro")
        succeed(libc.mount(b"none", os.fsencode(folder), b"tmpfs", flags, data.encode()))


@cache
def can_mount():
    """Whether a process can have `mounts` here."""
    with tempfile.TemporaryDirectory() as folder:
        return call("-c", "", mounts=[("size=16k", folder)]).returncode == 0


def work(script, arguments):
    if script == "-c":
        code, sys.argv = arguments[0], ["-c", *arguments[1:]]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        return 0
    sys.argv = [script, *arguments]
    if script == "detector":
        from detector.cli import main

        return main(arguments)
    sys.path.insert(0, str((TESTS / script).parent))
    runpy.run_path(str(TESTS / script), run_name="__main__")
    return 0


if __name__ == "__main__":
    serve()
