"""`detector search`: hyper-parameters by trials that are training runs."""

import argparse
from pathlib import Path
from typing import Any

import yaml

from detector import distributed
from detector.config import words
from detector.config.settings import SearchSettings, Settings, load_settings, validated
from detector.device import choose_device, choose_devices
from detector.errors import ConfigError
from detector.files import replaced, writing
from detector.fitting.fit import choose_batch
from detector.folders import create_folder
from detector.run import loop
from detector.run.build import Images
from detector.run.loop import TrainResult, say_now
from detector.run.resume import Resume
from detector.run.run import Say, Watch
from detector.search import study as studies
from detector.search.kept import KeptImages
from detector.search.objectives import LATENCY, objectives_of
from detector.search.search import Search
from detector.search.search import run as run_search
from detector.search.space import read_space, space_of
from detector.search.study import FREE, Definition
from detector.search.telling import best_trials, conclude, values_of
from detector.search.trial import folder_name
from detector.search.turns import TURN, turn

TRIALS = 50
WRITTEN = "# Written by detector search"
EXAMPLE = "detector search my.yaml space.yaml trials=50"


def run(options: argparse.Namespace) -> int:
    if not options.arguments:
        raise ConfigError(f"name a config file, and a file of what is varied: {EXAMPLE}")
    said = words.of_search(options.arguments)
    given = load_settings(SearchSettings, said.file, said.overrides, said.values)
    for note in said.notes:
        print(note)
    studies.optuna()  # before the time that reading takes
    target = None if options.write is None else checked_target(Path(options.write))
    images = KeptImages()
    search = taken_up(given) if given.resume is not None else begun(given, images)
    run_search(search, trained, images)
    with turn(search.folder):
        conclude(search)
        if target is not None:
            write_best(search, target)
    return 0


def begun(given: SearchSettings, images: Images) -> Search:
    """A new search, or the one of that name, if it is the same: then this worker takes part in it.

    All is checked before there is a folder.
    """
    if given.space is None:
        raise ConfigError(f"name a file of what is varied: {EXAMPLE}")
    common = given.common()
    space = read_space(given.space, common)
    settings = validated(Settings, {**common, **space.fixed}, {}, "settings")
    check_alone(settings)
    objectives = objectives_of(given.objectives, settings)
    if len(objectives) == 1 and objectives[0].name != LATENCY:
        common["metric"] = objectives[0].name  # what is best in a trial is what is best of the trials
    definition = Definition.of(common, space, [one.name for one in objectives], given.pruner)
    images.indices(settings, say_now)
    folder = place(given)
    with turn(folder), studies.kept(folder):
        kind = studies.kept_in(folder) or given.storage
        if "storage" in given.model_fields_set and kind != given.storage:
            raise ConfigError(f"storage={given.storage}: the search in {folder} is kept as {kind}; leave it out")
        study = studies.open_study(folder, kind, [one.direction for one in objectives])
        studies.begin(study, definition, folder)
        machine = {key: value for key, value in common.items() if key in FREE}
        study.set_user_attr(studies.MACHINES, machine)
        write_down(folder, validated(Settings, {**common, **space.fixed}, {}, "settings"), given.space)
    return opened(folder, study, definition, machine, given.trials)


def place(given: SearchSettings) -> Path:
    """The folder of a search: a new one, or the one of its name, which another worker may be making just now."""
    if given.name is None:
        return create_folder(given.project, None, "search", exist_ok=False)
    folder = Path(given.project).resolve() / given.name
    if folder.exists() and studies.kept_in(folder) is None and any(one.name != TURN for one in folder.iterdir()):
        raise ConfigError(f"{folder}: exists, and holds no search; choose another name=")
    return create_folder(given.project, given.name, "search", exist_ok=True)


def taken_up(given: SearchSettings) -> Search:
    """The search in a folder, to be gone on with."""
    folder = given.resume
    if folder is True:
        raise ConfigError("resume=true: name the search's folder: detector search resume=runs/search")
    folder = Path(folder).resolve()
    kind = studies.kept_in(folder)
    if kind is None:
        raise ConfigError(f"resume={folder}: holds no search; name a folder that detector search made")
    mine = given.common()
    if fixed := sorted(given.model_fields_set - {"resume", "trials"} - FREE):
        raise ConfigError(
            f"resume={folder}: {fixed[0]}: cannot change in the middle of a search, whose trials are compared; "
            "begin a new one, or leave it out"
        )
    with turn(folder):
        study = studies.open_study(folder, kind)
        definition = studies.begun_with(study)
    if definition is None:
        raise ConfigError(f"resume={folder}: the search ended before it began; remove the folder, and begin it again")
    machine = {**study.user_attrs.get(studies.MACHINES, {}), **mine}
    return opened(folder, study, definition, machine, given.trials)


def opened(folder: Path, study: Any, definition: Definition, machine: dict[str, Any], trials: int | None) -> Search:
    """The search of a study that was begun."""
    space = space_of(definition.space, definition.common)
    settings = validated(Settings, {**definition.common, **machine, **space.fixed}, {}, str(folder))
    check_alone(settings)
    pruner = studies.prepare(study, definition.pruner, settings)
    total = trials or study.user_attrs.get(studies.TRIALS, TRIALS)
    with studies.kept(folder):
        study.set_user_attr(studies.TRIALS, total)
    objectives = objectives_of(definition.objectives, settings)
    return Search(folder, study, space, objectives, definition.common, machine, pruner, total, say_now)


def check_alone(settings: Settings) -> None:
    """Raise ConfigError where a trial would take several processes."""
    if distributed.launched() or len(choose_devices(settings.device)) > 1:
        raise ConfigError(
            f"device={settings.device}: a trial is trained on one device; start a worker for each, "
            "all with the same name=: detector search ... name=my_search device=0"
        )


def trained(settings: Settings, resume: Resume | None, say: Say, watch: Watch, images: Images) -> TrainResult:
    """Train a trial, once `batch: auto` is a number."""
    if settings.batch == "auto":
        settings = choose_batch(settings, choose_device(settings.device), 1, say)
    return loop.train(settings, resume, say, watch, images)


def write_down(folder: Path, settings: Settings, space: Path) -> None:
    """Keep what the search was begun with where people look for it. It is not read again."""
    for name, text in (("settings.yaml", settings.to_yaml()), ("space.yaml", space.read_text(encoding="utf-8-sig"))):
        with writing(folder / name), replaced(folder / name) as beside:
            beside.write_text(text, encoding="utf-8")


def checked_target(target: Path) -> Path:
    """A file that the best settings may be written to. ConfigError where it is somebody's."""
    if not target.parent.is_dir():
        raise ConfigError(f"--write {target}: {target.parent}: no such folder; name a file in a folder that is there")
    if target.suffix.lower() not in words.SUFFIXES:
        raise ConfigError(f"--write {target}: is a config file; name it {target.name}.yaml")
    if target.exists() and (target.is_dir() or not target.read_bytes().startswith(WRITTEN.encode())):
        raise ConfigError(f"--write {target}: exists, and no search wrote it; choose another name")
    return target


def write_best(search: Search, target: Path) -> None:
    """Write the settings of the best trial, as it was trained by, for a run in a folder of its own."""
    found = best_trials(search)
    if not found:
        print(f"--write   {target}: not written, as no trial came to its end")
        return
    folder = search.folder / folder_name(found[0].number)
    try:
        values = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: cannot be read: {error.strerror}; --write takes the trial's folder"
        ) from None
    defaults = {key: Settings.model_fields[key].get_default() for key in ("project", "name", "exist_ok", "plots")}
    values |= {**defaults, "project": str(defaults["project"]), "resume": None}
    values["plots"] = search.given.get("plots", defaults["plots"])
    settings = validated(Settings, values, {}, str(target))
    reached = ", ".join(values_of(search.objectives, found[0].values))
    with writing(target), replaced(target) as beside:
        beside.write_text(
            f"{WRITTEN}: {folder.name} of {search.folder.name}, {reached}\n{settings.to_yaml()}", encoding="utf-8"
        )
    print(f"written   {target}; train by it: detector train {target}")
