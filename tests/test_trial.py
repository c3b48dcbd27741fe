"""Trials of `detector tune` and `batch: auto`: the image they use, the peaks they tell, and runs that rely on them."""

import json
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scenes import TINY, write_dataset
from test_training import run

from detector import commands, distributed
from detector.commands.train import start
from detector.config.settings import Settings, load_settings
from detector.data.batch import Sample
from detector.errors import ConfigError, DataError
from detector.fitting import rehearsal, trial
from detector.fitting.crowd import heaviest
from detector.fitting.fit import bench, budget, tried
from detector.fitting.rehearsal import Job
from detector.fitting.search import SPARE, modes_on
from detector.inference.infer import JUDGED
from detector.memory import resident_memory
from detector.reporting.journal import read_events
from detector.run import loop
from detector.run.build import indices

MIB = 2**20
ROOT, CPU = Path(__file__).parents[1], torch.device("cpu")
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


def some_job(data, *overrides):
    sample = Sample(
        np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8),
        np.array([[8, 8, 40, 40], [20, 20, 50, 60]], dtype=np.float32),
        np.array([0, 1]),
        0,
    )
    chosen = tiny(data, *overrides)
    return Job(chosen, 4, *indices(chosen, silent), sample)


# --- what stands for an evaluation


def test_the_detections_of_a_trial_are_as_many_as_are_kept_and_lie_in_their_image():
    found = rehearsal.crowd(48, 64, 3)
    assert len(found.scores) == len(found.classes) == JUDGED.max_det
    assert set(found.classes.tolist()) == {0, 1, 2}
    assert found.scores.diff().max() < 0
    low, high = found.boxes_xyxy[:, :2], found.boxes_xyxy[:, 2:]
    assert low.min() >= 0
    assert (high - low).min() > 1
    assert (high <= torch.tensor([64.01, 48.01])).all()


def test_images_that_are_not_judged_take_their_memory_all_the_same(monkeypatch, data):
    """Of 4 validation images one is judged; while it is, the bytes of the other three are there."""
    there, judged = [], []

    def judge(truth, found, names):
        there.append(tracemalloc.get_traced_memory()[0])
        judged.append(len(truth))

    monkeypatch.setattr(rehearsal, "find", lambda *arguments: None)
    monkeypatch.setattr(rehearsal, "judge", judge)
    job = some_job(data)
    tracemalloc.start()
    for most in (4, 1):
        monkeypatch.setattr(rehearsal, "JUDGED", most)
        rehearsal.validate(job, None, None, CPU)
    tracemalloc.stop()
    assert judged == [4, 1]
    assert there[1] - there[0] == pytest.approx(3 * 300 * rehearsal.JUDGING, rel=0.1)


def test_more_validation_images_than_are_judged_are_cut_with_all_that_is_known_of_them(monkeypatch, data):
    monkeypatch.setattr(rehearsal, "JUDGED", 2)
    job = some_job(data, "batch=1")
    boxes = len(job.judged.classes)
    assert boxes < len(job.validation.classes)
    assert len(job.judged.areas) == len(job.judged.ignored_boxes) == len(job.judged.rows) == boxes
    found = [rehearsal.crowd(*job.judged.size(i), 2) for i in range(2)]
    assert rehearsal.judge(rehearsal.ground_truth_of(job.judged), found, job.judged.names).images == 2


def test_damaged_validation_images_are_no_reason_for_a_trial_to_fail(monkeypatch, tmp_path):
    data = write_dataset(tmp_path / "data")
    image = tmp_path / "data" / "images" / "val" / "000.png"
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    monkeypatch.setattr(rehearsal, "find", lambda *arguments: None)
    job = some_job(data)
    rehearsal.draw(job, rehearsal.validate(job, None, None, CPU), tmp_path)
    assert (tmp_path / "validation.jpg").exists()
    strict = some_job(data, "bad_images=error")
    with pytest.raises(DataError, match=r"000\.png"):
        rehearsal.draw(strict, rehearsal.validate(strict, None, None, CPU), tmp_path)


@LINUX
@pytest.mark.slow
def test_metrics_take_what_is_taken_for_images_that_are_not_judged():
    """The peak of judging in a process of its own, with the detections that trials have."""
    code = """
import numpy as np
from detector.evaluation.evaluate import build_ground_truth, judge
from detector.fitting.rehearsal import crowd
from detector.memory import resident_memory
def judged(images):
    boxes, classes = [np.array([[10, 10, 90, 90.0]] * 10)] * images, [np.arange(10) % 3] * images
    truth = build_ground_truth([480] * images, [640] * images, boxes, classes)
    truth.coco
    before = resident_memory()
    judge(truth, [crowd(480, 640, 3) for _ in range(images)], ("a", "b", "c"))
    return resident_memory("VmHWM") - before
judged(1)
print(judged(200) / 200 / 300)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert 0.6 * rehearsal.JUDGING < float(done.stdout) < 1.1 * rehearsal.JUDGING


# --- trials


@LINUX
@pytest.mark.slow
@pytest.mark.long
def test_a_trial_measures_a_ballast_and_grows_with_the_batch(tmp_path, data):
    """The peak that a trial tells is that of its process: 200 MiB that are held beside it are in it."""
    code = "import sys, torch\nfrom detector.fitting import trial\n{}\ntrial.main(sys.argv[1])"
    kept = {"one": 0, "ballast": 0, "many": 0, "kept": 100 * MIB}
    peaks = {}
    for name, batch, first in (
        ("one", 1, ""),
        ("ballast", 1, "held = torch.ones(50 * 2**20)"),  # 4 bytes each
        ("many", 64, ""),
        ("kept", 1, ""),
    ):
        job = replace(some_job(data, f"batch={batch}", "plots=false"), kept=kept[name])
        (tmp_path / name).write_bytes(pickle.dumps(("measured", job, "cpu", 2**40)))
        command = [sys.executable, "-c", code.format(first), tmp_path / name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            said = process.stdout.read()
        found = json.loads(said)
        assert found["rate"] > 0
        peaks[name] = found["peak"] / MIB
    assert peaks["ballast"] - peaks["one"] == pytest.approx(200, abs=25)
    assert peaks["many"] > peaks["one"] + 25
    assert peaks["kept"] - peaks["one"] == pytest.approx(100, abs=25)


@LINUX
@pytest.mark.slow
def test_a_trial_that_takes_too_much_is_ended(data):
    assert trial.measure(some_job(data, "batch=1"), [CPU], 20 * MIB) == (None, None)


@LINUX
@pytest.mark.slow
def test_a_trial_that_fails_for_another_reason_says_so(data):
    with pytest.raises(ConfigError, match=r"not for want of memory: .*no_such"):
        trial.measure(some_job(data, "model=no_such.yaml"), [CPU], 2**40)


@LINUX
@pytest.mark.slow
def test_a_trial_in_stages_is_of_all_its_processes(monkeypatch, data):
    """Each tells its peak, and the larger counts; images a second are of each device."""
    answers, real = [], trial.in_children
    monkeypatch.setattr(trial, "in_children", lambda *asked: answers.extend(found := real(*asked)) or found)
    alone, staged = (
        bench(tiny(data, "imgsz=320", "plots=false", device), [CPU] * count, 2**34, silent)
        for device, count in (("device=cpu", 1), ("device=cpu:2", 2))
    )
    assert not {"pipeline", "pipeline + all"} & set(alone.modes())
    cut = staged.planned()[-1]
    assert (cut.batch, cut.accumulate, cut.devices) == (4, 1, 2)
    parts = staged.measure("pipeline", cut)
    first, second = (json.loads(said) for status, said in answers)
    assert first["rate"] == second["rate"] == 2 * parts.rate
    assert parts.peak == max(first["peak"], second["peak"]) > min(first["peak"], second["peak"])
    assert parts.fits
    assert parts.settings() == {"batch": 4, "checkpoint": "off", "offload": False, "pipeline": "auto"}


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_trial_in_stages_of_which_one_is_ended_is_ended(data, monkeypatch, rank):
    """As by a system without memory. The others end too, and it counts as one that takes too much."""
    started, real = [], subprocess.Popen

    def popen(*arguments, **options):
        started.append(real(*arguments, **options))
        if len(started) == 2:
            started[rank].kill()
        return started[-1]

    monkeypatch.setattr(trial.subprocess, "Popen", popen)
    monkeypatch.setattr(trial, "LINGER", 5.0)
    job = some_job(data, "batch=1", "pipeline=auto")
    assert trial.measure(job, [CPU, CPU], 2**40) == (None, None)
    assert all(process.poll() is not None for process in started)


@pytest.mark.parametrize("word", ["bn=sync", "compile=default", "nbs_scope=device"])
def test_stages_are_not_tried_where_a_run_would_refuse_them(data, word):
    assert "pipeline" in modes_on("cpu", 2, tiny(data))
    assert "pipeline" not in modes_on("cpu", 2, tiny(data, word))
    assert "pipeline" not in modes_on("cpu", 1, tiny(data))


@LINUX
@pytest.mark.slow
def test_tune_recommends_and_writes_what_trains(tmp_path, data, capsys):
    file = tmp_path / "my.yaml"
    lines = [f"data: {data}", f"model: {TINY}", "imgsz: 64 # small", "nbs: 2", "device: cpu", "workers: 0", "epochs: 1"]
    file.write_text("\n".join([*lines, "batch: 16", f"project: {tmp_path}", "plots: false", ""]))
    assert run("tune", file, "memory=4GiB", "--write", "--min-bn-batch", "2") == 0
    printed = capsys.readouterr().out
    tried = [line.split()[:2] for line in printed.splitlines() if line.startswith(("plain ", "stages ", "all "))]
    assert tried == [["plain", "2"]]  # it fits: none has more for BatchNorm, and checkpoints cannot be faster
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


@pytest.mark.long
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


@pytest.mark.parametrize(("rank", "events"), [("0", ["measured for 2", "joined", 2]), ("1", ["joined", "auto"])])
def test_batch_auto_is_measured_by_one_process_before_they_are_joined(monkeypatch, data, rank, events):
    seen = []

    def choose_batch(settings, device, devices, say):
        assert not distributed.active()
        seen.append(f"measured for {devices}")
        return settings.model_copy(update={"batch": 2})

    @contextmanager
    def process_group(device):
        seen.append("joined")
        yield

    monkeypatch.setattr(distributed, "process_group", process_group)
    monkeypatch.setattr(commands.train, "choose_batch", choose_batch)
    monkeypatch.setattr(loop, "train", lambda settings, resume, watch: seen.append(settings.batch))
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    start(tiny(data, "batch=auto", "device=cpu"), None)
    assert seen == events


def test_a_measurement_that_fails_fails_once_all_processes_can_hear_of_it(monkeypatch, data):
    joined = []

    def choose_batch(*arguments):
        raise ConfigError("does not fit")

    @contextmanager
    def process_group(device):
        joined.append(device)
        yield

    monkeypatch.setattr(commands.train, "choose_batch", choose_batch)
    monkeypatch.setattr(distributed, "process_group", process_group)
    with pytest.raises(ConfigError, match="does not fit"):
        start(tiny(data, "batch=auto"), None)
    assert joined == [CPU]


def test_a_trial_is_told_nothing_of_the_run_that_it_is_for(monkeypatch):
    """Else it would wait for the other ranks of a run, or divide the machine among them."""
    theirs = dict.fromkeys(
        ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
         "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
         "TORCHELASTIC_RESTART_COUNT"), "1"
    )  # fmt: skip
    for name in theirs:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    real, given = subprocess.Popen, []

    def popen(command, env, **options):
        given.append(env)
        return real([sys.executable, "-c", "print(5)"], **options)

    monkeypatch.setattr(trial.subprocess, "Popen", popen)
    assert trial.in_children([("free", "cpu")], float("inf")) == [(0, "5")]
    assert not given[0].keys() & theirs.keys()
    others = {
        name for name in os.environ if not name.startswith("TORCHELASTIC_")
    }  # a launcher in this process sets some
    assert given[0].keys() == others - theirs.keys()
    assert given[0]["CUDA_VISIBLE_DEVICES"] == "3"


@LINUX
@pytest.mark.slow
def test_no_trial_outlives_the_process_that_started_it(tmp_path):
    """Even where that is killed in such a way that it can do nothing about it."""
    code = (
        "import time\nfrom detector.fitting import trial\n"
        "class Asleep:\n    def __reduce__(self): return time.sleep, (1000,)\n"  # a question that takes long to read
        "trial.in_children([Asleep()], float('inf'))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        try:
            child = until(lambda: Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())[0]
            assert until(lambda: resident_memory(process=child))  # a process that is being started may have none yet
        finally:
            parent.kill()  # leaving the block waits for it
    assert until(lambda: resident_memory(process=child) == 0)


def until(found):
    """What `found` returns once it is something; pytest's timeout ends the waiting."""
    while not (answer := found()):
        time.sleep(0.05)
    return answer


@LINUX
@pytest.mark.slow
@pytest.mark.long
def test_a_run_keeps_what_a_trial_promised(tmp_path):
    """A run whose main process is killed as soon as it takes more than the memory that the trial fits ends well.

    With everything that takes memory beside the steps: images loaded in the process itself, pictures, metrics,
    checkpoints, the last evaluation.
    """
    data = write_dataset(tmp_path / "data", train=24, val=60, size=160)
    words = (f"data={data}", f"model={TINY}", "imgsz=160", "nbs=8", "batch=4", "workers=0", "amp=fp32", "epochs=2")
    here = bench(load_settings(Settings, None, [*words, "device=cpu"]), [CPU], 4 * 2**30, silent)
    found = here.measure("plain", next(cut for cut in here.planned() if cut.batch == 4))
    memory = found.peak / (1 - SPARE)
    command = [sys.executable, "-m", "detector", "train", *words, "device=cpu", f"project={tmp_path}", "name=run"]
    peak = 0
    with subprocess.Popen(command, cwd=ROOT) as process:
        # As Python ends, 100 MiB of libraries' files are read to leave them: pages that any system has.
        while process.poll() is None and [event.kind for event in read_events(tmp_path / "run")][-1:] != ["finished"]:
            peak = max(peak, resident_memory("VmHWM", process.pid))
            if peak > memory:
                process.kill()
            time.sleep(0.01)
    assert process.returncode == 0, (found.peak, peak, memory)
    assert (tmp_path / "run" / "report.html").exists()
    assert 0.85 * found.peak < peak < memory


def test_batch_auto_that_cannot_fit_names_the_ways_out(monkeypatch, data, capsys):
    monkeypatch.setattr(trial, "measure", lambda job, devices, limit: trial.Measured(None, None))
    assert run("train", f"data={data}", f"model={TINY}", "imgsz=64", "device=cpu", "batch=auto") == 2
    assert "not even one image" in capsys.readouterr().err


class Card:
    """A GPU's numbers: 8 of 10 GiB free, of which this process takes 3 at its peak, and 1 for kernels."""

    def __init__(self, monkeypatch):
        self.fractions, self.others = [], 2 * 2**30
        for name, value in {
            "mem_get_info": lambda device: (10 * 2**30 - self.others, 10 * 2**30),
            "memory_reserved": lambda device: 0,
            "max_memory_reserved": lambda device: 3 * 2**30,
            "set_per_process_memory_fraction": lambda share, device: self.fractions.append(share),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def take(self, job, device, depth):
        self.others += 2**30
        return 50.0


def test_a_trial_on_a_gpu_is_held_to_its_limit(monkeypatch, data):
    """The bookkeeping alone, with a GPU that is none: what the allocator is asked, and what becomes of its answers."""
    job, card = some_job(data, "batch=2"), Card(monkeypatch)
    monkeypatch.setattr(trial, "rehearse", card.take)
    assert trial.measured(job, "cuda:0", 5 * 2**30) == {"peak": 4 * 2**30, "rate": 50.0}
    assert card.fractions == [0.5]

    def refuse(error):
        def rehearse(job, device, depth):
            raise error

        return rehearse

    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")):
        monkeypatch.setattr(trial, "rehearse", refuse(error))
        assert trial.measured(job, "cuda:0", 5 * 2**30) == {"peak": None, "rate": None}
    monkeypatch.setattr(trial, "rehearse", refuse(RuntimeError("another mistake")))
    with pytest.raises(RuntimeError, match="another mistake"):
        trial.measured(job, "cuda:0", 5 * 2**30)


def test_a_gpu_is_measured_in_a_process_of_its_own(monkeypatch, data):
    """The process that asks makes no context on the GPU, which would take memory there: it calls nothing of CUDA."""
    asked = []

    def in_children(questions, most):
        asked.append((questions[0][0], most))
        return [(0, "123" if one[0] == "free" else '{"peak": 5, "rate": 2.0}') for one in questions]

    for name in ("mem_get_info", "memory_reserved", "set_per_process_memory_fraction", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, None)
    monkeypatch.setattr(trial, "in_children", in_children)
    here = bench(tiny(data), [torch.device("cuda", 1)] * 2, None, silent)
    assert here.memory == 123
    found = here.measure("all + offload", here.planned()[0])
    assert (found.peak, found.rate, found.fits) == (5, 2.0, True)
    assert asked == [("free", float("inf")), ("measured", float("inf"))]
    assert here.measure("pipeline", here.planned()[0]).rate == 1.0  # of each of the two devices


def test_what_a_gpu_has_is_what_is_free_or_given_less_the_context(monkeypatch):
    monkeypatch.setattr(trial, "free_on", lambda device: 8 * 2**30)
    device = torch.device("cuda", 0)
    assert budget(device, 2, None) == 8 * 2**30
    assert budget(device, 2, 4 * 2**30) == 4 * 2**30 - 512 * MIB
    assert budget(device, 2, 40 * 2**30) == 8 * 2**30  # no more than there is


def test_trials_of_a_mode_have_its_settings(monkeypatch, data):
    seen = []

    def measure(job, devices, limit):
        seen.append((job.settings.batch, job.settings.checkpoint, job.accumulate))
        return trial.Measured(90 * MIB * job.settings.batch, 1.0)

    monkeypatch.setattr(trial, "measure", measure)
    here = bench(tiny(data), [torch.device("cpu")], 450 * MIB, silent)
    found = tried(here.measure, here.settings, here.modes(), here.planned(), 8, silent)
    small = [(1, "off", 8), (2, "off", 4), (4, "off", 2)]  # 6 would make windows far from nbs
    assert seen == [(8, "off", 1), (8, "stages", 1), (8, "all", 1), *small]
    assert [(one.batch, one.fits) for one in found[:4]] == [(1, True), (2, True), (4, True), (8, False)]  # of 405 MiB
