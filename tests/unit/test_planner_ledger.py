"""What a ledger counts of operations on fake tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.planner.ledger import Ledger


def test_traffic_is_what_operations_read_and_write() -> None:
    """Of a product, its sum and their gradients; autograd asks every tensor for its device, and views are free."""
    with FakeTensorMode(), Ledger(only_fake=True) as ledger:
        rows, columns = torch.empty(2, 8, 4, requires_grad=True), torch.empty(16, 4, requires_grad=True)
        F.linear(rows, columns).sum().backward()
    product, of_rows, of_columns = 2 * 8 * 16, 2 * 8 * 4, 16 * 4
    three = product + of_rows + of_columns  # what each of the three products reads and writes
    assert sum(each.bytes for each in ledger.books.operations) == 4 * (3 * three + (product + 1) + 2)
    assert sum(each.flops for each in ledger.books.operations) == 3 * 2 * product * 4
