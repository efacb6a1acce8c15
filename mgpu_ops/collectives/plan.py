"""How a call runs: `plan` chooses its transport, backend and config, once a call, while JAX traces."""

from __future__ import annotations

import dataclasses
import math

from mgpu_ops.collectives.layout import Axes
from mgpu_ops.collectives.problem import XLA, Config, Problem, payload_bytes
from mgpu_ops.collectives.schedules import Kind, Transport
from mgpu_ops.collectives.topology import unable, unreachable
from mgpu_ops.collectives.workspace import Workspace, config_for, unusable
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import capture, dispatch, resolution
from mgpu_ops.registry.resolution import Resolution
from mgpu_ops.registry.spec import OpSpec


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call is given beside its array.

    transport, config, backend: None where the call leaves the choice to `plan`.
    equal: the result is the same on all devices, and typed so.
    timeout: seconds that an LL kernel waits at most (debug=True); None: for ever.
    no_multicast: the setting that forbids multicast, or None. A field, because JAX keeps what it traced for equal calls.
    """

    kind: Kind
    axes: Axes
    reduction: str = "add"
    transport: Transport | str | None = None
    config: Config | None = None
    backend: dispatch.Backend | None = None
    equal: bool = False
    timeout: float | None = None
    no_multicast: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.axes)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call runs.

    problem: with the transport of the kernel.
    choice: the backend, the GPU whose kernel runs, and why the call runs through XLA.
    config: of the kernel. None through XLA, and while `capture` traces.
    """

    problem: Problem
    choice: dispatch.Choice
    config: Config | None = None

    @property
    def backend(self) -> dispatch.Backend:
        return self.choice.backend

    @property
    def transport(self) -> str:
        return XLA if self.backend == XLA else self.problem.transport

    @property
    def reason(self) -> str | None:
        """Why the call runs through XLA; None for the kernel."""
        return self.choice.reason


def plan(call: Call, spec: OpSpec, problem: Problem) -> Plan:
    """The plan of a call, which resolves its config once for each transport that it considers.

    ValueError for a transport, backend or config that the call names and that cannot run.
    """
    if XLA in (call.transport, call.backend):
        return Plan(problem, dispatch.choose(spec, problem, XLA))
    found, reason = None, None
    if call.backend == "interpret":
        problem = dataclasses.replace(problem, transport=call.transport or "peer")
    elif call.transport is not None:
        problem = dataclasses.replace(problem, transport=call.transport)
        if cannot := _unreachable(call, problem):
            raise ValueError(f"transport={call.transport!r} cannot run {call.kind} over {call.names}: {cannot}")
    else:
        problem, found, reason = _with_transport(call, spec, problem)
    choice = dispatch.choose(spec, problem, call.backend, reason)
    if choice.device is None or capture.capturing():
        return Plan(problem, choice)
    found = found or resolution.resolve(spec, problem, choice.device, call.config)
    asked = call.config is None and (call.transport or call.backend)  # for the kernel, even where XLA is faster
    if found.runs == "xla" and not asked:
        return Plan(problem, dispatch.Choice(XLA, None, f"XLA is faster, as the config from {found.source!r} says"))
    return Plan(problem, choice, found.config)


def plan_in_workspace(call: Call, spec: OpSpec, problem: Problem, workspace: Workspace) -> Plan | None:
    """The plan of a call that runs in the workspace, or None where it cannot."""
    device = gpus.current()
    if device is None or call.devices == 1 or call.backend in (XLA, "interpret") or capture.capturing():
        return None
    if spec.supports(problem, device) or _unreachable(call, problem) or unusable():
        return None
    config = config_for(call.kind, problem, workspace)
    return None if config is None else Plan(problem, dispatch.Choice("mosaic", device, None), config)


def _with_transport(call: Call, spec: OpSpec, problem: Problem) -> tuple[Problem, Resolution | None, str | None]:
    """For a call that names no transport: the problem on the one that it takes, its config, and why it takes none, or None."""
    device = gpus.current()
    if device is None or spec.supports(problem, device) is not None:
        return problem, None, None  # `dispatch.choose` gives the reason
    reason = None
    for transport in ("multimem", "peer"):
        asked = dataclasses.replace(problem, transport=transport)
        reason = _unreachable(call, asked)
        if reason is None and spec.supports(asked, device) is None:
            found = _wanted(call, spec, asked, device)
            if found is not None:
                return asked, found, None
            reason = (
                f"nothing is tuned for {call.devices} GPUs and about {payload_bytes(problem)} bytes: "
                f"mgpu-tune run {call.kind} --devices {call.devices}, or pass transport={transport!r}"
            )
    return problem, None, reason


def _wanted(call: Call, spec: OpSpec, problem: Problem, device: Gpu) -> Resolution | None:
    """The config with which the kernel runs though the call names no transport, or None.

    Over peers, the kernel runs where the call names a config or a backend, and where a config is stored; also with the default
    config, where there is an entry for about as many bytes. Through the switch, it runs only with a config that was measured.
    Either way XLA runs where it is the faster (`Resolution.runs`).
    """
    named = call.config is not None or call.backend is not None
    if problem.transport == "multimem" and named:
        return None
    found = resolution.resolve(spec, problem, device, call.config)
    if problem.transport == "multimem":
        return found if found.entry is not None and found.entry.evidence.kind == "measured" else None
    if named or found.source != "default":
        return found
    return found if found.nearest is not None else None


def _unreachable(call: Call, problem: Problem) -> str | None:
    """Why the devices of the call's axes cannot reach each other by the problem's transport, or None."""
    return unable(call.axes, problem.transport) or unreachable(call.no_multicast, problem.transport)
