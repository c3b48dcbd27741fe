"""Loader processes: one result by any start method, no need of /dev/shm, and no wait without an end."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import ranks
import torch
from scenes import write_dataset

from detector.data import workers
from detector.data.augment import Augmentation
from detector.data.cache import ImageCache
from detector.data.dataset import TrainingSet, ValidationSet
from detector.data.description import load_description
from detector.data.loader import TrainingLoader, ValidationLoader, validation_batches
from detector.data.packing import pack, unpack
from detector.data.reading import build_index
from detector.data.shared import SharedMemory
from detector.data.workers import start_method
from detector.errors import ConfigError, TrainingError

IMAGES, IMGSZ = 12, 64
METHODS = multiprocessing.get_all_start_methods()
PLANS = [(epoch, [i, i + 1, i + 2]) for epoch in (0, 1) for i in range(0, IMAGES, 3)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=IMAGES, val=5, size=100)


def training_set(data, cache="ram"):
    return TrainingSet(build_index(load_description(data), "train"), IMGSZ, Augmentation(), 0, 9, 0, cache)


def contents(batches):
    return [tuple(one.numpy().tobytes() for one in batch) for batch in batches]


class Endless:
    """Items that take for ever, from the one numbered 2 on."""

    def __init__(self, data):
        self.samples = training_set(data)
        self.imgsz, self.channels = self.samples.imgsz, self.samples.channels

    def draw(self, position, out):
        if position[1] >= 2:
            time.sleep(3600)
        return self.samples.draw(position, out)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_any_start_method_gives_the_same_samples_from_one_cache(data, method):
    expected = contents(TrainingLoader(training_set(data), 0, False).batches(PLANS))
    dataset = training_set(data)
    loader = TrainingLoader(dataset, 2, False, method)
    assert contents(loader.batches(PLANS)) == expected
    assert contents(loader.batches(PLANS[2:4])) == expected[2:4]
    assert dataset.cache.kept() == IMAGES, "the workers' cache is not this process's"
    loader.close()


@pytest.mark.parametrize("method", [pytest.param(one, marks=pytest.mark.slow) for one in METHODS])
def test_validation_is_the_same_by_any_start_method(data, method):
    dataset = ValidationSet(build_index(load_description(data), "val"), IMGSZ)
    expected = {
        i: image.numpy()
        for images, _, at in validation_batches(dataset, 2, 0)
        for i, image in zip(at, images, strict=True)
    }
    loader = ValidationLoader(dataset, 2, method)
    for size in (2, 5):  # of another size, too, from the same loader
        found = {
            i: image.numpy() for images, _, at in loader.batches(size) for i, image in zip(at, images, strict=True)
        }
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[i], expected[i]) for i in found)
    loader.close()


def test_batches_do_not_share_the_memory_that_workers_write(data):
    loader = TrainingLoader(training_set(data), 1, False, "fork")
    held = list(loader.batches(PLANS))
    assert contents(held) == contents(TrainingLoader(training_set(data), 0, False).batches(PLANS))
    assert all(tensor.is_contiguous() for batch in held for tensor in batch)


def test_what_a_slot_does_not_hold_comes_all_the_same(data, monkeypatch):
    monkeypatch.setattr(workers, "SPARE", 0)
    monkeypatch.setattr(workers._Desk, "PAGE", 8)
    desk = workers._Desk.of(1, 16)
    value = torch.arange(100), np.arange(3), "text", torch.zeros(0, 4)
    found = unpack(pack(value, desk.slot(1)), desk.slot(1))
    assert torch.equal(found[0], value[0])
    assert np.array_equal(found[1], value[1])
    assert found[2] == "text"
    assert found[3].shape == (0, 4)


def test_a_pass_given_up_with_every_slot_in_use_does_not_spoil_the_next(data):
    loader = TrainingLoader(training_set(data, cache="off"), 1, False, "fork")
    for _ in range(3):
        given_up = loader.batches(PLANS)
        next(given_up)
        assert len(contents(loader.batches(PLANS[:3]))) == 3
    given_up.close()
    assert len(loader.pids) == 1


def test_larger_micro_batches_get_larger_slots(data):
    loader = TrainingLoader(training_set(data), 1, False, "fork")
    assert [len(batch.samples) for batch in loader.batches([(0, [1])])] == [1]
    assert [len(batch.samples) for batch in loader.batches([(0, range(9))])] == [9]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_ends_the_wait_with_its_reason(data, number):
    loader = TrainingLoader(Endless(data), 2, False, "fork")
    batches = loader.batches([(0, [i]) for i in range(9)])
    next(batches)
    (pid, other) = loader.pids
    os.kill(pid, number)
    with pytest.raises(TrainingError, match=rf"pid {pid}\) was ended by {number.name}.*workers=1"):
        list(batches)
    assert loader.pids == []
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)


def test_a_worker_that_falls_silent_ends_the_wait_and_a_stopped_one_ends_too(data, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE", 0.5)
    monkeypatch.setattr(workers, "POLL", 0.05)
    loader = TrainingLoader(training_set(data), 1, False, "fork")
    batches = loader.batches([(0, [i % IMAGES]) for i in range(99)])
    next(batches)
    (pid,) = loader.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TrainingError, match=rf"pid {pid}\) has not finished one image in 0.5 seconds"):
        list(batches)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_slow_worker_is_not_a_silent_one(data, monkeypatch):
    """Batches take longer than the limit, images do not."""
    monkeypatch.setattr(workers, "SILENCE", 2.0)

    class Slow(Endless):
        def draw(self, position, out):
            time.sleep(0.5)
            return self.samples.draw(position, out)

    loader = TrainingLoader(Slow(data), 1, False, "fork")
    assert [len(batch.samples) for batch in loader.batches([(0, range(6))])] == [6]


@pytest.mark.parametrize("count", [0, 2])
def test_whoever_waits_is_asked_whether_to_go_on(data, count):
    def stop():
        if len(asked) > 3:
            raise KeyboardInterrupt
        asked.append(1)

    asked = []
    loader = TrainingLoader(Endless(data) if count else training_set(data), count, False, "fork")
    with pytest.raises(KeyboardInterrupt):
        list(loader.batches([(0, [1, 2, 3]), (0, [4, 5, 6])], stop))
    assert loader.pids == []


def test_an_error_of_the_program_comes_with_the_workers_traceback(data):
    loader = TrainingLoader(training_set(data), 1, False, "fork")
    with pytest.raises(RuntimeError, match=r"in a loader process:\nTraceback(.|\n)*IndexError"):
        list(loader.batches([(0, [IMAGES + 5])]))


SCRIPT = """
import sys
from detector.data.augment import Augmentation
from detector.data.dataset import TrainingSet
from detector.data.description import load_description
from detector.data.reading import build_index
from detector.data.loader import TrainingLoader
from pathlib import Path
index = build_index(load_description(Path(sys.argv[1])), "train")
loader = TrainingLoader(TrainingSet(index, 320, Augmentation(), 0, 9, 0, "ram"), 2, False, sys.argv[2])
print("loaded", sum(len(batch.samples) for batch in loader.batches([(0, list(range(12)))] * 6)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mount", ["size=64m", "size=1m", "size=1m,ro"])
def test_small_shared_memory_loses_no_batch(tmp_path, data, mount):
    """In a mount namespace of its own, as a container is; 3.7 MB a batch."""
    if not ranks.can_mount():
        pytest.skip("no private mounts here")
    done = ranks.call("-c", SCRIPT, data, "fork", mounts=[(mount, "/dev/shm")])
    assert done.stdout.strip() == "loaded 72", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_guard_may_load(tmp_path, data, method):
    """New processes do not run the script again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(data), method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "loaded 72", done.stderr


def test_workers_end_with_a_parent_that_is_killed(tmp_path, data):
    """Its own descendants among them: each holds pipes of those before it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            loader = TrainingLoader(training_set(data), 3, False, "fork")
            next(loader.batches(PLANS))
            os.write(write, ",".join(map(str, loader.pids)).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.close(write)
    pids = os.read(read, 1000).decode().split(",")
    os.waitpid(pid, 0)
    assert len(pids) == 3
    deadline = time.monotonic() + 60
    while any(alive(int(one)) for one in pids):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_auto_forks_only_from_a_process_of_one_thread_without_a_gpu(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert start_method("auto") == ("fork" if sys.platform == "linux" else "spawn")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert start_method("auto") != "fork"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert start_method("auto") != "fork"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert start_method("auto") == "spawn"
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert start_method("auto") == "spawn"
    with pytest.raises(ConfigError, match="multiprocessing_start=fork: this system has only spawn"):
        start_method("fork")


def test_whoever_waits_for_processes_to_start_is_asked_too(data, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(workers.Workers, "_start", lambda *_: time.sleep(3600))
    with pytest.raises(KeyboardInterrupt):
        list(TrainingLoader(training_set(data), 2, False, "spawn").batches(PLANS, stop))


@pytest.mark.parametrize("method", METHODS)
def test_processes_that_cannot_start_are_named_with_a_remedy(data, monkeypatch, method):
    def refused(*_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(workers.Workers, "_start", refused)
    with pytest.raises(TrainingError, match=rf"cannot start 2 loader processes by {method}: .*workers=0"):
        list(TrainingLoader(training_set(data), 2, False, method).batches(PLANS))


def test_an_image_that_was_written_in_another_order_is_not_believed(data):
    """A flag before its pixels, as a weakly ordered CPU may show them: half of the image is there."""
    dataset = training_set(data)
    cache, expected = dataset.cache, ImageCache(dataset.index, IMGSZ, "off")[3]
    first = cache[3].copy()
    assert np.array_equal(first, expected)
    start, stop = int(cache._offsets[3]), int(cache._offsets[4])
    cache._kept._pixels.array()[(start + stop) // 2 : stop] = 0
    cache._seen[3] = 0  # as in another process
    assert np.array_equal(cache[3], expected)


def test_shared_memory_without_memfd_is_a_file_that_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = SharedMemory(5000)
    memory.array()[4999] = 7
    assert list(tmp_path.iterdir()) == []
    if (pid := os.fork()) == 0:
        os._exit(int(memory.array()[4999]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert not memory.array()[:4999].any()
    assert len(SharedMemory(0).array()) == 0


def test_loading_leaves_no_process_and_no_file_open(data):
    def files():
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    list(validation_batches(ValidationSet(build_index(load_description(data), "val"), IMGSZ), 2, 2, start="fork"))
    gc.collect()  # what other tests left: it may go at any moment, and its files with it
    before = files()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            dataset = ValidationSet(build_index(load_description(data), "val"), IMGSZ)
            next(batches := validation_batches(dataset, 1, 2, start="fork"))
            del batches, dataset
            loader = TrainingLoader(training_set(data), 2, False, "fork")
            next(loader.batches(PLANS))
            del loader
    assert files() == before
    assert multiprocessing.active_children() == []
