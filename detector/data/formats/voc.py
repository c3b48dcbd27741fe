"""Pascal VOC: an XML file an image, in `Annotations/` for the images' `JPEGImages/`, lists of stems in `ImageSets/`.

Corners are pixels counted from 1, both of the box: an object of the pixels 1 to 10 is the box 0 to 10. Difficult
objects are not learnt, and are no fault of a detection. Everingham et al., "The PASCAL visual object classes (VOC)
challenge" (2010).
"""

import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from xml.parsers import expat

from detector.data.description import DataDescription
from detector.data.findings import Finding
from detector.data.formats.listing import annotation_files, annotation_path, is_image, list_lines, listed_images
from detector.data.labels import BACKGROUND, NO_LABELS, Box, Labels, usable
from detector.errors import DataError

FOLDERS = ("JPEGImages", "images", "Images")  # of images, beside `Annotations`
CORNERS = ("xmin", "ymin", "xmax", "ymax")


class VocLabels:
    """The labels of a split; see `formats.Annotations`."""

    def __init__(self, description: DataDescription, split: str, polygons: bool = False) -> None:
        self.names = description.names
        self._numbers = {name: number for number, name in enumerate(description.names)}
        self._place = str(description.path)
        self.paths, self.findings = _images(description, split)
        self._folder_of = partial(annotation_folder, description)
        self.files, orphans = annotation_files(self.paths, self._folder_of, ".xml")
        if not _image_sets(description, split):  # the other splits' files lie in the same folder
            self.findings += [Finding("no picture", path) for path in orphans]

    def expected(self, i: int) -> str:
        """Where the annotation of image i is looked for."""
        return annotation_path(self.paths[i], self._folder_of, ".xml")

    def read(self, numbers: Sequence[int], sizes: Sequence[tuple[int, int] | None]) -> list[Labels]:
        return [
            NO_LABELS if self.files[i] is None else self._labels(self.files[i], self.paths[i], size)
            for i, size in zip(numbers, sizes, strict=True)
        ]

    def _labels(self, file: str, image: str, size: tuple[int, int] | None) -> Labels:
        try:
            with open(file, "rb") as opened:
                found = parse(opened.read())
        except FileNotFoundError:
            return NO_LABELS
        except (OSError, expat.ExpatError, ValueError, LookupError) as error:
            text = f"is no VOC annotation ({error}); write it anew"
            return BACKGROUND._replace(findings=(Finding("bad file", file, text, image),))
        return self.labels_of(found, file, image, size)

    def labels_of(self, found: "Annotation", file: str, image: str, size: tuple[int, int] | None) -> Labels:
        """The objects of an annotation as fractions of an image of this (height, width)."""
        boxes, findings = [], []
        said = found.size
        size = size or said
        if size and said and said != size:
            text = f"says {said[1]} x {said[0]} pixels, the image has {size[1]} x {size[0]}"
            findings.append(Finding("other size", file, text, image))
        for one in found.objects:
            try:
                label = self._label(one)
                xywh = _fractions(one, size)
            except ValueError as reason:
                findings.append(Finding("bad row", f"{file}:{one['line']}", str(reason), image, int(one["line"])))
                continue
            difficult = one.get("difficult", "").strip().lower() in ("1", "true", "yes")
            boxes.append(Box(label, xywh, int(one["line"]), ignored=difficult))
        return usable(boxes, f"{file}:", image, findings)

    def _label(self, one: dict[str, str]) -> int:
        name = one.get("name", "")
        if name not in self._numbers:
            raise ValueError(f"the class {name!r} is not among `names` of {self._place}; add it, or mend the label")
        return self._numbers[name]


class Annotation:
    """What an XML file says: (height, width), None where it does not, and its objects, each with its line."""

    def __init__(self) -> None:
        self.size: tuple[int, int] | None = None
        self.objects: list[dict[str, str]] = []


def parse(content: bytes) -> Annotation:
    """An annotation's text. Raises expat.ExpatError, ValueError or LookupError where it is none.

    The parts of an object, which have boxes of their own, are not objects.
    """
    found, stack, text, size = Annotation(), [], [], {}
    parser = expat.ParserCreate()

    def start(tag: str, _: dict[str, str]) -> None:
        stack.append(tag)
        text.clear()
        if stack[1:] == ["object"]:
            found.objects.append({"line": str(parser.CurrentLineNumber)})

    def end(tag: str) -> None:
        path, value = tuple(stack[1:]), "".join(text)
        stack.pop()
        text.clear()
        if len(path) == 2 and path[0] == "size":
            size[tag] = value
        elif (len(path) == 2 and path[0] == "object") or (len(path) == 3 and path[:2] == ("object", "bndbox")):
            found.objects[-1].setdefault(tag, value)

    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, text.append
    parser.Parse(content, True)
    try:
        height, width = int(float(size["height"])), int(float(size["width"]))
        found.size = (height, width) if min(height, width) > 0 else None
    except (KeyError, ValueError, OverflowError):
        pass  # not said: the image knows it
    return found


def _fractions(one: dict[str, str], size: tuple[int, int] | None) -> tuple[float, float, float, float]:
    """Centre and size of an object's box as fractions of the image."""
    if size is None:
        raise ValueError("the image cannot be read and its size is not written; add `size`")
    left, top, right, bottom = (_number(one, corner) for corner in CORNERS)
    height, width = size
    left, top = left - 1, top - 1
    return (left + right) / 2 / width, (top + bottom) / 2 / height, (right - left) / width, (bottom - top) / height


def _number(one: dict[str, str], corner: str) -> float:
    if corner not in one:
        raise ValueError(f"an object without {corner}; give its bndbox xmin, ymin, xmax and ymax")
    try:
        value = float(one[corner])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{corner} {one[corner]!r} is not a number of pixels")
    return value


def recognised(description: DataDescription) -> bool:
    """Whether the training images come from image sets, or have an XML file and no text."""
    for entry in description.splits["train"]:
        if entry in description.annotations:
            return description.annotations[entry].is_dir()
        if entry.is_file() and "ImageSets" in entry.parts:
            return True
        if entry.is_dir() and (image := _first_image(entry)):
            return os.path.exists(annotation_path(image, partial(annotation_folder, description), ".xml"))
    return False


def _first_image(folder: Path) -> str | None:
    for place, _, names in os.walk(folder, followlinks=True):
        images = sorted(name for name in names if is_image(name))
        if images:
            return os.path.join(place, images[0])
    return None


def class_names(description: DataDescription) -> tuple[str, ...]:
    """The names of all objects of all splits, exactly as written, in the order of the alphabet."""
    names: set[str] = set()
    for split in description.splits:
        paths, _ = _images(description, split)
        files, _ = annotation_files(paths, partial(annotation_folder, description), ".xml")
        for path in filter(None, files):
            try:
                content = Path(path).read_bytes()
                names |= {one["name"] for one in parse(content).objects if "name" in one}
            except (OSError, expat.ExpatError, ValueError, LookupError):
                continue  # told when it is read for its boxes
    return tuple(sorted(names))


def _image_sets(description: DataDescription, split: str) -> bool:
    return any(entry.is_file() for entry in description.splits[split])


def _images(description: DataDescription, split: str) -> tuple[list[str], list[Finding]]:
    """The images of a split: of folders, and of image sets, which list stems, with 1 or -1 in a class's own set."""
    sets = [entry for entry in description.splits[split] if entry.is_file() and "ImageSets" in entry.parts]
    if not sets:
        return listed_images(description, split)
    paths: list[str] = []
    findings: list[Finding] = []
    for entry in description.splits[split]:
        if entry not in sets:
            raise DataError(
                f"{description.path}: {split}: {entry} is no image set; name folders or image sets, not both"
            )
        place = f"{description.path}: {split}: {entry}"
        root = Path(*entry.parts[: entry.parts.index("ImageSets")])
        stems = _stems(list_lines(entry, place))
        if not stems:
            raise DataError(f"{place} lists no images; write one name a line")
        for stem, path in zip(stems, _pictures(root, stems), strict=True):
            if path is None:
                findings.append(Finding("no image", f"{entry}: {stem}", f"is not in {root / FOLDERS[0]}"))
            else:
                paths.append(path)
        if len(findings) == len(stems):
            raise DataError(f"{place}: none of its {len(stems):,} images is in {root / FOLDERS[0]}; put them there")
    repeated = len(paths) - len(set(paths))
    if repeated:
        seen: set[str] = set()
        findings += [Finding("listed twice", path, image=path) for path in paths if path in seen or seen.add(path)]
    return sorted(set(paths)), findings


def _stems(lines: Sequence[str]) -> list[str]:
    """The names of a list, without those that a class's own set says it is not in."""
    stems = []
    for line in lines:
        stem, _, flag = line.rpartition(" ")
        if stem and flag in ("1", "-1", "0"):
            if flag != "-1":
                stems.append(stem.strip())
        else:
            stems.append(line)
    return stems


def _pictures(root: Path, stems: Sequence[str]) -> list[str | None]:
    """The image of each stem, whatever its ending."""
    folder = next((root / name for name in FOLDERS if (root / name).is_dir()), root)
    there: dict[str, str] = {}
    for place, _, names in os.walk(folder, followlinks=True):
        prefix = os.path.relpath(place, folder)
        for name in sorted(names):
            if is_image(name):
                stem = os.path.splitext(name)[0]
                there[stem if prefix == "." else f"{prefix}{os.sep}{stem}"] = os.path.join(place, name)
    return [there.get(stem) or there.get(os.path.splitext(stem)[0]) for stem in stems]


def annotation_folder(description: DataDescription, folder: str) -> str:
    """The folder of the annotations of the images in a folder.

    As the description says; else `Annotations` for the images' folder, or where the images are.
    """
    for entry, place in description.annotations.items():
        if f"{folder}{os.sep}".startswith(f"{entry}{os.sep}"):
            return f"{place}{folder.removeprefix(str(entry))}"
    parts = folder.split(os.sep)
    for position in range(len(parts) - 1, -1, -1):
        if parts[position] in FOLDERS:
            for name in ("Annotations", "annotations"):
                if os.path.isdir(os.sep.join([*parts[:position], name])):
                    return os.sep.join([*parts[:position], name, *parts[position + 1 :]])
            break
    return folder
