"""What the simulator and the formulas say, against numbers from papers and worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from megatron_asyncpp import __main__ as command_line
from megatron_asyncpp import simulate_sweep
from megatron_asyncpp.predictions import NAMES, three_decimals
from megatron_asyncpp.schedules import SCHEDULES, Schedule, slowdown
from megatron_asyncpp.schedules.actions import Backward, Begin, Finish, Forward
from megatron_asyncpp.schedules.one_f_one_b import one_f_one_b
from megatron_asyncpp.schedules.simulate import Simulation, simulate
from megatron_asyncpp.schedules.steady import steady_time
from megatron_asyncpp.schedules.validate import PlanError
from tests.toy import GPIPE


def command(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert command_line.main(["simulate", *words]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], schedule: str, stages: int, microbatches: int, *words: str) -> Any:
    sizes = ("--schedule", schedule, "--pp", str(stages), "--microbatches", str(microbatches))
    return json.loads(command(capsys, *sizes, "--json", *words))


@pytest.mark.parametrize(
    ("backward", "schedule", "expected"),
    [
        # arXiv:2606.30634, appendix F.2: P = M = 16, W = F, F&B = F + B.
        ("2", "1f1b", 1.938),
        ("2", "zb1p", 1.313),
        ("2", "dualpipe", 1.292),
        ("2", "2bw", 1.000),
        ("3", "1f1b", 1.938),
        ("3", "zb1p", 1.469),
        ("3", "dualpipe", 1.438),
        ("3", "2bw", 1.000),
        # With a wait in each step: 1 + (P - 1) B / (M (F + B)).
        ("2", "2bw-blocking", 1.625),
        # 1 + (P - 1) / (v M) with v = 2.
        ("2", "interleaved", 1.469),
        # Neither ever drains (arXiv:1806.03377, arXiv:2606.07881).
        ("2", "pipedream", 1.000),
        ("2", "paci", 1.000),
    ],
)
def test_golden_table(backward: str, schedule: str, expected: float, capsys: pytest.CaptureFixture[str]) -> None:
    result = as_json(capsys, schedule, 16, 16, "--forward", "1", "--backward", backward)
    assert result["slowdown"] == expected
    assert abs(result["time_per_batch"] / result["ideal"] - expected) <= 0.0005 + 1e-12
    assert ("per_stage" in result) == (schedule in SCHEDULES)
    assert ("formula" in result["source"]) == (schedule not in SCHEDULES)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (3, 3), (4, 9), (5, 6), (8, 16)])
@pytest.mark.parametrize("backward", [0.5, 2.0, 3.0])
def test_the_simulator_agrees_with_the_closed_forms(stages: int, microbatches: int, backward: float) -> None:
    def simulated(name: str) -> float:
        return simulate(SCHEDULES[name], stages, microbatches, backward=backward).slowdown

    assert simulated("1f1b") == pytest.approx(slowdown.one_f_one_b(stages, microbatches), rel=1e-15)
    blocking = slowdown.two_bw_blocking(stages, microbatches, backward)
    assert simulated("2bw-blocking") == pytest.approx(blocking, rel=1e-15)
    assert simulated("2bw") == simulated("pipedream") == simulated("paci") == 1
    assert slowdown.interleaved(stages, microbatches, 1) == slowdown.one_f_one_b(stages, microbatches)


def rows(result: Simulation, kind: type) -> list[tuple[int, int, int, float, float]]:
    return [
        (span.stage, span.action.batch, span.action.microbatch, span.start, span.end)
        for span in sorted(result.spans, key=lambda one: (one.stage, one.start))
        if isinstance(span.action, kind)
    ]


def test_two_stages_by_hand() -> None:
    result = simulate(SCHEDULES["1f1b"], 2, 2, forward=1, backward=2, batches=1)
    # Stage 0  F0 F1 .  .  B0 B0 .  B1 B1
    # Stage 1  .  F0 B0 B0 F1 B1 B1 .  .
    assert rows(result, Forward) == [(0, 0, 0, 0, 1), (0, 0, 1, 1, 2), (1, 0, 0, 1, 2), (1, 0, 1, 4, 5)]
    assert rows(result, Backward) == [(0, 0, 0, 4, 6), (0, 0, 1, 7, 9), (1, 0, 0, 2, 4), (1, 0, 1, 5, 7)]
    # The steps begin at 9 and 7, and are finished when both have begun.
    steps = [(s.stage, type(s.action), s.start, s.end) for s in result.spans if isinstance(s.action, Begin | Finish)]
    assert steps == [(1, Begin, 7, 7), (0, Begin, 9, 9), (0, Finish, 9, 9), (1, Finish, 9, 9)]
    assert (result.time_per_batch, result.ideal, result.slowdown) == (9, 6, 1.5)
    assert result.bubble == pytest.approx([1 / 3, 1 / 3])


@pytest.mark.parametrize("slow", [0, 1])
def test_a_stage_twice_as_slow(slow: int) -> None:
    # P = M = 2, F = 1 and B = 2, but F = 2 and B = 4 on the slow stage, so the ideal is 2 (2 + 4) = 12.
    forward, backward = [1.0, 1.0], [2.0, 2.0]
    forward[slow], backward[slow] = 2.0, 4.0
    flushed = simulate(SCHEDULES["1f1b"], 2, 2, forward=forward, backward=backward)
    # Slow stage 1: F0@0 0-1, F0@1 1-3, B0@1 3-7, F1@1 7-9, B1@1 9-13, B1@0 13-15: the slow stage works without a
    # pause, between the first forward and the last backward of stage 0.
    # Slow stage 0: F0@0 0-2, F1@0 2-4, F0@1 2-3, B0@1 3-5, B0@0 5-9, F1@1 5-6, B1@1 6-8, B1@0 9-13: from 4 to 5 the
    # slow stage waits for the first gradient.
    assert flushed.time_per_batch == {0: 13, 1: 15}[slow]
    assert flushed.slowdown == {0: 13 / 12, 1: 15 / 12}[slow]
    # Without a flush the slow stage never waits, and the other one is idle half of the time.
    unflushed = simulate(SCHEDULES["2bw"], 2, 2, forward=forward, backward=backward)
    assert unflushed.time_per_batch == 12
    assert unflushed.bubble == {0: [0, 0.5], 1: [0.5, 0]}[slow]


@pytest.mark.parametrize("name", ["2bw", "pipedream", "paci"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 3), (3, 4), (4, 4), (4, 5)])
def test_what_latency_costs(name: str, stages: int, microbatches: int) -> None:
    # The last stage's backward of microbatch n reaches stage 0 after P - 1 backwards and messages, and ends there
    # with one more B. Then comes the forward of n + P (stage 0 is P - 1 ahead), and P forwards and P - 1 messages
    # later that has reached the last stage, which now runs its backward. So P microbatches take
    # P (F + B) + 2 (P - 1) latency.
    latency = 0.25
    result = simulate(SCHEDULES[name], stages, microbatches, latency=latency)
    assert result.time_per_batch / microbatches == pytest.approx(3 + 2 * (stages - 1) / stages * latency, rel=1e-15)


@pytest.mark.parametrize("name", ["1f1b", "2bw-blocking", "2bw", "2bw-wide"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (3, 5), (4, 8), (8, 16)])
def test_all_stages_make_their_steps_at_once(name: str, stages: int, microbatches: int) -> None:
    # Where a stage that was sent the first output of the new weights only then made its own step, all P would follow
    # each other, and a batch would take P steps longer.
    without = simulate(SCHEDULES[name], stages, microbatches)
    result = simulate(SCHEDULES[name], stages, microbatches, step=0.25)
    assert result.time_per_batch == without.time_per_batch + 0.25
    assert result.ideal == without.ideal
    last = simulate(SCHEDULES[name], stages, microbatches, step=[0.0] * (stages - 1) + [0.25])
    assert without.time_per_batch <= last.time_per_batch <= result.time_per_batch


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (3, 5), (4, 7), (4, 16)])
def test_a_wide_lead_hides_latency_up_to_half_a_microbatch_and_a_tight_one_none(stages: int, microbatches: int) -> None:
    # A gradient's way up and an output's way down may take as long as a forward and a backward, 3 together.
    hidden = simulate(SCHEDULES["2bw-wide"], stages, microbatches, latency=1.5)
    assert hidden.slowdown == 1
    assert simulate(SCHEDULES["2bw-wide"], stages, microbatches, latency=1.6).slowdown > 1
    assert simulate(SCHEDULES["2bw"], stages, microbatches, latency=0.1).slowdown > 1
    assert simulate(SCHEDULES["2bw-wide"], stages, microbatches).peak_activations == [
        2 * (stages - 1 - stage) + 1 for stage in range(stages)
    ]


def test_latency_of_a_flushed_batch() -> None:
    # By hand, as above with 0.5 more for each message: F0@1 1.5-2.5, B0@1 2.5-4.5, B0@0 5-7, F1@1 4.5-5.5,
    # B1@1 5.5-7.5, B1@0 8-10. The steps begin at 7.5 and 10; stage 1 knows of the latter at 10.5, and stage 0 starts.
    result = simulate(SCHEDULES["1f1b"], 2, 2, latency=0.5)
    finished = [span for span in result.spans if span.action == Finish(0)]
    assert [(span.stage, span.end) for span in finished] == [(0, 10), (1, 10.5)]
    assert result.time_per_batch == 10


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_each_stage_holds(name: str) -> None:
    stages = 5
    result = simulate(SCHEDULES[name], stages, 10)
    leads = [stages - 1 - stage for stage in range(stages)]
    expected_versions = {
        "1f1b": [1] * stages,
        "2bw": [2] * (stages - 1) + [1],  # the last stage runs all of a batch between two steps
        "2bw-blocking": [2] * stages,
        "2bw-wide": [2] * (stages - 1) + [1],
        "2bw-wide-blocking": [2] * stages,
        "pipedream": [lead + 1 for lead in leads],  # arXiv:1806.03377, section 3.3
        "paci": [1] * stages,  # arXiv:2606.07881
    }[name]
    settled = [set(batches[stages:]) for batches in result.staleness]
    expected_staleness = {
        "1f1b": [0] * stages,
        "2bw": [1] * stages,
        "2bw-blocking": [1] * stages,
        "2bw-wide": [1] * stages,
        "2bw-wide-blocking": [1] * stages,
        "pipedream": leads,
        "paci": [min(lead, 1) for lead in leads],
    }[name]
    assert result.peak_activations == [lead * (2 if "wide" in name else 1) + 1 for lead in leads]
    assert result.versions_alive == expected_versions
    assert settled == [{age} for age in expected_staleness]
    assert [batches[0] for batches in result.staleness] == [0] * stages
    assert result.drift == ([min(lead, 1) for lead in leads] if name == "paci" else [0] * stages)
    assert [len(batches) for batches in result.staleness] == [
        len({span.action.batch for span in result.spans if span.stage == stage}) for stage in range(stages)
    ]


@pytest.mark.parametrize("accumulated", [1, 2, 3, 5, 7, 8])
def test_paci_bounds_its_drift(accumulated: int) -> None:
    stages = 8
    result = simulate(SCHEDULES["paci"], stages, accumulated)
    assert result.drift == [ceil((stages - 1 - stage) / accumulated) for stage in range(stages)]
    assert [max(batches) for batches in result.staleness] == result.drift
    assert result.slowdown == 1


def test_when_a_pipeline_has_settled() -> None:
    def settled(*ends: int) -> Fraction | None:
        return steady_time([[end] for end in ends], tail=2)

    assert settled(0, 5, 8, 11, 14, 17, 99, 150) == 3  # the last two drain
    assert settled(0, 1, 4, 5, 8, 9, 99, 150) == 2  # two batches in 4
    assert settled(0, 4, 9, 15, 20, 27, 99, 150) is None


def test_how_many_batches_are_shown_changes_no_figure() -> None:
    shown = simulate(SCHEDULES["2bw"], 3, 4, latency=0.125, batches=2)
    settled = simulate(SCHEDULES["2bw"], 3, 4, latency=0.125)
    assert {span.action.batch for span in shown.spans} == {0, 1}
    assert (shown.slowdown, shown.bubble) == (settled.slowdown, settled.bubble)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_does_one_thing_at_a_time(name: str) -> None:
    result = simulate(SCHEDULES[name], 3, 5, forward=[1, 1.5, 0.7], backward=[2, 2.2, 3], latency=0.1)
    for stage in range(3):
        own = [span for span in result.spans if span.stage == stage]
        assert all(before.end <= after.start for before, after in pairwise(own))


def test_a_deadlock_says_who_waits_for_whom() -> None:
    def impatient(stage: int, stages: int, batches: Any) -> Any:
        return one_f_one_b(stages - 1 - stage, stages, batches)  # the last stage runs ahead instead of the first

    with pytest.raises(PlanError, match=r"stage 0.* waits for ever to receive the gradient .* from stage 1"):
        simulate(Schedule(impatient, delay=0, versions=lambda stage, stages: 1), 2, 2)


def test_a_plan_for_too_few_microbatches_is_refused() -> None:
    with pytest.raises(PlanError, match="stage 0"):
        simulate(SCHEDULES["2bw"], 6, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward": [1.0]},
        {"backward": -1.0},
        {"latency": -0.5},
        {"step": -1},
        {"batches": 0},
        {"forward": 0, "backward": 0},
    ],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="times|at least 1"):
        simulate(SCHEDULES["1f1b"], 2, 2, **wrong)


def test_a_new_schedule_needs_nothing_else() -> None:
    # GPipe: P - 1 forwards and P - 1 backwards of fill and drain (arXiv:1811.06965, section 2.3), all M live.
    result = simulate(GPIPE, 4, 6)
    assert result.slowdown == slowdown.one_f_one_b(4, 6)
    assert result.peak_activations == [6] * 4
    assert result.versions_alive == [1] * 4


def test_rounding_is_that_of_papers() -> None:
    assert [three_decimals(value) for value in (1.3125, 1.9375, 1.0, 1.29166)] == ["1.313", "1.938", "1.000", "1.292"]


def test_unequal_stages_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    result = as_json(capsys, "1f1b", 2, 2, "--forward", "1,2", "--backward", "2,4")
    assert (result["slowdown"], result["time_per_batch"]) == (1.25, 15)
    assert [row["stage"] for row in result["per_stage"]] == [0, 1]
    text = command(capsys, "--schedule", "2bw", "--pp", "2", "--microbatches", "2", "--latency", "0.1")
    assert "slowdown 1.033 (simulation)" in text
    text = command(capsys, "--schedule", "2bw", "--pp", "2", "--microbatches", "2", "--step", "0.3")
    assert "slowdown 1.050 (simulation)" in text
    assert "interleaved" not in command(capsys, "--schedule", "zb1p", "--pp", "2", "--microbatches", "2")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--schedule 2bw --pp 4 --microbatches 3", "raise it or lower --pp"),
        ("--schedule 2bw --pp 0 --microbatches 3", "--pp 0 leaves nothing to run"),
        ("--schedule 1f1b --pp 4 --microbatches -1", "--microbatches -1 leaves nothing"),
        ("--schedule 1f1b --pp 4 --microbatches 4 --forward 1,2", "--forward has 2 times for 4 stages"),
        ("--schedule 1f1b --pp 2 --microbatches 4 --backward 1,0", "--backward 1,0 is no time that work takes"),
        ("--schedule 1f1b --pp 2 --microbatches 4 --backward x", "--backward x is no number"),
        ("--schedule 1f1b --pp 2 --microbatches 4 --forward nan", "--forward nan is no number"),
        ("--schedule 1f1b --pp 2 --microbatches 4 --latency -1", "--latency -1 is no time"),
        ("--schedule zb1p --pp 2 --microbatches 4 --latency 1", "For zb1p there is only a formula"),
        ("--schedule zb1p --pp 2 --microbatches 4 --step 1", "For zb1p there is only a formula"),
        ("--schedule 2bw --pp 2 --microbatches 4 --step -1", "--step -1 is no time"),
        ("--schedule zb1p --pp 2 --microbatches 4 --forward 1,2", "For zb1p there is only a formula"),
        ("--schedule dualpipe --pp 3 --microbatches 4", "even number of stages"),
        ("--schedule zb1p --pp 2 --microbatches 4 --backward 0.5", "must be at least --forward"),
        ("--schedule interleaved --pp 2 --microbatches 3", "is a multiple of --pp"),
        ("--schedule interleaved --pp 2 --microbatches 4 --virtual-stages 0", "give at least 1"),
        ("--schedule 1f1b --pp 2", "needs --schedule, --pp and --microbatches"),
        ("--schedule 1f1b --pp 2 --microbatches 4 --out t.png", "add --sweep"),
        ("--sweep --pp 2", "leave out --schedule"),
        ("--sweep --forward 1,2", "--forward has 2 times for 1 stages"),
        ("--sweep --out t.jpg", "ends in .png or .svg"),
        ("--sweep --out /nowhere/t.png", "can't be written"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate_sweep, "STAGES", (2, 4))
    with pytest.raises(SystemExit) as leaving:
        command_line.main(["simulate", *words.split()])
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_sweep(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(simulate_sweep, "STAGES", (2, 4))
    lines = command(capsys, "--sweep", "--out", str(tmp_path / "sweep.png")).splitlines()
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert [row[:2] for row in table[2:]] == [
        [p, name if name in SCHEDULES else f"{name} (formula)"] for p in ("2", "4") for name in NAMES
    ]
    by_name = {(row[0], row[1]): row[2:] for row in table[2:]}
    # 1 + 3 / 4, 1 + 3 / 8, 1 + 3 / 16; and 1 + 3 * 2 / (4 * 3), ...
    assert by_name["4", "1f1b"] == ["1.750", "1.375", "1.188", "4 to 1", "1", "0"]
    assert by_name["4", "2bw-blocking"] == ["1.500", "1.250", "1.125", "4 to 1", "2", "1"]
    assert by_name["4", "2bw-wide"] == ["-", "1.000", "1.000", "7 to 1", "2 to 1", "1"]  # 2P - 1 don't fit into P
    assert by_name["4", "2bw"] == ["1.000", "1.000", "1.000", "4 to 1", "2 to 1", "1"]
    assert by_name["4", "pipedream"] == ["1.000", "1.000", "1.000", "4 to 1", "4 to 1", "3 to 0"]
    assert by_name["4", "paci"] == ["1.000", "1.000", "1.000", "4 to 1", "1", "1 to 0"]
    assert by_name["4", "dualpipe (formula)"] == ["1.167", "1.083", "1.042", "-", "-", "-"]
    # There is no formula with latency.
    slow = json.loads(command(capsys, "--sweep", "--latency", "0.5", "--json"))
    assert {one["schedule"] for one in slow} == set(SCHEDULES) & set(NAMES)
    stepping = json.loads(command(capsys, "--sweep", "--step", "0.5", "--json"))
    assert {one["time_per_batch"] - one["ideal"] for one in stepping if one["schedule"] == "2bw"} == {0.5}


def test_it_needs_neither_torch_nor_megatron_nor_matplotlib() -> None:
    program = (
        "import sys; from megatron_asyncpp.__main__ import main\n"
        "main('simulate --schedule 2bw --pp 2 --microbatches 2'.split())\n"
        "assert not {'torch', 'megatron', 'matplotlib', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
