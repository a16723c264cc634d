import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from eval.method_weights import AGAINST_RATIO
from eval.pictures import BLUE, ORANGE, read_curve, smoothed, weight_panels, write_learning_curves
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
    assert len(curve.reward) == 8 and curve.reward[-1][0] == 5.0


def points(path: Path, colour: str) -> list[list[tuple[float, float]]]:
    """Return the drawn points of each line of a colour, in SVG's coordinates: y grows downwards."""
    lines = []
    for element in ET.parse(path).iter(f"{SVG}path"):
        if f"stroke: {colour}" in element.get("style", "") and element.get("clip-path"):
            numbers = [float(part) for part in re.findall(r"[\d.]+", element.attrib["d"])]
            lines.append(list(zip(numbers[0::2], numbers[1::2], strict=True)))
    return lines


def test_several_runs_are_drawn_into_one_picture(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, last).path for name, last in (("a", 0.75), ("b", 0.875))]
    target = tmp_path / "docs" / "curve.svg"
    assert main([*map(str, runs), "--curve", str(target)]) == 0
    assert "held-out accuracy, 2 runs: 0.25 before, 0.75 to 0.88 after" in target.read_text()
    first, second = points(target, BLUE)
    assert len(points(target, ORANGE)) == 2
    assert second[-1][1] < first[-1][1] < first[0][1], "higher accuracy is drawn higher"
    before = target.read_bytes()
    assert main([*map(str, runs), "--curve", str(target)]) == 0 and target.read_bytes() == before


def test_values_outside_0_and_1_stay_inside_the_picture(tmp_path: Path) -> None:
    path = write_learning_curves([make_run(tmp_path / "a", 0.75, reward=-3.0).path], tmp_path / "curve.svg")
    (line,) = points(path, ORANGE)
    height = float(ET.parse(path).getroot().attrib["height"].removesuffix("pt"))
    assert all(0 < y < height for _, y in line)


def test_methods_that_weigh_alike_share_a_panel() -> None:
    """The same numbers draw the same bytes."""
    flat = [0.0] * len(AGAINST_RATIO.points)
    curves = {"one": (flat, flat), "other": (flat, flat), "third": (flat, [1.0] * len(flat))}
    text = weight_panels(AGAINST_RATIO, curves)
    assert text == weight_panels(AGAINST_RATIO, curves)
    assert "one, other" in text and "third" in text and "A = +1" in text


def test_one_step_is_enough(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a", "")
    run.write_metrics(0, {"eval/accuracy": 0.25, "time/since_start_seconds": 30.0})
    ET.parse(write_learning_curves([run.path], tmp_path / "curve.svg"))


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
