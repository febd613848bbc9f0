"""What the forkserver of the benches imports once, and every rank then finds in memory."""

from tests.harness.forkserver import import_megatron

import_megatron(
    "megatron_asyncpp.pretrain_gpt",
    "torch.distributed.pipelining",
    "scripts.bench.sleeping_stages",
    "scripts.bench.peers",
)
