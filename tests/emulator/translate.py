"""C for a kernel: of each stretch of instructions that no branch and no meeting of threads interrupts, a function of
one thread, and of each instruction at which threads meet, a function of a warp. ``machine.h`` says what they call."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from .parse import Instruction, Kernel, split

C_TYPES = {f"{kind}{bits}": f"{'' if kind == 's' else 'u'}int{bits}_t" for kind in "usb" for bits in (8, 16, 32, 64)}
C_TYPES |= {"f32": "float", "pred": "uint8_t"}
# of instructions that threads of a warp take together: how many operands before that of the threads, or None: all of
# them
_MEET = {"shfl": 4, "vote": 2, "redux": 2, "elect": 1}
_MEET |= dict.fromkeys(("bar", "barrier", "wgmma"))
_NOTHING = {"setmaxnreg", "prefetch", "griddepcontrol"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_OR_UNORDERED = {"neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}  # what must not hold
_BINARY = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
_UNARY = {"not": "~$0", "not.pred": "!$0", "neg": "-$0", "abs": "$0 < 0 ? -$0 : $0", "abs.f32": "fabsf($0)"}
_SPECIAL = {
    "%tid.x": "t->number",
    "%ctaid.x": "t->warp->cta->number",
    "%nctaid.x": "t->warp->cta->machine->ctas",
    "%cluster_ctarank": "t->warp->cta->rank",
    "%globaltimer": "now(t)",
}


class Stretch(NamedTuple):
    """``meets``: a function of a warp. Numbers of stretches are what a thread's place is."""

    code: str
    meets: bool
    line: int


class Translation(NamedTuple):
    """``source`` is to be compiled beside machine.h."""

    source: str
    lines: list[int]  # of the PTX, by stretch


def translate(kernel: Kernel) -> Translation:
    """The C source of a kernel."""
    return _Translator(kernel).source()


class _Translator:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.places: dict[str, tuple[str, int]] = {}  # of registers: which array, which element
        self.sizes = {1: 0, 16: 0, 32: 0, 64: 0}
        self.accumulators: list[str] = []

    def source(self) -> Translation:
        stretches: list[list[Instruction]] = [[]]
        labels: dict[str, int] = {}
        for item in self.kernel.body:
            if isinstance(item, str):
                if stretches[-1]:
                    stretches.append([])
                labels[item] = len(stretches) - 1
                continue
            if self._meets(item) and stretches[-1]:
                stretches.append([])
            stretches[-1].append(item)
            if self._meets(item) or item.opcode[0] in ("bra", "ret") or self._may_yield(item):
                stretches.append([])
        self.labels = labels
        done = [self._stretch(number, stretch) for number, stretch in enumerate(stretches)]
        table = ", ".join(
            f"{{{'0, meet' if s.meets else 'go'}_{n}{'' if s.meets else ', 0'}}}" for n, s in enumerate(done)
        )
        kernel = self.kernel
        sizes = {
            f"{kind}_REGISTERS": max(self.sizes[bits], 1) for kind, bits in zip("PHRD", (1, 16, 32, 64), strict=True)
        }
        sizes |= {
            "LOCAL_BYTES": max(kernel.local[1], 1),
            "PARAMETER_BYTES": kernel.parameter_bytes,
            "THREADS": kernel.threads,
        }
        lines = [f"#define {name} {value}" for name, value in sizes.items()]
        lines += ['#include "machine.h"', *self.accumulators, *(stretch.code for stretch in done)]
        lines += [f"const int SIZES[] = {{{', '.join(str(len(stretch)) for stretch in stretches)}}};"]
        lines += [f"const Stretch STRETCHES[] = {{{table}}};", f"const int MANY_STRETCHES = {len(done)};"]
        return Translation("\n".join(lines) + "\n", [stretch.line for stretch in done])

    def _meets(self, item: Instruction) -> bool:
        return item.opcode[0] in _MEET

    def _may_yield(self, item: Instruction) -> bool:
        return item.opcode[0] == "nanosleep" or item.opcode[:2] == ("mbarrier", "try_wait")

    def _stretch(self, number: int, stretch: list[Instruction]) -> Stretch:
        line = stretch[0].line if stretch else 0
        if stretch and self._meets(stretch[0]):
            (item,) = stretch
            assert item.guard is None, f"a condition on what threads do together: {item}"
            body = "\n".join(self._meeting(item))
            return Stretch(f"static int meet_{number}(Warp *w, uint32_t group) {{ // {item}\n{body}\n}}", True, line)
        steps: list[str] = []
        over = False
        for item in stretch:
            if item.opcode[0] in ("bra", "ret"):
                place = "EXITED" if item.opcode[0] == "ret" else str(self.labels[item.operands[0]])
                steps.append(f"{self._condition(item)}return {place};")
                over = over or item.guard is None
            else:
                text = " ".join(self._instruction(item))
                steps.append(f"{self._condition(item)}{{ {text} }} // {item}")
        if not over:
            steps.append(f"return {number + 1};")
        lines = "\n  ".join(steps)
        return Stretch(f"static int go_{number}(Thread *t) {{\n  {lines}\n}}", False, line)

    # -- operands

    def _condition(self, item: Instruction) -> str:
        return "" if item.guard is None else f"if ({'' if item.guard[1] else '!'}{self._place(item.guard[0])}) "

    def _place(self, register: str) -> str:
        """A register of the thread."""
        if register not in self.places:
            width = self.kernel.width(register)
            assert width is not None, f"what is {register}?"
            self.places[register] = {1: "p", 16: "h", 32: "r", 64: "d"}[width], self.sizes[width]
            self.sizes[width] += 1
        array, element = self.places[register]
        return f"t->{array}[{element}]"

    def _get(self, operand: str, kind: str) -> str:
        """The value of an operand as a C type."""
        c_type = C_TYPES[kind]
        if operand.startswith("!"):
            return f"(!{self._get(operand[1:], kind)})"
        if operand in _SPECIAL:
            return f"(({c_type}){_SPECIAL[operand]})"
        if self.kernel.width(operand) is not None:
            place = self._place(operand)
            return f"as_float({place})" if kind == "f32" else f"(({c_type}){place})"
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", operand):
            bits = f"0x{operand[2:]}u"
            return f"as_float({bits})" if kind == "f32" else f"(({c_type}){bits})"
        if re.fullmatch(r"[+-]?(0x[0-9A-Fa-f]+|\d+)U?", operand):
            return f"(({c_type}){int(operand.rstrip('U'), 0) & (2**64 - 1)}ull)"
        if operand == "THREADS":
            return operand
        if operand in self.kernel.parameters:
            return f"(({c_type})(uintptr_t)(t->warp->cta->machine->parameters + {self.kernel.parameters[operand][0]}))"
        if operand == self.kernel.shared:
            return f"(({c_type})SHARED_BASE)"
        if operand == self.kernel.local[0]:
            return f"(({c_type})0)"
        raise AssertionError(f"what is {operand}?")

    def _set(self, register: str, kind: str, value: str) -> str:
        """An assignment of a value of a C type to a register, which may be wider."""
        if register == "_":
            return ""
        place = self._place(register)
        if kind == "f32":
            return f"{place} = as_bits({value});"
        if kind == "pred":
            return f"{place} = ({value}) != 0;"
        return f"{place} = ({C_TYPES[kind]})({value});"

    def _address(self, operand: str) -> tuple[str, int]:
        """Register or name, and offset, of ``[a+8]``."""
        inner = operand[1:-1].replace(" ", "")
        base, _, offset = inner.partition("+")
        return base, int(offset, 0) if offset else 0

    def _memory(self, item: Instruction, operand: str, size: int, how: str) -> str:
        """A pointer to what an address means, and that it is accessed: "LOADS", "STORES" or both."""
        space, values = self._space(item), "values" if item.opcode[0] == "st" else "0"
        parts = set(item.opcode)
        if item.opcode[0] in ("atom", "red") or parts & {"relaxed", "acquire", "release", "acq_rel"}:
            how += "|STRONG"
        if parts & {"acquire", "acq_rel"}:
            how += "|ACQUIRES"
        if parts & {"release", "acq_rel"}:
            how += "|RELEASES"
        base, offset = self._address(operand)
        if space == "param":
            start, length = self.kernel.parameters[base]
            assert offset + size <= length
            return f"(t->warp->cta->machine->parameters + {start + offset})"
        if space == "global":
            return f"global_at(t, {self._get(base, 'u64')} + {offset}, {size}, {how}, {values})"
        if space == "shared":
            return f"shared_at(t, {self._get(base, 'u32')} + {offset}, {size}, {how}, {values})"
        assert space == "local", operand
        return f"local_at(t, {self._get(base, 'u64')} + {offset}, {size})"

    def _shared_address(self, operand: str) -> str:
        base, offset = self._address(operand)
        return f"({self._get(base, 'u32')} + {offset})"

    # -- instructions of one thread

    def _instruction(self, item: Instruction) -> Iterator[str]:
        name = item.opcode[0]
        if name in _NOTHING:
            return
        of_name: Callable[[Instruction], Iterator[str]] | None = getattr(self, f"_do_{name}", None)
        assert of_name is not None, f"not known: {item}"
        yield from of_name(item)

    def _arithmetic(self, item: Instruction, value: str, *kinds: str) -> Iterator[str]:
        """``value`` of the sources $0, $1, ... Their type is the instruction's last part, where ``kinds`` has no
        other."""
        kind = item.opcode[-1]
        sources = [
            self._get(source, kinds[n] if n < len(kinds) else kind) for n, source in enumerate(item.operands[1:])
        ]
        value = re.sub(r"\$(\d)", lambda match: sources[int(match[1])], value)
        if kind == "f32":
            value = f"canonical({value})"
        yield self._set(item.operands[0], kind, value)

    def _do_binary(self, item: Instruction) -> Iterator[str]:
        assert not set(item.opcode[1:-1]) - {"rn"}, f"not known: {item}"
        return self._arithmetic(item, f"$0 {_BINARY[item.opcode[0]]} $1")

    _do_add = _do_sub = _do_and = _do_or = _do_xor = _do_binary

    def _do_unary(self, item: Instruction) -> Iterator[str]:
        name, kind = item.opcode[0], item.opcode[-1]
        return self._arithmetic(item, _UNARY.get(f"{name}.{kind}", _UNARY[name]))

    _do_not = _do_neg = _do_abs = _do_unary

    def _do_mul(self, item: Instruction) -> Iterator[str]:
        way, kind = item.opcode[1], item.opcode[-1]
        if way == "lo" or (kind[0] == "f" and way in (kind, "rn")):
            yield from self._arithmetic(item, "$0 * $1")
        else:
            assert way in ("wide", "hi"), f"not known: {item}"
            product = self._wide_product(item)
            if way == "wide":
                yield self._set(item.operands[0], _wide(kind), product)
            else:
                yield self._set(item.operands[0], kind, f"{product} >> {kind[1:]}")

    def _wide_product(self, item: Instruction) -> str:
        kind = item.opcode[-1]
        wide = "__int128" if kind == "s64" else "unsigned __int128" if kind == "u64" else C_TYPES[_wide(kind)]
        a, b = (self._get(source, kind) for source in item.operands[1:3])
        return f"(({wide}){a} * ({wide}){b})"

    def _do_mad(self, item: Instruction) -> Iterator[str]:
        way, kind = item.opcode[1], item.opcode[-1]
        if way == "wide":
            sum_ = f"{self._wide_product(item)} + {self._get(item.operands[3], _wide(kind))}"
            yield self._set(item.operands[0], _wide(kind), sum_)
        else:
            assert way == "lo", f"not known: {item}"
            yield from self._arithmetic(item, "$0 * $1 + $2")

    def _do_fma(self, item: Instruction) -> Iterator[str]:
        if item.opcode == ("fma", "rn", "bf16x2"):
            a, b, c = (self._get(source, "u32") for source in item.operands[1:])
            yield self._set(item.operands[0], "u32", f"fma_bf16x2({a}, {b}, {c})")
            return
        assert item.opcode == ("fma", "rn", "f32"), f"not known: {item}"
        yield from self._arithmetic(item, "fmaf($0, $1, $2)")

    def _do_div(self, item: Instruction) -> Iterator[str]:
        if item.opcode[-1][0] == "f":
            assert item.opcode[1] in ("full", "rn"), f"not known: {item}"
            return self._arithmetic(item, "$0 / $1")
        return self._arithmetic(item, "divided($0, $1)" if item.opcode[-1][0] == "s" else "$1 ? $0 / $1 : -1")

    def _do_rem(self, item: Instruction) -> Iterator[str]:
        return self._arithmetic(item, "remainder_of($0, $1)" if item.opcode[-1][0] == "s" else "$1 ? $0 % $1 : $0")

    def _do_minmax(self, item: Instruction) -> Iterator[str]:
        name, kind = item.opcode[0], item.opcode[-1]
        if kind != "f32":
            return self._arithmetic(item, f"$0 {'<' if name == 'min' else '>'} $1 ? $0 : $1")
        assert item.opcode[1:-1] in ((), ("NaN",)), f"not known: {item}"
        return self._arithmetic(item, f"{name}imum($0, $1, {int(len(item.opcode) == 3)})")

    _do_min = _do_max = _do_minmax

    def _do_ex2(self, item: Instruction) -> Iterator[str]:
        assert item.opcode[1:] == ("approx", "ftz", "f32")
        return self._arithmetic(item, f"{item.opcode[0]}_approx(t, $0)")

    _do_lg2 = _do_rcp = _do_ex2

    def _do_shl(self, item: Instruction) -> Iterator[str]:
        bits = int(item.opcode[-1][1:])
        return self._arithmetic(item, f"$1 < {bits} ? $0 << $1 : 0", item.opcode[-1], "u32")

    def _do_shr(self, item: Instruction) -> Iterator[str]:
        kind = item.opcode[-1]
        bits = int(kind[1:])
        beyond = f"$0 >> {bits - 1}" if kind[0] == "s" else "0"
        return self._arithmetic(item, f"$1 < {bits} ? $0 >> $1 : {beyond}", kind, "u32")

    def _do_shf(self, item: Instruction) -> Iterator[str]:
        assert item.opcode == ("shf", "l", "wrap", "b32"), f"not known: {item}"
        a, b, c = (self._get(source, "u32") for source in item.operands[1:])
        yield self._set(item.operands[0], "u32", f"((uint64_t){b} << 32 | {a}) << ({c} & 31) >> 32")

    def _do_prmt(self, item: Instruction) -> Iterator[str]:
        return self._arithmetic(item, "permuted($0, $1, $2)")

    def _do_popc(self, item: Instruction) -> Iterator[str]:
        source = self._get(item.operands[1], item.opcode[-1])
        yield self._set(item.operands[0], "u32", f"__builtin_popcountll({source})")

    def _do_selp(self, item: Instruction) -> Iterator[str]:
        kind = item.opcode[-1]
        kind = "b32" if kind == "f32" else kind  # bits stay bits
        a, b, p = item.operands[1:]
        value = f"{self._get(p, 'pred')} ? {self._get(a, kind)} : {self._get(b, kind)}"
        yield self._set(item.operands[0], kind, value)

    def _do_setp(self, item: Instruction) -> Iterator[str]:
        _, how, kind = item.opcode
        a, b = (self._get(source, kind) for source in item.operands[1:])
        yield self._set(item.operands[0], "pred", _compared(how, a, b, kind))

    def _do_cvt(self, item: Instruction) -> Iterator[str]:
        if item.opcode[1:] == ("rz", "bf16x2", "f32"):
            high, low = (self._get(source, "f32") for source in item.operands[1:])
            yield self._set(item.operands[0], "u32", f"bf16_towards_zero({high}) << 16 | bf16_towards_zero({low})")
            return
        *how, to, source_kind = item.opcode[1:]
        source = self._get(item.operands[1], source_kind)
        if how == ["rz"]:
            assert (to, source_kind) == ("f32", "u32"), f"not known: {item}"
            source = f"float_towards_zero({source})"
        else:  # C rounds to the nearest too
            inexact = to[0] == "f" and (source_kind[0] != "f" or to == "f32")
            assert how == (["rn"] if inexact else []), f"not known: {item}"
            assert to[0] == "f" or source_kind[0] != "f", f"not known: {item}"
        value = f"({C_TYPES[to]}){source}"
        yield self._set(item.operands[0], to, f"canonical({value})" if to == "f32" else value)

    def _do_cvta(self, item: Instruction) -> Iterator[str]:
        source = self._get(item.operands[1], "u64")
        value = {
            ("param",): source,
            ("shared",): f"(uint64_t)(uintptr_t)shared_at(t, (uint32_t){source}, 1, 0, 0)",
            ("to", "shared::cluster"): f"shared_address(t, {source})",
            ("local",): source,
        }[item.opcode[1:-1]]
        yield self._set(item.operands[0], "u64", value)

    def _do_mapa(self, item: Instruction) -> Iterator[str]:
        address, rank = (self._get(source, "u32") for source in item.operands[1:])
        yield self._set(item.operands[0], "u32", f"({address} & 0xFFFFFF) | ({rank} + 1) << 24")

    def _do_mov(self, item: Instruction) -> Iterator[str]:
        to, source = item.operands
        kind = "b32" if item.opcode[-1] == "f32" else item.opcode[-1]
        if to.startswith("{"):  # low word first
            parts = split(to)
            bits = int(kind[1:]) // len(parts)
            yield f"uint64_t whole = {self._get(source, kind)};"
            for n, part in enumerate(parts):
                yield self._set(part, f"b{bits}", f"whole >> {bits * n}")
        elif source.startswith("{"):
            parts = split(source)
            bits = int(kind[1:]) // len(parts)
            words = (f"(uint64_t){self._get(part, f'b{bits}')} << {bits * n}" for n, part in enumerate(parts))
            yield self._set(to, kind, " | ".join(words))
        else:
            yield self._set(to, kind, self._get(source, kind))

    # -- memory

    def _space(self, item: Instruction) -> str:
        for part in item.opcode[1:]:
            space = part.split("::")[0]
            if space in ("global", "shared", "local", "param"):
                return space
        raise AssertionError(f"of which memory? {item}")

    def _do_ld(self, item: Instruction) -> Iterator[str]:
        kind = item.opcode[-1]
        kind = "b32" if kind == "f32" else kind
        registers = split(item.operands[0])
        size = int(kind[1:]) // 8
        yield f"{C_TYPES[kind]} *at = (void *){self._memory(item, item.operands[1], size * len(registers), 'LOADS')};"
        for n, register in enumerate(registers):
            yield self._set(register, kind, f"at[{n}]")

    def _do_st(self, item: Instruction) -> Iterator[str]:
        kind = item.opcode[-1]
        kind = "b32" if kind == "f32" else kind
        sources = split(item.operands[1])
        yield f"{C_TYPES[kind]} values[] = {{{', '.join(self._get(source, kind) for source in sources)}}};"
        size = int(kind[1:]) // 8 * len(sources)
        yield f"memcpy({self._memory(item, item.operands[0], size, 'STORES')}, values, {size});"

    def _do_atom(self, item: Instruction) -> Iterator[str]:
        how, kind = (
            next(part for part in item.opcode if part in ("add", "min", "max", "exch", "cas", "or")),
            item.opcode[-1],
        )
        operands = list(item.operands)
        to = operands.pop(0) if item.opcode[0] == "atom" else "_"
        c_type, size = C_TYPES[kind], int(kind[1:]) // 8
        values = [self._get(operand, kind) for operand in operands[1:]]
        yield f"{c_type} *at = (void *){self._memory(item, operands[0], size, 'LOADS|STORES')}, old = *at;"
        if how == "cas":
            yield f"if (old == {values[0]}) *at = {values[1]};"
        elif how in ("min", "max"):
            yield f"if ({values[0]} {'<' if how == 'min' else '>'} old) *at = {values[0]};"
        else:
            yield f"*at = {values[0] if how == 'exch' else f'old {_BINARY[how]} {values[0]}'};"
        yield self._set(to, kind, "old")

    _do_red = _do_atom

    def _do_mbarrier(self, item: Instruction) -> Iterator[str]:
        what = item.opcode[1]
        if what == "init":
            yield f"barrier_init(t, {self._shared_address(item.operands[0])}, {self._get(item.operands[1], 'u32')});"
        elif what == "try_wait":
            to, address, parity = item.operands[:3]
            waited = f"barrier_passed(t, {self._shared_address(address)}, {self._get(parity, 'u32')})"
            yield self._set(to, "pred", waited)
        else:
            assert what == "arrive", f"not known: {item}"
            address = next(operand for operand in item.operands if operand.startswith("["))
            rest = item.operands[item.operands.index(address) + 1 :]
            expected = "expect_tx" in item.opcode
            arrivals = self._get(rest[0], "u32") if rest and not expected else "1"
            bytes_expected = self._get(rest[0], "u32") if expected else "0"
            yield f"barrier_arrive(t, {self._shared_address(address)}, {arrivals}, {bytes_expected});"

    def _do_cp(self, item: Instruction) -> Iterator[str]:
        assert item.opcode[:5] == ("cp", "async", "bulk", "tensor", "2d"), f"not known: {item}"
        to, source, barrier, *rest = item.operands
        tensor, coordinates = split(source[1:-1])
        x, y = (self._get(part, "s32") for part in split(coordinates))
        mask = self._get(rest[0], "u16") if "multicast::cluster" in item.opcode else "0"
        places = f"{self._shared_address(to)}, {self._shared_address(barrier)}"
        yield f"copy_tile(t, {self._get(tensor, 'u64')}, {x}, {y}, {places}, {mask});"

    def _do_fence(self, item: Instruction) -> Iterator[str]:
        if "acq_rel" in item.opcode or "sc" in item.opcode:
            yield "fenced(t);"

    def _do_nanosleep(self, item: Instruction) -> Iterator[str]:
        yield "t->warp->yields = 1;"

    # -- instructions of a warp: 0, if it has to wait

    def _meeting(self, item: Instruction) -> Iterator[str]:
        name = item.opcode[0]
        position = 0 if item.opcode[:2] == ("bar", "warp") else _MEET[name]
        yield "  const uint32_t alive = living(w); (void)alive;"
        if position is None:
            yield "  if (group != alive) return 0;"
        else:
            mask = self._get(item.operands[position], "u32")
            yield f"  EACH(group) if (({mask} & alive) & ~group) return 0;"
        yield from getattr(self, f"_meet_{name}")(item)
        yield "  return 1;"

    def _meet_shfl(self, item: Instruction) -> Iterator[str]:
        way = item.opcode[2]
        to, source, lane, clamp, _ = item.operands
        assert "|" not in to, f"not known: {item}"
        yield f"  uint32_t old[32] = {{0}}; EACH(group) old[lane] = {self._get(source, 'u32')};"
        yield f"  EACH(group) {{ int b = {self._get(lane, 'u32')}, c = {self._get(clamp, 'u32')};"
        yield f"    int from = shuffle_{way}(lane, b, c); if (from < 0 || !(group >> from & 1)) from = lane;"
        yield f"    {self._set(to, 'u32', 'old[from]')} }}"

    def _meet_vote(self, item: Instruction) -> Iterator[str]:
        _, _, way, kind = item.opcode
        yield f"  uint32_t votes = 0; EACH(group) votes |= (uint32_t){self._get(item.operands[1], 'pred')} << lane;"
        value = {"any": "votes != 0", "all": "votes == group", "ballot": "votes"}[way]
        yield f"  EACH(group) {{ {self._set(item.operands[0], kind, value)} }}"

    def _meet_redux(self, item: Instruction) -> Iterator[str]:
        _, _, way, kind = item.opcode
        value = self._get(item.operands[1], kind)
        step = (
            f"total {_BINARY[way]} {value}"
            if way in _BINARY
            else f"{value} {'<' if way == 'min' else '>'} total ? {value} : total"
        )
        yield f"  {C_TYPES[kind]} total = 0; int first = 1;"
        yield f"  EACH(group) {{ total = first ? {value} : {step}; first = 0; }}"
        yield f"  EACH(group) {{ {self._set(item.operands[0], kind, 'total')} }}"

    def _meet_elect(self, item: Instruction) -> Iterator[str]:
        number, chosen = item.operands[0].split("|")
        yield "  int first = __builtin_ctz(group);"
        yield f"  EACH(group) {{ {self._set(number, 'u32', 'first')} {self._set(chosen, 'pred', 'lane == first')} }}"

    def _meet_bar(self, item: Instruction) -> Iterator[str]:
        if item.opcode[1] == "warp":
            yield "  meet(w, group);"
            return
        operands = list(item.operands)
        to = operands.pop(0) if item.opcode[1] == "red" else None
        yield "  Thread *t = &w->threads[0]; (void)t;"
        number, threads = (self._get(operand, "u32") for operand in [*operands[:2], "THREADS"][:2])
        if to is None:
            yield f"  if (!named_barrier(w, {number}, {threads}, 0, {int(item.opcode[1] == 'sync')})) return 0;"
            return
        assert item.opcode[2:] == ("popc", "u32"), f"not known: {item}"
        yield f"  int votes = 0; EACH(group) votes += {self._get(operands[2], 'pred')};"
        yield f"  if (!named_barrier(w, {number}, {threads}, votes, 1)) return 0;"
        yield f"  EACH(group) {{ {self._set(to, 'u32', f'w->cta->named[{number}].sum')} }}"

    def _meet_barrier(self, item: Instruction) -> Iterator[str]:
        if item.opcode[1] == "cta":
            yield from self._meet_bar(replace(item, opcode=("bar", *item.opcode[2:])))
            return
        assert item.opcode[1] == "cluster", f"not known: {item}"
        yield f"  if (!cluster_{item.opcode[2]}(w)) return 0;"

    def _meet_wgmma(self, item: Instruction) -> Iterator[str]:
        what = item.opcode[1]
        if what == "commit_group":
            yield "  commit_products(w);"
        elif what == "wait_group":
            yield f"  await_products(w, {item.operands[0]});"
        elif what == "mma_async":
            shape, *kinds = (part for part in item.opcode[2:] if part not in ("sync", "aligned"))
            columns = int(re.fullmatch(r"m64n(\d+)k16", shape)[1])  # type: ignore[index]
            assert kinds in (["f32", "bf16", "bf16"], ["f32", "f16", "f16"]), f"not known: {item}"
            registers, a, b, accumulate, *rest = item.operands
            assert rest == ["1", "1", "0", "0"], f"not known: {item}"
            places = [self._place(register) for register in split(registers)]
            assert len(places) == columns // 2
            numbers = ", ".join(re.fullmatch(r"t->r\[(\d+)\]", place)[1] for place in places)  # type: ignore[index]
            name = f"ACCUMULATOR_{len(self.accumulators)}"
            self.accumulators.append(f"static const uint16_t {name}[] = {{{numbers}}};")
            yield "  Thread *t = &w->threads[0];"
            descriptors = f"{self._get(a, 'u64')}, {self._get(b, 'u64')}"
            flags = f"{self._get(accumulate, 'pred')}, {int(kinds[1] == 'bf16')}"
            yield f"  multiply(w, {name}, {columns}, {descriptors}, {flags});"
        else:
            assert what == "fence", f"not known: {item}"


def _compared(how: str, a: str, b: str, kind: str) -> str:
    if how in ("num", "nan"):
        return f"({a} != {a} || {b} != {b}) == {int(how == 'nan')}"
    if how == "equ" or (how == "ne" and kind[0] == "f"):  # unlike C's
        return f"{'!' if how == 'equ' else ''}({a} < {b} || {a} > {b})"
    if how in _OR_UNORDERED:
        return f"!({a} {_OR_UNORDERED[how]} {b})"
    return f"{a} {_COMPARE[how]} {b}"


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"
