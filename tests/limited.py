"""`python limited.py MIB detector-arguments`: the command line, in a process whose memory ends MIB after the start of
training. A real limit (RLIMIT_AS), at which the allocator fails as it does on a machine that is full."""

import resource
import sys
from pathlib import Path

from detector.cli import main
from detector.run import loop


def limited(mib):
    real = loop.run_epochs

    def run_epochs(*arguments):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return real(*arguments)

    loop.run_epochs = run_epochs


if __name__ == "__main__":
    limited(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
