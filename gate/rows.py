"""The rows of the table: what was asked of a kernel, what the compiler made of it, and whether that will do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Architecture:
    """One generation of NVIDIA GPUs.

    Args:
        shared_limit: what one block may ask for, in bytes.
        shared_reserved: what the compiler reports on top of what a kernel asks for, in bytes.
    """

    capability: int
    shared_limit: int
    shared_reserved: int = 0

    @property
    def name(self) -> str:
        return f"sm_{self.capability}"


ARCHITECTURES = {
    80: Architecture(80, 163 * 1024),
    89: Architecture(89, 99 * 1024),
    90: Architecture(90, 227 * 1024, 1024),
    100: Architecture(100, 227 * 1024, 1024),
}

MATRIX_INSTRUCTIONS = ("HMMA", "HGMMA", "UTCHMMA")
"""SASS of the tensor cores for half precision and TF32: sm_80's of one warp, sm_90's of a warpgroup, sm_100's."""

MULTICAST = "UBLKCP.MULTICAST"
"""SASS of sm_90's copy engine where it writes to several blocks of a cluster at once."""

Instruction = str | Mapping[int, str] | None


@dataclass(frozen=True)
class Expectation:
    """What a row of a kernel table asks for.

    Args:
        instruction: the matrix instruction that must be there: one name, or one for each capability; None for none.
        multicast: whether copies to a whole cluster must be there.
    """

    instruction: Instruction = None
    multicast: bool = False

    def instruction_for(self, capability: int) -> str | None:
        if isinstance(self.instruction, Mapping):
            return self.instruction.get(capability)
        return self.instruction


@dataclass(frozen=True)
class Entry:
    """One entry function of a compiled file, as its disassembly shows it.

    Args:
        shared: static shared memory as the compiler reports it.
        dynamic_shared: what a launch asks for on top.
    """

    name: str
    registers: int
    stack: int
    shared: int
    local_accesses: int
    dynamic_shared: int = 0
    instructions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """One line of the table, with the reasons why it is red."""

    kernel: str
    configuration: str
    capability: int
    entry: Entry | None
    shared: int
    faults: tuple[str, ...]


def judge(kernel: str, configuration: str, capability: int, entry: Entry, expected: Expectation) -> Verdict:
    """Whether an entry function is what its row asks for on this architecture."""
    faults = []
    if entry.local_accesses:
        faults.append(f"{entry.local_accesses} loads and stores of spilled registers ({entry.stack} bytes)")
    architecture = ARCHITECTURES[capability]
    limit = architecture.shared_limit
    shared = max(entry.shared - architecture.shared_reserved, 0) + entry.dynamic_shared
    if shared > limit:
        faults.append(f"{shared} bytes of shared memory, over the limit of {limit}")
    wanted = expected.instruction_for(capability)
    if wanted is not None and not entry.instructions.get(wanted):
        found = ", ".join(sorted(entry.instructions)) or "no matrix instruction"
        faults.append(f"no {wanted}; found {found}")
    if expected.multicast and not entry.instructions.get(MULTICAST):
        faults.append(f"no {MULTICAST}")
    return Verdict(kernel, configuration, capability, entry, shared, tuple(faults))


def broken(kernel: str, configuration: str, capability: int, fault: str) -> Verdict:
    """A row that did not compile, or that no entry function belongs to."""
    return Verdict(kernel, configuration, capability, None, 0, (fault,))
