"""The oracle: the recursion of DESIGN.md written down literally, on one process, over Megatron's GPT model.

Of Megatron only the model, the data and the argument parser are used. Schedule, gradient accumulation, norm, clipping,
AdamW, learning rate, weight decay, delay and its corrections are written out here, in the order of operations that
gives Megatron's bits. Nothing is imported from megatron_asyncpp, directly or through another module (a test checks
that).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args, training

from tests.harness.reference import Reference
from tests.harness.results import RankResult, Weights

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def install(reference: Reference, result: RankResult, initial: Weights | None) -> None:
    """Make Megatron's pretrain() build a bare model (no DDP, no optimizer) and run the oracle's loop over it."""

    def build(*_: Any, cfg_container: Any, **__: Any) -> tuple[list, None, None]:
        args = get_args()
        args.train_iters = len(microbatches_of_batches(args))  # not known yet if --train-samples was given
        args.iteration = args.num_floating_point_operations_so_far = 0
        builder = cfg_container.model.get_builder_cls()(cfg_container.model)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return builder.build_distributed_models(pg_collection=groups, wrap_with_ddp=False), None, None

    def train(forward_step: Any, model: list, optimizer: Any, scheduler: Any, data: Any, *_: Any, **__: Any):
        Oracle(reference, model[0], initial).train(forward_step, data, result)
        return len(result.losses), 0

    training.setup_model_and_optimizer = build
    training.train = train


class Oracle:
    """V, the optimizer's state and the last update, as plain dicts by parameter name."""

    def __init__(self, reference: Reference, model: torch.nn.Module, initial: Weights | None) -> None:
        self.reference, self.model, self.args = reference, model, get_args()
        self.parameters = dict(model.named_parameters())
        assert all(p.dtype == torch.float32 for p in self.parameters.values()), "the oracle is for fp32"
        self.leaves = dict(self.parameters)  # what gradients are taken of
        if reference.tied_apart:
            assert OUTPUT not in self.parameters, "the embeddings aren't tied"
            self.leaves[OUTPUT] = output = self.parameters[EMBEDDING].detach().clone().requires_grad_()
            model.shared_embedding_or_output_weight = lambda: output
        start = initial if initial is not None else {n: p.detach() for n, p in self.parameters.items()}
        assert start.keys() == self.parameters.keys(), (
            f"initial weights: {sorted(start.keys() ^ self.parameters.keys())}"
        )
        self.versions = [{n: start[n].clone() for n in self.parameters}]  # versions[k] is V(k)
        self.microbatches = microbatches_of_batches(self.args)
        self.updates = 0
        self.mean, self.square, self.last_update, self.last_gradient = (
            {n: torch.zeros_like(w) for n, w in start.items()} for _ in range(4)
        )

    def train(self, forward_step: Any, data: Any, result: RankResult) -> None:
        args = self.args
        result.initial = {n: w.clone() for n, w in self.versions[0].items()}
        samples = 0  # that the schedule has counted before batch k
        for k, microbatches in enumerate(self.microbatches):
            loss, gradients = self.gradients(k, forward_step, data, microbatches)
            norm = self.norm(gradients)
            if args.clip_grad > 0 and (scale := args.clip_grad / (norm + 1e-6)) < 1:
                gradients = {n: g * scale for n, g in gradients.items()}
            rate = learning_rate(args, samples)
            if k in self.reference.skipped:
                self.versions.append(self.versions[k])
            else:
                samples += microbatches * args.micro_batch_size
                self.updates += 1
                self.versions.append(self.updated(k, gradients, rate))
            result.losses.append(loss)
            result.grad_norms.append(torch.tensor(norm).item())  # train_step reports it through an fp32 tensor
            result.learning_rates.append(rate)
            print(
                f"oracle: batch {k} on V({self.reference.version(k, len(self.microbatches))}), loss {loss:.6f}",
                flush=True,
            )
        result.final = self.versions[-1]

    def gradients(self, k: int, forward_step: Any, data: Any, microbatches: int) -> tuple[float, Weights]:
        """Loss and gradient of batch k at W(k): for each replica microbatch after microbatch, summed from zero."""
        version = self.versions[self.reference.version(k, len(self.microbatches))]
        for name, p in self.leaves.items():
            p.data.copy_(version[name] if name in version else version[EMBEDDING])
        replicas = self.reference.replicas
        sums = [{n: torch.zeros_like(p) for n, p in self.leaves.items()} for _ in range(replicas)]
        reports: list[list] = [[] for _ in range(replicas)]
        for m in range(microbatches):
            output, loss_function = forward_step(data, self.model)
            loss, tokens, report = loss_function(output)
            loss = loss / torch.clamp(tokens, min=1) / (microbatches // replicas)
            for name, g in zip(self.leaves, torch.autograd.grad(loss, list(self.leaves.values())), strict=True):
                sums[m % replicas][name].add_(g)
            reports[m % replicas].append(report["lm loss"])
        total = {n: added(one[n] * (1 / replicas) for one in sums) for n in self.leaves}
        if self.reference.tied_apart:
            total[EMBEDDING] = total[EMBEDDING] + total.pop(OUTPUT)
        summed = added(torch.vstack(of_one).sum(dim=0) for of_one in reports)
        return (summed[0] / summed[1]).item(), total

    def norm(self, gradients: Weights) -> float:
        """Global gradient norm: squares are summed within a stage, decayed parameters first, then over the stages."""
        if self.reference.exact_norm:
            return math.sqrt(sum(g.double().pow(2).sum().item() for g in gradients.values()))
        total = torch.zeros(1)
        for stage in self.reference.norm_partition or (tuple(gradients),):
            ordered = sorted(stage, key=lambda name: not self.decays(name))
            norms = torch.tensor([torch.norm(gradients[name]) for name in ordered])
            total += torch.norm(norms) ** 2
        return total.item() ** 0.5

    def decays(self, name: str) -> bool:
        """Megatron's rule: no weight decay on biases and other vectors."""
        return not name.endswith(".bias") and self.parameters[name].dim() != 1

    def updated(self, k: int, gradients: Weights, rate: float) -> Weights:
        """V(k+1) = V(k) - u_k - lam * (u_k - u_{k-1}), where V(k) - u_k is AdamW's step from V(k)."""
        args, after = self.args, {}
        lam = self.reference.correction(k, len(self.microbatches))
        for name, old in self.versions[k].items():
            g, new = self.corrected(k, name, gradients[name]), old.clone()
            mean, square = self.mean[name], self.square[name]
            if self.decays(name):
                new.mul_(1 - rate * args.weight_decay)
            mean.lerp_(g, 1 - args.adam_beta1)
            square.mul_(args.adam_beta2).addcmul_(g, g, value=1 - args.adam_beta2)
            denominator = (square.sqrt() / (1 - args.adam_beta2**self.updates) ** 0.5).add_(args.adam_eps)
            new.addcdiv_(mean, denominator, value=-(rate / (1 - args.adam_beta1**self.updates)))
            if self.reference.error_feedback is not None and self.reference.feedback_on == "update":
                u = old - new
                if lam is not None:
                    new.sub_(lam * (u - self.last_update[name]))
                self.last_update[name] = u.to(self.reference.feedback_dtype)
            after[name] = new
        return after

    def corrected(self, k: int, name: str, g: torch.Tensor) -> torch.Tensor:
        """The gradient that AdamW steps with: g, or what DC-ASGD or Error Feedback on gradients makes of it."""
        if (lam := self.reference.delay_compensation) is not None:
            ran_on = self.versions[self.reference.version(k, len(self.microbatches))]
            return g + lam * g * g * (self.versions[k][name] - ran_on[name])
        if self.reference.error_feedback is None or self.reference.feedback_on == "update":
            return g
        last, self.last_gradient[name] = self.last_gradient[name], g.to(self.reference.feedback_dtype)
        lam = self.reference.correction(k, len(self.microbatches))
        return g if lam is None else g + lam * (g - last)


def added(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Their sum, from the first to the last."""
    return functools.reduce(torch.add, tensors)


def microbatches_of_batches(args: Any) -> list[int]:
    """M of each batch: one number, or a schedule of batch sizes that begin at numbers of consumed tokens."""
    if args.step_batch_size_schedule is None:
        return [args.global_batch_size // args.micro_batch_size] * args.train_iters
    steps = [tuple(map(int, step.split(":"))) for step in args.step_batch_size_schedule.split()]
    sizes: list[int] = []
    while sum(sizes) < args.train_samples:
        sizes.append(max(size for tokens, size in steps if tokens <= sum(sizes) * args.seq_length))
    return [size // args.micro_batch_size for size in sizes]


def learning_rate(args: Any, samples: int) -> float:
    """The rate after so many samples: linear warm-up, then constant, linear or cosine down to min_lr."""
    if args.train_samples is not None:
        decay, warmup = args.lr_decay_samples or args.train_samples, args.lr_warmup_samples
    else:
        decay = (args.lr_decay_iters or args.train_iters) * args.global_batch_size
        warmup = args.lr_warmup_iters * args.global_batch_size
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    if warmup > 0 and samples <= warmup:
        return args.lr_warmup_init + (args.lr - args.lr_warmup_init) * float(samples) / float(warmup)
    if args.lr_decay_style == "constant":
        return args.lr
    if samples > decay:
        return args.min_lr
    ratio = float(samples - warmup) / float(decay - warmup)
    shapes = {"linear": lambda: 1.0 - ratio, "cosine": lambda: 0.5 * (math.cos(math.pi * ratio) + 1.0)}
    return args.min_lr + shapes[args.lr_decay_style]() * (args.lr - args.min_lr)
