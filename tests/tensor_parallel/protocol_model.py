"""The peer-to-peer protocol of ``flashsampling.exchange_protocol`` as a state machine, and a search through all that it
can do.

Modelled
    Ranks that make lists of calls. A launch finishes its rows in blocks; each block reads ``failure``, sends, waits,
    compares, judges and empties on its own, in any order with all others. Each word of each message and each store of
    ``failure`` is in flight for as long as it likes, and overtakes whatever it likes but stores to its own address.
    What a rank empties in its own memory may take effect after a peer's next store, as late as when that rank's next
    launch has been heard of (the fence). A rank may die between any two steps; of what it has in flight then, any part
    arrives. A wait may run out at any moment; or, where it is asked who is to blame, only once no rank but a slow one
    has anything left to do, and the wait that began first before the others.

Left out
    Hashes (tags are what is hashed: they never collide), widths of numbers, closing while a launch is at work, the
    host, chunks of peers (but for a defect of theirs). A rank's stores into its own memory are there at once.

Lazily: an arrival changes one address, so it matters only just before its owner reads or empties it. A step that reads
chooses what has arrived by then, instead of an arrival being a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from flashsampling.exchange_protocol import DECLARED, DIFFERS, LATE, MAX_RANKS, Verdict

LAUNCH, LEFT_OUT, REPLAY, CLOSE, LEAVE = "launch", "left out", "replay", "close", "leave"
NEVER, ANY, PROMPT = "never", "any", "prompt"  # when a wait may run out
TOGETHER, WARPS, BLOCKS = "together", "warps", "blocks"  # rows of a launch: see Scenario.rows
READY, SENDING, SENT, WAITING, JUDGING, ACCEPTED, FAILED, REFUSED = range(
    8
)  # a block of rows; from ACCEPTED on it is done

DEFECTS = {
    "unchecked": "failure is not read before sending",
    "untagged": "tags are not compared",
    "no numbers": "tags say nothing of the step",
    "no parameters": "tags say nothing of the parameters",
    "no rows": "tags say nothing of how many rows there are",
    "one buffer": "launches do not alternate between two buffers",
    "full": "slots are not emptied",
    "late emptying": "no fence between a launch's emptying and the next one's stores",
    "forgetful": "who judges does not store failure into its own memory",
    "no compare-and-swap": "every verdict counts",
    "one word": "the first word of a message stands for both",
    "reads again": "who is missing is asked again after the time-out",
    "late clock": "a wait's time begins after its stores",
    "partial": "a block that was refused does not fail the others",
    "emptied early": "of three ranks two are waited for first, and their slots are empty when the third is judged",
    "untold": "a last block that finds a failure at the end does not tell its host",
    "unspread": "a verdict is stored into no peer's failure",
    "unpolled": "failure is not looked at while waiting",
}


class Call(NamedTuple):
    # LEFT_OUT: it raised. REPLAY: a launch that does not know of what was left out. CLOSE. LEAVE: the host declares a
    # failure
    kind: str = LAUNCH
    rows: int = 1
    parameters: int = 0  # a bit for each row


@dataclass(frozen=True)
class Scenario:
    programs: tuple[tuple[Call, ...], ...]  # of each rank
    time_outs: str = NEVER
    dies: frozenset[int] = frozenset()  # ranks that may, at any point
    slow: frozenset[int] = frozenset()  # ranks that PROMPT waits for; those that may die are, too
    straggler: int | None = None  # who must be to blame, if anybody is
    peaceful: bool = False  # every call must be accepted
    # TOGETHER: one wait for all. Else each has its own: BLOCKS of rows, the last to finish asks for a failure, or WARPS
    # of one block, that know of each other whether all accepted
    rows: str = TOGETHER
    defects: frozenset[str] = frozenset()


class Rank(NamedTuple):
    call: int = 0  # which of its program is next, or at work
    launches: int = 0
    skipped_calls: int = 0
    closed: bool = False
    dead: bool = False
    told: Verdict | None = None
    blocks: tuple = ()  # of the launch at work: (phase, rows, what is to be judged)
    last: int | None = None  # block that finished last and concludes
    results: tuple[bool, ...] = ()  # of launches: accepted or not


class Word(NamedTuple):
    """Half a message. The protocol reads ``tags``; ``launch`` and ``call`` are the truth that it must not miss."""

    tags: tuple[int, int, int]  # number, parameters, rows
    launch: int
    call: int
    parameters: int
    rows: int


class Slot(NamedTuple):
    """One address: what is there, the launch (from 1) whose emptying has yet to take effect, stores that have yet to
    arrive."""

    value: Word | None = None
    emptied: int = 0
    coming: tuple[Word, ...] = ()


EMPTY = Slot()


class World:
    """A state. Its parts are never changed, only replaced."""

    __slots__ = ("failure", "order", "ranks", "slots", "verdict")

    def __init__(self, ranks, slots, failure, verdict, order):
        self.ranks = ranks
        self.slots = slots
        self.failure = failure  # of each rank: value, what is coming
        self.verdict = verdict
        self.order = order  # blocks that wait, the longest first; kept where it matters

    def copy(self) -> World:
        return World(self.ranks[:], self.slots[:], self.failure[:], self.verdict, self.order)

    def key(self) -> tuple:
        return tuple(self.ranks), tuple(self.slots), tuple(self.failure), self.verdict, self.order


class Step(NamedTuple):
    label: str
    world: World
    broken: str = ""  # which property, if it breaks one


@dataclass
class Report:
    states: int = 0
    outcomes: set[tuple] = field(default_factory=set)  # of each rank: dead, told, results
    broken: str = ""
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([self.broken or f"{self.states} states, {len(self.outcomes)} outcomes", *self.trace])


class Model:
    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.programs = scenario.programs
        self.ranks = len(scenario.programs)
        self.rows = max(call.rows for program in scenario.programs for call in program)
        self.slow = scenario.slow | scenario.dies
        self.remembers = not scenario.defects & {"unchecked", "forgetful"}
        assert scenario.defects <= set(DEFECTS)

    def has(self, defect: str) -> bool:
        return defect in self.scenario.defects

    def start(self) -> World:
        slots = [EMPTY] * (self.ranks * 2 * self.ranks * self.rows * 2)
        return World([Rank()] * self.ranks, slots, [(None, ())] * self.ranks, None, ())

    # -- memory

    def slot(self, owner: int, launch: int, source: int, row: int, word: int) -> int:
        buffer = 0 if self.has("one buffer") else launch % 2
        return (((owner * 2 + buffer) * self.ranks + source) * self.rows + row) * 2 + word

    def source(self, index: int) -> int:
        return index // (2 * self.rows) % self.ranks

    def memory(self, owner: int) -> range:
        size = len(self.start().slots) // self.ranks
        return range(owner * size, (owner + 1) * size)

    def contents(self, slot: Slot) -> list[tuple[Word | None, int]]:
        """Yields the values that the slot's owner may find, with the number of stores that have arrived."""
        found = []
        for arrived in range(len(slot.coming) + 1):
            value = slot.coming[arrived - 1] if arrived else None if slot.emptied else slot.value
            found.append((value, arrived))
            if slot.emptied and arrived:  # or the emptying came after them
                found.append((None, arrived))
        return found

    def arrive(self, world: World, index: int, value: Word | None, arrived: int) -> None:
        """Stores arrive: so has what their rank emptied before, if there is a fence between."""
        slot = world.slots[index]
        world.slots[index] = Slot(value, 0, slot.coming[arrived:])
        if arrived and not self.has("late emptying"):
            launch = max(word.launch for word in slot.coming[:arrived])
            for own in self.memory(self.source(index)):
                emptied = world.slots[own].emptied
                if emptied and emptied <= launch:
                    world.slots[own] = world.slots[own]._replace(value=None, emptied=0)

    def failures(self, world: World, rank: int) -> Iterator[tuple[Verdict | None, World]]:
        """Yields the verdicts that a rank may find in its own failure."""
        value, coming = world.failure[rank]
        yield value, world
        for arrived in range(1, len(coming) + 1):
            after = world.copy()
            after.failure[rank] = coming[arrived - 1], coming[arrived:]
            yield coming[arrived - 1], after

    # -- steps

    def steps(self, world: World) -> Iterator[Step]:
        """All that can happen next, time-outs and deaths included."""
        for rank in range(self.ranks):
            yield from self.steps_of(world, rank)
        for index, slot in enumerate(world.slots):
            if slot.emptied and slot.coming:  # which loses a message: that it may also be found does not help
                after = world.copy()
                after.slots[index] = Slot(None, 0, slot.coming[1:])
                yield Step(f"a message is emptied from slot {index}", after)
        if self.scenario.time_outs != NEVER:
            for rank in range(self.ranks):
                for block in self.patient(world, rank):
                    yield from self.time_out(world, rank, block)
        for rank in self.scenario.dies:
            if not world.ranks[rank].dead and world.ranks[rank].call < len(self.programs[rank]):
                after = world.copy()
                after.ranks[rank] = world.ranks[rank]._replace(dead=True, blocks=(), last=None)
                after.order = tuple(waiting for waiting in world.order if waiting[0] != rank)
                self.forget(after, rank)
                yield Step(f"{rank} dies", after)

    def steps_of(self, world: World, rank: int) -> Iterator[Step]:
        me = world.ranks[rank]
        if me.dead:
            return
        if not me.blocks:
            if me.call < len(self.programs[rank]):
                yield self.begin(world, rank)
            return
        if me.last is not None and self.scenario.rows == WARPS:
            fail = {FAILED} if self.has("partial") else {FAILED, REFUSED}
            yield self.conclude(world, rank, any(phase in fail for phase, _, _ in me.blocks))
            return
        if me.last is not None:
            for found, after in self.failures(world, rank):
                failed = found is not None and not (self.has("partial") and me.blocks[me.last][0] == REFUSED)
                if failed and not self.has("untold"):
                    after = self.told(after, rank, found)
                yield self.conclude(after, rank, failed)
            return
        for block, (phase, _, _) in enumerate(me.blocks):
            if phase == READY:
                yield from self.look(world, rank, block)
            elif phase == SENDING:
                yield from self.send(world, rank, block)
            elif phase == SENT:
                yield Step(f"{rank}.{block} starts its clock", self.at(world, rank, block, WAITING))
            elif phase == WAITING:
                yield from self.wait(world, rank, block)
            elif phase == JUDGING:
                yield from self.judge(world, rank, block)

    def at(self, world: World, rank: int, block: int, phase: int, what: tuple = ()) -> World:
        """The world with a block in another phase."""
        after = world.copy()
        me = world.ranks[rank]
        blocks = list(me.blocks)
        blocks[block] = phase, blocks[block][1], what
        last = block if all(each[0] >= ACCEPTED for each in blocks) else None
        after.ranks[rank] = me._replace(blocks=tuple(blocks), last=last)
        if self.scenario.time_outs == PROMPT:
            after.order = tuple(waiting for waiting in world.order if waiting != (rank, block))
            if phase == WAITING:
                after.order += ((rank, block),)
        return after

    def begin(self, world: World, rank: int) -> Step:
        me, call = world.ranks[rank], self.programs[rank][world.ranks[rank].call]
        after = world.copy()
        if call.kind == LEFT_OUT:
            after.ranks[rank] = me._replace(call=me.call + 1, skipped_calls=me.skipped_calls + 1)
            return Step(f"{rank} leaves out call {me.call}", after)
        if call.kind == CLOSE:
            after.ranks[rank] = me._replace(call=me.call + 1, closed=True)
            self.forget(after, rank)
            return Step(f"{rank} closes", after)
        if call.kind == LEAVE:
            after.ranks[rank] = me._replace(call=me.call + 1)
            verdict = self.declare(after, rank, Verdict(DECLARED, rank, rank))
            self.forget(after, rank)
            return Step(f"{rank} leaves", self.told(after, rank, verdict))
        if me.closed:
            after.ranks[rank] = me._replace(call=me.call + 1, launches=me.launches + 1, results=(*me.results, False))
            return Step(f"{rank} calls, closed", after)
        stale = ""
        for index in self.memory(rank):
            value = world.slots[index].value
            of_this = (index // (2 * self.rows * self.ranks) % 2) == me.launches % 2
            if world.verdict is None and of_this and value is not None and value.launch != me.launches:
                stale = f"rank {rank} begins launch {me.launches} and has a message of launch {value.launch}"
        rows = range(call.rows)
        blocks = [tuple(rows)] if self.scenario.rows == TOGETHER else [(row,) for row in rows]
        after.ranks[rank] = me._replace(blocks=tuple((READY, block, ()) for block in blocks))
        return Step(f"{rank} begins launch {me.launches}", after, stale)

    def look(self, world: World, rank: int, block: int) -> Iterator[Step]:
        for found, after in self.failures(world, rank):
            if found is None or self.has("unchecked"):
                yield Step(f"{rank}.{block} finds no failure", self.at(after, rank, block, SENDING))
            else:
                yield self.tell(after, rank, block, found, REFUSED)

    def send(self, world: World, rank: int, block: int) -> Iterator[Step]:
        me = world.ranks[rank]
        after = self.at(world, rank, block, SENT if self.has("late clock") else WAITING)
        for row, owner, word in itertools.product(me.blocks[block][1], range(self.ranks), range(2)):
            gone = world.ranks[owner]
            if gone.dead or gone.closed or (self.remembers and False in gone.results):
                continue  # no rank reads it
            index = self.slot(owner, me.launches, rank, row, word)
            slot, own = after.slots[index], self.message(me, rank, row)
            after.slots[index] = Slot(own, 0, ()) if owner == rank else slot._replace(coming=(*slot.coming, own))
        yield Step(f"{rank}.{block} sends", after)

    def message(self, me: Rank, rank: int, row: int) -> Word:
        call = self.programs[rank][me.call]
        number = me.launches + (0 if call.kind == REPLAY else me.skipped_calls)
        parameters = call.parameters >> row & 1
        skipped_calls = {"no numbers": 0, "no parameters": 1, "no rows": 2}
        tags = [number, parameters, call.rows]
        for defect, which in skipped_calls.items():
            if self.has(defect):
                tags[which] = 0
        return Word(tuple(tags), me.launches, me.call, parameters, call.rows)

    def slots_of(self, me: Rank, rank: int, rows: tuple[int, ...]) -> list[int]:
        """Those that a block waits for: by row, source and word."""
        return [
            self.slot(rank, me.launches, source, row, word)
            for row, source, word in itertools.product(rows, range(self.ranks), range(2))
        ]

    def wait(self, world: World, rank: int, block: int) -> Iterator[Step]:
        """It sees all messages, or a failure."""
        me = world.ranks[rank]
        rows = me.blocks[block][1]
        slots = self.slots_of(me, rank, rows)
        choices = []
        for index in slots:
            found = self.contents(world.slots[index])
            ignored = self.has("one word") and index % 2 == 1
            choices.append(found if ignored else [each for each in found if each[0] is not None])
        for chosen in itertools.product(*choices):
            yield self.compare(world, rank, block, slots, chosen)
        if not self.has("unpolled"):
            for failure, after in self.failures(world, rank):
                if failure is not None:
                    yield self.tell(after, rank, block, failure, FAILED)

    def compare(self, world: World, rank: int, block: int, slots: list[int], chosen: tuple) -> Step:
        me = world.ranks[rank]
        after = world.copy()
        for index, (value, arrived) in zip(slots, chosen):
            self.arrive(after, index, value, arrived)
        values = [value for value, _ in chosen]
        rows = me.blocks[block][1]
        verdicts = []
        for i, row in enumerate(rows):
            words = values[i * 2 * self.ranks : (i + 1) * 2 * self.ranks]
            seen = [high.tags for high in words[::2]]
            own = self.message(me, rank, row)
            if not self.has("untagged") and any(
                tags != own.tags for tags in (*seen, *(low.tags for low in words[1::2] if low))
            ):
                verdicts.append(self.verdict(rank, own.tags, seen))
        if verdicts:
            return Step(f"{rank}.{block} finds another's tags", self.at(after, rank, block, JUDGING, tuple(verdicts)))
        wrong = ""
        for index, value in zip(slots, values):
            own = self.message(me, rank, index // 2 % self.rows)
            truth = (own.launch, own.call, own.parameters, own.rows)
            if value is None or (value.launch, value.call, value.parameters, value.rows) != truth:
                source = self.source(index)
                wrong = f"rank {rank} accepts in launch {own.launch}, call {own.call}, from rank {source}: {value}"
            if not self.has("full"):
                after.slots[index] = after.slots[index]._replace(value=None, emptied=me.launches + 1)
        return self.done(after, rank, block, ACCEPTED, f"{rank}.{block} accepts", wrong)

    def tell(self, world: World, rank: int, block: int, verdict: Verdict, phase: int) -> Step:
        after = self.told(world, rank, verdict)
        broken = ""
        tolds = {each.told for each in after.ranks if each.told is not None}
        if len(tolds) > 1:
            broken = f"ranks are told different verdicts: {tolds}"
        what = "is refused" if phase == REFUSED else "fails"
        return self.done(after, rank, block, phase, f"{rank}.{block} {what}: {verdict}", broken)

    def told(self, world: World, rank: int, verdict: Verdict) -> World:
        after = world.copy()
        after.ranks[rank] = world.ranks[rank]._replace(told=verdict)
        return after

    def patient(self, world: World, rank: int) -> list[int]:
        """Its blocks whose time may run out now."""
        blocks = [i for i, block in enumerate(world.ranks[rank].blocks) if block[0] == WAITING]
        if self.scenario.time_outs == PROMPT and blocks:
            first = world.order[0]
            if first[0] != rank or any(
                self.busy(world, other) for other in range(self.ranks) if other not in self.slow
            ):
                return []
            return [first[1]]
        return blocks

    def busy(self, world: World, rank: int) -> bool:
        """Returns whether a rank can act, apart from a time-out, without help of a slow rank."""
        me = world.ranks[rank]
        if me.dead or (not me.blocks and me.call == len(self.programs[rank])):
            return False
        if (
            not me.blocks
            or me.last is not None
            or any(block[0] != WAITING for block in me.blocks if block[0] < ACCEPTED)
        ):
            return True
        if world.failure[rank] != (None, ()):
            return True
        return any(
            all(self.there(world, index) for index in self.slots_of(me, rank, rows))
            for phase, rows, _ in me.blocks
            if phase == WAITING
        )

    def there(self, world: World, index: int) -> bool:
        slot = world.slots[index]
        return slot.value is not None or bool(slot.coming and self.source(index) not in self.slow)

    def sights(self, world: World, rank: int, row: int) -> Iterator[list]:
        """Yields the tags of a row's messages that may have arrived: per source, None unless all of it has."""
        me = world.ranks[rank]
        choices = []
        for source in range(self.ranks):
            words = [self.slot(rank, me.launches, source, row, word) for word in range(2)]
            found = [[value for value, _ in self.contents(world.slots[index])] for index in words]
            sight = {high.tags for high in found[0] for low in found[1] if high is not None and low is not None}
            must = self.scenario.time_outs == PROMPT and all(self.there(world, index) for index in words)
            if any(None in each for each in found) and not must:
                sight.add(None)
            choices.append(sorted(sight, key=lambda tags: tags or ()))
        return map(list, itertools.product(*choices))

    def time_out(self, world: World, rank: int, block: int) -> Iterator[Step]:
        """Drops the stores that have arrived: no rank reads them again."""
        me = world.ranks[rank]
        verdicts = set()
        for row in me.blocks[block][1]:
            own = self.message(me, rank, row)
            for seen in self.sights(world, rank, row):
                if None in seen:
                    verdicts.add((row,) if self.has("reads again") else self.verdict(rank, own.tags, seen))
        for verdict in verdicts:
            yield Step(f"{rank}.{block} runs out of time", self.at(world, rank, block, JUDGING, (verdict,)))

    def verdict(self, rank: int, own: tuple, seen: list) -> Verdict:
        """Judges a row by the tags of its messages; None for missing messages."""
        if self.has("emptied early") and all(tags == own for tags in seen[:2]):
            seen = [None, None, *seen[2:]]
        present = [tags for tags in seen if tags is not None]
        same = sum(tags == own for tags in present)
        differing = [source for source, tags in enumerate(seen) if tags is not None and tags != own]
        missing = [source for source, tags in enumerate(seen) if tags is None]
        if differing:
            them = 2 * same > len(present) or (2 * same == len(present) and seen[0] == own)
            straggler, reporter = (differing[0], rank) if them else (rank, differing[0])
            return Verdict(DIFFERS, straggler, reporter)
        return Verdict.of(Verdict(LATE, missing[0] if missing else MAX_RANKS, rank).word())

    def judge(self, world: World, rank: int, block: int) -> Iterator[Step]:
        me = world.ranks[rank]
        verdicts = []
        for what in me.blocks[block][2]:
            if isinstance(what, Verdict):
                verdicts.append(what)
            else:
                row = what[0]
                own = self.message(me, rank, row)
                verdicts += [self.verdict(rank, own.tags, seen) for seen in self.sights(world, rank, row)]
        for verdict in verdicts:
            after = world.copy()
            broken = ""
            if world.verdict is None and self.scenario.straggler not in (None, verdict.straggler):
                broken = f"rank {verdict.straggler} is to blame, not {self.scenario.straggler}: {verdict}"
            step = self.tell(after, rank, block, self.declare(after, rank, verdict), FAILED)
            yield step._replace(broken=broken or step.broken)

    def declare(self, world: World, rank: int, verdict: Verdict) -> Verdict:
        """Keeps the earlier of two verdicts and sends it to all ranks."""
        if world.verdict is None:
            world.verdict = verdict
        elif not self.has("no compare-and-swap"):
            verdict = world.verdict
        for other in range(self.ranks):
            value, coming = world.failure[other]
            if other == rank:
                world.failure[other] = value if self.has("forgetful") else verdict, ()
            elif not self.has("unspread") and verdict not in (value, *coming) and not world.ranks[other].dead:
                world.failure[other] = value, (*coming, verdict)
        return verdict

    def done(self, world: World, rank: int, block: int, phase: int, label: str, broken: str) -> Step:
        after = self.at(world, rank, block, phase)
        if len(after.ranks[rank].blocks) == 1:
            step = self.conclude(after, rank, phase != ACCEPTED)
            return Step(f"{label}; {step.label}", step.world, broken or step.broken)
        return Step(label, after, broken)

    def conclude(self, world: World, rank: int, failed: bool) -> Step:
        me = world.ranks[rank]
        accepted = {phase == ACCEPTED and not failed for phase, _, _ in me.blocks}
        result = all(accepted)
        after = world.copy()
        after.ranks[rank] = me._replace(
            call=me.call + 1, launches=me.launches + 1, blocks=(), last=None, results=(*me.results, result)
        )
        broken = ""
        if len(accepted) > 1:
            broken = f"rank {rank} accepts a part of launch {me.launches}"
        if not result and me.told is None:
            broken = f"rank {rank} fails launch {me.launches} and is not told"
        open_ranks = [each for i, each in enumerate(after.ranks) if not each.closed]
        first = min((each.results.index(False) for each in open_ranks if False in each.results), default=None)
        if first is not None and any(True in each.results[first + 1 :] for each in after.ranks):
            broken = f"launch {first} failed, a later one was accepted: {[each.results for each in after.ranks]}"
        if not result:
            self.forget(after, rank)
        return Step(f"{rank} {'has' if result else 'has not'} launch {me.launches}", after, broken)

    def forget(self, world: World, rank: int) -> None:
        """Removes what a rank never reads again, so that states compare equal."""
        if self.remembers:
            for index in self.memory(rank):
                world.slots[index] = EMPTY

    # -- the end

    def at_the_end(self, world: World) -> str:
        """Returns the defects of a world in which nothing more happens."""
        for rank, each in enumerate(world.ranks):
            if not each.dead and each.call < len(self.programs[rank]):
                return f"rank {rank} waits for ever in launch {each.launches}"
        if self.scenario.peaceful and not all(all(each.results) for each in world.ranks):
            return f"a call failed for no reason: {world.verdict}"
        if world.verdict is None and not any(each.dead or each.closed for each in world.ranks):
            full = [
                i for i, slot in enumerate(world.slots) if slot.coming or (slot.value is not None and not slot.emptied)
            ]
            if full:
                return f"slots {full} are full at the end"
        return ""


def explore(scenario: Scenario) -> Report:
    """Every state that can be reached; stops at the first that breaks a property, with the way there."""
    model = Model(scenario)
    report = Report()
    start = model.start()
    before: dict[tuple, tuple[tuple, str] | None] = {start.key(): None}
    todo = [start]
    while todo:
        world = todo.pop()
        key = world.key()
        moved = False
        for step in model.steps(world):
            moved = moved or not step.label.endswith("dies")
            after = step.world.key()
            if after not in before or step.broken:
                before[after] = key, step.label
                todo.append(step.world)
            if step.broken:
                return _broken(report, before, after, step.broken)
        if not moved:
            report.outcomes.add(tuple((each.dead, each.told, each.results) for each in world.ranks))
            broken = model.at_the_end(world)
            if broken:
                return _broken(report, before, key, broken)
    report.states = len(before)
    return report


def _broken(report: Report, before: dict, key: tuple, broken: str) -> Report:
    report.states, report.broken = len(before), broken
    while before[key] is not None:
        key, label = before[key]
        report.trace.insert(0, label)
    return report
