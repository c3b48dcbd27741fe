"""Something fails on one process of two: both end, soon, and what is said is what happened."""

import failing_rank
import pytest
import ranks
from scenes import MINUTE, write_dataset

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", [*failing_rank.PLACES])
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
