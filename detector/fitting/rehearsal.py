"""A run in miniature: all that takes memory in a run, once, and how fast its steps are.

What comes once an epoch or once a run (checkpoints, the evaluation, its metrics and its pictures) stands between steps:
the libraries that it loads, and what is left of it, are there at a step's peak. And steps stand before the last
checkpoint, which with all that they leave behind is the peak of many a small run.
"""

import copy
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from detector import checkpoint_file, distributed
from detector.config.settings import Settings
from detector.data.batch import Batch, Sample, collate
from detector.data.dataset import ValidationSet
from detector.data.image import Letterbox
from detector.data.index import Index
from detector.data.loader import worker_count
from detector.drawing import save_image
from detector.evaluation.coco import GroundTruth
from detector.evaluation.evaluate import Evaluation, detect, ground_truth_of, judge
from detector.inference.infer import NetworkRuntime
from detector.model.network import Network
from detector.model.selection import Detections
from detector.precision import choose_precision
from detector.reporting.plots import plot_history
from detector.reporting.run_page.page import Measured, page
from detector.reporting.run_page.record import Record
from detector.reporting.samples import training_batch_image
from detector.reporting.summary import draw_evaluation
from detector.run.build import chosen_optimizer, class_parameters, gains_of, prepared_network, step_rules, training_set
from detector.run.run import silent
from detector.run.stages import mesh_of, pipeline_of
from detector.step import compiling
from detector.step.ema import Ema
from detector.step.gradients import GradientSum
from detector.step.optim import build_optimizer
from detector.step.plan import Cut, Window, input_sides
from detector.step.schedule import GROUPS, Rates
from detector.step.state import TrainState
from detector.step.statistics import set_modes
from detector.step.step import train_window

AT_REST = dict.fromkeys(GROUPS, 0.0)  # all the work, and weights that stay
MICRO_BATCHES = 4  # of a trial's window: gradients are there while all but the first run
SECONDS, LEAST, MOST = 1.0, 2, 5  # steps are timed for a second, but two at least and five at most
TRIES = 20  # fp16 finds its loss scale, and only then there are averages and momentum
LOADED = 8  # images that are augmented where a run does so in its own process, and that are drawn
JUDGED = 64  # validation images whose metrics are really computed
FOUND = 300  # detections in each of them: as many as an evaluation keeps
JUDGING = 1400  # bytes that the metrics take for a detection: 1,300 of 60,000, measured


@dataclass(frozen=True)
class Job:
    """What a trial needs to know of a run."""

    settings: Settings  # with the batch, checkpoint and offload to try, and one device
    accumulate: int
    training: Index
    validation: Index
    sample: Sample  # the image of which all micro-batches consist
    kept: int = 0  # bytes of images that the run's own process keeps, which a trial does not load

    @cached_property
    def truth(self) -> GroundTruth:
        """The true boxes of all validation images, kept once they are made, as a run keeps them."""
        return ground_truth_of(self.validation)

    @property
    def judged(self) -> Index:
        """The first validation images."""
        return self.validation.take(np.arange(min(len(self.validation), JUDGED)))

    def batch(self) -> Batch:
        """A micro-batch; all its images are equally crowded."""
        return collate([self.sample] * self.settings.batch)

    def with_cut(self, settings: Settings, accumulate: int) -> "Job":
        return replace(self, settings=settings, accumulate=accumulate)


def rehearse(job: Job, device: torch.device, depth: int = 1) -> float:
    """Do what a run of two epochs does, in its order; images a second of its steps.

    In a group each process does what a stage of the run does, with `depth` micro-batches under way at once; all take as
    many steps.
    """
    state, step = prepared(job, device, depth)
    held = [job.batch() for _ in range(job.accumulate)]  # a run holds the images of its whole window
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_copy = save(state, folder)  # which a run holds over the next steps, while it is written
        load_and_draw(job, held[0], folder)
        for _ in range(TRIES):
            if step():
                break
        seconds = [timed(step)]
        evaluation = validate(job, state, state.ema.network, device)
        del held_copy
        held_copy = save(state, folder)
        if evaluation and job.settings.plots:
            terms = state.network.head.terms
            row = {"epoch": 1.0, **dict.fromkeys(terms, 1.0), "lr": 1.0, **evaluation.row()}
            plot_history([row, {**row, "epoch": 2.0}], folder / "curves.png", terms)
        while len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < SECONDS):
            seconds.append(timed(step))
        del held_copy
        save(state, folder)
        measure_best(job, state, folder, device)
        if evaluation and job.settings.plots:
            draw(job, evaluation, folder)
    return job.settings.batch * micro_batches(job) / min(seconds)  # the fastest: what the machine disturbed least


def timed(step: Callable[[], bool]) -> float:
    """Seconds of a step, whose report is on the host: the device is done."""
    start = time.perf_counter()
    step()
    return distributed.from_main(time.perf_counter() - start)


def micro_batches(job: Job) -> int:
    """Micro-batches of a trial's window."""
    return min(max(job.accumulate, 2), MICRO_BATCHES)


def prepared(job: Job, device: torch.device, depth: int) -> tuple[TrainState, Callable[[], bool]]:
    """The state of a run, and a function that takes a step and says whether it was applied."""
    settings, names = job.settings, job.training.names
    network = prepared_network(settings, names, device, None, images=job.training)
    set_modes(network, settings.norm == "frozen")
    choice = chosen_optimizer(settings, Cut(settings.batch, job.accumulate), len(job.training), len(names))
    optimizer = build_optimizer(network, choice, settings.weight_decay, class_parameters(network))
    state = TrainState(network, Ema(network), optimizer, choose_precision(settings.amp, device))
    mesh = mesh_of(settings)
    pipeline = pipeline_of(settings, network, mesh, silent)
    rules = step_rules(settings, network, job.training, silent, pipeline)
    if pipeline:
        pipeline.depth = depth
        pipeline.connect()
    rates = Rates(AT_REST, 0.9, gains_of(settings, network)[0])
    gradients, batch = GradientSum(network), job.batch() if mesh.first else job.batch().without_images()
    side = input_sides(settings.imgsz, settings.multi_scale, network.stride)[1]  # the largest that a step meets
    window = Window(0, 0, ((tuple(range(settings.batch)),) * micro_batches(job),))
    compiling.prepare(state, rules, settings.batch, settings.imgsz, job.training.channels)

    def step() -> bool:
        on_device = (batch.to(device).resized(side) for _ in range(window.accumulate))  # one at a time, as in a run
        return train_window(state, gradients, rules, window, on_device, rates).applied

    return state, step


def load_and_draw(job: Job, batch: Batch, folder: Path) -> None:
    """Augment images where a run does so itself, and draw a micro-batch."""
    if worker_count(job.settings.workers) == 0:
        training = training_set(job.training, job.settings.model_copy(update={"cache": "off"}))
        for i in range(min(LOADED, len(training))):
            training[0, i]
    if job.settings.plots:
        names = job.training.names
        picture = training_batch_image(batch.images, batch.boxes_xyxy, batch.classes, batch.image_index, names)
        save_image(folder / "training.jpg", picture)


def save(state: TrainState, folder: Path) -> dict[str, Any]:
    """Write a checkpoint, and then the best one. Returns the copy of the state that they were written from."""
    contents = checkpoint_file.copied(state.state_dict())
    checkpoint_file.not_finite(contents)
    checkpoint_file.write(folder / "last.pt", contents)
    checkpoint_file.write(folder / "best.pt", {"ema": contents["ema"]})
    return contents


def measure_best(job: Job, state: TrainState, folder: Path, device: torch.device) -> None:
    """Detect with a second network, as a run does at its end."""
    network = copy.deepcopy(state.ema.network)
    network.load_state_dict(checkpoint_file.read(folder / "best.pt")["ema"])
    find(job, state, network, device)


def draw(job: Job, evaluation: Evaluation, folder: Path) -> None:
    """Draw an evaluation, with the first validation images, those that are damaged left out, and make a run's page."""
    first = job.validation.take(np.arange(min(len(job.validation), LOADED)))
    images = ValidationSet(first, job.settings.imgsz, bad_images=job.settings.bad_images)
    damaged = tuple(i for i in range(len(images)) if images[i] is None)
    draw_evaluation(replace(evaluation, missing=damaged), images, first.names, folder)
    judged = ValidationSet(job.judged, job.settings.imgsz, bad_images=job.settings.bad_images)
    page(Record(folder, {}), Measured(evaluation, judged, first.names))


def validate(job: Job, state: TrainState, network: Network, device: torch.device) -> Evaluation | None:
    """What a network's evaluation takes; None where the host's memory is not asked for.

    As many are found in each image as an evaluation keeps. Of a large set the first images are judged, and what the
    metrics of the others would take is taken beside it: to judge thousands takes long.
    """
    find(job, state, network, device)
    if device.type != "cpu":
        return None
    job.truth.coco  # noqa: B018  made once and kept, too
    index = job.judged
    others = np.ones((len(job.validation) - len(index)) * FOUND * JUDGING, dtype=np.uint8)  # zeros take nothing yet
    found = [crowd(*index.size(i), len(index.names)) for i in range(len(index))]
    evaluation = judge(ground_truth_of(index), found, index.names)
    del others
    return evaluation


def find(job: Job, state: TrainState, network: Network, device: torch.device) -> None:
    """Detect in one batch of the largest validation shape."""
    shapes = ValidationSet(job.validation, job.settings.imgsz, network.stride)
    height, width = max((shapes.shape(i) for i in range(len(shapes))), key=lambda shape: shape[0] * shape[1])
    one = torch.from_numpy(job.sample.image)[:height, :width]
    batch = job.settings.val_batch or job.settings.batch
    letterboxes = [Letterbox(height, width, 1.0, 1.0, 0, 0)] * batch
    images = one.expand(batch, *one.shape).contiguous()
    batches = [(images, letterboxes, list(range(batch)))]
    list(detect(NetworkRuntime(network, device, state.precision.autocast), batches))


def crowd(height: int, width: int, classes: int) -> Detections:
    """FOUND detections, side by side in an image of that many pixels, and of all classes in turn."""
    columns = math.ceil(math.sqrt(FOUND))
    place = torch.arange(FOUND)
    corner = torch.stack((place % columns, place // columns), dim=1)
    side = torch.tensor((width, height)) / columns
    boxes_xyxy = torch.cat((corner * side, (corner + 1) * side), dim=1)
    return Detections(boxes_xyxy, torch.linspace(0.9, 0.01, FOUND), place % classes)
