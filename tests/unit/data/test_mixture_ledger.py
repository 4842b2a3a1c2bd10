"""Ledgers of the sources of a mixture: saving, loading, and other shares or sources when a run resumes."""

from fractions import Fraction
from pathlib import Path

import pytest

from grpo_ray.data.ledger import DatasetFingerprint, Ledger, ids_to_uint64
from grpo_ray.data.mixture import Draws
from grpo_ray.data.mixture_ledger import DRAWS_FILE, MixtureLedger
from grpo_ray.errors import CheckpointError, LedgerError

SHARES = {"a": Fraction(1, 4), "b": Fraction(3, 4)}
IDS = {"a": ["1" * 16, "2" * 16], "b": ["3" * 16, "4" * 16, "5" * 16]}


def begun(folder: Path) -> MixtureLedger:
    """Save the ledger of a mixture that has used two problems, and return it."""
    ledger = MixtureLedger.load(None, SHARES)
    numbers = {name: ids_to_uint64(ids) for name, ids in IDS.items()}
    ledger.set_datasets(numbers, {name: DatasetFingerprint.of(ids) for name, ids in IDS.items()})
    ledger.mark("a", 0, IDS["a"][:1])
    ledger.mark("b", 0, IDS["b"][:1])
    ledger.save(folder)
    return ledger


def test_saved_ledger_is_read_back(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger-a.npz", "ledger-b.npz", DRAWS_FILE]
    found = MixtureLedger.load(tmp_path, SHARES)
    assert found.ledgers == ledger.ledgers and found.draws == Draws(SHARES, {"a": 1, "b": 1})


def test_each_source_has_its_own_problems(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    with pytest.raises(LedgerError, match="not in the dataset"):
        ledger.mark("a", 0, IDS["b"][1:])
    with pytest.raises(LedgerError, match="used twice"):
        ledger.mark("a", 0, IDS["a"][:1])
    copied = ledger.copy()
    copied.mark("a", 0, IDS["a"][1:])
    assert (copied.ledgers["a"].epoch, ledger.ledgers["a"].epoch) == (1, 0)
    assert ledger.draws.drawn["a"] == 1


def test_other_shares_count_from_their_first_step(tmp_path: Path) -> None:
    """With the old counts, the source whose share has grown would be drawn alone until it had caught up."""
    begun(tmp_path)
    other = {"a": Fraction(1, 2), "b": Fraction(1, 2)}
    found = MixtureLedger.load(tmp_path, other)
    assert found.draws == Draws(other) and len(found.ledgers["a"].used(0)) == 1


def test_ledger_of_a_removed_source_is_kept_until_it_returns(tmp_path: Path) -> None:
    begun(tmp_path)
    without = MixtureLedger.load(tmp_path, {"b": Fraction(1)})
    assert list(without.ledgers) == ["b"]
    (tmp_path / "next").mkdir()
    without.save(tmp_path / "next")
    returned = MixtureLedger.load(tmp_path / "next", SHARES)
    assert len(returned.ledgers["a"].used(0)) == 1 and not returned.absent


def test_checkpoint_of_the_other_kind_has_used_no_problem_of_this_run(tmp_path: Path) -> None:
    begun(tmp_path)
    assert MixtureLedger.load(tmp_path, {"": Fraction(1)}).ledgers == {"": Ledger()}
    single = tmp_path / "single"
    single.mkdir()
    MixtureLedger.single(Ledger()).save(single)
    assert [path.name for path in single.iterdir()] == ["ledger.npz"]
    assert MixtureLedger.load(single, SHARES).ledgers == {"a": Ledger(), "b": Ledger()}


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"shares": [], "drawn": {}}', '{"shares": {"a": "1/0"}, "drawn": {}}',
        '{"shares": {"a": "x"}, "drawn": {}}', '{"shares": {"a": "1"}, "drawn": {"a": -1}}',
        '{"shares": {"a": "-1"}, "drawn": {}}', '{"shares": {"a": "1"}, "drawn": {"a": "x"}}', " " * (1 << 21),
    ],
)  # fmt: skip
def test_damaged_draws_are_refused(content: str, tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / DRAWS_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"mixture\.json: cannot be read as the draws of a mixture"):
        MixtureLedger.load(tmp_path, SHARES)
