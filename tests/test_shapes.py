"""The drawn data set: same seed, same bytes; labels that are fair and tight."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from detector.data import shapes
from detector.data.description import load_description
from detector.data.reading import build_index
from detector.errors import DataError
from detector.rng import Purpose, generator

SMALL = "{scenes: shapes, train: 6, val: 3, size: 96, seed: 4}"


def describe(folder: Path, generate: str = SMALL, names: str = "[circle, square, triangle, star]") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "shapes.yaml"
    path.write_text(f"path: set\ntrain: images/train\nval: images/val\nnames: {names}\ngenerate: {generate}\n")
    return path


def digest(folder: Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    first, second = (load_description(describe(tmp_path / name)) for name in "ab")
    other = load_description(describe(tmp_path / "c", SMALL.replace("seed: 4", "seed: 5")))
    for description in (first, second, other):
        shapes.ensure_generated(description)
    assert digest(first.root) == digest(second.root)
    assert len(digest(first.root)) == 2 * (6 + 3) + 1
    images = [{v for k, v in digest(d.root).items() if k.endswith(".png")} for d in (first, other)]
    assert not images[0] & images[1]
    assert len(images[0]) == 9


def test_index_draws_the_set_on_first_use_and_reads_its_boxes_exactly(tmp_path):
    index = build_index(load_description(describe(tmp_path)), "val")
    assert len(index) == 3
    assert index.warnings == ()
    assert index.names == shapes.NAMES
    for number in range(3):
        scene = shapes.draw_scene(96, 4, 1, number)
        assert index.boxes_xyxy(number) == pytest.approx(scene.boxes_xyxy, abs=1e-6)
        assert np.array_equal(index.labels(number), scene.classes)


@pytest.mark.parametrize("number", range(40))
def test_box_is_the_extent_of_the_pixels_that_drawing_changes(number):
    shape = shapes._shape(128, generator(0, Purpose.SCENE, number))
    image = np.zeros((128, 128, 3), dtype=np.uint8)
    shapes.draw(image, shape._replace(colour=(255, 255, 255), edge=None))
    rows, columns = np.nonzero(image[..., 0] >= 128)
    box = shapes.extent(shapes.mask_of(shape, 128))
    assert box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    edged = np.zeros_like(image)
    shapes.draw(edged, shape._replace(colour=(255, 255, 255), edge=(255, 255, 255)))
    rows, columns = np.nonzero(edged[..., 0] >= 128)  # a contour stays inside its shape
    assert np.abs(np.subtract(box, (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))).max() <= 1


def test_circle_and_square_boxes_follow_geometry():
    circle = shapes.Shape(0, np.array(((50 * 16, 40 * 16), (20 * 16, 0)), dtype=np.int32), (255, 0, 0), None)
    assert np.abs(np.subtract(shapes.extent(shapes.mask_of(circle, 96)), (30, 20, 71, 61))).max() <= 1
    corners = np.array(((10, 20), (30, 20), (30, 40), (10, 40)), dtype=np.int32) * 16
    square = shapes.Shape(1, corners, (255, 0, 0), None)
    assert shapes.extent(shapes.mask_of(square, 96)) == (10, 20, 31, 41)


def test_no_label_belongs_to_a_shape_that_is_hidden():
    removed = 0
    for number in range(60):
        random = generator(1, Purpose.SCENE, number)
        drawn = [shapes._shape(96, random) for _ in range(9)]
        kept = shapes._uncovered(drawn, 96)
        removed += len(drawn) - len(kept)
        for position, (_, mask) in enumerate(kept):
            above = np.zeros_like(mask)
            for _, other in kept[position + 1 :]:
                above |= other
            assert (mask & ~above).sum() >= (1 - shapes.MAX_HIDDEN) * mask.sum()
    assert removed > 0


def test_all_classes_and_many_sizes_occur():
    scenes = [shapes.draw_scene(256, 0, 0, number) for number in range(60)]
    counts = np.bincount(np.concatenate([scene.classes for scene in scenes]), minlength=4)
    assert counts.min() > 30
    sides = np.concatenate([scene.boxes_xyxy[:, 2] - scene.boxes_xyxy[:, 0] for scene in scenes])
    assert sides.min() < 40
    assert sides.max() > 80


def test_second_use_draws_nothing_and_another_parameter_draws_anew(tmp_path, monkeypatch):
    description = load_description(describe(tmp_path))
    shapes.ensure_generated(description)
    with monkeypatch.context() as patched:
        patched.setattr(shapes, "draw_scene", None)
        shapes.ensure_generated(description)
    changed = load_description(describe(tmp_path, SMALL.replace("train: 6", "train: 2")))
    shapes.ensure_generated(changed)
    assert len(list((changed.root / "images" / "train").iterdir())) == 2
    assert json.loads((changed.root / shapes.RECORD).read_text())["train"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "shapes.yaml"]


def test_two_at_once_are_safe(tmp_path):
    description = load_description(describe(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(shapes.ensure_generated, [description] * 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "shapes.yaml"]
    assert len(digest(description.root)) == 19


def test_interrupted_drawing_leaves_nothing(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shapes, "_row", stop)
    with pytest.raises(KeyboardInterrupt):
        shapes.ensure_generated(load_description(describe(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["shapes.yaml"]


def test_a_folder_of_the_users_is_not_touched(tmp_path):
    description = load_description(describe(tmp_path))
    description.root.mkdir()
    (description.root / "mine.txt").write_text("precious")
    with pytest.raises(DataError, match="was not drawn by the project"):
        shapes.ensure_generated(description)
    assert (description.root / "mine.txt").read_text() == "precious"


def test_folder_that_cannot_be_written_is_named_with_its_remedy(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shapes.tempfile, "mkdtemp", refuse)
    with pytest.raises(DataError, match=r"set: cannot be written \(Permission denied\); copy shapes\.yaml to a folder"):
        shapes.ensure_generated(load_description(describe(tmp_path)))


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        ("{scenes: cubes}", "scenes is 'cubes'"),
        ("{train: 0}", "train is 0"),
        ("{size: 9.5}", "size is 9.5"),
        ("{trains: 3}", "'trains' is not a parameter"),
    ],
)
def test_wrong_parameter_is_named(tmp_path, generate, message):
    with pytest.raises(DataError, match=message):
        shapes.ensure_generated(load_description(describe(tmp_path, generate)))


def test_another_number_of_names_is_refused(tmp_path):
    shapes.ensure_generated(load_description(describe(tmp_path, names="[Kreis, Quadrat, Dreieck, Stern]")))
    with pytest.raises(DataError, match="has 2 names, expected circle"):
        shapes.ensure_generated(load_description(describe(tmp_path, names="[a, b]")))


def test_shipped_description_is_valid():
    description = load_description(Path(__file__).parents[1] / "datasets" / "shapes.yaml")
    assert shapes._checked(description) == {
        "version": shapes.VERSION, "scenes": "shapes", "train": 320, "val": 80, "size": 256, "seed": 0,
    }  # fmt: skip
