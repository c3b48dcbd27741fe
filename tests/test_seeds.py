"""Several seeds: the runs that each alone would be, and the numbers of all of them."""

import csv
import statistics

import pytest
import yaml
from test_training import common, data, run, same, train  # noqa: F401 - two are fixtures

from detector.commands import seeds
from detector.config.settings import TrainSettings, load_settings
from detector.errors import ConfigError


def best_of(folder):
    with (folder / "metrics.csv").open() as file:
        return max(float(row["mAP50-95"]) for row in csv.DictReader(file))


@pytest.mark.slow
def test_each_seed_is_the_run_that_it_alone_would_be(tmp_path, common, capsys):  # noqa: F811
    config = tmp_path / "my.yaml"
    config.write_text("seed: [0, 3]\n")
    words = [*common, "epochs=2", "quiet=true", f"project={tmp_path}"]
    assert run("train", config, *words) == 0
    said = capsys.readouterr().out
    alone = train(tmp_path, common, "alone", "epochs=2", "seed=3")
    assert same(tmp_path / "train-seed3", alone)
    assert not same(tmp_path / "train-seed0", alone)
    settings = yaml.safe_load((tmp_path / "train-seed3" / "settings.yaml").read_text())
    assert (settings["seed"], settings["name"]) == (3, "train-seed3")
    best = [best_of(tmp_path / f"train-seed{seed}") for seed in (0, 3)]
    rows = {line.split()[0]: line.split() for line in said.splitlines()[-4:]}
    assert rows["mean"][1] == f"{statistics.mean(best):.3f}"
    assert rows["deviation"][1] == f"{statistics.stdev(best):.3f}"
    assert [rows[seed][2] for seed in ("0", "3")] == [f"{one:.3f}" for one in best]
    assert "window " not in said
    assert "epoch 1/2" not in said


def test_the_best_row_is_that_of_the_metric_and_losses_are_better_when_lower(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("epoch,box,mAP50-95,mAP50\n1,3,0.2,nan\n2,1,0.5,0.6\n3,2,0.5,0.7\n4,,,\n")
    assert [seeds.best_of(tmp_path, metric)["epoch"] for metric in ("mAP50-95", "mAP50", "box")] == [2, 3, 2]


def test_folders_are_named_alike_and_none_is_there_before(tmp_path):
    settings = load_settings(TrainSettings, None, ["data=a.yaml", f"project={tmp_path}"]).of_run()
    assert seeds.named(settings, [0, 1]) == {0: "train-seed0", 1: "train-seed1"}
    (tmp_path / "train-seed1").mkdir()
    assert seeds.named(settings, [0, 1]) == {0: "train2-seed0", 1: "train2-seed1"}
    assert seeds.named(settings, [0]) == {0: "train-seed0"}
    mine = settings.model_copy(update={"name": "mine"})
    (tmp_path / "mine-seed0").mkdir()
    with pytest.raises(ConfigError, match="mine-seed0"):
        seeds.named(mine, [0, 1])
    assert seeds.named(mine.model_copy(update={"exist_ok": True}), [0]) == {0: "mine-seed0"}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["seed=[]"], "names none"),
        (["seed=[1,1]"], "twice"),
        (["seed=[1,two]"], "seed"),
        (["seed=[0,1]", "resume=runs/train"], "resume"),
    ],
)
def test_seeds_that_cannot_be_trained_are_refused_by_name(tmp_path, common, capsys, words, complaint):  # noqa: F811
    assert run("train", *common, f"project={tmp_path}", *words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error


def test_one_run_is_made_under_torchrun(tmp_path, common, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("train", *common, f"project={tmp_path}", "seed=0,1") == 2
    assert "torchrun" in capsys.readouterr().err
