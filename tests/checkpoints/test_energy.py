"""Energy from counters of the processor."""

from hf_recurrent.checkpoints.recorder import EnergyMeter


def test_packages_are_added_and_counters_wrap_around(tmp_path):
    counts = {"intel-rapl:0": 900, "intel-rapl:1": 50, "intel-rapl:0:0": 7}  # the last is a part of the first
    for name, count in counts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{count}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("999\n")
    meter = EnergyMeter(tmp_path)
    assert meter.joules() == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100")  # 200 more, around the end
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("80")
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("500")
    assert meter.joules() == 230e-6 == meter.joules()


def test_without_counters_nothing_is_measured(tmp_path):
    assert EnergyMeter(tmp_path).joules() is None
    (tmp_path / "intel-rapl:0").mkdir()
    assert EnergyMeter(tmp_path).joules() is None
