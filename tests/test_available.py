"""How much memory may still be taken: the limits of control groups and of ulimit, in made-up and in real systems."""

import sys
from pathlib import Path

import pytest
import ranks

from detector.memory import available_memory, resident_memory

MIB, GIB = 2**20, 2**30
NO_LIMIT = 9223372036854771712  # what version 1 says where there is none
V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2_MOUNT = "41 31 0:38 {top} {at} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
CPU_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class System:
    """A folder that looks like a Linux system with 64 GiB, of which 40 are free."""

    def __init__(self, root):
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemAvailable:   {40 * 2**20} kB\n")
        self.write("proc/self/status", "Name:\tpython\nVmSize:\t 2097152 kB\nVmData:\t 1048576 kB\n")  # 2 and 1 GiB
        self.write("proc/self/limits", "Limit  Soft Limit  Hard Limit  Units\nMax address space  unlimited unlimited\n")

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def process(self, groups, *mounts):
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in groups))
        self.write(
            "proc/self/mountinfo", "".join(f"{line}\n" for line in ("1 0 8:1 / / rw - ext4 /dev/sda rw", *mounts))
        )

    def v1(self, folder, limit, used, cache=0):
        at = f"sys/fs/cgroup/memory/{folder}"
        self.write(f"{at}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{at}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{at}/memory.stat", f"cache 7\ninactive_file 5\ntotal_cache 9\ntotal_inactive_file {cache}\n")

    def v2(self, folder, limit, used, cache=0, high="max"):
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 11\nfile 12\ninactive_file {cache}\nactive_file 13\n")

    @property
    def left(self):
        return available_memory(self.root)


@pytest.fixture
def system(tmp_path):
    return System(tmp_path)


CGROUP = "sys/fs/cgroup"


def test_without_limits_it_is_what_the_host_has_free(system):
    assert system.left == 40 * GIB
    system.process(["0::/"], V2_MOUNT.format(top="/", at="/sys/fs/cgroup"))  # the root group has no such files
    assert system.left == 40 * GIB
    system.process(["0::/user.slice"], V2_MOUNT.format(top="/", at="/sys/fs/cgroup"))
    system.v2(f"{CGROUP}/user.slice", "max", 5 * GIB)
    assert system.left == 40 * GIB
    system.process(["4:memory:/a"], V1_MOUNT.format(top="/"))
    system.v1("a", NO_LIMIT, 5 * GIB)
    assert system.left == 40 * GIB


def test_a_container_that_sees_its_own_group_as_the_root(system):
    system.process(["0::/"], V2_MOUNT.format(top="/", at="/sys/fs/cgroup"))
    system.v2(CGROUP, 2 * GIB, GIB)
    assert system.left == GIB


@pytest.mark.parametrize("tightest", ["", "system.slice", "system.slice/slurmd", "system.slice/slurmd/job_7"])
def test_the_tightest_group_on_the_way_up_counts(system, tightest):
    group = "system.slice/slurmd/job_7"
    system.process([f"0::/{group}"], V2_MOUNT.format(top="/", at="/sys/fs/cgroup"))
    for folder in ("", "system.slice", "system.slice/slurmd", group):
        system.v2(f"{CGROUP}/{folder}", 3 * GIB if folder == tightest else 30 * GIB, GIB)
    system.v2(f"{CGROUP}/other.slice", MIB, MIB)  # not ours
    assert system.left == 2 * GIB


def test_files_that_can_be_dropped_are_free_and_high_is_a_limit(system):
    system.process(["0::/a"], V2_MOUNT.format(top="/", at="/sys/fs/cgroup"))
    system.v2(f"{CGROUP}/a", 4 * GIB, 3 * GIB, cache=2 * GIB)
    assert system.left == 3 * GIB
    system.v2(f"{CGROUP}/a", 4 * GIB, 3 * GIB, cache=2 * GIB, high=3 * GIB)
    assert system.left == 2 * GIB
    system.v2(f"{CGROUP}/a", 4 * GIB, 5 * GIB)  # over its limit
    assert system.left == 0


def test_version_1_nested(system):
    system.process(["9:cpu:/cpu/group", "4:memory:/slurm/uid_5/job_7", "0::/"], CPU_MOUNT, V1_MOUNT.format(top="/"))
    for folder, limit in (
        ("", NO_LIMIT),
        ("slurm", 50 * GIB),
        ("slurm/uid_5", 6 * GIB),
        ("slurm/uid_5/job_7", NO_LIMIT),
    ):
        system.v1(folder, limit, 4 * GIB, cache=GIB)
    assert system.left == 3 * GIB


def test_version_1_in_a_container_whose_own_group_is_mounted(system):
    system.process(["4:cpuacct,memory:/docker/abc"], V1_MOUNT.format(top="/docker/abc"))
    system.v1("", 2 * GIB, GIB)
    assert system.left == GIB


def test_hybrid_takes_memory_from_the_version_that_has_it(system):
    mounts = V1_MOUNT.format(top="/"), V2_MOUNT.format(top="/", at="/sys/fs/cgroup/unified")
    system.process(["4:memory:/job", "0::/user.slice"], *mounts)
    system.write(f"{CGROUP}/unified/user.slice/cgroup.procs", "1\n")
    system.v1("job", 3 * GIB, GIB)
    assert system.left == 2 * GIB


@pytest.mark.parametrize(
    ("group", "top"), [("/../..", "/"), ("/../other", "/"), ("/", "/.."), ("/here", "/kubepods/pod")]
)
def test_a_group_outside_of_what_is_mounted_is_bound_by_what_is_mounted(system, group, top):
    system.process([f"0::{group}"], V2_MOUNT.format(top=top, at="/sys/fs/cgroup"))
    system.v2(CGROUP, 2 * GIB, GIB)
    system.v2("sys/fs", MIB, MIB)  # what '..' must not lead to
    assert system.left == GIB


def test_of_two_mounts_the_one_that_shows_the_group_counts(system):
    mounts = V2_MOUNT.format(top="/other", at="/mnt/part"), V2_MOUNT.format(top="/", at="/sys/fs/my\\040groups")
    system.process(["0::/mine"], *mounts)
    system.v2("mnt/part", MIB, MIB)
    system.v2("sys/fs/my groups/mine", 2 * GIB, GIB)
    assert system.left == GIB


def test_ulimits_count_what_is_taken_already(system):
    system.write("proc/self/limits", f"Max address space         {5 * GIB}           unlimited            bytes     \n")
    assert system.left == 3 * GIB
    system.write("proc/self/limits", f"Max data size         {5 * GIB}           {5 * GIB}            bytes     \n")
    assert system.left == 4 * GIB


def test_a_system_that_says_nothing_is_no_error(tmp_path):
    assert available_memory(tmp_path) >= 0


@LINUX
def test_a_real_ulimit_is_seen():
    code = (
        "import resource; from detector.memory import available_memory, resident_memory\n"
        "taken = resident_memory('VmSize')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (taken + 300 * 2**20,) * 2)\n"
        "print(available_memory() / 2**20)"
    )
    done = ranks.call("-c", code)
    assert float(done.stdout) == pytest.approx(300, abs=20)


@LINUX
def test_the_groups_of_this_process_are_found():
    """Whatever system this is: its own group is among those that were asked, by the list of processes in it."""
    from detector.memory import ROOT, _group_mounts, _groups

    if not any(_group_mounts(ROOT).values()):
        pytest.skip("no control group with memory is mounted")
    me = Path("/proc/self").readlink().name
    folders = [folder for folder, _ in _groups(ROOT)]
    assert any(me in (folder / "cgroup.procs").read_text().split() for folder in folders if folder.exists())


@LINUX
def test_resident_memory_grows_with_what_is_held():
    before = resident_memory()
    held = bytearray(b"x" * (256 * MIB))  # written to, so that it is there
    assert resident_memory() - before > 192 * MIB
    assert resident_memory("VmHWM") >= resident_memory()
    del held
    assert resident_memory(process=2**22 + 1) == 0  # beyond the largest process number
