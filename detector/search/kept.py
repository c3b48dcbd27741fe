"""What trials of a process have in common is read once: the indices of the images, and resized images."""

from typing import Any

from detector.config.settings import Settings
from detector.data.cache import ImageCache
from detector.data.dataset import TrainingSet
from detector.data.index import Index
from detector.run.build import Images, indices, training_set
from detector.run.run import Say

# What the indices follow from, beside whether boxes are turned; tests hold it to what reading them looks at.
INDEXED = (
    "data", "names", "classes", "single_cls", "bad_boxes", "max_missing_labels", "cache_dir", "fraction", "seed",
)  # fmt: skip
TURNING = ("copy_paste", "degrees", "shear", "perspective")
CACHED = ("imgsz", "cache", "cache_gb", "cache_dir", "workers")
MOST = 4  # pairs of indices: with fraction varied each trial has another


class KeptImages(Images):
    """Indices by the settings that they follow from, and the cache of the trial before, if it is the same one."""

    def __init__(self) -> None:
        self._indices: dict[Any, tuple[Index, Index]] = {}
        self._key: Any = None
        self._cache: ImageCache | None = None

    def indices(self, settings: Settings, say: Say) -> tuple[Index, Index]:
        key = _key_of(settings)
        if key not in self._indices:
            if len(self._indices) == MOST:
                self._indices.pop(next(iter(self._indices)))
            self._indices[key] = indices(settings, say)
        return self._indices[key]

    def training_set(self, index: Index, settings: Settings, colours_later: bool) -> TrainingSet:
        key = _key_of(settings), _values(settings, CACHED)
        if key != self._key:
            self._cache = None  # before the new one asks how much memory is free
        made = training_set(index, settings, colours_later, self._cache)
        self._key, self._cache = key, made.cache
        return made


def _key_of(settings: Settings) -> tuple[str, bool]:
    return _values(settings, INDEXED), any(getattr(settings, name) for name in TURNING)


def _values(settings: Settings, names: tuple[str, ...]) -> str:
    return repr([getattr(settings, name) for name in names])
