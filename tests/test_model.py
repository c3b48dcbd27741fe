"""Networks: sizes, names, shapes, starts, folding, decoding and the errors of model descriptions."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from detector import checkpoint_file
from detector.errors import ConfigError
from detector.inference.detector import Detector
from detector.inference.infer import NetworkRuntime
from detector.model import description as description_module
from detector.model.blocks.attention import Attention
from detector.model.blocks.conv import Conv
from detector.model.blocks.csp import C3k
from detector.model.checkpoint import started
from detector.model.description import shipped_folder
from detector.model.head import Detect, Predictions
from detector.model.layers import MODULES, Kind
from detector.model.network import Network, build_network, fused, load_description, network_from_description
from detector.model.selection import Detections

V11 = shipped_folder() / "v11.yaml"
PARAMETERS = {"n": 2_624_080, "s": 9_458_752, "m": 20_114_688, "l": 25_372_160, "x": 56_966_176}


def skeleton(name: str, nc: int = 80) -> Network:
    """A network without memory for its weights."""
    with torch.device("meta"):
        return Network({**load_description(name), "nc": nc})


@pytest.fixture(scope="module")
def network() -> Network:
    return build_network("v11n", nc=5)


@pytest.fixture
def content() -> dict:
    """The content of the shipped v11.yaml at scale n, to be changed."""
    return {**yaml.safe_load(V11.read_text(encoding="utf-8")), "scale": "n"}


# --- the architecture


@pytest.mark.parametrize("scale", PARAMETERS)
def test_v11_has_the_published_number_of_parameters(scale):
    assert sum(p.numel() for p in skeleton(f"v11{scale}").parameters()) == PARAMETERS[scale]


@pytest.mark.parametrize(
    ("scale", "key", "shape"),
    [
        ("n", "model.0.conv.weight", (16, 3, 3, 3)),
        ("n", "model.0.bn.num_batches_tracked", ()),
        ("n", "model.2.m.0.cv1.conv.weight", (8, 16, 3, 3)),
        ("n", "model.2.cv2.bn.running_var", (64,)),
        ("n", "model.6.m.0.cv3.conv.weight", (64, 64, 1, 1)),
        ("n", "model.6.m.0.m.1.cv2.bn.weight", (32,)),
        ("n", "model.9.cv2.conv.weight", (256, 512, 1, 1)),
        ("n", "model.10.m.0.attn.qkv.conv.weight", (256, 128, 1, 1)),
        ("n", "model.10.m.0.attn.pe.conv.weight", (128, 1, 3, 3)),
        ("n", "model.10.m.0.attn.proj.bn.bias", (128,)),
        ("n", "model.10.m.0.ffn.1.conv.weight", (128, 256, 1, 1)),
        ("n", "model.23.cv2.0.0.conv.weight", (64, 64, 3, 3)),
        ("n", "model.23.cv2.2.2.bias", (64,)),
        ("n", "model.23.cv3.0.0.0.conv.weight", (64, 1, 3, 3)),
        ("n", "model.23.cv3.0.0.1.conv.weight", (80, 64, 1, 1)),
        ("n", "model.23.cv3.1.1.0.bn.running_mean", (80,)),
        ("n", "model.23.cv3.2.1.1.conv.weight", (80, 80, 1, 1)),
        ("n", "model.23.cv3.2.2.weight", (80, 80, 1, 1)),
        ("n", "model.23.dfl.conv.weight", (1, 16, 1, 1)),
        ("m", "model.2.m.0.m.0.cv1.conv.weight", (32, 32, 3, 3)),
        ("x", "model.10.m.1.ffn.0.conv.weight", (768, 384, 1, 1)),
    ],
)
def test_state_dict_has_the_names_and_shapes_of_public_checkpoints(scale, key, shape):
    assert tuple(skeleton(f"v11{scale}").state_dict()[key].shape) == shape


def test_dfl_weight_is_the_bins_and_is_not_trained(network):
    assert network.state_dict()["model.23.dfl.conv.weight"].flatten().tolist() == list(range(16))
    trained = {id(p) for branch in network.branches() for p in branch}
    assert [name for name, p in network.named_parameters() if id(p) not in trained] == ["model.23.dfl.conv.weight"]


@pytest.mark.parametrize("channels_last", [False, True])
def test_predictions_of_an_oblong_image_have_a_row_for_every_cell(network, channels_last):
    images = torch.rand(2, 3, 64, 160)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    predictions = network(images)
    assert network.head.strides == (8, 16, 32)
    assert predictions.shapes == ((8, 20), (4, 10), (2, 5))
    assert predictions.boxes.shape == (2, 4 * 16, 160 + 40 + 10)
    assert predictions.logits.shape == (2, 5, 160 + 40 + 10)


def test_both_memory_formats_predict_the_same(network):
    images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    network.eval()
    with torch.no_grad():
        one = network(images)
        other = network(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(one.boxes, other.boxes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-5)


def test_predictions_are_the_levels_row_by_row(network):
    network.eval()
    with torch.no_grad():
        maps = [torch.rand(1, c, *size) for c, size in zip((64, 128, 256), ((4, 6), (2, 3), (1, 2)), strict=True)]
        predictions = network.head(maps)
        start = 0
        for box, classes, x in zip(network.head.cv2, network.head.cv3, maps, strict=True):
            for row in range(x.shape[2]):
                for column in range(x.shape[3]):
                    torch.testing.assert_close(predictions.boxes[0, :, start], box(x)[0, :, row, column])
                    torch.testing.assert_close(predictions.logits[0, :, start], classes(x)[0, :, row, column])
                    start += 1
    assert start == predictions.boxes.shape[2]


def test_every_trainable_weight_gets_a_gradient():
    network = build_network("v11n", nc=2)
    predictions = network(torch.rand(2, 3, 64, 64))
    (predictions.boxes.square().mean() + predictions.logits.square().mean()).backward()
    assert [n for n, p in network.named_parameters() if p.requires_grad and p.grad is None] == []


# --- blocks


def test_attention_is_the_formula():
    block = Attention(channels=16, heads=2).eval()
    x = torch.rand(2, 16, 3, 4)
    with torch.no_grad():
        qkv = block.qkv(x).flatten(2)  # (B, heads * (4 + 4 + 8), cells)
        seen = torch.empty(2, 16, 12)
        values = torch.empty(2, 16, 12)
        for image in range(2):
            for head in range(2):
                q, k, v = qkv[image, head * 16 : head * 16 + 16].split((4, 4, 8))
                attention = ((q * 4**-0.5).T @ k).softmax(dim=-1)
                values[image, head * 8 : head * 8 + 8] = v
                seen[image, head * 8 : head * 8 + 8] = v @ attention.T
        expected = block.proj(seen.view(2, 16, 3, 4) + block.pe(values.view(2, 16, 3, 4)))
        torch.testing.assert_close(block(x), expected)
        torch.testing.assert_close(block(x.contiguous(memory_format=torch.channels_last)), expected)


def test_convolution_with_batch_norm_and_silu_is_the_formula():
    block = Conv(2, 3, kernel=3, stride=2)
    x = torch.rand(4, 2, 6, 6)
    y = torch.nn.functional.conv2d(x, block.conv.weight, stride=2, padding=1)
    mean, variance = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), correction=0, keepdim=True)
    y = (y - mean) / (variance + 1e-3).sqrt()
    torch.testing.assert_close(block(x), y / (1 + (-y).exp()))
    torch.testing.assert_close(block.bn.running_mean, 0.03 * mean.flatten())


def test_scales_m_l_x_are_built_of_c3k_units():
    assert [s for s in PARAMETERS if isinstance(skeleton(f"v11{s}").model[2].m[0], C3k)] == ["m", "l", "x"]


# --- the start


def test_one_seed_gives_the_same_weights_and_another_gives_others():
    first, again, other = (build_network("v11n", 3, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    drawn = [key for key in first if key.endswith("conv.weight") and "dfl" not in key]
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


def test_building_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    build_network("v11n", 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_start_is_torchs_own_for_convolutions_and_batch_norms():
    fresh = build_network("v11n", nc=5).state_dict()
    weight = fresh["model.8.cv2.conv.weight"]
    bound = 1 / math.sqrt(weight[0].numel())
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)  # of a uniform distribution
    assert fresh["model.8.cv2.bn.weight"].unique().tolist() == [1]
    assert fresh["model.8.cv2.bn.running_var"].unique().tolist() == [1]
    assert fresh["model.8.cv2.bn.num_batches_tracked"] == 0


def test_biases_start_at_rare_classes(network):
    for i, cells in enumerate((80 * 80, 40 * 40, 20 * 20)):
        assert network.head.cv2[i][2].bias.unique().tolist() == [2.0]
        torch.testing.assert_close(network.head.cv3[i][2].bias, torch.full((5,), math.log(5 / 5 / cells)))


def test_a_network_is_built_again_from_its_description():
    network = build_network("v11n", 7, seed=3)
    again = network_from_description(yaml.safe_load(yaml.safe_dump(network.description)))
    again.load_state_dict(network.state_dict())
    assert again.nc == 7  # the caller's, not the file's
    assert again.description == network.description


# --- folding and decoding


def test_fused_network_predicts_the_same_and_the_original_stays():
    network = build_network("v11n", nc=3)
    rng = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor in (module.running_mean, module.bias.data, module.running_var, module.weight.data):
                tensor.uniform_(0.5, 1.5, generator=rng)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    network.eval()
    folded = fused(network)
    images = torch.rand(2, 3, 64, 96, generator=rng)
    with torch.no_grad():
        one, other = network(images), folded(images)
    torch.testing.assert_close(other.boxes, one.boxes, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other.logits, one.logits, rtol=1e-5, atol=1e-5)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert all(p.requires_grad for p in network.branches()[0])


def test_decoding_is_the_expectation_of_every_side():
    rng = torch.Generator().manual_seed(0)
    shapes, strides, bins = ((2, 3), (1, 2)), (8, 16), 4
    boxes, logits = torch.randn(2, 4 * bins, 8, generator=rng), torch.randn(2, 3, 8, generator=rng)
    xyxy, scores = Detect(3, (16, 16), strides, reg_max=bins).decode(Predictions(boxes, logits, shapes))
    assert xyxy.shape == (2, 8, 4)
    assert scores.shape == (2, 8, 3)
    for image in range(2):
        anchor = 0
        for (height, width), stride in zip(shapes, strides, strict=True):
            for row in range(height):
                for column in range(width):
                    side = []
                    for i in range(4):
                        weights = [math.exp(boxes[image, i * bins + j, anchor]) for j in range(bins)]
                        side.append(sum(j * w for j, w in enumerate(weights)) / sum(weights))
                    x, y = column + 0.5, row + 0.5
                    expected = [(x - side[0]), (y - side[1]), (x + side[2]), (y + side[3])]
                    assert xyxy[image, anchor].tolist() == pytest.approx(
                        [v * stride for v in expected], rel=1e-5, abs=1e-4
                    )
                    for c in range(3):
                        score = 1 / (1 + math.exp(-logits[image, c, anchor]))
                        assert scores[image, anchor, c].item() == pytest.approx(score, rel=1e-5)
                    anchor += 1


def test_decoding_gives_single_precision_whatever_comes_in(network):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        predictions = network(torch.rand(1, 3, 32, 64))
        assert predictions.boxes.dtype == torch.bfloat16
        xyxy, scores = network.head.decode(predictions)
    assert xyxy.dtype == scores.dtype == torch.float32
    expected = network.head.decode(predictions._replace(boxes=predictions.boxes.float()))[0]
    torch.testing.assert_close(xyxy, expected)


# --- heads


def test_the_bins_of_a_side_come_from_the_description(content):
    content["head"][-1] = [[16, 19, 22], 1, "Detect", ["nc", 8]]
    network = network_from_description({**content, "nc": 3})
    assert network.head.dfl.conv.weight.flatten().tolist() == list(range(8))
    with torch.no_grad():
        predictions = network.eval()(torch.rand(1, 3, 64, 64))
        xyxy, _ = network.head.decode(predictions)
    assert predictions.boxes.shape == (1, 32, 84)
    sides = xyxy[..., 2:] - xyxy[..., :2]
    largest = torch.tensor([8.0] * 64 + [16.0] * 16 + [32.0] * 4) * 2 * 7  # 7 cells to either side
    assert (sides > 0).all()
    assert (sides < largest[None, :, None]).all()


class Answering(Detect):
    """A head of another kind: the class branch has another name, and boxes are selected without suppression."""

    class_branches = ("cv3", "answers")

    def __init__(self, nc, channels, strides):
        super().__init__(nc, channels, strides, reg_max=16)
        self.answers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Conv2d(1, nc, 1))])

    def select(self, boxes_xyxy, scores, conf, iou, max_det=300, multi_label=True):
        best, classes = scores.max(dim=2)
        return [Detections(*one) for one in zip(boxes_xyxy, best, classes, strict=True)]


@pytest.fixture
def answering(monkeypatch, content):
    """A description with that head."""

    def build(site, nc: int):
        channels, strides = zip(*site.inputs, strict=True)
        return Answering(nc, channels, [int(stride) for stride in strides])

    monkeypatch.setitem(MODULES, "Answering", Kind(build, "predicting"))
    content["head"][-1] = [[16, 19, 22], 1, "Answering", ["nc"]]
    return content


def test_a_head_of_another_kind_is_built_in_the_last_place_alone(answering):
    assert isinstance(network_from_description({**answering, "nc": 3}).head, Answering)
    answering["head"][-2] = answering["head"][-1]
    with pytest.raises(
        ConfigError, match=r"layer 22: Answering: the last layer, .* is a head \(Detect, v10Detect, Answering\)"
    ):
        network_from_description({**answering, "nc": 3})


def test_a_head_selects_its_detections_itself(answering):
    network = network_from_description({**answering, "nc": 3}).eval()
    image = np.zeros((64, 64, 3), np.uint8)
    detector = Detector(NetworkRuntime(network, "cpu"), ("a", "b", "c"), 64)
    assert len(detector.predict(image, conf=0.9)[0]) == 84  # every anchor, whatever its score


def test_a_head_says_which_layers_depend_on_the_classes(answering, tmp_path):
    old = network_from_description({**answering, "nc": 3})
    saved = {"ema": old.state_dict(), "description": old.description, "names": ["a", "b", "c"]}
    path = tmp_path / "old.pt"
    checkpoint_file.write(path, saved)
    new, said = started(answering, path, "vwxyz")
    assert "fresh for 5 other classes: 8 class tensors" in said
    assert torch.equal(new.model[0].conv.weight, old.model[0].conv.weight)


# --- names, paths and their errors


def test_scale_comes_from_the_name_the_path_or_the_key(tmp_path, content):
    assert load_description("v11s")["scale"] == "s"
    assert load_description(V11.with_name("v11m.yaml"))["scale"] == "m"
    own = tmp_path / "my-v11.yaml"
    own.write_text(yaml.safe_dump({**content, "scale": "x"}))
    assert load_description(own)["scale"] == "x"
    assert load_description(tmp_path / "my-v11l.yaml")["scale"] == "l"
    own.write_text(yaml.safe_dump({key: value for key, value in content.items() if key != "scale"}, sort_keys=False))
    assert load_description(own)["scale"] == "n"  # the first
    named = own.rename(tmp_path / "net-v11m.yaml")
    assert load_description(named)["scale"] == "m"


def test_a_path_of_the_families_finds_their_scales():
    assert load_description("v5xu")["scales"]["x"] == [1.33, 1.25, 1024]
    assert load_description("v10b")["scale"] == "b"
    assert load_description("v9t")["scales"] == {"": [1.0, 1.0, 10**6]}


def test_maps_that_do_not_meet_are_told_with_the_layer_that_is_odd(tmp_path, content):
    content["backbone"][5] = [-1, 1, "Conv", [512, 2, 2]]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(
        ConfigError, match=r"layer 12: Concat: .*; layer 5, Conv \[512, 2, 2\], puts out 5 cells a side, not 4"
    ):
        build_network(path, nc=2)


def test_installed_descriptions_come_before_those_of_the_checkout(tmp_path, monkeypatch):
    package = tmp_path / "site" / "detector"
    (tmp_path / "site" / "configs" / "models").mkdir(parents=True)
    monkeypatch.setattr(description_module, "_PACKAGE", package)
    assert shipped_folder() == tmp_path / "site" / "configs" / "models"
    (package / "configs" / "models").mkdir(parents=True)
    assert shipped_folder() == package / "configs" / "models"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v11k", "v11k: not a model (v10[blmnsx], v11[nsmlx], "),
        ("v11", "v11: not a model ("),
        ("v11n.yaml", "v11n.yaml: no such file. Did you mean 'v11n'?"),
    ],
)
def test_unknown_names_are_named_with_the_nearest(name, message):
    with pytest.raises(ConfigError) as error:
        build_network(name, nc=1)
    assert str(error.value).startswith(message)


def test_a_misspelt_path_is_named_with_the_nearest(tmp_path):
    (tmp_path / "mine.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"mime\.yaml: no such file\. Did you mean '.*mine\.yaml'\?"):
        load_description(tmp_path / "mime.yaml")


@pytest.mark.parametrize(
    ("layer", "change", "message"),
    [
        (5, [-1, 1, "Conv3", [512, 3, 2]], "'Conv3' is not a module. Did you mean 'Conv'?"),
        (5, [5, 1, "Conv", [512, 3, 2]], "from 5 is not an earlier layer (0 to 4, or -1 to -5 counted back)"),
        (5, [-6, 1, "Conv", [512, 3, 2]], "from -6 is not an earlier layer (0 to 4, or -1 to -5 counted back)"),
        (0, [0, 1, "Conv", [64, 3, 2]], "from 0 is not an earlier layer (-1, the image)"),
        (5, ["4", 1, "Conv", [512, 3, 2]], "from '4' is not a layer's number (-1 is the previous layer) or a list"),
        (5, [[], 1, "Conv", [512, 3, 2]], "from [] is not a layer's number (-1 is the previous layer) or a list"),
        (5, [-1, 0, "Conv", [512, 3, 2]], "repeats 0 is not a whole number from 1"),
        (5, [-1, 4, "Conv", [1024, 3, 2]], "Conv is repeated 2 times, and so must put out what comes in: 256 for 128"),
        (5, [-1, 1, 7, [512, 3, 2]], "7 is not the name of a module"),
        (5, [-1, 1, "Conv", 512], "arguments 512 of Conv are not a list; write [512]"),
        (5, [-1, 1, "Conv"], "[-1, 1, 'Conv'] is not [from, repeats, module, arguments]"),
        (
            5,
            [-1, 1, "Conv", []],
            "Conv takes (outputs: int, kernel: int | tuple[int, int] = 1, stride: int = 1, padding: int | None = None, "
            "groups: int = 1, dilation: int = 1, act: bool = True), not the 0 arguments []",
        ),
        (5, [-1, 1, "Conv", [512, 3, 2, 1, 1, 1, True, 5]], "act: bool = True), not the 8 arguments"),
        (5, [-1, 1, "Conv", ["wide", 3, 2]], "act: bool = True): outputs cannot be 'wide'"),
        (5, [-1, 1, "Conv", [-512, 3, 2]], "outputs cannot be -512"),
        (5, [-1, 1, "Conv", [512, 3, 2, None, 3]], "Conv in_channels must be divisible by groups"),
        (12, [[-1, 8], 1, "Concat", [1]], "Concat joins maps of one stride, not strides 16, 32"),
        (5, [[-1, 3], 1, "Conv", [512, 3, 2]], "the module reads one layer, not 2; join them with Concat first"),
        (8, [-1, 2, "C3k2", [1024, 1]], "c3k cannot be 1"),
        (8, [-1, 2, "C3k2", [1024, True, 0.0]], "expansion cannot be 0.0"),
        (9, [-1, 1, "SPPF", [1024, 4]], "SPPF: Sizes of tensors must match"),
        (10, [-1, 2, "C2PSA", [512]], "C2PSA keeps its input's channels: 256 come in, 128 would go out"),
        (11, [-1, 1, "nn.Upsample", [None, 2, "cubic"]], "nn.Upsample takes [None, 2, nearest], not the mode cubic"),
        (11, [-1, 1, "nn.Upsample", [40]], "size cannot be 40"),
        (12, [[-1, 4], 1, "Concat", [1]], "Concat joins maps of one stride, not strides 8, 16"),
        (
            12,
            [[-1, 6], 1, "Concat", [2]],
            "Concat joins maps along dimension 1, their channels, not 2",
        ),
        (23, [[16, 19, 22], 1, "Segment", ["nc"]], "Segment is for another task (segmentation); this program finds"),
        (
            23,
            [[16, 19, 22], 1, "Detect", ["nc", 16, 3]],
            "Detect takes (nc: int, reg_max: int | None = None), not the 3",
        ),
        (16, [[4, 6], 1, "Detect", ["nc"]], "Detect: the last layer, and no other, is a head (Detect, v10Detect)"),
        (23, [-1, 1, "Conv", [64]], "Conv: the last layer, and no other, is a head (Detect, v10Detect)"),
    ],
)
def test_a_wrong_layer_is_named_with_what_would_be_right(tmp_path, content, layer, change, message):
    part, index = ("backbone", layer) if layer <= 10 else ("head", layer - 11)
    content[part][index] = change
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as error:
        build_network(path, nc=2)
    assert str(error.value).startswith(f"{path}: layer {layer}: ")
    assert message in str(error.value)


def test_channels_that_heads_cannot_share_are_refused(tmp_path, content):
    content["scales"] = {"n": [0.5, 0.4, 1024]}  # 1024 * 0.4 = 410, up to 416: half of it is not a multiple of 3
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(
        ConfigError, match="layer 10: C2PSA has 208 channels, which cannot be shared by 3 attention heads"
    ):
        build_network(path, nc=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": "k"}, "scale 'k' is not one of n, s, m, l, x"),
        ({"nc": 0}, "nc 0 is not a number of classes (a whole number from 1)"),
        ({"nc": True}, "nc True is not a number of classes"),
        ({"scales": []}, "scales [] is not a mapping"),
        ({"scales": {"n": [0.5, 0.25]}}, "scale n: [0.5, 0.25] is not [depth, width, most channels], all above 0"),
        ({"scales": {"n": [0.5, -1, 8]}}, "scale n: [0.5, -1, 8] is not [depth, width, most channels], all above 0"),
        ({"backbone": []}, "backbone is not a list of layers"),
        ({"backbones": []}, "'backbones' is not a key of a model description. Did you mean 'backbone'?"),
    ],
)
def test_a_wrong_key_is_named_with_what_would_be_right(tmp_path, content, changes, message):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}, sort_keys=False))
    with pytest.raises(ConfigError) as error:
        load_description(path)
    assert str(error.value).startswith(f"{path}: {message}")


UNREADABLE = {
    "nc: [": "cannot be read as YAML",
    "- 1": "is not a model description",
    "nc: 3": "the key 'backbone' is missing",
}


@pytest.mark.parametrize(("text", "message"), UNREADABLE.items())
def test_a_file_that_is_no_description_is_refused(tmp_path: Path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_description(path)
