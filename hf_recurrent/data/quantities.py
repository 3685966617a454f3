"""Numbers as people read them."""


def with_unit(value: float, unit: str = "") -> str:
    """1234567 → 1.2 M."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def count_of(count: int, noun: str) -> str:
    """1 → "1 document", 2000 → "2,000 documents"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
