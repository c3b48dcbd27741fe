"""The page of a training run: `record` reads what a run left, `page` shows it, the others are its parts."""
