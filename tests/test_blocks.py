"""Blocks against their formulas, written once more with plain functions on a block's state dict."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detector.model.blocks import attention, conv, csp, elan, join, pooling, psa

INPUTS = 8


class Weights:
    """Functions on the part of a state dict below a prefix."""

    def __init__(self, state: dict[str, Tensor], prefix: str = ""):
        self.state, self.prefix = state, prefix

    def __getitem__(self, name: str) -> "Weights":
        return Weights(self.state, f"{self.prefix}{name}.")

    def get(self, name: str) -> Tensor:
        return self.state[self.prefix + name]

    def norm(self, y: Tensor) -> Tensor:
        mean, var = self.get("running_mean"), self.get("running_var")
        y = (y - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + 1e-3).sqrt()
        return y * self.get("weight").view(-1, 1, 1) + self.get("bias").view(-1, 1, 1)

    def conv(self, x: Tensor, stride: int = 1, act: bool = True, groups: int = 1, padding=None) -> Tensor:
        """Convolution, norm and SiLU of a Conv."""
        weight = self.get("conv.weight")
        around = tuple(side // 2 for side in weight.shape[2:]) if padding is None else padding
        y = self["bn"].norm(F.conv2d(x, weight, None, stride, around, 1, groups))
        return y * torch.sigmoid(y) if act else y


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def bottleneck(w: Weights, x: Tensor, add: bool = True) -> Tensor:
    y = w["cv2"].conv(w["cv1"].conv(x))
    return x + y if add else y


def c3(w: Weights, x: Tensor, n: int, unit=bottleneck) -> Tensor:
    y = w["cv1"].conv(x)
    for i in range(n):
        y = unit(w[f"m.{i}"], y)
    return w["cv3"].conv(torch.cat((y, w["cv2"].conv(x)), 1))


def c2f(w: Weights, x: Tensor, n: int, unit) -> Tensor:
    parts = list(w["cv1"].conv(x).chunk(2, 1))
    for i in range(n):
        parts.append(unit(w[f"m.{i}"], parts[-1]))
    return w["cv2"].conv(torch.cat(parts, 1))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(key, cells), (key, cells), (value, cells) to (value, cells): one head."""
    weights = ((q * q.shape[0] ** -0.5).T @ k).softmax(dim=1)
    return v @ weights.T


def attention_of(w: Weights, x: Tensor, heads: int) -> Tensor:
    batch, channels, height, width = x.shape
    value = channels // heads
    key = value // 2
    qkv = w["qkv"].conv(x, act=False).flatten(2)
    out, values = x.new_empty(batch, channels, height * width), x.new_empty(batch, channels, height * width)
    for b in range(batch):
        for h in range(heads):
            q, k, v = qkv[b, h * (2 * key + value) : (h + 1) * (2 * key + value)].split((key, key, value))
            out[b, h * value : (h + 1) * value] = attend(q, k, v)
            values[b, h * value : (h + 1) * value] = v
    values = values.view(x.shape)
    return w["proj"].conv(out.view(x.shape) + w["pe"].conv(values, act=False, groups=channels), act=False)


def psa_block(w: Weights, x: Tensor, heads: int = 1) -> Tensor:
    x = x + attention_of(w["attn"], x, heads)
    return x + w["ffn.1"].conv(w["ffn.0"].conv(x), act=False)


def area_attention(w: Weights, x: Tensor, heads: int, area: int) -> Tensor:
    batch, channels, height, width = x.shape
    each, cells = channels // heads, height * width // area
    qkv = w["qkv"].conv(x, act=False).flatten(2)
    out, values = x.new_empty(batch, channels, height * width), x.new_empty(batch, channels, height * width)
    for b in range(batch):
        for h in range(heads):
            q, k, v = qkv[b, h * 3 * each : (h + 1) * 3 * each].split(each)
            values[b, h * each : (h + 1) * each] = v
            for a in range(area):
                run = slice(a * cells, (a + 1) * cells)
                out[b, h * each : (h + 1) * each, run] = attend(q[:, run], k[:, run], v[:, run])
    values = values.view(x.shape)
    return w["proj"].conv(out.view(x.shape) + w["pe"].conv(values, act=False, groups=channels), act=False)


def a_block(w: Weights, x: Tensor, heads: int, area: int) -> Tensor:
    x = x + area_attention(w["attn"], x, heads, area)
    return x + w["mlp.1"].conv(w["mlp.0"].conv(x), act=False)


def a2c2f(w: Weights, x: Tensor) -> Tensor:
    parts = [w["cv1"].conv(x)]
    for i in range(2):
        parts.append(a_block(w[f"m.{i}.1"], a_block(w[f"m.{i}.0"], parts[-1], 1, 2), 1, 2))
    return x + w.get("gamma").view(-1, 1, 1) * w["cv2"].conv(torch.cat(parts, 1))


def rep_conv(w: Weights, x: Tensor) -> Tensor:
    return silu(w["conv1"].conv(x, act=False) + w["conv2"].conv(x, act=False))


def rep_csp(w: Weights, x: Tensor, n: int) -> Tensor:
    return c3(w, x, n, lambda u, y: y + u["cv2"].conv(rep_conv(u["cv1"], y)))


def elan4(w: Weights, x: Tensor) -> Tensor:
    a, b = w["cv1"].conv(x).chunk(2, 1)
    c = w["cv2.1"].conv(rep_csp(w["cv2.0"], b, 2))
    d = w["cv3.1"].conv(rep_csp(w["cv3.0"], c, 2))
    return w["cv4"].conv(torch.cat((a, b, c, d), 1))


def elan1(w: Weights, x: Tensor) -> Tensor:
    a, b = w["cv1"].conv(x).chunk(2, 1)
    c = w["cv2"].conv(b)
    return w["cv4"].conv(torch.cat((a, b, c, w["cv3"].conv(c)), 1))


def down(w: Weights, x: Tensor) -> Tensor:
    a, b = F.avg_pool2d(x, 2, 1, 0).chunk(2, 1)
    return torch.cat((w["cv1"].conv(a, 2), w["cv2"].conv(F.max_pool2d(b, 3, 2, 1))), 1)


def pools(x: Tensor, kernels) -> list[Tensor]:
    return [F.max_pool2d(x, k, 1, k // 2) for k in kernels]


def sppf(w: Weights, x: Tensor, act: bool, times: int) -> Tensor:
    y = w["cv1"].conv(x, act=act)
    return w["cv2"].conv(torch.cat([y, *pools(y, [4 * i + 5 for i in range(times)])], 1))


def sppelan(w: Weights, x: Tensor) -> Tensor:
    y = w["cv1"].conv(x)
    return w["cv5"].conv(torch.cat([y, *pools(y, (5, 9, 13))], 1))


def ghost(w: Weights, x: Tensor, act: bool = True) -> Tensor:
    y = w["cv1"].conv(x, act=act)
    return torch.cat((y, w["cv2"].conv(y, act=act, groups=y.shape[1])), 1)


def ghost_unit(w: Weights, x: Tensor) -> Tensor:
    y = w["conv.1"].conv(ghost(w["conv.0"], x), 2, act=False, groups=4)
    short = w["shortcut.1"].conv(w["shortcut.0"].conv(x, 2, act=False, groups=8), act=False)
    return ghost(w["conv.2"], y, act=False) + short


def cib(w: Weights, x: Tensor, lk: bool) -> Tensor:
    y = w["cv1.1"].conv(w["cv1.0"].conv(x, groups=8))
    m = w["cv1.2"]
    if lk:
        y = silu(m["conv"].conv(y, act=False, groups=16) + m["conv1"].conv(y, act=False, groups=16))
    else:
        y = m.conv(y, groups=16)
    return x + w["cv1.4"].conv(w["cv1.3"].conv(y), groups=8)


def psa_of(w: Weights, x: Tensor) -> Tensor:
    a, b = w["cv1"].conv(x).chunk(2, 1)
    return w["cv2"].conv(torch.cat((a, psa_block(w, b)), 1))


def c2(w: Weights, x: Tensor) -> Tensor:
    a, b = w["cv1"].conv(x).chunk(2, 1)
    for i in range(2):
        a = bottleneck(w[f"m.{i}"], a)
    return w["cv2"].conv(torch.cat((a, b), 1))


def c1(w: Weights, x: Tensor) -> Tensor:
    y = w["cv1"].conv(x)
    return y + w["m.1"].conv(w["m.0"].conv(y))


def csp_first(w: Weights, x: Tensor) -> Tensor:
    y = bottleneck(w["m.0"], w["cv1"].conv(x))
    both = torch.cat((F.conv2d(y, w.get("cv3.weight")), F.conv2d(x, w.get("cv2.weight"))), 1)
    return w["cv4"].conv(silu(w["bn"].norm(both)))


def rep_c3(w: Weights, x: Tensor) -> Tensor:
    y = rep_conv(w["m.1"], rep_conv(w["m.0"], w["cv1"].conv(x)))
    return w["cv3"].conv(y + w["cv2"].conv(x))


def focus(w: Weights, x: Tensor) -> Tensor:
    parts = (x[:, :, 0::2, 0::2], x[:, :, 1::2, 0::2], x[:, :, 0::2, 1::2], x[:, :, 1::2, 1::2])
    return w["conv"].conv(torch.cat(parts, 1))


def enlarged(w: Weights, x: Tensor) -> Tensor:
    return silu(w["bn"].norm(F.conv_transpose2d(x, w.get("conv_transpose.weight"), stride=2)))


def attn_unit(w: Weights, x: Tensor) -> Tensor:
    return psa_block(w["1"], bottleneck(w["0"], x))


BLOCKS = {
    "Bottleneck, no shortcut": (csp.Bottleneck(8, 8, False), lambda w, x: bottleneck(w, x, add=False)),
    "Bottleneck, other channels": (csp.Bottleneck(8, 6), lambda w, x: bottleneck(w, x, add=False)),
    "C1": (csp.C1(8, 6, 2), c1),
    "C2": (csp.C2(8, 8, 2), c2),
    "C2f": (csp.C2f(8, 12, 2), lambda w, x: c2f(w, x, 2, lambda u, y: bottleneck(u, y, add=False))),
    "C2f, shortcut": (csp.C2f(8, 12, 2, True), lambda w, x: c2f(w, x, 2, bottleneck)),
    "C3": (csp.C3(8, 12, 2), lambda w, x: c3(w, x, 2)),
    "C3, no shortcut": (csp.C3(8, 8, 1, False), lambda w, x: c3(w, x, 1, lambda u, y: bottleneck(u, y, add=False))),
    "C3x": (csp.C3x(8, 8, 2), lambda w, x: c3(w, x, 2)),
    "C3k2": (csp.C3k2(8, 8, 2), lambda w, x: c2f(w, x, 2, bottleneck)),
    "C3k2, c3k": (csp.C3k2(8, 8, 2, True), lambda w, x: c2f(w, x, 2, lambda u, y: c3(u, y, 2))),
    "C3k2, attn": (csp.C3k2(8, 8, 1, True, 0.5, True), lambda w, x: c2f(w, x, 1, attn_unit)),
    "C2fCIB": (csp.C2fCIB(8, 16, 1, True), lambda w, x: c2f(w, x, 1, lambda u, y: cib(u, y, lk=False))),
    "C2fCIB, large": (csp.C2fCIB(8, 16, 1, True, True), lambda w, x: c2f(w, x, 1, lambda u, y: cib(u, y, lk=True))),
    "BottleneckCSP": (csp.BottleneckCSP(8, 8), csp_first),
    "RepConv": (conv.RepConv(8, 6), rep_conv),
    "RepC3": (csp.RepC3(8, 8, 2, 0.5), rep_c3),
    "RepCSP": (csp.RepCSP(8, 8, 2), lambda w, x: rep_csp(w, x, 2)),
    "RepNCSPELAN4": (elan.RepNCSPELAN4(8, 12, 8, 6, 2), elan4),
    "ELAN1": (elan.ELAN1(8, 12, 8, 6), elan1),
    "AConv": (pooling.AConv(8, 6), lambda w, x: w["cv1"].conv(F.avg_pool2d(x, 2, 1, 0), 2)),
    "ADown": (pooling.ADown(8, 12), down),
    "SPP": (
        pooling.SPP(8, 8),
        lambda w, x: w["cv2"].conv(torch.cat([w["cv1"].conv(x), *pools(w["cv1"].conv(x), (5, 9, 13))], 1)),
    ),
    "SPPF": (pooling.SPPF(8, 8), lambda w, x: sppf(w, x, act=True, times=3)),
    "SPPF, a longer row": (pooling.SPPF(8, 8, 5, 3, True), lambda w, x: x + sppf(w, x, act=False, times=3)),
    "SPPF, as said": (pooling.SPPF(8, 8, 5, 2, False, True), lambda w, x: sppf(w, x, act=True, times=2)),
    "SPPELAN": (pooling.SPPELAN(8, 8, 4), sppelan),
    "SCDown": (
        pooling.SCDown(8, 6, 3, 2),
        lambda w, x: w["cv2"].conv(w["cv1"].conv(x), 2, act=False, groups=6),
    ),
    "PSA": (psa.PSA(8, 8), psa_of),
    "C2PSA": (
        psa.C2PSA(8, 8, 1),
        lambda w, x: w["cv2"].conv(
            torch.cat((w["cv1"].conv(x)[:, :4], psa_block(w["m.0"], w["cv1"].conv(x)[:, 4:])), 1)
        ),
    ),
    "C2fPSA": (psa.C2fPSA(8, 8, 2), lambda w, x: c2f(w, x, 2, psa_block)),
    "ABlock": (attention.ABlock(8, 2, 1.5, 4), lambda w, x: a_block(w, x, 2, 4)),
    "GhostConv": (conv.GhostConv(8, 6), ghost),
    "GhostBottleneck": (csp.GhostBottleneck(8, 8, 3, 2), ghost_unit),
    "Focus": (conv.Focus(8, 6, 3), focus),
    "ConvTranspose": (conv.ConvTranspose(8, 6), enlarged),
    "Conv, dilated": (
        conv.Conv(8, 6, 3, dilation=2),
        lambda w, x: silu(w["bn"].norm(F.conv2d(x, w.get("conv.weight"), padding=2, dilation=2))),
    ),
}


def prepared(block: torch.nn.Module) -> torch.nn.Module:
    rng = torch.Generator().manual_seed(0)
    for module in block.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor in (module.running_mean, module.bias.data, module.running_var, module.weight.data):
                tensor.uniform_(0.5, 1.5, generator=rng)
        elif isinstance(module, torch.nn.Conv2d | torch.nn.ConvTranspose2d):
            torch.nn.init.normal_(module.weight, std=0.3, generator=rng)
    return block.double().eval()  # in double, so that only formulas differ


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_a_block_is_its_formula(name, channels_last):
    block, formula = BLOCKS[name]
    x = torch.randn(2, INPUTS, 6, 8, generator=torch.Generator().manual_seed(1)).double()
    prepared(block)
    expected = formula(Weights(block.state_dict()), x)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(block(x), expected)


@torch.no_grad()
def test_area_attention_units_are_scaled_and_added_where_residual():
    block = prepared(psa.A2C2f(64, 64, 2, True, 2, True, 1.5))
    block.gamma.fill_(0.3)
    x = torch.randn(1, 64, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(block(x), a2c2f(Weights(block.state_dict()), x))


@pytest.mark.parametrize("block", [conv.RepConv(8, 8), conv.RepConv(8, 8, 3, 2), conv.RepVGGDW(8)])
@torch.no_grad()
def test_parallel_convolutions_are_one_when_folded(block):
    prepared(block)
    x = torch.randn(2, 8, 6, 8).double()
    before = block(x)
    block.fold()
    assert sum(isinstance(module, torch.nn.Conv2d) for module in block.modules()) == 1
    torch.testing.assert_close(block(x), before)


@torch.no_grad()
def test_maps_are_split_and_fused():
    split, fuse = join.CBLinear(8, (4, 6)), join.CBFuse([1, 0])
    x, last = torch.randn(1, 8, 2, 2), torch.randn(1, 6, 4, 4)
    maps = split(x)
    assert [one.shape[1] for one in maps] == [4, 6]
    torch.testing.assert_close(torch.cat(maps, 1), F.conv2d(x, split.conv.weight, split.conv.bias))
    grown = maps[1].repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(fuse([maps, (last,), last]), last + grown + last)


def test_grouped_bottlenecks_group_their_second_convolution():
    unit = csp.C3(8, 16, 1, True, 4).m[0]
    assert (unit.cv1.conv.groups, unit.cv2.conv.groups) == (1, 4)
