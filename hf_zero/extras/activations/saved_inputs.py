"""Saved inputs of checkpointed regions: copied to where the configuration wants them, and brought back in backward.

[Note: Saved inputs]
torch.utils.checkpoint has autograd save a region's inputs. Hooks on what is saved (`pack`, `unpack`) put a `_Saved` in
the place of an input: a copy of it, or of this rank's part, in host memory or an arena. Autograd keeps the rest (which
graph the input belongs to, whether it needs a gradient). The copy lives as long as autograd refers to it, so a graph
that is kept is unpacked several times, and one that is dropped without a backward gives its memory back.

[Note: Copies beside the computation]
To the host, copies run on a stream of their own. An input is held until its copy is over: there are MAX_DOWNLOADS of
them at most, then the compute stream waits. A script that changes an input in place meanwhile is told so in backward,
as autograd tells it of what it has saved itself. In backward the inputs of the region before are on their way to the
device while this region is recomputed: staged are the inputs of two regions at most.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero.config.resolved import ActivationCheckpointing
from hf_zero.distributed.input_group import InputGroup
from hf_zero.errors import ConfigError
from hf_zero.native.block_pool import BlockPool
from hf_zero.native.host_memory import PAGE
from hf_zero.native.pinning import HostMemory
from hf_zero.storage.copy_stream import MAX_DOWNLOADS, CopyStreams

# The keys of SavedInputs.usage.
USAGE = ("device", "device_peak", "host", "host_peak", "allocations")
_ARENA_ALIGNMENT = 512  # bytes, as torch's allocator has it
_SIZES = 8  # of blocks between two powers of two: at most an eighth is unused


class _DeviceMemory(BlockPool):
    """Memory of torch's allocator, which pools by itself."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._device = device

    def acquire(self, nbytes: int, *, block_bytes: int = 0) -> torch.Tensor:
        self.allocations += 1
        self.live_bytes += nbytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def release(self, piece: torch.Tensor) -> None:
        self.live_bytes -= piece.numel()


class SavedRegion:
    """The inputs of one checkpointed region; it lives as long as one of them is saved."""

    def __init__(self, number: int, before: SavedRegion | None) -> None:
        self.number = number  # in its forward, from 0
        self.inputs: list[weakref.ref[_Saved]] = []
        self._before = weakref.ref(before) if before is not None else None

    @property
    def before(self) -> SavedRegion | None:
        """The one before it in forward, which backward comes to next."""
        return None if self._before is None else self._before()

    def waiting(self, num_uses: int) -> list[_Saved]:
        """Its inputs that were brought back at most so often."""
        found = [saved for one in self.inputs if (saved := one()) is not None]
        return [saved for saved in found if saved.num_uses <= num_uses]


class _MemoryCopy:
    """The memory behind one `_Saved`, and what is under way to it and from it.

    Args:
        number: The checkpoints that an arena has place for; None without one.
    """

    def __init__(
        self, memory: BlockPool, numel: int, dtype: torch.dtype, device: torch.device, number: int | None
    ) -> None:
        nbytes = numel * dtype.itemsize
        self._device = device
        self.memory = memory
        if number is None:
            self.piece = memory.acquire(nbytes, block_bytes=_size_class(nbytes))
        else:
            place_bytes = -(-nbytes // _ARENA_ALIGNMENT) * _ARENA_ALIGNMENT
            self.piece = memory.acquire(place_bytes, block_bytes=number * place_bytes)
        self.data = self.piece[:nbytes].view(dtype)  # 1-D: the elements, or this rank's part of them
        self.saved: torch.Event | None = None  # the copy to the host is over
        self.staged: torch.Tensor | None = None  # on the device again
        self.is_staged: torch.Event | None = None  # the copy to the device is over

    def bring(self, streams: CopyStreams) -> None:
        """Start the copy to the device."""
        if self.staged is None:
            self.staged = torch.empty(self.data.numel(), dtype=self.data.dtype, device=self._device)
            self.is_staged = streams.upload(self.staged, self.data, after=self.saved)

    def brought(self) -> torch.Tensor:
        """The elements on the device; the current stream waits for the copy."""
        assert self.staged is not None
        tensor, self.staged = self.staged, None
        if self.is_staged is not None:
            self.is_staged.wait(torch.accelerator.current_stream(tensor.device))
        return tensor

    def let_go(self) -> None:
        """Autograd has dropped the input."""
        if self.staged is not None:
            self.brought()  # the copy that nobody waits for must not write into memory of others
        self.memory.release(self.piece)


class _Saved:
    """Stands for one input in the autograd graph."""

    def __init__(self, tensor: torch.Tensor, region: SavedRegion, copy: _MemoryCopy) -> None:
        self.region = region
        self.copy = copy
        self.numel, self.shape, self.stride = tensor.numel(), tensor.shape, tensor.stride()
        self.is_dense = _is_dense(tensor)
        self.dtype, self.device = tensor.dtype, tensor.device
        self.num_uses = 0
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.version = tensor._version
        self.source: torch.Tensor | None = None  # until it is copied
        self.is_modified = False
        weakref.finalize(self, copy.let_go).atexit = False

    def look_for_change(self) -> None:
        """Note whether the input was changed in place before it was copied."""
        if self.source is not None and self.source._version != self.version:
            self.is_modified = True

    @property
    def what(self) -> str:
        return f"an input of checkpointed region {self.region.number}"


class _Download(NamedTuple):
    """The copy of one input to the host, under way."""

    event: torch.Event
    source: torch.Tensor
    copy: _MemoryCopy
    saved: weakref.ref[_Saved]


class SavedInputs:
    """Places the saved inputs of the regions of one process.

    Args:
        group: Ranks that share inputs; None where every rank keeps its own whole.
    """

    def __init__(
        self, settings: ActivationCheckpointing, device: torch.device, rank: int, group: InputGroup | None = None
    ) -> None:
        self._device = device
        self._rank = rank
        self._group = group if settings.partition_activations else None
        self._on_host = settings.cpu_checkpointing and device.type != "cpu"
        self._number = settings.number_checkpoints if settings.contiguous_memory_optimization else None
        self._streams = CopyStreams(device)
        self.memory = self._choose_memory(device)
        self._live: weakref.WeakSet[SavedRegion] = weakref.WeakSet()
        self._last: weakref.ref[SavedRegion] | None = None
        # Inputs that several regions have (an encoder's output) are copied once.
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], _Saved] = weakref.WeakValueDictionary()
        self._under_way: collections.deque[_Download] = collections.deque()
        self._held_bytes = self._held_peak = 0  # of what `_under_way` copies

    def _choose_memory(self, device: torch.device) -> BlockPool | None:
        """Return the memory for copies; after the first step a pool has all blocks that it needs."""
        if self._on_host:
            return BlockPool(HostMemory(device, pin=True))
        if self._number is not None:
            return BlockPool(device)
        return _DeviceMemory(device) if self._group is not None else None

    @property
    def places_anything(self) -> bool:
        """Whether inputs go anywhere else than where they are."""
        return self.memory is not None

    @property
    def num_live(self) -> int:
        """Regions with saved inputs."""
        return len(self._live)

    def usage(self) -> dict[str, int]:
        """The bytes of saved inputs that were placed, on this rank, by medium. Inputs on their way to the host count
        on the device too. `_peak` is the most at a time; `allocations` counts how often memory was allocated."""
        self._release()
        found = dict.fromkeys(USAGE, 0)
        if (memory := self.memory) is None:
            return found
        place = "host" if self._on_host else "device"
        found |= {place: memory.live_bytes, f"{place}_peak": memory.peak_live_bytes, "allocations": memory.allocations}
        if self._on_host:
            found |= {"device": self._held_bytes, "device_peak": self._held_peak}
        return found

    def begin_region(self, number: int) -> SavedRegion:
        """A region starts, in forward; its inputs are packed with what this returns."""
        self._release()
        return SavedRegion(number, self._last() if self._last is not None else None)

    def release_idle(self) -> None:
        """Give memory back that no saved input uses."""
        if self.memory is not None:
            self._streams.synchronize()
            self._release()
            self.memory.release_idle()

    # ---------------------------------------------------------------- forward
    @torch.no_grad()
    def pack(self, tensor: torch.Tensor, region: SavedRegion) -> Any:
        """Return the object that autograd keeps instead of `tensor`."""
        if not self.places_anything or not _is_placed(tensor):
            return tensor
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (*place, tensor.dtype, tensor._version)
        known = self._known.get(key)
        if known is not None and not known.storage.expired():
            return known
        saved = self._known[key] = self._copy(tensor, region)
        return saved

    def _copy(self, tensor: torch.Tensor, region: SavedRegion) -> _Saved:
        self._admit(region)
        flat = _flat(tensor.detach())
        numel, mine = flat.numel(), flat
        if self._group is not None:
            self._group.compare(flat, f"region {region.number}")
            numel, mine = self._group.part_numel(flat.numel()), self._group.part_of(flat)
        assert self.memory is not None
        copy = _MemoryCopy(self.memory, numel, tensor.dtype, self._device, self._number)
        data = copy.data
        saved = _Saved(tensor, region, copy)
        region.inputs.append(weakref.ref(saved))
        data[mine.numel() :].zero_()  # of the last part, what nobody reads but the gather
        target = data[: mine.numel()]
        if not self._on_host:
            target.copy_(mine)
            return saved
        shares_memory = tensor.untyped_storage().nbytes() != tensor.nbytes  # which goes when its owner wants
        if shares_memory and saved.is_dense:
            mine = mine.clone()
        copy.saved = self._streams.download(target, mine)
        if copy.saved is not None:
            # A copy was made on the compute stream already: what changes the input comes after it.
            saved.source = tensor.detach() if saved.is_dense and not shares_memory else None
            self._hold(saved, copy.saved, mine)
        return saved

    def _admit(self, region: SavedRegion) -> None:
        if region in self._live:
            return
        if self._number is not None and len(self._live) >= self._number:
            raise ConfigError(
                f"rank {self._rank}: activation_checkpointing.number_checkpoints = {self._number} is too small: the "
                f"inputs of {self._number} checkpointed regions are saved, and region {region.number + 1} of this "
                "forward needs a place.\nSet it to the number of checkpointed regions (layers) whose backward is yet "
                "to come, or remove contiguous_memory_optimization, which keeps memory for so many only."
            )
        self._live.add(region)
        self._last = weakref.ref(region)

    def _hold(self, saved: _Saved, event: torch.Event, source: torch.Tensor) -> None:
        """Keep what is copied to the host until it is there. See [Note: Copies beside the computation]."""
        self._under_way.append(_Download(event, source, saved.copy, weakref.ref(saved)))
        self._held_bytes += source.nbytes
        self._held_peak = max(self._held_peak, self._held_bytes)
        if len(self._under_way) > MAX_DOWNLOADS:
            self._under_way[0].event.wait(torch.accelerator.current_stream(source.device))
            self._forget_oldest()

    def _release(self) -> None:
        """Let go of inputs whose copy is over. It waits for nothing."""
        while self._under_way and self._under_way[0].event.query():
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest = self._under_way.popleft()
        self._held_bytes -= oldest.source.nbytes
        if (saved := oldest.saved()) is not None:
            saved.look_for_change()
            saved.source = None

    # ---------------------------------------------------------------- backward
    @torch.no_grad()
    def unpack(self, saved: Any) -> torch.Tensor:
        """The input, for the recomputation."""
        if not isinstance(saved, _Saved):
            tensor: torch.Tensor = saved
            return tensor
        self._release()
        saved.look_for_change()
        if saved.is_modified:
            raise RuntimeError(
                f"rank {self._rank}: {saved.what} was modified by an inplace operation after the region had run and "
                "before it was copied to the host (activation_checkpointing.cpu_checkpointing), and its recomputation "
                f"needs the old values: {tuple(saved.shape)}, {saved.dtype}. Change a clone of it."
            )
        part = self._part(saved)
        full = part if self._group is None else self._group.gather(part, saved.what)
        return _in_shape(full[: saved.numel], saved)

    def _part(self, saved: _Saved) -> torch.Tensor:
        """Bring back the part that was kept, in memory of its own."""
        if not self._on_host:
            return saved.copy.data if self._group is not None else saved.copy.data.clone()
        saved.copy.bring(self._streams)  # needed first
        for one in saved.region.waiting(saved.num_uses):
            one.copy.bring(self._streams)
        saved.num_uses += 1
        if (before := saved.region.before) is not None:
            for one in before.waiting(0):
                one.copy.bring(self._streams)
        return saved.copy.brought()


def _is_placed(tensor: torch.Tensor) -> bool:
    """Floating values of a plain tensor, as in DeepSpeed. What repeats elements (an expanded mask) is small.

    Not parameters and views of them: their memory comes and goes with their unit, whatever copies are under way.
    """
    if type(tensor) is not torch.Tensor or isinstance(tensor._base, nn.Parameter):
        return False
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    repeats = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.numel() > 0 and not repeats


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a range of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in 1-D: in the order of memory where they are dense, which copies nothing."""
    if _is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)


def _size_class(nbytes: int) -> int:
    """Round up to whole pages, so that few different sizes occur and batches of other lengths find room."""
    step = max(PAGE, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _SIZES))
    return -(-nbytes // step) * step


def _in_shape(flat: torch.Tensor, saved: _Saved) -> torch.Tensor:
    """The input with the strides that it had, which some kernels' sums depend on."""
    if saved.is_dense:
        return flat.as_strided(saved.shape, saved.stride)
    tensor = torch.empty_strided(saved.shape, saved.stride, dtype=saved.dtype, device=saved.device)
    return tensor.copy_(flat.view(saved.shape))
