"""Public checkpoints: read to the bit, without their package, and without running anything that is in them."""

import copy
import os
import pickle
import sys
import threading

import pytest
import torch
from public_writer import CLASSES, of_halves, package, public_network, shuffled, write
from scenes import TINY
from torch import nn

from detector import checkpoint_file
from detector.errors import CheckpointError
from detector.model.checkpoint import network_of
from detector.model.network import load_description, network_from_description

NAMES = ("cat", "dog")
SMALL = {"n": [0.33, 0.125, 256]}
IMAGES = torch.rand(2, 3, 96, 64, generator=torch.Generator().manual_seed(3))


def description_of(model, **other):
    """A model's description, made small."""
    found = {**load_description(model), "nc": 2, **other}
    return found if model == TINY else {**found, "scales": SMALL, "scale": "n"}


def with_sppf(description, active):
    """The same with an SPPF that has, or has not, an activation."""
    found = copy.deepcopy(description)
    for row in found["backbone"]:
        if row[2] == "SPPF":
            row[3] = [*row[3], *[5, 3, False][len(row[3]) - 1 :], active]
    return found


def built(description, seed=1):
    return shuffled(network_from_description(description, seed), seed)


def saved_as(folder, network, names=NAMES, finished=True, **other):
    return write(folder / "public.pt", public_network(network, names), finished, **other)


def loaded(path):
    return network_of(checkpoint_file.read(path), path)


def assert_equal(network, other):
    """Raw outputs of both branches, to the bit."""
    for one in (network, other):
        one.head.nms = True
    for nms in (True, False) if network.head.end2end else (True,):
        network.head.nms = other.head.nms = nms
        with torch.no_grad():
            ours, theirs = network(IMAGES), other(IMAGES)
        assert torch.equal(ours.boxes, theirs.boxes)
        assert torch.equal(ours.logits, theirs.logits)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("model", [TINY, "v11n", "v8n", "v26n"], ids=["tiny", "v11", "v8", "v26"])
def test_a_public_file_is_the_network_that_was_written_to_the_bit(tmp_path, model, active, finished):
    network = built(with_sppf(description_of(model), active))
    path = saved_as(tmp_path, network, finished=finished)
    saved = checkpoint_file.read(path)
    assert {value.dtype for value in saved["ema"].values()} <= {torch.float32, torch.int64}
    assert list(saved["ema"]) == list(network.state_dict())
    assert_equal(network_of(saved, path), of_halves(network))


def test_what_a_file_says_beside_its_network(tmp_path):
    finished = checkpoint_file.read(saved_as(tmp_path, built(description_of(TINY))))
    assert finished["names"] == ["cat", "dog"]
    assert finished["imgsz"] == 96
    assert finished["epoch"] is None
    assert finished["metrics"] == {"mAP50-95": 0.25, "recall": 0.5}
    assert finished["origin"]["license"] == "AGPL-3.0 (https://ultralytics.com/license)"
    assert finished["description"]["name"] == "yolo11n"
    unfinished = checkpoint_file.read(saved_as(tmp_path, built(description_of(TINY)), finished=False))
    assert unfinished["epoch"] == 12
    assert unfinished["imgsz"] == 96
    assert "optimizer" not in unfinished


def test_a_size_that_is_no_multiple_of_the_stride_becomes_one(tmp_path):
    network = built(description_of(TINY))
    for imgsz, side in ((100, 128), ([64, 96], 96), (None, 96), ("640", 640)):
        assert checkpoint_file.read(saved_as(tmp_path, network, train_args={"imgsz": imgsz}))["imgsz"] == side


def test_a_list_without_scales_has_no_cap(tmp_path):
    description = {**description_of("v8n"), "scales": {"": [0.33, 0.03125, 10**6]}, "scale": ""}
    network = built(description)
    made = public_network(network, NAMES)
    del made.yaml["scales"], made.yaml["scale"], made.yaml["yaml_file"]
    made.yaml |= {"depth_multiple": 0.33, "width_multiple": 0.03125}
    path = write(tmp_path / "public.pt", made)
    assert checkpoint_file.read(path)["description"]["scale"] == ""
    assert_equal(loaded(path), of_halves(network))


def test_an_old_sppf_does_not_say_how_often_it_pools(tmp_path):
    network = built(description_of(TINY))
    made = public_network(network, NAMES)
    sppf = next(layer for layer in made.model if type(layer).__name__ == "SPPF")
    del sppf.n, sppf.add
    assert_equal(loaded(write(tmp_path / "public.pt", made)), of_halves(network))


def test_class_branches_of_another_width_than_their_classes_ask_for(tmp_path):
    network = built(description_of(TINY, class_channels=40))
    assert network.head.cv3[0][-1].in_channels == 40
    assert_equal(loaded(saved_as(tmp_path, network)), of_halves(network))


# --- activations -----------------------------------------------------------------------------------------------------


def replace_activations(made, activation, where=lambda name: True):
    for name, module in list(made.named_modules()):
        if type(getattr(module, "act", None)) is nn.SiLU and where(name):
            module.act = copy.deepcopy(activation)


@pytest.mark.parametrize(
    ("activation", "text"),
    [
        (nn.ReLU(), "torch.nn.ReLU()"),
        (nn.LeakyReLU(0.2), "torch.nn.LeakyReLU(negative_slope=0.2)"),
        (nn.ReLU6(), "torch.nn.ReLU6()"),
    ],
    ids=str,
)
def test_another_activation_throughout_is_built(tmp_path, activation, text):
    network = built(description_of(TINY, activation=str(text)))
    made = public_network(network, NAMES)
    replace_activations(made, activation)
    path = write(tmp_path / "public.pt", made)
    assert checkpoint_file.read(path)["description"]["activation"] == text
    assert_equal(loaded(path), of_halves(network))


def test_several_activations_are_refused_by_name(tmp_path):
    made = public_network(built(description_of(TINY)), NAMES)
    replace_activations(made, nn.ReLU(), lambda name: name == "model.3")
    with pytest.raises(
        CheckpointError, match=r"public.pt: has torch.nn.SiLU\(\) at .* and torch.nn.ReLU\(\) at model.3"
    ):
        checkpoint_file.read(write(tmp_path / "public.pt", made))


def test_a_convolution_without_the_activation_of_its_layer_is_refused_by_name(tmp_path):
    made = public_network(built(description_of(TINY)), NAMES)
    replace_activations(made, nn.Identity(), lambda name: name == "model.3")
    with pytest.raises(CheckpointError, match=r"'model.3' is followed by Identity"):
        loaded(write(tmp_path / "public.pt", made))


# --- what is refused -------------------------------------------------------------------------------------------------


class Harm:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.system, os.mkdir, eval, getattr, pickle.loads], ids=lambda one: one.__name__)
@pytest.mark.parametrize("place", ["beside", "inside"])
def test_a_call_in_a_file_is_refused_by_name_and_not_made(tmp_path, function, place):
    arguments = {
        os.system: f"touch {tmp_path}/harm",
        os.mkdir: f"{tmp_path}/harm",
        eval: f"open('{tmp_path}/harm', 'w')",
    }
    harm = Harm(getattr, "x", "upper") if function is getattr else Harm(function, arguments.get(function, b"N."))
    made = public_network(built(description_of(TINY)), NAMES)
    if place == "inside":
        made.harm = harm
    path = write(tmp_path / "public.pt", made, **({"harm": harm} if place == "beside" else {}))
    with pytest.raises(CheckpointError, match=rf"public.pt: holds \w+\.{function.__name__}, .* could run code"):
        checkpoint_file.read(path)
    assert not (tmp_path / "harm").exists()


def test_other_tasks_and_code_bases_are_refused_with_the_reason(tmp_path):
    network = built(description_of(TINY))
    made = public_network(network, NAMES, "OBBModel")
    with pytest.raises(CheckpointError, match=r"public.pt: a network for oriented boxes \(OBBModel\)"):
        checkpoint_file.read(write(tmp_path / "public.pt", made))
    made = public_network(network, NAMES, "SegmentationModel")
    with pytest.raises(CheckpointError, match="a network for segmentation"):
        checkpoint_file.read(write(tmp_path / "public.pt", made))
    older = tmp_path / "older.pt"
    older.write_bytes(write(tmp_path / "public.pt", public_network(network, NAMES)).read_bytes())
    rename(older, b"cultralytics.nn.tasks\nDetectionModel\n", b"cmodels.yolo\nDetectionModel\n")
    with pytest.raises(CheckpointError, match="older YOLOv5 code base"):
        checkpoint_file.read(older)
    rename(older, b"cmodels.yolo\nDetectionModel\n", b"cultralytics.nn.tasks\nNovelModel\n")
    with pytest.raises(CheckpointError, match=r"holds ultralytics.nn.tasks.NovelModel, and is not opened"):
        checkpoint_file.read(older)


def rename(path, old, new):
    """Replace bytes of a file's pickle."""
    import zipfile

    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in parts.items():
            if name.endswith("data.pkl"):
                assert old in data
                data = data.replace(old, new)
            file.writestr(name, data)


def test_a_fused_network_is_refused_with_the_reason(tmp_path):
    made = public_network(built(description_of(TINY)), NAMES)
    for module in made.modules():
        if hasattr(module, "bn"):
            del module.bn
    with pytest.raises(CheckpointError, match=r"public.pt: a fused network"):
        checkpoint_file.read(write(tmp_path / "public.pt", made))


def test_an_altered_network_is_refused(tmp_path):
    network = built(description_of(TINY))

    def shorter(made):
        del made.model[-2]

    def other_kind(made):
        made.yaml["backbone"] = [
            [*row[:2], "C2f" if row[2] == "C3k2" else row[2], row[3]] for row in made.yaml["backbone"]
        ]
        made.yaml["head"] = [[*row[:2], "C2f" if row[2] == "C3k2" else row[2], row[3]] for row in made.yaml["head"]]

    def narrower(made):
        made.model[0].conv.weight = nn.Parameter(made.model[0].conv.weight[:4], requires_grad=False)

    def circle(made):
        made.model[0]._modules["again"] = made.model[0]

    def unnamed(made):
        made.names = {0: "cat"}

    def strides(made):
        made.stride = made.stride * 2

    def no_list(made):
        del made.yaml

    def unknown(made):
        made.yaml["backbone"][0][2] = "Sorcery"

    for alter, reason in (
        (shorter, "12 layers, and 13 in its layer list"), (other_kind, "class branch of another kind"),
        (narrower, r"model.0.conv.weight"), (circle, "inside themselves"), (unnamed, "2 classes and other names"),
        (strides, "has the strides"), (no_list, "without a layer list"), (unknown, "'Sorcery' is not a module"),
    ):  # fmt: skip
        made = public_network(network, NAMES)
        alter(made)
        with pytest.raises(CheckpointError, match=reason):
            loaded(write(tmp_path / "public.pt", made))


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    network = built(description_of(TINY))
    network.model[0].conv.weight.data[0, 0, 0, 0] = 1e6  # more than fp16 holds
    with pytest.raises(CheckpointError, match=r"'model.0.conv.weight' holds values that are not finite"):
        loaded(saved_as(tmp_path, network))


def test_damaged_and_other_files_are_named(tmp_path):
    whole = saved_as(tmp_path, built(description_of(TINY)))
    for size in (-1, -5000, 5000):
        (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:size])
        with pytest.raises(CheckpointError, match=r"cut.pt: not a checkpoint, or a damaged one"):
            checkpoint_file.read(tmp_path / "cut.pt")
    torch.save({"model": nn.Conv2d(1, 1, 1)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"other.pt: "):
        checkpoint_file.read(tmp_path / "other.pt")
    with package():
        torch.save(CLASSES["DetectionModel"](), tmp_path / "bare.pt")
    with pytest.raises(CheckpointError, match=r"bare.pt: not a public checkpoint"):
        checkpoint_file.read(tmp_path / "bare.pt")


def test_reading_leaves_nothing_behind_and_works_in_threads(tmp_path):
    path = saved_as(tmp_path, built(description_of(TINY)))
    before = set(torch.serialization.get_safe_globals())
    found = []
    threads = [threading.Thread(target=lambda: found.append(len(checkpoint_file.read(path)["ema"]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert set(torch.serialization.get_safe_globals()) == before
    assert not any(name.split(".")[0] == "ultralytics" for name in sys.modules)
