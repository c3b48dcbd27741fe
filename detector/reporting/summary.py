"""The pictures of an evaluation: curves, confusion matrix, and detections beside the truth."""

from pathlib import Path

from detector.data.dataset import ValidationSet
from detector.drawing import save_image
from detector.evaluation.evaluate import Evaluation
from detector.reporting.plots import plot_confusion, plot_f1, plot_pr
from detector.reporting.samples import validation_image


def draw_evaluation(
    evaluation: Evaluation, images: ValidationSet, names: tuple[str, ...], folder: Path, most: int = 8
) -> None:
    """Draw an evaluation of `images` into `folder`; `most` images are shown, spread over the set."""
    plot_pr(evaluation.curves, names, folder / "precision_recall.png")
    plot_f1(evaluation.curves, names, folder / "f1.png")
    plot_confusion(evaluation.confusion, names, folder / "confusion.png")
    whole = [i for i in range(len(images)) if i not in set(evaluation.missing)]
    chosen = whole[:: max(len(whole) // most, 1)][:most]
    if not chosen:
        return
    index = images.index
    picture = validation_image(
        [index.image(i) for i in chosen],
        [index.boxes_xyxy(i) for i in chosen],
        [index.labels(i) for i in chosen],
        [evaluation.detections[i] for i in chosen],
        names,
        titles=[index.path(i).name for i in chosen],
    )
    save_image(folder / "validation.jpg", picture)
