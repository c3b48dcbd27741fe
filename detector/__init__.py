"""A config-driven trainer for YOLO-style object detectors whose gradient accumulation is exact.

from detector import train, load

result = train("my.yaml", epochs=50)
for found in load(result.best).predict("images/"):
    print(found.path, found.boxes, found.scores, found.classes)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detector.commands.train import train
    from detector.errors import StopTraining
    from detector.inference.load import load

__version__ = "0.1.0"
__all__ = ["StopTraining", "load", "train"]


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for."""
    if name == "train":
        from detector.commands.train import train

        return train
    if name == "load":
        from detector.inference.load import load

        return load
    if name == "StopTraining":
        from detector.errors import StopTraining

        return StopTraining
    raise AttributeError(f"module 'detector' has no attribute '{name}'")
