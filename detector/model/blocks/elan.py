"""Layer aggregation blocks. Wang et al., "YOLOv9" (2024)."""

import torch
from torch import Tensor, nn

from detector.model.blocks.conv import Conv
from detector.model.blocks.csp import RepCSP


class RepNCSPELAN4(nn.Module):
    """1x1 to two parts, two stages chained from the second, 1x1 over all four. `repeats` units in a stage."""

    def __init__(self, inputs: int, outputs: int, parts: int, hidden: int, repeats: int = 1):
        super().__init__()
        self.cv1 = Conv(inputs, parts)
        self.cv2 = self.stage(parts // 2, hidden, repeats)
        self.cv3 = self.stage(hidden, hidden, repeats)
        self.cv4 = Conv(parts + 2 * hidden, outputs)

    @staticmethod
    def stage(inputs: int, outputs: int, repeats: int) -> nn.Module:
        return nn.Sequential(RepCSP(inputs, outputs, repeats), Conv(outputs, outputs, 3))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.cv1(x).chunk(2, dim=1))
        parts.append(self.cv2(parts[-1]))
        parts.append(self.cv3(parts[-1]))
        return self.cv4(torch.cat(parts, dim=1))


class ELAN1(RepNCSPELAN4):
    """RepNCSPELAN4 whose stages are single 3x3 convolutions."""

    def __init__(self, inputs: int, outputs: int, parts: int, hidden: int):
        super().__init__(inputs, outputs, parts, hidden)

    @staticmethod
    def stage(inputs: int, outputs: int, repeats: int) -> nn.Module:
        return Conv(inputs, outputs, 3)
