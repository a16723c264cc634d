"""What is published is what is read, byte for byte, and anything else is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestration.weight_transfer.file_publisher import WeightPublisher
from rollouts.vllm.weight_file import Checksum, FileUpdate, WeightFile, refuse_other_bytes

ROOT = Path(__file__).parents[3]
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6)
REFUSED = r"cannot be mapped|are not those sent"
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8])


def read(update: dict[str, Any], file: WeightFile | None = None) -> list[tuple[str, torch.Tensor]]:
    tensors = (file or WeightFile()).tensors(FileUpdate(**update))
    copied = [(name, tensor.clone()) for name, tensor in tensors]
    check(tensors, update)
    return copied


def check(tensors: list[tuple[str, torch.Tensor]], update: dict[str, Any]) -> None:
    refuse_other_bytes(f"of {update['path']}", Checksum(tensors).value(), update["checksum"])


@pytest.mark.parametrize("method", ["direct", "disk"])
@given(shapes=SHAPES, data=st.data())
def test_tensors_come_back_bit_for_bit(tmp_path_factory: Any, method: Any, shapes: list[list[int]], data: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = [data.draw(DTYPES) for _ in shapes]
    sent = [
        (f"tensor.{i}", (100 * torch.randn(shape, generator=generator)).to(dtype))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    sent.append(("last", torch.ones(1)))  # a file of no bytes cannot be mapped
    publisher = WeightPublisher(method, tmp_path_factory.mktemp("run") / "weights")
    received = read(publisher.publish(1, iter(sent)))
    publisher.close()
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (_, ours), (_, theirs) in zip(sent, received, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(ours, theirs)


def test_strided_tensors_with_gradients_are_sent_by_value(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    publisher = WeightPublisher("disk", tmp_path / "weights")
    (_, received), *_ = read(publisher.publish(1, [("transposed", weight.T)]))
    assert torch.equal(received, weight.detach().T)


@pytest.mark.parametrize("method", ["direct", "disk"])
def test_there_is_one_version_at_a_time_and_none_after_close(tmp_path: Path, method: Any) -> None:
    publisher = WeightPublisher(method, tmp_path / "weights")
    first = publisher.publish(1, [("a", torch.zeros(3))])
    assert read(first)[0][1].tolist() == [0, 0, 0]
    second = publisher.publish(2, [("a", torch.ones(3))])
    assert read(second)[0][1].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=REFUSED):
        read(first)
    publisher.close()
    with pytest.raises(ValueError, match="cannot be mapped"):
        read(second)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("method", ["direct", "disk"])
def test_versions_of_any_size_follow_one_another_also_after_close(tmp_path: Path, method: Any) -> None:
    publisher, file = WeightPublisher(method, tmp_path / "weights"), WeightFile()
    for version, size in enumerate([300, 300, 7, 5000, 1, 5000]):
        sent = [("a", torch.randn(size)), ("b", torch.full((3,), version))]
        if version == 4:
            publisher.close()
        for (_, ours), (_, theirs) in zip(sent, read(publisher.publish(version, sent), file), strict=True):
            assert torch.equal(ours, theirs)
    publisher.close()


def test_shared_memory_is_made_and_mapped_once(tmp_path: Path) -> None:
    publisher, file = WeightPublisher("direct", tmp_path), WeightFile()
    places = set()
    for version in range(3):
        update = publisher.publish(version, [("a", torch.full((1000,), float(version)))])
        (_, view), *_ = file.tensors(FileUpdate(**update))
        assert view.mean() == version
        places.add((update["path"], view.data_ptr()))
    assert len(places) == 1


def test_a_new_trainer_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    file = WeightFile()
    for value in (1.0, 2.0):  # both under the same path, as with a process id that comes again
        publisher = WeightPublisher("direct", tmp_path)
        update = publisher.publish(1, [("a", torch.full((1000,), value))])
        assert read(update, file)[0][1].mean() == value
        publisher.close()


@pytest.mark.parametrize("method", ["direct", "disk"])
def test_a_version_that_is_written_over_while_it_is_copied_is_refused(tmp_path: Path, method: Any) -> None:
    publisher, file = WeightPublisher(method, tmp_path / "weights"), WeightFile()
    update = publisher.publish(1, [(f"{i}", torch.zeros(1000)) for i in range(3)])
    copied, tensors = [], file.tensors(FileUpdate(**update))
    for i, (_, tensor) in enumerate(tensors):
        copied.append(tensor.mean().item())
        if i == 0:
            after = publisher.publish(2, [(f"{i}", torch.ones(1000)) for i in range(3)])
    assert copied == [0, 1, 1]
    with pytest.raises(ValueError, match="are not those sent"):
        check(tensors, update)
    assert [tensor.mean() for _, tensor in read(after, file)] == [1, 1, 1]
    publisher.close()


def test_a_trainer_that_dies_while_it_writes_leaves_what_is_refused(tmp_path: Path) -> None:
    def dies() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(100)
        raise KeyboardInterrupt

    publisher = WeightPublisher("disk", tmp_path / "weights")
    update = publisher.publish(1, [("a", torch.zeros(100)), ("b", torch.zeros(100))])
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(2, dies())
    with pytest.raises(ValueError, match=REFUSED):
        read(update)


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    WeightPublisher("disk", tmp_path / "weights").publish(1, [("a", torch.zeros(3))])
    (tmp_path / "weights" / "notes.txt").write_text("not ours")
    WeightPublisher("disk", tmp_path / "weights")
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["notes.txt"]


def test_shared_memory_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    program = (
        "import json, os, signal, sys, torch; from orchestration.weight_transfer.file_publisher import WeightPublisher\n"
        "publisher = WeightPublisher('direct', '.')\n"
        "print(json.dumps(publisher.publish(1, [('a', torch.ones(3))])), flush=True)\n"
        "sys.stdin.read(1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    sender = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert sender.stdout is not None
    update = json.loads(sender.stdout.readline())
    assert read(update)[0][1].tolist() == [1, 1, 1]
    sender.communicate("x")
    with pytest.raises(ValueError, match="cannot be mapped"):
        read(update)


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    publisher = WeightPublisher("disk", tmp_path / "weights")
    update = publisher.publish(3, [("a", torch.randn(100)), ("b", torch.randn(7))])
    path = Path(update["path"])
    content = path.read_bytes()
    for position in (0, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"the bytes of .* \(checksum"):
            read(update)
    path.write_bytes(content)
    assert len(read(update)) == 2


@pytest.mark.parametrize("change", ["shorter", "gone"])
def test_a_file_that_is_not_there_whole_is_refused(tmp_path: Path, change: str) -> None:
    publisher = WeightPublisher("disk", tmp_path / "weights")
    update = publisher.publish(3, [("a", torch.randn(100))])
    path = Path(update["path"])
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=REFUSED):
        read(update)
