"""A step's objects are found by a number while somebody has it; what the process does now is restored."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from lancet_kernels import optimize
from lancet_kernels.ops.context import Context, context_of, during, now


def test_a_context_is_found_by_its_number_until_it_is_gone():
    one, other = Context("sums"), Context("other sums")
    one.layers["dispatch_1"] = "exchange"
    assert context_of(one.number).layers == {"dispatch_1": "exchange"}
    assert context_of(other.number).accumulation == "other sums"
    number = one.number
    assert copy.deepcopy({"of a graph": one})["of a graph"] is one
    del one
    with pytest.raises(KeyError):
        context_of(number)


def test_what_the_process_does_is_restored_after_an_error():
    with during(layer="outer"):
        with contextlib.suppress(ZeroDivisionError), during(layer="inner", runs_a_plan=True):
            assert (now.layer, now.runs_a_plan, now.expects_sizes) == ("inner", True, False)
            raise ZeroDivisionError
        assert (now.layer, now.runs_a_plan) == ("outer", False)


def test_a_backward_finds_its_context_when_the_module_is_gone():
    step = optimize(nn.Linear(4, 1), (torch.ones(2, 4),), strategy="none", cluster="local")
    context = weakref.ref(step._step.context)
    loss = step(torch.ones(2, 4)).sum()
    del step
    gc.collect()
    assert context() is not None
    loss.backward()
    del loss
    gc.collect()
    assert context() is None
