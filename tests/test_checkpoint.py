"""Checkpoints: complete, strict, atomic, and harmless to open."""

import dataclasses
import os
import pickle

import pytest
import torch
from scenes import TINY, random_batch
from test_step import new_state, step_of

from detector import checkpoint_file
from detector.checkpoint_file import not_finite
from detector.classes import matches, order_of
from detector.errors import CheckpointError, ConfigError
from detector.model.checkpoint import network_of, started
from detector.model.network import build_network, load_description, network_from_description
from detector.run.state import RunState


def trained_state():
    state = new_state(model=TINY)
    for seed in (1, 2):
        step_of(random_batch([2, 1, 0, 3], seed=seed), [2, 2], torch.float32, state=state)
    state.epoch, state.history = 1, [{"epoch": 1, "mAP50-95": 0.25}]
    return state


def saved_file(folder, state, **more):
    path = folder / "last.pt"
    about = {"description": state.network.description, "names": ["a", "b"], "imgsz": 64, "settings": {}}
    checkpoint_file.write(path, {**about, **state.state_dict(), **more})
    return path


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def test_a_restored_state_is_the_saved_one_and_goes_on_like_it(tmp_path):
    state = trained_state()
    path = saved_file(tmp_path, state)
    restored = new_state(model=TINY)
    restored.load_state_dict(checkpoint_file.read(path))
    assert_same(dict(state.state_dict()), dict(restored.state_dict()))
    for one in (state, restored):
        step_of(random_batch([1, 4, 2, 0], seed=3), [2, 2], torch.float32, state=one)
    assert_same(dict(state.network.state_dict()), dict(restored.network.state_dict()))
    assert_same(dict(state.ema.network.state_dict()), dict(restored.ema.network.state_dict()))


def test_every_field_of_the_state_is_saved():
    saved = trained_state().state_dict().keys()
    names = {"network": "model"}
    assert {names.get(field.name, field.name) for field in dataclasses.fields(RunState)} | {"ema_steps"} == saved


def test_a_checkpoint_without_an_entry_is_refused(tmp_path):
    state = trained_state()
    for key in state.state_dict():
        saved = {name: value for name, value in state.state_dict().items() if name != key}
        with pytest.raises(CheckpointError, match=key):
            new_state(model=TINY).load_state_dict(saved)


def test_torch_reads_it_with_weights_only_and_all_is_fp32(tmp_path):
    saved = torch.load(saved_file(tmp_path, trained_state()), weights_only=True)
    for part in ("model", "ema"):
        assert {value.dtype for value in saved[part].values()} == {torch.float32, torch.int64}


def test_a_file_that_would_run_code_is_refused_and_does_not(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    for name, save in (
        ("a.pt", lambda path: torch.save({"format": 1, "model": Evil()}, path)),
        ("b.pt", lambda path: path.write_bytes(pickle.dumps(Evil()))),
    ):
        save(tmp_path / name)
        with pytest.raises(CheckpointError, match=name):
            checkpoint_file.read(tmp_path / name)
    assert not (tmp_path / "harm").exists()


def test_a_tensor_that_is_not_finite_is_found_by_name():
    """Wherever it is; numbers whose norm overflows are finite, and metrics may be NaN."""
    bad = torch.tensor([1.0, float("inf")])
    assert not_finite({"model": {"w": torch.ones(2), "bn.running_var": bad}}) == "model.bn.running_var"
    assert not_finite({"optimizer": {"state": {3: {"exp_avg": bad * 0}}}}) == "optimizer.state.3.exp_avg"
    huge = torch.full((9,), 3e38)
    assert not_finite({"model": {"huge": huge, "steps": torch.tensor(3)}, "mAP50": float("nan")}) is None
    assert not_finite({}) is None


def test_what_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").write_bytes(b"")
    path = saved_file(tmp_path, trained_state())
    (tmp_path / "cut.pt").write_bytes(path.read_bytes()[:-5000])
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    torch.save({"format": 99}, tmp_path / "newer.pt")
    for name in ("text.pt", "empty.pt", "cut.pt", "other.pt", "newer.pt", "missing.pt", ""):
        with pytest.raises(CheckpointError, match=name or "a folder"):
            checkpoint_file.read(tmp_path / name)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = saved_file(tmp_path, trained_state())
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        saved_file(tmp_path, new_state(model=TINY))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def start(path, names, model=TINY):
    """A network of `model` that starts from a checkpoint, and what was said."""
    return started(load_description(model), path, names, seed=5)


def fresh(classes):
    return build_network(TINY, nc=classes, seed=5)


def test_starting_from_weights_takes_what_fits_and_says_so(tmp_path):
    state = trained_state()
    path = saved_file(tmp_path, state)
    same, said = start(path, ("a", "b"))
    assert said.endswith(f"{len(same.state_dict())} of {len(same.state_dict())} tensors")
    assert_same(dict(same.state_dict()), dict(state.ema.network.state_dict()))
    other, said = start(path, "cdefg")
    assert "fresh for 5 other classes: 6 class tensors" in said
    assert torch.equal(other.model[0].conv.weight, state.ema.network.model[0].conv.weight)
    with pytest.raises(ConfigError, match="another architecture"):
        start(path, ("a", "b"), "v11n")


def test_classes_are_told_by_their_names(tmp_path):
    """In another order the network is the same function; other names at the same count start fresh."""
    state = trained_state()
    path = saved_file(tmp_path, state)
    images = random_batch([1, 2]).network_input()
    expected = state.ema.network.eval()(images).logits
    turned, said = start(path, ("b", "a"))
    assert "its classes in the data set's order" in said
    torch.testing.assert_close(turned.eval()(images).logits, expected.flip(1))
    other, said = start(path, ("c", "d"))
    assert "fresh for 2 other classes: 6 class tensors" in said
    for layer, untouched in zip(other.head.class_outputs, fresh(2).head.class_outputs, strict=True):
        assert torch.equal(layer.weight, untouched.weight)
    assert torch.equal(other.head.cv2[0][-1].weight, state.ema.network.head.cv2[0][-1].weight)


def test_classes_of_another_set_are_taken_by_their_names(tmp_path):
    """Space around a name and case aside; classes that the checkpoint has not start fresh, those left out are gone."""
    state = trained_state()
    path = saved_file(tmp_path, state, names=["Cat", "dog "])
    known = state.ema.network.head.class_outputs
    other, said = start(path, ("bird", " DOG", "cat"))
    assert "2 of 3 classes by their names, and fresh: bird (names=" in said
    for layer, theirs, new in zip(other.head.class_outputs, known, fresh(3).head.class_outputs, strict=True):
        for part in ("weight", "bias"):
            rows = getattr(new, part)[:1], getattr(theirs, part)[1:], getattr(theirs, part)[:1]
            assert torch.equal(getattr(layer, part), torch.cat(rows))
    fewer, said = start(path, ("dog",))
    assert said.endswith("; 1 of its 2 classes, by their names")
    assert torch.equal(fewer.head.class_outputs[0].bias, known[0].bias[1:])


@pytest.mark.parametrize(
    ("names", "known", "found"),
    [
        ("ab", "ba", [1, 0]),
        (["Car ", "bus"], ["BUS", "truck", "car"], [2, 0]),
        ("aab", "ab", [None, None, 1]),  # which a is it?
        (["class_0", "cat"], ["class_0", "dog", "cat"], [None, 2]),  # nobody's name
        (["class_0", "class_1"], ["class_0", "class_1"], [0, 1]),
        (["item"], ["item", "cat"], [None]),
        (["item"], ["item"], [0]),
        ("abc", "", [None] * 3),
    ],
)
def test_names_find_their_classes(names, known, found):
    assert matches(names, known) == found


def test_networks_that_differ_in_no_tensor_are_told_apart(tmp_path):
    """Shortcuts, strides, kernels of pools and where layers read are in no tensor."""
    path = saved_file(tmp_path, trained_state())
    for layer, change, said in (
        (2, [128, False, 0.25, False, 1, False], "'model.2.m.0' has add True, not False"),
        (8, [128, 3], "'model.8' has kernel 5, not 3"),
    ):
        description = load_description(TINY)
        [*description["backbone"], *description["head"]][layer][3] = change
        with pytest.raises(ConfigError, match=f"another architecture: {said}"):
            started(description, path, ("a", "b"))
    with pytest.raises(ConfigError, match="has activation"):
        started({**load_description(TINY), "activation": "torch.nn.ReLU()"}, path, ("a", "b"))


def test_what_no_model_name_says_is_as_in_the_checkpoint(tmp_path):
    """An SPPF without activation and class branches of another width: the network goes on as the same function."""
    description = {**load_description(TINY), "class_channels": 24}
    description["backbone"][8][3] = [128, 5, 3, False, False]
    network = network_from_description(description, seed=1).eval()
    saved = {"ema": network.state_dict(), "description": description, "names": ["a", "b"], "imgsz": 64, "settings": {}}
    checkpoint_file.write(tmp_path / "best.pt", saved)
    same, said = start(tmp_path / "best.pt", ("a", "b"))
    assert said.endswith("; its SPPF without activation; its class branches of 24 channels")
    images = random_batch([1, 2]).network_input()
    assert torch.equal(same.eval()(images).logits, network(images).logits)
    again = network_from_description(same.description)  # what is saved builds the same
    again.load_state_dict(same.state_dict())
    assert torch.equal(again.eval()(images).logits, network(images).logits)


@pytest.mark.parametrize(
    ("names", "known", "order"),
    [
        ("abc", "abc", [0, 1, 2]),
        ("cab", "abc", [2, 0, 1]),
        ("abd", "abc", None),
        ("ab", "abc", None),
        ("aab", "aab", [0, 1, 2]),
        ("aab", "aba", None),  # which a is which?
    ],
)
def test_the_order_of_names(names, known, order):
    assert order_of(names, known) == order


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value):
    state = trained_state()
    state.ema.network.model[0].conv.weight.data[0, 0, 0, 0] = value
    path = saved_file(tmp_path, state)
    for use in (
        lambda: network_of(checkpoint_file.read(path), path),
        lambda: start(path, ("a", "b")),
    ):
        with pytest.raises(CheckpointError, match=r"last.pt: 'model.0.conv.weight' holds values that are not finite"):
            use()


def test_resuming_with_another_architecture_is_refused(tmp_path):
    saved = checkpoint_file.read(saved_file(tmp_path, trained_state()))
    saved["model"]["model.0.conv.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="another model"):
        new_state(model=TINY).load_state_dict(saved)
