"""A small data set and a small network for tests that train."""

from functools import cache
from pathlib import Path

import cv2
import numpy as np
import torch
import yaml
from slow_loss import Raw, Truth, cells

from detector.data.batch import Batch

TINY = Path(__file__).parent / "data" / "tiny.yaml"  # a v11 thin and shallow enough for seconds
MINUTE = TINY.with_name("minute.yaml")  # the fewest layers there can be, for runs that are about what is around them
TINY26 = TINY.with_name("tiny26.yaml")  # the same of a v26: two heads, plain distances
MINUTE26 = TINY.with_name("minute26.yaml")


def write_dataset(folder: Path, train: int = 10, val: int = 4, size: int = 64) -> Path:
    """Bright squares (class 0) and dark discs (class 1) on grey noise, in the YOLO layout; returns the YAML."""
    random = np.random.default_rng(7)
    for split, count in (("train", train), ("val", val)):
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        for number in range(count):
            image = random.integers(90, 160, (size, size, 3), dtype=np.uint8)
            lines = []
            for _ in range(number % 3):  # every third image is background
                label, side = int(random.integers(2)), int(random.integers(size // 5, size // 2))
                x, y = (int(random.integers(size - side)) for _ in range(2))
                if label == 0:
                    image[y : y + side, x : x + side] = 240
                else:
                    cv2.circle(image, (x + side // 2, y + side // 2), side // 2, (10, 10, 10), -1)
                lines.append(f"{label} {(x + side / 2) / size} {(y + side / 2) / size} {side / size} {side / size}\n")
            cv2.imwrite(str(folder / "images" / split / f"{number:03d}.png"), image)
            (folder / "labels" / split / f"{number:03d}.txt").write_text("".join(lines))
    path = folder / "data.yaml"
    path.write_text(yaml.safe_dump({"train": "images/train", "val": "images/val", "names": ["square", "disc"]}))
    return path


def random_batch(boxes_per_image: list[int], size: int = 64, classes: int = 2, seed: int = 0) -> Batch:
    """Noise images with that many random boxes each."""
    rng = torch.Generator().manual_seed(seed)
    boxes, images = sum(boxes_per_image), len(boxes_per_image)
    side = torch.rand(boxes, 2, generator=rng) * size * 0.5 + 3
    low = torch.rand(boxes, 2, generator=rng) * (size - side)
    return Batch(
        images=torch.randint(0, 256, (images, size, size, 3), dtype=torch.uint8, generator=rng),
        boxes_xyxy=torch.cat((low, low + side), dim=1),
        classes=torch.randint(0, classes, (boxes,), generator=rng),
        image_index=torch.repeat_interleave(torch.arange(images), torch.tensor(boxes_per_image)),
        samples=torch.arange(images),
        bad=torch.zeros(0, dtype=torch.int64),
    )


def cut_batch(batch: Batch, sizes: list[int]) -> list[Batch]:
    """The batch's images in consecutive micro-batches of these sizes."""
    parts, start = [], 0
    for size in sizes:
        mine = (batch.image_index >= start) & (batch.image_index < start + size)
        parts.append(
            Batch(
                batch.images[start : start + size],
                batch.boxes_xyxy[mine],
                batch.classes[mine],
                batch.image_index[mine] - start,
                batch.samples[start : start + size],
                batch.bad,
            )
        )
        start += size
    return parts


KINDS = {  # boxes of each image, and the limits of their sides in pixels
    "dense": ([40, 25], 6.0, 60.0),
    "tiny": ([12, 20, 3], 0.5, 7.0),
    "mixed": ([0, 9, 2, 17], 2.0, 60.0),
    "empty": ([0, 0], 2.0, 60.0),
}


def near_truth(kind, strides, seed: int = 0, noise: float = 0.15, reg_max: int = 1) -> tuple[Raw, Truth]:
    """Raw output in fp64 for images of 64 x 96 pixels, where an anchor predicts about one of the boxes of its image."""
    raw, truth = _near_truth(kind, strides, seed, noise, reg_max)
    return raw._replace(boxes=raw.boxes.clone(), logits=raw.logits.clone()), truth


@cache
def _near_truth(kind, strides, seed, noise, reg_max):
    rng = torch.Generator().manual_seed(seed)
    counts, smallest, largest = KINDS[kind]
    width, height = 64, 96
    side = torch.rand(sum(counts), 2, generator=rng).double() * (largest - smallest) + smallest
    low = torch.rand(sum(counts), 2, generator=rng).double() * (torch.tensor([width, height]) - side)
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    truth = Truth(torch.cat((low, low + side), dim=1), torch.randint(0, 3, (sum(counts),), generator=rng), owners)
    shapes = tuple((height // stride, width // stride) for stride in strides)
    anchors = cells(shapes, strides)
    ltrb = torch.randn(len(counts), len(anchors), 4, generator=rng).double()
    for image in range(len(counts)):
        boxes = truth.boxes_xyxy[owners == image]
        for index, cell in enumerate(anchors):
            x, y = cell.x * cell.stride, cell.y * cell.stride
            inside = [one for one in boxes.tolist() if one[0] - 8 < x < one[2] + 8 and one[1] - 8 < y < one[3] + 8]
            if inside:
                # some boxes are predicted by many anchors, so that others take what those leave
                x1, y1, x2, y2 = inside[int(len(inside) * torch.rand(1, generator=rng) ** 3)]
                error = torch.randn(4, generator=rng).double() * noise * (x2 - x1 + y2 - y1) / 2
                ltrb[image, index] = (torch.tensor([x - x1, y - y1, x2 - x, y2 - y]) + error) / cell.stride
    logits = torch.randn(len(counts), 3, len(anchors), generator=rng).double()
    if reg_max == 1:
        return Raw(ltrb.transpose(1, 2), logits, shapes), truth
    nearness = -(ltrb[..., None] - torch.arange(reg_max)).square() + torch.rand(*ltrb.shape, reg_max, generator=rng)
    return Raw(nearness.flatten(-2).transpose(1, 2), logits, shapes), truth
