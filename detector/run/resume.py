"""Going on with a run: its checkpoint, and which of its settings may be others from here on."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detector import checkpoint_file, distributed
from detector.config.settings import Settings, validated
from detector.errors import CheckpointError, ConfigError
from detector.run import saving
from detector.run.lock import run_id
from detector.run.run import Run
from detector.run.state import Best, fitness_of

RUN = "run"  # under which torchrun's store keeps the id and the folder of a launch's run

# What stays as it was, and why. Everything else can change; a changed setting is applied from the next step on.
FIXED = {
    "model": "the checkpoint's weights are of this model",
    "weights": "the run has weights of its own by now",
    "names": "the checkpoint's class layers are of these classes",
    "classes": "best.pt was judged on these",
    "single_cls": "the checkpoint's class layers are of one class, or of all",
    "fraction": "a run goes on with its own images",
    "sampling": "the images of an epoch are drawn by it",
    "freeze": "the optimizer's state is of the layers that train",
    "optimizer": "the state of one optimizer means nothing to another",
    "recipe": "what it sets stands in the run's settings; change one of them by its name",
    "seed": "the order of the images and their augmentation follow from it",
    "nbs": "the windows of the run are planned by it",
    "nbs_scope": "the windows of the run are planned by it",
    "accumulate_warmup": "the windows of the run are planned by it",
    "metric": "best.pt was chosen by it",
    "project": "a run goes on in its own folder; to have it elsewhere, move the folder and resume it there",
    "name": "a run goes on in its own folder; to have it elsewhere, move the folder and resume it there",
    "exist_ok": "a run goes on in its own folder",
}


@dataclass(frozen=True)
class Resume:
    """A checkpoint to go on from."""

    path: Path
    saved: dict[str, Any]  # what it holds
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # settings: what they were, what they are now
    notes: tuple[str, ...] = ()  # what else there is to say, for example of damage that was found

    @property
    def folder(self) -> Path:
        """The run's folder, which holds weights/."""
        return self.path.parent.parent

    def lines(self) -> list[str]:
        """What to tell the user: notes, and a table of what changes."""
        width = max(map(len, self.changes), default=0)
        table = [f"changed   {key:{width}}  {before} -> {now}" for key, (before, now) in sorted(self.changes.items())]
        return [*self.notes, *table]


def take_up(settings: Settings) -> tuple[Settings, Resume | None]:
    """The settings that a run goes on with, and its checkpoint; the settings as they are for a run that begins.

    Raises CheckpointError where there is nothing to go on from, ConfigError for a setting that cannot change.
    """
    if settings.resume is None:
        return restarted(settings)
    notes: list[str] = []
    path, saved = read(settings.resume, notes)
    changes = changed(settings, {**saved["settings"], "batch": saved["batch"]})  # which may be less by now
    values = {**saved["settings"], **{key: now for key, (_, now) in changes.items()}}
    return validated(Settings, values, {}, str(path)), Resume(path, saved, changes, tuple(notes))


def locate(path: Path) -> Path:
    """The checkpoint to resume from: a run's weights/NAME.pt itself, or its folder's weights/last.pt."""
    file = path / "weights" / "last.pt" if path.is_dir() else path
    if not file.exists() and not checkpoint_file.previous_of(file).exists():
        if (settings := path / "settings.yaml").exists():
            raise CheckpointError(
                f"{file}: no such checkpoint: the run ended before it wrote its first. "
                f"Start it again with: detector train {settings}"
            )
        raise CheckpointError(f"{file}: no such checkpoint; name a run's folder, or a .pt file in its weights/")
    if file.parent.name != "weights":  # the run goes on in the folder that holds weights/
        raise CheckpointError(f"{file}: not in a run's weights/; start a new run from it with weights={file}")
    return file


def read(run: Path, notes: list[str]) -> tuple[Path, dict[str, Any]]:
    """The path and the contents of the checkpoint of a run's folder or file."""
    path = locate(run)
    saved = checkpoint_file.read_latest(path, notes.append)
    if saved["format"] < checkpoint_file.FORMAT:
        raise CheckpointError(
            f"resume={path}: written by an earlier version of detector, which kept less of a run; "
            f"start a new run from its weights with weights={path}"
        )
    if "origin" in saved:
        raise ConfigError(
            f"resume={path}: a network that {saved['origin']['program']} trained, whose run cannot go on here; "
            f"start a new run from its weights with weights={path}"
        )
    if "optimizer" not in saved:
        last = path.parent / "last.pt"
        raise ConfigError(
            f"resume={path}: holds weights only; resume from {last}, or start a new run with weights={path}"
        )
    return path, saved


def changed(settings: Settings, before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (before, now)} of the settings that were written and are others; ConfigError where one of them is fixed."""
    now = settings.model_dump(mode="json")
    written = settings.model_fields_set - {"resume"}
    if settings.optimizer == "auto":  # which one it came to is known, and stays
        written -= {"optimizer"}
    written -= {key for key in ("batch", "nbs") if getattr(settings, key) == "auto"}  # numbers since the run began
    changes = {key: (before.get(key), now[key]) for key in written if now[key] != before.get(key)}
    for key in FIXED:
        if key in changes:
            raise ConfigError(
                f"resume={settings.resume}: {key}={now[key]}: cannot change in the middle of a run (it is "
                f"{before.get(key)}): {FIXED[key]}"
            )
    return changes


def restarted(settings: Settings) -> tuple[Settings, Resume | None]:
    """The same for a run that torchrun starts again (`--max-restarts`): it goes on in the folder that it had."""
    identity, _, name = (distributed.recall(RUN) or "").partition(" ")
    folder = Path(name)
    if not identity or run_id(folder) != identity:
        return settings, None
    try:
        path, saved = read(folder, notes := [f"restarted by torchrun: going on with {folder}"])
    except CheckpointError:  # killed before its first checkpoint
        return settings.model_copy(update={"project": folder.parent, "name": folder.name, "exist_ok": True}), None
    return validated(Settings, saved["settings"], {}, str(path)), Resume(path, saved, notes=tuple(notes))


def rewind_best(run: Run, resume: Resume) -> None:
    """Make best.pt that of the epochs this run has trained, where it is of another future, or behind.

    That future was left by resuming from an earlier checkpoint. Its best weights may be gone: then the best of those
    that are still there takes their place.
    """
    state, weights = run.state, run.folder / "weights"
    there = {epoch: path for epoch in range(1, state.epoch + 1) if (path := saving.epoch_file(run, epoch)).exists()}
    if not state.done and state.epoch:
        there[state.epoch] = resume.path
    if run.best.exists() and (epoch := checkpoint_file.read(run.best)["epoch"]) <= state.epoch:
        there[epoch] = run.best
    best = Best()
    for epoch in sorted(there) if state.best.epoch not in there else [state.best.epoch]:
        best.take(epoch, fitness_of(state.history[epoch - 1], run.settings.metric, run.terms))
    if best.epoch and (source := there[best.epoch]) != run.best:
        # What was resumed is in memory, and its file may be a damaged one that another stood in for.
        saving.save_best(run, resume.saved if source == resume.path else checkpoint_file.read(source))
        run.say(f"best      {run.best} is that of epoch {best.epoch} again")
    if best.epoch != state.best.epoch:
        run.say(f"warning: the weights of epoch {state.best.epoch}, the best until here, are not in {weights} any more")
        state.best = best
