"""What a worker holds after a load is compared, bit by bit, with what was to be copied there.

While weights load, every copy that one of vLLM's loaders makes is noted: which part of which parameter, and a
fingerprint of the source. The same parts are read from the loaded parameters, and after the load from the layers that
compute. So fused, sharded and padded parameters need no code of their own, and a part that kept its old values is found
however small the step was. Some layers bring their weights into an order of their own once they are loaded: their parts
are read just before that, and what came of it is noted and read after the load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import hardshrink
from torch.utils._python_dispatch import TorchDispatchMode

from rollouts.vllm.internals import packed_product, processing_seen
from rollouts.vllm.weight_file import bytes_of, weighted_sum

COPY = torch.ops.aten.copy_.default
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)
TINY = torch.finfo(torch.float32).tiny
COLUMNS = 32  # that are read of every packed weight after a load; after the next load the next ones

Name = tuple[str, str]  # of a layer, and of its parameter
Found = list[tuple[Tensor, Tensor]]  # fingerprints of what is held, and of what should be
Place = tuple[tuple[int, ...], tuple[int, ...], int]  # of a view: shape, stride, offset


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a checksum of values, int64 []. Both zeros and numbers below 1e-38 count as one value, because the product
    of a packed weight does not tell them apart."""
    data = bytes_of(hardshrink(tensor, TINY) if tensor.is_floating_point() else tensor)
    if data.device.type == "cpu":
        return torch.tensor(xxhash.xxh3_64_intdigest(data.numpy().data) >> 1)
    return weighted_sum(data)


@dataclass(frozen=True)
class Note:
    """The fingerprints of what was copied to a place: of all values, and for a packed weight of some columns."""

    whole: Tensor
    columns: Tensor | None


class ResidentWeights:
    """What one worker's model should hold since its last load."""

    def __init__(self, model: nn.Module, device: torch.device, tied: list[tuple[nn.Module, nn.Module]]) -> None:
        """Begin with nothing noted. tied: heads and the embeddings whose weight they share; see
        `internals.tied_heads`."""
        self.version: int | None = None  # that was noted last
        self._model, self._device = model, device
        self._heads = {id(embedding): head for head, embedding in tied}
        self._packed = {name for name, layer in model.named_modules() if packed_product(layer) is not None}
        self._names = {id(layer): name for name, layer in model.named_modules()}
        self._seen: dict[Name, Tensor] = {}  # parameters as loaders see them, in shape and dtype
        self._notes: dict[Name, dict[Place, Note]] = {}
        self._loaded: dict[Name, Found] = {}  # of layers that were processed: what their loaded parameters held
        self._processed: dict[Name, Tensor] = {}  # and the fingerprints of what they became

    @contextmanager
    def noting(self, version: int) -> Iterator[None]:
        """Note what is copied into parameters during the block, which follows `internals.begin_reload`."""
        self.version, self._notes, self._loaded, self._processed = version, {}, {}, {}
        self._seen = {
            (layer_name, name): tensor.detach()
            for layer_name, layer in self._model.named_modules()
            if layer not in self._heads.values()  # they are read with their embedding
            for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        }
        by_storage = {_storage(tensor): name for name, tensor in self._seen.items()}

        def note(target: Tensor, source: Tensor) -> None:
            name = by_storage.get(_storage(target))
            if name is not None and not source.is_meta:
                self._notes.setdefault(name, {})[_place(target)] = self._note(name, target, source)

        with processing_seen(self._model, self._before_processing, self._after_processing), _Copies(note):
            yield

    def _note(self, name: Name, target: Tensor, source: Tensor) -> Note:
        values, columns, weight = source.expand(target.shape).to(target.dtype), None, self._seen[name]
        if self._is_packed(name) and target.shape[-1] == weight.shape[-1]:
            columns = fingerprint(values[:, self._columns(weight)])
        return Note(fingerprint(values.to(self._device)), columns)

    def _is_packed(self, name: Name) -> bool:
        return name[0] in self._packed and name[1] == "weight" and self._seen[name].ndim == 2

    def _columns(self, weight: Tensor) -> Tensor:
        """Return the numbers of those to read, in another part of the weight after every load."""
        width = weight.shape[-1]
        return (torch.arange(min(COLUMNS, width)) + COLUMNS * (self.version or 0)) % width

    def _parameters(self, layer: nn.Module) -> Iterator[tuple[Name, Tensor]]:
        """Yield the parameters of a layer into which something was copied."""
        for name, tensor in layer.named_parameters(recurse=False):
            full_name = (self._names.get(id(layer), ""), name)
            if full_name in self._notes:
                yield full_name, tensor.detach()

    def _before_processing(self, layer: nn.Module) -> None:
        for name, tensor in self._parameters(layer):
            self._loaded[name] = self._parts(name, tensor)

    def _after_processing(self, layer: nn.Module) -> None:
        for name, tensor in self._parameters(layer):
            if tensor.numel():
                self._processed[name] = fingerprint(tensor)

    def _parts(self, name: Name, tensor: Tensor) -> Found:
        """Return what the noted parts of a parameter hold; nothing when it does not have the layout of its loaders."""
        seen = self._seen[name]
        if (tensor.shape, tensor.stride()) != (seen.shape, seen.stride()):
            return []
        held = tensor.to(seen.dtype)
        return [(fingerprint(held.as_strided(*place)), note.whole) for place, note in self._notes[name].items()]

    def read_back(self) -> tuple[float, list[str]]:
        """Compare what layers hold with the notes.

        Return the share of noted values that could be compared, and the names of parameters that hold something else.
        """
        noted, read, other = 0, 0, []
        for name, notes in self._notes.items():
            size = sum(torch.Size(shape).numel() for shape, _, _ in notes)
            found = self._found(name)
            noted, read = noted + size, read + (size if found else 0)
            if differing := sum(int(holds) != int(should) for holds, should in found):
                other.append(f"{'.'.join(name)} ({differing} of {len(found)} comparisons)")
        return read / max(noted, 1), other

    def _found(self, name: Name) -> Found:
        """Return what is held and what should be, for every note and every place where a layer computes with it."""
        layer = self._model.get_submodule(name[0])
        tensor = getattr(layer, name[1]).detach()
        found = self._loaded.get(name)
        if found is None:
            found = self._parts(name, tensor)
        elif name in self._processed:
            found = [*found, (fingerprint(tensor), self._processed[name])]
        return [*found, *self._products(name, layer)]

    def _products(self, name: Name, layer: nn.Module) -> Found:
        if not self._is_packed(name):
            return []
        seen, found = self._seen[name], []
        for product in {packed_product(one) for one in (layer, self._heads.get(id(layer)))} - {None}:
            columns = unpacked(product, self._columns(seen), seen)
            for (shape, stride, offset), note in self._notes[name].items():
                if note.columns is not None:
                    first = offset // stride[0]
                    found.append((fingerprint(columns[first : first + shape[0]]), note.columns))
        return found


def unpacked(product: Callable[..., Tensor], columns: Tensor, weight: Tensor) -> Tensor:
    """Return columns of a packed weight, [N, C]: its products with rows of the identity, which are exact."""
    rows = torch.zeros(len(columns), weight.shape[1], dtype=weight.dtype)
    rows[torch.arange(len(columns)), columns] = 1
    return product(rows, None, None).T


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(view: Tensor) -> Place:
    return tuple(view.shape), view.stride(), int(view.storage_offset())


class _Copies(TorchDispatchMode):
    """Call a function before every copy into a tensor."""

    def __init__(self, seen: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is COPY:
            self._seen(args[0], args[1])
        return func(*args, **(kwargs or {}))


class Comparing(TorchDispatchMode):
    """In the block, compare what would be copied with what is there, and copy nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.differing = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is COPY:
            self.copies += 1
            self.differing += not torch.equal(args[0], args[1].to(args[0]))
        return args[0] if func is COPY or func in FILLS else func(*args, **(kwargs or {}))
