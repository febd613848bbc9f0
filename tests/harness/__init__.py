"""The test harness: `run` starts the ranks of one configuration and returns their losses and weights.

Kept empty of imports on purpose: the oracle lives in this package and must not import megatron_asyncpp through it.
"""
