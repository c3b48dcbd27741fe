"""Whatever is in a file of annotations: it is read, or refused with a reason."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats import picture

from detector.data.description import load_description
from detector.data.formats import voc
from detector.data.reading import Reading, build_index
from detector.errors import DataError

WORD = st.sampled_from(
    ["0", "1", "2", "-1", ".5", "0.25", "1.0005", "1.2", "nan", "inf", "1e9", "x", "", "0,5", "\u0661"]
)
LINES = st.lists(st.lists(WORD, max_size=9).map(" ".join), max_size=5).map("\n".join)
NUMBER = st.one_of(st.integers(-5, 60), st.floats(), st.none(), st.text(max_size=3), st.booleans(), st.just([1]))
BOX = st.one_of(NUMBER, st.lists(NUMBER, max_size=5), st.lists(st.floats(0, 40), min_size=4, max_size=4))
ID = st.one_of(st.integers(0, 3), NUMBER)
ROWS = {
    "images": st.fixed_dictionaries({}, optional={"id": ID, "file_name": st.sampled_from(["a.png", "b.png", 3, None]),
                                                   "width": NUMBER, "height": NUMBER}),
    "annotations": st.fixed_dictionaries({}, optional={"id": ID, "image_id": ID, "category_id": ID, "bbox": BOX,
                                                        "area": NUMBER, "iscrowd": NUMBER, "segmentation": BOX}),
    "categories": st.fixed_dictionaries({}, optional={"id": ID, "name": st.sampled_from(["cat", "dog", None, 3])}),
}  # fmt: skip
JSON = st.fixed_dictionaries(
    {}, optional={key: st.one_of(st.lists(row, max_size=3), row, NUMBER) for key, row in ROWS.items()}
)
TAG = st.sampled_from(["annotation", "size", "width", "height", "object", "name", "difficult", "bndbox", *voc.CORNERS])
XML_TEXT = st.recursive(
    st.sampled_from(["cat", "1", "-3", "1e400", "nan", " ", "", "40"]),
    lambda inner: st.lists(st.tuples(TAG, inner), max_size=6).map(
        lambda all: "".join(f"<{t}>{x}</{t}>" for t, x in all)
    ),
    max_leaves=20,
).map(lambda inner: f"<annotation>{inner}</annotation>")
anything = st.one_of(
    st.binary(max_size=60), LINES.map(str.encode), XML_TEXT.map(str.encode), JSON.map(json.dumps).map(str.encode)
)


def read_or_refused(data: Path) -> None:
    for policy in ("clip", "drop_image"):
        try:
            index = build_index(load_description(data), "train", Reading(policy, 1.0, polygons=True))
        except DataError:
            continue
        boxes = np.concatenate(
            [index.boxes_xyxy(i) / (*index.size(i)[::-1], *index.size(i)[::-1]) for i in range(len(index))]
        )
        assert np.isfinite(boxes).all()
        assert (boxes >= -1e-9).all()
        assert (boxes <= 1 + 1e-9).all()
        assert (boxes[:, 2:] > boxes[:, :2]).all()
        assert ((index.classes >= 0) & (index.classes < len(index.names))).all()


def fuzzed(root: Path, form: str, content: bytes) -> None:
    description = {"yolo": "train: images", "coco": "train: a.json", "voc": "train: JPEGImages"}[form]
    if not root.exists():
        for name in ("a.png", "b.png"):
            picture(root / ("JPEGImages" if form == "voc" else "images") / name)
        (root / "data.yaml").write_text(
            f"{description}\nval: {description[7:]}\nnames: [cat, dog]\nformat: {form}\n", encoding="utf-8"
        )
        for folder in ("labels", "Annotations"):
            (root / folder).mkdir()
    place = {"yolo": "labels/a.txt", "coco": "a.json", "voc": "Annotations/a.xml"}[form]
    (root / place).write_bytes(content)
    read_or_refused(root / "data.yaml")


NEAR = {"yolo": LINES.map(str.encode), "coco": JSON.map(json.dumps).map(str.encode), "voc": XML_TEXT.map(str.encode)}


@pytest.mark.parametrize(
    "examples", [100, pytest.param(10_000, marks=(pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)))]
)
@pytest.mark.parametrize("form", NEAR)
def test_any_file_is_read_or_refused_with_a_reason(tmp_path, form, examples):
    @settings(max_examples=examples, deadline=None)
    @given(st.one_of(NEAR[form], anything))
    def check(content):
        fuzzed(tmp_path / form, form, content)

    check()
