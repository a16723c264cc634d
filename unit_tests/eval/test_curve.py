import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from eval.curve import read_curve, smoothed, write_curve_svg
from eval.report import main
from orchestration.run.directory import RunDirectory

SVG = "{http://www.w3.org/2000/svg}"


def make_run(path: Path, last_accuracy: float, reward: float = 0.5) -> RunDirectory:
    run = RunDirectory.create(path, "")
    run.write_metrics(0, {"eval/accuracy": 0.25, "time/since_start_seconds": 30.0})
    for step in range(1, 8):
        run.write_metrics(step, {"reward/mean": reward, "time/since_start_seconds": 30.0 + 30.0 * step})
    run.write_metrics(8, {"reward/mean": reward, "eval/accuracy": last_accuracy, "time/since_start_seconds": 300.0})
    return run


def test_the_curve_is_read_in_minutes(tmp_path: Path) -> None:
    curve = read_curve(make_run(tmp_path / "a", 0.75).path)
    assert curve.accuracy == [(0.5, 0.25), (5.0, 0.75)]
    assert len(curve.reward) == 8 and curve.minutes == 5.0


def test_several_runs_are_drawn_into_one_picture(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, last).path for name, last in (("a", 0.75), ("b", 0.875))]
    target = tmp_path / "docs" / "curve.svg"
    assert main([*map(str, runs), "--curve", str(target)]) == 0
    root = ET.parse(target).getroot()
    paths = root.findall(f"{SVG}path")
    assert [p.get("class") for p in paths] == ["reward", "accuracy", "reward", "accuracy"]
    texts = [t.text for t in root.findall(f"{SVG}text")]
    assert "held-out accuracy, 2 runs: 0.25 before, 0.75 to 0.88 after" in texts
    circles = root.findall(f"{SVG}circle")
    heights = [float(c.attrib["cy"]) for c in circles]
    assert len(circles) == 4 and heights[3] < heights[1] < heights[0], "higher accuracy is drawn higher"


def test_values_outside_0_and_1_stay_inside_the_picture(tmp_path: Path) -> None:
    path = write_curve_svg([make_run(tmp_path / "a", 0.75, reward=-3.0).path], tmp_path / "curve.svg")
    root = ET.parse(path).getroot()
    line = next(p for p in root.findall(f"{SVG}path") if p.get("class") == "reward")
    heights = [float(point.split(",")[1]) for point in line.attrib["d"].replace("M", "").replace("L", "").split()]
    assert all(0 < height < 380 for height in heights)


def test_one_step_is_enough(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a", "")
    run.write_metrics(0, {"eval/accuracy": 0.25, "time/since_start_seconds": 30.0})
    ET.parse(write_curve_svg([run.path], tmp_path / "curve.svg"))


def test_smoothing_is_a_mean_of_neighbours() -> None:
    points = [(float(i), float(i * i)) for i in range(5)]
    assert smoothed(points) == [
        (0.0, pytest.approx(5 / 3)),
        (1.0, pytest.approx(14 / 4)),
        (2.0, pytest.approx(30 / 5)),
        (3.0, pytest.approx(30 / 4)),
        (4.0, pytest.approx(29 / 3)),
    ]
    assert smoothed([]) == []
