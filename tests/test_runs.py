"""`detector runs`: what a folder tells of its run, also in the midst of it, and nothing that is touched by asking."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from scenes import MINUTE, write_dataset

import detector
from detector.cli import main
from detector.errors import ConfigError
from detector.reporting.journal import Event, Journal
from detector.run.lock import LOCK, in_use, locked
from detector.run.records import read_record, runs_in

SETTINGS = {"epochs": 3, "model": "v11n", "data": "/sets/cells/data.yaml", "metric": "mAP50-95"}
METRICS = "epoch,step,box,mAP50-95,mAP50\n1,4,3.5,0.2,0.5\n2,8,3.1,0.4,0.6\n3,12,3.2,0.4,0.7\n"

needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="has no such locks")


def make(folder, events=(), settings=SETTINGS, metrics=METRICS):
    """A run's folder; events: pairs of kind and time."""
    folder.mkdir(parents=True)
    if settings is not None:
        (folder / "settings.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    if metrics is not None:
        (folder / "metrics.csv").write_text(metrics, encoding="utf-8")
    for kind, when in events:
        Journal(folder).event(Event(kind, "", 1, 0, float(when)))
    return folder


def aged(folder, seconds):
    for file in folder.rglob("*"):
        os.utime(file, (seconds, seconds))
    return folder


def listed(capsys, *words):
    assert main(["runs", *map(str, words)]) == 0
    return capsys.readouterr().out


def told(capsys, folder):
    return {one["folder"].rpartition("/")[2]: one for one in json.loads(listed(capsys, folder, "json=true"))}


HOLD = """
import sys
from pathlib import Path
from detector.run.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holding():
    """Starts a process that holds a run's folder, as one that trains does."""
    started = []

    def hold(folder):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "state", "seconds"),
    [
        ([("begun", 100), ("finished", 160)], "finished", 60),
        ([("begun", 100), ("bad step", 110), ("failed", 120)], "failed", 20),
        ([("begun", 100), ("stopped", 130), ("resumed", 500), ("stopped", 510)], "stopped", 40),
        ([("begun", 100), ("stopped", 130), ("resumed", 500)], "killed", 30 + 700),
        ([("begun", 100), ("memory", 150), ("resumed", 500), ("finished", 600)], "finished", 50 + 100),
        ([("begun", 100)], "killed", 1100),
        ([], "finished", None),  # of a version without a journal: all epochs are there
    ],
)
@needs_locks
def test_state_and_time_follow_from_the_journal(tmp_path, capsys, events, state, seconds):
    aged(make(tmp_path / "a", events), 1200)
    found = told(capsys, tmp_path)["a"]
    assert (found["state"], found["seconds"]) == (state, seconds)
    assert (found["epoch"], found["epochs"]) == (3, 3)


@needs_locks
def test_a_run_in_progress_is_running_and_keeps_its_lock(tmp_path, capsys, holding):
    folder = make(tmp_path / "a", [("begun", 100), ("stopped", 120), ("resumed", 130)])
    process = holding(folder)
    before = (folder / LOCK).read_bytes(), (folder / LOCK).stat().st_mtime_ns
    assert told(capsys, tmp_path)["a"]["state"] == "running"
    assert "running" in listed(capsys, tmp_path)
    assert ((folder / LOCK).read_bytes(), (folder / LOCK).stat().st_mtime_ns) == before
    with pytest.raises(ConfigError, match=f"process {process.pid}"), locked(folder):
        pass
    process.kill()
    process.wait()
    assert told(capsys, tmp_path)["a"]["state"] == "killed"
    with locked(folder):
        pass


@needs_locks
def test_asking_does_not_keep_a_run_from_starting(tmp_path, holding):
    folder = make(tmp_path / "a")
    assert in_use(folder) is False
    (folder / LOCK).write_text("process 1 of run x\n")
    os.chmod(folder / LOCK, 0o444)
    assert in_use(folder) is False
    os.chmod(folder / LOCK, 0o644)
    holding(folder)
    assert in_use(folder) is True


@needs_locks
def test_the_process_that_trains_can_ask_without_losing_its_lock(tmp_path):
    folder = make(tmp_path / "a")
    with locked(folder):
        assert read_record(folder).state == "running"
        asked = f"from pathlib import Path; from detector.run.lock import in_use; print(in_use(Path({str(folder)!r})))"
        done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
        assert done.stdout == "True\n"
    assert in_use(folder) is False


# --- what is told ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "metrics", "best"),
    [
        ("mAP50-95", METRICS, ("mAP50-95", 0.4, 2)),  # of equals the first
        ("mAP50", METRICS, ("mAP50", 0.7, 3)),
        ("box", METRICS, ("box", 3.1, 2)),  # of losses the lowest
        ("mAP50-95", "epoch,step,box\n1,4,3.5\n", None),  # val: false
        ("mAP50-95", "epoch,mAP50-95\n1,nan\n2,\n3,0.1\n", ("mAP50-95", 0.1, 3)),
        ("mAP50-95", "epoch,mAP50-95\n1,nan\n", None),
        (["no", "metric"], METRICS, None),
    ],
)
def test_the_best_epoch_is_that_of_the_metric(tmp_path, metric, metrics, best):
    record = read_record(make(tmp_path / "a", settings={**SETTINGS, "metric": metric}, metrics=metrics))
    assert record.best == best


def test_newest_first_and_one_level_deeper(tmp_path, capsys):
    aged(make(tmp_path / "old"), 1000)
    aged(make(tmp_path / "group" / "new"), 3000)
    aged(make(tmp_path / "middle"), 2000)
    make(tmp_path / "group" / "too" / "deep")
    make(tmp_path / "middle" / "inside_a_run")
    lines = listed(capsys, tmp_path).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["group/new", "middle", "old"]
    assert lines[2].split()[1:7] == ["finished", "3/3", "mAP50-95", "0.400", "2", "v11n"]
    assert "cells/data.yaml" in lines[2]
    assert listed(capsys, tmp_path / "old").splitlines()[2].startswith("old ")


DAMAGE = {
    "no yaml": ("settings.yaml", b"epochs: [3\n\x00"),
    "a list": ("settings.yaml", b"- 1\n"),
    "not utf-8": ("settings.yaml", b"model: \xff\xfe\n"),
    "other values": ("settings.yaml", b"epochs: many\nmodel: [1]\ndata: 7\nmetric: {}\n3: x\n"),
    "a tag": ("settings.yaml", b"epochs: !!python/object/apply:os.getcwd []\n"),
    "a date": ("settings.yaml", b"epochs: 2020-99-99\n"),
    "nul in csv": ("metrics.csv", b"epoch,mAP50-95\n1,0.5\n\x00,\n"),
    "words in csv": ("metrics.csv", b"epoch,mAP50-95\none,high,more,and,more\ninf,0.5\nnan,1\n"),
    "empty csv": ("metrics.csv", b""),
    "half an event": ("events.jsonl", b'{"kind":"begun","text":"","epoch":1,"st'),
    "foreign events": ("events.jsonl", b'{"a":1}\n[]\n7\n{"kind":3,"text":4,"epoch":5,"step":6,"time":"x"}\n'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_shown_with_a_dash(tmp_path, capsys, damage):
    name, content = DAMAGE[damage]
    (make(tmp_path / "a") / name).write_bytes(content)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / name).write_bytes(content)
    lines = listed(capsys, tmp_path).splitlines()
    assert sorted(line.split()[0] for line in lines[2:]) == ["a", "b"]
    assert " - " in next(line for line in lines if line.startswith("b"))
    assert set(told(capsys, tmp_path)) == {"a", "b"}


def test_what_is_no_run_is_left_out(tmp_path, capsys):
    (tmp_path / "predict").mkdir()
    (tmp_path / "predict" / "a.jpg").write_bytes(b"")
    (tmp_path / "check" / "pictures").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("settings.yaml", "metrics.csv", "events.jsonl", ".lock"):  # folders in the place of files
        (tmp_path / "odd" / name).mkdir(parents=True)
    assert runs_in(tmp_path) == []
    assert read_record(tmp_path / "odd").state is None
    make(tmp_path / "group" / "a")
    assert runs_in(tmp_path) == [tmp_path / "group" / "a"]
    assert len(listed(capsys, tmp_path).splitlines()) == 3


def test_folders_without_runs_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "no runs in" in listed(capsys)
    assert json.loads(listed(capsys, "json=true")) == []
    (tmp_path / "empty").mkdir()
    assert f"no runs in {tmp_path / 'empty'}; `detector train" in listed(capsys, "empty")
    for words, message in (
        (["elsewhere"], "there is no such folder"),
        (["empty", "empty"], "name one folder"),
        (["empty", "folder=empty"], "name one folder"),
        (["empty", "epochs=3"], "'epochs' is not a setting of detector runs"),
    ):
        assert main(["runs", *words]) == 2
        assert message in capsys.readouterr().err


@needs_locks
def test_the_list_needs_no_torch_and_any_locale_shows_it(tmp_path):
    make(tmp_path / "кот <b>&\n", [("begun", 100), ("finished", 200)])
    code = (
        "import sys; from detector.cli import main; status = main(sys.argv[1:]); print('torch' in sys.modules, status)"
    )
    for words in ([], ["json=true"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "runs", str(tmp_path), *words],
            env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == "False 0"
        assert not done.stderr
        if not words:
            assert len(done.stdout.splitlines()) == 4


@pytest.mark.slow
def test_a_run_of_this_version_is_told_as_it_was(tmp_path, capsys):
    data = write_dataset(tmp_path / "set")
    common = {"data": data, "model": MINUTE, "imgsz": 64, "batch": 2, "workers": 0, "device": "cpu", "plots": False}
    seen = []
    detector.train(
        **common, epochs=2, project=tmp_path / "runs", name="mine",
        on_epoch=lambda row: seen.append((row, read_record(tmp_path / "runs" / "mine").state)),
    )  # fmt: skip
    capsys.readouterr()
    found = told(capsys, tmp_path / "runs")["mine"]
    assert [state for _, state in seen] == ["running"] * len(seen)
    assert (found["state"], found["epoch"], found["epochs"]) == ("finished", 2, 2)
    best = max((row for row, _ in seen), key=lambda row: row["mAP50-95"])
    assert found["best"]["epoch"] == best["epoch"]
    assert found["best"]["value"] == pytest.approx(best["mAP50-95"], rel=1e-5)
    assert found["data"] == str(data)
    assert found["seconds"] > 0
