"""Everything that two or three ranks of the peer-to-peer protocol can do, and that the search would see if they did
wrong."""

from dataclasses import replace

import pytest

from .protocol_model import (
    ANY,
    BLOCKS,
    CLOSE,
    DEFECTS,
    LAUNCH,
    LEAVE,
    LEFT_OUT,
    PROMPT,
    REPLAY,
    WARPS,
    Call,
    Scenario,
    explore,
)

ROW = Call()
ROWS = Call(rows=2)
OTHER = Call(parameters=1)
OUT = Call(LEFT_OUT)

SCENARIOS = {  # and how many states there are, less a few
    "two in step": (Scenario(((ROW,) * 4,) * 2, peaceful=True), 90),
    "three in step": (Scenario(((ROW,) * 4,) * 3, peaceful=True), 400),
    "two in step, blocks": (Scenario(((ROWS,) * 4,) * 2, peaceful=True, rows=BLOCKS), 900),
    "two in step, warps": (Scenario(((ROWS,) * 4,) * 2, peaceful=True, rows=WARPS), 900),
    "two run out of time": (Scenario(((ROW,) * 4,) * 2, ANY), 600),
    "two run out of time, blocks": (Scenario(((ROWS,) * 2,) * 2, ANY, rows=BLOCKS), 9000),
    "two run out of time, warps": (Scenario(((ROWS,) * 2,) * 2, ANY, rows=WARPS), 9000),
    "three run out of time": (Scenario(((ROW,) * 2,) * 3, ANY), 5000),
    "one leaves out a call": (Scenario(((ROW, ROW, ROW), (ROW, ROW, ROW), (ROW, OUT, ROW)), straggler=2), 300),
    "the first leaves out a call": (Scenario(((ROW, OUT, ROW), (ROW, ROW, ROW), (ROW, ROW, ROW)), straggler=0), 300),
    "one leaves out a call, of two": (Scenario(((OUT, ROW, ROW), (ROW, ROW, ROW)), ANY), 150),
    "all leave out a call": (Scenario(((ROW, OUT, ROW),) * 3, peaceful=True), 200),
    "one has other parameters": (Scenario(((ROW, ROW, ROW), (ROW, OTHER, ROW), (ROW, ROW, ROW)), straggler=1), 350),
    "one has other parameters, of two": (Scenario(((ROW, ROW, ROW), (OTHER, ROW, ROW)), ANY), 150),
    "one has another row, blocks": (
        Scenario(((ROWS, ROWS), (Call(rows=2, parameters=2), ROWS)), ANY, rows=BLOCKS),
        7000,
    ),
    "one has another row, warps": (Scenario(((ROWS, ROWS), (Call(rows=2, parameters=2), ROWS)), ANY, rows=WARPS), 7000),
    "one has a row less": (Scenario(((ROWS, ROWS, ROWS), (ROWS, ROWS, ROWS), (ROWS, ROW, ROWS)), straggler=2), 200),
    "one has a row less, of two": (Scenario(((ROWS, ROWS), (ROW, ROWS)), ANY), 80),
    "one has a row less, blocks": (Scenario(((ROWS, ROWS), (ROW, ROWS)), ANY, rows=BLOCKS), 1000),
    "the first is late": (Scenario(((ROW,) * 3,) * 3, PROMPT, slow=frozenset({0}), straggler=0), 3000),
    "the last is late": (Scenario(((ROW,) * 3,) * 3, PROMPT, slow=frozenset({2}), straggler=2), 3000),
    "the last is late, blocks": (
        Scenario(((ROWS,) * 2,) * 2, PROMPT, slow=frozenset({1}), straggler=1, rows=BLOCKS),
        2000,
    ),
    "late and with other parameters": (
        Scenario(((ROW, ROW), (ROW, ROW), (ROW, OTHER)), PROMPT, slow=frozenset({2}), straggler=2),
        1000,
    ),
    "the first dies": (Scenario(((ROW,) * 3,) * 3, PROMPT, dies=frozenset({0}), straggler=0), 5000),
    "the last dies": (Scenario(((ROW,) * 3,) * 3, PROMPT, dies=frozenset({2}), straggler=2), 5000),
    "anybody dies, of two": (Scenario(((ROW,) * 3,) * 2, ANY, dies=frozenset({0, 1})), 800),
    "the last dies or is late": (Scenario(((ROW,) * 2,) * 3, ANY, dies=frozenset({2})), 7000),
    "the first leaves out a call or dies": (
        Scenario(((OUT, ROW, ROW), (ROW, ROW, ROW)), ANY, dies=frozenset({0})),
        200,
    ),
    "one closes": (
        Scenario(((ROW, ROW, ROW), (ROW, ROW, ROW), (ROW, Call(CLOSE), ROW)), PROMPT, slow=frozenset({2}), straggler=2),
        1400,
    ),
    "one closes, of two": (Scenario(((ROW, ROW, ROW), (ROW, Call(CLOSE), ROW)), ANY), 150),
    "one leaves": (Scenario(((ROW, ROW, ROW), (ROW, ROW, ROW), (ROW, Call(LEAVE), ROW)), ANY), 3000),
}

FINDS = {  # each defect by a scenario, and what is said
    "unchecked": ("one has other parameters", "a later one was accepted"),
    "untagged": ("one has other parameters", "accepts in launch 1"),
    "no numbers": ("one leaves out a call", "accepts in launch 1"),
    "no parameters": ("one has other parameters", "accepts in launch 1"),
    "no rows": ("one has a row less", "accepts in launch 1"),
    "one buffer": ("two in step", "a call failed for no reason"),
    "full": ("two in step", "has a message of launch 0"),
    "late emptying": ("two in step", "waits for ever"),
    "forgetful": ("two run out of time", "a later one was accepted"),
    "no compare-and-swap": ("two run out of time", "different verdicts"),
    "one word": ("two in step", "accepts in launch 0"),
    "reads again": ("the last is late", "rank 0 is to blame, not 2"),
    "emptied early": ("the last is late", "rank 0 is to blame, not 2"),
    "late clock": ("the last is late", "rank 0 is to blame, not 2"),
    "partial": ("two run out of time, blocks", "accepts a part of launch"),
    "untold": ("two run out of time, blocks", "is not told"),
    "unspread": ("one has a row less", "waits for ever"),
    "unpolled": ("one has a row less", "waits for ever"),
}


@pytest.mark.quick(18)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_interleaving(name):
    scenario, floor = SCENARIOS[name]
    report = explore(scenario)
    print(report)
    assert not report.broken, report
    assert report.states >= floor
    if scenario.peaceful:
        launches = [sum(call.kind == LAUNCH for call in program) for program in scenario.programs]
        assert report.outcomes == {tuple((False, None, (True,) * n) for n in launches)}
    else:
        assert any(notified for outcome in report.outcomes for _, notified, _ in outcome)


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_search_finds_what_each_part_is_for(defect):
    name, reported = FINDS[defect]
    report = explore(replace(SCENARIOS[name][0], defects=frozenset({defect})))
    assert reported in report.broken, report
    assert report.trace


def test_warps_of_a_block_fail_together():
    scenario = SCENARIOS["two run out of time, warps"][0]
    assert "accepts a part" in explore(replace(scenario, defects=frozenset({"partial"}))).broken


@pytest.mark.parametrize("defect", ["unspread", "unpolled"])
@pytest.mark.parametrize("name", ["two run out of time", "three run out of time", "one has a row less, of two"])
def test_spreading_a_failure_makes_it_fast_and_nothing_else(defect, name):
    """If every wait ends by itself, all promises hold without time-outs."""
    report = explore(replace(SCENARIOS[name][0], defects=frozenset({defect})))
    assert not report.broken, report


def test_calls_left_out_must_count_on_the_device():
    """Were their count an argument of a launch, a graph would replay the one of its capture, and be of another call."""
    caught = Scenario(((ROW, ROW, ROW), (OUT, ROW, ROW)), ANY)
    assert not explore(caught).broken
    report = explore(replace(caught, programs=((ROW, ROW, ROW), (OUT, Call(REPLAY), Call(REPLAY)))))
    assert "accepts in launch 0, call 0, from rank 1" in report.broken
