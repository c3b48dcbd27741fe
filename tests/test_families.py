"""Every public family: published sizes, two heads, and users' own layer lists."""

import copy
from functools import cache

import pytest
import torch
import yaml
from test_training import run

from detector.errors import ConfigError
from detector.model.cost import cost
from detector.model.description import shipped_folder
from detector.model.freezing import freeze
from detector.model.network import (
    Network,
    build_network,
    check_maps,
    fused,
    load_description,
    network_from_description,
)
from detector.model.selection import best_candidates
from detector.step.statistics import set_modes

# Parameters; of the network for inference, fused and with one head; GFLOPs as files, tables and trainers count them.
TABLE = {
    "v8n": (3_157_200, 3_151_904, 8.9, 8.7, 8.9),
    "v8s": (11_166_560, 11_156_544, 28.8, 28.6, 28.8),
    "v8m": (25_902_640, 25_886_080, 79.3, 78.9, 79.3),
    "v8l": (43_691_520, 43_668_288, 165.7, 165.2, 165.7),
    "v8x": (68_229_648, 68_200_608, 258.5, 257.8, 258.5),
    "v11n": (2_624_080, 2_616_248, 6.6, 6.5, 6.7),
    "v11s": (9_458_752, 9_443_760, 21.7, 21.5, 21.8),
    "v11m": (20_114_688, 20_091_712, 68.5, 68.0, 68.6),
    "v11l": (25_372_160, 25_340_992, 87.6, 86.9, 87.9),
    "v11x": (56_966_176, 56_919_424, 196.0, 194.9, 196.3),
    "v26n": (2_572_280, 2_408_932, 6.1, 5.4, 6.2),
    "v26s": (10_009_784, 9_496_140, 22.8, 20.7, 23.1),
    "v26m": (21_896_248, 20_411_132, 75.4, 68.2, 75.6),
    "v26l": (26_299_704, 24_807_420, 93.8, 86.4, 94.2),
    "v26x": (58_993_368, 55_725_948, 209.5, 193.9, 210.1),
    "v5nu": (2_654_816, 2_649_200, None, None, 7.8),
    "v5su": (9_153_152, 9_142_496, None, None, 24.2),
    "v5mu": (25_111_456, 25_091_536, None, None, 64.6),
    "v5lu": (53_225_024, 53_193_088, None, None, 135.6),
    "v5xu": (97_276_448, 97_229_648, None, None, 247.3),
    "v9t": (2_128_720, 2_094_000, None, None, 8.5),
    "v9s": (7_318_368, 7_198_048, None, None, 27.6),
    "v9m": (20_216_160, 20_070_832, None, None, 77.9),
    "v9c": (25_590_912, 25_380_928, None, None, 104.0),
    "v10n": (2_775_520, 2_299_264, None, None, 8.8),
    "v10s": (8_128_272, 7_248_960, None, None, 25.2),
    "v10m": (16_576_768, 15_359_488, None, None, 64.6),
    "v10b": (20_574_384, 19_065_792, None, None, 99.5),
    "v10l": (25_888_688, 24_371_008, None, None, 128.0),
    "v10x": (31_808_960, 29_473_568, None, None, 172.0),
    "v12n": (2_602_288, 2_590_824, None, None, 7.6),
    "v12s": (9_284_096, 9_261_840, None, None, 23.7),
    "v12m": (20_199_168, 20_166_592, None, None, 71.3),
    "v12l": (26_450_784, None, None, None, 96.3),
    "v12x": (59_210_784, None, None, None, 210.1),
    "v8n-p2": (3_354_144, None, None, None, None),
    "v8n-p6": (4_984_352, None, None, None, None),
    "v26n-p2": (2_662_400, None, None, None, None),
    "v26n-p6": (4_063_872, None, None, None, None),
}
SOME = ("v8n", "v11n", "v26n", "v5nu", "v9t", "v10n", "v12n")  # the smallest of each family
TENSORS = {"v8": (355, 355, 475, 595, 595), "v11": (499, 499, 649, 1015, 1015), "v26": (708, 708, 768, 1092, 1092)}


@cache
def skeleton(name: str, nc: int = 80) -> Network:
    """A network without memory for its weights; to be looked at only."""
    with torch.device("meta"):
        return Network({**load_description(name), "nc": nc})


def used(network: Network, seed: int = 0) -> Network:
    """The network in eval mode with weights and statistics as if it had been trained."""
    rng = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor in (module.running_mean, module.bias.data, module.running_var, module.weight.data):
                tensor.uniform_(0.5, 1.5, generator=rng)
    return network.eval()


# --- sizes


@pytest.mark.parametrize("name", TABLE)
def test_a_network_has_the_published_number_of_parameters(name):
    assert sum(p.numel() for p in skeleton(name).parameters()) == TABLE[name][0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SOME else pytest.mark.long) for n in TABLE])
def test_a_network_costs_what_is_published_by_every_count(name):
    found = cost(skeleton(name))
    _, parameters, *published = TABLE[name]
    if parameters is not None:
        assert found.fused_parameters == parameters
    for ours, theirs, name in zip(found[2:], published, found._fields[2:], strict=True):
        if theirs is not None:  # what trainers print differs in the last digit in a net or two (v11l)
            assert abs(ours - theirs) <= (0.1 if name == "trainers" else 0.0500001)


@pytest.mark.parametrize("family", TENSORS)
def test_a_state_dict_has_as_many_tensors_as_public_ones(family):
    assert tuple(len(skeleton(f"{family}{scale}").state_dict()) for scale in "nsmlx") == TENSORS[family]


def test_every_shipped_model_is_in_the_table():
    stems = {file.stem for file in shipped_folder().glob("*.yaml")}
    assert stems == {name if name in stems else name.replace(name.strip("v0123456789-pu")[0], "", 1) for name in TABLE}


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("model.9.cv1.conv.weight", (128, 256, 1, 1)),
        ("model.22.m.0.0.cv1.conv.weight", (64, 128, 3, 3)),
        ("model.22.m.0.1.attn.qkv.conv.weight", (256, 128, 1, 1)),
        ("model.22.m.0.1.ffn.1.bn.weight", (128,)),
        ("model.23.cv2.0.2.weight", (4, 16, 1, 1)),
        ("model.23.one2one_cv2.2.0.conv.weight", (16, 256, 3, 3)),
        ("model.23.one2one_cv3.1.0.0.conv.weight", (128, 1, 3, 3)),
        ("model.23.one2one_cv3.2.2.bias", (80,)),
    ],
)
def test_v26_has_the_names_and_shapes_of_public_checkpoints(key, shape):
    state = skeleton("v26n").state_dict()
    assert tuple(state[key].shape) == shape
    assert not any("dfl" in name for name in state)


def test_v8_has_full_convolutions_in_its_class_branch():
    assert tuple(skeleton("v8n").state_dict()["model.22.cv3.0.0.conv.weight"].shape) == (80, 64, 3, 3)


def test_info_tells_what_a_model_is_made_of(capsys, tmp_path):
    assert run("info", "yolo26n.yaml") == 0
    said = capsys.readouterr().out
    assert "2,572,280 parameters at 80 classes, 2,408,932 in use; 708 tensors" in said
    assert "two heads" in said
    rows = [line for line in said.splitlines() if line.strip()[:1].isdigit()]
    assert sum(int(row.split("  ")[-2].replace(",", "")) for row in rows) == 2_572_280
    assert run("info", tmp_path / "nothing.pt") == 2
    assert "no such checkpoint" in capsys.readouterr().err


# --- inference


@pytest.mark.parametrize("name", [*SOME, "v8n-p2", "v26n-p6"])
def test_a_folded_network_puts_out_the_same_without_normalisation(name):
    network = used(build_network(name, 3))
    images = torch.rand(2, 3, network.stride * 2, network.stride * 3)
    folded = fused(network)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    with torch.no_grad():
        one, other = network(images), folded(images)
    assert one.boxes.shape == (2, 4 * network.head.reg_max, sum(6 * 4**i for i in range(len(one.shapes))))
    for ours, theirs in ((other.boxes, one.boxes), (other.logits, one.logits)):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


def test_the_smallest_maps_go_through_every_family():
    for name in SOME:
        check_maps(build_network(name, 2))


# --- two heads


@pytest.fixture(scope="module")
def two_headed() -> Network:
    return build_network("v26n", 4)


def test_both_branches_start_alike_and_train_apart(two_headed):
    network = copy.deepcopy(two_headed).train()
    out = network(torch.rand(2, 3, 64, 64))
    assert torch.equal(out.boxes, out.one2one.boxes)
    assert torch.equal(out.logits, out.one2one.logits)
    (out.one2one.boxes.sum() + out.one2one.logits.sum()).backward()
    trunk, own = network.branches()
    assert all(p.grad is not None for p in own)
    assert all(p.grad is None for p in trunk)
    names = [name for name, p in network.named_parameters() if p.grad is not None]
    assert all("one2one_" in name for name in names)
    assert len(trunk) + len(own) == len(list(network.parameters()))


def test_inference_takes_the_chosen_branch_and_drops_the_other(two_headed):
    network = used(copy.deepcopy(two_headed))
    network.head.one2one_cv2.load_state_dict(network.head.cv2.state_dict())
    network.head.one2one_cv3.load_state_dict(network.head.cv3.state_dict())
    network.head.one2one_cv3[0][-1].bias.data += 1.0
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        many = network(images)
        network.head.choose(False)
        one = network(images)
        assert many.one2one is one.one2one is None
        torch.testing.assert_close(one.logits[..., :64], many.logits[..., :64] + 1.0)
        folded = fused(network)
        assert len(folded.state_dict()) == 204
        torch.testing.assert_close(folded(images).logits, one.logits, rtol=1e-4, atol=1e-4)
    assert network.head.end2end  # the original keeps both


@pytest.mark.parametrize("nms", ["no", 2, None])
def test_a_choice_that_is_none_is_told(two_headed, nms):
    with pytest.raises(ConfigError, match=r"nms=.*: should be true, false or auto"):
        copy.deepcopy(two_headed).head.choose(nms)


def test_a_model_of_one_head_cannot_go_without_suppression():
    with pytest.raises(ConfigError, match=r"nms=false: this model has no branch .*v26 and v10"):
        build_network("v8n", 2).head.choose(False)


def slow_candidates(boxes, scores, conf, max_det, multi_label):
    """The rule in words, for one image: lists of (score, anchor, class)."""
    anchors = sorted(range(len(scores)), key=lambda a: (-max(scores[a]), a))[:max_det]
    if multi_label:
        pairs = [(scores[a][c], a, c) for a in anchors for c in range(len(scores[a]))]
    else:
        pairs = [(max(scores[a]), a, scores[a].index(max(scores[a]))) for a in anchors]
    best = sorted(pairs, key=lambda pair: -pair[0])[:max_det]
    return [pair for pair in best if pair[0] >= conf]


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("max_det", [5, 300])
def test_candidates_without_suppression_are_the_best_pairs(multi_label, max_det):
    rng = torch.Generator().manual_seed(1)
    boxes, scores = torch.rand(2, 40, 4, generator=rng), torch.rand(2, 40, 3, generator=rng)
    found = best_candidates(boxes, scores, 0.4, max_det, multi_label)
    for image in range(2):
        expected = slow_candidates(boxes[image].tolist(), scores[image].tolist(), 0.4, max_det, multi_label)
        assert found[image].scores.tolist() == [score for score, _, _ in expected]
        assert found[image].classes.tolist() == [c for _, _, c in expected]
        assert torch.equal(found[image].boxes_xyxy, boxes[image][[a for _, a, _ in expected]])


def test_candidates_that_are_no_numbers_are_left_out():
    boxes, scores = torch.rand(1, 3, 4), torch.tensor([[[0.9], [float("nan")], [0.8]]])
    boxes[0, 0, 1] = float("inf")
    assert best_candidates(boxes, scores, 0.0)[0].scores.tolist() == pytest.approx([0.8])


# --- users' own layer lists


def own(tmp_path, backbone, head, **keys):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"nc": 80, **keys, "backbone": backbone, "head": head}, sort_keys=False))
    return path


def parameters(path) -> int:
    return sum(p.numel() for p in build_network(path, 80).parameters())


def test_v3_tiny_builds_with_two_levels(tmp_path):
    pool = [-1, 1, "nn.MaxPool2d", [2, 2, 0]]
    backbone = [row for c in (16, 32, 64, 128, 256) for row in ([-1, 1, "Conv", [c, 3, 1]], pool)]
    backbone += [
        [-1, 1, "Conv", [512, 3, 1]],
        [-1, 1, "nn.ZeroPad2d", [[0, 1, 0, 1]]],
        [-1, 1, "nn.MaxPool2d", [2, 1, 0]],
    ]
    head = [
        [-1, 1, "Conv", [1024, 3, 1]], [-1, 1, "Conv", [256, 1, 1]], [-1, 1, "Conv", [512, 3, 1]],
        [-2, 1, "Conv", [128, 1, 1]], [-1, 1, "nn.Upsample", ["None", 2, "nearest"]], [[-1, 8], 1, "Concat", [1]],
        [-1, 1, "Conv", [256, 3, 1]], [[19, 15], 1, "Detect", ["nc"]],
    ]  # fmt: skip
    path = own(tmp_path, backbone, head, depth_multiple=1.0, width_multiple=1.0)
    assert parameters(path) == 12_173_248
    assert build_network(path, 2).head.strides == (16, 32)


def test_v8_of_ghost_blocks_has_its_published_parameters(tmp_path):
    content = yaml.safe_load((shipped_folder() / "v8.yaml").read_text())
    swap = {"Conv": "GhostConv", "C2f": "C3Ghost"}
    for part in ("backbone", "head"):
        content[part] = [
            [f, n, m if (part, i) == ("backbone", 0) else swap.get(m, m), a]
            for i, (f, n, m, a) in enumerate(content[part])
        ]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**content, "scale": "n"}))
    assert parameters(path) == 1_865_316


def test_two_backbones_are_joined(tmp_path):
    """The joining layers of v9e, in small: maps of one stream are added to another's."""
    backbone = [
        [-1, 1, "Silence", []],
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "Conv", [32, 3, 2]],
        [1, 1, "CBLinear", [[16]]],
        [2, 1, "CBLinear", [[16, 32]]],
        [0, 1, "Conv", [16, 3, 2]],
        [[3, 4, 5], 1, "CBFuse", [[0, 0]]],
        [-1, 1, "Conv", [32, 3, 2]],
        [[4, 7], 1, "CBFuse", [[1]]],
        [-1, 1, "Conv", [32, 3, 2]],
    ]
    network = build_network(own(tmp_path, backbone, [[[8, 9], 1, "Detect", ["nc"]]]), 3).eval()
    assert network.head.strides == (4, 8)
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        m = network.model
        first, second = m[1](x), m[2](m[1](x))
        small = torch.nn.functional.interpolate(m[4].conv(second)[:, :16], scale_factor=2, mode="nearest")
        joined = m[5](x) + m[3].conv(first) + small
        level = m[7](joined) + m[4].conv(second)[:, 16:]
        expected = network.head([level, m[9](level)])
        torch.testing.assert_close(network(x).boxes, expected.boxes)


def test_an_activation_is_for_all_blocks_that_have_one(tmp_path):
    backbone = [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2, None, 1, 1, False]]]
    path = own(tmp_path, backbone, [[[0, 1], 1, "Detect", ["nc"]]], activation="torch.nn.LeakyReLU(0.25, inplace=True)")
    network = build_network(path, 2).eval()
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        before = network.model[0].bn(network.model[0].conv(x))
        torch.testing.assert_close(network.model[0](x), torch.where(before > 0, before, before / 4))
        plain = network.model[1].bn(network.model[1].conv(before))
        torch.testing.assert_close(network.model[1](before), plain)
    again = network_from_description(network.description, seed=None)  # it is kept in a checkpoint's description
    again.load_state_dict(network.state_dict())
    torch.testing.assert_close(again.eval()(x).boxes, network(x).boxes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch.nn.Tanhshrink()", "is not one of torch.nn's SiLU, ReLU"),
        ("__import__('os').system('x')", "is not one of torch.nn's"),
        ("nn.ReLU(3)", "ReLU takes no number, not 3"),
        ("nn.LeakyReLU(slope=0.1)", "LeakyReLU takes negative_slope, not slope=0.1"),
    ],
)
def test_another_activation_is_refused(tmp_path, text, message):
    path = own(tmp_path, [[-1, 1, "Conv", [8, 3, 2]]], [[[0], 1, "Detect", ["nc"]]], activation=text)
    with pytest.raises(ConfigError) as error:
        build_network(path, 2)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"reg_max": 0}, "reg_max 0 is not a number of bins"),
        ({"end2end": 1}, "end2end 1 is not true or false"),
        ({"ch": 0}, "channels 0 is not a number of channels"),
        ({"activation": 3}, "activation 3 is not a text"),
    ],
)
def test_a_wrong_key_of_a_public_layer_list_is_told(tmp_path, keys, message):
    path = own(tmp_path, [[-1, 1, "Conv", [8, 3, 2]]], [[[0], 1, "Detect", ["nc"]]], **keys)
    with pytest.raises(ConfigError, match=message):
        build_network(path, 2)


# --- freezing


def frozen(network: Network) -> set[str]:
    return {name for name, p in network.named_parameters() if not p.requires_grad} - {"model.23.dfl.conv.weight"}


def test_parts_are_frozen_by_layers_names_and_patterns():
    network = build_network("v11n", 2)
    freeze(network, [0, "10.cv1", "model.23.cv2", "4.*.bn"])
    for name, parameter in network.named_parameters():
        parts = name.split(".")
        expected = (
            parts[1] == "0"
            or parts[1:3] == ["10", "cv1"]
            or parts[1:3] == ["23", "cv2"]
            or (parts[1] == "4" and "bn" in parts[2:])
            or "dfl" in name
        )
        assert parameter.requires_grad is not expected, name
    set_modes(network, freeze_norms=False)
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert module.training is all(p.requires_grad for p in module.parameters()), name


def test_a_number_freezes_the_first_layers():
    network = build_network("v11n", 2)
    freeze(network, 2)
    assert {name.split(".")[1] for name in frozen(network)} == {"0", "1"}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ([23], r"layers 0 to 23, and the last, the head, must train; .*freeze=\['23.cv2'\]"),
        (["30.cv1"], "'30.cv1' is no part of this model"),
        ([-1], "layers 0 to 23"),
        (["*"], "nothing is left to train"),
        (["23.one2one_*"], "nothing is left to train in one of the loss's branches"),
    ],
)
def test_what_cannot_be_frozen_is_told(what, message):
    with pytest.raises(ConfigError, match=message):
        freeze(build_network("v26n", 2), what)
