"""`watch_worker.py OUT arguments`: trains through Python on one of several ranks; each writes down what it was told."""

import json
import os
import sys

import yaml

import detector

if __name__ == "__main__":
    out, *words = sys.argv[1:]
    told = []

    def on_window(row):
        told.append(row)
        if row["window"] == 4:
            raise detector.StopTraining("the fourth window")

    settings = yaml.safe_load("\n".join(word.replace("=", ": ", 1) for word in words))
    result = detector.train(settings, on_window=on_window)
    with open(f"{out}.{os.environ['RANK']}", "w") as file:
        json.dump([told, sorted(result.metrics)], file)
