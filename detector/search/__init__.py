"""Hyper-parameters on Optuna: what is varied, what is sought, and trials that are training runs."""
