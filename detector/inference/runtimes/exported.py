"""An exported file as a `Runtime`: the same images in, and the same selection of boxes, as of a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from detector.errors import ConfigError
from detector.inference.infer import Limits
from detector.inference.runtimes.engines import Engine
from detector.inference.runtimes.facts import Facts
from detector.model.selection import Detections, non_max_suppression
from detector.values import nearest_multiple

if TYPE_CHECKING:
    from detector.data.header import Range

PADDING = 114 / 255  # the grey around images


@dataclass(frozen=True)
class ExportedRuntime:
    """A file that some engine runs, and what is known of it."""

    engine: Engine
    facts: Facts
    channels_last: bool = False  # its input is (B, H, W, C)

    @property
    def stride(self) -> int:
        return self.facts.stride

    @property
    def channels(self) -> int:
        return self.facts.channels

    @property
    def value_range(self) -> Range | None:
        return self.facts.value_range

    @property
    def title(self) -> str:
        return f"{self.engine.title}, {self.facts.arithmetic}"

    @property
    def side(self) -> int | None:
        """The one side that its input has, in pixels; None where any multiple of the stride will do."""
        return None if self.facts.dynamic else self.facts.imgsz

    def check_side(self, imgsz: int) -> None:
        if self.side is not None and imgsz != self.side:
            raise ConfigError(
                f"imgsz={imgsz}: this export takes images of {self.side} x {self.side} alone; "
                "batch=dynamic makes one that takes any"
            )
        if imgsz % self.stride:
            nearest = nearest_multiple(imgsz, self.stride)
            raise ConfigError(f"imgsz={imgsz}: must be a multiple of {self.stride}; the nearest is {nearest}")

    @torch.inference_mode()
    def find(self, images: Tensor, limits: Limits) -> list[Detections]:
        """See `Runtime.find`. ConfigError for limits that the file's own suppression rules out."""
        self._check(limits)
        pixels, left, top = self._fitted(images.permute(0, 3, 1, 2).float() / 255)
        found = torch.cat([self._run(part)[:count] for part, count in self._pieces(pixels)])
        if self.facts.output == "raw":
            found = found.transpose(1, 2)  # (B, A, 4 + C)
            half = found[..., 2:4] / 2
            boxes = torch.cat((found[..., :2] - half, found[..., :2] + half), dim=-1)
            detections = non_max_suppression(boxes, found[..., 4:], *limits)
        else:
            detections = [rows_to_detections(one, limits) for one in found]
        if not left and not top:
            return detections
        shift = torch.tensor((left, top) * 2, dtype=torch.float32)
        return [one._replace(boxes_xyxy=one.boxes_xyxy - shift) for one in detections]

    def _check(self, limits: Limits) -> None:
        facts = self.facts
        if facts.nms == "inside" and limits.conf < facts.conf:
            raise ConfigError(
                f"conf={limits.conf:g}: this export keeps boxes from {facts.conf:g} on; say conf={facts.conf:g}"
            )
        if facts.nms == "inside" and limits.iou != facts.iou:
            raise ConfigError(
                f"iou={limits.iou:g}: this export suppresses by itself; say iou={facts.iou:g}, or export one with "
                "nms=false, which leaves it to you"
            )

    def _fitted(self, pixels: Tensor) -> tuple[Tensor, int, int]:
        """Images as the file takes them, and how many pixels they were moved right and down.

        Padded on both sides, so that an image stands where a letterbox of that size puts it.
        """
        height, width = pixels.shape[2:]
        if self.side is None or (height, width) == (self.side, self.side):
            return pixels, 0, 0
        across, down = self.side - width, self.side - height
        if across < 0 or down < 0:
            raise ConfigError(f"an image of {height} x {width}: this export takes {self.side} x {self.side} at most")
        left, top = across // 2, down // 2
        return F.pad(pixels, (left, across - left, top, down - top), value=PADDING), left, top

    def _pieces(self, pixels: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Images in pieces as large as the file takes, the last one filled up, and how many of a piece count."""
        size = self.facts.batch or len(pixels)
        for part in pixels.split(size):
            missing = size - len(part)
            yield (F.pad(part, (0, 0, 0, 0, 0, 0, 0, missing)) if missing else part), len(part)

    def _run(self, pixels: Tensor) -> Tensor:
        return self.engine.run((pixels.permute(0, 2, 3, 1) if self.channels_last else pixels).contiguous())


def rows_to_detections(rows: Tensor, limits: Limits) -> Detections:
    """(max_det, 6) rows x1, y1, x2, y2, score, class of one image, best first and padded with zeros, as detections.

    Where an anchor may have one class alone, of rows with one and the same box the first counts.
    """
    rows = rows[(rows[:, 4] >= limits.conf) & (rows[:, 4] > 0) & rows.isfinite().all(dim=1)]
    if not limits.multi_label and len(rows):
        _, owner = rows[:, :4].unique(dim=0, return_inverse=True)
        first = torch.full((int(owner.max()) + 1,), len(rows)).scatter_reduce(0, owner, torch.arange(len(rows)), "amin")
        rows = rows[first.sort().values]
    rows = rows[: limits.max_det]
    return Detections(rows[:, :4].contiguous(), rows[:, 4].contiguous(), rows[:, 5].round().long())
