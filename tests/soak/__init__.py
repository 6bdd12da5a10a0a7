"""A toy run among faults of every kind, and what happens to runs on real machines: see launch/soak.sh."""
