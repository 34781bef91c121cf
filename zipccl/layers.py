"""Code windows from the standard deviations of a model's layers, so that no values have to be sampled."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from zipccl import _C
from zipccl.backend import backend_of
from zipccl.codec import window

_CODED = (torch.bfloat16, torch.float32)
# Escapes of a layer beyond what its sigma predicts, as a part of its values: then its window has moved.
_MOVED = 0.01
# Of layers that are not counted as a whole: how many values tell.
_SAMPLE = 65536
_CHUNK = 8192

_owners = itertools.count(1)
_attached: weakref.WeakKeyDictionary[nn.Module, Layers] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Layer:
    """What is known of one parameter, or of this rank's part of it.

    Attributes:
        name: As in ``named_parameters()``.
        sigma: Root mean square of its values when they were last looked at; 0: there are none, or all are 0.
        observed: The part of its values that had no code when they were last counted, None before. Small layers share
            a chunk of 8192 values, and with it a window and this figure.
    """

    name: str
    parameter: weakref.ref[nn.Parameter]
    sigma: float = 0.0
    observed: float | None = None
    _usual: float = field(default=0.0, repr=False)  # what was observed right after sigma was read again
    _steps: int = field(default=0, repr=False)  # of its optimizer since sigma was read

    @property
    def window(self) -> range | None:
        """The exponent fields that have codes; None where samples decide."""
        return window(self.sigma) if self.sigma > 0 else None

    @property
    def predicted(self) -> float | None:
        """The part of values of N(0, sigma^2) that has no code."""
        return _C.escape_rate(self.sigma, self.window[-1]) if self.window else None

    @property
    def moved(self) -> bool:
        """Whether more values escape than are predicted, or usual for this layer."""
        return self.observed is not None and self.observed > max(self.predicted or 0.0, self._usual) + _MOVED

    def observe(self, escapes: float, replaced: float) -> None:
        """Of the layer's values, those that escape; of its chunks, those whose window did not fit."""
        self.observed = max(escapes, replaced / 16)

    def read(self, sigma: float) -> None:
        self.sigma = sigma if math.isfinite(sigma) and sigma < 1e38 else 0.0
        self._usual, self._steps = 0.0, 0

    def settle(self) -> None:
        """What is observed now is how this layer is, Gaussian or not."""
        self._usual = self.observed or 0.0

    def output_sigma(self, input_sigma: float = 1.0, fan_in: int | None = None) -> float:
        """The standard deviation of ``x @ weight.T``, where that of x is ``input_sigma`` and its mean 0.

        It is ``input_sigma * sqrt(fan_in) * sigma``, as fan_in independent products are summed; fan_in is the weight's
        last dimension unless it is given.
        """
        parameter = self.parameter()
        return input_sigma * self.sigma * math.sqrt(fan_in or (1 if parameter is None else parameter.shape[-1]))

    def values(self) -> torch.Tensor | None:
        """This rank's part, one-dimensional; None where the parameter is gone or its values are nowhere."""
        parameter = self.parameter()
        if parameter is None:
            return None
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return None if local.is_meta or not local.is_contiguous() else local.detach().view(-1)


class _LayersGather:
    """FSDP2's all-gather of one group of parameters, which tells the encoder whose values it gathers."""

    def __init__(self, layers: Layers, of: list[Layer], fsdp_group: Any):
        self._layers = layers
        self.of = of
        self._fsdp_group = fsdp_group  # FSDPParamGroup, of private parts: all that are used are read here or in runs()
        self.inner = fsdp_group._all_gather_comm
        self.group: dist.ProcessGroup = fsdp_group._all_gather_process_group
        self.runs()
        self.dtype: torch.dtype | None = None  # of what is gathered
        self.known: _C.KnownWindows | None = None

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.inner.allocate(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        return self._fsdp_group.fsdp_params[0]._sharded_param_data.device

    def runs(self) -> list[tuple[int, float]]:
        """Elements and sigma, in the order of what is gathered."""
        sizes = [parameter._sharded_param_data.numel() for parameter in self._fsdp_group.fsdp_params]
        return [(size, layer.sigma) for size, layer in zip(sizes, self.of, strict=True)]

    def values(self) -> torch.Tensor:
        return torch.cat([parameter._sharded_param_data.to(self.dtype) for parameter in self._fsdp_group.fsdp_params])

    def install(self) -> None:
        self._fsdp_group._all_gather_comm = self

    def remove(self) -> None:
        if self._fsdp_group._all_gather_comm is self:
            self._fsdp_group._all_gather_comm = self.inner

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        known = self._layers._known(self, input_tensor, group)
        with _known_windows(known) if known is not None else contextlib.nullcontext():
            return self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)


class Layers:
    """What :func:`attach` has found, a :class:`Layer` each; printed, a table."""

    def __init__(self, model: nn.Module, refresh_steps: int):
        self._refresh_steps = refresh_steps
        self._owner = next(_owners)
        self._steps = 0
        self._counted = 0  # steps when FSDP's parameters were last counted
        self.layers = [Layer(name, weakref.ref(parameter)) for name, parameter in _parameters(model)]
        self._by_id = {id(layer.parameter()): layer for layer in self.layers}
        self._gathers: list[weakref.ref[_LayersGather]] = []
        self._gathered: set[int] = set()  # ids of layers that FSDP gathers
        for module in model.modules():
            self._install(module)
        self._read(self.layers)
        self._publish()
        here = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (layers := here()) is not None:
                layers._stepped(optimizer)

        self._end = weakref.finalize(self, _forget, self._owner, register_optimizer_step_post_hook(stepped))

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> Layer:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def __str__(self) -> str:
        def percent(rate: float | None) -> str:
            return "" if rate is None else f"{rate:.2%}"

        width = max([5, *(len(layer.name) for layer in self.layers)])
        lines = [f"{'layer':{width}}     sigma     window  predicted  observed"]
        for layer in self.layers:
            codes = f"{layer.window[0]}..{layer.window[-1]}" if layer.window else "sampled"
            lines.append(
                f"{layer.name:{width}}  {layer.sigma:8.2e} {codes:>10} {percent(layer.predicted):>10} "
                f"{percent(layer.observed):>9}"
            )
        return "\n".join(lines)

    def detach(self) -> None:
        """Forgets all of it: windows come from samples again."""
        self._end()
        for gather in self._live():
            gather.remove()
        self._gathers = []

    # ---- FSDP2

    def _install(self, module: nn.Module) -> None:
        find_state: Any = getattr(module, "_get_fsdp_state", None)
        if find_state is None:
            return
        try:
            state = find_state()
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            for group in filter(None, groups):
                of = [self._by_id[id(parameter.sharded_param)] for parameter in group.fsdp_params]
                gather = _LayersGather(self, of, group)
                try:
                    backend_of(gather.group)
                except ValueError:  # another backend's
                    continue
                gather.install()
                self._gathers.append(weakref.ref(gather))
                self._gathered.update(id(layer) for layer in of)
        except (AttributeError, KeyError) as error:
            _say_once(f"zipccl.attach: FSDP of this PyTorch lacks expected parts ({error}): samples choose windows")

    def _live(self) -> list[_LayersGather]:
        return [gather for reference in self._gathers if (gather := reference()) is not None]

    def _known(self, gather: _LayersGather, values: torch.Tensor, group: dist.ProcessGroup) -> _C.KnownWindows | None:
        if not self._end.alive or values.dtype not in _CODED or group is not gather.group:
            return None
        runs = gather.runs()
        if sum(elements for elements, _ in runs) != values.numel():
            return None  # gathered are not the parameters as they are
        if gather.dtype != values.dtype:
            gather.dtype = values.dtype
            gather.known = _C.KnownWindows(_C.windows_of_layers(runs))
        # All ranks come here alike: they take the same steps and gather in the same order.
        if self._steps != self._counted:
            self._counted = self._steps
            self._count()
        return gather.known

    def _count(self) -> None:
        """Finds how many values have no code, and agrees with the ranks of each group on the most in each chunk."""
        of_group: dict[dist.ProcessGroup, list[tuple[_LayersGather, torch.Tensor, torch.Tensor]]] = {}
        for gather in self._live():
            if gather.dtype is not None:
                windows, escapes = self._plan(gather)
                of_group.setdefault(gather.group, []).append((gather, windows, escapes))
        for group, planned in of_group.items():
            most = torch.cat([escapes for _, _, escapes in planned]).to(planned[0][0].device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            parts = most.cpu().split([len(escapes) for _, _, escapes in planned])
            for (gather, windows, _), agreed in zip(planned, parts, strict=True):
                gather.known = _C.KnownWindows(windows, agreed.contiguous())

    def _plan(self, gather: _LayersGather) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows and escapes of its chunks."""
        values = gather.values()
        plan = self._plan_values(gather, values)
        moved = [layer for layer in gather.of if layer.moved]
        if moved:
            self._read(moved)
            plan = self._plan_values(gather, values)
            for layer in moved:
                layer.settle()
        return plan

    def _plan_values(self, gather: _LayersGather, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        runs = gather.runs()
        given = _C.windows_of_layers(runs)
        windows, escapes = _C.plan(values, given)
        rates = escapes / _CHUNK
        if values.numel() % _CHUNK:
            rates[-1] = escapes[-1] / (values.numel() % _CHUNK)
        replaced = (windows != given).float()
        before = 0
        for layer, (elements, _) in zip(gather.of, runs, strict=True):
            if elements:
                chunks = slice(before // _CHUNK, -(-(before + elements) // _CHUNK))
                layer.observe(rates[chunks].mean().item(), replaced[chunks].mean().item())
            before += elements
        return windows, escapes

    # ---- All layers

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        held = [self._by_id[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in self._by_id]
        self._steps += 1
        # An optimizer of other tensors, such as fp32 copies, moves all of ours.
        stepped = held or self.layers
        plain = [layer for layer in stepped if id(layer) not in self._gathered]
        for layer in stepped:
            layer._steps += 1
        for layer in plain:
            self._observe(layer)
        moved = [layer for layer in plain if layer.moved]
        again = {*moved, *(layer for layer in stepped if layer._steps >= self._refresh_steps)}
        if again:
            self._read(list(again))
            for layer in moved:
                self._observe(layer)
                layer.settle()
            self._publish()

    def _observe(self, layer: Layer) -> None:
        values = layer.values()
        if values is None or values.dtype not in _CODED or layer.sigma == 0 or values.numel() == 0:
            return
        some = values[:: max(1, values.numel() // _SAMPLE)].contiguous()
        given = _C.windows_of_layers([(some.numel(), layer.sigma)])
        windows, escapes = _C.plan(some, given)
        layer.observe(escapes.sum().item() / some.numel(), (windows != given).float().mean().item())

    def _read(self, layers: Sequence[Layer]) -> None:
        """Takes sigma from the parameters."""
        found = [(layer, values) for layer in layers if (values := layer.values()) is not None and values.numel() > 0]
        norms = [torch.linalg.vector_norm(values, dtype=torch.float32) for _, values in found]
        for (layer, values), norm in zip(found, torch.stack(norms).tolist() if norms else [], strict=True):
            layer.read(norm / math.sqrt(values.numel()))

    def _publish(self) -> None:
        """Says where in memory the layers are, for collectives on that memory."""
        memory = []
        for layer in self.layers:
            values = layer.values()
            if values is not None and values.dtype in _CODED and id(layer) not in self._gathered:
                memory.append((values.data_ptr(), values.numel() * values.element_size(), layer.sigma))
        _C.set_layers(self._owner, memory)


def attach(model: nn.Module, *, refresh_steps: int = 100) -> Layers:
    """Has the code windows of a model's parameters come from their standard deviations.

    For a model with FSDP2's ``fully_shard``, its all-gathers are told which layer each piece of their flat buffer
    belongs to; after each optimizer step the values without a code are counted once, and their maxima agreed in one
    small all-reduce a group, so that the next all-gathers have exactly the room that they need and no second phase. For
    any other model (plain, tensor-parallel, or with an optimizer that gathers parameters from one buffer), collectives
    on the parameters' own memory take the windows of the layers that lie there. All ranks of a group must attach alike.

    Args:
        model: After it was sharded, and on its device.
        refresh_steps: After so many optimizer steps every sigma is read again; before that, those of layers whose
            values have moved out of their window.

    Returns:
        The layers, for looking at and for ``detach()``. They live as long as the model.
    """
    if isinstance(refresh_steps, bool) or not isinstance(refresh_steps, int) or refresh_steps < 1:
        raise ValueError(f"zipccl.attach: refresh_steps={refresh_steps!r} is not allowed: expected 1 or more")
    if model in _attached:
        _attached.pop(model).detach()
    layers = Layers(model, refresh_steps)
    _attached[model] = layers
    return layers


@contextlib.contextmanager
def known_sigma(sigma: float) -> Iterator[None]:
    """The all-gathers and all-to-alls of this thread in the block are of values with this standard deviation.

    It sets their code windows; where it does not fit, samples do. For activations, :meth:`Layer.output_sigma` knows it.
    """
    window(sigma)  # checks it
    with _known_windows(_C.KnownWindows(torch.tensor([_C.window_top(sigma)], dtype=torch.int16))):
        yield


@contextlib.contextmanager
def _known_windows(known: _C.KnownWindows) -> Iterator[None]:
    before = _C.set_known_windows(known)
    try:
        yield
    finally:
        _C.set_known_windows(before)


def _parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.dtype.is_floating_point)


def _forget(owner: int, hook: RemovableHandle) -> None:
    hook.remove()
    _C.set_layers(owner, [])


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=4)
