"""The readable loop around the train step: checkpoints, metrics, evaluation, reports."""
