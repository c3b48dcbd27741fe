"""What a run tells: its journal is that of one run, however it was interrupted; whoever listens cannot harm it."""

import csv
import json
import math
import sys
import threading
import time

import pytest
import ranks
import yaml
from test_training import common, data, run, same, train  # noqa: F401 - two are fixtures

import detector
from detector.errors import ConfigError
from detector.reporting import journal
from detector.reporting.journal import Event, Journal, WindowRow, read_events, read_windows
from detector.reporting.loggers import loggers_of
from detector.reporting.reports import Facts, Had, Reports

EPOCHS = "epochs=3"
OF_THE_MACHINE = ("seconds", "waited", "memory", "time")


def settings_of(words):
    return yaml.safe_load("\n".join(word.replace("=", ": ", 1) for word in words))


def rows_of(folder):
    """The windows, without what another run of the same never has the same."""
    rows = [vars(row) for row in read_windows(folder)]
    return [{key: value for key, value in row.items() if key not in OF_THE_MACHINE} for row in rows]


def kinds_of(folder):
    return [event.kind for event in read_events(folder) if event.kind != "machine"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, common):  # noqa: F811
    return train(tmp_path_factory.mktemp("whole"), common, "run", EPOCHS, "log=tensorboard", "plots=true")


@pytest.mark.slow
def test_the_windows_add_up_to_the_epochs(whole):
    rows = read_windows(whole)
    with (whole / "metrics.csv").open() as file:
        epochs = list(csv.DictReader(file))
    assert [row.window for row in rows] == list(range(1, len(rows) + 1))
    assert kinds_of(whole) == ["begun", "finished"]
    for number, epoch in enumerate(epochs, 1):
        mine = [row for row in rows if row.epoch == number]
        assert sum(row.images for row in mine) == mine[-1].done == 10
        assert [sum(map(sum, row.cut)) for row in mine] == [row.images for row in mine]
        assert mine[-1].step == int(epoch["step"])
        assert mine[-1].lr == pytest.approx(float(epoch["lr"]), rel=1e-5)
        for term in ("box", "cls", "dfl"):
            mean = sum(row.losses[term] * row.images for row in mine) / 10
            assert mean == pytest.approx(float(epoch[term]), rel=1e-5)
        assert all(0 <= row.waited <= 1 and row.seconds > 0 and row.memory > 0 for row in mine)


@pytest.mark.slow
@pytest.mark.parametrize("logger", ["tensorboard", "mlflow"])
def test_a_run_that_was_killed_leaves_what_one_in_one_go_does(tmp_path, common, whole, logger, monkeypatch):  # noqa: F811
    pytest.importorskip(logger)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    words = [*common, EPOCHS, "plots=true", f"project={tmp_path}", "name=run", f"log={logger}"]
    process = ranks.start("detector", "train", *words)
    deadline = time.monotonic() + 60
    while len(read_windows(tmp_path / "run")) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert run("train", f"resume={tmp_path / 'run'}") == 0
    assert rows_of(tmp_path / "run") == rows_of(whole)
    assert same(tmp_path / "run", whole)
    assert kinds_of(tmp_path / "run") == ["begun", "resumed", "finished"]
    assert any("killed" in event.text for event in read_events(tmp_path / "run"))
    steps = steps_in_tensorboard if logger == "tensorboard" else steps_in_mlflow
    windows = [row.window for row in read_windows(whole)]
    assert steps(tmp_path / "run", "window/box") == steps(tmp_path / "run", "window/lr") == windows
    assert steps(tmp_path / "run", "epoch/mAP50") == [1, 2, 3]


def steps_in_tensorboard(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    if name == "window/box":
        losses = [row.losses["box"] for row in read_windows(folder)]
        assert [event.value for event in read.Scalars(name)] == pytest.approx(losses, rel=1e-6)
        assert "validation" in read.Tags()["images"]
    return [event.step for event in read.Scalars(name)]


def steps_in_mlflow(folder, name):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    (one,) = client.search_runs([client.get_experiment_by_name("detector").experiment_id])
    assert (one.info.status, one.info.run_name) == ("FINISHED", "run")
    assert one.data.params["nbs"] == "4"
    assert "validation.jpg" in [file.path for file in client.list_artifacts(one.info.run_id)]
    return [metric.step for metric in client.get_metric_history(one.info.run_id, name)]


@pytest.mark.slow
def test_weights_and_biases_offline_goes_on_under_one_id(tmp_path, common, monkeypatch):  # noqa: F811
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(tmp_path, common, "run", "epochs=1", "log=wandb")
    assert run("train", f"resume={tmp_path / 'run'}", "epochs=2") == 0
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    told = json.loads((tmp_path / "run" / "wandb" / "logged.json").read_text())
    assert len(folders) == 2
    assert all(folder.name.endswith(told["id"]) for folder in folders)
    assert (told["window"], told["epoch"]) == (len(read_windows(tmp_path / "run")), 2)


@pytest.mark.slow
def test_functions_get_plain_values_and_can_stop_a_run(tmp_path, common, whole):  # noqa: F811
    windows, epochs = [], []

    def on_window(row):
        windows.append(json.loads(json.dumps(row)))
        if row["window"] == 7:
            raise detector.StopTraining("seven are enough")

    result = detector.train(
        settings_of(common), epochs=3, project=tmp_path, name="run", on_window=on_window, on_epoch=epochs.append
    )
    assert [row["window"] for row in windows] == list(range(1, 8))
    assert [row["epoch"] for row in epochs] == [1]
    assert result.metrics.keys() >= {"mAP50", "mAP50-95"}
    assert read_events(tmp_path / "run")[-1].text == "by seven are enough"
    detector.train(resume=tmp_path / "run")
    assert rows_of(tmp_path / "run") == rows_of(whole)
    assert same(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_run_stopped_in_its_first_epoch_is_saved_and_has_no_metrics(tmp_path, common, whole):  # noqa: F811
    def at_once(row):
        raise detector.StopTraining

    result = detector.train(settings_of(common), epochs=3, project=tmp_path, name="run", on_window=at_once)
    assert result.metrics == {}
    assert not result.best.exists()
    detector.train(resume=result.folder)
    assert same(result.folder, whole)


@pytest.mark.slow
def test_any_other_error_of_a_function_ends_the_run(tmp_path, common):  # noqa: F811
    def broken(row):
        return row["no such key"]

    with pytest.raises(KeyError, match="no such key"):
        detector.train(settings_of(common), epochs=1, project=tmp_path, name="run", on_epoch=broken)
    assert kinds_of(tmp_path / "run") == ["begun", "failed"]


@pytest.mark.slow
def test_one_of_several_processes_calls_them_and_all_stop(tmp_path, common):  # noqa: F811
    words = [*common, "epochs=3", f"project={tmp_path}", "name=run"]
    done = ranks.run(2, "watch_worker.py", tmp_path / "out", *words)
    assert done.returncode == 0, done.stderr
    (told, metrics), (nothing, none) = (json.loads((tmp_path / f"out.{rank}").read_text()) for rank in (0, 1))
    assert [row["window"] for row in told] == [1, 2, 3, 4]
    assert [len(row["cut"]) for row in told] == [2, 2, 2, 2]
    assert nothing == []
    assert "mAP50" in metrics
    assert none == []


@pytest.mark.slow
def test_a_run_in_a_thread_can_be_stopped_by_its_function(tmp_path, common):  # noqa: F811
    results = []

    def on_epoch(row):
        raise detector.StopTraining

    def work():
        results.append(detector.train(settings_of(common), project=tmp_path, epochs=50, on_epoch=on_epoch))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert {row.epoch for row in read_windows(results[0].folder)} == {1}


class Failing:
    """A logger that fails at its second window."""

    def __init__(self):
        self.calls = 0

    def begin(self, facts):
        return Had()

    def window(self, row):
        self.calls += 1
        if row.window == 2:
            raise ConnectionError("the server\nis away")

    def event(self, event):
        pass

    epoch = picture = end = event


@pytest.mark.slow
def test_a_logger_that_fails_is_named_once_and_the_run_is_the_same(tmp_path, common, whole, monkeypatch, capsys):  # noqa: F811
    failing = Failing()
    monkeypatch.setattr("detector.run.build.loggers_of", lambda names: {"mine": failing})
    folder = train(tmp_path, common, "run", EPOCHS)
    said = capsys.readouterr().out
    assert said.count("warning: log: mine: ConnectionError: the server is away") == 1
    assert failing.calls == 2
    assert same(folder, whole)


@pytest.mark.slow
def test_a_journal_that_cannot_be_written_is_named_once(tmp_path, common, whole, capsys):  # noqa: F811
    (tmp_path / "run" / "steps.jsonl").mkdir(parents=True)
    folder = train(tmp_path, common, "run", EPOCHS, "exist_ok=true")
    assert capsys.readouterr().out.count("warning: steps.jsonl: cannot be written") == 1
    assert same(folder, whole)
    assert kinds_of(folder) == ["begun", "finished"]


def test_a_missing_package_is_named_before_a_run_begins(tmp_path, common, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert run("train", *common, f"project={tmp_path / 'runs'}", "log=mlflow") == 2
    assert "pip install 'detector[mlflow]'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match="mlflow"):
        loggers_of(["mlflow"])


def row_at(window, epoch, done, **other):
    values = dict(
        step=window, images=4, cut=[[2, 2]], applied=True, losses={"box": 1 / 3}, weight=1.0, norm=2.0, lr=0.1
    )
    values |= dict(loss_scale=1.0, seconds=0.5, waited=0.0, memory=2**30, time=1.8e9 + window) | other
    return WindowRow(window, epoch, done, **values)


def test_a_journal_reads_what_it_wrote_and_takes_back_what_is_later(tmp_path):
    diary = Journal(tmp_path)
    rows = [row_at(n, 1 + (n - 1) // 3, 4 * (1 + (n - 1) % 3), norm=math.inf if n == 2 else 2.0) for n in range(1, 8)]
    for row in rows:
        diary.window(row)
    diary.event(Event("begun", "zu früh 🙂", 1, 0, 1.0))
    read = read_windows(tmp_path)
    assert math.isnan(read[1].norm)
    assert [row.done for row in read] == [4, 8, 12, 4, 8, 12, 4]
    assert read[0].losses["box"] == pytest.approx(1 / 3, rel=1e-6)
    assert read_events(tmp_path)[0].text == "zu früh 🙂"
    kept, taken_back = diary.rewind(2, 8)
    assert ([row.window for row in kept], taken_back) == ([1, 2, 3, 4, 5], 2)
    assert [row.window for row in read_windows(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_line_that_was_cut_short_costs_no_other(tmp_path):
    diary = Journal(tmp_path)
    diary.window(row_at(1, 1, 4))
    with (tmp_path / journal.STEPS).open("ab") as file:
        file.write(b'{"window":2,"epo')
    diary.window(row_at(3, 1, 8))
    with (tmp_path / journal.STEPS).open("ab") as file:
        file.write(b'\xff\xfe[1]\nnull\n{"window":7}\n')
    assert [row.window for row in read_windows(tmp_path)] == [1, 3]


class Listener:
    """A logger that has so much of a run already."""

    def __init__(self, had):
        self.had, self.heard = had, []

    def begin(self, facts):
        self.left = facts.left
        return self.had

    def window(self, row):
        self.heard.append(row.window)

    def epoch(self, row, window):
        self.heard.append(f"epoch {row['epoch']} at {window}")


@pytest.mark.parametrize(
    ("had", "expected"),
    [
        (Had(), [1, 2, "epoch 1 at 2", 3, 4, "epoch 2 at 4", 5]),
        (Had(2, 0), ["epoch 1 at 2", 3, 4, "epoch 2 at 4", 5]),
        (Had(3, 1), [4, "epoch 2 at 4", 5]),
        (Had(5, 2), []),
        (Had(9, 2), []),
    ],
)
def test_a_logger_is_told_what_it_lacks_in_order(tmp_path, had, expected):
    diary = Journal(tmp_path)
    for n in range(1, 7):
        diary.window(row_at(n, 1 + (n - 1) // 2, 4 * (1 + (n - 1) % 2)))
    listener = Listener(had)
    reports = Reports(diary, {"one": listener}, pytest.fail)
    facts = Facts("id", tmp_path, {}, left=True)
    reports.begin(facts, 3, 4, [{"epoch": 1, "lr": 0.1}, {"epoch": 2, "lr": 0.1}], known=5)
    assert listener.heard == expected
    assert listener.left  # window 6 was taken back
    assert reports.windows == 5
