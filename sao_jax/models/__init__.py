"""One transformer for policy and critic, in training and in sampling: attention, experts, router, heads, LoRA.

Parameters, token ids, positions and segments enter; hidden states leave, and from them token log-probabilities,
entropies and values, all in fp32. Parameters are declared once, as trees of `ParamSpec`.
"""
