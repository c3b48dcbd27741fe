"""Trials of `detector tune` and `batch: auto`: the image they use, the peaks they tell, and runs that rely on them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scenes import TINY, write_dataset
from test_training import run

from detector.config import Settings, load_settings
from detector.data.batch import Sample
from detector.errors import ConfigError
from detector.fitting import trial
from detector.fitting.crowd import heaviest
from detector.fitting.fit import bench, budget, tried
from detector.fitting.trial import Job, in_child
from detector.run.build import indices

MIB = 2**20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")


# --- the image that is measured with


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"))


def tiny(data, *overrides):
    common = (f"model={TINY}", "imgsz=64", "nbs=8", "device=cpu", "amp=fp32", "workers=0")
    return load_settings(Settings, None, [f"data={data}", *common, *overrides])


def silent(text):
    pass


def test_the_heaviest_image_has_more_boxes_than_any_of_training(data):
    chosen = tiny(data, "epochs=20")
    index, _ = indices(chosen, silent)
    sample = heaviest(index, chosen)
    most = int(np.diff(index.box_offsets).max())
    assert most < len(sample.classes) <= 4 * most
    assert sample.image.shape == (64, 64, 3)
    assert len(sample.classes) == len(sample.boxes_xyxy)
    again = heaviest(index, chosen)
    assert np.array_equal(again.image, sample.image)
    assert len(heaviest(index, tiny(data, "mosaic=0.0")).classes) <= most


def test_a_job_is_what_was_saved(tmp_path, data):
    job = some_job(data, "batch=2")
    job.save(tmp_path / "job.pt")
    again = Job.load(tmp_path / "job.pt")
    assert again.settings == job.settings
    assert (again.accumulate, again.classes, again.images, tuple(again.shape)) == (4, 2, 10, (64, 64))
    for one, other in zip(again.batch(), job.batch(), strict=True):
        assert torch.equal(one, other)


def some_job(data, *overrides):
    sample = Sample(
        np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8),
        np.array([[8, 8, 40, 40], [20, 20, 50, 60]], dtype=np.float32),
        np.array([0, 1]),
        0,
    )
    return Job(tiny(data, *overrides), 4, 2, 10, sample, (64, 64))


# --- trials


@LINUX
@pytest.mark.slow
def test_a_trial_measures_a_ballast_and_grows_with_the_batch(tmp_path, data):
    """The peak that a trial tells is that of its process: 200 MiB that are held beside it are in it."""
    code = "import sys, torch\nfrom detector.fitting import trial\n{}\ntrial.main(sys.argv[1])"
    peaks = {}
    for name, batch, first in (
        ("one", 1, ""),
        ("ballast", 1, "held = torch.ones(50 * 2**20)"),  # 4 bytes each
        ("many", 64, ""),
    ):
        some_job(data, f"batch={batch}").save(path := tmp_path / f"{name}.pt")
        command = [sys.executable, "-c", code.format(first), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
        found = json.loads(done.stdout)
        assert found["rate"] > 0
        peaks[name] = found["peak"] / MIB
    assert peaks["ballast"] - peaks["one"] == pytest.approx(200, abs=25)
    assert peaks["many"] > peaks["one"] + 25


@LINUX
@pytest.mark.slow
def test_a_trial_that_takes_too_much_is_ended(data):
    assert in_child(some_job(data, "batch=1"), 20 * MIB) == (None, None)


@LINUX
@pytest.mark.slow
def test_a_trial_that_fails_for_another_reason_says_so(data):
    with pytest.raises(ConfigError, match=r"not for want of memory: .*no_such"):
        in_child(some_job(data, "model=no_such.yaml"), 2**40)


@LINUX
@pytest.mark.slow
def test_tune_recommends_and_writes_what_trains(tmp_path, data, capsys):
    file = tmp_path / "my.yaml"
    lines = [f"data: {data}", f"model: {TINY}", "imgsz: 64 # small", "nbs: 2", "device: cpu", "workers: 0", "epochs: 1"]
    file.write_text("\n".join([*lines, "batch: 16", f"project: {tmp_path}", "plots: false", ""]))
    assert run("tune", file, "memory=4GiB", "--write", "--min-bn-batch", "2") == 0
    printed = capsys.readouterr().out
    assert len([line for line in printed.splitlines() if line.startswith(("plain ", "stages ", "all "))]) == 6
    assert file.read_text().startswith("\n".join(lines))
    assert load_settings(Settings, file).batch == 2
    assert run("train", file, "name=run") == 0
    assert run("tune", file, "memory=40MiB") == 2
    assert "not even one image" in capsys.readouterr().err


def small_run(data, project):
    options = ("imgsz=64", "nbs=4", "batch=auto", "workers=0", "plots=false")
    return [f"data={data}", f"model={TINY}", *options, f"project={project}"]


@LINUX
@pytest.mark.slow
def test_batch_auto_ends_as_a_number_and_stays_it(tmp_path, data, capsys):
    arguments = small_run(data, tmp_path)
    assert run("train", *arguments, "device=cpu", "epochs=1", "name=run") == 0
    printed = capsys.readouterr().out
    assert "tried  " in printed
    assert "batch     auto: " in printed
    saved = yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text())
    assert saved["batch"] in (1, 2, 4)
    held = torch.load(tmp_path / "run" / "weights" / "last.pt", weights_only=True)
    assert held["settings"]["batch"] == held["cut"][0] == saved["batch"]
    assert run("train", f"resume={tmp_path / 'run'}", "batch=auto", "epochs=2") == 0
    assert "tried  " not in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text())["batch"] == saved["batch"]


@LINUX
@pytest.mark.slow
def test_batch_auto_is_one_number_for_all_processes(tmp_path, data):
    arguments = small_run(data, tmp_path)
    command = [
        sys.executable,
        "-m",
        "detector",
        "train",
        *arguments,
        "device=cpu:2",
        "batch=auto",
        "epochs=1",
        "name=two",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("batch     auto: ") == 1
    held = torch.load(tmp_path / "two" / "weights" / "last.pt", weights_only=True)
    assert held["cut"] == [held["settings"]["batch"], 2 // held["settings"]["batch"], 2]


def test_batch_auto_that_cannot_fit_names_the_ways_out(monkeypatch, data, capsys):
    monkeypatch.setattr(trial, "measure", lambda job, device, limit: trial.Measured(None, None))
    assert run("train", f"data={data}", f"model={TINY}", "imgsz=64", "device=cpu", "batch=auto") == 2
    assert "not even one image" in capsys.readouterr().err


class Card:
    """A GPU's numbers: 8 of 10 GiB free, of which this process takes 3 at its peak, and 1 for kernels."""

    def __init__(self, monkeypatch):
        self.fractions, self.emptied, self.others = [], 0, 2 * 2**30
        for name, value in {
            "mem_get_info": lambda device: (10 * 2**30 - self.others, 10 * 2**30),
            "memory_reserved": lambda device: 0,
            "max_memory_reserved": lambda device: 3 * 2**30,
            "reset_peak_memory_stats": lambda device: None,
            "set_per_process_memory_fraction": lambda share, device: self.fractions.append(share),
            "empty_cache": self.empty,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def empty(self):
        self.emptied += 1

    def take(self, job, device):
        self.others += 2**30
        return 50.0


def test_a_trial_on_a_gpu_is_held_to_its_limit_and_leaves_nothing(monkeypatch, data):
    """The bookkeeping alone, with a GPU that is none: what the allocator is asked, and what becomes of its answers."""
    device, job, card = torch.device("cuda", 0), some_job(data, "batch=2"), Card(monkeypatch)
    monkeypatch.setattr(trial, "run", card.take)
    assert trial.measure(job, device, 5 * 2**30) == (4 * 2**30, 50.0)
    assert (card.fractions, card.emptied) == ([0.5, 1.0], 1)

    def refuse(error):
        def run(job, device):
            raise error

        return run

    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")):
        monkeypatch.setattr(trial, "run", refuse(error))
        assert trial.measure(job, device, 5 * 2**30) == (None, None)
    assert (card.fractions[-2:], card.emptied) == ([0.5, 1.0], 3)
    monkeypatch.setattr(trial, "run", refuse(RuntimeError("another mistake")))
    with pytest.raises(RuntimeError, match="another mistake"):
        trial.measure(job, device, 5 * 2**30)
    assert card.fractions[-1] == 1.0


def test_what_a_gpu_has_is_what_is_free_or_given_less_the_context(monkeypatch):
    Card(monkeypatch)
    device = torch.device("cuda", 0)
    assert budget(device, 2, None) == 8 * 2**30
    assert budget(device, 2, 4 * 2**30) == 4 * 2**30 - 512 * MIB
    assert budget(device, 2, 40 * 2**30) == 8 * 2**30  # no more than there is


def test_trials_of_a_mode_have_its_settings(monkeypatch, data):
    seen = []

    def measure(job, device, limit):
        seen.append((job.settings.batch, job.settings.checkpoint, job.accumulate))
        return trial.Measured(90 * MIB * job.settings.batch, 1.0)

    monkeypatch.setattr(trial, "measure", measure)
    here = bench(tiny(data), torch.device("cpu"), 1, 450 * MIB, silent)
    found = tried(here.measure, here.settings, here.modes(), here.planned(), silent)
    plain = [(1, "off", 8), (2, "off", 4), (4, "off", 2), (8, "off", 1)]
    assert seen[:6] == [*plain, (1, "stages", 8), (2, "stages", 4)]  # 6 would make windows far from nbs
    assert [(one.batch, one.fits) for one in found[:4]] == [(1, True), (2, True), (4, True), (8, False)]  # of 405 MiB
