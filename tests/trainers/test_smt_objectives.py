"""One step of SMT and DMT against loops over positions, and where their gradients go."""

import pytest
import torch
import torch.nn.functional as F
from smt_cases import episodes, random_batch, tiny_pair

from hf_recurrent.trainers.smt.smt_objective import DmtObjective, SmtObjective, uniformity_loss

CONTEXT, FUTURE = 4, 3


@pytest.fixture
def pair():
    return tuple(model.double() for model in tiny_pair())


def all_anchors(inputs):
    return torch.arange(inputs.shape[1]).expand_as(inputs)


def some_anchors(inputs):
    return torch.tensor([[0, 5, 7], [1, 6, 11], [3, 7, 8]])


@pytest.mark.parametrize("choose", [all_anchors, some_anchors])
def test_smt_is_the_paper_s_equation(pair, choose):
    student, teacher = pair
    inputs, labels, resets = random_batch()
    anchors = choose(inputs)
    objective = SmtObjective(
        student, teacher, context_length=CONTEXT, future_length=FUTURE,
        decoder_weight=0.7, dynamics_weight=0.3, uniformity_weight=0.2,
    )  # fmt: skip
    losses = objective(inputs, labels, resets, anchors)

    def memory(row, place, start):
        if place < start:
            return torch.zeros(1, 3, 16, dtype=torch.float64)
        return teacher.encode(inputs[row : row + 1, max(start, place - CONTEXT + 1) : place + 1])

    nats, firsts, squares, memories = [], [], [], []
    for row in range(len(inputs)):
        bounds = episodes(resets[row])
        for place in anchors[row].tolist():
            start, end = bounds[place]
            now = memory(row, place, start)
            memories.append(now)
            step = student.update(memory(row, place - 1, start), inputs[row, place : place + 1])
            squares.append((step - now).square().mean())
            future = inputs[row : row + 1, place + 1 : min(end, place + FUTURE) + 1]
            logits = teacher.decode(now, F.pad(future, (0, FUTURE - future.shape[1])))
            for number, target in enumerate(labels[row, place : min(end, place + FUTURE)].tolist()):
                if target >= 0:
                    nats.append(-logits[0, number].log_softmax(-1)[target])
                    firsts += nats[-1:] if number == 0 else []
    uniformity = uniformity_loss(torch.cat(memories).view(*anchors.shape, 3, 16))
    expected = [torch.stack(part).mean() for part in (nats, squares, firsts)]
    for value, wanted in zip((losses.decoder_loss, losses.dynamics_loss, losses.teacher_loss), expected, strict=True):
        assert value.item() == pytest.approx(wanted.item(), rel=1e-10)
    total = 0.7 * expected[0] + 0.3 * expected[1] + 0.2 * uniformity
    assert losses.total.item() == pytest.approx(total.item(), rel=1e-10)
    parameters = [p for p in objective.parameters() if p.requires_grad]
    for mine, wanted in zip(
        torch.autograd.grad(losses.total, parameters, allow_unused=True),
        torch.autograd.grad(total, parameters, allow_unused=True),
        strict=True,
    ):
        assert (mine is None) == (wanted is None)
        if mine is not None:
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("detached", [False, True])
def test_only_the_joint_way_shapes_the_encoder_by_the_dynamics(pair, detached):
    student, teacher = pair
    inputs, labels, resets = random_batch()
    objective = SmtObjective(
        student, teacher, context_length=CONTEXT, future_length=FUTURE,
        decoder_weight=0, uniformity_weight=0, detached=detached,
    )  # fmt: skip
    objective(inputs, labels, resets, all_anchors(inputs)).total.backward()
    encoder = sum(float(p.grad.abs().sum()) for p in teacher.encoder.parameters() if p.grad is not None)
    assert (encoder == 0) == detached
    assert all(p.grad.abs().sum() > 0 for p in student.model.memory_update.parameters())


def longest_path(tensor):
    """Operations from a loss back to the farthest leaf."""
    lengths, stack = {}, [tensor.grad_fn]
    while stack:
        node = stack[-1]
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        waiting = [parent for parent in parents if parent not in lengths]
        if waiting:
            stack += waiting
        else:
            lengths[node] = 1 + max((lengths[parent] for parent in parents), default=0)
            stack.pop()
    return lengths[tensor.grad_fn]


def test_smt_has_no_unrolling_and_dmt_has(pair):
    smt, dmt = {}, {}
    for steps in (8, 32):
        inputs, labels, resets = random_batch(steps=steps)
        anchors = all_anchors(inputs)
        objective = SmtObjective(*pair, context_length=steps, future_length=steps)
        smt[steps] = longest_path(objective(inputs, labels, resets, anchors).total)
        dmt[steps] = longest_path(DmtObjective(*pair, context_length=steps)(inputs, labels, resets, anchors, 0).total)
    assert smt[32] <= smt[8]  # fused parts of long blocks are shorter
    assert dmt[32] > 3 * dmt[8]


@pytest.mark.parametrize("start", [0, 4])
def test_dmt_rolls_out_from_the_teacher_s_memory(pair, start):
    student, teacher = pair
    inputs, labels, resets = random_batch()
    anchors = torch.tensor([[4, 6, 11], [5, 6, 7], [4, 10, 11]])
    losses = DmtObjective(student, teacher, context_length=CONTEXT)(inputs, labels, resets, anchors, start)
    squares, nats = [], []
    for row in range(len(inputs)):
        bounds = episodes(resets[row])
        memory = torch.zeros(1, 3, 16, dtype=torch.float64)
        if start:
            begin = bounds[start - 1][0]
            memory = teacher.encode(inputs[row : row + 1, max(begin, start - CONTEXT) : start])
        for place in range(start, inputs.shape[1]):
            memory = torch.zeros_like(memory) if resets[row, place] else memory
            memory = student.update(memory, inputs[row, place : place + 1])
            if labels[row, place] >= 0:
                nats.append(-student.readout(memory)[0].log_softmax(-1)[labels[row, place]])
            if place in anchors[row].tolist():
                context = inputs[row : row + 1, max(bounds[place][0], place - CONTEXT + 1) : place + 1]
                squares.append((memory - teacher.encode(context)).square().mean())
    assert losses.memory_loss.item() == pytest.approx(torch.stack(squares).mean().item(), rel=1e-10)
    assert losses.readout_loss.item() == pytest.approx(torch.stack(nats).mean().item(), rel=1e-10)


def dmt_gradients(pair, gradient_steps, readout_weight=1):
    student, teacher = pair
    inputs, labels, resets = random_batch(resets=(0,))
    objective = DmtObjective(student, teacher, context_length=CONTEXT, gradient_steps=gradient_steps)
    labels = labels if readout_weight else torch.full_like(labels, -100)
    losses = objective(inputs, labels, resets, all_anchors(inputs), 0)
    parameters = [*student.model.memory_update.parameters(), student.model.embed_tokens.weight]
    grads = torch.autograd.grad(losses.total, parameters, retain_graph=True)
    teacher_grads = torch.autograd.grad(losses.total, list(teacher.parameters()), allow_unused=True)
    assert all(grad is None for grad in teacher_grads)
    return torch.cat([grad.flatten() for grad in grads])


def test_the_readout_s_loss_does_not_reach_the_rnn(pair):
    torch.testing.assert_close(dmt_gradients(pair, None), dmt_gradients(pair, None, readout_weight=0))


def test_truncation_through_time(pair):
    whole, four, one = (dmt_gradients(pair, steps) for steps in (None, 4, 1))
    torch.testing.assert_close(dmt_gradients(pair, 12), whole)
    assert (one - whole).norm() > 1e-3 * whole.norm()
    assert (four - whole).norm() < (one - whole).norm()
    # One step: every memory is a label of the step before it, taken as a given input.
    student, teacher = pair
    inputs, _, resets = random_batch(resets=(0,))
    objective = DmtObjective(student, teacher, context_length=CONTEXT)
    anchors = all_anchors(inputs)
    with torch.no_grad():
        memory = objective.encode(inputs, torch.zeros_like(inputs), anchors, CONTEXT)
        own = objective.roll_out(torch.zeros_like(memory[:, 0]), inputs, resets)
    before = torch.cat([torch.zeros_like(own[:, :1]), own[:, :-1]], 1)
    loss = (student.update(before, inputs) - memory).square().mean()
    parameters = [*student.model.memory_update.parameters(), student.model.embed_tokens.weight]
    single = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, parameters)])
    torch.testing.assert_close(one, single, rtol=1e-9, atol=1e-12)


def test_ngrams_reach_back_inside_an_episode():
    """Updates at positions and rollouts read the last bytes that `forward` reads."""
    student, teacher = (model.double() for model in tiny_pair())
    student = type(student)(
        type(student.config)(**student.config.to_dict() | {"ngram_orders": [2, 4], "ngram_rows": 32})
    )
    torch.nn.init.normal_(student.double().model.embed_ngrams.weight)
    inputs, labels, resets = random_batch()
    positions = all_anchors(inputs)
    objective = DmtObjective(student, teacher, context_length=CONTEXT, gradient_steps=2)
    starts = torch.tensor([[start for start, _ in episodes(row)] for row in resets])
    states = [student.init_state(3)]
    for step in range(inputs.shape[1]):
        one = slice(step, step + 1)
        states.append(student(inputs[:, one], state=states[-1], reset_mask=resets[:, one]).state)
    memories = torch.stack([state["memory"] for state in states[1:]], 1)
    previous = torch.stack([state["memory"] for state in states[:-1]], 1).masked_fill(resets[..., None, None], 0)
    torch.testing.assert_close(objective.update(previous, inputs, starts, positions), memories.flatten(0, 1))
    for start in (0, 3):
        rolled = objective.roll_out(states[start]["memory"], inputs, resets, start, 2)
        torch.testing.assert_close(rolled, memories[:, start:])
    objective(inputs, labels, resets, positions[:, 3:], 3).total.backward()
    assert student.model.embed_ngrams.weight.grad.to_dense().any()


def test_ngrams_at_the_output_are_refused():
    student, teacher = tiny_pair()
    student.config.ngram_output = True
    with pytest.raises(ValueError, match="a readout that has no n-grams"):
        SmtObjective(student, teacher, context_length=CONTEXT, future_length=FUTURE)
