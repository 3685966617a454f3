"""Results of `hf-recurrent evaluate` as text."""

import textwrap
from typing import Any

from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.data.quantities import count_of, with_unit

_COLUMNS = 80


def evaluation_table(source: EpisodeSource, metrics: dict[str, float], results: dict[str, Any]) -> str:
    """The accounts, bits per byte, or, of a task, its metrics, also with rounded weights."""
    if "accounts" in results:
        return accounts_table(results["accounts"])
    if "bits_per_byte" in metrics:
        return _bits_table(results)
    lines = [f"{source.name}, {results['split']}: {source.describe(held_out=True)}", ""]
    lines.append(source.describe_result(metrics))
    lines += [f"{kind} weights: {source.describe_result(found)}" for kind, found in results["rounded_weights"].items()]
    return "\n".join(lines)


def _bits_table(results: dict[str, Any]) -> str:
    """Bits per byte of a model, with rounded weights, and of compressors."""
    weights = f", {results['weights']} weights" if results["weights"] else ""
    rows = {f"{results['model']} ({results['context']}{weights})": results["bits_per_byte"]}
    if "frozen" in results:
        rows["frozen: no short-term memory"] = results["frozen"]["bits_per_byte"]
    if "network_bits_per_byte" in results:
        rows["network alone"] = results["network_bits_per_byte"]
    rows |= {f"{kind} weights": found["bits_per_byte"] for kind, found in results["rounded_weights"].items()}
    rows |= {
        f"source {name.rpartition('_')[2]} of the mixture": value
        for name, value in results.items()
        if name.startswith("bits_per_byte_")
    }
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


def accounts_table(accounts: dict[str, Any]) -> str:
    """Table of [`measure_accounts`], and the protocol."""
    rows = accounts["rows"]
    width = max(map(len, [*rows, "bits per byte"]))
    lines = [f"{'bits per byte':{width}}  adapting  frozen"]
    for method, row in rows.items():
        adapting, frozen = ("-" if row[name] is None else f"{row[name]:.3f}" for name in ("adapting", "frozen"))
        lines.append(f"{method:{width}}  {adapting:>8}  {frozen:>6}")
    amount = f"{count_of(accounts['num_episodes'], 'held-out document')} ({with_unit(accounts['num_bytes'], 'B')})"
    read, network_bytes = "", accounts["train_bytes"]
    if network_bytes is not None:
        counted_bytes = accounts.get("counted_bytes", network_bytes)  # earlier files have none
        read = f" after the same {with_unit(counted_bytes, 'B')}"
        read += f" (the network: {with_unit(network_bytes, 'B')} of them)" * (counted_bytes != network_bytes)
    protocol = (
        f"{amount}, each read from the same start{read}. Adapting: counts and compressors learn inside a document; "
        "frozen: nothing does. The network's weights are always frozen."
    )
    notes = [line for note in (protocol, *accounts["notes"]) for line in textwrap.wrap(note, _COLUMNS)]
    return "\n".join([*lines, "", *notes])
