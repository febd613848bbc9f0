"""Tests of megatron_asyncpp."""
