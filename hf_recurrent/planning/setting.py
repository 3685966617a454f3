"""`Setting`: the arguments of training that memory and time depend on."""

from dataclasses import dataclass

from hf_recurrent.trainers.sharding import ShardingSettings

BPTT, DMT = "bptt", "dmt"


@dataclass(frozen=True)
class Setting:
    """The arguments of training that memory and time depend on.

    Attributes:
        method: bptt, the name of a learning rule, smt or dmt.
        streams: B, of one process and micro-batch.
        block_size: steps of an optimizer step.
        stride: T, steps of a forward and backward pass.
        accumulation: micro-batches per optimizer step.
        anchors: of SMT and DMT, positions of a block with a loss.
        first_anchor: of SMT and DMT, the first position that may be one.
        bfloat16: autocast.
        checkpointing: gradient checkpointing.
        carries_state: whether the state goes from block to block, if the model has one.
        processes: number of processes.
        sharding: None for a copy of the model in every process (DDP); else that of FSDP2.
    """

    method: str = BPTT
    streams: int = 8
    block_size: int = 256
    stride: int = 256
    accumulation: int = 1
    anchors: int = 0
    first_anchor: int = 0
    bfloat16: bool = False
    checkpointing: bool = False
    carries_state: bool = True
    processes: int = 1
    sharding: ShardingSettings | None = None

    @property
    def step_bytes(self) -> int:
        """Bytes of an optimizer step of all processes."""
        return self.processes * self.accumulation * self.streams * self.block_size
