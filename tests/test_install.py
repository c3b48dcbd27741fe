"""What is installed is what is in the checkout: wheel and sdist hold every room, and train where no checkout is.

The commands run in an interpreter without its site packages' start files (-S): an editable install of the checkout
would lend its modules to a package that lacks them.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from scenes import TINY, write_dataset

pytestmark = pytest.mark.slow
CHECKOUT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
ALONE = ("--no-index", "--no-deps", "--no-build-isolation")  # nothing from a network: what builds is in the dev extra

# Run in the installed package: import every module, then all commands. Their status, or the first that is not 0.
SESSION = """
import importlib, pkgutil, sys
import detector
from detector.cli import main
names = [one.name for one in pkgutil.walk_packages(detector.__path__, "detector.") if one.name != "detector.__main__"]
print(*(importlib.import_module(name).__file__ for name in ["detector", *names]), sep="\\n", file=sys.stderr)
data, tiny, images, *how = sys.argv[1:]
small = ["imgsz=64", "batch=2", "nbs=4", "workers=0", "device=cpu", f"data={data}"]
run = ["epochs=1", "plots=false", "name=run"]
for command in (
    ["train", "model=v11n", *small, *run],  # a model that comes with the package
    ["tune", f"model={tiny}", *small, "nbs=1", "memory=2GiB", *how],
    ["val", "runs/run/weights/best.pt", "device=cpu", f"data={data}"],
    ["predict", "runs/run", images, "device=cpu"],
):
    if status := main(command):
        sys.exit(f"{command[0]} ended with {status}")
    compiler = {"torch._dynamo", "sympy", "torchvision.models"} & sys.modules.keys()
    if command[0] == "train" and compiler:
        sys.exit(f"training imports what costs it seconds and serves nothing: {compiler}")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The files that git tracks or would, alone: no build folder or egg-info of the checkout to help out."""
    listing = ["git", "-C", CHECKOUT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("takes git and its clone, to tell the project's files from others")
    folder = tmp_path_factory.mktemp("source")
    for name in filter(None, listed):
        if os.path.lexists(CHECKOUT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def archives(tmp_path_factory, source):
    """The wheel and the sdist, each built from nothing but the source."""
    out = tmp_path_factory.mktemp("archives")
    build = "from setuptools.build_meta import build_sdist, build_wheel; build_sdist({0!r}); build_wheel({0!r})"
    subprocess.run([sys.executable, "-c", build.format(str(out))], cwd=source, check=True, capture_output=True)
    return {"wheel": next(out.glob("*.whl")), "sdist": next(out.glob("*.tar.gz"))}


def packaged(names):
    return {name for name in names if name.startswith("detector/") and not name.endswith("/")}


def test_the_wheel_holds_every_module_and_every_model_and_nothing_else(source, archives):
    modules = {path.relative_to(source).as_posix() for path in (source / "detector").rglob("*.py")}
    models = {f"detector/configs/models/{path.name}" for path in (source / "configs" / "models").glob("*.yaml")}
    assert len(modules) > 50
    assert models
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        held = set(wheel.namelist())
    assert packaged(held) == modules | models | {"detector/py.typed"}
    assert {name.split("/")[0].partition("-")[0] for name in held} == {"detector"}  # and detector-1.2.3.dist-info
    with tarfile.open(archives["sdist"]) as sdist:
        assert all(member.isfile() or member.isdir() for member in sdist)  # no link to what it lacks
        assert packaged(name.partition("/")[2] for name in sdist.getnames()) >= packaged(held)


@pytest.mark.parametrize(
    ("kind", "how"), [("wheel", []), pytest.param("sdist", ["--estimate"], marks=pytest.mark.long)]
)  # trials: six more processes
def test_an_installed_package_trains_tunes_measures_and_predicts(tmp_path, archives, kind, how):
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    subprocess.run([*PIP, "install", *ALONE, "--target", target, archives[kind]], check=True, cwd=tmp_path)
    data = write_dataset(elsewhere)
    tiny = shutil.copy(TINY, elsewhere)
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *libraries])}

    def installed(*command):
        command = [sys.executable, "-S", *map(str, command)]
        return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)

    done = installed("-c", SESSION, data, tiny, elsewhere / "images" / "val", *how)
    assert done.returncode == 0, done.stderr
    loaded = [Path(line) for line in done.stderr.splitlines() if line.endswith(".py")]
    assert len(loaded) > 50
    assert all(target in path.parents for path in loaded)
    shown = installed(target / "bin" / "detector", "info", "runs/run")
    assert shown.returncode == 0, shown.stderr
    assert "v11n" in shown.stdout
