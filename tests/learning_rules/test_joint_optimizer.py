"""Row-wise Adagrad, Muon and their joint optimizer, each compared with the equation or with torch."""

import copy
import math

import pytest
import torch
from torch import nn

from hf_recurrent.checkpoints.files import load_tree, save_tree
from hf_recurrent.checkpoints.optimizer_state import load_optimizer_state, optimizer_state
from hf_recurrent.learning_rules.joint_optimizer import JointOptimizer, join_optimizers
from hf_recurrent.learning_rules.muon import Muon, orthogonalized
from hf_recurrent.learning_rules.rowwise_adagrad import RowwiseAdagrad, coalesced, sparse_tables

ROWS, WIDTH = 11, 4


class Table(nn.Module):
    sparse_gradients = True

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=dtype))


class Small(nn.Module):
    """A table, a linear map and a vector."""

    def __init__(self):
        super().__init__()
        self.table, self.map, self.norm = Table(), nn.Linear(WIDTH, 6, bias=False), nn.LayerNorm(6)

    def forward(self, ids):
        return self.norm(self.map(nn.functional.embedding(ids, self.table.weight, sparse=True)))


def gradients(steps=6, seed=0):
    """Sparse gradients with repeated rows, the last of them empty."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        count = 0 if step == steps - 1 else 5
        rows = torch.randint(0, ROWS - 2, (1, count), generator=generator)
        values = torch.randn(count, WIDTH, generator=generator)
        yield torch.sparse_coo_tensor(rows, values, (ROWS, WIDTH), check_invariants=True)


def test_rows_follow_the_equation():
    weight = nn.Parameter(torch.randn(ROWS, WIDTH))
    expected, sums = weight.detach().double(), [0.0] * ROWS
    optimizer = RowwiseAdagrad([weight], lr=0.3, eps=1e-8)
    for gradient in gradients():
        weight.grad = gradient
        optimizer.step()
        for row, values in enumerate(gradient.to_dense().double()):
            sums[row] += float((values**2).mean())
            if sums[row]:
                expected[row] -= 0.3 * values / (math.sqrt(sums[row]) + 1e-8)
    assert torch.allclose(weight.double(), expected, atol=1e-5)
    assert torch.allclose(optimizer.state[weight]["row_sums"].double(), torch.tensor(sums, dtype=torch.double))


def test_dense_gradients_give_the_same_and_untouched_rows_keep_their_bits():
    sparse = nn.Parameter(torch.randn(ROWS, WIDTH))
    before = sparse.detach().clone()
    dense = nn.Parameter(before.clone())
    optimizers = RowwiseAdagrad([sparse]), RowwiseAdagrad([dense])
    for gradient in gradients():
        sparse.grad, dense.grad = gradient, gradient.to_dense()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(sparse, dense, rtol=1e-6, atol=1e-7)
    assert torch.equal(sparse[-2:], before[-2:])  # no gradient has these rows
    assert not torch.isclose(sparse[:3], before[:3]).any()


def test_coalesced_gradients_are_those_of_torch():
    for gradient in gradients():
        found, expected = coalesced(gradient), gradient.coalesce()
        assert found.is_coalesced() and coalesced(found) is found
        assert torch.equal(found.indices(), expected.indices()) and torch.equal(found.values(), expected.values())
    assert coalesced(dense := torch.ones(3, 2)) is dense


def test_the_scale_of_gradients_changes_nothing():
    first = nn.Parameter(torch.zeros(ROWS, WIDTH))
    second = nn.Parameter(torch.zeros(ROWS, WIDTH))
    optimizers = RowwiseAdagrad([first]), RowwiseAdagrad([second])
    for gradient in gradients():
        first.grad, second.grad = gradient, gradient * 2**-10
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(first, second, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_continues_bit_for_bit(tmp_path, dtype):
    weight = nn.Parameter(torch.zeros(ROWS, WIDTH, dtype=dtype))
    optimizer = RowwiseAdagrad([weight])
    steps = [gradient.to(dtype) for gradient in gradients(8)]
    for gradient in steps[:4]:
        weight.grad = gradient
        optimizer.step()
    save_tree(optimizer_state(optimizer), tmp_path, "optimizer")
    other = nn.Parameter(weight.detach().clone())
    resumed = RowwiseAdagrad([other], lr=0.5)
    load_optimizer_state(resumed, load_tree(tmp_path, "optimizer"))
    assert resumed.state[other]["row_sums"].dtype == torch.float32
    for gradient in steps[4:]:
        weight.grad, other.grad = gradient.clone(), gradient.clone()
        optimizer.step(), resumed.step()
    assert torch.equal(weight, other)


def polar_factor(matrix):
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (left @ right).float()


def test_orthogonalized_matrices_are_near_the_polar_factor():
    matrices = torch.randn(3, 24, 16)
    for batch in (matrices, matrices.mT):
        for matrix, found in zip(batch, orthogonalized(batch), strict=True):
            values = torch.linalg.svdvals(found)
            assert values.min() > 0.91 and values.max() < 1.09
            assert (found - polar_factor(matrix)).norm() < 0.08 * 4  # the norm of the factor
    assert torch.allclose(orthogonalized(matrices)[1], orthogonalized(matrices[1:2])[0], atol=1e-5)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_follows_the_equation(nesterov):
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((24, 16), (16, 24), (24, 16))]
    before = [weight.detach().clone() for weight in weights]
    expected, means = [weight.clone() for weight in before], [torch.zeros_like(weight) for weight in before]
    optimizer = Muon(weights, lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=nesterov)
    for _ in range(4):
        for number, weight in enumerate(weights):
            gradient = weight.grad = torch.randn_like(weight)
            means[number] = 0.9 * means[number] + 0.1 * gradient
            direction = 0.1 * gradient + 0.9 * means[number] if nesterov else means[number]
            rate = 0.05 * max(1, len(weight) / weight.shape[1]) ** 0.5
            expected[number] = (1 - 0.005) * expected[number] - rate * polar_factor(direction)
        optimizer.step()
    for weight, other, start in zip(weights, expected, before, strict=True):
        assert (weight - other).norm() < 0.08 * (weight - start).norm()


def test_parts_step_as_they_would_alone():
    torch.manual_seed(1)
    model = Small()
    alone = copy.deepcopy(model)
    base = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    joint = join_optimizers(base, model, "muon", matrix_learning_rate=0.03, table_learning_rate=0.2)
    assert joint.description == "AdamW, Muon, RowwiseAdagrad"
    separate = (
        torch.optim.AdamW(alone.norm.parameters(), lr=0.01, weight_decay=0.1),
        Muon([alone.map.weight], lr=0.03, weight_decay=0.1),
        RowwiseAdagrad([alone.table.weight], lr=0.2),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(joint, lambda step: 1 / (1 + step))
    for step in range(4):
        ids = torch.randint(0, ROWS, (2, 5))
        for part in (model, alone):
            part.zero_grad()
            (part(ids) * torch.arange(6.0)).tanh().sum().backward()
        joint.step()
        for optimizer in separate:
            optimizer.step()
            for group in optimizer.param_groups:  # as the schedule does
                group["lr"] *= (1 + step) / (2 + step)
        schedule.step()
    for weight, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_nothing_to_move_leaves_the_optimizer():
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    assert join_optimizers(optimizer, model) is optimizer
    assert sparse_tables(Small()).keys() == {"table.weight"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda saved: saved["param_groups"][1].update(optimizer="AdamW"), "belong to the optimizers"),
        (
            lambda saved: saved["state"][3].update(row_sums=torch.zeros(ROWS + 1)),
            r"`row_sums` of parameter 3 with shape",
        ),
        (lambda saved: saved["state"][2].update(momentum_buffer=torch.zeros(3)), r"`momentum_buffer` of parameter 2"),
        (lambda saved: saved["state"][0].update(exp_avg=torch.zeros(3)), r"`exp_avg` of parameter 0"),
    ],
)
def test_a_damaged_state_is_refused(change, words):
    model = Small()
    joint = join_optimizers(torch.optim.AdamW(model.parameters()), model, "muon")
    model(torch.arange(4)[None]).tanh().sum().backward()
    joint.step()
    saved = copy.deepcopy(optimizer_state(joint))
    load_optimizer_state(joint, copy.deepcopy(saved))
    change(saved)
    with pytest.raises(ValueError, match=words):
        load_optimizer_state(joint, saved)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: RowwiseAdagrad([nn.Parameter(torch.zeros(3))]), r"shape \(3,\); it must be a matrix"),
        (lambda: RowwiseAdagrad([nn.Parameter(torch.zeros(3, 2))], lr=-1), "`lr` is -1"),
        (lambda: Muon([nn.Parameter(torch.zeros(3))]), r"shape \(3,\); it must be a matrix"),
        (lambda: Muon([nn.Parameter(torch.zeros(3, 2))], momentum=1.0), "`momentum` is 1.0"),
    ],
)
def test_bad_arguments(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_a_joint_optimizer_returns_the_loss_of_its_closure():
    model = Small()
    joint = JointOptimizer([torch.optim.SGD(model.norm.parameters(), lr=0.1), RowwiseAdagrad([model.table.weight])])
    assert joint.step(lambda: 3.0) == 3.0
