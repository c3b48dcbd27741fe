"""LiteRT, ExecuTorch and Core ML: files of one size, with their facts beside them, by packages that few have."""

import json

import pytest
from exports import NAMES, noise, write_checkpoint
from test_export import same
from test_training import run

import detector
from detector.errors import CheckpointError, ConfigError
from detector.export import formats, write
from detector.inference.infer import Limits
from detector.inference.runtimes.engines import _texts_beside
from detector.inference.runtimes.facts import Facts

pytestmark = pytest.mark.slow  # an export takes seconds
LIMITS = Limits(0.25, 0.7, 300, multi_label=False)


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("converters") / "best.pt")


@pytest.mark.parametrize(
    ("name", "module", "file"),
    [("litert", "litert_torch", "m.tflite"), ("executorch", "executorch", "m.pte")],
)
def test_files_of_one_size_are_proved_and_used(name, module, file, tmp_path, best, capsys):
    pytest.importorskip(module)
    target = tmp_path / file
    assert run("export", best, target, f"format={name}") == 0
    shown = capsys.readouterr()
    assert "1 x 96 x 96" in shown.out
    assert "alike: within 0.5 px" in shown.out
    assert "START" not in shown.out + shown.err
    assert sorted(one.name for one in tmp_path.iterdir()) == [file, f"{file}.json"]
    loaded = detector.load(target)
    assert loaded.runtime.facts == Facts(NAMES, 96, batch=1, dynamic=False)
    images = noise(96, 96, 3)
    expected = detector.load(best, device="cpu").runtime.find(images, LIMITS)
    same(expected, loaded.runtime.find(images, LIMITS))
    target.unlink()
    assert run("export", best, target, f"format={name}") == 2
    assert f"{file}.json: exists" in capsys.readouterr().err


def test_core_ml_programs_say_what_they_take(tmp_path, best, capsys):
    library = pytest.importorskip("coremltools")
    target = tmp_path / "m.mlpackage"
    assert run("export", best, target, "format=coreml") == 0
    assert "not run here" in capsys.readouterr().out
    described = library.utils.load_spec(str(target)).description
    assert list(described.input[0].type.multiArrayType.shape) == [1, 3, 96, 96]
    assert described.output[0].name == "output0"
    held = dict(described.metadata.userDefined)
    assert (json.loads(held["names"]), held["dynamic"], held["batch"]) == (list(NAMES), "false", "1")


def test_a_converter_that_fails_says_which_versions_work(monkeypatch):
    monkeypatch.setattr(formats, "version", lambda package: "0.1")
    told = r"coremltools 0\.1 .*\(odd\); .*pip install torch==\S+ coremltools==9\.0"
    with pytest.raises(ConfigError, match=told), formats._converting("coreml", "coremltools"):
        raise TypeError("odd")
    with pytest.raises(OSError, match="full"), formats._converting("coreml", "coremltools"):
        raise OSError(28, "full")


def test_what_a_format_cannot_compute_in_is_refused(monkeypatch, tmp_path, best, capsys):
    monkeypatch.setattr(formats, "find_spec", lambda module: True)
    for name in ("litert", "executorch"):
        assert run("export", best, tmp_path / f"m{formats.FORMATS[name].suffix}", f"format={name}", "half=true") == 2
        assert f"half=true: {name} is written in float32" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_facts_beside_a_file_go_where_it_goes(tmp_path):
    target = tmp_path / "m.tflite"
    target.with_name("m.tflite.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"m\.tflite\.json: exists"):
        write.check_target(target, False, formats.FORMATS["litert"])
    assert _texts_beside(target) == {}
    target.with_name("m.tflite.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        _texts_beside(target)
    assert _texts_beside(tmp_path / "other.tflite") == {}
