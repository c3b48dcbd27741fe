"""Searches of settings: trials are runs that go on after a kill, that workers share, and that may fail."""

import csv
import errno
import json
import os
import signal
import statistics
import time

import pytest
import ranks
import torch
import yaml
from scenes import MINUTE, write_dataset
from test_interruption import wait_for
from test_search_space import SPACE, space_file
from test_training import run, same

from detector import checkpoint_file
from detector.commands import search as command
from detector.errors import ConfigError
from detector.run import loop, recover
from detector.search import study as studies
from detector.search import trial as trials
from detector.search.space import Parameter
from detector.search.turns import claim, turn

optuna = pytest.importorskip("optuna")
slow, long = pytest.mark.slow, pytest.mark.long

RATES = "lr0: {low: 1e-4, high: 1, log: true}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=6, val=2)


@pytest.fixture(scope="module")
def common(data):
    return [
        f"data={data}", f"model={MINUTE}", "imgsz=64", "batch=2", "nbs=2", "workers=0", "device=cpu", "epochs=2",
        "objectives=cls",
    ]  # fmt: skip


def search(folder, common, *words, space=SPACE):
    assert run("search", *common, f"space={space_file(folder, space)}", f"project={folder}", "name=s", *words) == 0
    return folder / "s"


def study_of(folder, kind="sqlite"):
    return studies.open_study(folder, kind)


def told(folder, kind="sqlite"):
    """All that is known of a search's trials, but for when they were."""
    return [
        (one.number, one.state.name, one.params, one.values, one.intermediate_values, one.user_attrs.get("failed"))
        for one in study_of(folder, kind).trials
    ]


def tables(folder):
    return [path.read_bytes() for path in sorted(folder.glob("trial*/metrics.csv"))]


# --- what is refused before there is a folder ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["objectives=mAP5095"], "objectives=mAP5095: is no column of metrics.csv"),
        (["objectives=map50"], "Did you mean 'mAP50'?"),
        (["objectives=mAP50-95", "val=false"], "val=false: without validation metrics.csv has no mAP50-95"),
        (["objectives=l1"], "objectives=l1: the losses of this model are box, cls, dfl"),
        (["objectives=cls,cls"], "cls stands there twice"),
        (["objectives=[]"], "name at least one"),
        (["pruner=medain"], "pruner"),
        (["trials=0"], "trials"),
        (["device=cpu:2"], "a trial is trained on one device"),
        (["storage=redis"], "storage"),
    ],
)
def test_a_bad_search_is_named_before_anything_is_written(tmp_path, common, capsys, words, said):
    given = [*(word for word in common if not word.startswith(("objectives", "device"))), "device=cpu", *words]
    given = [word for word in given if word != "device=cpu" or words != ["device=cpu:2"]]
    assert run("search", *given, f"space={space_file(tmp_path)}", f"project={tmp_path}/runs") == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["space.yaml"]


def test_words_of_the_command(tmp_path, data, capsys):
    config = tmp_path / "c.yaml"
    config.write_text(f"data: {data}\n")
    for words, said in (
        ([], "name a config file"),
        ([config], "name a file of what is varied"),
        ([config, tmp_path / "gone.yaml"], "gone.yaml: cannot read this search space"),
        ([space_file(tmp_path)], "'data' is missing"),
        ([f"resume={tmp_path}"], "holds no search"),
        ([f"resume={tmp_path / 'gone'}"], "holds no search"),
        ([config, tmp_path / "space.yaml", "--write", tmp_path / "gone" / "b.yaml"], "no such folder"),
        ([config, tmp_path / "space.yaml", "--write", config], "exists, and no search wrote it"),
        ([config, tmp_path / "space.yaml", "--write", tmp_path / "b.txt"], "is a config file; name it b.txt.yaml"),
    ):
        assert run("search", *words) == 2
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "space.yaml"]


def test_without_optuna_it_says_what_to_install(tmp_path, data, monkeypatch, capsys):
    monkeypatch.setitem(studies.importlib.sys.modules, "optuna", None)
    assert run("search", f"data={data}", f"space={space_file(tmp_path)}", f"project={tmp_path}/runs") == 2
    assert "pip install 'detector[search]'" in capsys.readouterr().err


# --- whole searches --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory, common):
    """A search of four trials in one go, to be read only."""
    return search(tmp_path_factory.mktemp("whole"), common, "trials=4")


@slow
def test_a_trial_trains_by_what_its_folder_says_to_the_bit(whole, tmp_path):
    """All of them: the second and later ones had the index and the images of those before."""
    for trial in study_of(whole).trials:
        folder = whole / trials.folder_name(trial.number)
        written = yaml.safe_load((folder / "settings.yaml").read_text())
        assert trial.params.items() <= written.items()
        assert run("train", folder / "settings.yaml", f"project={tmp_path}", f"name={folder.name}") == 0
        assert same(tmp_path / folder.name, folder)
        assert (tmp_path / folder.name / "metrics.csv").read_bytes() == (folder / "metrics.csv").read_bytes()
        rows = list(csv.DictReader((folder / "metrics.csv").open()))
        assert trial.intermediate_values == {
            int(row["epoch"]): pytest.approx(float(row["cls"]), rel=1e-5) for row in rows
        }


@slow
def test_the_value_is_that_of_the_checkpoint_it_leaves(whole):
    for trial in study_of(whole).trials:
        best = torch.load(whole / trials.folder_name(trial.number) / "weights" / "best.pt", weights_only=True)
        assert trial.value == best["metrics"]["cls"] == min(trial.intermediate_values.values())


@slow
def test_the_best_settings_are_a_config_file(whole, tmp_path, capsys):
    target = tmp_path / "best.yaml"
    assert run("search", f"resume={whole}", "--write", target) == 0
    shown = capsys.readouterr().out
    best = study_of(whole).best_trial
    folder = whole / trials.folder_name(best.number)
    assert f"best      {folder}" in shown
    assert run("train", target, f"project={tmp_path}", "name=again", "plots=false") == 0
    assert same(tmp_path / "again", folder)
    assert run("search", f"resume={whole}", "--write", target) == 0  # its own file may be replaced


@slow
def test_plots_need_no_network(whole):
    for name in ("history.html", "importance.html"):
        text = (whole / name).read_text(encoding="utf-8")
        assert "Plotly.newPlot" in text
        assert "<script src" not in text
        assert "cdn.plot.ly" not in text.split("<script")[0]


class Killed(BaseException):
    """Nothing that was begun is ended."""


def killed_at(monkeypatch, owner, name, number, after=False):
    """The function ends the process, so to say, at its call of that number."""
    real, calls = getattr(owner, name), []

    def call(*given, **named):
        calls.append(1)
        if len(calls) == number and not after:
            raise Killed
        result = real(*given, **named)
        if len(calls) == number:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, call)


PLACES = {
    "before the first checkpoint": (loop, "begin", 2, False),
    "after the first checkpoint": (loop, "begin", 2, True),
    "before an epoch is told": (optuna.trial.Trial, "report", 3, False),
    "after an epoch is told": (optuna.trial.Trial, "report", 3, True),
    "after the last epoch": (trials, "_measured", 2, False),
    "before the result is kept": (optuna.study.Study, "tell", 2, False),
    "after the result is kept": (optuna.study.Study, "tell", 2, True),
    "while it draws": (Parameter, "suggested", 6, True),
}


EVERYWHERE = [*((place, "sqlite") for place in PLACES), *((place, "journal") for place in [*PLACES][1::3])]
OFTEN = ("after the first checkpoint", "before an epoch is told", "before the result is kept")
MARKED = [pytest.param(*one, marks=() if one in [(place, "sqlite") for place in OFTEN] else long) for one in EVERYWHERE]


@slow
@pytest.mark.parametrize(("place", "storage"), MARKED)
def test_a_search_that_is_killed_goes_on_as_if_it_was_not(tmp_path, common, whole, monkeypatch, place, storage):
    words = [
        *common,
        f"space={space_file(tmp_path)}",
        f"project={tmp_path}",
        "name=s",
        "trials=4",
        f"storage={storage}",
    ]
    with monkeypatch.context() as patch:
        killed_at(patch, *PLACES[place])
        with pytest.raises(Killed):
            run("search", *words)
    assert run("search", f"resume={tmp_path / 's'}") == 0
    assert told(tmp_path / "s", storage) == told(whole)
    assert tables(tmp_path / "s") == tables(whole)


@slow
def test_a_search_whose_process_is_killed_goes_on_as_if_it_was_not(tmp_path, common, whole):
    process = ranks.start(
        "detector", "search", *common, f"space={space_file(tmp_path)}", f"project={tmp_path}", "name=s", "trials=4"
    )
    wait_for(tmp_path / "s" / "trial001" / "metrics.csv", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(study_of(tmp_path / "s").trials) == 2
    assert run("search", f"resume={tmp_path / 's'}") == 0
    assert told(tmp_path / "s") == told(whole)
    assert tables(tmp_path / "s") == tables(whole)


@slow
def test_ctrl_c_saves_the_trial_and_says_how_to_go_on(tmp_path, common, whole):
    process = ranks.start(
        "detector", "search", *common, f"space={space_file(tmp_path)}", f"project={tmp_path}", "name=s", "trials=4"
    )
    wait_for(tmp_path / "s" / "trial001" / "weights" / "last.pt", process)
    os.kill(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert f"to go on: detector search resume={tmp_path / 's'}" in out
    assert run("search", f"resume={tmp_path / 's'}") == 0
    assert told(tmp_path / "s") == told(whole)


@slow
@pytest.mark.skipif(os.name == "nt", reason="takes locks of the system")
@pytest.mark.parametrize("storage", ["sqlite", pytest.param("journal", marks=long)])
def test_two_workers_share_the_trials(tmp_path, common, capsys, storage):
    """The first is held still in its trial: the second leaves that one alone, and trains all others."""
    words = [
        *common,
        f"space={space_file(tmp_path)}",
        f"project={tmp_path}",
        "name=s",
        "trials=3",
        f"storage={storage}",
    ]
    process = ranks.start("detector", "search", *words)
    wait_for(tmp_path / "s" / "trial000" / "weights" / "last.pt", process)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        assert run("search", *words) == 0
        shown = capsys.readouterr().out
        states = [one[1] for one in told(tmp_path / "s", storage)]
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert states == ["RUNNING", "COMPLETE", "COMPLETE"]
    assert "2 finished, 1 under way" in shown
    out, error = process.communicate(timeout=90)
    assert process.returncode == 0, error
    assert [one[1] for one in told(tmp_path / "s", storage)] == ["COMPLETE"] * 3
    assert out.count("  best cls") == 1


@pytest.mark.skipif(os.name == "nt", reason="takes locks of the system")
def test_a_claim_ends_with_its_process(tmp_path):
    code = "import sys, time; from pathlib import Path; from detector.search.turns import claim; "
    code += "held = claim(Path(sys.argv[1]), 3); print(held is not None, flush=True); time.sleep(60)"
    process = ranks.start("-c", code, tmp_path)
    wait_for(tmp_path / ".claims" / "003", process)
    deadline = time.monotonic() + 20
    while claim(tmp_path, 3) is not None and time.monotonic() < deadline:  # not locked yet: given back at once
        time.sleep(0.05)
    assert claim(tmp_path, 3) is None
    claim(tmp_path, 4).close()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    claim(tmp_path, 3).close()


def test_of_a_name_there_is_one_search(tmp_path):
    """Of workers that begin at once, the second finds a folder in which nothing is yet but the first one's turn."""
    given = command.SearchSettings(data="a", project=str(tmp_path), name="s")
    assert command.place(given) == command.place(given) == tmp_path / "s"
    with turn(tmp_path / "s"):
        assert command.place(given) == tmp_path / "s"
    (tmp_path / "s" / "weights").mkdir()
    with pytest.raises(ConfigError, match="exists, and holds no search"):
        command.place(given)


# --- trials that do not come to their end ----------------------------------------------------------------------------


@slow
@long
def test_trials_below_the_median_are_pruned_and_stay_so_after_a_kill(tmp_path, common, monkeypatch, capsys):
    monkeypatch.setattr(studies, "STARTUP", 1)
    pruning = [*common, "epochs=3", "warmup_epochs=0"]
    folder = search(tmp_path, pruning, "trials=6", space=RATES)
    assert_pruned_by_the_median(study_of(folder).trials, epochs=3)
    shown = capsys.readouterr().out
    for trial in study_of(folder).trials:
        if trial.state.name == "PRUNED":
            epochs = max(trial.intermediate_values)
            rows = list(csv.DictReader((folder / trials.folder_name(trial.number) / "metrics.csv").open()))
            assert len(rows) == epochs < 3
            assert f"pruned after epoch {epochs}" in shown
            events = (folder / trials.folder_name(trial.number) / "events.jsonl").read_text().splitlines()
            assert json.loads(events[-1])["text"] == "by the pruner"
    first = next(one.number for one in study_of(folder).trials if one.state.name == "PRUNED")
    for number, place in enumerate(((loop, "finish", first + 1), (optuna.study.Study, "tell", first + 1))):
        (again := tmp_path / str(number)).mkdir()
        with monkeypatch.context() as patch:
            killed_at(patch, *place)
            with pytest.raises(Killed):
                search(again, pruning, "trials=6", space=RATES)
        assert told(again / "s")[-1][1] == "RUNNING"
        assert run("search", f"resume={again / 's'}", f"trials={first + 1}") == 0
        assert told(again / "s") == told(folder)[: first + 1]


def assert_pruned_by_the_median(found, epochs):
    """By hand: a trial ends at the first epoch at which its lowest loss so far is above the median of those before."""
    done, pruned = [], 0
    for trial in found:
        expected = epochs
        for epoch in range(1, epochs):
            values = [trial.intermediate_values.get(n) for n in range(1, epoch + 1)]
            others = [one[epoch] for one in done]
            if others and min(values) > statistics.median(others):
                expected = epoch
                break
        assert max(trial.intermediate_values) == expected
        assert trial.state.name == ("COMPLETE" if expected == epochs else "PRUNED")
        if trial.state.name == "COMPLETE":
            done.append(trial.intermediate_values)
        else:
            pruned += 1
    assert pruned
    assert len(done) > 1


def short_of_memory(monkeypatch, most):
    """Memory for so many images at once."""
    real = recover.train_window

    def window(state, gradients, rules, cut, *rest):
        if max(len(micro) for device in cut.micro_batches for micro in device) > most:
            raise torch.OutOfMemoryError("CUDA out of memory (not really)")
        return real(state, gradients, rules, cut, *rest)

    monkeypatch.setattr(recover, "train_window", window)


@slow
def test_a_trial_that_runs_out_of_memory_is_cut_finer_and_no_failure(tmp_path, common, monkeypatch, capsys):
    short_of_memory(monkeypatch, most=1)
    folder = search(tmp_path, common, "trials=1")
    assert [one[1] for one in told(folder)] == ["COMPLETE"]
    assert "trial000  memory    ran out at 2 images a micro-batch" in capsys.readouterr().out


@slow
def test_a_trial_that_fails_is_kept_with_its_reason_and_the_search_goes_on(tmp_path, common, monkeypatch, capsys):
    real, calls = command.loop.train, []

    def train(*given):
        calls.append(1)
        with monkeypatch.context() as patch:
            if len(calls) == 2:
                short_of_memory(patch, most=0)
            return real(*given)

    monkeypatch.setattr(command.loop, "train", train)
    folder = search(tmp_path, common, "trials=3")
    assert [one[1] for one in told(folder)] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert "TrainingError: out of memory with one image" in told(folder)[1][5]
    assert "failed: TrainingError: out of memory with one image" in capsys.readouterr().out


@slow
def test_a_full_disk_stops_the_search_and_fails_no_trial(tmp_path, common, whole, monkeypatch, capsys):
    real, calls = checkpoint_file.write, []

    def full(*given, **named):
        calls.append(1)
        if len(calls) == 7:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*given, **named)

    words = [*common, f"space={space_file(tmp_path)}", f"project={tmp_path}", "name=s", "trials=4"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_file, "write", full)
        assert run("search", *words) == 2
    printed = capsys.readouterr()
    assert "cannot be written: No space left on device" in printed.err
    assert f"to go on: detector search resume={tmp_path / 's'}" in printed.out
    assert [one[1] for one in told(tmp_path / "s")] == ["COMPLETE", "RUNNING"]
    assert run("search", f"resume={tmp_path / 's'}") == 0
    assert told(tmp_path / "s") == told(whole)


@slow
@long
def test_a_trial_that_always_ends_its_process_counts_as_failed(tmp_path, common, monkeypatch, capsys):
    words = [*common, f"space={space_file(tmp_path)}", f"project={tmp_path}", "name=s", "trials=1"]
    for _ in range(trials.TRIES):
        with monkeypatch.context() as patch:
            killed_at(patch, loop, "run_epochs", 1)
            with pytest.raises(Killed):
                run("search", *words)
        assert [one[1] for one in told(tmp_path / "s")] == ["RUNNING"]
    assert run("search", *words) == 0
    assert [one[1] for one in told(tmp_path / "s")] == ["FAIL"]
    assert "begun 5 times at the same place" in capsys.readouterr().out


@slow
def test_a_search_of_failures_alone_stops_and_says_why(tmp_path, common, monkeypatch, capsys):
    short_of_memory(monkeypatch, most=0)
    words = [*common, f"space={space_file(tmp_path)}", f"project={tmp_path}", "name=s", "trials=9"]
    assert run("search", *words) == 2
    assert "5 trials in a row failed, the last with\n    TrainingError: out of memory" in capsys.readouterr().err
    assert [one[1] for one in told(tmp_path / "s")] == ["FAIL"] * 5


# --- going on with it ------------------------------------------------------------------------------------------------


@slow
def test_more_trials_are_those_of_a_longer_search(tmp_path, common, whole):
    folder = search(tmp_path, common, "trials=2")
    assert told(folder) == told(whole)[:2]
    assert run("search", f"resume={folder}", "trials=4") == 0
    assert told(folder) == told(whole)


@slow
@pytest.mark.parametrize(
    ("words", "space", "said"),
    [
        (["epochs=3"], SPACE, "epochs: 2 -> 3"),
        (["objectives=box"], SPACE, 'objectives: ["cls"] -> ["box"]'),
        (["pruner=none"], SPACE, 'pruner: "median" -> "none"'),
        ([], SPACE.replace("0.95", "0.9"), "space: momentum: "),
        (["cos_lr=true"], SPACE, "cos_lr: (not written) -> true"),
    ],
)
def test_another_search_in_the_folder_is_refused_with_what_differs(whole, common, tmp_path, capsys, words, space, said):
    before = told(whole)
    keys = [word.partition("=")[0] for word in words]
    given = [*(word for word in common if word.partition("=")[0] not in keys), *words]
    path = space_file(tmp_path, space)
    assert run("search", *given, f"space={path}", f"project={whole.parent}", f"name={whole.name}") == 2
    error = capsys.readouterr().err
    assert "holds another search" in error
    assert said in error
    assert told(whole) == before


@slow
def test_what_cannot_change_on_a_resume_is_named(whole, capsys):
    assert run("search", f"resume={whole}", "epochs=5") == 2
    assert "epochs: cannot change in the middle of a search" in capsys.readouterr().err


@slow
def test_a_damaged_study_is_named(tmp_path, capsys):
    for name, content in (("study.db", b"long enough to look like a file of one" * 99), ("study.journal", b"{\nx\n")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(content)
        assert run("search", f"resume={folder}") == 2
        assert f"{folder / name}: cannot be read as a search" in capsys.readouterr().err


# --- objectives, and what trials share -------------------------------------------------------------------------------


@slow
def test_two_objectives_make_a_front(tmp_path, common, capsys):
    folder = search(
        tmp_path,
        [*common[:-1], "epochs=1"],
        "objectives=cls,latency",
        "trials=3",
        space=RATES,
    )
    shown = capsys.readouterr().out
    found = study_of(folder).trials
    assert all(len(one.values) == 2 and one.values[1] > 0 and not one.intermediate_values for one in found)
    front = {one.number for one in found if not any(better(other.values, one.values) for other in found)}
    table = shown.partition("-----\n")[2].partition("these are the front")[0]
    assert {int(line[5:8]) for line in table.splitlines() if line.startswith("trial")} == front
    assert (folder / "front.html").is_file()


def better(these, those):
    """Nowhere worse, and not the same."""
    return these != those and all(a <= b for a, b in zip(these, those, strict=True))
