"""What the forkserver of the tests imports once, and every rank then finds in memory."""

from tests.harness.forkserver import import_megatron

import_megatron(
    "tests.harness.fixture",
    "tests.harness.oracle",
    "tests.harness.record",
    "pytest",  # a test module with a hook imports it
)
