"""Errors a user can mend. Each message carries the place, the value, the rule and the remedy."""


class DetectorError(ValueError):
    """Base of every error that is the input's fault and not the program's."""


class ConfigError(DetectorError):
    """A setting, a run config or a model description is wrong."""


class DataError(DetectorError):
    """A data-set description, an image or a label file is wrong."""


class CheckpointError(DetectorError):
    """A checkpoint is missing, damaged or made for something else."""
