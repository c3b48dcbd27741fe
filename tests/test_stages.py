"""A network cut into stages over several processes takes the steps of one that is whole."""

import json
import os
import re
import signal
import time

import failing_rank
import pytest
import ranks
import torch
from scenes import TINY, TINY26, random_batch, write_dataset
from stage_worker import steps
from test_training import run, weights

from detector import checkpoint_file
from detector.config.settings import Settings, load_settings
from detector.errors import ConfigError
from detector.mesh import Mesh
from detector.model.cost import counted, layer_costs
from detector.model.network import build_network
from detector.model.staging import balanced, first_layers, stage_count, told
from detector.step.messages import dense, pieces
from detector.step.pipeline import one_forward_one_backward, packed, unpacked

slow = pytest.mark.slow
WINDOWS = [
    [2, 2, 2, 2, 2, 2, 2, 2],
    [1, 9, 0, 3, 14, 0, 0],  # ragged
    [0, 0, 0, 200, 0, 3, 2, 1],  # one crowded image
    [3],  # fewer micro-batches than stages, and fewer images than replicas
    [0, 0],  # background only
]


def case(model=TINY, starts=(0,), **options):
    return {"model": str(model), "starts": list(starts), "windows": WINDOWS, **options}


def on_ranks(processes, out, *cases):
    done = ranks.run(processes, "stage_worker.py", out, json.dumps(cases))
    assert done.returncode == 0, done.stderr
    return torch.load(out, weights_only=True)


@slow
@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (2, [case(starts=(0, 5)), case(TINY26, (0, 9)), case(starts=(0, 1), checkpoint="all")]),
        (2, [case(TINY26, (0, 12), checkpoint="stages"), case(starts=(0, 7), frozen=6), case(starts=(0, 5), frozen=7)]),
        (4, [case(starts=(0, 3, 7, 10)), case(TINY26, (0, 8)), case(starts=(0, 11))]),
    ],
    ids=["two", "two, with frozen and checkpointed layers", "four, and two of two"],
)
def test_the_gradient_of_stages_and_replicas_is_that_of_one_process(tmp_path, processes, cases):
    found = on_ranks(processes, tmp_path / "out.pt", *cases)
    for one, (rows, after) in zip(cases, found, strict=True):
        expected, alone = steps(**{**one, "starts": [0], "checkpoint": "off"})
        for (gradient, *report), (whole, *others) in zip(rows, expected, strict=True):
            assert float((gradient - whole).norm() / whole.norm()) < 1e-10
            for now, then in zip(report, others, strict=True):
                assert now == pytest.approx(then, rel=1e-9)
        for name, value in alone.items():
            torch.testing.assert_close(after[name], value, rtol=1e-9, atol=1e-12)


@slow
def test_in_half_precision_a_step_of_stages_is_that_of_one_process_to_the_bit(tmp_path):
    """Of one replica; also where a window is skipped because its gradient overflows on one of the stages."""
    options = {"amp": "bf16", "norms": "batch", "poisoned": 1}
    cases = [case(starts=(0, 5), **options), case(TINY26, (0, 10), checkpoint="all", **options)]
    for one, (rows, after) in zip(cases, on_ranks(2, tmp_path / "out.pt", *cases), strict=True):
        expected, alone = steps(**{**one, "starts": [0]})
        assert [row[4] for row in rows] == [row[4] for row in expected] == [True, False, True, True, True]
        for number, (row, other) in enumerate(zip(rows, expected, strict=True)):
            assert number == 1 or torch.equal(row[0], other[0])
        assert [name for name, value in alone.items() if not torch.equal(after[name], value)] == []


@slow
def test_norm_layers_learn_what_they_learn_without_stages_to_the_bit(tmp_path):
    """Of the same micro-batches: one replica is one process, and two of two stages are two processes."""
    options = {"norms": "batch"}
    (_, two), (_, also) = on_ranks(2, tmp_path / "a", case(starts=(0, 5), **options), case(starts=(0,), **options))
    ((_, four),) = on_ranks(4, tmp_path / "b", case(starts=(0, 5), **options))
    _, alone = steps(**case(**options))
    for staged, expected in ((two, alone), (four, also)):
        assert expected["model.0.bn.num_batches_tracked"] > 0
        for name, value in expected.items():
            assert torch.equal(staged[name], value), name


# --- whole runs


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    data = write_dataset(tmp_path_factory.mktemp("data"))
    return [f"data={data}", f"model={TINY}", "imgsz=64", "nbs=8", "batch=2", "workers=0", "plots=false", "epochs=2",
            "amp=fp32", "optimizer=SGD", "multi_scale=0.5", "device=cpu", "save_minutes=1e-9"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory, common):
    folder = tmp_path_factory.mktemp("whole")
    assert run("train", *common, f"project={folder}", "name=run") == 0
    return weights(folder / "run")


def assert_same(folder, whole):
    found = weights(folder)
    assert found.keys() == whole.keys()
    assert [name for name, value in whole.items() if not torch.equal(found[name], value)] == []


@slow
def test_a_run_in_stages_is_one_without_to_the_bit_and_each_goes_on_with_the_other(tmp_path, common, whole):
    """Both are interrupted inside the first epoch, by an error on one stage, and resumed as the other, or at another
    cut."""
    here = [f"project={tmp_path}"]
    done = ranks.run(2, "detector", "train", *common, *here, "name=stages", "pipeline=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pipeline  2 stages: layers 0 to ") == 1
    assert "x 1 replica;" in done.stdout
    assert_same(tmp_path / "stages", whole)

    for name, processes, now, then in (("a", 2, ["pipeline=auto"], []), ("b", 1, [], ["pipeline=[11]"])):
        words = ["average", processes - 1, "train", *common, *here, f"name={name}", *now]
        done = ranks.run(processes, "failing_rank.py", *words)
        assert done.returncode in (1, 2), done.stderr
        saved = checkpoint_file.read(tmp_path / name / "weights" / "last.pt")
        assert (saved["epoch"], saved["step"]) == (0, 1)
        done = ranks.run(3 - processes, "detector", "train", f"resume={tmp_path / name}", *then or ["pipeline=off"])
        assert done.returncode == 0, done.stderr
        assert_same(tmp_path / name, whole)


@slow
def test_replicas_of_stages_end_with_the_weights_of_one_process(tmp_path, common):
    exact = [*common, "bn=frozen", "accumulate_warmup=false", f"project={tmp_path}"]
    assert run("train", *exact, "name=one", "batch=8") == 0
    done = ranks.run(4, "detector", "train", *exact, "name=four", "pipeline=2", "batch=1")
    assert done.returncode == 0, done.stderr
    expected = weights(tmp_path / "one")
    for name, value in weights(tmp_path / "four").items():
        if value.dtype.is_floating_point:
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


@slow
@pytest.mark.parametrize("place", ["network", "backward", "image", "average"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_stage_ends_all_with_its_message(tmp_path, common, place, rank):
    if (place, rank) == ("image", 1):
        pytest.skip("later stages load no images")
    words = [*common, f"project={tmp_path}", "pipeline=[6]", "cache=false", "val=false"]
    done = ranks.run(2, "failing_rank.py", place, rank, "train", *words)
    assert done.returncode in (1, 2), done.stderr  # and no rank had to be killed
    assert str(failing_rank.PLACES[place][2]) in done.stderr, done.stderr
    assert "epoch 2/2" not in done.stdout


@slow
def test_a_signal_saves_and_stops_a_run_in_stages(tmp_path, common):
    words = [*common, "device=cpu:2", "pipeline=2", "epochs=500", f"project={tmp_path}", "name=run"]
    process, table = ranks.start("detector", "train", *words), tmp_path / "run" / "metrics.csv"
    deadline = time.monotonic() + 120
    while not table.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=90)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert checkpoint_file.read(tmp_path / "run" / "weights" / "last.pt")["epoch"] >= 1


@slow
@pytest.mark.parametrize(
    ("processes", "words", "message"),
    [
        (1, ["pipeline=2"], r"pipeline: 2 stages are as many devices, and this run has one; name more"),
        (2, ["pipeline=3"], r"pipeline: 2 devices are no whole number of replicas of 3 stages; name 3 or 6 devices"),
        (2, ["pipeline=[13]"], r"pipeline=\[13\]: names the first layers .*; in this model they can be 1 to 12"),
        (2, ["pipeline=2", "batch=auto"], r"batch=auto: .*pipeline"),
        (2, ["pipeline=2", "compile=default"], r"compile=default: .*set compile=off, or pipeline=off"),
        (2, ["pipeline=2", "bn=sync"], r"bn=sync: .*set pipeline=off"),
    ],
)
def test_what_cannot_be_cut_is_told_once(tmp_path, common, processes, words, message):
    done = ranks.run(processes, "detector", "train", *common, f"project={tmp_path / 'runs'}", *words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 2, done.stderr
    assert re.search(message, done.stderr), done.stderr


# --- the parts


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3", 3),
        ("[4]", [4]),
        ("10,17", [10, 17]),
        ("10, 17", [10, 17]),
        ("off", "off"),
        ("false", "off"),
        ("true", "auto"),
    ],
)
def test_stages_are_written_in_several_ways(written, value):
    assert load_settings(Settings, None, ["data=a.yaml", f"pipeline={written}"], {}).pipeline == value


@pytest.mark.parametrize("written", ["0", "[]", "[0]", "2.5", "half", "10,a"])
def test_what_is_no_number_of_stages_is_refused(written):
    with pytest.raises(ConfigError, match="pipeline"):
        load_settings(Settings, None, ["data=a.yaml", f"pipeline={written}"], {})


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 4, 9])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_schedule_never_waits_for_itself_and_keeps_few_micro_batches(stages, count, depth):
    """Stages take turns, each until what it needs has not been made; in the end all passes are made."""
    orders = [list(one_forward_one_backward(stage, stages, count, depth)) for stage in range(stages)]
    done, places = set(), [0] * stages
    while places != [2 * count] * stages:
        before = list(places)
        for stage, order in enumerate(orders):
            while places[stage] < 2 * count:
                backward, number = order[places[stage]]
                source = stage + 1 if backward else stage - 1
                if 0 <= source < stages and (source, backward, number) not in done:
                    break
                done.add((stage, backward, number))
                places[stage] += 1
        assert places != before
    for stage, order in enumerate(orders):
        assert [number for backward, number in order if backward] == list(range(count))
        open_now = [sum(-1 if backward else 1 for backward, _ in order[: end + 1]) for end in range(2 * count)]
        assert max(open_now) == min(stages - stage, depth, count)


def test_a_mesh_is_replicas_of_neighbouring_stages():
    meshes = [Mesh(2, rank, 6) for rank in range(6)]
    assert [(one.replica, one.stage) for one in meshes] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [one.rank_of(1) for one in meshes] == [1, 1, 3, 3, 5, 5]
    assert {one.replicas for one in meshes} == {3}
    assert [one.first for one in meshes[:2]] == [True, False] == [not one.last for one in meshes[:2]]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_balanced_cut_has_the_least_costly_costliest_part(stages):
    costs = [5, 1, 1, 9, 2, 2, 7, 3]
    tried = []
    for a in range(1, len(costs)):
        for b in range(a + 1, len(costs)) if stages == 3 else [None]:
            starts = [0, a, b][:stages]
            parts = [sum(costs[i:j]) for i, j in zip(starts, [*starts[1:], len(costs)], strict=True)]
            tried.append(max(parts))
    starts = balanced(costs, stages)
    assert max(sum(costs[i:j]) for i, j in zip(starts, [*starts[1:], len(costs)], strict=True)) == min(tried)


def test_layers_are_counted_and_cut_as_asked():
    network = build_network(TINY, nc=2)
    costs, kinds = layer_costs(network, 64), counted(network, 64)
    assert len(costs) == 13
    assert sum(one.operations for one in costs) == sum(kinds.values()) - kinds["kept"]
    assert costs[1].kept == 2 * 16 * 16 * 16  # what its convolution and its norm put out
    assert first_layers([5, 9], 3, costs) == [0, 5, 9]
    assert first_layers("auto", 1, costs) == [0]
    said = r"layers 0 to 11 \((\d+)% of the arithmetic, (\d+)% of the activations\), 12 \((\d+)%, (\d+)%\)"
    shares = [int(one) for one in re.fullmatch(said, told([0, 12], costs)).groups()]
    assert 99 <= shares[0] + shares[2] <= 101
    assert 99 <= shares[1] + shares[3] <= 101
    assert [stage_count(one, 4) for one in ("off", "auto", 2, [3, 7])] == [1, 4, 2, 3]
    for wrong in ([5, 5], [9, 5], [13]):
        with pytest.raises(ConfigError, match="in this model they can be 1 to 12"):
            first_layers(wrong, len(wrong) + 1, costs)
    with pytest.raises(ConfigError, match="20 stages, and this model has 13 layers"):
        first_layers(20, 20, costs)


@pytest.mark.parametrize("start", [1, 5, 9, 12])
def test_layers_run_in_two_parts_put_out_what_they_do_in_one(start):
    network = build_network(TINY26, nc=2)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        maps = network.run_layers({-1: images}, 0, start)
        assert all(index < start for index in maps)
        found, expected = network.run_layers(maps, start, 13)[12], network(images)
    assert torch.equal(found.boxes, expected.boxes)
    assert torch.equal(found.one2one.logits, expected.one2one.logits)


def test_maps_are_unpacked_as_they_were_packed():
    """Also several of one layer, which lie in one memory, and those that need no gradient."""
    several = (
        torch.rand(2, 6, 4, 4, requires_grad=True).contiguous(memory_format=torch.channels_last).split((2, 4), dim=1)
    )
    maps = {4: torch.rand(2, 3, 8, 8), 2: several, -1: torch.rand(1, 3, 5, 5)}
    made, message = packed(maps)
    found, leaves = unpacked(message)
    assert [len(one) for one in (made, leaves)] == [4, 4]
    assert sorted(found) == [-1, 2, 4]
    assert isinstance(found[2], tuple)
    for now, then in zip((found[-1], *found[2], found[4]), (maps[-1], *several, maps[4]), strict=True):
        assert torch.equal(now, then)
        assert now.is_leaf
        assert now.requires_grad == then.requires_grad


def test_a_batch_without_images_is_cut_and_resized_as_one_with_them():
    whole = random_batch([2, 0, 3])
    bare = whole.without_images()
    assert bare.images.nbytes == 0
    for one, other in ((whole.part(0, 2), bare.part(0, 2)), (whole.resized(96), bare.resized(96))):
        assert other.images.shape == (*one.images.shape[:3], 0)
        assert torch.equal(one.boxes_xyxy, other.boxes_xyxy)
        assert torch.equal(one.samples, other.samples)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_pieces_of_a_map_are_its_bytes_in_their_order(layout):
    tensor = torch.rand(2, 3, 4, 5).contiguous(memory_format=layout)
    copy = torch.empty_strided(tensor.shape, tensor.stride())
    for piece, other in zip(pieces(tensor), pieces(copy), strict=True):
        other.copy_(piece)
    assert torch.equal(copy, tensor)
    assert dense(tensor).data_ptr() == tensor.data_ptr()
    assert torch.equal(dense(tensor[:, 1:]), tensor[:, 1:])
