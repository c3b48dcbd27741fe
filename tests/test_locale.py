"""Names in any alphabet, on terminals and in locales that have none for them, and terminals that are not there."""

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scenes import MINUTE, write_dataset

from detector import terminal
from detector.cli import main
from detector.reporting.progress import Progress

ROOT = Path(__file__).parents[1]
PLACES = {
    "ascii stdout": {"PYTHONIOENCODING": "ascii"},
    "latin-1 stdout": {"PYTHONIOENCODING": "latin-1:strict"},
    "C locale": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folders, files and classes with names of many alphabets, and one file whose name is no UTF-8."""
    path = write_dataset(tmp_path_factory.mktemp("dätá"), train=4, val=4)
    for split, old, new in (
        ("train", "000", "ñandú".encode()),
        ("val", "001", "кот".encode()),
        ("val", "002", b"\xff\xe9"),
    ):
        for kind, suffix in (("images", ".png"), ("labels", ".txt")):
            folder = os.fsencode(path.parent / kind / split)
            os.rename(path.parent / kind / split / f"{old}{suffix}", folder + b"/" + new + suffix.encode())
    (path.parent / "images" / "train" / "käputt.png").write_bytes(b"")  # named in a warning
    path.write_text("train: images/train\nval: images/val\nnames: [Кошка, 犬]\n", encoding="utf-8")
    return path


SESSION = """
import os, sys
from detector.cli import main
lines = [[]]
for word in sys.argv[1:]:
    lines.append([]) if word == "then" else lines[-1].append(word)
for line in lines:
    status = main(line)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.write(number, b"\\0%d\\0" % status)
"""


def detector(folder, place, *lines):
    """Command lines, one after the other, in a process whose environment has no other words on encodings.

    Yields what became of each: its status, stdout and stderr.
    """
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONIO", "PYTHONUTF8"))
    }
    words = [os.fsencode(str(word)) for line in lines for word in ("then", *line)][1:]
    done = subprocess.run(
        [sys.executable, "-c", SESSION, *words],
        cwd=folder,
        env={**kept, "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **PLACES[place]},
        capture_output=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    out, err = done.stdout.split(b"\0"), done.stderr.split(b"\0")
    for at in range(0, 2 * len(lines), 2):
        yield subprocess.CompletedProcess(lines[at // 2], int(out[at + 1]), out[at], err[at])


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [*(pytest.param(f"{name} stdout", marks=pytest.mark.long) for name in ("ascii", "latin-1")), "C locale"]
)
def test_a_run_and_its_use_survive_names_that_the_terminal_has_no_letters_for(tmp_path, data, place):
    words = [f"model={MINUTE}", "imgsz=64", "batch=2", "nbs=4", "workers=1", "device=cpu", "epochs=2", "name=наука"]
    folder = tmp_path / "runs" / "наука"
    images = data.parent / "images" / "val"
    lines = [
        ["train", data, *words],
        ["val", folder, "device=cpu", "name=v"],
        ["predict", folder, images, "device=cpu", "conf=0", "name=p"],
        ["info", folder],
        ["train", f"resume={folder}", "epochs=3"],
    ]
    mistakes = [
        (["train", tmp_path / "нет.yaml"], b"No such file"),
        (["train", f"data={tmp_path / 'нет.yaml'}"], b"no such file"),
        (["train", data, "épochs=3"], b"Did you mean 'epochs'?"),
        (["train", data, "names=[Ж, 犬, x]"], b"names=['\\u0416', '\\u72ac', 'x']: "),
    ]
    everything = list(detector(tmp_path, place, *lines, *(line for line, _ in mistakes)))
    trained, measured, found, told, again = done = everything[: len(lines)]
    for one in done:
        assert one.returncode == 0, one.stderr
    assert b"2 epochs" in trained.stdout
    assert b"\\u041a\\u043e\\u0448\\u043a\\u0430" in trained.stdout  # the class table
    assert "epochs: 3" in (folder / "settings.yaml").read_text(encoding="utf-8")
    assert b"\\u72ac" in measured.stdout
    assert {os.fsencode(file.name) for file in (tmp_path / "runs" / "p").iterdir()} == {
        b"000.jpg", "кот.jpg".encode(), b"\xff\xe9.jpg", b"003.jpg"
    }  # fmt: skip
    assert found.stdout.count(b"\n") == 5
    assert b"\\u72ac" in told.stdout
    assert b"finished  3 epochs" in again.stdout
    for (_, why), failed in zip(mistakes, everything[len(lines) :], strict=True):
        assert failed.returncode == 2
        assert why in failed.stderr
        assert b"Traceback" not in failed.stderr
        assert failed.stderr.count(b"\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_reader_that_goes_away_is_no_traceback(tmp_path, data, closed):
    """As in `detector info runs/train | head -0`."""
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, {fd}); "
    code += "from detector.cli import main; sys.exit(main(sys.argv[1:]))"
    # info of a missing file writes to stderr, --help to stdout
    program = code.format(fd=1 if closed == "stdout" else 2)
    arguments = (
        ["info", str(tmp_path / "none.pt")]
        if closed == "stderr"
        else ["train", str(data), f"model={MINUTE}", "device=cpu"]
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=tmp_path, env=env, capture_output=True, timeout=200
    )
    assert done.returncode in (1, 2)
    assert b"Traceback" not in done.stderr + done.stdout
    assert b"Exception ignored" not in done.stderr


class Notebook:
    """A stream that only writes."""

    def __init__(self, encoding):
        self.encoding, self.text = encoding, ""

    def write(self, text):
        text.encode(self.encoding or "ascii")
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", "\\u0416 \\udcff"), ("latin-1", "\\u0416 \\udcff"), ("utf-8", "Ж \\udcff"), (None, "\\u0416 \\udcff")],
)
def test_a_line_is_written_with_escapes_for_what_the_stream_lacks(encoding, shown, monkeypatch):
    stream = Notebook(encoding)
    terminal.say("Ж \udcff", stream)
    assert stream.text == f"{shown}\n"
    wrapped = io.TextIOWrapper(io.BytesIO(), encoding=encoding or "ascii")
    monkeypatch.setattr(sys, "stdout", wrapped)
    terminal.say("Ж \udcff")
    assert wrapped.buffer.getvalue().decode(encoding or "ascii").strip() == shown
    assert wrapped.errors == "strict"  # whoever owns it finds it as it was


def test_a_program_without_a_console_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    terminal.say("anything")
    assert main(["info", str(tmp_path / "none.pt")]) == 2
    with Progress(0, 1, 4) as bar:
        bar.update(4, {"box": 1.0}, 0.1, 1)


@pytest.mark.parametrize(
    "stream", [Notebook("ascii"), io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="ascii")], ids=type
)
def test_progress_is_one_plain_line_on_any_stream(stream):
    with Progress(0, 1, 4, stream=stream) as bar:
        bar.update(4, {"box": 1.0}, 0.1, 1)
    written = stream.text if isinstance(stream, Notebook) else None
    if written is None:
        stream.seek(0)
        written = stream.read()
    assert written.startswith("epoch 1/1  4/4 images")
    assert written.count("\n") == 1


def test_a_bar_on_an_ascii_terminal_is_ascii():
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    stream = Terminal(io.BytesIO(), encoding="ascii")
    with Progress(0, 1, 4, stream=stream) as bar:
        bar.update(2, {"box": 1.0}, 0.1, 1)
        bar.update(4, {"box": 1.0}, 0.1, 1)
    assert b"100%" in stream.buffer.getvalue()


def test_main_leaves_streams_without_encodings_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", Notebook("ascii"))
    monkeypatch.setattr(sys, "stderr", errors := Notebook("ascii"))
    assert main(["info", str(tmp_path / "кот.pt")]) == 2
    assert "\\u043a\\u043e\\u0442.pt" in errors.text


@pytest.mark.parametrize(
    "file", sorted((ROOT / "detector").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT))
)
def test_text_files_are_read_and_written_in_a_named_encoding(file):
    """Never in the locale's, which is another one on another machine."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if name not in ("read_text", "write_text", "open") or owner in (
            "os",
            "av",
            "Image",
            "Popen",
            "tarfile",
            "zipfile",
        ):
            continue
        modes = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        binary = any("b" in mode for mode in modes if len(mode) < 4)
        named = any(keyword.arg in ("encoding", None) for keyword in node.keywords)  # None: **options
        assert binary or named, f"{file}:{node.lineno}: {name} without encoding="
