#!/usr/bin/env bash
# From a fresh clone to a trained detector: makes .venv, trains on drawn shapes, and says where the pictures are.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
ensure_venv ""

.venv/bin/detector train configs/quickstart.yaml "$@"
cat <<'TEXT'

Look at the pictures in runs/quickstart:
  train_epoch1_batch0.jpg   what the network was trained on
  validation.jpg            the truth beside what the best checkpoint found
  curves.png                losses and mAP over the epochs
  precision_recall.png, f1.png, confusion.png

Use it:
  .venv/bin/detector predict runs/quickstart/weights/best.pt datasets/shapes/images/val
TEXT
