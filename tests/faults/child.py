"""`detector`, but it ends by SIGKILL the N-th time that it comes to a named point.

    python -m faults.child POINT N train data=my.yaml ...

with tests/ on PYTHONPATH. The points are in `points.py`.
"""

import sys

from detector.cli import main
from faults.points import arm

if __name__ == "__main__":
    arm(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
