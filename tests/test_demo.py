"""The page to try a detector on: what it shows is what `predict` finds, and it is for this machine alone."""

import gc
import importlib.util
import re
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

import browser
import numpy as np
import pytest
from PIL import Image
from sighted import picture, sighted, write_video

from detector.cli import main
from detector.errors import ConfigError, DataError
from detector.reporting import demo_page
from detector.reporting.demo_page import Looks, page, theme

needs_gradio = pytest.mark.skipif(not importlib.util.find_spec("gradio"), reason="needs gradio")
needs_video = pytest.mark.skipif(not importlib.util.find_spec("av"), reason="needs av")


def test_an_image_shows_what_predict_finds():
    detector = sighted()
    shown, said, rows = Looks(detector).at_image(picture(3), 0.25, 0.7, 64.0)  # a slider's numbers are floats
    (result,) = detector.predict(picture(3), 0.25, 0.7, 64)
    assert np.array_equal(shown, result.plot())
    assert said == result.summary() == "1 wide"
    assert rows == [[row[name] for name in demo_page.COLUMNS] for row in result.to_dicts()]
    assert Looks(detector).at_image(picture(3), 1.0, 0.7, 64)[1:] == ("nothing", [])
    assert Looks(detector).at_image(None, 0.25, 0.7, 64) == (None, "", [])


@needs_video
def test_a_video_shows_each_frame_at_its_time(tmp_path):
    import av

    times = [0.0, 0.1, 0.5, 0.6]
    video = write_video(tmp_path / "a.mp4", [picture(n) for n in range(4)], times=times)
    told = []
    looks = Looks(sighted())
    shown, said = looks.at_video(str(video), 0.25, 0.7, 64, told.append)
    assert said == "4 objects in 4 frames"
    assert [result.frame for result in told] == [0, 1, 2, 3]
    with av.open(shown) as container:
        assert [frame.time for frame in container.decode(video=0)] == pytest.approx(times, abs=0.01)
    assert Looks(sighted()).at_video(None, 0.25, 0.7, 64, told.append) == (None, "")
    (tmp_path / "b.mp4").write_bytes(b"no video")
    with pytest.raises(DataError, match=r"b\.mp4"):
        Looks(sighted()).at_video(str(tmp_path / "b.mp4"), 0.25, 0.7, 64, told.append)


@needs_video
@pytest.mark.parametrize("at", [0, 2])
def test_a_video_that_fails_in_the_middle_leaves_nothing_and_one_that_was_shown_goes_with_the_page(
    tmp_path, monkeypatch, at
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    video = write_video(tmp_path / "a.mp4", [picture(n) for n in range(4)])
    looks = Looks(sighted())

    def told(result):
        if result.frame == at:
            raise DataError("enough")

    with pytest.raises(DataError, match="enough"):
        looks.at_video(str(video), 0.25, 0.7, 64, told)
    assert not [file for file in (tmp_path / "temporary").rglob("*") if file.is_file()]
    assert not [thread for thread in threading.enumerate() if thread.name == "reading ahead"]
    shown, _ = looks.at_video(str(video), 0.25, 0.7, 64, lambda _: None)
    assert [file for file in (tmp_path / "temporary").rglob("*") if file.is_file()] == [Path(shown)]
    del looks
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())


def test_without_gradio_the_way_to_get_it_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ConfigError, match=r"needs gradio; `pip install 'detector\[demo\]'`"):
        demo_page.gradio()
    assert main(["demo", str(tmp_path / "best.pt")]) == 2
    assert "pip install" in capsys.readouterr().err


def test_demo_without_a_checkpoint_says_what_to_name(capsys):
    assert main(["demo"]) == 2
    assert "detector demo runs/train" in capsys.readouterr().err


@needs_gradio
@pytest.mark.slow
def test_the_page_is_served_to_this_machine_and_names_no_other(monkeypatch):
    blocks = page(sighted(), "a.pt: wide, high", 0.25, 0.7, 64)
    _, address, _ = blocks.launch(
        server_name="127.0.0.1", share=False, quiet=True, prevent_thread_lock=True, theme=theme()
    )
    try:
        with urllib.request.urlopen(address) as answer:
            text = answer.read().decode()
        assert blocks.share_url is None
        assert not blocks.analytics_enabled
        assert not re.findall(r"""(?:src|href)=["']https?://(?!127\.0\.0\.1)[^"']*(?:\.js|\.css|font)""", text)
        for kind in ("at_image", "at_video"):
            assert kind in text
    finally:
        blocks.close()


@needs_gradio
@pytest.mark.slow
@pytest.mark.skipif(not browser.BINARY, reason="needs chromium")
def test_in_a_browser_an_image_shows_its_boxes_and_a_slider_hides_them(tmp_path):
    """The page as people use it; and it asks nobody else for anything."""
    file = tmp_path / "bar.png"
    Image.fromarray(picture(3)).save(file)
    said = "document.querySelectorAll('textarea')[0]?.value"
    blocks = page(sighted(), "a.pt: wide, high", 0.25, 0.7, 64)
    _, address, _ = blocks.launch(
        server_name="127.0.0.1", share=False, quiet=True, prevent_thread_lock=True, theme=theme()
    )
    try:
        with browser.Browser() as there:
            there.ask("Page.navigate", url=address)
            there.until("document.querySelector('input[type=file]') !== null")
            there.put_file("input[type=file]", file)
            assert there.until(said) == "1 wide"
            assert there.until("document.querySelector('img[src*=\"/file=\"]') !== null")
            row = there.until("document.querySelector('table tbody tr')?.innerText")
            assert "wide" in row
            there.value(
                "(() => { const one = document.querySelector('input[type=range]');"
                "one.value = 1; one.dispatchEvent(new Event('input', {bubbles: true}));"
                "one.dispatchEvent(new Event('pointerup', {bubbles: true})); })()"
            )
            assert there.until(f"{said} !== '1 wide' && {said}") == "nothing"
            asked = there.value("performance.getEntriesByType('resource').map(one => one.name)")
        assert all(one.startswith((address, "data:", "blob:")) for one in asked), asked
    finally:
        blocks.close()
