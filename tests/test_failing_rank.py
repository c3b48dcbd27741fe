"""Something fails on one process of two: both end, soon, and what is said is what happened."""

import failing_rank
import pytest
import ranks
from scenes import MINUTE, write_dataset

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", [place for place in failing_rank.PLACES if place != "killed"])
def test_an_error_on_one_rank_ends_all_with_its_message(tmp_path, place, rank):
    if (place, rank) == ("checkpoint", 1):
        pytest.skip("only the main process writes")
    data = write_dataset(tmp_path / "data", train=8)
    settings = [f"data={data}", f"model={MINUTE}", "imgsz=64", "nbs=4", "batch=2", "workers=0", "plots=false",
                "epochs=3", "amp=fp32", "device=cpu", f"project={tmp_path}", "cache=false"]  # fmt: skip
    done = ranks.run(2, "failing_rank.py", place, rank, "train", *settings)
    assert done.returncode in (1, 2), done.stderr  # and no rank had to be killed
    message = str(failing_rank.PLACES[place][2]).removeprefix("[Errno 28] ")
    assert message in done.stderr, done.stderr
    assert "epoch 3/3" not in done.stdout


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("pipeline", ["off", "2"])
def test_none_waits_for_one_that_was_killed(tmp_path, rank, pipeline):
    """With rank 0 the store is gone, too, by which processes tell each other that they give up."""
    data = write_dataset(tmp_path / "data", train=8)
    words = [f"data={data}", f"model={MINUTE}", "imgsz=64", "nbs=4", "batch=2", "workers=0", "plots=false", "amp=fp32",
             "device=cpu", f"project={tmp_path}", f"pipeline={pipeline}"]  # fmt: skip
    with ranks.Printed() as printed:
        statuses = ranks.ask(do="run", processes=2, script="failing_rank.py",
                             arguments=["killed", str(rank), "train", *words], **printed.files)  # fmt: skip
        said = [*printed.texts()]
    assert statuses[rank] == -9
    assert statuses[1 - rank] in (1, 2), said  # by itself: who hangs is killed
    assert not (tmp_path / "train" / "weights" / "best.pt").exists()
