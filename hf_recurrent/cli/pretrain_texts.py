"""Texts and names of `hf-recurrent pretrain` that its parser and its help share; importing them takes no time."""

from hf_recurrent.cli.learn import METHODS as RULES
from hf_recurrent.cli.recipes import recipe_names

PROG = "hf-recurrent pretrain"
USAGE = "hf-recurrent pretrain [--model MODEL] [--ARGUMENT VALUE ...]"
DESCRIPTION = (
    "Train a byte-level model on continuous streams, evaluate it on held-out documents and save it. The default "
    "recipe trains a small Memora on the Python standard library in a few minutes."
)
EXAMPLES = """Examples:
  hf-recurrent pretrain
  hf-recurrent pretrain --recipe memora-s0 --corpus my_files/ --train_bytes 50e6
  hf-recurrent pretrain --model llama-s0 --regime iid --block_size 512
  hf-recurrent pretrain --method rtrl --block_size 1 --learning_rate 1e-3
  hf-recurrent pretrain --method smt --dmt_steps 300
  hf-recurrent pretrain --output_dir runs/one --resume_from_checkpoint true
  torchrun --nproc_per_node 2 scripts/pretrain.py --use_cpu"""
DEFAULT_RECIPE = "default"
# Truncated backpropagation through each block.
DEFAULT_METHOD = "bptt"
SMT, DMT = "smt", "dmt"
# Default recipes of methods that do not train a Memora.
DEFAULT_RECIPES = {SMT: "smt", DMT: "dmt"}
METHODS = (DEFAULT_METHOD, *RULES, SMT, DMT)
METHOD_HELP = (
    "bptt: backpropagation through each block. rtrl: real-time recurrent learning, exact gradients within each "
    "recurrent layer over the whole past. snap1: approximate RTRL (SnAp-1), for units that mix channels. truncated, "
    "spatial: baselines of rtrl. smt: an RNN learns single steps between memories of a teacher, without unrolling. "
    "dmt: the same on its own memories, after smt. `--method NAME --help` lists the arguments of each. (default: bptt)"
)


def recipe_help() -> str:
    """Help of `--recipe`."""
    return (
        f"Name ({', '.join(recipe_names())}) or YAML file of a recipe, or `none` for the defaults of the code; "
        "command-line flags take precedence."
    )
