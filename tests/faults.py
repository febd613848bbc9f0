"""Faults and observers that tests plant in a rank, as hooks of the harness."""

from __future__ import annotations

from typing import Any

from tests.harness.results import RankResult


def backward_on_the_newest() -> None:
    """Leave out the switch back to the older weights before a backward."""
    from megatron_asyncpp.runtime.pipeline import Pipeline
    from megatron_asyncpp.runtime.weights import WeightRing

    backward, lend = Pipeline._backward, WeightRing.lend

    def wrong(self: Pipeline, action: Any) -> None:
        WeightRing.lend = lambda ring, version: lend(ring, ring.newest)  # type: ignore[method-assign]
        try:
            backward(self, action)
        finally:
            WeightRing.lend = lend  # type: ignore[method-assign]

    Pipeline._backward = wrong  # type: ignore[method-assign]


def one_live_buffer() -> None:
    """Keep one buffer for all versions, so that a step overwrites weights that pending backwards have seen."""
    from megatron_asyncpp.runtime.weights import WeightRing

    start = WeightRing.__init__

    def init(self: WeightRing, *args: Any, versions: int, **kwargs: Any) -> None:
        start(self, *args, versions=1, **kwargs)

    def lend(self: WeightRing, version: int) -> None:
        self.lent = version

    WeightRing.__init__, WeightRing.lend = init, lend  # type: ignore[method-assign]


def add_linear() -> None:
    """Give every transformer layer an ``nn.Linear``, whose backward uses a saved view of its weight."""
    import torch
    from megatron.core.transformer.transformer_layer import TransformerLayer

    start, forward = TransformerLayer.__init__, TransformerLayer.forward

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        start(self, config, *args, **kwargs)
        self.extra = torch.nn.Linear(config.hidden_size, config.hidden_size, dtype=config.params_dtype)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            self.extra.weight.copy_(torch.randn(self.extra.weight.shape, generator=generator) * 0.05)
            self.extra.bias.zero_()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, context = forward(self, *args, **kwargs)
        return hidden + self.extra(torch.tanh(hidden)), context

    TransformerLayer.__init__, TransformerLayer.forward = init, run


def one_live_buffer_and_linear() -> None:
    """Both of the above."""
    one_live_buffer()
    add_linear()


def poison_batch_three() -> None:
    """Make one weight gradient of batch 3 a NaN on the first stage."""
    import torch
    from megatron.core import parallel_state

    from megatron_asyncpp.runtime.pipeline import Pipeline

    backward = Pipeline._backward

    def poisoned(self: Pipeline, action: Any) -> None:
        backward(self, action)
        if action.batch == 3 and action.microbatch == 0 and parallel_state.is_pipeline_first_stage():
            with torch.no_grad():
                self._ring.parameters[0].main_grad.fill_(float("nan"))

    Pipeline._backward = poisoned  # type: ignore[method-assign]


def leave_at_once() -> None:
    """A rank that leaves doesn't wait for rank 0."""
    from megatron_asyncpp import errors

    errors.HEAD_START = 0.0


def add_running_mean() -> None:
    """Give every transformer layer a buffer that its forward changes."""
    import torch
    from megatron.core.transformer.transformer_layer import TransformerLayer

    start, forward = TransformerLayer.__init__, TransformerLayer.forward

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.register_buffer("running", torch.zeros(1))

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, context = forward(self, *args, **kwargs)
        self.running.lerp_(hidden.detach().mean().view(1), 0.1)
        return hidden + self.running, context

    TransformerLayer.__init__, TransformerLayer.forward = init, run


def add_attribute() -> None:
    """Give every transformer layer a tensor attribute that its forward changes."""
    import torch
    from megatron.core.transformer.transformer_layer import TransformerLayer

    start, forward = TransformerLayer.__init__, TransformerLayer.forward

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.seen = torch.zeros(1)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = self.seen + 1
        return forward(self, *args, **kwargs)

    TransformerLayer.__init__, TransformerLayer.forward = init, run


def watch_evaluations(result: RankResult) -> None:
    """Keep the weights that each evaluation runs on, and the losses it finds."""
    from megatron.training import training

    from tests.harness.record import weights

    evaluate = training.evaluate
    result.extra["evaluations"] = seen = []

    def watched(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = evaluate(forward_step, data, model, *args, **kwargs)
        seen.append((weights(model), {key: float(value) for key, value in found[0].items()}))
        return found

    training.evaluate = watched


def carry_payloads(result: RankResult) -> None:
    """Replace the model by messages that say what they are, and check each where it arrives.

    A forward's output holds its batch, microbatch and the sequence's tokens; a backward's gradient holds the same,
    negated. Every stage checks that it received the microbatch that its plan names, and the last one that the tokens
    which the first stage read are those of its own labels. The runtime, the wire and the data iterators are real.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from megatron_asyncpp import pretrain_gpt
    from megatron_asyncpp.runtime import pipeline
    from megatron_asyncpp.schedules.actions import Forward

    now: list[Any] = []
    pipeline.observers.append(lambda action: now.append(action))
    known = 8  # tokens of a sequence that are carried
    first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    result.extra["arrived"] = arrived = []

    def message(shape: Any, sign: int, *values: Any) -> torch.Tensor:
        content = torch.tensor([now[-1].batch, now[-1].microbatch, *values], dtype=torch.float32)
        carrier = torch.zeros(shape)
        carrier.view(-1)[: len(content)] = sign * content
        return carrier

    def open_message(carrier: torch.Tensor, sign: int, where: str) -> list[float]:
        batch, microbatch, *values = (sign * carrier.detach().view(-1)[: 2 + known]).tolist()
        assert (batch, microbatch) == (now[-1].batch, now[-1].microbatch), f"{where} {batch, microbatch} at {now[-1]}"
        arrived.append((where, int(batch), int(microbatch)))
        return values

    real_forward_step = schedules.forward_step

    def forward_step(
        function: Any, data: Any, model: Any, microbatches: int, inputs: Any, losses: list, *args: Any, **kwargs: Any
    ) -> tuple[Any, torch.Tensor]:
        if not isinstance(now[-1], Forward):  # an evaluation, between two calls
            return real_forward_step(function, data, model, microbatches, inputs, losses, *args, **kwargs)
        own = pretrain_gpt.get_batch(data, None)
        (carrier,) = inputs if isinstance(inputs, list) else [inputs]
        values = own["tokens"].view(-1)[1 : 1 + known].tolist() if first() else open_message(carrier, 1, "forward")
        if last():
            assert values == own["labels"].view(-1)[:known].tolist(), f"labels of other data at {now[-1]}"
            losses.append({"lm loss": torch.tensor([1.0, 1.0])})
            out = torch.ones(1, requires_grad=True).sum()
        else:
            shape = (own["tokens"].shape[1], 1, 32) if first() else carrier.shape
            out = message(shape, 1, *values).requires_grad_()
        return [out], torch.ones([], dtype=torch.int)

    def backward_step(inputs: Any, outputs: Any, gradients: Any, config: Any) -> list[Any]:
        if not last():
            open_message(gradients[0], -1, "backward")
        if first():
            return [None]
        return [message(inputs[0].shape, -1)]

    schedules.forward_step, schedules.backward_step = forward_step, backward_step


def break_payloads(result: RankResult) -> None:
    """As above, but the first stage's iterator skips a sequence at batch 3, as one that is a batch ahead would."""
    carry_payloads(result)
    from megatron.core import parallel_state

    from megatron_asyncpp import pretrain_gpt

    get_batch, count = pretrain_gpt.get_batch, iter(range(1 << 30))

    def skipping(data: Any, vp_stage: Any) -> Any:
        if parallel_state.is_pipeline_first_stage() and next(count) == 12:
            get_batch(data, vp_stage)
        return get_batch(data, vp_stage)

    pretrain_gpt.get_batch = skipping


def _keep_pointers(keep: Any) -> None:
    """Give the ring only those pointers for which ``keep`` holds."""
    from megatron_asyncpp.integration import run

    pointers = run.pointers
    run.pointers = lambda model, leaves: [pointer for pointer in pointers(model, leaves) if keep(pointer)]


def without_bucket_pointers() -> None:
    """Leave out ``bucket.param_data``: a step's result is gathered into, and copied to, an older version's buffer."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket

    _keep_pointers(lambda p: not isinstance(getattr(p, "owner", None), _ParamAndGradBucket))


def without_shard_caches() -> None:
    """Leave out the cached shards of each bucket group: an older version's shard is gathered."""
    from megatron_asyncpp.runtime.pointers import ShardCache

    _keep_pointers(lambda p: not isinstance(p, ShardCache))


def without_views() -> None:
    """Leave out the views that the inner optimizer steps."""
    from megatron_asyncpp.runtime.pointers import View

    _keep_pointers(lambda p: not isinstance(p, View))


def without_copy() -> None:
    """Leave out the copy of the newest values into the buffer that a step then changes in place."""
    from megatron_asyncpp.runtime.weights import WeightRing

    start = WeightRing.__init__

    def init(self: WeightRing, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self._stepped = ()

    WeightRing.__init__ = init  # type: ignore[method-assign]


def walk_aliases(result: RankResult) -> None:
    """After six steps, list the tensors that lie in a version's storage and that the ring doesn't know."""
    import gc

    import torch

    from megatron_asyncpp.runtime.pipeline import Pipeline

    step, calls = Pipeline.optimizer_step, iter(range(1 << 30))
    result.extra["aliases"] = found = []

    def walk(ring: Any) -> None:
        gc.collect()
        slots = [slot for slot in ring._slots if slot is not None]
        known = {id(t) for slot in slots for t in (*slot.parameters, *slot.pointers)} | {id(p) for p in ring.parameters}
        known |= {id(getattr(pointer, "tensor", None)) for pointer in ring._pointers}
        for pointer in ring._pointers:
            known |= {id(pointer.get()), id(getattr(getattr(pointer, "tensor", None), "_base", None))}
            for shards in getattr(getattr(pointer, "group", None), "cached_param_buffer_shard_list", ()):
                known |= {id(shard) for shard in shards or ()}
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and id(thing) not in known:
                found.extend([tuple(thing.shape)] if thing.untyped_storage().data_ptr() in ring._places else [])

    def stepped(self: Pipeline, samples: int) -> Any:
        outcome = step(self, samples)
        if next(calls) == 5:
            walk(self._ring)
        return outcome

    Pipeline.optimizer_step = stepped  # type: ignore[method-assign]


def plant_alias(result: RankResult) -> None:
    """As above, with a model that keeps a view of one of its weights."""
    walk_aliases(result)
    from megatron_asyncpp.integration import run

    pointers = run.pointers

    def planting(model: Any, leaves: Any) -> Any:
        model.planted = next(p for p in model.parameters() if p.numel() > 100).data.view(-1)[:77]
        return pointers(model, leaves)

    run.pointers = planting


def keep_previous_updates(result: RankResult) -> None:
    """After training, hand out what Error Feedback left for the next step: by weight, and in the optimizers' order.

    By weight it is, where the distributed optimizer has only a part of one, with where that begins in the buffer of all
    weights.
    """
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    from megatron_asyncpp.optim.leaves import leaves

    train = training.train
    result.extra["by weight"], result.extra["in order"] = by_weight, in_order = {}, []  # type: ignore[var-annotated]

    def watched(forward_step: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        done = train(forward_step, model, optimizer, *args, **kwargs)
        owners = {}
        for leaf in leaves(optimizer):
            for stepped in (p for group in leaf.optimizer.param_groups for p in group["params"]):
                owners[stepped] = leaf
                in_order.append(leaf.optimizer.state[stepped]["previous_update"].clone())
        (chunk,) = unwrap_model(model)
        for name, p in chunk.named_parameters():
            stepped = p if p in owners else getattr(p, "main_param", None)
            if stepped in owners:
                kept, start = owners[stepped].optimizer.state[stepped]["previous_update"].clone(), None
                if getattr(p, "main_param_sharded", False):
                    start = owners[stepped]._get_model_param_range_map(p)["gbuf_world"].start
                by_weight[name] = (kept, start)
        return done

    training.train = watched


def take_what_has_not_arrived() -> None:
    """Use an input that was posted ahead without waiting for it."""
    from megatron_asyncpp.runtime.wire import PostedAhead

    def take(self: PostedAhead, payload: Any) -> Any:
        if not self._has_neighbour(payload, sends=False):
            return [None]
        tensor, work = self._coming[payload].popleft()
        taken = tensor.detach().clone().requires_grad_()
        work.wait()
        return [taken]

    PostedAhead.take = take  # type: ignore[method-assign]
