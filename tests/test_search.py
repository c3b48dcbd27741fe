"""Hyper-parameters by Optuna: what is refused, how trials go on after a kill, and that workers share them."""

import csv
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
from test_training import run, same

from detector.commands import search as command
from detector.config.settings import Settings
from detector.errors import ConfigError
from detector.run import build, loop, recover
from detector.search import study as studies
from detector.search import trial as trials
from detector.search.kept import INDEXED, TURNING, KeptImages
from detector.search.objectives import objectives_of
from detector.search.space import Parameter, read_space, space_of
from detector.search.turns import claim

optuna = pytest.importorskip("optuna")
slow = pytest.mark.slow

SPACE = """\
lr0: {low: 1e-4, high: 1e-1, log: true}
optimizer: {choices: [SGD, AdamW]}
momentum: {low: 0.7, high: 0.95, when: {optimizer: sgd}}
warmup_epochs: {low: 0, high: 1, step: 0.5}
"""

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


def space_file(folder, text=SPACE):
    path = folder / "space.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def search(folder, common, *words, space=SPACE):
    assert run("search", *common, f"space={space_file(folder, space)}", f"project={folder}", "name=s", *words) == 0
    return folder / "s"


def study_of(folder, kind="sqlite"):
    return studies.open_study(folder, kind)


def told(folder, kind="sqlite"):
    """All that is known of a search's trials, but for when they were."""
    return [
        (one.number, one.state.name, one.params, one.values, one.intermediate_values, one.user_attrs)
        for one in study_of(folder, kind).trials
    ]


def tables(folder):
    return [path.read_bytes() for path in sorted(folder.glob("trial*/metrics.csv"))]


# --- what is varied --------------------------------------------------------------------------------------------------


BAD_SPACES = {
    "lr: {low: 1, high: 2}": "space.yaml:1: 'lr' is not a setting",
    "\nmomentun: {low: 0, high: 1}": "space.yaml:2: 'momentun' is not a setting. Did you mean 'momentum'?",
    "lr0: {low: 0.1, high: 0.01}": "low=0.1 and high=0.01 are the wrong way round; swap them",
    "lr0: {low: 0.1, high: 0.1}": "are one value; write lr0: 0.1",
    "hsv_h: {low: 0, high: 1, log: true}": "low=0: log: true takes numbers above 0",
    "lrf: {low: -1, high: 1, log: true}": "low=-1: log: true takes numbers above 0",
    "lr0: {low: 1e-3, high: 1e-1, log: true, step: 0.1}": "has log and step",
    "lr0: {low: 1e-3}": "lacks high",
    "lr0: {}": "lacks low and high",
    "lr0: {low: a, high: 1}": "low='a': is no number",
    "lr0: {low: .nan, high: 1}": "low=nan: is no number",
    "lr0: {low: 0.1, high: .inf}": "high=inf: is no number",
    "lr0: {low: true, high: 2}": "low=True: is no number",
    "lr0: {low: 0.1, hihg: 1}": "'hihg' is none of low, high, log, step, choices, when. Did you mean 'high'?",
    "lr0: {low: 0.1, high: 1, log: maybe}": "log='maybe': is true or false",
    "mosaic: {low: 0, high: 2}": "space.yaml:1: mosaic=2: should be less than or equal to 1",
    "momentum: {low: 0.5, high: 1}": "space.yaml:1: momentum=1: should be less than 1",
    "imgsz: {low: 320, high: 640}": "imgsz=321: must be a multiple of 32",
    "imgsz: {low: 320, high: 650, step: 32}": "no number of steps of 32 leads from 320 to 650; write high: 640",
    "mosaic: {low: 0, high: 1, step: 0.3}": "write high: 0.9",
    "mosaic: {low: 0, high: 1, step: 0}": "step=0: is above 0",
    "mosaic: {low: 0, high: 1, step: 3}": "take a smaller step",
    "epochs: {low: 1.5, high: 3}": "epochs=1.5",
    "cos_lr: {low: 0, high: 1}": "cos_lr: is no number, so it has no range; name choices",
    "nbs: {choices: []}": "choices=[]: name two or more",
    "nbs: {choices: 16}": "choices=16: name two or more",
    "nbs: {choices: [16]}": "name two or more",
    "nbs: {choices: [16, 32], low: 1}": "has choices and low; keep one way",
    "nbs: {choices: [16, 0]}": "nbs=0",
    "optimizer: {choices: [SGD, sgd]}": "the choice 'SGD' stands there twice",
    "optimizer: {choices: [SGD, adam]}": "optimizer='adam': not here",
    "freeze: {choices: [1, [2, 3]]}": "no lists and mappings",
    "data: {choices: [a.yaml, b.yaml]}": "data: cannot be searched: values of trials could not be compared",
    "project: {choices: [a, b]}": "project: cannot be searched",
    "resume: {choices: [a, b]}": "resume: cannot be searched",
    "device: {choices: [cpu, 0]}": "device: cannot be searched",
    "seed: {low: 0, high: 9}": "seed: cannot be searched: trials are to differ by their parameters alone",
    "": "varies no setting",
    "epochs: 3": "varies no setting",
    "- lr0": "a search space is a list of 'key: value' lines",
    "lr0: {low: 1": "not a YAML file",
    "lr0: {low: 0.1, high: 1}\nlr0: {low: 0.1, high: 2}": "space.yaml:2: 'lr0' is written twice, first in line 1",
    "lr0: {low: 0.1, high: 1}\nepochs: 0": "space.yaml:2: epochs=0",
    "lr0: {low: 0.1, high: 1, when: AdamW}": "when='AdamW': is a mapping",
    "lr0: {low: 0.1, high: 1, when: {optimiser: SGD}}": "Did you mean 'optimizer'?",
    "lr0: {low: 0.1, high: 1, when: {optimizer: SGDW}}": "lr0: when: optimizer='SGDW'",
    "lr0: {low: 0.1, high: 1, when: {optimizer: SGD}}": "optimizer=SGD: never comes true: optimizer is not varied",
    "lr0: {low: 0.1, high: 1, when: {momentum: 0.9}}\nmomentum: {low: 0.8, high: 0.9}": "a condition takes choices",
    "lr0: {low: 0.1, high: 1, when: {nbs: 8}}\nnbs: {choices: [16, 32]}": "nbs=8: is none of its choices, 16, 32",
    "nbs: {choices: [1, 2], when: {bn: batch}}\nbn: {choices: [batch, frozen], when: {nbs: 1}}": "wait for one another",
}


@pytest.mark.parametrize(("text", "said"), BAD_SPACES.items(), ids=lambda value: None)
def test_a_bad_space_is_named(tmp_path, text, said):
    with pytest.raises(ConfigError) as error:
        read_space(space_file(tmp_path, text), {"data": "data.yaml"})
    assert said in str(error.value)


def test_what_a_space_means(tmp_path):
    text = "nbs: {low: 16, high: 64, log: true}\ndegrees: {low: 0, high: 45}\nbatch: {low: 2, high: 8, step: 2}"
    space = read_space(space_file(tmp_path, f"{text}\nepochs: 3"), {"data": "data.yaml"})
    batch, degrees, nbs = space.parameters
    assert space.fixed == {"epochs": 3}
    assert (nbs.whole, nbs.log, batch.whole, batch.step) == (True, True, True, 2)
    assert (degrees.whole, degrees.low, degrees.high) == (False, 0.0, 45.0)  # a setting that takes fractions
    assert space_of(json.loads(json.dumps(space.described())), {"data": "data.yaml"}) == space


def test_a_path_is_relative_to_the_space_file(tmp_path):
    (space,) = read_space(space_file(tmp_path, "model: {choices: [v11n, mine.yaml]}"), {"data": "a"}).parameters
    assert space.choices == ("v11n", str(tmp_path / "mine.yaml"))


# --- what a trial is drawn by ----------------------------------------------------------------------------------------


def drawn(seed, count, objective=lambda params: params["lr0"], path=None):
    """The parameters of trials whose value is a formula."""
    study = optuna.create_study(study_name=studies.NAME, direction="minimize")
    space = read_space(space_file(path), {"data": "data.yaml"})
    settings = Settings(data="data.yaml").model_dump(mode="json")
    for _ in range(count):
        trial = studies.asked(study, space, settings, seed, None)
        study.tell(trial, objective(trial.params))
    return [one.params for one in study.trials]


def test_equal_seeds_draw_equal_trials_and_others_do_not(tmp_path):
    first, again, other = (drawn(seed, 14, path=tmp_path) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert len({one["lr0"] for one in first}) == 14  # no generator stands still


def test_draws_follow_the_space_and_its_conditions(tmp_path):
    found = drawn(0, 30, path=tmp_path)
    assert {("momentum" in one, one["optimizer"]) for one in found} == {(True, "SGD"), (False, "AdamW")}
    assert all(1e-4 <= one["lr0"] <= 1e-1 and one["warmup_epochs"] in (0, 0.5, 1) for one in found)
    assert all(0.7 <= one["momentum"] <= 0.95 for one in found if "momentum" in one)
    early, late = (statistics.mean(one["lr0"] for one in part) for part in (found[:10], found[20:]))
    assert late < early  # the sampler learns


def test_a_trial_that_was_left_half_drawn_is_drawn_to_its_end_as_it_would_have_been(tmp_path, monkeypatch):
    whole = drawn(5, 12, path=tmp_path)
    study = optuna.create_study(study_name=studies.NAME, direction="minimize")
    space = read_space(space_file(tmp_path), {"data": "data.yaml"})
    settings = Settings(data="data.yaml").model_dump(mode="json")
    real = Parameter.suggested

    def killed(one, trial):
        if one.name == left_at:
            raise KeyboardInterrupt
        return real(one, trial)

    for number in range(12):
        left_at = space.parameters[number % len(space.parameters)].name
        monkeypatch.setattr(Parameter, "suggested", killed)
        try:
            trial = studies.asked(study, space, settings, 5, None)
        except KeyboardInterrupt:
            monkeypatch.setattr(Parameter, "suggested", real)
            trial = studies.asked(study, space, settings, 5, number)
        study.tell(trial, trial.params["lr0"])
    assert [one.params for one in study.trials] == whole


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
        assert trial.value == best["metrics"]["cls"]


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


@slow
@pytest.mark.parametrize("storage", ["sqlite", pytest.param("journal", marks=pytest.mark.long)])
@pytest.mark.parametrize("place", PLACES)
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
@pytest.mark.parametrize("storage", ["sqlite", pytest.param("journal", marks=pytest.mark.long)])
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


# --- trials that do not come to their end ----------------------------------------------------------------------------


@slow
def test_trials_below_the_median_are_pruned(tmp_path, common, monkeypatch, capsys):
    real = optuna.pruners.MedianPruner
    monkeypatch.setattr(optuna.pruners, "MedianPruner", lambda **named: real(n_startup_trials=1, **named))
    folder = search(tmp_path, [*common, "epochs=3", "warmup_epochs=0"], "trials=6", space=RATES)
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
    assert "TrainingError: out of memory with one image" in told(folder)[1][5]["failed"]
    assert "failed: TrainingError: out of memory with one image" in capsys.readouterr().out


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


def test_directions():
    settings = Settings(data="data.yaml", model=str(MINUTE))
    names = ["mAP50-95", "F1", "box", "dfl", "latency"]
    found = [one.direction for one in objectives_of(names, settings)]
    assert found == ["maximize", "maximize", "minimize", "minimize", "minimize"]
    assert [one.name for one in objectives_of(None, Settings(data="a", metric="recall"))] == ["recall"]


class Looked:
    """Settings that note what is read of them."""

    def __init__(self, settings):
        self.settings, self.seen = settings, set()

    def __getattr__(self, name):
        self.seen.add(name)
        return getattr(self.settings, name)


def test_indices_are_kept_by_all_that_they_follow_from(data):
    looked = Looked(Settings(data=str(data), fraction=0.5, classes=[0]))
    build.indices(looked, lambda text: None)
    assert looked.seen <= {*INDEXED, *TURNING}
    assert {"data", "fraction", "seed", "degrees"} <= looked.seen


def test_trials_share_indices_and_decoded_images(data, monkeypatch):
    images, settings = KeptImages(), Settings(data=str(data), imgsz=64, workers=0, cache="ram")
    first = images.training_set(images.indices(settings, print)[0], settings, False)
    samples = [first[0, slot] for slot in range(len(first))]
    other = settings.model_copy(update={"lr0": 0.5})
    assert images.indices(other, print)[0] is first.index
    monkeypatch.setattr(type(first.index), "fitted", None)  # decodes nothing from here on
    second = images.training_set(first.index, other, False)
    for slot, sample in enumerate(samples):
        assert (second[0, slot].image == sample.image).all()
    larger = settings.model_copy(update={"imgsz": 96})
    assert images.training_set(first.index, larger, False).cache.imgsz == 96
    turned = settings.model_copy(update={"degrees": 5.0})
    assert images.indices(turned, print)[0] is not first.index
