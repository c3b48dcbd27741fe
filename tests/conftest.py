"""One thread for the small networks of the tests, in this process and those it starts: two would wait for each other
whenever the machine has something else to do."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
