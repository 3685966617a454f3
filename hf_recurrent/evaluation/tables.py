"""Results of `hf-recurrent evaluate` as text."""

from typing import Any

from hf_recurrent.data.episode_source import EpisodeSource, count_of


def task_table(source: EpisodeSource, metrics: dict[str, float], results: dict[str, Any]) -> str:
    """Metrics of a task, also with rounded weights."""
    lines = [f"{source.name}, {results['split']}: {source.describe(held_out=True)}", ""]
    lines.append(source.describe_result(metrics))
    lines += [f"{kind} weights: {source.describe_result(found)}" for kind, found in results["rounded_weights"].items()]
    return "\n".join(lines)


def bits_table(results: dict[str, Any]) -> str:
    """Bits per byte of a model, with rounded weights, and of compressors."""
    weights = f", {results['weights']} weights" if results["weights"] else ""
    rows = {f"{results['model']} ({results['context']}{weights})": results["bits_per_byte"]}
    rows |= {f"{kind} weights": found["bits_per_byte"] for kind, found in results["rounded_weights"].items()}
    rows |= {f"{name} (each episode alone)": value for name, value in results["compressors"].items()}
    own = results["bits_per_byte"]
    differences = {f"{kind} weights" for kind in results["rounded_weights"]}
    width = max(map(len, rows))
    # A model is given the first byte of an episode, which a compressor has to encode.
    first_bytes = 8 * results["num_episodes"] / results["num_bytes"]
    amount = f"{count_of(results['num_episodes'], 'episode')}, {count_of(results['num_bytes'], 'byte')}"
    lines = [
        f"{results['corpus']}, {results['split']}: {amount}",
        "",
        f"{'':{width}}  bits per byte",
        *(
            f"{name:{width}}  {value:13.4f}" + (f"  {value - own:+.4f}" if name in differences else "")
            for name, value in rows.items()
        ),
        "",
        f"The first byte of an episode is given; at 8 bits each, this adds {first_bytes:.4f}.",
    ]
    return "\n".join(lines)
