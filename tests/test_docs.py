"""The docs name what the program has, no more and no less."""

import re
from pathlib import Path

import pytest

from detector.config.settings import PredictSettings, Settings, TuneSettings, ValSettings

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "settings", [Settings, TuneSettings, ValSettings, PredictSettings], ids=lambda cls: cls.__name__
)
def test_every_setting_is_documented_with_its_default(settings):
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", (ROOT / "docs" / "settings.md").read_text(), flags=re.M))
    for name, field in settings.model_fields.items():
        assert name in rows, f"docs/settings.md lacks {name}"
        if settings is Settings:
            shown = "" if field.default is None else str(field.default)
            shown = shown.lower() if isinstance(field.default, bool) else shown
            assert rows[name].strip().strip("`") == shown, name


def test_documented_settings_exist():
    names = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "settings.md").read_text(), flags=re.M)
    known = {*TuneSettings.model_fields, *ValSettings.model_fields, *PredictSettings.model_fields}
    assert set(names) <= known


def test_links_between_documents_lead_somewhere():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
