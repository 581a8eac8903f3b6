"""From a compiled trace to PyTorch's autograd: one specialisation of a graph as a callable.

A `Runner` gathers the program's inputs from the caller's arguments, runs it, inside one autograd Function when gradients
are wanted, writes new contents to mutated inputs, and puts the results together. Everything that can be decided once is
decided in its constructor.
"""

from __future__ import annotations

import torch

from .. import _core
from .._autograd import make_function, mark_second_derivatives
from .record import RecordedGraph


class _Carrier(torch.Tensor):
    """An empty tensor that holds a program's saved values, so that they live and die with autograd's saved tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def detach(self):  # activation checkpointing stores what it recomputed through detach()
        return self


_EMPTY = torch.empty(0)


def _carry(saved) -> torch.Tensor:
    carrier = torch.Tensor._make_subclass(_Carrier, _EMPTY)
    carrier.saved = saved
    return carrier


def _hooks_lose_attributes() -> bool:
    """Whether saved-tensor hooks are active that make new tensors of what they get (checkpointing keeps ours)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not getattr(hooks[0], "__module__", "").startswith("torch.utils.checkpoint")


_NO_SECOND_DERIVATIVE = (
    "second derivative: a program compiled by fulmen has first derivatives only; "
    "run this part of the model without torch.compile to differentiate it twice"
)
_Program = make_function("FulmenProgram", _NO_SECOND_DERIVATIVE)


class _Run(torch.autograd.Function):
    """For calls that C++ doesn't take (program_call.cpp): saved values go through hooks on saved tensors.
    `inputs` is the list of all inputs; `with_grad` are those of them that gradients are made for, once more."""

    @staticmethod
    def forward(ctx, runner, inputs, *with_grad):
        outputs, saved = runner.compiled.forward(inputs, False)
        ctx.runner = runner
        ctx.set_materialize_grads(False)
        ctx.kept = saved if _hooks_lose_attributes() else None
        ctx.save_for_backward(*[inputs[i] for i in runner.saved_places], _carry(saved))
        if runner.whole_numbers:
            ctx.mark_non_differentiable(*[outputs[i] for i in runner.whole_numbers])
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        runner = ctx.runner
        *inputs, carrier = ctx.saved_tensors
        saved = getattr(carrier, "saved", None) or ctx.kept
        if torch.is_grad_enabled():
            with torch.no_grad():
                made = runner.compiled.backward(saved, grads, inputs)
            made = [made[i] for i in runner.grad_places]
            return (None, None, *mark_second_derivatives(_NO_SECOND_DERIVATIVE, made, (*inputs, *grads)))
        made = runner.compiled.backward(saved, grads, inputs)
        return (None, None, *[made[i] for i in runner.grad_places])


def draw_seed() -> torch.Tensor:
    """Philox key and counter offset from PyTorch's generator, so that torch.manual_seed decides what is drawn."""
    return torch.empty(2, dtype=torch.int64).random_()


class Runner:
    """One specialisation: called with the graph's arguments."""

    def __init__(self, recorded: RecordedGraph, compiled):
        self.recorded = recorded
        self.compiled = compiled
        self.constants = list(recorded.constants)
        places = recorded.tensor_arguments
        self.places = places
        self.takes_all = places == list(range(len(places)))
        self.argument_count = len(places)
        self.grad_places = list(compiled.inputs_with_grad)
        self.saved_places = list(compiled.backward_saved_inputs)
        self.training = compiled.has_backward
        with_grad = set(compiled.grad_outputs)
        self.whole_numbers = [i for i in range(compiled.output_count) if i not in with_grad]
        input_of = {argument: i for i, argument in enumerate(places)}
        mutated = {input_of[argument] if argument >= 0 else len(places) + ~argument for argument, _ in recorded.mutations}
        self.cloned = sorted(mutated & set(self.saved_places)) if self.training else []
        self.written = [argument for argument, _ in recorded.mutations if argument >= 0] if len(places) > 1 else []
        self.plain = not recorded.mutations and all(r.kind == "output" and not r.steps for r in recorded.results)
        order = [r.index for r in recorded.results]
        self.in_order = self.plain and order == list(range(compiled.output_count))
        self.order = order if self.plain else None
        leaves = list(range(len(recorded.results)))
        flat = torch.utils._pytree.tree_unflatten(leaves, recorded.result_spec)
        self.flat = flat == tuple(leaves) or flat == leaves

    def callable(self):
        """What callers should call: C++ where it takes such graphs, else this runner."""
        if not (self.plain and self.flat):
            return self
        seed = draw_seed if self.recorded.has_seed else None
        hooks = torch._C._autograd._top_saved_tensors_default_hooks
        return _core.program_call(
            self.compiled, _Program, self, seed, hooks, list(self.places), self.constants, self.grad_places, self.whole_numbers, self.order
        )

    def __call__(self, *args):
        if self.takes_all and len(args) == self.argument_count:
            inputs = list(args)
        else:
            inputs = [args[i] for i in self.places]
        if self.constants:
            inputs += self.constants
        if self.recorded.has_seed:
            inputs.append(draw_seed())
        if self.training and torch.is_grad_enabled():
            with_grad = [inputs[i] for i in self.grad_places]
            for i in self.cloned:
                inputs[i] = inputs[i].detach().clone()
            outputs = _Run.apply(self, inputs, *with_grad)
        else:
            outputs = self.compiled.forward(inputs, False)[0]
        if self.in_order and self.flat:
            return outputs
        return self._results(args, outputs)

    def _source(self, args, index: int) -> torch.Tensor:
        return args[index] if index >= 0 else self.constants[~index]

    def _results(self, args, outputs):
        recorded = self.recorded
        for argument, output in recorded.mutations:
            new, old = outputs[output], self._source(args, argument)
            if new.requires_grad:
                old.copy_(new)
            else:
                with torch.no_grad():
                    old.copy_(new)
        leaves = []
        for result in recorded.results:
            if result.kind == "value":
                leaves.append(result.value)
                continue
            tensor = outputs[result.index] if result.kind == "output" else self._source(args, result.index)
            for step in result.steps:
                tensor = step.on_torch(tensor)
            leaves.append(tensor)
        if self.flat:
            return tuple(leaves)
        return torch.utils._pytree.tree_unflatten(leaves, recorded.result_spec)
