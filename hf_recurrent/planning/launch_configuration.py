"""Launch configurations of accelerate: the parts that the memory of a run depends on."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from hf_recurrent.trainers.sharding import ShardingSettings, requested_sharding

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "accelerate"


@dataclass(frozen=True)
class LaunchConfiguration:
    """Processes and precision of a run; `sharding` is None for a copy of the model in every process."""

    processes: int = 1
    bfloat16: bool = False
    sharding: ShardingSettings | None = None


def read_launch_configuration(name: str) -> LaunchConfiguration:
    """Read the file of `accelerate launch --config_file`, or one of `recipes/accelerate` by its name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a configuration of accelerate, or asks for something else than DDP or FSDP2.
    """
    path = Path(name)
    shipped = sorted(file.name for file in RECIPES.glob("*.yaml"))
    if not path.is_file():
        if name not in shipped:
            raise FileNotFoundError(
                f"`--config_file` is {name!r}; file not found. Or choose from {', '.join(shipped)}."
            )
        path = RECIPES / name
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"`--config_file` is {name!r}, which is not YAML: {error}") from error
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise ValueError(f"`--config_file` is {name!r}, which has no `distributed_type`: not one of accelerate.")
    options = content.get("fsdp_config") or {}
    # As `accelerate launch` passes them on.
    environment = {str(key).upper(): str(value) for key, value in options.items()}
    kind = str(content["distributed_type"])
    environment |= {"ACCELERATE_USE_FSDP": str(kind == "FSDP"), "ACCELERATE_USE_DEEPSPEED": str(kind == "DEEPSPEED")}
    return LaunchConfiguration(
        processes=int(content.get("num_processes") or 1),
        bfloat16=content.get("mixed_precision") == "bf16",
        sharding=requested_sharding(environment),
    )
