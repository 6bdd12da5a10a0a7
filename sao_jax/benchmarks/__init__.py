"""Measurements of this code on the machine at hand, as ratios taken in one run; `launch.benchmark` prints them."""
