"""Which run a process goes on with that torchrun has started again: its own, by a random id, and no other."""

import pytest
from scenes import MINUTE, write_dataset
from test_training import run

from detector import distributed
from detector.config.settings import Settings
from detector.run.lock import locked, run_id
from detector.run.resume import RUN, restarted


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    data = write_dataset(tmp_path_factory.mktemp("data"), train=4)
    settings = [f"data={data}", f"model={MINUTE}", "imgsz=64", "epochs=1", "workers=0", "plots=false", "device=cpu"]
    assert run("train", *settings, "val=false", f"project={folder}", "name=mine") == 0
    assert run("train", *settings, "val=false", f"project={folder}", "name=other") == 0
    return folder


def after_a_restart(monkeypatch, remembered, **settings):
    monkeypatch.setattr(distributed, "recall", lambda key: remembered if key == RUN else None)
    return restarted(Settings(data="data.yaml", **settings))


@pytest.mark.slow
def test_runs_have_ids_of_their_own_which_they_keep(finished):
    ids = [run_id(finished / name) for name in ("mine", "other")]
    assert len({*ids, None}) == 3
    assert run("train", f"resume={finished / 'mine'}", "epochs=2") == 0
    assert run_id(finished / "mine") == ids[0]


@pytest.mark.slow
def test_a_restarted_launch_goes_on_with_the_run_whose_id_it_kept(finished, monkeypatch):
    folder = finished / "mine"
    settings, resume = after_a_restart(monkeypatch, f"{run_id(folder)} {folder}", project=finished)
    assert (resume.folder, settings.name) == (folder, "mine")


@pytest.mark.slow
def test_it_takes_up_no_other_run(finished, monkeypatch):
    """Not one that stands in its folder by now, not the latest of the project, not one when it remembers nothing."""
    for remembered in (f"{run_id(finished / 'other')} {finished / 'mine'}", f"abc {finished / 'gone'}", None):
        settings, resume = after_a_restart(monkeypatch, remembered, project=finished, name="fresh")
        assert (settings.name, resume) == ("fresh", None)


def test_a_run_that_was_killed_before_its_first_checkpoint_takes_its_folder_again(tmp_path, monkeypatch):
    folder = tmp_path / "train3"
    folder.mkdir()
    with locked(folder) as identity:
        pass
    settings, resume = after_a_restart(monkeypatch, f"{identity} {folder}", project=tmp_path)
    assert (settings.project, settings.name, settings.exist_ok, resume) == (tmp_path, "train3", True, None)


def test_without_torchrun_nothing_is_kept(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    distributed.remember(RUN, "abc /somewhere")
    assert distributed.recall(RUN) is None
