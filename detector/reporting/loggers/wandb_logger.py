"""Weights & Biases: online where somebody is logged in, else offline; WANDB_MODE decides first. Files: DIR/wandb."""

import json
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from detector.files import replaced
from detector.reporting.journal import Event, WindowRow
from detector.reporting.loggers.scalars import of_epoch, of_window
from detector.reporting.reports import EpochRow, Facts, Had

TOLD = "logged.json"  # beside its files: which run this was, its id there, and the last window and epoch it was told


class WeightsAndBiases:
    """What a run that was killed had told of its last epoch it tells again, under the same numbers of windows."""

    def __init__(self) -> None:
        import wandb

        self._wandb = wandb

    def begin(self, facts: Facts) -> Had:
        folder = facts.folder / "wandb"
        folder.mkdir(exist_ok=True)
        self._file, self._told = folder / TOLD, self._told_before(folder / TOLD, facts)
        had = Had(self._told["window"], self._told["epoch"])
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "detector"),
            name=facts.folder.name,
            id=self._told["id"],
            resume="allow" if had != Had() else None,
            dir=str(facts.folder),
            config=dict(facts.settings),
            mode=None if "WANDB_MODE" in os.environ or self._wandb.login(prompt=False) else "offline",
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("epoch/*", step_metric="epoch")
        self._keep()
        return had

    def window(self, row: WindowRow) -> None:
        self._told["window"] = row.window
        self._run.log(of_window(row), step=row.window)

    def epoch(self, row: EpochRow, window: int) -> None:
        self._told["epoch"] = int(row["epoch"])
        self._run.log({"epoch": int(row["epoch"]), **of_epoch(row)}, step=self._told["window"])
        self._keep()

    def event(self, event: Event) -> None:
        self._run.summary[f"event/{event.kind}"] = event.text or event.kind

    def picture(self, path: Path) -> None:
        self._run.log({path.stem: self._wandb.Image(str(path))}, step=self._told["window"])

    def end(self, state: str) -> None:
        self._keep()
        self._run.finish(exit_code=int(state == "failed"))

    def _told_before(self, file: Path, facts: Facts) -> dict[str, Any]:
        with suppress(OSError, ValueError, KeyError):
            told = json.loads(file.read_text(encoding="utf-8"))
            if told["run"] == facts.identity and not facts.left:
                return told
        return {"run": facts.identity, "id": uuid.uuid4().hex[:16], "window": 0, "epoch": 0}

    def _keep(self) -> None:
        with replaced(self._file) as beside:
            beside.write_text(json.dumps(self._told), encoding="utf-8")
