"""The rules of `detector tune` on made-up trials: what is tried, what is recommended, and what is written."""

import io
import sys

import pytest
import torch
from test_training import run

from detector.cli import parse
from detector.commands.tune import write
from detector.config.settings import Settings, TuneSettings, load_settings
from detector.errors import ConfigError
from detector.fitting.fit import budget, to_come, tried
from detector.fitting.search import Trial, cuts, parse_memory, recommend, rounds, search, table
from detector.step.plan import Cut

MIB = 2**20


def settings(*overrides):
    return load_settings(Settings, None, ["data=d.yaml", "nbs=64", *overrides])


def made(mode, batch, peak, rate, fits=True, devices=1):
    return Trial(mode, Cut(batch, max(64 // (batch * devices), 1), devices), peak * MIB, rate, fits)


# --- what is tried


@pytest.mark.parametrize(
    ("overrides", "devices", "images", "batches"),
    [
        ((), 1, 1000, [1, 2, 4, 8, 16, 32, 64]),
        ((), 4, 1000, [1, 2, 4, 8, 16]),
        (("nbs_scope=device",), 4, 1000, [1, 2, 4, 8, 16, 32, 64]),
        (("nbs=48",), 1, 1000, [1, 2, 4, 8, 16, 48]),  # 32 would make windows of 64
        ((), 1, 10, [1, 2, 4, 8, 10]),  # no micro-batch has more images than there are
        (("nbs=2",), 8, 1000, [1]),
    ],
)
def test_micro_batches_double_up_to_the_window(overrides, devices, images, batches):
    assert [cut.batch for cut in cuts(settings(*overrides), devices, images)] == batches


def test_trials_begin_with_what_norms_should_see():
    planned = cuts(settings(), 2, 1000)

    def batches(norm, least):
        return [[cut.batch for cut in part] for part in rounds(planned, norm, least)]

    assert batches("batch", 8) == [[8, 16, 32], [1, 2, 4]]
    assert batches("sync", 8) == [[4, 8, 16, 32], [1, 2]]  # 4 images on each of two devices
    assert batches("batch", 1) == [[1, 2, 4, 8, 16, 32], []]
    assert batches("batch", 64) == [[32], [1, 2, 4, 8, 16]]  # none has as many


@pytest.mark.parametrize("limit", range(12, 66))
def test_the_search_stops_after_the_first_that_does_not_fit_and_tries_the_middle(limit):
    """Whatever fits, nothing is recommended that was not tried, and no doubling goes beyond the first that is over."""
    asked = []

    def measure(cut):
        asked.append(cut.batch)
        return made("plain", cut.batch, cut.batch, 1.0, cut.batch <= limit)

    found = search(settings(), cuts(settings(), 1, 1000), measure)
    assert sorted(asked) == [one.batch for one in found]
    over = [batch for batch in asked if batch > limit]
    powers = [batch for batch in (1, 2, 4, 8, 16, 32, 64) if batch <= limit]
    assert [batch for batch in asked if batch in powers] == powers
    assert len(over) <= 2
    if 12 <= limit < 16:
        assert asked == [1, 2, 4, 8, 16, 12]
    if 32 <= limit < 64:
        assert 48 not in asked  # a window of 48 would be another run


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        ({"plain": 64}, "plain 8 16 32 64"),  # all fit: no other mode is better
        ({"plain": 12, "stages": 16, "all": 64}, "plain 8 12 16 stages 16 24 32 all 32 64"),
        ({"plain": 8, "stages": 12, "all": 12}, "plain 8 12 16 stages 12 16 all 14 16"),
        ({"plain": 4, "stages": 8}, "plain 8 stages 8 12 16"),  # no smaller one: BatchNorm has its 8
        ({"plain": 6, "stages": 7}, "plain 1 2 4 6 8 stages 8"),
        ({"plain": 2, "stages": 5}, "plain 1 2 3 4 8 stages 4 6 8"),
        ({"plain": 0, "stages": 0, "all": 2}, "plain 1 8 stages 1 8 all 1 2 3 4 8"),
        ({"plain": 0, "stages": 0}, "plain 1 8 stages 1 8"),
    ],
)
def test_no_trial_is_made_that_could_not_be_recommended(most, expected):
    """Nothing below what BatchNorm should see where that fits, and no mode where a plainer one fits as many."""
    chosen = settings()

    def measure(mode, cut):
        return made(mode, cut.batch, cut.batch, 1.0, cut.batch <= most[mode])

    found = tried(measure, chosen, [*most], cuts(chosen, 1, 1000), 8, lambda text: None)
    words = [f"{mode} {' '.join(str(one.batch) for one in found if one.mode == mode)}".strip() for mode in most]
    assert " ".join(words) == expected


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_trials_are_told_as_they_come_and_what_is_tried_on_a_terminal_alone(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", shown := stream())
    said = []
    tried(
        lambda mode, cut: made(mode, cut.batch, 90, 2.0),
        settings("nbs=4"),
        ["plain"],
        [Cut(1, 4), Cut(2, 2)],
        1,
        said.append,
    )
    assert [text.split(",")[0] for text in said] == ["tried     batch 1", said[1], "tried     batch 2"]
    assert (
        said[1] == "time      up to 0:06 for the trials that are left"
    )  # 3 steps of 4 micro-batches, 1 image each more, at 2/s
    assert ("trying    batch 2, plain (1 done" in shown.getvalue()) == (stream is Terminal)


def test_the_time_that_is_left_follows_from_the_first_trial():
    enough, small = [Cut(8, 8), Cut(16, 4)], [Cut(1, 64), Cut(2, 32), Cut(4, 16)]
    first = made("plain", 8, 900, 10.0)
    larger = 20 + 3 * 4 * 8 / 10  # three windows of four micro-batches of eight images more
    assert to_come(first, enough, small, 3, 20) == pytest.approx(3 * larger)  # in each of three modes
    assert to_come(first, enough[:1], small, 3, 20) == 0  # nothing larger: it is done
    assert to_come(first._replace(fits=False), enough, small, 3, 20) == 5 * 20  # in two more modes, and the smaller
    assert to_come(first._replace(fits=False, rate=None), enough, small, 3, 20) == 5 * 20


# --- what is recommended


def test_the_fastest_that_fits_is_recommended():
    trials = [made("plain", 8, 900, 50.0), made("plain", 16, 1800, 70.0), made("plain", 32, 3600, 90.0, fits=False)]
    assert recommend(trials, "batch", 8) == trials[1]
    assert recommend(trials[2:], "batch", 8) is None
    assert recommend([], "batch", 8) is None


def test_a_large_enough_batch_for_norms_comes_before_speed_where_it_fits():
    small, large = made("plain", 4, 900, 100.0), made("all", 16, 900, 60.0)
    assert recommend([small, large], "batch", 8) == large
    assert recommend([small, large], "batch", 4) == small
    assert recommend([small, large], "batch", 32) == small  # none is large enough: then the fastest
    assert recommend([small, large], "frozen", 8) == small
    both = [made("plain", 4, 900, 100.0, devices=2), made("all", 16, 900, 60.0, devices=2)]
    assert recommend(both, "sync", 8) == both[0]  # 4 images on each of two devices
    assert recommend(both, "batch", 8) == both[1]


def test_noise_recommends_no_checkpointing():
    plain, stages = made("plain", 16, 900, 100.0), made("stages", 16, 500, 105.0)
    assert recommend([stages, plain], "batch", 8) == plain
    assert recommend([stages._replace(rate=150.0), plain], "batch", 8).mode == "stages"


def test_an_estimate_recommends_the_cheapest_mode_and_then_the_largest_batch():
    trials = [made(mode, batch, 100, None) for mode in ("all", "stages", "plain") for batch in (4, 8, 16)]
    assert recommend(trials, "batch", 8) == made("plain", 16, 100, None)
    without = [one for one in trials if one.mode != "plain" or one.batch < 8]
    assert recommend(without, "batch", 8) == made("stages", 16, 100, None)


def test_the_table_shows_every_trial_and_marks_one():
    trials = [made("plain", 8, 900, 50.0), Trial("all", Cut(16, 4), None, None, False)]
    head, *lines = table(trials, "batch", trials[0]).splitlines()
    assert head.split() == ["mode", "batch", "accumulate", "window", "BatchNorm", "peak", "images/s", "fits"]
    assert " ".join(lines[0].split()) == "plain 8 8 64 8 900 MiB 50.0 yes <-"
    assert " ".join(lines[1].split()) == "all 16 4 64 16 over no"
    assert table(trials, "frozen", None).splitlines()[1].split()[4] == "-"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("8GB", 8 * 10**9),
        ("900M", 900 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("4 GB", 4 * 10**9),
    ],
)
def test_memory_is_a_number_and_a_unit(text, count):
    assert parse_memory(text) == count


@pytest.mark.parametrize("text", ["4", "GiB", "-4GiB", "4 apples", "", "4GiBs", "0GiB", "1kB", "inf GB"])
def test_other_memory_is_refused_with_a_way_to_write_it(text):
    with pytest.raises(ConfigError, match=r"memory=.*MiB"):
        parse_memory(text)


def test_a_share_of_the_host_is_each_process():
    assert budget(torch.device("cpu"), 2, 8 * MIB) == 4 * MIB


# --- --write


CONFIG = """\
# my run
data: d.yaml  # mine
batch: 16 # too much
epochs: 3

checkpoint: stages
names: [a, b] # two
"""


def test_write_changes_its_lines_and_nothing_else(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(CONFIG)
    said = write(file, {"batch": 4, "checkpoint": "off", "offload": True})
    expected = CONFIG.replace("batch: 16", "batch: 4").replace("stages", "off") + "offload: true\n"
    assert file.read_text() == expected
    loaded = load_settings(Settings, file)
    assert (loaded.batch, loaded.checkpoint, loaded.offload, loaded.epochs) == (4, "off", True, 3)
    assert "batch: 16 -> 4" in "\n".join(said)
    assert len(said) == 3
    assert "already" in write(file, {"batch": 4, "checkpoint": "off", "offload": True})[0]
    assert file.read_text() == expected
    assert [one.name for one in tmp_path.iterdir()] == ["my.yaml"]


def test_write_adds_no_defaults_and_copes_with_a_last_line_without_an_end(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("data: d.yaml")
    write(file, {"batch": 16, "checkpoint": "off", "offload": False})
    assert file.read_text() == "data: d.yaml"
    write(file, {"batch": 8, "checkpoint": "all", "offload": False})
    assert file.read_text() == "data: d.yaml\nbatch: 8\ncheckpoint: all\n"


def test_write_keeps_mode_ends_of_lines_and_links(tmp_path):
    file, link = tmp_path / "my.yaml", tmp_path / "link.yaml"
    file.write_bytes(CONFIG.replace("\n", "\r\n").encode())
    file.chmod(0o640)
    link.symlink_to(file)
    write(link, {"batch": 4, "checkpoint": "stages", "offload": False})
    assert file.read_bytes() == CONFIG.replace("batch: 16", "batch: 4").replace("\n", "\r\n").encode()
    assert file.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()


@pytest.mark.parametrize("text", ["{data: d.yaml, epochs: 3}\n", "data: d.yaml\n...\n"])
def test_write_leaves_a_file_that_it_cannot_edit(tmp_path, text):
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="batch: 4"):
        write(file, {"batch": 4, "checkpoint": "off", "offload": False})
    assert file.read_text() == text


def test_write_needs_a_file(capsys):
    assert run("tune", "data=d.yaml", "--write") == 2
    assert "--write" in capsys.readouterr().err


# --- settings


def test_settings_of_tune_are_those_of_the_run_and_its_memory():
    given = load_settings(TuneSettings, None, ["data=d.yaml", "memory=4GiB", "epochs=3", "batch=auto"])
    assert given.memory == "4GiB"
    assert given.of_run() == load_settings(Settings, None, ["data=d.yaml", "epochs=3", "batch=auto"])
    assert given.of_run().model_fields_set == {"data", "epochs", "batch"}
    assert parse(["tune", "my.yaml"]).min_bn_batch == 8


def test_flags_stand_anywhere_and_unknown_ones_are_refused():
    options = parse(["tune", "my.yaml", "--estimate", "memory=4GiB", "--min-bn-batch", "4", "epochs=3"])
    assert options.arguments == ["my.yaml", "memory=4GiB", "epochs=3"]
    assert (options.estimate, options.min_bn_batch, options.write) == (True, 4, False)
    with pytest.raises(SystemExit):
        parse(["tune", "my.yaml", "--wrote"])


@pytest.mark.parametrize("value", ["0", "many", "-2", "1.5"])
def test_batch_is_a_number_or_auto(value):
    with pytest.raises(ConfigError, match="batch="):
        settings(f"batch={value}")


def test_memory_without_a_unit_is_told_of_its_unit_from_the_command_line(capsys):
    assert run("tune", "data=none.yaml", "memory=4") == 2
    assert "memory=4: a number and a unit: memory=4GiB" in capsys.readouterr().err
