"""A schedule that nothing in the package knows runs in the validator, the simulator, the picture and the runtime."""

from __future__ import annotations

from pathlib import Path

from megatron_asyncpp.schedules import picture
from megatron_asyncpp.schedules.batches import batches
from megatron_asyncpp.schedules.simulate import simulate
from megatron_asyncpp.schedules.validate import plans_of, problems
from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.reference import Reference
from tests.harness.results import assert_bitwise
from tests.harness.run import run
from tests.toy import GPIPE, offer


def test_it_is_short() -> None:
    assert len(Path(__file__).with_name("toy.py").read_text().splitlines()) < 40


def test_it_is_valid_and_simulated_and_drawn(tmp_path: Path) -> None:
    assert problems(GPIPE, plans_of(GPIPE, 4, batches(0, 3, 8, delay=0))) == []
    simulation = simulate(GPIPE, 4, 8)
    assert simulation.slowdown == 1 + 3 / 8  # (P - 1)(F + B) of idle time a batch, as in 1F1B
    assert simulation.peak_activations == [8, 8, 8, 8]
    picture.draw(simulation.spans, tmp_path / "gpipe.svg", name="GPipe", slowdown=simulation.slowdown)
    assert "GPipe" in (tmp_path / "gpipe.svg").read_text()


def test_it_trains() -> None:
    flags = tiny_flags(2, 4, extra=("--asyncpp-schedule", "gpipe"))
    done = run(flags, 2, hooks=offer, initial=rows.initial())
    first = [(a.kind, a.microbatch) for a in done.ranks[0].actions[:8]]
    assert first == [("Forward", m) for m in range(4)] + [("Backward", m) for m in range(4)]
    assert_bitwise(done, run(tiny_flags(1, 4), mode="oracle", reference=Reference(), initial=rows.initial()))
