"""The text of one PTX kernel as instructions, labels and registers."""

import re
from dataclasses import dataclass, field

_WIDTHS = {f"{kind}{width}": width for kind in "busf" for width in (8, 16, 32, 64)} | {"pred": 1}
_NAME = re.compile(r"[%$A-Za-z_][\w$.]*(?!\w)")


@dataclass(frozen=True)
class Instruction:
    """``opcode`` in its parts, between dots; ``guard``: a predicate register, and what it must be."""

    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None
    line: int

    def __str__(self) -> str:
        return f"line {self.line}: {'.'.join(self.opcode)} {', '.join(self.operands)}"


@dataclass
class Kernel:
    """``body``: instructions, and labels as strings."""

    name: str = ""
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)  # offset and size, in bytes
    parameter_bytes: int = 0
    threads: int = 0
    local: tuple[str, int] = ("", 0)
    shared: str = ""
    widths: dict[str, int] = field(default_factory=dict)  # of registers, or of families of them: "%r" of %r12
    body: list[Instruction | str] = field(default_factory=list)

    def width(self, register: str) -> int | None:
        """Of a register in bits, 1 for a predicate; None: it is none."""
        width = self.widths.get(register)
        return self.widths.get(register.rstrip("0123456789")) if width is None else width


def parse(text: str) -> Kernel:
    """The one kernel of a module, which calls no function."""
    kernel = Kernel()
    lines = [re.sub(r"//.*|^\s*\.(loc|file)\b.*", "", line) for line in text.splitlines()]
    text = "\n".join(lines)
    entry = re.search(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, re.DOTALL)
    assert entry is not None, "no kernel"
    kernel.name = entry[1]
    end = 0
    points = r"(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?"
    for align, kind, name, size in re.findall(
        rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+){points}\s+([\w$]+)(?:\[(\d+)\])?", entry[2]
    ):
        number = int(size) if size else _WIDTHS[kind] // 8
        step = int(align) if align else number
        start = -(-end // step) * step
        kernel.parameters[name] = start, number
        end = start + number
    kernel.parameter_bytes = end
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3])
    kernel.threads = int(threads[1]) if threads else 0
    shared = re.search(r"\.extern\s+\.shared[^;]*?([\w$]+)\[\]", text)
    kernel.shared = shared[1] if shared else ""
    _read_body(kernel, text[entry.end() :], text[: entry.end()].count("\n") + 1)
    return kernel


def _read_body(kernel: Kernel, text: str, line: int) -> None:
    """Statements up to the end of the kernel. Names that a pair of braces declares are made unlike all others."""
    scopes: list[int] = []
    declared: dict[int, set[str]] = {}
    statements: list[tuple[str, list[int], int]] = []
    pending, started, braces, number = "", line, 0, 0
    for at, character in enumerate(text):
        line += character == "\n"
        if not pending.strip():
            pending, started = "", line
            if character == "{":
                number += 1
                scopes.append(number)
                declared[number] = set()
                continue
            if character == "}":
                if not scopes:
                    break
                scopes.pop()
                continue
        if character == ":" and re.fullmatch(r"\s*[\w$]+", pending) and text[at + 1] != ":" and text[at - 1] != ":":
            label = pending.strip()
            if scopes:
                declared[scopes[-1]].add(label)
            statements.append((label + ":", list(scopes), started))
            pending = ""
        elif character == ";" and not braces:
            statement = pending.strip()
            if statement.startswith("."):
                _declare(kernel, statement, scopes, declared)
            elif statement:
                statements.append((statement, list(scopes), started))
            pending = ""
        else:
            braces += (character == "{") - (character == "}")
            pending += character
    for statement, within, at in statements:
        text = _renamed(statement, within, declared)
        kernel.body.append(text[:-1] if text.endswith(":") else _instruction(text, at))


def _declare(kernel: Kernel, statement: str, scopes: list[int], declared: dict[int, set[str]]) -> None:
    registers = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL)
    local = re.fullmatch(r"\.local\s+(?:\.align\s+\d+\s+)?\.b8\s+([\w$]+)\[(\d+)\]", statement)
    if registers:
        for name in registers[2].split(","):
            name = re.sub(r"<\d+>", "", name.strip())
            if scopes:
                declared[scopes[-1]].add(name)
                name = _unlike(name, scopes[-1])
            kernel.widths[name] = _WIDTHS[registers[1]]
    elif local:
        kernel.local = local[1], int(local[2])
    else:
        assert statement.startswith(".pragma"), statement


def _unlike(name: str, scope: int) -> str:
    return f"{name}@{scope}"


def _renamed(statement: str, scopes: list[int], declared: dict[int, set[str]]) -> str:
    def of_scope(match: re.Match[str]) -> str:
        scope = next((scope for scope in reversed(scopes) if match[0] in declared[scope]), None)
        return match[0] if scope is None else _unlike(match[0], scope)

    return _NAME.sub(of_scope, statement) if scopes else statement


def _instruction(text: str, line: int) -> Instruction:
    guard, rest = None, text
    guarded = re.match(r"@(!?)(\S+)\s+(.*)", text, re.DOTALL)
    if guarded:
        guard, rest = (guarded[2], not guarded[1]), guarded[3]
    opcode, _, operands = rest.partition(" ") if " " in rest else rest.partition("\t")
    return Instruction(tuple(opcode.strip().split(".")), tuple(split(operands)), guard, line)


def split(text: str) -> list[str]:
    """The operands in ``a, [b, c]`` or ``{a, b}``: between commas that no other bracket holds."""
    depth, parts = 0, [""]
    for character in text[1:-1] if text.startswith("{") and text.endswith("}") else text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in (" ".join(part.split()) for part in parts) if part]
