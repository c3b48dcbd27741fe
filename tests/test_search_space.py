"""What a search varies and seeks: what is refused, what is drawn, and what its trials share."""

import json
import statistics

import pytest
from scenes import MINUTE, write_dataset

from detector.config.settings import Settings
from detector.errors import ConfigError
from detector.run import build
from detector.search import study as studies
from detector.search.kept import INDEXED, TURNING, KeptImages
from detector.search.objectives import objectives_of
from detector.search.space import Parameter, read_space, space_of

SPACE = """\
lr0: {low: 1e-4, high: 1e-1, log: true}
optimizer: {choices: [SGD, AdamW]}
momentum: {low: 0.7, high: 0.95, when: {optimizer: sgd}}
warmup_epochs: {low: 0, high: 1, step: 0.5}
"""


def space_file(folder, text=SPACE):
    path = folder / "space.yaml"
    path.write_text(text, encoding="utf-8")
    return path


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
    pytest.importorskip("optuna")
    study = studies.optuna().create_study(study_name=studies.NAME, direction="minimize")
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
    study = studies.optuna().create_study(study_name=studies.NAME, direction="minimize")
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


def test_a_journal_whose_last_line_is_half_written_goes_on(tmp_path):
    pytest.importorskip("optuna")
    study = studies.open_study(tmp_path, "journal", ["minimize"])
    study.tell(study.ask(), 1.0)
    journal = tmp_path / studies.FILES["journal"]
    journal.write_bytes(journal.read_bytes() + journal.read_bytes().splitlines()[-1][:9])
    again = studies.open_study(tmp_path, "journal")
    again.tell(again.ask(), 2.0)
    assert [one.value for one in studies.open_study(tmp_path, "journal").trials] == [1.0, 2.0]


def test_directions():
    settings = Settings(data="data.yaml", model=str(MINUTE))
    names = ["mAP50-95", "F1", "box", "dfl", "latency"]
    found = [one.direction for one in objectives_of(names, settings)]
    assert found == ["maximize", "maximize", "minimize", "minimize", "minimize"]
    assert [one.name for one in objectives_of(None, Settings(data="a", metric="recall"))] == ["recall"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=6, val=2)


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
