"""From the pixels of the network input back to those of the original image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from detector.model.selection import Detections

if TYPE_CHECKING:
    from detector.data.image import Letterbox


def to_original(detections: Detections, letterbox: Letterbox) -> Detections:
    """Boxes from pixels of the network input to pixels of the original image, clipped to it.

    The inverse of x_net = x_orig * ratio_x + left and y_net = y_orig * ratio_y + top.
    """
    boxes = detections.boxes_xyxy
    shift = boxes.new_tensor((letterbox.left, letterbox.top) * 2)
    ratio = boxes.new_tensor((letterbox.ratio_x, letterbox.ratio_y) * 2)
    size = boxes.new_tensor((letterbox.width, letterbox.height) * 2)
    return detections._replace(boxes_xyxy=((boxes - shift) / ratio).clamp(min=0).minimum(size))
