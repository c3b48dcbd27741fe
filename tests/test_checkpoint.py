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
from detector.classes import order_of
from detector.errors import CheckpointError, ConfigError
from detector.model.checkpoint import network_of, start_from
from detector.model.network import build_network
from detector.run.state import RunState


def trained_state():
    state = new_state()
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
    restored = new_state()
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
            new_state().load_state_dict(saved)


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
        saved_file(tmp_path, new_state())
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_starting_from_weights_takes_what_fits_and_says_so(tmp_path):
    state = trained_state()
    path = saved_file(tmp_path, state)
    same = build_network(TINY, nc=2, seed=5)
    assert start_from(same, path, ("a", "b")).endswith(f"{len(same.state_dict())} of {len(same.state_dict())} tensors")
    assert_same(dict(same.state_dict()), dict(state.ema.network.state_dict()))
    other = build_network(TINY, nc=5, seed=5)
    assert "fresh for 5 other classes" in start_from(other, path, "abcde")
    assert torch.equal(other.model[0].conv.weight, state.ema.network.model[0].conv.weight)
    with pytest.raises(ConfigError, match="another architecture"):
        start_from(build_network("v11n", nc=2), path, ("a", "b"))


def test_classes_are_told_by_their_names(tmp_path):
    """In another order the network is the same function; other names at the same count start fresh."""
    state = trained_state()
    path = saved_file(tmp_path, state)
    images = random_batch([1, 2]).network_input()
    expected = state.ema.network.eval()(images).logits
    turned = build_network(TINY, nc=2, seed=5)
    assert "its classes in the data set's order" in start_from(turned, path, ("b", "a"))
    torch.testing.assert_close(turned.eval()(images).logits, expected.flip(1))
    other, untouched = (build_network(TINY, nc=2, seed=5) for _ in range(2))
    assert "fresh for 2 other classes: 6 class tensors" in start_from(other, path, ("a", "c"))
    for layer, fresh in zip(other.head.class_outputs, untouched.head.class_outputs, strict=True):
        assert torch.equal(layer.weight, fresh.weight)
    assert torch.equal(other.head.cv2[0][-1].weight, state.ema.network.head.cv2[0][-1].weight)


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
        lambda: start_from(build_network(TINY, nc=2), path, ("a", "b")),
    ):
        with pytest.raises(CheckpointError, match=r"last.pt: 'model.0.conv.weight' holds values that are not finite"):
            use()


def test_resuming_with_another_architecture_is_refused(tmp_path):
    saved = checkpoint_file.read(saved_file(tmp_path, trained_state()))
    saved["model"]["model.0.conv.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="another model"):
        new_state().load_state_dict(saved)
