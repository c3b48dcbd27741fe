"""`compile`: the same step by compiled kernels, and the plain one wherever that cannot be."""

import os
import shutil
import signal
from dataclasses import replace

import pytest
import ranks
import torch
import torch._dynamo
from scenes import TINY, cut_batch, random_batch, write_dataset
from test_step import Double, gradient, new_state, rates_of, relative
from test_training import run, same, weights
from torch import nn

from detector import distributed
from detector.data.batch import blank_batch
from detector.loss.criterion import DetectionLoss
from detector.model.blocks.conv import Conv
from detector.step import compiling, offload
from detector.step.compiling import Compiled, prepare
from detector.step.gradients import GradientSum
from detector.step.plan import Window, split
from detector.step.state import TrainState
from detector.step.statistics import set_modes
from detector.step.step import StepRules, Sums, train_window

pytestmark = pytest.mark.slow
MINUTE = TINY.with_name("minute.yaml")
BOXES = [1, 9, 0, 3, 14, 0, 0, 5]


@pytest.fixture
def graphs(monkeypatch):
    """What is compiled: each graph, and the operations run as they are."""
    found = []

    def as_it_is(graph, examples):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(compiling, "BACKEND", as_it_is)
    return found


@pytest.fixture
def aot(monkeypatch):
    """Forward and backward pass as the compiler cuts them into pure operations, without kernels."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")


def rules_of(network, said, **more):
    return StepRules(
        DetectionLoss(network.head), forward=Compiled("default", False, said.append), clip_norm=1e9, **more
    )


def taken(state, rules, sizes, batch):
    """A window in fp64, in micro-batches of these sizes."""
    parts = [Double(part) for part in cut_batch(batch, sizes)]
    window = Window(0, 0, (tuple(tuple(part.samples.tolist()) for part in parts),))
    return train_window(state, GradientSum(state.network), rules, window, parts, rates_of(state))


@pytest.mark.parametrize("memory", ["plain", pytest.param("checkpoint and offload", marks=pytest.mark.long)])
def test_window_gradient_equals_that_of_a_plain_batch(aot, monkeypatch, memory):
    """However it is cut, with norms that learn by the micro-batch, and with layers that are computed again."""
    monkeypatch.setattr(offload, "LEAST", 0)
    keeping = {} if memory == "plain" else {"keeping": offload.offloaded}
    said, batch = [], random_batch(BOXES)
    for frozen, sizes in ((True, [3, 3, 2]), (False, [8])):
        plain, compiled = (new_state(torch.float64, model=MINUTE) for _ in range(2))
        compiled.network.set_checkpoint("all" if keeping else "off")
        rules = rules_of(compiled.network, said, **keeping)
        for state in (plain, compiled):
            set_modes(state.network, frozen)
        before = {name: value.clone() for name, value in compiled.network.state_dict().items()}
        assert prepare(compiled, rules, 3, 64) is not None
        after = compiled.network.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items()), "it left a trace"
        report = taken(compiled, rules, sizes, batch)
        expected = taken(plain, replace(rules, forward=StepRules.forward), [8], batch)
        assert relative(gradient(compiled), gradient(plain)) < 1e-10
        assert report.losses == pytest.approx(expected.losses, rel=1e-10)
        one, other = compiled.network.state_dict(), plain.network.state_dict()
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-8, atol=1e-10, msg=name)
    assert not said


def test_one_compilation_serves_micro_batches_of_any_number(graphs):
    """But for those of one image, which torch always compiles apart, and blank ones, which are run as they are."""
    said, state = [], new_state(torch.float64, model=MINUTE)
    rules = rules_of(state.network, said)
    set_modes(state.network, freeze_norms=False)
    assert prepare(state, rules, 5, 64) is not None
    for sizes in ([5, 3], [4, 4], [2, 2, 2, 2], [3, 3, 2]):
        taken(state, rules, sizes, random_batch(BOXES))
    assert len(graphs) == 1
    for _ in range(2):
        taken(state, rules, [7, 1], random_batch(BOXES))
    assert len(graphs) == 2
    rules.forward(state.network, Double(blank_batch(64)))
    assert len(graphs) == 2
    assert not said


def test_one_compilation_serves_images_of_any_size(graphs):
    state = new_state(model=MINUTE)
    rules = StepRules(DetectionLoss(state.network.head), forward=Compiled("default", True, pytest.fail))
    assert prepare(state, rules, 2, 128) is not None
    for side in (64, 96, 160):
        rules.forward(state.network, random_batch([1, 0, 2], size=side))
    assert len(graphs) == 1


class Small(nn.Module):
    """A network that compiles fast: one convolution with its norm."""

    def __init__(self):
        super().__init__()
        self.layer = Conv(3, 4, 3, 2)

    def forward(self, images):
        return self.layer(images)


def small_state(dtype=torch.float32, frozen=True):
    torch.manual_seed(0)
    network = Small().to(dtype)
    state = TrainState.of(network, torch.optim.SGD(network.parameters(), lr=0.1))
    set_modes(network, freeze_norms=frozen)
    return state


def small_rules(say):
    def criterion(out, batch):
        return [Sums(out.square().sum(dim=(0, 2, 3))[:1], torch.tensor(float(len(batch.samples))))]

    return StepRules(criterion, forward=Compiled("default", False, say))


def small_step(state, rules):
    """Four images in micro-batches of two, over the ranks."""
    cut, parts = split(range(4), 2, distributed.world_size()), cut_batch(random_batch([0] * 4), [2, 2])
    mine = [Double(parts[micro[0] // 2]) for micro in cut[distributed.rank()]]
    return train_window(state, GradientSum(state.network), rules, Window(0, 0, cut), mine)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_the_compilers_own_kernels_take_the_same_step(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled, plain = (small_state(torch.float64, frozen=False) for _ in range(2))
    rules = small_rules(pytest.fail)
    assert prepare(compiled, rules, 4, 64) is not None
    assert list(tmp_path.rglob("*.so"))
    small_step(compiled, rules)
    small_step(plain, replace(rules, forward=StepRules.forward))
    for name, value in plain.network.state_dict().items():
        torch.testing.assert_close(compiled.network.state_dict()[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("folder", "compiler", "words"),
    [
        ("cache", "/nowhere/g++", ("No working C++ compiler", "install g++")),
        ("file/cache", "g++", ("NotADirectoryError", "TORCHINDUCTOR_CACHE_DIR")),
    ],
    ids=["no compiler", "no cache"],
)
def test_where_nothing_can_be_compiled_one_word_is_said(monkeypatch, tmp_path, folder, compiler, words):
    from torch._inductor import config

    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
    said, compiled, plain = [], small_state(torch.float64), small_state(torch.float64)
    rules = small_rules(said.append)
    with config.patch({"cpp.cxx": (compiler,)}):
        assert prepare(compiled, rules, 4, 64) is None
    (line,) = said
    assert line.startswith("warning: compile: ")
    assert line.endswith("; the run goes on without")
    assert all(word in line for word in words)
    assert "\n" not in line
    small_step(compiled, rules)
    small_step(plain, replace(rules, forward=StepRules.forward))
    assert all(
        torch.equal(a, b) for a, b in zip(compiled.network.parameters(), plain.network.parameters(), strict=True)
    )
    assert len(said) == 1


def test_a_compilation_that_fails_later_is_said_and_the_step_is_taken(graphs):
    said, state = [], small_state(torch.float64)
    rules = small_rules(said.append)
    assert prepare(state, rules, 1, 64) is not None

    def broken(graph, examples):
        raise ValueError("no more kernels")

    rules.forward.run = torch.compile(state.network, backend=broken)
    assert small_step(state, rules).applied
    assert said == ["warning: compile: ValueError: no more kernels; the run goes on without"]


def test_memory_that_runs_out_while_compiling_is_no_failure_of_the_compiler(graphs):
    """Fewer images are tried; what the first step does about it is the step's."""
    state, sizes = small_state(), []
    rules = small_rules(pytest.fail)

    def short(module, images):
        sizes.append(len(images[0]))
        if len(images[0]) > 4:
            raise MemoryError

    state.network.register_forward_pre_hook(torch.compiler.disable(short))
    assert prepare(state, rules, 16, 64) is not None
    assert sizes == [16, 8, 4]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=8, val=2)


@pytest.fixture
def common(data):
    settings = [f"data={data}", f"model={MINUTE}", "imgsz=64", "batch=3", "nbs=6", "workers=0", "device=cpu"]
    return [*settings, "plots=false", "compile=default", "save_period=1"]


def test_a_resumed_run_ends_like_one_that_was_not_stopped(tmp_path, common, aot, capsys):
    """And its checkpoint is one of a run without, which goes on from it, too."""
    assert run("train", *common, f"project={tmp_path}", "name=whole", "epochs=2") == 0
    shown = capsys.readouterr().out
    assert "compile   default" in shown
    assert "compiled  in" in shown
    assert "warning" not in shown
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.copytree(tmp_path / "whole", tmp_path / "plain")
    first = ("again", "plain")
    for name, more in zip(first, ([], ["compile=off"]), strict=True):
        assert run("train", f"resume={tmp_path / name / 'weights' / 'epoch1.pt'}", *more) == 0
    assert same(tmp_path / "again", tmp_path / "whole")
    ours, plain = weights(tmp_path / "whole"), weights(tmp_path / "plain")
    assert ours.keys() == plain.keys()
    assert not [name for name in ours if "orig_mod" in name]
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_signal_while_compiling_stops_the_run_as_at_any_time(tmp_path, common, monkeypatch, capsys):
    def slow(graph, examples):
        os.kill(os.getpid(), signal.SIGINT)
        return graph.forward

    monkeypatch.setattr(compiling, "BACKEND", slow)
    assert run("train", *common, f"project={tmp_path}", "name=run", "epochs=1") == 130
    shown = capsys.readouterr()
    assert "go on with: detector train resume=" in shown.out
    assert "warning" not in shown.out
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    assert run("train", f"resume={tmp_path / 'run'}") == 0


def test_several_processes_sum_the_gradient_of_the_compiled_network(tmp_path):
    """Also where compiling failed on one of them: then all go on without."""
    done = ranks.run(2, "compiled_worker.py", tmp_path / "out.pt")
    assert done.returncode == 0, done.stderr
    alone = small_state(torch.float64)
    small_step(alone, replace(small_rules(pytest.fail), forward=StepRules.forward))
    for backend, (graphs, weight, said) in torch.load(tmp_path / "out.pt").items():
        assert graphs == (backend == "kept")
        assert said == ([] if graphs else ["warning: compile: only here; the run goes on without"])
        torch.testing.assert_close(weight, alone.network.layer.conv.weight.detach(), rtol=1e-10, atol=1e-12)
