"""One block of one stream, forward and backward pass by a learning rule, as one program of a compiled kernel.

The program is recorded from the rule itself, so it computes what the rule computes, up to rounding, for every model,
unit and rule whose operations the kernel has.

Shape letters: T steps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_recurrent.learning_rules.compiled_program import CompiledProgram, Uncompilable, block_cpu, named
from hf_recurrent.learning_rules.optimizers import frozen, without_gradients
from hf_recurrent.learning_rules.rules import LearningRule, NonFiniteLossError
from hf_recurrent.learning_rules.traced_unit import shadowed
from hf_recurrent.modeling.block.recurrent_backbone import NGRAMS
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, upcast
from hf_recurrent.modeling.contexts.counted_predictions import init_network_state
from hf_recurrent.modeling.contexts.ngram_embedding import find_tables, read_ngrams

if TYPE_CHECKING:
    from hf_recurrent.kernels.block_cpu import LoopEnd
    from hf_recurrent.kernels.block_trace import BlockTrace
    from hf_recurrent.kernels.step_graph import Value

# Norms and √(1 - a²) amplify rounding, by 1,000 in one of 1,000 small models; a wrong program is wrong by its values.
_TOLERANCES = {torch.float32: 1e-2, torch.float64: 1e-8}
_INPUTS = ("ids", "labels", "resets")
Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # input_ids, shift_labels and reset_mask, (1, T) each


class CompiledBlock(CompiledProgram):
    """Blocks of T steps of one stream, for a rule and a model on the CPU as they are now.

    Args:
        num_targets: divisor of a block's nats.
        resets: False for blocks without resets only; some models choose by them what they compute.
        factored: leave gradients that are outer products of two vectors, as most of one step are, as their factors.

    Attributes:
        gradients: name → shape of the gradients that a block has; not of tables, whose gradients are sparse.
        factors: name → the two vectors, overwritten by every block, whose outer product is a gradient.
        tables: name of the parameter → trained table of n-grams.
        logits: (T, V), of the network, overwritten by every block; None without a count memory, which needs them.

    Raises:
        Uncompilable: the kernel cannot compute the block, or not for this model as it is.
    """

    def __init__(
        self, rule: LearningRule, steps: int, num_targets: int, *, resets: bool = True, factored: bool = False
    ):
        super().__init__(rule.model)
        self.rule, self.steps, self.num_targets, self.resets = rule, steps, num_targets, resets
        trained = {n: t for n, t in find_tables(rule.model).items() if t.weight.requires_grad}
        self.tables = {f"{name}.weight": table for name, table in trained.items()}
        self._inputs = {name: torch.empty(1, steps, dtype=self.dtype) for name in _INPUTS}
        self._nats = torch.empty(steps, dtype=self.dtype)
        has_counts = getattr(rule.model, "count_memory", None) is not None
        self.logits = torch.empty(steps, rule.model.config.vocab_size, dtype=self.dtype) if has_counts else None
        with self._recording():
            self.gradients, self.factors = self._record(factored)
            self._compare()

    def learn(
        self, carried: RecurrentState, state: RecurrentState, block: Block, gradients: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, RecurrentState]:
        """Read one block as [`BlockLearning.learn`]; `gradients` are name → memory, which gradients with factors do
        not need. Gradients of tables are added to theirs.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; `carried` is unchanged, `gradients` are not.
            ValueError: a tensor is not in memory, or of another type or size.
        """
        nats, new_state, of_tables = self._run(carried, state, block, gradients)
        for name, gradient in of_tables.items():
            weight = self.tables[name].weight
            weight.grad = gradient if weight.grad is None else (weight.grad + gradient).coalesce()
        return nats, new_state

    def _run(
        self, carried: RecurrentState, state: RecurrentState, block: Block, gradients: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, RecurrentState, dict[str, torch.Tensor]]:
        """As `learn`, but returns the gradients of tables."""
        for name, part in zip(_INPUTS, block, strict=True):
            self._inputs[name].copy_(part)
        inputs = self._inputs | named("state", state) | named("carried", carried)
        new_state = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        outputs = {"nats": self._nats} | named("state", new_state) | named("gradient", gradients) | self._of_factors
        if self.logits is not None:
            outputs["logits"] = self.logits
        of_sums = self._new_sums()
        if not self.program.run(inputs, outputs | named("sums", of_sums)):
            raise self.not_finite(self._nats)
        for name in self.factors.keys() & gradients.keys():
            torch.outer(*self.factors[name], out=gradients[name])
        return self._nats.clone(), new_state, self._of_tables(state, block, of_sums)

    def not_finite(self, nats: torch.Tensor) -> NonFiniteLossError:
        """The error for a block with these nats (T,)."""
        loss = (nats.sum() / self.num_targets).item()
        return NonFiniteLossError(f"The loss is {loss}: nothing was learned from this block.")

    @cached_property
    def _of_factors(self) -> dict[str, torch.Tensor]:
        """Outputs of the program that are vectors of outer products."""
        rows = {f"rows {name}": rows for name, (rows, _) in self.factors.items()}
        return rows | {f"columns {name}": columns for name, (_, columns) in self.factors.items()}

    def learn_blocks(
        self,
        carried: RecurrentState,
        state: RecurrentState,
        blocks: Block,
        gradients: Mapping[str, torch.Tensor],
        adagrad: Mapping[nn.Parameter, tuple[torch.Tensor, float, float]],
        run: "Callable[..., LoopEnd]",
    ) -> tuple["LoopEnd", RecurrentState, torch.Tensor, torch.Tensor | None]:
        """As `learn`, for blocks (N, T), with an update of the weights after each.

        Args:
            gradients: without those that have factors.
            adagrad: table → sums of its rows, learning rate, ε.
            run: runs a loop with inputs, outputs, the number of blocks, tables and lookups in them; makes the updates.

        Returns:
            The end of the loop, the state after the blocks that are done, and nats (N, T) and logits (N, T, V) of all,
            the logits only with a count memory.
        """
        count = len(blocks[0])
        before = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
        after = {name: torch.empty_like(tensor) for name, tensor in before.items()}
        inputs = {name: part.to(self.dtype).contiguous() for name, part in zip(_INPUTS, blocks, strict=True)}
        outputs = {"nats": torch.empty(count, self.steps, dtype=self.dtype)}
        if self.logits is not None:
            outputs["logits"] = torch.empty(count, *self.logits.shape, dtype=self.dtype)
        of_sums = self._new_sums()
        lookups = self._lookups(state, blocks).view(count, self.steps, -1) if of_sums else None
        results = outputs | named("state", after) | named("gradient", gradients) | named("sums", of_sums)
        inputs |= named("state", before) | named("carried", carried)
        tables = []
        for name, gradient in of_sums.items():
            weight = self.tables[name].weight
            row_sums, rate, eps = adagrad[weight]
            tables.append(block_cpu.TrainedTable(weight, row_sums, gradient, rate, eps))
        end = run(self._loop, inputs, results | self._of_factors, count, tables=tables, lookups=lookups)
        if end.done == 0:
            after = state
        elif end.done % 2 == 0:
            after |= {name: before[name] for name in before if f"state {name}" in self._loop.swapped}
        return end, after, outputs["nats"], outputs.get("logits")

    def _new_sums(self) -> dict[str, torch.Tensor]:
        """Memory (T, M) for the gradients of the sums of rows of each table."""
        width = self.model.config.hidden_size
        return {name: torch.empty(self.steps, width, dtype=self.dtype) for name in self.tables}

    def _lookups(self, state: RecurrentState, blocks: Block) -> torch.Tensor:
        """The rows (1, steps, orders) of the tables that all steps of blocks of one stream read."""
        ids, _, resets = (part.reshape(1, -1) for part in blocks)
        return read_ngrams(self.model.config, ids, state[NGRAMS], resets)[0]

    @cached_property
    def _loop(self) -> "block_cpu.BlockLoop":
        states = [name for name in self.program.outputs if name.startswith("state ")]
        return block_cpu.BlockLoop(self.program, (*_INPUTS, "nats", "logits"), states)

    def _of_tables(
        self, state: RecurrentState, block: Block, of_sums: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Sparse gradients of the tables from the gradients of the sums of their rows, (T, M)."""
        if not of_sums:
            return {}
        rows = self._lookups(state, block)
        indices, orders = rows.reshape(1, -1), rows.shape[-1]
        return {
            name: torch.sparse_coo_tensor(
                indices, of_sum.repeat_interleave(orders, 0), self.parameters[name].shape, check_invariants=False
            ).coalesce()
            for name, of_sum in of_sums.items()
        }

    def _record(self, factored: bool) -> tuple[dict[str, torch.Size], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Write the program; returns the shapes of the gradients, and memory for the factors of some."""
        from hf_recurrent.kernels.outer_products import join_products, separate_products

        trace, values = self.record()
        prefix, separated = "gradient ", []
        shapes = {name.removeprefix(prefix): x.shape for name, x in values.items() if name.startswith(prefix)}
        join_products(trace.graph)
        if factored:
            values, separated = separate_products(trace.graph, values)
        self.program = block_cpu.BlockProgram(trace.graph, values, trace.guards, trace.effects)
        return shapes, {name: tuple(torch.empty(n, dtype=self.dtype) for n in shapes[name]) for name in separated}

    def record(self) -> tuple["BlockTrace", dict[str, "Value"]]:
        """The recorded block: inputs `ids`, `labels`, `resets`, `state NAME` and `carried NAME`; and its results.

        Results are `nats`, `state NAME`, `gradient NAME`, of the sums of rows of a table `sums NAME`, and for a count
        memory `logits`.

        Raises:
            UnsupportedOp: the model has an operator without a rule.
        """
        from hf_recurrent.kernels.block_trace import BlockTrace

        rule, model = self.rule, self.model
        carried, state = rule.init_carried(1), init_network_state(model, 1)
        ids, labels = (torch.zeros(1, self.steps, dtype=torch.long) for _ in range(2))
        resets = torch.zeros(1, self.steps, dtype=torch.bool) if self.resets else None
        inputs = {"ids": ids, "labels": labels} | ({} if resets is None else {"resets": resets})
        trace = BlockTrace(self.dtype, inputs | named("state", state) | named("carried", carried), self.parameters)
        engine = getattr(rule, "engine", None)
        recorded = nullcontext() if engine is None else engine.advancing_by(trace.advance_sensitivities)
        with without_gradients(self.parameters.values()), recorded, self._probes() as probes, trace:
            with torch.enable_grad(), rule.block(carried):
                output = self._forward(
                    ids,
                    shift_labels=labels,
                    reset_mask=resets,
                    state=state,
                    use_cache=True,
                    num_items_in_batch=self.num_targets,
                )
                nats = nn.functional.cross_entropy(upcast(output.logits.detach())[0], labels[0], reduction="none")
                trace.require_finite(output.loss)
                output.loss.backward()
            gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            results = {"nats": nats} | named("state", output.state) | named("gradient", gradients)
            results |= {f"sums {name}": probe.grad for name, probe in probes.items()}
            if self.logits is not None:
                results["logits"] = output.logits
        return trace, {name: trace.value_of(tensor) for name, tensor in results.items()}

    @contextmanager
    def _probes(self) -> Iterator[dict[str, torch.Tensor]]:
        """Inside, zeros are added to the sums of rows of each table, and get their gradients in place of the table."""
        shape = 1, self.steps, self.model.config.hidden_size
        probes = {name: torch.zeros(shape, dtype=self.dtype, requires_grad=True) for name in self.tables}
        with ExitStack() as stack:
            for name, table in self.tables.items():
                stack.enter_context(frozen(table))
                stack.enter_context(shadowed(table, forward=partial(_probed, table.forward, probes[name])))
            yield probes

    def _compare(self) -> None:
        """Raise unless two blocks of the program give what the rule gives."""
        generator = torch.Generator().manual_seed(0)
        vocab_size, model = self.model.config.vocab_size, self.model
        plain_carried, carried = self.rule.init_carried(1), self.rule.init_carried(1)
        plain_state, state = init_network_state(model, 1), init_network_state(model, 1)
        for number in range(2):
            ids = torch.randint(vocab_size, (1, self.steps + 1), generator=generator)
            resets = torch.zeros(1, self.steps, dtype=torch.bool)
            resets[0, self.steps // 2] = self.resets and number == 0
            block = ids[:, :-1], ids[:, 1:], resets
            gradients = {name: torch.empty(shape, dtype=self.dtype) for name, shape in self.gradients.items()}
            nats, state, of_tables = self._run(carried, state, block, gradients)
            with without_gradients(self.parameters.values()):
                output = self.rule.learn(plain_carried, plain_state, *block, self.num_targets)
                plain_state, losses = output.state, output.loss.detach() * self.num_targets
                expected = {name: self.parameters[name].grad for name in (*gradients, *of_tables)}
            for name, gradient in of_tables.items():
                touched, whole = gradient.indices()[0], expected[name]
                gradients[name] = gradient.values()
                expected[name] = whole.coalesce().values() if whole.is_sparse else whole[touched]
            pairs = {"loss": (nats.sum(), losses)}
            for part, ours, theirs in (
                ("gradient of", gradients, expected),
                ("sensitivity of", carried, plain_carried),
                ("state", state, plain_state),
            ):
                pairs |= {f"{part} {name}": (ours[name], theirs[name]) for name in ours}
            # Small gradients are sums of larger ones, with their rounding.
            smallest = 1e-3 * max(tensor.abs().max().item() for tensor in expected.values())
            for name, (found, wanted) in pairs.items():
                bound = _TOLERANCES[self.dtype] * wanted.abs().amax().clamp_min(max(smallest, 1e-6))
                if not bool(((found - wanted).abs() <= bound).all()):
                    raise Uncompilable(f"the program computes another {name}")


def _probed(forward: Callable[[torch.Tensor], torch.Tensor], probe: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return forward(rows) + probe
