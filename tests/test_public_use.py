"""Public checkpoints in use: told, converted, measured, predicted with and trained from as our own."""

import pytest
import torch
from public_writer import of_halves, public_network, shuffled, write
from scenes import TINY, write_dataset
from test_training import run

from detector import checkpoint_file, load
from detector.errors import ConfigError
from detector.model.checkpoint import network_of, started
from detector.model.network import load_description, network_from_description

IMAGES = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))
LICENSE = "AGPL-3.0 (https://ultralytics.com/license)"


def bare_tiny():
    """TINY, with an SPPF that has no activation."""
    description = {**load_description(TINY), "nc": 2}
    description["backbone"][8][3] = [128, 5, 3, False, False]
    return description


@pytest.fixture(scope="module")
def network():
    return shuffled(network_from_description(bare_tiny(), 1))


@pytest.fixture(scope="module")
def public(tmp_path_factory, network):
    folder = tmp_path_factory.mktemp("public") / "weights"
    folder.mkdir()
    return write(folder / "public.pt", public_network(network, ("square", "disc")))


def same_outputs(one, other):
    with torch.no_grad():
        return torch.equal(one(IMAGES).boxes, other(IMAGES).boxes) and torch.equal(
            one(IMAGES).logits, other(IMAGES).logits
        )


def test_info_says_where_a_file_is_from(public, capsys):
    assert run("info", public) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    tensors = len(network_from_description(bare_tiny()).state_dict())
    assert lines["model"].startswith(f"yolo11n (scale t), {tensors} tensors")
    assert lines["model"].endswith("trained at imgsz 96")
    assert lines["classes"] == "square, disc"
    assert lines["epoch"] == "finished"
    assert lines["metrics"] == "mAP50-95 0.25  recall 0.5"
    assert lines["origin"] == "ultralytics  8.4.60  2026-01-02T03:04:05"
    assert lines["license"] == LICENSE
    assert "settings" not in lines


def test_a_converted_file_is_one_of_ours(tmp_path, public, network, capsys):
    assert run("convert", public, tmp_path / "ours.pt") == 0
    assert f"license   {LICENSE}" in capsys.readouterr().out
    plain = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert "activations" not in plain
    saved = checkpoint_file.read(tmp_path / "ours.pt")
    assert saved["origin"]["license"] == LICENSE
    assert same_outputs(network_of(saved, tmp_path / "ours.pt"), of_halves(network))
    detector = load(tmp_path / "ours.pt", device="cpu")
    assert (detector.names, detector.imgsz) == (("square", "disc"), 96)
    assert run("info", tmp_path / "ours.pt") == 0
    assert f"license   {LICENSE}" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["public", "ours"])
def test_a_state_dict_is_tensors_by_their_public_names_and_nothing_else(tmp_path, public, network, source, capsys):
    path = public
    if source == "ours":
        assert run("convert", public, path := tmp_path / "ours.pt") == 0
    assert run("convert", path, tmp_path / "plain.pt", "format=state_dict") == 0
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert type(plain) is dict
    assert list(plain) == list(network.state_dict())
    expected = of_halves(network).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in plain.items())
    capsys.readouterr()
    assert run("info", tmp_path / "plain.pt") == 2
    assert "bare weights, which do not say of what network" in capsys.readouterr().err


def test_converting_replaces_nothing_unasked(tmp_path, public, capsys):
    target = tmp_path / "ours.pt"
    target.write_bytes(b"mine")
    for words, reason in (
        ((public,), "name a checkpoint, and the file to write"),
        ((public, target), "exists; choose another name, or replace it with exist_ok=true"),
        ((public, public, "exist_ok=true"), "the checkpoint itself"),
        ((public, tmp_path), "a folder; name a file"),
        ((public, tmp_path / "no" / "ours.pt"), "no such folder"),
        ((public, target, "state_dict"), "'state_dict': a setting is written key=value"),
        ((public, target, "format=onnx"), "format='onnx'"),
    ):
        assert run("convert", *words) == 2
        assert reason in capsys.readouterr().err
    assert target.read_bytes() == b"mine"
    assert run("convert", f"weights={public}", f"to={target}", "exist_ok=true") == 0
    assert checkpoint_file.read(target)["names"] == ["square", "disc"]
    assert [file.name for file in tmp_path.iterdir()] == ["ours.pt"]


@pytest.mark.parametrize("form", ["checkpoint", "state_dict"])
def test_a_full_disk_leaves_the_old_file(tmp_path, public, capsys, monkeypatch, form):
    target = tmp_path / "ours.pt"
    target.write_bytes(b"mine")

    def full(*arguments):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(torch, "save", full)
    assert run("convert", public, target, "exist_ok=true", f"format={form}") == 2
    assert f"OutputError: {target}: cannot be written: No space left on device; make room" in capsys.readouterr().err
    assert target.read_bytes() == b"mine"
    assert [file.name for file in tmp_path.iterdir()] == ["ours.pt"]


def test_a_public_run_cannot_be_resumed(public, capsys):
    assert run("train", f"resume={public}", "device=cpu") == 2
    error = capsys.readouterr().err
    assert "a network that ultralytics trained, whose run cannot go on here" in error
    assert f"weights={public}" in error


def test_both_heads_start_from_public_weights_by_the_names_of_classes(tmp_path):
    small = {**load_description("v26n"), "nc": 2, "scales": {"n": [0.33, 0.125, 256]}, "scale": "n"}
    theirs = shuffled(network_from_description(small, 1))
    path = write(tmp_path / "public.pt", public_network(theirs, ("square", "disc")))
    network, said = started(small, path, ("ring", "disc", "Square"))
    assert "; 2 of 3 classes by their names, and fresh: ring" in said
    for layer, source in zip(network.head.class_outputs, of_halves(theirs).head.class_outputs, strict=True):
        assert torch.equal(layer.weight[1:], source.weight.flip(0))
    assert len(network.head.class_outputs) == 6
    with pytest.raises(ConfigError, match=r"of another architecture: .*one2one_cv"):
        started({**small, "end2end": False}, path, ("square", "disc"))


@pytest.mark.slow
def test_public_weights_are_measured_predicted_with_and_trained_from(tmp_path, public, network, capsys):
    data = write_dataset(tmp_path / "data", train=4, val=3)
    place = (f"project={tmp_path}", "device=cpu")
    assert run("val", public) == 2
    assert f"name one: detector val {public} my_data.yaml" in capsys.readouterr().err
    assert run("val", public, data, *place, "workers=0", "plots=false") == 0
    assert "3 images at 96" in capsys.readouterr().out
    assert run("predict", public, data.parent / "images" / "val", *place) == 0
    settings = ("imgsz=64", "workers=0", "plots=false", "lr0=1e-12", "weight_decay=0", "bn=frozen", "optimizer=SGD")
    words = (f"data={data}", f"model={TINY}", f"weights={public}", *place, "name=on", "warmup_bias_lr=0", *settings)
    capsys.readouterr()
    assert run("train", *words, "epochs=1") == 0
    assert "tensors; its SPPF without activation" in capsys.readouterr().out
    # At rates next to nothing the network that was trained is the one that it started from, and resuming builds it.
    trained = load(tmp_path / "on", device="cpu").network.eval()
    torch.testing.assert_close(trained(IMAGES).logits, of_halves(network)(IMAGES).logits)
    assert run("train", f"resume={tmp_path / 'on'}", "epochs=2") == 0
    again = load(tmp_path / "on", device="cpu").network.eval()
    torch.testing.assert_close(again(IMAGES).logits, of_halves(network)(IMAGES).logits)
