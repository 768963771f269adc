"""Run a Plan's cubin on a GPU with torch and cuda.bindings alone: no CuTe DSL, no Hydra.

`GpuRunner` binds a plan, its weights and vLLM's caches to a loaded cubin and is a StageRunner (execute/runner.py), so the
same validation drives the kernel and the CPU executor. Loading a cubin waits for pending device work (hundreds of
milliseconds behind a busy stream): construct before traffic starts.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch

from optkit.emit import layout as L
from optkit.emit.lower import Addresses, StateAddress, lower, sync_bytes, sync_image
from optkit.execute.contents import contents
from optkit.models.graph import Graph, State, step_name
from optkit.plan.types import Plan

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
STEP_INPUTS = {"token": torch.int32, "seq_len": torch.int32, "slot_mapping": torch.int64, "state_slot": torch.int32}
TIMEOUT_NS = 2_000_000_000  # a launch takes milliseconds; one that is not over after 2 s never will be


TAGGED = 2  # health code of a tagged wait: its stage is the one that should have written the word


class KernelAbort(RuntimeError):
    """A launch gave up; the message names what it waited for, the stage and the SM."""


@dataclass(frozen=True)
class LaunchFacts:
    """What the manifest says about a cubin."""

    name: str
    grid: int
    threads: int
    smem: int


def _check(result: tuple[Any, ...]) -> Any:
    """Unpack a cuda.bindings result; a driver error becomes a RuntimeError with its own words."""
    from cuda.bindings import driver as cu

    if int(result[0]):
        raise RuntimeError(f"CUDA driver: {cu.cuGetErrorString(result[0])[1].decode()}")
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


class Module:
    """A loaded cubin with one kernel (u64 table, u64 rt, i32 n, i32 lo, i32 hi), ready to launch cooperatively."""

    FORMAT = "QQiii"

    def __init__(self, cubin: bytes, facts: LaunchFacts):
        from cuda.bindings import driver as cu

        torch.zeros(1, device="cuda")  # the torch context must be current
        self.facts = facts
        self.library = _check(cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        kernels = _check(cu.cuLibraryEnumerateKernels(_check(cu.cuLibraryGetKernelCount(self.library)), self.library))
        self.kernel = kernels[0] if isinstance(kernels, list | tuple) else kernels
        name = _check(cu.cuKernelGetName(self.kernel)).decode()
        if name != facts.name:
            raise RuntimeError(f"cubin holds kernel {name!r}, the manifest says {facts.name!r}")
        sizes: list[int] = []
        while not int((got := cu.cuKernelGetParamInfo(self.kernel, len(sizes)))[0]):
            sizes.append(int(got[2]))
        if sizes != [struct.calcsize(f) for f in self.FORMAT]:
            raise RuntimeError(f"cubin's parameters are {sizes} bytes, expected {self.FORMAT}")
        device = _check(cu.cuCtxGetDevice())
        attr = cu.CUfunction_attribute
        _check(
            cu.cuKernelSetAttribute(
                attr.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, facts.smem, self.kernel, device
            )
        )
        self.registers = _check(cu.cuKernelGetAttribute(attr.CU_FUNC_ATTRIBUTE_NUM_REGS, self.kernel, device))
        self.local_bytes = _check(cu.cuKernelGetAttribute(attr.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, self.kernel, device))
        self.function = cu.CUfunction(int(self.kernel))
        resident = _check(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, facts.threads, facts.smem))
        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        if resident * sms < facts.grid:
            raise RuntimeError(f"{facts.grid} CTAs must be resident, this GPU holds {resident} x {sms}")

    def prepare(self, *values: int) -> Launch:
        """A launch with these parameters."""
        return Launch(self, values)


class Launch:
    """One prepared cooperative launch; parameters live in ctypes buffers, so repeated calls cost microseconds."""

    def __init__(self, module: Module, values: tuple[int, ...]):
        from cuda.bindings import driver as cu

        self.module = module
        self.buffers = [
            ctypes.create_string_buffer(struct.pack("<" + f, v), struct.calcsize(f))
            for f, v in zip(Module.FORMAT, values, strict=True)
        ]
        self.pointers = (ctypes.c_void_p * len(self.buffers))(*[ctypes.addressof(b) for b in self.buffers])
        c = self.config = cu.CUlaunchConfig()
        c.gridDimX, c.gridDimY, c.gridDimZ = module.facts.grid, 1, 1
        c.blockDimX, c.blockDimY, c.blockDimZ = module.facts.threads, 1, 1
        c.sharedMemBytes = module.facts.smem
        a = cu.CUlaunchAttribute()
        a.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        a.value.cooperative = 1
        c.attrs, c.numAttrs = [a], 1

    def __call__(self, stream: int | None = None) -> None:
        """Enqueue on `stream` (default: torch's current); recorded when that stream is being captured."""
        from cuda.bindings import driver as cu

        self.config.hStream = cu.CUstream(torch.cuda.current_stream().cuda_stream if stream is None else stream)
        _check(cu.cuLaunchKernelEx(self.config, self.module.function, ctypes.addressof(self.pointers), 0))


def state_address(state: State, cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> StateAddress:
    """Where a bound cache lies, with its own strides: conv [slots, taps - 1, channels], recurrent [slots, heads, V, K], kv
    [blocks, block_size, width], kv_heads (K, V) each [blocks, block_size, heads, dim].

    Slots, blocks, rows and heads may be padded. What device code takes for granted is held here: elements of a row lie
    side by side, a conv or recurrent slot is contiguous, and whatever is read 16 bytes at once starts at a multiple of
    16 bytes. Raises ValueError naming the state and what was expected.
    """
    pages = cache if isinstance(cache, tuple) else (cache,)
    found = []
    for t in pages:
        item = t.element_size()
        strides = [n * item for n in t.stride()]
        if state.kind in ("conv", "recurrent"):
            if not t[0].is_contiguous():
                raise ValueError(f"state {state.name}: strides {tuple(t.stride())} of shape {tuple(t.shape)}: expected the "
                                 "elements of a slot side by side")
            wide = [t.data_ptr(), strides[0]] if state.kind == "recurrent" else []
        else:
            if t.stride(-1) != 1:
                raise ValueError(f"state {state.name}: stride {t.stride(-1)} within a row: expected 1")
            wide = [t.data_ptr(), *strides[:-1]]
        if any(x % 16 for x in wide):
            raise ValueError(f"state {state.name}: address {t.data_ptr():#x}, strides {strides[:-1]} bytes: expected "
                             "multiples of 16 bytes")
        found.append((t.data_ptr(), strides[0], strides[1], strides[2] if len(pages) > 1 else 0))
    return StateAddress(*found[0], v=found[1] if len(pages) > 1 else (0, 0, 0, 0))


class GpuRunner:
    """A StageRunner on one GPU: whole steps, or slices from poisoned memory.

    Args:
        plan, graph: the Plan and the graph it was made from.
        weights: Weight name -> CUDA tensor, MXFP4 as (packed, scales); used in place.
        caches: State name -> paged CUDA tensor or (K, V); bound, not copied.
        module: the loaded cubin.
        max_blocks: width of the block table; positions: rows of the rotary table.
        own: step inputs that single layers have for themselves, as "state_slot@3" (models.graph.step_name).
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        weights: Mapping[str, Any],
        caches: dict[str, Any],
        module: Module,
        *,
        max_blocks: int,
        block_size: int,
        positions: int,
        own: Iterable[str] = (),
    ):
        self.plan, self.graph, self.weights, self.caches, self.module = plan, graph, weights, caches, module
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._states = {s.name: s for s in graph.states}
        self.block_size, self.rows = block_size, 0
        self._keep: dict[bytes, torch.Tensor] = {}
        self.sync = torch.zeros(sync_bytes(plan), dtype=torch.uint8, device=self.device)
        self.raw = {
            b.name: torch.zeros(-(-b.nbytes // 16) * 16, dtype=torch.uint8, device=self.device)
            for b in plan.buffers
            if b.klass in ("activation", "scratch", "mailbox")
        }
        self.inputs = {k: torch.zeros(L.ROWS, dtype=t, device=self.device) for k, t in STEP_INPUTS.items()}
        self.inputs["block_table"] = torch.zeros((L.ROWS, max_blocks), dtype=torch.int32, device=self.device)
        self.inputs |= {name: torch.zeros_like(self.inputs[name.partition("@")[0]]) for name in own}
        for b in plan.buffers:
            if b.klass == "input" and b.name not in self.inputs:
                self.inputs[b.name] = torch.zeros((b.rows, b.width), dtype=DTYPES[b.dtype], device=self.device)
        content = contents(plan, graph)[-1].after
        self._outputs = {s.value: b for b, s in content.items() if s.kind == "value" and s.value in graph.outputs}
        self._ids = {
            i: torch.zeros((L.ROWS, s.param("topk")), dtype=torch.int32, device=self.device)
            for i, s in enumerate(plan.stages)
            if s.body == "route"
        }
        self.positions, self.disturbance = positions, (0, 0)
        self._lower()
        self.rt = torch.zeros(L.RT_WORDS, dtype=torch.int64, device=self.device)
        self._launches: dict[tuple[int, int], Launch] = {}

    def _lower(self) -> None:
        addresses = Addresses(
            self._buffer,
            self._weight,
            self._state,
            self._constant,
            self._step,
            self.sync.data_ptr(),
            self.positions,
            {i: t.data_ptr() for i, t in self._ids.items()},
        )
        self.table = torch.from_numpy(lower(self.plan, addresses)).to(self.device)

    # ---- addresses
    def _buffer(self, name: str) -> int:
        return (self.raw[name] if name in self.raw else self.inputs[name]).data_ptr()

    def _weight(self, name: str) -> int | tuple[int, int]:
        w = self.weights[name]
        for t in w if isinstance(w, tuple) else (w,):
            if not t.is_contiguous() or t.data_ptr() % 16:
                raise ValueError(f"weight {name!r}: bulk copies need a contiguous tensor at a 16-byte boundary")
        return (w[0].data_ptr(), w[1].data_ptr()) if isinstance(w, tuple) else w.data_ptr()

    def _state(self, name: str) -> StateAddress:
        return state_address(self._states[name], self.caches[name])

    def _step(self, name: str, layer: int) -> int:
        return self.inputs[step_name(self.inputs, name, layer)].data_ptr()

    def _constant(self, array: np.ndarray) -> int:
        key = array.tobytes()
        if key not in self._keep:
            self._keep[key] = torch.from_numpy(array.copy()).to(self.device)
        return self._keep[key].data_ptr()

    # ---- launches
    def bind(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Copy step inputs to their fixed addresses; the row count is that of any of them."""
        rows = int(next(iter(inputs.values())).shape[0])
        if not 1 <= rows <= self.plan.rows:
            raise ValueError(f"rows={rows}: plan {self.plan.name!r} takes 1..{self.plan.rows} rows a step")
        for name, value in inputs.items():
            if name not in self.inputs:
                continue
            dst = self.inputs[name]
            if value.dim() > 1 and value.shape[1] > dst.shape[1]:
                raise ValueError(f"{name} is {value.shape[1]} wide, at most {dst.shape[1]} was bound")
            (dst[:rows] if value.dim() == 1 else dst[:rows, : value.shape[1]]).copy_(value.to(dst.dtype))
        if rows != self.rows:
            words = np.zeros(L.RT_WORDS, np.int64)
            words[[L.RT_ROWS, L.RT_TABLE_STRIDE, L.RT_BLOCK_SIZE, L.RT_TIMEOUT]] = (
                rows,
                self.inputs["block_table"].shape[1],
                self.block_size,
                TIMEOUT_NS,
            )
            for at, name in (
                (L.RT_TOKEN, "token"),
                (L.RT_SEQ_LEN, "seq_len"),
                (L.RT_BLOCK_TABLE, "block_table"),
                (L.RT_SLOT_MAPPING, "slot_mapping"),
                (L.RT_STATE_SLOT, "state_slot"),
            ):
                words[at] = self.inputs[name].data_ptr()
            words[L.RT_SYNC] = self.sync.data_ptr()
            words[[L.RT_DELAY, L.RT_SHUFFLE]] = self.disturbance
            self.rt.copy_(torch.from_numpy(words))
            self.rows = rows

    def launch(self, first: int = 0, last: int | None = None) -> None:
        """Enqueue stages [first, last) on the current stream; no synchronisation, so it may be captured."""
        key = (first, len(self.plan.stages) if last is None else last)
        if key not in self._launches:
            self._launches[key] = self.module.prepare(
                self.table.data_ptr(), self.rt.data_ptr(), len(self.plan.stages), *key
            )
        self._launches[key]()

    def raise_if_aborted(self) -> None:
        """Synchronise and raise KernelAbort if a wait gave up; the runner is unusable until `reset`."""
        torch.cuda.synchronize()
        if not int(self._word(L.SYNC_ABORT, 4)):
            return
        word = self._word(L.SYNC_HEALTH, 8)
        got = {name: (word >> shift) & ((1 << bits) - 1) for name, shift, bits in L.HEALTH_FIELDS}
        stage = got["stage"] - 1
        what, where = L.HEALTH_CODES.get(got["code"], str(got["code"])), f"SM {got['sm']}"
        if 0 <= stage < len(self.plan.stages):
            names = [s.name for s in self.plan.stages]
            if got["code"] == TAGGED:
                where += f", of stage {stage} {names[stage]!r}"
            else:
                waits = sorted({names[e.src] for e in self.plan.waits[stage]})
                where += f", stage {stage} {names[stage]!r}, wait {got['edge']}; it waits for {', '.join(waits)}"
        raise KernelAbort(f"launch {self.epoch} of plan {self.plan.name!r} gave up: {what}, {where}")

    def poison(self) -> None:
        """Fill the workspace with 0xFF: NaN in every float, a tag that no launch writes."""
        for t in self.raw.values():
            t.fill_(0xFF)

    def start_at(self, epoch: int) -> None:
        """Go on as if `epoch` launches had been: tests what wraps. Raises ValueError for an epoch that has been already."""
        if epoch < self.epoch:
            raise ValueError(f"epoch={epoch}: {self.epoch} launches have been, and their tags are in the buffers")
        self.sync.copy_(torch.from_numpy(sync_image(self.plan, epoch)))

    def reset(self) -> None:
        """Forget an aborted launch: counters, epoch, abort and health words start again from zero."""
        self.sync.zero_()
        for t in self.raw.values():
            t.zero_()
        torch.cuda.synchronize()

    def adopt(self, other: GpuRunner) -> None:
        """Share another runner's sync region, workspace and descriptor layout from now on (batch graphs of one plan)."""
        self.sync, self.raw, self._ids = other.sync, other.raw, other._ids
        self._lower()
        self.rows = 0
        self._launches.clear()

    def disturb(self, delay: int = 0, shuffle: tuple[int, int] = (0, 0)) -> None:
        """Pauses seeded by `delay`, and CTA i playing SM (a i + b) mod grid; zeros: none. Results must keep their bits."""
        a, b = shuffle
        if a and gcd(a, self.plan.sms) != 1:
            raise ValueError(f"shuffle: {a} and {self.plan.sms} CTAs have a common divisor: two would play one SM")
        self.disturbance = (delay & 0x7FFFFFFF, a | b << 32 if a else 0)
        self.rows = 0  # written with the next step's row count

    @contextmanager
    def without_signal(self, stage: int) -> Iterator[None]:
        """Plants a fault for tests: this stage does its work but never releases its arrivals."""
        kept = self.table[stage, L.SIGNAL].clone()
        self.table[stage, L.SIGNAL] = 0
        try:
            yield
        finally:
            self.table[stage, L.SIGNAL] = kept

    def _word(self, at: int, nbytes: int) -> int:
        return int.from_bytes(self.sync[at : at + nbytes].cpu().numpy().tobytes(), "little")

    @property
    def epoch(self) -> int:
        """Launches so far."""
        return self._word(L.SYNC_ENTERED, 8) // self.plan.sms

    # ---- StageRunner
    def step(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One decode step; see StageRunner.step."""
        self.bind(inputs)
        self.launch()
        self.raise_if_aborted()
        return self.outputs()[self.graph.outputs[0]]

    def outputs(self) -> dict[str, torch.Tensor]:
        """Copies of the graph's outputs after the last step, [rows, width]."""
        return {v: self.read(b)[: self.rows].clone() for v, b in self._outputs.items()}

    def choices(self) -> dict[str, torch.Tensor]:
        """Top-k choices of the last step by ids value, i32 [rows, topk]."""
        return {
            self.graph.op(self.plan.stages[i].ops[0]).outputs[0]: t[: self.rows].clone() for i, t in self._ids.items()
        }

    def run_stages(
        self, first: int, last: int, inputs: Mapping[str, torch.Tensor], inject: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Stages [first, last) from poisoned memory; see StageRunner.run_stages."""
        self.bind(inputs)
        self.poison()
        epoch = self.epoch + 1
        readers = {
            e.buffer: e.src for i in range(first, last) for e in self.plan.waits[i] if e.kind == "raw" and e.src < first
        }
        for name, value in inject.items():
            self.write(name, value, L.tag(epoch, readers.get(name, 0)))
        self.launch(first, last)
        self.raise_if_aborted()
        names = dict.fromkeys(a.buffer for s in self.plan.stages[first:last] for a in s.writes if a.buffer in self.raw)
        out = {name: self.read(name).clone() for name in names}
        for i in range(first, last):
            if i in self._ids:
                out[self.plan.stages[i].param("ids")] = self._ids[i].clone()
        return out

    # ---- buffers as tensors
    def read(self, name: str) -> torch.Tensor:
        """A buffer's elements, [rows, width] or [ranks, rows, width]; payloads of tagged words."""
        b = self.plan.buffer[name]
        shape = ((b.ranks,) if b.ranks else ()) + (b.rows, b.width)
        n = int(np.prod(shape))
        raw = self.raw[name]
        if b.layout == "tagged":
            raw = raw[: 2 * n * DTYPES[b.dtype].itemsize].view(-1, 16)[:, :8].reshape(-1)
        return raw[: n * DTYPES[b.dtype].itemsize].view(DTYPES[b.dtype]).view(shape)

    def write(self, name: str, value: torch.Tensor, tag: int) -> None:
        """Put elements into a buffer, in its layout."""
        if name in self.inputs:
            self.inputs[name][: value.shape[0]].copy_(value)
            return
        b = self.plan.buffer[name]
        full = torch.zeros(
            ((b.ranks,) if b.ranks else ()) + (b.rows, b.width), dtype=DTYPES[b.dtype], device=self.device
        )
        rows = min(value.shape[-2], b.rows)
        full[..., :rows, :] = value[..., :rows, :].to(device=self.device, dtype=full.dtype)
        flat = full.reshape(-1).view(torch.uint8)
        if b.layout != "tagged":
            self.raw[name][: flat.numel()].copy_(flat)
            return
        words = self.raw[name][: 2 * flat.numel()].view(-1, 16)
        words[:, :8].copy_(flat.view(-1, 8))
        words[:, 8:].copy_(
            torch.tensor([tag], dtype=torch.int64, device=self.device).view(torch.uint8).expand(len(words), 8)
        )
