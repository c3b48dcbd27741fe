"""Fonts for text in pictures: one that comes with matplotlib, and for the letters that it lacks what the system has."""

import unicodedata
from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

# Of the names of files of fonts with many letters those that are tried first, small letters without spaces.
WIDE = (
    "notosanscjk", "sourcehansans", "notosans", "wqy", "droidsansfallback", "ipag", "vlgothic", "takao", "nanum",
    "msyh", "simsun", "msgothic", "meiryo", "malgun", "pingfang", "hiragino", "applesdgothic", "arialunicode",
    "unifont",
)  # fmt: skip


def font(size: int, text: str = "") -> ImageFont.FreeTypeFont:
    """A font of that size in which a text can be read, if there is one; else DejaVu Sans."""
    return _loaded(font_file(text) or str(_own()), size)


@lru_cache(maxsize=64)
def _loaded(file: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size)


def drawable(text: str) -> bool:
    """Whether a font is there that has all letters of a text."""
    return font_file(text) is not None


@lru_cache(maxsize=4096)
def font_file(text: str) -> str | None:
    """The file of a font that has all letters of a text: DejaVu Sans, or one of the system's; None where none is there.

    DejaVu Sans comes with matplotlib and knows far more letters than OpenCV's line fonts, but no Chinese, Japanese or
    Korean. The system's fonts are looked for when one is needed.
    """
    if text.isascii() and text.isprintable():  # most are
        return str(_own())
    needed = {ord(letter) for letter in text if _is_drawn(letter)}
    if needed <= letters_of(str(_own())):
        return str(_own())
    return next((file for file in _of_system() if needed <= letters_of(file)), None)


@lru_cache(maxsize=1024)
def letters_of(file: str) -> frozenset[int]:
    """The code points that a font has; none of one that cannot be read or scaled."""
    from matplotlib.ft2font import FT2Font

    try:
        ImageFont.truetype(file, 20)
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError, ValueError):
        return frozenset()


def _is_drawn(letter: str) -> bool:
    """Not spaces, and not what only says how others are drawn, such as joiners and variation selectors."""
    return (
        not letter.isspace() and unicodedata.category(letter) not in ("Cf", "Cc") and not "\ufe00" <= letter <= "\ufe0f"
    )


@lru_cache(maxsize=1)
def _own() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


@lru_cache(maxsize=1)
def _of_system() -> tuple[str, ...]:
    """Files of the system's fonts, those first that have many letters."""
    from matplotlib.font_manager import findSystemFonts

    def rank(file: str) -> tuple[int, bool, str]:
        name = Path(file).stem.lower().replace(" ", "").replace("-", "").replace("_", "")
        place = next((number for number, known in enumerate(WIDE) if known in name), len(WIDE))
        return place, "regular" not in name, file

    return tuple(sorted(findSystemFonts(), key=rank))
