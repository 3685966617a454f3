"""Energy that a run has used, from the counters of the processor (RAPL); None where none can be read."""

from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules of all processor packages since the meter was made, other programs' included.

    Linux has counters of Intel and AMD processors, in microjoules, in `/sys/class/powercap`. As a rule, only root may
    read them, and virtual machines have none. They wrap around, so `joules` has to be called every few minutes.
    """

    def __init__(self, folder: Path = _POWERCAP):
        # Of whole packages; the zones of their parts are `intel-rapl:N:M`.
        zones = sorted(zone for zone in folder.glob("intel-rapl:*") if zone.name.count(":") == 1)
        found = ((zone, _read(zone / "energy_uj"), _read(zone / "max_energy_range_uj")) for zone in zones)
        self._ranges = {zone: most + 1 for zone, count, most in found if count is not None and most}
        self._last = {zone: _read(zone / "energy_uj") for zone in self._ranges}
        self._total = 0

    def joules(self) -> float | None:
        """The energy so far; None without counters."""
        for zone, most in self._ranges.items():
            if (count := _read(zone / "energy_uj")) is not None:
                self._total += (count - self._last[zone]) % most
                self._last[zone] = count
        return self._total / 1e6 if self._ranges else None


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
