"""The docs name what the program has, no more and no less: settings, commands, files, headings, rooms."""

import re
import shlex
from pathlib import Path

import pytest
from test_imports import ROWS

from detector.config.settings import (
    SearchSettings,
    Settings,
    TrainSettings,
    TuneSettings,
    load_settings,
)
from detector.config.uses import (
    CheckSettings,
    CompareSettings,
    ConvertDataSettings,
    ConvertSettings,
    DemoSettings,
    ExportSettings,
    InfoSettings,
    PredictSettings,
    ReportSettings,
    RunsSettings,
    ValSettings,
)

ROOT = Path(__file__).parents[1]
OF_COMMAND = {
    "check": CheckSettings,
    "train": TrainSettings,
    "tune": TuneSettings,
    "runs": RunsSettings,
    "search": SearchSettings,
    "val": ValSettings,
    "compare": CompareSettings,
    "predict": PredictSettings,
    "demo": DemoSettings,
    "report": ReportSettings,
    "export": ExportSettings,
    "info": InfoSettings,
    "convert": ConvertSettings,
    "convert-data": ConvertDataSettings,
}
DESCRIPTION = ("path", "train", "val", "test", "names", "nc", "format", "channels", "range")  # of a data set
# The changelog is no part of them: it tells of what was, too.
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
FOLDERS = "configs|datasets|detector|docs|scripts|tests"


@pytest.mark.parametrize("settings", [*OF_COMMAND.values()], ids=lambda cls: cls.__name__)
def test_every_setting_is_documented_with_its_default(settings):
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", (ROOT / "docs" / "settings.md").read_text(), flags=re.M))
    for name, field in settings.model_fields.items():
        assert name in rows, f"docs/settings.md lacks {name}"
        if settings is Settings:
            default = field.get_default(call_default_factory=True)
            shown = "" if default in (None, []) else str(default)
            shown = shown.lower() if isinstance(default, bool) else shown
            assert rows[name].strip().strip("`") == shown, name


def test_documented_settings_exist():
    names = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "settings.md").read_text(), flags=re.M)
    known = {name for settings in OF_COMMAND.values() for name in settings.model_fields}
    assert set(names) <= known


# --- links and files -------------------------------------------------------------------------------------------------


def anchors(document):
    """What a link to a heading of the document ends with."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^):]+)\)", document.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        there = document.parent / file if file else document
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@each_document
def test_files_of_the_project_that_are_named_exist(document):
    for name in re.findall(rf"(?<![\w./])(?:{FOLDERS})/[\w./-]*\w", document.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


# --- commands and settings -------------------------------------------------------------------------------------------


def spans(document):
    """Inline code, also where it goes over the end of a line."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def commands(document):
    """(command, words) of each call of `detector` in a document, in lines of code or inline."""
    lines = document.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    for code in [line for line in lines if line.startswith("    ")] + spans(document):
        if found := re.search(rf"(?:^| |/)detector ({'|'.join(OF_COMMAND)})(?![\w-])(.*)", code):
            yield found[1], shlex.split(found[2], comments=True)


def parsed(cls, words):
    """Settings from what of `words` is key=value; `N` and `...` stand for any number."""
    overrides = [re.sub(r"=(N|\.\.\.)$", "=1", word) for word in words if re.match(r"\w+=.", word)]
    return load_settings(cls, None, overrides, {"data": "my.yaml"} if "data" in cls.model_fields else {})


@each_document
def test_commands_take_the_settings_of_the_examples(document):
    for command, words in commands(document):
        parsed(OF_COMMAND[command], words)


def test_examples_are_found():
    found = [(command, words) for document in DOCUMENTS for command, words in commands(document)]
    assert {command for command, _ in found} == set(OF_COMMAND)
    assert ("train", ["data=my.yaml", "batch=4"]) in found
    assert ("train", ["data=/shared/my.yaml", "project=/shared/runs", "name=my_run"]) in found


@each_document
def test_settings_in_the_text_can_be_set(document):
    for span in spans(document):
        words = span.split()
        if span != "key=value" and all(re.match(r"[a-z]\w*=.", word) for word in words):
            keys = {word.partition("=")[0] for word in words}
            kinds = (TuneSettings, *OF_COMMAND.values())
            parsed(next((cls for cls in kinds if keys <= {*cls.model_fields, *cls.also}), TuneSettings), words)
        elif found := re.match(r"([a-z]\w*): \S", span):
            assert found[1] in {*TuneSettings.model_fields, *DESCRIPTION}, span


# --- the house -------------------------------------------------------------------------------------------------------


def test_contributing_describes_the_rooms():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    order = re.search(r"^    errors, .*?\n\n", text, flags=re.M | re.S)[0]
    assert [set(re.findall(r"\w+", row)) for row in order.split("<")] == ROWS
    for room in (ROOT / "detector").iterdir():
        if (room / "__init__.py").exists():
            assert f"| `{room.name}/`" in text, room.name
