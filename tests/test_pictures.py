"""Image files of all kinds: each is read right or refused with a reason, by whoever reads it."""

import importlib.util
import io
import tracemalloc
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml
from pictures import array, blocks, oriented, png, saved, tiff, tiff_of_pages
from PIL import Image, ImageCms, ImageOps, features
from scenes import MINUTE, TINY, write_dataset

from detector import load
from detector.cli import main
from detector.data.dataset import ValidationSet
from detector.data.description import load_description
from detector.data.header import MOST_BYTES, read_header
from detector.data.image import DamagedImageError, decode, letterbox, read_image
from detector.data.reading import build_index
from detector.data.writing import write_dataset as write_converted
from detector.errors import DataError
from detector.files import images_among
from detector.inference.sources import find_sources
from detector.model.checkpoint import with_channels
from detector.model.network import build_network, new_network
from detector.model.network import load_description as load_model

RGB = blocks()
GREY = RGB[..., 0]
PICTURE = Image.fromarray(RGB)
ALPHA = Image.fromarray(np.dstack((RGB, blocks(channels=1, seed=1))))  # colours below full transparency, too
PALETTE = PICTURE.quantize(16)


def through_lab() -> Image.Image:
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    return ImageCms.profileToProfile(PICTURE, *profiles, outputMode="LAB")


def pages(*images: Image.Image) -> dict[str, object]:
    return {"save_all": True, "append_images": [image.copy() for image in images]}


OTHER = Image.fromarray(blocks(seed=9))
FILES = {  # name: content, and how far from Pillow's pixels ours may be
    "colours.jpg": (saved(PICTURE, "JPEG"), 0),
    "progressive.jpg": (saved(PICTURE, "JPEG", progressive=True), 0),
    "grey.jpg": (saved(PICTURE.convert("L"), "JPEG"), 0),
    "cmyk.jpg": (saved(PICTURE.convert("CMYK"), "JPEG"), 2),
    "two.mpo": (saved(PICTURE, "MPO", **pages(OTHER)), 0),
    "colours.png": (saved(PICTURE, "PNG"), 0),
    "palette.png": (saved(PALETTE, "PNG"), 0),
    "transparent palette.png": (saved(PALETTE, "PNG", transparency=bytes(range(0, 256, 16))), 0),
    "alpha.png": (saved(ALPHA, "PNG"), 0),
    "grey alpha.png": (saved(ALPHA.convert("LA"), "PNG"), 0),
    "one bit.png": (saved(PICTURE.convert("1"), "PNG"), 0),
    "animated.png": (saved(PICTURE, "PNG", **pages(OTHER, PICTURE)), 0),
    "alpha.webp": (saved(ALPHA, "WEBP", lossless=True, exact=True), 0),
    "lossy.webp": (saved(PICTURE, "WEBP"), 0),
    "animated.webp": (saved(PICTURE, "WEBP", lossless=True, **pages(OTHER)), 0),
    "still.gif": (saved(PALETTE, "GIF"), 0),
    "animated.gif": (saved(PALETTE, "GIF", **pages(OTHER.quantize(16))), 0),
    "transparent.gif": (saved(PALETTE, "GIF", transparency=3), 0),
    "palette.bmp": (saved(PALETTE, "BMP"), 0),
    "colours.BMP": (saved(PICTURE, "BMP"), 0),
    "one bit.bmp": (saved(PICTURE.convert("1"), "BMP"), 0),
    "colours.ppm": (saved(PICTURE, "PPM"), 0),
    "few greys.pgm": (b"P5\n40 30\n15\n" + bytes((GREY // 16).tobytes()), 0),
    "colours.tif": (saved(PICTURE, "TIFF"), 0),
    "lzw.tiff": (saved(PICTURE, "TIFF", compression="tiff_lzw"), 0),
    "jpeg.tif": (saved(PICTURE, "TIFF", compression="jpeg"), 2),
    "cmyk.tif": (saved(PICTURE.convert("CMYK"), "TIFF"), 0),
    "lab.tif": (saved(through_lab(), "TIFF"), 0),
    "alpha.tif": (saved(ALPHA, "TIFF"), 0),
    "pages.tif": (saved(PICTURE, "TIFF", **pages(OTHER, OTHER)), 0),
    "planes.tif": (tiff(RGB, photometric=2, planar=2), 0),
    "colours.jp2": (saved(PICTURE, "JPEG2000"), 0),
    "a png by another name.jpg": (saved(PICTURE, "PNG"), 0),
    "名前 with space ü.JPG": (saved(PICTURE, "JPEG"), 0),
    "colours.avif": (saved(PICTURE, "AVIF", quality=90) if features.check("avif") else b"", 0),
}
FILES = {name: file for name, file in FILES.items() if file[0]}


def by_pillow(content: bytes, channels: int) -> np.ndarray:
    """(H, W, channels) as Pillow alone reads it: without alpha, in the colours that are stored."""
    image = Image.open(io.BytesIO(content))
    if channels == 1 and image.mode == "RGB":
        image.draft("L", image.size)  # of a JPEG: the luma that is stored
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode == "LAB":
        profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(image, *profiles, outputMode="RGB")
    image.info.pop("transparency", None)
    return np.asarray(image.convert({1: "L", 3: "RGB"}[channels])).reshape(*image.size[::-1], channels)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", FILES)
def test_each_kind_of_file_is_read_as_pillow_reads_it(tmp_path, name, channels):
    content, tolerance = FILES[name]
    (tmp_path / name).write_bytes(content)
    image = read_image(tmp_path / name, channels)
    expected = by_pillow(content, channels).astype(int)
    assert image.dtype == np.uint8
    assert image.shape == (30, 40, channels)
    assert np.abs(image - expected).max() <= tolerance + (2 if channels == 1 else 0)  # by two roundings of the luma
    assert read_header(tmp_path / name, channels) == ((30, 40), "")
    assert images_among([name]) == [name]


@pytest.mark.parametrize("orientation", [0, *range(1, 9), 9])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "16 bits"])
def test_orientation_is_applied_once(form, orientation):
    if form == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    if form == "16 bits":
        deep = RGB.astype(np.uint16) * 257
        content = tiff(deep, photometric=2, orientation=orientation)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(saved(PICTURE, "PNG", exif=oriented(orientation)))))
        expected = np.asarray(upright)
    else:
        options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}.get(form, {})
        content = saved(PICTURE, form, exif=oriented(orientation), **options)
        expected = by_pillow(content, 3)
    image = decode(content, "a")
    assert image.shape == ((40, 30, 3) if orientation in (5, 6, 7, 8) else (30, 40, 3))
    assert np.array_equal(image, expected)
    assert read_header(io.BytesIO(content)) == (image.shape[:2], "")


def test_orientation_in_xmp_alone_counts_for_nothing():
    """Labelling tools and browsers pass it over."""
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    content = saved(PICTURE, "JPEG", xmp=xmp)
    assert b'tiff:Orientation="6"' in content
    assert decode(content, "a").shape == (30, 40, 3)


# --- 16 bits


@pytest.mark.parametrize(
    ("most", "white"), [(255, 255), (256, 1023), (694, 1023), (1024, 4095), (4095, 4095), (5000, 16383), (20000, 65535)]
)
@pytest.mark.parametrize("form", ["png", "tiff", "npy"])
def test_white_of_16_bits_is_that_of_the_smallest_camera_that_holds_them(form, most, white):
    values = np.random.default_rng(0).integers(0, most, (20, 30, 3)).astype(np.uint16)
    values[3, 4, 1] = most
    content = {"png": png(values, 2), "tiff": tiff(values, photometric=2), "npy": array(values)}[form]
    expected = np.rint(values * (255 / white)).astype(int)
    assert np.array_equal(decode(content, "a"), expected)
    grey = {"png": png(values[..., 1], 0), "tiff": tiff(values[..., 1:2]), "npy": array(values[..., 1])}[form]
    for channels in (1, 3):
        assert np.array_equal(decode(grey, "a", channels), np.repeat(expected[..., 1:2], channels, axis=2))


def test_alpha_of_16_bits_is_no_value_of_the_image():
    values = np.full((6, 8, 4), 700, dtype=np.uint16)
    values[..., 3] = 65535
    assert np.all(decode(png(values, 6), "a") == round(700 * 255 / 1023))
    assert np.all(decode(tiff(values, photometric=2), "a") == round(700 * 255 / 1023))
    assert np.all(decode(png(values[..., 2:], 4), "a", 1) == round(700 * 255 / 1023))


def test_a_range_says_what_becomes_black_and_white():
    values = np.array([[[0], [27_000], [30_000], [33_000], [65_535]]], dtype=np.uint16)
    for content in (png(values[..., 0], 0), tiff(values), array(values)):
        assert decode(content, "a", 1, None, (27_000, 33_000)).ravel().tolist() == [0, 0, 128, 255, 255]
    eight = array(values.astype(np.uint8))
    assert np.array_equal(decode(eight, "a", 1, None, (27_000, 33_000)), values.astype(np.uint8)), "8 bits stay"


@pytest.mark.parametrize("dtype", ["float32", "int16", "float64"])
def test_other_numbers_need_a_range(dtype):
    values = np.array([[[-40], [-20], [20], [60], [80]]], dtype=dtype)
    for content in (array(values), *([tiff(values)] if dtype != "float64" else [])):
        size, reason = read_header(io.BytesIO(content), 1)
        assert size is None
        assert reason.startswith(f"holds {dtype} numbers: `range: [low, high]` in data.yaml")
        with pytest.raises(DamagedImageError, match="range: "):
            decode(content, "a", 1)
        assert decode(content, "a", 1, None, (-20, 60)).ravel().tolist() == [0, 0, 128, 255, 255]


def test_what_is_no_number_becomes_black():
    values = np.array([[np.nan, np.inf, -np.inf, 1.0]], dtype=np.float32)
    assert decode(array(values), "a", 1, None, (0, 1)).ravel().tolist() == [0, 255, 0, 255]


# --- other channels

needs_tifffile = pytest.mark.skipif(not importlib.util.find_spec("tifffile"), reason="needs tifffile")
BANDS = {
    "4 of 16 bits": (tiff(blocks(channels=4).astype(np.uint16) * 257, photometric=2), 4),
    "4 together": (tiff(blocks(channels=4), photometric=2), 4),
    "5 pages": (tiff_of_pages([blocks(channels=5)[..., i : i + 1] for i in range(5)]), 5),
    "2 pages of 16 bits": (
        tiff_of_pages([blocks(channels=2).astype(np.uint16)[..., i : i + 1] * 257 for i in (0, 1)]),
        2,
    ),
    "7 in an array": (array(blocks(channels=7)), 7),
    "6 of 16 bits in an array": (array(blocks(channels=6).astype(">u2") * 257), 6),
    "colours and alpha": (saved(Image.fromarray(blocks(channels=4)), "PNG"), 4),
    "grey and alpha": (saved(Image.fromarray(blocks(channels=2), "LA"), "PNG"), 2),
    "alpha of 16 bits": (png(blocks(channels=4).astype(np.uint16) * 257, 6), 4),
    "grey and alpha of 16 bits": (png(blocks(channels=2).astype(np.uint16) * 257, 4), 2),
}
LIBRARY = {
    "5 together": (tiff(blocks(channels=5)), 5),
    "8 planes": (tiff(blocks(channels=8), planar=2), 8),
    "4 planes of 16 bits": (tiff(blocks(channels=4).astype(np.uint16) * 257, photometric=2, planar=2), 4),
    "2 together": (tiff(blocks(channels=2)), 2),
}


@pytest.mark.parametrize("name", [*BANDS, *(pytest.param(name, marks=needs_tifffile) for name in LIBRARY)])
def test_channels_are_those_of_the_file_in_their_order(tmp_path, name):
    content, channels = (BANDS | LIBRARY)[name]
    image = decode(content, "a", channels)
    assert np.array_equal(image, blocks(channels=channels))
    assert read_header(io.BytesIO(content), channels) == ((30, 40), "")
    size, reason = read_header(io.BytesIO(content), channels + 4)
    assert size is None
    assert reason == f"has {channels} channels and not {channels + 4}: `channels: {channels}` in data.yaml reads it"
    with pytest.raises(DamagedImageError, match=f"a: has {channels} channels and not {channels + 4}"):
        decode(content, "a", channels + 4)


@pytest.mark.parametrize("name", LIBRARY)
def test_a_tiff_that_needs_a_library_names_it(name, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == "tifffile" else find(module))
    content, channels = LIBRARY[name]
    size, reason = read_header(io.BytesIO(content), channels)
    assert size is None
    assert "`pip install tifffile imagecodecs` reads it" in reason


def test_smaller_copies_in_a_tiff_are_no_pages():
    small = blocks(15, 20, 1)
    bands = [blocks(channels=4)[..., i : i + 1] for i in range(4)]
    content = tiff_of_pages([*bands, small], subfiles=[0, 0, 0, 0, 1])
    assert np.array_equal(decode(content, "a", 4), blocks(channels=4))
    first = tiff_of_pages([small, bands[0]], subfiles=[1, 0])
    assert np.array_equal(decode(first, "a", 1), bands[0])


def test_bands_are_not_taken_for_colours():
    for content, channels in ((tiff(blocks(channels=5), photometric=2), 5), (array(blocks(channels=4)), 4)):
        with pytest.raises(DamagedImageError, match=f"has {channels} channels and not 3"):
            decode(content, "a")
    with pytest.raises(DamagedImageError, match=r"move the channels to the end by array\.transpose\(1, 2, 0\)"):
        decode(array(blocks(channels=5).transpose(2, 0, 1)), "a", 5)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7, 128])
@pytest.mark.parametrize("imgsz", [64, 32])
def test_images_of_any_channels_are_letterboxed_larger_and_smaller(channels, imgsz):
    image = blocks(channels=channels)
    out, placed = letterbox(image, imgsz)
    assert out.shape == (imgsz, imgsz, channels)
    for band in {0, channels - 1}:
        alone, _ = letterbox(np.ascontiguousarray(image[..., band : band + 1]), imgsz)
        assert np.array_equal(out[..., band : band + 1], alone)
        assert np.all(out[: placed.top, :, band] == 114)


# --- refused, and damaged


def heic() -> bytes:
    return b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)


def huge(form: str) -> bytes:
    """The beginning of a picture that says that it is enormous."""
    if form == "png":
        content = bytearray(png(np.zeros((2, 2), np.uint16), 0))
        content[16:24] = (60_000).to_bytes(4, "big") * 2
        content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
        return bytes(content)
    if form == "gif":
        return b"GIF89a\xff\xff\xff\xff\x00\x00\x00,\0\0\0\0\xff\xff\xff\xff\0\x02\x02L\x01\0;"
    if form == "npy":
        return array(np.zeros((2, 2), np.uint8)).replace(b"(2, 2), }", b"(60000, 60000), }")[:128] + bytes(4)
    content = bytearray(saved(PICTURE, "JPEG"))
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = b"\xff\x00" * 2
    return bytes(content)


REFUSED = {
    "empty": (b"", "the file is empty"),
    "text": (b"no picture", "it is no image, or damaged at its beginning"),
    "another format": (saved(PICTURE, "PCX"), "is PCX; save it as JPEG or PNG"),
    "array of words": (array(np.array([["a", "b"]])), "save (H, W) or (H, W, C) numbers"),
    "four dimensions": (array(np.zeros((1, 2, 3, 4), np.uint8)), "save (H, W) or (H, W, C) numbers"),
    "raw": (tiff(blocks(channels=1), photometric=32803), "holds the raw data of a camera"),
    "preview alone": (tiff(blocks(channels=1), subfile=1), "it has no page that is a whole picture"),
    **{
        form: (huge(form), f"more than the {MOST_BYTES // 3:,} pixels that are read; cut it into tiles")
        for form in ("png", "gif", "jpg", "npy")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_the_reason_and_before_it_is_decoded(tmp_path, name, monkeypatch):
    content, reason = REFUSED[name]
    (tmp_path / "a.jpg").write_bytes(content)
    for module, function in ((cv2, "imdecode"), (np, "load"), (Image.Image, "load")):
        monkeypatch.setattr(module, function, lambda *_, **__: pytest.fail("it was decoded"))
    read_header(tmp_path / "a.jpg")  # Pillow loads its readers with the first file
    tracemalloc.start()
    size, said = read_header(tmp_path / "a.jpg")
    assert size is None
    assert reason in said
    with pytest.raises(DamagedImageError) as error:
        read_image(tmp_path / "a.jpg")
    assert reason in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "a.jpg"))
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_the_limit_is_of_pixels_and_channels():
    """12,000 x 12,000 is read as colours, and not with ten channels."""
    content = array(np.zeros((2, 2, 3), np.uint8)).replace(b"(2, 2, 3), }", b"(12000, 12000, 3), }")
    assert read_header(io.BytesIO(content)) == ((12_000, 12_000), "")
    content = array(np.zeros((2, 2, 10), np.uint8)).replace(b"(2, 2, 10), }", b"(12000, 12000, 10), }")
    assert "has more than the 53,687,091 pixels" in read_header(io.BytesIO(content), 10)[1]


@pytest.mark.skipif(bool(importlib.util.find_spec("pillow_heif")), reason="it is read here")
def test_heif_names_what_reads_it(tmp_path):
    (tmp_path / "a.heic").write_bytes(heic())
    assert (
        read_header(tmp_path / "a.heic")[1] == "is HEIF: `pip install pillow-heif` reads it, or save it as JPEG or PNG"
    )
    with pytest.raises(DamagedImageError, match=r"a\.heic: is HEIF: `pip install pillow-heif` reads it"):
        read_image(tmp_path / "a.heic")


def test_heif_is_read_and_upright():
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()
    content = saved(PICTURE, "HEIF", quality=95, chroma=444, exif=oriented(6).tobytes())
    turned = np.rot90(RGB, -1).astype(int)
    assert np.abs(decode(content, "a") - turned).mean() < 5
    assert read_header(io.BytesIO(content)) == ((40, 30), "")


CUT = {name: FILES[name][0] for name in FILES if name not in ("two.mpo", "pages.tif", "animated.gif")}


@pytest.mark.parametrize("name", CUT)
def test_a_picture_whose_end_is_missing_is_damaged_in_every_format(name):
    content = CUT[name]
    for missing in (1, 2, 5, 30, len(content) // 2, len(content) - 12):
        with pytest.raises(DamagedImageError, match=r"^a: cannot be decoded \(.+\); replace it or take it out"):
            decode(content[: len(content) - missing], "a")
    assert np.array_equal(decode(content + b"appended", "a"), decode(content, "a"))


def test_what_follows_the_first_picture_is_not_looked_at():
    for name in ("two.mpo", "pages.tif", "animated.gif"):
        content = FILES[name][0]
        if name == "pages.tif":
            content = tiff_of_pages([RGB, blocks(seed=9)], photometric=2)
        expected = decode(content, "a")
        assert np.array_equal(decode(content[: len(content) - len(content) // 4], "a"), expected), name


@pytest.mark.parametrize("name", FILES)
def test_noise_in_a_file_is_damage_or_pixels_and_nothing_else(name):
    """Whatever its bytes: no other error, and no other size than the header's."""
    content, random = FILES[name][0], np.random.default_rng(3)
    for _ in range(30):
        noisy = bytearray(content)
        for place in random.integers(len(content), size=5).tolist():
            noisy[place] = int(random.integers(256))
        size, _ = read_header(io.BytesIO(bytes(noisy)))
        try:
            image = decode(bytes(noisy), "a")
        except DamagedImageError:
            continue
        assert image.shape[:2] == size


# --- names


def test_all_endings_count_in_any_case_and_an_array_beside_an_image_does_not(tmp_path):
    names = ["a.jpg", "b.JPEG", "c.jfif", "d.Png", "e.AVIF", "f.heic", "g.GIF", "h.mpo", "i.tiff", "j.jp2", "k.npy"]
    others = ["a.npy", ".hidden.jpg", "notes.txt", "a.jpg.txt"]  # the first: a cache of another trainer
    assert images_among([*names, *others]) == names
    for name in (*names, *others):
        (tmp_path / name).touch()
    assert sorted(path.name for path in find_sources(tmp_path)) == sorted(names)


# --- the description


@pytest.mark.parametrize("channels", [0, -1, "grey", True, 1.5, 129])
def test_channels_that_are_none_are_named(tmp_path, channels):
    (tmp_path / "data.yaml").write_text(
        yaml.safe_dump({"train": "a", "val": "a", "names": ["a"], "channels": channels})
    )
    with pytest.raises(DataError, match=r"data\.yaml: channels is .+, expected 1 \(grey\), 3 \(RGB\)"):
        load_description(tmp_path / "data.yaml")


@pytest.mark.parametrize("limits", [[1], [5, 5], [9, 1], "0-255", [0, float("inf")], [True, 5], {"low": 1}])
def test_a_range_that_is_none_is_named(tmp_path, limits):
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"train": "a", "val": "a", "names": ["a"], "range": limits}))
    with pytest.raises(DataError, match=r"data\.yaml: range is .+, expected \[low, high\]"):
        load_description(tmp_path / "data.yaml")


def test_a_converted_data_set_keeps_channels_and_range(tmp_path):
    index = build_index(load_description(write_as(tmp_path / "a", 2, range=[0, 4095])), "val")
    write_converted({"train": index, "val": index}, tmp_path / "b", "coco")
    again = load_description(tmp_path / "b" / "data.yaml")
    assert (again.channels, again.value_range) == (2, (0, 4095))
    assert np.array_equal(build_index(again, "val").image(0), index.image(0))


# --- networks


def test_a_network_of_one_channel_sees_grey_as_its_weights_did():
    """The sum of the three: of an image whose channels are equal it makes the same."""
    colours = build_network(TINY, 2, seed=3).eval()
    grey, told = with_channels(colours, 1, Path("a.pt"), 0)
    image = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, theirs = grey(image), colours(image.expand(1, 3, 64, 64))
    torch.testing.assert_close(ours.boxes, theirs.boxes, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    assert told == ["its first layer for 1 channels: the sum of them all of 3"]


def test_a_network_of_more_channels_has_the_weights_of_the_common_ones():
    colours = build_network(TINY, 2, seed=3)
    more, _ = with_channels(colours, 5, Path("a.pt"), 7)
    fresh = new_network({**load_model(TINY), "nc": 2, "channels": 5}, 7)
    first = more.model[0].conv.weight
    assert torch.equal(first[:, :3], colours.model[0].conv.weight)
    assert torch.equal(first[:, 3:], fresh.model[0].conv.weight[:, 3:])
    back, _ = with_channels(more, 3, Path("a.pt"), 0)
    assert all(torch.equal(value, colours.state_dict()[key]) for key, value in back.state_dict().items())
    assert back.description == colours.description


def test_a_first_layer_of_shifted_copies_takes_each(tmp_path):
    model = yaml.safe_load(TINY.read_text())
    row = model["backbone"][0]
    model["backbone"][0] = [row[0], row[1], "Focus", [row[3][0], 3]]
    (tmp_path / "focus.yaml").write_text(yaml.safe_dump(model))
    colours = build_network(tmp_path / "focus.yaml", 2).eval()
    grey, _ = with_channels(colours, 1, Path("a.pt"), 0)
    image = torch.rand(1, 1, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(grey(image).boxes, colours(image.expand(1, 3, 64, 64)).boxes, atol=1e-4, rtol=1e-4)


# --- runs


def write_as(folder: Path, channels: int, **more) -> Path:
    """The scenes of `write_dataset` as images of so many channels; returns the YAML."""
    path = write_dataset(folder, train=6, val=3)
    for file in sorted((folder / "images").rglob("*.png")):
        grey = cv2.imread(str(file), cv2.IMREAD_GRAYSCALE).astype(np.uint16) * 16
        bands = np.dstack([grey // (band + 1) for band in range(channels)])
        file.unlink()
        if int(file.stem) % 2:
            file.with_suffix(".npy").write_bytes(array(bands))
        else:
            file.with_suffix(".tif").write_bytes(tiff_of_pages([bands[..., i : i + 1] for i in range(channels)]))
    content = {**yaml.safe_load(path.read_text()), "channels": channels, **more}
    path.write_text(yaml.safe_dump(content))
    return path


COMMON = ["imgsz=64", "batch=2", "nbs=4", "workers=0", "device=cpu", "epochs=1", "close_mosaic=0"]


def run(*words: str) -> int:
    return main([words[0], *map(str, words[1:])])


@pytest.mark.slow
@pytest.mark.parametrize("channels", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2)), 5])
def test_images_of_other_channels_are_trained_validated_and_predicted_alike(tmp_path, channels, capsys):
    data = write_as(tmp_path / "data", channels, range=[0, 4095])
    train = ["train", f"data={data}", f"project={tmp_path}", *COMMON]
    assert run(*train, f"model={MINUTE}", "name=run") == 0
    assert f"images of {channels} channels" in capsys.readouterr().out
    weights = tmp_path / "run" / "weights" / "best.pt"
    assert torch.load(weights, weights_only=True)["description"]["channels"] == channels
    assert run("info", weights) == 0
    assert f"{channels} channels, values 0 to 4095" in capsys.readouterr().out
    assert run("val", weights, f"project={tmp_path}", "workers=0", "device=cpu") == 0
    assert run("predict", weights, data.parent / "images" / "val", f"project={tmp_path}", "device=cpu", "conf=0") == 0
    detector = load(weights, "cpu")
    found = detector.predict(data.parent / "images" / "val", conf=0.0)
    images = ValidationSet(build_index(load_description(data), "val"), 64)
    for i, result in enumerate(found):
        assert np.array_equal(result.image, images.index.image(i))
        assert result.image.shape == (64, 64, channels)
        assert np.array_equal(result.image[..., 0], images[i][0][..., 0])
    (tmp_path / "run").rename(tmp_path / "other")
    assert run(*train, f"weights={tmp_path / 'other'}", "name=run", "epochs=2") == 0


@pytest.mark.slow
def test_weights_of_colours_start_a_run_on_grey_and_the_other_way_round_is_said(tmp_path, capsys):
    colours, grey = write_dataset(tmp_path / "colours", train=6, val=3), write_as(tmp_path / "grey", 1)
    assert run("train", f"data={colours}", f"model={MINUTE}", f"project={tmp_path}", "name=a", *COMMON) == 0
    assert run("train", f"data={grey}", f"weights={tmp_path / 'a'}", f"project={tmp_path}", "name=b", *COMMON) == 0
    assert "its first layer for 1 channels: the sum of them all of 3" in capsys.readouterr().out
    assert run("val", tmp_path / "b", f"data={colours}", "workers=0", "device=cpu") == 2
    assert "has `channels: 3`, and" in capsys.readouterr().err
    Image.fromarray(RGB).save(tmp_path / "rgb.png")  # an array becomes what its file does
    array, file = load(tmp_path / "b", "cpu").predict([RGB, tmp_path / "rgb.png"])
    assert array.image.shape == (*RGB.shape[:2], 1)
    assert np.abs(array.image.astype(int) - file.image).max() <= 1
    text = grey.read_text()
    grey.write_text(text.replace("channels: 1", "channels: 1\nrange: [0, 4095]"))
    assert run("train", f"resume={tmp_path / 'b'}", "epochs=2") == 2
    assert "range (0.0, 4095.0), and the run was trained with 1 and None" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_of_all_kinds_of_files_is_trained_on_and_the_others_are_named(tmp_path, capsys):
    data = write_dataset(tmp_path / "data", train=4, val=2)
    odd = {name: content for name, (content, _) in FILES.items()} | {
        f"{name}.jpg": content for name, (content, _) in REFUSED.items()
    }
    odd["cut short.png"] = FILES["colours.png"][0][:-40]
    odd["cut short.jpg"] = FILES["colours.jpg"][0][:-40]
    for split in ("train", "val"):
        for name, content in odd.items():
            (data.parent / "images" / split / name).write_bytes(content)
            label = data.parent / "labels" / split / Path(name).with_suffix(".txt").name
            label.write_text("0 .5 .5 .5 .5\n")
    assert run("train", f"data={data}", f"model={MINUTE}", f"project={tmp_path}", "name=run", *COMMON, "workers=2") == 0
    out = capsys.readouterr().out
    assert f"{len(REFUSED)} unreadable images were left out" in out
    saved_state = torch.load(tmp_path / "run" / "weights" / "last.pt", weights_only=True)
    assert saved_state["images"] == 4 + len(odd) - len(REFUSED)
    assert len(saved_state["bad_images"]["train"]) == 2
    for name in ("cut short.png", "cut short.jpg"):
        assert f"{name}: cannot be decoded" in out
    assert run("predict", tmp_path / "run", data.parent / "images" / "val", f"project={tmp_path}", "device=cpu") == 0
    printed = capsys.readouterr()
    assert f"in {2 + len(FILES) + 2} images" in printed.out  # pages.tif has three pages
    assert printed.err.count("warning: left out:") == len(REFUSED) + 2
