"""The mathematics of SAO: advantages, losses, diagnostics and the train step. It knows no model."""
