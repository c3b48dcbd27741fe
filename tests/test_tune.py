"""`detector tune` and `batch: auto`: the rules on made-up trials, and real trials against what is known of them."""

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

from detector.cli import parse
from detector.commands.tune import write
from detector.config import Settings, TuneSettings, load_settings
from detector.data.batch import Sample
from detector.errors import ConfigError
from detector.training import trial
from detector.training.crowd import heaviest
from detector.training.fit import bench, budget, tried
from detector.training.plan import Cut
from detector.training.setup import indices
from detector.training.trial import Job, in_child
from detector.training.tune import Trial, cuts, parse_memory, recommend, search, table

MIB = 2**20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")


def settings(*overrides):
    return load_settings(Settings, None, ["data=d.yaml", *overrides])


def made(mode, batch, peak, rate, fits=True, devices=1):
    return Trial(mode, Cut(batch, max(64 // (batch * devices), 1), devices), peak * MIB, rate, fits)


# --- what is tried


@pytest.mark.parametrize(
    ("overrides", "devices", "images", "batches"),
    [
        ((), 1, 1000, [1, 2, 4, 8, 16, 32, 64]),
        ((), 4, 1000, [1, 2, 4, 8, 16]),
        (("nbs_scope=device",), 4, 1000, [1, 2, 4, 8, 16, 32, 64]),
        (("nbs=48",), 1, 1000, [1, 2, 4, 8, 16, 48]),  # 32 would make windows of 64
        ((), 1, 10, [1, 2, 4, 8, 10]),  # no micro-batch has more images than there are
        (("nbs=2",), 8, 1000, [1]),
    ],
)
def test_micro_batches_double_up_to_the_window(overrides, devices, images, batches):
    assert [cut.batch for cut in cuts(settings(*overrides), devices, images)] == batches


@pytest.mark.parametrize("limit", range(12, 66))
def test_the_search_stops_after_the_first_that_does_not_fit_and_tries_the_middle(limit):
    """Whatever fits, nothing is recommended that was not tried, and no doubling goes beyond the first that is over."""
    asked = []

    def measure(cut):
        asked.append(cut.batch)
        return made("plain", cut.batch, cut.batch, 1.0, cut.batch <= limit)

    found = search(settings(), cuts(settings(), 1, 1000), measure)
    assert sorted(asked) == [one.batch for one in found]
    over = [batch for batch in asked if batch > limit]
    powers = [batch for batch in (1, 2, 4, 8, 16, 32, 64) if batch <= limit]
    assert [batch for batch in asked if batch in powers] == powers
    assert len(over) <= 2
    if 12 <= limit < 16:
        assert asked == [1, 2, 4, 8, 16, 12]
    if 32 <= limit < 64:
        assert 48 not in asked  # a window of 48 would be another run


# --- what is recommended


def test_the_fastest_that_fits_is_recommended():
    trials = [made("plain", 8, 900, 50.0), made("plain", 16, 1800, 70.0), made("plain", 32, 3600, 90.0, fits=False)]
    assert recommend(trials, "batch", 8) == trials[1]
    assert recommend(trials[2:], "batch", 8) is None
    assert recommend([], "batch", 8) is None


def test_a_large_enough_batch_for_norms_comes_before_speed_where_it_fits():
    small, large = made("plain", 4, 900, 100.0), made("all", 16, 900, 60.0)
    assert recommend([small, large], "batch", 8) == large
    assert recommend([small, large], "batch", 4) == small
    assert recommend([small, large], "batch", 32) == small  # none is large enough: then the fastest
    assert recommend([small, large], "frozen", 8) == small
    both = [made("plain", 4, 900, 100.0, devices=2), made("all", 16, 900, 60.0, devices=2)]
    assert recommend(both, "sync", 8) == both[0]  # 4 images on each of two devices
    assert recommend(both, "batch", 8) == both[1]


def test_noise_recommends_no_checkpointing():
    plain, stages = made("plain", 16, 900, 100.0), made("stages", 16, 500, 105.0)
    assert recommend([stages, plain], "batch", 8) == plain
    assert recommend([stages._replace(rate=150.0), plain], "batch", 8).mode == "stages"


def test_an_estimate_recommends_the_cheapest_mode_and_then_the_largest_batch():
    trials = [made(mode, batch, 100, None) for mode in ("all", "stages", "plain") for batch in (4, 8, 16)]
    assert recommend(trials, "batch", 8) == made("plain", 16, 100, None)
    without = [one for one in trials if one.mode != "plain" or one.batch < 8]
    assert recommend(without, "batch", 8) == made("stages", 16, 100, None)


def test_the_table_shows_every_trial_and_marks_one():
    trials = [made("plain", 8, 900, 50.0), Trial("all", Cut(16, 4), None, None, False)]
    head, *lines = table(trials, "batch", trials[0]).splitlines()
    assert head.split() == ["mode", "batch", "accumulate", "window", "BatchNorm", "peak", "images/s", "fits"]
    assert " ".join(lines[0].split()) == "plain 8 8 64 8 900 MiB 50.0 yes <-"
    assert " ".join(lines[1].split()) == "all 16 4 64 16 over no"
    assert table(trials, "frozen", None).splitlines()[1].split()[4] == "-"


@pytest.mark.parametrize(
    ("text", "count"),
    [("4GiB", 4 * 2**30), ("4 gib", 4 * 2**30), ("8GB", 8 * 10**9), ("900M", 900 * 10**6), ("1.5Gi", 3 * 2**29)],
)
def test_memory_is_a_number_and_a_unit(text, count):
    assert parse_memory(text) == count


@pytest.mark.parametrize("text", ["4", "GiB", "-4GiB", "4 apples", "", "4GiBs", "0GiB", "1kB", "inf GB"])
def test_other_memory_is_refused_with_a_way_to_write_it(text):
    with pytest.raises(ConfigError, match=r"memory=.*MiB"):
        parse_memory(text)


def test_a_share_of_the_host_is_each_process():
    assert budget(torch.device("cpu"), 2, 8 * MIB) == 4 * MIB


# --- --write


CONFIG = """\
# my run
data: d.yaml  # mine
batch: 16 # too much
epochs: 3

checkpoint: stages
names: [a, b] # two
"""


def test_write_changes_its_lines_and_nothing_else(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(CONFIG)
    said = write(file, {"batch": 4, "checkpoint": "off", "offload": True})
    expected = CONFIG.replace("batch: 16", "batch: 4").replace("stages", "off") + "offload: true\n"
    assert file.read_text() == expected
    loaded = load_settings(Settings, file)
    assert (loaded.batch, loaded.checkpoint, loaded.offload, loaded.epochs) == (4, "off", True, 3)
    assert "batch: 16 -> 4" in "\n".join(said)
    assert len(said) == 3
    assert "already" in write(file, {"batch": 4, "checkpoint": "off", "offload": True})[0]
    assert file.read_text() == expected
    assert [one.name for one in tmp_path.iterdir()] == ["my.yaml"]


def test_write_adds_no_defaults_and_copes_with_a_last_line_without_an_end(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("data: d.yaml")
    write(file, {"batch": 16, "checkpoint": "off", "offload": False})
    assert file.read_text() == "data: d.yaml"
    write(file, {"batch": 8, "checkpoint": "all", "offload": False})
    assert file.read_text() == "data: d.yaml\nbatch: 8\ncheckpoint: all\n"


@pytest.mark.parametrize("text", ["{data: d.yaml, epochs: 3}\n", "data: d.yaml\n...\n"])
def test_write_leaves_a_file_that_it_cannot_edit(tmp_path, text):
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="batch: 4"):
        write(file, {"batch": 4, "checkpoint": "off", "offload": False})
    assert file.read_text() == text


def test_write_needs_a_file(capsys):
    assert run("tune", "data=d.yaml", "--write") == 2
    assert "--write" in capsys.readouterr().err


# --- settings


def test_settings_of_tune_are_those_of_the_run_and_its_memory():
    given = load_settings(TuneSettings, None, ["data=d.yaml", "memory=4GiB", "epochs=3", "batch=auto"])
    assert given.memory == "4GiB"
    assert given.of_run() == load_settings(Settings, None, ["data=d.yaml", "epochs=3", "batch=auto"])
    assert given.of_run().model_fields_set == {"data", "epochs", "batch"}
    assert parse(["tune", "my.yaml"]).min_bn_batch == 8


def test_flags_stand_anywhere_and_unknown_ones_are_refused():
    options = parse(["tune", "my.yaml", "--estimate", "memory=4GiB", "--min-bn-batch", "4", "epochs=3"])
    assert options.arguments == ["my.yaml", "memory=4GiB", "epochs=3"]
    assert (options.estimate, options.min_bn_batch, options.write) == (True, 4, False)
    for words in (["tune", "my.yaml", "--wrote"], ["info", "last.pt", "more"]):
        with pytest.raises(SystemExit):
            parse(words)


@pytest.mark.parametrize("value", ["0", "many", "-1", "1.5"])
def test_batch_is_a_number_or_auto(value):
    with pytest.raises(ConfigError, match="batch="):
        settings(f"batch={value}")


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
    code = "import sys, torch\nfrom detector.training import trial\n{}\ntrial.main(sys.argv[1])"
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
    lines = [f"data: {data}", f"model: {TINY}", "imgsz: 64 # small", "nbs: 4", "device: cpu", "workers: 0", "epochs: 1"]
    file.write_text("\n".join([*lines, "batch: 16", f"project: {tmp_path}", "plots: false", ""]))
    assert run("tune", file, "memory=4GiB", "--write", "--min-bn-batch", "4") == 0
    printed = capsys.readouterr().out
    assert len([line for line in printed.splitlines() if line.startswith(("plain ", "stages ", "all "))]) == 9
    assert file.read_text().startswith("\n".join(lines))
    assert load_settings(Settings, file).batch == 4
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
    """The bookkeeping alone, with a GPU that is none: what is asked of the allocator, and what is made of its answers."""
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
